"""Faults: skipped steps, refused losses and gradients, and states that stay unchanged."""

import contextlib
import datetime
import math
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megazero.engine.mesh.mesh import Mesh
from megazero.engine.mesh.peer_errors import PeerLost
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.operations import Backward, Forward, Op, Reduce, Start
from megazero.engine.step.engine import Engine, LossScaleExhausted
from megazero.flags.config import Config, ModelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from megazero.observe.bad_step import LayerResult, diagnose_step, samples_text
from tests.parallel.cases import Case, MicroBatch, micro_batches, new_engine, train


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Everything that an update changes."""
    tensors = {}
    for unit in engine.zero.units.values():
        optimizer = unit.optimizer
        kept = [(optimizer.master, unit.flat.owned.numel)]
        kept += [(state, part.owned.numel) for part in optimizer.parts for state in part.states]
        found = [unit.weights.sharded, *(numbers.read(slice(0, numel)) for numbers, numel in kept)]
        tensors |= {f"{unit.name}.{i}": t for i, t in enumerate(found)}
    return {name: t.clone() for name, t in tensors.items()}


def step(engine: Engine, case: Case, number: int, poison: str | None = None) -> dict[str, object]:
    """One iteration; `poison`: the last data-parallel rank's gradient of this parameter becomes infinite."""
    holders = [(u, m) for u in engine.zero.units.values() for m in u.flat.members if m.weight.spec.name == poison]
    if holders and engine.mesh.dp.rank + 1 == engine.mesh.dp.size:
        ((unit, member),) = holders

        @contextlib.contextmanager
        def observe(op: Op) -> Iterator[None]:
            """Right before the unit's gradients are reduced."""
            if op in (Reduce(unit.name), Start(Reduce(unit.name))):
                assert unit.gradients.unsharded is not None
                unit.gradients.unsharded.data[member.window.start] = math.inf
            yield

        engine.interpreter.observe = observe
    result = engine.train_step(number, micro_batches(case, engine.mesh, number - 1))
    engine.interpreter.observe = None
    return result._asdict()


def skip_then_go_on(rank: int, case: Case) -> list[dict[str, object]]:
    engine = new_engine(rank, case)
    first = step(engine, case, 1)
    before, updates = state_of(engine), engine.updates
    poisoned = step(engine, case, 2, poison="blocks.1.mlp.up.bias")
    after = state_of(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert engine.updates == updates == 1
    return [first, poisoned]


@pytest.mark.parametrize(
    "case",
    [Case(), Case(dp=2, zero=0, micro_batches=3), Case(dp=2, zero=3, precision="fp16"), Case(pp=2, tp=2)],
    ids=str,
)
def test_a_skipped_step_changes_nothing_and_names_the_tensor(case: Case, ranks) -> None:
    for first, poisoned in ranks(case.world).run(skip_then_go_on, case):
        assert not first["skipped"] and first["skip_reason"] is None
        assert poisoned["skipped"] and not math.isfinite(poisoned["grad_norm"])
        assert "blocks.1.mlp.up.bias" in poisoned["skip_reason"] and "rank" in poisoned["skip_reason"]
        assert math.isfinite(poisoned["loss"])


def overflow(rank: int, case: Case) -> tuple[list[float], str]:
    """Loss scales until the run gives up."""
    config = case.config()
    training = replace(config.training, initial_loss_scale=2.0**40, min_loss_scale=2.0**38, hysteresis=2)
    engine = Engine(replace(config, training=training), new_engine(rank, case).mesh, diagnose=diagnose_step)
    before, scales = state_of(engine), []
    for number in range(1, 10):
        try:
            scales.append(step(engine, case, number)["loss_scale"])
        except LossScaleExhausted as error:
            after = state_of(engine)
            assert all(torch.equal(before[name], after[name]) for name in before)
            return scales, str(error)
    return scales, "no end"


def test_fp16_overflow_lowers_the_scale_and_ends_at_its_least(ranks) -> None:
    """Every gradient overflows: hysteresis forgives one, then the scale halves, then there is no way."""
    for scales, error in ranks(2).run(overflow, Case(dp=2, zero=2, precision="fp16", grad_dtype="fp16")):
        assert scales == [2.0**40, 2.0**40, 2.0**39]
        assert "--min-loss-scale" in error and "iteration 4" in error and "on rank" in error


def blamed(rank: int, case: Case) -> object:
    return step(new_engine(rank, case), case, 1, poison="blocks.4.mlp.up.bias")["skip_reason"]


@pytest.mark.parametrize("case", [Case(pp=2), Case(pp=2, dp=2), Case(pp=2, tp=2), Case(pp=3)], ids=str)
def test_the_rank_that_has_the_tensor_is_named(case: Case, ranks) -> None:
    """The lowest of the last stage's; all ranks report the same."""
    guilty = next(rank for rank in range(case.world) if case.layout.coord(rank).pp == case.pp - 1)
    assert guilty > 0
    found = ranks(case.world).run(blamed, case)
    assert len(set(found)) == 1 and "blocks.4.mlp.up.bias" in found[0]
    assert re.search(r"\brank (\d+)", found[0])[1] == str(guilty)


def broken_weight(rank: int, case: Case, name: str) -> tuple[object, list[int]]:
    """Return the reason of a skip, one weight of the last rank infinite, and the samples of its first micro-batch."""
    engine = new_engine(rank, case)
    engine.wait()
    if rank == case.world - 1:
        unit = next(unit for unit in engine.zero.units.values() if name in unit.flat.layout.windows)
        unit.weights.unsharded[unit.flat.layout.windows[name].start] = math.inf
    batches = micro_batches(case, engine.mesh, 0)
    return engine.train_step(1, batches).skip_reason, list(batches[0].samples)


@pytest.mark.parametrize(
    ("case", "name", "layer"),
    [
        (Case(), "blocks.2.mlp.up.bias", "the output of block 2"),
        (Case(dp=2, zero=2, micro_batches=3), "blocks.0.attention.proj.weight", "the output of block 0"),
        (Case(dp=2, zero=1, offload=1.0, disk=True), "blocks.1.mlp.down.weight", "the output of block 1"),
        (Case(pp=2, dp=2), "head.norm.weight", "the output of the head"),
        (Case(dp=2, batch=1, micro_batch_size=1, micro_batches=1), "head.norm.weight", "the output of the head"),
        (Case(pp=2, tp=2, recompute="full"), "blocks.4.norm1.weight", "the output of block 4"),
    ],
    ids=str,
)
def test_the_first_layer_that_is_not_finite_is_named(case: Case, name: str, layer: str, ranks) -> None:
    """And the rank, of a pair that tensor parallelism couples the lower one, and the samples of its micro-batch."""
    found = ranks(case.world).run(broken_weight, case, name)
    rank = case.world - case.tp
    samples = samples_text(found[rank][1])
    for reason, _ in found:
        assert reason.startswith(f"{layer} is the first that is not finite, on rank {rank}, for {samples}; "), reason


def test_a_fault_that_does_not_come_again_is_said_to_be_one(ranks) -> None:
    for reason in ranks(2).run(blamed, Case(pp=2)):
        assert reason.startswith("every layer's result was finite when the step was computed again; the gradient of ")


def test_forwards_come_before_backwards_and_each_in_its_direction() -> None:
    forwards = [Forward(layer, 0, True) for layer in ("token_embedding", "blocks.0", "blocks.11", "head")]
    backwards = [Backward(layer, 0, True) for layer in ("head", "blocks.11", "blocks.0")]
    layers = declare(ModelConfig(vocab_size=64))
    places = [LayerResult.of(op, layers) for op in [*forwards, *backwards]]
    assert sorted(places) == places
    assert places[0].text(layers) == "the output of the embedding"
    assert places[4].text(layers) == "the gradient of the input of the head"
    assert places[5].text(layers).endswith("block 11")


@pytest.mark.parametrize(
    "frozen", [("*embedding*", "blocks.[012].*"), ("head.*", "blocks.[34].*")], ids=["first", "last"]
)
def test_a_stage_may_learn_nothing(frozen: tuple[str, ...], ranks) -> None:
    """All that a pipeline stage holds is frozen: it still passes activations and gradients on."""
    case = Case(pp=2, frozen=frozen, recompute="full", precision="fp64")
    wanted = train(0, case._replace(pp=1))
    for found in ranks(2).run(train, case):
        assert found.losses == pytest.approx(wanted.losses, rel=1e-10)
        assert found.norms == pytest.approx(wanted.norms, rel=1e-10)


def without_targets(rank: int) -> tuple[bool, int, float]:
    case = Case(dp=2, zero=2)
    engine = new_engine(rank, case)
    before = state_of(engine)
    empty = [b._replace(loss_mask=torch.zeros_like(b.loss_mask)) for b in micro_batches(case, engine.mesh, 0)]
    result = engine.train_step(1, empty)
    after = state_of(engine)
    same = all(torch.equal(before[name], after[name]) for name in before)
    return same and result.skipped, engine.updates, engine.evaluate(empty)[1]


def test_a_batch_without_targets_makes_no_update(ranks) -> None:
    assert ranks(2).run(without_targets) == [(True, 0, 0)] * 2


def test_a_parameter_without_a_gradient_is_named() -> None:
    """Not hung: here the last block's MLP is cut out of the loss."""
    case = Case()
    engine = new_engine(0, case)
    block = engine.model.blocks["4"]
    block.forward = lambda x, tokens, output: block.attention(x, block.norm1, block.residuals[0], tokens)
    with pytest.raises(RuntimeError, match=r"blocks.4.norm2.weight.*blocks.4.mlp.down.bias received no gradient"):
        engine.train_step(1, micro_batches(case, engine.mesh, 0))


def test_a_unit_with_fewer_elements_than_ranks(ranks) -> None:
    """Hidden size 2: the final norm has 4 parameters, on 4 ranks."""
    model = ModelConfig(num_layers=1, hidden_size=2, num_attention_heads=1, seq_length=3, vocab_size=5)
    case = Case(model=model, micro_batches=1, precision="fp64")
    wanted = first_step(0, case)
    found = ranks(4).run(first_step, case._replace(dp=4, zero=3))
    assert [r.loss for r in found] == pytest.approx([wanted.loss] * 4, rel=1e-10)
    assert [r.grad_norm for r in found] == pytest.approx([wanted.grad_norm] * 4, rel=1e-10)


def first_step(rank: int, case: Case):
    engine = new_engine(rank, case)
    return engine.train_step(1, micro_batches(case, engine.mesh, 0))


def released(rank: int) -> bool:
    engine = new_engine(rank, Case(dp=2, zero=3))
    weights = [weight.data for unit in engine.model.units.values() for weight in unit]
    return all(bool(w.isnan().all()) and w.untyped_storage().nbytes() <= 4 for w in weights)


def test_a_released_parameter_is_nan_and_takes_no_memory(ranks) -> None:
    assert ranks(2).run(released) == [True, True]


def timeouts(rank: int) -> set[datetime.timedelta]:
    mesh = Mesh.build(Layout(pp=2, dp=2), rank, torch.device("cpu"), timeout_minutes=3.0)
    groups = [axis.group for axis in (mesh.pp, mesh.dp, mesh.shard, mesh.embedding)]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def test_every_group_has_the_time_out(ranks) -> None:
    assert ranks(4).run(timeouts) == [{datetime.timedelta(minutes=3)}] * 4


def own_mistake(rank: int) -> str:
    mesh = Mesh.build(Layout(dp=2), rank, torch.device("cpu"))
    try:
        mesh.dp.all_reduce_(torch.ones(4, dtype=torch.complex32))
    except PeerLost:
        return "blames the others"
    except Exception as error:
        return type(error).__name__
    return "no error"


def test_a_mistake_of_our_own_is_not_blamed_on_others(ranks) -> None:
    assert "blames the others" not in ranks(2).run(own_mistake)


def test_a_masked_micro_batch_counts_by_its_targets() -> None:
    """The loss is over all unmasked targets of the global batch, not a mean of means."""
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=4, vocab_size=11)
    config, layout = resolve(
        replace(Config(), model=model, training=TrainingConfig(global_batch_size=2, precision="fp64")), 1, 0, declare
    )
    engine = Engine(config, Mesh.build(layout, 0, torch.device("cpu")))
    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))
    masks = torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 1]])
    batches = [MicroBatch(ids[i : i + 1, :-1], ids[i : i + 1, 1:], masks[i : i + 1], (i,)) for i in (0, 1)]
    losses = [engine.evaluate([b]) for b in batches]
    assert [n for _, n in losses] == [4, 1]
    assert engine.train_step(1, batches).loss == pytest.approx(sum(loss for loss, _ in losses) / 5, rel=1e-10)
