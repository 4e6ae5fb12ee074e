"""`InFlight`: the memory that collectives in flight read or write. It refuses operations that overlap it."""

from collections.abc import Iterable, Sequence

import torch


class OverlapError(AssertionError):
    """Two operations use the same memory at once, and at least one of them writes: a result would depend on timing."""


def addresses(x: torch.Tensor) -> range:
    """Return the bytes from the first to the last element of `x`; none for an empty or a meta tensor."""
    if x.numel() == 0 or x.device.type == "meta":
        return range(0)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return range(x.data_ptr(), x.data_ptr() + elements * x.element_size())


class InFlight:
    """The collectives of one rank between start and wait. Owned by a Mesh, shared by its axes.

    Note [buffers in flight]: a backend reads a collective's inputs and writes its outputs at any time between start
    and wait. This includes the rank's own part of an in-place all-gather (gloo gathers into a buffer of its own and
    copies all of it back). So before the wait, inputs must not be written, and outputs neither read nor written. A
    collective that is dropped without a wait stays in flight.
    """

    def __init__(self, checks: bool = True) -> None:
        """`checks` False: record and refuse nothing."""
        self._checks = checks
        # name, inputs and outputs of each; holding the tensors prevents the reuse of their memory
        self._claims: dict[int, tuple[str, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {}
        self._next = 0

    def add(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> int:
        """Record a collective that is about to start; returns the number to `remove`. OverlapError: see `check`."""
        self._next += 1
        if self._checks:
            self.check(name, reads=reads, writes=writes)
            self._claims[self._next] = name, tuple(reads), tuple(writes)
        return self._next

    def remove(self, number: int) -> None:
        """Forget a collective, after its wait."""
        self._claims.pop(number, None)

    def check(self, action: str, *, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()) -> None:
        """Refuse an operation that overlaps a collective in flight.

        Raises:
            OverlapError: `action` would read an output of a collective, or write an input or an output.
        """
        if not self._claims:
            return
        reading, writing = [*map(addresses, reads)], [*map(addresses, writes)]
        for name, inputs, outputs in self._claims.values():
            self._refuse(f"{action} would write", writing, f"{name}, in flight, reads", inputs)
            self._refuse(f"{action} would write", writing, f"{name}, in flight, writes", outputs)
            self._refuse(f"{action} would read", reading, f"{name}, in flight, writes", outputs)

    def _refuse(self, ours: str, mine: Sequence[range], theirs: str, tensors: Sequence[torch.Tensor]) -> None:
        for x in tensors:
            used = addresses(x)
            for own in mine:
                shared = min(own.stop, used.stop) - max(own.start, used.start)
                if shared > 0:
                    tensor = f"a tensor {list(x.shape)} of {x.dtype}"
                    raise OverlapError(f"{ours} {shared} bytes that {theirs} ({tensor}); wait for it first")
