"""Optimizers are values: AdamW, Lion, Muon; and another place for their states is a value."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from megazero.comm.mesh.mesh import Mesh
from megazero.config.optimizers import LION, OPTIMIZERS, State
from megazero.model.stage import declare
from megazero.optim.updates import MATRIX_UPDATES, UPDATES
from megazero.plan.program.operations import Start, Update, Wait, name_of
from megazero.plan.program.program import program
from megazero.plan.program.rank_spec import rank_spec
from megazero.plan.sizes import Rates
from megazero.rehearse.saves import pretended_shards
from megazero.step.engine import Engine
from tests.parallel.cases import Case, Outcome, train, train_on
from tests.parallel.test_parity import check_bytes

ON_HOST = OPTIMIZERS["adamw"]._replace(place="host")


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIMIZERS, "adamw", ON_HOST)
        yield


def train_on_host(rank: int, case: Case) -> Outcome:
    with on_host():
        return train(rank, case)


class Learned(NamedTuple):
    outcome: Outcome
    states: set[str]


def learn(rank: int, case: Case) -> Learned:
    mesh = Mesh.build(case.layout, rank, torch.device("cpu"))
    outcome = train_on(mesh, case)
    return Learned(outcome, set(Engine(case.config(), mesh).shards()))


def case_of(dp: int, zero: int, **changes: object) -> Case:
    return Case(dp=dp, zero=zero, micro_batches=12 // dp // 2, precision="fp64", **changes)  # type: ignore[arg-type]


def test_lion_is_the_same_in_every_layout(ranks) -> None:
    """Over three ranks as on one; its bytes are the estimate's; all who count states count its one."""
    one, three = case_of(1, 0, optimizer="lion"), case_of(3, 3, optimizer="lion")
    (alone,) = ranks(1).run(learn, one)
    (adamw,) = ranks(1).run(train, case_of(1, 0))
    spread = ranks(3).run(learn, three)
    for found in spread:
        assert found.outcome.losses == pytest.approx(alone.outcome.losses, rel=1e-10, abs=0)
        kinds = {name.split(".")[0] for name in found.states}
        assert kinds == {"model", "direction"} and len(found.states) > 40
    losses = alone.outcome.losses
    assert adamw.losses[0] == pytest.approx(losses[0], rel=1e-12) and adamw.losses[-1] != losses[-1]
    check_bytes(one, [alone.outcome])
    check_bytes(three, [found.outcome for found in spread])
    config = one.config()
    assert Rates.of(config, LION) == (8, 8, 8, 8, 5 * 8)
    kinds = {name.split(".")[0] for name in pretended_shards(config, one.layout, 0, torch.float64)}
    assert kinds == {"model", "direction"}


def test_states_have_bytes_by_their_precision() -> None:
    assert LION._replace(states=(State("direction", "bf16"), State("second"))).state_bytes(4) == 6
    assert OPTIMIZERS["muon"].states == (State("momentum"), State("exp_avg"), State("exp_avg_sq", positive=True))


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_states_on_the_host_are_the_same_to_the_bit(zero: int, ranks) -> None:
    """Their master weights are a copy, also of weights as wide; updates start ahead and are waited for."""
    case = case_of(2, zero)
    device, host = (ranks(2).run(learned, case) for learned in (train, train_on_host))
    for ours, theirs in zip(host, device, strict=True):
        assert ours.losses == theirs.losses and ours.norms == theirs.norms
        for here, there in zip(ours.memory, theirs.memory, strict=True):
            assert here["optimizer"] == 0 and here["host"] == there["optimizer"] * 3 // 2 + there["host"]
    with on_host():
        check_bytes(case, host)


def test_every_rule_has_an_update() -> None:
    rules = {rule.name for optimizer in OPTIMIZERS.values() for rule in optimizer.rules}
    assert rules == UPDATES.keys() | MATRIX_UPDATES.keys()


def test_updates_on_the_host_start_one_unit_ahead() -> None:
    case = case_of(2, 2)
    plain = rank_spec(case.config(), case.layout, 0, declare)
    assert [name_of(op) for op in program(plain, "1f1b", 2).update[:2]] == [
        "Update token_embedding",
        "start Sync token_embedding",
    ]
    with on_host():
        spec = rank_spec(case.config(), case.layout, 0, declare)
    ops = [op for op in program(spec, "1f1b", 2).update if isinstance(op, (Start, Wait)) and isinstance(op.op, Update)]
    started = [op.op.unit for op in ops if isinstance(op, Start)]
    assert started == [op.op.unit for op in ops if isinstance(op, Wait)] == spec.trained_units
    assert [type(op) for op in ops] == [Start, *[Start, Wait] * (len(started) - 1), Wait]
