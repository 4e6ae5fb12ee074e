"""The first number of a step that is not finite: the step is computed again, and every operation's result looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megazero.comm.collectives import MIN
from megazero.comm.mesh import Mesh
from megazero.config.batch_sizes import PADDING
from megazero.plan.operations import Backward, Forward, Op
from megazero.plan.parameters import HEAD
from megazero.train.interpreter import Interpreter

MOST_LAYERS, MOST_MICRO_BATCHES = 1 << 14, 1 << 24


class Place(NamedTuple):
    """Result of an operation on a layer; the first one that is not finite is the smallest."""

    backward: bool
    order: int  # of the layer, in the direction of the operation
    micro_batch: int

    @classmethod
    def of(cls, op: Forward | Backward) -> Place:
        backward = isinstance(op, Backward)
        name = op.layer
        block = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0
        at = MOST_LAYERS - 1 if name == HEAD else block
        return cls(backward, MOST_LAYERS - 1 - at if backward else at, op.micro_batch)

    @property
    def number(self) -> int:
        return (self.backward * MOST_LAYERS + self.order) * MOST_MICRO_BATCHES + self.micro_batch

    @classmethod
    def from_number(cls, number: int) -> Place:
        rest, micro_batch = divmod(number, MOST_MICRO_BATCHES)
        return cls(*divmod(rest, MOST_LAYERS), micro_batch)

    def __str__(self) -> str:
        at = MOST_LAYERS - 1 - self.order if self.backward else self.order
        layer = {0: "the embedding", MOST_LAYERS - 1: "the head"}.get(at, f"block {at - 1}")
        return f"the gradient of the input of {layer}" if self.backward else f"the output of {layer}"


class Inspector:
    """An observer of the interpreter that keeps the first result which is not finite."""

    def __init__(self, interpreter: Interpreter) -> None:
        self.interpreter, self.first = interpreter, None

    @contextlib.contextmanager
    def __call__(self, op: Op) -> Iterator[None]:
        yield
        if isinstance(op, (Forward, Backward)):
            run, backward = self.interpreter, isinstance(op, Backward)
            result = (run.dx if backward else run.x).get(op.micro_batch)
            if result is None and not backward:
                result = run.losses.get(op.micro_batch)
            if result is not None and not result.isfinite().all():
                place = Place.of(op)
                self.first = place if self.first is None else min(self.first, place)


def first_bad_result(mesh: Mesh, inspector: Inspector, samples: Sequence[tuple[int, ...]]) -> str | None:
    """Name the first layer whose result is not finite, the lowest rank that has it, and the samples. All ranks call it.

    Args:
        samples: global numbers of this rank's micro-batches.

    Returns:
        A phrase, the same on all ranks; None if all results were finite.
    """
    nowhere = Place(True, MOST_LAYERS, 0).number
    mine = inspector.first.number if inspector.first is not None else nowhere
    first = mesh.agree(mine, MIN)
    if first == nowhere:
        return None
    rank = mesh.agree(mesh.rank if mine == first else mesh.world.size, MIN)
    place = Place.from_number(first)
    of_rank = samples[place.micro_batch] if mesh.rank == rank else [0] * len(samples[0])
    numbers = mesh.host.all_reduce_(torch.tensor(of_rank), kind="control").tolist()
    host = f" ({mesh.world.hosts[rank]})" if mesh.world.hosts else ""
    return f"{place} is the first that is not finite, on rank {rank}{host}, for {samples_text(numbers)}"


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
