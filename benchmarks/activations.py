#!/usr/bin/env python3
"""Measure saved bytes and step time of every recompute mode, on 1, 2 and 4 tensor-parallel ranks.

For each tensor-parallel size the modes run on the same ranks and take turns, step by step, in alternating order. A
ratio compares with "none" in the same round. Bytes are of one block and micro-batch, predicted by `planner.trace.trace`
and counted as live storages after the forward. On a CPU both are asserted equal, and kept inputs on the host equal
the tracker's count. Korthikanti: his formula for Megatron. GPUs run in bf16, one per rank.

    python -m benchmarks.activations
    python -m benchmarks.activations --layers 8 --hidden 1024 --rounds 20 --dropout 0.1
"""

import json
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import interval
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.step.batch import MicroBatch
from megazero.engine.step.engine import Engine
from megazero.flags.config import ActivationConfig, Config, ModelConfig, ParallelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from megazero.planner.bytes.estimate import estimate
from tests.helpers.block_bytes import block_saves, kept_by_a_block, korthikanti


@dataclass(frozen=True)
class Options:
    """Bytes kept by a block, and the time of a step, in every recompute mode."""

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    seq_length: int = 256
    vocabulary: int = 1024
    batch: int = 2
    """Samples of a micro-batch; a step has one."""
    dropout: float = 0.0
    """Dropout of the residual stream and of the attention weights."""
    sizes: tuple[int, ...] = (1, 2, 4)
    """Tensor-parallel sizes."""
    rounds: int = 9
    """Steps of every mode that count."""
    json: str = ""
    """FILE for all that was measured."""


class Mode(NamedTuple):
    name: str
    activations: ActivationConfig
    sequence_parallel: bool = False
    compile: bool = False


MODES = [
    Mode("none", ActivationConfig()),
    Mode("none, compiled", ActivationConfig(), compile=True),
    Mode("selective", ActivationConfig("selective")),
    Mode("full", ActivationConfig("full")),
    Mode("full, contiguous", ActivationConfig("full", contiguous_checkpointing=True)),
    Mode("full + cpu", ActivationConfig("full", checkpoint_in_cpu=True)),
    Mode("full + Pa", ActivationConfig("full", partition_activations=True)),
    Mode("full + Pa+cpu", ActivationConfig("full", partition_activations=True, checkpoint_in_cpu=True)),
    Mode("none, sequence", ActivationConfig(), True),
    Mode("selective, sequence", ActivationConfig("selective"), True),
    Mode("full, sequence", ActivationConfig("full"), True),
    Mode("full + cpu, sequence", ActivationConfig("full", checkpoint_in_cpu=True), True),
]


def modes(tp: int) -> list[Mode]:
    return [mode for mode in MODES if tp > 1 or not (mode.sequence_parallel or mode.activations.partition_activations)]


def config_of(options: Options, mode: Mode, tp: int) -> tuple[Config, Layout]:
    o = options
    drops = {"attention_dropout": o.dropout, "hidden_dropout": o.dropout}
    config = Config(
        model=ModelConfig(o.layers, o.hidden, 4 * o.hidden, o.heads, o.seq_length, o.vocabulary, **drops),
        training=TrainingConfig(
            o.batch, precision="bf16" if torch.cuda.is_available() else "fp32", compile=mode.compile
        ),
        parallel=ParallelConfig(tp, sequence_parallel=mode.sequence_parallel),
        activations=mode.activations,
    )
    return resolve(config, tp, 0, declare)


def timed(engine: Engine, batch: MicroBatch) -> tuple[float, float]:
    """(seconds of a step, those that this rank computed)"""
    if engine.mesh.world.size > 1:
        dist.barrier()
    start, computed = time.perf_counter(), time.process_time()
    engine.train_step(1, [batch])
    if engine.mesh.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - computed


def run_rank(rank: int, tp: int, options: Options, rendezvous: str, answers: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if tp > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(rendezvous, tp), rank=rank, world_size=tp)
    tokens = torch.randint(0, options.vocabulary, (options.batch, options.seq_length + 1))
    batch = MicroBatch(
        tokens[:, :-1], tokens[:, 1:], torch.ones(options.batch, options.seq_length), tuple(range(options.batch))
    )
    engines: dict[str, Engine] = {}
    found: dict[str, dict[str, Any]] = {}
    for mode in modes(tp):
        config, layout = config_of(options, mode, tp)
        engine = Engine(config, Mesh.build(layout, rank, device))
        engines[mode.name] = engine
        on_host = mode.activations.checkpoint_in_cpu
        kept, said = sum(kept_by_a_block(engine)), sum(block_saves(config, layout, device.type))
        kept_on_host = engine.tracker.now["host"]
        if device.type == "cpu":  # a fused kernel of a GPU may keep a random state besides
            assert kept == said + kept_on_host and (kept_on_host > 0) == on_host, (mode.name, kept, said, kept_on_host)
            kept -= kept_on_host
        found[mode.name] = {
            "estimate": said,
            "measured": kept,
            "host": kept_on_host,
            "korthikanti": None if on_host else korthikanti(config, layout),
            "tp_traffic": estimate(config, layout).traffic["tp"],
            "seconds": [],
            "cpu": [],
        }
        engine.zero.discard_gradients()
        timed(engine, batch)  # warms up
    rounds = range(options.rounds)
    for number in track(rounds, f"tensor parallelism {tp}", console=Console(stderr=True)) if rank == 0 else rounds:
        for name in list(engines) if number % 2 else list(engines)[::-1]:
            seconds, computed = timed(engines[name], batch)
            found[name]["seconds"].append(seconds)
            found[name]["cpu"].append(computed)
    if rank == 0:
        Path(answers).write_text(json.dumps(found))
    if tp > 1:
        dist.barrier()
        dist.destroy_process_group()


def measure(tp: int, options: Options) -> dict[str, dict[str, Any]]:
    """Return the results of rank 0 by mode."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (tp, options, f"{folder}/store", f"{folder}/answers.json")
        mp.start_processes(run_rank, arguments, nprocs=tp, start_method="spawn")
        return json.loads(Path(folder, "answers.json").read_text())


def ratio(found: dict[str, dict[str, Any]], name: str, what: str) -> list[float]:
    return [a / b for a, b in zip(found[name][what], found["none"][what], strict=True)]


def main(options: Options) -> None:
    console = Console(width=None if sys.stdout.isatty() else 180)
    table = Table(title=f"{options}")
    columns = ("tp", "recompute", "kept a block: estimate", "measured", "on the host", "Korthikanti", "tp sends a step")
    for name in (*columns, "step", "95 %", "CPU"):
        table.add_column(name, justify="right")
    measured = {}
    for tp in options.sizes:
        measured[tp] = found = measure(tp, options)
        for name, row in found.items():
            steps = ratio(found, name, "seconds")
            low, high = interval(steps)
            theirs = f"{row['korthikanti']:,.0f}" if row["korthikanti"] is not None else ""
            table.add_row(
                *(str(tp), name, f"{row['estimate']:,}", f"{row['measured']:,}", f"{row['host']:,}", theirs),
                *(f"{row['tp_traffic']:,}", f"{statistics.median(steps):.2f}", f"{low:.2f} to {high:.2f}"),
                f"{statistics.median(ratio(found, name, 'cpu')):.2f}",
            )
        table.add_section()
    console.print(table)
    if options.json:
        Path(options.json).write_text(json.dumps({"options": asdict(options), "measured": measured}))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
