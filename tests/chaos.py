"""Kills and damages at random: `make chaos`, or `python -m tests.chaos --kills 100 --damages 1000`.

Kills: a run of real ranks saves after every iteration or two, in the background or not, or into the memory of nodes, of
one rank each, and every fourth to the disk. One rank or all are killed by SIGKILL at a random moment, saves included,
and the run is started again in the same folder, until it is done. Each loss of any attempt must be that of a run that
was never killed, bit for bit, and the last checkpoint must be whole.
Disk full: the same, with a limit on the size of files on a random rank in place of the kill.
Damages: a byte, a cut, or a missing file in a checkpoint; each must be found, in a sentence.
"""

import argparse
import contextlib
import datetime
import json
import multiprocessing as mp
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from megazero import checkpoint
from megazero.checkpoint import verify
from tests.helpers.chains import LAYOUTS, Curve, configured, make_corpus, train

ITERATIONS = 8
SECONDS = 120  # no attempt takes nearly as long
TIMEOUT_SECONDS = 30  # of a rank that waits for one that was killed before they connected: no socket reports that
SMALL = [name for name, (world, _, _) in LAYOUTS.items() if world <= 2]


def serve(rank: int, world: int, store: str, config: Any, every: int, log: str, file_limit: int) -> None:
    """One rank of an attempt; rank 0 writes the losses that it sees to `log`."""
    import signal

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["MEGAZERO_NODE"] = f"node{rank}"
    if file_limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
    with open(f"{log}.stderr{rank}", "a") as said, contextlib.redirect_stderr(said):

        def see(iteration: int, loss: float) -> None:
            if rank == 0:
                with open(log, "a") as file:
                    file.write(json.dumps([iteration, loss]) + "\n")

        try:
            if world > 1:
                timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
                files = dist.FileStore(store, world)
                files.set_timeout(timeout)  # five minutes otherwise, for a rank that never writes its address
                dist.init_process_group("gloo", store=files, rank=rank, world_size=world, timeout=timeout)
            train(rank, world, config, save_every=every, see=see)
        except Exception as error:
            said.write(f"{type(error).__name__}: {error}\n")
            said.flush()
            os._exit(1)
        os._exit(0)


class Attempts:
    """Attempts at one run, in a folder of its own."""

    def __init__(
        self, name: str, folder: Path, corpus: str, background: bool, every: int, memory_every: int = 0
    ) -> None:
        self.world, self.folder, self.every = LAYOUTS[name][0], folder, every
        root = str(folder / "saved")
        options = {"save": root, "load": root, "async_save": background, "keep_last": 3}
        if memory_every:
            options |= {"memory_checkpoint_interval": memory_every, "memory_checkpoint_dir": str(folder / "memory")}
        config = configured(name, corpus, ITERATIONS, "fp32", **options)
        parallel = replace(config.parallel, distributed_timeout_minutes=TIMEOUT_SECONDS / 60)
        self.config = replace(config, parallel=parallel)
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "torch.distributed", "megazero.run.trainer"])

    def once(self, kill: tuple[float, list[int]] | None = None, file_limit: tuple[int, int] | None = None) -> list[int]:
        """Run once; kill: (seconds after the start, ranks); file_limit: (rank, bytes). The exit codes."""
        store = tempfile.mktemp(dir=self.folder)
        limits = [file_limit[1] if file_limit and file_limit[0] == rank else 0 for rank in range(self.world)]
        log = str(self.folder / "losses")
        processes = [
            self.context.Process(target=serve, args=(r, self.world, store, self.config, self.every, log, limits[r]))
            for r in range(self.world)
        ]
        for process in processes:
            process.start()
        if kill is not None:
            processes[0].join(kill[0])
            for rank in kill[1]:
                processes[rank].kill()
        deadline = time.monotonic() + SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                for each in processes:
                    each.kill()
                raise AssertionError(f"a rank hangs: {self.said()}")
        return [process.exitcode for process in processes]

    def losses(self) -> Curve:
        """All that the attempts have seen."""
        path = self.folder / "losses"
        return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def said(self) -> str:
        return "".join(path.read_text()[-1000:] for path in sorted(self.folder.glob("losses.stderr*")))


def kills(number: int, seed: int, say: Any = print) -> Counter[str]:
    """Kill runs at random until `number` kills have hit a live run. Raises AssertionError at a deviation."""
    draw, found = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="megazero-chaos-") as folder:
        corpus = make_corpus(Path(folder))
        wanted: dict[str, Curve] = {}
        took: dict[str, float] = {}
        while found["kills"] < number:
            name, background, every = draw.choice(SMALL), draw.random() < 0.5, draw.choice([1, 2])
            in_memory = draw.random() < 0.5
            if name not in wanted:
                whole = Attempts(name, Path(folder, f"whole {len(wanted)}"), corpus, False, 1)
                whole.folder.mkdir()
                began = time.monotonic()
                assert whole.once() == [0] * whole.world, whole.said()
                wanted[name], took[name] = whole.losses(), time.monotonic() - began
            run = Attempts(name, Path(folder, "run"), corpus, background, *((4, every) if in_memory else (every,)))
            run.folder.mkdir()
            done = False
            while not done:
                some = draw.choice([list(range(run.world)), [draw.randrange(run.world)]])
                codes = run.once(kill=(draw.uniform(0, 1.2 * took[name]), some))
                done = codes == [0] * run.world
                found["kills"] += not done
                found["kills with background saves"] += background and not done
                found["kills with saves in memory"] += in_memory and not done
                partial = in_memory and not done and [*run.folder.glob("memory/*/*/.iter_*.partial")]
                found["kills during a save in memory"] += bool(partial)
                found["kills of one of two ranks"] += len(some) < run.world and not done
                left = list((run.folder / "saved").glob(".iter_*.partial")) if not done else []
                found["kills during a save"] += bool(left)
                if found["kills"] >= number and not done:
                    done = run.once() == [0] * run.world
                    assert done, run.said()
            curve = dict(wanted[name])
            for iteration, loss in run.losses():
                assert loss == curve[iteration], (name, background, iteration, loss, curve[iteration])
            assert {iteration for iteration, _ in run.losses()} == set(curve)
            for path in checkpoint.checkpoints(run.folder / "saved"):
                assert not [*verify.faults(path)], path
            assert checkpoint.find(run.folder / "saved").name == f"iter_{ITERATIONS:07d}"
            assert "Traceback" not in run.said()
            found["runs"] += 1
            shutil.rmtree(run.folder)
            if found["runs"] % 10 == 0:
                say(dict(found))
    return found


def full_disks(number: int, seed: int) -> Counter[str]:
    """Saves that a rank cannot write are reported; after room is made, the run ends with the same curve."""
    draw, found = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="megazero-chaos-") as folder:
        corpus = make_corpus(Path(folder))
        for _ in range(number):
            name, background = draw.choice(SMALL), draw.random() < 0.5
            run = Attempts(name, Path(folder, "run"), corpus, background, draw.choice([1, 2]))
            run.folder.mkdir()
            codes = run.once(file_limit=(draw.randrange(run.world), draw.choice([600, 5_000, 20_000])))
            found["failed runs"] += codes != [0] * run.world
            assert not [*(run.folder / "saved").glob(".iter_*.partial")]
            if codes != [0] * run.world:
                assert "File too large" in run.said() and "Traceback" not in run.said(), run.said()
            assert run.once() == [0] * run.world, run.said()
            assert not [*verify.faults(checkpoint.find(run.folder / "saved"))]
            found["full disks"] += 1
            shutil.rmtree(run.folder)
    return found


def damages(number: int, seed: int) -> Counter[str]:
    """Damage a checkpoint of two ranks at random; each damage is found by `verify`, and by a resume."""
    draw, found = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="megazero-chaos-") as folder:
        run = Attempts("dp2 zero3", Path(folder, "run"), make_corpus(Path(folder)), False, ITERATIONS)
        run.folder.mkdir()
        assert run.once() == [0, 0], run.said()
        sound = checkpoint.find(run.folder / "saved")
        files = sorted(path.name for path in sound.iterdir())
        for _ in range(number):
            path = Path(folder, "damaged", sound.name)
            shutil.copytree(sound, path)
            file, way = path / draw.choice(files), draw.choice(["bit", "bit", "cut", "gone", "zeros"])
            content = bytearray(file.read_bytes())
            at = draw.randrange(len(content))
            if way == "bit":
                content[at] ^= 1 << draw.randrange(8)
            elif way == "cut":
                del content[at:]
            elif way == "zeros":
                content[at : at + 64] = bytes(len(content[at : at + 64]))
            if way == "gone":
                file.unlink()
            else:
                file.write_bytes(content)
            if way == "gone" or bytes(content) != (sound / file.name).read_bytes():
                sentences = [*verify.faults(path)]
                assert sentences and all("\n" not in text for text in sentences), (file, way, at, sentences)
                found[way] += 1
            shutil.rmtree(path.parent)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--full-disks", type=int, default=20)
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for what, function, number in (
        ("damages", damages, options.damages),
        ("full disks", full_disks, options.full_disks),
        ("kills", kills, options.kills),
    ):
        began = time.monotonic()
        print(f"{what}: {dict(function(number, options.seed))} in {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
