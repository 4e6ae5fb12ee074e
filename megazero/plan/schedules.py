"""Pipeline schedules as data: who computes and sends what, in which order. Pure: no torch.

A plan is one list of actions a stage. `pipeline.run` interprets it, `simulate` proves it free of deadlock and says
what it holds, `draw` shows it:  python -m megazero.plan.schedules 1f1b 4 8
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple


class Op(Enum):
    """What a stage does with one micro-batch. x flows forward between stages, dx backward."""

    RECV_X = "rx"
    FORWARD = "F"
    SEND_X = "sx"
    RECV_DX = "rd"
    BACKWARD = "B"
    SEND_DX = "sd"


COMPUTE = (Op.FORWARD, Op.BACKWARD)
# op -> (step to the neighbour's stage, what the neighbour does meanwhile)
PEER = {
    Op.SEND_X: (+1, Op.RECV_X),
    Op.RECV_X: (-1, Op.SEND_X),
    Op.SEND_DX: (-1, Op.RECV_DX),
    Op.RECV_DX: (+1, Op.SEND_DX),
}


class Action(NamedTuple):
    op: Op
    micro_batch: int
    final: bool = False  # no later action of this stage adds weight gradients

    def __repr__(self) -> str:
        return f"{self.op.value}{self.micro_batch}{'!' if self.final else ''}"


Plan = list[Action]
Order = list[tuple[Op, int]]


def gpipe(stage: int, stages: int, micro_batches: int) -> Order:
    """All forwards, then all backwards (Huang 2019). Holds every micro-batch."""
    del stage, stages  # every stage has the same order
    every = range(micro_batches)
    return [(Op.FORWARD, i) for i in every] + [(Op.BACKWARD, i) for i in every]


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> Order:
    """Warm-up forwards, then one forward and one backward in turn, then drain (PipeDream-Flush, Narayanan 2021)."""
    warm_up = min(stages - stage - 1, micro_batches)
    order: Order = [(Op.FORWARD, i) for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        order += [(Op.FORWARD, warm_up + i), (Op.BACKWARD, i)]
    return order + [(Op.BACKWARD, i) for i in range(micro_batches - warm_up, micro_batches)]


def forward_only(stage: int, stages: int, micro_batches: int) -> Order:
    """Evaluation."""
    del stage, stages
    return [(Op.FORWARD, i) for i in range(micro_batches)]


SCHEDULES: dict[str, Callable[[int, int, int], Order]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "forward-only": forward_only,
}


def plan(kind: str, stage: int, stages: int, micro_batches: int) -> Plan:
    """The actions of one stage: receives before and sends after each computation, the final backward marked."""
    order = SCHEDULES[kind](stage, stages, micro_batches)
    backwards = [at for at, (op, _) in enumerate(order) if op is Op.BACKWARD]
    final = backwards[-1] if backwards else -1
    before = {Op.FORWARD: Op.RECV_X, Op.BACKWARD: Op.RECV_DX}
    after = {Op.FORWARD: Op.SEND_X, Op.BACKWARD: Op.SEND_DX}

    def has_peer(op: Op) -> bool:
        return 0 <= stage + PEER[op][0] < stages

    actions: Plan = []
    for at, (op, i) in enumerate(order):
        actions += [Action(before[op], i)] * has_peer(before[op])
        actions.append(Action(op, i, at == final))
        actions += [Action(after[op], i)] * has_peer(after[op])
    return actions


def steps(actions: Plan) -> Iterator[tuple[Action, ...]]:
    """Split a plan: one computation, or a run of adjacent transfers, which is issued as one exchange."""
    transfers: list[Action] = []
    for action in actions:
        if action.op not in COMPUTE:
            transfers.append(action)
            continue
        if transfers:
            yield tuple(transfers)
            transfers = []
        yield (action,)
    if transfers:
        yield tuple(transfers)


def peak_live(actions: Plan) -> int:
    """The most micro-batches that a stage holds at once, between their forward and their backward."""
    live = peak = 0
    for action in actions:
        live += (action.op is Op.FORWARD) - (action.op is Op.BACKWARD)
        peak = max(peak, live)
    return peak


class Simulation(NamedTuple):
    ticks: int  # a computation takes one, transfers none
    peak_live: list[int]  # per stage: the most micro-batches between their forward and their backward
    timeline: list[list[str]]  # per stage: what it does at each tick, "" when idle


def simulate(plans: list[Plan]) -> Simulation:
    """Run every stage under rendezvous transfers.

    Raises:
        RuntimeError: the plans deadlock; it says where every stage waits.
    """
    stages = len(plans)
    todo = [list(steps(p)) for p in plans]
    at, live, peak = [0] * stages, [0] * stages, [0] * stages
    done: set[tuple[int, Op, int]] = set()
    timeline: list[list[str]] = [[] for _ in plans]

    def current(stage: int) -> tuple[Action, ...]:
        return todo[stage][at[stage]] if 0 <= stage < stages and at[stage] < len(todo[stage]) else ()

    def ready(stage: int, a: Action) -> bool:
        step, op = PEER[a.op]
        offered = any(b.op is op and b.micro_batch == a.micro_batch for b in current(stage + step))
        return offered or (stage + step, op, a.micro_batch) in done

    def transfer_ready(stage: int) -> bool:
        now = current(stage)
        return bool(now) and now[0].op not in COMPUTE and all(ready(stage, a) for a in now)

    while any(current(s) for s in range(stages)):
        transfers = [s for s in range(stages) if transfer_ready(s)]
        if transfers:
            for s in transfers:
                done |= {(s, a.op, a.micro_batch) for a in current(s)}
                at[s] += 1
            continue
        computes = [s for s in range(stages) if current(s) and current(s)[0].op in COMPUTE]
        if not computes:
            raise RuntimeError(f"pipeline deadlock; each stage waits at {[current(s) for s in range(stages)]}")
        for s in range(stages):
            timeline[s].append(repr(current(s)[0]).rstrip("!") if s in computes else "")
        for s in computes:
            live[s] += 1 if current(s)[0].op is Op.FORWARD else -1
            peak[s] = max(peak[s], live[s])
            at[s] += 1
    return Simulation(len(timeline[0]), peak, timeline)


def draw(kind: str, stages: int, micro_batches: int) -> str:
    """The schedule as text: one row a stage, one column a tick."""
    done = simulate([plan(kind, s, stages, micro_batches) for s in range(stages)])
    width = 2 + len(str(micro_batches - 1))
    rows = [
        f"stage {s} |" + "".join(cell.rjust(width) for cell in row) + f" |  holds {done.peak_live[s]}"
        for s, row in enumerate(done.timeline)
    ]
    busy = sum(cell != "" for row in done.timeline for cell in row)
    idle = 1 - busy / (stages * done.ticks)
    return "\n".join([*rows, f"{done.ticks} ticks, {idle:.0%} idle"])


if __name__ == "__main__":
    print(draw(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
