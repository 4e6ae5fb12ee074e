"""Plants a fault in a function of the program while a test runs."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch


class Fault(NamedTuple):
    """A fault.

    Attributes:
        module, owner, function: where; `owner` is a class of the module.
        find, replace: text of the function, which occurs once, and the text to plant.
    """

    module: str
    owner: str
    function: str
    find: str
    replace: str


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Replace a method by one with the fault."""
    module = importlib.import_module(fault.module)
    owner = getattr(module, fault.owner)
    source = textwrap.dedent(inspect.getsource(getattr(owner, fault.function)))
    assert source.count(fault.find) == 1, f"{fault.find!r} is not once in {fault.owner}.{fault.function}"
    names = dict(vars(module))
    future = "from __future__ import annotations\n"
    exec(compile(future + source.replace(fault.find, fault.replace), f"<{fault}>", "exec"), names)
    with patch.object(owner, fault.function, names[fault.function]):
        yield
