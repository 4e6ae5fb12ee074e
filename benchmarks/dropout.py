#!/usr/bin/env python3
"""Measure dropout: masks by coordinate against F.dropout and against a generator per sample and head.

In turn in one process; ratios are taken round by round, so that a machine whose speed drifts slows all equally. Prints
Markdown. With `--steps`, also the share that dropout has of a small model's training step.

    python -m benchmarks.dropout --rounds 31
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.measure import interval
from megazero.engine.kernels.dropout import Dropout, Rows
from megazero.engine.kernels.initial_values import seed_of

SEED, PROBABILITY = 1234, 0.1
Times = dict[str, list[float]]  # seconds of each round


@dataclass(frozen=True)
class Options:
    """Measure dropout."""

    rounds: int = 31
    """Runs of forward and backward; two more warm up."""
    steps: int = 15
    """Training steps of each kind; two more warm up. 0: none."""
    threads: int = 1
    """Threads of torch, on a CPU."""


class _Generators(torch.autograd.Function):
    """The former way: a generator per sample and head, whole samples alone; recomputed in backward."""

    @staticmethod
    def forward(ctx, x, samples):
        ctx.samples = samples
        return x * _generated(x, samples)

    @staticmethod
    def backward(ctx, dy):
        return dy * _generated(dy, ctx.samples), None


def _generated(x: torch.Tensor, samples: tuple[int, ...]) -> torch.Tensor:
    mask = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part, sample in zip(mask, samples, strict=True):
        for head, values in enumerate(part if x.dim() == 4 else (part,)):
            seed = seed_of(SEED, "dropout", sample, 0, "benchmark", head)
            values.bernoulli_(1 - PROBABILITY, generator=torch.Generator(x.device).manual_seed(seed))
    return mask.div_(1 - PROBABILITY)


def in_turn(kinds: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> Times:
    """Every round runs each kind once, in an order of its own; two rounds warm up."""
    seconds: Times = {name: [] for name in kinds}
    order, shuffle = list(kinds), random.Random(0).shuffle
    for i in range(rounds + 2):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            kinds[name]()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if i >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def report(title: str, seconds: Times, baseline: str) -> None:
    """Each kind's median, and the median of its ratios to the baseline with a 95 % interval."""
    print(f"\n| {title} | ms | times {baseline} | 95 % |\n|---|---|---|---|")
    for name, found in seconds.items():
        ratios = [a / b for a, b in zip(found, seconds[baseline], strict=True)]
        low, high = interval(ratios)
        ratio = statistics.median(ratios)
        print(f"| {name} | {1e3 * statistics.median(found):.2f} | {ratio:.3f} | {low:.3f} to {high:.3f} |", flush=True)


def passes(shape: tuple[int, ...], rounds: int, device: torch.device) -> Times:
    """Forward and backward over [b, s, h] or [b, n, s, s]; and, as a lower bound, a product with a given mask."""
    x = torch.randn(shape, device=device, requires_grad=True)
    dy, there = torch.randn_like(x), torch.ones_like(x)
    samples = tuple(range(shape[0]))
    rows = tuple(Rows(sample, 0, x[0].numel() // shape[-1]) for sample in samples)
    dropout = Dropout(PROBABILITY, SEED, 0, "benchmark")
    forwards = {
        "F.dropout": lambda: F.dropout(x, PROBABILITY),
        "generators": lambda: _Generators.apply(x, samples),
        "by coordinate": lambda: dropout(x, rows),
        "a mask that is there": lambda: x * there,
    }
    return in_turn({k: lambda f=f: torch.autograd.grad(f(), x, dy) for k, f in forwards.items()}, rounds, device)


def training_steps(rounds: int, device: torch.device) -> Times:
    """4 layers, hidden 512, 8 heads, sequence 256, two samples."""
    from megazero.engine.mesh.mesh import Mesh
    from megazero.engine.model.stage import declare
    from megazero.engine.step.batch import MicroBatch
    from megazero.engine.step.engine import Engine
    from megazero.flags.config import Config, ModelConfig, TrainingConfig
    from megazero.flags.resolve import resolve

    layers, h, n, s, v, b = 4, 512, 8, 256, 8192, 2
    ids = torch.randint(0, v, (b, s + 1), generator=torch.Generator().manual_seed(0))
    ids, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    batch = MicroBatch(ids, labels, torch.ones(b, s), tuple(range(b)))

    def kind(hidden: float, attention: float) -> Callable[[], object]:
        model = ModelConfig(layers, h, 0, n, s, v, hidden_dropout=hidden, attention_dropout=attention)
        config, layout = resolve(Config(model=model, training=TrainingConfig(micro_batch_size=b)), 1, 0, declare)
        engine = Engine(config, Mesh.build(layout, 0, device))
        return lambda: engine.train_step(1, [batch])

    kinds = {
        "no dropout": kind(0.0, 0.0),
        "hidden 0.1": kind(PROBABILITY, 0.0),
        "hidden and attention 0.1": kind(PROBABILITY, PROBABILITY),
    }
    return in_turn(kinds, rounds, device)


def main(o: Options) -> None:
    torch.set_num_threads(o.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, threads: {o.threads}"
    print(f"torch {torch.__version__}, {where}; fp32, probability {PROBABILITY}")
    for shape in ((2, 512, 1024), (2, 8, 256, 256), (1, 64, 128)):
        report(f"forward and backward, {list(shape)}", passes(shape, o.rounds, device), "F.dropout")
    if o.steps:
        report("training step", training_steps(o.steps, device), "no dropout")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
