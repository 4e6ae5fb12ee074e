#!/usr/bin/env python3
"""A mixture of experts on CPUs: side by side in one run.

- step: megazero at ZeRO stage 3, and with experts divided over the ranks (ep) at stage 1, next to transformers'
  MixtralForCausalLM under FSDP2, whose experts are a loop (eager) or `F.grouped_mm`. All train the same model on the
  same batches, without balance losses; their first losses have to agree.
- layer: a step of megazero by part of the layers with experts, on one process and with ep 2.
- products: megazero's loop of products next to `F.grouped_mm`.

One thread per process. Turns and intervals are as in `zero.py`. Examples:

    python benchmarks/experts.py
    python benchmarks/experts.py --parts products --rounds 30
"""

import functools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import peers
from benchmarks.peer_models import initial_weights
from benchmarks.peers import System, Training
from benchmarks.processes import Job, alive, isolate, quotients, shown, take_turns
from megazero.engine.kernels.grouped import GroupedProducts, RowGroups
from megazero.engine.kernels.matmul import Products
from megazero.engine.mesh.collectives import AsyncTensor
from megazero.engine.model.dispatch import Dispatch, SortedRows
from megazero.engine.model.experts import experts as layers
from megazero.engine.model.experts.router import Router
from megazero.families import with_traits
from megazero.flags.config import Config
from megazero.torch_private import has_onednn

LOSS_GAP = 1e-4  # relative, in fp32
REST, WAITS = "the rest of the step", "waits"
Make = Callable[[Any, torch.device], Training]  # (work, device) -> training of a rank


@dataclass(frozen=True)
class Work(peers.Work):
    """Adds experts.

    Attributes:
        top: experts of a token.
        width: inside an expert.
        ep: ranks over which experts are divided.
        products: --matmul-backend.
    """

    experts: int = 8
    top: int = 2
    width: int = 1024
    ep: int = 1
    products: Literal["auto", "torch"] = "auto"

    def config(self, stage: int) -> Config:
        base = super().config(stage)
        model = replace(
            base.model,
            **with_traits({"architecture": "mixtral"}),
            num_query_groups=self.num_heads // 2,
            ffn_hidden_size=self.width,
            norm_epsilon=1e-5,
            rotary_base=1e6,
            untie_embeddings=True,
            num_experts=self.experts,
            moe_router_topk=self.top,
        )
        return replace(
            base,
            model=model,
            parallel=replace(base.parallel, expert_model_parallel_size=self.ep),
            training=replace(base.training, matmul_backend=self.products),
        )


class PlainMixtral(nn.Module):
    """transformers' MixtralForCausalLM with torch's attention, and megazero's initial values.

    Args:
        products: of the experts, one of transformers' names.
    """

    def __init__(self, products: str, config: Config) -> None:
        from transformers import MixtralForCausalLM

        from megazero.interop.huggingface.families import family_of

        super().__init__()
        model = config.model
        family = family_of(model)
        theirs = family.to_config(model, None)
        theirs.use_cache = False
        implementations = {"attn_implementation": "sdpa", "experts_implementation": products}
        self.mixtral = MixtralForCausalLM._from_config(theirs, **implementations)
        self.blocks = self.mixtral.model.layers
        ours = dict(initial_weights(model, config.training.seed))
        experts = {name: ours.pop(name) for name in list(ours) if ".experts." in name}
        values = {name.replace(".block_sparse_moe.", ".mlp."): x for name, x in family.split(ours, model).items()}
        for i, block in enumerate(self.blocks):  # files have a tensor for each expert, modules one for all
            for mine, their in (("up.weight", "gate_up_proj"), ("down.weight", "down_proj")):
                shape = getattr(block.mlp.experts, their).shape
                values[f"model.layers.{i}.mlp.experts.{their}"] = experts[f"blocks.{i}.mlp.experts.{mine}"].view(shape)
        self.mixtral.load_state_dict(values)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """ids, labels [b, s] -> mean cross-entropy, a scalar."""
        return F.cross_entropy(self.mixtral(ids).logits.flatten(0, 1).float(), labels.flatten())


class Clock:
    """CPU seconds of this thread by part. A part that calls another does not count the other's."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.open = [REST]
        self.since = time.thread_time()

    def charge(self) -> None:
        """Count the time since the last call for the innermost part."""
        now = time.thread_time()
        self.seconds[self.open[-1]] += now - self.since
        self.since = now

    def watch(self, owner: Any, name: str, part: str) -> None:
        """From now on, calls of this function or method are of `part`."""
        called = getattr(owner, name)

        @functools.wraps(called)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.charge()
            self.open.append(part)
            try:
                return called(*args, **kwargs)
            finally:
                self.charge()
                self.open.pop()

        is_bound = getattr(called, "__self__", None) is owner  # a class method
        setattr(owner, name, staticmethod(timed) if is_bound else timed)

    def reset(self) -> None:
        self.seconds.clear()
        self.since = time.thread_time()


PARTS = {
    "route": [(Router, "forward"), (Router, "backward"), (Router, "mixed")],
    "sort, exchange": [
        *((SortedRows, name) for name in ("of", "rows", "choices")),
        *((Dispatch, name) for name in ("of", "order", "start")),
        (layers, "arranged"),
        (layers, "as_arrived"),
        (AsyncTensor, "wait"),
    ],
    "products": [(GroupedProducts, name) for name in ("output", "input_grad", "weight_grad")],
    "activation, weighting": [(layers.ExpertMLPs, "forward"), (layers.ExpertMLPs, "backward")],
    "combine": [(Dispatch, "start_back"), (SortedRows, "unsorted")],
    "norm, residual": [(layers._Branch, "forward"), (layers._Branch, "backward")],
}


def _megazero(stage: int, ep: bool = False, products: Literal["auto", "torch"] = "auto") -> Make:
    """`ep`: experts are divided over all ranks; products: --matmul-backend."""
    return lambda work, device: peers.megazero(
        replace(work, ep=work.ranks if ep else 1, products=products), device, stage
    )


def watched(work: Work, device: torch.device) -> Training:
    """megazero, whose `check` returns the CPU seconds of each part of the last step, and the seconds of its waits."""
    clock, training = Clock(), _megazero(1, ep=True)(work, device)
    for part, calls in PARTS.items():
        for owner, name in calls:
            clock.watch(owner, name, part)

    def step(*inputs: torch.Tensor) -> float:
        clock.reset()
        start = time.perf_counter()
        loss = training.step(*inputs)
        clock.charge()
        clock.seconds[WAITS] = time.perf_counter() - start - clock.seconds.total()
        return loss

    return Training(step, training.wait_for_all, lambda: dict(clock.seconds))


def _fsdp2(products: str) -> Make:
    return lambda work, device: peers.fsdp2(work, device, True, functools.partial(PlainMixtral, products))


SYSTEMS = {
    "fsdp2-eager": System(3, "transformers, eager, FSDP2", _fsdp2("eager")),
    "fsdp2-grouped": System(3, "transformers, grouped_mm, FSDP2", _fsdp2("grouped_mm")),
    "megazero3": System(3, "megazero, stage 3", _megazero(3)),
    "megazero3-torch": System(3, "megazero, stage 3, torch's products", _megazero(3, products="torch")),
    "megazero1-ep": System(1, "megazero, ep, stage 1", _megazero(1, ep=True)),
    "megazero1-ep-torch": System(1, "megazero, ep, stage 1, torch's products", _megazero(1, True, "torch")),
    "watched": System(1, "megazero by part", watched),
}
PEERS = ("fsdp2-eager", "fsdp2-grouped")


@dataclass(frozen=True)
class Options:
    """A mixture of experts on CPUs."""

    parts: tuple[Literal["step", "layer", "products"], ...] = ("step", "layer", "products")
    layers: int = 4
    hidden: int = 512
    heads: int = 8
    seq_length: int = 256
    vocabulary: int = 4096
    batch: int = 2
    """Samples of a micro-batch; a step has one on every rank."""
    experts: int = 8
    top: int = 2
    width: int = 1024
    """Inside an expert."""
    rounds: int = 12
    """Turns of every system."""
    steps: int = 2
    """Steps of a turn."""
    quick: bool = False
    """A smoke run: a tiny model, one round."""

    def work(self, ranks: int) -> Work:
        shape = (self.layers, self.hidden, self.heads, self.seq_length, self.vocabulary, self.batch)
        return Work(*shape, ranks, "fp32", "mixtral", self.experts, self.top, self.width)


def job(system: str, work: Work) -> Job:
    return Job(system, work, "benchmarks.experts")


def compare_steps(o: Options, console: Console) -> None:
    """Ranks of all systems take turns. The losses of the first steps, which warm up too, have to agree."""
    names, isolated = [name for name in SYSTEMS if name != "watched"], isolate()
    with alive([job(name, o.work(2)) for name in names]) as systems:
        losses = {}
        for system in systems:
            system.ask("build")
            losses[system.system] = torch.tensor(system.ask("losses", 4)[0]["losses"])
        gaps = {name: float((each / losses[names[0]] - 1).abs().max()) for name, each in losses.items()}
        wrong = {name: gap for name, gap in gaps.items() if not gap < LOSS_GAP}
        if wrong:
            raise SystemExit(f"not timed, for these train another model than {names[0]}, by relative losses: {wrong}")
        found = take_turns(systems, o.rounds, o.steps, isolated)
    best = min(PEERS, key=lambda name: statistics.median(found[name]["seconds"]))
    table = Table(title=f"two ranks, {o.rounds} turns of {o.steps} steps; medians, 95 % intervals")
    for column in ("system", "ms", f"speed over {SYSTEMS[best].label}", "CPU ms", "MB sent", "gap"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for name, it in found.items():
        table.add_row(
            SYSTEMS[name].label,
            shown([1000 * s for s in it["seconds"]], 0),
            shown(quotients(found[best]["seconds"], it["seconds"]), 2) if name != best else "",
            f"{1000 * statistics.median(it['cpu']):.0f}",
            f"{statistics.median(it['wire']) / 1e6:.0f}" if it["wire"] else "not measured",
            f"{gaps[name]:.0e}",
        )
    console.print(table)


def time_parts(o: Options, console: Console) -> None:
    table = Table(title=f"a step by part, CPU ms, and waits: {o.rounds} steps; medians, 95 % intervals")
    table.add_column("part")
    found: dict[str, list[dict[str, float]]] = {}  # rank -> seconds of each part of every step
    with alive([job("watched", o.work(1)), job("watched", o.work(2))]) as systems:
        for system in systems:
            system.ask("build")
            system.ask("losses", 3)
        for _ in range(o.rounds):
            for system in systems:
                system.ask("timed", 1)
                for rank, seconds in enumerate(system.ask("check")):
                    title = "one process" if system.num_ranks == 1 else f"ep 2, rank {rank}"
                    found.setdefault(title, []).append(seconds)
    for title in found:
        table.add_column(title, justify="right")
    for part in (*PARTS, REST, WAITS):
        table.add_row(part, *(shown([1000 * step[part] for step in steps], 1) for steps in found.values()))
    console.print(table)


def _seconds(products: GroupedProducts, groups: RowGroups, *tensors: torch.Tensor) -> float:
    """CPU seconds of the three products of x [R, in], dy [R, out], weight and its gradient [E, out, in]."""
    x, dy, weight, gradient = tensors
    start = time.thread_time()
    products.output(x, weight, groups)
    products.input_grad(dy, weight, groups)
    products.weight_grad(groups, x, dy, gradient, False)
    return time.thread_time() - start


def compare_products(o: Options, console: Console) -> None:
    """The first product of a layer's experts; as many FLOPs with few wide experts as with many narrow ones."""
    torch.set_num_threads(1)
    table = Table(title=f"output and both gradients, CPU ms: {o.rounds} turns; medians, 95 % intervals")
    for column in ("experts", "per token", "rows", "width", "loop", "F.grouped_mm", "it / loop", "loop, oneDNN"):
        table.add_column(column, justify="right")
    for times in (1, 8):
        experts, top, width = times * o.experts, times * o.top, 2 * o.width // times
        rows = top * o.batch * o.seq_length
        counts = torch.randint(experts, (rows,), generator=torch.Generator().manual_seed(0)).bincount(minlength=experts)
        on_host, on_device = RowGroups.of(counts, tuple(counts.tolist())), RowGroups.of(counts, None)
        weight = torch.randn(experts, width, o.hidden)
        tensors = torch.randn(rows, o.hidden), torch.randn(rows, width), weight, torch.empty_like(weight)
        ways = [(Products(), on_host), (Products(), on_device), (Products(onednn=has_onednn()), on_host)]
        turns = [[_seconds(GroupedProducts(it), groups, *tensors) for it, groups in ways] for _ in range(o.rounds + 2)]
        loop, grouped, onednn = ([1000 * seconds for seconds in way] for way in zip(*turns[2:], strict=True))
        cells = shown(loop, 1), shown(grouped, 1), shown(quotients(grouped, loop), 2)
        last = shown(onednn, 1) if has_onednn() else "not there"
        table.add_row(*map(str, (experts, top, rows, width)), *cells, last)
    console.print(table)


def main(o: Options) -> None:
    if o.quick:
        tiny = {"layers": 2, "hidden": 64, "heads": 4, "seq_length": 16, "vocabulary": 128, "width": 32}
        o = replace(o, **tiny, rounds=1, steps=1)
    console = Console(width=150 if not sys.stdout.isatty() else None)
    for name, measure in (("step", compare_steps), ("layer", time_parts), ("products", compare_products)):
        if name in o.parts:
            measure(o, console)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
