"""Amounts and names for people. Bytes are decimal: 1 GB is 10^9 bytes, as on the labels of devices."""

import difflib
import re
from collections.abc import Iterable

# Of ASCII, and those of Latin-1, of which some terminals obey a few.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SCALES = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def size(num_bytes: int) -> str:
    """Format bytes with three digits: "999 bytes", "1.50 MB", "28.0 GB"."""
    for scale, letter in SCALES:
        if num_bytes >= scale:
            return f"{_three_digits(num_bytes / scale)} {letter}B"
    return f"{num_bytes} bytes"


def count(number: int) -> str:
    """Format a number of things with three digits: "999", "1.50 k", "124 M", "1.56 B"."""
    for scale, letter in SCALES:
        if number >= scale:
            return f"{_three_digits(number / scale)} {'B' if letter == 'G' else letter}"
    return str(number)


def things(number: int, name: str) -> str:
    """Format a number with its noun: "1 document", "1,024 documents"."""
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def visible(text: str) -> str:
    """Write control characters, except tabs and ends of lines, as escapes: a terminal obeys them."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def ranges(numbers: Iterable[int]) -> list[str]:
    """Format rising numbers: [0, 1, 2, 5] -> ["0-2", "5"]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "did you mean NAME?" with the known name that resembles `name` most; empty if none does."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else ""


def duration(seconds: float) -> str:
    """Format as "1:02:03", or "2:03" below an hour."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
