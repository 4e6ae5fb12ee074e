"""Costs of layers by running them on stand-ins, against Narayanan's and Korthikanti's counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megazero.config.schema import ActivationConfig, Config, ModelConfig, ParallelConfig, TrainingConfig
from megazero.plan.resolve import resolve
from megazero.price.trace import trace_layers

MODEL = ModelConfig(3, 64, 0, 8, 32, 130)


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
    config, layout = resolve(config, tp, 0)
    cost = trace_layers(config, layout, 0)["blocks.1"]
    one_pass = 4 * 32 * 64 * 4 * (tp - 1) // tp  # b s h in fp32 round a ring
    assert cost.forward == 4 * one_pass
    assert cost.recompute == (3 if sp else 2) * one_pass
    assert cost.backward == (6 if sp else 4) * one_pass
    assert cost.logits == 0


def test_logits_are_this_ranks_part_of_the_padded_vocabulary() -> None:
    config = Config(model=MODEL, parallel=ParallelConfig(tensor_model_parallel_size=2))
    config, layout = resolve(config, 2, 0)
    assert trace_layers(config, layout, 0)["head"].logits == 4 * 32 * 128  # 65 rows, padded to a multiple of 64


def test_a_frozen_layer_sends_no_gradients() -> None:
    """A layer that is frozen, and all before it, passes no gradient, and has no backward."""
    frozen = TrainingConfig(freeze_parameters=("*_embedding.*", "blocks.0.*"))
    config = Config(model=MODEL, training=frozen, parallel=ParallelConfig(tensor_model_parallel_size=2))
    config, layout = resolve(config, 2, 0)
    costs = trace_layers(config, layout, 0)
    assert costs["blocks.0"].backward == costs["token_embedding"].backward == 0
    assert costs["blocks.0"].forward == costs["blocks.1"].forward > 0
    # the first norm's input needs no gradient, but its own parameters do: both sums of a block are still made
    assert costs["blocks.1"].backward == costs["blocks.2"].backward > 0
