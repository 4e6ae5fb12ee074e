"""The memory tracker: allocations, peaks, kinds that count as the device's."""

import pytest

from megazero.engine.memory.tracker import KINDS, MemoryTracker


def test_an_allocation_counts_until_it_ends() -> None:
    tracker = MemoryTracker()
    allocation = tracker.allocate("buffers", 10)
    assert (tracker.now["buffers"], tracker.total) == (10, 10)
    allocation.end()
    allocation.end()  # harmless
    assert (tracker.now["buffers"], tracker.total) == (0, 0)


def test_an_allocation_without_references_has_ended() -> None:
    tracker = MemoryTracker()
    allocations = [tracker.allocate("gradients", n) for n in (1, 2, 4)]
    del allocations[1]
    assert tracker.now["gradients"] == 5
    allocations.clear()
    assert tracker.now["gradients"] == 0
    ended = tracker.allocate("gradients", 8)
    ended.end()
    del ended
    assert tracker.now["gradients"] == 0


def test_peaks_are_of_each_kind_and_of_one_instant() -> None:
    """The total's peak is not the sum of the kinds' peaks."""
    tracker = MemoryTracker()
    tracker.allocate("buffers", 10).end()
    held = tracker.allocate("logits", 7)
    tracker.allocate("buffers", 4).end()
    assert (tracker.peak["buffers"], tracker.peak["logits"], tracker.total_peak) == (10, 7, 11)
    held.end()
    assert (tracker.peak["logits"], tracker.total_peak) == (7, 11)


def test_host_memory_is_not_the_devices() -> None:
    tracker = MemoryTracker()
    held = [tracker.allocate("host", 100), tracker.allocate("parameters", 3)]
    assert (tracker.total, tracker.total_peak, tracker.peak["host"]) == (3, 3, 100)
    assert held


def test_peaks_are_an_iterations() -> None:
    tracker = MemoryTracker()
    rest = tracker.allocate("parameters", 5)
    tracker.allocate("buffers", 50).end()
    tracker.begin_iteration()
    assert (tracker.peak["buffers"], tracker.peak["parameters"], tracker.total_peak) == (0, 5, 5)
    tracker.allocate("buffers", 2).end()
    assert (tracker.peak["buffers"], tracker.total_peak) == (2, 7)
    assert tracker.now["parameters"] == rest.num_bytes


def test_trackers_are_apart_and_kinds_are_known() -> None:
    first, second = MemoryTracker(), MemoryTracker()
    held = first.allocate("buffers", 1)
    assert (first.total, second.total) == (held.num_bytes, 0)
    with pytest.raises(AssertionError):
        first.allocate("misc", 1)
    assert first.total == 1
    assert len(set(KINDS)) == len(KINDS)
