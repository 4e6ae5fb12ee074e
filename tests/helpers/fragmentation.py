"""The usual measures of external fragmentation, from the numbers of `megazero.observe.fragmentation`."""

from megazero.observe.fragmentation import Fragmentation


def free(found: Fragmentation) -> int:
    """Return the bytes that are reserved and not in use."""
    return found.reserved - found.allocated


def ratio(found: Fragmentation) -> float:
    """Return the share of the free bytes outside the largest free block, in [0, 1); 0 if nothing is free.

    It is an upper bound of the harm, because the allocator can return segments that are free as a whole.
    """
    return 1 - found.largest_free / free(found) if free(found) else 0.0
