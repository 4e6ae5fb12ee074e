"""The manifest: the file and the checksum of each chunk of each tensor. JSON, so that loading runs no code.

Note [On disk]
A checkpoint is a folder `iter_0000100`:
    rank_00000.safetensors ...   the chunks that a rank wrote, each under the key `name@offset` (`w@0,128`)
    state.json                   everything but the tensors
    tokenizer/                   the run's tokenizer, if it has one: attached files, which rank 0 writes
    manifest.json                this module; rank 0 writes it last
The manifest lists *tilings*: regions that cover a shape, and the file of each. Many tensors share a tiling: those of
all layers, and their moments. A tensor has the number of its tiling, and the checksum of each of its chunks. So a
manifest of 10^6 chunks takes 15 MB.
Checksums are CRC-32: of each chunk, of state.json, of each attached file, and of the manifest itself. So one flipped
bit anywhere is found. They protect against accidents, not against forgery: a manifest is therefore decoded by a
schema, and can name files of its own folder only.
"""

import contextlib
import functools
import json
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import torch

from megazero.checkpoint.regions import Region
from megazero.files import OutputFile, crc32, read_regular, sync_folder
from megazero.typed_files import decode

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = "megazero checkpoint 2"
# Larger files are not read. A manifest has 12 bytes per chunk of up to 64 MiB; a tokenizer has some MB.
MAX_MANIFEST_BYTES = 2 << 30
MAX_STATE_BYTES = 64 << 20
MAX_ATTACHED_BYTES = 1 << 30

RESTORE = "restore the file, or load an earlier checkpoint"
T = TypeVar("T")

# torch's name of every dtype that a checkpoint holds -> its code in the safetensors format.
SAFETENSORS_CODES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
}


Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Checksum = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
DtypeName = Annotated[str, msgspec.Meta(pattern=rf"\A(?:{'|'.join(SAFETENSORS_CODES)})\Z")]
DataFile = Annotated[str, msgspec.Meta(pattern=r"\Arank_[0-9]{5,9}\.safetensors\Z")]
AttachedFile = Annotated[str, msgspec.Meta(pattern=r"\Atokenizer/[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\Z")]


class Tiling(msgspec.Struct, frozen=True, dict=True):
    """Regions that cover a shape, and the file that holds each."""

    offset: tuple[tuple[Count, ...], ...]
    size: tuple[tuple[Count, ...], ...]
    file: tuple[str, ...]

    @classmethod
    def of(cls, regions: Sequence[Region], files: Iterable[str]) -> "Tiling":
        return cls(tuple(r.offset for r in regions), tuple(r.size for r in regions), tuple(files))

    @functools.cached_property
    def regions(self) -> tuple[Region, ...]:
        return tuple(map(Region, self.offset, self.size))


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint."""

    dtype: DtypeName
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=16)]
    tiling: Count  # index into `Manifest.tilings`
    crc32: tuple[Checksum, ...]  # of each region of the tiling


class StoredChunk(NamedTuple):
    """A region of a tensor, the file that holds it, and the CRC-32 of its bytes."""

    region: Region
    file: DataFile
    crc32: Checksum


class Attached(NamedTuple):
    """Length and CRC-32 of an attached file."""

    num_bytes: Count
    crc32: Checksum


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a checkpoint, as manifest.json has them between `format` and the manifest's own checksum."""

    files: dict[DataFile, Count]  # name -> bytes, the safetensors files
    state_crc32: Checksum
    attached: dict[AttachedFile, Attached] = {}  # by path within the folder
    tilings: list[Tiling]
    tensors: dict[str, StoredTensor]

    def tiling(self, name: str) -> Tiling:
        return self.tilings[self.tensors[name].tiling]

    def chunks(self, name: str) -> list[StoredChunk]:
        tiling = self.tiling(name)
        return list(map(StoredChunk, tiling.regions, tiling.file, self.tensors[name].crc32))

    def check(self) -> None:
        """ValueError if a number of items, a tiling's number, or a file's name does not fit the rest."""
        for number, each in enumerate(self.tilings):
            fits = len(each.offset) == len(each.size) == len(each.file)
            if not fits or list(map(len, each.offset)) != list(map(len, each.size)):
                raise ValueError(f"the offsets, sizes and files of tiling {number} differ in number")
            if unknown := set(each.file) - self.files.keys():
                raise ValueError(f"tiling {number} names {min(unknown)[:80]!r}, which is not in `files`")
        for name, tensor in self.tensors.items():
            if tensor.tiling >= len(self.tilings) or len(tensor.crc32) != len(self.tiling(name).file):
                raise ValueError(f"tensor {name[:200]!r} has no tiling, or not one checksum per chunk")
            if any(len(offset) != len(tensor.shape) for offset in self.tiling(name).offset):
                raise ValueError(f"tensor {name[:200]!r} and its tiling differ in the number of dims")


class Versioned(msgspec.Struct):
    """The key of manifest.json that every version has."""

    format: str


def dtype_name(dtype: torch.dtype) -> str:
    """Return the key of SAFETENSORS_CODES; ValueError for a dtype that checkpoints do not hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in SAFETENSORS_CODES:
        raise ValueError(f"a checkpoint cannot hold tensors of {dtype}; it holds {', '.join(SAFETENSORS_CODES)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a key of SAFETENSORS_CODES."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def key(name: str, offset: Sequence[int]) -> str:
    """Return the name of a chunk within a safetensors file."""
    return f"{name}@{','.join(map(str, offset))}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `folder/manifest.json`, durably."""
    write_durably(folder / MANIFEST, manifest_text(manifest).encode())


def manifest_text(manifest: Manifest) -> str:
    """Return the text of a manifest, its checksum included."""
    return checked_text({"format": FORMAT} | msgspec.to_builtins(manifest))


def checked_text(content: Mapping[str, Any]) -> str:
    """Return JSON whose last key is the CRC-32 of the JSON without that key."""
    text = json.dumps(content, separators=(",", ":"))
    return f'{text[:-1]},"crc32":{crc32(text.encode())}}}'


def attach(folder: Path, files: Mapping[str, bytes]) -> dict[str, Attached]:
    """Write files by their path within a checkpoint folder, durably; return their records for the manifest."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_durably(folder / name, content)
    for parent in {(folder / name).parent for name in files}:
        sync_folder(parent)
    return {name: Attached(len(content), crc32(content)) for name, content in files.items()}


def write_durably(path: Path, content: bytes) -> None:
    """Write a file in a folder that no process reads yet, and wait until it is on the disk."""
    with contextlib.closing(OutputFile(path)) as file:
        file.write(content)
        file.sync()


def read_manifest(folder: Path) -> Manifest:
    """Read and check `folder/manifest.json`.

    Raises:
        Damaged: it is absent, not a regular file, damaged, or not a manifest.
        ValueError: it is of another version's format.
    """
    return parse_manifest(folder, read_manifest_bytes(folder))


def read_manifest_bytes(folder: Path) -> bytes:
    """Read `folder/manifest.json` for `parse_manifest`; Damaged if it is absent or not a regular file."""
    return _read(folder, MANIFEST, MAX_MANIFEST_BYTES)


def parse_manifest(folder: Path, raw: bytes) -> Manifest:
    """Check and parse the bytes of `folder/manifest.json`; raises as `read_manifest`."""
    body, _, checksum = raw.rpartition(b',"crc32":')
    if checksum != b"%d}" % crc32(body + b"}"):
        raise damage(folder, MANIFEST, "its checksum does not fit its content")
    found = _decoded(folder, raw, Versioned).format
    if found != FORMAT:
        raise ValueError(
            f"--load {folder} has the format {found[:80]!r}; this version reads {FORMAT!r}: "
            "load it with the version that wrote it"
        )
    manifest = _decoded(folder, raw, Manifest)
    try:
        manifest.check()
    except ValueError as error:
        raise _malformed(folder, error) from None
    return manifest


def read_state_file(folder: Path) -> dict[str, Any]:
    """Return the `state` that was saved; check its checksum and those of attached files.

    Raises:
        Damaged: the folder is not whole or is damaged.
    """
    manifest = read_manifest(folder)
    for name, attached in manifest.attached.items():
        content = _read(folder, name, MAX_ATTACHED_BYTES)
        if Attached(len(content), crc32(content)) != attached:
            raise damage(folder, name, f"its length or checksum is not the one in {MANIFEST}")
    raw = _read(folder, STATE, MAX_STATE_BYTES)
    if crc32(raw) != manifest.state_crc32:
        raise damage(folder, STATE, f"its checksum is not the one in {MANIFEST}")
    return _parse_state(folder, raw)


def unchecked_state(folder: Path) -> dict[str, Any]:
    """Return `state.json` without checking its checksum, to order and prune checkpoints; {} if it cannot be read."""
    try:
        return _parse_state(folder, _read(folder, STATE, MAX_STATE_BYTES))
    except Damaged:
        return {}


def missing_part(folder: Path, manifest: Manifest) -> str | None:
    """Name a file that is absent, not regular, or of another length than in the manifest; None if all are whole."""
    attached = {name: each.num_bytes for name, each in manifest.attached.items()}
    for file, size in {**manifest.files, **attached, STATE: None}.items():
        try:
            found = (folder / file).stat()
        except OSError as error:
            return f"{file} is missing" if isinstance(error, FileNotFoundError) else f"{file}: {error.strerror}"
        if not stat.S_ISREG(found.st_mode):
            return f"{file} is not a regular file"
        if size is not None and found.st_size != size:
            return f"{file} has {found.st_size} bytes instead of {size}"
    return None


class Damaged(ValueError):
    """A checkpoint is not whole, or its content has changed since it was written. An older one may be whole."""


def damage(folder: Path, name: str, fault: str) -> Damaged:
    """Return the error for a file of the checkpoint `folder` whose content has changed since it was written."""
    return Damaged(f"--load {folder}: {name} is damaged: {fault}; {RESTORE}")


def _malformed(folder: Path, fault: object) -> Damaged:
    return damage(folder, MANIFEST, f"it is not a manifest: {fault}")


def _read(folder: Path, name: str, limit: int) -> bytes:
    try:
        return read_regular(folder / name, limit)
    except FileNotFoundError:
        raise Damaged(f"--load {folder} is not a whole checkpoint: it has no {name}") from None
    except OSError as error:
        raise damage(folder, name, error.strerror or str(error)) from None
    except ValueError as error:
        raise damage(folder, name, str(error)) from None


def _decoded(folder: Path, raw: bytes, kind: type[T]) -> T:
    try:
        return decode(raw, kind, Path(MANIFEST))
    except ValueError as error:
        raise _malformed(folder, str(error).removeprefix(f"{MANIFEST}: ")) from None


def _parse_state(folder: Path, raw: bytes) -> dict[str, Any]:
    """Parse with `json`, because `msgspec` refuses paths that are not UTF-8."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise damage(folder, STATE, f"it is not JSON ({str(error)[:200]})") from None
    if not isinstance(content, dict):
        raise damage(folder, STATE, "it is not a JSON object")
    return content
