"""Durations as equalities: idle time of schedules, exposed communication, sequences of buckets.

A pass of a chunk takes 1 here: a forward, an input gradient, a weight gradient (`scripts.draw_schedule.thirds`).
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.mesh.collectives import Pending
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.flat_layout import Range, equal_ranges
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.layout.zero_policy import Buckets
from megazero.engine.plan.program.operations import Backward, Fetch, Forward, Gather, Op, Recompute, Reduce, Sync
from megazero.engine.plan.program.program import program
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.engine.plan.schedule.schedules import Pipeline, order_of, placement
from megazero.engine.zero.reduce_scatter import Buffer, Reducer
from megazero.flags.config import ActivationConfig, Config, ModelConfig, ZeroConfig
from megazero.flags.pipeline_split import LayerCosts, split_by_cost
from megazero.planner.bytes.estimate import Few
from megazero.planner.time.simulate import simulate
from megazero.planner.trace.pretend import PretendAxis
from scripts.draw_schedule import plain_pipeline, play, thirds
from tests.helpers.live import peak_live
from tests.helpers.table import for_each

pytestmark = pytest.mark.second


# (ranks p, micro-batches m, chunks v) -> idle time of a step. 1F1B and GPipe: 3 (p - 1), of chunks as long as v parts.
IDLE = {
    "1f1b": {(3, 5, 1): 6, (12, 16, 1): 33},
    "gpipe": {(3, 5, 1): 6, (12, 16, 1): 33},
    # p divides m: as 1F1B, of chunks 1/v as long; else each missing micro-batch costs up to two passes of a chunk
    "interleaved": {
        (4, 8, 2): 9,
        (12, 24, 2): 33,
        (4, 7, 2): 10,
        (4, 6, 2): 12,
        (4, 5, 2): 14,
        (3, 4, 3): 12,
        (3, 5, 4): 9,
        (8, 9, 2): 34,
        (12, 14, 2): 51,
    },
    "zero-bubble": {(4, 8, 1): 3, (12, 16, 1): 11, (4, 2, 1): 5},  # p - 1, unless the pipeline is never full
    "zero-bubble-v": {  # the same, of chunks half as long
        (2, 4, 2): 1,
        (3, 7, 2): 2,
        (4, 8, 2): 3,
        (5, 9, 2): 5,
        (8, 16, 2): 7,
        (8, 5, 2): 13,
        (9, 18, 2): 8,
    },
}


@for_each("schedule", IDLE)
def test_a_schedule_waits_so_long_and_no_longer(schedule: str) -> None:
    found = {}
    for p, m, v in IDLE[schedule]:
        timing = play(schedule, p, m, v)
        assert max(timing.busy) == 3 * m * v
        found[p, m, v] = timing.seconds - 3 * m * v
    assert found == IDLE[schedule]


@for_each(
    ("schedule", "m", "v", "wanted"),
    [
        ("1f1b", 9, 1, [4, 3, 2, 1]),
        ("gpipe", 9, 1, [9, 9, 9, 9]),
        ("interleaved", 8, 2, [11, 9, 7, 5]),  # 2 (p - r - 1) + (v - 1) p + 1
        ("interleaved", 8, 3, [15, 13, 11, 9]),
        ("zero-bubble", 9, 1, [4, 3, 2, 1]),
        ("zero-bubble-v", 9, 2, [7, 7, 8, 8]),  # of half as many layers; 2 p at most
    ],
)
def test_a_rank_of_four_holds_so_many_chunks(schedule: str, m: int, v: int, wanted: list[int]) -> None:
    """Chunks between their forward and the gradient of their input."""
    places = [Pipeline(rank, 4, m, v, v_shaped=schedule == "zero-bubble-v") for rank in range(4)]
    assert [peak_live(order_of(schedule, place)) for place in places] == wanted


@for_each(
    ("schedule", "ranks", "wanted"),
    [
        ("zero-bubble", 4, {1: 5, 2: 4, 3: 3, None: 3}),  # one pass less for each that may wait, down to p - 1
        ("zero-bubble", 6, {1: 9, 2: 8, 3: 7, 4: 6, None: 5}),
        ("zero-bubble-v", 4, {1: 5, 2: 3, 3: 3, None: 3}),
        ("zero-bubble-v", 6, {1: 9, 2: 7, 3: 5, None: 5}),
    ],
)
def test_a_backlog_is_used_up(schedule: str, ranks: int, wanted: dict[int | None, int]) -> None:
    """Idle time with 2 p micro-batches, if the weight gradients of `backlog` micro-batches may wait."""
    v = 1 + (schedule == "zero-bubble-v")
    found = {}
    for backlog in wanted:
        specs = plain_pipeline(ranks, v, v_shaped=v == 2)
        specs = [replace(spec, pipeline=replace(spec.pipeline, backlog=backlog)) for spec in specs]
        timing = simulate([program(spec, schedule, 2 * ranks).gradients for spec in specs], thirds)
        found[backlog] = timing.seconds - 6 * ranks * v
    assert found == wanted


SECONDS: dict[type[Op], float] = {
    Forward: 4.0,
    Recompute: 4.0,
    Backward: 8.0,
    Gather: 3.0,
    Sync: 3.0,
    Reduce: 5.0,
    Fetch: 3.0,
}


@for_each(
    ("stage", "exposed", "at_once"),
    [
        (0, 5, 30),  # the last reduction | six of them
        (1, 3 + 5, 6 * 3 + 30),  # and the first gather of updated weights | six of them
        (2, 3 + 5, 6 * 3 + 30),
        (
            3,
            3 + 2 + 5,
            10 * 3 + 30,
        ),  # a head's norm and its table, 6, behind a forward of 4 | three blocks gather again
    ],
)
@for_each("recompute", ["none", "full"])
def test_overlap_leaves_only_the_ends_of_a_step_exposed(stage: int, exposed: int, at_once: int, recompute: str) -> None:
    """Token table, positions, three blocks, head; kept inputs in host memory, whose copies of 3 come back in time."""
    for overlap, wanted, copies in ((True, exposed, 0), (False, at_once, 9)):
        config = Config(
            model=ModelConfig(3, 64, 0, 4, 16, 128),
            zero=ZeroConfig(stage, overlap_comm=overlap),
            activations=ActivationConfig(recompute, checkpoint_in_cpu=recompute == "full"),
        )
        step = program(rank_spec(config, Layout(dp=2), 0, declare), "1f1b", 1)
        timing = simulate([[*step.update, *step.gradients]], lambda op: SECONDS.get(type(op), 0.0))
        assert (timing.spent[0]["dp"], timing.spent[0]["host"]) == (wanted, copies * (recompute == "full"))
        assert timing.seconds == sum(timing.spent[0].values())


class _Events(PretendAxis):
    """Notes when a reduce-scatter begins and when it is waited for."""

    def __init__(self, size: int) -> None:
        super().__init__("shard", list(range(size)), 0, needs_staging_buffer=False)
        self.events: list[str] = []

    def start_reduce_scatter(self, whole: torch.Tensor, out: torch.Tensor, add: bool, **_: object) -> Pending:
        name = f"{out.storage_offset()}"
        self.events.append(f"start {name}")
        return Pending(lambda: self.events.append(f"wait {name}"))


@for_each(
    ("overlap", "slots", "wanted"),
    [
        # two in flight: a bucket is packed while the one before it is sent
        (True, 2, "start 0, start 64, wait 0, start 128, wait 64, start 192, wait 128, start 256 | wait 192, wait 256"),
        (False, 1, "start 0, wait 0, start 64, wait 64, start 128, wait 128, start 192, wait 192, start 256, wait 256"),
    ],
)
def test_buckets_of_a_unit_follow_each_other(overlap: bool, slots: int, wanted: str) -> None:
    """A unit of 2 x 300 elements in buckets of 64 columns; after the bar, operations in flight after its start."""
    axis, tracker = _Events(2), MemoryTracker()
    reducer = Reducer(axis, Buckets(64, slots, True, 64, 128), torch.float32, torch.device("cpu"), tracker, overlap)
    unit = SimpleNamespace(ranges=equal_ranges(600, 2), owned=Range(0, 300), uneven=())
    buffer = Buffer(torch.zeros(600), tracker.allocate("buffers", 2400))
    reducer.start(buffer, torch.zeros(300), False, unit)  # type: ignore[arg-type]
    started = ", ".join(axis.events)
    reducer.drain()
    reducer.drain()  # waits for nothing twice
    left = ", ".join(sorted(axis.events[started.count(",") + 1 :]))
    assert " | ".join(filter(None, (started, left))) == wanted


@for_each(
    ("layers", "pp", "head", "wanted"),
    [
        (12, 4, 0.2, (3, 3, 3, 3)),
        (13, 4, 0.2, (4, 3, 3, 3)),  # already even: the first stages take the remainder
        (12, 4, 1.0, (3, 3, 3, 3)),  # 4,3,3,2 would be no faster
        (12, 4, 2.0, (4, 4, 3, 1)),  # the busiest computes 4 blocks, against 5
        (24, 4, 0.5, (6, 6, 6, 6)),  # 7 against 6.5
        (100, 4, 1.5, (26, 25, 25, 24)),  # 26 against 26.5: 2 %
        (200, 4, 1.2, (50, 50, 50, 50)),  # 51 against 51.2: less than 1 %
    ],
)
def test_layers_leave_the_last_stage_for_the_sake_of_the_head(
    layers: int, pp: int, head: float, wanted: tuple[int, ...]
) -> None:
    assert split_by_cost(placement(pp, 1, False), LayerCosts(0.0, (1.0,) * layers, head)) == wanted


@for_each(
    ("schedule", "layout", "wanted", "played"),
    [
        ("1f1b", Layout(pp=12), 64, (16, 28)),  # at least a micro-batch per stage, and the same rest
        ("interleaved", Layout(pp=12, chunks=2), 128, (32, 44)),
        ("1f1b", Layout(pp=12), 44, (44,)),  # no fewer would do
        ("gpipe", Layout(pp=12), 64, (64,)),
        ("1f1b", Layout(dp=4), 9, (2, 3)),
    ],
)
def test_a_long_pipeline_is_played_with_so_many_micro_batches(
    schedule: str, layout: Layout, wanted: int, played: tuple[int, ...]
) -> None:
    few = Few.of(schedule, layout, wanted)
    assert few == (wanted, played)
    assert few.extend([3.0 * m + 5 for m in played]) == 3.0 * wanted + 5
