"""The work folder of an unfinished corpus, from which a run resumes.

`P.partial/` holds the unfinished files, `journal.json` and a lock. A commit flushes the files to the disk, then
replaces the journal, which records their sizes. A resumed run truncates the files to these sizes. So a kill at any
moment loses at most the work since the last commit, and the result is byte for byte the same.
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
    """`P.partial`, locked until this process ends.

    job: all settings on which the result depends; a folder with another job is refused, not overwritten.
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
                    f"--output-prefix {prefix}: another run works on it, in {self.path}; wait for it, or give another "
                    f"prefix"
                ) from error
            # A file system without locks: continue without one.
        try:
            self._read(prefix)
        except BaseException:
            try:
                with suppress(OSError):  # it is not empty
                    self.path.rmdir()
            finally:
                self.close()
            raise

    def _read(self, prefix: str) -> None:
        if not (self.path / JOURNAL).exists():
            if not all(entry.name.startswith(f".{JOURNAL}.partial-") for entry in self.path.iterdir()):
                raise ValueError(
                    f"--output-prefix {prefix}: {self.path} has files, and is not the work of an unfinished run; move "
                    "it, or give another prefix"
                )
            self.clear()
            self._write(None)
            return
        way_out = f"give the flags of that run to resume it, or delete {self.path} to start again"
        try:
            found = read_json_object(self.path / JOURNAL)
            job, state = found["job"], found["state"]
        except (KeyError, ValueError) as error:
            raise ValueError(f"--output-prefix {prefix}: {self.path / JOURNAL} is damaged; {way_out}") from error
        if state is None:  # killed before its first commit
            self.clear()
            self._write(None)
            return
        known = job if isinstance(job, dict) else {}
        differs = [key for key in {**self.job, **known} if known.get(key) != self.job.get(key)]
        if differs:
            raise ValueError(
                f"--output-prefix {prefix}: {self.path} holds the unfinished work of another run, with other "
                f"{', '.join(differs)}; {way_out}"
            )
        self.state = state

    def commit(self, state: Mapping[str, Any]) -> None:
        """Record `state`; all files must be on the disk up to it."""
        self._write(state)
        self.state = dict(state)

    def _write(self, state: Mapping[str, Any] | None) -> None:
        write_atomically(self.path / JOURNAL, json.dumps({"job": self.job, "state": state}).encode())

    def clear(self) -> None:
        """Delete the contents of the folder, the journal last."""
        self.state = None
        for entry in sorted(self.path.iterdir(), key=lambda entry: entry.name == JOURNAL):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def remove(self) -> None:
        """Delete the folder, because the work is done or nothing is committed."""
        with suppress(OSError):
            self.clear()
            self.path.rmdir()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)


class Skipped:
    """The bad lines of a run, in a file that is resumed like the tokens."""

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
