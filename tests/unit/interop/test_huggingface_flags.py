"""--hf-config on the command line: between a preset and the flags, and the model of a run that resumes."""

import json
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt
from megazero import checkpoint
from megazero.checkpoint.shards import LocalShard
from megazero.families import FAMILIES
from megazero.flags.cli import Command, parse, read
from megazero.flags.config import Config, ModelConfig
from megazero.flags.flag_names import flags
from megazero.interop.huggingface.model_flags import find_model
from megazero.run.run_state import RunState, source_digest
from tests.end_to_end.test_generate import write_tokenizer
from tests.helpers.table import for_each
from tests.unit.interop.test_huggingface_config import written

MODEL_FLAGS = {name for name, flag in flags().items() if flag.group == "model"} - FAMILIES["qwen3"].trait_flags.keys()


def command(*words: object) -> Command:
    return read([str(word) for word in words], find_model=find_model)


def save(root: Path, source: Path, model: ModelConfig, **changes: Any) -> Path:
    """Write a checkpoint of a run that --hf-config began."""
    config = {"hf_config": str(source), "data": {"tokenizer": "byte"}}
    state = RunState(1, 8, 1, None, asdict(model), {}, config, source_digest=source_digest(str(source)))
    shard = LocalShard((3,), (0,), (3,), 0, 3, torch.zeros(3))
    return checkpoint.save(root, 1, {"model.w": shard}, replace(state, **changes).to_json())


def test_flags_stand_above_the_file_and_the_file_above_a_preset(tmp_path: Path) -> None:
    file = written(tmp_path / "theirs", "qwen3", intermediate_size=40, head_dim=12, num_key_value_heads=2)
    preset = tmp_path / "p.toml"
    preset.write_text("lr = 0.5\nnum-layers = 7\nhidden-dropout = 0.3\n")
    found = command("--preset", preset, "--hf-config", file, "--seq-length", 16)
    model = found.config.model
    assert (model.architecture, model.hidden_size, model.num_layers, model.seq_length) == ("qwen3", 48, 2, 16)
    assert (model.kv_channels, model.num_query_groups, model.vocab_size, model.hidden_dropout) == (12, 2, 61, 0.0)
    assert found.config.optimizer.lr == 0.5 and found.config.hf_config == str(file)
    assert found.given >= MODEL_FLAGS | {"lr"} and "--hf-config" in found.args
    assert len(found.notes) == 1 and f"the model is that of {file}" in found.notes[0]
    assert command("--hf-config", file.parent, "--num-layers", 1).config.model == replace(
        model, num_layers=1, seq_length=20
    )


@pytest.mark.second
def test_config_toml_holds_the_fields_and_not_the_file(tmp_path: Path) -> None:
    file = written(tmp_path / "theirs", "llama")
    first = command("--hf-config", file, "--num-layers", 1, "--lr", 1)
    text = first.to_toml(first.config)
    assert set(tomllib.loads(text)) == MODEL_FLAGS | {"lr"} and text.startswith("# The model is that of config.json in")
    (tmp_path / "config.toml").write_text(text)
    file.unlink()
    again = command("--preset", tmp_path / "config.toml")
    assert again.config.model == first.config.model and again.config.hf_config == ""


@pytest.mark.second
def test_a_folder_as_load_implies_its_config(tmp_path: Path) -> None:
    folder = written(tmp_path / "theirs", "gpt2").parent
    found = command("--load", folder, "--hidden-dropout", 0)
    assert found.config.model.hidden_size == 48 and found.config.hf_config == str(folder)
    assert command("--hf-config", folder / "config.json", "--load", folder).config.model.num_layers == 2
    (tmp_path / "config.toml").write_text(f'num-layers = 1\nload = "{folder}"\n')  # of a run that --num-layers 1 began
    assert command("--preset", tmp_path / "config.toml").config.model.num_layers == 1
    assert command("--preset", tmp_path / "config.toml", "--load", folder).config.model.num_layers == 2
    other = written(tmp_path / "other", "gpt2", n_layer=3)
    with pytest.raises(ValueError, match=r"other.* another model than --load .*theirs: --num-layers 3, not 2; leave"):
        command("--hf-config", other, "--load", folder)


@pytest.mark.second
def test_the_tokenizer_of_the_folder_is_the_default(tmp_path: Path) -> None:
    file = written(tmp_path / "theirs", "llama")
    assert command("--hf-config", file).config.data.tokenizer == ""
    write_tokenizer(tmp_path / "tokenizer", 5)
    (tmp_path / "tokenizer" / "tokenizer.json").rename(file.parent / "tokenizer.json")
    for named in (file, file.parent):
        found = command("--hf-config", named)
        assert found.config.data.tokenizer == str(file.parent) and "tokenizer" in found.given
    assert command("--hf-config", file, "--tokenizer", "byte").config.data.tokenizer == "byte"
    (tmp_path / "p.toml").write_text('tokenizer = "byte"\n')
    assert command("--hf-config", file, "--preset", tmp_path / "p.toml").config.data.tokenizer == "byte"


@pytest.mark.second
@for_each("change", ["none", "changed", "gone"])
def test_a_resumed_run_has_the_model_of_its_checkpoint(change: str, tmp_path: Path) -> None:
    file = written(tmp_path / "theirs", "llama")
    model = replace(command("--hf-config", file, "--num-layers", 1).config.model, seq_length=8)
    save(tmp_path / "run", file, model)
    if change == "changed":
        written(tmp_path / "theirs", "llama", rope_theta=5e5)
    elif change == "gone":
        file.unlink()
    words = {"changed": ["has changed since"], "gone": ["is gone since"], "none": []}[change]
    found = command("--hf-config", file, "--load", tmp_path / "run")
    assert found.config.model == model and found.config.hf_config == str(file)
    assert found.config.data.tokenizer == "byte"
    assert [note for note in found.notes if not any(word in note for word in words)] == []
    assert len(found.notes) == len(words)
    one = command("--hf-config", file, "--load", tmp_path / "run" / "iter_0000001", "--hidden-dropout", 0.5)
    assert one.config.model == replace(model, hidden_dropout=0.5)


@pytest.mark.second
def test_a_batch_script_resumes_by_one_more_load(tmp_path: Path) -> None:
    """The folder of the weights stays on the command line: scripts/slurm/pretrain.sbatch appends a --load."""
    folder = written(tmp_path / "theirs", "gpt2").parent
    model = command("--load", folder).config.model
    save(tmp_path / "run", folder, replace(model, seq_length=8))
    found = command("--load", folder, "--load", tmp_path / "run", "--no-finetune")
    assert found.config.model.seq_length == 8 and found.config.checkpoint.load == str(tmp_path / "run")
    (folder / "config.json").unlink()
    assert command("--load", folder, "--load", tmp_path / "run").config.model.seq_length == 8
    assert command("--load", tmp_path / "run").config.model.seq_length == 8
    # the folder's weights are not silently left out where there is no checkpoint yet
    written(tmp_path / "theirs", "gpt2")
    with pytest.raises(ValueError, match=r"new holds no checkpoint, and .* so that --load .*theirs has no effect"):
        command("--load", folder, "--load", tmp_path / "new")


@pytest.mark.second
def test_another_file_is_read_for_the_checkpoint_of_another_run(tmp_path: Path) -> None:
    one, other = written(tmp_path / "one", "gpt2"), written(tmp_path / "other", "gpt2", n_layer=3)
    save(tmp_path / "run", one, command("--hf-config", one).config.model)
    assert command("--hf-config", other, "--load", tmp_path / "run").config.model.num_layers == 3


@pytest.mark.second
def test_programs_that_do_not_read_it_refuse_it() -> None:
    with pytest.raises(ValueError, match="--hf-config x: this program does not read it"):
        parse(["--hf-config", "x"])
    assert parse([]) == Config()


@pytest.mark.second
def test_flags_of_hugging_faces_scripts(tmp_path: Path) -> None:
    file = written(tmp_path / "theirs", "gpt2")
    assert command("--config_name", file).config.model.hidden_size == 48
    found = command("--model_name_or_path", file.parent)
    assert found.config.checkpoint.load == str(file.parent) and found.config.model.hidden_size == 48


@pytest.mark.second
@pytest.mark.long
def test_it_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "theirs", "qwen2")
    asked = "--device-type h100-80gb --world-size 2 --global-batch-size 8"
    for mode in ("--plan", "--plan-search"):
        pretrain_gpt.main(["--hf-config", str(file), mode, *asked.split()])
        text = capsys.readouterr().out
        assert "2 x" in text or "fastest" in text
        assert mode == "--plan" or f"--hf-config {file}" in text
    pretrain_gpt.main(["--hf-config", str(file), "--rehearse", "4:1", "--zero-stage", "3"])
    assert "rank 1" in capsys.readouterr().out
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"bits": 4}}))
    with pytest.raises(SystemExit):
        pretrain_gpt.main(["--hf-config", str(file), "--plan", *asked.split()])
    assert "config.json has quantization_config" in capsys.readouterr().err
