"""Name the first gradient and the first result of a step that are not finite; the step is computed again for these."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import torch

from megazero.engine.mesh.collectives import MIN
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.options.batch_sizes import PADDING
from megazero.engine.plan.layout.layers import End, Layers
from megazero.engine.plan.program.operations import Backward, Forward, Op
from megazero.engine.step.engine import Engine
from megazero.engine.step.interpreter import Interpreter
from megazero.units import ranges

NOT_AGAIN = "every layer's result was finite when the step was computed again"
NONE = 1 << 30  # above all orders of layers and numbers of micro-batches


class LayerResult(NamedTuple):
    """Result of a layer's Forward or Backward. They are ordered as a micro-batch computes them."""

    backward: bool
    order: int  # place of the layer, in the direction of the operation
    micro_batch: int

    @classmethod
    def of(cls, op: Forward | Backward, layers: Layers) -> Self:
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
        self.interpreter, self.layers = interpreter, layers
        self.first: LayerResult | None = None

    @contextlib.contextmanager
    def __call__(self, op: Op) -> Iterator[None]:
        yield
        if isinstance(op, (Forward, Backward)):
            run, backward = self.interpreter, isinstance(op, Backward)
            result = (run.dx if backward else run.x).get(op.micro_batch)
            if result is None and not backward:
                result = run.losses.get(op.micro_batch)
            if result is not None and not result.isfinite().all():
                found = LayerResult.of(op, self.layers)
                self.first = found if self.first is None else min(self.first, found)


def diagnose_step(engine: Engine, samples: Sequence[tuple[int, ...]], repeat: Callable[[], None] | None) -> str:
    """Name the first gradient that is not finite and, if the step can be repeated, first the first such result.

    All ranks call this and return the same.

    Args:
        samples: global numbers of this rank's micro-batches.
        repeat: computes the step's gradients again.
    """
    reason = first_bad_gradient(engine)
    if repeat is None:
        return reason
    engine.zero.discard_gradients()
    inspector, observe = Inspector(engine.interpreter, engine.layers), engine.interpreter.observe
    engine.interpreter.observe = inspector
    try:
        repeat()
    finally:
        engine.interpreter.observe = observe
        engine.zero.discard_gradients()
    found = first_bad_result(engine.mesh, inspector, samples)
    return f"{found or NOT_AGAIN}; {reason}"


def first_bad_gradient(engine: Engine) -> str:
    """Name the model's first parameter whose gradient is not finite on a rank, and the lowest such rank."""
    mesh, world = engine.mesh, engine.mesh.world.size
    names = [spec.name for spec in engine.layers.params()]
    at = min((names.index(name) for name in _bad_gradients(engine)), default=len(names))
    at, rank = divmod(mesh.agree(at * world + mesh.rank, MIN), world)
    return f"the gradient of {names[at]} is not finite on rank {rank}" if at < len(names) else "a sum of gradients"


def _bad_gradients(engine: Engine) -> Iterator[str]:
    """Yield this rank's parameters whose reduced gradient, in the owned range, is not finite."""
    for unit in engine.zero.trained_units:
        gradients = unit.gradients
        for part in unit.flat.owned_parts() if gradients.reduced is not None else ():
            if not gradients.sharded_grad[part.owned.slice()].isfinite().all():
                yield part.weight.spec.name


def first_bad_result(mesh: Mesh, inspector: Inspector, samples: Sequence[tuple[int, ...]]) -> str | None:
    """Name the first layer whose result is not finite, the lowest rank with it, and its samples. All ranks call it.

    Args:
        samples: global numbers of this rank's micro-batches.

    Returns:
        A phrase, the same on all ranks; None if all results were finite.
    """
    found, mine = inspector.first is not None, inspector.first or LayerResult(True, NONE, NONE)
    # The smallest of all ranks' results, part by part: direction, layer, micro-batch.
    backward = mesh.agree(int(mine.backward), MIN)
    order = mesh.agree(mine.order if mine.backward == backward else NONE, MIN)
    micro_batch = mesh.agree(mine.micro_batch if mine[:2] == (backward, order) else NONE, MIN)
    if micro_batch == NONE:
        return None
    first = LayerResult(bool(backward), order, micro_batch)
    rank = mesh.agree(mesh.rank if found and mine == first else mesh.world.size, MIN)
    of_rank = samples[micro_batch] if mesh.rank == rank else [0] * len(samples[0])
    numbers = mesh.host.all_reduce_(torch.tensor(of_rank), kind="control").tolist()
    host = f" ({mesh.world.hosts[rank]})" if mesh.world.hosts else ""
    result = first.text(inspector.layers)
    return f"{result} is the first that is not finite, on rank {rank}{host}, for {samples_text(numbers)}"


def samples_text(numbers: Sequence[int]) -> str:
    """Name samples: "sample 7", "samples 4-7, 9"; "padding" if there is none."""
    real = [number for number in numbers if number != PADDING]
    if not real:
        return "padding"
    return f"{'sample' if len(real) == 1 else 'samples'} {', '.join(ranges(real))}"
