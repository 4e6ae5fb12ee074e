"""Measure the pipeline's idle time in an iteration, and simulate it from the same iteration's costs.

Both are idle time / compute time of the stage that computes longest, as `simulate.Timing.bubble`: (p - 1) / m
for 1F1B with equal stages. docs/metrics.md has the definition.
"""

import time
from collections import Counter
from typing import NamedTuple

import torch

from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.plan.program.operations import COMPUTE, Op, Transfer, inner
from megazero.engine.plan.program.program import program
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.flags.config import Config
from megazero.observe.timeline import Interval
from megazero.planner.time.simulate import simulate

Key = tuple[str, str]  # operation, layer
PATIENCE = 100  # a simulation may take this fraction, 1 / 100, of the time since the last one


class StageTimes(NamedTuple):
    """One stage's iteration, in seconds."""

    computing: float
    waiting: float  # for messages, up to its last computation
    until: float  # from the iteration's first operation to the end of its last computation


def stage_times(intervals: list[Interval]) -> StageTimes:
    """Add up the operations of one iteration of one rank."""
    last = max((n for n, each in enumerate(intervals) if isinstance(each.op, COMPUTE)), default=-1)
    computing = waiting = 0
    for op, begin, end in intervals[: last + 1]:
        if isinstance(op, COMPUTE):
            computing += end - begin
        elif isinstance(inner(op), Transfer):
            waiting += end - begin
    until = intervals[last].end - intervals[0].begin if last >= 0 else 0
    return StageTimes(computing / 1e9, waiting / 1e9, until / 1e9)


def bubble(stages: list[StageTimes]) -> float:
    """Return idle time / compute time of the stage that computes longest.

    Idle time: waits for messages, and the time from its last computation to the last computation of any stage.
    """
    end = max(stage.until for stage in stages)
    busiest = max(stages, key=lambda stage: stage.computing)
    return (busiest.waiting + end - busiest.until) / busiest.computing if busiest.computing else 0.0


def key_of(op: Op) -> Key:
    """Return the kind of a computation. Costs are means over the micro-batches of a kind."""
    return type(op).__name__, op.layer if isinstance(op, COMPUTE) else ""


class BubbleMeter:
    """Measures and simulates the bubble of this rank's pipeline."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config, self.pp, self.device = config, mesh.pp, mesh.device
        self.stages = [rank_spec(config, mesh.layout, pp, declare) for pp in range(mesh.layout.pp)]
        # A layer is on one stage, so the sum over pp of the stages' means has the mean of each layer.
        self.keys = [(op.__name__, layer) for stage in self.stages for layer in stage.layers for op in COMPUTE]
        self._simulated_at, self._simulation_took = 0.0, 0.0

    def measure(self, intervals: list[Interval], simulates: bool) -> dict[str, float]:
        """Return `bubble`, the same on all ranks of the pipeline, and if `simulates`, `bubble_simulated`.

        All ranks of the pipeline call this. A simulation is skipped if it would take more than a hundredth of the time
        since the last one, because long pipelines take a while.
        """
        total, count = Counter[Key](), Counter[Key]()
        for op, begin, end in intervals:
            if isinstance(op, COMPUTE):
                total[key_of(op)] += end - begin
                count[key_of(op)] += 1
        micro_batches = 1 + max(op.micro_batch for op, _, _ in intervals if isinstance(op, COMPUTE))
        own = stage_times(intervals)
        stages = torch.zeros(self.pp.size, len(own), dtype=torch.float64)
        stages[self.pp.rank] = torch.tensor(own, dtype=torch.float64)
        means = torch.tensor([total[key] / max(1, count[key]) for key in self.keys], dtype=torch.float64)
        numbers = torch.cat([stages.view(-1), means]).to(self.device)
        numbers = self.pp.all_reduce_(numbers, kind="control").cpu()
        stages, means = numbers[: stages.numel()].view_as(stages), numbers[stages.numel() :]
        found = {"bubble": bubble([StageTimes(*stage) for stage in stages.tolist()])}
        now = time.perf_counter()
        if simulates and now - self._simulated_at >= PATIENCE * self._simulation_took:
            found["bubble_simulated"] = self._simulate(dict(zip(self.keys, means.tolist(), strict=True)), micro_batches)
            self._simulated_at = time.perf_counter()
            self._simulation_took = self._simulated_at - now
        return found

    def _simulate(self, costs: dict[Key, float], micro_batches: int) -> float:
        schedule = self.config.parallel.pipeline_schedule
        programs = [program(stage, schedule, micro_batches).gradients for stage in self.stages]
        return simulate(programs, lambda op: costs.get(key_of(op), 0.0)).bubble
