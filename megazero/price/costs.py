"""Seconds of the operations of a step on a device: rooflines of traced layers, collectives, the optimizer.

An operator of a layer takes the longer of its FLOPs and its bytes, and what starting it costs. On a GPU the host runs
ahead: a layer takes at least what the host needs to issue it. docs/plan.md has the formulas.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from megazero.config.schema import BYTES, Config
from megazero.model.stage import declare
from megazero.plan.flat_layout import partition_numel
from megazero.plan.layers import stage_units
from megazero.plan.operations import (
    COMPUTE,
    Backward,
    BackwardWeights,
    Fetch,
    Forward,
    Gather,
    Keep,
    LayerOp,
    Norm,
    Op,
    Rebuild,
    Recompute,
    Reduce,
    ReduceReplicas,
    Send,
    SumReplicated,
    SumTied,
    Sync,
    Transfer,
    UnitOp,
    Update,
)
from megazero.plan.parameters import unit_layout
from megazero.plan.rank_spec import RankSpec
from megazero.plan.topology import Layout, route
from megazero.price.devices import Device, interpolate
from megazero.price.estimate import NUMBER, state_bytes
from megazero.price.kernels import Arrive, Events, Issue, LayerEvents, Operator, Product, layer_events
from megazero.price.network import Network


class Roofline:
    """Seconds of single operators on a device, beside `computing` ranks in all on its node."""

    def __init__(self, device: Device, computing: int = 1) -> None:
        self.device = device
        self.slower = interpolate(device.contention, computing) if device.contention else 1.0
        self.bandwidth = device["memory.bandwidth"] * device["memory.fraction"]

    def product(self, product: Product, dtype: str) -> float:
        """Seconds of a matrix product: whole tiles, in whole waves over the device's units."""
        d = self.device
        if d.products:
            return product.flops / (interpolate(d.products, product.flops) * d["compute.fraction"])
        rows, columns, units = (int(d[f"compute.{name}"]) for name in ("tile_rows", "tile_columns", "units"))
        tiles = product.batch * min(
            math.ceil(product.m / a) * math.ceil(product.n / b) for a, b in ((rows, columns), (columns, rows))
        )
        waves = math.ceil(tiles / units)
        used = product.batch * product.m * product.n / (rows * columns) / (waves * units)
        # a product of less than a wave takes smaller tiles, or is split along k
        return product.flops / (d[f"compute.{dtype}"] * d["compute.fraction"] * max(min(1.0, used), 0.5))

    def memory(self, name: str, num_bytes: float) -> float:
        """Seconds of reading and writing `num_bytes` by operator `name`: as fast as memory lets it, or as itself is."""
        d = self.device
        bandwidth = interpolate(d.elementwise, num_bytes) * d["memory.fraction"] if d.elementwise else self.bandwidth
        return num_bytes / min(bandwidth, d.operators.get(name, math.inf) * d["memory.fraction"])

    def seconds(self, op: Operator) -> float:
        """Seconds of an operator on the device, without what the host takes to issue it."""
        moving = self.memory(op.name, op.num_bytes)
        if op.product is not None:
            moving = self.product(op.product, op.dtype) if self.device.products else moving
            moving = max(moving, self.product(op.product, op.dtype))
        elif op.attention_flops:
            peak = self.device[f"compute.{op.dtype}"] * self.device.attention(op.head_dim)
            moving = max(0.0 if self.device.products else moving, op.attention_flops / peak)
        return moving * self.slower + self.device["overhead.kernel"]


class Cost(NamedTuple):
    """Seconds of an operation on the stream that computes; `exposed`: those of them in which it waits for tp."""

    seconds: float
    exposed: float = 0.0


class StepCosts:
    """Seconds of every operation of one pipeline rank's program. Call it with an operation."""

    def __init__(
        self, config: Config, layout: Layout, spec: RankSpec, device: Device, network: Network | None = None
    ) -> None:
        """`config` is resolved; `spec` is of the pipeline rank."""
        self.config, self.layout, self.spec, self.device = config, layout, spec, device
        self.network = network or Network(device, layout)
        self.roofline = Roofline(device, min(layout.world_size, device.devices_per_node))
        training, model = config.training, config.model
        self.w, self.g = BYTES[training.precision], BYTES[training.grad_dtype]
        self.specs = stage_units(declare(model, layout.tp), layout, spec.rank, training.freeze_parameters)
        parts = layout.tp if config.parallel.sequence_parallel else 1
        self.hidden_bytes = training.micro_batch_size * model.seq_length // parts * model.hidden_size * self.w
        parts = layout.tp if config.activations.partition_activations else 1
        self.kept_bytes = partition_numel(self.hidden_bytes // self.w, parts) * self.w
        self.events: dict[tuple[str, bool], LayerEvents] = {}
        self.known: dict[tuple[type, str, bool], Cost] = {}
        self.seconds: dict[tuple[object, ...], float] = {}

    def __call__(self, op: Op) -> float:
        """Return the seconds of an operation; those of the same kind, layer and unit are computed once."""
        if isinstance(op, LayerOp):
            key: tuple[object, ...] = (type(op), op.layer, isinstance(op, Backward) and op.weights)
        elif isinstance(op, Transfer):
            key = type(op), op.what, op.to
        else:
            key = type(op), op.unit if isinstance(op, UnitOp) else ""
        found = self.seconds.get(key)
        if found is None:
            found = self.seconds[key] = self._price(op)
        return found

    def _price(self, op: Op) -> float:
        if isinstance(op, COMPUTE):
            return self.of_layer(op).seconds
        if isinstance(op, Transfer):
            step = route(self.spec.placement, op.what, op.to).step * (1 if isinstance(op, Send) else -1)
            there = (self.spec.rank + step) % self.spec.ranks
            return self.network.message(self.hidden_bytes, self.spec.rank, there)
        if isinstance(op, (Keep, Fetch, Rebuild)):
            return self._kept(op)
        return self._of_unit(op)

    # -- layers

    def of_layer(self, op: Forward | Recompute | Backward | BackwardWeights) -> Cost:
        """Return the cost of a computation; layers of a kind that all train share theirs."""
        at_once = not isinstance(op, BackwardWeights) and (not isinstance(op, Backward) or op.weights)
        layer = self.spec.layers[op.layer]
        kind = layer.name if self.config.training.freeze_parameters else layer.kind
        key = type(op), kind, at_once
        if key not in self.known:
            found = self.events.get((kind, at_once))
            if found is None:
                found = layer_events(self.config, self.layout, layer, self.specs, self.device.kind, at_once)
                self.events[kind, at_once] = found
            passes = {Forward: found.forward, Recompute: found.recompute, Backward: found.backward}
            self.known[key] = self._play(passes.get(type(op), found.weight_gradients))
        return self.known[key]

    def _play(self, events: Events) -> Cost:
        """Play a layer's events: a stream that computes, one for tp, and the host that issues operators."""
        now = tp_free = exposed = 0.0
        done: dict[int, float] = {}
        calls = 0
        for event in events:
            if isinstance(event, Operator):
                now += self.roofline.seconds(event)
                calls += 1
            elif isinstance(event, Issue):
                now += self.device.collective_overhead
                seconds = self.network.collective("tp", event.collective, event.num_bytes)
                tp_free = done[event.number] = max(now, tp_free) + seconds
            elif isinstance(event, Arrive) and done[event.number] > now:
                exposed += done[event.number] - now
                now = done[event.number]
        host = calls * self.device["overhead.call"] + self.device["overhead.operation"]
        return Cost(now + host if self.device.kind == "cpu" else max(now, host), exposed)

    def _kept(self, op: Op) -> float:
        on_host = self.config.activations.checkpoint_in_cpu
        if isinstance(op, Fetch):
            return self.kept_bytes / self.device["host.bandwidth"]
        if isinstance(op, Rebuild):
            return self.network.one_pass("tp", self.kept_bytes * self.layout.tp)
        copies = op.slot is not None or self.config.activations.partition_activations  # type: ignore[union-attr]
        # on its way to the host, a kept input is copied behind the computation
        return self.roofline.memory("copy_", 2 * self.kept_bytes) if copies or on_host else 0.0

    # -- units

    def _owned(self, unit: str) -> int:
        return self.spec.units[unit].numel // (self.layout.shard if self.spec.policy.optimizer else 1)

    def _of_unit(self, op: Op) -> float:
        network = self.network
        if isinstance(op, (Gather, Sync)):
            return network.one_pass("shard", self.spec.units[op.unit].numel * self.w)
        if isinstance(op, Reduce):
            num_bytes = self.spec.units[op.unit].numel * self.g
            if not self.spec.policy.optimizer:
                return network.all_reduce("shard", num_bytes)
            return network.one_pass("shard", num_bytes) + self.roofline.memory("add_", 3 * self._owned(op.unit))
        if isinstance(op, ReduceReplicas):
            return network.all_reduce("replica", self._owned(op.unit) * self.g)
        if isinstance(op, SumReplicated):
            flat = unit_layout(self.specs[op.unit], self.layout.sizes, self.layout.shard)
            summed = sum(r.numel for r in flat.summed("tp", self.config.parallel.sequence_parallel))
            return network.all_reduce("tp", summed * self.g * self._owned(op.unit) / self.spec.units[op.unit].numel)
        if isinstance(op, SumTied):
            return network.all_reduce("embedding", self._owned(op.unit) * self.g)
        if isinstance(op, Update):
            return self._update(op.unit)
        return self._norm() if isinstance(op, Norm) else 0.0

    def _update(self, unit: str) -> float:
        """Fused AdamW: reads master, gradient and two moments, writes three, and a divided gradient."""
        state, _ = state_bytes(self.config.training.precision)
        owned = self._owned(unit)
        moved = 7 * state + (state if self.config.optimizer.clip_grad else 0)
        moved += (self.g + state if self.g != state else 0) + (state + self.w if self.w != state else 0)
        host = (2 + (self.g != state) + (self.w != state)) * self.device["overhead.call"]  # decayed, not decayed, casts
        device = self.roofline.memory("adamw", moved * owned) * self.roofline.slower
        return device + host if self.device.kind == "cpu" else max(device, host)

    def _norm(self) -> float:
        read = sum(self._owned(u) * self.g for u in self.spec.trained_units)
        agreed = sum(self.network.all_reduce(axis, NUMBER) for axis in ("tp", "pp", "shard", "dp", "dp", "pp"))
        return self.roofline.memory("norm", read) * self.roofline.slower + agreed
