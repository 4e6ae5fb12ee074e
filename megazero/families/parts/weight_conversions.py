"""Options that have another form in transformers, of several families; `rope_scaling` has those of positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megazero.engine.options.model_options import ModelOptions
from megazero.families.parts.model_types import Conversion, Options, attention_kinds, pattern_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LOCAL, GLOBAL = "sliding_attention", "full_attention"
DENSE_OR_SPARSE = ("dense", "sparse")


# -- Windows and kinds of layers


def _windows(model: ModelOptions) -> Options:
    kinds = [LOCAL if kind == "L" else GLOBAL for kind in attention_kinds(model)]
    return {"sliding_window": model.window_size or None, "layer_types": kinds}


def _qwen_windows(model: ModelOptions) -> Options:
    found = _windows(model)
    if not model.window_size:
        return found | {"use_sliding_window": False}
    first = [*found["layer_types"], LOCAL].index(LOCAL)  # readers without layer_types take the layers before as global
    return found | {"use_sliding_window": True, "max_window_layers": first}


def layer_types_of(letters: str) -> str:
    """Return the shortest pattern that repeats to `letters`; empty if all are L or all are G."""
    return "" if set(letters) <= {"L"} or set(letters) <= {"G"} else pattern_of(letters)


def _from_windows(config: PreTrainedConfig) -> Options:
    """Return window_size and layer_pattern of `sliding_window` and `layer_types`."""
    size = config.sliding_window if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = [LOCAL if size else GLOBAL] * config.num_hidden_layers
    if unknown := set(kinds) - {LOCAL, GLOBAL}:
        raise ValueError(f"config.json has layer_types {min(unknown)}; this version computes {LOCAL} and {GLOBAL} only")
    if LOCAL in kinds and not size:
        raise ValueError(
            f"config.json has {LOCAL} in layer_types and no window: sliding_window {config.sliding_window}, "
            f"use_sliding_window {getattr(config, 'use_sliding_window', True)}; give the window, or make these layers "
            f"{GLOBAL}"
        )
    letters = "".join("L" if kind == LOCAL else "G" for kind in kinds)
    return {"window_size": size if "L" in letters else 0, "layer_pattern": layer_types_of(letters)}


WINDOW = Conversion(  # of all layers
    ("window_size",),
    lambda model: {"sliding_window": model.window_size or None},
    lambda config: {"window_size": config.sliding_window or 0},
)
SWITCHED_WINDOW = Conversion(
    ("window_size",),
    lambda model: {"use_sliding_window": model.window_size > 0, "sliding_window": model.window_size or None},
    lambda config: {"window_size": (config.sliding_window or 0) if config.use_sliding_window else 0},
)
WINDOWS = Conversion(("window_size", "layer_pattern"), _windows, _from_windows)
QWEN_WINDOWS = WINDOWS._replace(to_theirs=_qwen_windows)


# -- Heads and scores


def usual_head_dim(config: PreTrainedConfig) -> int:
    return int(config.hidden_size // config.num_attention_heads)


def _head_dim(config: PreTrainedConfig) -> Options:
    usual = usual_head_dim(config)
    found = getattr(config, "head_dim", None) or usual
    return {"kv_channels": 0 if found == usual else found}


def _other_head_dim(model: ModelOptions) -> Options:
    return {"head_dim": model.head_dim} if model.head_dim * model.num_attention_heads != model.hidden_size else {}


def _require_usual_head_dim(config: PreTrainedConfig) -> Options:
    usual = usual_head_dim(config)
    if config.head_dim != usual:
        raise ValueError(
            f"config.json has head_dim {config.head_dim}; transformers' model has heads of hidden_size / "
            f"num_attention_heads = {usual} alone"
        )
    return {}


def _from_latent_heads(config: PreTrainedConfig) -> Options:
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    if keys != heads:
        raise ValueError(
            f"config.json has num_key_value_heads {keys} and num_attention_heads {heads}; each head of this version's "
            "latent attention has keys of its own"
        )
    return {"q_lora_rank": config.q_lora_rank or 0, "num_query_groups": 0}


def _gemma_scores(model: ModelOptions) -> Options:
    scalar = round(model.attention_scale**-2) if model.attention_scale else model.head_dim
    if model.attention_scale and not math.isclose(scalar**-0.5, model.attention_scale):
        raise ValueError(
            f"--attention-scale {model.attention_scale}: Gemma's is 1 / sqrt(N) of a whole N, such as {scalar**-0.5}"
        )
    return {
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": model.final_softcap or None,
    }


def _from_gemma_scores(config: PreTrainedConfig) -> Options:
    scalar = config.query_pre_attn_scalar
    return {
        "attention_scale": 0.0 if scalar == config.head_dim else scalar**-0.5,
        "final_softcap": config.final_logit_softcapping or 0.0,
    }


LATENT_HEADS = Conversion(  # theirs have None for the width of a latent of queries that is missing
    ("q_lora_rank",), lambda model: {"q_lora_rank": model.q_lora_rank or None}, _from_latent_heads
)
HEAD_DIM = Conversion(("kv_channels",), lambda model: {"head_dim": model.head_dim}, _head_dim)
USUAL_HEAD_DIM = Conversion((), lambda model: {"head_dim": model.head_dim}, _require_usual_head_dim)
# Of classes that have no such key, while their models read it.
OTHER_HEAD_DIM = HEAD_DIM._replace(to_theirs=_other_head_dim)
GEMMA_SCORES = Conversion(("attention_scale", "final_softcap"), _gemma_scores, _from_gemma_scores)


# -- Experts


def _from_sparse_layers(config: PreTrainedConfig) -> Options:
    step, dense = config.decoder_sparse_step, config.mlp_only_layers
    layers = range(config.num_hidden_layers)
    letters = "".join("DE"[(i + 1) % step == 0 and i not in dense and config.num_experts > 0] for i in layers)
    if "E" not in letters:
        raise ValueError(
            f"config.json has num_experts {config.num_experts}, decoder_sparse_step {step} and mlp_only_layers "
            f"{dense}; no layer has experts, and this version computes such a model as the family without them"
        )
    return {"moe_layer_freq": pattern_of(letters) if "D" in letters else "1"}


def _sparse_layers(model: ModelOptions) -> Options:
    dense = [number for number in range(model.num_layers) if not model.has_experts(number)]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _first_dense(model: ModelOptions) -> Options:
    dense = next((n for n in range(model.num_layers) if model.has_experts(n)), model.num_layers)
    if not all(map(model.has_experts, range(dense, model.num_layers))):
        raise ValueError(
            f"--moe-layer-freq {model.moe_layer_freq}: DeepSeek's dense layers are the first ones, as in DDE"
        )
    return {"first_k_dense_replace": dense}


def _from_first_dense(config: PreTrainedConfig) -> Options:
    dense = config.first_k_dense_replace
    return _layers_with_experts(["dense"] * dense, config.num_hidden_layers, f"first_k_dense_replace {dense}")


def _layers_with_experts(kinds: Sequence[str], layers: int, said: str) -> Options:
    """Return the option of layers that are dense or, the rest of them too, sparse, as `said`."""
    letters = "".join("D" if kind == "dense" else "E" for kind in kinds)[:layers].ljust(layers, "E")
    if "E" not in letters:
        raise ValueError(
            f"config.json has num_hidden_layers {layers} and {said}; no layer has experts, and this version computes "
            "such a model in no family"
        )
    return {"moe_layer_freq": letters if "D" in letters else "1"}


def _from_shared_experts(config: PreTrainedConfig) -> Options:
    return {"moe_shared_expert_intermediate_size": (config.n_shared_experts or 0) * config.moe_intermediate_size}


def _shared_experts(model: ModelOptions) -> Options:
    width, each = model.moe_shared_expert_intermediate_size, model.expert_size
    if not width or width % each:
        raise ValueError(
            f"--moe-shared-expert-intermediate-size {width}: DeepSeek's shared experts are as wide as a number of "
            f"experts; use {max(1, round(width / each)) * each}"
        )
    return {"n_shared_experts": width // each}


def _from_expert_groups(config: PreTrainedConfig) -> Options:
    groups, chosen = config.n_group or 1, config.topk_group or 1
    if chosen == groups:
        groups = chosen = 0
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


SPARSE_LAYERS = Conversion(("moe_layer_freq",), _sparse_layers, _from_sparse_layers)
# The factor of their balance loss, router_aux_loss_coef, is not converted: theirs is of all layers and samples
# together, ours of each, so that no factor makes them equal. An import has none, and an export the class's default.
TOPK_PROB = Conversion(
    ("moe_router_pre_softmax",),
    lambda model: {"norm_topk_prob": not model.moe_router_pre_softmax},
    lambda config: {"moe_router_pre_softmax": not config.norm_topk_prob},
)
FIRST_DENSE = Conversion(("moe_layer_freq",), _first_dense, _from_first_dense)
MLP_LAYER_TYPES = Conversion(
    ("moe_layer_freq",),
    lambda model: {"mlp_layer_types": [DENSE_OR_SPARSE[model.has_experts(n)] for n in range(model.num_layers)]},
    lambda config: _layers_with_experts(
        config.mlp_layer_types, config.num_hidden_layers, f"mlp_layer_types {config.mlp_layer_types}"
    ),
)
SHARED_EXPERTS = Conversion(("moe_shared_expert_intermediate_size",), _shared_experts, _from_shared_experts)
EXPERT_GROUPS = Conversion(
    ("moe_router_num_groups", "moe_router_group_topk"),
    lambda model: {"n_group": model.moe_router_num_groups or 1, "topk_group": model.moe_router_group_topk or 1},
    _from_expert_groups,
)
# A config.json names these modules, which files need not hold: --mtp-num-layers decides.
PREDICTIONS_NUMBER = Conversion(
    ("mtp_num_layers",), lambda model: {"num_nextn_predict_layers": model.mtp_num_layers}, lambda config: {}
)
ONE_WIDTH = Conversion((), lambda model: {"intermediate_size": model.expert_size}, lambda config: {})


# -- Dropout


def equal_dropout(embedding: str, residual: str) -> Conversion:
    """Return the conversion of a dropout of embeddings, by the names of theirs: it must be that of the branches."""

    def check(config: PreTrainedConfig) -> Options:
        rates = getattr(config, embedding), getattr(config, residual)
        if rates[0] != rates[1]:
            raise ValueError(
                f"config.json has {embedding} {rates[0]} and {residual} {rates[1]}; this version computes equal ones "
                "only, which are --hidden-dropout"
            )
        return {}

    return Conversion((), lambda model: {embedding: model.hidden_dropout}, check)
