"""Another optimizer is a module and a value; another place for its states is a value."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from megazero.comm.mesh.mesh import Mesh
from megazero.config.optimizers import OPTIMIZERS, UpdateRule
from megazero.model.stage import declare
from megazero.optim.updates import UPDATES
from megazero.plan.layout.flat_layout import whole_windows
from megazero.plan.program.operations import Start, Update, Wait, name_of
from megazero.plan.program.program import program
from megazero.plan.program.rank_spec import rank_spec
from megazero.plan.sizes import Rates
from megazero.price.bytes.estimate import estimate
from megazero.rehearse.saves import pretended_shards
from megazero.step.engine import Engine
from tests.helpers import lion
from tests.parallel.cases import Case, Outcome, train, train_on
from tests.parallel.test_parity import check_bytes

ON_HOST = OPTIMIZERS["adamw"]._replace(place="host")


@contextlib.contextmanager
def ruled_by(rule: UpdateRule) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIMIZERS, "adamw", rule)
        patch.setitem(UPDATES, "lion", lion.update)
        yield


class Learned(NamedTuple):
    outcome: Outcome
    states: dict[str, torch.Tensor]  # whole tensors, where one rank owns all of it


def learn(rank: int, case: Case, rule: UpdateRule) -> Learned:
    with ruled_by(rule):
        mesh = Mesh.build(case.layout, rank, torch.device("cpu"))
        outcome = train_on(mesh, case)
        engine = Engine(case.config(), mesh)
        names = [name for name, shard in engine.shards().items() if shard.data.dtype != torch.float64]
        return Learned(outcome, dict.fromkeys(names, torch.empty(0)))


def case_of(dp: int, zero: int, **changes: object) -> Case:
    return Case(dp=dp, zero=zero, micro_batches=12 // dp // 2, precision="fp64", **changes)  # type: ignore[arg-type]


def test_another_optimizer_is_the_same_in_every_layout(ranks) -> None:
    """Lion over three ranks follows Lion on one; its bytes are the estimate's; all who count states count its one."""
    one, three = case_of(1, 0), case_of(3, 3)
    (alone,) = ranks(1).run(learn, one, lion.RULE)
    (adamw,) = ranks(1).run(train, one)
    spread = ranks(3).run(learn, three, lion.RULE)
    for found in spread:
        assert found.outcome.losses == pytest.approx(alone.outcome.losses, rel=1e-10, abs=0)
        assert all(name.startswith("direction.") for name in found.states) and len(found.states) > 20
    losses = alone.outcome.losses
    assert adamw.losses[0] == pytest.approx(losses[0], rel=1e-12) and adamw.losses[-1] != losses[-1]
    with ruled_by(lion.RULE):
        check_bytes(one, [alone.outcome])
        check_bytes(three, [found.outcome for found in spread])
        config = one.config()
        assert Rates.of(config) == (8, 8, 8, 2, 3 * 8 + 2 * 2)
        kinds = {name.split(".")[0] for name in pretended_shards(config, one.layout, 0, torch.float64)}
        assert kinds == {"model", "direction"}


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_states_on_the_host_are_the_same_to_the_bit(zero: int, ranks) -> None:
    """Their master weights are a copy, also of weights as wide; updates start ahead and are waited for."""
    case = case_of(2, zero)
    device, host = (ranks(2).run(learn, case, rule) for rule in (OPTIMIZERS["adamw"], ON_HOST))
    for ours, theirs in zip(host, device, strict=True):
        assert ours.outcome.losses == theirs.outcome.losses and ours.outcome.norms == theirs.outcome.norms
        for here, there in zip(ours.outcome.memory, theirs.outcome.memory, strict=True):
            assert here["optimizer"] == 0 and here["host"] == there["optimizer"] * 3 // 2 + there["host"]
    with ruled_by(ON_HOST):
        check_bytes(case, [each.outcome for each in host])


def test_every_rule_has_an_update() -> None:
    assert OPTIMIZERS.keys() == UPDATES.keys() == {rule.name for rule in OPTIMIZERS.values()}


def test_updates_on_the_host_start_one_unit_ahead() -> None:
    case = case_of(2, 2)
    plain = rank_spec(case.config(), case.layout, 0, declare)
    assert [name_of(op) for op in program(plain, "1f1b", 2).update[:2]] == [
        "Update token_embedding",
        "start Sync token_embedding",
    ]
    with ruled_by(ON_HOST):
        spec = rank_spec(case.config(), case.layout, 0, declare)
    ops = [op for op in program(spec, "1f1b", 2).update if isinstance(op, (Start, Wait)) and isinstance(op.op, Update)]
    started = [op.op.unit for op in ops if isinstance(op, Start)]
    assert started == [op.op.unit for op in ops if isinstance(op, Wait)] == spec.trained_units
    assert [type(op) for op in ops] == [Start, *[Start, Wait] * (len(started) - 1), Wait]


def test_an_optimizer_of_whole_matrices_has_ranges_between_weights() -> None:
    case = case_of(3, 1)
    with ruled_by(lion.RULE._replace(whole_matrices=True)):
        spec = rank_spec(case.config(), case.layout, 0, declare)
    assert spec.group("blocks.0").cut is whole_windows
    assert estimate(case.config(), case.layout)  # AdamW cuts anywhere
