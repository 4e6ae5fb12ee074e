"""`Weight`: a parameter as its layer sees it: declaration, current memory, owner of its gradient.

A layer declares its weights where it uses them, by `Context.weight`. A declared weight has no memory, but its layer can
be traced. ZeRO is built from the weights of all layers. It gives them memory and takes their gradients.

Note [the Weight itself]: an autograd Function that needs a weight in backward keeps the Weight, never a view or a cast
of its data, and never by save_for_backward. The reason is that a released weight is gathered into another slot, so
backward must read `Weight.data` again. The Function also takes a `handle` (`handle_of` several weights) as an argument,
so that autograd runs its backward.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
import torch.nn as nn

from megazero.engine.kernels import initial_values
from megazero.engine.kernels.matmul import write_or_add
from megazero.engine.plan.layout.parameters import LocalBlock, ParamSpec


class GradWriter(NamedTuple):
    """A contribution to a gradient: `function(*tensors, out, add)` writes it to `out` or adds it."""

    function: Callable[..., None]
    tensors: tuple[torch.Tensor, ...]

    def __call__(self, out: torch.Tensor, add: bool) -> None:
        self.function(*self.tensors, out, add)


class Owner(Protocol):
    """The owner of a weight's memory and gradient: ZeRO, or a trace."""

    def accumulate_grad(self, weight: Weight, write: GradWriter) -> None: ...


class Weight:
    """One rank's shard of a parameter.

    Attributes:
        spec: the global parameter. Its name is the weight's path in the model, set by `named_weights`.
        block: this rank's shard.
        data: the shard with its rows of padding. Without memory, or released: one NaN expanded to that shape. Read it
            in forward and again in backward.
        handle: an empty tensor that stands for the weight in autograd's graph.
        owner: set together with its memory.
    """

    def __init__(self, spec: ParamSpec, block: LocalBlock, seed: int, released: torch.Tensor) -> None:
        self.spec, self.block, self.seed = spec, block, seed
        self.data = released.expand(self.block.stored)
        self.handle = released.new_empty(0).requires_grad_(spec.trains)
        self.owner: Owner | None = None

    @property
    def trains(self) -> bool:
        return self.spec.trains

    def initial(self, start: int, stop: int) -> torch.Tensor:
        """Return initial values of elements [start, stop) of the row-major shard; fp32, on the CPU."""
        return initial_values.draw(self.seed, self.spec, self.block, start=start, stop=stop)

    def accumulate_grad(self, write: GradWriter) -> None:
        """Hand over a contribution to the gradient, in backward. A frozen weight ignores it."""
        if self.trains:
            assert self.owner is not None, f"{self.spec.name} has no owner"
            self.owner.accumulate_grad(self, write)

    def add_grad(self, gradient: torch.Tensor) -> None:
        """Hand over a computed gradient."""
        self.accumulate_grad(GradWriter(write_or_add, (gradient,)))


class HasWeights(Protocol):
    """A part of a layer, with the weights that it uses."""

    weights: tuple[Weight, ...]


class WeightedModule(nn.Module):
    """A part whose weights are those that it assigns to itself."""

    @functools.cached_property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(value for value in vars(self).values() if isinstance(value, Weight))


def handle_of(*parts: HasWeights | None) -> torch.Tensor:
    """Return a handle for all weights of `parts`: that of one that trains, if any does."""
    handles = [weight.handle for part in parts if part is not None for weight in part.weights]
    return next((handle for handle in handles if handle.requires_grad), handles[0])


def weights_of(layer: nn.Module, prefix: str) -> Iterator[tuple[str, Weight]]:
    """Yield (path, weight) in the order in which modules and weights were assigned."""
    for path, module in layer.named_modules(prefix=prefix):
        for name, value in vars(module).items():
            if isinstance(value, Weight):
                yield f"{path}.{name}", value


def named_weights(layer: nn.Module, prefix: str, frozen: tuple[str, ...] = ()) -> list[Weight]:
    """Set the global names of a layer's weights and freeze those that match a pattern of `frozen`. Return them."""
    found = []
    for path, weight in weights_of(layer, prefix):
        trains = not any(fnmatch.fnmatchcase(path, pattern) for pattern in frozen)
        decays = weight.spec.decays and trains
        weight.spec = dataclasses.replace(weight.spec, name=path, trains=trains, decays=decays)
        weight.handle.requires_grad_(trains)
        found.append(weight)
    return found
