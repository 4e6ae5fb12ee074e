#!/usr/bin/env python3
"""The head's loss and gradients: in chunks of tokens, whole, and as others compute them. One process, on the CPU.

Every way gets the same hidden states x [T, h] and table [v, h], and returns the gradients of both. They take turns;
the ratio to the whole head is taken round by round, with its 95 % bootstrap interval. Memory: the most bytes of all
tensors at once beyond x, the table and its gradient. Errors: of the gradients in bf16, from fp64, relative to their
norms. Liger's fused loss is missing: its kernels are Triton's, for GPUs. Prints a table. Example:

    python benchmarks/head.py --tokens 1024 --hidden 768 --vocabulary 50257
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F

from benchmarks.measure import interval
from megazero.command.rehearsal.allocated import Allocated
from megazero.engine.kernels.matmul import Products
from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.model.layers.context import DTYPES, Context, DeviceBatch, MicroBatchInfo, ResidualStream
from megazero.engine.model.layers.norm import NoNorm
from megazero.engine.model.layers.weight import GradWriter, Weight
from megazero.engine.model.stage import Stage
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import ModelConfig
from megazero.planner.trace.pretend import pretend_mesh

CPU = torch.device("cpu")
Way = Callable[[], tuple[torch.Tensor, torch.Tensor]]  # -> gradients of x and of the table


@dataclass(frozen=True)
class Options:
    """Time, memory and error of the head's loss."""

    tokens: int = 1024
    hidden: int = 768
    vocabulary: int = 50257
    chunks: tuple[int, ...] = (128, 256, 512)
    """Tokens of a chunk, each a way of its own."""
    rounds: int = 7
    """Rounds that count; one more warms up."""
    threads: int = 2


class Gradients:
    """Owner of the head's weights: sums their gradients in fp32, or in fp64 of fp64."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}

    def accumulate_grad(self, weight: Weight, write: GradWriter) -> None:
        name, exact = weight.spec.name, torch.float64 if weight.data.dtype == torch.float64 else torch.float32
        add = name in self.sums
        if not add:
            self.sums[name] = torch.empty(weight.block.stored, dtype=exact)
        write(self.sums[name], add)


def ours(o: Options, x: torch.Tensor, table: torch.Tensor, labels: torch.Tensor, chunk: int, onednn: bool) -> Way:
    """Return the head of the engine without its norm; chunk: tokens, 0: all."""
    mesh = pretend_mesh(Layout(), 0, CPU, needs_staging_buffer=True)
    names = {dtype: name for name, dtype in DTYPES.items()}
    model = ModelConfig(1, o.hidden, 0, 8, o.tokens, o.vocabulary, untie_embeddings=True)
    context = Context(
        ResidualStream(mesh.tp, sharded=False),
        MemoryTracker(),
        names[x.dtype],
        CPU,
        products=Products(onednn=onednn),
        loss_chunk=chunk,
    )
    head = Stage(model, ["head"], context).head
    assert head is not None and head.output is not None
    weight = head.output.weight
    weight.data = F.pad(table, (0, 0, 0, weight.block.stored[0] - o.vocabulary))
    ids = labels[None]
    tokens = MicroBatchInfo.of(ids, (0,), context.stream, training=True)
    batch = DeviceBatch(ids, ids, torch.ones(ids.shape), tokens).seeded(
        torch.tensor([1 / o.tokens], dtype=torch.float64)
    )

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        weight.owner = owner = Gradients()
        leaf = x.detach().requires_grad_()
        loss = head.vocabulary.loss(leaf, NoNorm(), batch.labels, batch.loss_mask, batch.seed)
        (dx,) = torch.autograd.grad(loss.sum(), leaf)
        return dx, owner.sums[weight.spec.name][: o.vocabulary]

    return run


def plain(x: torch.Tensor, table: torch.Tensor, labels: torch.Tensor, upcast: bool) -> Way:
    """Return F.linear and F.cross_entropy under autograd. upcast: the logits in fp32, as transformers' loss does."""

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, table)]
        logits = F.linear(*leaves)
        F.cross_entropy(logits.float() if upcast else logits, labels).backward()
        return tuple(leaf.grad for leaf in leaves)

    return run


def by_autograd(x: torch.Tensor, table: torch.Tensor, labels: torch.Tensor, parts: int) -> Way:
    """Return a loss in chunks under autograd, each with its backward at once, as torchtitan's chunked loss does."""

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        leaf, weight = x.detach(), table.detach().requires_grad_()
        grads = []
        for part, targets in zip(leaf.chunk(parts), labels.chunk(parts), strict=True):
            part = part.detach().requires_grad_()
            (F.cross_entropy(F.linear(part, weight).float(), targets, reduction="sum") / len(labels)).backward()
            grads.append(part.grad)
        return torch.cat(grads), weight.grad

    return run


def ways(o: Options, x: torch.Tensor, table: torch.Tensor, labels: torch.Tensor, onednn: bool) -> dict[str, Way]:
    found = {"ours, whole": ours(o, x, table, labels, 0, onednn)}
    found |= {f"ours, {chunk} tokens": ours(o, x, table, labels, chunk, onednn) for chunk in o.chunks}
    found["torch"] = plain(x, table, labels, upcast=False)
    found["transformers' loss"] = plain(x, table, labels, upcast=True)
    found["8 chunks by autograd"] = by_autograd(x, table, labels, 8)
    return found


def peak(way: Way) -> int:
    """Return the most bytes of tensors that a way allocates, its results included."""
    with Allocated(CPU) as allocated:
        way()
    return allocated.peak


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def main(o: Options) -> None:
    torch.set_num_threads(o.threads)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(o.tokens, o.hidden, generator=generator)
    table = 0.02 * torch.randn(o.vocabulary, o.hidden, generator=generator)
    labels = torch.randint(0, o.vocabulary, (o.tokens,), generator=generator)
    timed = ways(o, x, table, labels, onednn=False)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(o.rounds + 1):
        for name, way in timed.items():
            begin = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begin)
    few = replace(o, tokens=min(o.tokens, 256))
    x, labels = x[: few.tokens], labels[: few.tokens]
    exact = plain(x.bfloat16().double(), table.bfloat16().double(), labels, upcast=False)()
    narrow = ways(few, x.bfloat16(), table.bfloat16(), labels, onednn=False)
    print("| head | seconds | ratio to whole | memory | error of dx, bf16 | of the table's gradient |")
    print("|---|---|---|---|---|---|")
    for name, way in timed.items():
        ratios = [a / b for a, b in zip(seconds[name][1:], seconds["ours, whole"][1:], strict=True)]
        low, high = interval(ratios)
        errors = [error(a, b) for a, b in zip(narrow[name](), exact, strict=True)]
        print(
            f"| {name} | {statistics.median(seconds[name][1:]):.3f} | {statistics.median(ratios):.2f} "
            f"[{low:.2f}, {high:.2f}] | {peak(way) / 1e6:,.0f} MB | {errors[0]:.1e} | {errors[1]:.1e} |"
        )


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
