"""Checkpoints in the memory of nodes are loaded after a failure, in any layout, on any nodes.

Ranks of a test are on nodes that they name themselves (MEGAZERO_NODE), with folders of their own.
"""

import contextlib
import datetime
import errno
import itertools
import json
import logging
import multiprocessing as mp
import os
import re
import resource
import shutil
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megazero import checkpoint
from megazero.checkpoint import AgreedFailure, MemoryCheckpoints, chunk_files, in_memory, manifest, tensor_file
from megazero.checkpoint.in_memory import Held, whole
from megazero.checkpoint.nodes import Nodes
from megazero.checkpoint.shards import LocalShard
from megazero.engine.model.stage import declare
from megazero.flags.cli import parse
from megazero.flags.config import Config
from megazero.log import log
from megazero.planner.bytes import estimate
from megazero.planner.parameter_counts import num_parameters
from megazero.planner.plan_report import summary
from megazero.planner.run_plan import make_plan, plan_config
from megazero.run.training_run import TrainingRun
from megazero.units import size
from megazero.world import Node, this_node
from tests.helpers.chains import LAYOUTS, Curve, configured, deviation, make_corpus
from tests.helpers.ranks import RankError
from tests.helpers.rings import by_default
from tests.parallel.runs import configured as small
from tests.parallel.runs import names, quietly, run_of, write_corpus


class Outcome(NamedTuple):
    """Losses and messages of a rank of `attempt`."""

    curve: Curve
    said: list[str]  # messages, "WARNING: " before those of that level


class Heard(logging.Filter):
    """Keeps all messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        warns = "WARNING: " if record.levelno == logging.WARNING else ""
        self.texts.append(warns + record.getMessage())
        return True


@contextlib.contextmanager
def hearing() -> Iterator[list[str]]:
    heard = Heard()
    log.addFilter(heard)
    try:
        yield heard.texts
    finally:
        log.removeFilter(heard)


def attempt(rank: int, config: Config, nodes: Sequence[str], until: int, file_limit: int = -1) -> Outcome:
    """Resume, and train until iteration `until`, as a run that is then killed: it saves nothing more.

    Args:
        nodes: each rank's.
        file_limit: bytes that rank 0 can write to a file; -1: any number.
    """
    os.environ["MEGAZERO_NODE"] = nodes[rank]
    if rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
    options, found = config.checkpoint, Curve()
    with hearing() as said, contextlib.redirect_stdout(open(os.devnull, "w")):
        run = run_of(rank, len(nodes), config)
        _, run.trainer.progress = run.loader.resume()
        while run.trainer.progress.iteration < until:
            record = run.trainer.iterate()
            found.append((record["iteration"], record["loss"]))
            if run.trainer.due(options.save_interval):
                run.checkpoints.save(run.trainer.progress)
            if run.checkpoints.copy_due(run.trainer.progress.iteration):
                run.checkpoints.save_in_memory(run.trainer.progress, wait=True)
        run.checkpoints.finish_save()
        run.trainer.train_batches.close()
        run.trainer.engine.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return Outcome(found, said)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)


LONGEST = 9  # iterations of the tests' longest run
WHOLE: dict[tuple[str, str], Curve] = {}  # by layout and precision; all tests have the same corpus


class Runs:
    """Attempts at one run."""

    def __init__(self, ranks: Any, folder: Path) -> None:
        self.ranks, self.corpus = ranks, make_corpus(folder)
        self.disk, self.memory = folder / "saved", folder / "memory"

    def __call__(
        self, name: str, until: int, nodes: str, save_interval: int = 100, precision: str = "fp64", **options: Any
    ) -> Outcome:
        """Make an attempt in a layout of `chains`; nodes: a letter for each rank."""
        limit = options.pop("file_limit", -1)
        options = {"load": str(self.disk), "memory_checkpoint_interval": 2, "save_interval": save_interval} | options
        options |= {"save": str(self.disk), "memory_checkpoint_dir": str(self.memory)}
        config = configured(name, self.corpus, 20, precision, **options)
        found = self.ranks(LAYOUTS[name][0]).run(attempt, config, list(nodes), until, limit)
        assert all(each.curve == found[0].curve for each in found)
        return found[0]

    def whole(self, name: str, until: int, precision: str = "fp64") -> Curve:
        """The curve of a run that nothing interrupts."""
        if (name, precision) not in WHOLE:
            config = configured(name, self.corpus, 20, precision)
            world = LAYOUTS[name][0]
            WHOLE[name, precision] = self.ranks(world).run(attempt, config, ["x"] * world, LONGEST)[0].curve
        assert until <= LONGEST
        return WHOLE[name, precision][:until]

    def folder(self, node: str) -> Path:
        """The folder of a node."""
        (run,) = self.memory.iterdir()
        return run / f"{node}-0"

    def flip(self, node: str, iteration: int, file: str) -> None:
        """Change a bit near the end of a file on a node."""
        flip(self.folder(node) / f"iter_{iteration:07d}" / file)

    def lose(self, *nodes: str) -> None:
        for node in nodes:
            shutil.rmtree(self.folder(node))


@pytest.fixture
def runs(ranks: Any, tmp_path: Path) -> Runs:
    return Runs(ranks, tmp_path)


# -- loaded from memory


@pytest.mark.parametrize(("nodes", "words"), by_default([("aa", "1 node"), ("ab", "2 nodes")], 1))
def test_the_same_layout_goes_on_to_the_bit(runs: Runs, nodes: str, words: str) -> None:
    """Killed after iteration 7: 6 is in memory, 5 on the disk."""
    wanted = runs.whole("dp2 zero1", 8, "fp32")
    first = runs("dp2 zero1", 7, nodes, save_interval=5, precision="fp32")
    rest = runs("dp2 zero1", 8, nodes, save_interval=5, precision="fp32")
    assert first.curve + rest.curve == wanted[:7] + wanted[6:]
    assert any(text.startswith(f"loaded iteration 6 from the memory of {words} in ") for text in rest.said)
    assert any(text.endswith("(the disk has 5)") for text in rest.said)


@pytest.mark.second
@pytest.mark.parametrize(
    ("first", "before", "second", "after"),
    [
        ("dp4 zero2", "abcd", "dp3 zero3", "abc"),  # a node is gone, and the next one has its part
        ("dp4 zero2", "abcd", "pp2 interleaved", "ca"),  # two that are no neighbours are gone; the others change places
        ("pp2 tp2", "aabb", "dp4 zero2", "ebbb"),  # another number of ranks on a node, and a new node, with rank 0
        pytest.param("tp2 dp2 zero3", "abbb", "alone", "a", marks=pytest.mark.slow),
        pytest.param("dp2 zero1", "ab", "pp2 dp2 zero-bubble", "dacb", marks=pytest.mark.slow),
    ],
)
def test_another_layout_goes_on(runs: Runs, first: str, before: str, second: str, after: str) -> None:
    """Killed after iteration 5; the nodes that are no letter of `after` are lost."""
    wanted = runs.whole("alone", 6)
    assert deviation(runs(first, 5, before).curve, wanted) < 1e-10
    runs.lose(*set(before) - set(after))
    rest = runs(second, 6, after)
    assert [iteration for iteration, _ in rest.curve] == [5, 6], rest.said
    assert deviation(rest.curve, wanted) < 1e-10


# -- copies that are lost or damaged


@pytest.mark.second
def test_neighbours_that_are_lost_at_once_cost_the_steps_since_the_disk(runs: Runs) -> None:
    """Nodes b and c of four: both copies of b's part are gone."""
    wanted = runs.whole("dp4 zero2", 5, "fp32")
    runs("dp4 zero2", 5, "abcd", save_interval=3, precision="fp32")
    runs.lose("b", "c")
    rest = runs("dp4 zero2", 5, "abcd", save_interval=3, precision="fp32")
    assert rest.curve == wanted[3:]
    lost = "iteration 4 in memory has lost both copies of rank_00001.safetensors"
    assert f"{lost}: {runs.disk / 'iter_0000003'} is loaded" in rest.said
    assert not list(runs.folder("a").glob("iter_*2"))  # another attempt's


@pytest.mark.second
def test_a_lost_node_is_replaced_by_an_empty_one(runs: Runs) -> None:
    """Ranks of the new node ask others for their part."""
    wanted = runs.whole("dp4 zero3 in twos", 5, "fp32")
    runs("dp4 zero3 in twos", 5, "abcd", precision="fp32")
    runs.lose("a", "c")
    rest = runs("dp4 zero3 in twos", 5, "ebfd", precision="fp32")
    assert rest.curve == wanted[4:]
    assert any(text.startswith("loaded iteration 4 from the memory of 2 nodes in ") for text in rest.said)
    assert any(text.endswith(" s (the disk has none)") for text in rest.said)


@pytest.mark.second
def test_nodes_lost_one_after_the_other_cost_a_step_each(runs: Runs) -> None:
    """Iterations 4 and, without node b, 5 are copied: c is lost next, long before 8, the interval's."""
    wanted = runs.whole("alone", 6)
    runs("dp3 zero3", 5, "abc", memory_checkpoint_interval=4)
    runs.lose("b")
    assert len(runs("dp2 zero1", 7, "ac", memory_checkpoint_interval=4).curve) == 3
    runs.lose("c")
    rest = runs("alone", 6, "a", memory_checkpoint_interval=4)
    assert [iteration for iteration, _ in rest.curve] == [6], rest.said
    assert deviation(rest.curve, wanted) < 1e-10


@pytest.mark.second
def test_damage_is_repaired_from_the_other_copy(runs: Runs) -> None:
    """The file of each rank is damaged on its own node."""
    wanted = runs.whole("dp2 zero3", 5, "fp32")
    runs("dp2 zero3", 5, "ab", precision="fp32")
    runs.flip("a", 4, "rank_00000.safetensors")
    runs.flip("b", 4, "rank_00001.safetensors")
    rest = runs("dp2 zero3", 5, "ab", precision="fp32")
    assert rest.curve == wanted[4:]
    files = "rank_00000.safetensors of a-0, rank_00001.safetensors of b-0"
    assert f"WARNING: iteration 4 in memory is damaged: {files}; trying other copies" in rest.said


@pytest.mark.second
@pytest.mark.parametrize(
    ("damaged", "file", "begins", "words"),
    [
        ([8], "rank_00001.safetensors", 7, "loaded iteration 6 from the memory of 2 nodes"),
        pytest.param([8, 6], "rank_00001.safetensors", 6, "iter_0000005 is loaded", marks=pytest.mark.slow),
        pytest.param([8], "manifest.json", 7, "loaded iteration 6 from the memory of 2 nodes", marks=pytest.mark.slow),
        ([8, 6], "state.json", 6, "no node has a checkpoint in memory: "),
    ],
)
def test_damage_of_both_copies_costs_a_checkpoint(
    runs: Runs, damaged: list[int], file: str, begins: int, words: str
) -> None:
    """Memory has 6 and 8, the disk 5."""
    wanted = runs.whole("dp2 zero3", 9, "fp32")
    runs("dp2 zero3", 9, "ab", save_interval=5, precision="fp32")
    for iteration in damaged:
        runs.flip("a", iteration, file)
        runs.flip("b", iteration, file)
    rest = runs("dp2 zero3", 9, "ab", save_interval=5, precision="fp32")
    assert rest.curve == wanted[begins - 1 :]
    assert any(words in text for text in rest.said), rest.said


@pytest.mark.second
def test_damage_of_all_copies_of_the_only_checkpoint_ends_the_start(runs: Runs) -> None:
    """The weights are no initial ones any more. The next start begins at iteration 1."""
    runs("dp2 zero3", 3, "ab")
    for node in "ab":
        runs.flip(node, 2, "rank_00001.safetensors")
    with pytest.raises(RankError, match=r"Damaged: iteration 2 in memory is damaged: .* start again to begin"):
        runs("dp2 zero3", 3, "ab")
    assert [iteration for iteration, _ in runs("dp2 zero3", 3, "ab").curve] == [1, 2, 3]


@pytest.mark.second
@pytest.mark.parametrize("deep", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_damage_of_the_disk_leaves_memory(runs: Runs, deep: bool) -> None:
    """Memory has 4. The disk has 3 and 6: both lack a file; or the tensors of 6 are damaged, which the load notices."""
    wanted = runs.whole("dp2 zero3", 7, "fp32")
    runs("dp2 zero3", 6, "ab", save_interval=3, precision="fp32")
    for folder in runs.disk.glob("iter_*"):
        if not deep:
            (folder / "rank_00001.safetensors").unlink()
        elif folder.name == "iter_0000006":
            flip(folder / "rank_00001.safetensors")
    rest = runs("dp2 zero3", 7, "ab", save_interval=3, precision="fp32")
    assert rest.curve == wanted[4:], rest.said
    damaged = f"WARNING: --load {runs.disk} has no whole checkpoint (iter_0000006: "
    assert deep != any(text.startswith(damaged) for text in rest.said)
    assert any(text.endswith(f" s (the disk has {'3' if deep else 'none'})") for text in rest.said)
    if not deep:
        runs.lose("a", "b")
        (runs.disk / "latest").write_text("iter_0000003\n")
        with pytest.raises(RankError, match=r"Damaged: --load .* has no whole checkpoint"):
            runs("dp2 zero3", 7, "ab", save_interval=3, precision="fp32")


@pytest.mark.second
@pytest.mark.parametrize("copies", [False, True])
def test_a_folder_that_is_full_costs_a_copy(runs: Runs, copies: bool) -> None:
    """Rank 0 cannot write its own file; or only the larger copy of rank 1's."""
    wanted = runs.whole("pp4 by hand", 5, "fp32")
    runs("pp4 by hand", 3, "abcd", precision="fp32")
    own, copy = ((runs.folder("a") / "iter_0000002" / f"rank_{n:05d}.safetensors").stat().st_size for n in (0, 3))
    assert own < copy
    shutil.rmtree(runs.disk)
    limit = own if copies else own - 1
    first = runs("pp4 by hand", 5, "abcd", precision="fp32", file_limit=limit)
    assert first.curve == wanted
    warning = next(text for text in first.said if text.startswith("WARNING: copying iteration 4 to memory failed on"))
    file = f"rank_0000{3 if copies else 0}.safetensors"
    assert f"rank 0: {runs.folder('a')}/.iter_0000004.partial/{file}: File too large. Training" in warning
    assert warning.endswith("Training continues; the next copy is attempted as scheduled")
    assert not [path for path in runs.memory.rglob("*") if path.is_file()]


def test_copies_that_fail_leave_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any failures the newest whole one is still found."""
    memory = MemoryCheckpoints(str(tmp_path / "memory"), tmp_path / "saved", None)
    shards = {"model.w": LocalShard((3,), (0,), (3,), 0, 3, torch.ones(3))}

    def save(iteration: int) -> list[int]:
        with contextlib.suppress(AgreedFailure):
            memory.save(iteration, shards, {"iteration": iteration} | memory.stamp())
        return [each.iteration for each in memory.find(None, {})]

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert save(2) == [2]
    for iteration, stage in enumerate(("_copy", "_write_texts", "_publish", "_plan", "_copy"), 3):
        with monkeypatch.context() as broken:
            broken.setattr(MemoryCheckpoints, stage, fail)
            assert save(iteration) == [2], stage
    assert save(8) == [8, 2] and save(9) == [9, 8]
    (tmp_path / "theirs").mkdir()
    for name in ("iter_0000005", "iter_0000010", "iter_0000012"):  # links of a user are deleted, not their targets
        (memory.folder / name).symlink_to(tmp_path / ("theirs" if name != "iter_0000012" else "gone"))
    assert save(10) == [10, 9] and save(12) == [12, 10] and save(13) == [13, 12] and (tmp_path / "theirs").is_dir()


def test_a_copy_whose_file_has_another_length_is_not_whole(tmp_path: Path) -> None:
    """It is passed over before it is read: the one before it, or the disk's, is loaded at once."""
    memory = MemoryCheckpoints(str(tmp_path / "memory"), tmp_path / "saved", None)
    shards = {"model.w": LocalShard((3,), (0,), (3,), 0, 3, torch.ones(3))}
    for iteration in (2, 4):
        memory.save(iteration, shards, {"iteration": iteration} | memory.stamp())
    file = memory.folder / "iter_0000004" / "rank_00000.safetensors"
    whole_file = file.read_bytes()
    for content, found in ((whole_file, [4, 2]), (whole_file[:-1], [2]), (whole_file + b"x", [2]), (b"", [2])):
        file.write_bytes(content)
        assert [each.iteration for each in memory.find(None, {})] == found, len(content)


SIZES = (500, 90, 10)  # elements of the tensor of each rank


def keep(rank: int, save: str, memory: str) -> tuple[list[int], dict[str, bytes], bool, list[str]]:
    """Save on three nodes, in pieces of 128 bytes; damage the files of ranks 0 and 2 on their own nodes, and load."""
    node = mock.patch.dict(os.environ, MEGAZERO_NODE="abc"[rank])
    with node, mock.patch.object(chunk_files, "PIECE_BYTES", 128), hearing() as said:
        store, n = MemoryCheckpoints(memory, Path(save), dist.group.WORLD), SIZES[rank]
        data = torch.arange(n, dtype=torch.float32) + rank
        shard = LocalShard((n,), (0,), (n,), 0, n, data)
        folder = store.save(4, {f"model.w{rank}": shard}, {"iteration": 4} | store.stamp(), dist.group.WORLD)
        files = {path.name: path.read_bytes() for path in folder.glob("rank_*")}
        if rank != 1:
            flip(folder / f"rank_{rank:05}.safetensors")
        found = next(store.find(None, {}))
        loaded = replace(shard, data=torch.zeros(n))
        store.load(found, {f"model.w{rank}": loaded})
        return store.bytes_per_node({f"model.w{rank}": shard}), files, torch.equal(loaded.data, data), said


def test_a_node_keeps_whole_copies_of_the_one_before(ranks: Any, tmp_path: Path) -> None:
    """Files have several pieces, and any lengths; a damaged one is read from the next node."""
    found = ranks(3).run(keep, str(tmp_path / "saved"), str(tmp_path / "memory"))
    own = [files[f"rank_{rank:05}.safetensors"] for rank, (_, files, _, _) in enumerate(found)]
    for rank, (planned, files, same, said) in enumerate(found):
        assert planned == [2 * 4 * (SIZES[node] + SIZES[node - 1]) for node in range(3)]
        assert files == {f"rank_{each:05}.safetensors": own[each] for each in (rank, (rank - 1) % 3)}
        damaged = "rank_00000.safetensors of a-0, rank_00002.safetensors of c-0"
        assert same and f"WARNING: iteration 4 in memory is damaged: {damaged}; trying other copies" in said


def ask(rank: int, save: str, memory: str) -> list[float]:
    """Save on node a, and on b with two ranks; then b is new. Load there."""
    with mock.patch.dict(os.environ, MEGAZERO_NODE="abb"[rank]):
        store, shape = MemoryCheckpoints(memory, Path(save), dist.group.WORLD), (2,)
        shard = LocalShard(shape, (0,), shape, 0, 2, torch.full(shape, rank + 0.5))
        folder = store.save(4, {f"model.w{rank}": shard}, {"iteration": 4} | store.stamp(), dist.group.WORLD)
        if rank == 1:
            shutil.rmtree(folder)
        loaded = replace(shard, data=torch.zeros(shape))
        store.load(next(store.find(None, {})), {f"model.w{rank}": loaded})
        return loaded.data.tolist()


def test_several_ranks_ask_a_node_with_one(ranks: Any, tmp_path: Path) -> None:
    """Each rank of a new node asks one of the node that has the file, which has fewer."""
    found = ranks(3).run(ask, str(tmp_path / "saved"), str(tmp_path / "memory"))
    assert found == [[0.5, 0.5], [1.5, 1.5], [2.5, 2.5]]


def test_a_start_keeps_the_copy_that_it_loads_alone(tmp_path: Path) -> None:
    """Not another one of that iteration, which a node that was lost for a while may have."""
    memory = MemoryCheckpoints(str(tmp_path / "memory"), tmp_path / "saved", None)
    shards = {"model.w": LocalShard((3,), (0,), (3,), 0, 3, torch.ones(3))}
    for iteration in (2, 4):
        memory.save(iteration, shards, {"iteration": iteration} | memory.stamp())
    found, _ = memory.find(None, {})
    memory.settle(found)
    assert [each.iteration for each in memory.find(None, {})] == [4] and memory.newest == 4
    memory.settle(found._replace(digest=found.digest ^ 1))
    assert list(memory.find(None, {})) == []


# -- which one


def test_a_copy_is_newer_by_its_save_and_by_its_iteration(tmp_path: Path) -> None:
    """Iteration 8 was copied before a run went back to 4: the disk's 6, saved since then, is the newer one."""
    saved, shards = tmp_path / "saved", {"model.w": LocalShard((3,), (0,), (3,), 0, 3, torch.ones(3))}
    memory = MemoryCheckpoints(str(tmp_path / "memory"), saved, None)
    memory.save(8, shards, {"iteration": 8} | memory.stamp())
    assert [each.iteration for each in memory.find(None, {})] == [8]
    disk = checkpoint.save(saved, 6, shards, {"iteration": 6})
    assert [each.iteration for each in memory.find(disk, {})] == []
    again = MemoryCheckpoints(str(tmp_path / "memory"), saved, None)  # of a start after that save
    again.save(5, shards, {"iteration": 5} | again.stamp())
    assert [each.iteration for each in again.find(disk, {})] == []
    again.save(7, shards, {"iteration": 7} | again.stamp())
    assert [(each.iteration, each.disk) for each in again.find(disk, {})] == [(7, 6)]


@pytest.mark.second
def test_an_explicit_checkpoint_is_loaded(runs: Runs) -> None:
    """The run goes back to iteration 3: its 4 in memory is abandoned."""
    wanted = runs.whole("dp2 zero1", 5, "fp32")
    runs("dp2 zero1", 5, "ab", save_interval=3, precision="fp32")
    explicit, away = str(runs.disk / "iter_0000003"), runs.disk.with_name("away")
    shutil.copytree(runs.folder("b"), away)
    rest = runs("dp2 zero1", 4, "ab", precision="fp32", load=explicit, memory_checkpoint_interval=3)
    assert rest.curve == wanted[3:4]
    assert [*runs.folder("a").iterdir()] == []
    shutil.rmtree(runs.folder("b"))  # it was absent, and comes back
    shutil.copytree(away, runs.folder("b"))
    (runs.disk / "latest").write_text("iter_0000003\n")
    assert runs("dp2 zero1", 4, "ab", precision="fp32").curve == wanted[3:4]


@pytest.mark.second
def test_memory_that_is_older_than_the_disk_is_deleted(runs: Runs) -> None:
    runs("dp2 zero1", 6, "ab", save_interval=3)
    rest = runs("dp2 zero1", 7, "ab", save_interval=3)
    assert f"iteration 4 in memory is not newer: {runs.disk / 'iter_0000006'} is loaded" in rest.said
    assert [iteration for iteration, _ in rest.curve] == [7] and [*runs.folder("b").iterdir()] == []


@pytest.mark.second
def test_a_deleted_save_folder_is_another_run(runs: Runs) -> None:
    runs("dp2 zero1", 3, "ab")
    shutil.rmtree(runs.disk)
    assert [iteration for iteration, _ in runs("dp2 zero1", 3, "ab").curve] == [1, 2, 3]


@pytest.mark.second
def test_a_branch_resumes_from_its_memory(runs: Runs) -> None:
    """The checkpoint that it began from has a larger save number, of another folder."""
    runs("dp2 zero1", 3, "ab", save_interval=1)
    source = runs.disk.with_name("source")
    runs.disk.rename(source)
    shutil.rmtree(runs.memory)
    branch = {"decay_from": str(source / "iter_0000003"), "decay_iters": 17}
    assert [iteration for iteration, _ in runs("dp2 zero1", 5, "ab", **branch).curve] == [4, 5]
    rest = runs("dp2 zero1", 6, "ab", **branch)
    assert rest.curve == runs.whole("dp2 zero1", 6)[4:] and not [*runs.disk.glob("iter_*")]


def held(iteration: int, number: int, seconds: float, files: str, absent: str = "") -> Held:
    return Held((number, seconds), iteration, 1, tuple(files), tuple(absent))


def test_whole_ones_are_found_newest_first() -> None:
    """8 lacks a file on both nodes. The run has gone back from 9 to 5."""
    first = [held(8, 2, 9.0, "ab", "c"), held(6, 2, 8.0, "ab", "c"), held(5, 2, 7.0, "abc"), held(9, 1, 6.0, "abc")]
    second = [held(8, 2, 9.0, "b", "ac"), held(6, 2, 8.0, "c", "ab"), held(4, 1, 5.0, "abc")]
    found, faults = whole([first, second])
    assert [(each.iteration, each.nodes) for each in found] == [(6, (0, 1)), (5, (0,)), (4, (1,))]
    assert found[0].holders == {"a": [0], "b": [0], "c": [1]}
    assert faults == {8: "iteration 8 in memory has lost both copies of c"}
    damaged = first[2]._replace(digest=2)
    assert [each.digest for each in whole([[damaged], [first[2]]])[0]] == [2, 1]


# -- killed while copying


def serve(rank: int, nodes: str, store: str, config: Config, until: int, stage: str) -> None:
    """A rank of an attempt that is killed: rank 1 kills itself at a stage of the copy of iteration 4."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(nodes), timeout=limit)
    original = getattr(MemoryCheckpoints, stage)

    def stricken(memory: MemoryCheckpoints, *args: Any) -> Any:
        if (Path(memory.folder) / "iter_0000002").exists():  # so this is not the first copy
            os.kill(os.getpid(), signal.SIGKILL)
        return original(memory, *args)

    if rank == 1:
        setattr(MemoryCheckpoints, stage, stricken)
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        attempt(rank, config, nodes, until)


@pytest.mark.second
@pytest.mark.parametrize(
    ("stage", "iteration", "nodes"),
    [("_copy", 2, "2 nodes"), ("_write_texts", 2, "2 nodes"), ("_publish", 4, "1 node")],
)
def test_a_kill_at_any_stage_of_a_copy_leaves_a_whole_one(runs: Runs, stage: str, iteration: int, nodes: str) -> None:
    """Rank 1 is killed by SIGKILL before its part of a stage; then rank 0, which waits for it.

    Before the last stage, node a has all of iteration 4, and gives it its name.
    """
    context = mp.get_context("forkserver")
    options = {"save": str(runs.disk), "load": str(runs.disk), "memory_checkpoint_dir": str(runs.memory)}
    config = configured("dp2 zero1", runs.corpus, 20, "fp32", memory_checkpoint_interval=2, **options)
    ranks = [context.Process(target=serve, args=(r, "ab", f"{runs.disk}-store", config, 5, stage)) for r in range(2)]
    for process in ranks:
        process.start()
    ranks[1].join(60)
    ranks[0].join(1)
    ranks[0].kill()
    ranks[0].join()
    assert ranks[1].exitcode == -signal.SIGKILL
    assert [*runs.folder("b").glob(".iter_*4.partial/*")], "it was killed at another time"
    rest = runs("dp2 zero1", 6, "ab", precision="fp32")
    assert rest.curve == runs.whole("dp2 zero1", 6, "fp32")[iteration:]
    assert any(text.startswith(f"loaded iteration {iteration} from the memory of {nodes} in ") for text in rest.said)
    assert not [*runs.folder("b").glob(".iter_*")]


# -- a run that is not killed


def test_a_copy_that_is_slow_costs_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the copy of iteration 2 until iteration 5: 4 is not copied, and 6 is. The end deletes all."""
    gate, write, seen = threading.Event(), tensor_file.host_bytes, []

    def slow(tensor: torch.Tensor) -> memoryview:
        assert gate.wait(20)
        return write(tensor)

    options = {"load": str(tmp_path / "saved"), "memory_checkpoint_interval": 2}
    options |= {"save_interval": 100, "memory_checkpoint_dir": str(tmp_path / "memory")}
    config = small(write_corpus(tmp_path / "small"), tmp_path / "saved", 7, **options)
    run = run_of(0, 1, config)
    monkeypatch.setattr(tensor_file, "host_bytes", slow)
    step = run.trainer.engine.train_step

    def watched(iteration: int, batches: Any, samples: int) -> Any:
        if iteration == 5:
            gate.set()
            while not run.checkpoints.memory_saver.idle:
                time.sleep(0.01)
        if iteration == 7:
            assert run.checkpoints.memory_saver.finish() is not None
            seen.extend(path.name for path in run.checkpoints.memory.folder.iterdir())
            found = estimate.stage_bytes(run.config, run.mesh.layout, 0, "cpu").memory["host"]
            assert found == run.trainer.engine.tracker.now["host"] == run.checkpoints.memory_saver.num_bytes > 0
        return step(iteration, batches, samples)

    run.trainer.engine.train_step = watched
    with hearing() as said:
        quietly(run)
    assert sorted(seen) == ["iter_0000002", "iter_0000006"]
    assert "iteration 4 is not saved in memory: 2 is still being copied" in said
    assert not [*(tmp_path / "memory").iterdir()] and names(tmp_path / "saved") == [7]


@pytest.mark.second
@pytest.mark.parametrize(("name", "nodes"), [("dp2 zero1", "aa"), ("dp2 zero0", "ab"), ("pp4 by hand", "abbc")])
def test_the_memory_of_a_node_is_foretold(runs: Runs, name: str, nodes: str) -> None:
    """Bytes of all tensors in the files of the fullest node."""
    said = runs(name, 4, nodes).said
    files = {node: [*runs.folder(node).rglob("*.safetensors")] for node in set(nodes)}
    held = {f"{node}-0": sum(map(tensor_bytes, paths)) for node, paths in files.items()}
    line = next(text for text in said if text.startswith("checkpoints in memory take at most "))
    fullest = max(sorted(held), key=lambda node: held[node])
    assert line.startswith(f"checkpoints in memory take at most {size(held[fullest])} of node {fullest}; "), held
    assert ("there is no other node" in line) == (len(files) == 1)


@pytest.mark.parametrize(("world", "times"), [(4, 2.0), (8, 2.0), (16, 2.0), (32, 1.0)])
def test_a_plan_has_the_memory_of_a_node(world: int, times: float) -> None:
    """Nodes of eight devices hold a checkpoint, of weights and two moments in fp32, once or twice."""
    flags = (
        "--plan --device-type h100-80gb --num-layers 4 --hidden-size 2048 --num-attention-heads 16 --vocab-size 50304 "
    )
    flags += f"--global-batch-size 32 --world-size {world} --save x --memory-checkpoint-interval 5"
    config, layout, device = plan_config(parse(flags.split()))
    lines, whole = summary(make_plan(config, layout, device)), 12 * num_parameters(declare(config.model)) / 1e9
    assert f"checkpoints in memory: {times * whole:.1f} GB per node in --memory-checkpoint-dir" in lines
    staged = f"host memory: {whole * min(8, world) / world:.1f} GB per node for checkpoints on their way to memory"
    assert staged in lines


def tensor_bytes(path: Path) -> int:
    """Bytes of a safetensors file after its header."""
    content = path.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


def test_too_little_memory_is_announced(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryCheckpoints(str(runs.memory), runs.disk, None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=159))
    shard = LocalShard((10, 4), (0, 0), (10, 4), 0, 40, torch.zeros(40))
    with hearing() as said:
        memory.announce({"w": shard})
    assert said[0].startswith("WARNING: checkpoints in memory take at most 320 bytes of node ")
    assert "; 159 bytes are free for them in " in said[0] and "copies will fail" in said[0]
    with hearing() as said:  # those of an earlier start, which are replaced
        (memory.folder / "old").write_bytes(bytes(161))
        memory.announce({"w": shard})
    assert not said[0].startswith("WARNING") and "; 320 bytes are free for them in " in said[0]


def test_a_folder_that_cannot_be_used_is_refused(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made in it, nor where a link points."""
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    victim, run = runs.memory / "victim", in_memory.run_folder("", str(runs.disk)).name
    victim.mkdir(parents=True)
    theirs: dict[str, Callable[[Path], object]] = {
        "is no folder": lambda path: path.touch(),
        "is a link": lambda path: path.symlink_to(victim),
        "belongs to another user": lambda path: (path.mkdir(0o700), os.chown(path, 12345, 12345)),
    }
    lax = {"can be written by others": lambda path: (path.mkdir(), path.chmod(0o777))}
    places = {"given": "", "default": "", "run": run, "node": f"{run}/{this_node().machine}-0"}
    for place, below in places.items():
        for fault, make in (theirs | lax if place == "given" else theirs).items():
            base = runs.memory / f"{place} {fault}"
            folder = base / below
            folder.parent.mkdir(0o700, parents=True, exist_ok=True)
            make(folder)
            monkeypatch.setattr(in_memory, "SHARED_MEMORY", str(base))
            with pytest.raises(
                ValueError, match=f"--memory-checkpoint-dir: {folder} {fault}; name a folder of your own"
            ):
                MemoryCheckpoints("" if place == "default" else str(base), runs.disk, None)
            assert folder.is_symlink() or not folder.is_dir() or not [*folder.iterdir()]
    assert not [*victim.iterdir()]


def test_copies_are_private(runs: Runs) -> None:
    """Also in folders of earlier versions, which others could enter."""
    memory = MemoryCheckpoints(str(runs.memory), runs.disk, None)
    memory.folder.chmod(0o755)
    runs.memory.chmod(0o755)  # as the user made it
    MemoryCheckpoints(str(runs.memory), runs.disk, None)
    modes = [oct(folder.stat().st_mode & 0o777) for folder in (memory.folder, memory.folder.parent, runs.memory)]
    assert modes == ["0o700", "0o700", "0o755"]


# -- nodes


def test_nodes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of torchrun's nodes on one machine, one on another."""
    places = [("x", "0"), ("x", "1"), ("y", "2"), ("x", "1")]
    nodes = Nodes.of([Node(*place) for place in places], 3)
    assert nodes == Nodes(("x-0", "x-1", "y-0"), ((0,), (1, 3), (2,)), 1, 1) and not nodes.leads
    for name in ("MEGAZERO_NODE", "SLURMD_NODENAME", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert this_node() == Node(socket.gethostname(), "0")
    for name, value, machine in (("SLURMD_NODENAME", "n7", "n7"), ("MEGAZERO_NODE", "a/b", "a_b")):
        monkeypatch.setenv(name, value)
        monkeypatch.setenv("GROUP_RANK", "3")
        assert this_node() == Node(machine, "3")


@pytest.mark.parametrize("shape", ["aabb", "aaabccc", "abbbb", "ab", "a", "aaa", "abca"])
def test_each_file_has_a_keeper_on_the_next_node(shape: str) -> None:
    """Both ranks of a pair take the same turn, and no rank has two partners of a kind in one."""
    labels = [Node(letter, "0") for letter in shape]
    sent: dict[tuple[int, int], int] = {}  # (rank, keeper) -> turn
    received: dict[tuple[int, int], int] = {}
    for rank in range(len(shape)):
        for turn, (to, source) in enumerate(Nodes.of(labels, rank).copies()):
            if to is not None:
                sent[rank, to] = turn
            if source is not None:
                received[source, rank] = turn
    assert sent == received
    order = sorted(set(shape), key=shape.index)
    assert len(sent) == (0 if len(set(shape)) == 1 else len(shape))
    kept = {rank: shape[keeper] for rank, keeper in sent}
    following = {letter: order[(at + 1) % len(order)] for at, letter in enumerate(order)}
    assert kept == ({} if len(order) == 1 else {rank: following[letter] for rank, letter in enumerate(shape)})


# -- valid checksums, and contents that no run writes


def forgeries(content: dict[str, Any], deep: Sequence[str], values: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """`content` without each of its keys, and with other values; objects of `deep` too, with the third value."""
    for key, value in content.items():
        yield {name: value for name, value in content.items() if name != key}
        yield from (content | {key: other} for other in values)
        if key in deep and isinstance(value, dict):
            yield from (content | {key: inner} for inner in forgeries(value, deep, values[2:3]))


def rewrite(folder: Path, state: dict[str, Any] | None = None, about: dict[str, Any] | None = None) -> None:
    """Put JSON in place of the state or the manifest of a checkpoint, with the right checksums."""
    about = about or json.loads((folder / "manifest.json").read_text())
    if state is not None:
        (folder / "state.json").write_text(json.dumps(state))
        about["state_crc32"] = zlib.crc32((folder / "state.json").read_bytes())
    about.pop("crc32", None)
    (folder / "manifest.json").write_text(manifest.checked_text(about))


@pytest.mark.second
@pytest.mark.parametrize(
    ("values", "step"),
    [
        ((None, {"a": {"b": 1}}), 4),
        pytest.param((-1, "x", 1.5, [1], {}, None, {"a": {"b": 1}}), 1, marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
@pytest.mark.parametrize("file", ["state.json", "manifest.json"])
def test_contents_that_no_run_writes_are_passed_over(
    tmp_path: Path, file: str, values: Sequence[Any], step: int
) -> None:
    """The disk has iteration 1, memory 2. The copy is loaded if the change is of no account; else the disk's.

    step: between the forgeries that are tried.
    """
    saved, memory, away = tmp_path / "saved", tmp_path / "memory", tmp_path / "away"
    options = {"load": str(saved), "memory_checkpoint_interval": 2, "memory_checkpoint_dir": str(memory)}
    config = small(write_corpus(tmp_path / "small"), saved, 9, **options)

    def start() -> TrainingRun:
        return run_of(0, 1, config)

    first = start()
    first.loader.resume()
    for save in (first.checkpoints.save, lambda progress: first.checkpoints.save_in_memory(progress, wait=True)):
        first.trainer.iterate()
        save(first.trainer.progress)
    folder = first.checkpoints.memory.folder / "iter_0000002"
    for place in (saved, memory):
        shutil.copytree(place, away / place.name)
    content = json.loads((folder / file).read_text())
    loaded = list[int]()
    for forged in itertools.islice(forgeries(content, ["model", "config", "data"], values), 0, None, step):
        for place in (saved, memory):
            shutil.rmtree(place)
            shutil.copytree(away / place.name, place)
        rewrite(folder, **{"state" if file == "state.json" else "about": forged})
        run = start()
        try:
            loaded.append(run.loader.resume()[1].iteration)
        except ValueError as error:  # the run is refused, because it would be another one
            assert type(error) is ValueError and re.match(f"--load {folder}\\b.*(model|split)", str(error)), error
    assert {*loaded} == {1, 2}


@pytest.mark.second
def test_the_copy_of_another_node_is_loaded(runs: Runs) -> None:
    """Node a has all files, and a state with the right checksums that lacks a field."""
    wanted = runs.whole("dp2 zero3", 5, "fp32")
    runs("dp2 zero3", 5, "ab", precision="fp32")
    folder = runs.folder("a") / "iter_0000004"
    state = json.loads((folder / "state.json").read_text())
    del state["updates"]
    rewrite(folder, state)
    rest = runs("dp2 zero3", 5, "ab", precision="fp32")
    assert rest.curve == wanted[4:]
    assert any(text.startswith("loaded iteration 4 from the memory of 1 node in ") for text in rest.said), rest.said
