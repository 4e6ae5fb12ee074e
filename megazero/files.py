"""Regular files, read without a hang and replaced without a half-written moment.

A FIFO, a device or a folder in place of a file is refused at once: opening a FIFO waits for a writer, and
reading a device may never end.
"""

import errno
import json
import os
import shutil
import stat
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

# Bytes read or written at once: bounds memory.
COPY_BYTES = 8 << 20
# A description or a tokenizer's settings are far smaller; a larger file is not one.
MAX_JSON_BYTES = 64 << 20
# Descriptors that a `FilePool` keeps open: most systems allow a process 1024 in all.
POOLED_FILES = 128

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def _fastest_crc32() -> Callable[..., int]:
    """Return isal's CRC-32, at ten times the pace of zlib's (docs/log); else zlib's. megazero[data] brings isal."""
    try:
        from isal import isal_zlib
    except ModuleNotFoundError:
        return zlib.crc32
    return isal_zlib.crc32


crc32 = _fastest_crc32()


def open_regular(path: str | os.PathLike[str], follow: bool = True) -> int:
    """Open a regular file for reading; its descriptor. `follow`: a link to one, too; else it is an OSError of ELOOP.

    Raises:
        ValueError: `path` is a folder, a FIFO, a device or a socket.
        OSError: it cannot be opened.
    """
    # O_NONBLOCK: without it, opening a FIFO waits for a writer. It changes nothing for a regular file.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    handle = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = next((name for matches, name in _KINDS if matches(mode)), "something")
        raise ValueError(f"{os.fspath(path)} is {kind}, not a file")
    return handle


def identity(file: str | int) -> tuple[int, int]:
    """Size and time of the last write of a path or a descriptor: a file that is made again under the same name differs.

    Its inode is no part of it: a new file may get that of a deleted one, and some file systems number them anew.
    """
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def changed(path: str) -> OSError:
    """The error for a file of another identity than it had."""
    return OSError(errno.ESTALE, "another file took its name, or it was written to", path)


def read_regular(path: str | os.PathLike[str], limit: int | None = None, follow: bool = True) -> bytes:
    """The whole of a regular file, opened as `open_regular` does; ValueError if it is larger than `limit` bytes."""
    with os.fdopen(open_regular(path, follow), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise ValueError(f"{os.fspath(path)} is {size:,} bytes long, more than {limit:,}")
        return file.read()


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A JSON file that holds an object. ValueError naming the path for whatever else it is; OSError."""
    raw = read_regular(path, MAX_JSON_BYTES)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:  # RecursionError: nested thousands of levels deep
        reason = str(error).split("\n")[0] if isinstance(error, ValueError) else "nested too deeply"
        raise ValueError(f"{os.fspath(path)} is no JSON: {reason}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{os.fspath(path)} holds a JSON {type(found).__name__}, not an object")
    return found


def read_at(handle: int, count: int, at: int) -> bytes:
    """Up to `count` bytes from position `at`; fewer only where the file ends."""
    parts = []
    while count:
        part = os.pread(handle, min(count, 1 << 30), at)  # the system reads at most 2 GiB at once
        if not part:
            break
        parts.append(part)
        count, at = count - len(part), at + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class FilePool:
    """Regular files opened on demand, the least recently used closed: 10,000 corpora need few descriptors."""

    def __init__(self, limit: int = POOLED_FILES) -> None:
        self._limit = limit
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = Lock()  # a file must not be closed while another thread reads it

    def __reduce__(self) -> tuple[type["FilePool"], tuple[int]]:
        return FilePool, (self._limit,)  # another process opens its own

    def read(self, path: str, known: tuple[int, int], count: int, at: int) -> bytes:
        """Read like `read_at`. ValueError if `path` is not a regular file; OSError, also if its identity changed.

        known: its identity. A file that is still open is not compared: its content stays, whatever takes its name.
        """
        with self._lock:
            handle = self._open.pop(path, None)
            if handle is None:
                handle = open_regular(path)
                if identity(handle) != known:
                    os.close(handle)
                    raise changed(path)
            self._open[path] = handle
            if len(self._open) > self._limit:
                os.close(self._open.popitem(last=False)[1])
            return read_at(handle, count, at)

    def close(self) -> None:
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        for handle in self._open.values():
            os.close(handle)


class OutputFile:
    """A file written without a buffer: an error is that of the call that met it, never of a later `close`.

    Each OSError names the file. `at`: where writing goes on; what lies behind is cut off.
    """

    def __init__(self, path: str | os.PathLike[str], at: int = 0) -> None:
        self.path = os.fspath(path)
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            size = os.fstat(self._handle).st_size
            if size < at:
                raise ValueError(f"{self.path} is {size} bytes long, and {at} bytes of it are needed to go on")
            os.ftruncate(self._handle, at)
        except BaseException:
            os.close(self._handle)
            raise
        self.size = at

    def write(self, data: bytes | memoryview) -> None:
        """Append."""
        self.size += self._write_at(data, self.size)

    def overwrite(self, data: bytes, at: int) -> None:
        """Write over what is there from position `at`."""
        self._write_at(data, at)

    def _write_at(self, data: bytes | memoryview, at: int) -> int:
        view, done = memoryview(data).cast("B"), 0
        try:
            while done < len(view):  # a disk that fills up takes a part
                done += os.pwrite(self._handle, view[done : done + (1 << 30)], at + done)
        except OSError as error:
            raise named(error, self.path) from error
        return done

    def read(self, count: int, at: int) -> bytes:
        return read_at(self._handle, count, at)

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise named(error, self.path) from error

    def close(self) -> None:
        try:
            os.close(self._handle)
        except OSError as error:
            raise named(error, self.path) from error


def named(error: OSError, path: str | os.PathLike[str]) -> OSError:
    """The same error with the file that it is about."""
    return OSError(error.errno, error.strerror, os.fspath(path))


def explain(error: OSError) -> str:
    """One sentence for an OSError: the file, the reason, and the way out where there is one."""
    where = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
    what = error.strerror or str(error)
    ways = {
        errno.ENOSPC: "; free some space, or write elsewhere",
        errno.EDQUOT: "; free some space, or write elsewhere",
        errno.EROFS: "; write elsewhere",
        errno.EACCES: "; change its rights, or name another",
        errno.EMFILE: "; raise `ulimit -n`",
        errno.ESTALE: "; resume from the last checkpoint",
    }
    return f"{where}{what}{ways.get(error.errno or 0, '')}"


@contextmanager
def replacing(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[OutputFile]:
    """A file under a passing name, which becomes `path` when the block ends without an exception.

    An exception, that of a full disk too, leaves nothing behind. `durable`: wait until it is on the disk; not
    needed for what can be made again.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex[:12]}")
    file = OutputFile(part)
    try:
        try:
            yield file
            if durable:
                file.sync()
        finally:
            file.close()
        os.replace(part, target)
        if durable:
            sync_folder(target.parent)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder under a passing name, which becomes `path`, whole and on the disk, when the block ends.

    An exception leaves nothing behind. What a process that was killed left there is deleted by the next.

    Raises:
        ValueError: `path` is a file, or a folder that is not empty.
    """
    target = Path(os.path.abspath(path))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{os.fspath(path)} is there already; name another folder, or delete it")
    part = target.with_name(f".{target.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        for entry in sorted(part.rglob("*"), reverse=True):
            sync_folder(entry)
        sync_folder(part)
        os.replace(part, target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace `path` by a file of these bytes, durably; OSError leaves the old one and nothing else."""
    with replacing(path) as file:
        file.write(data)


def replace_file(path: str | os.PathLike[str], text: str) -> None:
    """Replace `path` by a file of this text, durably."""
    write_atomically(path, text.encode("utf-8", "surrogateescape"))


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make renames in a folder, or what was written to a file, last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def crc32_of(handle: int, start: int, stop: int) -> int:
    """CRC-32 of the bytes [start, stop) of a file, or of as many as there are."""
    check = 0
    while start < stop and (part := os.pread(handle, min(COPY_BYTES, stop - start), start)):
        check = crc32(part, check)
        start += len(part)
    return check
