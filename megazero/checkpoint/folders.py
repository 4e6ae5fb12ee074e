"""Checkpoint folders under a root: their names, which one to load, how one is committed, which ones are kept.

Note [Whole or absent]
A reader never meets half a checkpoint. A save writes into `.iter_0000100.partial`. Once every rank has its files on the
disk, rank 0 renames the folder to `iter_0000100`, and then replaces `latest`. If iteration 100 was saved before, its
old folder is first renamed to `.iter_0000100.replaced`. A crash right after that leaves no `iter_0000100`, so
`find_copy` takes the replaced folder. Deleting, too, begins with a rename.

Note [Which one]
If a run goes back to iteration 100 and saves 150, it has abandoned its 200 and 300, which stay on the disk. So that
saves can be ordered by age, each has a save number in its state.json: 1 more than the largest under the root. *Newest*
means the largest save number. To resume from a root:
1. Take the folder that the file `latest` names, if it is whole.
2. If it is damaged or gone, take the newest whole save of a smaller iteration. Larger iterations were abandoned.
3. If the file `latest` is missing or damaged, begin at the newest save of any iteration.
In cases 2 and 3, skip a folder if a newer save has the same or a smaller iteration: that save abandoned the folder.
A warning names every damaged folder that is passed over.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from megazero.checkpoint.locking import PARTIAL, check_owner, owned
from megazero.checkpoint.manifest import MANIFEST, RESTORE, Damaged, missing_part, read_manifest, unchecked_state
from megazero.checkpoint.others import HUGGING_FACE, other_system, refuse_other
from megazero.files import CHECKPOINT_NAME, UNIQUE, read_regular, replacing, sync_folder
from megazero.log import log
from megazero.world import this_generation

LATEST = "latest"
REPLACED = ".replaced"
MAX_LATEST_BYTES = 256

_NAME = CHECKPOINT_NAME
# Of a save, an export or a retired folder; `..iter_N.partial.partial` is of an earlier version.
_LEFTOVER = re.compile(rf"\.\.?iter_\d{{7,}}(\.\d+)?(\.old)?(\.partial){{1,2}}({UNIQUE})?")
_LEFTOVER_FILE = re.compile(rf"\..+\.partial{UNIQUE}")
_ASIDE = re.compile(r"\.(iter_\d{7,})\.replaced")


def folder_name(iteration: int) -> str:
    """`iter_0000100` for 100."""
    return f"iter_{iteration:07d}"


def partial_folder(root: Path, iteration: int) -> Path:
    """Return the folder that a save writes to before it is renamed to its final name; each generation has its own."""
    start = this_generation()
    number = f".{start.number}" if start is not None and start.number else ""
    return root / f".{folder_name(iteration)}{number}{PARTIAL}"


def find_copy(load: Path, passing_over: Mapping[str, str] | None = None, exact: bool = False) -> Path | None:
    """Return the checkpoint that `--load` means: a folder `iter_NNNNNNN`, or one under a root. See Note [Which one].

    Args:
        passing_over: name of a folder under the root -> its fault, for folders that an earlier load found damaged.
        exact: refuse if the first choice is not whole, instead of passing it over.

    Returns:
        None if there is no checkpoint under the root, or no root.

    Raises:
        Damaged: `load` names a folder `iter_NNNNNNN` that is missing or not whole. Or a root has checkpoints and none
            is whole: starting fresh there would lose them.
        ValueError: another system saved there; or `load` is a checkpoint by another name.
    """
    load, known = Path(load), passing_over or {}
    if _NAME.fullmatch(load.name):
        fault = known.get(load.name) or _fault(load)
        if fault:
            refuse_other("--load", load)
            raise Damaged(f"--load {load} is not a whole checkpoint: {fault}; name another, or its parent folder")
        return load
    while True:
        faults: list[str] = []
        latest = _pointer(load)
        try:
            folder, refusal = _find_under(load, known, exact, faults), None
        except Damaged as error:
            folder, refusal = None, error
        # Another run may save and prune here. Then the checkpoint that was found is gone, and `latest` has changed.
        if (faults or refusal) and _pointer(load) != latest:
            continue
        if refusal:
            raise refusal
        if faults and folder:
            log.warning("--load %s: %s. RESUMING FROM %s", load, "; ".join(faults), folder.name)
        return folder


def _pointer(root: Path) -> str | None:
    """Return the name in `latest`, or the fault of that file."""
    try:
        return _read_latest(root)
    except Damaged as error:
        return str(error)


def _find_under(load: Path, known: Mapping[str, str], exact: bool, faults: list[str]) -> Path | None:
    """Find a checkpoint under a root as it is now, and list the faults of those that are passed over."""
    folders, named = checkpoints(load), None
    if not _ours(folders):
        refuse_other("--load", load)
        _refuse_other_name(load)
    if load.is_file():
        raise ValueError(f"--load {load} is a file; name a folder of checkpoints, or one of its iter_NNNNNNN")
    try:
        named = _read_latest(load)
    except Damaged as error:
        faults.append(str(error))
    candidates = _branch(folders, named)
    if candidates and named is not None and iteration_of(candidates[0]) != iteration_of(Path(named)):
        faults.append(f"{named}, which `latest` names, is gone")
    for folder in candidates:
        fault = _brief(folder, known[folder.name]) if folder.name in known else _fault(folder)
        if fault is None:
            if faults and exact:
                break
            return folder
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
    if faults:
        raise Damaged(f"--load {load} has no checkpoint, and {faults[0]}; name another folder, or delete the file")
    return None


def _ours(folders: list[Path]) -> bool:
    """Return whether any of the `checkpoints` of a root is one of ours, damaged or not."""
    return any((folder / MANIFEST).exists() for folder in folders)


def _refuse_other_name(load: Path) -> None:
    """Refuse a checkpoint in a folder of another name: a run would take it for a root, and save into it."""
    number = unchecked_state(load).get("iteration") if (load / MANIFEST).is_file() else None
    if isinstance(number, int):
        name = folder_name(number)
        raise ValueError(
            f"--load {load} is a checkpoint of iteration {number}, and its folder has another name; name it {name}, in "
            f"a folder of its own: mkdir DIR; mv {load} DIR/{name}"
        )


def refuse_to_mix(flag: str, root: Path, exports: bool = False) -> None:
    """Refuse to save among files of another system. Where our checkpoints are too, only equal names are refused.

    exports: a run writes Hugging Face folders here, which are accepted.

    Raises:
        ValueError: it holds some; or `latest` is another system's, or `root` is a checkpoint.
    """
    folders = checkpoints(root)
    theirs = [folder for folder in folders if not (folder / MANIFEST).exists()]
    for folder in theirs if _ours(folders) else [root, *theirs]:
        other = other_system(folder)
        if other is not None and not (exports and folder in theirs and other.kind is HUGGING_FACE):
            place = os.path.relpath(folder / other.path, root)
            raise ValueError(
                f"{flag} {root} has {other.kind.name} ({place}), and no run saves among the files of another system; "
                "name another folder"
            )
    try:
        if not _ours(folders):
            _read_latest(root)
    except Damaged as error:
        raise ValueError(f"{flag} {root}: {error}; a save would replace this file: name another folder") from None


def names_checkpoint(root: Path) -> bool:
    """Return whether `root` has a checkpoint of ours, or a file `latest` that names one."""
    try:
        return _ours(checkpoints(root)) or _read_latest(root) is not None
    except ValueError:
        return False


def _branch(folders: list[Path], named: str | None) -> list[Path]:
    """Return the folders to try, best first. See Note [Which one]."""
    limit = None if named is None else iteration_of(Path(named))
    newest_first = sorted(folders, key=lambda folder: (save_number(folder), iteration_of(folder)), reverse=True)
    chosen = [folder for folder in newest_first if iteration_of(folder) == limit]
    for folder in newest_first:
        if limit is None or iteration_of(folder) < limit:
            chosen.append(folder)
            limit = iteration_of(folder)
    return chosen


def next_save_number(root: Path) -> int:
    """Return the number of the next save into `root`: larger than those of all checkpoints there."""
    return 1 + max((save_number(folder) for folder in checkpoints(root)), default=0)


def save_mark(root: str) -> str:
    """Return a text that changes with every save into `root`; empty if there was none. pretrain.sbatch has it too."""
    try:
        return str(int((Path(root) / LATEST).stat().st_mtime))
    except OSError:
        return ""


def save_number(folder: Path) -> int:
    """Return the number in a save's state; 0 if it has none."""
    number = unchecked_state(folder).get("save_number")
    return number if isinstance(number, int) else 0


def prune(root: Path, keep_last: int, keep_every: int = 0, run: str = "") -> None:
    """Delete old checkpoints of one run: those with `run` in their state.

    Kept are
    - the last `keep_last` whole ones up to the one that `latest` names (0: all),
    - the last sound one up to there: the iterations before it made updates,
    - those whose iteration is a multiple of `keep_every` (0: none),
    - damaged ones, and those of other runs.
    Others with a larger iteration than `latest` are deleted too, because the run abandoned them when it went back.
    Symbolic links, which only users make, and folders that cannot be deleted stay, with a warning. Call it in one
    process, between saves.
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
    kept |= {folder for folder in ours if keep_every and iteration_of(folder) % keep_every == 0}
    kept |= set([folder for folder in ours[: last + 1] if states[folder].get("sound") is not False][-1:])
    for folder in ours:
        if folder not in kept:
            with _warning_about(folder):
                if folder.is_symlink():
                    raise OSError("it is a link")
                delete(retire(folder, root))


def retire(folder: Path, save: Path) -> Path:
    """Rename a folder into a new partial folder, and return that one, to be deleted.

    save: the --save folder of the run; ValueError if a later start saves there.
    """
    partial = partial_folder(folder.parent, iteration_of(folder))
    retired = partial.with_name(f"{partial.name.removesuffix(PARTIAL)}.old{PARTIAL}")
    retired.mkdir(exist_ok=True)
    check_owner(save)
    folder.rename(retired / folder.name)
    return retired


def clear_leftovers(root: Path) -> None:
    """Delete the leftovers of saves that crashed. Call it in one process, while no save into `root` runs."""
    for leftover in leftovers(root):
        delete(leftover)
    for folder in root.glob(f".iter_*{REPLACED}"):
        aside = _ASIDE.fullmatch(folder.name)
        if aside and (root / aside[1]).exists():
            delete(folder)


def leftovers(root: Path) -> list[Path]:
    """Return the partial files and folders of saves or exports.

    Those with other names are a user's; a folder may be of a command that writes it now, such as an export.
    """
    return [
        path
        for path in (root.iterdir() if root.is_dir() else ())
        if _LEFTOVER.fullmatch(path.name) or (_LEFTOVER_FILE.fullmatch(path.name) and not path.is_dir())
    ]


def delete(path: Path) -> None:
    """Delete a folder, a file or a link. A failure is a warning, because it should not end a run.

    ValueError if a later start saves there.
    """
    check_owner(path.parent)
    with _warning_about(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _warning_about(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a warning that `path` stays, unless a later start saves there."""
    try:
        with owned(path.parent):
            yield
    except OSError as error:
        log.warning("cannot delete %s: %s; delete it by hand", path, error.strerror or error)


def commit(root: Path, iteration: int) -> Path:
    """Turn a partial folder into the checkpoint of its iteration, and make it the latest one.

    All its files are on the disk. If this fails, the folder is partial again, for the caller to delete, and a replaced
    checkpoint is back in its place. But if `latest` already names the folder, it stays, because only the wait for the
    disk failed. Once a later start saves there, its files stay as they are.

    Raises:
        ValueError: a later start saves there: see Note [Later generations] in `locking`.
    """
    final, partial = root / folder_name(iteration), partial_folder(root, iteration)
    aside, ours = root / f".{final.name}{REPLACED}", partial.stat()
    check_owner(root)
    if os.path.lexists(final):
        final.rename(aside)
    try:
        partial.rename(final)
        sync_folder(root)
        _point(root, final.name)
    except BaseException:
        if final.exists() and os.path.samestat(final.stat(), ours):
            check_owner(root)
            if _pointer(root) == final.name:
                raise
            final.rename(partial)
        if os.path.lexists(aside) and not os.path.lexists(final):
            aside.rename(final)
        raise
    delete(aside)
    return final


def _point(root: Path, name: str) -> None:
    """Let `latest` name a checkpoint. A folder of this name stays, with a warning: a load then takes the newest."""
    latest = root / LATEST
    if latest.is_symlink():
        check_owner(root)
        latest.unlink()
    elif latest.exists() and not latest.is_file():
        log.warning("%s is no file, and does not name %s, which is saved; delete or move it", latest, name)
        return
    with replacing(latest) as file:
        file.write(f"{name}\n".encode())
        check_owner(root)


def checkpoints(root: Path) -> list[Path]:
    """Return the folders under a root that should be whole checkpoints, oldest first; see Note [Whole or absent]."""
    found: dict[int, Path] = {}
    if root.is_dir():
        for entry in sorted(os.scandir(root), key=lambda entry: entry.name):  # '.iter...' sorts before 'iter...'
            if (_NAME.fullmatch(entry.name) or _ASIDE.fullmatch(entry.name)) and entry.is_dir():
                found[iteration_of(Path(entry.name))] = root / entry.name
    return [found[iteration] for iteration in sorted(found)]


def iteration_of(folder: Path) -> int:
    return int(folder.name.strip(".").removesuffix(REPLACED).removeprefix("iter_"))


def _read_latest(root: Path) -> str | None:
    """Return the name in `latest`, or of the folder to which it is a link; None if there is no such file.

    Raises:
        Damaged: it holds anything else.
        ValueError: it is a link to a folder elsewhere.
    """
    path = root / LATEST
    if path.is_symlink() and not path.is_file():
        target = root / os.readlink(path)
        if _NAME.fullmatch(target.name) and target.parent.resolve() == root.resolve():
            return target.name
        if path.is_dir():
            raise ValueError(f"--load {root}: `latest` is a link to {target}; --load that folder, or delete the link")
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
    """Return why a folder is not a whole checkpoint, by names and lengths alone; a load checks checksums."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        return missing_part(folder, read_manifest(folder))
    except ValueError as error:
        if not (folder / MANIFEST).exists() and (other := other_system(folder)) is not None:
            return f"it is {other.kind.name}"
        return _brief(folder, str(error))


def _brief(folder: Path, text: str) -> str:
    """Return an error's text without the folder and the remedy, which the message around it already has."""
    text = text.removeprefix(f"--load {folder}: ").removeprefix(f"--load {folder} is not a whole checkpoint: ")
    return text.removesuffix(f"; {RESTORE}")
