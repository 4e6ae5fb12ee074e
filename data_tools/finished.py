"""Finished outputs: a record of the options that made them, so that other options do not replace them by accident."""

import glob
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_tools.sources import Source
from megazero.files import read_json_object


def record_of(sources: Sequence[Source], options: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of the inputs, without their dates, and of each further option, by flag.

    Args:
        sources: all of --input, also with --partition.
    """
    inputs = [[source.name, source.kind, source.size, source.split] for source in sources]
    return {flag: digest(value) for flag, value in {"--input": inputs, **options}.items()}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def refuse_other(output: str, found: Any, record: Mapping[str, str], sources: Sequence[Source]) -> None:
    """Raise ValueError unless an existing output was made from the same inputs with the same options.

    Args:
        output: the flag and the file, which begin the message.
        found: the record next to the file; anything else if there is none.
        record: of this command. Text from standard input is never the same.
    """
    if not isinstance(found, dict):
        reason = "there is no record of the options that made it"
    else:
        unknown = any(source.kind in ("stdin", "stdin-text") for source in sources)
        other = [flag for flag in {**record, **found} if found.get(flag) != record.get(flag)]
        if unknown and "--input" not in other:
            other.insert(0, "--input")
        if not other:
            return
        reason = f"it was made with other {', '.join(other)}"
    raise ValueError(f"{output} exists, and {reason}; name another output, or add --overwrite to replace it")


def refuse_files_of_others(prefix: str, copied: Path | None = None) -> None:
    """Raise ValueError if PREFIX_tokenizer or PREFIX_skipped.txt exists, and no description of a corpus names it.

    copied: the folder that becomes PREFIX_tokenizer; its equal, which a killed run leaves, may exist.
    """
    folder, skipped = Path(f"{prefix}_tokenizer"), Path(f"{prefix}_skipped.txt")
    abouts = list[dict[str, Any]]()
    saved = set[str]()
    for name in glob.glob(f"{glob.escape(prefix)}*.json"):
        with suppress(OSError, ValueError):  # a file of others, or a damaged one
            abouts.append(read_json_object(name))
            spec = str(abouts[-1].get("saved_tokenizer"))
            saved |= {spec, *re.split("[:/]", spec)}
    same = copied is not None and _files_of(copied) == _files_of(folder)
    for path, ours in (
        (folder, (folder.name in saved or same) and folder.is_dir() and not folder.is_symlink()),
        (skipped, any(about.get("skipped_lines") for about in abouts)),
    ):
        if (path.exists() or path.is_symlink()) and not ours:
            raise ValueError(
                f"--output-prefix {prefix}: {path} exists, and no {prefix}...json names it as part of a "
                f"corpus; move it, or name another output"
            )


def _files_of(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
