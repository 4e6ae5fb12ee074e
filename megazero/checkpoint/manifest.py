"""The manifest: which chunk of which tensor lies in which file, with checksums. JSON, so that nothing runs
on load.

Note [On disk]
A checkpoint is a folder `iter_0000100`:
    rank_00000.safetensors ...   the chunks that a rank wrote, each under the key `name@offset` (`w@0,128`)
    state.json                   all that is not a tensor
    tokenizer/                   the run's tokenizer, where it has one: attached files, which rank 0 writes
    manifest.json                this module; written last, and by rank 0 alone
The manifest lists *tilings*, which many tensors share (those of all layers, and their moments): regions that cover
a shape, and the file of each. A tensor has a tiling's number, and the checksum of each of its chunks. So 10^6 chunks
are some 15 MB.
Its checksums are CRC-32: of each chunk's bytes, of state.json, of each attached file, and of the manifest itself, so
that one flipped bit anywhere is found. They guard against accidents, not against forgery: so whatever is read is
parsed by a schema, names files of its own folder only, and is read only where it is a regular file and no link. A link
to a whole folder is followed.
"""

import errno
import json
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazero.files import OutputFile, crc32, read_regular, sync_folder
from megazero.plan.layout.regions import Region

MANIFEST = "manifest.json"
STATE = "state.json"
TOKENIZER = "tokenizer"
FORMAT = "megazero checkpoint 2"
# 12 bytes per chunk of at most 64 MiB: far above what any checkpoint needs, far below what fills a host's memory.
MAX_MANIFEST_BYTES = 2 << 30
MAX_STATE_BYTES = 64 << 20

MAX_ATTACHED_BYTES = 1 << 30  # of a file: far more than any tokenizer's

LINKED = "it is a link, and a checkpoint has files of its own only: copy the folder with `cp -rL`"
RESTORE = "restore the file, or load an earlier checkpoint"
_FILE = re.compile(r"rank_[0-9]{5,9}\.safetensors")
_ATTACHED = re.compile(r"tokenizer/[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")

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


@dataclass(frozen=True)
class Chunk:
    """A region of a tensor, the file that holds it, and the CRC-32 of its bytes."""

    region: Region
    file: str
    crc32: int


@dataclass(frozen=True)
class Tiling:
    """Regions that cover a shape, and the file that holds each: shared by all tensors that are alike in it."""

    regions: tuple[Region, ...]
    files: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint."""

    dtype: str  # a key of SAFETENSORS_CODES
    shape: tuple[int, ...]
    tiling: Tiling
    crc32: tuple[int, ...]  # of each region of the tiling

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> "Entry":
        """An entry with a tiling of its own."""
        tiling = Tiling(tuple(c.region for c in chunks), tuple(c.file for c in chunks))
        return cls(dtype, shape, tiling, tuple(c.crc32 for c in chunks))

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(map(Chunk, self.tiling.regions, self.tiling.files, self.crc32))


class Attached(NamedTuple):
    """Length and CRC-32 of an attached file."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint."""

    files: dict[str, int]  # name -> bytes, the safetensors files
    state_crc32: int
    tensors: dict[str, Entry]
    attached: dict[str, Attached] = field(default_factory=dict)  # by path within the folder


def dtype_name(dtype: torch.dtype) -> str:
    """The key of SAFETENSORS_CODES; ValueError for a dtype that checkpoints do not hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in SAFETENSORS_CODES:
        raise ValueError(f"a checkpoint cannot hold tensors of {dtype}; it holds {', '.join(SAFETENSORS_CODES)}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """The reverse of `dtype_name`."""
    return getattr(torch, name)


def key(name: str, offset: Sequence[int]) -> str:
    """The name of a chunk within a safetensors file."""
    return f"{name}@{','.join(map(str, offset))}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `folder/manifest.json`, durably."""
    write_durably(folder / MANIFEST, manifest_text(manifest).encode())


def manifest_text(manifest: Manifest) -> str:
    """Return the text of a manifest, its checksum included."""
    numbers: dict[Tiling, int] = {}
    by_identity: dict[int, int] = {}  # tilings are shared as objects: their hashes are long to compute
    tensors: dict[str, Any] = {}
    for name, entry in manifest.tensors.items():
        if id(entry.tiling) not in by_identity:
            by_identity[id(entry.tiling)] = numbers.setdefault(entry.tiling, len(numbers))
        number = by_identity[id(entry.tiling)]
        tensors[name] = {"dtype": entry.dtype, "shape": entry.shape, "tiling": number, "crc32": entry.crc32}
    content = {
        "format": FORMAT,
        "files": manifest.files,
        "state_crc32": manifest.state_crc32,
        "attached": manifest.attached,
        "tilings": [
            {
                "offset": [r.offset for r in tiling.regions],
                "size": [r.size for r in tiling.regions],
                "file": tiling.files,
            }
            for tiling in numbers
        ],
        "tensors": tensors,
    }
    text = _compact(content)
    return f'{text[:-1]},"crc32":{crc32(text.encode())}}}'


def attach(folder: Path, files: Mapping[str, bytes]) -> dict[str, Attached]:
    """Write files by their path within a checkpoint folder, durably; returns what the manifest says of them."""
    assert all(map(_ATTACHED.fullmatch, files)), list(files)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_durably(folder / name, content)
    for parent in {(folder / name).parent for name in files}:
        sync_folder(parent)
    return {name: Attached(len(content), crc32(content)) for name, content in files.items()}


def write_durably(path: Path, content: bytes) -> None:
    """Write a file in a folder that no process reads yet, and wait until it is on the disk."""
    file = OutputFile(path)
    try:
        file.write(content)
        file.sync()
    finally:
        file.close()


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
    """Check and parse the bytes of a manifest, which `folder` holds; raises as `read_manifest`."""
    content = _parse_object(folder, MANIFEST, raw)
    if content.pop("crc32", None) != _digest(content):
        raise damage(folder, MANIFEST, "its checksum does not fit its content")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"--load {folder} has the format {str(content.get('format'))[:80]!r}; this version reads {FORMAT!r}: "
            "load it with the version that wrote it"
        )
    try:
        return _parse(content)
    except Malformed as error:
        raise damage(folder, MANIFEST, f"it is not a manifest: {error}") from None


def read_state(folder: Path) -> dict[str, Any]:
    """The `state` that the checkpoint was saved with, its checksum and those of attached files checked.

    Raises:
        Damaged: the folder is not whole or is damaged.
    """
    manifest = read_manifest(folder)
    if manifest.attached and (folder / TOKENIZER).is_symlink():
        raise damage(folder, TOKENIZER, LINKED)
    for name, attached in manifest.attached.items():
        content = _read(folder, name, MAX_ATTACHED_BYTES)
        if Attached(len(content), crc32(content)) != attached:
            raise damage(folder, name, f"its length or checksum is not the one in {MANIFEST}")
    raw = _read(folder, STATE, MAX_STATE_BYTES)
    if crc32(raw) != manifest.state_crc32:
        raise damage(folder, STATE, f"its checksum is not the one in {MANIFEST}")
    return _parse_object(folder, STATE, raw)


def unchecked_state(folder: Path) -> dict[str, Any]:
    """`state.json` without a look at its checksum, to order and to prune checkpoints; {} if it cannot be read."""
    try:
        return _parse_object(folder, STATE, _read(folder, STATE, MAX_STATE_BYTES))
    except Damaged:
        return {}


def missing_part(folder: Path, manifest: Manifest) -> str | None:
    """Name a file that is absent, not regular, or of another length than the manifest says; None if all are whole."""
    attached = {name: each.num_bytes for name, each in manifest.attached.items()}
    if attached and (folder / TOKENIZER).is_symlink():
        return f"{TOKENIZER}: {LINKED}"
    for file, size in {**manifest.files, **attached, STATE: None}.items():
        try:
            found = (folder / file).lstat()
        except OSError as error:
            return f"{file} is missing" if isinstance(error, FileNotFoundError) else f"{file}: {error.strerror}"
        if not stat.S_ISREG(found.st_mode):
            return f"{file}: {LINKED}" if stat.S_ISLNK(found.st_mode) else f"{file} is no regular file"
        if size is not None and found.st_size != size:
            return f"{file} has {found.st_size} bytes instead of {size}"
    return None


def refusal(error: OSError) -> str:
    """Return the reason why a file of a checkpoint, which must be no link, cannot be opened."""
    return LINKED if error.errno == errno.ELOOP else error.strerror or str(error)


class Damaged(ValueError):
    """A checkpoint is not whole, or its content is not what was written. An older one may be."""


def damage(folder: Path, name: str, fault: str) -> Damaged:
    """The error for a file of the checkpoint `folder` whose content is not what was written."""
    return Damaged(f"--load {folder}: {name} is damaged: {fault}; {RESTORE}")


def _read(folder: Path, name: str, limit: int) -> bytes:
    try:
        return read_regular(folder / name, limit, follow=False)
    except FileNotFoundError:
        raise Damaged(f"--load {folder} is not a whole checkpoint: it has no {name}") from None
    except OSError as error:
        raise damage(folder, name, refusal(error)) from None
    except ValueError as error:
        raise damage(folder, name, str(error)) from None


def _parse_object(folder: Path, name: str, raw: bytes) -> dict[str, Any]:
    """The JSON object that a file holds; Damaged for anything else."""
    try:
        content = json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError:
        raise damage(folder, name, "it is nested too deeply") from None
    except ValueError as error:
        raise damage(folder, name, f"it is no JSON ({str(error)[:200]})") from None
    if not isinstance(content, dict):
        raise damage(folder, name, f"it holds a JSON {type(content).__name__}, not an object")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _digest(content: dict[str, Any]) -> int:
    """CRC-32 of the content, whatever the spacing of the text that it was read from."""
    return crc32(_compact(content).encode())


def _compact(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"))


class Malformed(ValueError):
    """Well-formed JSON that is not a manifest; the message says where."""


def _parse(content: dict[str, Any]) -> Manifest:
    """The manifest in a JSON object whose checksum and format are right; anyone may have written it."""
    attached = {}
    for name, each in _object(content.get("attached", {}), "'attached'").items():
        if not _ATTACHED.fullmatch(name):
            raise Malformed(f"it names a file {name[:80]!r}, where files of the folder tokenizer are expected")
        numbers = _numbers(each, f"the length and checksum of {name}")
        if len(numbers) != 2:
            raise Malformed(f"it has {len(numbers)} numbers of {name} instead of a length and a checksum")
        attached[name] = Attached(*numbers)
    files = _object(content.get("files"), "'files'")
    for name, size in files.items():
        # No other names than `write_data` gives: nothing outside the folder can be named.
        if not _FILE.fullmatch(name):
            raise Malformed(f"it names a file {name[:80]!r}, where rank_NNNNN.safetensors are expected")
        _number(size, f"the length of {name}")
    tilings = content.get("tilings")
    if not isinstance(tilings, list):
        raise Malformed("'tilings' is no list")
    shared: dict[tuple[Region, ...], tuple[Region, ...]] = {}  # so that equal ones are one object
    parsed = []
    for at, each in enumerate(tilings):
        tiling = _parse_tiling(f"tiling {at}", _object(each, f"tiling {at}"), files)
        parsed.append(replace(tiling, regions=shared.setdefault(tiling.regions, tiling.regions)))
    tensors = {
        name: _parse_entry(repr(name[:200]), _object(entry, f"tensor {name[:200]!r}"), parsed)
        for name, entry in _object(content.get("tensors"), "'tensors'").items()
    }
    return Manifest(files, _number(content.get("state_crc32"), "'state_crc32'"), tensors, attached)


def _parse_tiling(name: str, tiling: dict[str, Any], files: dict[str, int]) -> Tiling:
    offsets, sizes, names = tiling.get("offset"), tiling.get("size"), tiling.get("file")
    if not (isinstance(offsets, list) and isinstance(sizes, list) and isinstance(names, list)):
        raise Malformed(f"the offsets, sizes and files of {name} are no lists")
    if not len(offsets) == len(sizes) == len(names):
        raise Malformed(f"the offsets, sizes and files of {name} are not equally many")
    regions = []
    for offset, size, file in zip(offsets, sizes, names, strict=True):
        begin, lengths = _numbers(offset, f"an offset of {name}"), _numbers(size, f"a size of {name}")
        if len(begin) != len(lengths):
            raise Malformed(f"an offset and a size of {name} differ in their number of dims")
        if not isinstance(file, str) or file not in files:
            raise Malformed(f"a chunk of {name} lies in {str(file)[:80]!r}, which is not among 'files'")
        regions.append(Region(begin, lengths))
    return Tiling(tuple(regions), tuple(names))


def _parse_entry(name: str, entry: dict[str, Any], tilings: Sequence[Tiling]) -> Entry:
    dtype, number, checksums = entry.get("dtype"), entry.get("tiling"), entry.get("crc32")
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_CODES:
        raise Malformed(f"the dtype of tensor {name} is {str(dtype)[:40]!r}, not one of {', '.join(SAFETENSORS_CODES)}")
    shape = _numbers(entry.get("shape"), f"the shape of tensor {name}")
    if 0 in shape or len(shape) > 16:
        raise Malformed(f"the shape of tensor {name} has a zero, or more than 16 dims")
    if _number(number, f"the tiling of tensor {name}") >= len(tilings):
        raise Malformed(f"tensor {name} has tiling {number}, and there are {len(tilings)}")
    tiling = tilings[number]
    if any(len(region.offset) != len(shape) for region in tiling.regions):
        raise Malformed(f"a chunk of tensor {name} has another number of dims than the tensor")
    if not isinstance(checksums, list) or len(checksums) != len(tiling.regions):
        raise Malformed(f"tensor {name} has not one checksum per chunk")
    if not all(type(crc) is int and 0 <= crc < 2**32 for crc in checksums):
        raise Malformed(f"a checksum of tensor {name} is no whole number from 0 to 2^32 - 1")
    return Entry(dtype, shape, tiling, tuple(checksums))


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"{what} is no object")
    return value


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise Malformed(f"{what} is no whole number from 0 to 2^63 - 1")
    return value


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise Malformed(f"{what} is no list")
    return tuple(_number(each, what) for each in value)
