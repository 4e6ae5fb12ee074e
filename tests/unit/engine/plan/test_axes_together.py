"""Traces and start screens over every combination of axes: a name or a key that forgets one axis is ambiguous."""

import itertools
import re
from collections import defaultdict

import torch

from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import AXES, Layout
from megazero.engine.plan.program.program import program
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.flags.cli import parse
from megazero.flags.resolve import resolve
from megazero.observe.timeline import Interval, Timeline
from megazero.observe.trace_file import Trace
from megazero.planner.trace.pretend import pretend_mesh
from tests.unit.observe.test_start_report import shown

CPU = torch.device("cpu")
SIZES = "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 260"
FLAGS = {"pp": "pipeline-model", "cp": "context", "tp": "tensor-model"}
LAYOUTS = [Layout(**dict(zip(AXES, sizes, strict=True))) for sizes in itertools.product((1, 2), repeat=len(AXES))]


def flags_of(layout: Layout) -> str:
    axes = (f"--{name}-parallel-size {getattr(layout, axis)}" for axis, name in FLAGS.items())
    return " ".join([SIZES, *axes, f"--micro-batch-size 1 --global-batch-size {2 * layout.dp}"])


def test_an_arrow_joins_neighbours_of_a_pipeline_in_every_layout() -> None:
    """All ranks of up to 16, pretended, with two virtual stages: an id is of one send and of its receive."""
    for layout in (each for each in LAYOUTS if each.pp > 1):
        line = f"{flags_of(layout)} --pipeline-schedule interleaved --virtual-pipeline-stages 2"
        config, layout = resolve(parse(line.split()), layout.world_size, 0, declare)
        programs = [program(rank_spec(config, layout, pp, declare), "interleaved", 2) for pp in range(layout.pp)]
        halves: dict[str, dict[str, int]] = defaultdict(dict)
        for rank in range(layout.world_size):
            trace, timeline = Trace(pretend_mesh(layout, rank, CPU, True), MemoryTracker()), Timeline(CPU)
            ops = programs[layout.coord(rank).pp].gradients
            timeline.issued = [Interval(op, 2 * at, 2 * at + 1) for at, op in enumerate(ops)]
            trace.iteration(1, timeline)
            for event in trace.events:
                if event["ph"] in ("s", "f"):
                    assert event["ph"] not in halves[event["id"]], (layout, event)
                    halves[event["id"]][event["ph"]] = event["pid"]
        assert len(halves) == 2 * 3 * 2 * layout.data * layout.tp  # both ways over 3 links, 2 micro-batches
        for half in halves.values():
            sender, receiver = (layout.coord(half[end]) for end in "sf")
            assert sender.pp != receiver.pp and sender._replace(pp=0) == receiver._replace(pp=0), layout


def test_the_start_screen_groups_the_ranks_of_every_layout() -> None:
    """Each rank once, with its stage; in [ ] those that differ along tp alone, in { } along cp too."""

    def named(text: str) -> list[int]:
        spans = re.findall(r"(\d+)(?:-(\d+))?", text)
        return [rank for first, last in spans for rank in range(int(first), int(last or first) + 1)]

    for layout in (each for each in LAYOUTS if each.world_size > 1):
        line = flags_of(layout) + " --untie-embeddings"
        lines = [
            text.split("ranks ")[1] for text in shown(line, layout.world_size) if re.search(r"ranks [\[{\d]", text)
        ]
        lines = [text.split(":")[0] for text in lines]
        assert [sorted(named(text)) for text in lines] == [list(layout.stage_ranks(pp)) for pp in range(layout.pp)], (
            line
        )
        for text in lines:
            for pattern, inner in ((r"\[(.*?)\]", ("tp",)), (r"\{(.*?)\}", ("cp", "tp"))):
                groups = [named(group) for group in re.findall(pattern, text)]
                assert bool(groups) == (getattr(layout, inner[0]) > 1), text
                for group in groups:
                    places = {layout.coord(rank)._replace(**dict.fromkeys(inner, 0)) for rank in group}
                    size = layout.tp if len(inner) == 1 else layout.cp * layout.tp
                    assert len(places) == 1 and len(group) == size, text
