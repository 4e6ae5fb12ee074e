"""Predicted bytes of one rank: memory by kind, and traffic of an iteration. Pure.

It walks the rank's plan as the engine does, entering in a ledger what the engine enters and counting what it sends; so
it agrees with `memory_bytes` and `traffic_bytes` to the byte. docs/metrics.md has the closed formulas.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from megazero.config.schema import BYTES, Config
from megazero.memory.tracker import Lease, Ledger
from megazero.plan.flat_layout import FlatLayout, Range, partition_numel
from megazero.plan.parameters import HEAD, POSITION, TOKEN, ParamSpec, stage_units, unit_layout
from megazero.plan.schedules import Action, Op, peak_live, plan, steps
from megazero.plan.topology import Layout, ring_bytes
from megazero.plan.zero_policy import COPY_DEPTH, Use, ZeroPolicy, fixed_gradients, layer_uses, plan_buckets, ring_slots

NUMBER = 8  # bytes of a number that is agreed on: fp64


def state_bytes(precision: str) -> tuple[int, int]:
    """Bytes per element of an optimizer state, and of all: two moments, and a master copy of 16-bit weights."""
    each = max(4, BYTES[precision])
    return each, each * (2 if BYTES[precision] == each else 3)


class Estimate(NamedTuple):
    """Of one rank; keys as in metrics.jsonl."""

    memory: dict[str, int]
    traffic: dict[str, int]


def estimate(config: Config, layout: Layout, rank: int = 0, staged: bool = True) -> Estimate:
    """Bytes of `rank` in one iteration.

    Args:
        config: resolved.
        staged: as on gloo and CPUs, where a reduce-scatter needs a staging buffer and copies to the host none. False:
            as on NCCL and GPUs, where it is the other way round.
    """
    return _Walk(config, layout, rank, staged).run()


class _Unit:
    """What is known of a unit while the plan is walked."""

    def __init__(self, flat: FlatLayout, trains: bool) -> None:
        self.flat, self.numel, self.trains = flat, flat.numel, trains
        self.users = 0
        self.held = False  # gathered until the end of the iteration
        self.expected = 0  # uses that owe a gradient, a micro-batch
        self.arrived = 0
        self.full: Lease | None = None
        self.reduced: Lease | None = None


class Backward(NamedTuple):
    """What a layer's backward does along tp, where parameters are frozen."""

    runs: bool  # a gradient passes through; only then is the layer's input kept for recompute
    gathers: int = 0  # of the residual stream, where that is cut
    sums: int = 0


def backward_passes(
    uses: dict[str, tuple[Use, list[str]]], specs: dict[str, list[ParamSpec]], enters: bool, anchored: bool
) -> dict[str, Backward]:
    """layer -> its backward, by what autograd would do.

    Args:
        enters: the stage's input needs a gradient: its sender waits for it.
        anchored: so does the input of every layer whose weights are gathered for backward (`zero._Closes`).
    """
    trains = {spec.name: spec.trains for members in specs.values() for spec in members}
    x, found = enters, {}
    for layer, (use, names) in uses.items():
        x = x or (anchored and use is not Use.LOOKUP)
        if use is Use.LAYER:

            def any_of(module: str, layer: str = layer) -> bool:
                return trains[f"{layer}.{module}.weight"] or trains[f"{layer}.{module}.bias"]

            gathers = sums = 0
            for norm, column, row in (("norm1", "attention.qkv", "attention.proj"), ("norm2", "mlp.up", "mlp.down")):
                normed = x or any_of(norm)
                inner = normed or any_of(column)
                branch = inner or any_of(row)
                gathers += (inner and trains[f"{layer}.{column}.weight"]) + branch
                sums += normed
                x = x or branch
            found[layer] = Backward(x, gathers, sums)
        else:
            mine = any(spec.trains for name in names for spec in specs[name])
            if use is Use.HEAD:  # its product has a gradient to pass on, wanted or not
                table = next((s for name in reversed(names) for s in reversed(specs[name]) if len(s.shape) == 2), None)
                found[layer] = Backward(x or mine, int(table is not None and table.trains), 1)
            else:
                found[layer] = Backward(x or mine, int(layer == TOKEN and mine))
                x = x or mine
    return found


class _Walk:
    def __init__(self, config: Config, layout: Layout, rank: int, staged: bool) -> None:
        training, model = config.training, config.model
        self.config, self.layout, self.coord = config, layout, layout.coord(rank)
        self.staged = staged
        self.policy = ZeroPolicy.for_stage(config.zero, layout.shard)
        self.ledger = Ledger()
        self.sent: Counter[str] = Counter({"dp": 0, "tp": 0, "pp": 0, "control": 0})
        self.w, self.g = BYTES[training.precision], BYTES[training.grad_dtype]
        self.first, self.last = self.coord.pp == 0, self.coord.pp == layout.pp - 1
        self.tied = not model.untie_embeddings
        specs = stage_units(model, layout, self.coord.pp, training.freeze_parameters)
        self.units = {
            name: _Unit(unit_layout(s, layout.tp, layout.shard), any(spec.trains for spec in s))
            for name, s in specs.items()
        }
        self.uses = layer_uses(specs, self.first, self.tied)
        self.passes = backward_passes(self.uses, specs, not self.first, self.policy.parameters)
        for _, names in self.uses.values():
            for name in names:
                self.units[name].expected += 1
        self.tokens = training.micro_batch_size * model.seq_length  # b s
        self.stream_bytes = self.tokens * model.hidden_size * self.w  # the residual stream: b s h
        self.sequence_parallel = config.parallel.sequence_parallel
        # a block's input, a message: what a rank holds of it
        self.hidden_bytes = self.stream_bytes // (layout.tp if self.sequence_parallel else 1)
        self.fixed = fixed_gradients(
            self.policy, config.activations.contiguous_checkpointing, config.micro_batches(layout.dp)
        )
        self.vocabulary = stage_units(model, Layout(), 0)[TOKEN][0].local(layout.tp, 0).stored[0]  # rows a rank
        self.blocks = [name for name in self.units if name.startswith("blocks.")]
        self.kept: dict[tuple[str, int], Lease] = {}  # (layer, micro-batch) -> its checkpoint
        self.logits: dict[int, Lease] = {}
        self.messages: dict[tuple[Op, int], Lease] = {}
        self.sending: Lease | None = None  # full gradients that are sent as they lie

    def run(self) -> Estimate:
        config, layout = self.config, self.layout
        parameters, optimizer = self._at_rest()
        at_rest = [self.ledger.lease("parameters", parameters), self.ledger.lease("optimizer", optimizer)]
        at_rest.append(self.ledger.lease("buffers", self._fixed_buffers()))
        at_rest += [
            self.ledger.lease(kind, numel * self.g)
            for unit in self.units.values()
            for kind, numel in zip((self._full_kind, "gradients"), self._fixed_numel(unit), strict=True)
        ]
        actions = plan(config.parallel.pipeline_schedule, self.coord.pp, layout.pp, config.micro_batches(layout.dp))
        kept = sum(self.passes[name].runs for name in self.blocks)
        at_rest.append(self._slots(peak_live(actions), len(self.blocks), kept))
        for batch in steps(actions):
            op, i, final = batch[0]
            if op is Op.FORWARD:
                self._forward(i)
            elif op is Op.BACKWARD:
                self._backward(i, final)
            else:
                self._exchange(batch)
        self._drain()
        gradients = self.ledger.now["gradients"]
        self._reduce_replicas()
        self._control()
        self._update()
        memory = {
            "parameters": parameters,
            "optimizer": optimizer,
            "gradients": gradients,
            **{kind: self.ledger.peak[kind] for kind in ("activation_checkpoints", "buffers", "logits")},
            "peak": self.ledger.total_peak,
            "host": self.ledger.peak["host"],
        }
        return Estimate(memory, dict(self.sent))

    def _at_rest(self) -> tuple[int, int]:
        total = sum(unit.numel for unit in self.units.values())
        owned = sum(self._owned(unit) for unit in self.units.values())
        kept = owned if self.policy.parameters else total
        return kept * self.w, owned * state_bytes(self.config.training.precision)[1]

    def _owned(self, unit: _Unit) -> int:
        return unit.numel // self.layout.shard if self.policy.optimizer else unit.numel

    def _fixed_buffers(self) -> int:
        """Slots of gathered units, and the buckets with their scratch."""
        sizes, shards, zero = [u.numel for u in self.units.values()], self.layout.shard, self.config.zero
        ring = sum(size * slots for size, slots in ring_slots(sizes, self.policy).items())
        cut = sizes if self.policy.optimizer else []
        buckets = plan_buckets(zero.reduce_bucket_size, cut, shards, zero.overlap_comm)
        self.columns = buckets.columns
        scratch = 0 if shards == 1 else buckets.columns * (shards if self.staged else 1)
        packed = buckets.columns * shards * buckets.packs
        return ring * self.w + buckets.slots * (scratch + packed) * self.g

    def _slots(self, live: int, blocks: int, kept: int) -> Lease:
        """Slots for the checkpoints of `live` micro-batches, in host memory or as an arena.

        Of each, `kept` are in use at once; and while it runs, a block that keeps nothing has one too.
        """
        activations, each = self.config.activations, self._kept_bytes()
        arena = live * blocks * each * activations.contiguous_checkpointing
        if activations.checkpoint_in_cpu:
            self.ledger.enter("buffers", 0 if self.staged else 2 * COPY_DEPTH * each)
            return self.ledger.lease("host", arena or max(live * kept, 1) * each)
        return self.ledger.lease("buffers", arena)

    def _kept_bytes(self) -> int:
        """Of one block's input on this rank."""
        activations = self.config.activations
        if activations.recompute != "full":
            return 0
        if activations.partition_activations:
            return partition_numel(self.hidden_bytes // self.w, self.layout.tp) * self.w
        return self.hidden_bytes

    # -- the plan

    def _forward(self, i: int) -> None:
        if not self.first:
            self.messages.pop((Op.RECV_X, i)).end()
        for layer, (use, names) in self.uses.items():
            self._gather(names)
            if use is not Use.HEAD:
                self._release(names)
            if layer == TOKEN:
                self._stream_sum()
            elif use is Use.LAYER:
                self._stream_gather(2)
                self._stream_sum(2)
                self._keep(layer, i)
            elif layer == HEAD:
                self._stream_gather()
                self.logits[i] = self.ledger.lease("logits", self.tokens * self.vocabulary * self.w)
                for count in (1, 2):  # maxima; sums and picked logits
                    num_bytes = count * self.tokens * max(4, self.w)
                    self.sent["tp"] += ring_bytes(num_bytes, self.layout.tp, passes=2)
        if not self.last:
            self.messages[Op.SEND_X, i] = self.ledger.lease("buffers", self.hidden_bytes)

    def _keep(self, layer: str, i: int) -> None:
        """On the host it is counted at rest already; in an arena it was a buffer until now."""
        activations, each = self.config.activations, self._kept_bytes()
        if activations.recompute == "full" and not activations.checkpoint_in_cpu and self.passes[layer].runs:
            self.ledger.enter("buffers", -each * activations.contiguous_checkpointing)
            self.kept[layer, i] = self.ledger.lease("activation_checkpoints", each)

    def _let_go(self, layer: str, i: int) -> None:
        if (layer, i) in self.kept:
            self.kept.pop((layer, i)).end()
            self.ledger.enter("buffers", self._kept_bytes() * self.config.activations.contiguous_checkpointing)

    def _backward(self, i: int, final: bool) -> None:
        if not self.last:
            self.messages.pop((Op.RECV_DX, i)).end()
        for layer, (use, names) in reversed(self.uses.items()):
            done = self.passes[layer]
            self._stream_gather(done.gathers)
            self._stream_sum(done.sums)
            if layer == HEAD:
                if self.tied:
                    self._contribute(TOKEN, final)
                else:
                    self._start(self.units[HEAD])  # the output matrix comes first, the norm after the logits are gone
                self.logits.pop(i).end()
                self._contribute(HEAD, final)
                self._release(names)
            elif use is Use.LAYER:
                self._gather(names)
                self._recompute(done)
                self._contribute(layer, final)
                self._let_go(layer, i)
                self._release(names)
            elif layer in (TOKEN, POSITION):
                self._contribute(layer, final)
        if not self.first:
            self.messages[Op.SEND_DX, i] = self.ledger.lease("buffers", self.hidden_bytes)

    def _recompute(self, done: Backward) -> None:
        """The recompute stops at the last input that backward needs: before the block's second sum over tp."""
        activations, tp = self.config.activations, self.layout.tp
        if activations.recompute == "full" and done.runs:
            self._stream_gather(2)
            self._stream_sum()
            if activations.partition_activations:
                self.sent["tp"] += ring_bytes(self._kept_bytes() * tp, tp)

    def _exchange(self, transfers: tuple[Action, ...]) -> None:
        for op, i, _ in transfers:
            if op in (Op.RECV_X, Op.RECV_DX):
                self.messages[op, i] = self.ledger.lease("buffers", self.hidden_bytes)
            else:
                self.sent["pp"] += self.hidden_bytes
        for op, i, _ in transfers:
            if op in (Op.SEND_X, Op.SEND_DX):
                self.messages.pop((op, i)).end()

    def _stream_gather(self, times: int = 1) -> None:
        """`tensor_parallel.Stream`: nothing is gathered of a stream that is whole on every rank."""
        if self.sequence_parallel:
            self.sent["tp"] += times * ring_bytes(self.stream_bytes, self.layout.tp)

    def _stream_sum(self, times: int = 1) -> None:
        self.sent["tp"] += times * ring_bytes(self.stream_bytes, self.layout.tp, passes=2 - self.sequence_parallel)

    # -- weights

    def _gather(self, names: list[str]) -> None:
        for unit in (self.units[name] for name in names):
            unit.users += 1
            if self.policy.parameters and unit.users == 1:
                self.sent["dp"] += ring_bytes(unit.numel * self.w, self.layout.shard)
            if self.policy.keeps_gathered and not unit.held:
                unit.held = True
                unit.users += 1

    def _release(self, names: list[str]) -> None:
        for name in names:
            self.units[name].users -= 1

    # -- gradients

    @property
    def _full_kind(self) -> str:
        return "buffers" if self.policy.optimizer else "gradients"

    def _fixed_numel(self, unit: _Unit) -> tuple[int, int]:
        """Elements of full and of reduced gradients that lie in an arena."""
        fixed = self.fixed
        return unit.numel * (fixed.full and unit.trains), self._owned(unit) * (fixed.reduced and unit.trains)

    def _start(self, unit: _Unit) -> None:
        if unit.full is None and unit.trains:
            unit.full = self.ledger.lease(self._full_kind, 0 if self.fixed.full else unit.numel * self.g)

    def _contribute(self, name: str, final: bool) -> None:
        unit = self.units[name]
        if not unit.trains:
            return
        self._start(unit)
        unit.arrived = (unit.arrived + 1) % unit.expected
        if unit.arrived == 0 and (self.policy.gradients or final):
            self._reduce(unit)

    def _reduce(self, unit: _Unit) -> None:
        """What is sent as it lies is there until the next unit's turn; what is packed goes at once."""
        num_bytes = unit.numel * self.g
        if not self.policy.optimizer:
            self.sent["dp"] += ring_bytes(num_bytes, self.layout.shard, passes=2)
            unit.reduced, unit.full = unit.full, None
            return
        if unit.reduced is None:
            unit.reduced = self.ledger.lease("gradients", 0 if self.fixed.reduced else self._owned(unit) * self.g)
        self._drain()
        self.sent["dp"] += ring_bytes(num_bytes, self.layout.shard)
        self.sending, unit.full = unit.full, None
        if self._owned(unit) > self.columns or not self.config.zero.overlap_comm:
            self._drain()

    def _drain(self) -> None:
        if self.sending is not None:
            self.sending.end()
            self.sending = None

    def _reduce_replicas(self) -> None:
        for unit in self.units.values():
            if unit.reduced is not None:
                num_bytes = self._owned(unit) * self.g
                self.sent["dp"] += ring_bytes(num_bytes, self.layout.replica, passes=2)
                if self.sequence_parallel:
                    num_bytes = self._replicated(unit).numel * self.g
                    self.sent["tp"] += ring_bytes(num_bytes, self.layout.tp, passes=2)

    def _replicated(self, unit: _Unit) -> Range:
        """What this rank owns of what is replicated over tp."""
        owned = Range(0, unit.numel)
        if self.policy.optimizer:
            owned = unit.flat.owned(self.coord.dp % self.layout.shard, self.layout.shard)
        return unit.flat.replicated.within(owned)

    # -- the end of the iteration

    def _control(self) -> None:
        """Numbers agreed on: targets and loss over dp, loss over pp, the norm over tp, pp and what dp cuts; and the
        tied table's gradient over both pipeline ends, which is pipeline traffic."""
        pp, dp, tp = self.layout.pp, self.layout.dp, self.layout.tp
        for size in (dp, dp, pp, tp, pp, self.layout.shard if self.policy.optimizer else 1):
            self.sent["control"] += ring_bytes(NUMBER, size, passes=2)
        if self.tied and TOKEN in self.units and self.units[TOKEN].trains:
            ends = 2 if pp > 1 else 1
            self.sent["pp"] += ring_bytes(self._owned(self.units[TOKEN]) * self.g, ends, passes=2)

    def _update(self) -> None:
        for unit in self.units.values():
            if unit.reduced is None:  # frozen
                continue
            master, _ = state_bytes(self.config.training.precision)
            wide = self.ledger.lease("buffers", master * self._owned(unit) if self.g < master else 0)
            wide.end()
            unit.reduced.end()
            if self.policy.optimizer and not self.policy.parameters:
                self.sent["dp"] += ring_bytes(unit.numel * self.w, self.layout.shard)
