"""Seconds of a training step and their parts: the programs of all pipeline ranks, played with costs of a device.

The update is played before the gradients that follow it: all ranks agree on the norm between the two, so that a step
begins there, and the all-gathers of updated weights run behind the forward that they belong to.
"""

from __future__ import annotations

from typing import NamedTuple

from megazero.config.schema import Config
from megazero.model.stage import declare
from megazero.plan.operations import COMPUTE, Backward, BackwardWeights, Forward, Ops, Recompute
from megazero.plan.program import Program, program
from megazero.plan.rank_spec import RankSpec, rank_spec
from megazero.plan.topology import Layout
from megazero.price.costs import StepCosts
from megazero.price.devices import Device
from megazero.price.estimate import Few
from megazero.price.network import Network
from megazero.price.simulate import simulate

COMPUTATIONS = (Forward, Backward, BackwardWeights)
PARTS = ("compute", "recompute", "optimizer", "tp", "dp", "pp", "host", "bubble", "copies")


class Parts(NamedTuple):
    """Seconds of a step, and where those of its busiest pipeline rank go: they add up to `seconds`.

    Attributes:
        parts: compute, recompute and optimizer; time in which it only waits for communication along tp, dp or pp, or
            for copies from the host; bubble, in which it waits for other pipeline ranks; copies of kept inputs.
        compute: per pipeline rank, computing and recomputing.
        rank: the busiest.
    """

    seconds: float
    parts: dict[str, float]
    compute: list[float]
    rank: int


class StepPrograms:
    """The programs of all ranks of a pipeline, for a step of a few micro-batches. Made once, played often."""

    def __init__(self, config: Config, layout: Layout) -> None:
        self.config, self.layout = config, layout
        schedule = config.parallel.pipeline_schedule
        self.few = Few.of(schedule, layout, config.micro_batches(layout.dp))
        self.specs: list[RankSpec] = [rank_spec(config, layout, pp, declare) for pp in range(layout.pp)]
        self.programs: list[list[Program]] = [[program(s, schedule, m) for s in self.specs] for m in self.few.played]


def step_parts(steps: StepPrograms, device: Device) -> Parts:
    """Play a step on a device."""
    network = Network(device, steps.layout)
    costs = [StepCosts(steps.config, steps.layout, spec, device, network) for spec in steps.specs]
    found = [_play([[*p.update, *p.gradients] for p in programs], costs) for programs in steps.programs]
    if len(found) == 1:
        return found[0]
    extend, rank = steps.few.extend, found[-1].rank
    if found[0].rank != rank:  # a tie
        found[0] = found[0]._replace(rank=rank)
    parts = {name: extend([one.parts[name] for one in found]) for name in PARTS}
    compute = [extend(both) for both in zip(*(one.compute for one in found), strict=True)]
    return Parts(extend([one.seconds for one in found]), parts, compute, rank)


def _play(programs: list[Ops], costs: list[StepCosts]) -> Parts:
    device = costs[0].device
    timing = simulate(programs, costs, device.collective_overhead, device.overlap)
    compute = [sum((spent[op.__name__] for op in COMPUTE), 0.0) for spent in timing.spent]
    rank = max(range(len(programs)), key=lambda r: compute[r])
    spent = timing.spent[rank]
    exposed = {"compute": 0.0, "recompute": 0.0}
    for op in programs[rank]:
        if isinstance(op, COMPUTE):
            exposed["recompute" if isinstance(op, Recompute) else "compute"] += costs[rank].of_layer(op).exposed
    parts = {
        "compute": sum(spent[op.__name__] for op in COMPUTATIONS) - exposed["compute"] + spent["issue"],
        "recompute": spent["Recompute"] - exposed["recompute"],
        "optimizer": spent["Update"] + spent["Norm"],
        "tp": sum(exposed.values()) + spent["tp"] + spent["Rebuild"],
        "dp": spent["dp"],
        "pp": spent["pp"],
        "host": spent["host"],
        "copies": spent["Keep"],
    }
    parts["bubble"] = timing.seconds - sum(parts.values())
    return Parts(timing.seconds, {name: parts[name] for name in PARTS}, compute, rank)


class StepTime(NamedTuple):
    """Seconds of a step: expected, and with every uncertain constant at its fast or its slow end at once."""

    expected: Parts
    fast: float
    slow: float


def step_time(config: Config, layout: Layout, device: Device, with_range: bool = True) -> StepTime:
    """Predict the seconds of a step; `config` is resolved. Without `with_range`, both ends are what is expected."""
    steps = StepPrograms(config, layout)
    expected = step_parts(steps, device)
    if not with_range:
        return StepTime(expected, expected.seconds, expected.seconds)
    fast, slow = (step_parts(steps, device.at_end(fast)).seconds for fast in (True, False))
    return StepTime(expected, fast, slow)
