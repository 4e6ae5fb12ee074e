"""Name the corpus that a --data-path without one may have meant. No file is read beyond its beginning."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

LOOKED_AT_BYTES = 4096  # of a file, for what kind it is
MOST_NAMES = 3  # of corpora that are proposed
MAKES = "python data_tools/preprocess_data.py"


def complaint(prefix: str, missing: list[str]) -> str:
    """Return what is wrong with a prefix whose pair of files is not there, and the way out.

    Args:
        missing: which files of the pair are not there.
    """
    path = Path(prefix)
    if near := similar_corpora(path):
        return f"{' and '.join(missing)} not found; did you mean {' or '.join(near)}?"
    if path.is_file():
        made = Path("runs") / path.name.split(".")[0]
        return (
            f"{prefix} is {_kind(path)}, not a corpus; make one: {MAKES} --input {prefix} --output-prefix {made} "
            f"--tokenizer PATH --append-eod (or --tokenizer byte), then give --data-path {made}_text_document"
        )
    folder = f" ({prefix} is a folder)" if path.is_dir() else ""
    return (
        f"{' and '.join(missing)} not found{folder}; give the prefix that data_tools/preprocess_data.py printed, "
        "without .bin or .idx"
    )


def similar_corpora(path: Path) -> list[str]:
    """Return prefixes of corpora with a name that continues `path`'s, else in a folder of that name, else similar."""
    beside = _corpora(path.parent)
    begun = [name for name in beside if name.startswith(f"{path.name}_")]
    if begun:
        return [str(path.parent / name) for name in begun[:MOST_NAMES]]
    if path.is_file():  # a text, of which a corpus of another name is none
        return []
    inside = [str(path / name) for name in _corpora(path)[:MOST_NAMES]]
    close = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.75)
    return inside or [str(path.parent / name) for name in close]


def _corpora(folder: Path) -> list[str]:
    try:
        names = set(os.listdir(folder))
    except OSError:
        return []
    return sorted(name[:-4] for name in names if name.endswith(".idx") and f"{name[:-4]}.bin" in names)


def _kind(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return "a file" if b"\0" in file.read(LOOKED_AT_BYTES) else "a text file"
    except OSError:
        return "a file"
