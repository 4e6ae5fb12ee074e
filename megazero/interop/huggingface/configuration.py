"""Read a config.json of Hugging Face as a model of ours; refuse unsupported options by key and value.

Note [Every key is read]
transformers' class parses config.json, and the family's row in MODELS converts the result; the attributes that the row
reads are recorded. A key of the file is *read* if the row reads its attribute, or if an attribute that the row reads
is another without the key, or with 1 as its number or its factor: `rope_theta` and `rope_scaling` of old files become
`rope_parameters`, and may have the default values. Then the file is parsed again with the keys that are read alone. An
attribute that differs between both is one that the file sets away from its default, and that nothing of ours computes.
No computation depends on those of HARMLESS. `trial` finds which of the others transformers' model ignores, by
small copies of it with and without them: they are ignored, and reported, as are IGNORED and `HuggingFaceModel.ignored`.
The rest is refused. So a row needs no list of the keys that it does not support.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megazero.data.tokenizer import hub_hint
from megazero.families import MODELS
from megazero.families.parts.model_types import HuggingFaceModel
from megazero.families.parts.weight_conversions import usual_head_dim
from megazero.files import explain, read_json_object
from megazero.flags.config import ModelConfig
from megazero.interop.huggingface.trial import ignored_keys
from megazero.optional import load_optional
from megazero.units import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CONFIG = "config.json"

# Keys on which no loss of a text depends: of the file, of heads other than the language model's, of generation.
HARMLESS = frozenset(
    """
    _name_or_path architectures dtype torch_dtype transformers_version model_type name_or_path is_llama_config
    transformers.js_config tokenizer_class prefix task_specific_params finetuning_task
    use_cache cache_implementation bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    return_dict output_hidden_states output_attentions torchscript gradient_checkpointing chunk_size_feed_forward
    id2label label2id num_labels problem_type classifier_dropout classifier_dropout_prob hidden_dropout_prob
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    do_sample early_stopping max_length min_length max_new_tokens num_beams num_return_sequences temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size diversity_penalty num_beam_groups bad_words_ids
    encoder_no_repeat_ngram_size exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    forced_bos_token_id forced_eos_token_id remove_invalid_values return_dict_in_generate output_scores
    pretraining_tp n_ctx max_window_layers _sliding_window_pattern no_rope_layer_interval
    attn_implementation _attn_implementation original_max_position_embeddings
    output_router_logits router_aux_loss_coef
    """.split()
)  # pretraining_tp cuts products in parts; n_ctx repeats n_positions; the next three act through layer_types or
# no_rope_layers alone, and original_max_position_embeddings through rope_parameters. The last two ask for a loss that
# balances experts, which is a choice of training: --moe-aux-loss-coeff, of a loss that differs (docs/experts.md).
ADD = "it changes the model; docs/extending.md shows how to add a part of a model"
# Keys that ask for other weights, or layers that differ -> the way out.
NEVER = {
    "quantization_config": "load a folder with the dequantised weights in bf16 (of MXFP4: that of transformers' "
    "from_pretrained with Mxfp4Config(dequantize=True), and then save_pretrained)",
    "per_layer_config": ADD,
}
# Code of a model's own: from_pretrained runs it with trust_remote_code alone.
IGNORED = ("auto_map",)
# Keys that no class reads any more, with the values that ask for nothing. Gemma's activation is hidden_activation.
WITHOUT_EFFECT: Mapping[str, Any] = {
    **{"rope_interleaved": False, "rotary": True, "tie_encoder_decoder": False, "use_mrope": False},
    "hidden_act": "gelu_pytorch_tanh",
}

# Keys of positions that classes convert, and have no attribute for.
ROPE_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"}
NEAR = 0.9  # similarity, of at most 1, of a misspelled key

PREDICTIONS_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")

# Types of published files that transformers does not know -> the one that it computes for them.
SAME_TYPE = {"kimi_k2": "deepseek_v3"}
# Models that are refused -> the part that no layer here computes.
LACKING = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "zamba", "zamba2"), "state-space layers"),
    **dict.fromkeys(("jamba", "bamba", "falcon_h1", "nemotron_h", "granitemoehybrid"), "state-space layers"),
    **dict.fromkeys(("bert", "roberta", "modernbert"), "attention to later tokens"),
    **dict.fromkeys(("t5", "mt5", "bart"), "an encoder"),
    **dict.fromkeys(("bloom", "mpt"), "ALiBi positions"),
    **dict.fromkeys(("kimi_linear", "minimax", "bailing_hybrid", "olmo_hybrid"), "linear attention"),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "rwkv"), "linear attention"),
    **{"nemotron": "LayerNorms that add 1 to their weights", "nanochat": "norms without weights"},
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "attention to chosen tokens"),
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), "embeddings in each layer"),
    **dict.fromkeys(("cohere", "cohere2"), "LayerNorm without biases"),
    **{"apertus": "xIELU in its MLP", "olmo": "norms without weights", "opt": "learned positions with an offset"},
    **{"dbrx": "clipped queries and keys", "diffllama": "differential attention", "jetmoe": "experts in attention"},
    **{"hunyuan_v1_dense": "norms of queries behind the rotation", "longcat_flash": "experts without weights"},
    **{"lfm2": "convolutions", "llama4_text": "attention in chunks"},
    **{"minicpm3": "LongRoPE positions", "recurrent_gemma": "recurrent layers"},
}


class _Recorded:
    """A configuration of theirs that records the names of the attributes that are read."""

    def __init__(self, config: PreTrainedConfig, read: set[str]) -> None:
        self._config, self._read = config, read

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self._config, name)


def config_file(path: Path) -> Path:
    """Return config.json for the folder that holds it, and any other path as it is."""
    return path / CONFIG if path.is_dir() else path


class ReadConfig(NamedTuple):
    """A config.json, read.

    Attributes:
        notes: lines that report keys without effect.
    """

    architecture: HuggingFaceModel
    model: ModelConfig
    notes: list[str]


def read_config(path: Path, flag: str = "--from hf") -> ReadConfig:
    """Return the model that a config.json describes.

    Args:
        path: the file, or its folder.
        flag: names `path` in messages.

    Raises:
        ValueError: it is missing, or asks for another architecture or computation than ours.
    """
    where, file = f"{flag} {path}", config_file(path)
    if not path.exists():
        raise ValueError(f"{where}: no such file or folder{hub_hint(str(path))}")
    if not file.is_file():
        raise ValueError(f"{where}: it has no {CONFIG}; name the folder of a Hugging Face model")
    try:
        keys = read_json_object(file)
    except OSError as error:
        raise ValueError(f"{where}: {explain(error)}") from None
    architecture, classes = architecture_of(keys, where), load_optional("transformers", where).CONFIG_MAPPING
    try:
        model, tried = _converted(architecture, classes[architecture.model_type], keys)
    except Exception as error:  # transformers' checks raise classes of several libraries
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{where}: {reason}") from (None if isinstance(error, ValueError) else error)
    ignored = [key for key in (*IGNORED, *architecture.ignored) if keys.get(key)]
    notes = [_ignored_note(file, key, keys[key], architecture) for key in ignored]
    if tried:
        notes.append(
            f"{file} has {_listed(tried)}: transformers' {architecture.model_class} ignores such keys (small models "
            "with and without them are equal), and so does this version"
        )
    return ReadConfig(architecture, model, notes)


def _ignored_note(file: Path, key: str, value: Any, architecture: HuggingFaceModel) -> str:
    if key in PREDICTIONS_KEYS and architecture.predicts:
        return f"{file} has {key} {_shown(value)}: modules that predict later tokens, which --mtp-num-layers N trains"
    ignored = f"transformers' {architecture.model_class} ignores it, and so does this version"
    return f"{file} has {key} {_shown(value)}; {ignored}"


def architecture_of(keys: Mapping[str, Any], where: str) -> HuggingFaceModel:
    """Return the architecture that a config.json names. ValueError if there is none."""
    model_type = str(keys.get("model_type"))
    model_type = SAME_TYPE.get(model_type, model_type)
    if model_type not in MODELS:
        raise ValueError(f"{where}: {_unknown(model_type, keys)}")
    return MODELS[model_type]


def _unknown(model_type: str, keys: Mapping[str, Any]) -> str:
    """Return the reason for which a model is refused, and the way out."""
    text = keys.get("text_config")
    if isinstance(text, dict) and text.get("model_type") in MODELS:
        return (
            f"its model_type is {model_type[:80]!r}, which reads more than text; its text_config is a "
            f"{text['model_type']}, which --hf-config takes as a {CONFIG} of its own"
        )
    lacking = f", which has {LACKING[model_type]}" if model_type in LACKING else ""
    return (
        f"its model_type is {model_type[:80]!r}{lacking}; known are {', '.join(MODELS)}, and docs/extending.md "
        "shows how to add an architecture"
    )


def _converted(
    architecture: HuggingFaceModel, parser: type[PreTrainedConfig], keys: Mapping[str, Any]
) -> tuple[ModelConfig, dict[str, Any]]:
    """Return the model of a config.json, and its keys that were tried and have no effect.

    Raises:
        ValueError: it asks for a computation that is not ours.
    """
    for key in filter(keys.get, NEVER):
        _refuse({key: keys[key]}, NEVER[key])
    keys = {key: value for key, value in keys.items() if key not in (*IGNORED, *architecture.ignored)}
    whole, read = _parsed(parser, keys), set[str]()
    model = ModelConfig(**architecture.from_config(_Recorded(whole, read)))  # type: ignore[arg-type]
    return model, _unread(architecture.model_class, keys, whole, read)


def _parsed(parser: type[PreTrainedConfig], keys: Mapping[str, Any]) -> PreTrainedConfig:
    """Parse keys. transformers writes into the values that it is given (rope_theta into rope_scaling): hence a copy.

    Its models begin with `standardize_rope_params`, which writes a key `original_max_position_embeddings` outside of
    rope_parameters over that inside.
    """
    try:
        found = parser.from_dict(copy.deepcopy(dict(keys)))
        if getattr(found, "rope_parameters", None):
            found.standardize_rope_params()
    except (AttributeError, LookupError, TypeError) as error:  # no check of theirs, but a fault
        from transformers import __version__ as version

        raise ValueError(f"transformers {version} cannot read it: {type(error).__name__}: {error}") from error
    return found


def _unread(model_class: str, keys: Mapping[str, Any], whole: PreTrainedConfig, read: set[str]) -> dict[str, Any]:
    """Return the keys that transformers' model ignores, although they change an attribute that is not harmless.

    Others that are not read are refused. See Note [Every key is read].
    """
    parser = type(whole)

    def differing(other: PreTrainedConfig, names: set[str]) -> list[str]:
        return [name for name in sorted(names) if getattr(whole, name, None) != getattr(other, name, None)]

    def parsed(left: set[str], **others: Any) -> PreTrainedConfig:
        return _parsed(parser, {key: value for key, value in keys.items() if key not in left} | others)

    def is_read(key: str) -> bool:
        other = _with_other_numbers(keys[key])
        others: list[dict[str, Any]] = [{}] if other is None else [{}, {key: other}]
        return any(differing(parsed({key}, **given), read) for given in others)

    asked = {key for key, value in keys.items() if key not in HARMLESS and not _without_effect(key, value, whole)}
    unread = {key for key in asked - read if not is_read(key)}
    known = {name for name in vars(whole) if not name.startswith("_")} - HARMLESS - read
    faults = dict.fromkeys(differing(parsed(unread), known))
    faults |= dict.fromkeys(sorted(unread - known))
    if not faults:
        return {}
    plain = vars(parser()).keys() | ROPE_KEYS
    for name in faults.keys() - plain:
        if near := did_you_mean(name, plain, NEAR):
            _refuse({name: keys.get(name)}, f"{near} transformers ignores a key that it does not know")
    values = {name: keys.get(name, getattr(whole, name, None)) for name in faults}
    try:
        ignored = ignored_keys(model_class, whole, parsed, faults)
    except ValueError as error:
        _refuse(values, str(error))
    _refuse({name: value for name, value in values.items() if name not in ignored}, ADD)
    return values


def _refuse(asked: Mapping[str, Any], way_out: str) -> None:
    if asked:
        raise ValueError(f"{CONFIG} has {_listed(asked)}; this version does not compute it: {way_out}")


def _listed(asked: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in asked.items())


def _with_other_numbers(value: Any) -> Any:
    """Return another number for a number, and a dict with another factor for one with a factor; else None."""
    if isinstance(value, dict) and "factor" in value:
        return value | {"factor": _with_other_numbers(value["factor"])}
    return type(value)(2 if value == 1 else 1) if type(value) in (int, float) else None


def _without_effect(key: str, value: Any, whole: PreTrainedConfig) -> bool:
    """Return whether a key asks for nothing: null, the usual head_dim, or one that no class has now, switched off."""
    if key == "head_dim" and value == usual_head_dim(whole) and not hasattr(whole, "kv_lora_rank"):
        return True
    return value is None or (key in WITHOUT_EFFECT and WITHOUT_EFFECT[key] == value)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
