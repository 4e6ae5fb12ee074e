"""Llama, Qwen 2 and Qwen 3 against transformers' classes with the same weights: logits and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megazero.comm.mesh.mesh import Mesh
from megazero.config.schema import Config, ModelConfig, TrainingConfig
from megazero.kernels.rotary import Rotary
from megazero.model.layers.context import MicroBatchInfo
from megazero.model.stage import declare
from megazero.plan.layout.resolve import resolve
from megazero.plan.layout.topology import Layout
from megazero.step.engine import Engine
from tests.helpers.rounding import model_tolerance
from tests.parallel.cases import MicroBatch

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=48,
    ffn_hidden_size=80,
    num_attention_heads=6,
    seq_length=17,
    vocab_size=131,
    untie_embeddings=True,
    architecture="llama",
    num_query_groups=2,
    rotary_base=5e5,
    norm_epsilon=1e-6,
)
QWEN3 = replace(MODEL, architecture="qwen3", qk_layernorm=True, kv_channels=14)
ROPE = {"rope_type": "default", "rope_theta": MODEL.rotary_base}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"rope_theta": MODEL.rotary_base, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": MODEL.rotary_base}
CASES: dict[str, tuple[ModelConfig, str, dict[str, Any]]] = {
    "llama": (MODEL, "Llama", {"rope_parameters": ROPE}),
    "one group": (replace(MODEL, num_query_groups=1), "Llama", {"rope_parameters": ROPE}),
    "no groups, tied": (replace(MODEL, num_query_groups=0, untie_embeddings=False), "Llama", {"rope_parameters": ROPE}),
    "llama 3.1": (replace(MODEL, rope_scaling_factor=8.0), "Llama", {"rope_parameters": LLAMA_3}),
    "llama 3.1 of 4096": (
        replace(MODEL, rope_scaling_factor=8.0, rope_trained_length=4096),
        "Llama",
        {"rope_parameters": LLAMA_3 | {"original_max_position_embeddings": 4096}},
    ),
    "linear": (
        replace(MODEL, rope_scaling_factor=3.0, rope_scaling_type="linear"),
        "Llama",
        {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 3.0}},
    ),
    "yarn": (
        replace(MODEL, rope_scaling_factor=4.0, rope_scaling_type="yarn", rope_trained_length=4096),
        "Llama",
        {"rope_parameters": YARN},
    ),
    "qwen 2": (replace(MODEL, add_qkv_bias=True), "Qwen2", {"rope_parameters": ROPE}),
    "wide heads": (replace(MODEL, kv_channels=14), "Llama", {"rope_parameters": ROPE}),
    "qwen 3": (QWEN3, "Qwen3", {"rope_parameters": ROPE}),
    "qwen 3, tied, narrow heads": (
        replace(QWEN3, kv_channels=4, untie_embeddings=False),
        "Qwen3",
        {"rope_parameters": ROPE},
    ),
}


def to_megazero(theirs: dict[str, torch.Tensor], model: ModelConfig) -> dict[str, torch.Tensor]:
    """transformers' tensors, or gradients of them, under our names and in our shapes."""
    h, d = model.hidden_size, model.head_dim
    names = {"token_embedding.weight": "model.embed_tokens.weight", "head.norm.weight": "model.norm.weight"}
    if model.untie_embeddings:
        names["head.output.weight"] = "lm_head.weight"
    found = {ours: theirs[name] for ours, name in names.items()}
    for i in range(model.num_layers):
        t = {name.removeprefix(f"model.layers.{i}."): x for name, x in theirs.items() if f".layers.{i}." in name}
        block = {"norm1.weight": t["input_layernorm.weight"], "norm2.weight": t["post_attention_layernorm.weight"]}
        for kind, rest in (("weight", (h,)), ("bias", ())):
            if f"self_attn.q_proj.{kind}" in t:
                q, k, v = (t[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
                block[f"attention.query.{kind}"] = q.view(-1, d, *rest)
                block[f"attention.kv.{kind}"] = torch.stack([k.view(-1, d, *rest), v.view(-1, d, *rest)], dim=1)
        for ours, name in (("query", "q"), ("key", "k")):
            if f"self_attn.{name}_norm.weight" in t:
                block[f"attention.{ours}_norm.weight"] = t[f"self_attn.{name}_norm.weight"]
        block["attention.proj.weight"] = t["self_attn.o_proj.weight"]
        block["mlp.up.weight"] = torch.stack([t["mlp.gate_proj.weight"], t["mlp.up_proj.weight"]])
        block["mlp.down.weight"] = t["mlp.down_proj.weight"]
        found |= {f"blocks.{i}.{name}": x for name, x in block.items()}
    return found


def exact_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Theirs without its cast to fp32, which in fp64 loses half of the digits."""
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(
    case: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    model, family, options = CASES[case]
    torch.manual_seed(0)
    hf = getattr(transformers, f"{family}Config")(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.query_groups,
        head_dim=model.head_dim,
        max_position_embeddings=model.seq_length,
        rms_norm_eps=model.norm_epsilon,
        tie_word_embeddings=not model.untie_embeddings,
        **options,
    )
    dtype = torch.float64 if precision == "fp64" else torch.float32
    tolerance = 1e-10 if precision == "fp64" else model_tolerance(model, dtype)
    theirs = getattr(transformers, f"{family}ForCausalLM")(hf).to(dtype)
    if precision == "fp64":
        for norm in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
            monkeypatch.setattr(norm, "forward", exact_norm)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    training = TrainingConfig(micro_batch_size=3, precision=precision)  # type: ignore[arg-type]
    config, _ = resolve(replace(Config(), model=model, training=training), 1, 0, declare)
    ours = Engine(config, Mesh.build(Layout(), 0, torch.device("cpu")))
    weights = {weight.spec.name: weight for unit in ours.model.units.values() for weight in unit}
    for name, value in to_megazero(dict(theirs.named_parameters()), model).items():
        weights.pop(name).data[tuple(map(slice, value.shape))] = value.detach()  # the vocabulary is padded
    assert not weights

    tokens = torch.randint(0, model.vocab_size, (3, model.seq_length + 1), generator=torch.Generator().manual_seed(1))
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    logits = theirs(ids).logits
    with torch.no_grad():
        info = MicroBatchInfo.of(ids, (0, 1, 2), ours.model.stream, training=False)
        assert ours.model.head is not None
        found = ours.model.head.logits(ours.model.body(ours.model.embed(ids, info), info)).view_as(logits)
    assert (found - logits).abs().max() < tolerance * logits.abs().max()

    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    batch = MicroBatch(ids, labels, torch.ones(3, model.seq_length), (0, 1, 2))
    summed = ours._run(
        ours.program("1f1b", 1),
        ours._upload([batch], training=True),
        torch.tensor(1 / labels.numel(), dtype=torch.float64),
    )
    assert abs(summed[0].sum() / labels.numel() - loss) < tolerance * loss
    wanted = to_megazero({name: p.grad for name, p in theirs.named_parameters()}, model)
    for unit in ours.zero.units.values():
        for member in unit.flat.members:
            gradient = unit.gradients.sharded_grad[member.window.slice()].view(member.block.stored)
            want = wanted[member.spec.name]
            gradient = gradient[tuple(map(slice, want.shape))]
            assert (gradient - want).abs().max() < tolerance * want.abs().max(), member.spec.name
    ours.zero.discard_gradients()


def test_layers_share_one_pair_of_tables() -> None:
    """Made with the model, and a buffer: for d = 8, a cosine for every dim and a sine for every second, in bf16."""
    config, _ = resolve(replace(Config(), model=MODEL, training=TrainingConfig(3, precision="bf16")), 1, 0, declare)
    engine = Engine(config, Mesh.build(Layout(), 0, torch.device("cpu")))
    first, second = (block.attention.tables for block in engine.model.blocks.values())
    assert first is second
    assert engine.tracker.now["buffers"] - engine.zero.arena.data.nbytes == 17 * (8 + 4) * 2
    batch = MicroBatch(*torch.zeros(2, 3, 17, dtype=torch.int64), torch.ones(3, 17), (0, 1, 2))
    with torch.profiler.profile() as profile:
        engine.train_step(1, [batch])
    assert not {"aten::cos", "aten::sin"} & {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_angles_of_far_positions_are_not_rounded_to_the_precision(dtype: torch.dtype) -> None:
    """bf16 holds no odd number above 256, fp16 none above 2,048: only cos and sin are rounded."""
    length, dim, base = 6000, 4, 500.0
    cos, sin, _ = Rotary(dim, base).tables(length, dtype, torch.device("cpu"))
    angles = torch.arange(length, dtype=torch.float64)[:, None] / torch.tensor([1.0, base**0.5], dtype=torch.float64)
    for table, exact in ((cos[..., :2], angles.cos()), (cos[..., 2:], angles.cos()), (sin, angles.sin())):
        assert table.dtype == dtype
        error = (table.reshape(length, dim // 2).double() - exact).abs()
        assert (error <= torch.finfo(dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps * angles).all()
