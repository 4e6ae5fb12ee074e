"""Shrink a run to a model and a mesh that train in seconds, in which everything that the layout depends on is left.

An axis of more than one rank keeps at least two, and an axis of one rank stays one. Sizes that ranks divide stay
divisible by them, or indivisible if they are. Patterns of layers, groups of heads and of experts, chosen experts,
windows, documents, padding of the batch and its accumulation keep their kind: one, some or all.
"""

import fnmatch
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.dealing import rank_tokens
from megazero.engine.plan.layout.layers import Layers
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.batch_ramp import padding_samples
from megazero.flags.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LogConfig,
    ModelConfig,
    MonitorConfig,
    PlanConfig,
)
from megazero.flags.flag_names import flags, value_of, with_values
from megazero.planner.layouts import layout_words, least_layout

MOST_RANKS = 8
MOST_STD = 0.1  # of initial weights, which grow as the model becomes narrower
LOSS_SCALE = 2.0**10  # of fp16; the gradients of narrow models are large
FEW_TOKENS = 5  # of a chunk of the loss: several chunks, of which the last is shorter
WIDTH, BLOCKED_WIDTH = 8, 32  # of a head; the second where 32 neighbours of a row share an exponent
# Flags that change no result of a step; those of a run around its steps are dropped with their groups.
WITHOUT_EFFECT = {"compile": False, "matmul-backend": "torch", "elastic": "", "deterministic-mode": False}
WITHOUT_EFFECT |= {"train-tokens": 0, "recipe": "none"}
# Flags whose change is reported, besides those of the model. Others follow from them.
SHOWN = ("micro-batch-size", "global-batch-size", "rampup-batch-size", "pipeline-split", "freeze-parameters")
UNSAID = ("init-method-std", "rope-trained-length", "max-position-embeddings")


class Shrunk(NamedTuple):
    """A layout of the shrunk model. config: not resolved."""

    config: Config
    layout: Layout


def steps_alone(config: Config, iterations: int) -> Config:
    """Return the configuration without the run around its steps: data, saving, evaluation, monitoring, logs."""
    data = config.data
    names = ("packing", "eod_mask_loss", "reset_attention_mask", "reset_position_ids")
    kept = {name: getattr(data, name) for name in names}
    config = replace(
        config,
        data=DataConfig(tokenizer="byte", num_workers=0, **kept),
        evaluation=EvaluationConfig(),
        checkpoint=CheckpointConfig(),
        monitor=MonitorConfig(straggler_interval=0),
        log=LogConfig(log_interval=10**9),
        plan=PlanConfig(),
    )
    optimizer, wsd = config.optimizer, config.optimizer.lr_decay_style == "wsd" and iterations > 1
    values = WITHOUT_EFFECT | {
        "train-iters": iterations,
        "lr-warmup-iters": min(optimizer.lr_warmup_iters, iterations > 2),
        "lr-decay-iters": 0,
        "lr-wsd-decay-iters": int(wsd),
        "lr-decay-style": "constant" if optimizer.lr_decay_style == "wsd" and not wsd else optimizer.lr_decay_style,
        "ema-interval": min(optimizer.ema_interval, 1),
        "poison-buffers": True,
        "distributed-timeout-minutes": 2.0,
    }
    return with_values(config, values)


# -- the mesh


def small_layout(layout: Layout, model: ModelConfig) -> Layout:
    """Return the smallest layout with the same axes of more than one rank; up to `MOST_RANKS`, the layout itself.

    Raises:
        ValueError: there is none.
    """
    if layout.world_size <= MOST_RANKS:
        return replace(layout, split=())
    found = [each for each in _candidates(layout, model) if _shape(each) == _shape(layout)]
    if not found:
        raise ValueError(
            f"the layout {layout_words(layout)} has no smaller one with the same axes of more than one rank"
        )
    stages = min(layout.pp, 3)  # a stage in the middle, if the ranks allow it
    return min(found, key=lambda one: (max(one.world_size, MOST_RANKS), one.pp != stages, one.world_size))


def _shape(layout: Layout) -> dict[str, bool]:
    return {axis: size > 1 for axis, size in layout.sizes.items()}


def _candidates(layout: Layout, model: ModelConfig) -> list[Layout]:
    def few(size: int, *levels: int) -> tuple[int, ...]:
        return (1,) if size == 1 else tuple(level for level in levels if level <= size)

    parts = layout.expert_tp if layout.expert_tp != layout.tp else 0
    shared = 1 < model.query_groups < layout.tp or 1 < parts < layout.tp  # some ranks share a group, or an expert
    found = []
    for pp, dp, cp, tp, ep, shards in itertools.product(
        few(layout.pp, 2, 3),
        few(layout.dp, 2, 3, 4, 8),
        few(layout.cp, 2, 4),
        few(layout.tp, 4 if shared else 2),
        few(layout.ep, 2, 4),
        (0, 2, 4) if layout.replica > 1 else (0,),
    ):
        one = Layout(pp, dp, tp, cp=cp)
        copy = ep * (min(parts, 2) or one.tp)
        whole = one.stride("pp") % copy == 0 and one.data % (shards or 1) == 0
        if whole and replace(one, shards=shards).stride("replica") % (copy if shards else 1) == 0:
            one = replace(one, ep=ep, expert_tp=min(parts, 2), shards=shards)
            found.append(replace(one, chunks=min(layout.chunks, 2), v_shaped=layout.v_shaped))
    return found


def least_world(config: Config) -> int:
    """Return the ranks of a layout with the fewest replicas, two of them at least if ZeRO shards states."""
    p = config.parallel
    one = least_layout(
        p.tensor_model_parallel_size,
        p.context_parallel_size,
        p.expert_model_parallel_size,
        p.expert_tensor_parallel_size,
    )
    shards = config.zero.zero_shard_size or 1
    replicas = max(one.dp, 2 if config.zero.zero_stage and one.data < 2 else 1, -(-2 * shards // one.cp) * (shards > 1))
    return replace(one, dp=replicas, pp=p.pipeline_model_parallel_size).world_size


# -- the model


class Model(NamedTuple):
    """The numbers that the sizes of the shrunk model are made from.

    Attributes:
        real: layout of the run that is verified.
        small: layouts that must be able to hold the shrunk model, its own first.
        size: factor of the smallest sizes.
    """

    config: Config
    real: Layout
    small: Sequence[Layout]
    size: int

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def parts(self) -> int:
        """The tensor-parallel ranks of all layouts divide this."""
        return math.lcm(*(layout.tp for layout in self.small))

    @property
    def blocked(self) -> bool:
        return self.config.optimizer.adam_moments != "fp32"

    def heads(self) -> tuple[int, int]:
        """Return heads and groups of heads."""
        heads, groups, parts = self.model.num_attention_heads, self.model.query_groups, self.parts
        if groups >= self.real.tp:
            few = parts * min(max(1, groups // self.real.tp), 2 * self.size)
        else:
            few = min(groups, 2)
        each = min(heads // groups, 2 * self.size)
        while few * each % parts:
            each += 1
        return few * each, few

    def head_width(self) -> int:
        """Return the width of a head, of which an even number of dims rotates if positions are rotary."""
        model = self.model
        width = min(model.head_dim, (BLOCKED_WIDTH if self.blocked else WIDTH) * self.size)
        if model.multi_latent_attention:
            return width
        rotates = not model.learned_positions
        while rotates and width < model.head_dim and (rotated := int(width * model.rotary_percent)) % 2 + (rotated < 2):
            width += 1
        return width

    def sizes(self) -> dict[str, Any]:
        """Return the flags of widths, heads, vocabulary and experts."""
        model, parts = self.model, self.parts
        heads, groups = self.heads()
        width = self.head_width()
        unit = BLOCKED_WIDTH if self.blocked else WIDTH
        inner, hidden = heads * width, heads * width
        if model.num_attention_heads * model.head_dim != model.hidden_size:
            share = model.hidden_size / (model.num_attention_heads * model.head_dim)
            step = unit * parts if "experts" in model.linear_biases else unit  # ranks share the biases of experts
            hidden = max(step, round(inner * share / step) * step)
            if hidden == inner:
                hidden = inner + step if share > 1 else max(step // 2, inner - step)
        hidden = min(hidden, model.hidden_size) if model.kv_channels else hidden
        shrink = hidden / model.hidden_size

        def like(size: int) -> int:
            """Return a width that is 0, or as large compared with the hidden size as before."""
            step = unit * parts
            return min(size, max(1, round(size * shrink / step)) * step) if size else 0

        vocabulary = model.vocab_size
        few = 128 * self.size - (vocabulary % self.real.tp > 0)
        return {
            "num-attention-heads": heads,
            "num-query-groups": groups if model.num_query_groups else 0,
            "kv-channels": width if model.kv_channels else 0,
            **self.latents(width),
            "hidden-size": hidden,
            "ffn-hidden-size": like(model.ffn_hidden_size),
            "moe-ffn-hidden-size": like(model.moe_ffn_hidden_size),
            "moe-shared-expert-intermediate-size": like(model.moe_shared_expert_intermediate_size),
            "vocab-size": min(vocabulary, few),
            "init-method-std": max(model.init_method_std, min(MOST_STD, model.init_method_std / math.sqrt(shrink))),
            **self.experts(),
        }

    def latents(self, width: int) -> dict[str, int]:
        """Return the flags of latent attention with keys of `width` dims; widths keep their order."""
        model, whole = self.model, self.model.head_dim
        if not model.multi_latent_attention:
            return {}
        turned = max(2, 2 * round(width * model.qk_pos_emb_head_dim / whole / 2))
        value = width if model.v_head_dim == whole else max(1, round(width * model.v_head_dim / whole))
        unit = BLOCKED_WIDTH if self.blocked else WIDTH
        return {
            "qk-pos-emb-head-dim": turned,
            "qk-head-dim": width - turned,
            "v-head-dim": value,
            "kv-lora-rank": min(model.kv_lora_rank, 2 * unit * self.size),
            "q-lora-rank": min(model.q_lora_rank, 3 * unit * self.size),
        }

    def experts(self) -> dict[str, int]:
        """Return the flags of the numbers of experts: one, some or all of them are chosen, and on a rank."""
        model = self.model
        if not model.num_experts:
            return {}
        divided = math.lcm(*(layout.ep for layout in self.small))
        groups, all_groups = min(model.moe_router_num_groups, 4), max(1, model.moe_router_num_groups)
        chosen = -(-model.moe_router_group_topk * groups // all_groups)
        some = model.moe_router_topk < model.num_experts
        top = min(model.moe_router_topk, 2 * self.size)
        each = min(model.num_experts // self.real.ep, 2 * self.size)
        step = math.lcm(divided * each, groups or 1)
        fits = (n for n in itertools.count(step, step) if n >= top + some and n >= 2 * groups)
        number = min(model.num_experts, next(n for n in fits if not groups or chosen * n // groups >= top))
        return {
            "num-experts": number,
            "moe-router-topk": top if some else number,
            "moe-router-num-groups": groups,
            "moe-router-group-topk": chosen,
        }

    def layers(self) -> dict[str, Any]:
        """Return the flags of the layers: each kind of attention and of MLP, and layers for each stage."""
        model, parallel = self.model, self.config.parallel
        number = model.num_layers
        kinds = [(model.attention_kind(n), "E" if model.has_experts(n) else "D") for n in range(number)]
        period = next(p for p in range(1, number + 1) if all(kinds[n] == kinds[n % p] for n in range(number)))
        base = kinds[:period] if period <= 8 else list(dict.fromkeys(kinds))
        stages = max(len(layout.placement) for layout in self.small)
        real_stages = len(self.real.placement)
        each = min(max(1, number // real_stages), 2 if stages <= 4 else 1) * self.size
        few = max(stages * each + (number % real_stages > 0 and stages > 1), len(base))
        few = min(few, number)
        found: dict[str, Any] = {}
        if parallel.pipeline_split:
            whole = [int(n) for n in parallel.pipeline_split.split(",")]
            places = [round(i * (len(whole) - 1) / max(1, stages - 1)) for i in range(stages)]
            least = min((n for n in whole if n), default=1)
            split = [0 if not whole[p] else 1 + (whole[p] > least) for p in places]
            split[split.index(max(split))] += max(0, len(base) - sum(split))
            found["pipeline-split"], few = ",".join(map(str, split)), sum(split)
        found["num-layers"] = few
        if model.layer_pattern:
            found["layer-pattern"] = "".join(base[n % len(base)][0] for n in range(few))
        if model.num_experts and model.moe_layer_freq != "1":
            found["moe-layer-freq"] = "".join(base[n % len(base)][1] for n in range(few))
        return found

    def lengths(self) -> dict[str, Any]:
        """Return the flags of the length of a sample, and of the windows and positions in it."""
        model, real = self.model, self.real
        cp = math.lcm(*(layout.cp for layout in self.small))
        length = max(16, WIDTH * cp * self.parts) * self.size
        if model.seq_length % real.cp:
            micro = min(self.config.training.micro_batch_size, 2)
            step = self.parts // math.gcd(self.parts, micro) if self.config.parallel.sequence_parallel else 1
            length += next((n for n in range(step, cp * step, step) if n % cp), 0)
        length = min(length, model.seq_length)
        window = model.window_size
        if 0 < window < model.seq_length:
            window = max(2, min(window, length // 4))
        found = {"seq-length": length, "max-position-embeddings": 0, "window-size": min(window, length)}
        if model.rope_scaling_factor > 1:
            found["rope-trained-length"] = max(1, round(model.rope_trained_length * length / model.seq_length))
        return found

    def batch(self, config: Config, real: Layout, small: Layout) -> dict[str, Any]:
        """Return the flags of the batch: as few micro-batches as the schedule shows, padding if there is padding."""
        training, number = config.training, config.micro_batches(real.dp)
        micro = min(training.micro_batch_size, 2)
        few = min(number, 3 if small.pp == 1 else small.pp + 1)
        if small.pp > 1 and number >= 2 * small.pp and number % real.pp == 0:
            few = 2 * small.pp
        added = padding_samples(config, real.dp)
        padding = min(1 + (added >= training.micro_batch_size) * (micro - 1), added)
        whole = few * micro * small.dp
        batch = whole - min(padding, small.dp * micro - 1)
        found: dict[str, Any] = {"micro-batch-size": micro, "global-batch-size": batch}
        if training.rampup_batch_size and batch > 1:
            start = batch // 2
            found["rampup-batch-size"] = (start, batch - start, start)
        elif training.rampup_batch_size:
            found["rampup-batch-size"] = ()
        return found


def shrink(runs: Sequence[tuple[Config, Layout]], size: int = 1) -> list[Shrunk]:
    """Shrink runs of one model in one or several layouts: to one model, and one global batch.

    Args:
        runs: resolved configurations, without the run around their steps (`steps_alone`).
        size: factor of the smallest sizes; sizes never grow beyond the real ones.

    Raises:
        ValueError: there is no smaller mesh of the same shape.
    """
    (first, real), *_ = runs
    smalls = [small_layout(layout, config.model) for config, layout in runs]
    made = Model(first, real, smalls, size)
    values = made.sizes() | made.layers() | made.lengths()
    known = declare(
        replace(first.model, **{n.replace("-", "_"): v for n, v in values.items() if flags()[n].group == "model"})
    )
    found = list[Shrunk]()
    for (config, layout), small in zip(runs, smalls, strict=True):
        batch = made.batch(config, layout, small)
        batch["global-batch-size"] = found[0].config.training.global_batch_size if found else batch["global-batch-size"]
        if found and "rampup-batch-size" in batch:
            batch["rampup-batch-size"] = found[0].config.training.rampup_batch_size
        names = [spec.name for spec in known.params()]
        own = values | batch | _parallel(config, small) | {
            "freeze-parameters": _frozen(config.training.freeze_parameters, names, first.model.num_layers, values),
            "loss-chunk-tokens": _chunk(config, layout),
            "initial-loss-scale": max(LOSS_SCALE, config.training.min_loss_scale),
            "reduce-bucket-size": _bucket(config, _largest(known), _largest(declare(config.model))),
        }  # fmt: skip
        if (
            small.world_size == layout.world_size
            and config.parallel.pipeline_split
            and not made_shorter(config, values)
        ):
            own["pipeline-split"] = config.parallel.pipeline_split
        found.append(Shrunk(with_values(config, own), small))
    return found


def _chunk(config: Config, layout: Layout) -> int:
    """Return --loss-chunk-tokens: several chunks if the run has several."""
    return FEW_TOKENS if 0 < config.loss_chunk("cuda", layout.tp) < rank_tokens(config, layout) else 0


def made_shorter(config: Config, values: dict[str, Any]) -> bool:
    return bool(values["num-layers"] != config.model.num_layers)


def _parallel(config: Config, small: Layout) -> dict[str, Any]:
    return {
        "pipeline-model-parallel-size": small.pp,
        "context-parallel-size": small.cp,
        "tensor-model-parallel-size": small.tp,
        "expert-model-parallel-size": small.ep,
        "expert-tensor-parallel-size": small.expert_tp,
        "virtual-pipeline-stages": small.chunks,
        "zero-shard-size": small.shards,
    }


def _largest(layers: Layers) -> int:
    """Return the elements of the largest layer."""
    return max(sum(math.prod(spec.shape) for spec in kind.params) for kind in layers.kinds.values())


def _bucket(config: Config, small: int, real: int) -> int:
    """Return a bucket that is to the largest layer as the real one is."""
    return max(64, config.zero.reduce_bucket_size * small // real)


def _frozen(patterns: tuple[str, ...], names: list[str], layers: int, values: dict[str, Any]) -> tuple[str, ...]:
    """Return the patterns of frozen weights with the numbers of the blocks that are left."""

    def moved(found: re.Match[str]) -> str:
        return found[0].replace(found[1], str(int(found[1]) * values["num-layers"] // layers))

    renamed = [re.sub(r"blocks\.(\d+)\.", moved, pattern) for pattern in patterns]
    return tuple(dict.fromkeys(pattern for pattern in renamed if fnmatch.filter(names, pattern)))


def changes(before: Config, after: Config) -> list[str]:
    """Return each flag of model, batch and optimizer that was shrunk, as "--flag before -> after"."""
    found = []
    for name in flags():
        old, new = value_of(before, name), value_of(after, name)
        if old != new and name not in UNSAID and (flags()[name].group == "model" or name in SHOWN):
            found.append(f"{name} {_text(old)} -> {_text(new)}")
    return found


def _text(value: Any) -> str:
    return (
        f"{value:,}"
        if isinstance(value, int)
        else " ".join(map(str, value))
        if isinstance(value, tuple)
        else str(value)
    )
