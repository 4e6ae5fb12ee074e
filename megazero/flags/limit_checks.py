"""Checks of single values: the range of a number, the length of a text; and values as an error shows them."""

import math

from megazero.engine.options.option import Bounds

MAX_NAME = 255  # bytes of a file name on common file systems; Linux: NAME_MAX
MAX_TEXT = 4096 - 256  # bytes of any text: a path (Linux: PATH_MAX) less the endings that are appended
SUFFIX = len(".partial-00000000")  # the longest ending that a run or a tool adds to a name


def out_of_range(value: float, bounds: Bounds) -> str:
    """Return why `value` is out of range; empty if it is not."""
    if isinstance(value, float) and not math.isfinite(value):
        return "must be finite"
    if value < bounds.least or (bounds.least_open and value == bounds.least):
        if bounds.least_open:
            return f"must be more than {bounds.least}"
        return f"must be at least {bounds.least}" if bounds.least else "must not be negative"
    if value > bounds.most or (bounds.most_open and value == bounds.most):
        reason = f": {bounds.why}" if bounds.why else ""
        return f"must be {'less than' if bounds.most_open else 'at most'} {bounds.most}{reason}"
    return ""


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
