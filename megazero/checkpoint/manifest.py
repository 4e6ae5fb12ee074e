"""The manifest: which chunk of which tensor lies in which file, with checksums. JSON, so that nothing runs
on load.

Note [On disk]
A checkpoint is a folder `iter_0000100`:
    rank_00000.safetensors ...   the chunks that a rank wrote, each under the key `name@offset` (`w@0,128`)
    state.json                   all that is not a tensor
    manifest.json                this module; written last, and by rank 0 alone
Its checksums are CRC-32: of each chunk's bytes, of state.json, and of the manifest itself, so that one
flipped bit anywhere is found. They guard against accidents, not against forgery.
"""

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megazero.plan.regions import Rectangle

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = "megazero checkpoint 1"

# Our name of a dtype -> what torch and the safetensors format call it.
DTYPES = {
    "float32": (torch.float32, "F32"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float16": (torch.float16, "F16"),
    "float64": (torch.float64, "F64"),
    "int64": (torch.int64, "I64"),
    "int32": (torch.int32, "I32"),
    "uint8": (torch.uint8, "U8"),
}


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor, the file that holds it, and the CRC-32 of its bytes."""

    rectangle: Rectangle
    file: str
    crc32: int


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    files: dict[str, int]  # name -> bytes, the safetensors files
    state_crc32: int
    tensors: dict[str, Entry]


def dtype_name(dtype: torch.dtype) -> str:
    """The key of DTYPES; ValueError for a dtype that checkpoints do not hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"a checkpoint cannot hold tensors of {dtype}; it holds {', '.join(DTYPES)}")
    return name


def key(name: str, offset: Sequence[int]) -> str:
    """The name of a chunk within a safetensors file."""
    return f"{name}@{','.join(map(str, offset))}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `folder/manifest.json`, durably."""
    content = {
        "format": FORMAT,
        "files": manifest.files,
        "state_crc32": manifest.state_crc32,
        "tensors": {
            name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "chunks": [
                    {"offset": c.rectangle.offset, "size": c.rectangle.size, "file": c.file, "crc32": c.crc32}
                    for c in entry.chunks
                ],
            }
            for name, entry in manifest.tensors.items()
        },
    }
    write_durably(folder / MANIFEST, json.dumps(content | {"crc32": _digest(content)}))


def read_manifest(folder: Path) -> Manifest:
    """Read and check `folder/manifest.json`; ValueError, naming --load and the file, if absent or damaged."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        crc32 = content.pop("crc32")
    except FileNotFoundError:
        raise ValueError(f"--load {folder} is not a whole checkpoint: it has no {MANIFEST}") from None
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(_damaged(path, f"it is not a manifest ({error})")) from None
    if crc32 != _digest(content):
        raise ValueError(_damaged(path, "its checksum does not fit its content"))
    if content["format"] != FORMAT:
        raise ValueError(
            f"--load {folder} has the format {content['format']!r}; this version reads {FORMAT!r}: "
            "load it with the version that wrote it"
        )
    return Manifest(
        files=content["files"],
        state_crc32=content["state_crc32"],
        tensors={
            name: Entry(
                entry["dtype"],
                tuple(entry["shape"]),
                tuple(
                    Chunk(Rectangle(tuple(c["offset"]), tuple(c["size"])), c["file"], c["crc32"])
                    for c in entry["chunks"]
                ),
            )
            for name, entry in content["tensors"].items()
        },
    )


def read_state(folder: Path) -> dict[str, Any]:
    """The `state` that the checkpoint was saved with; ValueError if the folder is not whole or is damaged."""
    manifest = read_manifest(folder)
    path = folder / STATE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"--load {folder} is not a whole checkpoint: it has no {STATE}") from None
    if zlib.crc32(text) != manifest.state_crc32:
        raise ValueError(_damaged(path, f"its checksum is not the one in {MANIFEST}"))
    return json.loads(text)


def missing_part(folder: Path, manifest: Manifest) -> str | None:
    """What is absent or of another length than the manifest says, found without reading it; or None."""
    for file, size in manifest.files.items():
        path = folder / file
        if not path.is_file():
            return f"{file} is missing"
        if path.stat().st_size != size:
            return f"{file} has {path.stat().st_size} bytes instead of {size}"
    return None if (folder / STATE).is_file() else f"{STATE} is missing"


def write_durably(path: Path, text: str) -> None:
    """Write a text file and wait until it is on the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the folder's entries (creations, renames) are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(path: Path, fault: str) -> ValueError:
    """The error for a file whose content is not what was written."""
    return ValueError(_damaged(path, fault))


def _damaged(path: Path, fault: str) -> str:
    way_out = "restore the file, or load an earlier checkpoint"
    return f"--load {path.parent}: {path.name} is damaged: {fault}; {way_out}"


def _digest(content: dict[str, Any]) -> int:
    """CRC-32 of the content, whatever the spacing and order of the text that it was read from."""
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
