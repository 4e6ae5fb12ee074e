"""Bytes of a pipeline stage over a step, with what autograd keeps: the estimate, watched operation by operation."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from megazero.config.schema import Config
from megazero.memory.tracker import MemoryTracker
from megazero.model.stage import declare
from megazero.plan.operations import Backward, Forward, Op, Recompute, Start, Wait
from megazero.plan.rank_spec import rank_spec
from megazero.plan.topology import Layout
from megazero.price.estimate import Estimate, estimate
from megazero.price.step_time import Few
from megazero.price.trace import trace_layers

KINDS = ("parameters", "optimizer", "gradients", "activation_checkpoints", "buffers", "logits", "activations")


class Moment(NamedTuple):
    """Bytes on a rank's device when an operation has been carried out: by kind, in the order of KINDS."""

    op: Op
    held: tuple[int, ...]


class StageBytes(NamedTuple):
    """Bytes of one rank of a pipeline stage.

    Attributes:
        memory, traffic: as `estimate`, to the byte.
        activations: the most that autograd keeps from forward to backward, inputs kept for recompute excluded.
        peak: the most at one instant of all that is on the device, activations included.
        at_peak: what that is made of, by KINDS.
        moments: over a step of a few micro-batches.
    """

    memory: dict[str, int]
    traffic: dict[str, int]
    activations: int
    peak: int
    at_peak: dict[str, int]
    moments: list[Moment]


class _Watch:
    """Adds what autograd keeps to what the engine allocates."""

    def __init__(self, config: Config, layout: Layout, pp: int, device_type: str) -> None:
        self.spec = rank_spec(config, layout, pp, declare)
        self.costs = trace_layers(config, layout, pp, device_type)
        self.kept: dict[tuple[str, int], int] = {}
        self.live = self.most = 0
        self.moments: list[Moment] = []

    def __call__(self, op: Op, tracker: MemoryTracker) -> None:
        if isinstance(op, (Start, Wait)):
            return
        if isinstance(op, Forward) and op.graph and not self.spec.captures(self.spec.layers[op.layer]):
            self._keep(op, recomputed=False)
        elif isinstance(op, Recompute):
            self._keep(op, recomputed=True)
        now = tracker.now
        self.moments.append(Moment(op, (*(now[kind] for kind in KINDS[:-1]), self.live)))
        if isinstance(op, Backward):
            self.live -= self.kept.pop(op.key, 0)

    def _keep(self, op: Forward | Recompute, recomputed: bool) -> None:
        cost = self.costs[op.layer]
        # a kept input is a checkpoint, unless it has been gathered from its parts; logits are a kind of their own
        own_input = cost.saved_input * (not recomputed or self.spec.partitioned)
        self.kept[op.key] = max(0, sum(cost.saved) + own_input - cost.logits)
        self.live += self.kept[op.key]
        self.most = max(self.most, self.live)

    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: sum(moment.held))


def stage_bytes(config: Config, layout: Layout, pp: int, device_type: str) -> StageBytes:
    """Predict the bytes of the first rank of pipeline stage `pp`; `config` is resolved."""
    few = Few.of(config.parallel.pipeline_schedule, layout, config.micro_batches(layout.dp))
    found = list[tuple[Estimate, _Watch]]()
    for micro_batches in few.played:
        samples = micro_batches * config.training.micro_batch_size * layout.dp
        fewer = dataclasses.replace(config, training=dataclasses.replace(config.training, global_batch_size=samples))
        watch = _Watch(config, layout, pp, device_type)
        staging = device_type == "cpu"
        found.append((estimate(fewer, layout, layout.stage_ranks(pp)[0], staging, watch), watch))
    estimates, watches = [e for e, _ in found], [w for _, w in found]
    peaks = [w.peak() for w in watches]

    def extend(values: list[int]) -> int:
        return round(few.extend(values))

    return StageBytes(
        {kind: extend([e.memory[kind] for e in estimates]) for kind in estimates[0].memory},
        {axis: extend([e.traffic[axis] for e in estimates]) for axis in estimates[0].traffic},
        extend([w.most for w in watches]),
        extend([sum(p.held) for p in peaks]),
        {kind: extend([p.held[n] for p in peaks]) for n, kind in enumerate(KINDS)},
        watches[0].moments,
    )
