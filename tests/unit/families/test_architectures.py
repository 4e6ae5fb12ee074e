"""Architectures on the command line: defaults, refusals, declarations of layers."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megazero import families
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.parameters import unit_layout
from megazero.families import FAMILIES
from megazero.flags.cli import parse
from megazero.flags.config import ActivationConfig, ModelConfig
from megazero.flags.flag_names import flags, to_toml
from megazero.flags.pipeline_split import layer_costs
from megazero.flags.presets import over_defaults, preset_values
from megazero.flags.resolve import resolve
from megazero.flags.validate import check_device
from megazero.planner.trace.trace import model_flops, trace_block
from tests.helpers.families import of_family
from tests.helpers.table import for_each
from tests.parallel.cases import Case
from tests.unit.flags.test_config import make

LLAMA = ModelConfig(3, 64, 96, 8, 32, 1000, untie_embeddings=True, **of_family("llama"), num_query_groups=2)


def test_an_architecture_brings_its_defaults(tmp_path: Path) -> None:
    """Under the preset's flags, which the command line overrides."""
    assert parse([]).model == ModelConfig()
    model = parse(["--architecture", "llama"]).model
    assert (model.untie_embeddings, model.norm_epsilon) == (True, 1e-6)
    asked = parse(["--architecture=llama", "--no-untie-embeddings", "--norm-epsilon", "1e-5"]).model
    assert (asked.untie_embeddings, asked.norm_epsilon) == (False, 1e-5)
    preset = tmp_path / "mine.toml"
    preset.write_text('architecture = "llama"\nnorm-epsilon = 1e-7\n')
    model = parse(["--preset", str(preset)]).model
    assert (model.untie_embeddings, model.norm_epsilon) == (True, 1e-7)
    assert parse(["--preset", str(preset), "--architecture", "gpt2"]).model.untie_embeddings is False
    saved = parse(["--architecture", "llama", "--no-untie-embeddings"])
    preset.write_text(to_toml(saved))
    assert parse(["--preset", str(preset)]).model == saved.model


def test_an_activation_that_is_auto_is_the_familys(tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    for activation in ("relu", "auto"):
        preset.write_text(f'architecture = "gemma"\nactivation = "{activation}"\n')
        named = parse(["--preset", str(preset)]).model
        assert named.activation == ("relu" if activation == "relu" else "geglu-tanh")
        assert parse(["--preset", str(preset), "--activation", "auto"]).model.activation == "geglu-tanh"
        assert over_defaults(preset_values(str(preset))).model == named
    assert parse(["--preset", str(preset), "--architecture", "llama"]).model.activation == "swiglu"


def test_qwen3_is_llama_with_norms_of_queries_and_keys() -> None:
    qwen3, llama = parse(["--architecture", "qwen3"]).model, parse(["--architecture", "llama"]).model
    assert qwen3 == replace(llama, **of_family("qwen3"), qk_layernorm=True, rotary_base=1e6)
    assert parse(["--architecture", "qwen3", "--no-qk-layernorm"]).model == replace(qwen3, qk_layernorm=False)


@for_each(
    "architecture",
    [name for name in FAMILIES if "multi-latent-attention" not in FAMILIES[name].defaults],
)
def test_heads_have_a_width_of_their_own(architecture: str) -> None:
    """It need not divide the hidden size, and nothing else changes."""
    model = parse(f"--architecture {architecture} --hidden-size 60 --num-attention-heads 8 --kv-channels 24".split())
    config, _ = resolve(replace(model, model=replace(model.model, vocab_size=99)), 1, 0, declare)
    shapes = {spec.name: spec.shape for spec in declare(config.model).kinds["blocks.0"].params}
    assert shapes["blocks.0.attention.proj.weight"] == (60, 8 * 24)
    usual = declare(replace(config.model, num_attention_heads=3, kv_channels=0)).kinds["blocks.0"].params
    assert shapes.keys() == {spec.name for spec in usual}


@for_each("architecture", ["gpt2", "llama", "parallel"])
def test_biases_are_those_of_the_option(architecture: str) -> None:
    qkv = ("qkv",) if architecture == "gpt2" else ("query", "kv")
    layers = {"qkv": {f"attention.{name}.bias" for name in qkv}, "proj": {"attention.proj.bias"}}
    layers |= {"mlp": {"mlp.up.bias", "mlp.down.bias"}, "logits": {"head.output_bias"}}
    for names in ((), *((name,) for name in layers), tuple(layers)):
        model = replace(LLAMA, **of_family(architecture) | {"norm": "rmsnorm", "linear_biases": names})
        found = {spec.name.removeprefix("blocks.0.") for kind in declare(model).kinds.values() for spec in kind.params}
        wanted = {bias for name in names for bias in layers[name]}
        assert {name for name in found if name.endswith("bias")} == wanted


@for_each(("architecture", "biases"), [("llama", False), ("parallel", True)])
def test_norms_of_heads_are_those_of_the_block(architecture: str, biases: bool) -> None:
    layers = declare(replace(LLAMA, **of_family(architecture), qk_layernorm=True, kv_channels=20), 4)
    specs = layers.kinds["blocks.0"].params
    norms = {spec.name.removeprefix("blocks.0.attention."): spec for spec in specs if "_norm" in spec.name}
    kinds = ("weight", "bias") if biases else ("weight",)
    assert sorted(norms) == sorted(f"{of}_norm.{kind}" for of in ("query", "key") for kind in kinds)
    for spec in norms.values():
        assert (spec.shape, spec.sharded, spec.summed, spec.decays) == ((20,), (), {"tp"}, False)


def test_norms_over_all_heads_are_sharded_like_the_heads() -> None:
    """The weight of groups that several ranks have is replicated, and its gradient summed."""
    model = replace(LLAMA, qk_layernorm=True, qk_norm_all_heads=True, kv_channels=20)
    for tp, keys in ((2, (((0, "tp"),), set())), (4, ((), {"tp"}))):
        params = declare(model, tp).kinds["blocks.0"].params
        specs = {spec.name.removeprefix("blocks.0.attention."): spec for spec in params}
        query, key = specs["query_norm.weight"], specs["key_norm.weight"]
        assert (query.shape, query.sharded, query.summed, query.decays) == ((8 * 20,), ((0, "tp"),), set(), False)
        assert (key.shape, (key.sharded, key.summed), key.decays) == ((2 * 20,), keys, False)


LATENT = {"architecture": "llama", "multi_latent_attention": True}


@for_each(
    "options, message",
    [
        ({"num_query_groups": 2}, "--architecture gpt2 has no --num-query-groups 2; use one of llama, mistral"),
        ({"add_qkv_bias": True}, "--architecture gpt2 has no --add-qkv-bias; use one of llama, mistral"),
        ({"qk_layernorm": True}, "--architecture gpt2 has no --qk-layernorm; use one of llama, mistral"),
        (
            {"qk_norm_all_heads": True},
            "--architecture gpt2 has no --qk-norm-all-heads; use one of llama, mistral",
        ),
        ({"architecture": "llama", "qk_norm_all_heads": True}, "--qk-norm-all-heads needs --qk-layernorm"),
        ({"architecture": "llama", "kv_channels": 5}, "--kv-channels 5: .* even size; use --kv-channels 6"),
        (
            {"architecture": "llama", "num_query_groups": 5},
            "--num-query-groups 5 .*-heads 12; .* 6, 12",
        ),
        (
            {"architecture": "llama", "num_query_groups": 4, "tensor_model_parallel_size": 6},
            "--num-query-groups 4 and --tensor-model-parallel-size 6: .* use a --tensor-model-parallel-size of 1, 2, 4",
        ),
        ({"architecture": "llama", "hidden_size": 36}, "--hidden-size 36 / --num-attention-heads 12 = 3: .* even"),
        ({"multi_latent_attention": True}, "--architecture gpt2 has no --multi-latent-attention; use one of llama"),
        (
            {"architecture": "llama", "v_head_dim": 12},
            "--v-head-dim 12 has no effect without .*; add --multi-latent-attention, or drop it",
        ),
        (LATENT | {"kv_channels": 12}, "--kv-channels 12 has no effect with --multi-latent-attention; drop it"),
        (LATENT | {"v_head_dim": 200}, "--v-head-dim 200 is more than .* 128 .* 64 = 192; use at most 192"),
        (LATENT | {"qk_pos_emb_head_dim": 7}, "--qk-pos-emb-head-dim 7: .* in pairs; use .* 8"),
        (
            LATENT | {"mscale": 0.7},
            "--mscale 0.7 has no effect without --rope-scaling-type yarn and .* above 1; add them",
        ),
        ({"architecture": "llama", "beta_fast": 16.0, "rope_scaling_type": "yarn"}, "--beta-fast 16.0 has no effect"),
        (
            {"learned_positions": False},
            "--fused-qkv needs --learned-positions: queries .* not rotated; add it, or drop",
        ),
        ({"architecture": "llama", "fused_qkv": True}, "--fused-qkv needs --learned-positions"),
        ({"fused_qkv": False}, "--no-fused-qkv needs --no-learned-positions"),
        ({"parallel_norms": 2, "norm_place": "after"}, "--norm-place after with --parallel-norms 2: .* no such norms"),
        (LATENT | {"attention_sinks": True}, "--architecture llama has no --multi-latent-attention"),
        ({"num_experts": 4, "linear_biases": ("mlp",)}, "--num-experts 4 with --architecture gpt2: experts have no"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    config = make(vocab_size=50257, **options)
    with pytest.raises(ValueError, match=f"^{message}"):
        resolve(config, config.parallel.tensor_model_parallel_size, 0, declare)


@for_each(
    ("flags", "width", "near"),
    [
        ("--window-size 8", 20, 24),
        ("--window-size 8", 320, 256),
        ("--reset-attention-mask --tokenizer byte", 12, 16),
        ("--reset-attention-mask --tokenizer byte --precision fp16", 264, 256),
    ],
)
def test_heads_that_flash_attention_lacks_are_refused(flags: str, width: int, near: int) -> None:
    """Within documents and windows, in 16 bit on a GPU, torch has no other kernel."""
    line = f"--architecture llama --kv-channels {width} --precision bf16 {flags}"
    with pytest.raises(ValueError, match=rf"of width {width} in .* at most 256; use --kv-channels {near}, or"):
        check_device(parse(line.split()), "cuda")
    check_device(parse(line.split()), "cpu")
    for other in ("--precision fp32", "--attention-dropout 0.1", f"--kv-channels {near}"):
        check_device(parse(f"{line} {other}".split()), "cuda")
    check_device(parse(f"--architecture llama --kv-channels {width} --precision bf16".split()), "cuda")


def test_latent_heads_that_flash_attention_lacks_are_refused() -> None:
    line = "--architecture llama --multi-latent-attention --precision bf16 --window-size 8 --qk-head-dim"
    with pytest.raises(ValueError, match=r"of width 190 .*; use --qk-head-dim 128, or"):
        check_device(parse(f"{line} 126".split()), "cuda")
    check_device(parse(f"{line} 128".split()), "cuda")


def test_options_of_families_are_flags_of_the_model() -> None:
    for family in FAMILIES.values():
        assert all(flags()[name].group == "model" for name in family.defaults)
    assert next(iter(FAMILIES)) == "gpt2" and len(FAMILIES) == len(list(Path(families.__path__[0]).glob("[a-z]*.py")))


def test_a_command_line_imports_neither_torch_nor_transformers() -> None:
    """It reads the families."""
    code = "import sys, megazero.flags.cli; print(sorted({'transformers', 'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@for_each(("architecture", "d"), [("llama", 8), ("llama", 20), ("qwen3", 20)])
@for_each("groups", [1, 2, 8])
def test_flops_of_a_llama_are_those_of_its_products(groups: int, architecture: str, d: int) -> None:
    """Three times the forward: 2 h (n + 2 g) d for q, k, v, 2 n d h, 4 s n d for attention, 6 h f, 2 V h at the end."""
    model = replace(LLAMA, num_query_groups=groups, **of_family(architecture), kv_channels=d)
    model = replace(model, qk_layernorm=architecture == "qwen3")
    h, f, s, v, n = 64, 96, 32, 1000, 8
    block = 2 * h * (n + 2 * groups) * d + 2 * n * d * h + 4 * s * n * d + 6 * h * f
    assert model_flops(model, 5) == 3 * 5 * s * (3 * block + 2 * v * h)
    costs = layer_costs(declare(model), model, ActivationConfig())
    assert (costs.head, costs.embedding) == pytest.approx((2 * v * h / block, 2 * h / block))


def test_fewer_groups_than_ranks_are_replicated_and_their_gradients_summed() -> None:
    for tp, sharded in ((1, True), (2, True), (4, False), (8, False)):
        specs = declare(LLAMA, tp).kinds["blocks.0"].params
        kv = {spec.name: spec for spec in specs}["blocks.0.attention.kv.weight"]
        assert kv.shape == (2, 2, 8, 64)
        assert (kv.sharded, kv.summed) == ((((0, "tp"),), set()) if sharded else ((), {"tp"}))
        flat = unit_layout(specs, {"tp": tp}, 1)
        assert sum(r.numel for r in flat.summed("tp", False)) == (0 if sharded else kv.local({}, {}).numel)
        assert flat.summed("tp", True) == flat.replicated("tp")


@for_each("all_heads", [False, True])
def test_norms_of_queries_and_keys_keep_copies_of_their_inputs(all_heads: bool) -> None:
    """In fp32: queries and keys, not the values next to the keys; and a number per head, or two per token."""
    plain = replace(LLAMA, kv_channels=20)
    normed = replace(plain, qk_layernorm=True, qk_norm_all_heads=all_heads)
    saved = [sum(trace_block(*Case(model=model).resolved(), "cpu").saved) for model in (normed, plain)]
    tokens, heads = Case().samples * LLAMA.seq_length, 8 + 2
    assert saved[0] - saved[1] == 4 * tokens * (heads * 20 + (2 if all_heads else heads))
