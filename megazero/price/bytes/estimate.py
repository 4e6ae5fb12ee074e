"""Predicted bytes of one rank: memory by kind, and traffic of an iteration.

The rank's program is interpreted as the engine interprets it, with the sizes of `plan.sizes` in place of tensors: each
operation enters in a memory tracker what the engine enters there, and counts what it sends. So the result equals
`memory_bytes` and `traffic_bytes` to the byte. docs/metrics.md has the closed formulas.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megazero.config.schema import Config
from megazero.memory.tracker import Allocation, MemoryTracker
from megazero.model.stage import declare
from megazero.plan.layout.topology import Layout
from megazero.plan.program.operations import (
    Backward,
    BackwardWeights,
    Drop,
    Forward,
    Gather,
    Keep,
    Op,
    Open,
    Ops,
    Recompute,
    Recv,
    Reduce,
    Send,
    Start,
    Sync,
    Update,
    Wait,
    inner,
)
from megazero.plan.program.program import Program, program
from megazero.plan.program.rank_spec import rank_spec
from megazero.plan.sizes import PASSES, StepSizes
from megazero.price.trace.trace import layer_sizes

PEAKS = ("activation_checkpoints", "buffers", "logits")  # kinds of which metrics.jsonl has the peak
KINDS = ("parameters", "optimizer", "gradients", "activation_checkpoints", "buffers", "logits", "activations")
STEADY = ("1f1b", "interleaved")  # schedules that repeat themselves after the first round of the pipeline


class Estimate(NamedTuple):
    """Bytes of one rank; keys as in metrics.jsonl."""

    memory: dict[str, int]
    traffic: dict[str, int]


class Moment(NamedTuple):
    """Bytes on a rank's device when an operation has been carried out: by kind, in the order of KINDS."""

    op: Op
    held: tuple[int, ...]


class StageBytes(NamedTuple):
    """Bytes of one rank of a pipeline stage.

    Attributes:
        memory, traffic: as `estimate`, to the byte.
        activations: the most that autograd keeps from forward to backward, inputs kept for recompute excluded.
        queued: the most that weight gradients which wait keep.
        peak: the most at one instant of all that is on the device, activations included.
        at_peak: the bytes at that instant, by KINDS.
        numel: elements of its units, padding included.
        gathers: times that a step gathers a unit's weights, of the units of which that is least and most.
        reductions: times that a unit's gradients go round the ring of the ranks that share a copy, at most.
    """

    memory: dict[str, int]
    traffic: dict[str, int]
    activations: int
    queued: int
    peak: int
    at_peak: dict[str, int]
    numel: int
    gathers: tuple[int, int]
    reductions: int


class Few(NamedTuple):
    """Numbers of micro-batches whose steps predict a step of `wanted` of them.

    From a certain number on, every further micro-batch sends as much as the one before, adds no memory and takes as
    long, to less than half a percent of a step. So two of such numbers are enough, and one where `wanted` is small or
    the schedule not one of STEADY.
    """

    wanted: int
    played: tuple[int, ...]

    @classmethod
    def of(cls, schedule: str, layout: Layout, wanted: int) -> Few:
        # at least two: gradients of one micro-batch are not accumulated, and are reduced unit by unit
        least = max(2, (1 if layout.chunks == 1 else 2) * layout.pp + wanted % layout.pp)
        if schedule not in STEADY or least + least + layout.pp >= wanted:
            return cls(wanted, (wanted,))
        return cls(wanted, (least, least + layout.pp))

    def extend(self, found: Sequence[float]) -> float:
        """Return the value at `wanted`, given those at `played`: on the line through them."""
        if len(found) == 1:
            return found[0]
        first, second = self.played
        return found[0] + (found[1] - found[0]) * (self.wanted - first) / (second - first)


def estimate(config: Config, layout: Layout, rank: int = 0, needs_staging_buffer: bool = True) -> Estimate:
    """Predict the bytes of `rank` in one iteration.

    Args:
        config: resolved.
        needs_staging_buffer: True as on gloo and CPUs, where a reduce-scatter needs a staging buffer and a copy to the
            host does not; False as on NCCL and GPUs, where it is the other way round.
    """
    return _Walk(config, layout, rank, needs_staging_buffer).run()


def predicted_after(
    config: Config, layout: Layout, rank: int, needs_staging_buffer: bool, num_ops: int
) -> MemoryTracker:
    """Predict the memory tracker of `rank` when the first `num_ops` operations of a step have been carried out."""
    walk = _Walk(config, layout, rank, needs_staging_buffer)
    step = walk.at_rest()
    walk.execute([*step.gradients, *step.update][:num_ops])
    return walk.tracker


@functools.lru_cache(maxsize=64)
def stage_bytes(config: Config, layout: Layout, pp: int, device_type: str) -> StageBytes:
    """Predict the bytes of the first rank of pipeline stage `pp`; `config` is resolved."""
    few = Few.of(config.parallel.pipeline_schedule, layout, config.micro_batches(layout.dp))
    walks = [_of_stage(config, layout, pp, device_type, micro_batches) for micro_batches in few.played]
    estimates = [walk.run() for walk in walks]

    def extend(values: list[int]) -> int:
        return round(few.extend(values))

    return StageBytes(
        {kind: extend([e.memory[kind] for e in estimates]) for kind in estimates[0].memory},
        {axis: extend([e.traffic[axis] for e in estimates]) for axis in estimates[0].traffic},
        extend([walk.activations.most for walk in walks]),
        extend([walk.queued.most for walk in walks]),
        extend([walk.peak for walk in walks]),
        {kind: extend([walk.at_peak[n] for walk in walks]) for n, kind in enumerate(KINDS)},
        sum(walks[0].sizes.numel.values()),
        (extend([min(walk.gathers.values(), default=0) for walk in walks]), extend([_most(w.gathers) for w in walks])),
        extend([_most(walk.reductions) for walk in walks]),
    )


def _most(times: Counter[str]) -> int:
    return max(times.values(), default=0)


def stage_moments(config: Config, layout: Layout, pp: int, device_type: str) -> list[Moment]:
    """Predict the bytes of the first rank of pipeline stage `pp` after every operation of a few micro-batches."""
    few = Few.of(config.parallel.pipeline_schedule, layout, config.micro_batches(layout.dp))
    found = list[Moment]()
    walk = _of_stage(config, layout, pp, device_type, few.played[0])
    walk.watch = lambda op: found.append(Moment(op, walk.held()))
    walk.run()
    return found


def _of_stage(config: Config, layout: Layout, pp: int, device_type: str, micro_batches: int) -> _Walk:
    samples = micro_batches * config.training.micro_batch_size * layout.dp
    fewer = dataclasses.replace(config, training=dataclasses.replace(config.training, global_batch_size=samples))
    return _Walk(fewer, layout, layout.stage_ranks(pp)[0], device_type == "cpu")


class _Level:
    """Bytes now, and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)


class _Walk:
    """A step, operation by operation: the sizes of `plan.sizes` over time.

    Attributes:
        activations: that autograd keeps from forward to backward, inputs kept for recompute excluded.
        queued: that weight gradients which wait keep.
        peak, at_peak: the most at one instant of all that is on the device, and of which KINDS.
        watch: called when an operation has been carried out; a backward's activations are freed after that.
    """

    def __init__(self, config: Config, layout: Layout, rank: int, needs_staging_buffer: bool) -> None:
        self.config, self.needs_staging_buffer = config, needs_staging_buffer
        coord = layout.coord(rank)
        self.spec = rank_spec(config, layout, coord.pp, declare)
        layers = layer_sizes(config, layout, self.spec, "cpu" if needs_staging_buffer else "cuda")
        self.sizes = StepSizes(config, layout, self.spec, layers, layout.places(coord))
        self.tracker = MemoryTracker()
        self.traffic: Counter[str] = Counter({"dp": 0, "tp": 0, "pp": 0, "control": 0})
        self.allocations: dict[object, Allocation] = {}
        self.saved: dict[tuple[str, int], int] = {}
        self.activations, self.queued = _Level(), _Level()
        self.peak, self.at_peak = 0, (0,) * len(KINDS)
        self.tracker.watch = self._compare
        self.watch: Callable[[Op], None] | None = None
        self.gathers, self.reductions = Counter[str](), Counter[str]()  # unit -> passes of its ring
        self.on_device = not config.activations.checkpoint_in_cpu  # kept inputs
        self.enter: dict[type, Callable[[Any], None]] = {
            Forward: self._forward,
            Recompute: self._recompute,
            Backward: self._backward,
            BackwardWeights: self._backward_weights,
            Keep: self._keep,
            Drop: self._drop,
            Recv: self._message,
            Send: self._message,
            Gather: self._gather,
            Sync: self._gather,
            Open: self._open,
            Reduce: self._reduce,
            Update: self._update,
        }

    def at_rest(self) -> Program:
        """Enter the bytes that are held between steps; return the step."""
        sizes = self.sizes
        step = program(self.spec, self.config.schedule, self.config.micro_batches(sizes.layout.dp))
        for kind, num_bytes in sizes.at_rest().items():
            self.tracker.enter(kind, num_bytes)
        self.tracker.enter("buffers", sizes.buffers_at_rest(step.arena_numel, self.needs_staging_buffer))
        self.tracker.enter("buffers", sizes.graphs_at_rest(step.live_by_chunk))
        for name in self.spec.trained_units:
            if sizes.persistent[name].unsharded:
                self.tracker.enter(self._unsharded_kind(name), sizes.gradients(name))
            if sizes.persistent[name].sharded:
                self.tracker.enter("gradients", sizes.owned_gradients(name))
        self.tracker.enter("buffers" if self.on_device else "host", step.num_slots * sizes.kept)
        if not (self.on_device or self.needs_staging_buffer):
            self.tracker.enter("buffers", sizes.copies_at_rest())
        return step

    def run(self) -> Estimate:
        step = self.at_rest()
        now, peak = self.tracker.now, self.tracker.peak
        memory = {kind: now[kind] for kind in ("parameters", "optimizer")}
        self.execute(step.gradients)
        memory["gradients"] = now["gradients"]
        for kind, num_bytes in self.sizes.sent(self.sizes.agreed()):
            self.traffic[kind] += num_bytes
        self.execute(step.update)
        memory |= {kind: peak[kind] for kind in PEAKS}
        return Estimate(memory | {"peak": self.tracker.total_peak, "host": peak["host"]}, dict(self.traffic))

    def execute(self, ops: Ops) -> None:
        """Walk through operations in order; the buffers of an asynchronous one are free when it has been waited for."""
        for op in ops:
            about: Op = inner(op)
            if not isinstance(op, Wait):
                for kind, num_bytes in self.sizes.traffic(about):
                    self.traffic[kind] += num_bytes
                if type(about) in self.enter:
                    self.enter[type(about)](about)
            if not isinstance(op, Start):
                self.allocations.pop(about, None)
            if self.watch is not None and not isinstance(op, (Start, Wait)):
                self.watch(op)
            if isinstance(op, Backward):
                self.activations.add(-self.saved.pop(op.key, 0))

    def held(self) -> tuple[int, ...]:
        """Return the bytes on the device now, by KINDS."""
        return (*(self.tracker.now[kind] for kind in KINDS[:-1]), self.activations.now)

    def _compare(self, _kind: str = "") -> None:
        now = self.tracker.total + self.activations.now
        if now > self.peak:
            self.peak, self.at_peak = now, self.held()

    # -- layers

    def _forward(self, op: Forward) -> None:
        layer = self.sizes.layers[op.layer]
        if op.graph and not self.spec.captures(self.spec.layers[op.layer]):
            self._save(op, layer.kept(own_input=True))
        if layer.logits:
            logits = self.tracker.allocate("logits", layer.logits)
            if op.graph:
                self.allocations["logits", op.micro_batch] = logits

    def _recompute(self, op: Recompute) -> None:
        # its own input is the kept one, and counted there, unless it has been gathered from its parts
        self._save(op, self.sizes.layers[op.layer].kept(own_input=self.spec.partitioned))

    def _save(self, op: Forward | Recompute, num_bytes: int) -> None:
        self.saved[op.key] = num_bytes
        self.activations.add(num_bytes)
        self._compare()

    def _backward(self, op: Backward) -> None:
        layer = self.sizes.layers[op.layer]
        if layer.logits:
            self.allocations.pop(("logits", op.micro_batch))
        if not op.weights:
            self.queued.add(layer.queued)
            self.allocations["queued", op.key] = self.tracker.allocate("buffers", layer.queued)

    def _backward_weights(self, op: BackwardWeights) -> None:
        self.queued.add(-self.allocations.pop(("queued", op.key)).num_bytes)

    # -- kept inputs: those on the host are counted at rest

    def _keep(self, op: Keep) -> None:
        if self.on_device:
            if op.slot is not None:  # of an arena, whose free slots are buffers
                self.tracker.enter("buffers", -self.sizes.kept)
            self.allocations[op.key] = self.tracker.allocate("activation_checkpoints", self.sizes.kept)

    def _drop(self, op: Drop) -> None:
        if self.on_device:
            self.allocations.pop(op.key)
            if op.slot is not None:
                self.tracker.enter("buffers", self.sizes.kept)

    # -- between stages

    def _message(self, op: Recv | Send) -> None:
        self.allocations[op] = self.tracker.allocate("buffers", self.sizes.hidden)

    # -- units

    def _unsharded_kind(self, unit: str) -> str:
        return "buffers" if self.spec.policy(unit).optimizer else "gradients"

    def _gather(self, op: Gather | Sync) -> None:
        self.gathers[op.unit] += 1

    def _open(self, op: Open) -> None:
        size = 0 if self.sizes.persistent[op.unit].unsharded else self.sizes.gradients(op.unit)
        self.allocations["unsharded", op.unit] = self.tracker.allocate(self._unsharded_kind(op.unit), size)

    def _reduce(self, op: Reduce) -> None:
        """Free an unpacked unit's gradient when the reduction has been waited for, a packed one's at once."""
        sizes, unsharded = self.sizes, self.allocations.pop(("unsharded", op.unit))
        self.reductions[op.unit] += sum(PASSES[move.collective] for move in sizes.moves(op))
        if not self.spec.policy(op.unit).optimizer:
            self.allocations["sharded", op.unit] = unsharded
            return
        if ("sharded", op.unit) not in self.allocations:
            size = 0 if sizes.persistent[op.unit].sharded else sizes.owned_gradients(op.unit)
            self.allocations["sharded", op.unit] = self.tracker.allocate("gradients", size)
        if sizes.owned(op.unit) <= sizes.buckets[self.spec.units[op.unit].group].columns:
            self.allocations[op] = unsharded

    def _update(self, op: Update) -> None:
        self.tracker.allocate("buffers", self.sizes.cast_gradients(op.unit)).end()
        self.allocations[op] = self.allocations.pop(("sharded", op.unit))
