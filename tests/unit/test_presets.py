"""scripts/presets: each resolves at its world size, and is the model of its name."""

from __future__ import annotations

import re

import pytest

from megazero.config.cli import parse
from megazero.config.presets import PRESETS
from megazero.config.schema import Config
from megazero.model.stage import declare
from megazero.plan.layout.layers import num_parameters
from megazero.plan.layout.resolve import resolve
from megazero.plan.layout.topology import Layout
from megazero.price.bytes.capacity import estimated
from megazero.price.bytes.estimate import estimate

# preset -> (ranks, layers, hidden, heads, tensor parallelism, samples a model replica, global batch): the ZeRO paper,
# figure 2, and GPT-2's shapes.
SHAPES = {
    "quickstart": (2, 4, 192, 6, 1, 8, 16),
    **{f"c{i}": (4, 4, 256, 8, 2, 8, 16) for i in (1, 2, 3, 4, 5)},
    "tiny": (1, 4, 256, 4, 1, 16, 16),
    "gpt2-124m": (8, 12, 768, 12, 1, 64, 512),
    "gpt2-345m": (8, 24, 1024, 16, 1, 64, 512),
    "gpt2-1.5b": (8, 48, 1600, 25, 1, 64, 512),
    "zero-1.5b": (400, 48, 1600, 16, 1, 24, 9600),
    "zero-40b": (400, 88, 6144, 32, 4, 12, 1200),
    "zero-8b": (400, 72, 3072, 24, 4, 64, 6400),
    "zero-60b": (400, 132, 6144, 32, 16, 64, 1600),
    "zero-100b": (400, 125, 8192, 64, 16, 32, 800),
    "zero-170b": (400, 212, 8192, 64, 16, 12, 300),
    "llama-125m": (8, 12, 768, 12, 1, 32, 256),
    "llama-1b": (8, 20, 2048, 32, 1, 128, 1024),
    "llama-7b": (64, 32, 4096, 32, 1, 16, 1024),
    "llama-70b": (512, 80, 8192, 64, 8, 64, 1024),
    "mistral-7b": (64, 32, 4096, 32, 1, 8, 512),
    "parallel-6b": (64, 28, 4096, 16, 1, 4, 256),
    "gpt-100b-h100": (512, 125, 8192, 64, 8, 16, 1024),
    "gpt-100b-h200": (256, 125, 8192, 64, 4, 16, 1024),
    "gpt-100b-b200": (128, 125, 8192, 64, 4, 32, 1024),
    "gpt-1000b": (1024, 128, 25600, 160, 8, 4, 512),
    "qwen2-0.5b": (8, 24, 896, 14, 1, 64, 512),
    "qwen2-1.5b": (8, 28, 1536, 12, 1, 64, 512),
    "qwen3-0.6b": (8, 28, 1024, 16, 1, 64, 512),
    "qwen3-1.7b": (8, 28, 2048, 16, 1, 64, 512),
}
# preset -> (width of the MLP, query groups, vocabulary, sequence, weights): llamas. The weights of those that are
# published: Llama 2's, Mistral's, Qwen2's and Qwen3's, as transformers counts them.
LLAMAS = {
    "llama-125m": (2048, 4, 32000, 2048, None),
    "llama-1b": (5632, 4, 32000, 2048, None),
    "llama-7b": (11008, 32, 32000, 4096, 6_738_415_616),
    "llama-70b": (28672, 8, 32000, 4096, 68_976_648_192),
    "mistral-7b": (14336, 8, 32000, 8192, 7_241_732_096),
    "qwen2-0.5b": (4864, 2, 151936, 4096, 494_032_768),
    "qwen2-1.5b": (8960, 2, 151936, 4096, 1_543_714_304),
    "qwen3-0.6b": (3072, 8, 151936, 4096, 596_049_920),
    "qwen3-1.7b": (6144, 8, 151936, 4096, 1_720_574_976),
}
SMALL = (
    "quickstart",
    "tiny",
    "c1",
    "c2",
    "c3",
    "c4",
    "c5",
)  # these have the vocabulary of --tokenizer
# preset -> bytes of its GPU
TODAY = {"gpt-100b-h100": 80e9, "gpt-100b-h200": 141e9, "gpt-100b-b200": 180e9, "gpt-1000b": 80e9}
PAPER = [name for name in SHAPES if name.startswith("zero-")]


def load(name: str) -> tuple[Config, Layout]:
    return resolve(parse(["--preset", name, "--save", "runs/a"]), SHAPES[name][0], 257 if name in SMALL else 0, declare)


def test_every_preset_is_listed_here() -> None:
    assert {path.name.removesuffix(".toml") for path in PRESETS.glob("*")} == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_shape_and_batch(name: str) -> None:
    config, layout = load(name)
    model, training = config.model, config.training
    samples = training.micro_batch_size * config.micro_batches(layout.dp)
    shape = (model.num_layers, model.hidden_size, model.num_attention_heads)
    assert (layout.world_size, *shape, layout.tp, samples, training.global_batch_size) == SHAPES[name]
    if name in LLAMAS or name == "parallel-6b":
        return
    assert model.ffn_hidden_size == 4 * model.hidden_size
    if name in TODAY:
        assert estimated(config, layout, 0, "cuda").total < 0.9 * TODAY[name]
    elif name not in SMALL:
        assert (model.seq_length, model.vocab_size, training.precision) == (1024, 50257, "bf16")


@pytest.mark.parametrize("name", LLAMAS)
def test_llamas_have_published_shapes_and_fit(name: str) -> None:
    """Each fits a GPU of 80 GB, its activations included."""
    config, layout = load(name)
    model, (ffn, groups, vocabulary, length, weights) = config.model, LLAMAS[name]
    architecture = "qwen3" if name.startswith("qwen3") else "llama"
    epsilon = 1e-5 if name in ("llama-7b", "llama-70b", "mistral-7b") else 1e-6
    assert (model.architecture, model.norm_epsilon) == (architecture, epsilon)
    assert model.qk_layernorm == (architecture == "qwen3")
    assert (model.ffn_size, model.query_groups, model.vocab_size, model.seq_length) == (ffn, groups, vocabulary, length)
    assert model.untie_embeddings == name.startswith(("llama", "mistral")) and model.add_qkv_bias == name.startswith(
        "qwen2"
    )
    assert model.window_size == (4096 if name == "mistral-7b" else 0)
    assert weights is None or num_parameters(declare(model)) == weights
    assert max(estimated(config, layout, stage, "cuda").total for stage in range(layout.pp)) < 80e9


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in SMALL])
def test_the_name_says_the_size(name: str) -> None:
    said = re.fullmatch(r"\w+-([\d.]+)([mb])(-\w+)?", name)
    assert said
    size = float(said[1]) * {"m": 1e6, "b": 1e9}[said[2]]
    assert num_parameters(declare(load(name)[0].model)) == pytest.approx(size, rel=0.05)


# The ZeRO paper's Table 3; all with CB and MD: ZeRO stage, Pa, Pa+cpu
TABLE_3 = {
    "c1": (1, False, False),
    "c2": (1, True, False),
    "c3": (2, False, False),
    "c4": (2, True, False),
    "c5": (2, True, True),
}


@pytest.mark.parametrize("name", TABLE_3)
def test_the_configurations_of_table_3(name: str) -> None:
    config, _ = load(name)
    zero, kept = config.zero, config.activations
    assert (zero.zero_stage, kept.partition_activations, kept.checkpoint_in_cpu) == TABLE_3[name]
    assert kept.recompute == "full" and kept.contiguous_checkpointing
    assert 0 < zero.reduce_bucket_size < num_parameters(declare(config.model))


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_models_are_zero_100bs_configuration(name: str) -> None:
    """Pos+g and Pa, no accumulation; and each fits its V100 of 32 GB, without the few GB of one block's activations."""
    config, layout = load(name)
    assert config.zero.zero_stage == 2 and config.training.grad_dtype == "bf16"
    assert config.activations.recompute == "full" and config.activations.partition_activations == (layout.tp > 1)
    assert config.micro_batches(layout.dp) == 1
    assert estimate(config, layout, needs_staging_buffer=False).memory["peak"] < 32e9
