#!/usr/bin/env python3
"""Simulate a pipeline schedule and draw it: a row per pipeline rank, time from left to right.

Stages are equal. A forward, an input gradient and a weight gradient take one unit of time each, transfers none.
A box is F forward, B backward, I input gradient alone or W queued weight gradients, with its micro-batch. Examples:

    python scripts/draw_schedule.py --schedule zero-bubble --stages 4 --micro-batches 8
    python scripts/draw_schedule.py --schedule interleaved --virtual 2 --output interleaved.png
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.engine.plan.layout.flat_layout import FlatParam, flat_layout
from megazero.engine.plan.layout.layers import Use
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.layout.zero_policy import sharding_groups
from megazero.engine.plan.program.operations import Backward, BackwardWeights, Forward, Op
from megazero.engine.plan.program.program import program
from megazero.engine.plan.program.rank_spec import PlannedLayer, RankSpec, Unit
from megazero.engine.plan.schedule.schedules import EVALUATION, SCHEDULES, Pipeline
from megazero.flags.config import Config
from megazero.optional import missing_package
from megazero.planner.time.simulate import Computation, Timing, simulate

COLORS = {"F": "#7fb2e5", "B": "#f2b56b", "I": "#f8dca8", "W": "#9fd39b"}
CELL = 4  # characters of a unit of time


@dataclass(frozen=True)
class Options:
    """Draw a pipeline schedule."""

    schedule: str = "1f1b"
    """Schedule, as for --pipeline-schedule of pretrain_gpt.py, or forward-only: an evaluation."""
    stages: int = 4
    """Pipeline ranks."""
    micro_batches: int = 8
    """Per iteration."""
    virtual: int = 1
    """Virtual stages per rank."""
    output: Path | None = None
    """FILE.png or FILE.svg. Without it, text in the terminal."""


def plain_pipeline(ranks: int, chunks: int = 1, layers: int = 1, v_shaped: bool = False) -> list[RankSpec]:
    """Return the specs of a pipeline of equal layers, `layers` per chunk, without embedding, head or ZeRO."""
    found, alone = [], sharding_groups(Config(), Layout())
    for rank in range(ranks):
        names = [[f"{c}.{n}" for n in range(layers)] for c in range(chunks)]
        made = [
            tuple(
                PlannedLayer(
                    name=name,
                    units=(name,),
                    use=Use.LAYER,
                    trains=True,
                    passes_gradient=rank + c > 0 or n > 0,
                    kind=name,
                )
                for n, name in enumerate(chunk)
            )
            for c, chunk in enumerate(names)
        ]
        flat = flat_layout([FlatParam("", 64, True)], 1)
        units = {name: Unit(flat, True) for chunk in names for name in chunk}
        found.append(RankSpec(tuple(made), units, alone, Pipeline(rank, ranks, chunks=chunks, v_shaped=v_shaped)))
    return found


def thirds(op: Op) -> float:
    """Return the time of an operation: 1 for a forward, an input gradient and a weight gradient, 0 for the rest."""
    if isinstance(op, Backward):
        return 2.0 if op.weights else 1.0
    return float(isinstance(op, (Forward, BackwardWeights)))


def play(schedule: str, ranks: int, micro_batches: int, chunks: int = 1, layers: int = 1) -> Timing:
    """Simulate a schedule on a plain pipeline with the costs of `thirds`."""
    specs = plain_pipeline(ranks, chunks, layers, schedule in SCHEDULES and SCHEDULES[schedule].v_shaped)
    return simulate([program(spec, schedule, micro_batches).gradients for spec in specs], thirds)


class Box(NamedTuple):
    """A drawn computation."""

    kind: str  # a key of COLORS
    micro_batch: int
    chunk: int
    begin: int
    end: int


def box_of(span: Computation) -> Box:
    op = span.op
    assert isinstance(op, (Forward, Backward, BackwardWeights)), op
    kind = "F" if isinstance(op, Forward) else "W" if isinstance(op, BackwardWeights) else "B" if op.weights else "I"
    return Box(
        kind=kind,
        micro_batch=op.micro_batch,
        chunk=int(op.layer.split(".")[0]),
        begin=round(span.begin),
        end=round(span.end),
    )


def simulated(options: Options) -> Timing:
    """Check the options and simulate.

    Raises:
        ValueError: naming the option and the way out.
    """
    known = [*SCHEDULES, EVALUATION]
    if options.schedule not in known:
        raise ValueError(f"--schedule {options.schedule}: unknown; use one of {', '.join(known)}")
    for name in ("stages", "micro_batches", "virtual"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    takes = options.schedule == EVALUATION or SCHEDULES[options.schedule].virtual_stages
    if options.virtual > 1 and not takes:
        raise ValueError(f"--virtual {options.virtual}: --schedule {options.schedule} has no virtual stages; drop it")
    return play(options.schedule, options.stages, options.micro_batches, options.virtual)


def title(options: Options, timing: Timing) -> str:
    virtual = f", {options.virtual} virtual stages each" if options.virtual > 1 else ""
    return (
        f"{options.schedule}: {options.stages} ranks{virtual}, {options.micro_batches} micro-batches; "
        f"bubble {timing.bubble:.1%} of the busiest rank's computing time"
    )


def text(options: Options, timing: Timing) -> str:
    """Return a row per rank. If ranks hold several chunks, a letter after the micro-batch names the chunk: a, b, ..."""
    lines = [title(options, timing)]
    for rank, spans in enumerate(timing.spans):
        row = ["."] * (CELL * round(timing.seconds))
        for box in map(box_of, spans):
            chunk = chr(ord("a") + box.chunk) if options.virtual > 1 else ""
            label = f"{box.kind}{box.micro_batch}{chunk}"
            width = CELL * (box.end - box.begin)
            row[CELL * box.begin : CELL * box.end] = f"{label:-<{width - 1}} "[:width]
        lines.append(f"{rank:>3} |{''.join(row)}|")
    return "\n".join(lines)


def draw(options: Options, timing: Timing, output: Path) -> None:
    """Write a picture in the format of the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if output.suffix not in (".png", ".svg"):
        raise ValueError(f"--output {output}: must end in .png or .svg")
    width = min(24.0, max(8.0, 0.22 * timing.seconds))
    figure, axes = plt.subplots(figsize=(width, 1.2 + 0.45 * options.stages))
    for rank, spans in enumerate(timing.spans):
        for box in map(box_of, spans):
            shade = 1.0 - 0.45 * box.chunk / options.virtual  # later chunks are paler
            place = ((box.begin, rank - 0.42), box.end - box.begin, 0.84)
            axes.add_patch(plt.Rectangle(*place, facecolor=COLORS[box.kind], alpha=shade, edgecolor="white"))
            middle = (box.begin + box.end) / 2
            axes.text(middle, rank, str(box.micro_batch), ha="center", va="center", fontsize=7)
    names = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradients"}
    used = {box_of(span).kind for spans in timing.spans for span in spans}
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[kind], label=names[kind]) for kind in names if kind in used]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=4, frameon=False, fontsize=8)
    axes.set(xlim=(0, timing.seconds), ylim=(options.stages - 0.5, -0.5), ylabel="pipeline rank")
    axes.set_yticks(range(options.stages))
    axes.set_xlabel("time, in forwards of a virtual stage", fontsize=8)
    axes.set_title(title(options, timing), fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130, bbox_inches="tight")
    plt.close(figure)


def main(options: Options) -> None:
    timing = simulated(options)
    if options.output is None:
        print(text(options, timing))
    else:
        draw(options, timing, options.output)
        print(f"wrote {options.output}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except ModuleNotFoundError as error:
        sys.exit(f"this {missing_package(error)}")
    except ValueError as error:
        sys.exit(f"error: {error}")
