"""The lock of a folder of checkpoints: one run at a time saves into it.

A POSIX record lock on the file `.lock`. The system releases it when the process ends, however it ends, and its child
processes do not share it. The file stays; it names the process that holds the lock, or held it last.
"""

import datetime
import errno
import fcntl
import os
import socket
import time
from pathlib import Path

from megazero.files import explain
from megazero.log import log

LOCK = ".lock"
RETRY_SECONDS = 0.5
_HELD = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class SaveLock:
    """Held from construction to `release`, or to the end of the process.

    A process that opens the lock file again and closes it loses the lock: nothing else may open it.
    """

    def __init__(self, root: Path, patience: float = 0.0) -> None:
        """Take the lock.

        Args:
            patience: seconds to wait for its holder, such as a frozen or lost node's process.

        Raises:
            ValueError: it names --save, and the process that still holds the lock; or the folder cannot be written.
        """
        root, self._until = Path(root), time.monotonic() + patience
        now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        text = f"process {os.getpid()} on {socket.gethostname()}, since {now}\n"
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._file = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._lock(root)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text.encode(), 0)
        except OSError as error:
            raise ValueError(f"--save {root}: {explain(error)}") from None

    def _lock(self, root: Path) -> None:
        try:
            while True:
                try:
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                except OSError as error:
                    if error.errno not in _HELD or time.monotonic() > self._until:
                        raise
                    time.sleep(RETRY_SECONDS)
        except OSError as error:
            if error.errno in _HELD:
                holder = os.pread(self._file, 500, 0).decode(errors="replace").strip() or "another process"
                os.close(self._file)
                raise ValueError(
                    f"--save {root} is in use by {holder}; wait for that run to end, end it, or name another folder"
                ) from None
            if error.errno not in _UNSUPPORTED:
                raise
            log.warning("--save %s: this file system has no locks (%s); make sure that one run uses it", root, error)

    def release(self) -> None:
        os.close(self._file)
