"""Layers of each virtual pipeline stage: as given, or by cost. Pure.

Costs are in blocks: a block costs 1, the embedding and the head what their FLOPs are against a block's. All virtual
stages are named in the order of the forward pass; `placement` has the rank of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megazero.config.limits import shorten
from megazero.config.schema import Config
from megazero.plan.schedules import SCHEDULES, placement

WORTH_IT = 0.01  # an uneven split must make the busiest rank this much faster: what divides evenly is easier to read


class NonBlockCosts(NamedTuple):
    """Cost of the embedding (first virtual stage) and of the head (last virtual stage), in blocks."""

    embedding: float
    head: float


def even_split(num_layers: int, stages: int) -> tuple[int, ...]:
    """Split layers evenly; the first stages take one more where that leaves a rest."""
    each, rest = divmod(num_layers, stages)
    return tuple(each + (stage < rest) for stage in range(stages))


def rank_costs(split: tuple[int, ...], place: tuple[int, ...], outer: NonBlockCosts) -> list[float]:
    """Return the cost of what every pipeline rank computes for a micro-batch, in blocks; `place`: the stages' ranks."""
    costs = [0.0] * (max(place) + 1)
    for layers, rank in zip(split, place, strict=True):
        costs[rank] += layers
    costs[place[0]] += outer.embedding
    costs[place[-1]] += outer.head
    return costs


def split_by_cost(num_layers: int, place: tuple[int, ...], outer: NonBlockCosts) -> tuple[int, ...]:
    """Split layers so that the busiest rank computes least; evenly, unless that is slower by WORTH_IT.

    Every virtual stage has a layer, but for the last, whose head may be work enough.
    """
    even, last = even_split(num_layers, len(place)), len(place) - 1
    ranks = range(max(place) + 1)
    if len(ranks) == 1:
        return even
    of_rank = _fill(
        rank_costs((0,) * len(place), place, outer), [place.count(r) - (r == place[-1]) for r in ranks], num_layers
    )
    found = [0] * len(place)
    for rank, layers in zip(ranks, of_rank, strict=True):
        stages = [stage for stage, holder in enumerate(place) if holder == rank]
        base = [outer.embedding * (stage == 0) + outer.head * (stage == last) for stage in stages]
        counts = _fill(base, [int(stage != last) for stage in stages], layers)
        for stage, count in zip(stages, counts, strict=True):
            found[stage] = count
    uneven = tuple(found)
    gain = 1 - max(rank_costs(uneven, place, outer)) / max(rank_costs(even, place, outer))
    return uneven if gain >= WORTH_IT else even


def _fill(base: list[float], least: list[int], num_layers: int) -> list[int]:
    """Hand out layers one by one, each to the part that costs least so far: so the costliest part costs least."""
    counts = list(least)
    for _ in range(num_layers - sum(least)):
        costs = [cost + count for cost, count in zip(base, counts, strict=True)]
        counts[costs.index(min(costs))] += 1
    return counts


def given_split(config: Config) -> tuple[int, ...]:
    """Read --pipeline-split.

    Raises:
        ValueError: naming the way out.
    """
    text, layers = config.parallel.pipeline_split, config.model.num_layers
    pp, chunks = config.parallel.pipeline_model_parallel_size, config.parallel.virtual_pipeline_stages
    stages, virtual = pp * chunks, f" x --virtual-pipeline-stages {chunks}" * (chunks > 1)
    words, text = text.split(","), shorten(text)
    example = shorten(",".join(map(str, even_split(layers, stages))))
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"--pipeline-split {text}: must be whole numbers with commas between, such as {example}")
    split = tuple(map(int, words))
    if len(split) != stages:
        raise ValueError(
            f"--pipeline-split {text} is for {len(split)} virtual stages, and --pipeline-model-parallel-size {pp}"
            f"{virtual} makes {stages}; give {stages} numbers, such as {example}"
        )
    if sum(split) != layers:
        raise ValueError(
            f"--pipeline-split {text} comes to {shorten(sum(split))} layers, and --num-layers is {layers}; "
            f"change one of them, or use {example}"
        )
    if 0 in split[1:-1] or (stages == 1 and not layers):
        raise ValueError(
            f"--pipeline-split {text}: only the first and the last stage, which hold the embedding and the head, can "
            f"do without a layer; use {example}, or fewer stages"
        )
    return split


def layer_split(config: Config, costs: Callable[[], NonBlockCosts]) -> tuple[int, ...]:
    """Layers per virtual stage; () stands for `even_split`. `costs` is asked where several stages need it."""
    parallel, layers = config.parallel, config.model.num_layers
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_stages
    if parallel.pipeline_split:
        found = given_split(config)
    else:
        place = placement(pp, chunks, SCHEDULES[parallel.pipeline_schedule].v_shaped)
        found = split_by_cost(layers, place, costs() if pp > 1 else NonBlockCosts(0, 0))
    return () if found == even_split(layers, pp * chunks) else found
