"""JSON and TOML files read into dataclasses, checked by msgspec."""

from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode(data: bytes, kind: type[T], path: Path) -> T:
    """Return the contents `data` of the file `path` as a `kind`; TOML if the name ends in .toml, else JSON.

    kind: a dataclass, a `msgspec.Struct`, or any annotation of these, lists and dicts.
    ValueError: names the file, the key, and the type that was expected there.
    """
    parse = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
    try:
        return parse(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ValueError(f"{path}: {error}") from error
