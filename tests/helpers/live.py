"""Micro-batches that a schedule holds between their forward and their backward."""

import itertools

from megazero.engine.plan.schedule.schedules import IN, B, F, Order, W


def peak_live(order: Order) -> int:
    """Return the most (chunk, micro-batch) pairs that a rank holds at once, between forward and backward."""
    change = {F: 1, B: -1, IN: -1, W: 0}
    return max(itertools.accumulate((change[kind] for kind, _, _ in order), initial=0))


def live_by_chunk(order: Order, chunks: int) -> tuple[int, ...]:
    """Return the most micro-batches of each chunk that a rank holds at once, between forward and backward."""
    return tuple(peak_live([step for step in order if step[2] == chunk]) for chunk in range(chunks))
