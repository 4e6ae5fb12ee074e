"""Checkpoints: planning for a thousand pretended ranks, and speed next to the disk's own.

python benchmarks/checkpoint.py --pretend 400 --preset zero-100b
python benchmarks/checkpoint.py --pretend 1024 --preset zero-100b --num-layers 128 --hidden-size 25600 ...
python benchmarks/checkpoint.py --folder /scratch --ranks 2 --mb 512

`--pretend` creates the messages of all ranks to rank 0 and runs rank 0's part: proof of coverage, manifest, and one
rank's plan of a resume. Nothing is allocated or written. Without it, real ranks save and load, next to the same bytes
written and read by one plain process per rank, and next to torch.distributed.checkpoint.
"""

import argparse
import functools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing

from benchmarks.measure import interval
from megazero import checkpoint
from megazero.checkpoint import manifest, planning, storage
from megazero.checkpoint.shards import LocalShard
from megazero.checkpoint.shared_outcome import message_of, value_of_message
from megazero.command.rehearsal.rehearsed_save import pretended_shards
from megazero.engine.model.stage import declare
from megazero.flags.cli import parse
from megazero.flags.resolve import resolve
from megazero.planner.layouts import layout_words

COMPARED = (
    *(("write ours", "write plain"), ("write DCP", "write plain"), ("read ours", "read plain")),
    *(("read DCP", "read plain"), ("stall of async", "copy alone")),
)


# -- pretended ranks


class Timed:
    """Print the seconds of each action."""

    def __init__(self) -> None:
        self.total = 0.0

    def __call__(self, action: str, function: Callable[[], Any], counts: bool = True) -> Any:
        start = time.perf_counter()
        outcome = function()
        seconds = time.perf_counter() - start
        self.total += seconds * counts
        print(f"  {seconds:7.2f} s  {action}", flush=True)
        return outcome


def pretend(world: int, flags: list[str]) -> None:
    """Print the time that planning takes on rank 0, and on any other, of `world` ranks."""
    config, layout = resolve(parse(flags), world, 0, declare)
    print(f"{world} ranks, {layout_words(layout)}, ZeRO stage {config.zero.zero_stage}")
    timed, plans, slowest = Timed(), [], 0.0
    for rank in range(world):
        mine = pretended_shards(config, layout, rank, torch.float32)
        made = time.perf_counter()
        plans.append(message_of(planning.RankPlan.of(mine)))
        slowest = max(slowest, time.perf_counter() - made)
        del mine
    print(f"  {slowest:7.2f} s  a rank's own plan of a save (the slowest); {max(map(len, plans)):,} bytes to rank 0")
    timed.total += slowest
    received = timed(
        "rank 0 reads the plans of all", lambda: [value_of_message(plan, planning.RankPlan) for plan in plans]
    )
    saved = timed("rank 0 proves coverage and leaves out replicas", lambda: planning.SaveLayout(received))
    print(f"  {timed.total:7.2f} s  PLANNING of a save")
    checksums = []
    for plan, skipped in zip(received, saved.skipped, strict=True):
        held = sum(len(holding.names) * len(holding.chunks) for holding in plan.holdings)
        checksums.append([(1 << 32) - 1] * (held - len(skipped)))
    timed = Timed()
    tilings, tensors = timed("rank 0 puts the checksums of all in order", lambda: saved.stored(checksums))
    sizes = {planning.file_name(r): 1 << 33 for r in range(world)}
    whole = manifest.Manifest(files=sizes, state_crc32=0, tilings=tilings, tensors=tensors)
    text = timed("rank 0 makes the manifest's text", lambda: manifest.manifest_text(whole))
    print(f"  {timed.total:7.2f} s  MANIFEST of a save")
    print(f"  {len(text) / 1e6:7.1f} MB manifest of {sum(map(len, checksums)):,} chunks of {len(tensors):,} tensors")
    timed = Timed()
    found = timed("every rank parses the manifest", lambda: manifest.parse_manifest(Path("pretended"), text.encode()))
    mine = pretended_shards(config, layout, world - 1, torch.float32)
    table = timed("a rank lists its tensors", lambda: planning.table_of(mine))
    action = "rank 0 compares the lists of all with the manifest, and proves coverage"
    timed(action, lambda: planning.check_request(Path("pretended"), found, [table] * world))
    reader = storage.ChunkReader(Path("pretended"), found)
    wanted = timed("a rank plans its reads", lambda: reader.plan(mine))
    num_reads = sum(len(parts) for chunks in wanted.values() for parts in chunks.values())
    print(f"  {timed.total:7.2f} s  PLANNING of a load ({num_reads:,} reads of the last rank)")


# -- real ranks, real files


def timed_together(function: Callable[[], Any]) -> float:
    """Seconds until all ranks are done."""
    dist.barrier()
    start = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - start


def plain_write(path: Path, data: torch.Tensor) -> None:
    """Write bytes in pieces as large as a chunk, flushed: the disk's own speed."""
    view = memoryview(data.view(torch.uint8).numpy())
    with open(path, "wb", buffering=0) as file:
        for at in range(0, len(view), 64 << 20):
            file.write(view[at : at + (64 << 20)])
        os.fsync(file.fileno())


def plain_read(path: Path, data: torch.Tensor) -> None:
    with open(path, "rb", buffering=0) as file:
        file.readinto(memoryview(data.view(torch.uint8).numpy()))


def uncached(folder: Path) -> None:
    """Ask the system to forget the pages of all files below a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def held(rank: int, ranks: int, numel: int, tensors: int) -> dict[str, LocalShard]:
    """Flat parts of `tensors` matrices of 1024 columns."""
    rows = numel // tensors // 1024
    shape = (rows * ranks, 1024)
    each = rows * 1024
    return {
        f"model.{at}": LocalShard(shape, (0, 0), shape, rank * each, (rank + 1) * each, torch.rand(each))
        for at in range(tensors)
    }


def measure(rank: int, ranks: int, folder: Path, store: str, mb: int, rounds: int) -> Iterator[tuple[str, float]]:
    """Yield (action, seconds), interleaved in a new order every round, so that all use the same disk."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    shards = held(rank, ranks, mb * 2**20 // 4, tensors=12)
    mine = torch.cat([shard.data for shard in shards.values()])
    saver = checkpoint.BackgroundSaver(10, functools.partial(checkpoint.save, folder / "async"))
    copy = torch.empty_like(mine)
    mesh = init_device_mesh("cpu", (ranks,))
    tensors = {name: DTensor.from_local(shard.data.view(-1, 1024), mesh, [Shard(0)]) for name, shard in shards.items()}
    for number in range(rounds):
        plain, ours, theirs = folder / f"plain{number}", folder / f"ours{number}", folder / f"dcp{number}"
        plain.mkdir(exist_ok=True)
        writes = [
            ("write plain", lambda at=plain: plain_write(at / str(rank), mine)),
            ("write ours", lambda at=ours: checkpoint.save(at, 1, shards, {})),
            ("write DCP", lambda at=theirs: dcp.save(tensors, checkpoint_id=str(at))),
        ]
        reads = [
            ("read plain", lambda at=plain: plain_read(at / str(rank), copy)),
            ("read ours", lambda at=ours: checkpoint.load(at / "iter_0000001", shards)),
            ("read DCP", lambda at=theirs: dcp.load(tensors, checkpoint_id=str(at))),
        ]
        for actions in (writes, reads):
            for what, action in actions[number % 3 :] + actions[: number % 3]:
                if rank == 0:
                    uncached(folder)
                yield what, timed_together(action)
        yield "copy alone", timed_together(lambda: copy.copy_(mine))
        yield "stall of async", timed_together(lambda: saver.start(1, shards, {}))
        saver.finish()
        dist.barrier()
        if rank == 0:
            for path in folder.iterdir():
                shutil.rmtree(path)
        dist.barrier()


def rank_main(rank: int, ranks: int, folder: str, store: str, mb: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found: dict[str, list[float]] = {}
    for what, seconds in measure(rank, ranks, Path(folder), store, mb, rounds):
        found.setdefault(what, []).append(seconds)
    if rank == 0:
        total = mb * ranks / 1000
        print(f"{ranks} ranks x {mb} MiB, {rounds} rounds, in {Path(folder).parent}: median (best) seconds, GB/s")
        for what, seconds in found.items():
            middle = statistics.median(seconds[1:] or seconds)  # the first round allocates buffers
            print(f"  {what:15} {middle:7.3f} ({min(seconds):.3f})  {1.048576 * total / middle:6.2f} GB/s")
        for what, base in COMPARED:
            paces = [plain / mine for plain, mine in zip(found[base][1:], found[what][1:], strict=True)]
            low, high = interval(paces)
            print(f"  pace of {what!r} in that of {base!r}: {statistics.median(paces):.2f} [{low:.2f}, {high:.2f}]")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretend", type=int, metavar="WORLD", help="ranks that are not there; flags of a run follow")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mb", type=int, default=512, help="MiB that each rank saves")
    parser.add_argument("--rounds", type=int, default=5)
    options, flags = parser.parse_known_args()
    if options.pretend:
        pretend(options.pretend, flags)
        return
    if flags:
        parser.error(f"not known without --pretend: {' '.join(flags)}")
    with tempfile.TemporaryDirectory(prefix="megazero-bench-", dir=options.folder) as folder:
        work, store = Path(folder, "work"), Path(folder, "store")
        work.mkdir()
        arguments = (options.ranks, str(work), str(store), options.mb, options.rounds)
        torch.multiprocessing.spawn(rank_main, arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
