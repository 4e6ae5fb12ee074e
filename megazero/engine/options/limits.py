"""Limits of single values: the range of a number, declared next to its flag; the length of a text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

MAX_NAME = 255  # bytes of a file name on common file systems; Linux: NAME_MAX
MAX_TEXT = 4096 - 256  # bytes of any text: a path (Linux: PATH_MAX) less the endings that are appended
SUFFIX = len(".partial-00000000")  # the longest ending that a run or a tool adds to a name


@dataclass(frozen=True)
class Bounds:
    """Values from `least` to `most`, both included unless they are marked open.

    `why` is the reason for the upper bound and ends the message: "--lr 1e+300: must be at most 10: " + why.
    """

    least: float
    most: float
    why: str = ""
    least_open: bool = False
    most_open: bool = False

    def complaint(self, value: float) -> str:
        """Return why `value` is out of range; empty if it is not."""
        if isinstance(value, float) and not math.isfinite(value):
            return "must be finite"
        if value < self.least or (self.least_open and value == self.least):
            if self.least_open:
                return f"must be more than {self.least}"
            return f"must be at least {self.least}" if self.least else "must not be negative"
        if value > self.most or (self.most_open and value == self.most):
            reason = f": {self.why}" if self.why else ""
            return f"must be {'less than' if self.most_open else 'at most'} {self.most}{reason}"
        return ""


# Kinds of numbers that several flags share. 0 stands for a derived value or for "never".
FEW = "no published model has as many"
ITERATIONS = "iterations are numbered in 9 digits"
Positive = Annotated[int, Bounds(1, 10**9, ITERATIONS)]
Iterations = Annotated[int, Bounds(0, 10**9, ITERATIONS)]
MOST_LAYERS = 4096
MOST_MINUTES = 10**6
Minutes = Annotated[float, Bounds(0, MOST_MINUTES, "that is two years")]
Ranks = Annotated[int, Bounds(1, 10**6, "no job has as many ranks")]
Probability = Annotated[float, Bounds(0, 1, "1 would drop everything", most_open=True)]
DecayRate = Annotated[float, Bounds(0, 1, "a mean with weight 1 on its past never changes", most_open=True)]
LearningRate = Annotated[float, Bounds(0, 10, "AdamW moves every weight by about --lr per update")]
LossScaleValue = Annotated[float, Bounds(0, 2**48, "the scaled loss would overflow fp32", least_open=True)]


def divisors(number: int) -> list[int]:
    """Return the divisors of `number` in ascending order, after at most sqrt(number) trials."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def shorten(value: object) -> str:
    """Return the value as text, cut in the middle where it is too long to be read."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:40]}...{text[-20:]}"


def check_text(flag: str, text: str, is_path: bool) -> None:
    """Check that a string can be written to config.toml and, for a path, that file systems take it."""
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        shown = shorten(text.encode(errors="backslashreplace").decode())
        raise ValueError(f"--{flag} {shown} is not UTF-8, as config.toml must be; rename it, or use a link") from None
    if "\0" in text:
        raise ValueError(f"--{flag} {shorten(ascii(text))}: contains a null character; remove it")
    if len(encoded) > MAX_TEXT:
        raise ValueError(f"--{flag} {shorten(text)}: longer than {MAX_TEXT} bytes; use a shorter one")
    if not is_path:
        return
    longest = max(len(part) for part in encoded.split(b"/"))
    if longest + SUFFIX > MAX_NAME:
        raise ValueError(
            f"--{flag} {shorten(text)}: a name in it has {longest} bytes, and file systems allow {MAX_NAME}, less "
            f"{SUFFIX} for endings; use a name of at most {MAX_NAME - SUFFIX} bytes"
        )


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
