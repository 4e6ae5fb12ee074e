"""The specification: every layout, stage, schedule and recompute policy is the single process's model.

Losses and gradient norms over AdamW steps against plain PyTorch in fp64, with NaN-poisoned buffers. In fp64 a
difference is a mistake: rounding is some 1e-14. Fewer cases test the precisions that users train in.
The same runs show that memory and traffic, counted on every rank, are those of `estimate`, to the byte.
"""

import functools
import math
from dataclasses import replace

import pytest
import torch

from megazero.engine.kernels.dropout import Dropout
from megazero.flags.config import ModelConfig
from megazero.planner.bytes.estimate import estimate
from megazero.verify.planned import unplanned
from tests import reference
from tests.helpers.families import of_family
from tests.helpers.late import late_collectives
from tests.helpers.rings import SECOND, by_default
from tests.parallel import matrix
from tests.parallel.cases import (
    MODEL,
    STEPS,
    Case,
    Outcome,
    corpora_of,
    evaluate,
    global_batch,
    micro_batches,
    new_engine,
    reference_batches,
    train,
)

TOLERANCE = 1e-10  # relative, in fp64; the most that was seen is 4e-14, in a norm after two updates
# Newton-Schulz iterations multiply small singular values by 3.4 each, 480 in all, and with them their rounding errors.
WITH_MUON = 1e-9


SHALLOW = replace(MODEL, num_layers=1)
# Two groups of keys and values on four ranks, two of which share each.
SHARED_GROUPS = replace(MODEL, num_layers=2, num_attention_heads=8, **of_family("llama"), num_query_groups=2)

# LayerNorms of queries and keys, whose biases are summed over tp too.
PARALLEL_NORMS = replace(MODEL, num_layers=2, **of_family("parallel"), num_query_groups=2, qk_layernorm=True)
ALL_BUT_NORMS_OF_HEADS = ("token*", "head*", "*.norm.*", "*.mlp.*", *(f"*.{n}.weight" for n in ("query", "kv", "proj")))


# Blocks whose linear layers read the block's input, without a norm in front.
POST_NORM = replace(MODEL, num_layers=3, **of_family("olmo2"))

# Kinds of rotary positions: parts of a head, interleaved, scaled, and layers that differ.
LLAMA = replace(MODEL, num_layers=3, **of_family("llama"), num_query_groups=2, kv_channels=10)
PART_OF_A_HEAD = replace(
    LLAMA, **of_family("parallel"), rotary_percent=0.65, rotary_interleaved=True, qk_layernorm=True
)
YARN = replace(LLAMA, rope_scaling_factor=4.0, rope_scaling_type="yarn", rope_trained_length=64, rotary_percent=0.8)
LINEAR = replace(LLAMA, rope_scaling_factor=3.0, rope_scaling_type="linear")
BY_LAYER = replace(LINEAR, layer_pattern="LNG", window_size=4, local_rotary_base=99.0)

# A query sees the keys of every rank, but its head's sink once; and an expert's bias is added once.
SINKS = replace(MODEL, num_layers=2, **of_family("gpt-oss"), num_query_groups=2, num_experts=4, ffn_hidden_size=24)

# Traits that no family has together
OF_NO_FAMILY = replace(MODEL, num_layers=2, norm="rmsnorm-1p", norm_place="around", linear_biases=("qkv", "logits"))
OF_NO_FAMILY = replace(OF_NO_FAMILY, attention_sinks=True, root_embedding=True, activation="swiglu-clamped")


def parameters(found: matrix.Covers) -> list[object]:
    """Parameters of a test: each generated case in its ring."""
    rings = zip(found, ((), SECOND, pytest.mark.slow), strict=True)
    return [pytest.param(matrix.case_of(c), id=matrix.name_of(c), marks=marks) for part, marks in rings for c in part]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cases are generated when pytest collects tests, and not when a rank imports this module: that takes seconds."""
    if metafunc.function is test_every_layout_is_the_same_model:
        covers = matrix.covers()
        generated = parameters(covers._replace(slow=covers.slow + matrix.products()))
        by_hand = by_default(map(fp64, BY_HAND), 0, 1, 5, 6, 8, 11, 12, 13)
        metafunc.parametrize("case", [*by_hand, *generated], ids=str)
    if metafunc.function is test_other_precisions_are_as_near_as_they_can_be:
        metafunc.parametrize("case", parameters(matrix.numbers()))


def fp64(case: Case) -> Case:
    return case._replace(precision="fp64")


def expected(case: Case) -> tuple[list[float], list[float]]:
    """Losses and norms of plain PyTorch in fp64."""
    return _expected(*model_of(case))[:2]


def model_of(case: Case) -> tuple[ModelConfig, tuple[str, ...], int, str, str, str, str, int]:
    """Return all that the results of a case depend on."""
    return case.model, case.frozen, case.batch, case.reset, case.targets, case.optimizer, case.moments, case.ema


def expected_balance(case: Case) -> list[reference.Balance]:
    """Return the balance of each step in plain PyTorch in fp64."""
    return _expected(*model_of(case))[2]


def expected_ahead(case: Case) -> list[list[float]]:
    """Return the losses of the modules of multi-token prediction in plain PyTorch in fp64."""
    return _expected(*model_of(case))[3]


def expected_averaged(case: Case) -> list[float]:
    """Return the losses of the averaged weights in plain PyTorch in fp64."""
    return _expected(*model_of(case))[4]


def expected_layers(case: Case) -> list[reference.LayerValues]:
    """Return the statistics per layer of each step in plain PyTorch in fp64."""
    return _expected(*model_of(case))[5]


@functools.cache
def _expected(
    model: ModelConfig,
    frozen: tuple[str, ...],
    batch: int,
    reset: str,
    targets: str,
    optimizer: str,
    moments: str,
    ema: int,
) -> tuple[
    list[float], list[float], list[reference.Balance], list[list[float]], list[float], list[reference.LayerValues]
]:
    case = Case(model=model, frozen=frozen, batch=batch, micro_batches=1, reset=reset, targets=targets)
    balance: list[reference.Balance] = []
    ahead: list[list[float]] = []
    averaged: list[float] = []
    layers: list[reference.LayerValues] = []
    case = fp64(case)._replace(optimizer=optimizer, moments=moments, ema=ema)
    found = reference.train(
        case.config(),
        reference_batches(case),
        tell_balance=balance.append,
        tell_ahead=ahead.append,
        tell_average=averaged.append,
        tell_layers=layers.append,
    )
    return *found, balance, ahead, averaged, layers


def tolerance(case: Case) -> float:
    return WITH_MUON if case.optimizer == "muon" else TOLERANCE


def relative_error(found: list[float], wanted: list[float]) -> float:
    """The largest; NaN when any is NaN, which no comparison calls small."""
    assert len(found) == len(wanted)
    a, b = torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    return float(((a - b) / b).abs().max())


def check_ahead(case: Case, outcomes: list[Outcome]) -> None:
    """Compare the losses of multi-token prediction; one without targets is NaN here, and 0 there."""
    for outcome in outcomes:
        for found, wanted in zip(outcome.ahead, expected_ahead(case), strict=True):
            assert len(found) == case.model.mtp_num_layers
            counted = [(a, b) for a, b in zip(found, wanted, strict=True) if b]
            assert not counted or relative_error(*map(list, zip(*counted, strict=True))) < tolerance(case)
            assert all(math.isnan(a) for a, b in zip(found, wanted, strict=True) if not b)


def check_averaged(case: Case, outcomes: list[Outcome]) -> None:
    """Compare the losses of the averaged weights."""
    for outcome in outcomes:
        assert len(outcome.averaged) == (STEPS - case.ema + 1 if case.ema else 0)
        assert not case.ema or relative_error(outcome.averaged, expected_averaged(case)) < tolerance(case)


def check_layers(case: Case, outcomes: list[Outcome]) -> None:
    """Compare statistics per layer; they change no bit, because losses and norms are compared too."""
    for outcome in outcomes:
        assert len(outcome.layers) == (len(outcome.losses) if case.stats else 0)
        for found, wanted in zip(outcome.layers, expected_layers(case), strict=False):
            assert {key: list(values) for key, values in found.items()} == {k: list(v) for k, v in wanted.items()}
            for key in found.keys() - follows_rounding(case):
                assert relative_error([*found[key].values()], [*wanted[key].values()]) < tolerance(case), key


def follows_rounding(case: Case) -> set[str]:
    """Return the statistics that rounding decides.

    The gradient of a key's bias is 0 but for rounding, whose sign Lion follows. No loss depends on this bias.
    """
    biased = case.optimizer == "lion" and case.model.learned_positions
    return {"layer_update_ratio", "layer_max_logit"} if biased else set()


def check_balance(case: Case, outcomes: list[Outcome]) -> None:
    """Compare loads of experts to the integer, and the rest to rounding, with plain PyTorch."""
    wanted = expected_balance(case)
    factors = case.model.moe_aux_loss_coeff, case.model.moe_z_loss_coeff
    for outcome in outcomes:
        for found, step in zip((each for each in outcome.experts if each is not None), wanted, strict=True):
            assert found.choices == step.choices
            wide = [max(row) / (sum(row) / len(row)) for row in step.choices]
            assert found.imbalance == pytest.approx(wide, rel=1e-12)
            assert abs(found.dropped - step.dropped) < 1e-14
            given = [True, *(factor > 0 for factor in factors)]
            ours, theirs = ((each.entropy, each.aux_loss, each.z_loss) for each in (found, step))
            pairs = list(zip(ours, theirs, given, strict=True))
            assert relative_error([a for a, _, use in pairs if use], [b for _, b, use in pairs if use]) < 1e-12
            assert all(number == 0 for number, _, use in pairs if not use)


def check_bytes(case: Case, outcomes: list[Outcome]) -> None:
    """On every rank, in every iteration: the first allocates the buffers that later ones reuse."""
    config, layout, on_gpu = case.config(), case.layout, case.device != "cpu"
    skipped = unplanned(config, layout, on_gpu)
    for rank, outcome in enumerate(outcomes):
        memory, traffic = estimate(config, layout, rank, needs_staging_buffer=not on_gpu)
        for counted, predicted in ((outcome.sent, traffic), (outcome.memory, memory)):
            kinds = [kind for kind in predicted if kind not in skipped]
            wanted = {kind: predicted[kind] for kind in kinds}
            assert [{kind: each[kind] for kind in kinds} for each in counted] == [wanted] * len(outcome.losses)


BY_HAND = [
    Case(dp=2, zero=3, micro_batches=1, options=(("reduce_bucket_size", 1),), model=SHALLOW),  # 64 elements at a time
    Case(tp=4, model=SHARED_GROUPS),
    Case(tp=4, model=replace(SHARED_GROUPS, kv_channels=4, qk_layernorm=True)),
    Case(tp=2, model=replace(SHALLOW, residual_multiplier=0.22), recompute="selective", sp=True),
    Case(tp=2, model=PARALLEL_NORMS, recompute="selective", reset="documents"),
    Case(tp=2, model=PARALLEL_NORMS, frozen=ALL_BUT_NORMS_OF_HEADS),
    Case(dp=2, tp=2, zero=3, model=PART_OF_A_HEAD, recompute="full", reset="documents"),
    Case(pp=2, model=POST_NORM, schedule="zero-bubble", micro_batches=4, recompute="full", host=True),
    Case(pp=2, model=POST_NORM, schedule="zero-bubble", micro_batches=4, recompute="full", md=True),
    Case(tp=2, model=YARN, sp=True, reset="positions"),
    Case(pp=2, model=BY_LAYER, recompute="selective"),
    Case(cp=2, zero=3, model=SINKS, exchange="ring", reset="documents"),
    Case(tp=2, model=SINKS),
    Case(tp=2, sp=True, model=OF_NO_FAMILY),
]


def test_every_layout_is_the_same_model(case: Case, ranks) -> None:
    losses, norms = expected(case)
    outcomes = ranks(case.world).run(train, case)
    for outcome in outcomes:
        assert relative_error(outcome.losses, losses) < tolerance(case)
        assert relative_error(outcome.norms, norms) < tolerance(case)
    check_ahead(case, outcomes)
    check_averaged(case, outcomes)
    check_layers(case, outcomes)
    check_balance(case, outcomes)
    check_bytes(case, outcomes)


@pytest.mark.parametrize(
    "case",
    [
        *by_default((fp64(Case(dp=3, zero=z, micro_batches=3, batch=8, micro_batch_size=1)) for z in range(4)), 3),
        fp64(Case(dp=3, zero=3, micro_batches=1, batch=1, micro_batch_size=1)),  # one replica computes for three
        fp64(Case(dp=3, zero=2, micro_batches=2, batch=4, micro_batch_size=1, corpora=4)),
        pytest.param(
            fp64(Case(dp=2, cp=2, zero=2, micro_batches=2, batch=3, micro_batch_size=1, reset="documents", corpora=3)),
            marks=SECOND,
        ),
        *(
            pytest.param(fp64(Case(pp=2, dp=3, zero=z, micro_batches=3, batch=8, micro_batch_size=1, schedule=s)),
                         marks=pytest.mark.slow)
            for z, s in enumerate(("1f1b", "gpipe", "zero-bubble", "1f1b"))
        ),
    ],
    ids=str,
)  # fmt: skip
def test_replicas_with_unequal_numbers_of_micro_batches_are_the_same_model(case: Case, ranks) -> None:
    """A batch that three replicas cannot share equally: the first take one more."""
    losses, norms = expected(case)
    outcomes = ranks(case.world).run(train, case)
    for outcome in outcomes:
        assert relative_error(outcome.losses, losses) < tolerance(case)
        assert relative_error(outcome.norms, norms) < tolerance(case)
    check_bytes(case, outcomes)


@pytest.mark.parametrize(
    "case",
    by_default(
        [
            fp64(Case(corpora=4)),
            fp64(Case(pp=2, dp=2, zero=2, micro_batches=3, recompute="full", corpora=4)),
            fp64(Case(dp=2, tp=2, zero=3, sp=True, micro_batches=1, corpora=4)),
            fp64(Case(cp=2, zero=3, micro_batches=3, targets="last", corpora=4)),
            fp64(Case(pp=2, schedule="zero-bubble", micro_batches=4, corpora=4)),
        ],
        1,
    ),
    ids=str,
)
def test_losses_of_a_blends_corpora_are_those_of_every_layout(case: Case, ranks) -> None:
    batches, wanted = reference_batches(case), []
    steps = iter(range(STEPS))

    def tell(losses: torch.Tensor) -> None:
        step = next(steps)
        of = torch.tensor(corpora_of(case, range(step * case.batch, (step + 1) * case.batch)))
        mask = batches[step][2]
        wanted.append([(losses[of == n].sum() / mask[of == n].sum()).item() for n in range(case.corpora - 1)])

    losses, _ = reference.train(case.config(), batches, tell)
    assert all(max(row) - min(row) > 1e-3 for row in wanted), "the corpora's losses do not differ"
    outcomes = ranks(case.world).run(train, case)
    for outcome in outcomes:
        assert relative_error(outcome.losses, losses) < TOLERANCE
        for found, row in zip(outcome.by_corpus, wanted, strict=True):
            assert found[-1] is None  # no sample was of the last corpus
            assert relative_error(list(found[:-1]), row) < TOLERANCE
    check_bytes(case, outcomes)


# precision -> relative tolerances: of the first loss and norm, which are before any update; of all losses; all norms.
#
# Before an update there is only rounding: 2^-24 of a value in fp32, 2^-12 in fp16, 2^-9 in bf16, of which a loss
# averages many, and a norm fewer. Adam makes a full step of the rounding of a gradient near 0, whichever way a product
# was summed; so after updates no precision gives as much. The most that was seen on two ranks of an Intel CPU:
#     fp32 6e-9, 3e-8, 3e-7, 6e-6 (plain PyTorch in fp32, one process: 1e-7, 8e-8, 5e-7, 9e-6; ours up to 2e-5)
#     bf16 3e-4, 4e-3, 1e-3, 7e-2    fp16 3e-5, 5e-4, 3e-3, 4e-2
# The norm depends on the case: with one micro-batch of a llama with untied tables, plain PyTorch in fp32 has 1.5e-4.
# The loss of a llama and its relatives rises at first at this learning rate, and moves further: in one process in bf16
# 2e-4, 3e-3, 7e-3, 0.14; of a deepseek-v3 8e-3, of a gpt-oss on two samples 1.2e-2. Gradients in 16 bit are rounded
# once more after each micro-batch: 5e-3 after two updates on two ranks, with the loss whole or in chunks.
RISING = {"llama": 4, "deepseek-v3": 4, "gpt-oss": 8}  # architecture -> factor of the tolerance of later losses
NEAR = {
    "fp64": (TOLERANCE,) * 4,
    "fp32": (1e-6, 1e-6, 5e-6, 2**-10),
    "bf16": (2**-9, 2**-7, 2**-8, 2**-2),
    "fp16": (2**-12, 2**-9, 2**-7, 2**-2),
}


def check_near(case: Case, outcomes: list[Outcome]) -> None:
    """Compare losses and norms with plain PyTorch's in fp64."""
    losses, norms = expected(case)
    first_loss, first_norm, any_loss, any_norm = NEAR[case.precision]
    if case.precision != "fp64":
        any_loss *= RISING.get(case.model.architecture, 2 if case.grad_dtype != "fp32" else 1)
    for outcome in outcomes:
        steps = len(outcome.losses)
        assert relative_error(outcome.losses[:1], losses[:1]) < first_loss
        assert relative_error(outcome.norms[:1], norms[:1]) < first_norm
        assert relative_error(outcome.losses, losses[:steps]) < any_loss
        assert relative_error(outcome.norms, norms[:steps]) < any_norm
        for at, (found, wanted) in enumerate(zip(outcome.ahead, expected_ahead(case), strict=False)):
            assert not found or relative_error(list(found), wanted) < (any_loss if at else first_loss)
        for key, values in outcome.layers[0].items() if case.stats else ():
            assert relative_error([*values.values()], [*expected_layers(case)[0][key].values()]) < 8 * first_norm, key
        wanted = expected_averaged(case)[: len(outcome.averaged)]
        assert not case.ema or relative_error(outcome.averaged, wanted) < any_loss


def test_other_precisions_are_as_near_as_they_can_be(case: Case, ranks) -> None:
    outcomes = ranks(case.world).run(train, case)
    check_bytes(case, outcomes)
    check_near(case, outcomes)


DROPOUT = replace(MODEL, hidden_dropout=0.1, attention_dropout=0.2)


@pytest.mark.parametrize("where", ["attention_dropout", "hidden_dropout"])
def test_each_dropout_does_something_in_training_alone(where: str) -> None:
    case, plain = (Case(model=model) for model in (replace(MODEL, **{where: 0.3}), MODEL))
    engine, without = new_engine(0, case), new_engine(0, plain)
    batches = micro_batches(case, engine.mesh, 0)
    assert engine.evaluate(batches) == without.evaluate(batches)
    found, wanted = engine.train_step(1, batches).loss, without.train_step(1, batches).loss
    assert relative_error([found], [wanted]) > 1e-4


def test_every_place_of_hidden_dropout_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding's, and two a block, in training."""
    used = []
    times = Dropout.times
    monkeypatch.setattr(Dropout, "times", lambda self, *a: used.append((self.layer, self.site)) or times(self, *a))
    case = Case(model=DROPOUT, micro_batches=1)
    engine = new_engine(0, case)
    engine.train_step(1, micro_batches(case, engine.mesh, 0))
    sites = [(-1, "embedding")] + [(i, site) for i in range(5) for site in ("scores", "attention", "mlp")]
    assert sorted(used) == sorted(sites * 2)  # forward and backward


@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, zero=3, precision="fp64"),
        Case(pp=2, dp=2, zero=1, precision="fp64"),
        Case(tp=2, precision="bf16"),
        Case(dp=2, zero=3, precision="fp64", batch=9, micro_batches=3, micro_batch_size=2),
        Case(cp=3, zero=3, precision="fp64", targets="last", exchange="ring"),
    ],
    ids=str,
)
def test_evaluation_is_the_same_in_every_layout(case: Case, ranks) -> None:
    """Evaluate the first weights, over a global batch whose ranks have unlike numbers of targets."""
    ids, labels, mask = global_batch(case, 0)
    config = case._replace(precision="fp64", grad_dtype="fp32").config()
    logits = reference.forward(config, reference.initial_weights(config), ids)
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    wanted = float((each * mask.flatten()).sum())
    tolerance = TOLERANCE if case.precision == "fp64" else 2**-8
    for loss, targets in ranks(case.world).run(evaluate, case):
        assert targets == int(mask.sum())
        assert abs(loss - wanted) < tolerance * wanted


def train_late(rank: int, case: Case) -> Outcome:
    with late_collectives():
        return train(rank, case)


OVERLAPPING = [
    Case(dp=2, zero=3, micro_batches=3, recompute="full"),
    Case(dp=2, zero=3, precision="bf16", micro_batches=1, options=(("reduce_bucket_size", 2000),)),
    Case(tp=2, recompute="full", pa=True, micro_batches=1),
    Case(dp=2, tp=2, zero=3, sp=True, recompute="selective", micro_batches=1, model=replace(MODEL, num_layers=3)),
]


@pytest.mark.parametrize(
    "case",
    by_default(OVERLAPPING, 3)
    + [
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            Case(dp=2, zero=1, micro_batches=3, recompute="full"),
            Case(pp=2, dp=2, zero=2, micro_batches=3),
            Case(dp=4, zero=2, micro_batches=3, options=(("zero_shard_size", 2),)),
            Case(tp=3, sp=True, recompute="full", md=True, micro_batches=1),
        )
    ],
    ids=str,
)
def test_overlap_changes_no_bit(case: Case, ranks) -> None:
    """Nor do late collectives: see tests/helpers/late.py."""
    off = case._replace(options=(*case.options, ("overlap_comm", False)))
    wanted = ranks(case.world).run(train, off)
    for outcome in (ranks(case.world).run(train, case), ranks(case.world).run(train_late, case)):
        assert [(o.losses, o.norms, o.sent) for o in outcome] == [(o.losses, o.norms, o.sent) for o in wanted]


@pytest.mark.parametrize("precision", by_default(["fp32", "bf16"], 1))
def test_stages_are_the_same_to_the_bit(precision: str, ranks) -> None:
    """Every stage adds the same numbers in the same order, with one micro-batch and two ranks."""
    found = [ranks(2).run(train, Case(dp=2, zero=z, micro_batches=1, precision=precision))[0] for z in range(4)]
    for outcome in found[1:]:
        assert outcome.losses == found[0].losses
        assert relative_error(outcome.norms, found[0].norms) < 1e-12  # each rank's part in fp64, summed over ranks
