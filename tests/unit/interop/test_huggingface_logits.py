"""Keys of config.json whose reading is easy to get wrong: our logits are those of a small model of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.families.parts.model_types import canonical
from megazero.interop.huggingface.configuration import read_config
from megazero.interop.huggingface.export import export
from megazero.interop.huggingface.families import family_of
from megazero.interop.huggingface.importing import import_model
from tests.helpers.rounding import model_tolerance
from tests.helpers.table import for_each
from tests.unit.interop.test_huggingface_config import written
from tests.unit.interop.test_published_configs import loaded, logits_of_ours, logits_of_theirs, weights_of

IDS = torch.randint(0, 61, (3, 20), generator=torch.Generator().manual_seed(1))
YARN = {"rope_type": "yarn", "rope_theta": 10.0, "factor": 2.5, "original_max_position_embeddings": 8}
LLAMA_3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}


def by_kind(full: dict[str, Any], **others: Any) -> dict[str, Any]:
    layers = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}
    return layers | {"rope_parameters": {"full_attention": full, "sliding_attention": DEFAULT, **others}}


def assert_same_logits(model_type: str, keys: dict[str, Any], folder: Path) -> None:
    written(folder, model_type, pad_token_id=None, **keys)
    weights_of(folder)
    wanted, engine = logits_of_theirs(folder, IDS), loaded(folder, "--seq-length", 20)
    model = read_config(folder).model
    family = family_of(model, model_type)
    family.to_config(model, None).save_pretrained(folder / "exported")
    assert family.model_type == model_type and canonical(read_config(folder / "exported").model) == canonical(model)
    error = (logits_of_ours(engine, IDS) - wanted).abs().max() / wanted.abs().max()
    assert error < model_tolerance(engine.config.model, torch.float32), float(error)


@for_each(
    ("model_type", "keys"),
    [
        ("llama", {"rope_parameters": YARN | {"factor": None}}),
        ("qwen3", {"rope_parameters": YARN | {"truncate": None}, "head_dim": 32}),
        ("llama", {"rope_parameters": YARN | dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"))}),
        ("llama", {"rope_parameters": YARN | {"beta_fast": 0, "mscale": 0.7, "mscale_all_dim": None}}),
        ("mistral", {"rope_parameters": YARN, "original_max_position_embeddings": 16}),
        ("llama", {"rope_parameters": LLAMA_3, "original_max_position_embeddings": 12}),
        ("llama", {"rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("olmo3", by_kind(YARN | {"factor": None})),
        ("glm4", {"rope_parameters": None, "partial_rotary_factor": None}),  # the class's is 0.5
    ],
)
def test_null_and_repeated_rope_keys(model_type: str, keys: dict[str, Any], tmp_path: Path) -> None:
    assert_same_logits(model_type, keys, tmp_path)


def test_a_key_next_to_the_rope_of_kinds_of_layers(tmp_path: Path) -> None:
    """The class of some versions, such as 5.17, cannot read the file: neither do we."""
    from transformers import AutoConfig

    keys = by_kind(YARN, truncate=False)
    written(tmp_path, "olmo3", pad_token_id=None, **keys)
    try:
        AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    except AttributeError:
        with pytest.raises(ValueError, match=r"^--from hf .*: transformers 5\.\S+ cannot read it: AttributeError: "):
            read_config(tmp_path)
    else:
        assert_same_logits("olmo3", keys, tmp_path)


@for_each("model_type", "qwen2 qwen2_moe olmo2 olmo3 phi3 smollm3 starcoder2 granite".split())
def test_a_width_of_heads_that_only_the_model_reads(model_type: str, tmp_path: Path) -> None:
    """Classes of these families have no head_dim, and their models take it from the file."""
    assert_same_logits(model_type, {"head_dim": 20}, tmp_path)


@for_each(
    ("model_type", "keys"),
    [("mixtral", {}), ("qwen3_moe", {"norm_topk_prob": True}), ("olmoe", {"norm_topk_prob": True})],
)
def test_one_expert_per_token_whose_weight_is_one(model_type: str, keys: dict[str, Any], tmp_path: Path) -> None:
    assert_same_logits(model_type, keys | {"num_experts_per_tok": 1}, tmp_path)


KINDS_OF_MLP = ["dense", "sparse", "dense"]


@for_each(
    ("model_type", "keys"),
    [
        ("glm4_moe_lite", {"num_hidden_layers": 3, "mlp_layer_types": KINDS_OF_MLP}),
        ("glm4_moe_lite", {}),  # DeepSeek-V3's model too
        ("deepseek_v3", {}),
        ("ministral", {"head_dim": 8}),  # Mistral's too
        ("helium", {}),
        ("glm", {"attention_bias": False, "partial_rotary_factor": 1.0, "head_dim": 8}),  # Helium's too
        ("qwen2", {}),
    ],
)
def test_a_folder_comes_back_as_its_class(model_type: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """After an import and an export, and with its own logits."""
    from transformers import AutoModelForCausalLM

    written(tmp_path, model_type, pad_token_id=None, **keys)
    weights_of(tmp_path)
    wanted, model = logits_of_theirs(tmp_path, IDS), read_config(tmp_path).model
    import_model(tmp_path, tmp_path / "run")
    export(tmp_path / "run" / "iter_0000000", tmp_path / "exported", None)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", attn_implementation="eager").eval()
    assert back.config.model_type == model_type
    with torch.no_grad():
        error = (back(IDS).logits - wanted).abs().max() / wanted.abs().max()
    assert error < model_tolerance(model, torch.float32)


UNGATED, GATED = ("gelu", "gelu_new", "relu", "relu2"), ("silu", "swish", "gelu_pytorch_tanh")


@for_each(
    ("model_type", "key", "name"),
    [
        *(("gpt2", "activation_function", name) for name in UNGATED),
        ("gptj", "activation_function", "relu"),
        *(("starcoder2", "hidden_act", name) for name in UNGATED[:2]),
        ("gpt_neox", "hidden_act", "gelu_fast"),  # of GPT-NeoX-20B
        *(("llama", "hidden_act", name) for name in GATED),
        ("gemma2", "hidden_activation", "swish"),
        *((kind, "hidden_act", GATED[2]) for kind in ("mixtral", "deepseek_v3", "glm4", "phi3")),
    ],
)
def test_activations(model_type: str, key: str, name: str, tmp_path: Path) -> None:
    assert_same_logits(model_type, {key: name}, tmp_path)


def test_gelu_of_gemma(tmp_path: Path) -> None:
    """Its class takes gelu as the tanh approximation. That of some versions, such as 5.17, does not: refused there."""
    from transformers import GemmaConfig

    if GemmaConfig(hidden_act="gelu").hidden_act == "gelu":
        written(tmp_path, "gemma", pad_token_id=None, hidden_act="gelu")
        with pytest.raises(ValueError, match=r"has hidden_act gelu; this version computes .*gelu_pytorch_tanh"):
            read_config(tmp_path)
    else:
        assert_same_logits("gemma", {"hidden_act": "gelu"}, tmp_path)


@for_each(
    ("model_type", "keys", "words"),
    [
        *(
            ("llama", {"rope_parameters": rope | {key: None}}, key)
            for rope, missing in (
                (YARN, ("rope_type", "rope_theta")),
                (LLAMA_3, ("factor",)),
                (DEFAULT | {"rope_type": "linear", "factor": 2.0}, ("factor", "partial_rotary_factor")),
            )
            for key in missing
        ),
        ("llama", {"rope_theta": None, "rope_parameters": None}, "rope_theta null in rope_parameters"),
        ("llama", {"rope_parameters": YARN, "original_max_position_embeddings": None}, "original_max_position_embed"),
        ("gpt_neox", {"rope_parameters": None, "rotary_pct": None}, "partial_rotary_factor null in rope_parameters"),
        ("olmo3", by_kind(YARN | {"truncate": False}), "truncate false in rope_parameters of a kind of layers"),
        ("llama", {"attention_dropout": None}, "attention_dropout null, for which LlamaForCausalLM has no value"),
    ],
)
def test_nulls_that_stop_transformers_are_refused(
    model_type: str, keys: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        read_config(written(tmp_path, model_type, **keys))
