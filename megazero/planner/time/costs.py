"""Seconds of the operations of a step on a device: rooflines of traced layers, collectives, the optimizer.

An operator takes the longer time of its FLOPs and its bytes, and the launch of a kernel. On a GPU the host runs ahead,
and a layer takes at least the host's time to issue its operators. docs/plan.md has the formulas.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.flat_layout import Matrices
from megazero.engine.plan.layout.layers import stage_units
from megazero.engine.plan.layout.topology import TRAFFIC, Layout, route
from megazero.engine.plan.program.operations import (
    COMPUTE,
    HOST_COPIES,
    Backward,
    BackwardWeights,
    Fetch,
    Forward,
    GradNorm,
    Keep,
    LayerOp,
    Op,
    Recompute,
    Reduce,
    Send,
    Transfer,
    UnitOp,
    Update,
)
from megazero.engine.plan.program.rank_spec import RankSpec
from megazero.flags.config import Config
from megazero.planner.imbalance import update_imbalance
from megazero.planner.sizes import Moved, StepSizes
from megazero.planner.state_shares import updated_bytes
from megazero.planner.time.devices import Device, interpolate
from megazero.planner.time.network import Network
from megazero.planner.trace.kernel_records import Arrive, Events, Issue, LayerEvents, Operator, Product
from megazero.planner.trace.trace import trace


class Roofline:
    """Seconds of single operators on a device, while `computing` ranks compute on its node."""

    def __init__(self, device: Device, computing: int = 1) -> None:
        self.device, self.curves = device, device.curves
        self.slower = interpolate(self.curves.contention, computing) if self.curves.contention else 1.0
        self.bandwidth = device["memory.bandwidth"] * device["memory.fraction"]

    def product(self, product: Product, dtype: str) -> float:
        """Return the seconds of a matrix product: whole tiles, in whole waves over the device's units."""
        d = self.device
        if self.curves.products:
            return product.flops / (interpolate(self.curves.products, product.flops) * d["compute.fraction"])
        rows, columns, units = (int(d[f"compute.{name}"]) for name in ("tile_rows", "tile_columns", "units"))
        tiles = product.batch * min(
            math.ceil(product.m / a) * math.ceil(product.n / b) for a, b in ((rows, columns), (columns, rows))
        )
        waves = math.ceil(tiles / units)
        used = product.batch * product.m * product.n / (rows * columns) / (waves * units)
        # less than a wave uses smaller tiles, or is split along k
        return product.flops / (d[f"compute.{dtype}"] * d["compute.fraction"] * max(min(1.0, used), 0.5))

    def memory(self, name: str, num_bytes: float) -> float:
        """Return the seconds of an operator that moves `num_bytes`, at the bandwidth of memory or its own limit."""
        d, curve = self.device, self.curves.elementwise
        bandwidth = interpolate(curve, num_bytes) * d["memory.fraction"] if curve else self.bandwidth
        return num_bytes / min(bandwidth, d.operators.get(name, math.inf) * d["memory.fraction"])

    def seconds(self, op: Operator) -> float:
        """Return the seconds of an operator on the device, excluding launch overhead of the host."""
        measured = bool(self.curves.products)  # products and attention include their memory accesses
        moving = self.memory(op.name, op.num_bytes)
        if op.product is not None:
            product = self.product(op.product, op.dtype)
            moving = product if measured else max(moving, product)
        elif op.attention_flops:
            peak = self.device[f"compute.{op.dtype}"] * self.device.attention(op.head_dim)
            moving = max(0.0 if measured else moving, op.attention_flops / peak)
        return moving * self.slower + self.device["overhead.kernel"]


class Cost(NamedTuple):
    """Seconds of an operation on the compute stream; `exposed`: those of waiting, by kind of traffic: tp, cp, ep."""

    seconds: float
    exposed: Mapping[str, float]


def iteration_products(matrices: Matrices, ranks: int) -> tuple[tuple[int, int, int], ...]:
    """Return the (m, n, k) of each product of an iteration on a matrix, on one of `ranks` ranks of its axis."""
    side, other = matrices.sides
    mine = other // ranks if matrices.sums_grams else other
    return (side, side, mine), (side, side, side), (side, mine, side)


class StepCosts:
    """Seconds of the operations of one pipeline rank's program. Call it with an operation."""

    def __init__(
        self, config: Config, layout: Layout, spec: RankSpec, device: Device, network: Network | None = None
    ) -> None:
        """Take a resolved configuration. spec: of the pipeline rank."""
        self.config, self.layout, self.spec, self.device = config, layout, spec, device
        self.network = network or Network(device, layout)
        self.roofline = Roofline(device, device.ranks_per_node(layout.world_size))
        self.sizes, self.uneven = StepSizes(config, layout, spec), update_imbalance(spec)
        frozen = config.training.freeze_parameters
        self.specs = stage_units(declare(config.model, layout.tp), layout, spec.pipeline.rank, frozen)
        self.events: dict[tuple[str, bool], LayerEvents] = {}
        self.known: dict[tuple[type, str, bool], Cost] = {}
        self.seconds: dict[tuple[object, ...], float] = {}

    def __call__(self, op: Op) -> float:
        """Return the seconds of an operation, computed once per kind, layer and unit."""
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
            step = route(self.spec.placement, op.what, op.to).step
            there = (self.spec.pipeline.rank + (step if isinstance(op, Send) else -step)) % self.spec.pipeline.ranks
            return self.network.message(self.sizes.hidden, self.spec.pipeline.rank, there)
        if isinstance(op, (Keep, Fetch)):
            return self._copy(op)
        if isinstance(op, HOST_COPIES):
            speeds = {"pcie": self.device["host.bandwidth"], "nvme": self.device.nvme_bandwidth}
            return max(move.num_bytes / speeds[move.axis] for move in self.sizes.moves(op))
        moving = self._moving(self.sizes.moves(op))
        if isinstance(op, Update):  # these are the collectives of all of a sharding group's ranks
            moving *= self.uneven / self.spec.group(op.unit).parts
        return moving + self._of_unit(op)

    def _moving(self, moves: tuple[Moved, ...]) -> float:
        return sum(self.network.collective(move.axis, move.collective, move.num_bytes) for move in moves)

    # -- layers

    def of_layer(self, op: Forward | Recompute | Backward | BackwardWeights) -> Cost:
        """Return the cost of a computation, shared by layers of a kind if all weights train."""
        at_once = not isinstance(op, BackwardWeights) and (not isinstance(op, Backward) or op.weights)
        layer = self.spec.layers[op.layer]
        kind = layer.name if self.config.training.freeze_parameters else layer.kind
        key = type(op), kind, at_once
        if key not in self.known:
            found = self.events.get((kind, at_once))
            if found is None:
                found = trace(
                    self.config, self.layout, layer, specs=self.specs, device_type=self.device.kind, at_once=at_once
                ).events
                self.events[kind, at_once] = found
            passes = {Forward: found.forward, Recompute: found.recompute, Backward: found.backward}
            self.known[key] = self._simulate(passes.get(type(op), found.weight_gradients))
        return self.known[key]

    def _simulate(self, events: Events) -> Cost:
        """Simulate a layer's events: a compute stream, a stream for each axis, and the host."""
        now = 0.0
        exposed: dict[str, float] = defaultdict(float)  # kind of traffic -> seconds of waiting for it
        free: dict[str, float] = {}  # axis -> when its stream becomes idle
        done: dict[int, tuple[str, float]] = {}
        calls = 0
        for event in events:
            if isinstance(event, Operator):
                now += self.roofline.seconds(event)
                calls += 1
            elif isinstance(event, Issue):
                now += self.device.collective_overhead
                seconds = self.network.collective(event.axis, event.collective, event.num_bytes)
                free[event.axis] = max(now, free.get(event.axis, 0.0)) + seconds
                done[event.number] = event.axis, free[event.axis]
            elif isinstance(event, Arrive) and done[event.number][1] > now:
                axis, at = done[event.number]
                exposed[TRAFFIC.get(axis, axis)] += at - now
                now = at
        host = calls * self.device["overhead.call"] + self.device["overhead.operation"]
        return Cost(now + host if self.device.kind == "cpu" else max(now, host), exposed)

    def _copy(self, op: Keep | Fetch) -> float:
        kept, activations = self.sizes.kept, self.config.activations
        if isinstance(op, Fetch):
            return kept / self.device["host.bandwidth"]
        copies = op.slot is not None or activations.partition_activations  # those in host memory have a slot
        # copies to the host overlap with computation
        return self.roofline.memory("copy_", 2 * kept) if copies else 0.0

    def _of_unit(self, op: Op) -> float:
        """Return the seconds of reading and writing memory."""
        sizes, roofline = self.sizes, self.roofline
        if isinstance(op, Reduce) and self.spec.policy(op.unit).optimizer:
            return roofline.memory("add_", 3 * sizes.owned_gradients(op.unit))
        if isinstance(op, GradNorm):
            offloaded = self.spec.offloaded_units
            read = sum(sizes.owned_gradients(unit) for unit in self.spec.trained_units if unit not in offloaded)
            on_host = sum(map(sizes.owned_gradients, offloaded)) / self.device.host_memory_bandwidth
            return roofline.memory("norm", read) * roofline.slower + on_host + self._moving(sizes.agreed())
        return self._update(op.unit) if isinstance(op, Update) else 0.0

    def _matrices(self, unit: str) -> float:
        """Return the seconds of Newton-Schulz iterations on the busiest rank."""
        sizes, steps, total = self.sizes, self.config.optimizer.muon_num_ns_steps, 0.0
        dtype = self.config.training.product_precision
        for matrices in sizes.optimized(unit).matrices:
            shapes = iteration_products(matrices, sizes.parts_of(matrices))
            total += matrices.number * steps * sum(self.roofline.product(Product(1, *s), dtype) for s in shapes)
        return total / self.spec.group(unit).parts * self.uneven

    def _update(self, unit: str) -> float:
        """Return the seconds of a fused update: two slices, with and without weight decay, and the casts."""
        rates = self.sizes.rates
        if self.spec.units[unit].on_host:
            return updated_bytes(self.sizes.optimized(unit)) / self.device.host_memory_bandwidth
        calls = 2 + (rates.gradients != rates.state) + (rates.weights != rates.state)
        host = calls * self.device["overhead.call"]
        device = self.roofline.memory(
            "adamw", updated_bytes(self.sizes.optimized(unit))
        ) * self.roofline.slower + self._matrices(unit)
        return device + host if self.device.kind == "cpu" else max(device, host)
