"""Rewrite a command line that has flags of other systems into ours, and report the translations."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megazero.config.foreign.conversions import CONVERSIONS, nearest
from megazero.config.foreign.table import FLAGS, Foreign, find_entry, read_tables
from megazero.config.foreign.use import FALSE, TRUE, Refused, Use
from megazero.config.limits import Range, shorten

TYPES = {
    **dict.fromkeys(("bfloat16", "bf16", "bf16-mixed", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("float16", "half", "fp16", "16-mixed", "torch.float16"), "fp16"),
    **dict.fromkeys(("float32", "float", "fp32", "no", "torch.float32"), "fp32"),
    **dict.fromkeys(("float64", "double", "fp64", "torch.float64"), "fp64"),
}  # spellings of number types -> ours
LAST = 5  # the order of entries whose words go to the end of the command line
POWER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?[eE]\+?[0-9]{1,3}")
OWN_WORDS = ("preset", "help")  # flags of the parser, not of the configuration


class Option(NamedTuple):
    """A flag of ours, as far as a translation asks.

    Attributes:
        kind: its type: bool, int, ...
        default: its default, in one word; empty where it is none.
        limits: its range, if it takes a number.
    """

    kind: Any
    default: str
    limits: Range | None = None

    def complaint(self, values: Sequence[str]) -> str:
        """Return why its parser refuses these words; empty if it does not."""
        if self.kind is bool:
            return f"{' '.join(values)} is neither true nor false" if values else ""
        if typing.get_origin(self.kind) is tuple:
            return ""
        if len(values) != 1:
            return "give it one value"
        if typing.get_origin(self.kind) is typing.Literal:
            choices = list(map(str, typing.get_args(self.kind)))
            return "" if values[0] in choices else f"there are {', '.join(choices)}"
        try:
            value = self.kind(values[0])
        except ValueError:
            return f"must be a {'whole ' if self.kind is int else ''}number"
        return self.limits.complaint(value) if self.limits else ""


@dataclass(frozen=True)
class Item:
    """A flag on a command line with its words; the first item may have words alone.

    Attributes:
        spelled: as it was written, with dashes; empty for words before any flag.
        name: in kebab-case, without dashes.
        joined: whether it was --name=value.
    """

    spelled: str
    name: str
    values: tuple[str, ...]
    joined: bool = False

    def words(self) -> list[str]:
        if self.joined:
            return [f"--{self.name}={self.values[0]}", *self.values[1:]]
        return [f"--{self.name}", *self.values] if self.spelled else list(self.values)

    def __str__(self) -> str:
        return " ".join([self.spelled, *self.values])


class Answer(NamedTuple):
    """The fate of a foreign flag.

    Attributes:
        item: as given.
        entry: its line in the table.
        words: ours; none where there is nothing to do.
        refusal: why it is refused; empty if it is not.
    """

    item: Item
    entry: Foreign
    words: tuple[str, ...]
    refusal: str = ""


class Translated(NamedTuple):
    """A command line in our words.

    Attributes:
        args: the command line.
        answers: one for each foreign flag, in the order of the command line.
    """

    args: list[str]
    answers: tuple[Answer, ...]

    @property
    def notes(self) -> list[str]:
        """Format the translations and the flags that need nothing: at most one line each."""
        done = [f"{answer.item} is {' '.join(answer.words)}" for answer in self.answers if answer.words]
        needless: dict[str, list[str]] = {}
        for answer in self.answers:
            if not (answer.words or answer.refusal):
                why = answer.entry.here if answer.entry.kind == "nothing to do" else "other flags decide it"
                needless.setdefault(why, []).append(answer.item.spelled)
        lines = [f"translated: {'; '.join(done)}"] if done else []
        left = "; ".join(f"{', '.join(names)} ({why})" for why, names in needless.items())
        return lines + ([f"nothing to do for: {left}"] if left else [])


class UnknownFlags(Exception):
    """Words that are neither ours nor in the table."""


def split_items(argv: list[str]) -> list[Item]:
    """Return the flags of a command line, each with the words up to the next flag."""
    items = list[Item]()
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            spelled, equals, value = word.partition("=")
            name = spelled.removeprefix("--").replace("_", "-")
            items.append(Item(spelled, name, (value,) if equals else (), bool(equals)))
        elif items:
            last = items[-1]
            items[-1] = Item(last.spelled, last.name, (*last.values, word), last.joined)
        else:
            items.append(Item("", "", (word,)))
    return items


def is_ours(name: str, known: Mapping[str, Option]) -> bool:
    """Return whether a name in kebab-case is a flag of ours, or --no- and a switch of ours."""
    off = name.removeprefix("no-")
    return name in known or name in OWN_WORDS or (off != name and off in known and known[off].kind is bool)


def translate(
    argv: list[str],
    known: Mapping[str, Option],
    under: list[str] | None = None,
    count_ranks: Callable[[], int] = lambda: 1,
) -> Translated:
    """Rewrite a command line.

    Args:
        known: our flags.
        under: words of the preset, over which the command line lies.
        count_ranks: returns the number of ranks; asked only where a translation depends on it.

    Returns:
        The command line in our words, each flag's in its place. Refused flags are left out, and answered.

    Raises:
        UnknownFlags: with a sentence for each word that is neither ours nor in the table.
    """
    items = [_spell(item, known) for item in split_items(argv)]
    theirs = [at for at, item in enumerate(items) if item.name and not is_ours(item.name, known)]
    found = {at: find_entry(items[at].name) for at in theirs}
    if unknown := [items[at] for at in theirs if found[at] is None]:
        raise UnknownFlags("\n".join(_unknown(item, known) for item in unknown))
    entries = {at: entry for at, entry in found.items() if entry is not None}
    foreign = {items[at].name.lower(): items[at].values for at in entries}
    defaults = {name: option.default for name, option in known.items()}
    became: dict[int, list[Item]] = {at: [item] for at, item in enumerate(items) if at not in entries}
    answers: dict[int, Answer] = {}
    beneath = split_items(under or [])
    checked = functools.partial(_checked, known)
    for at in sorted(entries, key=lambda at: (entries[at].order, at)):
        entry, item = entries[at], items[at]
        so_far = beneath + [ours for place in sorted(became) for ours in became[place]]
        ours = {_positive(own.name, known): own.values for own in so_far}
        use = Use(item.name.lower(), item.values, entry.argument, foreign, ours, defaults, count_ranks, checked)
        try:
            words = tuple(checked(CONVERSIONS[entry.by](use)))
        except Refused as reason:
            answers[at] = Answer(item, entry, (), str(reason))
            continue
        answers[at] = Answer(item, entry, words)
        place = at + len(items) * (entry.order == LAST)
        became[place] = [_spell(own, known) for own in split_items(list(words))]
    args = [word for at in sorted(became) for own in became[at] for word in own.words()]
    return Translated(args, tuple(answers[at] for at in sorted(answers)))


def _checked(known: Mapping[str, Option], words: Sequence[str]) -> Sequence[str]:
    """Return words of ours unchanged. Refused if a flag does not take its value: its parser would name ours only."""
    for item in split_items(list(words)):
        own = _spell(item, known)
        if own.name in known and (complaint := known[own.name].complaint(own.values)):
            raise Refused(f"{shorten(item)}: {complaint}")
    return words


def _positive(name: str, known: Mapping[str, Option]) -> str:
    return name if name in known else name.removeprefix("no-")


def _spell(item: Item, known: Mapping[str, Option]) -> Item:
    """Write a value of ours as its parser reads it: 1e5 as 100000, bfloat16 as bf16, True as a switch."""
    if item.name not in known or len(item.values) != 1:
        return item
    kind, word = known[item.name].kind, item.values[0]
    if kind is bool and word.lower() in TRUE:
        return Item(item.spelled, item.name, ())
    if kind is bool and word.lower() in FALSE:
        return Item(item.spelled, f"no-{item.name}", ())
    if kind is int and POWER.fullmatch(word) and float(word).is_integer():
        word = str(int(float(word)))
    if typing.get_origin(kind) is typing.Literal and word.lower() in typing.get_args(kind):
        word = word.lower()
    if item.name in ("precision", "grad-dtype"):
        word = TYPES.get(word.lower(), word)
    return Item(item.spelled, item.name, (word,), item.joined)


def _unknown(item: Item, known: Mapping[str, Option]) -> str:
    names = {name: f"--{name}" for name in known}
    names |= {entry.name: entry.spelled for entry in read_tables(*FLAGS).values() if "*" not in entry.name}
    close = nearest(item.name, names)
    hint = f"Perhaps you meant: {close}" if close else "--help-all lists ours, docs/results/flags.md others"
    return f"{shorten(item.spelled)}: no such flag. {hint}"


def refusals(answers: tuple[Answer, ...]) -> str:
    """Return one line for each reason to refuse, with the flags that it refuses; empty if none is."""
    by_reason: dict[tuple[str, str], dict[str, None]] = {}
    for answer in answers:
        if answer.refusal:
            shown = f"{answer.item.spelled} {shorten(' '.join(answer.item.values))}".rstrip()
            by_reason.setdefault((answer.entry.system, answer.refusal), {})[shown] = None
    return "\n".join(f"{', '.join(items)} ({system}'s): {why}" for (system, why), items in by_reason.items())
