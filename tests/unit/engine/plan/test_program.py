"""Programs: the rules that every pass keeps, for every schedule and policy."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megazero.console.program_tool import lines_of
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.flat_layout import ALIGN
from megazero.engine.plan.layout.layers import Use
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.layout.zero_policy import ShardingGroup
from megazero.engine.plan.program.operations import (
    COMPUTE,
    Backward,
    BackwardWeights,
    Drop,
    Forward,
    Gather,
    GradNorm,
    Keep,
    Op,
    Open,
    Recompute,
    Reduce,
    ReduceReplicas,
    Release,
    Start,
    SumReplicated,
    SumTied,
    Sync,
    Transfer,
    Update,
    Wait,
    inner,
    name_of,
)
from megazero.engine.plan.program.passes import finish_gradients, merge_gathers
from megazero.engine.plan.program.program import Program, program
from megazero.engine.plan.program.rank_spec import RankSpec, rank_spec
from megazero.engine.plan.schedule.schedules import EVALUATION
from megazero.flags.config import ActivationConfig, Config, ModelConfig, ParallelConfig, TrainingConfig, ZeroConfig
from megazero.planner.time.simulate import simulate
from tests.helpers.table import for_each

KINDS = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1), (EVALUATION, 1), (EVALUATION, 2)]


def config(**changes: object) -> Config:
    base = Config(model=ModelConfig(5, 64, 0, 4, 16, 128), training=TrainingConfig(global_batch_size=8))
    return replace(base, **changes)  # type: ignore[arg-type]


def programs() -> Iterator[tuple[str, RankSpec, Program]]:
    for stage, every, gather, overlap, (schedule, chunks), pp, recompute, host in itertools.product(
        range(4), ("micro-batch", "step"), ("use", "step"), (False, True), KINDS, (1, 2), ("none", "full"), (0, 1)
    ):
        if (chunks > 1 and pp == 1) or (host and recompute == "none"):
            continue
        made = config(
            zero=ZeroConfig(stage, 0, every, gather, overlap_comm=overlap),  # type: ignore[arg-type]
            parallel=replace(ParallelConfig(), pipeline_model_parallel_size=pp),
            activations=ActivationConfig(recompute, checkpoint_in_cpu=bool(host)),  # type: ignore[arg-type]
        )
        for rank in range(pp):
            spec = rank_spec(made, Layout(pp, 2, chunks=chunks), rank, declare)
            yield schedule, spec, program(spec, schedule, 4)


def replicated(spec: RankSpec) -> dict[str, ShardingGroup]:
    """The groups of a rank, of two copies each."""
    return {name: replace(group, replicas=2) for name, group in spec.groups.items()}


@pytest.mark.long
def test_everything_used_is_present() -> None:
    """Weights between Wait(Gather) and Release, each in a part of the arena of its own; gradients between Open and
    Reduce; kept inputs between Keep and Drop. Every started operation is waited for once, updated weights before
    their first use.
    """
    for _, spec, made in programs():
        present, opened, kept, in_flight, updated = set(), set(), set(), set(), set()
        taken: dict[str, range] = {}  # unit -> its part of the arena
        for op in made.gradients:
            if isinstance(op, Start):
                assert op.op not in in_flight
                in_flight.add(op.op)
            if isinstance(op, Wait) and not isinstance(op.op, Sync):
                in_flight.remove(op.op)
            elif isinstance(op, Wait):
                updated.add(op.op.unit)
            about = inner(op)
            if isinstance(about, Gather) and isinstance(op, Start):
                part = range(about.offset, about.offset + spec.units[about.unit].numel)
                assert part.start % ALIGN == 0 and part.stop <= made.arena_numel
                assert all(part.stop <= other.start or other.stop <= part.start for other in taken.values())
                assert about.unit not in taken
                taken[about.unit] = part
            elif isinstance(about, Gather):
                assert about.offset == taken[about.unit].start
                present.add(about.unit)
            elif isinstance(op, Release):
                present.remove(op.unit)
                del taken[op.unit]
            elif isinstance(op, Open):
                assert op.unit not in opened
                # A gradient that is sharded once it is reduced has one whole buffer, also over two micro-batches.
                assert Reduce(op.unit) not in in_flight or not spec.policy(op.unit).optimizer
                opened.add(op.unit)
            elif isinstance(about, Reduce) and not isinstance(op, Wait):
                opened.remove(about.unit)
            elif isinstance(op, Keep):
                kept.add(op.key)
            elif isinstance(op, Drop):
                kept.remove(op.key)
            elif isinstance(op, COMPUTE):
                layer = spec.layers[op.layer]
                if isinstance(op, Forward):
                    assert {unit for unit in layer.units if spec.policy(unit).syncs} <= updated
                needs = isinstance(op, (Forward, Recompute)) or (isinstance(op, Backward) and layer.use is Use.LAYER)
                if needs:
                    assert {unit for unit in layer.units if spec.policy(unit).parameters} <= present
                derives = isinstance(op, BackwardWeights) or (isinstance(op, Backward) and op.weights)
                if layer.use is Use.HEAD:
                    derives = isinstance(op, Forward) and op.graph
                if derives:
                    assert {u for u in layer.units if spec.units[u].trains} <= opened
                if isinstance(op, Recompute):
                    assert op.key in kept
        assert not (present or taken or opened or kept or in_flight)


def test_gathers_and_receives_start_one_layer_ahead() -> None:
    """A layer's weights are gathered, with overlap, while the layer before it computes, and no earlier."""
    spec = rank_spec(config(zero=ZeroConfig(3)), Layout(dp=2), 0, declare)
    ops = program(spec, "1f1b", 1).gradients
    for at, op in enumerate(ops):
        if isinstance(op, Start) and isinstance(op.op, Gather):
            between = [o for o in ops[at : ops.index(Wait(op.op), at)] if isinstance(o, COMPUTE)]
            between = [o for o in between if not (isinstance(o, Backward) and o.layer == "head")]  # computes nothing
            at_the_start = not any(isinstance(o, COMPUTE) for o in ops[:at])
            # after the loss the last block waits: head and block before it hold the two slots of their size
            assert len(between) == 1 or at_the_start, (name_of(op), [name_of(o) for o in between])
    without = replace(spec, overlap=False)
    for at, op in enumerate(ops := program(without, "1f1b", 1).gradients):
        if isinstance(op, Start) and isinstance(op.op, Gather):
            assert ops[at + 1] == Wait(op.op)


def test_reductions_run_behind_the_backward() -> None:
    """A unit's reduction is waited for, with overlap, only when the next starts or its own gradients are opened."""
    spec = rank_spec(config(zero=ZeroConfig(2)), Layout(dp=2), 0, declare)
    ops = program(spec, "1f1b", 2).gradients
    starts = [at for at, op in enumerate(ops) if isinstance(op, Start) and isinstance(op.op, Reduce)]
    for at in starts[:-1]:
        wait = ops.index(Wait(ops[at].op), at)
        assert any(isinstance(op, COMPUTE) for op in ops[at:wait])
        following = ops[wait + 1]
        assert following == Open(ops[at].op.unit) or (isinstance(following, Start) and isinstance(following.op, Reduce))
    plain = program(replace(spec, overlap=False), "1f1b", 2).gradients
    assert not any(isinstance(op, (Start, Wait)) and isinstance(op.op, Reduce) for op in plain)


@for_each(
    ("stage", "every", "wanted"), [(0, "micro-batch", 1), (1, "micro-batch", 1), (2, "micro-batch", 4), (3, "step", 1)]
)
def test_reductions_per_step(stage: int, every: str, wanted: int) -> None:
    """Stages 2 and 3 reduce at every micro-batch, unless asked for once per step."""
    zero = ZeroConfig(stage, 0, every)  # type: ignore[arg-type]
    spec = rank_spec(config(zero=zero), Layout(dp=2), 0, declare)
    ops = program(spec, "1f1b", 4).gradients
    reduced = [op for op in ops if isinstance(inner(op), Reduce) and not isinstance(op, Wait)]
    assert len(reduced) == wanted * len(spec.units)


def test_a_release_right_before_a_gather_is_dropped() -> None:
    """At the last layer of a stage that is not the last, forward and backward follow each other in 1F1B."""
    spec = rank_spec(
        config(zero=ZeroConfig(3), parallel=replace(ParallelConfig(), pipeline_model_parallel_size=2)),
        Layout(2, 2),
        0,
        declare,
    )
    ops = program(spec, "1f1b", 4).gradients
    last = spec.chunks[0][-1].units[0]
    gathers = [op for op in ops if isinstance(op, Start) and isinstance(op.op, Gather) and op.op.unit == last]
    # 4 forwards and 4 backwards; warm-up F0 | F1 B0 | F2 B1 | F3 B2 | B3 leaves 5 spans
    assert len(gathers) == 5
    assert merge_gathers([Release("a"), Gather("a"), Release("b"), Forward("x", 0, True), Gather("b")]) == [
        Release("b"),
        Forward("x", 0, True),
        Gather("b"),
    ]


def test_the_end_of_a_step_has_one_order() -> None:
    spec = rank_spec(config(zero=ZeroConfig(2)), Layout(dp=2), 0, declare)
    units = {name: unit._replace(sums_over_tp=True) for name, unit in spec.units.items()}
    spec = replace(spec, groups=replicated(spec), units=units, tied="token_embedding")
    order = [type(inner(op)) for op in finish_gradients(spec)]
    assert [kind for kind, _ in itertools.groupby(order)] == [ReduceReplicas, SumReplicated, SumTied, GradNorm]


@for_each("schedule, pp", [("1f1b", 1), ("1f1b", 2), ("zero-bubble", 2)])
@for_each("stage", [1, 2, 3])
def test_replicas_are_summed_behind_the_backward(stage: int, schedule: str, pp: int) -> None:
    """Each unit is summed once, when its last reduction is done; all but the last two while another layer computes."""
    parallel = replace(ParallelConfig(), pipeline_model_parallel_size=pp)
    spec = rank_spec(config(zero=ZeroConfig(stage), parallel=parallel), Layout(pp, 4), pp - 1, declare)
    spec = replace(spec, groups=replicated(spec))
    ops = program(spec, schedule, 2).gradients
    last = max(at for at, op in enumerate(ops) if isinstance(op, COMPUTE))
    started = {op.op.unit: at for at, op in enumerate(ops) if isinstance(op, Start) and type(op.op) is ReduceReplicas}
    starts = [op for op in ops if isinstance(op, Start) and type(op.op) is ReduceReplicas]
    assert len(started) == len(spec.trained_units) == len(starts)
    for unit, at in started.items():
        assert ops[at - 1] == Wait(Reduce(unit)) and Wait(Reduce(unit)) not in ops[at:]
        assert ops.count(Wait(ReduceReplicas(unit))) == 1 and ops.index(Wait(ReduceReplicas(unit))) > last
    assert sum(at > last for at in started.values()) <= 2

    def cost(op: Op) -> float:
        return 2.0 if isinstance(op, Backward) else float(isinstance(inner(op), ReduceReplicas))

    at_the_end = [op for op in ops if not isinstance(op, Start) or type(op.op) is not ReduceReplicas]
    first = next(at for at, op in enumerate(at_the_end) if isinstance(op, Wait) and type(op.op) is ReduceReplicas)
    at_the_end[first:first] = [Start(ReduceReplicas(unit)) for unit in spec.trained_units]
    alone = [[op for op in each if not isinstance(inner(op), Transfer)] for each in (ops, at_the_end)]
    behind, after = (simulate([each], cost).seconds for each in alone)
    assert after - behind >= (len(spec.trained_units) - 2 if schedule == "1f1b" else 1)


def test_a_frozen_unit_is_neither_opened_nor_updated() -> None:
    frozen = replace(config(), training=replace(config().training, freeze_parameters=("blocks.1.*",)))
    spec = rank_spec(frozen, Layout(dp=2), 0, declare)
    step = program(spec, "1f1b", 2)
    every = map(inner, [*step.gradients, *step.update])
    touched = {op.unit for op in every if isinstance(op, (Open, Reduce, Update))}
    assert "blocks.1" not in touched and {"blocks.0", "blocks.2"} <= touched


def test_operations_of_different_types_differ() -> None:
    assert Sync("head") != Reduce("head") and len({Sync("head"), Reduce("head")}) == 2


@pytest.mark.second
@pytest.mark.long
def test_a_program_is_printed_one_operation_per_line() -> None:
    spec = rank_spec(config(zero=ZeroConfig(3)), Layout(dp=2), 0, declare)
    step = program(spec, "1f1b", 1)
    lines = list(lines_of(step.gradients))
    assert len(lines) == len(step.gradients) and "Forward blocks.0 mb 0" in lines
    command = "--zero-stage 3 --num-layers 5 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 128"
    done = subprocess.run(
        [sys.executable, "scripts/print_program.py", *command.split(), "--world-size", "2"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[: len(lines)] == lines
