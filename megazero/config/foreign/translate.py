"""Rewrite a command line that has words of other systems into ours, and say what was done."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megazero.config.foreign import (
    deepspeed,
    huggingface,
    megatron_data,
    megatron_layout,
    megatron_model,
    megatron_rest,
    megatron_training,
)
from megazero.config.foreign.table import FALSE, LAST, TRUE, TYPES, Entries, Foreign, Refused, Use
from megazero.config.limits import Range, shorten

ENTRIES: Entries = (
    *megatron_model.MODEL,
    *megatron_training.TRAINING,
    *megatron_layout.LAYOUT,
    *megatron_data.DATA,
    *megatron_rest.REST,
    *megatron_rest.EXPERTS,
    *deepspeed.ENTRIES,
    *huggingface.ENTRIES,
)
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
        return [f"--{self.name}" if self.spelled else "", *self.values][0 if self.spelled else 1 :]

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
        """Say what was translated, and what needs nothing: at most one line each."""
        done = [f"{answer.item} is {' '.join(answer.words)}" for answer in self.answers if answer.words]
        needless: dict[str, list[str]] = {}
        for answer in self.answers:
            if not (answer.words or answer.refusal):
                why = answer.entry.here if answer.entry.kind == "nothing to do" else "other flags say it"
                needless.setdefault(why, []).append(answer.item.spelled)
        lines = [f"translated: {'; '.join(done)}"] if done else []
        left = "; ".join(f"{', '.join(names)} ({why})" for why, names in needless.items())
        return lines + ([f"nothing to do for: {left}"] if left else [])


class UnknownFlags(Exception):
    """Words that are neither ours nor in the table."""


@functools.cache
def _exact() -> dict[str, Foreign]:
    return {entry.name: entry for entry in ENTRIES if "*" not in entry.name}


def find_entry(name: str) -> Foreign | None:
    """Return the line of the table for a name in kebab-case; a whole name goes before a pattern."""
    name = name.lower()
    if name in _exact():
        return _exact()[name]
    return next((e for e in ENTRIES if "*" in e.name and fnmatch.fnmatchcase(name, e.name)), None)


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
    unknown = [item for item in items if item.name and not is_ours(item.name, known) and find_entry(item.name) is None]
    if unknown:
        raise UnknownFlags("\n".join(_unknown(item, known) for item in unknown))
    found = {at: find_entry(item.name) for at, item in enumerate(items) if item.name and not is_ours(item.name, known)}
    entries = {at: entry for at, entry in found.items() if entry is not None}
    foreign = {items[at].name.lower(): items[at].values for at in entries}
    defaults = {name: option.default for name, option in known.items()}
    became: dict[int, list[Item]] = {at: [item] for at, item in enumerate(items) if at not in entries}
    answers: dict[int, Answer] = {}
    beneath = split_items(under or [])
    checked = functools.partial(_checked, known)
    for at in sorted(entries, key=lambda at: (entries[at].stage, at)):
        entry, item = entries[at], items[at]
        so_far = beneath + [ours for place in sorted(became) for ours in became[place]]
        ours = {_positive(own.name, known): own.values for own in so_far}
        use = Use(item.name.lower(), item.values, foreign, ours, defaults, count_ranks, checked)
        try:
            words = tuple(checked(entry.translate(use)))
        except Refused as reason:
            answers[at] = Answer(item, entry, (), str(reason))
            continue
        answers[at] = Answer(item, entry, words)
        place = at + len(items) * (entry.stage == LAST)
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
    if kind is int and POWER.fullmatch(word):
        digits, _, exponent = word.lower().partition("e")
        whole, _, fraction = digits.partition(".")
        if len(fraction.rstrip("0")) <= int(exponent):
            number = int(whole + fraction) * 10 ** max(0, int(exponent) - len(fraction))
            value = str(number if len(fraction) <= int(exponent) else number // 10 ** (len(fraction) - int(exponent)))
            return Item(item.spelled, item.name, (value,), item.joined)
    if typing.get_origin(kind) is typing.Literal and word.lower() in typing.get_args(kind):
        return Item(item.spelled, item.name, (word.lower(),), item.joined)
    if item.name in ("precision", "grad-dtype") and word.lower() in TYPES:
        return Item(item.spelled, item.name, (TYPES[word.lower()],), item.joined)
    return item


def _unknown(item: Item, known: Mapping[str, Option]) -> str:
    names = {name: f"--{name}" for name in known} | {name: entry.spelled for name, entry in _exact().items()}
    close = [names[name] for name in difflib.get_close_matches(item.name, names, n=3, cutoff=0.6)]
    hint = f"Perhaps you meant: {', '.join(close)}" if close else "--help-all lists ours, docs/megatron.md others"
    return f"{shorten(item.spelled)}: no such flag. {hint}"


def refusals(answers: tuple[Answer, ...]) -> str:
    """Return one line for each reason to refuse, with the flags that it refuses; empty if none is."""
    by_reason: dict[tuple[str, str], dict[str, None]] = {}
    for answer in answers:
        if answer.refusal:
            shown = f"{answer.item.spelled} {shorten(' '.join(answer.item.values))}".rstrip()
            by_reason.setdefault((answer.entry.system, answer.refusal), {})[shown] = None
    return "\n".join(f"{', '.join(items)} ({system}'s): {why}" for (system, why), items in by_reason.items())
