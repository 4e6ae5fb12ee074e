"""Values of our own flags as other systems spell or name them, and refusals of values that a flag does not take."""

import fnmatch
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any

from megazero.flags.foreign.flag import Refused, layer_letters
from megazero.flags.foreign.flag_table import Value, kebab
from megazero.units import did_you_mean

WINDOW = re.compile(r"\(?(-1|[0-9]+),0\)?")  # Megatron-LM: (keys before a query, keys after it)
FLOAT = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE]\+?[0-9]{1,3})?")
NUMBERS = {int: "a whole number", float: "a number"}


def choices(kind: Any) -> list[str]:
    """Return the values of a flag of few values as words; none if it is not one."""
    return list(map(str, typing.get_args(kind))) if typing.get_origin(kind) is typing.Literal else []


def spell(kind: Any, word: str) -> str:
    """Return a value as our parser reads it: 1e5 and 100000.0 as 100000, WSD as wsd, inverse_sqrt as inverse-sqrt."""
    known = choices(kind)
    whole = kind is int or all(map(str.isdigit, known or "x"))
    if whole and not _is(int, word) and FLOAT.fullmatch(word) and float(word).is_integer():
        return str(int(float(word)))
    return {kebab(choice.lower()): choice for choice in known}.get(kebab(word.lower()), word)


def translate_value(name: str, kind: Any, values: Sequence[str], rows: Callable[[], Sequence[Value]]) -> list[str]:
    """Return words of ours for a value of another system; none if the flag takes the value as it is.

    Args:
        name: of a flag of ours, without dashes.
        kind: its type. Flags of few values and of numbers are checked, others take any words.
        rows: returns values of other systems. Called only if the flag does not take the value.

    Raises:
        Refused: the flag does not take the value, and no row translates it.
    """
    known = choices(kind)
    if name == "moe-layer-freq" and "[" in "".join(values):  # Megatron-LM: 1 for each layer with experts
        return [f"--{name}", layer_letters("".join(values), "DE")]
    if not known and kind not in NUMBERS:
        return []
    if name == "num-experts" and list(values) == ["1"]:  # Megatron-DeepSpeed: one expert is a dense MLP
        return ["--num-experts", "0"]
    if len(values) == 1 and (values[0] in known if known else _is(kind, values[0])):
        return []
    word = kebab(values[0].lower()) if len(values) == 1 else ""
    if name == "window-size" and (pair := WINDOW.fullmatch("".join(values).replace(" ", ""))):
        return [f"--{name}", str(int(pair[1]) + 1)]
    for row in rows():
        if fnmatch.fnmatchcase(word, row.name):
            if row.answer:
                raise Refused(row.answer)
            return [f"--{name}", *row.words.split()]
    if not known:
        raise Refused(f"--{name} takes {NUMBERS[kind]}")
    raise Refused("; ".join(filter(None, [f"there are {', '.join(known)}", did_you_mean(word, known)])))


def _is(kind: Callable[[str], object], word: str) -> bool:
    try:
        kind(word)
    except ValueError:
        return False
    return True
