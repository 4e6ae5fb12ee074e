"""Optimizers are values: AdamW, Lion, Muon."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from megazero.checkpoint.engine_state import EngineState
from megazero.command.rehearsal.allocated import Allocated
from megazero.command.rehearsal.rehearsed_save import pretended_shards
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.optim.step import StepParams
from megazero.engine.optim.updates import MATRIX_UPDATES, UPDATES
from megazero.engine.options.optimizers import LION, OPTIMIZERS, State
from megazero.engine.plan.optimizer_sizes import Rates
from megazero.engine.step.engine import Engine
from megazero.engine.zero.reduce_scatter import Buffer
from megazero.planner.state_shares import host_rate
from tests.parallel.cases import MODEL, Case, Outcome, train, train_on
from tests.parallel.test_bytes import FEW_NUMBERS
from tests.parallel.test_parity import check_bytes

WIDE = replace(MODEL, num_layers=1, hidden_size=128, num_attention_heads=2, ffn_hidden_size=256)
NARROW = replace(WIDE, ffn_hidden_size=64, kv_channels=16)  # the MLP's longer sides are whole on every rank


class Learned(NamedTuple):
    outcome: Outcome
    states: set[str]


def learn(rank: int, case: Case) -> Learned:
    mesh = Mesh.build(case.layout, rank, torch.device("cpu"))
    outcome = train_on(mesh, case)
    return Learned(outcome, set(EngineState(Engine(case.config(), mesh)).shards()))


def case_of(dp: int, zero: int, **changes: object) -> Case:
    return Case(dp=dp, zero=zero, micro_batches=12 // dp // 2, precision="fp64", **changes)  # type: ignore[arg-type]


@pytest.mark.second
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
    assert Rates.of(config, LION) == (8, 8, 8, 8, 16, 5 * 8) and host_rate(Rates.of(config, LION)) == 24
    kinds = {name.split(".")[0] for name in pretended_shards(config, one.layout, 0, torch.float64)}
    assert kinds == {"model", "direction"}


class NoAllocation:
    def end(self) -> None:
        pass


def update_twice(rank: int, case: Case) -> list[tuple[int, int]]:
    """Return (the estimate's bytes, the most that the second update has alive, beyond those before) of every unit."""
    engine, found = Engine(case.config(), Mesh.build(case.layout, rank, torch.device("cpu"))), []
    for unit in engine.zero.units.values():
        params = StepParams(engine.config.optimizer, 1e-3, torch.tensor(1.0), None, number=1)
        gradient = torch.ones(unit.flat.owned.numel, dtype=engine.zero.options.grad_dtype)
        with Allocated(torch.device("cpu")) as alive:
            unit.optimizer.step(params, Buffer(gradient.clone(), NoAllocation()))  # type: ignore[arg-type]
            again = gradient.clone()
            before = alive.now
            alive.begin()
            unit.optimizer.step(params, Buffer(again, NoAllocation()))  # type: ignore[arg-type]
        found.append((unit.flat.sizes(engine.zero.options).temporary, alive.peak - before))
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case(optimizer="lion", model=WIDE),
        Case(optimizer="lion", model=WIDE, precision="bf16", grad_dtype="bf16", masters="split"),
        Case(optimizer="muon", model=WIDE, precision="bf16"),
        Case(tp=2, optimizer="muon", model=WIDE, precision="bf16"),
        Case(tp=2, optimizer="muon", model=NARROW),
        Case(optimizer="muon", model=WIDE, precision="fp64", grad_dtype="fp64", moments="int8"),
        Case(model=WIDE, precision="bf16", moments="bf16", masters="split"),
        Case(model=WIDE, moments="int8"),
    ],
    ids=str,
)
def test_an_update_allocates_as_many_bytes_as_estimated(case: Case, ranks) -> None:
    for found in ranks(case.world).run(update_twice, case):
        assert max(estimated for estimated, _ in found)
        for estimated, counted in found:
            assert 0.85 * estimated <= counted <= estimated + FEW_NUMBERS


def test_states_have_bytes_by_their_precision() -> None:
    assert LION._replace(states=(State("direction", "bf16"), State("second"))).state_bytes(4) == 6
    assert OPTIMIZERS["muon"].states == (State("momentum"), State("exp_avg"), State("exp_avg_sq", positive=True))


def test_every_rule_has_an_update() -> None:
    rules = {rule.name for optimizer in OPTIMIZERS.values() for rule in optimizer.rules}
    assert rules == UPDATES.keys() | MATRIX_UPDATES.keys()
