#!/usr/bin/env python3
"""Speeds and largest models of the ZeRO paper and of Narayanan 2021, by the time model and the estimate, as Markdown.

Nothing runs on a device. Figure 2 and 3: TFLOP/s of 400 and fewer V100; Figure 6: the largest model of C1 to C5. Then
the layouts that --plan-search finds for Narayanan's clusters, beside the published ones. Example, some minutes:

    python benchmarks/paper_speed.py > docs/results/paper_speed.md
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.config.cli import parse
from megazero.config.schema import Config
from megazero.plan.parameters import num_parameters
from megazero.plan.resolve import resolve
from megazero.plan.topology import Layout
from megazero.price.devices import Device, load_device
from megazero.price.plan import Plan, make_plan
from megazero.price.search import Search
from megazero.price.stage_bytes import stage_bytes
from megazero.price.step_time import Parts, StepPrograms, step_parts

# The paper says neither sequence length nor vocabulary of its evaluation: our assumption.
ASSUMED = "--seq-length 1024 --vocab-size 50257 --precision fp16 --grad-dtype fp16 --recompute full"


class Point(NamedTuple):
    """A point of Figure 2 or 3: arXiv 1910.02054 v3, appendix; TFLOP/s read from the figure, +-0.1."""

    model: str
    gpus: int
    tp: int
    layers: int
    hidden: int
    heads: int
    micro_batch: int
    paper: float | None = None


ZERO = [
    Point("1.5B", 400, 1, 48, 1600, 16, 24, 30.3),
    Point("8B", 400, 4, 72, 3072, 24, 64, 36.9),
    Point("40B", 400, 4, 88, 6144, 32, 12, 35.9),
    Point("60B", 400, 16, 132, 6144, 32, 64, 36.5),
    Point("80B", 400, 16, 100, 8192, 64, 32, 37.6),
    Point("100B", 400, 16, 125, 8192, 64, 32, 38.7),
    Point("120B", 400, 16, 150, 8192, 64, 24, 28.2),
    Point("140B", 400, 16, 175, 8192, 64, 16, 26.9),
    Point("170B", 400, 16, 212, 8192, 64, 12, 20.9),
]
BASELINE = [
    Point("1.5B", 400, 2, 48, 1600, 16, 16, 26.3),
    Point("8B", 400, 8, 72, 3072, 24, 8, 23.2),
    Point("40B", 384, 32, 88, 6144, 64, 4, 5.0),
    Point("60B", 384, 64, 132, 6144, 64, 4, 6.4),
    Point("80B", 384, 128, 100, 8192, 128, 4, 5.2),
    Point("100B", 384, 128, 125, 8192, 128, 2, 3.8),
    Point("120B", 384, 128, 150, 8192, 128, 2, 3.8),
    Point("140B", 384, 128, 175, 8192, 128, 2, 3.9),
    Point("170B", 256, 256, 212, 8192, 256, 2, 2.2),
]
SCALING = [Point("60B", gpus, 16, 75, 8192, 32, b) for gpus, b in ((64, 16), (128, 48), (256, 48), (400, 64))]
CALIBRATING = ("8B", "40B", "100B")

# Figure 6: layers of the largest model, hidden, heads; Table 3
LARGEST = {
    "C1": (50, 8192, 32, "--zero-stage 1 --contiguous-checkpointing"),
    "C2": (132, 6144, 64, "--zero-stage 1 --contiguous-checkpointing --partition-activations"),
    "C3": (62, 8192, 32, "--zero-stage 2 --contiguous-checkpointing"),
    "C4": (175, 8192, 64, "--zero-stage 2 --contiguous-checkpointing --partition-activations"),
    "C5": (187, 8192, 64, "--zero-stage 2 --contiguous-checkpointing --partition-activations --checkpoint-in-cpu"),
}


class Published(NamedTuple):
    """A row of Narayanan 2021 (arXiv 2104.04473), table 1: A100-80GB, sequence 2048, vocabulary 51200.

    `tflops` per GPU counts recompute: 96 B s L h^2 (1 + s/6h + V/16Lh).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    tp: int
    pp: int
    gpus: int
    batch: int
    tflops: float


NARAYANAN = [
    Published("18.4B", 40, 6144, 48, 8, 1, 256, 1024, 135),
    Published("145.6B", 80, 12288, 96, 8, 8, 1536, 2304, 148),
    Published("1008B", 128, 25600, 160, 8, 64, 3072, 3072, 163),
]


@dataclass(frozen=True)
class Options:
    """Write the tables."""

    only: str = ""
    """One of figure2, figure3, figure6, narayanan. Empty: all."""


def executed(config: Config, parts: Parts, gpus: int) -> float:
    """TFLOP/s of a GPU with recompute counted (Narayanan 2021)."""
    m, b = config.model, config.training.global_batch_size
    layers, h, s, v = m.num_layers, m.hidden_size, m.seq_length, m.vocab_size
    flops = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    return flops / parts.seconds / gpus / 1e12


def point(p: Point, flags: str, device: Device) -> tuple[Config, Layout, Parts]:
    shape = f"--num-layers {p.layers} --hidden-size {p.hidden} --num-attention-heads {p.heads} {ASSUMED}"
    place = f"--tensor-model-parallel-size {p.tp} --micro-batch-size {p.micro_batch}"
    config, layout = resolve(parse([*shape.split(), *place.split(), *flags.split()]), p.gpus, 0)
    return config, layout, step_parts(StepPrograms(config, layout), device)


def header(columns: str) -> None:
    """Print the head of a table."""
    print(f"| {columns} |\n|{'---|' * (columns.count('|') + 1)}")


def figure2(device: Device) -> None:
    print("## Figure 2: TFLOP/s per V100, recompute counted\n")
    for system, points, flags in (("ZeRO", ZERO, "--zero-stage 2"), ("baseline", BASELINE, "--zero-stage 0")):
        rows = []
        header("model | system | ours, overlapped | ours, not overlapped | x factor | paper | deviation | waits tp, dp")
        for p in points:
            pa = " --partition-activations" * (system == "ZeRO" and p.tp > 1)
            config, _, fast = point(p, flags + pa, device)
            _, _, plain = point(p, flags + pa + " --no-overlap-comm", device)
            waits = f"{plain.parts['tp'] / plain.seconds:.0%}, {plain.parts['dp'] / plain.seconds:.0%}"
            rows.append((p, executed(config, fast, p.gpus), executed(config, plain, p.gpus), waits))
        ratios = [p.paper / ours for p, _, ours, _ in rows if p.model in CALIBRATING and p.paper]
        factor, errors = statistics.geometric_mean(ratios), []
        for p, fast, plain, waits in rows:
            assert p.paper is not None
            deviation = factor * plain / p.paper - 1
            fitted = p.model in CALIBRATING
            errors += [] if fitted else [abs(deviation)]
            print(
                f"| {p.model} | {system} | {fast:.1f} | {plain:.1f} | {factor * plain:.1f} | {p.paper} | "
                f"{deviation:+.0%}{' (calibrates)' if fitted else ''} | {waits} |"
            )
        raw = statistics.mean(abs(fast / p.paper - 1) for p, fast, _, _ in rows if p.paper)
        print(
            f"\n{system}: factor {factor:.2f}, the geometric mean of paper / ours over 8B, 40B and 100B; mean absolute "
            f"error of the other {len(errors)} points {statistics.mean(errors):.0%}. Without a factor, overlapped, all "
            f"points: {raw:.0%}.\n"
        )


def figure3(device: Device) -> None:
    print("## Figure 3: 60B on 64 to 400 V100, TFLOP/s per GPU, recompute counted\n")
    header("GPUs | micro-batch | ours | per GPU over that at 64 | GB of a device | GB with the batch of 400")
    first = 0.0
    for p in SCALING:
        config, layout, parts = point(p, "--zero-stage 2 --partition-activations", device)
        found = executed(config, parts, p.gpus)
        first = first or found
        held = stage_bytes(config, layout, 0, device.kind).peak
        wide, same, _ = point(p._replace(micro_batch=64), "--zero-stage 2 --partition-activations", device)
        most = stage_bytes(wide, same, 0, device.kind).peak
        print(
            f"| {p.gpus} | {p.micro_batch} | {found:.1f} | {found / first:.3f} | {held / 1e9:.1f} | {most / 1e9:.1f} |"
        )
    print()


def largest(hidden: int, heads: int, flags: str, device: Device) -> tuple[int, Config]:
    """Return the most layers that fit on 400 GPUs, tensor parallelism 16, micro-batch 16."""
    shape = f"--hidden-size {hidden} --num-attention-heads {heads} {ASSUMED} --tensor-model-parallel-size 16"
    args = [*shape.split(), "--micro-batch-size=16", *flags.split()]

    def peak(layers: int) -> tuple[int, Config]:
        config, layout = resolve(parse([*args, f"--num-layers={layers}"]), 400, 0)
        return stage_bytes(config, layout, 0, device.kind).peak, config

    low, high = 1, 400
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peak(middle)[0] <= device.usable_bytes else (low, middle - 1)
    return low, peak(low)[1]


def figure6(device: Device) -> None:
    print("## Figure 6: the largest model on 400 V100, tensor parallelism 16, micro-batch 16\n")
    header("| hidden | paper: layers | B | ours: layers | B | ratio | GB of a device at the paper's size, by kind")
    for name, (layers, hidden, heads, flags) in LARGEST.items():
        most, config = largest(hidden, heads, flags, device)
        shape = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} {ASSUMED} {flags}"
        args = f"{shape} --tensor-model-parallel-size 16 --micro-batch-size 16"
        paper, layout = resolve(parse(args.split()), 400, 0)
        held = stage_bytes(paper, layout, 0, device.kind)
        kinds = ", ".join(f"{kind.replace('_', ' ')} {b / 1e9:.1f}" for kind, b in held.at_peak.items() if b > 5e7)
        ours, theirs = (num_parameters(c.model) / 1e9 for c in (config, paper))
        sizes = f"{layers} | {theirs:.0f} | {most} | {ours:.0f} | {ours / theirs:.2f}"
        print(f"| {name} | {hidden} | {sizes} | {held.peak / 1e9:.1f}: {kinds} |")
    print(f"\nUsable: {device.usable_bytes / 1e9:.1f} GB of {device['memory.capacity'] / 1e9:.1f}.\n")


def narayanan(device: Device) -> None:
    print("## --plan-search beside Narayanan 2021: A100-80GB, sequence 2048, vocabulary 51200\n")
    header("model | GPUs, batch | layout | TFLOP/s, with recompute as run | s a step | GB | published TFLOP/s")
    for row in NARAYANAN:
        model = f"--num-layers {row.layers} --hidden-size {row.hidden} --num-attention-heads {row.heads}"
        common = f"{model} --seq-length 2048 --vocab-size 51200 --precision bf16 --global-batch-size {row.batch}"
        theirs = f"--tensor-model-parallel-size {row.tp} --pipeline-model-parallel-size {row.pp} --recompute full"
        theirs += " --zero-stage 0" if row.gpus == row.tp * row.pp else " --zero-stage 1"
        config, layout = resolve(parse([*common.split(), *theirs.split()]), row.gpus, 0)
        published = make_plan(config, layout, device)
        theirs = _row(f"{row.name} | {row.gpus}, {row.batch} | theirs", published, row.tflops)
        print(theirs)
        asked = f"--plan-search --world-size {row.gpus} --device-type a100-80gb"
        search, plans = Search(parse([*common.split(), *asked.split()]), device, 0), list[Plan]()
        for done in search.run():
            plans = plans if isinstance(done, int) else done
        for n, plan in enumerate(plans[:3]):
            print(_row(f" | | found {n + 1}", plan))
    print()


def _row(name: str, plan: Plan, published: float | str = "") -> str:
    peak = plan.stages[plan.fullest].peak / 1e9
    return f"| {name}: {_describe(plan)} | {_tflops(plan):.0f} | {plan.seconds:.1f} | {peak:.0f} | {published} |"


def _tflops(plan: Plan) -> float:
    full = plan.config.activations.recompute == "full"
    return executed(plan.config, plan.time.expected, plan.layout.world_size) * (1 if full else 3 / 4)


def _describe(plan: Plan) -> str:
    config = plan.config
    flags = [config.parallel.pipeline_schedule] * (plan.layout.pp > 1) + [f"ZeRO {config.zero.zero_stage}"]
    flags += [f"recompute {config.activations.recompute}", f"micro-batch {config.training.micro_batch_size}"]
    return f"{plan.layout}, {', '.join(flags)}{', SP' * config.parallel.sequence_parallel}"


def main() -> None:
    only = tyro.cli(Options).only
    v100, a100 = load_device("v100-32gb"), load_device("a100-80gb")
    print("# Speeds of published runs by the time model\n\nMade by `python benchmarks/paper_speed.py`; docs/plan.md.\n")
    for name, table, device in (
        ("figure2", figure2, v100),
        ("figure3", figure3, v100),
        ("figure6", figure6, v100),
        ("narayanan", narayanan, a100),
    ):
        if only in ("", name):
            table(device)


if __name__ == "__main__":
    main()
