"""Plants a fault in a function of the program while a test runs."""

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
        module, owner, function: where; `owner` is a class of the module, or empty: a function of the module itself.
        find, replace: text of the function, which occurs once, and the text to plant.
    """

    module: str
    owner: str
    function: str
    find: str
    replace: str


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Replace a function by one with the fault."""
    owner, faulty = _faulty(fault)
    with patch.object(owner, fault.function, faulty):
        yield


def plant(fault: Fault) -> None:
    """Replace a function for the rest of this process, once."""
    owner = _owner(fault)
    if getattr(owner, fault.function).__code__.co_filename != f"<{fault}>":
        setattr(owner, fault.function, _faulty(fault)[1])


def _owner(fault: Fault) -> Any:
    module = importlib.import_module(fault.module)
    return getattr(module, fault.owner) if fault.owner else module


def _faulty(fault: Fault) -> tuple[Any, Any]:
    """Return the owner, and its function with the fault."""
    module = importlib.import_module(fault.module)
    owner = _owner(fault)
    source = textwrap.dedent(inspect.getsource(getattr(owner, fault.function)))
    assert source.count(fault.find) == 1, (
        f"{fault.find!r} is not once in {fault.owner or fault.module}.{fault.function}"
    )
    names = dict(vars(module))
    future = "from __future__ import annotations\n"
    exec(compile(future + source.replace(fault.find, fault.replace), f"<{fault}>", "exec"), names)
    return owner, names[fault.function]
