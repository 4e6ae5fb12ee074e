#!/usr/bin/env python3
"""Speeds and largest models of the ZeRO paper, by the time model and the estimate, as Markdown.

Nothing runs on a device. Figure 2 and 3: TFLOP/s of 400 and fewer V100; Figure 6: the largest model of C1 to C5.
Example, some minutes:

    python benchmarks/paper_speed.py > docs/results/paper_speed.md
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.reports.pictures import bars
from benchmarks.reports.published import FIGURE_2_BASELINE, FIGURE_2_ZERO, FIGURE_3, FIGURE_6, ZeroRun
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.cli import parse
from megazero.flags.config import Config
from megazero.flags.resolve import resolve
from megazero.planner.bytes.estimate import stage_bytes
from megazero.planner.parameter_counts import num_parameters
from megazero.planner.time.devices import Device, load_device
from megazero.planner.time.step_time import Parts, StepPrograms, step_parts

# The paper does not state sequence length and vocabulary of its evaluation: our assumption.
ASSUMED = "--seq-length 1024 --vocab-size 50257 --precision fp16 --grad-dtype fp16 --recompute full"


CALIBRATING = ("8B", "40B", "100B")
LAYOUT = Layout(dp=25, tp=16)  # of Figure 6

# Table 3
FLAGS = {
    1: "--zero-stage 1 --contiguous-checkpointing",
    2: "--zero-stage 1 --contiguous-checkpointing --partition-activations",
    3: "--zero-stage 2 --contiguous-checkpointing",
    4: "--zero-stage 2 --contiguous-checkpointing --partition-activations",
    5: "--zero-stage 2 --contiguous-checkpointing --partition-activations --checkpoint-in-cpu",
}


@dataclass(frozen=True)
class Options:
    """Write the tables."""

    only: str = ""
    """One of figure2, figure3, figure6. Empty: all."""


def executed(config: Config, parts: Parts, gpus: int) -> float:
    """TFLOP/s of a GPU with recompute counted (Narayanan 2021)."""
    m, b = config.model, config.training.global_batch_size
    layers, h, s, v = m.num_layers, m.hidden_size, m.seq_length, m.vocab_size
    flops = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    return flops / parts.seconds / gpus / 1e12


def point(p: ZeroRun, flags: str, device: Device) -> tuple[Config, Layout, Parts]:
    shape = f"--num-layers {p.layers} --hidden-size {p.hidden} --num-attention-heads {p.heads} {ASSUMED}"
    place = f"--tensor-model-parallel-size {p.tp} --micro-batch-size {p.micro_batch}"
    config, layout = resolve(parse([*shape.split(), *place.split(), *flags.split()]), p.gpus, 0, declare)
    return config, layout, step_parts(StepPrograms(config, layout), device)


def header(columns: str) -> None:
    """Print the head of a table."""
    print(f"| {columns} |\n|{'---|' * (columns.count('|') + 1)}")


def figure2(device: Device) -> None:
    print("## Figure 2: TFLOP/s per V100, recompute counted\n")
    drawn: dict[str, list[float]] = {}
    for system, points, flags in (
        ("ZeRO", FIGURE_2_ZERO, "--zero-stage 2"),
        ("baseline", FIGURE_2_BASELINE, "--zero-stage 0"),
    ):
        rows = []
        header("model | system | ours, overlapped | ours, not overlapped | x factor | paper | deviation | waits tp, dp")
        for p in points:
            pa = " --partition-activations" if system == "ZeRO" and p.tp > 1 else ""
            config, _, fast = point(p, flags + pa, device)
            _, _, plain = point(p, flags + pa + " --no-overlap-comm", device)
            waits = f"{plain.parts['tp'] / plain.seconds:.0%}, {plain.parts['dp'] / plain.seconds:.0%}"
            rows.append((p, executed(config, fast, p.gpus), executed(config, plain, p.gpus), waits))
        ratios = [p.tflops / ours for p, _, ours, _ in rows if p.model in CALIBRATING and p.tflops]
        factor, errors = statistics.geometric_mean(ratios), []
        for p, fast, plain, waits in rows:
            assert p.tflops is not None
            deviation = factor * plain / p.tflops - 1
            fitted = p.model in CALIBRATING
            errors += [] if fitted else [abs(deviation)]
            print(
                f"| {p.model} | {system} | {fast:.1f} | {plain:.1f} | {factor * plain:.1f} | {p.tflops} | "
                f"{deviation:+.0%}{' (calibrates)' if fitted else ''} | {waits} |"
            )
        drawn[system] = [factor * plain for _, _, plain, _ in rows]
        raw = statistics.mean(abs(fast / p.tflops - 1) for p, fast, _, _ in rows if p.tflops)
        print(
            f"\n{system}: factor {factor:.2f}, the geometric mean of paper / ours over 8B, 40B and 100B; mean absolute "
            f"error of the other {len(errors)} points {statistics.mean(errors):.0%}. Without a factor, overlapped, all "
            f"points: {raw:.0%}.\n"
        )

    _picture(drawn)


def _picture(drawn: dict[str, list[float]]) -> None:
    """Draw docs/pictures/paper-figure-2.svg: the paper's speeds and predictions times each system's factor."""
    series = {}
    for system, points in (("ZeRO", FIGURE_2_ZERO), ("baseline", FIGURE_2_BASELINE)):
        series[f"{system}, the paper's"] = [run.tflops or 0.0 for run in points]
        series[f"{system}, predicted"] = drawn[system]
    bars("paper-figure-2.svg", [run.model for run in FIGURE_2_ZERO], series, "TFLOP/s per V100, recompute counted")


def figure3(device: Device) -> None:
    print("## Figure 3: 60B on 64 to 400 V100, TFLOP/s per GPU, recompute counted\n")
    header("GPUs | micro-batch | ours | per GPU over that at 64 | GB of a device | GB with the batch of 400")
    first = 0.0
    for p in FIGURE_3:
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
        config, layout = resolve(parse([*args, f"--num-layers={layers}"]), 400, 0, declare)
        return stage_bytes(config, layout, 0, device.kind).peak, config

    usable = device.usable_bytes(LAYOUT)

    low, high = 1, 400
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peak(middle)[0] <= usable else (low, middle - 1)
    return low, peak(low)[1]


def figure6(device: Device) -> None:
    print("## Figure 6: the largest model on 400 V100, tensor parallelism 16, micro-batch 16\n")
    header("| hidden | paper: layers | B | ours: layers | B | ratio | GB of a device at the paper's size, by kind")
    for number, run in FIGURE_6.items():
        flags = FLAGS[number]
        most, config = largest(run.hidden, run.heads, flags, device)
        shape = f"--num-layers {run.layers} --hidden-size {run.hidden} --num-attention-heads {run.heads}"
        shape = f"{shape} {ASSUMED} {flags}"
        args = f"{shape} --tensor-model-parallel-size 16 --micro-batch-size 16"
        paper, layout = resolve(parse(args.split()), 400, 0, declare)
        held = stage_bytes(paper, layout, 0, device.kind)
        kinds = ", ".join(f"{kind.replace('_', ' ')} {b / 1e9:.1f}" for kind, b in held.at_peak.items() if b > 5e7)
        ours, theirs = (num_parameters(declare(c.model)) / 1e9 for c in (config, paper))
        sizes = f"{run.layers} | {theirs:.0f} | {most} | {ours:.0f} | {ours / theirs:.2f}"
        print(f"| C{number} | {run.hidden} | {sizes} | {held.peak / 1e9:.1f}: {kinds} |")
    print(f"\nUsable: {device.usable_bytes(LAYOUT) / 1e9:.1f} GB of {device['memory.capacity'] / 1e9:.1f}.\n")


def main() -> None:
    only = tyro.cli(Options).only
    v100 = load_device("v100-32gb")
    print("# Speeds of published runs by the time model\n")
    print("Made by `python benchmarks/paper_speed.py`; [discussion](plans.md#the-zero-papers-speeds).\n")
    for table in (figure2, figure3, figure6):
        if only in ("", table.__name__):
            table(v100)


if __name__ == "__main__":
    main()
