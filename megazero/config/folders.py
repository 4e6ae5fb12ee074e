"""Check that a run can write where its flags say: before hours of work, not after them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from megazero.files import explain

# Characters that Weights & Biases refuses in the name of a project, and how long a name may be.
WANDB_REFUSES, WANDB_LENGTH = "/\\#?%:", 128
LONGEST_NAME = 255  # bytes of a file's or folder's name, on every file system in use


def check_writable(flag: str, name: str) -> None:
    """Try a folder that exists, or the nearest one in which it will be made, with a file that leaves no trace.

    Raises:
        ValueError: a file of that name is in the way, nothing can be written there, or a name is too long.
    """
    path = Path(name)
    try:
        long = next((part for part in path.parts if len(os.fsencode(part)) > LONGEST_NAME), None)
        if long is not None:
            raise ValueError(
                f"--{flag} {name[:40]}...: {long[:20]}... is longer than the {LONGEST_NAME} bytes of a name"
            )
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not there.is_dir():
            raise ValueError(f"--{flag} {path}: {there} is a file, not a folder; name another")
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        reason = explain(OSError(error.errno, error.strerror))
        raise ValueError(
            f"--{flag} {name if len(name) < 200 else name[:40] + '...'}: cannot write there: {reason}"
        ) from None


def check_project(name: str) -> None:
    """ValueError unless Weights & Biases takes `name` for a project."""
    if any(character in WANDB_REFUSES for character in name) or len(name) > WANDB_LENGTH:
        raise ValueError(
            f"--wandb-project {name[:200]}: a project's name has at most {WANDB_LENGTH} characters and none of "
            f"{' '.join(WANDB_REFUSES)}; name another"
        )
