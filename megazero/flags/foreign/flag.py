"""A foreign flag on a command line: its values as numbers and switches, and the flags around it."""

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megazero.engine.options.option import MOST_LAYERS
from megazero.flags.batch_ramp import BatchSizes, data_parallel_size
from megazero.flags.flag_names import flags

LONGEST = 1000  # characters of a list of layers
UNSET = ("none", "null", "[]", "")  # values that leave a flag or key to its default
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class Refused(Exception):
    """A foreign flag cannot be translated; the text is the reason or the replacement."""


class Overridden(Exception):
    """A flag or key does not count; the text is the flag that does, as the command line has it."""


@dataclass(frozen=True)
class ForeignFlag:
    """A foreign flag with its values.

    Attributes:
        name: in kebab-case, without dashes.
        values: its words.
        argument: from its entry in the table.
        foreign: every foreign flag of the command line -> the words of its last occurrence.
        ours: our flags that the preset, the command line or an earlier translation sets -> their words.
        count_ranks: returns the number of ranks of the run.
    """

    name: str
    values: tuple[str, ...]
    argument: Any
    foreign: Mapping[str, tuple[str, ...]]
    ours: Mapping[str, tuple[str, ...]]
    count_ranks: Callable[[], int]

    @property
    def value(self) -> str:
        """The only word. Raises `Refused` if there is none, or if there are several."""
        if len(self.values) != 1:
            raise Refused("give it one value")
        return self.values[0]

    def number(self) -> float:
        return read_number(self.value)

    def whole(self) -> int:
        """The only word as a whole number, which may be written as 1e5."""
        return whole_number(self.value)

    def on(self) -> bool:
        """Return True if a switch has no value, or one for true."""
        return not self.values or truth(self.value)

    def is_off(self) -> bool:
        """Return whether the only word asks for nothing; for a key of a DeepSpeed file, 0 too."""
        return is_off(self.value, zero=self.name.startswith("file."))

    def word(self, foreign: str) -> str:
        """The only word of another foreign flag; empty if that is missing, or has several words."""
        words = self.foreign.get(foreign, ())
        return words[0] if len(words) == 1 else ""

    def number_of(self, foreign: str, default: str) -> float:
        """The number of another foreign flag."""
        return read_number(self.word(foreign) or default, f"--{foreign} ")

    def get(self, ours: str) -> str:
        """The value of one of our flags, or its default; empty if it is not one word."""
        words = self.ours.get(ours, (str(flags()[ours].default),))
        return words[0] if len(words) == 1 else ""

    def get_whole(self, ours: str) -> int:
        return int(self.get(ours))

    def data_parallel(self) -> int:
        """Data-parallel ranks of the run, or of the --world-size of a plan."""
        ranks = self.get_whole("world-size") or self.count_ranks()
        sizes = [
            max(1, self.get_whole(f"{axis}-parallel-size")) for axis in ("pipeline-model", "tensor-model", "context")
        ]
        return max(1, data_parallel_size(ranks, *sizes))

    def batch_sizes(self) -> BatchSizes:
        """The global batch of each iteration. A ramp that leads nowhere is refused later, and ignored here."""
        batch = self.get_whole("global-batch-size") or self.get_whole("micro-batch-size") * self.data_parallel()
        ramp = [
            whole_number(word) for word in re.findall(r"[^\s,()]+", " ".join(self.ours.get("rampup-batch-size", ())))
        ]
        return BatchSizes(max(1, batch), *(ramp if len(ramp) == 3 and min(ramp) > 0 else ()))

    def iterations(self, samples: float) -> Fraction:
        """Convert a number of samples to iterations, whose batches grow with --rampup-batch-size."""
        return self.batch_sizes().iterations(samples)


def read_number(word: str, name: str = "") -> float:
    """Return a word as a finite number, or raise `Refused`; `name` begins the reason."""
    try:
        found = float(word)
    except ValueError:
        raise Refused(f"{name}{word} is not a number") from None
    if not math.isfinite(found):
        raise Refused(f"{name}{word} is not a finite number")
    return found


def whole_number(word: str) -> int:
    """Return a word as a whole number, as `read_number` does."""
    found = read_number(word)
    if not found.is_integer():
        raise Refused(f"{word} is not a whole number")
    return int(found)


def layer_letters(word: str, letters: str) -> str:
    """Return the letter of each layer, for a list of 0 and 1 in Python's words, such as ([1]*3+[0])*2.

    Args:
        letters: for 0 and for 1.

    Raises:
        Refused: it is no such list.
    """
    try:
        found = _digits(ast.parse(word.strip() if len(word) < LONGEST else "", mode="eval").body)
    except (SyntaxError, ValueError):
        found = ""
    if not found:
        raise Refused(f"it is no list of 0 and 1 for at most {MOST_LAYERS} layers; give letters, such as {letters}")
    return found.translate({ord("0"): letters[0], ord("1"): letters[1]})


def _digits(node: ast.expr) -> str:
    """Return the digits of a list, of a sum of lists, or of a list times a number; ValueError for anything else."""
    match node:
        case ast.List(elts=items) if all(isinstance(item, ast.Constant) and item.value in (0, 1) for item in items):
            found = "".join(str(int(ast.literal_eval(item))) for item in items)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            found = _digits(left) + _digits(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int() as times)) if times <= MOST_LAYERS:
            found = _digits(left) * times
        case _:
            raise ValueError
    return found if len(found) <= MOST_LAYERS else ""


def is_off(word: str, zero: bool = True) -> bool:
    """Return whether a value leaves something to its default, or switches it off; 0 does so if `zero`."""
    return word.lower() in (*UNSET, *FALSE[:3]) or (zero and word in ("0", "0.0"))


def truth(word: str) -> bool:
    """Return whether the word of a switch is one for true. Raises `Refused` if it is not one for false either."""
    if word.lower() not in TRUE + FALSE:
        raise Refused(f"it is a switch, and {word} is neither true nor false")
    return word.lower() in TRUE
