"""The checkpoint engine in one process: files, refusals, and the state after a crash."""

import errno
import functools
import json
import os
import pickle
import resource
import signal
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megazero import checkpoint, files
from megazero.checkpoint import manifest, shards, storage
from megazero.checkpoint.regions import Region
from megazero.checkpoint.shards import LocalShard
from tests.helpers.table import for_each

SHAPES = {"w": (5, 7), "b": (7,), "qkv": (2, 3, 2, 5), "scale": ()}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8]


def whole(shape: tuple[int, ...], data: torch.Tensor) -> LocalShard:
    """A tensor in one piece."""
    return LocalShard(shape, (0,) * len(shape), shape, 0, prod(shape), data)


def model(value: float | None = None, dtype: torch.dtype = torch.float32) -> dict[str, LocalShard]:
    """Every tensor of SHAPES in one piece: ascending numbers plus `value`, or zeros to load into."""
    made = {}
    for name, shape in SHAPES.items():
        data = torch.zeros(prod(shape)) if value is None else torch.arange(prod(shape)) + value
        made[name] = whole(shape, data.to(dtype))
    return made


def assert_holds(path: Path, value: float) -> None:
    """The checkpoint loads and is `model(value)`."""
    target = model()
    checkpoint.load(path, target)
    for name, expected in model(value).items():
        assert torch.equal(target[name].data, expected.data), name


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


@for_each("dtype", DTYPES)
@for_each("chunk_bytes", [8, 64, 2**20])
def test_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk_bytes: int) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", chunk_bytes)
    state = {"consumed_samples": 12, "layout": {"tp": 1}, "loss": 0.1, "name": "é"}
    path = checkpoint.save(tmp_path / "new" / "root", 100, model(1, dtype), state)
    assert path == tmp_path / "new" / "root" / "iter_0000100"
    target = model(None, dtype)
    checkpoint.load(path, target)
    for name, expected in model(1, dtype).items():
        assert torch.equal(target[name].data, expected.data), name
    assert checkpoint.read_state(path) == state | {"save_number": 1}
    assert checkpoint.find(path.parent) == checkpoint.find(path) == path


def test_bits_survive(tmp_path: Path) -> None:
    """NaN payloads, infinities, negative zero."""
    bits = torch.tensor([0x7FC00001, -1, -(2**31), 0x7F800000, 1], dtype=torch.int32)
    path = checkpoint.save(tmp_path, 1, {"x": whole((5,), bits.view(torch.float32))}, {})
    target = torch.zeros(5)
    checkpoint.load(path, {"x": whole((5,), target)})
    assert torch.equal(target.view(torch.int32), bits)


def test_any_range_loads_from_any_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flat range of every column block of a matrix that was saved in chunks of 2 rows."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 2 * 7 * 4)
    full = torch.arange(35.0)
    path = checkpoint.save(tmp_path, 1, {"w": whole((5, 7), full)}, {})
    assert len(manifest.read_manifest(path).chunks("w")) == 3
    for column, width in [(0, 7), (2, 3)]:
        block = full.view(5, 7)[:, column : column + width].flatten()
        for start, stop in [(0, 5 * width), (1, 5 * width - 1), (width, 3 * width), (4, 5), (6, 6)]:
            target = torch.full((stop - start,), -1.0)
            shard = LocalShard((5, 7), (0, column), (5, width), start, stop, target)
            checkpoint.load(path, {"w": shard})
            assert torch.equal(target, block[start:stop]), (column, start, stop)


def test_only_what_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 16)
    path = checkpoint.save(tmp_path, 1, {"x": whole((100,), torch.arange(100.0))}, {})
    read = []
    original = storage.ChunkReader.read_chunk
    monkeypatch.setattr(
        storage.ChunkReader,
        "read_chunk",
        lambda self, opened, name, chunk: (
            read.append(chunk.region.offset[0]),
            original(self, opened, name, chunk),
        )[1],
    )
    target = torch.zeros(6)
    checkpoint.load(path, {"x": LocalShard((100,), (0,), (100,), 10, 16, target)})
    assert target.tolist() == [10, 11, 12, 13, 14, 15]
    assert sorted(read) == [8, 12]


def test_nothing_on_disk_can_run(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, model(1), {"a": 1})
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", "latest"]
    assert sorted(os.listdir(path)) == ["manifest.json", "rank_00000.safetensors", "state.json"]
    assert (tmp_path / "latest").read_text() == "iter_0000001\n"
    for file in path.iterdir():
        with pytest.raises((pickle.UnpicklingError, ValueError, KeyError)), open(file, "rb") as opened:
            pickle.load(opened)
    for file in path.glob("*.json"):
        json.loads(file.read_text())
    stored = load_file(path / "rank_00000.safetensors")  # the library agrees that it is safetensors
    assert torch.equal(stored["w@0,0"], torch.arange(1.0, 36.0).view(5, 7))


def test_a_hole_is_refused_and_nothing_published(tmp_path: Path) -> None:
    broken = model(1) | {"w": LocalShard((5, 7), (0, 0), (5, 7), 0, 33, torch.zeros(33))}
    with pytest.raises(ValueError, match=r"tensor 'w' of shape \(5, 7\).*elements \[4:5, 5:7\] are missing"):
        checkpoint.save(tmp_path, 100, broken, {})
    assert os.listdir(tmp_path) == []


def test_a_tensor_of_which_nobody_owns_anything_is_a_hole(tmp_path: Path) -> None:
    broken = model(1) | {"w": LocalShard((5, 7), (0, 0), (5, 7), 3, 3, torch.zeros(0))}
    with pytest.raises(ValueError, match=r"tensor 'w'.*elements \[0:5, 0:7\] are missing"):
        checkpoint.save(tmp_path, 100, broken, {})
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"saving .*iter_0000100 failed on rank 0: TypeError: .*not JSON") as info:
        checkpoint.save(tmp_path, 100, model(1), {"a": object()})
    assert not isinstance(info.value, checkpoint.AgreedFailure)  # which a run survives
    complex_shard = {"z": whole((2,), torch.zeros(2, dtype=torch.complex64))}
    with pytest.raises(ValueError, match=r"cannot hold tensors of .*complex64"):
        checkpoint.save(tmp_path, 100, complex_shard, {})
    assert os.listdir(tmp_path) == []


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, model(1), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RuntimeError, match=r"failed on rank 0: /\S+/rank_00000.safetensors: File too large$"):
            checkpoint.save(tmp_path, 2, {"x": whole((1000,), torch.zeros(1000))}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", "latest"]
    assert checkpoint.find(tmp_path) == tmp_path / "iter_0000001"


@pytest.mark.long
@for_each("file", ["manifest.json", "state.json", "rank_00000.safetensors"])
def test_every_flipped_bit_is_found(tmp_path: Path, file: str) -> None:
    """One bit of every byte in turn (of tensors: of every seventh), header and data; the error names the file."""
    path = checkpoint.save(tmp_path, 1, model(1), {"consumed_samples": 123})
    damaged = path / file
    for position in range(0, damaged.stat().st_size, 7 if file.endswith(".safetensors") else 1):
        flip_bit(damaged, position, position % 8)
        with pytest.raises(ValueError, match=f"--load .*iter_0000001.*{file}|has the format"):
            checkpoint.read_state(path) if file == "state.json" else checkpoint.load(path, model())
        flip_bit(damaged, position, position % 8)
    assert_holds(path, 1)


@for_each("file", ["manifest.json", "state.json", "rank_00000.safetensors"])
@for_each("remove", [False, True])
def test_a_truncated_or_missing_file(tmp_path: Path, file: str, remove: bool) -> None:
    older = checkpoint.save(tmp_path, 1, model(1), {"a": 1})
    path = checkpoint.save(tmp_path, 2, model(2), {"a": 2})
    content = (path / file).read_bytes()
    (path / file).unlink()
    if not remove:
        (path / file).write_bytes(content[:-1])
    if file == "state.json":
        with pytest.raises(ValueError, match=file):
            checkpoint.read_state(path)
    else:
        with pytest.raises(ValueError, match=file):
            checkpoint.load(path, model())
    if remove or file != "state.json":  # its length is in no manifest, its checksum is
        with pytest.raises(ValueError, match=f"--load .*iter_0000002.*{file}"):
            checkpoint.find(path)
        assert checkpoint.find(tmp_path) == older


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, model(1), {})
    flag = r"--load .*iter_0000001 is a checkpoint of another model: "
    wide = model() | {"w": whole((5, 8), torch.zeros(40))}
    with pytest.raises(ValueError, match=flag + r"tensor 'w' is float32 of shape \(5, 7\) there and .*\(5, 8\) here"):
        checkpoint.load(path, wide)
    with pytest.raises(ValueError, match=flag + "tensor '.*' is float32 .* there and bfloat16"):
        checkpoint.load(path, model(None, torch.bfloat16))
    with pytest.raises(ValueError, match=flag + "it lacks 'more', and this model lacks no tensor"):
        checkpoint.load(path, model() | {"more": whole((2,), torch.zeros(2))})
    few = model()
    del few["b"], few["w"]
    with pytest.raises(ValueError, match=flag + "it lacks no tensor, and this model lacks 'b', 'w'"):
        checkpoint.load(path, few)


def test_some_tensors_can_be_loaded(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, model(1), {})
    wanted = model(1)
    few = {name: shard for name, shard in model().items() if name == "w"}
    checkpoint.load(path, few, partial=True)
    assert torch.equal(few["w"].data, wanted["w"].data)
    with pytest.raises(ValueError, match="it lacks 'more'"):
        checkpoint.load(path, few | {"more": whole((2,), torch.zeros(2))}, partial=True)


def rewritten(path: Path, change: Callable[[list[manifest.StoredChunk]], list[manifest.StoredChunk]]) -> None:
    """Write the manifest again, its checksum right, with the chunks of `w` changed."""
    content = manifest.read_manifest(path)
    w, chunks = content.tensors["w"], change(content.chunks("w"))
    tiling = manifest.Tiling.of([chunk.region for chunk in chunks], [chunk.file for chunk in chunks])
    content.tensors["w"] = manifest.StoredTensor(w.dtype, w.shape, len(content.tilings), tuple(c.crc32 for c in chunks))
    content.tilings.append(tiling)
    manifest.write_manifest(path, content)


def test_a_manifest_with_a_hole_or_an_overlap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 7 * 4)
    path = checkpoint.save(tmp_path, 1, model(1), {})
    rewritten(path, lambda chunks: chunks[:2] + chunks[3:])
    with pytest.raises(ValueError, match=r"broken: of tensor 'w' elements \[2:3, 0:7\] are missing"):
        checkpoint.load(path, model())
    path = checkpoint.save(tmp_path, 1, model(1), {})
    extra = manifest.StoredChunk(Region((2, 1), (1, 2)), "rank_00000.safetensors", 0)
    rewritten(path, lambda chunks: [*chunks, extra])
    with pytest.raises(ValueError, match=r"broken: of tensor 'w' elements \[2:3, 1:3\] are given 2 times"):
        checkpoint.load(path, model())


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint.save(tmp_path, 1, model(1), {})
    monkeypatch.setattr(manifest, "FORMAT", "megazero checkpoint 3")
    with pytest.raises(ValueError, match=r"--load .* has the format 'megazero checkpoint 2'"):
        checkpoint.load(path, model())


def test_find(tmp_path: Path) -> None:
    assert checkpoint.find(tmp_path / "nowhere") is None
    assert checkpoint.find(tmp_path) is None
    (tmp_path / "notes").mkdir()
    (tmp_path / "latest").write_text("iter_0000009")
    with pytest.raises(ValueError, match=r"--load .*`latest` names iter_0000009, which is gone"):
        checkpoint.find(tmp_path)
    with pytest.raises(ValueError, match=r"--load .* is a file"):
        checkpoint.find(tmp_path / "latest")
    with pytest.raises(ValueError, match=r"--load .*iter_0000009 is not a whole checkpoint: there is no such"):
        checkpoint.find(tmp_path / "iter_0000009")
    first, second = (checkpoint.save(tmp_path, i, model(i), {}) for i in (1, 2))
    assert checkpoint.find(tmp_path) == second
    (tmp_path / "latest").write_text("iter_0000001")
    assert checkpoint.find(tmp_path) == first
    for stale in ("iter_0000077", "../elsewhere", ""):
        (tmp_path / "latest").write_text(stale)
        assert checkpoint.find(tmp_path) == second
    (tmp_path / "latest").unlink()
    assert checkpoint.find(tmp_path) == second
    for path in (first, second):
        (path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"--load .* has no whole checkpoint \(iter_0000002.*iter_0000001"):
        checkpoint.find(tmp_path)


def test_iterations_sort_as_numbers(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 9_999_999, model(1), {})
    newest = checkpoint.save(tmp_path, 10_000_000, model(1), {})
    (tmp_path / "latest").unlink()
    assert checkpoint.find(tmp_path) == newest


def test_prune(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        checkpoint.save(tmp_path, iteration, model(iteration), {})
    with pytest.raises(ValueError, match="--keep-last -1"):
        checkpoint.prune(tmp_path, -1)
    checkpoint.prune(tmp_path, 0)
    checkpoint.prune(tmp_path, 7)
    assert len(list(tmp_path.glob("iter_*"))) == 4
    (tmp_path / "latest").write_text("iter_0000003\n")  # a run that went back from 4
    checkpoint.prune(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000002", "iter_0000003", "latest"]
    checkpoint.prune(tmp_path / "nowhere", 2)


def test_what_cannot_be_deleted_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Put a link in place of an old checkpoint, and take a name. Later saves and deletions work."""
    elsewhere = tmp_path / "elsewhere"
    root = tmp_path / "root"
    for iteration in (1, 2, 3, 4):
        checkpoint.save(root, iteration, model(iteration), {})
    (root / "iter_0000001").rename(elsewhere)
    (root / "iter_0000001").symlink_to(elsewhere)
    (root / ".iter_0000002.old.partial" / "iter_0000002" / "full").mkdir(parents=True)
    checkpoint.prune(root, 1)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"cannot delete {root}/iter_0000001: it is a link; delete it by hand",
        f"cannot delete {root}/iter_0000002: Directory not empty; delete it by hand",
    ]
    assert {path.name for path in root.glob("[!.]*")} == {"iter_0000001", "iter_0000002", "iter_0000004", "latest"}
    (root / ".iter_0000009.partial").symlink_to(elsewhere)
    checkpoint.save(root, 5, model(5), {})
    checkpoint.prune(root, 1)
    assert sorted(os.listdir(root)) == ["iter_0000001", "iter_0000005", "latest"]
    assert_holds(elsewhere, 1)


@for_each("again", [False, True])
def test_a_save_that_fails_after_it_has_its_name_gives_it_back(
    tmp_path: Path, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free its disk space, and restore the checkpoint that it replaced."""
    checkpoint.save(tmp_path, 1, model(1), {})
    (tmp_path / "latest").unlink()
    replace = os.replace

    def fail(source: Path, target: Path) -> None:
        if Path(target).name == "latest":
            raise OSError(errno.EIO, "the disk is gone", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(checkpoint.AgreedFailure, match=r"failed on rank 0: /\S+/latest: the disk is gone"):
        checkpoint.save(tmp_path, 1 if again else 2, model(2), {})
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001"]
    assert_holds(tmp_path / "iter_0000001", 1)


@for_each("again", [False, True])
@for_each("error", [OSError(errno.EIO, "disk"), KeyboardInterrupt()])
def test_a_save_that_fails_after_latest_names_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, again: bool
) -> None:
    """The wait for the disk fails, or is interrupted: `latest` still names a whole checkpoint."""

    def fail(folder: Path) -> None:
        raise error

    checkpoint.save(tmp_path, 2 if again else 1, model(1), {})
    with monkeypatch.context() as patched, pytest.raises((checkpoint.AgreedFailure, KeyboardInterrupt)):
        patched.setattr(files, "sync_folder", fail)  # after `latest` has been replaced
        checkpoint.save(tmp_path, 2, model(2), {})
    assert checkpoint.find(tmp_path) == tmp_path / "iter_0000002"
    assert_holds(tmp_path / "iter_0000002", 2)
    checkpoint.save(tmp_path, 3, model(3), {})
    assert sorted(os.listdir(tmp_path)) == [
        *([] if again else ["iter_0000001"]),
        "iter_0000002",
        "iter_0000003",
        "latest",
    ]


def test_a_save_that_is_interrupted_frees_its_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        assert list(tmp_path.glob(".iter_*"))
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "write_manifest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, model(2), {})
    assert not list(tmp_path.glob(".iter_*"))


def test_leftovers_of_a_crash_are_cleared(tmp_path: Path) -> None:
    for stale in (".iter_0000100.partial", ".iter_0000050.partial"):
        (tmp_path / stale).mkdir()
        (tmp_path / stale / "rank_00007.safetensors").write_bytes(b"half")
    assert checkpoint.find(tmp_path) is None
    path = checkpoint.save(tmp_path, 100, model(1), {})
    assert sorted(os.listdir(tmp_path)) == ["iter_0000100", "latest"]
    assert sorted(os.listdir(path)) == ["manifest.json", "rank_00000.safetensors", "state.json"]
    (tmp_path / ".latest.partial-0123456789ab").write_bytes(b"")
    ours = [".iter_0000100.2.partial", ".iter_0000100.old.partial", ".iter_0000100.partial-0123456789ab"]
    theirs = [".iter_best.partial", ".notes.partial-old", ".iter_0000100.partial.bak", "iter_0000100.partial"]
    theirs += [".hf.partial-0123456789ab"]  # an export into this folder, while the run saves
    for name in (*ours, *theirs):
        (tmp_path / name).mkdir()
    checkpoint.save(tmp_path, 200, model(1), {})
    assert {*os.listdir(tmp_path)} == {"iter_0000100", "iter_0000200", "latest", *theirs}


def crash_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process die, as by SIGKILL, before its `step`-th call that changes names or flushes."""
    calls = 0

    def counted(function: Callable) -> Callable:
        def wrapper(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))


@pytest.mark.long
def test_a_crash_at_any_step_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration is saved again, and the process dies at each step in turn: old or new remains."""
    seen = set()
    for step in range(1, 100):
        root = tmp_path / str(step)
        checkpoint.save(root, 50, model(0), {"value": 0})
        checkpoint.save(root, 100, model(1), {"value": 1})
        child = os.fork()
        if child == 0:
            crash_at(step, monkeypatch)
            checkpoint.save(root, 100, model(2), {"value": 2})
            os._exit(0)
        finished = os.waitpid(child, 0)[1] == 0
        path = checkpoint.find(root)
        assert path is not None
        value = checkpoint.read_state(path)["value"]
        assert value in (1, 2), (step, path)
        assert_holds(path, value)
        seen.add((path.name, value))
        checkpoint.save(root, 100, model(3), {"value": 3})  # and the next save is none the worse
        assert sorted(os.listdir(root)) == ["iter_0000050", "iter_0000100", "latest"]
        assert_holds(root / "iter_0000100", 3)
        if finished:
            break
    assert finished and step > 10
    assert seen == {("iter_0000100", 1), (".iter_0000100.replaced", 1), ("iter_0000100", 2)}


def test_a_shard_must_fit_its_tensor() -> None:
    with pytest.raises(AssertionError):
        LocalShard((4, 4), (2, 0), (3, 4), 0, 12, torch.zeros(12))
    with pytest.raises(AssertionError):
        LocalShard((4, 4), (0, 0), (4, 4), 0, 17, torch.zeros(17))
    with pytest.raises(AssertionError):
        LocalShard((4, 4), (0, 0), (4, 4), 0, 4, torch.zeros(5))
    with pytest.raises(AssertionError):
        LocalShard((4, 4), (0, 0), (4, 4), 0, 4, torch.zeros(8)[::2])


def test_a_save_in_the_background_is_of_its_own_copies(tmp_path: Path) -> None:
    """The weights change while they are written; the copies' memory serves every save; attached files are saved."""
    save = functools.partial(checkpoint.save, tmp_path, attached={"tokenizer/a.json": b"{}"})
    saver, live = checkpoint.BackgroundSaver(1.0, save), model(1)
    places = set()
    for iteration in (1, 2):
        saver.start(iteration, live, {"n": iteration})
        for shard in live.values():
            shard.data.add_(1)
        places.add(tuple(buffer.data_ptr() for buffer in saver._buffers.values()))
        assert saver.finish() == tmp_path / f"iter_{iteration:07}"
        assert_holds(tmp_path / f"iter_{iteration:07}", iteration)
        assert checkpoint.read_state(tmp_path / f"iter_{iteration:07}")["n"] == iteration
        assert (tmp_path / f"iter_{iteration:07}" / "tokenizer/a.json").read_bytes() == b"{}"
    assert len(places) == 1 and saver.num_bytes == 4 * sum(map(prod, SHAPES.values()))
    assert saver.finish() is None
