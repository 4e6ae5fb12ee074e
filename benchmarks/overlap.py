#!/usr/bin/env python3
"""Share of communication that is hidden behind computation, seen in the traces of --profile-iterations.

A run is traced twice, with overlap and with --no-overlap-comm. Without overlap the computation waits for every
collective, so its waiting time is the communication's own time. Waiting time that remains with overlap is exposed; the
rest is hidden. Collectives of tensor parallelism inside a layer are part of its operation and not visible.

One rank per GPU. With fewer than two GPUs, two CPU ranks run over gloo at a tiny size, only to test the code. Prints a
Markdown table. Also reads the trace of another run:

    python -m benchmarks.overlap --trace runs/a/trace-10-12.json
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

from megazero.engine.plan.program.operations import Asynchronous, Update
from megazero.planner.time.simulate import axis_of
from tests.helpers.ranks import ROOT

# name of an operation that communicates -> its axis
AXIS = {kind.__name__: axis_of(kind(*[0] * len(fields(kind)))) for kind in get_args(Asynchronous) if kind is not Update}
TRACED = (4, 6)  # iterations


class Waiting(NamedTuple):
    """Milliseconds of a mean iteration, of a mean rank."""

    iteration: float
    by_axis: dict[str, float]  # in which the computation stands still for communication


def waiting(trace: dict[str, Any]) -> Waiting:
    """Sum up a trace: on a GPU the track `device`, on a CPU `compute`.

    Raises:
        ValueError: the file has no iteration in it.
    """
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    wanted = "device" if "device" in tracks.values() else "compute"
    total, iterations = Counter[str](), defaultdict[int, list[float]](list)
    for event in trace["traceEvents"]:
        if event["ph"] != "X":
            continue
        track, words = tracks[event["pid"], event["tid"]], event["name"].split()
        if words[0] == "iteration":
            iterations[event["pid"]].append(event["dur"] / 1000)
        elif track == wanted and words[0] != "start" and (axis := AXIS.get(words[words[0] == "wait"])):
            total[axis] += event["dur"] / 1000  # a wait, or an operation that is not split
    if not iterations:
        raise ValueError("the trace has no iteration in it; is it one of --profile-iterations?")
    every = [ms for of_rank in iterations.values() for ms in of_rank]
    return Waiting(statistics.mean(every), {axis: ms / len(every) for axis, ms in sorted(total.items())})


def table(overlapped: Waiting, alone: Waiting | None) -> str:
    """Write the Markdown table: with `alone`, of the run without overlap, the share that is hidden."""
    lines = [
        "| axis | exposed, ms of an iteration | share of it | without overlap, ms | hidden |",
        "|---|---|---|---|---|",
    ]
    for axis, ms in overlapped.by_axis.items():
        own = alone.by_axis.get(axis, 0.0) if alone else 0.0
        hidden = f"{1 - ms / own:.0%}" if own else ""
        share = f"{ms / overlapped.iteration:.1%}"
        lines.append(f"| {axis} | {ms:.2f} | {share} | {f'{own:.2f}' if alone else ''} | {hidden} |")
    steps = f"An iteration takes {overlapped.iteration:.2f} ms with overlap"
    return "\n".join([*lines, "", f"{steps}, {alone.iteration:.2f} without." if alone else f"{steps}."])


@dataclass(frozen=True)
class Options:
    """Share of communication that is hidden behind computation."""

    flags: str = "--preset gpt2-345m --micro-batch-size 4 --global-batch-size 64"
    """The flags of the run on GPUs."""
    stages: tuple[int, ...] = (2, 3)
    """ZeRO stages, each traced."""
    trace: str = ""
    """Read this file, and run nothing."""


TINY = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 257 "
    "--micro-batch-size 1 --global-batch-size 8"
)


def corpus(folder: Path) -> Path:
    """Write random bytes."""
    from megazero.data.writer import IndexedWriter

    draw = np.random.default_rng(0)
    with IndexedWriter(folder / "corpus", np.uint16) as writer:
        for _ in range(200):
            writer.add(draw.integers(0, 256, 5000))
    return folder / "corpus"


def traced(flags: list[str], ranks: int, folder: Path) -> Waiting:
    """Run pretrain_gpt.py under torchrun, and read its trace."""
    first, last = TRACED
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["pretrain_gpt.py", *flags, "--train-iters", str(last), "--lr-warmup-iters", "0", "--split", "1"]
    command += ["--profile-iterations", f"{first}:{last}", "--log-dir", str(folder), "--num-workers", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"OMP_NUM_THREADS": "1", **os.environ})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return waiting(json.loads((folder / f"trace-{first}-{last}.json").read_text()))


def main(o: Options) -> None:
    if o.trace:
        print(table(waiting(json.loads(Path(o.trace).read_text())), None))
        return
    gpus = torch.cuda.device_count()
    ranks, flags = (gpus, o.flags.split()) if gpus > 1 else (2, TINY.split())
    if gpus < 2:
        print("Fewer than two GPUs here: CPU ranks and a tiny model, which try the code and say nothing of a GPU.\n")
    with tempfile.TemporaryDirectory(prefix="megazero-overlap-") as name:
        folder = Path(name)
        flags += ["--data-path", str(corpus(folder)), "--tokenizer", "byte"]
        for stage in o.stages if gpus > 1 else o.stages[:1]:
            found = [
                traced([*flags, "--zero-stage", str(stage), f"--{no}overlap-comm"], ranks, folder / f"{stage}{no}")
                for no in ("", "no-")
            ]
            print(f"ZeRO stage {stage}, {ranks} ranks: `{' '.join(flags[:-4])}`\n\n{table(*found)}\n", flush=True)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
