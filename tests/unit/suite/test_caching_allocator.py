"""The simulation of torch's caching allocator, which test_fragmentation.py builds on."""

import itertools
import random

import pytest

from megazero.observe.fragmentation import Fragmentation, fragmentation
from tests.caching_allocator import Block, CachingAllocator, OutOfMemory
from tests.helpers.fragmentation import ratio
from tests.helpers.table import for_each

pytestmark = pytest.mark.second


KiB, MiB = 1 << 10, 1 << 20


@for_each(
    ("requested", "allocated", "reserved"),
    [
        (1, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        (11 * MiB, 12 * MiB, 12 * MiB),  # 1 MiB is left: too little to split off
        (11 * MiB - 512, 11 * MiB - 512, 12 * MiB),
    ],
)
def test_sizes_of_blocks_and_segments(requested: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator(1 << 30)
    allocator.malloc(requested)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_best_fit_takes_the_smallest_block_that_holds_it() -> None:
    allocator = CachingAllocator(1 << 30)
    sizes = (40 * MiB, 20 * MiB, 30 * MiB)
    for block in [allocator.malloc(size) for size in sizes]:
        allocator.free(block)
    assert allocator.malloc(18 * MiB).size == 18 * MiB  # of the 20; 2 MiB are split off
    assert allocator.malloc(19 * MiB).size == 19 * MiB  # of the 30
    assert sorted(b["size"] // MiB for s in allocator.snapshot() for b in s["blocks"]) == [2, 11, 18, 19, 40]
    assert allocator.reserved == sum(sizes)


def test_free_neighbours_merge_and_a_segment_stays() -> None:
    allocator = CachingAllocator(1 << 30)
    blocks = [allocator.malloc(5 * MiB) for _ in range(4)]  # one segment of 20 MiB
    for i in (0, 2, 3):
        allocator.free(blocks[i])
    assert [b["size"] // MiB for b in allocator.snapshot()[0]["blocks"]] == [5, 5, 10]
    assert fragmentation(allocator.snapshot()) == Fragmentation(20 * MiB, 5 * MiB, 10 * MiB)
    allocator.free(blocks[1])
    assert [b["size"] // MiB for b in allocator.snapshot()[0]["blocks"]] == [20]
    assert (allocator.allocated, allocator.reserved, allocator.peak_allocated) == (0, 20 * MiB, 20 * MiB)


def test_pools_are_apart() -> None:
    allocator = CachingAllocator(1 << 30)
    allocator.free(allocator.malloc(20 * MiB))
    allocator.malloc(512 * KiB)
    assert [segment["segment_type"] for segment in allocator.snapshot()] == ["large", "small"]


def test_a_full_device_gets_whole_segments_back() -> None:
    allocator = CachingAllocator(100 * MiB)
    allocator.free(allocator.malloc(60 * MiB))
    allocator.malloc(80 * MiB)
    assert (allocator.reserved, allocator.peak_reserved, allocator.retries) == (80 * MiB, 80 * MiB, 1)


def test_out_of_memory_though_enough_is_free() -> None:
    allocator = CachingAllocator(100 * MiB)
    allocator.free(allocator.malloc(100 * MiB))
    blocks = [allocator.malloc(20 * MiB) for _ in range(5)]
    for i in (0, 2, 4):
        allocator.free(blocks[i])
    with pytest.raises(OutOfMemory) as death:
        allocator.malloc(30 * MiB)
    assert (death.value.requested, death.value.idle) == (30 * MiB, 60 * MiB)
    found = fragmentation(allocator.snapshot())
    assert found == Fragmentation(100 * MiB, 40 * MiB, 20 * MiB)
    assert ratio(found) == pytest.approx(2 / 3)


def test_a_block_is_freed_once() -> None:
    allocator = CachingAllocator(1 << 30)
    block = allocator.malloc(1)
    allocator.free(block)
    with pytest.raises(AssertionError, match="twice"):
        allocator.free(block)


def test_invariants_hold_under_any_traffic() -> None:
    """Blocks tile their segments, no two neighbours are both free, live blocks do not overlap, counters agree."""
    draw, allocator, live = random.Random(0), CachingAllocator(400 * MiB), list[Block]()
    for _ in range(2000):
        if live and draw.random() < 0.5:
            allocator.free(live.pop(draw.randrange(len(live))))
            continue
        try:
            live.append(allocator.malloc(int(2 ** draw.uniform(0, 26))))
        except OutOfMemory:
            allocator.free(live.pop(draw.randrange(len(live))))
    assert allocator.retries > 0
    snapshot = allocator.snapshot()
    for segment in snapshot:
        at, free = segment["address"], False
        for block in segment["blocks"]:
            assert block["address"] == at
            assert not (free and block["state"] == "inactive")
            at, free = at + block["size"], block["state"] == "inactive"
        assert at == segment["address"] + segment["total_size"]
    found = fragmentation(snapshot)
    assert (found.reserved, found.allocated) == (allocator.reserved, allocator.allocated)
    assert found.allocated == sum(block.size for block in live) == sum(s["allocated_size"] for s in snapshot)
    ends = sorted((block.address, block.address + block.size) for block in live)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ends))
