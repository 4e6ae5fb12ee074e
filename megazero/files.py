"""Files that are read whole, written with errors that name them, and replaced without a half-written moment."""

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import tomllib
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Bytes that one system call reads or writes; the system takes at most 2 GiB.
CALL_BYTES = 1 << 30
MAX_SMALL_BYTES = 64 << 20
CHECKPOINT_NAME = re.compile(r"iter_(\d{7,})")  # of the folder of one checkpoint
UNIQUE = r"-[0-9a-f]{12}"  # end of a temporary name
NO_FILE = "it is a folder, a FIFO, a device, or a link that is not followed; name another file, or move it"
# Characters of a library's message that ours quote: some quote a whole file.
MAX_REASON = 500


def _fastest_crc32() -> Callable[..., int]:
    """Return isal's CRC-32, ten times as fast as zlib's (docs/log), else zlib's. megazero[data] installs isal."""
    try:
        from isal import isal_zlib
    except ModuleNotFoundError:
        return zlib.crc32
    return isal_zlib.crc32


crc32 = _fastest_crc32()


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises:
        ValueError: `path` is a folder, a FIFO or a device.
        OSError: it cannot be opened.
    """
    # O_NONBLOCK: without it, opening a FIFO waits for a writer. It changes nothing for a regular file.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{os.fspath(path)} is a folder, a FIFO or a device, not a file")
    return handle


def read_regular(path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """Read a regular file; ValueError if it is larger than `limit` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise ValueError(f"{os.fspath(path)} is {size:,} bytes long, more than {limit:,}")
        return file.read()


def read_small(path: str | os.PathLike[str]) -> bytes:
    """Read a file of settings or a description: a regular one of at most MAX_SMALL_BYTES; else ValueError."""
    return read_regular(path, MAX_SMALL_BYTES)


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a small JSON file that holds an object. OSError; ValueError naming the path for anything else.

    Not by msgspec, which refuses lone surrogates: a file name that is not UTF-8 is stored with them.
    """
    content = read_small(path)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:  # RecursionError: nested thousands of levels deep
        raise ValueError(f"{os.fspath(path)} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{os.fspath(path)} holds a JSON {type(found).__name__}, not an object")
    return found


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a small TOML file. OSError; ValueError naming the path for anything else."""
    content = read_small(path)
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # RecursionError: nested hundreds of levels deep
        raise ValueError(f"{os.fspath(path)} is not a TOML file: {error}") from None


def read_at(handle: int, count: int, at: int) -> bytes:
    """Read `count` bytes from position `at`; fewer only if the file ends before."""
    parts = []
    while count and (part := os.pread(handle, min(count, CALL_BYTES), at)):
        parts.append(part)
        count, at = count - len(part), at + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def open_to_write(path: str | os.PathLike[str]) -> int:
    """Open or create a regular file for reading and writing, and return its descriptor.

    Others may write to the folder: no link is followed, and a FIFO or a device is not waited for.

    Raises:
        OSError: it is no regular file, or cannot be opened.
    """
    refuse_special(path)  # opening a device may change it
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EEXIST, NO_FILE, os.fspath(path))
    return handle


def refuse_special(path: str | os.PathLike[str]) -> None:
    """Raise OSError for a link, a folder, a FIFO or a device in the place of a file."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EEXIST, NO_FILE, os.fspath(path))


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Refuse an output that is no regular file, such as /dev/stdout. A link to a regular file may be replaced.

    Raises:
        OSError: it exists, and is no regular file.
        ValueError: it is in a checkpoint.
    """
    refuse_in_checkpoint(path)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found, linked = os.lstat(path), ""
        if stat.S_ISLNK(found.st_mode):
            linked = os.readlink(path)
            with contextlib.suppress(OSError):  # its target is missing
                found = os.stat(path)
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)) or linked.startswith("/proc/"):
            raise OSError(errno.EEXIST, NO_FILE, os.fspath(path))


def refuse_in_checkpoint(path: str | os.PathLike[str]) -> None:
    """Raise ValueError for an output in a checkpoint, or by the name of one, because it would be deleted with it."""
    if not CHECKPOINT_NAME.search(absolute := os.path.realpath(path)):
        return
    for folder in (Path(absolute), *Path(absolute).parents):
        if CHECKPOINT_NAME.fullmatch(folder.name) and (
            (folder / "manifest.json").exists() or os.path.lexists(folder.parent / "latest")
        ):
            raise ValueError(
                f"{os.fspath(path)} is in the checkpoint {folder}, and would be deleted with it; name a place outside "
                f"{folder.parent}"
            )


class OutputFile:
    """A file written without a buffer: an error is raised by the call that meets it, not by a later `close`.

    Each OSError names the file.
    """

    def __init__(self, path: str | os.PathLike[str], at: int | None = 0) -> None:
        """Open or create the file, as `open_to_write`.

        at: byte offset at which writing resumes; the file is truncated there. None: its end.
        """
        self.path = os.fspath(path)
        self._handle = open_to_write(self.path)
        size = os.fstat(self._handle).st_size
        self.size = at = size if at is None else at
        if size < at:
            os.close(self._handle)
            raise ValueError(f"{self.path} is {size} bytes long, and {at} bytes of it are needed to resume")
        with self._named_errors():
            os.ftruncate(self._handle, at)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from error

    @property
    def is_in_place(self) -> bool:
        """The path still names this file: it was neither moved, nor deleted, nor replaced."""
        try:
            return os.path.samestat(os.fstat(self._handle), os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def write(self, data: bytes | memoryview) -> None:
        """Append."""
        self.size += self.overwrite(data, self.size)

    def overwrite(self, data: bytes | memoryview, at: int) -> int:
        """Write at position `at`; returns the number of bytes."""
        view, done = memoryview(data).cast("B"), 0
        with self._named_errors():
            while done < len(view):  # a disk that fills up takes a part
                done += os.pwrite(self._handle, view[done : done + CALL_BYTES], at + done)
        return done

    def read(self, count: int, at: int) -> bytes:
        return read_at(self._handle, count, at)

    def sync(self) -> None:
        """Flush to the disk."""
        with self._named_errors():
            os.fsync(self._handle)

    def close(self) -> None:
        with self._named_errors():
            os.close(self._handle)


def explain(error: OSError) -> str:
    """One sentence for an OSError: the file, the reason, and the way out if there is one."""
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if name is not None]
    where = f"{' to '.join(names)}: " if names else ""
    ways = {
        errno.ENOSPC: "; free some space, or write elsewhere",
        errno.EDQUOT: "; free some space, or write elsewhere",
        errno.EROFS: "; write elsewhere",
        errno.EACCES: "; change its rights, or name another",
        errno.EMFILE: "; raise `ulimit -n`",
        errno.ESTALE: "; resume from the last checkpoint",
    }
    return f"{where}{error.strerror or error}{ways.get(error.errno or 0, '')}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception of a library, cut off if it is long; its kind if there is no text."""
    line = str(error).strip().split("\n")[0]
    return f"{line[:MAX_REASON]}..." if len(line) > MAX_REASON else line or type(error).__name__


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[OutputFile]:
    """Write a file under a temporary name; it becomes `path` if the block ends without an exception.

    An exception leaves nothing behind.

    durable: flush to the disk; not needed for a file that can be made again.

    Raises:
        OSError, ValueError: as `check_replaceable`; or it cannot be written.
    """
    target = Path(path)
    check_replaceable(target)
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


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a folder under a temporary name; it becomes `path`, flushed to the disk, if the block ends.

    An exception leaves nothing behind. The next call deletes the remains of a killed process.

    Raises:
        ValueError: `path` is a file, or a folder that is not empty; or it is in a checkpoint.
    """
    target = Path(os.path.abspath(path))
    refuse_in_checkpoint(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{os.fspath(path)} exists already; name another folder, or delete it")
    prefix = f".{target.name}.partial"
    if target.parent.is_dir():
        for left in target.parent.iterdir():
            if re.fullmatch(re.escape(prefix) + UNIQUE, left.name):
                shutil.rmtree(left, ignore_errors=True)
    part = target.with_name(f"{prefix}-{uuid.uuid4().hex[:12]}")
    make_folders(part)
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
    """Replace `path` by a file of these bytes, flushed to the disk; an OSError leaves the old file as it was."""
    with replacing(path) as file:
        file.write(data)


def replace_file(path: str | os.PathLike[str], text: str) -> None:
    """Replace `path` by a file of this text, flushed to the disk."""
    write_atomically(path, text.encode("utf-8", "surrogateescape"))


def make_folders(path: str | os.PathLike[str]) -> None:
    """Make a folder and those above it that are missing, and flush their names to the disk."""
    missing = [folder for folder in (Path(path), *Path(path).absolute().parents) if not folder.exists()]
    Path(path).mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with contextlib.suppress(PermissionError):  # a folder that this user cannot list
            sync_folder(folder.absolute().parent)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Flush a folder's names, or a file's content, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
