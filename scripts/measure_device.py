#!/usr/bin/env python3
"""Measure this machine's CPU and write a device file for --plan: products, operators, gloo, overhead per operation.

Ranks compute at the same time with a thread each, as in training. A number is the median of several rounds, its range
the quartiles. Example, a minute:

    python scripts/measure_device.py --output cpu.toml
    python pretrain_gpt.py --preset tiny --plan --world-size 2 --device-type cpu.toml
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.device import device_of, measure, to_toml


@dataclass(frozen=True)
class Options:
    """Measure this machine's CPU as a device for --plan."""

    output: Path
    """File to write, such as cpu.toml."""
    ranks: int = 4
    """Ranks of a node: the most that will compute at once."""
    rounds: int = 5
    """Rounds, of which the median counts."""


def main() -> None:
    options = tyro.cli(Options)
    if options.rounds < 2 or options.ranks < 1:
        sys.exit("measure_device.py: --rounds must be at least 2, --ranks at least 1")
    device, curves = device_of(measure(options.ranks, options.rounds), options.ranks)
    options.output.write_text(to_toml(device, curves, options.ranks))
    print(
        f"{options.output}: {device['compute.fp32'] / 1e9:.1f} GFLOP/s and {device['memory.bandwidth'] / 1e9:.1f} GB/s "
        f"of a rank, {device['node.bandwidth'] / 1e9:.2f} GB/s between {options.ranks} ranks"
    )


if __name__ == "__main__":
    main()
