#!/usr/bin/env python3
"""Measure this machine and write a device file for --plan.

With a GPU, in about 20 s: copies, products by size, attention with heads of 64 and 128, copies of pinned memory, and
launches, in place of the assumed constants of its file in scripts/devices. Otherwise the CPU, in a minute: products,
operators, gloo, and the overhead of an operation. There, ranks compute at the same time with a thread each, as in
training. A number is the median of several rounds; its range is that over sizes, or the quartiles. Example:

    python scripts/measure_device.py --output cpu.toml
    python pretrain_gpt.py --preset tiny --plan --world-size 2 --device-type cpu.toml
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import device_gpu
from benchmarks.device import cpu_name, device_of, measure, to_toml
from megazero.files import replace_file
from megazero.planner.time.devices import find_card, load_device


@dataclass(frozen=True)
class Options:
    """Measure this machine as a device for --plan."""

    output: Path
    """File to write, such as cpu.toml."""
    ranks: int = 4
    """Ranks of a node, the most that will compute at once; on CPUs."""
    rounds: int = 5
    """Rounds, of which the median counts; on CPUs."""
    like: str = ""
    """Device of scripts/devices with the constants that are not measured on GPUs. Empty: this card's."""


def main() -> None:
    options = tyro.cli(Options)
    if options.rounds < 2 or options.ranks < 1:
        sys.exit("measure_device.py: --rounds must be at least 2, --ranks at least 1")
    import torch  # here, because an import of megazero sets variables that it reads when it is imported

    if torch.cuda.is_available():
        of_gpu(options)
        return
    device = device_of(measure(options.ranks, options.rounds), options.ranks)
    replace_file(options.output, to_toml(device, f"{cpu_name()}, {options.ranks} ranks of one thread"))
    print(
        f"{options.output}: {device['compute.fp32'] / 1e9:.1f} GFLOP/s and {device['memory.bandwidth'] / 1e9:.1f} GB/s "
        f"of a rank, {device['node.bandwidth'] / 1e9:.2f} GB/s between {options.ranks} ranks"
    )


def of_gpu(options: Options) -> None:
    """Measure the first GPU, and show each constant next to the one that it replaces."""
    import torch

    card = torch.cuda.get_device_name(0)
    like = load_device(options.like) if options.like else find_card(card)
    if like is None:
        sys.exit(f"measure_device.py: no file of scripts/devices is of {card}; name a similar device with --like")
    device = device_gpu.measured(like, torch.device("cuda", 0))
    replace_file(options.output, to_toml(device, f"{card}, other constants as {like.name}"))
    print("| constant | measured | range | before |\n|---|---|---|---|")
    for name, constant in device.constants.items():
        if constant != like.constants.get(name):
            before = like.constants[name].value if name in like.constants else float("nan")
            print(f"| {name} | {constant.value:.4g} | {constant.low:.4g} to {constant.high:.4g} | {before:.4g} |")


if __name__ == "__main__":
    main()
