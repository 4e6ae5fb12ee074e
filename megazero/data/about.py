"""PREFIX.json, the description beside a corpus: its tokenizer, its counts, its checksums.

The checksum of a file is the CRC-32 of each of its blocks of `block_bytes`: it finds accidents, not
forgery, and a sample of blocks can be checked in no time.
"""

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megazero.data.indexed import IndexedDataset
from megazero.files import crc32, crc32_of, explain, open_regular, read_json_object

FORMAT_VERSION = 1
BLOCK_BYTES = 16 << 20
# What is checked at the start of training, over all corpora: a tenth of a second's work.
SAMPLED_BYTES = 128 << 20
_REMAKE = "copy the corpus again, or rerun data_tools/preprocess_data.py"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# What each key must be, if it is there; other keys are not checked.
_SCHEMA: dict[str, tuple[Callable[[object], bool], str]] = {
    "version": (_is_count, "a whole number"),
    "num_tokens": (_is_count, "a whole number"),
    "num_documents": (_is_count, "a whole number"),
    "max_id": (lambda value: value == -1 or _is_count(value), "a whole number"),
    "vocab_size": (_is_count, "a whole number"),
    "eod": (lambda value: value is None or _is_count(value), "a whole number or null"),
    "dtype": (_is_text, "a text"),
    "tokenizer": (_is_text, "a text"),
    "tokenizer_hash": (_is_text, "a text"),
    "checksum": (lambda value: isinstance(value, dict), "an object"),
}


@dataclass
class Checksum:
    """CRC-32 of every block of a stream of bytes; can be stored in the middle and taken up again."""

    block_bytes: int = BLOCK_BYTES
    blocks: list[int] = field(default_factory=list)  # of the blocks that are full
    check: int = 0  # of the one that is not
    filled: int = 0  # bytes of it

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            part = view[: self.block_bytes - self.filled]
            self.check = crc32(part, self.check)
            self.filled += len(part)
            view = view[len(part) :]
            if self.filled == self.block_bytes:
                self.blocks.append(self.check)
                self.check = self.filled = 0

    def digests(self) -> list[str]:
        """Each block's CRC-32 as eight hexadecimal digits, the last and shorter block included."""
        return [f"{check:08x}" for check in [*self.blocks, *([self.check] if self.filled else [])]]


def read_about(data: IndexedDataset) -> dict[str, Any]:
    """The description PREFIX.json of a corpus: tokenizer, vocab_size, max_id, ...; {} if there is none.

    Raises:
        ValueError: the file is damaged, is not a description, or describes other tokens.
    """
    path = data.prefix + ".json"
    try:
        about = read_json_object(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"--data-path {data.prefix}: {explain(error)}") from error
    except ValueError as error:
        raise ValueError(f"--data-path {data.prefix}: {error}; {_REMAKE}") from error

    def refuse(fault: str) -> ValueError:
        return ValueError(f"--data-path {data.prefix}: {path} {fault}; {_REMAKE}")

    if "num_tokens" not in about:
        raise refuse('is no description of a corpus, for it lacks "num_tokens"')
    for key, (valid, kind) in _SCHEMA.items():
        if key in about and not valid(about[key]):
            raise refuse(f'says "{key}": {json.dumps(about[key])[:80]}, which is not {kind}')
    if about.get("version", FORMAT_VERSION) > FORMAT_VERSION:
        raise refuse(f"is of version {about['version']}, which is newer than {FORMAT_VERSION}, the newest known here")
    for key, actual in (
        ("num_tokens", data.num_tokens),
        ("num_documents", data.num_documents),
        ("dtype", data.dtype.name),
    ):
        if about.get(key, actual) != actual:
            raise refuse(f"describes another corpus: {key} {about[key]} there, {actual} in {data.prefix}.idx")
    if "checksum" in about:
        _check_checksum(data, about["checksum"], refuse)
    return about


def _check_checksum(data: IndexedDataset, checksum: Mapping[str, Any], refuse: Callable[[str], ValueError]) -> None:
    block = checksum.get("block_bytes")
    if checksum.get("algorithm") != "crc32" or not _is_count(block) or not block:
        raise refuse('has a "checksum" that is not of blocks by crc32')
    for name in ("bin", "idx"):
        blocks, size = checksum.get(name), os.path.getsize(f"{data.prefix}.{name}")
        whole = isinstance(blocks, list) and all(isinstance(one, str) and len(one) == 8 for one in blocks)
        if not whole or len(blocks) != -(-size // block):  # type: ignore[arg-type]
            raise refuse(f'has a "checksum" that does not fit the {size} bytes of {data.prefix}.{name}')


def describe(
    about: Mapping[str, Any], *, dtype: str, num_documents: int, num_tokens: int, max_id: int,
    bin_checksum: Checksum, idx_checksum: Checksum,
) -> bytes:  # fmt: skip
    """The bytes of PREFIX.json."""
    return (
        json.dumps(
            {
                "version": FORMAT_VERSION,
                **about,
                "dtype": dtype,
                "num_documents": num_documents,
                "num_tokens": num_tokens,
                "max_id": max_id,
                "checksum": {
                    "algorithm": "crc32",
                    "block_bytes": bin_checksum.block_bytes,
                    "bin": bin_checksum.digests(),
                    "idx": idx_checksum.digests(),
                },
            },
            indent=2,  # and ASCII: a path that is no UTF-8 has surrogates, which only an escape can hold
        ).encode()
        + b"\n"
    )


def verify(
    data: IndexedDataset,
    budget: int | None = None,
    draw: random.Random | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> bool:
    """Compare a corpus with the checksums in PREFIX.json; False if it has none.

    Args:
        budget: bytes to read of it; a random choice of blocks, at least one of each file. None: all.
        draw: chooses the blocks.
        advance: called with the bytes of each block once it is checked.

    Raises:
        ValueError: a block differs, or a file cannot be read.
    """
    checksum = read_about(data).get("checksum")
    if checksum is None:
        return False
    block = checksum["block_bytes"]
    for name in ("idx", "bin"):
        path, blocks = f"{data.prefix}.{name}", checksum[name]
        chosen = range(len(blocks))
        if budget is not None and len(blocks) > (count := max(1, budget // (2 * block))):
            chosen = sorted((draw or random.Random()).sample(chosen, count))  # type: ignore[assignment]
        try:
            handle = open_regular(path)
            try:
                for number in chosen:
                    check = f"{crc32_of(handle, number * block, (number + 1) * block):08x}"
                    if check != blocks[number]:
                        raise ValueError(
                            f"--data-path {data.prefix}: {path} is damaged between bytes {number * block:,} and "
                            f"{(number + 1) * block:,}: their checksum is {check}, and {data.prefix}.json says "
                            f"{blocks[number]}; {_REMAKE}"
                        )
                    advance(block)
            finally:
                os.close(handle)
        except OSError as error:
            raise ValueError(f"--data-path {data.prefix}: {explain(error)}") from error
    return True
