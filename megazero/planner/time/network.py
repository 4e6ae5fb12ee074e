"""Seconds of collectives and messages: latency and bandwidth inside a node and between nodes (alpha-beta). Pure.

Ranks are numbered pp-major, tp-minor, and fill one node after the other. A ring passes all ranks of a node before it
leaves the node. All groups of an axis communicate at the same time; those that leave a node share its network cards.
"""

import math
from collections import Counter
from dataclasses import dataclass

from megazero.engine.plan.layout.topology import Layout
from megazero.planner.time.devices import Device, interpolate


@dataclass(frozen=True)
class GroupNodes:
    """One group of an axis, and its nodes.

    Attributes:
        ranks: of the group.
        nodes: of the group.
        per_node: ranks of the group in a node; the larger number if nodes differ.
        sharing: groups of the axis that leave the same node.
    """

    ranks: int
    nodes: int
    per_node: int
    sharing: int


def ranks_of_axis(size: int, stride: int, devices_per_node: int) -> GroupNodes:
    """Place the groups of an axis whose neighbours are `stride` ranks apart."""
    count = Counter(n * stride // devices_per_node for n in range(size))
    per_node = max(count.values())
    return GroupNodes(size, len(count), per_node, devices_per_node // per_node)


class Network:
    """Times of communication of a layout on a kind of device."""

    def __init__(self, device: Device, layout: Layout) -> None:
        self.each = device.ranks_per_node(layout.world_size)
        inside = interpolate(device.curves.links, self.each) if device.curves.links else device["node.bandwidth"]
        self.inside = inside * device["node.fraction"], device["node.latency"]
        self.link = device.get("node.link", inside) * device["node.fraction"]  # with a switch: all of a rank's links
        self.between = device["cluster.bandwidth"] * device["cluster.fraction"], device["cluster.latency"]
        self.exchanges = device.kind == "cpu"  # gloo: every rank sends to every other rank at once
        sizes = layout.sizes | {"embedding": 2 if layout.last_pp else 1}
        self.groups = {axis: ranks_of_axis(size, layout.stride(axis), self.each) for axis, size in sizes.items()}
        self.layout = layout

    def bandwidth(self, group: GroupNodes) -> float:
        """Return the bytes per second that each rank of a ring sends, limited by the slowest hop."""
        inside = min(self.inside[0], self.link * max(1, group.per_node - 1))
        if group.nodes == 1:
            return inside
        return min(inside, self.between[0] / group.sharing)

    def _hops(self, group: GroupNodes) -> float:
        """Return the latency from the first rank of a ring to the last."""
        leaving = group.nodes - 1
        return (group.ranks - 1 - leaving) * self.inside[1] + leaving * self.between[1]

    def _tree(self, group: GroupNodes) -> float:
        """Return the latency from the leaves to the root of a tree, over the ranks of a node and over nodes."""
        return math.log2(group.per_node) * self.inside[1] + math.log2(group.nodes) * self.between[1]

    def one_pass(self, axis: str, num_bytes: float) -> float:
        """Return the seconds of a reduce-scatter or all-gather of a buffer: a ring sends (n-1)/n of it."""
        group = self.groups[axis]
        if group.ranks == 1:
            return 0.0
        latency = self._tree(group) if self.exchanges else self._hops(group)
        return latency + num_bytes * (group.ranks - 1) / group.ranks / self.bandwidth(group)

    def all_reduce(self, axis: str, num_bytes: float) -> float:
        """Return the seconds of an all-reduce, by a ring or by trees, whichever is faster."""
        group = self.groups[axis]
        if group.ranks == 1:
            return 0.0
        passes = 2 * num_bytes * (group.ranks - 1) / group.ranks / self.bandwidth(group)
        return 2 * min(self._hops(group), self._tree(group)) + passes

    def collective(self, axis: str, name: str, num_bytes: float) -> float:
        """Return the seconds of a collective over a whole buffer of `num_bytes`; of a shift, of each rank's message."""
        group = self.groups[axis]
        if name == "shift" and group.ranks > 1:
            return self._hops(group) / (group.ranks - 1) + num_bytes / self.bandwidth(group)
        return self.all_reduce(axis, num_bytes) if name == "all-reduce" else self.one_pass(axis, num_bytes)

    def message(self, num_bytes: float, sender: int, receiver: int) -> float:
        """Return the seconds of a message between pipeline ranks, while all ranks of a stage send theirs."""
        nodes = [self.layout.stage_ranks(pp)[0] // self.each for pp in (sender, receiver)]
        bandwidth, latency = self.link, self.inside[1]
        if nodes[0] != nodes[1]:
            between, latency = self.between
            bandwidth = min(self.inside[0], between / min(self.each, self.layout.stride("pp")))
        return latency + num_bytes / bandwidth
