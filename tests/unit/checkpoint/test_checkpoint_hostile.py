"""Damaged and forged checkpoints: one sentence, no traceback, no hang, nothing read outside the folder."""

import json
import os
import random
import shutil
import zlib
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero import checkpoint
from megazero.checkpoint import Damaged, folders, manifest
from megazero.checkpoint.shards import LocalShard
from megazero.checkpoint.verify import faults
from megazero.flags.config import CheckpointConfig, Config, ModelConfig
from megazero.run.resume import find_checkpoint
from megazero.run.run_state import RunState, run_tokenizer
from tests.helpers.table import for_each

SHAPES = {"model.w": (5, 7), "model.b": (7,), "exp_avg.w": (5, 7)}
STATE: dict[str, Any] = {
    "iteration": 1,
    "consumed_samples": 8,
    "updates": 1,
    "loss_scale": {"value": 65536.0, "left": 2, "good": 1},
    "model": {"num_layers": 2, "init_method_std": 0.02, "vocab_size": 257},
    "layout": {"dp": 1},
    "config": {"data": {"data_path": ["x"], "tokenizer": "byte"}, "preset": ""},
    "run": "abc",
    "fingerprints": ["0123456789abcdef:-"],
    "saved_tokenizer": "tokenizer",
}


OURS = ModelConfig(num_layers=2, hidden_size=48, num_attention_heads=6, seq_length=8, vocab_size=257)
ATTACHED = {"tokenizer/tokenizer.json": b"{}", "tokenizer/chat_template.jinja": b"x"}


def tensors(fill: float | None = None) -> dict[str, LocalShard]:
    made = {}
    for name, shape in SHAPES.items():
        data = torch.arange(float(prod(shape))) if fill is None else torch.full((prod(shape),), fill)
        made[name] = LocalShard(shape, (0,) * len(shape), shape, 0, prod(shape), data)
    return made


# Files of a checkpoint of `tensors()` as the first version with format 2 wrote them.
MANIFEST = (
    '{"format":"megazero checkpoint 2","files":{"rank_00000.safetensors":524},"state_crc32":227703996,"at'
    'tached":{"tokenizer/tokenizer.json":[2,2745614147],"tokenizer/chat_template.jinja":[1,2363233923]},"'
    'tilings":[{"offset":[[0,0]],"size":[[5,7]],"file":["rank_00000.safetensors"]},{"offset":[[0]],"size"'
    ':[[7]],"file":["rank_00000.safetensors"]}],"tensors":{"model.w":{"dtype":"float32","shape":[5,7],"ti'
    'ling":0,"crc32":[3879409234]},"model.b":{"dtype":"float32","shape":[7],"tiling":1,"crc32":[982014189'
    ']},"exp_avg.w":{"dtype":"float32","shape":[5,7],"tiling":0,"crc32":[3879409234]}},"crc32":1270219655'
    "}"
)
HEADER = (
    '{"model.w@0,0":{"dtype":"F32","shape":[5,7],"data_offsets":[0,140]},"exp_avg.w@0,0":{"dtype":"F32","'
    'shape":[5,7],"data_offsets":[140,280]},"model.b@0":{"dtype":"F32","shape":[7],"data_offsets":[280,30'
    "8]}}    "
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one checkpoint."""
    root = tmp_path_factory.mktemp("sound") / "root"
    checkpoint.save(root, 1, tensors(), STATE, attached=ATTACHED)
    return root


def test_checkpoints_of_earlier_versions_load(sound: Path, tmp_path: Path) -> None:
    root = copied(sound, tmp_path)
    folder = root / "iter_0000001"
    data = torch.cat([torch.arange(35.0), torch.arange(35.0), torch.arange(7.0)]).numpy().tobytes()
    old = {"manifest.json": MANIFEST.encode(), "state.json": json.dumps(STATE | {"save_number": 1}).encode()}
    old["rank_00000.safetensors"] = len(HEADER).to_bytes(8, "little") + HEADER.encode() + data
    for name, content in old.items():
        assert (folder / name).read_bytes() == content, name
        (folder / name).write_bytes(content)
    read_all(root)


def copied(sound: Path, tmp_path: Path) -> Path:
    shutil.rmtree(tmp_path / "root", ignore_errors=True)
    shutil.copytree(sound, tmp_path / "root", symlinks=True)
    return tmp_path / "root"


def read_all(root: Path) -> None:
    """Read all that a resume reads: which checkpoint, its state, its tensors."""
    path = checkpoint.find(root)
    assert path is not None
    state = RunState.read(path)
    state.model_config(path)
    state.tokenizer(path)
    target = tensors(-1.0)
    checkpoint.load(path, target)
    for name, expected in tensors().items():
        assert torch.equal(target[name].data, expected.data), name


def forge(folder: Path, file: str, content: Any) -> None:
    """Put JSON in place of a file, and make every checksum right again."""
    if file == "state.json":
        (folder / file).write_text(json.dumps(content))
        about = json.loads((folder / "manifest.json").read_text())
        about["state_crc32"] = zlib.crc32((folder / file).read_bytes())
    else:
        about = content
    if isinstance(about, dict):
        about.pop("crc32", None)
    text = manifest.checked_text(about) if isinstance(about, dict) else json.dumps(about)
    (folder / "manifest.json").write_text(text)


def replace_by(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to({"device": "/dev/zero", "dangling link": "/nowhere/at/all", "loop": path}[kind])


KINDS = ("folder", "FIFO", "device", "dangling link", "loop")


@for_each("kind", KINDS)
@for_each("file", ["manifest.json", "state.json", "rank_00000.safetensors", "tokenizer/tokenizer.json"])
def test_anything_but_a_file_is_damage(sound: Path, tmp_path: Path, file: str, kind: str) -> None:
    root = copied(sound, tmp_path)
    replace_by(root / "iter_0000001" / file, kind)
    with pytest.raises(Damaged, match=file):
        checkpoint.find(root)
    with pytest.raises(Damaged, match=file):
        RunState.read(root / "iter_0000001")
        checkpoint.load(root / "iter_0000001", tensors(0.0))


@for_each("kind", KINDS)
def test_a_latest_that_is_no_file_is_said_and_replaced_by_the_newest(
    sound: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = copied(sound, tmp_path)
    replace_by(root / "latest", kind)
    found = checkpoint.find(root)
    assert found == root / "iter_0000001"
    if kind != "dangling link":  # which is as good as no file
        assert "latest is damaged" in caplog.text and "RESUMING FROM iter_0000001" in caplog.text
        with pytest.raises(Damaged, match=r"--load-exact: .*latest is damaged"):
            checkpoint.find(root, exact=True)


@for_each("name", ["../../secret.safetensors", "/etc/passwd", "rank_00000.safetensors/../x", ".", ""])
def test_a_manifest_cannot_name_a_file_elsewhere(sound: Path, tmp_path: Path, name: str) -> None:
    root = copied(sound, tmp_path)
    folder = root / "iter_0000001"
    shutil.copy(folder / "rank_00000.safetensors", tmp_path / "secret.safetensors")
    text = (folder / "manifest.json").read_text()
    for file in ("rank_00000.safetensors", "tokenizer/tokenizer.json"):
        forge(folder, "manifest.json", json.loads(text.replace(file, name)))
        with pytest.raises(Damaged, match=r"not a manifest: Expected `str` matching regex"):
            checkpoint.load(folder, tensors(0.0))


@for_each("name", ["", "manifest.json", "state.json", "rank_00000.safetensors", "tokenizer"])
def test_links_are_followed(sound: Path, tmp_path: Path, name: str) -> None:
    """A checkpoint, or a file of it, may be a link to a copy elsewhere."""
    root = copied(sound, tmp_path)
    place = root / "iter_0000001" / name
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    read_all(root)
    assert list(faults(root / "iter_0000001")) == []


def test_an_older_checkpoint_has_no_attached_file(sound: Path, tmp_path: Path) -> None:
    root = copied(sound, tmp_path)
    folder = root / "iter_0000001"
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(Damaged, match=r"tokenizer/tokenizer\.json"):
        checkpoint.find(root)
    about, state = (json.loads((folder / name).read_text()) for name in ("manifest.json", "state.json"))
    del about["attached"], state["saved_tokenizer"]
    forge(folder, "manifest.json", about)
    forge(folder, "state.json", state)
    read_all(root)
    with pytest.raises(ValueError, match=r"has no copy of its run's tokenizer.*/gone.*give --tokenizer"):
        state["config"]["data"]["tokenizer"] = "/gone"
        forge(folder, "state.json", state)
        run_tokenizer(folder, RunState.read(folder))


@for_each(
    ("model", "words"),
    [
        ({}, "--vocab-size 0"),
        ({"vocab_size": 257, "architecture": "mamba"}, "'mamba'.*architecture"),
        ({"vocab_size": 257, "num_attention_heads": 7}, "--hidden-size 768 is not divisible by --num-attention-heads"),
        ({"vocab_size": 257, "num_layers": 0}, "--num-layers 0"),
    ],
)
def test_a_state_without_a_model_is_refused(sound: Path, tmp_path: Path, model: dict[str, Any], words: str) -> None:
    """Refuse it with right checksums, to train, to generate and to export."""
    folder = copied(sound, tmp_path) / "iter_0000001"
    forge(folder, "state.json", STATE | {"model": model})
    with pytest.raises(
        ValueError,
        match=rf"--load {folder}: (the checkpoint of another model: it has .*--|state.json describes no model: )",
    ):
        find_checkpoint(replace(Config(), model=OURS, checkpoint=CheckpointConfig(load=str(folder))))
    with pytest.raises(ValueError, match=f"--load {folder}: state.json describes no model: .*{words}"):
        RunState.read(folder).model_config(folder)


@for_each("text", ["[]", "null", "1e999", "NaN", '"x"', "[" * 100_000, '{"a":' * 50_000, "{", "", "\0"])
@for_each("file", ["manifest.json", "state.json"])
def test_odd_json_is_damage(sound: Path, tmp_path: Path, file: str, text: str) -> None:
    root = copied(sound, tmp_path)
    (root / "iter_0000001" / file).write_text(text)
    with pytest.raises(Damaged, match=f"{file} is damaged") as info:
        RunState.read(root / "iter_0000001")
    assert "\n" not in str(info.value) and len(str(info.value)) < 500


ODD = (None, True, -1, 2**70, 1e308, "", "../x", "\ud800", [], {}, [[]], {"a": {}}, [1, "2"], "rank_00001.safetensors")


def mutated(draw: random.Random, content: Any) -> Any:
    """`content` with one node, anywhere in it, replaced, removed or added."""
    if isinstance(content, (dict, list)) and content and draw.random() < 0.85:
        key = draw.choice(list(content) if isinstance(content, dict) else range(len(content)))
        copy = content.copy()
        way = draw.random()
        if way < 0.1:
            del copy[key]
        elif way < 0.15 and isinstance(copy, list):
            copy.append(copy[key])
        elif way < 0.2 and isinstance(copy, dict):
            copy[draw.choice(["extra", "crc32", "files"])] = copy[key]
        else:
            copy[key] = mutated(draw, content[key])
        return copy
    if type(content) is int and draw.random() < 0.5:
        return content + draw.choice([-1, 1, 1000])
    return draw.choice(ODD)


def damage_at_random(draw: random.Random, root: Path) -> str:
    folder = root / "iter_0000001"
    file = draw.choice(["manifest.json", "state.json", "rank_00000.safetensors", "latest", *ATTACHED])
    path = root / file if file == "latest" else folder / file
    way = draw.choice(["bytes", "cut", "kind", "forge", "forge", "forge"])
    if way == "forge" and file in ("manifest.json", "state.json"):
        forge(folder, file, mutated(draw, json.loads(path.read_text())))
    elif way == "kind":
        replace_by(path, draw.choice(KINDS))
    elif way == "cut":
        path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
    else:
        content = bytearray(path.read_bytes())
        for _ in range(draw.choice([1, 1, 8])):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
    return f"{way} of {file}"


def fuzz(sound: Path, tmp_path: Path, cases: range) -> int:
    """Each either reads as it was, or is refused in a sentence; returns how many were refused."""
    refused = 0
    for seed in cases:
        root = copied(sound, tmp_path)
        what = damage_at_random(random.Random(seed), root)
        try:
            read_all(root)
        except ValueError as error:
            refused += 1
            assert "--load" in str(error) and "\n" not in str(error), (seed, what, str(error))
        except Exception as error:
            raise AssertionError(f"seed {seed}, {what}: {type(error).__name__}: {error}") from error
    return refused


def test_damages_at_random(sound: Path, tmp_path: Path) -> None:
    assert fuzz(sound, tmp_path, range(120)) > 60


@pytest.mark.slow
def test_many_damages_at_random(sound: Path, tmp_path: Path) -> None:
    assert fuzz(sound, tmp_path, range(1000, 4000)) > 1500


# -- which checkpoint to resume from


def saved(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        checkpoint.save(root, iteration, tensors(), STATE)


def test_a_damaged_latest_does_not_revive_an_abandoned_branch(tmp_path: Path) -> None:
    """The run reached 300, went back to 100 and saved 150: 200 and 300 are not its past."""
    saved(tmp_path, 100, 200, 300, 150)
    (tmp_path / "latest").write_text("iter_00x0150")
    assert checkpoint.find(tmp_path).name == "iter_0000150"
    (tmp_path / "latest").unlink()
    assert checkpoint.find(tmp_path).name == "iter_0000150"


def test_a_damaged_checkpoint_falls_back_on_its_own_branch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 100, 200, 300, 150)
    (tmp_path / "iter_0000150" / "manifest.json").unlink()
    assert checkpoint.find(tmp_path).name == "iter_0000100"
    assert "iter_0000150: it has no manifest.json. RESUMING FROM iter_0000100" in caplog.text
    with pytest.raises(Damaged, match=r"--load-exact: iter_0000150: it has no manifest.json; restore it"):
        checkpoint.find(tmp_path, exact=True)
    with pytest.raises(Damaged, match=r"ahead of it, and perhaps abandoned, are iter_0000200, iter_0000300"):
        checkpoint.find(tmp_path, passing_over={"iter_0000100": "bad"})


def test_a_latest_whose_folder_is_gone_takes_what_is_before_it(tmp_path: Path) -> None:
    saved(tmp_path, 100, 200, 300, 150)
    shutil.rmtree(tmp_path / "iter_0000150")
    assert checkpoint.find(tmp_path).name == "iter_0000100"
    shutil.rmtree(tmp_path / "iter_0000100")
    with pytest.raises(Damaged, match=r"`latest` names iter_0000150, which is gone.*ahead of it"):
        checkpoint.find(tmp_path)


def test_a_run_that_went_back_by_hand_is_believed(tmp_path: Path) -> None:
    saved(tmp_path, 100, 200, 300)
    (tmp_path / "latest").write_text("iter_0000200\n")
    assert checkpoint.find(tmp_path).name == "iter_0000200"


# -- another run saves and prunes there


def keep_one(root: Path, iteration: int) -> None:
    """Save an iteration as another run would, and delete all before it."""
    saved(root, iteration)
    checkpoint.prune(root, 1, run=STATE["run"])


@for_each("exact", [False, True])
@for_each("function", ["checkpoints", "_read_latest", "_fault"])
def test_a_folder_that_is_pruned_while_it_is_looked_for(
    function: str, exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Find the newest, without a warning, whichever look at the folders or at `latest` the deletion follows."""
    saved(tmp_path, 1, 2)
    original, calls = getattr(folders, function), []

    def pruned(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            monkeypatch.setattr(folders, function, original)
            found = original(*args) if function != "_fault" else None
            keep_one(tmp_path, 3)
            return found if function != "_fault" else original(*args)
        return original(*args)

    monkeypatch.setattr(folders, function, pruned)
    assert checkpoint.find(tmp_path, exact=exact) == tmp_path / "iter_0000003"
    assert calls and "RESUMING" not in caplog.text


def test_a_file_that_is_deleted_while_it_is_opened_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete it when safetensors has opened it, and torch is about to map it by its name."""
    saved(tmp_path, 1)
    path, original = tmp_path / "iter_0000001", torch.UntypedStorage.from_file

    def late(*args: Any, **options: Any) -> Any:
        shutil.rmtree(path, ignore_errors=True)
        return original(*args, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", late)
    with pytest.raises(Damaged, match=r"rank_00000\.safetensors is damaged: it is gone"):
        checkpoint.load(path, tensors(0.0))
