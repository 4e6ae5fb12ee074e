"""Sliding windows, soft caps and the scale of attention's scores: --window-size, --layer-pattern, --attention-softcap.

`tests/parallel/matrix.py` has them as a factor; `test_families.py` compares with transformers.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megazero.engine.kernels.dropout import Dropout, Rows
from megazero.engine.kernels.kernel_table import EAGER
from megazero.engine.model.documents import Documents
from megazero.engine.model.layers.attention import CoreAttention
from megazero.engine.model.scores import Scores
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.layers import stage_units
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.families import MODELS
from megazero.flags.cli import parse
from megazero.flags.config import ActivationConfig, Config, ModelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from megazero.generation.kv_cache import KVCache, attend_prompt
from megazero.interop.huggingface.families import family_of
from megazero.planner.run_plan import make_plan, plan_config
from megazero.planner.trace.kernel_records import Operator
from megazero.planner.trace.trace import model_flops, trace, trace_block
from tests.helpers.families import of_family
from tests.helpers.table import for_each
from tests.pretended_gpu import GPU, pretended_gpu

B, HEADS, GROUPS, LENGTH, DIM = 2, 4, 2, 300, 8
STARTS = ((20, 200), (110,))  # further documents of the two samples, shorter and longer than the window of 70
SCORES = [  # a window of 70 has pieces of 70 and 64 queries, and a rest
    Scores(window=70),
    Scores(window=5, scale=0.3),
    Scores(window=70, softcap=2.0, scale=0.5),
    Scores(softcap=2.0),
]


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """q [b, n, s, d], k and v [b, g, s, d], starts [b, s] -> [b, s, n d], as the papers write it."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    weights = q @ k.transpose(-1, -2) * (scores.scale or q.shape[-1] ** -0.5)
    if scores.softcap:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    at = torch.arange(q.shape[2])
    seen = at[:, None] >= at
    if scores.window:
        seen = seen & (at[:, None] - at < scores.window)
    if starts is not None:
        seen = seen & (starts[:, :, None] == starts[:, None])[:, None]
    return (weights.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


def heads(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, n, LENGTH, DIM) for n in (HEADS, GROUPS, GROUPS))
    return [torch.randn(shape, generator=generator).mul(1.5).to(dtype).requires_grad_() for shape in shapes]


@for_each("documents", [False, True])
@for_each(
    ("scores", "fused"),
    [(scores, fused) for scores in SCORES for fused in (False, True) if not (fused and scores.softcap)],
)
def test_attention_sees_the_window(scores: Scores, fused: bool, documents: bool) -> None:
    """Output and gradients, in fp64: by the kernel of the CPU, in pieces, and by explicit weights, saved or not."""
    starts = torch.zeros(B, LENGTH, dtype=torch.int64)
    for row, firsts in enumerate(STARTS):
        for first in firsts:
            starts[row, first:] = first
    parts = heads()
    wanted = plain(*parts, scores, starts if documents else None).flatten(0, 1)
    dy = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(wanted, parts, dy)
    for again in (False, True):
        core = CoreAttention(Dropout(0.0, 0, 0, "scores"), EAGER, again, scores)
        y = core(*parts, fused, None, Documents.of(starts) if documents else None)
        assert (y - wanted).abs().max() < 1e-12 * wanted.abs().max()
        for found, want in zip(torch.autograd.grad(y, parts, dy), gradients, strict=True):
            assert (found - want).abs().max() < 1e-12 * want.abs().max()


@for_each(("dtype", "capability"), [(torch.bfloat16, (9, 0)), (torch.float16, (7, 0)), (torch.float32, (9, 0))])
def test_a_gpu_sees_the_window(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """FlashAttention, which knows windows; and pieces, without it and in fp32. A result is a sum of a few roundings."""
    scores, parts = Scores(window=20, scale=0.3), heads(dtype)
    wide = [part.detach().double().requires_grad_() for part in parts]
    dy = torch.randn(B * LENGTH, HEADS * DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = plain(*wide, scores).flatten(0, 1)
    with pretended_gpu(capability):
        there = [part.detach().to(GPU).requires_grad_() for part in parts]
        y = CoreAttention(Dropout(0.0, 0, 0, "scores"), EAGER, False, scores)(*there, True, None)
        found = [x.cpu().double() for x in (y.detach(), *torch.autograd.grad(y, there, dy.to(GPU)))]
    tolerance = 4 * torch.finfo(dtype).eps
    for ours, theirs in zip(found, (wanted, *torch.autograd.grad(wanted, wide, dy.double())), strict=True):
        assert (ours - theirs).norm() < tolerance * theirs.norm()


def test_a_capped_gradient_survives_16_bit() -> None:
    """The saved scores are rounded once; their cap's derivative is made of them."""
    scores, parts = Scores(window=70, softcap=2.0), heads(torch.bfloat16)
    wide = [part.detach().double().requires_grad_() for part in parts]
    y = CoreAttention(Dropout(0.0, 0, 0, "scores"), EAGER, False, scores)(*parts, False, None)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = torch.autograd.grad(plain(*wide, scores).flatten(0, 1), wide, dy.double())
    for found, want in zip(torch.autograd.grad(y, parts, dy), wanted, strict=True):
        assert (found.double() - want).norm() < 8 * torch.finfo(torch.bfloat16).eps * want.norm()


@for_each("scores", [Scores(), Scores(window=4), Scores(window=4, softcap=1.0, scale=0.4)])
def test_a_cache_attends_as_whole_sequences_do(scores: Scores) -> None:
    """Prompts of 1, 6 and 3 tokens, then one token at a time; the second sequence ends, and a new prompt replaces."""
    parts, lengths = [part.detach()[:1, :, :15] for part in heads()], [1, 6, 3]
    sequences = [[part.roll(number, dims=2)[0].transpose(0, 1) for part in parts] for number in range(3)]
    core = CoreAttention(Dropout(0.0, 0, 0, "scores"), EAGER, False, scores)

    def attend(cache: KVCache, new: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Check tokens [first, stop) of sequences, and return the last of each."""
        rows = tuple(Rows(row, first, stop - first) for row, (_, first, stop) in enumerate(new))
        given = [torch.cat([sequences[i][j][first:stop] for i, first, stop in new]) for j in range(3)]
        found = cache.attend(
            7, scores, lambda q, k, v, dealt: attend_prompt(core, q, k, v, not scores.softcap, dealt), *given, rows
        )
        return list(found.split([row.count for row in rows]))

    wholes = [plain(*(part.transpose(0, 1)[None] for part in parts), scores)[0] for parts in sequences]
    cache, alive, at = KVCache(3, 15), [0, 1, 2], list(lengths)
    found = attend(cache, [(i, 0, at[i]) for i in alive])
    for step in range(8):
        for i, y in zip(alive, found, strict=True):
            torch.testing.assert_close(y, wholes[i][at[i] - len(y) : at[i]])
        if step == 3:
            cache.keep([0, 2])
            alive = [0, 2]
        for i in alive:
            at[i] += 1
        found = attend(cache, [(i, at[i] - 1, at[i]) for i in alive])
    found = attend(cache, [(0, 0, 2), (2, at[2], at[2] + 1)])  # a text behind the model's window begins again
    torch.testing.assert_close(found[0], wholes[0][:2])
    torch.testing.assert_close(found[1], wholes[2][at[2] : at[2] + 1])
    (keys, values), slots = cache._layers[7], scores.window or 15
    assert keys.shape == values.shape == (2, GROUPS, slots, DIM)


MODEL = ModelConfig(
    num_layers=5,
    hidden_size=48,
    ffn_hidden_size=80,
    num_attention_heads=6,
    num_query_groups=2,
    seq_length=32,
    vocab_size=101,
    **of_family("llama"),
    untie_embeddings=True,
    window_size=8,
    layer_pattern="LLG",
)
MATRICES = 2 * 48 * (2 * 6 + 2 * 2) * 8 + 2 * 3 * 48 * 80  # FLOPs per token: queries, output, keys, values; MLP


def test_a_layer_has_the_scores_of_its_letter() -> None:
    model = replace(MODEL, attention_scale=0.2, attention_softcap=3.0)
    assert [Scores.of(model, number) for number in (1, 2)] == [Scores(8, 3.0, 0.2), Scores(0, 3.0, 0.2)]
    assert Scores.of(replace(MODEL, seq_length=8), 1) == Scores(), "a window of whole samples is none"


@for_each(
    ("model_type", "keys", "options"),
    [
        ("mistral", {"sliding_window": 8}, (8, "")),
        ("mistral", {"sliding_window": None}, (0, "")),
        ("ministral", {"sliding_window": 8, "layer_types": "GLLGL"}, (8, "GLL")),
        ("ministral", {"sliding_window": 8, "layer_types": "GGGGG"}, (0, "")),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (8, "GGGLL")),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, "")),
        ("qwen3", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 3}, (0, "")),
        ("llama", {"sliding_window": 8}, (0, "")),  # a key that its class does not read
    ],
)
def test_windows_of_hugging_face_are_a_pattern(
    model_type: str, keys: dict[str, object], options: tuple[int, str]
) -> None:
    from transformers import AutoConfig

    types = {"L": "sliding_attention", "G": "full_attention"}
    keys = {key: [types[c] for c in value] if isinstance(value, str) else value for key, value in keys.items()}
    config = AutoConfig.for_model(model_type, num_hidden_layers=5, **keys)
    model = ModelConfig(**MODELS[model_type].from_config(config))
    assert (model.window_size, model.layer_pattern) == options
    back = family_of(model).to_config(model, None)
    assert ModelConfig(**family_of(model).from_config(back)) == model


def test_kinds_of_layers_that_are_not_known_are_refused() -> None:
    from transformers import MinistralConfig

    config = MinistralConfig(num_hidden_layers=2, layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(ValueError, match=r"has layer_types chunked_attention; .* sliding_attention and full_attention"):
        MODELS["ministral"].from_config(config)


@for_each(
    "options",
    [
        {"attention_softcap": 5.0},
        {"layer_pattern": "GN", "qk_layernorm": True},
        of_family("gpt2") | {"window_size": 4},
    ],
)
def test_a_model_that_hugging_face_lacks_is_refused(options: dict[str, Any]) -> None:
    model = replace(ModelConfig(**of_family("llama"), seq_length=16), **options)
    assert family_of(replace(ModelConfig(**of_family("llama")), attention_scale=0.5)).model_type == "granite"
    with pytest.raises(ValueError, match=r"^no model of Hugging Face is a (llama|gpt2) with --(attention|window|qk)-"):
        family_of(model)


@for_each(
    ("changes", "seen"),
    [
        ({}, 4 * 8 + 32),
        ({"layer_pattern": ""}, 5 * 8),
        ({"layer_pattern": "", "window_size": 0}, 5 * 32),
        ({"window_size": 32}, 5 * 32),
        ({"attention_softcap": 3.0, "attention_dropout": 0.5}, 4 * 8 + 32),  # which compute all scores
    ],
)
def test_flops_count_the_keys_that_a_query_sees(changes: dict[str, object], seen: int) -> None:
    """The peers count 4 n d per key of a sample, or of the window; causal or not."""
    model = replace(MODEL, **changes)
    assert model_flops(model, 7) == 3 * 7 * 32 * (5 * MATRICES + 4 * seen * 48 + 2 * 101 * 48)


def attention_flops(device_type: str, precision: str, length: int, layer: str) -> list[int]:
    model = replace(MODEL, seq_length=length, window_size=64)
    training = TrainingConfig(micro_batch_size=2, precision=precision)  # type: ignore[arg-type]
    config, layout = resolve(Config(model=model, training=training), 1, 0, declare)
    spec = rank_spec(config, layout, 0, declare)
    specs = stage_units(declare(config.model), layout, 0)
    events = trace(config, layout, spec.layers[layer], specs, device_type).events
    return [
        sum(event.attention_flops for event in found if isinstance(event, Operator))
        for found in (events.forward, events.backward)
    ]


def test_the_price_of_a_kernel_is_that_of_its_window() -> None:
    """4 n d per score. FlashAttention computes 64 per query, and fewer of the first queries. The pieces of 64 queries
    of other kernels compute 128 per query, but those of the first piece, which are causal."""
    each = 2 * 4 * 48  # of two samples
    flash, pieces, whole = 64 * 192 - 64 * 64 // 2, 64 * 64 // 2 + 128 * 128, 192 * 192 // 2
    for device_type, precision, windowed in (
        ("cuda", "bf16", flash),
        ("cuda", "fp32", pieces),
        ("cpu", "fp32", pieces),
    ):
        for layer, scores in (("blocks.0", windowed), ("blocks.2", whole)):
            wanted = each * scores
            assert attention_flops(device_type, precision, 192, layer) == [wanted, wanted * 5 // 2], device_type


def test_a_plan_of_windows_is_cheaper() -> None:
    flags = "--architecture llama --num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 16384 "
    flags += "--vocab-size 512 --precision bf16 --plan --world-size 1 --device-type h100-80gb"
    seconds = []
    for more in ("", "--window-size 1024 --layer-pattern LLLG", "--window-size 1024", "--window-size 16384"):
        config, layout, device = plan_config(parse(f"{flags} {more}".split()))
        seconds.append(make_plan(config, layout, device).seconds)
    whole, three, four, none = seconds
    assert none == whole and (whole - four) * 3 == pytest.approx((whole - three) * 4)
    # each windowed layer saves 1 - 2 x 1024 / 16384 + (1024 / 16384)^2 of 4 s^2 h / 2, three and a half times
    saved = 3.5 * 2 * 16384**2 * 1024 * (1 - 1 / 16) ** 2
    assert (whole - four) / 4 == pytest.approx(saved / (989e12 * device.attention(128)), rel=0.05)


def test_a_window_of_a_cpu_keeps_no_byte_more() -> None:
    """And a soft cap as many as explicit weights: the capped scores."""

    def saved(model: ModelConfig, precision: str = "fp32", recompute: str = "none") -> int:
        training = TrainingConfig(micro_batch_size=2, precision=precision)  # type: ignore[arg-type]
        activations = ActivationConfig(recompute)  # type: ignore[arg-type]
        config, layout = resolve(Config(model=model, training=training, activations=activations), 1, 0, declare)
        return sum(trace_block(config, layout, "cpu").saved)

    whole = replace(MODEL, window_size=0, layer_pattern="")
    assert saved(MODEL) == saved(whole) and saved(MODEL, "bf16") == saved(whole, "bf16")
    capped = replace(whole, attention_softcap=5.0)
    assert saved(capped, "bf16") == saved(whole, "bf16")
    log_sums = 2 * 6 * 32 * 4
    assert saved(capped) - saved(whole) == 2 * 6 * 32 * 32 * 4 - log_sums
    assert saved(capped, recompute="selective") == saved(whole, recompute="selective") - log_sums
