"""Notes between a rank and the agent of its node (`elastic.node_agent`), which ends and starts ranks of --elastic.

Each note is a file in a folder of the node that MEGAZERO_AGENT names. So they need no store, which may be gone, and no
collective, which may hang.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

FOLDER = "MEGAZERO_AGENT"
LOST = "lost"  # from the agent: why the ranks must end at once
CHANGED = "changed"  # from the agent: why the ranks should stop after a step
BEGAN = "began"  # from a rank: the iteration after which this start trains
STOPPED = "stopped"  # from a rank: the name of the wish with which it ended


def make_folder() -> Path:
    """Make a folder for this process, the agent, locked until its end; delete those of agents that were killed."""
    temporary, prefix = Path(tempfile.gettempdir()), "megazero-agent-"
    for left in temporary.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # its agent lives, or it is another user's, or no folder
            _lock(left)
            shutil.rmtree(left, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix="megazero-new-"))
    _lock(new)  # before another agent finds it by its name
    return new.rename(new.with_name(new.name.replace("megazero-new-", prefix)))


def _lock(folder: Path) -> None:
    """Lock a folder of this user until the end of this process; OSError if another one has, or if it is none."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(file).st_uid != os.geteuid():
            raise PermissionError(f"{folder} is another user's")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise


def read_note(name: str) -> str:
    """Return a note; empty if there is none, or no agent."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return ""
    try:
        return (Path(folder) / name).read_text()
    except OSError:
        return ""


def leave(name: str, text: str) -> None:
    """Leave a note, if there is an agent."""
    if folder := os.environ.get(FOLDER):
        with contextlib.suppress(OSError):
            path = Path(folder) / name
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(text)
            part.replace(path)
