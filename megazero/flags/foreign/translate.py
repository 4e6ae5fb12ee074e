"""Translate a command line that has flags of other systems into ours, and report the translations."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megazero.files import read_json_object
from megazero.flags.flag_names import flags
from megazero.flags.foreign.flag import FALSE, TRUE, UNSET, ForeignFlag, Overridden, Refused, is_off
from megazero.flags.foreign.flag_table import DEEPSPEED_FILE, FLAGS, find_entry, kebab, read_table, read_values
from megazero.flags.foreign.value_conversions import CONVERSIONS, ORDER, hint
from megazero.flags.foreign.values import spell, translate_value
from megazero.flags.limit_checks import check_text, shorten
from megazero.units import did_you_mean

OWN_WORDS = ("preset", "hf-config", "help")  # flags of the parser, not of the configuration
QUOTED = re.compile(r"^\s*(['\"])([\w\s.,:+*()\[\]-]*)\1\s*$")
DEEPSPEED_FLAGS = ("deepspeed", "deepspeed-config", "ds-config")  # a JSON file may follow


class Item(NamedTuple):
    """A flag on a command line with its words.

    Attributes:
        spelled: as it was written, with dashes; empty for words before the first flag.
    """

    spelled: str
    name: str  # in kebab-case, without dashes
    values: tuple[str, ...]

    def words(self) -> list[str]:
        if len(self.values) == 1 and self.values[0].startswith("-"):
            return [f"--{self.name}={self.values[0]}"]
        return [f"--{self.name}", *self.values] if self.spelled else [*self.values]

    def __str__(self) -> str:
        return " ".join([self.spelled, *self.values])


class Answer(NamedTuple):
    """The translation of a foreign flag, or of a foreign value of a flag of ours.

    Attributes:
        words: ours; none if there is nothing to do.
        refusal: why it is refused; empty if it is not.
        unknown: it is neither ours nor in the table.
        overridden: flags of the command line that count instead, as they were written.
    """

    item: Item
    words: tuple[str, ...]
    refusal: str = ""
    unknown: bool = False
    overridden: str = ""

    def __str__(self) -> str:
        """Format a translation."""
        done = f"{self.item} is {' '.join(self.words)}"
        if not self.overridden:
            return done
        return f"{done if self.words else self.item}, overridden by {self.overridden}"


class Translated(NamedTuple):
    """A command line in our words, and an answer for each foreign flag or value, in their order."""

    args: list[str]
    answers: tuple[Answer, ...]

    @property
    def foreign(self) -> frozenset[str]:
        """The foreign flags and keys of files, in kebab-case."""
        return frozenset(name for answer in self.answers if not is_ours(name := answer.item.name.lower()))

    @property
    def notes(self) -> list[str]:
        """Format the translations, and the flags that need none: at most one line each."""
        done = [str(answer) for answer in self.answers if answer.words or answer.overridden]
        needless = [
            answer.item.spelled for answer in self.answers if not (answer.words or answer.refusal or answer.overridden)
        ]
        lines = [f"translated: {'; '.join(done)}"] if done else []
        return lines + ([f"nothing to do for: {', '.join(needless)}"] if needless else [])


def split_items(argv: Sequence[str]) -> list[Item]:
    """Return the flags of a command line, each with the words up to the next flag."""
    items = list[Item]()
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            spelled, equals, value = word.partition("=")
            items.append(Item(spelled, kebab(spelled.removeprefix("--")), (value,) if equals else ()))
        elif items:
            items[-1] = items[-1]._replace(values=(*items[-1].values, word))
        else:
            items.append(Item("", "", (word,)))
    return items


def is_ours(name: str) -> bool:
    """Return whether a name in kebab-case is a flag of ours, or --no- and a switch of ours."""
    off = name.removeprefix("no-")
    return name in flags() or name in OWN_WORDS or (off != name and off in flags() and flags()[off].kind is bool)


def translate(
    argv: Sequence[str], preset: Mapping[str, Any] | None = None, count_ranks: Callable[[], int] = lambda: 1
) -> Translated:
    """Translate a command line. Refused flags are left out of it, and answered.

    Args:
        preset: flags of ours that the preset sets.
        count_ranks: returns the number of ranks; called only if a translation depends on it.

    Raises:
        ValueError: a DeepSpeed file cannot be read.
    """
    items = _with_file_keys([_spell(_unquoted(item)) for item in split_items(argv)])
    theirs = {at: find_entry(item.name) for at, item in enumerate(items) if item.name and not is_ours(item.name)}
    foreign = {items[at].name.lower(): items[at].values for at in theirs}
    known = {name: (str(value),) for name, value in (preset or {}).items()}
    became: dict[int, list[Item]] = {}
    answers: dict[int, Answer] = {}
    for at, item in enumerate(items):
        if at not in theirs:
            try:
                became[at] = _own(item)
            except Refused as reason:
                answers[at] = Answer(item, (), str(reason))
                continue
            if became[at] != [item]:
                answers[at] = Answer(item, _words(became[at]))
    for at, entry in sorted(theirs.items(), key=lambda found: (ORDER[found[1].by] if found[1] else 0, found[0])):
        item = items[at]
        if entry is None:
            answers[at] = _unknown(item)
            continue
        if item.name.startswith("file.") and item.values[0].lower() in UNSET:
            answers[at] = Answer(item, ())
            continue
        so_far = [own for place in sorted(became) for own in became[place]]
        ours = known | {_flag(own): own.values for own in so_far}
        try:
            flag = ForeignFlag(
                name=item.name.lower(),
                values=item.values,
                argument=entry.argument,
                foreign=foreign,
                ours=ours,
                count_ranks=count_ranks,
            )
            owns = [own for word in split_items(CONVERSIONS[entry.by](flag)) for own in _own(_spell(word))]
        except Refused as reason:
            answers[at] = Answer(item, (), str(reason))
            continue
        except Overridden as reason:
            answers[at] = Answer(item, (), overridden=str(reason))
            continue
        answers[at] = Answer(item, _words(owns))
        place = at + len(items) if entry.by == "tokenizer" else at  # at the end, its --vocab-size wins
        became[place] = owns
    _note_overridden(items, became, answers)
    args = [word for at in sorted(became) for word in _words(became[at])]
    return Translated(args, tuple(answers[at] for at in sorted(answers)))


def _note_overridden(items: Sequence[Item], became: Mapping[int, list[Item]], answers: dict[int, Answer]) -> None:
    """Note in answers whose flags have other values at the end of the command line which of its words set those.

    A precision that a DeepSpeed file switches on or off is refused if the command line names another, or that one.
    """
    last = {_flag(own): (at, own) for at in sorted(became) for own in became[at]}
    for at, answer in answers.items():
        others = [last[_flag(own)] for own in split_items(answer.words) if last[_flag(own)][1] != own]
        of_file = answer.item.name.startswith("file.")
        if of_file and not (answer.words or answer.refusal) and "precision" in last:
            entry, (_, own) = find_entry(answer.item.name), last["precision"]
            others += [last["precision"]] if entry and entry.argument == f"--precision {own.values[0]}" else []
        by = ", ".join(dict.fromkeys(str(items[other % len(items)]) for other, _ in others))
        if of_file and any(own.name == "precision" for _, own in others):
            answers[at] = answer._replace(words=(), refusal=f"{by} contradicts it; drop one of the two")
        elif others:
            answers[at] = answer._replace(overridden=by)


def _flag(own: Item) -> str:
    """Return the flag of ours that an item of ours sets."""
    return own.name if own.name in flags() else own.name.removeprefix("no-")


def _words(items: Sequence[Item]) -> tuple[str, ...]:
    return tuple(word for item in items for word in item.words())


def _unquoted(item: Item) -> Item:
    """Remove quotes that a shell script has left around values that are no paths, such as --split "'99,1,0'"."""
    return item._replace(values=tuple(QUOTED.sub(r"\2", value) for value in item.values))


def _spell(item: Item) -> Item:
    """Write a value of ours as its parser reads it: 1e5 as 100000, bfloat16 as bf16, True as a switch."""
    if item.name not in flags() or len(item.values) != 1:
        return item
    kind, word = flags()[item.name].kind, item.values[0]
    if kind is bool and word.lower() in TRUE:
        return item._replace(values=())
    if kind is bool and word.lower() in FALSE:
        return item._replace(name=f"no-{item.name}", values=())
    return item._replace(values=(spell(kind, word),))


def _own(item: Item) -> list[Item]:
    """Return a flag of ours with a value that it takes, and further flags if a foreign value stands for several.

    Raises:
        Refused: it does not take the value.
    """
    if item.name not in flags():
        return [item]
    kind = flags()[item.name].kind
    words = translate_value(item.name, kind, item.values, lambda: read_values().get(item.name, ()))
    return split_items(words) if words else [item]


def _unknown(item: Item) -> Answer:
    if item.name.startswith("file."):
        known = [entry.name for entry in read_table(DEEPSPEED_FILE) if "*" not in entry.name]
        meant = did_you_mean(item.spelled, known, cutoff=0.9)
        if is_off(item.values[0]) and not meant:
            return Answer(item, ())
        instead = f", or {meant}" if meant else ""
        return Answer(item, (), f"it has no equal here; drop it{instead}")
    close = hint(item.name, (entry for table in FLAGS for entry in read_table(table) if "*" not in entry.name))
    found = f"Perhaps you meant: {close}" if close else "--help-all lists ours, docs/results/flags.md others"
    return Answer(item, (), f"no such flag. {found}", unknown=True)


def refusals(answers: Sequence[Answer]) -> str:
    """Return one line for each reason to refuse, with the flags that it refuses; empty if none is."""
    by_reason: dict[str, dict[str, None]] = {}
    for answer in answers:
        if answer.refusal:
            values = " ".join(value if value.strip() else repr(value) for value in answer.item.values)
            shown = f"{shorten(answer.item.spelled)} {shorten(values)}".rstrip()
            by_reason.setdefault(answer.refusal, {})[shown] = None
    return "\n".join(f"{', '.join(items)}: {why}" for why, items in by_reason.items())


# -- DeepSpeed's JSON file


def _with_file_keys(items: list[Item]) -> list[Item]:
    """Replace flags that name a DeepSpeed file by the file's keys, in front, where flags of the command line win."""
    named = [item for item in items if item.name in DEEPSPEED_FLAGS and item.values]
    named = [item for item in named if item.values[0].lower() not in ("true", "false")]
    keys = [key for item in named for key in _file_keys(item)]
    return keys + [item for item in items if item not in named]


def _file_keys(item: Item) -> list[Item]:
    """Return the keys of a DeepSpeed file with their values.

    Left out are keys with the value "auto", which the command line decides; comments; and the rest of a section with
    `enabled` off.
    """
    path = " ".join(item.values)
    check_text(item.name, path, is_path=True)
    try:
        leaves = _flatten(read_json_object(path))
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: hundreds of levels deep
        raise ValueError(f"{item} cannot be read: {error}") from None
    off = {key for key, value in leaves.items() if key.endswith(".enabled") and is_off(value)}
    disabled = tuple(key.removesuffix("enabled") for key in off)
    return [
        Item(key, kebab(f"file.{key}"), (value,))
        for key, value in leaves.items()
        if value != "auto" and "._" not in f".{key}" and (key in off or not key.startswith(disabled))
    ]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the leaves of a JSON object as words of a command line, by the path to them, joined by dots."""
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, float) and value.is_integer():
            found[prefix + key] = str(int(value))  # 5e8 is a whole number
        else:
            found[prefix + key] = value if isinstance(value, str) else json.dumps(value)
    return found
