"""The checkpoint engine over gloo: any layout loads any other's checkpoint; a failure reaches all ranks at once."""

import contextlib
import os
import resource
import shutil
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megazero import checkpoint
from megazero.checkpoint import manifest, shards, tensor_file
from megazero.checkpoint.shards import LocalShard

TIME_LIMIT = 600.0  # seconds, for a group of ranks


def on_ranks(world: int, function: Callable, tmp_path: Path, *args: Any) -> list[Any]:
    """`function(rank, *args)` on `world` processes, a gloo group. Return the results by rank.

    RuntimeError with the tracebacks of the ranks that raised; TimeoutError if they do not end in time.
    """
    context = mp.get_context("forkserver")  # forking a process with threads can deadlock
    store = tmp_path / f"store_{time.monotonic_ns()}"
    pipes, processes = [], []
    for rank in range(world):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(send, rank, world, store, function, args))
        process.start()
        send.close()
        pipes.append(receive)
        processes.append(process)
    deadline = time.monotonic() + TIME_LIMIT
    try:
        outcomes = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} of {world} still runs after {TIME_LIMIT} s")
            outcomes.append(pipe.recv())
    finally:
        for process in processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()
    errors = [f"rank {rank} of {world} raised\n{error}" for rank, (_, error) in enumerate(outcomes) if error]
    if errors:
        raise RuntimeError("\n".join(errors))
    return [value for value, _ in outcomes]


def _rank_main(send: Any, rank: int, world: int, store: Path, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
        outcome = (function(rank, *args), None)
        dist.destroy_process_group()
    except BaseException:
        outcome = (None, traceback.format_exc())
    send.send(outcome)
    send.close()
    os._exit(0)


# name -> global shape, dtype, dim that tensor parallelism cuts (None: replicated). Odd sizes: no cut is even.
MODEL = {
    "qkv": ((5, 3, 2, 7), torch.float32, 0),
    "row": ((9, 11), torch.bfloat16, 1),
    "table": ((13, 6), torch.float32, 0),
    "norm": ((7,), torch.float32, None),
    "one": ((1,), torch.bfloat16, None),  # with dp > 1 some rank owns nothing of it
    "scale": ((), torch.float32, None),
}


def values(name: str) -> torch.Tensor:
    """Return the global tensor that a save writes and a load must find."""
    shape, dtype, _ = MODEL[name]
    source = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shape, generator=source).to(dtype)


def cut(size: int, rank: int, parts: int) -> tuple[int, int]:
    return size * rank // parts, size * (rank + 1) // parts


def held(rank: int, tp: int, dp: int, filled: bool, stage: int = 1) -> dict[str, LocalShard]:
    """Return the shards of a rank of a layout: a tensor-parallel block, in flat ranges over dp unless stage 0."""
    tp_rank, dp_rank = rank % tp, rank // tp
    made = {}
    for name, (shape, _, dim) in MODEL.items():
        offset, local = [0] * len(shape), list(shape)
        if dim is not None:
            start, stop = cut(shape[dim], tp_rank, tp)
            offset[dim], local[dim] = start, stop - start
        block = values(name)
        for d, (o, n) in enumerate(zip(offset, local, strict=True)):
            block = block.narrow(d, o, n)
        start, stop = cut(prod(local), dp_rank, dp) if stage > 0 else (0, prod(local))
        data = block.flatten()[start:stop].clone()
        if not filled:
            data = torch.full_like(data, float("nan"))
        made[name] = LocalShard(shape, tuple(offset), tuple(local), start, stop, data)
    return made


def assert_bit_for_bit(got: dict[str, LocalShard], expected: dict[str, LocalShard]) -> None:
    for name in MODEL:
        assert torch.equal(got[name].data.view(torch.uint8), expected[name].data.view(torch.uint8)), name


def save_layout(rank: int, root: Path, tp: int, dp: int, stage: int) -> str:
    path = checkpoint.save(root, 100, held(rank, tp, dp, True, stage), {"layout": [tp, dp], "rank": rank})
    assert path == root / "iter_0000100" and path.is_dir()
    return str(path)


def load_layout(rank: int, root: Path, tp: int, dp: int, stage: int) -> None:
    path = checkpoint.find(root, dist.group.WORLD)
    got = held(rank, tp, dp, False, stage)
    checkpoint.load(path, got, dist.new_group(backend="gloo"))
    assert_bit_for_bit(got, held(rank, tp, dp, True, stage))
    assert checkpoint.read_state(path)["rank"] == 0


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [  # (tp, dp, ZeRO stage)
        ((1, 3, 1), (2, 1, 1)),
        ((1, 2, 1), (1, 3, 1)),
        ((2, 2, 1), (3, 1, 1)),
        ((3, 1, 1), (2, 2, 1)),
        ((2, 2, 0), (1, 3, 1)),
        ((1, 1, 1), (1, 3, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk_bytes", [32, 2**26])
def test_any_layout_loads_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: tuple, loaded: tuple, chunk_bytes: int
) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", chunk_bytes)
    assert len(set(on_ranks(saved[0] * saved[1], save_layout, tmp_path, tmp_path / "root", *saved))) == 1
    assert sorted(os.listdir(tmp_path / "root")) == ["iter_0000100", "latest"]
    files = {file.name for file in (tmp_path / "root" / "iter_0000100").iterdir()}
    assert {Path(file).suffix for file in files} == {".safetensors", ".json"}
    on_ranks(loaded[0] * loaded[1], load_layout, tmp_path, tmp_path / "root", *loaded)


def test_one_process_loads_what_many_saved(tmp_path: Path) -> None:
    """Without torch.distributed at all."""
    on_ranks(3, save_layout, tmp_path, tmp_path / "root", 1, 3, 1)
    got = held(0, 1, 1, False)
    checkpoint.load(tmp_path / "root" / "iter_0000100", got)
    assert_bit_for_bit(got, held(0, 1, 1, True))


def save_replicas(rank: int, root: Path) -> None:
    replicated = {f"layer{i}": LocalShard((64, 8), (0, 0), (64, 8), 0, 512, torch.arange(512.0) + i) for i in range(8)}
    checkpoint.save(root, 1, replicated, {})


def test_replicas_are_written_once_and_by_turns(tmp_path: Path) -> None:
    on_ranks(2, save_replicas, tmp_path, tmp_path / "root")
    written = manifest.read_manifest(tmp_path / "root" / "iter_0000001")
    chunks = [chunk for name in written.tensors for chunk in written.chunks(name)]
    assert len(chunks) == 8
    assert sorted(chunk.file for chunk in chunks) == ["rank_00000.safetensors"] * 4 + ["rank_00001.safetensors"] * 4
    sizes = [file.stat().st_size for file in (tmp_path / "root" / "iter_0000001").glob("*.safetensors")]
    assert max(sizes) < 4 * 2048 + 1000


def save_spread(rank: int, root: Path) -> None:
    """Rank 0 alone holds much, so the tensors that both hold should go to rank 1."""
    mine = {"both": LocalShard((50,), (0,), (50,), 0, 50, torch.ones(50))}
    if rank == 0:
        mine["big"] = LocalShard((100,), (0,), (100,), 0, 100, torch.ones(100))
    checkpoint.save(root, 1, mine, {})


def test_replicas_go_to_the_least_laden_rank(tmp_path: Path) -> None:
    on_ranks(2, save_spread, tmp_path, tmp_path / "root")
    written = manifest.read_manifest(tmp_path / "root" / "iter_0000001")
    assert written.chunks("both")[0].file == "rank_00001.safetensors"
    assert written.chunks("big")[0].file == "rank_00000.safetensors"


def refused(error: type[Exception], function: Callable[[], Any]) -> str:
    """The message of the error that the function raises."""
    with pytest.raises(error) as info:
        function()
    return str(info.value)


def save_with_hole(rank: int, root: Path) -> str:
    mine = held(rank, 1, 3, True)
    if rank == 1:
        row = mine["row"]
        mine["row"] = LocalShard(row.global_shape, row.offset, row.local_shape, row.start, row.stop - 2, row.data[:-2])
    return refused(ValueError, lambda: checkpoint.save(root, 100, mine, {}))


def test_a_hole_at_save_is_everyones_error(tmp_path: Path) -> None:
    outcomes = on_ranks(3, save_with_hole, tmp_path, tmp_path / "root")
    message = "tensor 'row' of shape (9, 11) is not held exactly once by the ranks: "
    message += "elements [5:6, 9:11] are missing"
    assert outcomes == [message] * 3
    assert not (tmp_path / "root").exists()


def save_with_overlap(rank: int, root: Path) -> str:
    """Rank 0 holds a vector, rank 1 its first half: by their offsets alone they would be replicas."""
    stop = 8 if rank == 0 else 4
    mine = {"x": LocalShard((8,), (0,), (8,), 0, stop, torch.ones(stop))}
    return refused(ValueError, lambda: checkpoint.save(root, 100, mine, {}))


def test_an_overlap_at_save_is_refused(tmp_path: Path) -> None:
    for text in on_ranks(2, save_with_overlap, tmp_path, tmp_path / "root"):
        assert "tensor 'x'" in text and "elements [0:4] are given 2 times" in text
    assert not (tmp_path / "root").exists()


def save_unlike(rank: int, root: Path) -> str:
    shape = (8,) if rank == 0 else (4, 2)
    mine = {"x": LocalShard(shape, (0,) * len(shape), shape, 0, 8, torch.ones(8))}
    return refused(ValueError, lambda: checkpoint.save(root, 100, mine, {}))


def test_ranks_that_disagree_about_a_tensor(tmp_path: Path) -> None:
    for text in on_ranks(2, save_unlike, tmp_path, tmp_path / "root"):
        assert text == "tensor 'x' is float32 of shape (8,) on rank 0, but float32 of shape (4, 2) on rank 1"


def save_on_full_disk(rank: int, root: Path) -> str:
    """Rank 1 may write 100 bytes a file; afterwards the disk has room again."""
    checkpoint.save(root, 50, held(rank, 1, 3, True), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    outcome = refused(RuntimeError, lambda: checkpoint.save(root, 100, held(rank, 1, 3, True), {}))
    assert checkpoint.find(root) == root / "iter_0000050"
    dist.barrier()
    assert sorted(os.listdir(root)) == ["iter_0000050", "latest"]
    dist.barrier()  # else rank 0 begins the next save while others still look
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    checkpoint.save(root, 100, held(rank, 1, 3, True), {})
    return outcome


def test_one_rank_that_cannot_write(tmp_path: Path) -> None:
    for text in on_ranks(3, save_on_full_disk, tmp_path, tmp_path / "root"):
        assert "iter_0000100 failed on rank 1: /" in text and text.endswith("/rank_00001.safetensors: File too large")
        assert "rank 0" not in text and "rank 2" not in text
    assert sorted(os.listdir(tmp_path / "root")) == ["iter_0000050", "iter_0000100", "latest"]


def save_into_folders_of_its_own(rank: int, root: Path, leftover: bool) -> str:
    """Save where `--save` names a disk of each node: every rank has a root that the others do not see."""
    mine = root / str(rank)
    if rank == 1 and leftover:
        (mine / ".iter_0000100.partial").mkdir(parents=True)
    return refused(RuntimeError, lambda: checkpoint.save(mine, 100, held(rank, 1, 2, True), {}))


@pytest.mark.parametrize("leftover", [False, True])
def test_a_folder_that_ranks_do_not_share(tmp_path: Path, leftover: bool) -> None:
    for text in on_ranks(2, save_into_folders_of_its_own, tmp_path, tmp_path, leftover):
        assert "--save must be a folder shared by all ranks" in text
        assert ("rank_00001.safetensors is missing" if leftover else "made by rank 0, is not here") in text
    assert list(tmp_path.glob("*/iter_*")) == list(tmp_path.glob("*/latest")) == []


class Unsendable(Exception):
    """An error that pickle cannot carry, as some of native libraries are."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


def save_with_unsendable_error(rank: int, root: Path) -> str:
    def broken(tensor: torch.Tensor) -> memoryview:
        raise Unsendable("out of luck")

    if rank == 1:
        tensor_file.host_bytes = broken
    return refused(RuntimeError, lambda: checkpoint.save(root, 100, held(rank, 1, 2, True), {}))


def test_an_error_that_cannot_be_sent_does_not_hang(tmp_path: Path) -> None:
    for text in on_ranks(2, save_with_unsendable_error, tmp_path, tmp_path / "root"):
        assert "failed on rank 1: Unsendable: out of luck" in text


def load_damaged(rank: int, path: Path) -> str:
    return refused(ValueError, lambda: checkpoint.load(path, held(rank, 1, 3, False)))


def test_damage_that_one_rank_meets_is_everyones_error(tmp_path: Path) -> None:
    on_ranks(3, save_layout, tmp_path, tmp_path / "root", 1, 3, 1)
    path = tmp_path / "root" / "iter_0000100"
    content = bytearray((path / "rank_00002.safetensors").read_bytes())
    content[-5] ^= 4
    (path / "rank_00002.safetensors").write_bytes(content)
    for text in on_ranks(3, load_damaged, tmp_path, path):
        assert f"--load {path}: rank_00002.safetensors is damaged: tensor " in text
    (path / "rank_00002.safetensors").write_bytes(content[:-1])
    for text in on_ranks(3, load_damaged, tmp_path, path):
        assert f"--load {path}: rank_00002.safetensors is damaged" in text
    (path / "manifest.json").unlink()
    for text in on_ranks(3, load_damaged, tmp_path, path):
        assert text == f"--load {path} is not a whole checkpoint: it has no manifest.json"


def pipeline_stage(rank: int, tied: str) -> dict[str, LocalShard]:
    """Two stages with a layer each; the table `tied` on both."""
    layer = LocalShard((4,), (0,), (4,), 0, 4, torch.full((4,), float(rank)))
    return {f"layer{rank}": layer, tied: LocalShard((6, 2), (0, 0), (6, 2), 0, 12, torch.arange(12.0))}


def stages(rank: int, root: Path) -> str:
    path = checkpoint.save(root, 1, pipeline_stage(rank, "table"), {})
    checkpoint.load(path, pipeline_stage(rank, "table"))
    wrong = pipeline_stage(rank, "table" if rank == 0 else "untied")
    return refused(ValueError, lambda: checkpoint.load(path, wrong))


def test_pipeline_stages_with_names_of_their_own(tmp_path: Path) -> None:
    for text in on_ranks(2, stages, tmp_path, tmp_path / "root"):
        assert "is a checkpoint of another model: it lacks 'untied', and this model lacks no tensor" in text
    whole = manifest.read_manifest(tmp_path / "root" / "iter_0000001")
    assert sorted(whole.tensors) == ["layer0", "layer1", "table"]
    assert len(whole.chunks("table")) == 1


def save_until_killed(rank: int, root: Path) -> str:
    """Rank 1 dies in the middle of the second save."""
    checkpoint.save(root, 1, held(rank, 1, 2, True), {"rank": rank})
    if rank == 1:
        tensor_file.host_bytes = lambda tensor: os._exit(1)
    with contextlib.suppress(RuntimeError):
        checkpoint.save(root, 2, held(rank, 1, 2, True), {})
        return "saved"
    return "failed"


def test_a_rank_that_dies_during_a_save(tmp_path: Path) -> None:
    with pytest.raises(EOFError):  # rank 1 has no last word
        on_ranks(2, save_until_killed, tmp_path, tmp_path / "root")
    assert checkpoint.find(tmp_path / "root") == tmp_path / "root" / "iter_0000001"
    assert not (tmp_path / "root" / "iter_0000002").exists()
    on_ranks(2, load_layout, tmp_path, tmp_path / "root", 1, 2, 1)


def find_on_ranks(rank: int, root: Path, unseen: Path) -> str:
    """A rank whose view of the file system lags behind asks rank 0."""
    path = checkpoint.find(root if rank == 0 else unseen, dist.group.WORLD)
    assert path == root / "iter_0000100"
    return refused(ValueError, lambda: checkpoint.find(root / "iter_0000007", dist.group.WORLD))


def test_rank_0_finds_for_all(tmp_path: Path) -> None:
    on_ranks(1, save_layout, tmp_path, tmp_path / "root", 1, 1, 1)
    for text in on_ranks(2, find_on_ranks, tmp_path, tmp_path / "root", tmp_path / "unseen"):
        assert "iter_0000007 is not a whole checkpoint: there is no such folder" in text


def load_with_lagging_view(rank: int, path: Path, lagging: Path) -> list[str]:
    """The tensors that came, each checked bit for bit."""
    got = held(rank, 1, 2, False)
    checkpoint.load(path if rank == 0 else lagging, got)
    assert_bit_for_bit(got, held(rank, 1, 2, True))
    return sorted(got)


def test_rank_0_reads_the_manifest_for_all(tmp_path: Path) -> None:
    """One read of a file that may be tens of megabytes, so that all ranks agree on the contents."""
    on_ranks(1, save_layout, tmp_path, tmp_path / "root", 1, 1, 1)
    path, lagging = tmp_path / "root" / "iter_0000100", tmp_path / "lagging"
    shutil.copytree(path, lagging)
    (lagging / "manifest.json").unlink()
    assert on_ranks(2, load_with_lagging_view, tmp_path, path, lagging) == [sorted(MODEL)] * 2


def save_beside_training(rank: int, root: Path) -> None:
    """Save as `--async-save` does: from a thread, over a group of its own, during the collectives of a step."""
    group = dist.new_group(backend="gloo")
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(checkpoint.save, root, 100, held(rank, 1, 2, True), {"rank": rank}, group)
        for _ in range(50):
            total = torch.ones(1000)
            dist.all_reduce(total)
            assert torch.equal(total, torch.full((1000,), 2.0))
        assert saving.result() == root / "iter_0000100"


def test_a_save_from_a_thread(tmp_path: Path) -> None:
    on_ranks(2, save_beside_training, tmp_path, tmp_path / "root")
    assert (tmp_path / "root" / "latest").read_text().strip() == "iter_0000100"
    on_ranks(2, load_layout, tmp_path, tmp_path / "root", 2, 1, 1)  # which compares bit for bit
