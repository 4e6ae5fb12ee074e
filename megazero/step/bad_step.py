"""The first number of a step that is not finite: the step is computed again, and every operation's result looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megazero.comm.mesh.collectives import MIN
from megazero.comm.mesh.mesh import Mesh
from megazero.config.batch_sizes import PADDING
from megazero.plan.layout.layers import End, Layers
from megazero.plan.program.operations import Backward, Forward, Op
from megazero.step.interpreter import Interpreter

MOST = 1 << 30  # above all orders of layers and numbers of micro-batches


class Place(NamedTuple):
    """Result of an operation on a layer; the first one that is not finite is the smallest."""

    backward: bool
    order: int  # of the layer, in the direction of the operation
    micro_batch: int

    @classmethod
    def of(cls, op: Forward | Backward, layers: Layers) -> Place:
        backward, names = isinstance(op, Backward), list(layers.kinds)
        return cls(backward, (names[::-1] if backward else names).index(op.layer), op.micro_batch)

    def text(self, layers: Layers) -> str:
        name = list(layers.kinds)[-1 - self.order if self.backward else self.order]
        ends = {End.FIRST: "the embedding", End.LAST: "the head", None: "block "}
        number = layers.blocks.index(name) if name in layers.blocks else ""
        layer = f"{ends[layers.kinds[name].end]}{number}"
        return f"the gradient of the input of {layer}" if self.backward else f"the output of {layer}"


class Inspector:
    """An observer of the interpreter that keeps the first result which is not finite."""

    def __init__(self, interpreter: Interpreter, layers: Layers) -> None:
        self.interpreter, self.layers, self.first = interpreter, layers, None

    @contextlib.contextmanager
    def __call__(self, op: Op) -> Iterator[None]:
        yield
        if isinstance(op, (Forward, Backward)):
            run, backward = self.interpreter, isinstance(op, Backward)
            result = (run.dx if backward else run.x).get(op.micro_batch)
            if result is None and not backward:
                result = run.losses.get(op.micro_batch)
            if result is not None and not result.isfinite().all():
                place = Place.of(op, self.layers)
                self.first = place if self.first is None else min(self.first, place)


def first_bad_result(mesh: Mesh, inspector: Inspector, samples: Sequence[tuple[int, ...]]) -> str | None:
    """Name the first layer whose result is not finite, the lowest rank that has it, and the samples. All ranks call it.

    Args:
        samples: global numbers of this rank's micro-batches.

    Returns:
        A phrase, the same on all ranks; None if all results were finite.
    """
    mine = (MOST, MOST, MOST) if inspector.first is None else tuple(map(int, inspector.first))
    first: tuple[int, ...] = ()
    for n, number in enumerate(mine):  # the smallest of all, part by part
        first += (mesh.agree(number if mine[:n] == first else MOST, MIN),)
    if first[0] == MOST:
        return None
    rank = mesh.agree(mesh.rank if mine == first else mesh.world.size, MIN)
    place = Place(bool(first[0]), *first[1:])
    of_rank = samples[place.micro_batch] if mesh.rank == rank else [0] * len(samples[0])
    numbers = mesh.host.all_reduce_(torch.tensor(of_rank), kind="control").tolist()
    host = f" ({mesh.world.hosts[rank]})" if mesh.world.hosts else ""
    result = place.text(inspector.layers)
    return f"{result} is the first that is not finite, on rank {rank}{host}, for {samples_text(numbers)}"


def samples_text(numbers: Sequence[int]) -> str:
    """Name samples: "sample 7", "samples 4 to 7", "samples 1, 5"; "padding" where there is none."""
    numbers = [number for number in numbers if number != PADDING]
    if not numbers:
        return "padding"
    if len(numbers) == 1:
        return f"sample {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"samples {numbers[0]} to {numbers[-1]}"
    return f"samples {', '.join(map(str, numbers))}"
