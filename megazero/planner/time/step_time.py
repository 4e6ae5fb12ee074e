"""Seconds of a training step and their parts: simulates the programs of all pipeline ranks on a device.

The update is simulated before the gradients of the next step: all ranks agree on the norm between the two, so that a
step begins there, and the all-gathers of updated weights overlap with the forward that needs them.
"""

from typing import NamedTuple

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.operations import COMPUTE, Backward, BackwardWeights, Forward, Ops, Recompute
from megazero.engine.plan.program.program import Program, program
from megazero.engine.plan.program.rank_spec import RankSpec, rank_spec
from megazero.flags.config import Config
from megazero.planner.bytes.estimate import Few
from megazero.planner.time.costs import StepCosts
from megazero.planner.time.devices import Device
from megazero.planner.time.network import Network
from megazero.planner.time.simulate import simulate

WITHIN = ("tp", "cp", "ep")  # kinds of traffic inside a layer
COMPUTATIONS = (Forward, Backward, BackwardWeights)
PARTS = ("compute", "recompute", "optimizer", "tp", "cp", "ep", "dp", "pp", "host", "bubble", "copies")


class Parts(NamedTuple):
    """Seconds of a step, and how its busiest pipeline rank spends them.

    Attributes:
        parts: they add up to `seconds`: compute, recompute and optimizer; waiting for communication along tp, cp, ep,
            dp or pp, for copies from the host, or for other pipeline ranks (bubble); copying inputs kept for recompute.
        compute: of every pipeline rank, recompute included.
        rank: the busiest.
    """

    seconds: float
    parts: dict[str, float]
    compute: tuple[float, ...]
    rank: int


class StepPrograms:
    """The programs of all ranks of a pipeline, for a step of a few micro-batches. Made once, simulated often."""

    def __init__(self, config: Config, layout: Layout) -> None:
        self.config, self.layout = config, layout
        schedule = config.parallel.pipeline_schedule
        self.few = Few.of(schedule, layout, config.micro_batches(layout.dp))
        self.specs: list[RankSpec] = [rank_spec(config, layout, pp, declare) for pp in range(layout.pp)]
        self.programs: list[list[Program]] = [[program(s, schedule, m) for s in self.specs] for m in self.few.counts]


def step_parts(steps: StepPrograms, device: Device) -> Parts:
    """Simulate a step on a device."""
    network = Network(device, steps.layout)
    costs = [
        StepCosts(config=steps.config, layout=steps.layout, spec=spec, device=device, network=network)
        for spec in steps.specs
    ]
    found = [_simulate([[*p.update, *p.gradients] for p in programs], costs) for programs in steps.programs]
    last = found[-1]
    if found[0].rank != last.rank:  # a tie
        found[0] = found[0]._replace(rank=last.rank)
    extended = Parts(*steps.few.extend(found))
    # Waits of the first rounds of a pipeline shrink from round to round until they stay: the line through two counts
    # would continue the decrease, below zero for the bubble of a long step.
    parts = {name: max(seconds, last.parts[name]) for name, seconds in extended.parts.items()}
    seconds = extended.seconds + sum(parts[name] - extended.parts[name] for name in parts)
    return extended._replace(parts=parts, seconds=seconds)


def _simulate(programs: list[Ops], costs: list[StepCosts]) -> Parts:
    device = costs[0].device
    timing = simulate(programs, costs, device.collective_overhead, device.overlap)
    compute = tuple(sum((spent[op.__name__] for op in COMPUTE), 0.0) for spent in timing.spent)
    rank = max(range(len(programs)), key=lambda r: compute[r])
    spent = timing.spent[rank]
    exposed = {(kind, axis): 0.0 for kind in ("compute", "recompute") for axis in WITHIN}
    for op in programs[rank]:
        if isinstance(op, COMPUTE):
            for axis, seconds in costs[rank].of_layer(op).exposed.items():
                exposed["recompute" if isinstance(op, Recompute) else "compute", axis] += seconds
    waits = {kind: sum(exposed[each] for each in exposed if kind in each) for kind in ("compute", "recompute", *WITHIN)}
    parts = {
        "compute": sum(spent[op.__name__] for op in COMPUTATIONS) - waits["compute"] + spent["issue"],
        "recompute": spent["Recompute"] - waits["recompute"],
        "optimizer": spent["Update"] + spent["GradNorm"],
        "tp": waits["tp"] + spent["tp"] + spent["Rebuild"],
        "cp": waits["cp"],
        "ep": waits["ep"],
        "dp": spent["dp"],
        "pp": spent["pp"],
        "host": spent["host"],
        "copies": spent["Keep"],
    }
    parts["bubble"] = timing.seconds - sum(parts.values())
    return Parts(timing.seconds, {name: parts[name] for name in PARTS}, compute, rank)


class StepTime(NamedTuple):
    """Seconds of a step: expected, and with all constants at the fast or the slow end of their range."""

    expected: Parts
    fast: float
    slow: float


def step_time(config: Config, layout: Layout, device: Device, with_range: bool = True) -> StepTime:
    """Predict the seconds of a step; `config` is resolved. Without `with_range`, both ends equal the expectation."""
    steps = StepPrograms(config, layout)
    expected = step_parts(steps, device)
    if not with_range:
        return StepTime(expected, expected.seconds, expected.seconds)
    fast, slow = (step_parts(steps, device.at_end(fast)).seconds for fast in (True, False))
    return StepTime(expected, fast, slow)
