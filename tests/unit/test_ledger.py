"""The account of memory: leases, peaks, what counts as the device's."""

from __future__ import annotations

import pytest

from megazero.memory.tracker import KINDS, Ledger


def test_a_lease_counts_until_it_ends() -> None:
    ledger = Ledger()
    lease = ledger.lease("buffers", 10)
    assert (ledger.now["buffers"], ledger.total) == (10, 10)
    lease.end()
    lease.end()  # harmless
    assert (ledger.now["buffers"], ledger.total) == (0, 0)


def test_a_lease_that_nobody_holds_has_ended() -> None:
    ledger = Ledger()
    leases = [ledger.lease("gradients", n) for n in (1, 2, 4)]
    del leases[1]
    assert ledger.now["gradients"] == 5
    leases.clear()
    assert ledger.now["gradients"] == 0
    ended = ledger.lease("gradients", 8)
    ended.end()
    del ended
    assert ledger.now["gradients"] == 0


def test_peaks_are_of_each_kind_and_of_one_instant() -> None:
    """The total's peak is not the sum of the kinds' peaks."""
    ledger = Ledger()
    ledger.lease("buffers", 10).end()
    held = ledger.lease("logits", 7)
    ledger.lease("buffers", 4).end()
    assert (ledger.peak["buffers"], ledger.peak["logits"], ledger.total_peak) == (10, 7, 11)
    held.end()
    assert (ledger.peak["logits"], ledger.total_peak) == (7, 11)


def test_host_memory_is_not_the_devices() -> None:
    ledger = Ledger()
    held = [ledger.lease("host", 100), ledger.lease("parameters", 3)]
    assert (ledger.total, ledger.total_peak, ledger.peak["host"]) == (3, 3, 100)
    assert held


def test_peaks_are_an_iterations() -> None:
    ledger = Ledger()
    rest = ledger.lease("parameters", 5)
    ledger.lease("buffers", 50).end()
    ledger.begin_iteration()
    assert (ledger.peak["buffers"], ledger.peak["parameters"], ledger.total_peak) == (0, 5, 5)
    ledger.lease("buffers", 2).end()
    assert (ledger.peak["buffers"], ledger.total_peak) == (2, 7)
    assert ledger.now["parameters"] == rest.num_bytes


def test_ledgers_are_apart_and_kinds_are_known() -> None:
    first, second = Ledger(), Ledger()
    held = first.lease("buffers", 1)
    assert (first.total, second.total) == (held.num_bytes, 0)
    with pytest.raises(AssertionError):
        first.lease("misc", 1)
    assert first.total == 1
    assert len(set(KINDS)) == len(KINDS)
