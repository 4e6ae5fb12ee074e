"""Micro-batches of a global batch."""

PADDING = -1  # instead of a sample's number: tokens that fill up a micro-batch, and count as no target


def micro_batches(samples: int, micro_batch_size: int, dp: int) -> int:
    """Return the micro-batches per data-parallel rank of a global batch of `samples`; the last may hold padding."""
    return -(-samples // (micro_batch_size * dp))
