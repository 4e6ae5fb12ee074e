"""Layouts as plans and reports show them, and the places of ranks in them. Pure."""

import math

from megazero.engine.plan.layout.topology import Coord, Layout


def layout_words(layout: Layout) -> str:
    """Describe a layout: "pp 2 x dp 3 x tp 4"."""
    shape = ", as a V" if layout.v_shaped else ""
    chunks = f" ({layout.chunks} virtual stages each{shape})" if layout.chunks > 1 else ""
    parts = f" ({layout.replica} x {layout.shard})" if layout.replica > 1 else ""
    split = f" (layers {','.join(map(str, layout.split))})" if layout.split else ""
    context = f" x cp {layout.cp}" if layout.cp > 1 else ""
    experts = f", ep {layout.ep} x etp {layout.etp}" if divides_experts(layout) else ""
    return f"pp {layout.pp}{chunks}{split} x dp {layout.dp}{context}{parts} x tp {layout.tp}{experts}"


def least_layout(tp: int, cp: int, ep: int, expert_tp: int) -> Layout:
    """Return the layout of one stage with as few replicas as these axes allow."""
    whole, each = ep * (expert_tp or tp), Layout(tp=tp, cp=cp).world_size
    return Layout(dp=whole // math.gcd(whole, each), tp=tp, cp=cp, ep=ep, expert_tp=expert_tp)


def rank_layers(layout: Layout, num_layers: int, pp: int) -> list[int]:
    """Return the numbers of all layers of pipeline rank `pp`, chunk by chunk."""
    return [n for chunk in range(layout.chunks) for n in layout.chunk_layers(num_layers, pp, chunk)]


def divides_experts(layout: Layout) -> bool:
    """Return whether experts are on other ranks than an MLP would be. Each rank then sends tokens of its own."""
    return layout.ep > 1 or layout.etp != layout.tp


def coord_words(coord: Coord) -> str:
    return ", ".join(f"{axis} {place}" for axis, place in coord._asdict().items())


def rank_places(layout: Layout, rank: int) -> dict[str, int]:
    """Return a rank's place along each of `Layout.sizes`."""
    return {axis: rank // layout.stride(axis) % size for axis, size in layout.sizes.items()}


def stage_copies(layout: Layout, pp: int) -> list[list[int]]:
    """Return the tensor-parallel ranks of each copy of a stage's weights."""
    return [ranks for ranks in layout.groups("tp") if ranks[0] in layout.stage_ranks(pp)]
