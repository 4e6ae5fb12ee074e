#!/usr/bin/env python3
"""Make the tables and the picture of docs/results/scale.md: groups, checkpoints, failures and goodput of large jobs.

Example: python -m benchmarks.reports.scale
"""

import sys
from pathlib import Path

from benchmarks.reports.blocks import markdown, write_blocks
from benchmarks.reports.pictures import lines
from benchmarks.reports.rehearsals import Asked, rehearse_all, resolved
from megazero.engine.plan.layout.topology import AXES, SUB_AXES, Layout
from megazero.planner.bytes.estimate import estimate
from megazero.planner.goodput import SECONDS_PER_HOUR, best_interval, goodput
from megazero.planner.layouts import layout_words
from megazero.planner.time.devices import communicators

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "scale.md"
# Hours between failures of a device: 419 unexpected interruptions in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783,
# section 3.3.4)
LLAMA_3_DEVICE_HOURS = 54 * 24 * 16_384 / 419
DEVICES = (1_024, 4_096, 10_240, 16_384)
STATE_BYTES = 12  # of a checkpoint, for a parameter: fp32 weight and moments
PARAMETERS = {"100B": 1e11, "1T": 1e12}
WRITE_GB = 2.0  # a second, of a node of 8 devices into the shared file system; assumed
HOST_GB = 20.0  # a second, of a device into host memory; assumed
RESTART_SECONDS = 600.0  # until a requeued job trains again; assumed
PRESETS = {"gpt-100b-h100": 512, "gpt-100b-h200": 256, "gpt-100b-b200": 128, "gpt-1000b": 1024}


def groups() -> dict[str, str]:
    """Count communicators: of the whole job, of rank 0 with others, and the splits that make them."""
    rows = []
    for devices in DEVICES:
        for layout in (Layout(dp=devices // 8, tp=8), Layout(pp=16, dp=devices // 128, tp=8)):
            made = {tuple(ranks) for axis in (*AXES, *SUB_AXES) for ranks in layout.groups(axis) if len(ranks) > 1}
            links = len(layout.links()) * layout.dp * layout.tp
            mine = sum(0 in ranks for ranks in made)
            own_links = sum(0 in (first, (first + 1) % layout.pp) for first, _, _ in layout.links())
            rows.append(
                [
                    f"{devices:,}",
                    layout_words(layout),
                    f"{len(made) + links:,}",
                    mine + own_links,
                    communicators(layout) - 1,
                ]
            )
    columns = ["devices", "layout", "communicators of the job", "of rank 0", "splits that make them"]
    return {"groups": markdown(columns, rows)}


def saves() -> dict[str, str]:
    """Sizes and times of checkpoints; failures, the best interval, goodput."""
    rows = []
    for devices in DEVICES:
        between = LLAMA_3_DEVICE_HOURS * SECONDS_PER_HOUR / devices
        for name, parameters in PARAMETERS.items():
            total = STATE_BYTES * parameters
            written = total / 1e9 / (WRITE_GB * devices / 8)
            copied = total / devices / 1e9 / HOST_GB
            row: list[object] = [f"{devices:,}", f"{86400 / between:.1f}", name, f"{total / 1e12:.1f} TB"]
            for stall in (written, copied):
                interval = max(best_interval(stall, between), written)
                share = goodput(interval, stall, RESTART_SECONDS, between)
                row.append(f"{stall:.1f} s, {interval / 60:.1f} min: {100 * share:.1f} %")
            rows.append(row)
    columns = [
        "devices",
        "failures a day",
        "model",
        "checkpoint",
        "`--save`: stall, best interval, goodput",
        "`--async-save`",
    ]
    between = LLAMA_3_DEVICE_HOURS * SECONDS_PER_HOUR / 10_240
    minutes = [2 ** (step / 8) for step in range(-8, 73)]
    series = {}
    for title, stall in (("save, 1T: 4.7 s", 4.7), ("async save, 1T: 0.06 s", 0.06), ("a save of 60 s", 60.0)):
        kept = [100 * goodput(60 * each, stall, RESTART_SECONDS, between) for each in minutes]
        series[title] = (minutes, kept)
    lines("goodput.svg", series, "minutes between saves, 10,240 devices", "goodput, %", log_x=True)
    return {"saves": markdown(columns, rows)}


def presets() -> dict[str, str]:
    """Rehearse rank 0 of every preset of today, with two micro-batches: more change tp's traffic alone."""
    asked = []
    for name, world in PRESETS.items():
        config, layout = resolved(Asked(world, f"--preset {name}"))
        micro_batches = min(2, config.micro_batches(layout.dp))
        batch = micro_batches * layout.dp * config.training.micro_batch_size
        asked.append(Asked(world, f"--preset {name} --global-batch-size {batch}"))
    rows = []
    for (name, world), found in zip(PRESETS.items(), rehearse_all(asked), strict=True):
        assert (found.memory, found.traffic) == (found.estimated_memory, found.estimated_traffic), name
        whole = estimate(*resolved(Asked(world, f"--preset {name}")), needs_staging_buffer=False)
        assert whole.memory == found.memory and whole.traffic["dp"] == found.traffic["dp"], name
        cells = [f"{each / 1e9:.2f}" for each in (found.memory["peak"], found.allocated)]
        cells += [f"{whole.traffic[kind] / 1e9:.1f}" for kind in ("tp", "dp")]
        seconds = found.build_seconds + found.step_seconds
        rows.append([f"`{name}`", world, *cells, f"{seconds:.0f} s", f"{found.host_peak_bytes / 1e9:.1f} GB"])
    columns = ["preset", "GPUs", "peak, GB", "all tensors at once, GB", "tp, GB a step", "dp, GB a step"]
    return {"presets": markdown([*columns, "rehearsed in", "host"], rows)}


SECTIONS = {"groups": groups, "saves": saves, "presets": presets}


if __name__ == "__main__":
    for name in sys.argv[1:] or SECTIONS:
        write_blocks(PAGE, SECTIONS[name]())
