"""The words of `megazero launch`: its own, those of the program, and the folder of the ranks' logs."""

from pathlib import Path

import pytest

from megazero.cluster import launch_ranks, launcher
from tests.helpers.table import for_each


def launched(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], int | None, Path | None]:
    """Return the program's words, its ranks and the folder of their logs; no ranks if the words are refused."""
    found: list[tuple[list[str], int | None, Path | None]] = []

    def launch(log_dir: Path, wait: str, arguments: list[str]) -> int:
        ranks = int(arguments[arguments.index("--nproc-per-node") + 1])
        found.append((arguments[arguments.index("program") + 1 :], ranks, log_dir))
        return 0

    monkeypatch.setattr(launcher, "set_environment", lambda nproc, log_dir: None)
    monkeypatch.setattr(launch_ranks, "launch_ranks", launch)
    code = launcher.launch_ranks_here(words, ["-m", "program"])
    assert code == (0 if found else 2)
    return found[0] if found else ([], None, None)


@for_each(
    ("words", "log_dir"),
    [
        ("", "runs"),
        ("--log-dir a", "a"),
        ("--log-dir=a", "a"),
        ("--log_dir=a", "a"),
        ("--log_dir a", "a"),
        ("--log-dir=runs/lr=1e-4", "runs/lr=1e-4"),
        ("--log-dir a --log-dir=b", "b"),
        ("--log-dir=a --log_dir b", "b"),
        ("--log-dir=", "runs"),
        ("--log-dir=a --log-dir-else=b --no-log-dir", "a"),
    ],
)
def test_ranks_log_where_the_program_does(words: str, log_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = words.split()
    assert launched(["--nproc=3", *given], monkeypatch) == (given, 3, Path(log_dir, "ranks"))


@for_each(
    ("words", "ranks", "rest"),
    [
        ("--nproc 3 --lr=1", 3, "--lr=1"),
        ("--lr 1 --nproc=3 --nproc=4", 4, "--lr 1"),
        ("--nproc= 3", None, ""),  # an empty variable: not the next word
        ("--nproc", None, ""),
        ("--nproc 2 -- --nproc 5", 2, "--nproc 5"),
        ("--nproc 2 --elastic=1:1 --lr 1", 2, "--elastic 1:1 --lr 1"),
        ("--nproc 2 --elastic=1:2 --rdzv-endpoint=host:1 --lr 1", 2, "--elastic 1:2 --lr 1"),
        ("--nproc 2 --elastic=1:2 --rdzv-endpoint= host:1", None, ""),
        ("--nproc 2 --elastic=1:1 --wait= 5", None, ""),
        ("--nproc 2 --rdzv-endpoint=host:1", None, ""),
    ],
)
def test_own_words_are_taken_out_in_either_spelling(
    words: str, ranks: int | None, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, started, _ = launched(words.split(), monkeypatch)
    assert (started, found) == (ranks, rest.split())
