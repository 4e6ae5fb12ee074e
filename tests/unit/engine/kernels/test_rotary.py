"""Rotary positions against transformers' functions: parts of a head, interleaved dims, scalings, kinds of layers."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.engine.kernels.kernel_table import EAGER
from megazero.engine.kernels.rotary import Rotary
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.step.engine import Engine
from megazero.families.parts.rope_scaling import rope_parameters, rotary_options
from megazero.flags.config import Config, ModelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from megazero.flags.validate import check_values
from megazero.generation.generate import NewTokens
from megazero.generation.model import InferenceModel
from tests import reference
from tests.helpers.families import of_family
from tests.helpers.table import for_each
from tests.parallel.cases import MicroBatch

CPU = torch.device("cpu")
MODEL = ModelConfig(4, 48, 80, 6, 17, 131, **of_family("llama"), num_query_groups=2, kv_channels=16)
OLMO3 = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
OLMO3 |= {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0}
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 4096}
LLAMA_3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
DEEPSEEK = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}
DEEPSEEK |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.2}
PARAMETERS: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default", "rope_theta": 1e4},
    "Llama 3.1": LLAMA_3 | {"factor": 8.0, "original_max_position_embeddings": 8192},
    "Llama 3.2 on another length": LLAMA_3,
    "Gemma 3": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "OLMo 3": OLMO3,
    "DeepSeek": DEEPSEEK,
    "Kimi K2": DEEPSEEK | {"factor": 32.0, "rope_theta": 5e4, "beta_fast": 1.0},
    "gpt-oss": OLMO3 | {"rope_theta": 1.5e5, "factor": 32.0, "truncate": False, "attention_factor": None},
    "Qwen 2.5": {"type": "yarn", **OLMO3, "rope_theta": 1e6, "factor": 4.0, "attention_factor": None},
    "all of YaRN in one place": OLMO3 | {"rope_theta": 1e12, "original_max_position_embeddings": 10},
    "odd factor": OLMO3 | {"factor": 3.0, "attention_factor": None},
}
ODD = ("odd factor", "DeepSeek")  # no powers of two: theirs divides 1 by the product of factor and wavelength


@for_each("percent", [1.0, 0.75])
@for_each("case", PARAMETERS)
def test_frequencies_are_those_of_transformers(case: str, percent: float) -> None:
    """At d = 128 and 96, which have wavelengths that are kept, scaled, and between the two."""
    from transformers import GPTNeoXConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

    given = PARAMETERS[case] | {"partial_rotary_factor": percent}
    config = GPTNeoXConfig(hidden_size=256, num_attention_heads=2, rope_parameters=dict(given))
    make = ROPE_INIT_FUNCTIONS.get(given["rope_type"], GPTNeoXRotaryEmbedding.compute_default_rope_parameters)
    wanted, factor = make(config, CPU)
    rotary = Rotary.of(replace(MODEL, kv_channels=128, **rotary_options(given, partial=True)), 0)
    found = rotary.frequencies(CPU)
    assert rotary.amplitude == pytest.approx(factor, rel=1e-12)
    assert len(found) == 64 * percent
    if case in ODD:
        assert ((found - wanted).abs() <= 4 * torch.finfo(torch.float32).eps * wanted).all()
    else:
        assert torch.equal(found, wanted)


def check_kernel(rotary: Rotary, x: torch.Tensor, wanted: torch.Tensor, model: ModelConfig) -> None:
    """Compare the kernel's rotation of x [b, s, heads, d], and its gradient, with theirs; and the reference's."""
    (b, s, *_), dy = x.shape, torch.randn_like(x)
    (dx,) = torch.autograd.grad(wanted, x, dy)
    tables = rotary.tables(s, torch.float64, CPU)
    for given, back, expected in ((x.detach(), False, wanted.detach()), (dy, True, dx)):
        results = tuple(torch.empty_like(given) for _ in range(3))
        EAGER.rotary((given,) * 3, results, tables, None, back)
        assert all((found - expected).abs().max() < 1e-14 * 8 for found in results[:2])
        assert torch.equal(results[2], given)
    found = reference.rotated(model, "G", torch.arange(s).expand(b, s), x.detach().transpose(1, 2)).transpose(1, 2)
    assert (found - wanted).abs().max() < 1e-14 * 8


@for_each("case", [case for case in PARAMETERS if case not in ODD])
@for_each("percent", [1.0, 0.25])
def test_a_part_of_a_head_is_rotated_as_in_gpt_neox(case: str, percent: float) -> None:
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb

    given = PARAMETERS[case] | {"partial_rotary_factor": percent}
    theirs = GPTNeoXRotaryEmbedding(GPTNeoXConfig(hidden_size=64, num_attention_heads=2, rope_parameters=dict(given)))
    model = replace(MODEL, kv_channels=32, **rotary_options(given, partial=True))
    x = torch.randn(2, 7, 3, 32, dtype=torch.float64, requires_grad=True)
    cos, sin = theirs(x, torch.arange(7)[None])
    wanted = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0]
    check_kernel(Rotary.of(model, 0), x, wanted, model)


def test_interleaved_dims_are_rotated_as_in_gpt_j() -> None:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb, create_sinusoidal_positions

    model = replace(MODEL, kv_channels=32, rotary_percent=0.375, rotary_interleaved=True)
    x = torch.randn(2, 7, 3, 32, dtype=torch.float64, requires_grad=True)
    sin, cos = create_sinusoidal_positions(7, 12).double().expand(2, 7, 12).chunk(2, dim=-1)
    wanted = torch.cat([apply_rotary_pos_emb(x[..., :12], sin, cos), x[..., 12:]], dim=-1)
    check_kernel(Rotary.of(model, 0), x, wanted, model)


def test_layers_with_a_window_have_a_base_of_their_own_and_no_scaling() -> None:
    """--local-rotary-base, letter L; letter N has no rotation."""
    model = replace(MODEL, layer_pattern="LGN", window_size=4, rope_scaling_factor=4.0, rope_scaling_type="linear")
    scaled = Rotary(16, 1e4, 4.0, "linear")
    assert [Rotary.of(model, i) for i in range(3)] == [scaled, scaled, Rotary(0, 1e4)]
    model = replace(model, local_rotary_base=99.0, rotary_percent=0.5, rotary_interleaved=True)
    assert Rotary.of(model, 3) == Rotary(8, 99.0, interleaved=True)
    assert Rotary.of(model, 1) == Rotary(8, 1e4, 4.0, "linear", interleaved=True)


@for_each(
    "options",
    [
        of_family("parallel") | {"rotary_percent": 0.65, "rotary_interleaved": True, "qk_layernorm": True},
        {"rope_scaling_factor": 4.0, "rope_scaling_type": "yarn", "rope_trained_length": 256, "layer_pattern": "GN"},
    ],
)
def test_a_cache_computes_the_same(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token with a cache, two sequences of different lengths: the logits of plain PyTorch over whole ones."""
    model = replace(MODEL, init_method_std=0.2, **options)
    config = replace(Config(), model=model, training=TrainingConfig(precision="fp64"))
    weights = reference.initial_weights(config)

    def load(path: Path, shards: Mapping[str, Any], *_: Any, **__: Any) -> None:
        for name, shard in shards.items():
            shard.data.copy_(weights[name.removeprefix("model.")].flatten()[: shard.data.numel()])

    monkeypatch.setattr("megazero.checkpoint.load", load)
    ours = InferenceModel(Path(), model, Mesh.build(Layout(), 0, CPU), "fp64")
    ids = torch.randint(0, model.vocab_size, (2, 12), generator=torch.Generator().manual_seed(1))
    wanted = reference.forward(config, weights, ids)
    cache = ours.new_cache(2, 12)
    first = (5, 3)
    new = [NewTokens(row[:n].tolist(), 0) for row, n in zip(ids, first, strict=True)]
    for step in range(8):
        logits = ours.logits(new, cache)
        assert logits is not None
        ends = [n + step for n in first]
        for row, end in enumerate(ends):
            error = (logits[row, : model.vocab_size] - wanted[row, end - 1]).abs().max()
            assert error < 1e-10 * wanted.abs().max()
        new = [NewTokens(row[end : end + 1].tolist(), end) for row, end in zip(ids, ends, strict=True)]


@for_each(
    ("given", "options"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, {}),
        (PARAMETERS["Gemma 3"] | {"rope_theta": 1e4}, {"rope_scaling_factor": 8.0, "rope_scaling_type": "linear"}),
        (LLAMA_3, {"rotary_base": 5e5, "rope_scaling_factor": 32.0, "rope_trained_length": 4096}),
        (
            OLMO3,
            {"rotary_base": 5e5, "rope_scaling_factor": 8.0, "rope_scaling_type": "yarn", "rope_trained_length": 8192},
        ),
        (
            DEEPSEEK,
            {"rope_scaling_factor": 40.0, "rope_scaling_type": "yarn", "rope_trained_length": 4096, "mscale": 0.7}
            | {"mscale_all_dim": 1.2},
        ),
        (
            OLMO3 | {"beta_fast": 16},
            {"rotary_base": 5e5, "rope_scaling_factor": 8.0, "rope_scaling_type": "yarn", "rope_trained_length": 8192}
            | {"beta_fast": 16},
        ),
        (
            DEEPSEEK | {"truncate": False},
            {"rope_scaling_factor": 40.0, "rope_scaling_type": "yarn", "rope_trained_length": 4096, "mscale": 0.7}
            | {"mscale_all_dim": 1.2, "yarn_correction_range_round_to_int": False},
        ),
    ],
)
def test_rope_parameters_are_imported_and_exported(given: dict[str, Any], options: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    model = replace(MODEL, **options)
    assert replace(MODEL, **rotary_options(given)) == model
    check_values(replace(Config(), model=model))
    assert (
        replace(MODEL, **rotary_options(LlamaConfig(rope_parameters=rope_parameters(model)).rope_parameters)) == model
    )
    part = replace(model, rotary_percent=0.5)
    assert replace(MODEL, **rotary_options(rope_parameters(part, partial=True), partial=True)) == part
    for local in (0.0, 77.0):
        both = replace(model, local_rotary_base=local)
        assert replace(MODEL, **rotary_options(rope_parameters(both, by_kind=True))) == both


def test_a_factor_of_one_is_no_scaling() -> None:
    assert replace(MODEL, **rotary_options(OLMO3 | {"factor": 1.0, "attention_factor": 1.0})) == replace(
        MODEL, rotary_base=5e5
    )


@for_each(
    ("given", "words"),
    [
        (
            {"rope_type": "longrope", "short_factor": [1.0]},
            "config.json has rope_type longrope; .* linear, llama3, yarn",
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, "config.json has rope_type dynamic"),
        ({"factor": 8.0}, "has factor 8.0 in rope_parameters of rope_type default; this version does not compute it"),
        ({"partial_rotary_factor": 0.5}, "has partial_rotary_factor 0.5; this architecture rotates whole heads"),
        (
            OLMO3 | {"beta_slow": 2.0},
            "has beta_slow 2.0 in rope_parameters of rope_type yarn; this version computes 1 only",
        ),
        (OLMO3 | {"attention_factor": 1.3}, "has attention_factor 1.3 .*; this version computes 1.20794 only"),
        (LLAMA_3 | {"mscale": 0.7}, "has mscale 0.7 .* of rope_type llama3; this version does not compute it"),
        (LLAMA_3 | {"high_freq_factor": 8.0}, "has high_freq_factor 8.0"),
        (
            {"full_attention": OLMO3, "sliding_attention": OLMO3 | {"factor": 2.0, "attention_factor": None}},
            "'factor': 2.0.* in rope_parameters; this version computes layers with a window with another rope_theta",
        ),
    ],
)
def test_other_rope_parameters_are_refused(given: dict[str, Any], words: str) -> None:
    whole = given if "full_attention" in given else {"rope_type": "default", "rope_theta": 1e4} | given
    with pytest.raises(ValueError, match=words):
        rotary_options(whole)


@for_each("dtype", [torch.bfloat16, torch.float16])
def test_angles_of_far_positions_are_not_rounded_to_the_precision(dtype: torch.dtype) -> None:
    """bf16 holds no odd number above 256, fp16 none above 2,048: only cos and sin are rounded."""
    length, dim, base = 6000, 4, 500.0
    cos, sin, _ = Rotary(dim, base).tables(length, dtype, torch.device("cpu"))
    angles = torch.arange(length, dtype=torch.float64)[:, None] / torch.tensor([1.0, base**0.5], dtype=torch.float64)
    for table, exact in ((cos[..., :2], angles.cos()), (cos[..., 2:], angles.cos()), (sin, angles.sin())):
        assert table.dtype == dtype
        error = (table.reshape(length, dim // 2).double() - exact).abs()
        assert (error <= torch.finfo(dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps * angles).all()


def test_layers_share_one_pair_of_tables() -> None:
    """Made with the model, and a buffer: for d = 16, a cosine for every dim and a sine for every second, in bf16."""
    config, _ = resolve(replace(Config(), model=MODEL, training=TrainingConfig(3, precision="bf16")), 1, 0, declare)
    engine = Engine(config, Mesh.build(Layout(), 0, torch.device("cpu")))
    first, *others = (block.attention.tables for block in engine.model.blocks.values())
    assert all(each is first for each in others)
    assert engine.tracker.now["buffers"] - engine.zero.arena.nbytes == 17 * (16 + 8) * 2
    batch = MicroBatch(*torch.zeros(2, 3, 17, dtype=torch.int64), torch.ones(3, 17), (0, 1, 2))
    with torch.profiler.profile() as profile:
        engine.train_step(1, [batch])
    assert not {"aten::cos", "aten::sin"} & {event.key for event in profile.key_averages()}
