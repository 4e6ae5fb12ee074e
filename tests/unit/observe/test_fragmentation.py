"""The measure of fragmentation, and the effect of an arena on it: the ZeRO paper's memory defragmentation (MD).

Shapes: b micro-batch, s sequence, h hidden, n heads, v vocabulary. Sizes are bytes, 16 bit unless noted.
"""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from megazero.engine.plan.layout.topology import Layout
from megazero.engine.step.results import StepResult
from megazero.flags.config import Config, ModelConfig
from megazero.observe.fragmentation import Fragmentation, device_fragmentation, fragmentation
from megazero.run import trainer
from megazero.run.run_state import Progress
from tests.caching_allocator import OutOfMemory
from tests.helpers.fragmentation import free, ratio
from tests.helpers.replay import MicroBatch, Rank, Shape
from tests.helpers.table import for_each

pytestmark = pytest.mark.second


# -- the measure


def segment(*blocks: tuple[int, str]) -> dict[str, Any]:
    """(size, state) of every block -> a segment with the keys that torch's has."""
    return {
        "device": 0,
        "total_size": sum(size for size, _ in blocks),
        "allocated_size": sum(size for size, state in blocks if state == "active_allocated"),
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }


def test_an_empty_allocator() -> None:
    found = fragmentation([])
    assert found == Fragmentation(reserved=0, allocated=0, largest_free=0)
    assert (free(found), ratio(found)) == (0, 0.0)


def test_nothing_free_is_not_fragmented() -> None:
    found = fragmentation([segment((512, "active_allocated"), (1536, "active_allocated"))])
    assert found == Fragmentation(reserved=2048, allocated=2048, largest_free=0)
    assert ratio(found) == 0.0


def test_one_free_block_is_not_fragmented() -> None:
    found = fragmentation([segment((512, "active_allocated"), (1536, "inactive"))])
    assert found == Fragmentation(reserved=2048, allocated=512, largest_free=1536)
    assert ratio(found) == 0.0


def test_free_blocks_do_not_add_up() -> None:
    """Neither over a block in use, nor over the end of a segment."""
    split = segment((3072, "inactive"), (512, "active_allocated"), (1024, "inactive"))
    found = fragmentation([split, segment((2048, "inactive")), segment((512, "active_allocated"))])
    assert found == Fragmentation(reserved=7168, allocated=1024, largest_free=3072)
    assert (free(found), ratio(found)) == (6144, 0.5)


@for_each("state", ["active_pending_free", "active_awaiting_free"])
def test_a_block_that_another_stream_reads_is_not_free(state: str) -> None:
    found = fragmentation([segment((1024, state), (512, "inactive"), (512, "active_allocated"))])
    assert found == Fragmentation(reserved=2048, allocated=1536, largest_free=512)


# -- MD


class Pattern(NamedTuple):
    """A run: its steps' micro-batches."""

    steps: list[list[MicroBatch]]
    evaluate: bool = False  # after every step
    in_flight: int = 1


def patterns() -> dict[str, Pattern]:
    """Each ends with a step of full size, so those with one micro-batch in flight have the same largest demand."""
    shape = Shape()
    full, eighth = MicroBatch(shape.b, shape.s), shape.s // 8
    growing = range(eighth // 2, shape.s + 1, eighth // 2)
    # The multiples of 1/8 of s, in an order of their own for each of two micro-batches: 3 and 9 are coprime with 8.
    mixed = [[eighth * (1 + factor * step % 8) for factor in (3, 9)] for step in range(1, 8)]
    return {
        "steady": Pattern([[full] * 2] * 4),
        "evaluations": Pattern([[full] * 2] * 4, evaluate=True),
        "4 in flight": Pattern([[full] * 6] * 2, in_flight=4),
        "growing": Pattern([[MicroBatch(shape.b, s)] * 2 for s in growing]),  # a warm-up of the sequence length
        "mixed": Pattern(
            [*([MicroBatch(shape.b, s) for s in step] for step in mixed), [full] * 2]
        ),  # padded to the longest
    }


PLAIN: tuple[str, ...] = ()
CHECKPOINTS = ("checkpoints",)
BOTH = ("checkpoints", "gradients")

# Memory beyond the demand that a run needs to survive, in percent of the demand, by the kinds in an arena. The demand
# is the peak of memory in use minus the memory at rest: the need of a run without fragmentation.
SLACK = {
    ("steady", PLAIN): 11,
    ("steady", CHECKPOINTS): 11,
    ("steady", BOTH): 3,
    ("evaluations", PLAIN): 11,
    ("evaluations", CHECKPOINTS): 11,
    ("evaluations", BOTH): 3,
    ("4 in flight", PLAIN): 8,
    ("4 in flight", CHECKPOINTS): 11,
    ("4 in flight", BOTH): 4,
    ("growing", PLAIN): 48,
    ("growing", CHECKPOINTS): 46,
    ("growing", BOTH): 22,
    ("mixed", PLAIN): 52,
    ("mixed", CHECKPOINTS): 35,
    ("mixed", BOTH): 26,
}


def replay(name: str, capacity: int, in_arena: tuple[str, ...], rounds: int = 1) -> Rank:
    pattern = patterns()[name]
    rank = Rank(Shape(), capacity, in_arena, pattern.in_flight)
    for _ in range(rounds):
        rank.steps(pattern.steps, pattern.evaluate)
    return rank


@functools.cache
def capacity(name: str, slack: int) -> int:
    """Return the capacity of a device that has `slack` percent more than the run's demand."""
    rank = replay(name, 1 << 50, PLAIN)
    return rank.at_rest + (rank.allocator.peak_allocated - rank.at_rest) * (100 + slack) // 100


def survives(name: str, in_arena: tuple[str, ...], slack: int) -> bool:
    try:
        replay(name, capacity(name, slack), in_arena)
    except OutOfMemory:
        return False
    return True


@pytest.mark.long
@for_each(("name", "in_arena"), SLACK)
def test_memory_that_a_run_needs_beyond_its_demand(name: str, in_arena: tuple[str, ...]) -> None:
    """Compare with the measured numbers, to the percent.

    - One steady pattern fragments little: best fit finds for every tensor the hole that its like left a block ago.
      Evaluations change nothing: they ask for the same sizes.
    - Changing sizes fragment: holes of one length fit no tensor of the next, and long-lived tensors keep them apart.
    - An arena for checkpoints and gradients needs the least in every row.
    - An arena for checkpoints alone does not help there: the gradients' shards, laid down one by one among a
      backward's activations, keep the holes apart just as well, and the arena itself can lend no hole to others.
    - The numbers belong to these sizes, which decide the tensors that fit a hole.
    - With both in the arena, only short-lived tensors fragment: a block's input is in the place that the logits need.
    """
    slack = SLACK[name, in_arena]
    assert survives(name, in_arena, slack)
    assert not survives(name, in_arena, slack - 1)


@for_each("name", patterns())
def test_an_arena_for_all_that_lives_long_needs_less(name: str) -> None:
    assert SLACK[name, BOTH] < SLACK[name, PLAIN]


@for_each("name", ["growing", "mixed"])
def test_plain_allocation_dies_of_fragmentation_where_the_arena_goes_on(name: str) -> None:
    """On a device half-way between the two needs, plain allocation fails with more than the requested bytes idle;
    with the arena the whole pattern runs five times.
    """
    device = capacity(name, (SLACK[name, PLAIN] + SLACK[name, BOTH]) // 2)
    with pytest.raises(OutOfMemory) as death:
        replay(name, device, PLAIN)
    assert death.value.idle > death.value.requested
    rank = replay(name, device, BOTH, rounds=5)
    assert rank.allocator.peak_allocated <= rank.allocator.peak_reserved <= device


def test_the_measure_shows_it_at_the_point_of_death() -> None:
    """There all segments that were free as a whole have been returned; the rest is stranded between blocks in use."""
    pattern, device = patterns()["mixed"], capacity("mixed", SLACK["mixed", PLAIN] - 1)
    rank = Rank(Shape(), device)
    with pytest.raises(OutOfMemory) as death:
        rank.steps(pattern.steps, pattern.evaluate)
    found = fragmentation(rank.allocator.snapshot())
    assert (found.reserved, found.allocated) == (rank.allocator.reserved, rank.allocator.allocated)
    assert found.largest_free < death.value.requested < free(found)
    assert ratio(found) > 0.25


@for_each("in_arena", [PLAIN, CHECKPOINTS, BOTH])
@for_each("in_flight", [1, 4])
def test_the_trace_gives_everything_back(in_arena: tuple[str, ...], in_flight: int) -> None:
    rank = Rank(Shape(), 1 << 50, in_arena, in_flight)
    before = rank.allocator.allocated
    rank.steps([[MicroBatch(8, 1024), MicroBatch(5, 640)] * 3], evaluate=True)
    assert rank.allocator.allocated == before


# -- the reading


def test_a_device_is_read_by_its_own_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's snapshot is of all devices of the process."""
    segments = [segment((512, "inactive")), segment((1024, "inactive")) | {"device": 1}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert device_fragmentation(torch.device("cuda", 1)) == Fragmentation(1024, 0, 1024)


def test_a_cpu_has_no_allocator_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: pytest.fail("a snapshot was taken"))
    assert device_fragmentation(torch.device("cpu")) is None


@for_each("leads", [True, False])
def test_the_record_of_a_traced_iteration_has_it_on_the_rank_that_writes(
    leads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "device_fragmentation", lambda device: Fragmentation(30, 10, 5))
    monkeypatch.setattr(trainer, "memory_bytes", lambda engine, result: {})
    run = object.__new__(trainer.Trainer)  # no model, no data
    run.config = replace(Config(), model=ModelConfig(vocab_size=257))
    run.mesh, run.leads = SimpleNamespace(layout=Layout(), device=torch.device("cuda", 0)), leads
    run.engine = SimpleNamespace()
    run.peak_flops, run.sensors = 0.0, SimpleNamespace(read=dict)
    run.datasets = SimpleNamespace(served=lambda consumed: {}, named=[])
    result = StepResult(1.0, 1.0, 1.0, 1.0, False, None, 0)
    for iteration in (1, 2, 3, 4):
        run.progress, run.profiler = Progress(iteration), SimpleNamespace(traces=iteration % 2 == 0)
        found = run._record(result, 1, 1.0, {}).get("fragmentation")
        due = leads and iteration % 2 == 0
        assert found == ({"reserved": 30, "allocated": 10, "largest_free": 5} if due else None)
