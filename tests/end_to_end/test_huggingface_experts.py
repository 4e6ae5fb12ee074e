"""Experts in files of Hugging Face: both layouts are read, one is written, and a rank reads its own experts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megazero.checkpoint import streaming
from megazero.checkpoint.shards import LocalShard
from megazero.families import MODELS
from megazero.interop.huggingface import importing
from megazero.interop.huggingface.configuration import read_config
from megazero.interop.huggingface.weight_files import open_weights
from tests.end_to_end.test_huggingface import export, import_
from tests.reference_run import read_checkpoint

SIZES = {
    **{"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 61},
    **{"max_position_embeddings": 16, "intermediate_size": 40, "num_experts": 5, "num_experts_per_tok": 2},
}
NARROW = {"moe_intermediate_size": 28, "decoder_sparse_step": 2, "norm_topk_prob": True}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": NARROW | {"shared_expert_intermediate_size": 20},
    "qwen3_moe": NARROW | {"head_dim": 8},
    "olmoe": {},
}
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """saved(model type, apart) -> a folder that transformers wrote: experts apart as by default, or as in memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    root = tmp_path_factory.mktemp("saved")

    def folder(model_type: str, apart: bool) -> Path:
        path = root / f"{model_type}-{apart}"
        if not path.exists():
            torch.manual_seed(1)
            config = AutoConfig.for_model(model_type, **SIZES, **KINDS[model_type])
            model = AutoModelForCausalLM.from_config(config)
            model.save_pretrained(path, save_original_format=apart)
        return path

    return folder


def layers(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for name, x in load_file(folder / WEIGHTS).items() if ".experts." in name or "shared" in name}


def damaged(folder: Path, path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Copy a folder with its tensors changed."""
    path.mkdir()
    (path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS, {"format": "pt"})
    return path


@pytest.mark.parametrize("model_type", KINDS)
def test_both_layouts_are_read_and_the_one_of_save_pretrained_is_written(
    model_type: str, saved, tmp_path: Path
) -> None:
    apart, together = saved(model_type, True), saved(model_type, False)
    names = layers(apart).keys(), layers(together).keys()
    assert len(names[0]) > len(names[1]) and any(name.endswith("gate_up_proj") for name in names[1])
    first, second = (read_checkpoint(import_(folder, tmp_path / folder.name) / "iter_0000000")
                     for folder in (apart, together))  # fmt: skip
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    written = load_file(export(tmp_path / together.name, tmp_path / "export") / WEIGHTS)
    wanted = load_file(apart / WEIGHTS)
    assert written.keys() == wanted.keys() and all(torch.equal(written[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("experts", [2, 0.5])
def test_bands_of_experts_are_the_experts(
    experts: float, apart: bool, saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts at a time, of which a chunk holds one or half of one; and files that begin in the middle of a layer."""
    size = 4 * 2 * 40 * 24
    monkeypatch.setattr(streaming, "CHUNK_BYTES", size if experts > 1 else size // 2)
    monkeypatch.setattr(streaming, "BAND_BYTES", int(experts * size))
    bands = [band.stop - band.start for band in streaming.bands((5, 2, 40, 24))]
    assert bands == ([2, 2, 1] if experts > 1 else [1] * 5)
    read: list[int] = []
    original = importing.read_rows

    def recording(*args: Any, name: str, asked: slice, **options: Any) -> Any:
        if name == "blocks.1.mlp.experts.up.weight":
            read.append(asked.stop - asked.start)
        return original(*args, name=name, asked=asked, **options)

    monkeypatch.setattr(importing, "read_rows", recording)
    folder = import_(saved("mixtral", apart), tmp_path / "imported")
    assert read == bands
    found = export(folder, tmp_path / "export", max_shard_size=1e-5)
    assert len(list(found.glob("*.safetensors"))) > 10
    parts = {name: x for file in found.glob("*.safetensors") for name, x in load_file(file).items()}
    wanted = load_file(saved("mixtral", True) / WEIGHTS)
    assert parts.keys() == wanted.keys() and all(torch.equal(parts[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("apart", [True, False])
def test_a_rank_reads_the_tensors_of_its_own_experts(
    apart: bool, saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shard begins within expert 3, in one half of the experts' width, and ends with expert 4."""
    folder = saved("qwen3_moe", apart)
    model = read_config(folder).model
    fill, read = open_weights(folder, model).fill, []
    original = importing.Source.read
    monkeypatch.setattr(importing.Source, "read", lambda *args: (read.append((args[1], *args[2:])), original(*args))[1])
    shape, data = (2, 2, 14, 24), torch.zeros(2 * 14 * 24 + 5)
    name = "blocks.1.mlp.experts.up.weight"
    shard = LocalShard((5, 2, 28, 24), (3, 0, 14, 0), shape, 2 * 14 * 24 - 5, 2 * 2 * 14 * 24, data)
    fill({f"model.{name}": shard})
    row = MODELS["qwen3_moe"]
    whole = row.join(load_file(folder / WEIGHTS), [name], model)[name]
    assert torch.equal(data, whole[3:, :, 14:].flatten()[2 * 14 * 24 - 5 :])
    layer = "model.layers.1.mlp.experts."
    wanted = [f"{layer}{expert}.{part}_proj.weight" for expert in (3, 4) for part in ("gate", "up")]
    rows = slice(3, 5)
    assert [each[0] for each in read] == wanted if apart else read == [(f"{layer}gate_up_proj", rows)]


@pytest.mark.parametrize(
    ("apart", "change", "words"),
    [
        (
            True,
            lambda x: x.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
            "missing model.layers.1.mlp.experts.3.up_proj.weight, unknown none",
        ),
        (
            True,
            lambda x: x.update({"model.layers.1.mlp.experts.5.up_proj.weight": torch.zeros(28, 24)}),
            "missing none, unknown model.layers.1.mlp.experts.5.up_proj.weight",
        ),
        (
            True,
            lambda x: x.update({"model.layers.1.mlp.experts.down_proj": torch.zeros(5, 24, 28)}),
            "missing none, unknown model.layers.1.mlp.experts.down_proj",
        ),
        (
            True,
            lambda x: x.update({"model.layers.1.mlp.experts.4.down_proj.weight": torch.zeros(28, 24)}),
            r"model.layers.1.mlp.experts.4.down_proj.weight is \[28, 24\], and the model .* needs \[24, 28\]",
        ),
        (
            False,
            lambda x: x.pop("model.layers.1.mlp.experts.gate_up_proj"),
            "missing model.layers.1.mlp.experts.0.gate",
        ),
        (
            False,
            lambda x: x.update({"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(6, 56, 24)}),
            r"gate_up_proj is \[6, 56, 24\], and the model .* needs \[5, 56, 24\]",
        ),
        (
            False,
            lambda x: x["model.layers.1.mlp.experts.down_proj"][4, 3].fill_(torch.nan),
            "blocks.1.mlp.experts.down.weight holds values that are not finite",
        ),
    ],
)
def test_missing_and_further_experts_are_refused(
    apart: bool, change: Callable[[dict[str, torch.Tensor]], object], words: str, saved, tmp_path: Path
) -> None:
    folder = damaged(saved("qwen3_moe", apart), tmp_path / "damaged", change)
    with pytest.raises(ValueError, match=words):
        import_(folder, tmp_path / "back")


def test_files_of_the_base_model_alone_are_read(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("mixtral", **SIZES, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "base")
    assert all(not name.startswith("model.") for name in load_file(tmp_path / "base" / WEIGHTS))
    both = [read_checkpoint(import_(tmp_path / name, tmp_path / f"{name}-back") / "iter_0000000")
            for name in ("whole", "base")]  # fmt: skip
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])


def test_modules_that_a_folder_does_not_hold_are_refused(saved) -> None:
    """--mtp-num-layers: its family has no place for them, or its files have fewer."""
    folder = saved("qwen3_moe", True)
    model = replace(read_config(folder).model, mtp_num_layers=2)
    words = r"--mtp-num-layers 2: --load .* holds 0 modules of multi-token prediction; give at most as many"
    with pytest.raises(ValueError, match=words):
        open_weights(folder, model)
