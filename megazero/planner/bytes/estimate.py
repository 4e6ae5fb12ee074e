"""Predicted bytes of one rank: memory by kind, and traffic of an iteration.

The estimate executes the rank's program with sizes (`planner.sizes`) in place of tensors. Each operation makes the same
allocations in a memory tracker as in the engine, and its traffic is counted. So the result equals a run's
`memory_bytes` and `traffic_bytes` to the byte. docs/metrics.md has the closed formulas.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megazero.engine.memory.tracker import Allocation, MemoryTracker
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import KINDS_OF_TRAFFIC, Layout
from megazero.engine.plan.program.operations import (
    Backward,
    BackwardWeights,
    Drop,
    FetchGradient,
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
    StoreGradient,
    Sync,
    Update,
    Wait,
    inner,
)
from megazero.engine.plan.program.program import Program, program
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.engine.plan.schedule.schedules import SCHEDULES
from megazero.flags.config import Config
from megazero.flags.flag_names import with_values
from megazero.planner.bytes.rank_parts import rank_parts
from megazero.planner.bytes.statistics import StatisticsSizes
from megazero.planner.layouts import rank_places
from megazero.planner.sizes import PASSES, Moved, StepSizes
from megazero.planner.state_shares import saved_bytes
from megazero.planner.trace.trace import layer_sizes

PEAKS = ("activation_checkpoints", "buffers", "logits")  # kinds whose peak is in metrics.jsonl
KINDS = ("parameters", "optimizer", "gradients", "activation_checkpoints", "buffers", "logits", "activations")


class Estimate(NamedTuple):
    """Bytes of one rank; keys as in metrics.jsonl."""

    memory: dict[str, int]
    traffic: dict[str, int]


class Moment(NamedTuple):
    """Bytes on a rank's device after an operation, in the order of KINDS."""

    op: Op
    held: tuple[int, ...]


class StageBytes(NamedTuple):
    """Bytes of one rank of a pipeline stage: of the fullest.

    Attributes:
        memory, traffic: as `estimate`.
        activations: peak of autograd's saved tensors, without inputs kept for recompute.
        queued: peak of the factors of queued weight gradients (zero-bubble).
        peak: peak of everything on the device, activations included.
        at_peak: the bytes at that instant, by KINDS.
        numel: elements of the rank's units, padding included.
        gathers: the least and the most times that a step gathers a unit's weights.
        reductions: the most ring passes over a unit's gradients in its sharding group: 2 for an all-reduce, 1 for a
            reduce-scatter.
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
    """Steps of `counts` micro-batches are simulated, and a step of `wanted` is extrapolated from them.

    Under periodic schedules, every further micro-batch sends the same bytes, adds no memory and takes the same
    time, up to one percent of a step. So two counts are enough. If `wanted` is small, the only count is `wanted`.
    """

    wanted: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, schedule: str, layout: Layout, wanted: int) -> Few:
        # At least two, because gradients of one micro-batch are not accumulated but reduced unit by unit. More than the
        # forwards before a rank's first backward: it holds most in the first forward after that.
        least = max(2, (1 if layout.chunks == 1 else 2) * layout.pp + (wanted % layout.pp or layout.pp))
        if schedule not in SCHEDULES or not SCHEDULES[schedule].periodic or least + least + layout.pp >= wanted:
            return cls(wanted, (wanted,))
        return cls(wanted, (least, least + layout.pp))

    def extend(self, found: Sequence[Any]) -> Any:
        """Return the value at `wanted`, linear in the values at `counts`: a number, or a dict or tuple of numbers."""
        one, *others = found
        if not others:
            return one
        if isinstance(one, dict):
            return type(one)((key, self.extend([each[key] for each in found])) for key in one)
        if isinstance(one, tuple):
            values = [self.extend(both) for both in zip(*found, strict=True)]
            return type(one)(*values) if hasattr(one, "_fields") else type(one)(values)
        first, second = self.counts
        value = one + (others[0] - one) * (self.wanted - first) / (second - first)
        return round(value) if isinstance(one, int) else value


def estimate(config: Config, layout: Layout, rank: int = 0, needs_staging_buffer: bool = True) -> Estimate:
    """Predict the bytes of `rank` in one iteration.

    Args:
        config: resolved.
        needs_staging_buffer: True on CPUs: gloo's reduce-scatter needs a staging buffer. False on GPUs: NCCL's needs
            none, but a copy to the host does.
    """
    found = _Walk(config, layout, rank, needs_staging_buffer).run()
    return Estimate(found.memory, found.traffic)


def predicted_after(
    config: Config, layout: Layout, rank: int, needs_staging_buffer: bool, num_ops: int
) -> MemoryTracker:
    """Predict the memory tracker of `rank` after the first `num_ops` operations of a step."""
    walk = _Walk(config, layout, rank, needs_staging_buffer)
    step = walk.at_rest()
    walk.execute([*step.gradients, *step.update][:num_ops])
    return walk.tracker


@functools.lru_cache(maxsize=64)
def stage_bytes(config: Config, layout: Layout, pp: int, device_type: str) -> StageBytes:
    """Predict the bytes of the fullest rank of pipeline stage `pp`; `config` is resolved."""
    few = Few.of(config.parallel.pipeline_schedule, layout, config.micro_batches(layout.dp))
    found = [_of_stage(config, layout, pp, device_type=device_type, micro_batches=count).run() for count in few.counts]
    return StageBytes(*few.extend(found))


def stage_moments(config: Config, layout: Layout, pp: int, device_type: str) -> list[Moment]:
    """Predict the bytes of the fullest rank of pipeline stage `pp` after every operation of a few micro-batches."""
    few = Few.of(config.parallel.pipeline_schedule, layout, config.micro_batches(layout.dp))
    found = list[Moment]()
    walk = _of_stage(config, layout, pp, device_type=device_type, micro_batches=few.counts[0])
    walk.watch = lambda op: found.append(Moment(op, walk.held()))
    walk.run()
    return found


def _of_stage(config: Config, layout: Layout, pp: int, device_type: str, micro_batches: int) -> _Walk:
    samples = micro_batches * config.training.micro_batch_size * layout.dp
    return _Walk(
        with_values(config, {"global-batch-size": samples}), layout, _fullest(config, layout, pp), device_type == "cpu"
    )


def _fullest(config: Config, layout: Layout, pp: int) -> int:
    """Return the rank of a pipeline stage that owns most elements; the first, if they own as many."""
    ranks, spec = layout.stage_ranks(pp), rank_spec(config, layout, pp, declare)
    if not config.optimizer.rules.matrices.whole_matrices:
        return ranks[0]

    def owned(rank: int) -> int:
        places = rank_places(layout, rank)
        return sum(unit.owned[places[spec.groups[unit.group].axis]].numel for unit in spec.units.values())

    return max(ranks, key=owned)


def staged_bytes(config: Config, layout: Layout, rank: int) -> int:
    """Return the bytes of the copies that a rank's checkpoints in memory are written from."""
    if not (config.checkpoint.memory_checkpoint_interval and config.trains):
        return 0
    parts = rank_parts(config, layout, rank, declare)
    return saved_bytes(config, ((part.spec, part.stop - part.start) for part in parts))


class _Level:
    """Bytes now, and their peak."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


class _Walk:
    """A step, operation by operation: the sizes of `planner.sizes` over time.

    Attributes:
        activations, queued, peak: as in `StageBytes`.
        at_peak: bytes at the peak, by KINDS.
        watch: called after each operation, before the activations of a backward are freed.
    """

    def __init__(self, config: Config, layout: Layout, rank: int, needs_staging_buffer: bool) -> None:
        self.config, self.needs_staging_buffer = config, needs_staging_buffer
        coord = layout.coord(rank)
        self.spec = rank_spec(config, layout, coord.pp, declare)
        layers = layer_sizes(
            config, layout, self.spec, device_type="cpu" if needs_staging_buffer else "cuda", cp_rank=coord.cp
        )
        self.sizes = StepSizes(
            config=config, layout=layout, spec=self.spec, layers=layers, places=rank_places(layout, rank)
        )
        self.statistics = StatisticsSizes(config, layout, coord, self.sizes.rates.weights)
        self.tracker = MemoryTracker()
        self.traffic: Counter[str] = Counter(dict.fromkeys(KINDS_OF_TRAFFIC, 0))
        self.allocations: dict[object, Allocation] = {}
        self.saved: dict[tuple[str, int], int] = {}
        self.activations, self.queued = _Level(), _Level()
        self.peak, self.at_peak = 0, (0,) * len(KINDS)
        self.tracker.watch = self._compare
        self.watch: Callable[[Op], None] | None = None
        self.gathers, self.reductions = Counter[str](), Counter[str]()  # unit -> ring passes over its elements
        self.on_device = not config.activations.checkpoint_in_cpu  # inputs kept for recompute
        self.staged = staged_bytes(config, layout, rank)
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
            StoreGradient: self._store_gradient,
            FetchGradient: self._fetch_gradient,
            Update: self._update,
        }

    def at_rest(self) -> Program:
        """Allocate the memory that is held between steps, and return the step."""
        sizes = self.sizes
        step = program(self.spec, self.config.schedule, self.config.micro_batches(sizes.layout.dp))
        for kind, num_bytes in sizes.at_rest().items():
            self.tracker.enter(kind, num_bytes)
        self.tracker.enter("buffers", sizes.buffers_at_rest(step.arena_numel, self.needs_staging_buffer))
        for name in self.spec.trained_units:
            if sizes.persistent[name].unsharded:
                self.tracker.enter(self._unsharded_kind(name), sizes.gradients(name))
            if sizes.persistent[name].sharded:
                self.tracker.enter("gradients", sizes.owned_gradients(name))
        self.tracker.enter("buffers" if self.on_device else "host", step.num_slots * sizes.kept)
        self.tracker.enter("host", self.staged)
        if not (self.on_device or self.needs_staging_buffer):
            self.tracker.enter("buffers", sizes.copies_at_rest())
        return step

    def run(self) -> StageBytes:
        step = self.at_rest()
        now, peak = self.tracker.now, self.tracker.peak
        memory = {kind: now[kind] for kind in ("parameters", "optimizer")}
        self.execute(step.gradients)
        memory["gradients"] = now["gradients"]
        self._send(self.sizes.agreed() + self.statistics.reduced())
        self.execute(step.update)
        memory |= {kind: peak[kind] for kind in PEAKS}
        gathers = self.gathers.values()
        return StageBytes(
            memory=memory | {"peak": self.tracker.total_peak, "host": peak["host"], "nvme": now["nvme"]},
            traffic=dict(self.traffic),
            activations=self.activations.peak,
            queued=self.queued.peak,
            peak=self.peak,
            at_peak=dict(zip(KINDS, self.at_peak, strict=True)),
            numel=sum(self.sizes.numel.values()),
            gathers=(min(gathers, default=0), max(gathers, default=0)),
            reductions=max(self.reductions.values(), default=0),
        )

    def execute(self, ops: Ops) -> None:
        """Execute operations in order. The buffers of an asynchronous operation are freed at its Wait."""
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

    def _send(self, moves: tuple[Moved, ...]) -> None:
        for kind, num_bytes in self.sizes.sent(moves):
            self.traffic[kind] += num_bytes

    def held(self) -> tuple[int, ...]:
        """Return the current bytes on the device, by KINDS."""
        return (*(self.tracker.now[kind] for kind in KINDS[:-1]), self.activations.now)

    def _compare(self, _kind: str = "") -> None:
        now = self.tracker.total + self.activations.now
        if now > self.peak:
            self.peak, self.at_peak = now, self.held()

    # -- layers

    def _forward(self, op: Forward) -> None:
        layer = self.sizes.layers[op.layer]
        if self.statistics.observes_scores(op):
            self._send((self.statistics.gathered(),))
            self.tracker.allocate("buffers", self.statistics.scores).end()
        if op.graph:
            self._save(op, layer.kept(own_input=True))
        if layer.routes and self.spec.recomputes(self.spec.layers[op.layer]):
            self.allocations["routes", op.key] = self.tracker.allocate("activation_checkpoints", layer.routes)
        freed = layer.freed if op.graph else 0
        self.activations.add(freed)
        self.tracker.allocate("logits", layer.logits).end()
        self.activations.add(-freed)

    def _recompute(self, op: Recompute) -> None:
        self.allocations.pop(("routes", op.key), None)
        # its input is counted as the kept input, unless it was gathered from parts
        own_input = self.spec.partitioned or self.config.copies_kept_inputs
        self._save(op, self.sizes.layers[op.layer].kept(own_input=own_input))

    def _save(self, op: Forward | Recompute, num_bytes: int) -> None:
        self.saved[op.key] = num_bytes
        self.activations.add(num_bytes)
        self._compare()

    def _backward(self, op: Backward) -> None:
        layer = self.sizes.layers[op.layer]
        if not op.weights:
            self.queued.add(layer.queued)
            self.allocations["queued", op.key] = self.tracker.allocate("buffers", layer.queued)

    def _backward_weights(self, op: BackwardWeights) -> None:
        self.queued.add(-self.allocations.pop(("queued", op.key)).num_bytes)

    # -- kept inputs; those in host memory are allocated in `at_rest`

    def _keep(self, op: Keep) -> None:
        if self.on_device:
            if op.slot is not None:  # the slot was free, and counted as a buffer
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
        """Free a unit's unsharded gradient at the Wait of its reduction; if it was copied into buckets, at once."""
        sizes, unsharded = self.sizes, self.allocations.pop(("unsharded", op.unit))
        self.reductions[op.unit] += sum(PASSES[move.collective] for move in sizes.moves(op))
        if not self.spec.policy(op.unit).optimizer:
            self.allocations["sharded", op.unit] = unsharded
            return
        if ("sharded", op.unit) not in self.allocations:
            size = 0 if sizes.persistent[op.unit].sharded else sizes.owned_gradients(op.unit)
            self.allocations["sharded", op.unit] = self.tracker.allocate("gradients", size)
        if not sizes.packs(op.unit):
            self.allocations[op] = unsharded

    def _store_gradient(self, op: StoreGradient) -> None:
        self.allocations[op] = self.allocations.pop(("sharded", op.unit))

    def _fetch_gradient(self, op: FetchGradient) -> None:
        kind = "sharded" if self.spec.policy(op.unit).optimizer else "unsharded"
        size = self.sizes.owned_gradients(op.unit)
        self.allocations[kind, op.unit] = self.tracker.allocate("gradients", size)

    def _update(self, op: Update) -> None:
        on_host = self.spec.units[op.unit].on_host
        copied = self.statistics.copied(self.sizes.owned(op.unit), self.sizes.rates.state)
        self.tracker.allocate("host" if on_host else "buffers", copied + self.sizes.optimized(op.unit).temporary).end()
        if not on_host:
            self.allocations[op] = self.allocations.pop(("sharded", op.unit))
