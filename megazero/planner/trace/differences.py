"""Stand-ins that differ between the ranks of an axis, followed from sharded weights through operators and collectives.

Note [summed]: a weight that is replicated over tp, but used for this rank's heads or columns only, must be declared
with summed=("tp",), because its gradient is then a sum over the ranks. Without it, a run with tensor parallelism would
train on wrong gradients in silence. So the trace of a layer refuses it: results of sharded weights differ between ranks
until a collective joins them, and a gradient that is computed from them is one rank's summand.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megazero.engine.model.layers.weight import GradWriter, Weight

# operators whose results do not depend on the values of their arguments
SHAPES_ONLY = ("empty_like", "new_empty", "zeros_like", "new_zeros", "ones_like", "new_ones", "full_like", "new_full")


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among the values, and in lists of them."""
    found = list[torch.Tensor]()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


class Differences:
    """The axes over whose ranks the values of a storage differ. A storage without an entry has the same everywhere."""

    def __init__(self) -> None:
        self.sums_replicated = False  # gradients of all replicated weights are summed over tp
        self._axes: dict[StorageWeakRef, frozenset[str]] = {}  # a weak reference keeps its number from being reused

    def start_from(self, weights: Iterable[Weight]) -> None:
        """Add the weights of which this rank has a part."""
        for weight in weights:
            parts, whole = weight.block.shape, weight.spec.shape
            if axes := _merged(axis for dim, axis in weight.spec.sharded if parts[dim] != whole[dim]):
                self._axes[_reference(weight.data)] = axes

    def of(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        if not self._axes:
            return frozenset()
        return frozenset().union(*(self._axes.get(_reference(tensor), ()) for tensor in tensors))

    def follow(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Add the results of an operator that read different values, returned or written to arguments."""
        if not self._axes or function.__name__.split(".")[0] in SHAPES_ONLY:
            return
        if axes := self.of(tensors_in((*args, *kwargs.values()))):
            arguments = function._schema.arguments
            given = {**{a.name: value for a, value in zip(arguments, args, strict=False)}, **kwargs}
            written = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
            for tensor in tensors_in((out, *written)):
                reference = _reference(tensor)
                self._axes[reference] = self._axes.get(reference, frozenset()) | axes

    def join(self, tensors: Iterable[torch.Tensor], axis: str, reads: Iterable[torch.Tensor] = ()) -> None:
        """Take results of a collective along `axis` for the same on its ranks, or for each rank's own tokens.

        Args:
            reads: the tensors that the collective reads. Its results differ as they do along other axes.
        """
        axes = self.of(reads)
        for tensor in tensors:
            reference = _reference(tensor)
            if axes or reference in self._axes:
                self._axes[reference] = (self._axes.get(reference, frozenset()) | axes) - _merged({axis})

    def check(self, weight: Weight, write: GradWriter) -> None:
        """Refuse a replicated weight whose declaration does not fit its gradient; see Note [summed]."""
        summands = self.of(write.tensors) - _merged(weight.spec.axes)
        missing = summands - weight.spec.summed
        assert not missing, (
            f"{weight.spec.name} is used for this rank's heads or columns only, so its gradient is a sum over "
            f"{' and '.join(missing)}; declare it with summed={tuple(missing)}"
        )
        known = frozenset().union(*self._axes.values())
        needless = (weight.spec.summed & known) - summands if not self.sums_replicated else ()
        assert not needless, (
            f"{weight.spec.name} has the same gradient on all ranks of {' and '.join(needless)}; "
            f"declare it without summed={tuple(needless)}"
        )


def _merged(axes: Iterable[str]) -> frozenset[str]:
    """Replace etp by tp, of whose ranks it has some: gradients that differ over it are summed over tp."""
    return frozenset("tp" if axis == "etp" else axis for axis in axes)


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
