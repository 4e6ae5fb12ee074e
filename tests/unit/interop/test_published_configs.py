"""Published config.json files, as transformers 4 wrote them on the hub: read, and trained from their weights."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megazero.checkpoint.shards import LocalShard
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.layers.context import MicroBatchInfo
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.step.engine import Engine
from megazero.flags.cli import read
from megazero.flags.resolve import resolve
from megazero.generation.model import hidden_states
from megazero.interop.huggingface.configuration import SAME_TYPE, read_config
from megazero.interop.huggingface.export import plan_shards, shapes_of
from megazero.interop.huggingface.families import family_of
from megazero.interop.huggingface.importing import import_model
from megazero.interop.huggingface.model_flags import find_model
from megazero.interop.huggingface.weight_files import open_weights
from megazero.run.run_state import RunState
from tests.helpers.rounding import model_tolerance

# Written by hand from the models' cards. SmolLM3, OLMo 3 and gpt-oss have fewer layers, since their files list each.
PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "helpers/published.json").read_text())
LENGTH, LONGEST, VOCAB, HEADS = 17, 24, 131, 4
SMALL = {  # sizes of a small copy, under each name that a file can have. Its other keys, and their form, are kept
    **dict.fromkeys(("hidden_size", "n_embd"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head"), HEADS),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), LONGEST),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1),
    **dict.fromkeys(("num_experts", "num_local_experts"), 6),
    **{"vocab_size": VOCAB, "num_experts_per_tok": 3, "intermediate_size": 44, "moe_intermediate_size": 28},
    **{"shared_expert_intermediate_size": 20, "head_dim": 16, "query_pre_attn_scalar": 16, "rotary_dim": 8},
    **{"n_routed_experts": 16, "kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6},
    **{"v_head_dim": 12, "sliding_window": 6, "sliding_window_pattern": 3, "max_window_layers": 4},
    "original_max_position_embeddings": 8,
}


def small(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys with small sizes, also inside `rope_scaling`."""
    groups = keys.get("num_key_value_heads", 0) * HEADS // keys.get("num_attention_heads", 1) or 1
    sizes = SMALL | {"num_key_value_heads": groups}
    found = {key: small(value) if isinstance(value, dict) else value for key, value in keys.items()}
    found |= {key: size for key, size in sizes.items() if keys.get(key) is not None}
    return found | {key: value[:4] for key, value in keys.items() if key in ("layer_types", "no_rope_layers")}


def write(folder: Path, keys: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def as_theirs(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys with a model_type that transformers knows."""
    return keys | {"model_type": SAME_TYPE.get(keys["model_type"], keys["model_type"])}


def weights_of(folder: Path) -> None:
    """Write random weights for a folder's config.json, and leave that as it is."""
    from transformers import AutoConfig, AutoModelForCausalLM

    text = (folder / "config.json").read_text()
    write(folder, as_theirs(json.loads(text)))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    model.float().save_pretrained(folder)
    (folder / "config.json").write_text(text)


def logits_of_theirs(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    options = {"local_files_only": True, "dtype": torch.float32, "attn_implementation": "eager"}
    text = (folder / "config.json").read_text()
    write(folder, as_theirs(json.loads(text)))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, **options).eval()(ids).logits
    (folder / "config.json").write_text(text)
    return logits


def loaded(folder: Path, *flags: object) -> Engine:
    """Return the engine of `--load folder`, with its weights."""
    flags = ("--load", folder, "--micro-batch-size", 3, *flags)
    config, _ = resolve(read([str(flag) for flag in flags], find_model=find_model).config, 1, 0, declare)
    engine = Engine(config, Mesh.build(Layout(), 0, torch.device("cpu")))
    shards = {}
    for name, shape in shapes_of(config.model).items():
        size = math.prod(shape)
        shards[name] = LocalShard(shape, (0,) * len(shape), shape, 0, size, torch.zeros(size))
    open_weights(folder, config.model).fill({f"model.{name}": shard for name, shard in shards.items()})
    for weight in (weight for unit in engine.model.units.values() for weight in unit):
        shard = shards[weight.spec.name]
        weight.data[tuple(map(slice, shard.global_shape))] = shard.data.view(shard.global_shape)
    return engine


def logits_of_ours(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    model = engine.model
    with torch.no_grad():
        tokens = MicroBatchInfo.of(ids, tuple(range(len(ids))), model.stream, training=False)
        return model.head.whole_logits(hidden_states(model, ids, tokens)).view(*ids.shape, -1)


@pytest.mark.second
def test_published_files_are_the_models_of_transformers(tmp_path: Path) -> None:
    """--hf-config takes each as it is; --load of a small copy has transformers' logits.

    An export has the copy's context, and the tensors of save_pretrained.
    """
    ids = torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    faults = []
    for number, (name, keys) in enumerate(PUBLISHED.items()):
        file = write(tmp_path / f"real{number}", keys) / "config.json"
        model = read(["--hf-config", str(file), "--seq-length", "512"], find_model=find_model).config.model
        longest = keys.get("max_position_embeddings") or keys["n_positions"]
        learned = model.learned_positions
        assert (model.vocab_size, model.max_positions) == (keys["vocab_size"], 512 if learned else longest), name

        folder = write(tmp_path / f"small{number}", small(keys))
        weights_of(folder)
        wanted, engine = logits_of_theirs(folder, ids), loaded(folder, *(() if learned else ("--seq-length", LENGTH)))
        error = (logits_of_ours(engine, ids) - wanted).abs().max() / wanted.abs().max()
        if not error < model_tolerance(engine.config.model, torch.float32):
            faults.append((name, float(error)))
        family = family_of(engine.config.model, as_theirs(keys)["model_type"])
        exported = family.to_config(engine.config.model, None)
        assert exported.model_type == as_theirs(keys)["model_type"], name
        assert exported.max_position_embeddings == LONGEST, name
        (shard,) = plan_shards(family, engine.config.model, torch.float32, 1 << 30)
        saved = {key: value.shape for key, value in load_file(folder / "model.safetensors").items()}
        assert {key: shape for key, _, shape in shard.announced} == saved, name
    assert not faults


def test_files_of_an_export_are_as_large_as_their_tensors(tmp_path: Path) -> None:
    """Also the last, whose biases of experts are in fp32."""
    model = read_config(write(tmp_path / "small", small(PUBLISHED["deepseek-v3-base, in bf16"]))).model
    shards = plan_shards(family_of(model, "deepseek_v3"), model, torch.bfloat16, 1 << 16)
    sizes = [sum(dtype.itemsize * shape.numel() for _, dtype, shape in shard.announced) for shard in shards]
    assert len(sizes) > 1 and shards[-1].announced[-1][1] == torch.float32
    assert [shard.num_bytes for shard in shards] == sizes


def test_a_tied_model_with_a_head_of_its_own_is_not_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers warns and does not tie them. A head with the same values is tied."""
    folder = write(tmp_path / "theirs", small(PUBLISHED["llama-3.2-1b"]))
    weights_of(folder)
    weights = load_file(folder / "model.safetensors")
    ids = torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    for head, tied in ((weights["model.embed_tokens.weight"].clone(), True), (torch.randn(VOCAB, 64), False)):
        save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
        engine, wanted = loaded(folder), logits_of_theirs(folder, ids)
        assert engine.config.model.untie_embeddings == (not tied)
        error = (logits_of_ours(engine, ids) - wanted).abs().max() / wanted.abs().max()
        assert error < model_tolerance(engine.config.model, torch.float32)
    words = "lm_head.weight differs from the token table"
    (_, note) = read(["--load", str(folder)], find_model=find_model).notes
    assert f"--load {folder}: {words}, although tie_word_embeddings is true in config.json; they are not tied" in note
    with pytest.raises(ValueError, match=f"{words}, and .* leave out --no-untie-embeddings"):
        loaded(folder, "--no-untie-embeddings")

    with caplog.at_level("WARNING", "megazero"):
        import_model(folder, tmp_path / "run")
    assert words in caplog.text
    model = RunState.read_alone(tmp_path / "run" / "iter_0000000").typed_model(tmp_path)
    assert model.untie_embeddings and model.max_position_embeddings == LONGEST
