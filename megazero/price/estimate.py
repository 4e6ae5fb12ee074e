"""Predicted bytes of one rank: memory by kind, and traffic of an iteration.

The rank's program is interpreted as the engine interprets it, with sizes in place of tensors: each operation enters in
a memory tracker what the engine enters there, and counts what it sends. So the result equals `memory_bytes` and
`traffic_bytes` to the byte. docs/metrics.md has the closed formulas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from megazero.config.schema import BYTES, Config
from megazero.memory.tracker import Allocation, MemoryTracker
from megazero.model.stage import declare
from megazero.plan.flat_layout import Range, partition_numel
from megazero.plan.layers import stage_units
from megazero.plan.operations import (
    Backward,
    BackwardWeights,
    Drop,
    Forward,
    Gather,
    Keep,
    Norm,
    Op,
    Open,
    Ops,
    Rebuild,
    Recompute,
    Recv,
    Reduce,
    ReduceReplicas,
    Send,
    Start,
    SumReplicated,
    SumTied,
    Sync,
    Update,
    Wait,
    inner,
)
from megazero.plan.parameters import unit_layout
from megazero.plan.program import Program, program
from megazero.plan.rank_spec import rank_spec
from megazero.plan.topology import Layout, ring_bytes
from megazero.plan.zero_policy import COPY_DEPTH, persistent_gradients, plan_buckets
from megazero.price.trace import trace_layers

NUMBER = 8  # bytes of a number that ranks agree on: fp64


def state_bytes(precision: str, trains: bool = True) -> tuple[int, int]:
    """Bytes per element of one optimizer state, and of all: a master copy of 16-bit weights; to train, two moments."""
    each = max(4, BYTES[precision])
    return each, each * ((BYTES[precision] != each) + 2 * trains)


class Estimate(NamedTuple):
    """Bytes of one rank; keys as in metrics.jsonl."""

    memory: dict[str, int]
    traffic: dict[str, int]


Watch = Callable[[Op, MemoryTracker], None]


def estimate(
    config: Config, layout: Layout, rank: int = 0, needs_staging_buffer: bool = True, watch: Watch | None = None
) -> Estimate:
    """Predict the bytes of `rank` in one iteration.

    Args:
        config: resolved.
        needs_staging_buffer: True as on gloo and CPUs, where a reduce-scatter needs a staging buffer and a copy to the
            host does not; False as on NCCL and GPUs, where it is the other way round.
        watch: called with every operation of the step once it has been carried out.
    """
    return _Pricer(config, layout, rank, needs_staging_buffer, watch).run()


def predicted_after(
    config: Config, layout: Layout, rank: int, needs_staging_buffer: bool, num_ops: int
) -> MemoryTracker:
    """Predict the memory tracker of `rank` when the first `num_ops` operations of a step have been carried out."""
    pricer = _Pricer(config, layout, rank, needs_staging_buffer)
    step = pricer.at_rest()
    pricer.execute([*step.gradients, *step.update][:num_ops])
    return pricer.tracker


class _Pricer:
    """Memory and traffic of every operation. Operations without a method here cost nothing of either."""

    def __init__(
        self, config: Config, layout: Layout, rank: int, needs_staging_buffer: bool, watch: Watch | None = None
    ) -> None:
        training, model, self.activations = config.training, config.model, config.activations
        self.watch = watch
        self.config, self.layout, self.coord, self.needs_staging_buffer = (
            config,
            layout,
            layout.coord(rank),
            needs_staging_buffer,
        )
        layers = declare(model, layout.tp)
        self.spec = rank_spec(config, layout, self.coord.pp, declare)
        self.policy, self.tracker = self.spec.policy, MemoryTracker()
        self.sent: Counter[str] = Counter({"dp": 0, "tp": 0, "pp": 0, "control": 0})
        self.w, self.g = BYTES[training.precision], BYTES[training.grad_dtype]
        self.specs = stage_units(layers, layout, self.coord.pp, training.freeze_parameters)
        self.flats = {name: unit_layout(s, layout.sizes, layout.shard) for name, s in self.specs.items()}
        self.costs = trace_layers(config, layout, self.coord.pp, "cpu" if needs_staging_buffer else "cuda")
        # a block's input and a message between stages: a rank's part of the residual stream
        parts = layout.tp if config.parallel.sequence_parallel else 1
        self.hidden_bytes = training.micro_batch_size * model.seq_length // parts * model.hidden_size * self.w
        parts = layout.tp if self.activations.partition_activations else 1
        self.kept_bytes = partition_numel(self.hidden_bytes // self.w, parts) * self.w
        self.persistent = persistent_gradients(
            self.policy, self.activations.contiguous_checkpointing, config.micro_batches(layout.dp)
        )
        self.allocations: dict[object, Allocation] = {}
        self.price: dict[type, Callable[[Any], None]] = {
            Forward: self._forward,
            Recompute: self._recompute,
            Backward: self._backward,
            BackwardWeights: self._backward_weights,
            Keep: self._keep,
            Drop: self._drop,
            Rebuild: self._rebuild,
            Recv: self._recv,
            Send: self._send,
            Gather: self._gather,
            Sync: self._gather,
            Open: self._open,
            Reduce: self._reduce,
            ReduceReplicas: self._reduce_replicas,
            SumReplicated: self._sum_replicated,
            SumTied: self._sum_tied,
            Norm: self._norm,
            Update: self._update,
        }

    def at_rest(self) -> Program:
        """Enter what is held between steps; return the step."""
        micro_batches = self.config.micro_batches(self.layout.dp)
        step = program(self.spec, self.config.schedule, micro_batches)
        parameters, optimizer = self._states()
        self.tracker.enter("parameters", parameters)
        self.tracker.enter("optimizer", optimizer)
        tables = max(cost.tables for cost in self.costs.values())
        self.tracker.enter("buffers", step.arena_numel * self.w + self._buckets() + tables)
        for name, unit in self.spec.units.items():
            self.tracker.enter(self._unsharded_kind, unit.trains * self.persistent.unsharded * unit.numel * self.g)
            self.tracker.enter("gradients", unit.trains * self.persistent.sharded * self._owned(name) * self.g)
        self.tracker.enter("buffers", self._graphs(step))
        on_host = self.activations.checkpoint_in_cpu
        self.tracker.enter("host" if on_host else "buffers", step.num_slots * self.kept_bytes)
        self.tracker.enter("buffers", 2 * COPY_DEPTH * self.kept_bytes * (on_host and not self.needs_staging_buffer))
        return step

    def run(self) -> Estimate:
        step = self.at_rest()
        parameters, optimizer = self.tracker.now["parameters"], self.tracker.now["optimizer"]
        self.execute(step.gradients)
        gradients = self.tracker.now["gradients"]
        # targets, and losses
        self._agree(self.layout.dp, self.layout.dp, self.layout.pp, numbers=self.config.data.named_corpora)
        self.execute(step.update)
        peak = {kind: self.tracker.peak[kind] for kind in ("activation_checkpoints", "buffers", "logits")}
        memory = {"parameters": parameters, "optimizer": optimizer, "gradients": gradients, **peak}
        return Estimate(memory | {"peak": self.tracker.total_peak, "host": self.tracker.peak["host"]}, dict(self.sent))

    def execute(self, ops: Ops) -> None:
        """Price operations in order. What an asynchronous operation holds is free when it has been waited for."""
        for op in ops:
            about: Op = inner(op)
            if not isinstance(op, Wait) and type(about) in self.price:
                self.price[type(about)](about)
            if not isinstance(op, Start):
                self.allocations.pop(about, None)
            if self.watch is not None:
                self.watch(op, self.tracker)

    # -- at rest

    def _states(self) -> tuple[int, int]:
        total = sum(unit.numel for unit in self.spec.units.values())
        owned = sum(map(self._owned, self.spec.units))
        kept = owned if self.policy.parameters else total
        return kept * self.w, owned * state_bytes(self.config.training.precision, self.config.trains)[1]

    def _owned(self, unit: str) -> int:
        return self.spec.units[unit].numel // (self.layout.shard if self.policy.optimizer else 1)

    def _buckets(self) -> int:
        """Bytes of the reduce buckets with their scratch."""
        sizes, shards, zero = [u.numel for u in self.spec.units.values()], self.layout.shard, self.config.zero
        sharded = sizes if self.policy.optimizer and self.config.trains else []
        buckets = plan_buckets(zero.reduce_bucket_size, sharded, shards, zero.overlap_comm)
        self.columns = buckets.columns
        scratch = buckets.columns * (shards - 1 if self.needs_staging_buffer else shards > 1)
        packed = buckets.columns * shards * buckets.packs
        return buckets.slots * (scratch + packed) * self.g

    def _graphs(self, step: Program) -> int:
        """Bytes that CUDA graphs hold: per slot the blocks' inputs, saved tensors and last output; buffers of all."""
        if not self.spec.graphs:
            return 0
        captured = [[layer for layer in chunk if self.spec.captures(layer)] for chunk in self.spec.chunks]
        total = self.hidden_bytes
        for layers, live in zip(captured, step.live_by_chunk, strict=True):
            saved = sum(sum(self.costs[layer.name].saved) for layer in layers)
            total += live * (saved + (len(layers) + 1) * self.hidden_bytes) if layers else 0
        numel = max((self.spec.units[layer.units[0]].numel for layers in captured for layer in layers), default=0)
        return total + numel * self.g

    # -- layers

    def _forward(self, op: Forward) -> None:
        cost = self.costs[op.layer]
        self.sent["tp"] += cost.forward
        if cost.logits:
            logits = self.tracker.allocate("logits", cost.logits)
            if op.graph:
                self.allocations["logits", op.micro_batch] = logits

    def _recompute(self, op: Recompute) -> None:
        self.sent["tp"] += self.costs[op.layer].recompute

    def _backward(self, op: Backward) -> None:
        cost = self.costs[op.layer]
        self.sent["tp"] += cost.backward
        if cost.logits:
            self.allocations.pop(("logits", op.micro_batch))
        if not op.weights:
            self.allocations["queued", op.key] = self.tracker.allocate("buffers", cost.queued)

    def _backward_weights(self, op: BackwardWeights) -> None:
        self.allocations.pop(("queued", op.key))

    # -- kept inputs: those on the host are counted at rest; in an arena they were buffers until they are kept

    def _keep(self, op: Keep) -> None:
        if not self.activations.checkpoint_in_cpu:
            self.tracker.enter("buffers", -self.kept_bytes * (op.slot is not None))
            self.allocations[op.key] = self.tracker.allocate("activation_checkpoints", self.kept_bytes)

    def _drop(self, op: Drop) -> None:
        if not self.activations.checkpoint_in_cpu:
            self.allocations.pop(op.key)
            self.tracker.enter("buffers", self.kept_bytes * (op.slot is not None))

    def _rebuild(self, op: Rebuild) -> None:
        self.sent["tp"] += ring_bytes(self.kept_bytes * self.layout.tp, self.layout.tp)

    # -- between stages

    def _recv(self, op: Recv | Send) -> None:
        self.allocations[op] = self.tracker.allocate("buffers", self.hidden_bytes)

    def _send(self, op: Send) -> None:
        self._recv(op)
        self.sent["pp"] += self.hidden_bytes

    # -- units

    def _gather(self, op: Gather | Sync) -> None:
        self.sent["dp"] += ring_bytes(self.spec.units[op.unit].numel * self.w, self.layout.shard)

    @property
    def _unsharded_kind(self) -> str:
        return "buffers" if self.policy.optimizer else "gradients"

    def _open(self, op: Open) -> None:
        size = 0 if self.persistent.unsharded else self.spec.units[op.unit].numel * self.g
        self.allocations["unsharded", op.unit] = self.tracker.allocate(self._unsharded_kind, size)

    def _reduce(self, op: Reduce) -> None:
        """An unpacked unit's gradient is freed when the reduction has been waited for; a packed one's at once."""
        num_bytes, unsharded = self.spec.units[op.unit].numel * self.g, self.allocations.pop(("unsharded", op.unit))
        if not self.policy.optimizer:
            self.sent["dp"] += ring_bytes(num_bytes, self.layout.shard, passes=2)
            self.allocations["sharded", op.unit] = unsharded
            return
        if ("sharded", op.unit) not in self.allocations:
            size = 0 if self.persistent.sharded else self._owned(op.unit) * self.g
            self.allocations["sharded", op.unit] = self.tracker.allocate("gradients", size)
        self.sent["dp"] += ring_bytes(num_bytes, self.layout.shard)
        if self._owned(op.unit) <= self.columns:
            self.allocations[op] = unsharded

    def _reduce_replicas(self, op: ReduceReplicas) -> None:
        self.sent["dp"] += ring_bytes(self._owned(op.unit) * self.g, self.layout.replica, passes=2)

    def _sum_replicated(self, op: SumReplicated) -> None:
        flat, owned = self.flats[op.unit], Range(0, self.spec.units[op.unit].numel)
        if self.policy.optimizer:
            owned = flat.owned(self.layout.shard_rank(self.coord), self.layout.shard)
        for summed in flat.summed("tp", self.config.parallel.sequence_parallel):
            self.sent["tp"] += ring_bytes(summed.within(owned).numel * self.g, self.layout.tp, passes=2)

    def _sum_tied(self, op: SumTied) -> None:
        self.sent["pp"] += ring_bytes(self._owned(op.unit) * self.g, 2, passes=2)

    def _norm(self, op: Norm) -> None:
        self._agree(self.layout.tp, self.layout.pp, self.layout.shard if self.policy.optimizer else 1)

    def _agree(self, *sizes: int, numbers: int = 1) -> None:
        """Count numbers that ranks agree on, over axes of these sizes."""
        self.sent["control"] += sum(ring_bytes(numbers * NUMBER, size, passes=2) for size in sizes)

    def _update(self, op: Update) -> None:
        master, _ = state_bytes(self.config.training.precision)
        self.tracker.allocate("buffers", master * self._owned(op.unit) if self.g < master else 0).end()
        self.allocations.pop(("sharded", op.unit)).end()
