"""Blocks of a Markdown page that a program rewrites: between `<!-- NAME -->` and `<!-- end of NAME -->`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from megazero.files import replace_file


def write_blocks(page: Path, blocks: Mapping[str, str]) -> None:
    """Put each text into the page's block of its name.

    Raises:
        ValueError: the page has no such block.
    """
    text = page.read_text(encoding="utf-8")
    for name, content in blocks.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        text, count = re.subn(
            f"{re.escape(begin)}\n.*?{re.escape(end)}", lambda _, b=f"{begin}\n{content}\n{end}": b, text, flags=re.S
        )
        if count != 1:
            raise ValueError(f"{page} has {count} blocks {begin} ... {end}; it must have one")
    replace_file(page, text)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def gb(num_bytes: float) -> str:
    """Format bytes as GB of 1e9, as the ZeRO paper does."""
    return f"{num_bytes / 1e9:.2f}"


def percent(ours: float, theirs: float) -> str:
    """Format the deviation of `ours` from `theirs`."""
    return f"{100 * (ours / theirs - 1):+.1f} %"
