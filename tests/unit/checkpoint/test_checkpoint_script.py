"""scripts/checkpoint.py, and the check of every byte behind it."""

import re
import subprocess
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megazero import checkpoint
from megazero.checkpoint import verify
from megazero.checkpoint.shards import LocalShard
from megazero.console import checkpoint_tool
from megazero.flags.config import ModelConfig
from megazero.run.run_state import RunState
from megazero.units import size
from tests.helpers.families import of_family
from tests.helpers.programs import warm
from tests.helpers.table import for_each


def save(root: Path, iteration: int) -> Path:
    tensors = {"model.b": LocalShard((3, 5, 1), (0, 0, 0), (3, 5, 1), 0, 15, torch.arange(15.0).bfloat16())}
    for name in ("model.w", "exp_avg.w"):
        tensors[name] = LocalShard((6, 2), (0, 0), (6, 2), 0, 12, torch.arange(12.0))
    layout = {"pp": 1, "dp": 2, "tp": 3, "cp": 5, "ep": 6, "expert_tp": 0}
    state = RunState(iteration, 8 * iteration, 4 * iteration, None, asdict(ModelConfig()), layout, {}, run="abc")
    return checkpoint.save(root, iteration, tensors, state.to_json(), attached={"tokenizer/tokenizer.json": b"{ }"})


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@for_each(
    ("file", "at", "words"),
    [
        ("rank_00000.safetensors", -1, "tensor 'exp_avg.w' at"),
        ("rank_00000.safetensors", 20, "rank_00000.safetensors is damaged"),
        ("state.json", 3, "state.json is damaged"),
        ("manifest.json", 3, "manifest.json"),
        ("tokenizer/tokenizer.json", 1, "tokenizer/tokenizer.json is damaged"),
    ],
)
def test_every_fault_is_named(tmp_path: Path, file: str, at: int, words: str) -> None:
    path = save(tmp_path, 1)
    assert list(verify.faults(path)) == []
    flip(path / file, at)
    found = list(verify.faults(path))
    assert found and words in found[0] and "damaged" in found[0]
    save(tmp_path, 2)  # whole: one damaged checkpoint is enough for a CI to fail
    assert checkpoint_tool.verify_checkpoints(checkpoint_tool.Verify(tmp_path)) == 1


def script(*words: object) -> subprocess.CompletedProcess[str]:
    return warm("scripts/checkpoint.py", *words)


@pytest.mark.long
def test_list_verify_and_show(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    flip(first / "rank_00000.safetensors", -1)
    (second / "rank_00000.safetensors").unlink()
    listed = script("list", tmp_path)
    assert listed.returncode == 0
    head, *rows = listed.stdout.splitlines()
    for path, row, samples in ((first, rows[0], "8"), (second, rows[1], "16")):
        files = [file.stat() for file in path.rglob("*") if file.is_file()]
        saved = datetime.fromtimestamp(max(file.st_mtime for file in files)).isoformat(" ", "seconds")
        assert re.split("  +", row)[:3] == [path.name, saved, size(sum(file.st_size for file in files))]
        assert re.split("  +", row)[4] == samples
    assert head.split() == ["checkpoint", "saved", "size", "layout", "samples", "state"]
    assert re.search(r" kB  pp 1 x dp 2 x cp 5 x tp 3 x ep 6  8  ", rows[0]) and rows[0].endswith(
        "<- a resume starts here"
    )
    assert rows[1].endswith("NOT WHOLE: rank_00000.safetensors is missing; name another, or its parent folder")
    checked = script("verify", tmp_path)
    assert checked.returncode == 1
    assert f"{first}: DAMAGED" in checked.stdout and "tensor 'exp_avg.w' at [0, 0]" in checked.stdout
    shown = script("show", first)
    assert shown.returncode == 0 and "iteration 1, 8 samples, 4 updates, run abc" in shown.stdout
    assert "layout pp 1 x dp 2 x cp 5 x tp 3 x ep 6, 1 files, " in shown.stdout
    tensors = size((first / "rank_00000.safetensors").stat().st_size)
    assert f"1 files, {tensors}\n" in shown.stdout and "tokenizer: " in shown.stdout
    assert "model of 27 parameters: num-layers=12 hidden-size=768 " in shown.stdout
    assert [re.split("  +", line) for line in shown.stdout.splitlines()[-4:]] == [
        ["tensor", "dtype", "shape", "chunks", "size"],
        ["model.b", "bfloat16", "3 x 5 x 1", "1", "30 bytes"],
        ["model.w", "float32", "6 x 2", "1", "48 bytes"],
        ["exp_avg.w", "float32", "6 x 2", "1", "48 bytes"],
    ]
    (first / "rank_00000.safetensors").unlink()
    listed = script("list", tmp_path)  # a job's script must see that there is nothing to resume from
    assert listed.returncode == 1 and len(listed.stdout.splitlines()) == 3 and listed.stdout.count("NOT WHOLE") == 2
    assert str(tmp_path) in listed.stderr and "<- a resume" not in listed.stdout
    named = save(tmp_path / "copy", 3).rename(tmp_path / "copy" / "best")  # whole, but no run loads it by this name
    listed = script("list", named)
    assert listed.returncode == 1 and "NOT LOADED: it is a checkpoint of iteration 3" in listed.stdout
    refused = script("list", tmp_path / "nothing")
    assert refused.returncode == 1 and refused.stderr.startswith("error: ") and "holds no checkpoint" in refused.stderr
    theirs = tmp_path / "theirs" / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    for folder in (tmp_path / "theirs", tmp_path / "theirs" / "iter_0000100"):
        for action in ("verify", "list", "show"):
            refused = script(action, folder)
            assert refused.returncode == 1 and "has a checkpoint of Megatron-LM" in refused.stderr, action
            assert not refused.stdout


def test_what_is_made_of_checkpoints_is_reported_with_its_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stand-ins replace the writing. 2 layers, 24 hidden, 40 in MLPs, 50 tokens in a table that is the head too."""
    model = ModelConfig(2, 24, 40, 3, 10, 50, **of_family("llama"))
    state = RunState(1, 2, 3, None, asdict(model), {}, {"training": {"precision": "fp64"}})
    monkeypatch.setattr(checkpoint_tool, "found_checkpoint", lambda path: path)
    monkeypatch.setattr(RunState, "read", lambda path: state)
    written = list[object]()
    for name in ("merge.merge", "upcycle.upcycle", "huggingface.export.export", "huggingface.importing.import_model"):
        monkeypatch.setattr(f"megazero.interop.{name}", lambda *given, **named: written.append((given, named)) or True)
    reads = SimpleNamespace(model=model)
    monkeypatch.setattr("megazero.interop.huggingface.configuration.read_config", lambda folder: reads)
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    mlp = 3 * 24 * 40
    parameters = 2 * (4 * 24 * 24 + mlp + 2 * 24) + 24 + 50 * 24

    def said(*words: object) -> str:
        assert checkpoint_tool.run_checkpoint_tool([*map(str, words)]) == 0
        return capsys.readouterr().out

    found = said("export", a, "--output", out, "--dtype", "bf16", "--tokenizer", "none", "--max-shard-size", "3")
    assert found == f"wrote {out}: {size(2 * parameters)} of bf16 weights, of {a}\n"
    assert written[-1][1]["shard_bytes"] == 3 * 2**30  # type: ignore[index]
    found = said("import", a, "--output", out)
    assert found.startswith(f"wrote {out}: {size(4 * parameters)} of fp32 weights, of {a}. To train on from there:\n")
    assert found.endswith(f" --preset {out}/config.toml --load {out} --data-path PREFIX ...\n")
    found = said("merge", out, a, b, "--weights", "0.25,0.75")
    assert [line.split() for line in found.splitlines()[:3]] == [
        ["weight", "checkpoint"],
        ["0.25", str(a)],
        ["0.75", str(b)],
    ]
    assert f"wrote {out}: {parameters:,} merged parameters." in found and f"--load {out} " in found
    found = said("upcycle", "--load", a, "--save", out, "--num-experts", "5", "--moe-layer-freq", "ED")
    parameters += 4 * mlp + 5 * 24  # in the first layer, with the router
    assert found.startswith(f"wrote {out}: {parameters:,} parameters, {size(8 * parameters)}, of {a}. To train on")


def test_help_keeps_its_lines() -> None:
    shown = script("--help").stdout.splitlines()
    assert "  python scripts/checkpoint.py export --to hf --output exports/a runs/a" in [
        line.rstrip() for line in shown
    ]


@pytest.mark.long
def test_a_name_of_the_hub_is_downloaded_first(tmp_path: Path) -> None:
    refused = script("import", "--from", "hf", "gpt2", "--output", tmp_path / "out")
    assert refused.returncode == 1
    assert "--from hf gpt2: no such file or folder (a model of" in refused.stderr
    assert "hf download gpt2 --local-dir DIR" in refused.stderr
