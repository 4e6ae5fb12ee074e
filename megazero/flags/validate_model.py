"""Check the flags of the model: architecture, heads, layers, experts, and widths that tensor-parallel ranks share."""

import math
import re
from collections.abc import Callable

from megazero.engine.options.option import Role
from megazero.families import FAMILIES
from megazero.flags.config import Config, ModelConfig
from megazero.flags.flag_names import as_flag, flags, flags_with, value_of
from megazero.flags.limit_checks import divisors, shorten

ROTARY, LATENT = flags_with(Role.ROTARY), flags_with(Role.LATENT)


def layer_flags(model: ModelConfig) -> tuple[str, ...]:
    """Return the flags that layers with the traits of a model read, and that those of some other family do not."""
    if model.learned_positions:
        return ()
    # Latent attention has no biases and no sinks, and comes before the MLP.
    biases = {"qkv", "proj"} & {*model.linear_biases}
    plain = not (biases or model.attention_sinks or model.parallel_norms or model.norm_place == "around")
    return ROTARY + LATENT if plain and model.norm == "rmsnorm" else ROTARY


def _takes_experts(model: ModelConfig) -> bool:
    return not model.parallel_norms and "mlp" not in model.linear_biases


def _families(fit: Callable[[ModelConfig], bool]) -> str:
    """Return the names of the families whose traits fit."""
    return ", ".join(name for name, family in FAMILIES.items() if fit(ModelConfig(**family.traits)))


def split_widths(model: ModelConfig, expert_tp: int = 0) -> dict[str, int]:
    """Return the widths that tensor-parallel ranks share, by flag. expert_tp: of the experts; 0: the same ranks."""
    widths = {"num-attention-heads": model.num_attention_heads}
    if not all(map(model.has_experts, range(model.num_layers))):
        widths["ffn-hidden-size"] = model.ffn_size
    if model.num_experts and not expert_tp:
        widths[_expert_width(model)] = model.expert_size
        if "experts" in model.linear_biases:
            widths["hidden-size"] = model.hidden_size
    if model.moe_shared_expert_intermediate_size:
        widths["moe-shared-expert-intermediate-size"] = model.moe_shared_expert_intermediate_size
    return widths


def _expert_width(model: ModelConfig) -> str:
    return "moe-ffn-hidden-size" if model.moe_ffn_hidden_size else "ffn-hidden-size"


def tensor_parallel_sizes(model: ModelConfig) -> list[int]:
    """Return the numbers of tensor-parallel ranks that can share the model's heads, their groups and its MLPs."""
    all_widths, groups = divisors(math.gcd(*split_widths(model).values())), model.query_groups
    return [n for n in all_widths if groups % n == 0 or n % groups == 0]


def check_model(config: Config) -> None:
    """Check the flags of the model, and whether the ranks of a layout can share it.

    Raises:
        ValueError: naming the flag, its value and the way out.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    etp = config.parallel.expert_tensor_parallel_size
    heads, hidden = model.num_attention_heads, model.hidden_size
    if hidden % heads and not model.kv_channels and not model.multi_latent_attention:
        fits = min(divisors(hidden), key=lambda n: abs(n - heads))
        raise ValueError(
            f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}; use {fits} "
            f"head{'s' if fits > 1 else ''}"
        )
    _check_architecture(model)
    _check_latents(config)
    _check_experts(config)
    _check_predictions(model)
    for flag, size in split_widths(model, etp).items():
        if size % tp:
            sizes = ", ".join(str(n) for n in tensor_parallel_sizes(model) if n <= 64)
            raise ValueError(
                f"--{flag} {size} is not divisible by --tensor-model-parallel-size {tp}; "
                f"use a --tensor-model-parallel-size of {sizes}, or another --{flag}"
            )
    if etp and model.expert_size % etp:
        sizes = ", ".join(str(n) for n in divisors(model.expert_size) if n <= 64)
        raise ValueError(
            f"--{_expert_width(model)} {model.expert_size} is not divisible by --expert-tensor-parallel-size {etp}; "
            f"use an --expert-tensor-parallel-size of {sizes}"
        )
    if etp and "experts" in model.linear_biases and hidden % etp:
        raise ValueError(
            f"--hidden-size {hidden} is not divisible by --expert-tensor-parallel-size {etp}, whose ranks share the "
            "biases of experts; use --expert-tensor-parallel-size 1"
        )
    groups = model.query_groups
    if groups % tp and tp % groups:
        sizes = ", ".join(str(n) for n in tensor_parallel_sizes(model) if n <= 64)
        raise ValueError(
            f"--num-query-groups {groups} and --tensor-model-parallel-size {tp}: one must divide the other; "
            f"use a --tensor-model-parallel-size of {sizes}"
        )
    pp = config.parallel.pipeline_model_parallel_size
    if pp > model.num_layers:
        raise ValueError(
            f"--pipeline-model-parallel-size {pp} is more than --num-layers {model.num_layers}, so that a stage has no "
            f"layer; use at most {model.num_layers}"
        )


def _check_predictions(model: ModelConfig) -> None:
    depths, factor = model.mtp_num_layers, model.mtp_loss_scaling_factor
    if depths >= model.seq_length:
        raise ValueError(
            f"--mtp-num-layers {depths}: a sample of --seq-length {model.seq_length} has no token so far ahead; use at "
            f"most {model.seq_length - 1}"
        )
    if not depths and factor != ModelConfig.mtp_loss_scaling_factor:
        raise ValueError(
            f"--mtp-loss-scaling-factor {factor:g} has no effect without --mtp-num-layers N; add it, or drop it"
        )


def _check_experts(config: Config) -> None:
    """Refuse flags of experts without experts, and experts in blocks that have no place for them."""
    model = config.model
    experts, top, defaults = model.num_experts, model.moe_router_topk, FAMILIES[model.architecture].defaults
    if not experts:
        for name in (name for name in flags() if name.startswith("moe-")):
            value, default = value_of(config, name), flags()[name].default
            if value not in (default, defaults.get(name, default)):
                raise ValueError(f"{as_flag(name, value)} needs --num-experts E; add it, or drop --{name}")
        return
    if not _takes_experts(model):
        raise ValueError(
            f"--num-experts {experts} with --architecture {model.architecture}: experts have no biases, and follow the "
            f"attention; use one of {_families(_takes_experts)}, or drop it"
        )
    if top > experts:
        raise ValueError(f"--moe-router-topk {top} is more than --num-experts {experts}; use at most {experts}")
    _check_expert_layers(model)
    _check_groups(model)
    if model.moe_shared_expert_gate and not (
        model.moe_shared_expert_intermediate_size or "moe-shared-expert-gate" in defaults
    ):
        raise ValueError(
            "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size W; add it, or drop "
            "--moe-shared-expert-gate"
        )


def _check_expert_layers(model: ModelConfig) -> None:
    pattern = model.moe_layer_freq
    if not re.fullmatch("[1-9][0-9]{0,8}|[DE]+", pattern):
        raise ValueError(
            f"--moe-layer-freq {shorten(pattern) or repr(pattern)}: give a number of at least 1, such as 2 for layers "
            "0, 2, 4 and so on, or letters D (dense) and E (experts), such as DE"
        )
    if not model.expert_layers:
        raise ValueError(
            f"--moe-layer-freq {shorten(pattern)} leaves none of --num-layers {model.num_layers} with experts; use 1"
        )


def _check_architecture(model: ModelConfig) -> None:
    """Refuse options that only other architectures have, and traits that do not go together."""
    _check_traits(model)
    known = layer_flags(model)
    for name in sorted({*ROTARY, *LATENT} - set(known)):
        value = getattr(model, name.replace("-", "_"))
        if value != flags()[name].default:
            others = _families(lambda other, name=name: name in layer_flags(other))  # type: ignore[misc]
            raise ValueError(
                f"--architecture {model.architecture} has no {as_flag(name, value)}; use one of {others}, or drop it"
            )
    positions = model.max_position_embeddings
    if model.learned_positions and positions not in (0, model.seq_length):
        raise ValueError(
            f"--max-position-embeddings {positions} is not --seq-length {model.seq_length}, and each token of a sample "
            "has a learned position; give both the same value"
        )
    _check_layer_pattern(model)
    heads, groups = model.num_attention_heads, model.query_groups
    if heads % groups:
        sizes = ", ".join(str(n) for n in divisors(heads) if n <= 64)
        raise ValueError(
            f"--num-query-groups {groups} does not divide --num-attention-heads {heads}; use one of {sizes}"
        )
    scaled = model.rope_scaling_type == "yarn" and model.rope_scaling_factor > 1
    for name in ("beta-fast", "mscale", "mscale-all-dim", "yarn-correction-range-round-to-int"):
        value = getattr(model, name.replace("-", "_"))
        if not scaled and value not in (flags()[name].default, FAMILIES[model.architecture].defaults.get(name)):
            raise ValueError(
                f"{as_flag(name, value)} has no effect without --rope-scaling-type yarn and a --rope-scaling-factor "
                "above 1; add them, or drop it"
            )
    if "rotary-base" in known and not model.multi_latent_attention:
        _check_rotary(model)


def _check_traits(model: ModelConfig) -> None:
    """Refuse traits of which one would have no effect. Those of a family go together."""
    if model.fused_qkv != model.learned_positions:
        one, other = as_flag("fused-qkv", model.fused_qkv), as_flag("learned-positions", model.fused_qkv)
        raise ValueError(f"{one} needs {other}: queries and keys in one weight are not rotated; add it, or drop {one}")
    if model.parallel_norms and model.norm_place != "before":
        raise ValueError(
            f"--norm-place {model.norm_place} with --parallel-norms {model.parallel_norms}: a block whose attention "
            "and MLP read the same x has no such norms; use --norm-place before, or --parallel-norms 0"
        )


def _check_latents(config: Config) -> None:
    """Refuse flags of heads that latent attention has not, and its own flags without it."""
    model, defaults = config.model, FAMILIES[config.model.architecture].defaults
    known, having = flags(), model.multi_latent_attention
    of_latents = [name for name in LATENT if name != "multi-latent-attention"]
    of_others = ("num-query-groups", "kv-channels", "add-qkv-bias", "qk-layernorm", "rotary-percent")
    way_out = "drop it" if having else "add --multi-latent-attention, or drop it"
    for name in of_others if having else of_latents:
        if (value := value_of(config, name)) not in (known[name].default, defaults.get(name)):
            condition = "with" if having else "without"
            raise ValueError(f"{as_flag(name, value)} has no effect {condition} --multi-latent-attention; {way_out}")
    if not having:
        return
    if model.v_head_dim > model.head_dim:
        raise ValueError(
            f"--v-head-dim {model.v_head_dim} is more than --qk-head-dim {model.qk_head_dim} + --qk-pos-emb-head-dim "
            f"{model.qk_pos_emb_head_dim} = {model.head_dim}; use at most {model.head_dim}"
        )
    if model.qk_pos_emb_head_dim % 2:
        raise ValueError(
            f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim}: dims are rotated in pairs; use an even number, such "
            f"as {model.qk_pos_emb_head_dim + 1}"
        )


def _check_groups(model: ModelConfig) -> None:
    """Refuse groups of experts that no token could pass."""
    experts, groups, chosen = model.num_experts, model.moe_router_num_groups, model.moe_router_group_topk
    if not groups or not chosen:
        return
    if experts % groups:
        sizes = ", ".join(str(n) for n in divisors(experts) if n <= 64)
        raise ValueError(
            f"--moe-router-num-groups {groups} does not divide --num-experts {experts}; use one of {sizes}"
        )
    if chosen > groups:
        raise ValueError(
            f"--moe-router-group-topk {chosen} is more than --moe-router-num-groups {groups}; use at most {groups}"
        )
    if chosen * (experts // groups) < model.moe_router_topk:
        raise ValueError(
            f"--moe-router-topk {model.moe_router_topk}: the groups of --moe-router-group-topk {chosen} have only "
            f"{chosen * (experts // groups)} experts; use a --moe-router-group-topk of at least "
            f"{math.ceil(model.moe_router_topk * groups / experts)}"
        )


def _check_rotary(model: ModelConfig) -> None:
    rotated, width = model.rotary_dim, model.head_dim
    if rotated >= 2 and rotated % 2 == 0:
        return
    head = f"--hidden-size {model.hidden_size} / --num-attention-heads {model.num_attention_heads} = {width}"
    if model.kv_channels:
        head = f"--kv-channels {width}"
    if model.rotary_percent == 1 or width < 2:
        raise ValueError(f"{head}: rotary positions need heads of an even size; use --kv-channels {width + 1}")
    even = rotated - rotated % 2 or 2
    raise ValueError(
        f"--rotary-percent {model.rotary_percent:g} of {head} is {rotated}: rotary positions need an even number of "
        f"dims; use {math.ceil((even + 0.01) / width * 1e4) / 1e4:g}, which is {even}"
    )


def _check_layer_pattern(model: ModelConfig) -> None:
    pattern, window = model.layer_pattern, model.window_size
    if unknown := set(pattern) - set("LGN"):
        raise ValueError(
            f"--layer-pattern {shorten(pattern)} has {min(unknown)}; use the letters L (local, with a window), G "
            "(global) and N (global, without rotary positions)"
        )
    if "L" in pattern and not window:
        raise ValueError(f"--layer-pattern {shorten(pattern)} needs --window-size W for its local layers; add it")
    if window and pattern and "L" not in pattern:
        raise ValueError(
            f"--window-size {window} needs a layer L in --layer-pattern {shorten(pattern)}; add one, or drop the window"
        )
    if "N" in pattern and model.learned_positions:
        raise ValueError(
            f"--layer-pattern {shorten(pattern)}: --architecture {model.architecture} has no rotary positions, which N "
            "leaves out; use G"
        )
