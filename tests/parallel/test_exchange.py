"""Gathers and reduce-scatters on gloo, which are messages: their results, and the memory that they take."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from megazero.engine.mesh.mesh import Mesh
from megazero.engine.plan.layout.topology import Layout
from tests.helpers.late import late_collectives
from tests.helpers.resident import forget_peak, resident

CPU = torch.device("cpu")


def part_of(rank: int, k: int, n: int) -> torch.Tensor:
    """Numbers that differ between ranks and collectives, exact in 16 bit."""
    return torch.arange(n) % 7 + 8.0 * rank + 32.0 * k


def many_in_flight(rank: int, dtype: torch.dtype) -> list[bool]:
    """Gathers and reduce-scatters in flight at once, waited for in another order than they were started."""
    mesh = Mesh.build(Layout(dp=3), rank, CPU)
    axis, sizes, pending, right = mesh.dp, (5, 1000, 64), [], []
    for k, n in enumerate(sizes):
        gathered = torch.full((3 * n,), torch.nan, dtype=dtype)
        own = part_of(rank, k, n).to(dtype)
        if k == 1:  # a window of the output
            gathered[rank * n : (rank + 1) * n] = own
            own = gathered[rank * n : (rank + 1) * n]
        wanted = torch.cat([part_of(i, k, n) for i in range(3)]).to(dtype)
        pending.append((axis.start_all_gather(own, gathered), gathered, wanted))

        full = torch.cat([part_of(rank + i, k, n) for i in range(3)]).to(dtype)  # rank's contribution to rank i
        summed, scratch = torch.full((n,), 2.0, dtype=dtype), torch.empty(axis.scratch_numel(n), dtype=dtype)
        assert scratch.numel() == 2 * n
        wanted = sum(part_of(i + rank, k, n) for i in range(3)) + 2.0 * (k > 0)
        start = axis.start_reduce_scatter(full, summed, k > 0, scratch)
        pending.append((start, summed, wanted.to(dtype)))
    for start, found, wanted in pending[::-1]:
        start.wait()
        right.append(torch.equal(found, wanted))
    return right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_in_flight_arrive_where_they_belong(dtype: torch.dtype, ranks) -> None:
    assert ranks(3).run(many_in_flight, dtype) == [[True] * 6] * 3


def shifts(rank: int, ranks: int, late: bool) -> list[bool]:
    """Messages round the ring in both directions, in flight at once; each is counted once."""
    axis, right = Mesh.build(Layout(dp=ranks), rank, CPU).dp, []
    with late_collectives() if late else nullcontext():
        for dtype in (torch.float64, torch.bfloat16):
            started = []
            for k, step in enumerate((1, -1, 1)):
                x, out = (torch.empty(2, 3 + k, dtype=dtype) for _ in range(2))
                x.copy_(part_of(rank, k, x.numel()).view_as(x))
                started.append((axis.start_shift(x, out, step), out, part_of((rank - step) % ranks, k, x.numel())))
            for pending, out, wanted in started[::-1]:
                pending.wait()
                right.append(torch.equal(out.view(-1), wanted.to(dtype)))
    sent = 2 * (3 + 4 + 5) * (8 + 2) if ranks > 1 else 0
    return [*right, axis.sent["dp"] == sent]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_shift_sends_to_one_neighbour_and_receives_from_the_other(count: int, late: bool, ranks) -> None:
    assert ranks(count).run(shifts, count, late) == [[True] * 7] * count


ROWS = [[2, 0, 3], [1, 4, 0], [0, 0, 0]]  # rows that each rank sends to each; the last has none, and receives from one


def all_to_alls(rank: int, late: bool) -> list[bool]:
    """Unequal parts, two exchanges in flight at once; the rows that stay are not counted."""
    axis, right = Mesh.build(Layout(dp=3), rank, CPU).dp, []
    sends, receives, started = ROWS[rank], [row[rank] for row in ROWS], []
    with late_collectives() if late else nullcontext():
        for k, dtype in enumerate((torch.float32, torch.int64)):
            parts = [part_of(3 * rank + to, k, 5 * n).view(n, 5) for to, n in enumerate(sends)]
            wanted = [part_of(3 * source + rank, k, 5 * n).view(n, 5) for source, n in enumerate(receives)]
            out = torch.full((sum(receives), 5), -1.0).to(dtype)
            x = torch.cat(parts).to(dtype)
            started.append((axis.start_all_to_all(x, out, sends, receives), out, torch.cat(wanted).to(dtype)))
        for pending, out, wanted in started[::-1]:
            pending.wait()
            right.append(torch.equal(out, wanted))
    return [*right, axis.sent == {"dp": (sum(sends) - sends[rank]) * 5 * (4 + 8)}]


@pytest.mark.parametrize("late", [False, True])
def test_an_all_to_all_sends_rows_to_every_rank(late: bool, ranks) -> None:
    assert ranks(3).run(all_to_alls, late) == [[True] * 3] * 3


def taken_by_a_gather(rank: int, numel: int) -> int:
    """Bytes of resident memory that an all-gather takes besides its input and its output."""
    mesh = Mesh.build(Layout(dp=2), rank, CPU)
    part, out = torch.ones(numel), torch.zeros(2 * numel)
    mesh.dp.all_gather(torch.ones(4), torch.empty(8))  # connected
    forget_peak()
    before = resident("VmRSS")
    mesh.dp.all_gather(part, out)
    taken = resident("VmHWM") - before
    assert torch.equal(out, torch.ones(2 * numel))
    return taken


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells a process its peak")
def test_a_gather_takes_no_buffer_besides_its_output(ranks) -> None:
    """gloo's own would take 32 MiB more here."""
    for taken in ranks(2).run(taken_by_a_gather, 1 << 22):
        assert taken < 8 << 20
