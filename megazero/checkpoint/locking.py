"""The lock of a folder of checkpoints: one run at a time saves into it.

A POSIX record lock on the file `.lock`. The system releases it when the process ends, however it ends, and its child
processes do not share it. The file stays; it names the process that holds the lock, or held it last.

Note [Later generations]
A run with --elastic continues without a node that is frozen, but a frozen rank 0 keeps its lock. So each start writes
its run and generation into the file OWNER, and a later generation of the same run takes the lock away: it replaces
OWNER, then the lock file, and deletes all partial files. The frozen process may run again. It makes a change visible
only by a rename from or into a partial file or folder, which it makes before it calls `check_owner`. So wherever it was
frozen, it either finds the new owner, or its rename fails because its partial file is gone.
"""

import contextlib
import datetime
import errno
import fcntl
import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec

from megazero.files import explain, make_folders, open_to_write, read_small, replacing
from megazero.log import log
from megazero.typed_files import decode
from megazero.world import Generation, this_generation

LOCK = ".lock"
OWNER = ".owner"
PARTIAL = ".partial"
RETRY_SECONDS = 0.5
_HELD = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Taken(ValueError):
    """The --save folder was moved or deleted while a run trained, and another run saves there."""


class SaveLock:
    """Held from construction to `release`, or to the end of the process.

    A process that opens the lock file again and closes it loses the lock: nothing else may open it.
    """

    def __init__(self, root: Path, patience: float = 0.0) -> None:
        """Take the lock, at once from an earlier generation of this run.

        Args:
            patience: seconds to wait for any other holder, such as a process of a lost machine.

        Raises:
            ValueError: it names --save, and the process that still holds the lock; or the folder cannot be written.
        """
        root, start, until = Path(root), this_generation(), time.monotonic() + patience
        now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        text = f"process {os.getpid()} on {socket.gethostname()}, since {now}\n"
        try:
            make_folders(root)
            owner = _owner(root, starts=True) if start is not None else None
            mine = start or Generation(text.strip(), 0)
            again = owner is not None and owner != mine and owner.run == mine.run
            if again:
                _claim(root, mine)
            self.root, self._mine = root, mine
            self._file = _take(root, until, replace=again)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text.encode(), 0)
            if not again:
                _claim(root, mine)
        except OSError as error:
            raise ValueError(f"--save {root}: {explain(error)}") from None

    def keep(self) -> None:
        """Take the lock again if the folder, or its lock file, was moved or deleted. Call it before each save.

        Raises:
            Taken: another run has begun there.
            ValueError: as `check_owner`.
        """
        check_owner(self.root)
        if self._is_held():
            return
        try:
            owner = _owner(self.root)
            if owner not in (None, self._mine) or (owner is None and any(self.root.glob("iter_*"))):
                raise ValueError(f"it is of {owner.run if owner is not None else 'an earlier version'}")
            again = SaveLock(self.root)
        except ValueError as error:
            raise Taken(f"--save {self.root} was moved or deleted, and another run saves there: {error}") from None
        self.release()
        self._file, self._mine = again._file, again._mine
        log.warning(
            "--save %s has lost the lock of this run, because the folder or its file %s was moved or deleted. It is "
            "made again, and this run saves there; earlier checkpoints are where they were moved",
            self.root,
            LOCK,
        )

    def _is_held(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self.root / LOCK))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # of a disk that does not respond; the save will report it
            return True

    def release(self) -> None:
        os.close(self._file)


def check_owner(root: Path) -> None:
    """Raise ValueError if a later start saves into `root`, because the node of this process was declared lost.

    See Note [Later generations]. Nothing is checked in a run without generations, or in a folder without OWNER.
    """
    start = this_generation()
    owner = _owner(root) if start is not None else None
    if owner is not None and owner != start:
        raise _lost(root, owner)


@contextlib.contextmanager
def owned(root: Path) -> Iterator[None]:
    """Raise the error of `check_owner` in place of an OSError of the block, such as that a partial file is gone."""
    try:
        yield
    except OSError:
        check_owner(root)
        raise


def _lost(root: Path, owner: Generation) -> ValueError:
    return ValueError(
        f"--save {root} is in use by generation {owner.number} of a run, which began since this node did not "
        "respond; this process saves and deletes nothing there"
    )


def _owner(root: Path, starts: bool = False) -> Generation | None:
    """Return the start that saves into `root`; None if none has. ValueError if the file is damaged.

    starts: this process begins: an empty file, or one of zeros, which a power cut leaves, names no run.
    """
    try:
        content = read_small(root / OWNER)
        if starts and not content.strip(b"\0"):
            return None
        return decode(content, Generation, root / OWNER)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ValueError(f"--save {root}: {error}; if no other run saves there, delete this file") from None


def _claim(root: Path, start: Generation) -> None:
    """Make `start` the owner of `root`. ValueError if a later generation of its run is."""
    with replacing(root / OWNER) as file:
        file.write(msgspec.json.encode(start))
        owner = _owner(root, starts=True)
        if owner is not None and owner.run == start.run and owner.number > start.number:
            raise _lost(root, owner)


def _take(root: Path, until: float, replace: bool) -> int:
    """Return the descriptor of the lock file, once it is locked; ValueError if it is not at the time `until`.

    replace: replace the file, whose lock an earlier generation may hold, by a locked one.
    """
    if replace:
        part = root / f"{LOCK}{PARTIAL}-{uuid.uuid4().hex[:12]}"
        file = open_to_write(part)
        _lock(root, file)
        check_owner(root)
        os.replace(part, root / LOCK)
        return file
    while True:
        file = open_to_write(root / LOCK)
        if _lock(root, file) and os.path.samestat(os.fstat(file), os.stat(root / LOCK)):  # else it was replaced
            return file
        holder = os.pread(file, 500, 0).decode(errors="replace").strip() or "another process"
        os.close(file)
        if time.monotonic() > until:
            raise ValueError(
                f"--save {root} is in use by {holder}; wait for that run to end, end it, or name another folder"
            )
        time.sleep(RETRY_SECONDS)


def _lock(root: Path, file: int) -> bool:
    """Lock an open file; False if another process has."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno not in _UNSUPPORTED:
            raise
        log.warning("--save %s: this file system has no locks (%s); make sure that one run uses it", root, error)
    return True
