"""The same models in plain PyTorch, sharing no mechanism with megazero but initial values, dropout's masks and rotary
frequencies, which are transformers' (tests/unit/engine/kernels/test_rotary.py).

F.linear, F.cross_entropy, clip_grad_norm_ and torch.optim.AdamW over whole tensors, in one process, the global batch at
once. In fp32, or with --precision fp64 in fp64, from the same weights. Every expert computes all tokens; its result is
multiplied by 0 for those that do not pass it.

Shapes: b samples, s tokens of a sample, h hidden, f inner width, E experts, k experts of a token.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megazero.engine.kernels import initial_values
from megazero.engine.kernels.dropout import Dropout, Rows
from megazero.engine.kernels.rotary import Rotary
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.layers import stage_units
from megazero.engine.plan.layout.parameters import LocalBlock
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import Config, ModelConfig
from tests.helpers.small import round_moments_


def initial_weights(config: Config) -> dict[str, torch.Tensor]:
    dtype = torch.float64 if config.training.precision == "fp64" else torch.float32
    weights = {}
    for specs in stage_units(declare(config.model), Layout(), 0).values():
        for spec in specs:
            whole = LocalBlock((0,) * len(spec.shape), spec.shape, spec.shape)
            drawn = initial_values.draw(config.training.seed, spec, whole, 0, whole.numel)
            weights[spec.name] = drawn.view(spec.shape).to(dtype)
    return weights


def forward(config: Config, w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """ids [b, s] -> logits [b, s, v] of the next token"""
    return all_depths(config, w, ids)[0]


def all_depths(
    config: Config,
    w: dict[str, torch.Tensor],
    ids: torch.Tensor,
    samples: range | None = None,
    starts: torch.Tensor | None = None,
    note: Note = lambda choice: None,
    following: list[torch.Tensor] | None = None,
    watch: Watch = lambda kind, layer, x: None,
) -> list[torch.Tensor]:
    """ids [b, s] -> logits [b, s, v] of the next token, and by modules of multi-token prediction of those behind it.

    Args:
        samples: their global numbers in training, where dropout drops.
        starts: where the document of each token begins [b, s], for the flags that reset something there.
        note: gets the choices of each layer with experts, in order.
        following: for each module the tokens that it reads [b, s]; None: no module runs.
        watch: gets the results of layers ("activation") and the scores of blocks ("logit").
    """
    model, s = config.model, ids.shape[1]
    places = torch.arange(s).expand(ids.shape)
    starts = torch.zeros_like(ids) if starts is None else starts
    position = places - starts if config.data.reset_position_ids else places
    document = starts if config.data.reset_attention_mask else torch.zeros_like(ids)
    seen = (document[:, :, None] == document[:, None, :]) & (places[:, :, None] >= places[:, None, :])

    def drop(probability: float, layer: int, site: str, x: torch.Tensor) -> torch.Tensor:
        """x * mask; x [b, rows, columns] or [b, n, s, s]."""
        if site == "logits":
            watch("logit", f"blocks.{layer}", x)
        if probability == 0 or samples is None:
            return x
        rows = tuple(Rows(sample, 0, x[0, ..., 0].numel()) for sample in samples)
        return x * Dropout(probability, config.training.seed, layer, site).mask(x.detach(), rows)

    if samples is None:  # training alone drops choices of experts
        model = replace(model, moe_expert_capacity_factor=0.0)
    blocks = parallel_block if model.parallel_norms else sequential_block
    root = model.hidden_size**0.5 if model.root_embedding else 1.0

    def embed(ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, w["token_embedding.weight"]) * root * model.embedding_multiplier

    def block(i: int, prefix: str, x: torch.Tensor) -> torch.Tensor:
        mine = {name.removeprefix(prefix): t for name, t in w.items() if name.startswith(prefix)}
        near = places[:, :, None] - places[:, None, :] < model.window_size
        kind = model.attention_kind(min(i, model.num_layers - 1))
        sees = seen & near if kind == "L" else seen
        turn = functools.partial(rotated, model, kind, position)
        return blocks(model, mine, x, lambda p, site, x: drop(p, i, site, x), sees, turn, note)

    def logits(x: torch.Tensor) -> torch.Tensor:
        table = w.get("head.output.weight", w["token_embedding.weight"])
        found = F.linear(x, table, w.get("head.output_bias")) / model.logits_divisor
        return model.final_softcap * (found / model.final_softcap).tanh() if model.final_softcap else found

    x, last = embed(ids), "token_embedding"
    if model.learned_positions:
        watch("activation", last, x)
        x, last = x + w["position_embedding.weight"][position], "position_embedding"
    x = drop(model.hidden_dropout, -1, "embedding", x)
    watch("activation", last, x)
    for i in range(model.num_layers):
        x = block(i, f"blocks.{i}.", x)
        watch("activation", f"blocks.{i}", x)
    x = norm(model, w, "head.norm", x)
    found = [logits(x)]
    for k, tokens in enumerate(following or []):
        at = f"head.mtp.{k}"
        both = [norm(model, w, f"{at}.token_norm", embed(tokens)), norm(model, w, f"{at}.state_norm", x)]
        x = block(model.num_layers + k, f"{at}.block.", linear(w, f"{at}.projection", torch.cat(both, -1)))
        x = norm(model, w, f"{at}.norm", x)
        found.append(logits(x))
    return found


def targets_ahead(
    depth: int, labels: torch.Tensor, mask: torch.Tensor, starts: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens that the module of a depth reads and predicts, and which targets count [b, s], one by one.

    At depth k, the token at i reads the one at i + k and predicts that at i + k + 1, if that of i + k is in its
    document. Behind the sample it reads token 0.
    """
    (b, s), made = labels.shape, [torch.zeros_like(labels), torch.zeros_like(labels), torch.zeros_like(mask)]
    for row in range(b):
        for i in range(s - depth + 1):
            made[0][row, i] = labels[row, i + depth - 1]
            if i + depth == s:
                break
            made[1][row, i] = labels[row, i + depth]
            same = starts is None or starts[row, i + depth] == starts[row, i]
            made[2][row, i] = mask[row, i + depth] if same else 0.0
    return made[0], made[1], made[2]


class Choice(NamedTuple):
    """A router's logits [b, s, E], the numbers of the experts of each token [b, s, k], and which of them it passes."""

    logits: torch.Tensor
    experts: torch.Tensor
    kept: torch.Tensor


Note = Callable[[Choice], None]
Watch = Callable[[str, str, torch.Tensor], None]  # kind, layer, x
Drop = Callable[[float, str, torch.Tensor], torch.Tensor]  # probability, site, x
Rotate = Callable[[torch.Tensor], torch.Tensor]  # queries or keys [b, n, s, d]
Weights = dict[str, torch.Tensor]
Turn = Callable[[torch.Tensor], torch.Tensor]  # queries or keys [b, n, s, d], by position


def norm(model: ModelConfig, w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """x itself, if there is no norm of that name."""
    if f"{name}.weight" not in w:
        return x
    if model.norm == "layernorm":
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], model.norm_epsilon)
    return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"] + (model.norm == "rmsnorm-1p"), model.norm_epsilon)


def all_heads(model: ModelConfig, w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """x [b, n, s, d] -> x / rms(x) * weight, where rms is over all heads."""
    joined = x.transpose(1, 2).flatten(2)
    normed = F.rms_norm(joined, joined.shape[-1:], w[f"{name}.weight"], model.norm_epsilon)
    return normed.unflatten(2, (x.shape[1], -1)).transpose(1, 2)


def linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    bias = w.get(f"{name}.bias")
    return F.linear(x, w[f"{name}.weight"].reshape(-1, x.shape[-1]), None if bias is None else bias.flatten())


def attention(
    model: ModelConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    drop: Drop,
    seen: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q, k, v [b, n, s, d], seen [b, s, s]: by each query; sinks [n]: score of a key without a value -> [b, s, n d]"""
    scores = q @ k.transpose(-1, -2) * (model.attention_scale or q.shape[-1] ** -0.5)
    if model.attention_softcap:
        scores = model.attention_softcap * (scores / model.attention_softcap).tanh()
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    drop(0.0, "logits", scores)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (drop(model.attention_dropout, "scores", weights) @ v).transpose(1, 2).flatten(2)


def grouped_attention(
    model: ModelConfig, w: Weights, y: torch.Tensor, drop: Drop, seen: torch.Tensor, turn: Turn
) -> torch.Tensor:
    b, s, _ = y.shape
    q = linear(w, "attention.query", y).view(b, s, model.num_attention_heads, -1).transpose(1, 2)
    k, v = linear(w, "attention.kv", y).view(b, s, model.query_groups, 2, -1).transpose(1, 2).unbind(3)
    if model.qk_norm_all_heads:
        q, k = (all_heads(model, w, f"attention.{name}_norm", t) for name, t in (("query", q), ("key", k)))
    elif model.qk_layernorm:
        q, k = norm(model, w, "attention.query_norm", q), norm(model, w, "attention.key_norm", k)
    each = model.num_attention_heads // model.query_groups
    k, v = (t.repeat_interleave(each, dim=1) for t in (turn(k), v))
    sinks = w.get("attention.sinks.weight")
    return linear(w, "attention.proj", attention(model, turn(q), k, v, drop, seen, sinks))


def latent_attention(
    model: ModelConfig, w: Weights, y: torch.Tensor, drop: Drop, seen: torch.Tensor, turn: Turn
) -> torch.Tensor:
    """DeepSeek's: keys and values of all heads from one latent of a token, and one rotary key."""
    (b, s, _), n, r, plain = y.shape, model.num_attention_heads, model.kv_lora_rank, model.qk_head_dim

    def normed(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"attention.{name}_norm.weight"], 1e-6)

    if model.q_lora_rank:
        q = linear(w, "attention.query_up", normed("query", linear(w, "attention.query_down", y)))
    else:
        q = linear(w, "attention.query", y)
    q = q.view(b, s, n, -1).transpose(1, 2)
    latent = linear(w, "attention.kv_down", y)
    kv = linear(w, "attention.kv_up", normed("kv", latent[..., :r])).view(b, s, n, -1).transpose(1, 2)
    shared = turn(latent[..., r:].view(b, s, 1, -1).transpose(1, 2)).expand(-1, n, -1, -1)
    q = torch.cat([q[..., :plain], turn(q[..., plain:])], -1)
    k = torch.cat([kv[..., :plain], shared], -1)
    scale = model.attention_scale or q.shape[-1] ** -0.5
    if model.rope_scaling_type == "yarn" and model.rope_scaling_factor > 1 and model.mscale_all_dim:
        scale *= (0.1 * model.mscale_all_dim * math.log(model.rope_scaling_factor) + 1) ** 2
    y = attention(replace(model, attention_scale=scale), q, k, kv[..., plain:], drop, seen)
    return linear(w, "attention.proj", y)


def fused_attention(
    model: ModelConfig, w: Weights, y: torch.Tensor, drop: Drop, seen: torch.Tensor, turn: Turn
) -> torch.Tensor:
    """GPT-2's: one weight for queries, keys and values, by head; no rotation."""
    b, s, _ = y.shape
    qkv = linear(w, "attention.qkv", y).view(b, s, model.num_attention_heads, 3, -1)
    q, k, v = qkv.transpose(1, 2).unbind(3)
    return linear(w, "attention.proj", attention(model, q, k, v, drop, seen, w.get("attention.sinks.weight")))


def mlp(model: ModelConfig, w: Weights, name: str, y: torch.Tensor, expert: int | None = None) -> torch.Tensor:
    """down [h, f] @ activation(up [f or 2 f, h] @ y), with biases if there are any; of one of the experts."""
    mine = {key.removeprefix(f"{name}."): value for key, value in w.items() if key.startswith(f"{name}.")}
    if expert is not None:
        mine = {key: value[expert] for key, value in mine.items()}
    return linear(mine, "down", ACTIVATIONS[model.activation](linear(mine, "up", y)))


def gated(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda inner: function(*inner.chunk(2, dim=-1))


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": lambda x: x.clamp(min=0),
    "squared-relu": lambda x: x.clamp(min=0) ** 2,
    "swiglu": gated(lambda gate, value: F.silu(gate) * value),
    "geglu-tanh": gated(lambda gate, value: F.gelu(gate, approximate="tanh") * value),
    "swiglu-clamped": gated(
        lambda gate, value: (value.clamp(-7, 7) + 1) * gate.clamp(max=7) * (1.702 * gate.clamp(max=7)).sigmoid()
    ),
}


def mlp_or_experts(model: ModelConfig, w: Weights, y: torch.Tensor, note: Note) -> torch.Tensor:
    if "mlp.router.weight" not in w:
        return mlp(model, w, "mlp", y)
    logits = F.linear(y, w["mlp.router.weight"], w.get("mlp.router.logit_bias"))
    scores = logits.sigmoid() if model.moe_router_score_function == "sigmoid" else logits.softmax(-1)
    best, chosen = within_groups(model, scores).topk(model.moe_router_topk)
    if not model.moe_router_pre_softmax:
        best = best / best.sum(-1, keepdim=True)
    best = best * model.moe_router_topk_scaling_factor
    kept = passed(model, best, chosen)
    note(Choice(logits, chosen, kept))
    best = best * kept
    total = torch.zeros_like(y)
    for e in range(model.num_experts):
        weight = (best * (chosen == e)).sum(-1, keepdim=True)
        total = total + weight * mlp(model, w, "mlp.experts", y, e)
    if "mlp.shared.up.weight" in w:
        shared = mlp(model, w, "mlp.shared", y)
        gate = w.get("mlp.shared_gate.weight")
        total = total + (shared if gate is None else F.linear(y, gate).sigmoid() * shared)
    return total


def within_groups(model: ModelConfig, scores: torch.Tensor) -> torch.Tensor:
    """Return scores [b, s, E] with -inf outside the groups whose best two experts have the largest sums."""
    if not model.moe_router_num_groups:
        return scores
    grouped = scores.unflatten(-1, (model.moe_router_num_groups, -1))
    groups = grouped.topk(2).values.sum(-1).topk(model.moe_router_group_topk).indices
    seen = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, groups, True)
    return grouped.masked_fill(~seen[..., None], -torch.inf).flatten(-2)


def passed(model: ModelConfig, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """weights, chosen [b, s, k] -> whether an expert has room for a choice, 0 or 1: sorted by sample and expert"""
    kept, rounded = torch.ones_like(weights), weights.float()  # of fp64
    if not model.moe_expert_capacity_factor:
        return kept
    room = math.ceil(chosen[0].numel() / model.num_experts * model.moe_expert_capacity_factor)
    for sample in range(len(chosen)):
        for e in range(model.num_experts):
            places = (chosen[sample] == e).nonzero().tolist()
            places.sort(key=lambda place: (-rounded[sample, *place].item(), place))
            for place in places[room:]:
                kept[sample, *place] = 0.0
    return kept


def sequential_block(
    model: ModelConfig, w: Weights, x: torch.Tensor, drop: Drop, seen: torch.Tensor, turn: Turn, note: Note
) -> torch.Tensor:
    attend = fused_attention if "attention.qkv.weight" in w else grouped_attention
    attend = latent_attention if model.multi_latent_attention else attend
    y = norm(model, w, "norm1_after", attend(model, w, norm(model, w, "norm1", x), drop, seen, turn))
    x = x + drop(model.hidden_dropout, "attention", y * model.residual_multiplier)
    y = norm(model, w, "norm2_after", mlp_or_experts(model, w, norm(model, w, "norm2", x), note))
    return x + drop(model.hidden_dropout, "mlp", y * model.residual_multiplier)


def parallel_block(
    model: ModelConfig, w: Weights, x: torch.Tensor, drop: Drop, seen: torch.Tensor, turn: Turn, note: Note
) -> torch.Tensor:
    y = norm(model, w, "norm", x)
    z = norm(model, w, "mlp_norm", x) if "mlp_norm.weight" in w else y
    both = grouped_attention(model, w, y, drop, seen, turn) + mlp_or_experts(model, w, z, note)
    return x + drop(model.hidden_dropout, "block", both * model.residual_multiplier)


def rotated(model: ModelConfig, kind: str, position: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x [b, n, s, d], pairs of dims as complex numbers, turned by position [b, s] x frequency. `kind`: L, G or N."""
    if kind == "N":
        return x
    d = x.shape[-1] if model.multi_latent_attention else int(x.shape[-1] * model.rotary_percent)
    rotary = Rotary(d, model.rotary_base)
    if kind == "L" and model.local_rotary_base:
        rotary = Rotary(d, model.local_rotary_base)
    elif model.rope_scaling_factor > 1:
        scaling = model.rope_scaling_factor, model.rope_scaling_type, model.rope_trained_length
        rounds = model.yarn_correction_range_round_to_int
        rotary = Rotary(d, model.rotary_base, *scaling, fast=model.beta_fast, rounds=rounds)
    size = 0.1 * math.log(rotary.scaling) + 1 if rotary.scaling_type == "yarn" else 1.0
    if rotary.scaling_type == "yarn" and model.mscale and model.mscale_all_dim:
        above, below = (0.1 * m * math.log(rotary.scaling) + 1 for m in (model.mscale, model.mscale_all_dim))
        size = above / below
    angles = (position[..., None].float() * rotary.frequencies(x.device))[:, None]
    turn = torch.complex((angles.cos() * size).to(x.dtype), (angles.sin() * size).to(x.dtype))
    part, rest = x[..., :d], x[..., d:]
    pairs = part.unflatten(-1, (-1, 2)) if model.rotary_interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    back = turned.flatten(-2) if model.rotary_interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat([back, rest], dim=-1)


class Balance(NamedTuple):
    """The balance of a step's experts, of the samples with targets.

    Attributes:
        choices: of each expert, by layer with experts.
        entropy: of the probabilities in nats, the mean over tokens and layers.
        dropped: the share of the choices that no expert has room for.
        aux_loss, z_loss: without their factors, the mean over samples by their targets, and over layers.
        margin: least difference of a token's logits of a chosen and of another expert, over the root mean square of
            the layer's logits.
    """

    choices: tuple[tuple[int, ...], ...]
    entropy: float
    dropped: float
    aux_loss: float
    z_loss: float
    margin: float


def sample_losses(choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    """The balance losses of each sample [b]: of the loads of experts, and of the size of logits."""
    logits, experts, _ = choice
    count = logits.shape[-1]
    share = F.one_hot(experts, count).to(logits.dtype).mean((1, 2))  # of the sample's choices, [b, E]
    aux = count * (share * logits.softmax(-1).mean(1)).sum(-1)
    return aux, logits.logsumexp(-1).square().mean(1)


def balance(choices: list[Choice], targets: torch.Tensor) -> Balance:
    """`targets`: of each sample [b]."""
    weight, real = targets / targets.sum(), targets > 0
    losses = [sample_losses(choice) for choice in choices]
    entropy = [torch.distributions.Categorical(logits=logits[real]).entropy().mean() for logits, *_ in choices]
    return Balance(
        tuple(
            tuple(experts[real].flatten().bincount(minlength=logits.shape[-1]).tolist())
            for logits, experts, _ in choices
        ),
        float(torch.stack(entropy).mean()),
        1 - float(torch.stack([each.kept[real] for each in choices]).mean()),
        *(float(torch.stack([weight @ each[i] for each in losses]).mean()) for i in range(2)),
        min(margin(choice) for choice in choices),
    )


def margin(choice: Choice) -> float:
    """See `Balance`."""
    logits, experts, _ = choice
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, experts, True)
    least, most = logits.masked_fill(~chosen, torch.inf).amin(-1), logits.masked_fill(chosen, -torch.inf).amax(-1)
    return float((least - most).min() / logits.square().mean().sqrt())


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


NUMBERING = {  # end of a weight's name -> the dims that number its matrices
    "attention.qkv.weight": (1,),
    "attention.query.weight": (),
    "attention.kv.weight": (1,),
    "attention.query_down.weight": (),
    "attention.query_up.weight": (),
    "attention.kv_down.weight": (),
    "attention.kv_up.weight": (),
    "proj.weight": (),
    "projection.weight": (),
    "experts.up.weight": (0, 1),
    "experts.down.weight": (0,),
    "up.weight": (0,),
    "down.weight": (),
}


def matrices(name: str, x: torch.Tensor) -> list[torch.Tensor]:
    """Return views [.., columns] of the matrices of a weight, which Muon moves one by one; of others none."""
    dims = next((dims for end, dims in NUMBERING.items() if name.endswith(end)), None)
    if dims is None:
        return []
    if name.endswith("up.weight") and x.dim() - len(dims) < 2:  # without a gate
        dims = dims[:-1]
    found = [x]
    for dim in reversed(dims):
        found = [each for several in found for each in several.unbind(dim)]
    return found


class Muon:
    """Muon as its author describes it, in the weights' precision."""

    def __init__(self, config: Config, weights: Weights) -> None:
        self.config, self.weights = config.optimizer, weights
        self.moments = {name: torch.zeros_like(w) for name, w in weights.items()}

    @torch.no_grad()
    def step(self) -> None:
        o = self.config
        for name, w in self.weights.items():
            assert w.grad is not None
            self.moments[name] = o.muon_momentum * self.moments[name] + (1 - o.muon_momentum) * w.grad
            ahead = o.muon_momentum * self.moments[name] + (1 - o.muon_momentum) * w.grad
            for weight, direction in zip(matrices(name, w), matrices(name, ahead), strict=True):
                m = direction.flatten(0, -2)
                x = m / m.norm().clamp(min=1e-7)
                for _ in range(o.muon_num_ns_steps):
                    x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
                rows, columns = m.shape
                factor = (
                    0.2 * max(rows, columns) ** 0.5 if o.muon_scale == "moonlight" else max(1, rows / columns) ** 0.5
                )
                weight -= o.lr * (o.weight_decay * weight + factor * x.view(weight.shape))


class Lion:
    """Algorithm 2 of its paper, in the weights' precision."""

    def __init__(self, config: Config, weights: Weights, no_decay: set[str]) -> None:
        self.config, self.weights, self.no_decay = config.optimizer, weights, no_decay
        self.moments = {name: torch.zeros_like(w) for name, w in weights.items()}

    @torch.no_grad()
    def step(self) -> None:
        o = self.config
        for name, w in self.weights.items():
            assert w.grad is not None
            direction = torch.sign(o.adam_beta1 * self.moments[name] + (1 - o.adam_beta1) * w.grad)
            w -= o.lr * (direction + (0.0 if name in self.no_decay else o.weight_decay) * w)
            self.moments[name] = o.adam_beta2 * self.moments[name] + (1 - o.adam_beta2) * w.grad


LayerValues = dict[str, dict[str, float]]  # key of metrics.jsonl -> layer -> value


def squares_by_layer(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the sums of squares of tensors by the layer that their names begin with."""
    found: dict[str, float] = {}
    for name, x in tensors.items():
        layer = ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
        found[layer] = found.get(layer, 0.0) + x.double().square().sum().item()
    return found


def train(
    config: Config,
    batches: list[Batch],
    tell: Callable[[torch.Tensor], None] = lambda losses: None,
    tell_balance: Callable[[Balance], None] = lambda balance: None,
    tell_ahead: Callable[[list[float]], None] = lambda losses: None,
    tell_average: Callable[[float], None] = lambda loss: None,
    tell_layers: Callable[[LayerValues], None] = lambda values: None,
) -> tuple[list, list]:
    """losses and gradient norms over global batches of (ids, labels, loss mask, where documents begin).

    `tell` gets each batch's losses of targets [B, s], 0 where none counts; `tell_balance` that of its experts;
    `tell_ahead` the loss of each module of multi-token prediction; `tell_average` the loss of the batch without dropout
    by the running average of the weights, after each update since its first change; `tell_layers` the statistics of
    layers, under their keys in metrics.jsonl.
    """
    o = config.optimizer
    w = initial_weights(config)
    frozen = {name for name in w if any(fnmatch.fnmatch(name, p) for p in config.training.freeze_parameters)}
    trained = {name: t.requires_grad_() for name, t in w.items() if name not in frozen}
    no_decay = {name for name in w if any(word in name for word in ("norm", "bias", "sinks"))}
    moved = {name for name in trained if o.optimizer == "muon" and matrices(name, w[name])}
    moved |= {name for name in trained if o.optimizer == "lion"}
    groups = [
        {"params": [t for name, t in trained.items() if (name in no_decay) == exempt], "weight_decay": decay}
        for exempt, decay in ((False, o.weight_decay), (True, 0.0))
    ]
    for group in groups:
        group["params"] = [
            t for name, t in trained.items() if any(t is p for p in group["params"]) and name not in moved
        ]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps)
    others = {name: trained[name] for name in sorted(moved)}
    other = Lion(config, others, no_decay) if o.optimizer == "lion" else Muon(config, others)
    losses, norms, average = [], [], {}
    for step, (ids, labels, mask, starts) in enumerate(batches):
        choices: list[Choice] = []
        ahead = [targets_ahead(1 + k, labels, mask, starts) for k in range(config.model.mtp_num_layers)]
        samples = range(step * len(ids), (step + 1) * len(ids))
        largest: dict[str, dict[str, float]] = {"activation": {}, "logit": {}}

        def watch(kind: str, layer: str, x: torch.Tensor, largest: LayerValues = largest) -> None:
            if kind == "activation" or layer in {f"blocks.{i}" for i in range(config.model.num_layers)}:
                largest[kind][layer] = (x.abs() if kind == "activation" else x[0]).max().item()

        tokens_ahead = [tokens for tokens, *_ in ahead]
        found = all_depths(config, w, ids, samples, starts, choices.append, tokens_ahead, watch)
        every = [
            F.cross_entropy(logits.flatten(0, 1), at.flatten(), reduction="none") * counts.flatten()
            for logits, (at, counts) in zip(found, [(labels, mask), *(each[1:] for each in ahead)], strict=True)
        ]
        loss, *others = (
            each.sum() / counts.sum().clamp(min=1)
            for each, counts in zip(every, [mask, *(a[2] for a in ahead)], strict=True)
        )
        tell(every[0].detach().view_as(mask))
        tell_ahead([each.item() for each in others])
        for weight in trained.values():
            weight.grad = None
        objective, weight = loss, mask.double().sum(1) / mask.double().sum()
        if others:
            objective = objective + config.model.mtp_loss_scaling_factor / len(others) * sum(others)
        for choice in choices:
            aux, z = sample_losses(choice)
            objective = objective + weight.to(aux.dtype) @ (
                config.model.moe_aux_loss_coeff * aux + config.model.moe_z_loss_coeff * z
            )
        objective.backward()
        if choices:
            tell_balance(
                balance([each._replace(logits=each.logits.detach()) for each in choices], mask.sum(1).double())
            )
        gradients = squares_by_layer({name: weight.grad for name, weight in trained.items()})
        old = {name: weight.detach().clone() for name, weight in trained.items()}
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), o.clip_grad).item())
        losses.append(loss.item())
        optimizer.step()
        other.step()
        updates, weights = squares_by_layer({n: w[n].detach() - old[n] for n in old}), squares_by_layer(old)
        tell_layers(
            {
                "layer_grad_norm": {layer: square**0.5 for layer, square in gradients.items()},
                "layer_update_ratio": {n: (updates[n] / weights[n]) ** 0.5 for n in gradients if weights[n]},
                "layer_max_activation": largest["activation"],
                "layer_max_logit": largest["logit"],
            }
        )
        for name, weight in trained.items():
            state = optimizer.state.get(weight, {})
            moments = [other.moments[name]] if name in moved else [state["exp_avg"], state["exp_avg_sq"]]
            round_moments_(moments, config, name, step + 1)
        if o.ema_interval and (step + 1) % o.ema_interval == 0:
            new = max(1 - o.ema_decay, o.ema_interval / (step + 1))
            old = average or w
            average = {name: (1 - new) * old[name].detach() + new * t.detach() for name, t in w.items()}
        if average:
            with torch.no_grad():
                [logits] = all_depths(config, average, ids, starts=starts)
                every = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") * mask.flatten()
            tell_average((every.sum() / mask.sum()).item())
    return losses, norms
