"""The watchdog, slow ranks and copies that differ, without other ranks."""

import threading
from types import SimpleNamespace

import torch

from megazero.cluster.failures import hang_text
from megazero.cluster.watchdog import Watchdog
from megazero.engine.plan.program.operations import Forward
from megazero.observe.stragglers import slow_ranks
from megazero.run.replicas import checksum, differing_replicas

MINUTES = 0.002  # 0.12 s without progress


def watched(seconds: float, progress: bool, doing: str = "iteration 7") -> list[str]:
    """Return a watchdog's messages about a rank within `seconds`, or its first."""
    said, spoke = [], threading.Event()

    def end(place: str) -> None:
        said.append(place)
        spoke.set()

    interpreter = SimpleNamespace(current=Forward("blocks.3", 0, True), since=1.0)
    watchdog = Watchdog(MINUTES, end)
    watchdog.doing = doing
    with watchdog.over(interpreter):
        if not progress:
            spoke.wait(seconds)
        else:
            for _ in range(100):  # each wait is far shorter than the limit
                interpreter.since += 1
                spoke.wait(0.003)
    return said


def test_no_progress_is_said_once_with_the_operation() -> None:
    (said,) = watched(60, progress=False)
    assert said.startswith("has been in operation 'Forward blocks.3 mb 0' of iteration 7")


def test_progress_and_what_has_a_limit_of_its_own_are_left_alone() -> None:
    assert watched(0, progress=True) == []
    assert watched(0.5, progress=False, doing="") == []


def test_a_hang_names_the_odd_rank_first_and_the_silent_ones_last() -> None:
    places = {0: "waits", 1: "computes", 3: "waits"}
    assert hang_text(places, 5, ()) == (
        "rank 1 computes; ranks 0, 3 waits; ranks 2, 4 do not respond: frozen, gone, or making progress"
    )


def test_slow_ranks_are_compared_within_their_stage() -> None:
    assert slow_ranks([1.0, 1.0, 1.1, 5.0, 5.1, 9.0], peers=3) == [(5, 9.0 / 5.1)]
    assert slow_ranks([0.0, 0.0], peers=2) == slow_ranks([1.0], peers=1) == []


def test_every_bit_and_every_place_counts_in_a_checksum() -> None:
    x = torch.randn(1000)
    seen = {int(checksum(x))}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        y = x.to(dtype)
        bits = y.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[y.element_size()])
        for at in (0, 1, 999):
            for bit in (0, 5, 8 * y.element_size() - 2):
                bits[at] ^= 1 << bit
                seen.add(int(checksum(y)))
                bits[at] ^= 1 << bit
    assert len(seen) == 1 + 3 * 9
    assert int(checksum(x)) != int(checksum(x[torch.arange(1000).flip(0)]))
    assert int(checksum(x[:0])) == 0


def test_differences_name_the_minority() -> None:
    table = torch.tensor([[1, 7], [1, 7], [1, 8]])
    assert differing_replicas(table, ["a", "b"], [4, 5, 6], ()) == ["b: rank 6 unlike ranks 4-5"]
