"""PREFIX.json, the description next to a corpus: its tokenizer, its counts, its checksums.

The checksum of a file is the CRC-32 of each of its blocks of `block_bytes`: it finds accidents, not
forgery, and a sample of blocks is checked in a moment.
"""

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

import msgspec

from megazero.data.indexed import REMAKE, IndexedDataset
from megazero.files import crc32, explain, read_at, read_json_object

FORMAT_VERSION = 1
BLOCK_BYTES = 16 << 20
# Bytes of all corpora that are checked at the start of training: a tenth of a second's work.
SAMPLED_BYTES = 128 << 20

Count = Annotated[int, msgspec.Meta(ge=0)]
BlockSums = list[Annotated[str, msgspec.Meta(min_length=8, max_length=8)]]


class Checksums(TypedDict):
    """The checksums of the files."""

    algorithm: Literal["crc32"]
    block_bytes: Annotated[int, msgspec.Meta(ge=1)]
    bin: BlockSums
    idx: BlockSums
    mask: NotRequired[BlockSums]


class Description(TypedDict, total=False):
    """The keys of PREFIX.json that are checked."""

    num_tokens: Required[Count]
    version: Annotated[int, msgspec.Meta(ge=0, le=FORMAT_VERSION)]
    num_documents: Count
    num_targets: Count
    max_id: Annotated[int, msgspec.Meta(ge=-1)]
    vocab_size: Count
    eod: Count | None
    bos: list[Count] | None
    dtype: str
    tokenizer: str
    tokenizer_hash: str
    saved_tokenizer: str
    made_with: dict[str, str]
    checksum: Checksums


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
        msgspec.convert(about, Description)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"--data-path {data.prefix}: {explain(error)}") from error
    except ValueError as error:
        raise ValueError(f"--data-path {data.prefix}: {path} is damaged: {error}; {REMAKE}") from error
    actual = {"num_tokens": data.num_tokens, "num_documents": data.num_documents, "dtype": data.dtype.name}
    for key, value in actual.items():
        if about.get(key, value) != value:
            raise ValueError(
                f"--data-path {data.prefix}: {path} describes another corpus, of {key} {about[key]}, and "
                f"{data.prefix}.idx has {value}; {REMAKE}"
            )
    if not data.masked and "mask" in about.get("checksum", {}):
        raise ValueError(
            f"--data-path {data.prefix}: {data.prefix}.mask is missing, and without it every token would count as a "
            f"target; copy it too, or preprocess the text again"
        )
    return about


def describe(about: Mapping[str, Any], counts: Mapping[str, Any], checksums: Mapping[str, Checksum]) -> bytes:
    """The bytes of PREFIX.json: `about`, `counts` and checksums, by the suffix of their file."""
    checksum = {
        "algorithm": "crc32",
        "block_bytes": checksums["bin"].block_bytes,
        **{end: each.digests() for end, each in checksums.items()},
    }
    found = {"version": FORMAT_VERSION, **about, **counts, "checksum": checksum}
    # ASCII, because a path that is not UTF-8 has lone surrogates, which only an escape can hold
    return f"{json.dumps(found, indent=2)}\n".encode()


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
    for name in ("idx", "bin", *(["mask"] if "mask" in checksum else [])):
        path, blocks = f"{data.prefix}.{name}", checksum[name]
        if len(blocks) != -(-os.path.getsize(path) // block):
            raise ValueError(
                f"--data-path {data.prefix}: {data.prefix}.json has no checksum of all of {path}; {REMAKE}"
            )
        chosen = list(range(len(blocks)))
        if budget is not None and len(blocks) > (count := max(1, budget // (2 * block))):
            chosen = sorted((draw or random.Random()).sample(chosen, count))
        try:
            with open(path, "rb", buffering=0) as file:
                for number in chosen:
                    check = f"{crc32(read_at(file.fileno(), block, number * block)):08x}"
                    if check != blocks[number]:
                        raise ValueError(
                            f"--data-path {data.prefix}: {path} is damaged between bytes {number * block:,} and "
                            f"{(number + 1) * block:,}: their checksum is {check}, and {data.prefix}.json has "
                            f"{blocks[number]}; {REMAKE}"
                        )
                    advance(block)
        except OSError as error:
            raise ValueError(f"--data-path {data.prefix}: {explain(error)}") from error
    return True
