"""Files are written where others may write too: no link is followed, no device replaced, no checkpoint written into."""

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from megazero.checkpoint.locking import SaveLock
from megazero.files import NO_FILE, OutputFile, new_folder, replace_file, replacing
from megazero.flags.config import CheckpointConfig, Config, LogConfig
from megazero.flags.validate import check_values
from tests.helpers.table import for_each

pytestmark = pytest.mark.timeout(60)  # a FIFO must not be waited for

SPECIAL: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "folder": Path.mkdir,
    "null device": lambda path: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3)),
    "link to a device": lambda path: path.symlink_to("/dev/null"),
    "link to stdout": lambda path: path.symlink_to("/proc/self/fd/1"),
    "link to a folder": lambda path: path.symlink_to(path.parent),
}


def make(kind: str, path: Path) -> os.stat_result:
    try:
        SPECIAL[kind](path)
    except PermissionError:
        pytest.skip("only root makes devices")
    return path.lstat()


def lock(path: Path) -> None:
    SaveLock(path.parent).release()


@for_each("kind", SPECIAL)
def test_what_is_no_file_is_neither_replaced_nor_opened(kind: str, tmp_path: Path) -> None:
    for name, write in (
        ("out", lambda path: replace_file(path, "text")),
        ("out", OutputFile),
        (".lock", lock),
    ):
        path = tmp_path / f"{name} {write}"[:6].strip() / name
        path.parent.mkdir(exist_ok=True)
        before = make(kind, path)
        with pytest.raises((OSError, ValueError), match=NO_FILE):
            write(path)
        assert os.path.samestat(path.lstat(), before) and path.lstat().st_mode == before.st_mode
        path.rmdir() if kind == "folder" else path.unlink()


def test_a_link_to_a_file_is_never_followed(tmp_path: Path) -> None:
    """A file that is appended to, or locked, is refused; one that is replaced leaves the target alone."""
    target, link = tmp_path / "thesis.txt", tmp_path / ".lock"
    target.write_text("a thesis")
    link.symlink_to(target)
    for write in (OutputFile, lock):
        with pytest.raises((OSError, ValueError), match=NO_FILE):
            write(link)
    replace_file(link, "text")
    assert target.read_text() == "a thesis" and link.read_text() == "text" and not link.is_symlink()


def test_the_remains_of_a_killed_process_are_deleted_and_a_users_folder_is_not(tmp_path: Path) -> None:
    kept = [tmp_path / ".x.partial", tmp_path / ".x.partial-old", tmp_path / ".xy.partial-0123456789ab"]
    for folder in (*kept, tmp_path / ".x.partial-0123456789ab"):
        folder.mkdir()
        (folder / "notes").touch()
    with new_folder(tmp_path / "x") as made:
        (made / "file").touch()
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "x"])
    with contextlib.suppress(KeyError), new_folder(tmp_path / "y"):
        raise KeyError
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "x"])


def test_no_output_is_written_into_a_checkpoint(tmp_path: Path) -> None:
    """Nor by the name of one. Folders by such names that are not among checkpoints are the user's."""
    saved = tmp_path / "s" / "iter_0000004"
    saved.mkdir(parents=True)
    (saved / "manifest.json").touch()
    (tmp_path / "s" / "latest").touch()
    (tmp_path / "link").symlink_to(saved)
    before = sorted(tmp_path.rglob("*"))
    for path in (saved / "hf", saved / "a" / "b", tmp_path / "link" / "hf", tmp_path / "s" / "iter_0000008"):
        with pytest.raises(ValueError, match=r"is in the checkpoint .*, and would be deleted with it; name a place"):
            with new_folder(path):
                pass
        with pytest.raises(ValueError, match="is in the checkpoint"), replacing(path):
            pass
        for flag in ("save", "save_hf", "memory_checkpoint_dir", "log_dir", "tensorboard_dir"):
            options = {"save": str(tmp_path / "t"), "memory_checkpoint_interval": 1, flag: str(path)}
            logs = {name: options.pop(name) for name in ("log_dir", "tensorboard_dir") if name in options}
            config = Config(checkpoint=CheckpointConfig(**options), log=LogConfig(**logs))
            with pytest.raises(ValueError, match=rf"--{flag.replace('_', '-')} .* is in the checkpoint"):
                check_values(config)
    assert sorted(tmp_path.rglob("*")) == before
    with new_folder(tmp_path / "results" / "iter_0000004"):
        pass
    replace_file(tmp_path / "results" / "iter_0000004" / "scores.jsonl", "")
