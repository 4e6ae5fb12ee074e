#!/usr/bin/env python3
"""megazero's ZeRO stages against torch DDP, ZeroRedundancyOptimizer, FSDP2, DeepSpeed and transformers' Trainer.

The same GPT, initial weights, data and AdamW in fp32 (bf16 on a GPU). Every system has its own processes, which stay
alive; one system computes at a time, a few steps a turn, and the others wait on a pipe. Systems of one stage take
turns, forwards and backwards; a ratio is of neighbouring turns, so that a machine whose speed drifts slows both.
CPU ms: CPU time of a rank's threads in a step; other work on the machine hardly changes it.
Settings of the peers: `peers.py`. Examples:

    python benchmarks/zero.py --rounds 20 --json zero.json
    python benchmarks/zero.py --architecture llama --stages 3
    python3 -m venv deepspeed-venv && deepspeed-venv/bin/pip install torch==2.13.0 deepspeed==0.19.8 ninja
    python benchmarks/zero.py --deepspeed-python deepspeed-venv/bin/python
    python benchmarks/zero.py --deepspeed-python deepspeed-venv/bin/python --stages 2 --offload
    python3 -m venv titan-venv && titan-venv/bin/pip install torch==2.13.0 torchtitan==0.3.0 triton transformers tyro
    python benchmarks/zero.py --architecture llama --stages 3 --torchtitan-python titan-venv/bin/python
    python3 -m venv trainer-venv && trainer-venv/bin/pip install -r requirements.txt accelerate==1.15.0
    python benchmarks/zero.py --architecture llama --stages 0 3 --trainer-python trainer-venv/bin/python
    python benchmarks/zero.py --ranks 1 --stages 3 --layers 24 --hidden 2048 --heads 16   # one GPU: FSDP2 and megazero
"""

import dataclasses
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.peers import SYSTEMS, Work
from benchmarks.processes import Job, alive, isolate, quotients, shown, take_turns
from megazero.engine.model.stage import declare
from megazero.planner.parameter_counts import num_parameters

LOSS_GAP = 1e-3  # relative to megazero's stage 0, in fp32
# Freed memory leaves the process, so its resident peak shows the effect of sharding. Slow, hence a separate pass.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Options:
    """megazero's ZeRO stages against DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed."""

    architecture: Literal["gpt2", "llama"] = "gpt2"
    """llama: the peers train transformers' LlamaForCausalLM."""
    layers: int = 6
    hidden: int = 512
    heads: int = 8
    seq_length: int = 128
    vocabulary: int = 8192
    batch: int = 2
    """Samples of a micro-batch; a step has one on every rank."""
    ranks: int = 2
    """Processes; on GPUs, one each."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages to compare."""
    rounds: int = 12
    """Turns of every system."""
    steps: int = 2
    """Steps of a turn."""
    loss_steps: int = 6
    """First steps, whose losses are compared; they warm up too."""
    memory: bool = True
    """Measure memory; on a CPU in processes of their own, before the speed."""
    offload: bool = False
    """Optimizer states in host memory (stages 1 to 3): DeepSpeed and megazero alone."""
    matmul_backend: Literal["auto", "torch"] = "auto"
    """torch: megazero computes products as the peers do."""
    deepspeed_python: str = ""
    """Python of an environment with DeepSpeed. Empty: without it."""
    torchtitan_python: str = ""
    """Python of an environment with torchtitan, whose model code is compared as a llama. Empty: without it."""
    trainer_python: str = ""
    """Python of an environment with transformers' Trainer and accelerate, which train a llama. Empty: without them."""
    starts: int = 0
    """Times that each system is started again, to measure the seconds from its processes' start to its first loss."""
    json: str = ""
    """FILE for all that was measured."""
    quick: bool = False
    """A smoke run: a tiny model, stages 0 and 3, two rounds."""

    def python_of(self, system: str) -> str:
        """The Python that a system runs with; empty if it is to be left out."""
        named = {
            "deepspeed": self.deepspeed_python,
            "torchtitan": self.torchtitan_python,
            "trainer": self.trainer_python,
        }
        return named.get(system.rstrip("0123"), sys.executable)

    def work(self) -> Work:
        precision = "bf16" if torch.cuda.is_available() else "fp32"
        shape = (self.layers, self.hidden, self.heads, self.seq_length, self.vocabulary, self.batch)
        return Work(*shape, self.ranks, precision, self.architecture, self.offload, self.matmul_backend)


def jobs(names: list[str], work: Work, options: Options, extra: dict[str, str]) -> list[Job]:
    env = extra if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu", **extra}
    pythons = {name: options.python_of(name) for name in names}
    paths = {name: f"{Path(python).absolute().parent}:{os.environ['PATH']}" for name, python in pythons.items()}
    return [Job(name, work, "benchmarks.peers", pythons[name], env | {"PATH": paths[name]}) for name in names]


def measure_memory(names: list[str], work: Work, options: Options) -> dict[str, Any]:
    """Measure the rank that takes the most. The systems run at once: nothing is timed; on a GPU one after the other."""
    found = {}
    at_once = [names] if not torch.cuda.is_available() else [[name] for name in names]
    for group in at_once:
        with alive(jobs(group, work, options, MALLOC)) as systems:
            for system in systems:
                system.tell("memory", 4)
            for system in systems:
                answers = system.hear()
                found[system.system] = {kind: max(answer[kind] for answer in answers) for kind in answers[0]}
    return found


def measure_speed(names: list[str], work: Work, options: Options, isolated: bool) -> dict[str, Any]:
    """Per system: first losses; of every turn, a step's seconds, CPU seconds and bytes that a rank puts on the wire."""
    with alive(jobs(names, work, options, {})) as systems:
        losses = {}
        for system in systems:
            system.ask("build")
            losses[system.system] = system.ask("losses", options.loss_steps)[0]["losses"]
        found = take_turns(systems, options.rounds, options.steps, isolated)
    return {name: {**found[name], "losses": losses[name]} for name in names}


def measure_starts(names: list[str], work: Work, options: Options) -> dict[str, list[float]]:
    """Return the seconds from the start of a system's processes to the loss of its first step, in turns."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.starts):
        for name in names:
            start = time.perf_counter()
            with alive(jobs([name], work, options, {})) as (system,):
                system.ask("build")
                system.ask("losses", 1)
                found[name].append(time.perf_counter() - start)
    return found


def choose(options: Options) -> dict[int, list[str]]:
    """stage -> systems, megazero last."""
    compared = [name for name in SYSTEMS if not options.offload or name.startswith(("deepspeed", "megazero"))]
    return {
        stage: [name for name in compared if SYSTEMS[name].stage == stage and options.python_of(name)]
        for stage in options.stages
    }


def gap(losses: list[float], reference: list[float]) -> float:
    """Largest relative difference; NaN if any loss is."""
    a, b = torch.tensor(losses), torch.tensor(reference)
    return float(((a - b).abs() / b.abs()).max())


def show(results: dict[int, dict[str, Any]], reference: list[float], options: Options, console: Console) -> None:
    tokens = options.ranks * options.batch * options.seq_length
    table = Table(
        title=f"{options.ranks} ranks, {options.rounds} turns of {options.steps} steps; medians, 95 % intervals"
    )
    for column in (
        "ZeRO",
        "system",
        "tokens/s",
        "megazero / it",
        "CPU ms",
        "MiB of a step",
        "start s",
        "wire B/param.",
        "loss",
        "gap",
    ):
        table.add_column(column, justify="left" if column == "system" else "right")
    parameters = num_parameters(declare(options.work().config(0).model))
    for stage, systems in results.items():
        ours = systems[f"megazero{stage}"]["seconds"]
        for name, found in systems.items():
            speed = shown([tokens / s for s in found["seconds"]], 0)
            ratio = "" if found["seconds"] is ours else shown(quotients(found["seconds"], ours), 2)
            memory = f"{found['memory']['step'] / 2**20:.0f}" if "memory" in found else "not measured"
            wire = f"{statistics.median(found['wire']) / parameters:.2f}" if found["wire"] else "not measured"
            start = shown(found["starts"], 1) if "starts" in found else "not measured"
            loss = f"{found['losses'][0]:.4f} to {found['losses'][-1]:.4f}"
            cpu = f"{1000 * statistics.median(found['cpu']):.0f}"
            distance = f"{gap(found['losses'], reference):.0e}"
            table.add_row(str(stage), SYSTEMS[name].label, speed, ratio, cpu, memory, start, wire, loss, distance)
        table.add_section()
    console.print(table)


def main(options: Options) -> None:
    if options.quick:
        stages = (0, 3) if options.stages == Options.stages else options.stages
        tiny = {"layers": 2, "hidden": 128, "heads": 2, "vocabulary": 512, "rounds": 2, "stages": stages}
        options = dataclasses.replace(options, **tiny)
    if options.ranks > torch.cuda.device_count() > 0:
        raise SystemExit(
            f"--ranks {options.ranks}: there are {torch.cuda.device_count()} GPUs, and a rank needs its own"
        )
    work, console = options.work(), Console(width=165 if not sys.stdout.isatty() else None)
    isolated = not torch.cuda.is_available() and isolate()
    if not options.deepspeed_python:
        console.print("DeepSpeed is left out: --deepspeed-python names the Python of an environment that has it.")
    results: dict[int, dict[str, Any]] = {}
    for stage, names in choose(options).items():
        memory = measure_memory(names, work, options) if options.memory else {}
        results[stage] = measure_speed(names, work, options, isolated)
        for name, found in memory.items():
            results[stage][name]["memory"] = found
        for name, seconds in measure_starts(names, work, options).items() if options.starts else ():
            results[stage][name]["starts"] = seconds
    if 0 in results:
        reference = results[0]["megazero0"]["losses"]
    else:
        with alive(jobs(["megazero0"], work, options, {})) as (alone,):
            alone.ask("build")
            reference = alone.ask("losses", options.loss_steps)[0]["losses"]
    show(results, reference, options, console)
    if options.json:
        about = {"torch": torch.__version__, "cores": os.cpu_count(), "options": dataclasses.asdict(options)}
        Path(options.json).write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
    if work.precision == "fp32":
        for systems in results.values():
            for name, found in systems.items():
                assert gap(found["losses"], reference) < LOSS_GAP, f"{name} trains another model: {found['losses']}"


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options, description=__doc__))
