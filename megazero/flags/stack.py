"""A configuration as a stack of layers, each with its source. Pure.

From below: the defaults of an architecture, a preset, a config.json, the command line, and then values that follow from
these: of --recipe auto, --layout auto, --decay-from, --train-tokens, or of the GPU. A higher layer decides.
"""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from megazero.flags.config import Config
from megazero.flags.flag_names import all_flags, as_flag, flags, value_of, with_values
from megazero.flags.limit_checks import shorten

COMMAND_LINE = "the command line"


class Standing(Enum):
    """Relation of a layer to the words of the user."""

    GIVEN = "given"  # by the command line, its preset or a config.json, or as if: config.toml keeps the values
    IMPLIED = "implied"  # by given values
    DERIVED = "derived"  # for this run: its machine, ranks or data


class OptionLayer(NamedTuple):
    """Values of flags, by their names without dashes.

    Attributes:
        source: for messages.
        undone: flags that return to their defaults first; they are not given any more.
    """

    source: str
    values: Mapping[str, Any]
    standing: Standing = Standing.GIVEN
    undone: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Stack:
    """Layers, the lowest one first."""

    layers: tuple[OptionLayer, ...] = ()

    def over(
        self,
        source: str,
        values: Mapping[str, Any],
        standing: Standing = Standing.IMPLIED,
        undone: Collection[str] = (),
    ) -> "Stack":
        """Return the stack with one layer more."""
        return Stack((*self.layers, OptionLayer(source, values, standing, frozenset(undone))))

    @functools.cached_property
    def sources(self) -> Mapping[str, OptionLayer]:
        """The layer that decides the value of a flag, by its name; a flag without one has its default."""
        found = dict[str, OptionLayer]()
        for layer in self.layers:
            found = {name: below for name, below in found.items() if name not in layer.undone}
            found |= dict.fromkeys(layer.values, layer)
        return found

    @functools.cached_property
    def config(self) -> Config:
        """The configuration, not resolved."""
        return with_values(Config(), {name: layer.values[name] for name, layer in self.sources.items()})

    @functools.cached_property
    def given(self) -> frozenset[str]:
        """Names of the flags that are given."""
        found = set[str]()
        for layer in self.layers:
            found -= layer.undone
            if layer.standing is Standing.GIVEN:
                found |= layer.values.keys()
        return frozenset(found & flags().keys())

    @property
    def asked(self) -> "Stack":
        """The stack without derived values."""
        return Stack(tuple(layer for layer in self.layers if layer.standing is not Standing.DERIVED))

    def of(self, source: str) -> frozenset[str]:
        """Return the flags whose values a source decides."""
        return frozenset(name for name, layer in self.sources.items() if layer.source == source)

    def undone_by(self, source: str) -> frozenset[str]:
        return frozenset().union(*(layer.undone for layer in self.layers if layer.source == source))

    def freed(self, source: str, names: Collection[str]) -> tuple["Stack", str]:
        """Return the stack without the values that presets give to `names`, and these values as flags.

        source: the flag that chooses them instead.
        """
        undone = [name for name in names if name in self.given - self.of(COMMAND_LINE)]
        words = " ".join(as_flag(name, value_of(self.config, name)) for name in undone)
        return self.over(source, {}, undone=undone), words

    def table(self, resolved: Config | None = None) -> str:
        """Return a line for each option that is no default: its value and its source.

        resolved: the final configuration; its other values are shown as derived.
        """
        rows = []
        for name, flag in all_flags().items():
            value, layer = value_of(self.config, name), self.sources.get(name)
            source = layer.source if layer else "default"
            if resolved is not None and value_of(resolved, name) != value:
                value, source = value_of(resolved, name), f"derived for this run ({source}: {shorten(value)})"
            if value != flag.default:
                rows.append((shorten(as_flag(name, value)), source))
        width = max((len(words) for words, _ in rows), default=0)
        return "\n".join(f"{words:<{width}}  {source}" for words, source in rows)
