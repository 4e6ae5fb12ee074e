"""Moments in 16 and 8 bits, and split master weights: the same run in every layout, in fewer bytes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megazero import checkpoint
from megazero.checkpoint.engine_state import EngineState, states_of
from megazero.checkpoint.shards import owned_regions, views_of
from megazero.checkpoint.streaming import TensorReader
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.optim.small import Wide
from megazero.engine.optim.step import StepParams
from megazero.engine.step.engine import Engine
from megazero.engine.zero import optimizer_shard
from megazero.engine.zero.optimizer_shard import OptimizerShard
from megazero.engine.zero.reduce_scatter import Buffer
from tests.helpers import small
from tests.helpers.families import of_family
from tests.helpers.rings import by_default
from tests.parallel.cases import MODEL, Case, Outcome, micro_batches, new_engine, train, train_on
from tests.parallel.test_parity import TOLERANCE, check_bytes, expected, relative_error
from tests.parallel.test_update_rules import NoAllocation

# Rows of most matrices are whole blocks of 32; those of `odd` are not. A head's 32 columns, or 2 x 32 on a rank.
WIDE = replace(MODEL, hidden_size=96, kv_channels=32, num_layers=2)
LLAMA = replace(WIDE, **of_family("llama"), num_query_groups=2, ffn_hidden_size=192)
EXPERTS = replace(
    LLAMA,
    num_experts=4,
    moe_ffn_hidden_size=64,
    moe_aux_loss_coeff=0.1,
)


def case_of(moments: str, **changes: object) -> Case:
    return Case(moments=moments, **{"precision": "fp64", "model": WIDE, "micro_batches": 1} | changes)  # type: ignore[arg-type]


CASES = [
    case_of("int8"),
    case_of("bf16"),
    case_of("int8", optimizer="muon"),
    case_of("bf16", dp=2, zero=1, micro_batches=2),
    case_of("int8", dp=3, zero=3, model=LLAMA, options=(("reduce_bucket_size", 3000),)),
    case_of("int8", dp=2, tp=2, zero=2, sp=True),
    case_of("bf16", tp=2, model=LLAMA, zero=1),
    case_of("int8", tp=3, model=WIDE),
    case_of("int8", tp=2, model=replace(LLAMA, num_query_groups=1)),  # a weight that both ranks have, behind others
    case_of("int8", pp=2, dp=2, zero=1, model=LLAMA, micro_batches=2),
    case_of("bf16", dp=2, tp=2, zero=1, ep=4, etp=1, sp=True, model=EXPERTS),
    case_of("int8", dp=2, zero=2, offload=0.5),
    case_of("bf16", zero=0, optimizer="lion", offload=1.0),
]
LARGE = [  # other experts' shares; and Muon, whose layouts test_muon.py has
    case_of("int8", dp=2, tp=2, zero=3, ep=2, etp=2, sp=True, model=EXPERTS),
    case_of("int8", dp=4, zero=2, optimizer="muon"),
    case_of("bf16", dp=2, tp=2, zero=1, optimizer="muon", model=LLAMA),
]


@pytest.mark.parametrize(
    "case", [*by_default(CASES, 1, 11), *(pytest.param(case, marks=pytest.mark.slow) for case in LARGE)], ids=str
)
def test_every_layout_rounds_moments_alike(case: Case, ranks) -> None:
    """Losses are those of plain PyTorch with moments that numpy rounds."""
    losses, norms = expected(case)
    outcomes = ranks(case.world).run(train, case)
    for outcome in outcomes:
        assert relative_error(outcome.losses, losses) < TOLERANCE
        assert relative_error(outcome.norms, norms) < TOLERANCE
    check_bytes(case, outcomes)


def update(rank: int, case: Case, number: int) -> torch.Tensor:
    """Return the first moment of a block after one update, as if it was the run's update `number`."""
    engine = new_engine(rank, case)
    unit = engine.zero.units["blocks.0"]
    gradient = torch.linspace(0.1, 1.0, unit.flat.owned.numel, dtype=engine.zero.options.grad_dtype)
    params = StepParams(engine.config.optimizer, 1e-3, torch.tensor(1.0), None, number)
    unit.optimizer.step(params, Buffer(gradient, NoAllocation()))  # type: ignore[arg-type]
    return torch.cat(
        [states_of(unit.optimizer, part)["exp_avg"] for part in unit.flat.owned_parts() if part.weight.spec.blocked]
    )


def test_every_update_has_its_own_bits(ranks) -> None:
    """About half of the numbers are rounded differently; by the bits of one update, none."""
    (second,), (again,), (third,) = (ranks(1).run(update, case_of("bf16"), number) for number in (2, 2, 3))
    assert torch.equal(second, again) and (second != third).double().mean() > 0.2


def train_in_pieces(rank: int, case: Case, numel: int) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_shard, "TOGETHER", numel)
        return train(rank, case)


@pytest.mark.second
@pytest.mark.parametrize(
    ("optimizer", "moments", "masters"),
    [("adamw", "int8", "fp32"), ("adamw", "fp32", "split"), ("adamw", "bf16", "split"), ("lion", "fp32", "fp32")],
)
def test_large_units_are_updated_piece_by_piece(optimizer: str, moments: str, masters: str, ranks) -> None:
    """The pieces change no result: numbers of one element do not depend on those of others, or of its block alone."""
    case = case_of(moments, optimizer=optimizer, masters=masters, precision="bf16", dp=2, zero=2)
    whole, pieces = ranks(2).run(train, case), ranks(2).run(train_in_pieces, case, 4096)
    assert [each.losses for each in whole] == [each.losses for each in pieces]


def whole_states(engine: Engine) -> dict[str, torch.Tensor]:
    """This rank's elements of every saved tensor, in place in the global tensor, and NaN elsewhere."""
    found = {}
    for name, shard in EngineState(engine).shards().items():
        whole = torch.full(shard.global_shape, torch.nan, dtype=shard.data.dtype)
        regions = owned_regions(shard)
        for region, data in zip(regions, views_of(shard, regions), strict=True):
            whole[tuple(slice(at, at + n) for at, n in zip(region.offset, region.size, strict=True))] = data
        found[name] = whole
    return found


def train_and_save(rank: int, case: Case, folder: Path) -> float:
    """Two steps, a checkpoint, and the loss of the step after it."""
    engine = new_engine(rank, case)
    for step in range(2):
        engine.train_step(step + 1, micro_batches(case, engine.mesh, step))
    engine.wait()
    checkpoint.save(folder, 2, EngineState(engine).shards(), EngineState(engine).numbers(), engine.mesh.host.group)
    return engine.train_step(3, micro_batches(case, engine.mesh, 0)).loss


def load(rank: int, case: Case, path: Path, folder: Path) -> tuple[dict[str, torch.Tensor], float]:
    """Load, save again in `folder`, and train a step. Return this rank's states and the loss."""
    engine = new_engine(rank, case)
    engine.wait()
    shards = EngineState(engine).shards()
    checkpoint.load(path, shards, engine.mesh.host.group)
    EngineState(engine).load(checkpoint.read_state(path), shards)
    checkpoint.save(folder, 2, EngineState(engine).shards(), EngineState(engine).numbers(), engine.mesh.host.group)
    states = whole_states(engine)
    return states, engine.train_step(3, micro_batches(case, engine.mesh, 0)).loss


def read(path: Path) -> dict[str, torch.Tensor]:
    reader = TensorReader(path)
    return {name: reader.read(name) for name in reader.manifest.tensors}


@pytest.mark.parametrize("moments", [pytest.param("bf16", marks=pytest.mark.slow), "int8"])
def test_checkpoints_keep_numbers_that_every_layout_and_precision_loads(moments: str, tmp_path: Path, ranks) -> None:
    """In another layout, to the bit; in fp32, the same numbers; from fp32, rounded by coordinates, and then kept."""
    first = case_of(moments, dp=2, tp=2, zero=2, model=LLAMA, precision="fp32")
    other = case_of(moments, dp=3, zero=3, model=LLAMA, precision="fp32", micro_batches=2)
    wide = other._replace(moments="fp32")
    [loss, *_] = ranks(4).run(train_and_save, first, tmp_path / "first")
    path, saved = tmp_path / "first" / "iter_0000002", read(tmp_path / "first" / "iter_0000002")
    for number, case in enumerate((other, wide)):
        found = ranks(case.world).run(load, case, path, tmp_path / f"again{number}")
        again = read(tmp_path / f"again{number}" / "iter_0000002")
        assert again.keys() == saved.keys() and all(torch.equal(again[name], saved[name]) for name in saved)
        for states, after in found:
            assert after == pytest.approx(loss, rel=1e-4)
            for name, mine in states.items():
                held = ~mine.isnan()
                assert torch.equal(mine[held], saved[name][held])
    ranks(4).run(train_and_save, first._replace(moments="fp32"), tmp_path / "wide")
    wanted, last = read(tmp_path / "wide" / "iter_0000002"), []
    for number, case in enumerate((first, other)):
        ranks(case.world).run(load, case, tmp_path / "wide" / "iter_0000002", tmp_path / f"small{number}")
        last.append(read(tmp_path / f"small{number}" / "iter_0000002"))
    for name, mine in last[0].items():
        kind, _, weight = name.partition(".")
        assert torch.equal(mine, last[1][name])
        bits = None
        if kind != "model" and small.is_blocked(mine):
            bits = small.random_bits(1234, weight, 2, mine.numel()) & np.uint32(0xFFFF)
            numbers = wanted[name].double().numpy().reshape(-1)
            rounded = small.rounded(numbers, moments, bits.astype(np.float64), positive=kind == "exp_avg_sq")
            wanted[name] = torch.from_numpy(rounded).view(mine.shape).float()
        assert torch.equal(mine, wanted[name])
        assert bits is None or mine.count_nonzero() > 0


def train_with_masters(rank: int, case: Case, away: bool) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """Train. `away`: fp32 master weights in the middle are rounded away from 0."""

    def cast(self: OptimizerShard) -> None:
        if isinstance(self.master, Wide):
            bits = self.master.data.view(torch.int32) + (1 << 15)
            target = self.home.compute_weights(self.weights)
            target.copy_((bits >> 16 << 16).view(torch.float32))

    with pytest.MonkeyPatch.context() as patch:
        if away:
            patch.setattr(OptimizerShard, "cast", cast)
        mesh = Mesh.build(case.layout, rank, torch.device("cpu"))
        outcome, engine = train_on(mesh, case), new_engine(rank, case)
        for step in range(2):
            engine.train_step(step + 1, micro_batches(case, engine.mesh, step))
        engine.wait()
        return outcome, whole_states(engine)


@pytest.mark.parametrize(
    ("dp", "zero", "offload"),
    [
        (1, 2, 0.5),
        *(pytest.param(2, *row, marks=pytest.mark.second) for row in ((0, 0.0), (3, 0.0), (1, 0.5), (3, 1.0))),
        *(pytest.param(2, zero, 0.0, marks=pytest.mark.slow) for zero in (1, 2)),
    ],
)
def test_split_master_weights_are_the_same_to_the_bit(dp: int, zero: int, offload: float, ranks) -> None:
    """They take 2 bytes less than fp32 ones. Those in host memory, far from the compute weights, are not split."""
    plain = case_of("fp32", precision="bf16", dp=dp, zero=zero, micro_batches=2, offload=offload)
    split = plain._replace(masters="split")
    wanted, found = (ranks(dp).run(train_with_masters, case, True) for case in (plain, split))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours[0].losses == theirs[0].losses and ours[0].norms == theirs[0].norms
        assert ours[1].keys() == theirs[1].keys()
        for name, states in ours[1].items():
            assert states.dtype == torch.float32
            assert torch.equal(states.view(torch.int32), theirs[1][name].view(torch.int32)), name
        for here, there in zip(ours[0].memory, theirs[0].memory, strict=True):
            numel = there["optimizer"] // 12
            assert here["optimizer"] == 10 * numel and here["parameters"] == there["parameters"]
    check_bytes(plain, [each[0] for each in wanted])
    check_bytes(split, [each[0] for each in found])


def test_all_small_states_at_once(ranks) -> None:
    """Bytes, in a layout with everything, and a loss near fp32's."""
    case = case_of(
        "int8", precision="bf16", masters="split", dp=2, tp=2, zero=3, sp=True, model=LLAMA, grad_dtype="bf16"
    )
    plain = case._replace(moments="fp32", masters="fp32")
    small_states, wide = (ranks(4).run(train, each) for each in (case, plain))
    check_bytes(case, small_states)
    assert small_states[0].losses == pytest.approx(wide[0].losses, rel=0.01)
    assert small_states[0].memory[-1]["optimizer"] < 0.37 * wide[0].memory[-1]["optimizer"]
