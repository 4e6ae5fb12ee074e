"""Finished outputs: a record of the options that made them, so that other options do not replace them by accident."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from data_tools.sources import Source


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
