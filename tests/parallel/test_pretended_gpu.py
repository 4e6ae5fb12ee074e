"""The engine on the pretended GPU: every layout's paths on CUDA have no fault of order, and each planted one is found.

Losses are the reference's there too, bytes those of the estimate, and the host waits once a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from megazero.comm.mesh import Mesh
from megazero.price.estimate import estimate
from tests.helpers.pretended_gpu import GPU, Finding, pretended_gpu
from tests.parallel import matrix
from tests.parallel.cases import Case, Outcome, train_on
from tests.parallel.test_parity import check_near, parameters

STEPS = 2  # the second finds buffers, streams and moments of the first


class Watched(NamedTuple):
    """One rank's results. `waits`: per step, the operators that the host waited for."""

    outcome: Outcome
    found: Counter[Finding]
    waits: list[list[str]]


def train_watched(rank: int, case: Case) -> Watched:
    waits: list[list[str]] = []

    @contextmanager
    def around_step() -> Iterator[None]:
        before = len(findings.waits)
        yield
        waits.append(findings.waits[before:])

    with pretended_gpu() as findings:
        outcome = train_on(Mesh.build(case.layout, rank, GPU), case, STEPS, around_step=around_step)
    return Watched(outcome, findings.found, waits)


@pytest.mark.parametrize(
    "case", [*parameters(matrix.on_gpu()[0]), *parameters(matrix.on_gpu()[1], pytest.mark.slow)]
)
def test_every_path_of_a_gpu_is_in_order(case: Case, ranks) -> None:
    watched = ranks(case.world).run(train_watched, case)
    for rank, (outcome, found, waits) in enumerate(watched):
        assert found == {}
        assert waits == [["tolist"]] * STEPS
        memory, traffic = estimate(case.config(), case.layout, rank, needs_staging_buffer=False)
        assert outcome.sent == [traffic] * STEPS
        for measured in outcome.memory:  # the peak is the allocator's, with everything that is not planned
            assert measured | {"peak": 0} == memory | {"peak": 0}
    check_near(case, [outcome for outcome, _, _ in watched])
