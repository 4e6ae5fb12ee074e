"""Find keys of a config.json that transformers' model ignores: compare small copies of it with and without them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LAYERS, TOKENS, VOCAB = 8, 24, 61
MOST_PARAMETERS = 2 * 10**8  # of a small copy: a larger one is not tried
MOST = {  # attribute -> its largest value in a small copy, whose heads are as wide as the model's
    **{"num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_window_layers": LAYERS // 2, "first_k_dense_replace": 1},
    **dict.fromkeys(("intermediate_size", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 16),
    **{"num_experts_per_tok": 4, "q_lora_rank": 32, "kv_lora_rank": 32},
}
BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")


def ignored_keys(model_class: str, whole: PreTrainedConfig, without: Any, keys: Iterable[str]) -> set[str]:
    """Return those of `keys` that a model of transformers ignores.

    A model of `whole` does not read their attributes while it is built, trained and evaluated, and one without the keys
    has the same weights and logits.

    Args:
        model_class: of transformers.
        whole: configuration with the keys.
        without: returns the configuration without some keys.

    Raises:
        ValueError: a small copy cannot be built and run.
    """
    read = set[str]()
    first = _outputs(model_class, _recording(_small(whole), read))
    found = {key for key in keys if key not in read}
    if first is None or not found:
        return set()
    second = _outputs(model_class, _small(without(found)))
    same = (
        second is not None and first.keys() == second.keys() and all(map(torch.equal, first.values(), second.values()))
    )
    return found if same else set()


def _small(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a small copy of a configuration."""
    small = copy.deepcopy(config)
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    few = min(groups, 2)
    sizes = {"num_attention_heads": few if groups == heads else 2 * few, "num_key_value_heads": few}
    sizes |= {"hidden_size": sizes["num_attention_heads"] * (config.hidden_size // heads), "pad_token_id": None}
    sizes |= {name: min(most, value) for name, most in MOST.items() if (value := getattr(config, name, None))}
    if getattr(config, "head_dim", 1) is None:  # Ministral's model has no value for it
        sizes["head_dim"] = config.hidden_size // heads
    for name, size in sizes.items():
        if hasattr(config, name):
            setattr(small, name, size)
    for name in BY_LAYER:
        if (kinds := getattr(config, name, None)) and len(kinds) > LAYERS:
            setattr(small, name, [*kinds[: LAYERS // 2], *kinds[-LAYERS // 2 :]])
    return small


def _recording(config: PreTrainedConfig, read: set[str]) -> PreTrainedConfig:
    """Make a configuration add the names of its attributes that are read to `read`."""

    def get(self: Any, name: str) -> Any:
        read.add(name)
        return super(recorded, self).__getattribute__(name)

    recorded: Any = type(type(config).__name__, (type(config),), {"__getattribute__": get})
    config.__class__ = recorded
    return config


def _outputs(model_class: str, config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Return weights and logits of the model of a small configuration. ValueError if it cannot be built and run."""
    import transformers

    model_of = getattr(transformers, model_class)
    ids = torch.arange(2 * TOKENS).view(2, TOKENS)[:, : config.max_position_embeddings] % config.vocab_size
    try:
        with torch.device("meta"):
            parameters = sum(p.numel() for p in model_of(config).parameters())
        if parameters > MOST_PARAMETERS:
            raise ValueError(f"it has {parameters} parameters")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = model_of(config)
            model.train()(input_ids=ids, labels=ids)
            return dict(model.state_dict()) | {"logits": model.eval()(input_ids=ids).logits}
    except Exception as error:  # of any kind: the code is transformers', and the keys are anybody's
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"a small {model_class} with it cannot be run: {reason}") from None
