"""The program of one rank: a training step as a flat list of operations. Pure: no torch.

    schedule         F0 F1 B0 ...                           order of whole chunks: `plan.schedule.schedules`
    -> layers()      Recv, Keep, Forward, Recompute, ...    the same, layer by layer, with transfers and kept inputs
    -> places()      Keep(slot), Drop(slot)                 slots for kept inputs
    -> weights()     + Gather, Release; Wait(Sync)       stage 3: around uses; stages 1, 2: before the first use
    -> merge()       - Release, Gather                      where nothing is computed between the two
    -> gradients()   + Open, Reduce                         when the last gradient that is due has been added
    -> ahead()       Gather -> Start(Gather) .. Wait(Gather)   one layer earlier
    -> replicas()    + Start(ReduceReplicas)                once a unit's last Reduce has been waited for
    -> place_weights()   Gather(offset)                     gathered weights in one arena, by liveness: `arena`
    + tail()         ReduceReplicas, SumReplicated, SumTied, Norm
    + update()       Update, Sync

Every pass is a function from list to list. The list is what runs (`step.interpreter`), what is priced in bytes
(`price.bytes.estimate`), what is timed (`price.time.simulate`) and what is read:

    python scripts/print_program.py --zero-stage 3 --num-layers 2 --vocab-size 50257 --world-size 2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megazero.plan.program.arena import delay, place_weights
from megazero.plan.program.operations import COMPUTE, Keep, Op, Ops, Start, Wait, name_of
from megazero.plan.program.passes import ahead, gradients, layers, merge, places, replicas, tail, update, weights
from megazero.plan.program.rank_spec import RankSpec
from megazero.plan.schedule.schedules import EVALUATION, live_by_chunk, order_of, peak_live


class Program(NamedTuple):
    """One step in two parts: `gradients` and, unless the step is skipped, `update`."""

    gradients: Ops
    update: Ops
    trains: bool  # else an evaluation
    num_slots: int  # for kept inputs
    arena_numel: int  # elements of the arena for gathered weights
    peak_live: int  # the most (chunk, micro-batch) pairs between their forward and their backward
    live_by_chunk: tuple[int, ...] = ()  # the same, chunk by chunk


def program(spec: RankSpec, schedule: str, micro_batches: int, arena_limit: int | None = None) -> Program:
    """Make the program of a rank for one iteration, under a schedule of `plan.schedule.schedules`.

    Args:
        arena_limit: elements of an arena that there is already: gathers start later where they would need a larger one.
    """
    order = order_of(schedule, spec.pipeline(micro_batches))
    trains = schedule != EVALUATION
    placed = places(spec, layers(spec, order, trains))
    ops = merge(weights(spec, placed))
    slots = 1 + max((op.slot for op in placed if isinstance(op, Keep) and op.slot is not None), default=-1)
    sizes = {name: unit.numel for name, unit in spec.units.items()}
    ops = replicas(spec, ahead(spec, gradients(spec, ops) if trains else ops))
    ops, numel = place_weights(ops if arena_limit is None else delay(ops, sizes, arena_limit), sizes)
    if not trains:
        return Program(ops, [], trains, slots, numel, 0)
    live = live_by_chunk(order, len(spec.chunks))
    return Program(ops + tail(spec), update(spec), trains, slots, numel, peak_live(order), live)


# -- printing


def text(ops: Iterable[Op]) -> Iterator[str]:
    """Yield one line per operation: computation on the left, then memory, then what may be in flight."""
    for op in ops:
        if isinstance(op, (Start, Wait)):
            yield f"{'':34}{name_of(op)}"
        else:
            yield name_of(op) if isinstance(op, COMPUTE) else f"{'':17}{name_of(op)}"
