"""Notes of the arguments of a program's parts, taken while it runs with all of its real parts."""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

Call = dict[str, Any]  # parameter -> argument, defaults included


class Notes:
    """Arguments of functions and constructors, noted for as long as `patch` lasts."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.calls = patch, dict[str, list[Call]]()

    def of(self, name: str, instead: Callable[..., Any] | None = None) -> list[Call]:
        """Note the calls of "module:function" or "module:Class"; a function may be replaced by `instead`."""
        module, _, path = name.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, attribute = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        target = getattr(owner, attribute)
        is_class = inspect.isclass(target)
        if is_class:
            owner, attribute, target = target, "__init__", target.__init__
        signature, calls = inspect.signature(target), self.calls.setdefault(name, [])

        @functools.wraps(target)
        def noted(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            calls.append({key: value for key, value in bound.arguments.items() if key != "self"})
            return (instead or target)(*args, **kwargs)

        static = isinstance(inspect.getattr_static(owner, attribute), (staticmethod, classmethod))
        self.patch.setattr(owner, attribute, staticmethod(noted) if static else noted)
        return calls


def calls_of(notes: Notes, part: str) -> list[Call]:
    """Return the calls of a part, by the last word of its name."""
    return next(calls for name, calls in notes.calls.items() if name.rpartition(":")[2].removeprefix("Mesh.") == part)


@dataclass(frozen=True)
class As:
    """The argument of another part's first call, or an attribute of it: "PART.parameter.attribute"."""

    path: str

    def found(self, notes: Notes) -> Any:
        part, parameter, *attributes = self.path.split(".")
        return functools.reduce(getattr, attributes, calls_of(notes, part)[0][parameter])


@dataclass(frozen=True, eq=False)
class Kind:
    """Any object of the class of this name."""

    name: str

    def __eq__(self, other: object) -> bool:
        return type(other).__name__ == self.name


def differences(notes: Notes, call: Call, wanted: Call) -> dict[str, Any]:
    """Return the arguments that are not those wanted, by parameter."""
    wanted = {name: value.found(notes) if isinstance(value, As) else value for name, value in wanted.items()}
    return {name: call[name] for name, value in wanted.items() if not (call[name] is value or value == call[name])}
