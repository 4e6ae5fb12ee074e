"""Checkpoint folders under a root: their names, which one to load, how one is published, which ones are kept.

Note [Whole or absent]
A reader never meets half a checkpoint. A save writes into `.iter_0000100.partial`; once every rank has its
files on the disk, rank 0 renames the folder to `iter_0000100`, and then replaces `latest`. Saving an
iteration again moves the old folder to `.iter_0000100.replaced` for the moment between two renames: a crash
right there leaves no `iter_0000100`, so `find` takes the folder set aside in its stead. Deleting, too,
begins with a rename.
"""

import logging
import os
import re
import shutil
from pathlib import Path

from megazero.checkpoint.manifest import missing_part, read_manifest, sync_folder, write_durably

LATEST = "latest"
PARTIAL = ".partial"
REPLACED = ".replaced"

_NAME = re.compile(r"iter_(\d{7,})")
_ASIDE = re.compile(r"\.(iter_\d{7,})\.replaced")

logger = logging.getLogger(__name__)


def folder_name(iteration: int) -> str:
    """`iter_0000100` for 100."""
    return f"iter_{iteration:07d}"


def partial_folder(root: Path, iteration: int) -> Path:
    """Where a save writes before it publishes."""
    return root / f".{folder_name(iteration)}{PARTIAL}"


def find(load: Path) -> Path | None:
    """The checkpoint that `--load` means: a folder `iter_NNNNNNN`, or the newest under a root.

    Under a root: the folder that `latest` names; if that is not whole, the newest that is. None if there is
    no checkpoint under the root, or no root. ValueError if a folder `iter_NNNNNNN` was asked for and is
    missing or not whole, and if a root has checkpoints of which none is whole: to start afresh there would
    lose them.
    """
    load = Path(load)
    if _NAME.fullmatch(load.name):
        fault = _fault(load)
        if fault:
            raise ValueError(f"--load {load} is not a whole checkpoint: {fault}; name another, or its parent folder")
        return load
    candidates = list(reversed(_checkpoints(load)))
    named = _read_latest(load)
    if named is not None:
        candidates.sort(key=lambda folder: folder.name != named)  # stable: the rest stays newest first
    faults = []
    for folder in candidates:
        fault = _fault(folder)
        if fault is None:
            return folder
        logger.warning("--load %s: passing over %s, which is not whole: %s", load, folder.name, fault)
        faults.append(f"{folder.name}: {fault}")
    if faults:
        raise ValueError(
            f"--load {load} has no whole checkpoint ({'; '.join(faults)}); "
            "restore one, or name another folder to start afresh"
        )
    if named is not None:
        raise ValueError(
            f"--load {load}: its file `latest` names {named}, which is gone; restore it, or delete the file"
        )
    if load.is_file():
        raise ValueError(f"--load {load} is a file; name a folder of checkpoints, or one of its iter_NNNNNNN")
    return None


def prune(root: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints (0 = keep all) up to the one that `latest` names.

    Those of larger numbers go too: they are of a run that was left when this one went back to an earlier
    checkpoint. For one process, between saves.
    """
    root = Path(root)
    if keep_last < 0:
        raise ValueError(f"--keep-last {keep_last} is negative; 0 keeps every checkpoint")
    if keep_last == 0:
        return
    named = _read_latest(root)
    every = _checkpoints(root)
    last = next((at for at, folder in enumerate(every) if folder.name == named), len(every) - 1)
    for folder in every[: max(0, last + 1 - keep_last)] + every[last + 1 :]:
        if folder.name != named:
            doomed = root / f".{folder.name.strip('.')}{PARTIAL}"
            folder.rename(doomed)
            shutil.rmtree(doomed)


def clear_leftovers(root: Path) -> None:
    """Delete what saves that crashed left behind. For one process, while no save into `root` is under way."""
    for folder in root.glob(f".iter_*{PARTIAL}"):
        shutil.rmtree(folder)
    for folder in root.glob(f".iter_*{REPLACED}"):
        aside = _ASIDE.fullmatch(folder.name)
        if aside and (root / aside[1]).exists():
            shutil.rmtree(folder)


def publish(root: Path, iteration: int) -> Path:
    """Make a partial folder, whole and on the disk, the checkpoint of its iteration and the latest one."""
    final = root / folder_name(iteration)
    aside = root / f".{final.name}{REPLACED}"
    if final.exists():
        final.rename(aside)
    partial_folder(root, iteration).rename(final)
    sync_folder(root)
    pointer = root / f".{LATEST}{PARTIAL}"
    write_durably(pointer, final.name + "\n")
    pointer.replace(root / LATEST)
    sync_folder(root)
    if aside.exists():
        shutil.rmtree(aside)
    return final


def _checkpoints(root: Path) -> list[Path]:
    """The folders under a root that should be whole checkpoints, oldest first; see Note [Whole or absent]."""
    found: dict[int, Path] = {}
    if root.is_dir():
        for entry in sorted(os.scandir(root), key=lambda entry: entry.name):  # '.iter...' sorts before 'iter...'
            aside = _ASIDE.fullmatch(entry.name)
            name = _NAME.fullmatch(aside[1] if aside else entry.name)
            if name and entry.is_dir():
                found[int(name[1])] = root / entry.name
    return [found[iteration] for iteration in sorted(found)]


def _read_latest(root: Path) -> str | None:
    try:
        return (root / LATEST).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return None


def _fault(folder: Path) -> str | None:
    """Why a folder is not a whole checkpoint, from names and lengths alone; checksums are for the load."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        return missing_part(folder, read_manifest(folder))
    except ValueError as error:
        return str(error)
