"""A foreign flag on a command line: its values as numbers and switches, and the command line around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class Refused(Exception):
    """A foreign flag, or a value of it, without an equal here; the text is the reason or the replacement."""


@dataclass(frozen=True)
class Use:
    """A foreign flag with its values.

    Attributes:
        name: in kebab-case, without dashes.
        values: its words.
        argument: data of its entry in the table.
        foreign: every foreign flag of the command line -> the words of its last use.
        ours: our flags that are given so far (by the preset, the command line or a translation) -> their words.
        defaults: our flags -> their defaults as words.
        count_ranks: returns the number of ranks of the run.
        checked: returns words of ours unchanged; Refused if one of our flags does not take its value.
    """

    name: str
    values: tuple[str, ...]
    argument: Any
    foreign: Mapping[str, tuple[str, ...]]
    ours: Mapping[str, tuple[str, ...]]
    defaults: Mapping[str, str]
    count_ranks: Callable[[], int]
    checked: Callable[[Sequence[str]], Sequence[str]]

    @property
    def value(self) -> str:
        """The only word. Refused if there is none, or if there are several."""
        if len(self.values) != 1:
            raise Refused("give it one value")
        return self.values[0]

    def number(self) -> float:
        """The only word as a number."""
        return number(self.value)

    def whole(self) -> int:
        """The only word as a whole number, which may be written as 1e5 or 1_000."""
        return whole(self.value)

    def on(self) -> bool:
        """Return whether a switch is on: alone, or followed by a word for true. Refused for any other word."""
        return not self.values or truth(self.value)

    def word(self, foreign: str) -> str:
        """The only word of a foreign flag of the command line; empty if it is missing, or has several."""
        words = self.foreign.get(foreign, ())
        return words[0] if len(words) == 1 else ""

    def number_of(self, foreign: str, default: str) -> float:
        """The number of another foreign flag of the command line."""
        return number(self.word(foreign) or default, f"--{foreign} ")

    def given(self, ours: str) -> bool:
        """Return whether one of our flags is given so far."""
        return ours in self.ours

    def get(self, ours: str) -> str:
        """The value of one of our flags: as given, else its default; empty if it is not one word."""
        words = self.ours.get(ours, (self.defaults[ours],))
        return words[0] if len(words) == 1 else ""

    def get_whole(self, ours: str) -> int:
        """The value of one of our flags that takes a whole number."""
        return whole(self.get(ours), f"--{ours} ")

    def data_parallel(self) -> int:
        """Data-parallel ranks of the run: all ranks, or --world-size of a plan, over tensor x pipeline."""
        ranks = self.get_whole("world-size") or self.count_ranks()
        shares = self.get_whole("tensor-model-parallel-size") * self.get_whole("pipeline-model-parallel-size")
        return max(1, ranks // max(1, shares))

    def global_batch(self) -> int:
        """Samples of an iteration."""
        return max(1, self.get_whole("global-batch-size") or self.get_whole("micro-batch-size") * self.data_parallel())


def number(word: str, name: str = "") -> float:
    """A word as a number. Refused if it is none, or not finite; `name` with a space begins the reason."""
    try:
        found = float(word)
    except ValueError:
        raise Refused(f"{name}{word} is not a number") from None
    if not math.isfinite(found):
        raise Refused(f"{name}{word} is not a finite number")
    return found


def whole(word: str, name: str = "") -> int:
    """A word as a whole number, as `number`."""
    found = number(word, name)
    if not found.is_integer():
        raise Refused(f"{name}{word} is not a whole number")
    return int(found)


def truth(word: str) -> bool:
    """Return whether a switch is on. Refused unless its word is one for true or for false."""
    if word.lower() not in TRUE + FALSE:
        raise Refused(f"it is a switch, and {word} is neither true nor false")
    return word.lower() in TRUE
