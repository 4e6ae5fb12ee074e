"""Names of the tensors of transformers' models, as pieces that several families have.

Shapes are those of `model_types`.
"""

from typing import Any

from megazero.families.parts.model_types import (
    EXPERT,
    EXPERTS_HALVES,
    HALVES,
    HEADS,
    KEYS_AND_VALUES,
    OUTPUT,
    SAME,
    STACKED,
    Form,
    TensorNames,
)

Names = dict[str | tuple[str, ...], tuple[Any, ...]]  # ours -> form, theirs


def tensor_rows(outside: dict[str, str], block: str, *inside: Names) -> tuple[TensorNames, ...]:
    """Return the names of tensors outside and inside blocks, whose names of theirs begin with `block`."""
    rows = [TensorNames((ours,), (theirs,)) for ours, theirs in outside.items()]
    for names in inside:
        for key, (form, *theirs) in names.items():
            ours = (key,) if isinstance(key, str) else key
            rows.append(
                TensorNames(tuple(f"blocks.{{}}.{name}" for name in ours), tuple(block + name for name in theirs), form)
            )
    return tuple(rows)


def weight_and_bias(ours: str, form: Form, *theirs: str) -> Names:
    """Return the names of a linear layer's weight and bias."""
    return {f"{ours}.{kind}": (form, *(f"{name}.{kind}" for name in theirs)) for kind in ("weight", "bias")}


def same_forms(**names: str) -> Names:
    return {name.replace("__", "."): (SAME, theirs) for name, theirs in names.items()}


LLAMA_OUTSIDE = {
    "token_embedding.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.norm.bias": "model.norm.bias",
    "head.output.weight": OUTPUT,
}
BEFORE = same_forms(norm1__weight="input_layernorm.weight", norm2__weight="post_attention_layernorm.weight")
LAYER_NORMS = weight_and_bias("norm1", SAME, "input_layernorm")
LAYER_NORMS |= weight_and_bias("norm2", SAME, "post_attention_layernorm")
AFTER = same_forms(
    norm1_after__weight="post_attention_layernorm.weight", norm2_after__weight="post_feedforward_layernorm.weight"
)
AROUND = AFTER | same_forms(norm1__weight="input_layernorm.weight", norm2__weight="pre_feedforward_layernorm.weight")
ATTENTION = {
    **weight_and_bias("attention.query", HEADS, "self_attn.q_proj"),
    **weight_and_bias("attention.kv", KEYS_AND_VALUES, "self_attn.k_proj", "self_attn.v_proj"),
    **same_forms(
        attention__query_norm__weight="self_attn.q_norm.weight",
        attention__key_norm__weight="self_attn.k_norm.weight",
        attention__proj__weight="self_attn.o_proj.weight",
    ),
}
GATED_MLP: Names = {
    "mlp.up.weight": (STACKED, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down.weight": (SAME, "mlp.down_proj.weight"),
}
EXPERTS: Names = {
    "mlp.router.weight": (SAME, "mlp.gate.weight"),
    "mlp.experts.up.weight": (
        *(EXPERT, "mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
    ),
    "mlp.experts.down.weight": (STACKED, "mlp.experts.{expert}.down_proj.weight"),
}
EXPERTS_IN_MEMORY: Names = {
    "mlp.router.weight": (SAME, "mlp.gate.weight"),
    "mlp.experts.up.weight": (EXPERTS_HALVES, "mlp.experts.gate_up_proj"),
    "mlp.experts.down.weight": (SAME, "mlp.experts.down_proj"),
}
SHARED_EXPERT: Names = {
    "mlp.shared.up.weight": (STACKED, "mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    "mlp.shared.down.weight": (SAME, "mlp.shared_expert.down_proj.weight"),
    "mlp.shared_gate.weight": (SAME, "mlp.shared_expert_gate.weight"),
}
SHARED_EXPERTS_LAYERS: Names = {
    "mlp.shared.up.weight": (STACKED, "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    "mlp.shared.down.weight": (SAME, "mlp.shared_experts.down_proj.weight"),
}
LATENT_ATTENTION: Names = {
    **same_forms(
        attention__query_down__weight="self_attn.q_a_proj.weight",
        attention__query_norm__weight="self_attn.q_a_layernorm.weight",
        attention__kv_down__weight="self_attn.kv_a_proj_with_mqa.weight",
        attention__kv_norm__weight="self_attn.kv_a_layernorm.weight",
        attention__proj__weight="self_attn.o_proj.weight",
    ),
    "attention.query.weight": (HEADS, "self_attn.q_proj.weight"),
    "attention.query_up.weight": (HEADS, "self_attn.q_b_proj.weight"),
    "attention.kv_up.weight": (HEADS, "self_attn.kv_b_proj.weight"),
}
# Modules of multi-token prediction, behind the last layer
PREDICTIONS = same_forms(
    mtp__token_norm__weight="enorm.weight",
    mtp__state_norm__weight="hnorm.weight",
    mtp__projection__weight="eh_proj.weight",
    mtp__norm__weight="shared_head.norm.weight",
)
JOINED_MLP: Names = {
    "mlp.up.weight": (HALVES, "mlp.gate_up_proj.weight"),
    "mlp.down.weight": (SAME, "mlp.down_proj.weight"),
}
GLM: Names = ATTENTION | JOINED_MLP
