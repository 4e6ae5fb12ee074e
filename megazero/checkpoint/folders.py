"""Checkpoint folders under a root: their names, which one to load, how one is committed, which ones are kept.

Note [Whole or absent]
A reader never meets half a checkpoint. A save writes into `.iter_0000100.partial`; once every rank has its
files on the disk, rank 0 renames the folder to `iter_0000100`, and then replaces `latest`. Saving an
iteration again moves the old folder to `.iter_0000100.replaced` for the moment between two renames: a crash
right there leaves no `iter_0000100`, so `find` takes the folder set aside instead. Deleting, too,
begins with a rename.

Note [Which one]
A run that goes back to iteration 100 and saves 150 has abandoned its 200 and 300, which stay on the disk. Every save
has a number in its state, larger than those of all folders under the root at that time. To go on from a root:
1. Take the folder that `latest` names, if it is whole.
2. If it is not, or is gone, take the newest whole save of a smaller iteration, and so on: a later iteration is ahead of
   what the run had reached, hence abandoned.
3. If `latest` itself is missing or damaged, begin at the newest save, whatever its iteration.
In both cases a folder is passed over if its iteration is not smaller than that of a newer save: it was abandoned then.
Whatever is passed over is said.
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from megazero.checkpoint.manifest import RESTORE, Damaged, missing_part, read_manifest, unchecked_state
from megazero.files import read_regular, sync_folder, write_atomically

LATEST = "latest"
PARTIAL = ".partial"
REPLACED = ".replaced"
MAX_LATEST_BYTES = 256

_NAME = re.compile(r"iter_(\d{7,})")
_ASIDE = re.compile(r"\.(iter_\d{7,})\.replaced")

logger = logging.getLogger(__name__)


def folder_name(iteration: int) -> str:
    """`iter_0000100` for 100."""
    return f"iter_{iteration:07d}"


def partial_folder(root: Path, iteration: int) -> Path:
    """Return the folder that a save writes to before it is renamed to its final name."""
    return root / f".{folder_name(iteration)}{PARTIAL}"


def find(load: Path, passing_over: Mapping[str, str] | None = None, exact: bool = False) -> Path | None:
    """The checkpoint that `--load` means: a folder `iter_NNNNNNN`, or the one to go on from under a root.

    See Note [Which one].

    Args:
        passing_over: folders under the root that were found damaged since -> what is wrong with them.
        exact: refuse where the first choice is not whole, instead of passing it over.

    Returns:
        None if there is no checkpoint under the root, or no root.

    Raises:
        Damaged: a folder `iter_NNNNNNN` was asked for and is missing or not whole; or a root has checkpoints and none
            to go on from: to start fresh there would lose them.
    """
    load, known = Path(load), passing_over or {}
    if _NAME.fullmatch(load.name):
        fault = known.get(load.name) or _fault(load)
        if fault:
            raise Damaged(f"--load {load} is not a whole checkpoint: {fault}; name another, or its parent folder")
        return load
    while True:
        latest = _pointer(load)
        try:
            folder, faults = _find_under(load, known, exact)
            refusal = None
        except Damaged as error:
            folder, faults, refusal = None, [], error
        # Another run may save and prune here: a checkpoint that was found is gone then, and `latest` names a newer one.
        if (faults or refusal) and _pointer(load) != latest:
            continue
        if refusal:
            raise refusal
        if faults and folder:
            logger.warning("--load %s: %s. GOING ON FROM %s", load, "; ".join(faults), folder.name)
        return folder


def _pointer(root: Path) -> str | None:
    """Return the name in `latest`, or the fault of that file."""
    try:
        return _read_latest(root)
    except Damaged as error:
        return str(error)


def _find_under(load: Path, known: Mapping[str, str], exact: bool) -> tuple[Path | None, list[str]]:
    """Find a checkpoint under a root as it is now; return it with the faults of those that are passed over."""
    folders = checkpoints(load)
    named, faults = None, []
    try:
        named = _read_latest(load)
    except Damaged as error:
        faults.append(str(error))
    if load.is_file():
        raise ValueError(f"--load {load} is a file; name a folder of checkpoints, or one of its iter_NNNNNNN")
    candidates = _branch(folders, named)
    if candidates and named is not None and candidates[0].name.strip(".").removesuffix(REPLACED) != named:
        faults.append(f"{named}, which `latest` names, is gone")
    for folder in candidates:
        fault = _brief(folder, known[folder.name]) if folder.name in known else _fault(folder)
        if fault is None:
            if faults and exact:
                break
            return folder, faults
        faults.append(f"{folder.name}: {fault}")
    ahead = [folder.name for folder in folders if folder not in candidates]
    rest = f"; ahead of it, and perhaps abandoned, are {', '.join(ahead)}: name one to load it" if ahead else ""
    if candidates and exact:
        raise Damaged(f"--load {load} --load-exact: {'; '.join(faults)}; restore it, or leave out --load-exact")
    if candidates:
        raise Damaged(
            f"--load {load} has no whole checkpoint ({'; '.join(faults)}); "
            f"restore one, or name another folder to start fresh{rest}"
        )
    if named is not None:
        raise Damaged(
            f"--load {load}: its file `latest` names {named}, which is gone; restore it, or delete the file{rest}"
        )
    return None, faults


def _branch(folders: list[Path], named: str | None) -> list[Path]:
    """The folders to try, best first. See Note [Which one]."""
    limit = None if named is None else int(_NAME.fullmatch(named)[1])
    newest_first = sorted(folders, key=lambda folder: (_save_number(folder), _iteration(folder)), reverse=True)
    chosen = [folder for folder in newest_first if _iteration(folder) == limit]
    for folder in newest_first:
        if limit is None or _iteration(folder) < limit:
            chosen.append(folder)
            limit = _iteration(folder)
    return chosen


def next_save_number(root: Path) -> int:
    """The number of the next save into `root`: larger than those of all checkpoints there."""
    return 1 + max((_save_number(folder) for folder in checkpoints(root)), default=0)


def _save_number(folder: Path) -> int:
    """Return the number of the save that made a folder, counted under its root; 0 if it does not say."""
    number = unchecked_state(folder).get("save_number")
    return number if isinstance(number, int) else 0


def prune(root: Path, keep_last: int, keep_every: int = 0, run: str = "") -> None:
    """Delete old checkpoints of the run `run` (as their state's "run" says), up to the one that `latest` names.

    Kept are: the newest `keep_last` whole ones (0: all), those whose iteration is a multiple of `keep_every`
    (0: none), the newest whose state does not say that it is not "sound", and whatever another run wrote or is
    not whole. Those of larger numbers go: they are of a branch that was left when the run went back to an
    earlier checkpoint. A folder that cannot be deleted stays, with a warning; so does a link, which no save made. For
    one process, between saves.
    """
    root = Path(root)
    if keep_last < 0:
        raise ValueError(f"--keep-last {keep_last} is negative; 0 keeps every checkpoint")
    if keep_last == 0:
        return
    named = _read_latest(root)
    states = {
        folder: unchecked_state(folder) for folder in checkpoints(root) if folder.name == named or not _fault(folder)
    }
    ours = [folder for folder, state in states.items() if state.get("run", "") == run or folder.name == named]
    last = next((at for at, folder in enumerate(ours) if folder.name == named), len(ours) - 1)
    kept = set(ours[: last + 1][-keep_last:])
    kept |= {folder for folder in ours if keep_every and _iteration(folder) % keep_every == 0}
    kept |= set([folder for folder in ours[: last + 1] if states[folder].get("sound") is not False][-1:])
    for folder in ours:
        if folder not in kept:
            removed = root / f".{folder.name.strip('.')}{PARTIAL}"
            with _warning_about(folder):
                if folder.is_symlink():
                    raise OSError("it is a link")
                folder.rename(removed)
            _delete(removed)


def clear_leftovers(root: Path) -> None:
    """Delete what saves that crashed left behind. For one process, while no save into `root` runs."""
    for leftover in (*root.glob(f".iter_*{PARTIAL}"), *root.glob(f".{LATEST}{PARTIAL}-*")):
        _delete(leftover)
    for folder in root.glob(f".iter_*{REPLACED}"):
        aside = _ASIDE.fullmatch(folder.name)
        if aside and (root / aside[1]).exists():
            _delete(folder)


def _delete(path: Path) -> None:
    """Delete a folder, a file or a link; warn where that fails, because no run should end of it."""
    with _warning_about(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _warning_about(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a warning that `path` stays."""
    try:
        yield
    except OSError as error:
        logger.warning("cannot delete %s: %s; delete it by hand", path, error.strerror or error)


def commit(root: Path, iteration: int) -> Path:
    """Make a partial folder, whole and on the disk, the checkpoint of its iteration and the latest one.

    If that fails, the folder is the partial one again, for the caller to delete, and a checkpoint that it replaced is
    back in its place. Except where `latest` names the folder already: then it stays, because only the wait for the disk
    failed.
    """
    final, partial = root / folder_name(iteration), partial_folder(root, iteration)
    aside = root / f".{final.name}{REPLACED}"
    if final.exists():
        final.rename(aside)
    try:
        partial.rename(final)
        sync_folder(root)
        write_atomically(root / LATEST, f"{final.name}\n".encode())
    except BaseException:
        if not partial.exists():
            if _pointer(root) == final.name:
                raise
            final.rename(partial)
        if aside.exists():
            aside.rename(final)
        raise
    _delete(aside)
    return final


def checkpoints(root: Path) -> list[Path]:
    """The folders under a root that should be whole checkpoints, oldest first; see Note [Whole or absent]."""
    found: dict[int, Path] = {}
    if root.is_dir():
        for entry in sorted(os.scandir(root), key=lambda entry: entry.name):  # '.iter...' sorts before 'iter...'
            aside = _ASIDE.fullmatch(entry.name)
            name = _NAME.fullmatch(aside[1] if aside else entry.name)
            if name and entry.is_dir():
                found[int(name[1])] = root / entry.name
    return [found[iteration] for iteration in sorted(found)]


def _iteration(folder: Path) -> int:
    aside = _ASIDE.fullmatch(folder.name)
    return int(_NAME.fullmatch(aside[1] if aside else folder.name)[1])


def _read_latest(root: Path) -> str | None:
    """The name in `latest`; None if there is no such file. Damaged if it is anything but one."""
    path = root / LATEST
    try:
        text = read_regular(path, MAX_LATEST_BYTES).decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} is damaged: {str(error)[:200]}") from None
    if not _NAME.fullmatch(text.strip()):
        raise Damaged(f"{path} is damaged: it names no checkpoint, but {text.strip()[:40]!r}")
    return text.strip()


def _fault(folder: Path) -> str | None:
    """Why a folder is not a whole checkpoint, from names and lengths alone; checksums are for the load."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        return missing_part(folder, read_manifest(folder))
    except ValueError as error:
        return _brief(folder, str(error))


def _brief(folder: Path, text: str) -> str:
    """An error's text without what the sentence around it says already."""
    for known in (f"--load {folder}: ", f"--load {folder} is not a whole checkpoint: "):
        text = text.removeprefix(known)
    return text.removesuffix(f"; {RESTORE}")
