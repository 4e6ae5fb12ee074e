#!/usr/bin/env python3
"""One device, one process: step time, MFU and memory of megazero next to torch's systems, same model and batch.

Systems are built and freed one after the other, because two large models do not fit together. The ratio is of medians
of steps, with a bootstrap interval over both. Prints a Markdown table. Without a GPU it runs at a tiny size, only to
test the code. Example:

    python -m benchmarks.gpu --layers 48 --hidden 1600 --heads 25 --batch 8 --recompute none
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import peers
from benchmarks.measure import ratio_interval
from benchmarks.peers import Work
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.step.batch import MicroBatch
from megazero.engine.step.engine import Engine
from megazero.flags.config import Config
from megazero.flags.resolve import resolve
from megazero.observe.step_metrics import memory_bytes
from megazero.planner.bytes.estimate import stage_bytes
from megazero.planner.time.devices import Device, find_card, load_device, peak_flops
from megazero.planner.time.step_time import step_time
from megazero.planner.trace.trace import model_flops
from megazero.run.kernel_choices import choose_matmul_backend


@dataclass(frozen=True)
class Options:
    """Step time, MFU and memory on one device."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    seq_length: int = 1024
    vocabulary: int = 50257
    batch: int = 16
    precision: str = "bf16"
    recompute: str = "none"
    """megazero's recompute: none, selective or full. The others keep everything."""
    offload: bool = False
    """megazero with --recompute full, once with its kept inputs on the device and once with them on the host."""
    systems: tuple[str, ...] = ("megazero", "compiled", "fsdp2")
    """megazero, compiled (plain PyTorch under torch.compile, autocast) and fsdp2 (a world of one), in this order."""
    architecture: str = "gpt2"
    """gpt2 or llama."""
    steps: int = 10
    """Steps that count, after three that do not."""


COLUMNS = (
    *("system", "ms per step", "planned ms", "tokens/s", "MFU", "megazero / it, tokens/s"),
    *("GB at the peak", "planned GB", "loss"),
)
TINY = Options(2, 64, 4, 32, 311, 2, "fp32", steps=3)


class Own:
    """megazero's engine with its predictions and counts."""

    def __init__(self, o: Options, device: torch.device, host: bool = False) -> None:
        work = work_of(o)
        recompute: Any = "full" if o.offload else o.recompute
        config = replace(
            work.config(0),
            activations=replace(work.config(0).activations, recompute=recompute, checkpoint_in_cpu=host),
        )
        config, self.layout = resolve(config, 1, 0, declare)
        mesh = Mesh.build(self.layout, 0, device)
        self.config, _ = choose_matmul_backend(config, mesh)
        self.engine = Engine(self.config, mesh)
        self.mask = torch.ones(o.batch, o.seq_length)
        self.samples = tuple(range(o.batch))
        self.memory: dict[str, int] = {}

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        result = self.engine.train_step(1, [MicroBatch(ids, labels, self.mask, self.samples)])
        self.memory = memory_bytes(self.engine, result)
        return result.loss

    def planned(self, device: torch.device) -> tuple[float | None, int]:
        """Return the planned seconds of a step, None on an unknown card, and the planned bytes at its peak."""
        peak = stage_bytes(self.config, self.layout, 0, device.type).peak
        card = planned_device(device)
        return step_time(self.config, self.layout, card, with_range=False).expected.seconds if card else None, peak


def work_of(o: Options) -> Work:
    return Work(o.layers, o.hidden, o.heads, o.seq_length, o.vocabulary, o.batch, 1, o.precision, o.architecture)


def timed(step: Callable[..., float], o: Options, device: torch.device, on_device: bool) -> tuple[list[float], float]:
    """Return (seconds of each step, the last loss)."""
    work, seconds, loss = work_of(o), [], 0.0
    for n in range(o.steps + 3):
        inputs = work.inputs(n, 0, device if on_device else torch.device("cpu"))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        loss = step(*inputs)  # a float: the device has been waited for
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds[3:], loss


def planned_device(device: torch.device) -> Device | None:
    """Return the device of scripts/devices by which this one is planned; None if the card is unknown."""
    return find_card(torch.cuda.get_device_name(device)) if device.type == "cuda" else load_device("cpu")


def systems_of(o: Options) -> list[str]:
    return ["megazero, inputs on the device", "megazero, inputs on the host"] if o.offload else list(o.systems)


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Restore torch's settings of products, which megazero changes for itself."""
    products = torch.backends.cuda.matmul
    names = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_tf32"
    before = {name: getattr(products, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(products, name, value)


def run(name: str, o: Options, device: torch.device) -> tuple[list[float], float, str, tuple[str, str]]:
    """Return (seconds per step, loss, GB at the peak, planned ms and GB) of one system, built and freed here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    planned, own = ("", ""), None
    if name.startswith("megazero"):
        own = Own(o, device, host=name.endswith("host"))
        step: Callable[..., float] = own.step
    elif name == "compiled":
        step = peers.compiled(work_of(o), device).step
    else:
        step = peers.fsdp2(work_of(o), device, reshard=False).step
    seconds, loss = timed(step, o, device, on_device=own is None)
    if own is not None:
        step_seconds, num_bytes = own.planned(device)
        planned = f"{step_seconds * 1e3:.1f}" if step_seconds else "", f"{num_bytes / 1e9:.3f}"
    peak = f"{torch.cuda.max_memory_allocated(device) / 1e9:.3f}" if device.type == "cuda" else ""
    return seconds, loss, peak, planned


def main(o: Options) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if not on_gpu:
        print("No GPU here: a tiny model, which tries the code and says nothing of speed.\n")
        o = replace(TINY, recompute=o.recompute, offload=o.offload, systems=o.systems, architecture=o.architecture)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    config: Config = work_of(o).config(0)
    flops, peak = model_flops(config.model, o.batch), 0.0
    if on_gpu:
        peak = peak_flops(torch.cuda.get_device_name(device), config.training)
    print(
        f"{o.architecture}, {o.layers} layers, "
        f"hidden {o.hidden}, sequence {o.seq_length}, vocabulary {o.vocabulary}, batch {o.batch}, "
        f"{o.precision}; megazero with --recompute {'full' if o.offload else o.recompute}\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    ours: list[float] = []
    for name in systems_of(o):
        try:
            with own_settings():
                seconds, loss, gigabytes, (planned_ms, planned_gb) = run(name, o, device)
        except Exception as error:  # out of memory, no compiler, Triton's own errors: the others are worth a row
            first = (str(error).splitlines() or [type(error).__name__])[0][:120]
            print(f"| {name} | failed: {first} {'| ' * (len(COLUMNS) - 2)}|", flush=True)
            seconds = []
        if seconds:
            ours = ours or seconds
            middle = statistics.median(seconds)
            low, high = ratio_interval(ours, seconds)
            ratio = f"{middle / statistics.median(ours):.2f} [{low:.2f}, {high:.2f}]" if seconds is not ours else ""
            mfu = f"{flops / middle / peak:.1%}" if peak else ""
            tokens = o.batch * o.seq_length / middle
            cells = [name, f"{middle * 1e3:.1f}", planned_ms, f"{tokens:,.0f}", mfu, ratio]
            cells += [gigabytes, planned_gb, f"{loss:.4f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
