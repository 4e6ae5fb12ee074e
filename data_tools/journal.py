"""The work folder of an unfinished corpus: what is committed, and from where to go on.

`P.partial/` holds the files in the making, `journal.json` and a lock. The journal is replaced at once, after
the files are on the disk up to what it says; what was written later is cut off by who goes on. So a kill at
any moment loses at most what came after the last commit, and the result is byte for byte the same.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megazero.files import OutputFile, read_json_object, write_atomically

JOURNAL = "journal.json"


class WorkFolder:
    """`P.partial`, locked by this process for as long as it lives.

    `job` is all that the result depends on; a folder of another job is refused, not overwritten.
    """

    def __init__(self, prefix: str, job: Mapping[str, Any]) -> None:
        self.path = Path(f"{prefix}.partial")
        self.job = json.loads(json.dumps(job))
        self.state: dict[str, Any] | None = None  # of the last commit
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(self._lock)
                raise ValueError(
                    f"--output-prefix {prefix}: another run is at work on it, in {self.path}; wait for it, or give "
                    f"another prefix"
                ) from error
            # A file system without locks: go on without.
        try:
            self._read(prefix)
        except BaseException:
            self.close()
            raise

    def _read(self, prefix: str) -> None:
        if not (self.path / JOURNAL).exists():
            self.clear()
            return
        way_out = f"give the flags of that run to go on with it, or delete {self.path} to begin anew"
        try:
            found = read_json_object(self.path / JOURNAL)
            job, state = found["job"], found["state"]
        except (KeyError, ValueError) as error:
            raise ValueError(f"--output-prefix {prefix}: {self.path / JOURNAL} is damaged; {way_out}") from error
        differs = [key for key in self.job if not isinstance(job, dict) or job.get(key) != self.job[key]]
        if differs:
            raise ValueError(
                f"--output-prefix {prefix}: {self.path} holds the unfinished work of another run, with other "
                f"{', '.join(differs)}; {way_out}"
            )
        self.state = state

    def commit(self, state: Mapping[str, Any]) -> None:
        """Record that all files are on the disk up to `state`."""
        write_atomically(self.path / JOURNAL, json.dumps({"job": self.job, "state": state}).encode())
        self.state = dict(state)

    def clear(self) -> None:
        """Delete what is in the folder."""
        self.state = None
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def remove(self) -> None:
        """Delete the folder: the work is done, or nothing of it is worth keeping. The journal goes last."""
        with suppress(OSError):
            for entry in self.path.iterdir():
                if entry.name != JOURNAL:
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            (self.path / JOURNAL).unlink(missing_ok=True)
            self.path.rmdir()

    def close(self) -> None:
        """Give the lock back."""
        os.close(self._lock)


class Skipped:
    """The bad lines of a run, one per line of a file: resumable, like the tokens."""

    def __init__(self, path: Path, state: Mapping[str, int] | None) -> None:
        self.count = state["count"] if state else 0
        self._file = OutputFile(path, state["size"] if state else 0)

    def add(self, bad: list[Any]) -> None:
        self.count += len(bad)
        if bad:
            self._file.write("".join(f"{each}\n" for each in bad).encode("utf-8", "backslashreplace"))

    def commit(self) -> dict[str, int]:
        self._file.sync()
        return {"count": self.count, "size": self._file.size}

    def close(self) -> None:
        self._file.close()
