"""Units of one rank in several sharding groups: other axes, sizes and policies, the same model.

Today's runs have one group. Here layers are dealt to three along the axes that there are: block 1 and block 3 are
sharded where the others are replicated and the other way round, and the head by itself, over one rank.
"""

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch

from megazero.command.rehearsal.rehearsed_save import plan_save, pretended_shards
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout import zero_policy
from megazero.engine.plan.layout.flat_layout import ALIGN
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.layout.zero_policy import ShardingGroup, ZeroPolicy
from megazero.engine.plan.program import rank_spec
from megazero.engine.plan.program.operations import (
    Gather,
    Ops,
    Reduce,
    ReduceReplicas,
    Release,
    Start,
    Sync,
    Wait,
    inner,
)
from megazero.engine.plan.program.program import program
from megazero.flags.config import Config
from megazero.planner.bytes import rank_parts
from megazero.planner.bytes.estimate import estimate
from tests.parallel.cases import Case, Outcome, train
from tests.parallel.test_parity import TOLERANCE, check_bytes, expected, relative_error

SWAPPED, ALONE = ("blocks.1", "blocks.3"), ("head",)


def three(config: Config, layout: Layout) -> dict[str, ShardingGroup]:
    axes = {"dense": ("shard", "replica"), "swapped": ("replica", "shard"), "alone": ("tp", "dp")}
    return {name: ShardingGroup.of(config, layout, *found) for name, found in axes.items()}


def group_of(unit: str) -> str:
    return "swapped" if unit in SWAPPED else "alone" if unit in ALONE else "dense"


@contextlib.contextmanager
def three_groups() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (rank_spec, rank_parts, zero_policy):
            patch.setattr(module, "sharding_groups", three)
            patch.setattr(module, "group_of", group_of)
        rank_parts._units.cache_clear()
        yield
    rank_parts._units.cache_clear()


def train_in_groups(rank: int, case: Case) -> Outcome:
    with three_groups():
        return train(rank, case)


def case_of(zero: int, dp: int = 4, **changes: object) -> Case:
    return Case(dp=dp, zero=zero, precision="fp64", options=(("zero_shard_size", 2),), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "zero", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.second), 3]
)
def test_units_in_several_groups_are_the_same_model(zero: int, ranks) -> None:
    case = case_of(zero, micro_batches=3)
    losses, norms = expected(case)
    outcomes = ranks(case.world).run(train_in_groups, case)
    for outcome in outcomes:
        assert relative_error(outcome.losses, losses) < TOLERANCE
        assert relative_error(outcome.norms, norms) < TOLERANCE
    with three_groups():
        check_bytes(case, outcomes)
        fewer = estimate(case.config(), case.layout).memory["parameters"]
    assert fewer >= estimate(case.config(), case.layout).memory["parameters"]  # the head has all of its weights


def operations(ops: Ops, *kinds: type) -> list[str]:
    """The units of the operations of these types, each once."""
    return sorted({inner(op).unit for op in ops if isinstance(inner(op), kinds)})  # type: ignore[union-attr]


def test_a_program_takes_the_policy_of_each_units_group() -> None:
    """A group of one rank is at stage 0 independently of the others; each group has one reduction in flight."""
    case = case_of(3, dp=6, micro_batches=2)  # shard 2, replica 3
    with three_groups():
        spec = rank_spec.rank_spec(case.config(), case.layout, 0, declare)
    assert spec.policy("head") == ZeroPolicy(False, False, False) != spec.policy("blocks.0") == spec.policy("blocks.1")
    numel = {name: unit.numel for name, unit in spec.units.items()}
    assert [numel[u] // spec.units[u].owned[0].numel for u in ("blocks.0", "blocks.1", "head")] == [2, 3, 1]
    assert [spec.group(u).replicas for u in ("blocks.0", "blocks.1", "head")] == [3, 2, 6]
    step = program(spec, "1f1b", 2)
    gathered = [unit for unit in spec.units if unit != "head"]
    assert operations(step.gradients, Gather) == operations(step.gradients, Release) == sorted(gathered)
    assert operations(step.gradients, Reduce) == operations(step.gradients, ReduceReplicas) == sorted(spec.units)
    assert step.gradients.count(Start(Reduce("head"))) == 1 < step.gradients.count(Start(Reduce("blocks.1")))
    in_flight: dict[str, int] = dict.fromkeys(spec.groups, 0)
    most, at_once = dict(in_flight), 0
    for op in step.gradients:
        if isinstance(op, (Start, Wait)) and isinstance(op.op, Reduce):
            group = group_of(op.op.unit)
            in_flight[group] += 1 if isinstance(op, Start) else -1
            most[group] = max(most[group], in_flight[group])
            at_once = max(at_once, sum(in_flight.values()))
    assert most == {"dense": 1, "swapped": 1, "alone": 1} and at_once == 3 and not any(in_flight.values())
    with three_groups():
        spec = rank_spec.rank_spec(case._replace(zero=1).config(), case.layout, 0, declare)
    assert operations(program(spec, "1f1b", 2).update, Sync) == sorted(gathered)


def test_ranks_of_several_groups_save_every_element() -> None:
    """`plan_save` raises if an element is missing. Its parts are a half, a third, and all of a unit."""
    case = case_of(2, dp=6)
    with three_groups():
        for rank in (0, 5):
            shards = pretended_shards(case.config(), case.layout, rank, torch.float64)
            plan_save(case.config(), case.layout, rank, shards)
            held = {
                unit: sum(s.data.numel() for name, s in shards.items() if name.startswith(f"model.{unit}."))
                for unit in ("blocks.0", "blocks.1", "head")
            }
            numel = sum(math.prod(spec.shape) for spec in declare(case.model).kinds["blocks.0"].params)
            assert abs(held["blocks.0"] - numel / 2) < 6 * ALIGN > abs(held["blocks.1"] - numel / 3)
            assert held["head"] == 2 * case.model.hidden_size
