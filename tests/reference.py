"""The same GPT in plain PyTorch, sharing no mechanism with megazero but the initial values and dropout's masks.

F.linear, F.cross_entropy, clip_grad_norm_ and torch.optim.AdamW over whole tensors, in one process, the global batch at
once. In fp32, or with --precision fp64 in fp64, from the same weights.
"""

from __future__ import annotations

import fnmatch

import torch
import torch.nn.functional as F

from megazero.config.schema import Config
from megazero.model import initial_values
from megazero.model.dropout import Dropout, Rows
from megazero.plan.parameters import LocalBlock, stage_units
from megazero.plan.topology import Layout


def initial_weights(config: Config) -> dict[str, torch.Tensor]:
    dtype = torch.float64 if config.training.precision == "fp64" else torch.float32
    weights = {}
    for specs in stage_units(config.model, Layout(), 0).values():
        for spec in specs:
            whole = LocalBlock((0,) * len(spec.shape), spec.shape, spec.shape)
            drawn = initial_values.draw(config.training.seed, spec, whole, 0, whole.numel)
            weights[spec.name] = drawn.view(spec.shape).to(dtype)
    return weights


def forward(
    config: Config, w: dict[str, torch.Tensor], ids: torch.Tensor, samples: range | None = None
) -> torch.Tensor:
    """ids [b, s] -> logits [b, s, v]; `samples`: their global numbers in training, where dropout drops."""
    model = config.model

    def drop(probability: float, layer: int, site: str, x: torch.Tensor) -> torch.Tensor:
        """x * mask; x [b, rows, columns] or [b, n, s, s]."""
        if probability == 0 or samples is None:
            return x
        rows = tuple(Rows(sample, 0, x[0, ..., 0].numel()) for sample in samples)
        return x * Dropout(probability, config.training.seed, layer, site).mask(x.detach(), rows)

    x = F.embedding(ids, w["token_embedding.weight"]) + w["position_embedding.weight"][: ids.shape[1]]
    x = drop(model.hidden_dropout, -1, "embedding", x)
    b, s, h = x.shape
    for i in range(model.num_layers):

        def lin(name: str, x: torch.Tensor, i: int = i) -> torch.Tensor:
            weight, bias = w[f"blocks.{i}.{name}.weight"], w[f"blocks.{i}.{name}.bias"]
            return F.linear(x, weight.reshape(-1, x.shape[-1]), bias.flatten())

        def norm(name: str, x: torch.Tensor, i: int = i) -> torch.Tensor:
            return F.layer_norm(x, (h,), w[f"blocks.{i}.{name}.weight"], w[f"blocks.{i}.{name}.bias"])

        qkv = lin("attention.qkv", norm("norm1", x)).view(b, s, model.num_attention_heads, 3, -1)
        q, k, v = qkv.transpose(1, 2).unbind(3)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(torch.ones(s, s).triu(1) > 0, -torch.inf)
        a = drop(model.attention_dropout, i, "scores", scores.softmax(-1)) @ v
        y = lin("attention.proj", a.transpose(1, 2).reshape(b, s, h))
        x = x + drop(model.hidden_dropout, i, "attention", y)
        y = lin("mlp.down", F.gelu(lin("mlp.up", norm("norm2", x)), approximate="tanh"))
        x = x + drop(model.hidden_dropout, i, "mlp", y)
    x = F.layer_norm(x, (h,), w["head.norm.weight"], w["head.norm.bias"])
    return F.linear(x, w.get("head.output.weight", w["token_embedding.weight"]))


def train(config: Config, batches: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> tuple[list, list]:
    """losses and gradient norms over global batches of (ids, labels, loss mask)."""
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
    for step, (ids, labels, mask) in enumerate(batches):
        logits = forward(config, w, ids, range(step * len(ids), (step + 1) * len(ids)))
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        loss = (each * mask.flatten()).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), o.clip_grad).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms
