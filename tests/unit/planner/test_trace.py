"""Costs of layers by running them on stand-ins, against closed formulas: Narayanan's, Korthikanti's and our own."""

import itertools
import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from megazero.engine.kernels.matmul import writes_wide
from megazero.engine.model.layers.context import DTYPES
from megazero.engine.model.stage import declare
from megazero.engine.options.schema import Precision
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.flags.config import ActivationConfig, Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from megazero.planner.bytes.estimate import estimate
from megazero.planner.trace.trace import Kind, _trace, model_flops, trace_block, whole_samples
from tests.helpers import saved_formulas
from tests.helpers.block_bytes import block_saves
from tests.helpers.families import of_family
from tests.helpers.oldest_torch import oldest_torch
from tests.helpers.table import for_each
from tests.helpers.traces import trace_layers

MODEL = ModelConfig(3, 64, 0, 8, 32, 130)


@pytest.mark.second
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("model", [MODEL, replace(MODEL, vocab_size=1 << 20)], ids=["real tensors", "meta tensors"])
def test_a_blocks_collectives(tp: int, sp: bool, model: ModelConfig) -> None:
    """Two sums forward and two backward, an all-reduce each; with sequence parallelism two gathers and two
    reduce-scatters, and two gathers more in backward. A recompute leaves the last sum out.
    """
    if sp and tp == 1:
        pytest.skip("sequence parallelism needs tensor parallelism")
    config = Config(
        model=model,
        training=TrainingConfig(micro_batch_size=4),
        parallel=ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sp),
        activations=ActivationConfig("full"),
    )
    config, layout = resolve(config, tp, 0, declare)
    cost = trace_layers(config, layout, 0)["blocks.1"]
    one_pass = 4 * 32 * 64 * 4 * (tp - 1) // tp  # b s h in fp32 round a ring
    passes = (4, 3 if sp else 2, 6 if sp else 4)
    assert [+found for found in cost[:3]] == [+Counter({"tp": n * one_pass}) for n in passes]
    assert cost.logits == 0


def test_traced_samples_are_one_document_each() -> None:
    found = whole_samples(2, 3, torch.device("cpu"))
    assert found.starts.tolist() == [[0] * 3] * 2 and found.bounds.tolist() == [0, 3, 6]
    assert [tuple(span) for span in found.spans] == [(0, 0, 3), (1, 0, 3)]


def test_logits_are_this_ranks_part_of_the_padded_vocabulary() -> None:
    config = Config(model=MODEL, parallel=ParallelConfig(tensor_model_parallel_size=2))
    config, layout = resolve(config, 2, 0, declare)
    assert trace_layers(config, layout, 0)["head"].logits == 4 * 32 * 128  # 65 rows, padded to a multiple of 64


def test_a_frozen_layer_sends_no_gradients() -> None:
    """A layer that is frozen, and all before it, passes no gradient, and has no backward."""
    frozen = TrainingConfig(freeze_parameters=("*_embedding.*", "blocks.0.*"))
    config = Config(model=MODEL, training=frozen, parallel=ParallelConfig(tensor_model_parallel_size=2))
    config, layout = resolve(config, 2, 0, declare)
    costs = trace_layers(config, layout, 0)
    assert not costs["blocks.0"].backward.total() and not costs["token_embedding"].backward.total()
    assert costs["blocks.0"].forward == costs["blocks.1"].forward and costs["blocks.0"].forward["tp"] > 0
    # the first norm's input needs no gradient, but its own parameters do: both sums of a block are still made
    assert costs["blocks.1"].backward == costs["blocks.2"].backward
    assert costs["blocks.1"].backward["tp"] > 0


def saving_cases() -> Iterator[tuple[object, ...]]:
    """Yield half of the product of four options, in which every pair meets."""
    options = [(1, False), (2, False), (4, True)], ["fp32", "bf16"], ["none", "selective"], [0.0, 0.1]
    for levels in itertools.product(*map(enumerate, options)):
        (tp, sp), *others = (level for _, level in levels)
        if sum(number for number, _ in levels) % 2 == 0:
            yield tp, sp, *others


@pytest.mark.second
@for_each(("tp", "sp", "precision", "recompute", "dropout"), saving_cases())
def test_a_block_saves_what_the_formula_lists(
    tp: int, sp: bool, precision: str, recompute: str, dropout: float
) -> None:
    """Tensor by tensor, on a CPU by real and by fake tensors; on a GPU its kernel's random state besides."""
    for length in (32, 1024) if tp == 4 else (32,):
        config = Config(
            model=replace(MODEL, seq_length=length, attention_dropout=dropout, hidden_dropout=dropout),
            training=TrainingConfig(micro_batch_size=4, precision=precision),  # type: ignore[arg-type]
            parallel=ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sp),
            activations=ActivationConfig(recompute),  # type: ignore[arg-type]
        )
        config, layout = resolve(config, tp, 0, declare)
        for device_type in ("cpu", "cuda"):
            wanted = [saved.num_bytes for saved in saved_formulas.block_saves(config, layout, device_type)]
            if device_type == "cuda" and not dropout:
                wanted += [8, 8] if precision == "fp32" else [8, 16]
            assert block_saves(config, layout, device_type) == sorted(wanted), (length, device_type)


def test_model_flops_are_narayanans() -> None:
    """72 B L s h^2 (1 + s/6h + V/12hL) where f = 4h; the vocabulary's padding does not count."""
    for model in (MODEL, replace(MODEL, untie_embeddings=True), replace(MODEL, hidden_size=128, seq_length=1024)):
        h, s, v, layers = model.hidden_size, model.seq_length, model.vocab_size, model.num_layers
        wanted = 72 * 5 * layers * s * h**2 * (1 + Fraction(s, 6 * h) + Fraction(v, 12 * h * layers))
        assert model_flops(model, 5) == wanted
        narrow = replace(model, ffn_hidden_size=h)
        assert model_flops(narrow, 5) == wanted - 5 * layers * s * 3 * (16 - 4) * h**2


def test_a_wide_layer_is_no_small_one() -> None:
    """Few tokens do not make it one: its weights would be made. A narrow layer runs on real tensors: faster."""
    narrow, layout = resolve(Config(model=ModelConfig(1, 64, 0, 4, 16, 512)), 1, 0, declare)
    wide = replace(narrow, model=replace(narrow.model, hidden_size=16384))
    layer = rank_spec(narrow, layout, 0, declare).layers["blocks.0"]
    assert [Kind.of(config, layout, layer, {"blocks.0": []}, "cpu").small for config in (narrow, wide)] == [
        True,
        False,
    ]


@for_each("device_type", ["cpu", "cuda"])
def test_100b_is_traced_without_its_memory(device_type: str) -> None:
    """All kinds of layers, at tp 16. Next to no memory is taken, and a second trace runs nothing."""
    model = ModelConfig(125, 8192, 0, 64, 1024, 50257)
    config = Config(
        model=model,
        training=TrainingConfig(micro_batch_size=32, precision="fp16"),
        parallel=ParallelConfig(tensor_model_parallel_size=16),
        activations=ActivationConfig("full"),
    )
    config, layout = resolve(config, 16, 0, declare)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    costs = trace_layers(config, layout, 0, device_type)
    assert len(costs) == 128 and sum(costs["blocks.7"].saved) > 1 << 30
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19
    )  # KiB: the imitations of kernels are loaded
    assert trace_layers(config, layout, 0, device_type)["blocks.7"] is costs["blocks.7"]


LLAMA = replace(MODEL, **of_family("llama"), num_query_groups=2)


@for_each("precision", ["bf16", "fp16"])
@for_each("data", [DataConfig(), DataConfig(tokenizer="byte", reset_attention_mask=True)])
@for_each("model", [MODEL, LLAMA, replace(LLAMA, window_size=8), replace(LLAMA, num_experts=4, moe_router_topk=2)])
def test_the_oldest_torch_plans_for_a_gpu(
    precision: Precision, data: DataConfig, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of newer ones, though its stand-ins add no 16-bit product to a wider tensor, and know no groups."""
    training = TrainingConfig(micro_batch_size=2, global_batch_size=4, precision=precision)
    config, layout = resolve(Config(model=model, training=training, data=data), 1, 0, declare)
    _trace.cache_clear()  # of the torch that runs
    with oldest_torch(monkeypatch):
        assert not writes_wide(torch.device("meta"), DTYPES[precision])
        found = estimate(config, layout, 0, needs_staging_buffer=False)
        kind = trace_block(config, layout, "cuda")
    _trace.cache_clear()
    assert found == estimate(config, layout, 0, needs_staging_buffer=False)
    assert kind == trace_block(config, layout, "cuda")
