"""Every schedule for every small number of stages and micro-batches: order, memory, time, transfers, deadlock."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter

import pytest

from megazero.plan.schedules import COMPUTE, PEER, Action, Op, Plan, draw, plan, simulate, steps

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 17)]
TRAINING = ("1f1b", "gpipe")


def plans(kind: str, stages: int, micro_batches: int) -> list[Plan]:
    return [plan(kind, stage, stages, micro_batches) for stage in range(stages)]


@pytest.mark.parametrize("kind", TRAINING)
def test_time_and_memory(kind: str) -> None:
    """2 (M + P - 1) ticks, so a bubble of (P - 1) / M; 1f1b holds min(P - s, M) micro-batches, gpipe all M."""
    for p, m in SIZES:
        done = simulate(plans(kind, p, m))
        assert done.ticks == 2 * (m + p - 1), (p, m)
        assert done.peak_live == [min(p - s, m) if kind == "1f1b" else m for s in range(p)], (p, m)
        for s, row in enumerate(done.timeline):
            assert len(row) == done.ticks
            assert sum(cell == "" for cell in row) == 2 * (p - 1), (p, m, s)


@pytest.mark.parametrize("kind", TRAINING)
def test_every_micro_batch_goes_forward_then_backward_once(kind: str) -> None:
    for p, m in SIZES:
        for actions in plans(kind, p, m):
            forwards = [a.micro_batch for a in actions if a.op is Op.FORWARD]
            backwards = [a.micro_batch for a in actions if a.op is Op.BACKWARD]
            assert forwards == backwards == list(range(m))
            at = {(a.op, a.micro_batch): n for n, a in enumerate(actions)}
            assert all(at[Op.FORWARD, i] < at[Op.BACKWARD, i] for i in range(m))


@pytest.mark.parametrize("kind", TRAINING)
def test_the_last_backward_alone_is_final(kind: str) -> None:
    for p, m in SIZES:
        for actions in plans(kind, p, m):
            final = [a for a in actions if a.final]
            assert final == [[a for a in actions if a.op is Op.BACKWARD][-1]]


@pytest.mark.parametrize("kind", [*TRAINING, "forward-only"])
def test_transfers_pair_up(kind: str) -> None:
    """Whatever is sent is received by the neighbour, in the same order; what is computed was received before."""
    for p, m in SIZES:
        every = plans(kind, p, m)
        for stage in range(p - 1):
            for op in (Op.SEND_X, Op.RECV_DX):
                step, peer = PEER[op]
                assert step == 1
                here = [a.micro_batch for a in every[stage] if a.op is op]
                there = [a.micro_batch for a in every[stage + 1] if a.op is peer]
                assert here == there == ([] if kind == "forward-only" and op is Op.RECV_DX else list(range(m)))
        for stage, actions in enumerate(every):
            ops = Counter(a.op for a in actions)
            assert ops[Op.RECV_X] == ops[Op.SEND_DX] == 0 or stage > 0
            assert ops[Op.SEND_X] == ops[Op.RECV_DX] == 0 or stage < p - 1
            assert len(set(actions)) == len(actions)
            for received, computed, sent in (
                (Op.RECV_X, Op.FORWARD, Op.SEND_X),
                (Op.RECV_DX, Op.BACKWARD, Op.SEND_DX),
            ):
                at = {(a.op, a.micro_batch): n for n, a in enumerate(actions)}
                for i in range(m):
                    if ops[computed]:
                        middle = at[computed, i]
                        assert at.get((received, i), -1) < middle < at.get((sent, i), len(actions))


def test_peers_are_mutual() -> None:
    for op, (step, peer) in PEER.items():
        assert PEER[peer] == (-step, op)


def test_evaluation_holds_no_gradients() -> None:
    for p, m in SIZES:
        every = plans("forward-only", p, m)
        assert simulate(every).ticks == m + p - 1
        for actions in every:
            assert [a.micro_batch for a in actions if a.op is Op.FORWARD] == list(range(m))
            assert {a.op for a in actions} <= {Op.FORWARD, Op.SEND_X, Op.RECV_X}
            assert not any(a.final for a in actions)


def test_steps_join_adjacent_transfers_only() -> None:
    for kind, (p, m) in itertools.product([*TRAINING, "forward-only"], SIZES):
        for actions in plans(kind, p, m):
            batches = list(steps(actions))
            assert [a for batch in batches for a in batch] == actions
            assert all(len(batch) == 1 for batch in batches if batch[0].op in COMPUTE)
            assert all(a.op not in COMPUTE for batch in batches if len(batch) > 1 for a in batch)
            kinds = [batch[0].op in COMPUTE for batch in batches]
            assert not any(not a and not b for a, b in itertools.pairwise(kinds))


def test_the_simulator_sees_a_deadlock() -> None:
    """Two ways: both wait for the other, and one does not send what the other awaits."""
    forward, backward = Action(Op.FORWARD, 0), Action(Op.BACKWARD, 0, True)
    first = [Action(Op.RECV_DX, 0), forward, Action(Op.SEND_X, 0), backward]
    last = [Action(Op.RECV_X, 0), forward, backward, Action(Op.SEND_DX, 0)]
    with pytest.raises(RuntimeError, match=r"deadlock.*rd0.*rx0"):
        simulate([first, last])
    silent = [forward, Action(Op.RECV_DX, 0), backward]
    with pytest.raises(RuntimeError, match="deadlock"):
        simulate([silent, last])
    two = plans("1f1b", 2, 3)
    two[0][two[0].index(Action(Op.SEND_X, 1))] = Action(Op.SEND_X, 2)
    with pytest.raises(RuntimeError, match="deadlock"):
        simulate(two)


def test_drawing() -> None:
    assert draw("1f1b", 2, 3).splitlines() == [
        "stage 0 | F0 F1    B0 F2 B1    B2 |  holds 2",
        "stage 1 |    F0 B0 F1 B1 F2 B2    |  holds 1",
        "8 ticks, 25% idle",
    ]
    assert draw("gpipe", 2, 2).splitlines() == [
        "stage 0 | F0 F1       B0 B1 |  holds 2",
        "stage 1 |    F0 F1 B0 B1    |  holds 2",
        "6 ticks, 33% idle",
    ]
    assert draw("1f1b", 1, 1) == "stage 0 | F0 B0 |  holds 1\n2 ticks, 0% idle"
    assert len({len(row) for row in draw("1f1b", 4, 12).splitlines()[:-1]}) == 1


def test_drawing_from_the_command_line() -> None:
    command = [sys.executable, "-m", "megazero.plan.schedules", "gpipe", "3", "4"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == draw("gpipe", 3, 4)
