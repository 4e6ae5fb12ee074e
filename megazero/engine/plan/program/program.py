"""The program of one rank: a training step as a flat list of operations (`operations`). Pure: no torch.

    schedule                 F0 F1 B0 ...                      order of chunks: `engine.plan.schedule.schedules`
    -> expand_layers()       Recv, Keep, Forward, Recompute    per layer, with transfers and kept inputs
    -> assign_slots()        Keep(slot), Drop(slot)            slots of kept inputs
    -> insert_gathers()      + Gather, Release; Wait(Sync)     ZeRO-3: around uses; ZeRO-1, 2: before the first use
    -> merge_gathers()       - Release, Gather                 if nothing is computed between them
    -> insert_reductions()   + Open, Reduce                    after the last contribution
    -> start_early()         Start(Gather) .. Wait(Gather)     one layer earlier
    -> start_replica_sums()  + Start(ReduceReplicas)           after a unit's last Reduce
    -> store_gradients()     + StoreGradient, FetchGradient    after a unit's Reduce, with states on the host: `offload`
    -> place_weights()       Gather(offset)                    offsets in one arena, by liveness: `arena`
    + finish_gradients()     ReduceReplicas, SumReplicated, SumTied, GradNorm
    + update_units()         Update, FetchWeights, Sync

Every pass maps a list to a list; "+" inserts operations, "-" removes them. The interpreter (`step.interpreter`) runs
the final list, `planner.bytes.estimate` counts its bytes, `planner.time.simulate` its seconds. To print it:

    python scripts/print_program.py --zero-stage 3 --num-layers 2 --vocab-size 50257 --world-size 2
"""

from dataclasses import replace
from typing import NamedTuple

from megazero.engine.plan.program.arena import delay, place_weights
from megazero.engine.plan.program.offload import store_gradients
from megazero.engine.plan.program.operations import Keep, Ops
from megazero.engine.plan.program.passes import (
    assign_slots,
    expand_layers,
    finish_gradients,
    insert_gathers,
    insert_reductions,
    merge_gathers,
    start_early,
    start_replica_sums,
    update_units,
)
from megazero.engine.plan.program.rank_spec import RankSpec
from megazero.engine.plan.schedule.schedules import EVALUATION, order_of


class Program(NamedTuple):
    """One step in two parts: `gradients` and, unless the step is skipped, `update`; an evaluation has no update."""

    gradients: Ops
    update: Ops
    num_slots: int  # for kept inputs
    arena_numel: int  # elements of the arena for gathered weights


def program(spec: RankSpec, schedule: str, micro_batches: int, arena_limit: int | None = None) -> Program:
    """Return the program of a rank for one iteration, under a schedule of `engine.plan.schedule.schedules`.

    Args:
        arena_limit: elements of an existing arena. Gathers for which it has no room yet start later.
    """
    order = order_of(schedule, replace(spec.pipeline, micro_batches=micro_batches))
    trains = schedule != EVALUATION
    placed = assign_slots(spec, expand_layers(spec, order, trains))
    ops = merge_gathers(insert_gathers(spec, placed))
    slots = 1 + max((op.slot for op in placed if isinstance(op, Keep) and op.slot is not None), default=-1)
    sizes = {name: unit.numel for name, unit in spec.units.items()}
    if trains:
        ops = insert_reductions(spec, ops)
    ops = store_gradients(spec, start_replica_sums(spec, start_early(spec, ops)))
    ops, numel = place_weights(ops if arena_limit is None else delay(ops, sizes, arena_limit), sizes)
    gradients, update = (ops + finish_gradients(spec), update_units(spec)) if trains else (ops, [])
    return Program(gradients=gradients, update=update, num_slots=slots, arena_numel=numel)
