"""An entry of the table of foreign flags, and what its translation may look at."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

LAST = 5
MEGATRON, DEEPSPEED, HUGGING_FACE, ANY = "Megatron-LM", "DeepSpeed", "Hugging Face", "other systems"

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
TYPES = {
    **dict.fromkeys(("bfloat16", "bf16", "bf16-mixed", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("float16", "half", "fp16", "16-mixed", "torch.float16"), "fp16"),
    **dict.fromkeys(("float32", "float", "fp32", "no", "torch.float32"), "fp32"),
    **dict.fromkeys(("float64", "double", "fp64", "torch.float64"), "fp64"),
}  # spellings of number types -> ours


class Refused(Exception):
    """A foreign flag, or a value of it, that has no equal here; the text is the reason or the replacement."""


@dataclass(frozen=True)
class Use:
    """A foreign flag on a command line, and the command line around it.

    Attributes:
        name: without dashes, in kebab-case.
        values: its words.
        foreign: every foreign flag of the command line -> the words of its last use.
        ours: what has been given in our words so far (preset included) -> its words.
        defaults: our flags -> their defaults as words.
        count_ranks: returns the number of ranks of the run.
        checked: returns words of ours unchanged; Refused if one of our flags does not take its value.
    """

    name: str
    values: tuple[str, ...]
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

    def number_of(self, foreign: str, default: str) -> float:
        """The number of another foreign flag of the command line."""
        return number(self.word(foreign) or default, f"--{foreign} ")

    def on(self) -> bool:
        """Return whether a switch is on: it is alone, or followed by a word for true. Refused for any other word."""
        return not self.values or truth(self.value)

    def word(self, foreign: str) -> str:
        """The only word of a foreign flag of the command line; empty if it is not there, or has several."""
        words = self.foreign.get(foreign, ())
        return words[0] if len(words) == 1 else ""

    def given(self, ours: str) -> bool:
        """Return whether one of our flags has been given, by a word of ours or by a translation."""
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


Translation = Callable[[Use], Sequence[str]]
Kind = Literal["translated", "nothing to do", "refused"]


@dataclass(frozen=True)
class Foreign:
    """A flag of another system, and what it is here. A flag that bears the same name in both needs no entry.

    Attributes:
        name: without dashes, in kebab-case; * stands for any ending.
        system: whose it is.
        kind: translated into words of ours; nothing to do, for it is always so; refused.
        here: for people: what it becomes, or why there is nothing to do, or the replacement or reason.
        translate: words of ours for a use; none where the use asks for nothing. It may raise `Refused`.
        stage: uses of lower stages are translated first; a translation may look at what they became. The words of
            stage LAST are put behind all others, so that they win.
    """

    name: str
    system: str
    kind: Kind
    here: str
    translate: Translation = field(compare=False)
    stage: int = 0

    @property
    def spelled(self) -> str:
        """The flag as its system spells it."""
        return "--" + (self.name.replace("-", "_") if self.system == HUGGING_FACE else self.name)


Entries = tuple[Foreign, ...]


def alias(system: str, names: str, ours: str) -> Entries:
    """Entries for other names of one of our flags; its words stay."""
    return tuple(
        Foreign(name, system, "translated", f"--{ours}", lambda use: [f"--{ours}", *use.values])
        for name in names.split()
    )


def switch(system: str, names: str, ours: str) -> Entries:
    """Entries for switches that stand for words of ours, where they are on."""
    return tuple(
        Foreign(name, system, "translated", ours, lambda use: ours.split() if use.on() else [])
        for name in names.split()
    )


def unneeded(system: str, names: str, why: str) -> Entries:
    """Entries for flags without anything to do, whatever their values."""
    return tuple(Foreign(name, system, "nothing to do", why, lambda use: []) for name in names.split())


def fixed(system: str, names: str, values: str, why: str) -> Entries:
    """Entries for flags of which only these values, separated by |, are the case here; others are refused."""
    allowed = values.lower().split("|")

    def check(use: Use) -> list[str]:
        word = "true" if not use.values else use.value.lower()
        if word not in allowed and not _equal_number(word, allowed):
            raise Refused(why)
        return []

    here = f"{values.replace('|', ' or ')} alone: {why}"
    return tuple(Foreign(name, system, "nothing to do", here, check) for name in names.split())


def refused(system: str, names: str, why: str) -> Entries:
    """Entries for flags without an equal, unless they are switched off."""

    def refuse(use: Use) -> list[str]:
        if len(use.values) == 1 and use.values[0].lower() in FALSE[:3]:
            return []
        raise Refused(why)

    return tuple(Foreign(name, system, "refused", why, refuse) for name in names.split())


def computed(system: str, names: str, here: str, translate: Translation, stage: int = 0) -> Entries:
    """Entries for flags whose words of ours depend on their value or on other flags."""
    return tuple(Foreign(name, system, "translated", here, translate, stage) for name in names.split())


def choice(system: str, names: str, ours: Mapping[str, str], why: str) -> Entries:
    """Entries for flags whose values, in lower case, stand for words of ours; others are refused with `why`."""

    def pick(use: Use) -> list[str]:
        if use.value.lower() not in ours:
            raise Refused(f"{use.value}: {why}")
        return ours[use.value.lower()].split()

    shown = "; ".join(f"{value}: {words or 'nothing to do'}" for value, words in ours.items())
    return computed(system, names, shown, pick)


def _equal_number(word: str, allowed: Sequence[str]) -> bool:
    try:
        return float(word) in [float(value) for value in allowed]
    except ValueError:
        return False


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


def as_text(value: object) -> str:
    """A value of a JSON or TOML file as a word of a command line; 5e8 is a whole number."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value)
