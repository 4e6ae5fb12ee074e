"""ZeRO without ranks."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from megazero.engine.mesh.mesh import Mesh
from megazero.engine.plan.program.operations import Op, Start, Wait
from megazero.engine.step.engine import Engine
from megazero.engine.zero.norms import square_sums
from tests.helpers.rounding import error_bound
from tests.helpers.table import for_each
from tests.parallel.cases import MODEL, Case, micro_batches

CPU = torch.device("cpu")


def test_square_sum_is_exact_where_fp32_is_not() -> None:
    """See Note [norms in fp32]."""
    x = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))
    exact = float(x.double().square().sum())
    for pieces in ([x], list(x.split([1 << 20, 64, (3 << 20) - 64]))):
        found = float(square_sums([pieces], CPU))
        assert abs(found - exact) < error_bound(exact, 64, torch.float32)  # rows of 64 in fp32
    assert square_sums([[], [x]], CPU)[0] == 0
    assert abs(float(square_sums([[x.double()]], CPU)) - exact) < error_bound(exact, 2 * 64, torch.float64)


class Planted(Exception):
    """The failure of an operation."""


def failing(fatal: int, after: bool) -> Callable[[Op], contextlib.AbstractContextManager[None]]:
    """Return an observer that raises before or after operation number `fatal`."""
    numbers = iter(range(fatal + 1))

    @contextlib.contextmanager
    def observe(op: Op) -> Iterator[None]:
        last = next(numbers) == fatal
        if last and not after:
            raise Planted
        yield
        if last:
            raise Planted

    return observe


SMALL = replace(MODEL, num_layers=2)
FAILING = [
    Case(model=SMALL, zero=2, offload=1.0, batch=2),  # contributions add to a gradient that was fetched
    Case(model=SMALL, batch=2, recompute="full", host=True, md=True),
]


@for_each("case", FAILING)
def test_a_step_that_failed_anywhere_leaves_nothing_to_the_next(case: Case) -> None:
    """After a failure before and behind an operation of each kind, the next step has the same gradients."""
    engine = Engine(case.config(), Mesh.build(case.layout, 0, CPU))
    batches = micro_batches(case, engine.mesh, 0)
    program = engine.program(engine.config.schedule, len(batches))

    def norm() -> float:
        engine.begin()
        return engine._compute_gradients(
            program, engine._upload(batches, training=True, documents=engine.config.documents), 1.0
        ).norm

    wanted = norm()
    kinds = [(type(op), type(op.op) if isinstance(op, (Start, Wait)) else None) for op in program.gradients]
    last = {kind: number for number, kind in enumerate(kinds)}
    for fatal in sorted(last.values()):
        for after in (False, True):
            engine.interpreter.observe = failing(fatal, after)
            with pytest.raises(Planted):
                norm()
            engine.interpreter.observe = None
            assert norm() == wanted > 0, (program.gradients[fatal], after)
