"""The same models in plain PyTorch, sharing no mechanism with megazero but the initial values and dropout's masks.

F.linear, F.cross_entropy, clip_grad_norm_ and torch.optim.AdamW over whole tensors, in one process, the global batch at
once. In fp32, or with --precision fp64 in fp64, from the same weights.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megazero.config.schema import Config, ModelConfig
from megazero.kernels import initial_values
from megazero.kernels.dropout import Dropout, Rows
from megazero.model.stage import declare
from megazero.plan.layout.layers import stage_units
from megazero.plan.layout.parameters import LocalBlock
from megazero.plan.layout.topology import Layout


def initial_weights(config: Config) -> dict[str, torch.Tensor]:
    dtype = torch.float64 if config.training.precision == "fp64" else torch.float32
    weights = {}
    for specs in stage_units(declare(config.model), Layout(), 0).values():
        for spec in specs:
            whole = LocalBlock((0,) * len(spec.shape), spec.shape, spec.shape)
            drawn = initial_values.draw(config.training.seed, spec, whole, 0, whole.numel)
            weights[spec.name] = drawn.view(spec.shape).to(dtype)
    return weights


def forward(
    config: Config,
    w: dict[str, torch.Tensor],
    ids: torch.Tensor,
    samples: range | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """ids [b, s] -> logits [b, s, v].

    Args:
        samples: their global numbers in training, where dropout drops.
        starts: where the document of each token begins [b, s], for the flags that reset something there.
    """
    model, s = config.model, ids.shape[1]
    places = torch.arange(s).expand(ids.shape)
    starts = torch.zeros_like(ids) if starts is None else starts
    position = places - starts if config.data.reset_position_ids else places
    document = starts if config.data.reset_attention_mask else torch.zeros_like(ids)
    seen = (document[:, :, None] == document[:, None, :]) & (places[:, :, None] >= places[:, None, :])

    def drop(probability: float, layer: int, site: str, x: torch.Tensor) -> torch.Tensor:
        """x * mask; x [b, rows, columns] or [b, n, s, s]."""
        if probability == 0 or samples is None:
            return x
        rows = tuple(Rows(sample, 0, x[0, ..., 0].numel()) for sample in samples)
        return x * Dropout(probability, config.training.seed, layer, site).mask(x.detach(), rows)

    blocks = parallel_block if model.traits.parallel else sequential_block
    x = F.embedding(ids, w["token_embedding.weight"])
    if model.traits.learned_positions:
        x = x + w["position_embedding.weight"][position]
    x = drop(model.hidden_dropout, -1, "embedding", x)
    for i in range(model.num_layers):
        mine = {name.removeprefix(f"blocks.{i}."): t for name, t in w.items() if name.startswith(f"blocks.{i}.")}
        x = blocks(model, mine, x, lambda p, site, x, i=i: drop(p, i, site, x), seen, position)
    x = norm(model, w, "head.norm", x)
    return F.linear(x, w.get("head.output.weight", w["token_embedding.weight"]))


Drop = Callable[[float, str, torch.Tensor], torch.Tensor]  # probability, site, x
Weights = dict[str, torch.Tensor]


def norm(model: ModelConfig, w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """x itself, if there is no norm of that name."""
    if f"{name}.weight" not in w:
        return x
    if model.traits.norm == "layernorm":
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], model.norm_epsilon)
    return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"] + (model.traits.norm == "rmsnorm-1p"), model.norm_epsilon)


def linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    bias = w.get(f"{name}.bias")
    return F.linear(x, w[f"{name}.weight"].reshape(-1, x.shape[-1]), None if bias is None else bias.flatten())


def attention(
    model: ModelConfig, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, drop: Drop, seen: torch.Tensor
) -> torch.Tensor:
    """q, k, v [b, n, s, d], seen [b, s, s]: by each query -> [b, s, n d]"""
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~seen[:, None], -torch.inf)
    return (drop(model.attention_dropout, "scores", scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)


def grouped_attention(
    model: ModelConfig, w: Weights, y: torch.Tensor, drop: Drop, seen: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    b, s, _ = y.shape
    q = linear(w, "attention.query", y).view(b, s, model.num_attention_heads, -1).transpose(1, 2)
    k, v = linear(w, "attention.kv", y).view(b, s, model.query_groups, 2, -1).transpose(1, 2).unbind(3)
    if model.qk_layernorm:
        q, k = norm(model, w, "attention.query_norm", q), norm(model, w, "attention.key_norm", k)
    each = model.num_attention_heads // model.query_groups
    k, v = (t.repeat_interleave(each, dim=1) for t in (rotated(model, k, position), v))
    return linear(w, "attention.proj", attention(model, rotated(model, q, position), k, v, drop, seen))


def fused_attention(
    model: ModelConfig, w: Weights, y: torch.Tensor, drop: Drop, seen: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """GPT-2's: one weight for queries, keys and values, by head; no rotation."""
    b, s, _ = y.shape
    qkv = linear(w, "attention.qkv", y).view(b, s, model.num_attention_heads, 3, -1)
    return linear(w, "attention.proj", attention(model, *qkv.transpose(1, 2).unbind(3), drop, seen))


def mlp(model: ModelConfig, w: Weights, y: torch.Tensor) -> torch.Tensor:
    inner = linear(w, "mlp.up", y)
    gate, value = inner.chunk(2, dim=-1)
    return linear(w, "mlp.down", {
        "gelu": lambda: F.gelu(inner),
        "gelu-tanh": lambda: F.gelu(inner, approximate="tanh"),
        "swiglu": lambda: F.silu(gate) * value,
        "geglu-tanh": lambda: F.gelu(gate, approximate="tanh") * value,
    }[model.traits.activation]())  # fmt: skip


def sequential_block(
    model: ModelConfig, w: Weights, x: torch.Tensor, drop: Drop, seen: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    attend = fused_attention if "attention.qkv.weight" in w else grouped_attention
    y = norm(model, w, "norm1_after", attend(model, w, norm(model, w, "norm1", x), drop, seen, position))
    x = x + drop(model.hidden_dropout, "attention", y * model.residual_multiplier)
    y = norm(model, w, "norm2_after", mlp(model, w, norm(model, w, "norm2", x)))
    return x + drop(model.hidden_dropout, "mlp", y * model.residual_multiplier)


def parallel_block(
    model: ModelConfig, w: Weights, x: torch.Tensor, drop: Drop, seen: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    y = norm(model, w, "norm", x)
    z = norm(model, w, "mlp_norm", x) if "mlp_norm.weight" in w else y
    both = grouped_attention(model, w, y, drop, seen, position) + mlp(model, w, z)
    return x + drop(model.hidden_dropout, "block", both * model.residual_multiplier)


def rotated(model: ModelConfig, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """x [b, n, s, d], as complex numbers of dims i and i + d/2, turned by position [b, s] x base^(-2 i / d)."""
    d = x.shape[-1]
    rates = 1.0 / model.rotary_base ** (torch.arange(0, d, 2).float() / d)
    angles = (position[..., None].float() * rates)[:, None]
    turn = torch.complex(angles.cos().to(x.dtype), angles.sin().to(x.dtype))
    turned = torch.complex(*x.chunk(2, dim=-1)) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def train(
    config: Config, batches: list[Batch], tell: Callable[[torch.Tensor], None] = lambda losses: None
) -> tuple[list, list]:
    """losses and gradient norms over global batches of (ids, labels, loss mask, where documents begin).

    `tell` gets each batch's losses of targets [B, s], 0 where none counts.
    """
    o = config.optimizer
    w = initial_weights(config)
    frozen = {name for name in w if any(fnmatch.fnmatch(name, p) for p in config.training.freeze_parameters)}
    trained = {name: t.requires_grad_() for name, t in w.items() if name not in frozen}
    no_decay = {name for name in w if "norm" in name or name.endswith("bias")}
    groups = [
        {"params": [t for name, t in trained.items() if (name in no_decay) == exempt], "weight_decay": decay}
        for exempt, decay in ((False, o.weight_decay), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps)
    losses, norms = [], []
    for step, (ids, labels, mask, starts) in enumerate(batches):
        logits = forward(config, w, ids, range(step * len(ids), (step + 1) * len(ids)), starts)
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        loss = (each * mask.flatten()).sum() / mask.sum()
        tell((each.detach() * mask.flatten()).view_as(mask))
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), o.clip_grad).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms
