"""A whole run of a llama with mixtures of experts in plain PyTorch: `tests/reference_run.py` with another model.

Nothing here imports megazero. The rules are those of docs/run.md and docs/experts.md: every expert computes every
token, one at a time, and autograd makes all gradients.

Shapes: b samples, s tokens of a sample, h hidden, n heads, d head dim, E experts, k experts of a token.
"""

import itertools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tests.reference_run import Flags, Model, Run, Weights, drawn

TABLES = ("token_embedding", "head.output")


def expert_layers(flags: Flags) -> list[int]:
    """--moe-layer-freq of letters"""
    pattern = flags["moe-layer-freq"]
    return [i for i in range(flags["num-layers"]) if pattern[i % len(pattern)] == "E"]


def initial_weights(flags: Flags) -> Weights:
    """Every parameter by its name, fp32."""
    layers, h, heads = flags["num-layers"], flags["hidden-size"], flags["num-attention-heads"]
    std, small = flags["init-method-std"], flags["init-method-std"] / math.sqrt(2 * layers)
    groups, d = flags["num-query-groups"], h // heads
    experts, f, shared = (
        flags[n] for n in ("num-experts", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size")
    )
    normal: dict[str, Any] = {f"{name}.weight": (std, (flags["vocab-size"], h)) for name in TABLES}
    constant: dict[str, Any] = {"head.norm.weight": (1.0, (h,))}
    for i in range(layers):
        at = f"blocks.{i}"
        constant |= {f"{at}.norm{k}.weight": (1.0, (h,)) for k in (1, 2)}
        normal[f"{at}.attention.query.weight"] = (std, (heads, d, h))
        normal[f"{at}.attention.kv.weight"] = (std, (groups, 2, d, h))
        normal[f"{at}.attention.proj.weight"] = (small, (h, h))
        if i in expert_layers(flags):
            normal[f"{at}.mlp.router.weight"] = (std, (experts, h))
            normal[f"{at}.mlp.experts.up.weight"] = (std, (experts, 2, f, h))
            normal[f"{at}.mlp.experts.down.weight"] = (small, (experts, h, f))
            normal[f"{at}.mlp.shared.up.weight"] = (std, (2, shared, h))
            normal[f"{at}.mlp.shared.down.weight"] = (small, (h, shared))
            normal[f"{at}.mlp.shared_gate.weight"] = (std, (1, h))
        else:
            normal[f"{at}.mlp.up.weight"] = (std, (2, flags["ffn-hidden-size"], h))
            normal[f"{at}.mlp.down.weight"] = (small, (h, flags["ffn-hidden-size"]))
    return drawn(flags, normal, constant)


class Routed(NamedTuple):
    """The routers' results for samples [b, ..] of a call, by layer, and the samples' numbers of targets [b]."""

    logits: list[torch.Tensor]  # [b, s, E]
    chosen: list[torch.Tensor]  # [b, s, k]
    dropped: list[torch.Tensor]  # choices that experts have no room for, by sample [b]
    targets: torch.Tensor


class Llama(Model):
    """A llama's architecture over named fp64 weights, with experts in some layers."""

    def __init__(self, flags: Flags, weights: Weights) -> None:
        super().__init__(flags, weights)
        self.calls: list[Routed] = []

    def loss(self, samples: list[list[int]], numbers: list[int] | None) -> tuple[torch.Tensor, int]:
        ids = torch.tensor(samples)[:, :-1]
        self.calls.append(Routed([], [], [], (ids != self.flags["eod"]).double().sum(1)))
        return super().loss(samples, numbers)

    def __call__(self, ids: torch.Tensor, samples: list[int] | None) -> torch.Tensor:
        flags, w, (b, s) = self.flags, self.weights, ids.shape
        heads, groups = flags["num-attention-heads"], flags["num-query-groups"]
        hidden, positions = torch.ones(b, s, s, dtype=torch.bool).triu(1), torch.arange(s).repeat(b, 1)
        for row, place in (ids == flags["eod"]).nonzero().tolist():
            hidden[row, place + 1 :, : place + 1] = True
            positions[row, place + 1 :] = torch.arange(s - place - 1)
        x = F.embedding(ids, w["token_embedding.weight"])
        for i in range(flags["num-layers"]):
            at = f"blocks.{i}"
            y = self.norm(x, f"{at}.norm1")
            q = F.linear(y, w[f"{at}.attention.query.weight"].flatten(0, 1)).view(b, s, heads, -1)
            k, v = F.linear(y, w[f"{at}.attention.kv.weight"].flatten(0, 2)).view(b, s, groups, 2, -1).unbind(3)
            k, v = (t.repeat_interleave(heads // groups, dim=2).transpose(1, 2) for t in (rotated(k, positions), v))
            scores = rotated(q, positions).transpose(1, 2) @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            attended = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1) @ v
            x = x + F.linear(attended.transpose(1, 2).flatten(2), w[f"{at}.attention.proj.weight"])
            y = self.norm(x, f"{at}.norm2")
            x = x + (
                self.experts(y, f"{at}.mlp", samples is not None)
                if i in expert_layers(flags)
                else self.swiglu(y, f"{at}.mlp")
            )
        return F.linear(self.norm(x, "head.norm"), w["head.output.weight"])

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return (
            x / (x.square().mean(-1, keepdim=True) + self.flags["norm-epsilon"]).sqrt() * self.weights[f"{name}.weight"]
        )

    def swiglu(self, y: torch.Tensor, at: str, expert: int | None = None) -> torch.Tensor:
        up, down = self.weights[f"{at}.up.weight"], self.weights[f"{at}.down.weight"]
        gate, value = up if expert is None else up[expert]
        return (F.silu(y @ gate.T) * (y @ value.T)) @ (down if expert is None else down[expert]).T

    def experts(self, y: torch.Tensor, at: str, drops: bool) -> torch.Tensor:
        """y [b, s, h] -> the sum of the experts' results, and of the gated shared expert's."""
        logits = y @ self.weights[f"{at}.router.weight"].T
        chosen = logits.argsort(-1, descending=True)[..., : self.flags["moe-router-topk"]]
        self.calls[-1].logits.append(logits)
        self.calls[-1].chosen.append(chosen)
        mine = (chosen[..., None] == torch.arange(logits.shape[-1])).any(-2)
        scores = logits.exp() * mine
        scores = scores / (logits.exp() if self.flags["moe-router-pre-softmax"] else scores).sum(-1, keepdim=True)
        kept = mine.clone()
        if drops:
            room = math.ceil(mine[0].sum().item() / mine.shape[-1] * self.flags["moe-expert-capacity-factor"])
            for sample, e in itertools.product(range(mine.shape[0]), range(mine.shape[2])):
                order = sorted(range(mine.shape[1]), key=lambda t: (-scores[sample, t, e].float().item(), t))
                kept[sample, order[room:], e] = False
        self.calls[-1].dropped.append(mine.sum((1, 2)) - kept.sum((1, 2)))
        scores = scores * kept
        total = (y @ self.weights[f"{at}.shared_gate.weight"].T).sigmoid() * self.swiglu(y, f"{at}.shared")
        for e in range(logits.shape[-1]):
            total = total + scores[..., e, None] * self.swiglu(y, f"{at}.experts", e)
        return total

    def penalty(self) -> torch.Tensor | float:
        """The balance losses of the last call, times their factors."""
        logits, chosen, _, targets = self.calls[-1]
        factors = self.flags["moe-aux-loss-coeff"], self.flags["moe-z-loss-coeff"]
        return sum(
            factor * (targets @ losses)
            for layer in zip(logits, chosen, strict=True)
            for factor, losses in zip(factors, balance_losses(*layer), strict=True)
        )

    @torch.no_grad()
    def read_balance(self) -> dict[str, Any]:
        calls, self.calls = [call for call in self.calls if len(call.targets)], []
        if not calls:
            return {}
        targets, layers = torch.cat([call.targets for call in calls]), expert_layers(self.flags)
        experts, real = self.flags["num-experts"], targets > 0
        load, dropped, entropy, aux, z = {}, [], [], [], []
        for place, layer in enumerate(layers):
            logits, chosen, left = (torch.cat([call[kind][place] for call in calls]) for kind in range(3))
            dropped.append(left[real].sum() / chosen[real].numel())
            counts = [int((chosen[real] == e).sum()) for e in range(experts)]
            load[str(layer)] = max(counts) / (sum(counts) / experts)
            p = logits[real].softmax(-1)
            entropy.append(-(p * p.log()).sum(-1).mean())
            for found, losses in zip((aux, z), balance_losses(logits, chosen), strict=True):
                found.append(targets @ losses / targets.sum())
        means = {"moe_dropped": dropped, "moe_router_entropy": entropy, "moe_aux_loss": aux, "moe_z_loss": z}
        return {"moe_load": load} | {name: float(sum(values) / len(layers)) for name, values in means.items()}


def balance_losses(logits: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [b, s, E], chosen [b, s, k] -> the loss of the experts' loads and that of large logits, by sample [b]."""
    aux = torch.zeros(len(logits), dtype=logits.dtype)
    for e in range(logits.shape[-1]):
        share = (chosen == e).double().mean((1, 2))
        aux = aux + logits.shape[-1] * share * logits.softmax(-1)[..., e].mean(1)
    return aux, logits.exp().sum(-1).log().square().mean(1)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x [b, s, n, d], whose dims i and i + d/2 turn by position [b, s] x 10000^(-2 i / d); angles are in fp32."""
    d = x.shape[-1]
    angles = positions.float()[..., None, None] * (1.0 / 10000 ** (torch.arange(0, d, 2).float() / d))
    cos, sin = angles.cos().double(), angles.sin().double()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class ExpertRun(Run):
    """A run of a llama with experts."""

    def _initial_weights(self) -> Weights:
        return initial_weights(self.flags)

    def _model(self) -> Model:
        return Llama(self.flags, self.weights)

    def _losses_by_corpus(self, *args: Any, **options: Any) -> dict[str, float]:
        found = super()._losses_by_corpus(*args, **options)
        self.model.read_balance()
        return found

    def _flops(self, b: int) -> float:
        """Count the FLOPs of an iteration as docs/metrics.md does: three forwards, with k experts of a token."""
        flags = self.flags
        s, h, heads, groups = (
            flags[n] for n in ("seq-length", "hidden-size", "num-attention-heads", "num-query-groups")
        )
        d, layers, experts = h // heads, flags["num-layers"], len(expert_layers(flags))
        active = flags["moe-router-topk"] * flags["moe-ffn-hidden-size"] + flags["moe-shared-expert-intermediate-size"]
        each = 6 * h * active + 2 * h * (flags["num-experts"] + 1)
        dense = (layers - experts) * 6 * h * flags["ffn-hidden-size"]
        attention = layers * (4 * heads * d * h + 4 * groups * d * h + 4 * s * heads * d)
        return 3 * b * s * (attention + experts * each + dense + 2 * flags["vocab-size"] * h)
