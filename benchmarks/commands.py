"""Commands to the rank of a system that lives in this process: see `rank.Rank`. Runs in trees of old revisions too."""

from __future__ import annotations

import functools
import importlib
import json
import warnings
from typing import Any

from benchmarks.rank import Rank


@functools.cache
def served(rank: int, module: str, system: str, work: str) -> Rank:
    """Make this process' rank of a system, once."""
    warnings.filterwarnings("ignore")
    systems = importlib.import_module(module)
    return Rank(systems.SYSTEMS[system].make, systems.Work(**json.loads(work)), rank)


def obey(rank: int, made_of: tuple[str, str, str], name: str, *arguments: Any) -> dict[str, Any]:
    """Carry out a command of this process' rank; `made_of`: module, system, work."""
    return getattr(served(rank, *made_of), name)(*arguments)
