"""scripts/presets: each resolves at its world size, and is the model of its name."""

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import pretrain_gpt
from megazero import families
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.cli import parse
from megazero.flags.config import Config, ModelConfig
from megazero.flags.presets import PRESETS, preset_values
from megazero.flags.resolve import resolve
from megazero.interop.huggingface.families import family_of
from megazero.planner.bytes.capacity import estimated, largest_preset
from megazero.planner.bytes.estimate import estimate
from megazero.planner.parameter_counts import num_parameters
from tests.helpers.families import of_family
from tests.helpers.table import for_each

# preset -> (ranks, layers, hidden, heads, tensor parallelism, samples a model replica, global batch): the ZeRO paper,
# figure 2, and GPT-2's shapes.
SHAPES = {
    "quickstart": (2, 4, 192, 6, 1, 8, 16),
    **{f"c{i}": (4, 4, 256, 8, 2, 8, 16) for i in (1, 2, 3, 4, 5)},
    "tiny-experts": (1, 4, 128, 4, 1, 16, 16),
    "tiny-deepseek": (2, 4, 192, 6, 1, 8, 16),
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
    "mistral-v0.3-7b": (64, 32, 4096, 32, 1, 8, 512),
    "parallel-6b": (64, 28, 4096, 16, 1, 4, 256),
    "gpt-100b-h100": (512, 125, 8192, 64, 8, 16, 1024),
    "gpt-100b-h200": (256, 125, 8192, 64, 4, 16, 1024),
    "gpt-100b-b200": (128, 125, 8192, 64, 4, 32, 1024),
    "gpt-1000b": (1024, 128, 25600, 160, 8, 4, 512),
    "qwen2-0.5b": (8, 24, 896, 14, 1, 64, 512),
    "qwen2-1.5b": (8, 28, 1536, 12, 1, 64, 512),
    "qwen3-0.6b": (8, 28, 1024, 16, 1, 64, 512),
    "qwen3-1.7b": (8, 28, 2048, 16, 1, 64, 512),
    "qwen3-8b": (64, 36, 4096, 32, 1, 16, 1024),
    "llama-3.2-1b": (8, 16, 2048, 32, 1, 64, 512),
    "llama-3.1-8b": (64, 32, 4096, 32, 1, 8, 512),
    "llama-3.1-70b": (512, 80, 8192, 64, 8, 32, 512),
    "llama-3.1-8b-128k": (64, 32, 4096, 32, 2, 4, 32),
    "llama-3.1-8b-1m": (512, 32, 4096, 32, 8, 1, 4),
    "smollm2-135m": (8, 30, 576, 9, 1, 64, 512),
    "smollm2-1.7b": (8, 24, 2048, 32, 1, 128, 1024),
    "smollm3-3b": (64, 36, 2048, 16, 1, 9, 576),
    "stablelm-1.6b": (64, 24, 2048, 32, 1, 16, 1024),
    "starcoder2-3b": (64, 30, 3072, 24, 1, 2, 128),
    "mixtral-8x7b": (64, 32, 4096, 32, 1, 16, 1024),
    "qwen1.5-moe-a2.7b": (64, 24, 2048, 16, 1, 16, 1024),
    "qwen3-30b-a3b": (64, 48, 2048, 32, 1, 16, 1024),
    "olmoe-1b-7b": (64, 16, 2048, 16, 1, 16, 1024),
    "deepseek-v2-16b": (64, 27, 2048, 16, 1, 16, 1024),
    "deepseek-v3-671b": (1024, 61, 7168, 128, 1, 240, 15360),
    "kimi-k2-1t": (1024, 61, 7168, 64, 1, 256, 16384),
    "glm4.5-air-107b": (256, 46, 4096, 96, 1, 64, 4096),
    "gpt-oss-20b": (64, 24, 2880, 64, 1, 16, 1024),
    "gpt-oss-120b": (256, 36, 2880, 64, 1, 64, 4096),
    "granite-2b": (64, 40, 2048, 32, 1, 16, 1024),
    "phi3-mini-3.8b": (64, 32, 3072, 32, 1, 16, 1024),
    "olmo2-7b": (64, 32, 4096, 32, 1, 16, 1024),
    "olmo3-7b": (64, 32, 4096, 32, 1, 8, 512),
    "glm4-9b": (64, 40, 4096, 32, 1, 8, 512),
    "gemma-2b": (64, 18, 2048, 8, 1, 8, 512),
    "gemma2-2b": (64, 26, 2304, 8, 1, 8, 512),
    "gemma3-1b": (8, 26, 1152, 4, 1, 64, 512),
    "pythia-160m": (8, 12, 768, 12, 1, 128, 1024),
    "pythia-1.4b": (8, 24, 2048, 16, 1, 128, 1024),
    "gptj-6b": (64, 28, 4096, 16, 1, 4, 256),
}
LLAMA_3 = {"rotary_base": 5e5, "rope_trained_length": 8192}
TIED = {"norm_epsilon": 1e-6}
UNTIED = {"norm_epsilon": 1e-6, "untie_embeddings": True}
QWEN2 = TIED | {"rotary_base": 1e6, "add_qkv_bias": True}
QWEN3 = TIED | {"rotary_base": 1e6, "qk_layernorm": True}
OLMO = UNTIED | {"rotary_base": 5e5, "qk_layernorm": True, "qk_norm_all_heads": True}
OLMO3 = {"window_size": 4096, "layer_pattern": "LLLG", "local_rotary_base": 5e5}
GEMMA = TIED | {"kv_channels": 256}
DEEPSEEK = UNTIED | {"multi_latent_attention": True, "rotary_interleaved": True}
GPT_OSS = {"untie_embeddings": True, "kv_channels": 64, "rotary_base": 1.5e5, "window_size": 128, "layer_pattern": "LG"}
GPT_OSS |= {"rope_scaling_factor": 32.0, "rope_scaling_type": "yarn", "rope_trained_length": 4096}
GPT_OSS |= {"yarn_correction_range_round_to_int": False, "moe_router_topk": 4, "moe_aux_loss_coeff": 0.001}
NEOX = {"untie_embeddings": True, "rotary_percent": 0.25}
# preset -> (architecture, width of the MLP, query groups, vocabulary, sequence, weights, options that have not GPT-2's
# defaults). The weights of those that are published, as transformers counts them.
FAMILIES: dict[str, tuple[str, int, int, int, int, int | None, dict[str, Any]]] = {
    "llama-125m": ("llama", 2048, 4, 32000, 2048, None, UNTIED),
    "llama-1b": ("llama", 5632, 4, 32000, 2048, None, UNTIED),
    "llama-7b": ("llama", 11008, 32, 32000, 4096, 6_738_415_616, {"untie_embeddings": True}),
    "llama-70b": ("llama", 28672, 8, 32000, 4096, 68_976_648_192, {"untie_embeddings": True}),
    "llama-3.2-1b": ("llama", 8192, 8, 128256, 8192, 1_235_814_400, LLAMA_3 | {"rope_scaling_factor": 32}),
    "llama-3.1-8b": (
        *("llama", 14336, 8, 128256, 8192, 8_030_261_248),
        LLAMA_3 | {"rope_scaling_factor": 8, "untie_embeddings": True},
    ),
    "llama-3.1-70b": (
        *("llama", 28672, 8, 128256, 8192, 70_553_706_496),
        LLAMA_3 | {"rope_scaling_factor": 8, "untie_embeddings": True},
    ),
    "llama-3.1-8b-128k": (
        *("llama", 14336, 8, 128256, 131_072, 8_030_261_248),
        LLAMA_3 | {"rope_scaling_factor": 8, "untie_embeddings": True},
    ),
    "llama-3.1-8b-1m": (
        *("llama", 14336, 8, 128256, 1_048_576, 8_030_261_248),
        LLAMA_3 | {"rope_scaling_factor": 128, "untie_embeddings": True},
    ),
    "smollm2-135m": ("llama", 1536, 3, 49152, 2048, 134_515_008, {"rotary_base": 1e5}),
    "smollm2-1.7b": ("llama", 8192, 32, 49152, 2048, 1_711_376_384, {"rotary_base": 1.3e5}),
    "mistral-7b": ("mistral", 14336, 8, 32000, 8192, 7_241_732_096, {"untie_embeddings": True, "window_size": 4096}),
    "mistral-v0.3-7b": (
        *("mistral", 14336, 8, 32768, 8192, 7_248_023_552),
        {"untie_embeddings": True, "rotary_base": 1e6},
    ),
    "qwen2-0.5b": ("qwen2", 4864, 2, 151936, 4096, 494_032_768, QWEN2),
    "qwen2-1.5b": ("qwen2", 8960, 2, 151936, 4096, 1_543_714_304, QWEN2),
    "qwen3-0.6b": ("qwen3", 3072, 8, 151936, 4096, 596_049_920, QWEN3 | {"kv_channels": 128}),
    "qwen3-1.7b": ("qwen3", 6144, 8, 151936, 4096, 1_720_574_976, QWEN3 | {"kv_channels": 128}),
    "qwen3-8b": ("qwen3", 12288, 8, 151936, 4096, 8_190_735_360, QWEN3 | {"untie_embeddings": True}),
    "mixtral-8x7b": (
        *("mixtral", 14336, 8, 32000, 4096, 46_702_792_704),
        {"untie_embeddings": True, "rotary_base": 1e6, "num_experts": 8, "moe_aux_loss_coeff": 0.01},
    ),
    "qwen1.5-moe-a2.7b": (
        *("qwen2-moe", 8192, 16, 151936, 4096, 14_315_784_192),
        QWEN2
        | {"untie_embeddings": True, "num_experts": 60, "moe_router_topk": 4, "moe_router_pre_softmax": True}
        | {"moe_ffn_hidden_size": 1408, "moe_shared_expert_intermediate_size": 5632, "moe_shared_expert_gate": True}
        | {"moe_aux_loss_coeff": 0.001},
    ),
    "qwen3-30b-a3b": (
        *("qwen3-moe", 8192, 4, 151936, 4096, 30_532_122_624),
        QWEN3
        | {"untie_embeddings": True, "kv_channels": 128, "num_experts": 128, "moe_router_topk": 8}
        | {"moe_ffn_hidden_size": 768, "moe_aux_loss_coeff": 0.001},
    ),
    "olmoe-1b-7b": (
        *("olmoe", 1024, 16, 50304, 4096, 6_919_161_856),
        {"untie_embeddings": True, "qk_layernorm": True, "qk_norm_all_heads": True, "num_experts": 64}
        | {"moe_router_topk": 8, "moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001},
    ),
    "phi3-mini-3.8b": ("phi3", 8192, 32, 32064, 4096, 3_821_079_552, {"untie_embeddings": True, "window_size": 2047}),
    "smollm3-3b": (
        *("smollm3", 11008, 4, 128256, 4096, 3_075_098_624),
        TIED | {"rotary_base": 5e6, "layer_pattern": "GGGN"},
    ),
    "stablelm-1.6b": ("stablelm", 5632, 32, 100352, 4096, 1_644_515_328, NEOX | {"add_qkv_bias": True}),
    "starcoder2-3b": (
        *("starcoder2", 12288, 2, 49152, 16384, 3_030_371_328),
        {"rotary_base": 999999.4420358813, "window_size": 4096, "init_method_std": 0.018042},
    ),
    "deepseek-v2-16b": (
        *("deepseek-v2", 10944, 16, 102400, 4096, 15_706_484_224),
        DEEPSEEK
        | {"num_experts": 64, "moe_router_topk": 6, "moe_router_pre_softmax": True, "moe_layer_freq": "D" + "E" * 26}
        | {"moe_ffn_hidden_size": 1408, "moe_shared_expert_intermediate_size": 2816, "moe_aux_loss_coeff": 0.001},
    ),
    "deepseek-v3-671b": (
        *("deepseek-v3", 18432, 128, 129280, 4096, 671_026_404_352),
        DEEPSEEK
        | {"num_experts": 256, "moe_router_topk": 8, "moe_layer_freq": "DDD" + "E" * 58, "moe_ffn_hidden_size": 2048}
        | {"moe_router_num_groups": 8, "moe_router_group_topk": 4, "moe_router_topk_scaling_factor": 2.5}
        | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "q_lora_rank": 1536}
        | {"moe_shared_expert_intermediate_size": 2048, "moe_aux_loss_coeff": 0.0001, "init_method_std": 0.006},
    ),
    "kimi-k2-1t": (
        *("deepseek-v3", 18432, 64, 163840, 4096, 1_026_408_209_408),
        DEEPSEEK
        | {"num_experts": 384, "moe_router_topk": 8, "moe_layer_freq": "D" + "E" * 60, "moe_ffn_hidden_size": 2048}
        | {"moe_router_topk_scaling_factor": 2.827, "moe_router_score_function": "sigmoid", "rotary_base": 5e4}
        | {"moe_router_enable_expert_bias": True, "q_lora_rank": 1536, "moe_aux_loss_coeff": 0.001}
        | {"moe_shared_expert_intermediate_size": 2048},
    ),
    "glm4.5-air-107b": (
        *("glm4-moe", 10944, 8, 151552, 4096, 106_852_245_504),
        UNTIED
        | {"num_experts": 128, "moe_router_topk": 8, "moe_layer_freq": "D" + "E" * 45, "moe_ffn_hidden_size": 1408}
        | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "rotary_base": 1e6}
        | {"rotary_percent": 0.5, "kv_channels": 128, "add_qkv_bias": True, "moe_aux_loss_coeff": 0.0001}
        | {"moe_shared_expert_intermediate_size": 1408, "norm_epsilon": 1e-5},
    ),
    "gpt-oss-20b": (*("gpt-oss", 2880, 8, 201088, 4096, 20_914_757_184), GPT_OSS | {"num_experts": 32}),
    "gpt-oss-120b": (*("gpt-oss", 2880, 8, 201088, 4096, 116_829_156_672), GPT_OSS | {"num_experts": 128}),
    "granite-2b": (
        *("granite", 8192, 8, 49152, 4096, 2_533_525_504),
        {"embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_divisor": 8, "attention_scale": 1 / 64},
    ),
    "olmo2-7b": ("olmo2", 11008, 32, 100352, 4096, 7_298_617_344, OLMO),
    "olmo3-7b": (
        *("olmo3", 11008, 32, 100278, 8192, 7_298_011_136),
        OLMO | OLMO3 | {"rope_scaling_factor": 8, "rope_scaling_type": "yarn"},
    ),
    "glm4-9b": (
        *("glm4", 13696, 2, 151552, 8192, 9_400_279_040),
        {"untie_embeddings": True, "rotary_percent": 0.5, "rotary_interleaved": True, "add_qkv_bias": True},
    ),
    "gemma-2b": ("gemma", 16384, 1, 256000, 8192, 2_506_172_416, GEMMA),
    "gemma2-2b": (
        *("gemma2", 9216, 4, 256000, 8192, 2_614_341_888),
        GEMMA | {"window_size": 4096, "layer_pattern": "LG", "attention_softcap": 50, "final_softcap": 30},
    ),
    "gemma3-1b": (
        *("gemma3", 6912, 1, 262144, 8192, 999_885_952),
        GEMMA
        | {"qk_layernorm": True, "window_size": 512, "layer_pattern": "LLLLLG"}
        | {"rotary_base": 1e6, "local_rotary_base": 1e4},
    ),
    "pythia-160m": ("gpt-neox", 3072, 12, 50304, 2048, 162_322_944, NEOX),
    "pythia-1.4b": ("gpt-neox", 8192, 16, 50304, 2048, 1_414_647_808, NEOX),
    "gptj-6b": ("gptj", 16384, 16, 50400, 2048, 6_050_882_784, NEOX | {"rotary_interleaved": True}),
    "parallel-6b": ("parallel", 16384, 16, 50400, 2048, None, {"untie_embeddings": True}),
}
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
PAPER = [name for name in SHAPES if name.startswith("zero-")]


@functools.cache
def load(name: str) -> tuple[Config, Layout]:
    return resolve(parse(["--preset", name, "--save", "runs/a"]), SHAPES[name][0], 257 if name in SMALL else 0, declare)


def test_every_preset_is_listed_here() -> None:
    assert {path.name.removesuffix(".toml") for path in PRESETS.glob("*")} == set(SHAPES)


@pytest.mark.second
@for_each("name", SHAPES)
def test_shape_and_batch(name: str) -> None:
    config, layout = load(name)
    model, training = config.model, config.training
    samples = training.micro_batch_size * config.micro_batches(layout.dp)
    shape = (model.num_layers, model.hidden_size, model.num_attention_heads)
    assert (layout.world_size, *shape, layout.tp, samples, training.global_batch_size) == SHAPES[name]
    if name in FAMILIES:
        return
    assert model.ffn_hidden_size == (512 if name == "tiny-deepseek" else 4 * model.hidden_size)
    if name in TODAY:
        assert estimated(config, layout, 0, "cuda").total < 0.9 * TODAY[name]
    elif name not in SMALL:
        assert (model.seq_length, model.vocab_size, training.precision) == (1024, 50257, "bf16")


@pytest.mark.second
@for_each("name", FAMILIES)
def test_families_have_published_shapes_and_fit(name: str) -> None:
    """Each fits GPUs of 80 GB, its activations included."""
    config, layout = load(name)
    architecture, ffn, groups, vocabulary, length, weights, options = FAMILIES[name]
    _, layers, hidden, heads, *_ = SHAPES[name]
    assert replace(config.model, num_query_groups=config.model.query_groups, ffn_hidden_size=ffn) == ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        **of_family(architecture),
        ffn_hidden_size=config.model.ffn_size,
        num_query_groups=groups,
        vocab_size=vocabulary,
        seq_length=length,
        **options,
    )
    assert weights is None or num_parameters(declare(config.model)) == weights
    assert max(estimated(config, layout, stage, "cuda").total for stage in range(layout.pp)) < 80e9


# of each architecture the first preset
PLANNED = {architecture: name for name, (architecture, *_) in reversed(FAMILIES.items())}.values()


@pytest.mark.second
@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in PLANNED else pytest.mark.slow) for name in FAMILIES]
)
def test_a_preset_is_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    world = str(SHAPES[name][0])
    pretrain_gpt.main(["--preset", name, "--plan", "--world-size", world, "--device-type", "h100-80gb"])
    printed = capsys.readouterr().out
    said = f"{num_parameters(declare(load(name)[0].model)) / 1e9:.2f} B parameters on {world} x h100-80gb"
    assert said in printed and "expected: " in printed


@pytest.mark.second
@for_each("name", [name for name in FAMILIES if FAMILIES[name][5]])
def test_transformers_has_as_many_weights(name: str) -> None:
    """Its class of the exported configuration, on the meta device."""
    import transformers

    model = load(name)[0].model
    family = family_of(model)
    assert family.architecture == model.architecture
    with torch.device("meta"):
        theirs = getattr(transformers, family.model_class)(family.to_config(model, None))
    assert sum(p.numel() for p in theirs.parameters()) == num_parameters(declare(model))


@pytest.mark.second
@for_each("architecture", sorted({architecture for architecture, *_ in FAMILIES.values()}))
def test_presets_are_sought_with_the_defaults_of_their_architecture(architecture: str) -> None:
    """A run that does not fit names a smaller preset."""
    found: list[Config] = []
    largest_preset(parse(["--architecture", architecture]), lambda config, _: found.append(config) or False)
    models = [config.model for config in found]
    assert all(load(name)[0].model in models for name in FAMILIES if FAMILIES[name][0] == architecture)


def test_every_architecture_has_a_preset() -> None:
    assert {family[0] for family in FAMILIES.values()} == families.FAMILIES.keys() - {"gpt2"}


@for_each("name", FAMILIES)
def test_defaults_of_the_architecture_are_not_repeated(name: str) -> None:
    given, defaults = preset_values(name), families.FAMILIES[FAMILIES[name][0]].defaults
    assert [flag for flag in given.keys() & defaults.keys() if given[flag] == defaults[flag]] == []


MIXTURES = ("mixtral-8x7b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "olmoe-1b-7b")  # named by other sizes


@pytest.mark.second
@for_each("name", [name for name in SHAPES if name not in (*SMALL, *MIXTURES)])
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
