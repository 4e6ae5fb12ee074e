"""torch's CUDA caching allocator, as far as its policy goes: which bytes a request gets, and when it fails. No GPU.

Constants and rules are those of c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13)
under the default settings: no maximal split size, no expandable segments, no rounding to powers of two, no collection
of garbage. One stream, one device, no graphs: nothing waits for another stream.

- A request is rounded up to 512 B. Up to 1 MiB it is served by the small pool, else by the large one.
- Best fit: the smallest free block of the pool that holds it, the lowest address among equals.
- No block: a new segment from the device, of 2 MiB for the small pool; of 20 MiB for requests below 10 MiB; else of the
  request, rounded up to 2 MiB.
- The rest of the block is split off if it is at least 512 B in the small pool, more than 1 MiB in the large one.
  Else it goes with the block, and counts as allocated.
- A freed block merges with free neighbours of its segment. A segment that is free as a whole stays reserved.
- The device is full: all segments that are free as a whole are returned to it, and the request tried once more.

Not simulated: the device's own fragmentation (it maps pages, so any free bytes of it serve), the driver's granularity
and the memory that it takes for itself.
"""

from bisect import bisect_left, insort
from typing import Any

MIN_BLOCK = 512
SMALL_REQUEST, SMALL_SEGMENT = 1 << 20, 2 << 20
LARGE_SEGMENT, OWN_SEGMENT = 20 << 20, 10 << 20  # from OWN_SEGMENT on, a request has a segment of its own size
ROUND_LARGE = 2 << 20


class OutOfMemory(RuntimeError):
    """No block is large enough, nor has the device enough left to take.

    Attributes: `requested`, rounded; `idle`, unused bytes, reserved or not. Both in bytes.
    """

    def __init__(self, requested: int, idle: int) -> None:
        super().__init__(f"{requested} bytes asked for, {idle} bytes idle")
        self.requested, self.idle = requested, idle


class Block:
    """A part of a segment, between its neighbours there."""

    __slots__ = ("address", "allocated", "next", "previous", "requested", "size", "small")

    def __init__(self, address: int, size: int, small: bool) -> None:
        self.address, self.size, self.small = address, size, small
        self.allocated, self.requested = False, 0
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


class CachingAllocator:
    """`capacity`: bytes of the device.

    Attributes, in bytes: `reserved` of the device, `allocated` in blocks that are in use, and the peaks of both.
    `retries`: how often it had to return segments to the device.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = self.retries = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}  # by pool (small?), sorted by key
        self._heads: list[Block] = []  # the first block of every segment, by address
        self._unused_address = 0  # fresh for every segment

    def malloc(self, requested: int) -> Block:
        """Raises: OutOfMemory."""
        assert requested > 0, requested
        size = round_up(requested, MIN_BLOCK)
        small = size <= SMALL_REQUEST
        block = self._best_fit(size, small) or self._new_segment(size, small)
        if block.size - size >= MIN_BLOCK if small else block.size - size > SMALL_REQUEST:
            self._split(block, size)
        block.allocated, block.requested = True, requested
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        assert block.allocated, f"address {block.address} is freed twice"
        self.allocated -= block.size
        block.allocated, block.requested = False, 0
        if block.next is not None and not block.next.allocated:
            self._take(block.next)
            self._join(block, block.next)
        if block.previous is not None and not block.previous.allocated:
            previous = block.previous
            self._take(previous)
            self._join(previous, block)
            block = previous
        insort(self._free[block.small], block, key=_key)

    def empty_cache(self) -> int:
        """Return every segment that is free as a whole to the device; their bytes."""
        whole = [block for blocks in self._free.values() for block in blocks if _is_segment(block)]
        for block in whole:
            self._take(block)
            self._heads.remove(block)
        returned = sum(block.size for block in whole)
        self.reserved -= returned
        return returned

    def snapshot(self) -> list[dict[str, Any]]:
        """In the format of `torch.cuda.memory_snapshot()`, less the stack traces."""
        return [_segment(head) for head in self._heads]

    def _best_fit(self, size: int, small: bool) -> Block | None:
        blocks = self._free[small]
        at = bisect_left(blocks, (size, 0), key=_key)
        return blocks.pop(at) if at < len(blocks) else None

    def _new_segment(self, size: int, small: bool) -> Block:
        wanted = segment_size(size)
        if self.reserved + wanted > self.capacity:
            self.retries += 1
            self.empty_cache()
        if self.reserved + wanted > self.capacity:
            raise OutOfMemory(size, self.capacity - self.allocated)
        head = Block(self._unused_address, wanted, small)
        self._unused_address += wanted
        self._heads.append(head)
        self.reserved += wanted
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return head

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.small)
        rest.previous, rest.next = block, block.next
        if rest.next is not None:
            rest.next.previous = rest
        block.size, block.next = size, rest
        insort(self._free[rest.small], rest, key=_key)

    def _join(self, left: Block, right: Block) -> None:
        left.size, left.next = left.size + right.size, right.next
        if left.next is not None:
            left.next.previous = left

    def _take(self, block: Block) -> None:
        blocks = self._free[block.small]
        found = blocks.pop(bisect_left(blocks, block.key, key=_key))
        assert found is block


def round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def segment_size(size: int) -> int:
    """Bytes taken from the device for a request of `size`, rounded."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else round_up(size, ROUND_LARGE)


def _key(block: Block) -> tuple[int, int]:
    return block.key


def _is_segment(block: Block) -> bool:
    return block.previous is None and block.next is None


def _segment(head: Block) -> dict[str, Any]:
    blocks, block = [], head
    while block is not None:
        blocks.append(block)
        block = block.next  # type: ignore[assignment]
    in_use = sum(block.size for block in blocks if block.allocated)
    return {
        "device": 0,
        "address": head.address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": in_use,
        "active_size": in_use,
        "requested_size": sum(block.requested for block in blocks),
        "stream": 0,
        "segment_type": "small" if head.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": "active_allocated" if block.allocated else "inactive",
                "frames": [],
            }
            for block in blocks
        ],
    }
