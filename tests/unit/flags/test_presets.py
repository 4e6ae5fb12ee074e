"""scripts/presets: each resolves at its world size, and is the model of its name."""

import functools
import re
from dataclasses import replace

import pytest
import torch

import pretrain_gpt
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.families import FAMILIES
from megazero.flags.cli import parse
from megazero.flags.config import Config, ModelConfig
from megazero.flags.presets import PRESETS, preset_values
from megazero.flags.resolve import resolve
from megazero.interop.huggingface.families import family_of
from megazero.planner.bytes.capacity import estimated, largest_preset
from megazero.planner.bytes.estimate import estimate
from megazero.planner.parameter_counts import num_parameters
from tests.helpers.table import for_each

# preset -> (ranks, tensor parallelism, samples a model replica, global batch)
LAYOUTS = {
    **{f"c{i}": (4, 2, 8, 16) for i in (1, 2, 3, 4, 5)},
    "quickstart": (2, 1, 8, 16),
    "tiny-experts": (1, 1, 16, 16),
    "tiny-deepseek": (2, 1, 8, 16),
    "tiny": (1, 1, 16, 16),
    "gpt2-124m": (8, 1, 64, 512),
    "gpt2-345m": (8, 1, 64, 512),
    "gpt2-1.5b": (8, 1, 64, 512),
    "zero-1.5b": (400, 1, 24, 9600),
    "zero-40b": (400, 4, 12, 1200),
    "zero-8b": (400, 4, 64, 6400),
    "zero-60b": (400, 16, 64, 1600),
    "zero-100b": (400, 16, 32, 800),
    "zero-170b": (400, 16, 12, 300),
    "llama-125m": (8, 1, 32, 256),
    "llama-1b": (8, 1, 128, 1024),
    "llama-7b": (64, 1, 16, 1024),
    "llama-70b": (512, 8, 64, 1024),
    "mistral-7b": (64, 1, 8, 512),
    "mistral-v0.3-7b": (64, 1, 8, 512),
    "parallel-6b": (64, 1, 4, 256),
    "gpt-100b-h100": (512, 8, 16, 1024),
    "gpt-100b-h200": (256, 4, 16, 1024),
    "gpt-100b-b200": (128, 4, 32, 1024),
    "gpt-1000b": (1024, 8, 4, 512),
    "qwen2-0.5b": (8, 1, 64, 512),
    "qwen2-1.5b": (8, 1, 64, 512),
    "qwen3-0.6b": (8, 1, 64, 512),
    "qwen3-1.7b": (8, 1, 64, 512),
    "qwen3-8b": (64, 1, 16, 1024),
    "llama-3.2-1b": (8, 1, 64, 512),
    "llama-3.1-8b": (64, 1, 8, 512),
    "llama-3.1-70b": (512, 8, 32, 512),
    "llama-3.1-8b-128k": (64, 2, 4, 32),
    "llama-3.1-8b-1m": (512, 8, 1, 4),
    "smollm2-135m": (8, 1, 64, 512),
    "smollm2-1.7b": (8, 1, 128, 1024),
    "smollm3-3b": (64, 1, 9, 576),
    "stablelm-1.6b": (64, 1, 16, 1024),
    "starcoder2-3b": (64, 1, 2, 128),
    "mixtral-8x7b": (64, 1, 16, 1024),
    "qwen1.5-moe-a2.7b": (64, 1, 16, 1024),
    "qwen3-30b-a3b": (64, 1, 16, 1024),
    "olmoe-1b-7b": (64, 1, 16, 1024),
    "deepseek-v2-16b": (64, 1, 16, 1024),
    "deepseek-v3-671b": (1024, 1, 240, 15360),
    "kimi-k2-1t": (1024, 1, 256, 16384),
    "glm4.5-air-107b": (256, 1, 64, 4096),
    "gpt-oss-20b": (64, 1, 16, 1024),
    "gpt-oss-120b": (256, 1, 64, 4096),
    "granite-2b": (64, 1, 16, 1024),
    "phi3-mini-3.8b": (64, 1, 16, 1024),
    "olmo2-7b": (64, 1, 16, 1024),
    "olmo3-7b": (64, 1, 8, 512),
    "glm4-9b": (64, 1, 8, 512),
    "gemma-2b": (64, 1, 8, 512),
    "gemma2-2b": (64, 1, 8, 512),
    "gemma3-1b": (8, 1, 64, 512),
    "pythia-160m": (8, 1, 128, 1024),
    "pythia-1.4b": (8, 1, 128, 1024),
    "gptj-6b": (64, 1, 4, 256),
}
# preset -> (layers, hidden, heads): the ZeRO paper, figure 2, and ours
SHAPES = {
    **{f"c{i}": (4, 256, 8) for i in (1, 2, 3, 4, 5)},
    "quickstart": (4, 192, 6),
    "tiny-experts": (4, 128, 4),
    "tiny-deepseek": (4, 192, 6),
    "tiny": (4, 256, 4),
    "zero-1.5b": (48, 1600, 16),
    "zero-40b": (88, 6144, 32),
    "zero-8b": (72, 3072, 24),
    "zero-60b": (132, 6144, 32),
    "zero-100b": (125, 8192, 64),
    "zero-170b": (212, 8192, 64),
    "gpt-100b-h100": (125, 8192, 64),
    "gpt-100b-h200": (125, 8192, 64),
    "gpt-100b-b200": (125, 8192, 64),
    "gpt-1000b": (128, 25600, 160),
}
PUBLISHED = {name: model for family in FAMILIES.values() for name, model in family.published.items()}
OF_FAMILIES = [name for name in LAYOUTS if name in PUBLISHED]
FAMILY_OF = {name: family for family in FAMILIES.values() for name in family.published}
SMALL = (
    "quickstart",
    "tiny",
    "tiny-experts",
    "tiny-deepseek",
    "c1",
    "c2",
    "c3",
    "c4",
    "c5",
)  # these have the vocabulary of --tokenizer
# preset -> bytes of its GPU
TODAY = {"gpt-100b-h100": 80e9, "gpt-100b-h200": 141e9, "gpt-100b-b200": 180e9, "gpt-1000b": 80e9}
PAPER = [name for name in LAYOUTS if name.startswith("zero-")]


@functools.cache
def load(name: str) -> tuple[Config, Layout]:
    return resolve(
        parse(["--preset", name, "--save", "runs/a"]), LAYOUTS[name][0], 257 if name in SMALL else 0, declare
    )


def test_every_preset_is_listed_here() -> None:
    assert {path.name.removesuffix(".toml") for path in PRESETS.glob("*")} == set(LAYOUTS)
    assert set(LAYOUTS) <= {*SHAPES, *PUBLISHED}


def published(name: str) -> ModelConfig:
    """Return a model as its family has it."""
    family = FAMILY_OF[name]
    return ModelConfig(**family.options | PUBLISHED[name].options | {"architecture": family.name})


@pytest.mark.second
@for_each("name", LAYOUTS)
def test_shape_and_batch(name: str) -> None:
    config, layout = load(name)
    model, training = config.model, config.training
    samples = training.micro_batch_size * config.micro_batches(layout.dp)
    assert (layout.world_size, layout.tp, samples, training.global_batch_size) == LAYOUTS[name]
    if name in PUBLISHED:
        assert replace(model, num_query_groups=model.query_groups) == published(name)
        return
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == SHAPES[name]
    assert model.ffn_hidden_size == (512 if name == "tiny-deepseek" else 4 * model.hidden_size)
    if name in TODAY:
        assert estimated(config, layout, 0, "cuda").total < 0.9 * TODAY[name]
    elif name not in SMALL:
        assert (model.seq_length, model.vocab_size, training.precision) == (1024, 50257, "bf16")


@pytest.mark.second
@for_each("name", OF_FAMILIES)
def test_presets_of_families_fit(name: str) -> None:
    """Each fits GPUs of 80 GB, its activations included."""
    config, layout = load(name)
    assert max(estimated(config, layout, stage, "cuda").total for stage in range(layout.pp)) < 80e9


# of each family the first preset
PLANNED = {FAMILY_OF[name].name: name for name in reversed(OF_FAMILIES)}.values()


@pytest.mark.second
@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in PLANNED else pytest.mark.slow) for name in LAYOUTS if name in PUBLISHED],
)
def test_a_preset_is_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    world = str(LAYOUTS[name][0])
    pretrain_gpt.main(["--preset", name, "--plan", "--world-size", world, "--device-type", "h100-80gb"])
    printed = capsys.readouterr().out
    said = f"{num_parameters(declare(load(name)[0].model)) / 1e9:.2f} B parameters on {world} x h100-80gb"
    assert said in printed and "expected: " in printed


@pytest.mark.second
@for_each("name", [name for name, model in PUBLISHED.items() if model.weights])
def test_published_models_have_their_weights(name: str) -> None:
    """So has transformers' class of the exported configuration, on the meta device."""
    import transformers

    model, weights = published(name), PUBLISHED[name].weights
    family = family_of(model)
    assert family.architecture == model.architecture
    with torch.device("meta"):
        theirs = getattr(transformers, family.model_class)(family.to_config(model, None))
    assert sum(p.numel() for p in theirs.parameters()) == num_parameters(declare(model)) == weights


@pytest.mark.second
@for_each("name", [family.name for family in FAMILIES.values() if family.published.keys() & LAYOUTS.keys()])
def test_presets_are_sought_with_the_defaults_of_their_family(name: str) -> None:
    """A run that does not fit names a smaller preset."""
    found: list[Config] = []
    largest_preset(parse(["--architecture", name]), lambda config, _: found.append(config) or False)
    models = [config.model for config in found]
    assert all(load(preset)[0].model in models for preset in FAMILIES[name].published.keys() & LAYOUTS.keys())


@for_each("name", OF_FAMILIES)
def test_defaults_of_the_family_are_not_repeated(name: str) -> None:
    given, defaults = preset_values(name), FAMILY_OF[name].defaults
    assert [flag for flag in given.keys() & defaults.keys() if given[flag] == defaults[flag]] == []


MIXTURES = ("mixtral-8x7b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "olmoe-1b-7b")  # named by other sizes


@pytest.mark.second
@for_each("name", [name for name in LAYOUTS if name not in (*SMALL, *MIXTURES)])
def test_the_name_says_the_size(name: str) -> None:
    """Within a twentieth, or rounded down to a whole billion, as some developers do."""
    said = re.fullmatch(r"[\w.]+(?:-[\w.]+)??-([\d.]+)([mbt])(?:-\w+)?", name)
    assert said
    size = float(said[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[said[2]]
    found = num_parameters(declare(load(name)[0].model))
    assert found == pytest.approx(size, rel=0.05) or found // 1e9 * 1e9 == size


# The ZeRO paper's Table 3; all with CB and MD: ZeRO stage, Pa, Pa+cpu
TABLE_3 = {
    "c1": (1, False, False),
    "c2": (1, True, False),
    "c3": (2, False, False),
    "c4": (2, True, False),
    "c5": (2, True, True),
}


@for_each("name", TABLE_3)
def test_the_configurations_of_table_3(name: str) -> None:
    config, _ = load(name)
    zero, kept = config.zero, config.activations
    assert (zero.zero_stage, kept.partition_activations, kept.checkpoint_in_cpu) == TABLE_3[name]
    assert kept.recompute == "full" and kept.contiguous_checkpointing
    assert 0 < zero.reduce_bucket_size < num_parameters(declare(config.model))


@for_each("name", PAPER)
def test_the_papers_models_are_zero_100bs_configuration(name: str) -> None:
    """Pos+g and Pa, no accumulation; and each fits its V100 of 32 GB, without the few GB of one block's activations."""
    config, layout = load(name)
    assert config.zero.zero_stage == 2 and config.training.grad_dtype == "bf16"
    assert config.activations.recompute == "full" and config.activations.partition_activations == (layout.tp > 1)
    assert config.micro_batches(layout.dp) == 1
    assert estimate(config, layout, needs_staging_buffer=False).memory["peak"] < 32e9
