"""`megazero.log`: which ranks print a line, to which stream, in which form."""

import errno
import os
import sys
from collections.abc import Iterator

import pytest

from megazero.log import log, log_as
from tests.helpers.table import for_each


@pytest.fixture(autouse=True)
def alone_again() -> Iterator[None]:
    yield
    log_as(0, 1)


@for_each(
    ("rank", "world_size", "out", "err"),
    [
        (0, 1, ["100 % done"], ["WARNING: slow", "broken"]),
        (0, 2, ["100 % done"], ["WARNING: slow", "rank 0: broken"]),
        (1, 2, [], ["rank 1: broken"]),
    ],
)
def test_lines(rank: int, world_size: int, out: list[str], err: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    log_as(rank, world_size)
    log.info("100 % done")
    log.warning("slow")
    log.error("broken")
    said = capsys.readouterr()
    assert (said.out.splitlines(), said.err.splitlines()) == (out, err)


def test_a_full_disk_or_a_closed_pipe_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, text: str) -> None:
            asked.append(text)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    asked = list[str]()
    monkeypatch.setattr(sys, "stdout", Full())
    log.info("done")
    assert asked == ["done"]
