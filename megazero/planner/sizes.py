"""The account of a step in integers: bytes that a rank holds, and bytes that each of its operations moves. Pure.

`planner.bytes.estimate` adds them up over a step, `planner.time.costs` divides them by speeds, and `planner.bytes` and
`planner.search` bound memory with them. Sizes in a layer come from its trace (`planner.trace.trace`): `LayerSizes`.
Everything else is derived here.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

from megazero.engine.memory import COPY_DEPTH
from megazero.engine.plan.layout.dealing import rank_tokens
from megazero.engine.plan.layout.flat_layout import Matrices, Range, partition_numel
from megazero.engine.plan.layout.layers import ROUTER_SUMS, LayerKind
from megazero.engine.plan.layout.parameters import unit_layout
from megazero.engine.plan.layout.topology import TRAFFIC, Layout, ring_bytes, unsent
from megazero.engine.plan.layout.zero_policy import Buckets, ShardingGroup, group_of, persistent_gradients, plan_buckets
from megazero.engine.plan.optimizer_sizes import OptimizerSizes, OwnedSizes, block_sizes
from megazero.engine.plan.program.operations import (
    Backward,
    Fetch,
    FetchGradient,
    FetchWeights,
    Forward,
    Gather,
    GradNorm,
    Keep,
    LayerOp,
    Op,
    ReadStates,
    Rebuild,
    Recompute,
    Reduce,
    ReduceReplicas,
    Send,
    StoreGradient,
    SumReplicated,
    SumTied,
    Sync,
    UnitOp,
    Update,
    WriteStates,
)
from megazero.engine.plan.program.rank_spec import RankSpec
from megazero.engine.plan.schedule.schedules import SCHEDULES
from megazero.flags.config import BYTES, Config
from megazero.flags.corpus_flags import named_corpora
from megazero.planner.state_shares import States, host_rate

NUMBER = 8  # bytes of a number that ranks agree on: fp64
Sent = tuple[tuple[str, int], ...]  # (kind of traffic, bytes)
PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}  # collective -> passes of its buffer around a ring


class Moved(NamedTuple):
    """A collective or a message of an operation.

    Attributes:
        axis: an axis or a sub-axis of `Layout`.
        collective: all-gather, reduce-scatter, all-reduce; or message.
        num_bytes: of the whole buffer.
        control: counts as control traffic: numbers that ranks agree on.
        unsent: bytes that the rank does not send; None: as many as every other rank.
    """

    axis: str
    collective: str
    num_bytes: int
    control: bool = False
    unsent: int | None = None

    @property
    def kind(self) -> str:
        """The kind of traffic in metrics.jsonl."""
        return "control" if self.control else TRAFFIC.get(self.axis, self.axis)

    def sent(self, ranks: int) -> int:
        """Return the bytes that each of `ranks` ranks of the axis sends."""
        if self.unsent is not None:
            return self.num_bytes - self.unsent if ranks > 1 else 0
        passes = PASSES.get(self.collective)
        return ring_bytes(self.num_bytes, ranks, passes) if passes else self.num_bytes


def agreement(*axes: str, numbers: int = 1) -> tuple[Moved, ...]:
    """Return the all-reduces, one along each axis, by which ranks agree on some numbers."""
    return tuple(Moved(axis, "all-reduce", numbers * NUMBER, control=True) for axis in axes)


def _copied(num_bytes: int) -> Moved:
    """Return a copy between the device and host memory."""
    return Moved("pcie", "message", num_bytes)


def _filed(num_bytes: int) -> Moved:
    """Return a read or a write of a file."""
    return Moved("nvme", "message", num_bytes)


class LayerSizes(NamedTuple):
    """Bytes of one layer and micro-batch on one rank, as traced.

    Traffic is axis -> bytes that this rank sends under a ring algorithm.
    """

    forward: Counter[str]
    recompute: Counter[str]
    backward: Counter[str]
    logits: int  # held in its forward, at most
    queued: int  # held by its queued weight gradients
    saved: tuple[int, ...]  # bytes of every tensor that autograd saves, except the layer's input
    saved_input: int  # bytes of the layer's input, if autograd saves it
    tables: dict[Hashable, int]  # bytes of each table that is allocated at startup; layers share equal tables
    routes: int = 0  # bytes of the choices of experts, held from Forward to Recompute
    freed: int = 0  # bytes that autograd saves in the forward and frees before its end: multi-token prediction

    def kept(self, own_input: bool) -> int:
        """Return the bytes that autograd saves in a forward."""
        return sum(self.saved) + (self.saved_input if own_input else 0)


def hidden_bytes(config: Config, layout: Layout, cp_rank: int = 0) -> int:
    """Return the bytes of a block's input, and of a message between stages: a rank's part of the residual stream."""
    training, model = config.training, config.model
    tokens = rank_tokens(config, layout, cp_rank)
    rows = tokens // layout.tp if config.parallel.sequence_parallel else tokens
    return rows * model.hidden_size * BYTES[training.precision]


def kept_input_bytes(config: Config, layout: Layout, cp_rank: int = 0) -> int:
    """Return the bytes of a block's input that is kept for recompute: with Pa, a rank's part of it."""
    each = BYTES[config.training.precision]
    parts = layout.tp if config.activations.partition_activations else 1
    return partition_numel(hidden_bytes(config, layout, cp_rank) // each, parts) * each


def keys_bytes(config: Config, layout: Layout) -> int:
    """Return the bytes of a micro-batch's keys and values on a rank, in a layer: a message of a ring.

    Values of latent attention count with the width of keys, to which they are padded.
    """
    model, training = config.model, config.training
    tokens = rank_tokens(config, layout)
    return 2 * tokens * max(1, model.query_groups // layout.tp) * model.head_dim * BYTES[training.precision]


def logits_bytes(config: Config, layout: Layout) -> int:
    """Return the least bytes of logits that a rank of the last stage holds, without the vocabulary's padding."""
    training, model, tokens = config.training, config.model, rank_tokens(config, layout)
    chunk = min(config.loss_chunk(kind, layout.tp) or tokens for kind in ("cpu", "cuda"))
    return min(tokens, chunk) * model.vocab_size * BYTES[training.precision] // layout.tp


def elements(kind: LayerKind, layout: Layout, groups: Mapping[str, ShardingGroup]) -> Counter[str]:
    """Return the elements of a layer's units on one rank, by sharding group."""
    found: Counter[str] = Counter()
    for unit, specs in kind.units_of(kind.name).items():
        name = group_of(unit)
        found[name] += unit_layout(specs, layout.sizes, groups[name].shards).numel
    return found


def least_held(config: Config, layout: Layout, numel: Mapping[str, int], blocks: int, last: bool) -> dict[str, int]:
    """Return a lower bound of a rank's bytes by kind, without a trace.

    It adds to the states the larger of two amounts: the gradients (at the end of an iteration), or the inputs of blocks
    and the logits (at the end of a forward pass; of all micro-batches under gpipe). A block always keeps its input, or
    a part of it, for the backward.

    Args:
        numel: sharding group -> elements of the rank's units, at least.
        blocks: number of blocks of the rank.
        last: whether the rank is of the last virtual stage, which has the logits.
    """
    states, training = States.by_group(config, layout), config.training
    held: Counter[str] = Counter()
    for name, count in numel.items():
        held.update(states[name].at_rest(count))
        if states[name].host.part == 1:  # with a smaller fraction, the units may be larger
            held["host"] += states[name].host.of(count)
    if training.freeze_parameters or not config.trains:  # layers before the first trained one keep no input
        return held
    live = config.micro_batches(layout.dp) if SCHEDULES[config.parallel.pipeline_schedule].holds_all else 1
    kept = 0 if config.activations.checkpoint_in_cpu else live * blocks * kept_input_bytes(config, layout)
    gradients = sum(states[name].gradients.of(count) for name, count in numel.items())
    logits = logits_bytes(config, layout) if last else 0
    if gradients > kept + logits:
        return held | {"gradients": gradients}
    return held | {"activations": kept, "logits": logits}


class StepSizes:
    """Sizes of a step of one rank, or of all ranks of a pipeline stage."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        spec: RankSpec,
        layers: Mapping[str, LayerSizes] | None = None,
        places: Mapping[str, int] | None = None,
    ) -> None:
        """Compute the sizes of a resolved configuration.

        Args:
            spec: of the pipeline rank.
            layers: traced sizes of its layers; None if traffic inside layers is not needed.
            places: axis -> the rank's place along it; None: use the mean of ranks that differ.
        """
        self.config, self.layout, self.spec = config, layout, spec
        self.layers, self.places = layers or {}, places
        self.optimizer = OptimizerSizes(config)
        self.rates = self.optimizer.others
        self._owned: dict[str, OwnedSizes] = {}
        cp_rank = places["cp"] if places is not None else 0
        self.hidden, self.kept = hidden_bytes(config, layout, cp_rank), kept_input_bytes(config, layout, cp_rank)
        self.numel = {name: unit.numel for name, unit in spec.units.items()}
        arena, micro_batches = config.activations.contiguous_checkpointing, config.micro_batches(layout.dp)
        self.persistent = {
            name: persistent_gradients(spec.policy(name), arena, micro_batches, unit.on_host)
            for name, unit in spec.units.items()
        }
        self.buckets = {name: self._buckets(name, group) for name, group in spec.groups.items()}
        self._traffic: dict[tuple[type, str], Sent] = {}
        alone = {"pcie": 1, "nvme": 1}
        self.ranks = layout.sizes | {"embedding": 2 if layout.last_pp else 1, "world": layout.world_size} | alone

    def _buckets(self, name: str, group: ShardingGroup) -> Buckets:
        zero, reduces = self.config.zero, group.policy.optimizer and self.config.trains
        ranges = [unit.owned for unit in self.spec.units.values() if reduces and unit.group == name]
        place = self.places[group.axis] if self.places is not None else 0
        return plan_buckets(zero.reduce_bucket_size, ranges, place, zero.overlap_comm)

    def packs(self, unit: str) -> bool:
        """Return whether a unit's gradients are copied into buckets to be reduced."""
        return self.buckets[self.spec.units[unit].group].count(self.spec.units[unit].owned) > 1

    # -- held

    def range(self, unit: str) -> Range | None:
        """Return the range of a unit that this rank owns."""
        return None if self.places is None else self.spec.units[unit].owned[self.places[self.spec.group(unit).axis]]

    def owned(self, unit: str) -> int:
        """Return the elements of a unit that this rank owns."""
        owned = self.range(unit)
        return self.numel[unit] // self.spec.group(unit).parts if owned is None else owned.numel

    def weights(self, unit: str) -> int:
        """Return the bytes of a unit's unsharded weights."""
        return self.numel[unit] * self.rates.weights

    def gradients(self, unit: str) -> int:
        """Return the bytes of a unit's unsharded gradients."""
        return self.numel[unit] * self.rates.gradients

    def owned_gradients(self, unit: str) -> int:
        return self.owned(unit) * self.rates.gradients

    def optimized(self, unit: str) -> OwnedSizes:
        """Return the sizes of the part of a unit that this rank updates."""
        found = self._owned.get(unit)
        if found is None:
            flat, owned = self.spec.units[unit].flat, self.range(unit)
            parts = self.spec.group(unit).parts if owned is None else 1
            found = self.optimizer.owned(flat, owned or Range(0, flat.numel), self.ranks, parts)
            self._owned[unit] = found
        return found

    def at_rest(self) -> dict[str, int]:
        """Return the bytes held between steps, by kind."""
        found: Counter[str] = Counter()
        for unit, numel in self.numel.items():
            found["parameters"] += self.rates.weights * (
                self.owned(unit) if self.spec.policy(unit).parameters else numel
            )
            on_host = self.spec.units[unit].on_host
            if on_host and self.spec.on_disk:
                continue
            for rule, count in self.optimized(unit).by_rule.items():
                rates = self.optimizer.rates[rule]
                rate = host_rate(rates) if on_host else rates.optimizer
                found["host" if on_host else "optimizer"] += int(count * rate)
        if self.spec.on_disk:
            regions = [sum(self.optimized(unit).in_file) for unit in self.numel if self.spec.units[unit].on_host]
            found["nvme"], found["host"] = sum(regions), sum(block_sizes(regions))
        return found

    def buffers_at_rest(self, arena_numel: int, needs_staging_buffer: bool) -> int:
        """Return the bytes of the arena of gathered weights, of reduce buckets and their scratch, and of tables."""
        tables = sum({key: size for layer in self.layers.values() for key, size in layer.tables.items()}.values())
        buckets = 0
        for name, each in self.buckets.items():
            others = self.spec.groups[name].shards - 1
            scratch = each.row * (others if needs_staging_buffer else min(others, 1))
            buckets += each.slots * (scratch + each.packed) * self.rates.gradients
        return arena_numel * self.rates.weights + buckets + tables

    def copies_at_rest(self) -> int:
        """Return the bytes of a GPU's buffers for copies of kept inputs to and from host memory."""
        return 2 * COPY_DEPTH * self.kept

    # -- moved

    def moves(self, op: Op) -> tuple[Moved, ...]:
        """Return the collectives and messages of an operation, except those inside layers, which `traffic` includes."""
        spec = self.spec
        if isinstance(op, (Gather, Sync)):
            return (self._moved(op.unit, "all-gather", self.rates.weights),)
        if isinstance(op, Reduce):
            collective = "reduce-scatter" if spec.policy(op.unit).optimizer else "all-reduce"
            return (self._moved(op.unit, collective, self.rates.gradients),)
        if isinstance(op, ReduceReplicas):
            return (Moved(spec.group(op.unit).replica_axis, "all-reduce", self.owned_gradients(op.unit)),)
        if isinstance(op, SumReplicated):
            return tuple(Moved("tp", "all-reduce", n * self.rates.gradients) for n in self._summed(op.unit))
        if isinstance(op, SumTied):
            return (Moved("embedding", "all-reduce", self.owned_gradients(op.unit)),)
        if isinstance(op, Update):
            return tuple(self._moved_by_update(op.unit))
        if isinstance(op, GradNorm):
            axes = [group.norm_axis for group in spec.groups.values() if group.norm_axis]
            return agreement("tp", "pp", numbers=len(spec.groups)) + agreement(*axes)
        if isinstance(op, (StoreGradient, FetchGradient)):
            copied = _copied(self.owned_gradients(op.unit))
            return (copied, _filed(self.optimized(op.unit).in_file[0])) if spec.on_disk else (copied,)
        if isinstance(op, ReadStates):
            return (_filed(sum(self.optimized(op.unit).in_file)),)
        if isinstance(op, WriteStates):
            return (_filed(self.optimized(op.unit).in_file[1]),)
        if isinstance(op, FetchWeights):
            return (_copied(self.owned(op.unit) * self.rates.weights),)
        if isinstance(op, (Keep, Fetch)):
            return (_copied(self.kept),) if self.config.activations.checkpoint_in_cpu else ()
        if isinstance(op, Rebuild):
            return (Moved("tp", "all-gather", self.kept * self.layout.tp),)
        return (Moved("pp", "message", self.hidden),) if isinstance(op, Send) else ()

    def parts_of(self, matrices: Matrices) -> int:
        """Return the number of ranks that have parts of each."""
        return self.ranks[matrices.axis] if matrices.axis else 1

    def _moved_by_update(self, unit: str) -> Iterator[Moved]:
        """Yield the collectives of an update over the ranks that have parts of a matrix."""
        steps, each = self.config.optimizer.muon_num_ns_steps, self.optimizer.product_bytes
        for matrices in self.optimized(unit).matrices:
            if self.parts_of(matrices) == 1:
                continue
            if matrices.sums_grams:
                gram = Moved(matrices.axis, "all-reduce", matrices.sides[0] ** 2 * each)
                one = [Moved(matrices.axis, "all-reduce", max(4, each)), *[gram] * steps]
            else:
                one = [Moved(matrices.axis, "all-gather", matrices.rows * matrices.columns * each)]
            yield from one * matrices.number

    def _moved(self, unit: str, collective: str, each: int) -> Moved:
        """Return a collective of a unit's elements, of `each` bytes, over its sharding group."""
        axis, ranges = self.spec.group(unit).axis, self.spec.units[unit].owned
        moved = Moved(axis, collective, self.numel[unit] * each)
        if self.places is None or collective == "all-reduce":
            return moved
        return moved._replace(unsent=each * unsent(collective, ranges, self.places[axis]))

    def agreed(self) -> tuple[Moved, ...]:
        """Return the all-reduces of a step outside its program: of counts of targets, of losses and of routers."""
        model = self.config.model
        depths = model.mtp_num_layers if self.config.trains else 0
        found = agreement("data", "data", "pp", numbers=named_corpora(self.config.data.data_path) + depths)
        if layers := len(model.expert_layers):
            found += agreement("data", "tp", "pp", numbers=layers * (model.num_experts + ROUTER_SUMS))
        return found

    def traffic(self, op: Op) -> Sent:
        """Return the bytes that this rank sends in an operation, by kind of traffic."""
        key = type(op), op.layer if isinstance(op, LayerOp) else op.unit if isinstance(op, UnitOp) else ""
        found = self._traffic.get(key)
        if found is None:
            found = self._traffic[key] = self._sent_in_layer(op) or self.sent(self.moves(op))
        return found

    def _sent_in_layer(self, op: Op) -> Sent:
        if not isinstance(op, (Forward, Recompute, Backward)):
            return ()
        layer = self.layers[op.layer]
        by_axis = {Forward: layer.forward, Recompute: layer.recompute, Backward: layer.backward}[type(op)]
        return tuple((TRAFFIC.get(axis, axis), num_bytes) for axis, num_bytes in by_axis.items())

    def sent(self, moves: tuple[Moved, ...]) -> Sent:
        """Return the bytes that this rank sends for `moves`, by kind of traffic."""
        return tuple((move.kind, move.sent(self.ranks[move.axis])) for move in moves)

    def _summed(self, unit: str) -> Iterator[int]:
        """Yield the sizes of the pieces of the owned range whose gradients tensor-parallel ranks add up."""
        for summed in self.spec.units[unit].summed:
            owned = self.range(unit)
            yield summed.numel // self.spec.group(unit).parts if owned is None else summed.within(owned).numel
