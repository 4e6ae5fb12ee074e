"""Plants a fault in a function of the program while a test runs."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
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
    owner, faulty = _faulty(fault)
    with patch.object(owner, fault.function, faulty):
        yield


def plant(fault: Fault) -> None:
    """Replace a method for the rest of this process, once."""
    owner = getattr(importlib.import_module(fault.module), fault.owner)
    if getattr(owner, fault.function).__code__.co_filename != f"<{fault}>":
        setattr(owner, fault.function, _faulty(fault)[1])


def _faulty(fault: Fault) -> tuple[Any, Any]:
    """Return the owner, and its method with the fault."""
    module = importlib.import_module(fault.module)
    owner = getattr(module, fault.owner)
    source = textwrap.dedent(inspect.getsource(getattr(owner, fault.function)))
    assert source.count(fault.find) == 1, f"{fault.find!r} is not once in {fault.owner}.{fault.function}"
    names = dict(vars(module))
    future = "from __future__ import annotations\n"
    exec(compile(future + source.replace(fault.find, fault.replace), f"<{fault}>", "exec"), names)
    return owner, names[fault.function]
