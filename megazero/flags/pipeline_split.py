"""Layers of each virtual pipeline stage: as given, or by cost. Pure.

The cost of a layer is the ratio of its FLOPs to those of a mean block. Virtual stages are listed in the order of the
forward pass; `placement` has the rank of each.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

from megazero.engine.plan.layout.layers import Layers
from megazero.engine.plan.layout.topology import even_split
from megazero.engine.plan.schedule.schedules import SCHEDULES, placement
from megazero.flags.config import ActivationConfig, Config, ModelConfig
from megazero.flags.limit_checks import shorten

WORTH_IT = 0.01  # least gain of the busiest rank from an uneven split, because an even one is easier to read


class LayerCosts(NamedTuple):
    """Costs of the embedding (first virtual stage), of each block and of the head (last virtual stage), in blocks."""

    embedding: float
    blocks: tuple[float, ...]
    head: float


def layer_costs(layers: Layers, model: ModelConfig, activations: ActivationConfig) -> LayerCosts:
    """Return the costs of the embedding (2 h FLOPs per token), each block and the head (2 v h); 1 is the mean block.

    Each module of multi-token prediction costs the head another 2 v h, besides its own products. A backward costs twice
    a forward. A recomputed block costs one more forward; embedding and head are not recomputed.
    """
    flops = [sum(each) for each in layers.block_flops.values()]
    h, mean = model.hidden_size, sum(flops) / len(flops)
    cost = mean * (4 if activations.recompute == "full" else 3) / 3
    kind, table = next(reversed(layers.kinds.values())), 2 * model.vocab_size * h
    head = table * (1 + model.mtp_num_layers) + kind.matrix_flops + kind.score_flops - table * model.untie_embeddings
    return LayerCosts(2 * h / cost, tuple(each / mean for each in flops), head / cost)


def rank_costs(split: tuple[int, ...], place: tuple[int, ...], costs: LayerCosts) -> list[float]:
    """Return the cost of a micro-batch on every pipeline rank, in blocks. place: rank of each virtual stage."""
    found, blocks = [0.0] * (max(place) + 1), iter(costs.blocks)
    for layers, rank in zip(split, place, strict=True):
        found[rank] += sum(itertools.islice(blocks, layers))
    found[place[0]] += costs.embedding
    found[place[-1]] += costs.head
    return found


def split_by_cost(place: tuple[int, ...], costs: LayerCosts) -> tuple[int, ...]:
    """Split layers so that the busiest rank computes least; evenly, unless that is slower by WORTH_IT.

    Every virtual stage has a layer, except the last, which has the head. If blocks differ, the split is computed with
    mean blocks, and then moved to the nearest sums of costs.
    """
    num_layers = len(costs.blocks)
    even, last = even_split(num_layers, len(place)), len(place) - 1
    ranks = range(max(place) + 1)
    if len(ranks) == 1:
        return even
    ends = rank_costs((0,) * len(place), place, costs)
    of_rank = _fill(ends, [place.count(r) - (r == place[-1]) for r in ranks], num_layers)
    found = [0] * len(place)
    for rank, layers in zip(ranks, of_rank, strict=True):
        stages = [stage for stage, holder in enumerate(place) if holder == rank]
        base = [costs.embedding * (stage == 0) + costs.head * (stage == last) for stage in stages]
        counts = _fill(base, [int(stage != last) for stage in stages], layers)
        for stage, count in zip(stages, counts, strict=True):
            found[stage] = count
    uneven = _cut(costs.blocks, found)
    gain = 1 - max(rank_costs(uneven, place, costs)) / max(rank_costs(even, place, costs))
    return uneven if gain >= WORTH_IT else even


def _cut(blocks: tuple[float, ...], wanted: list[int]) -> tuple[int, ...]:
    """Cut blocks so that each stage costs about `wanted` mean blocks; every stage but the last has a block."""
    sums, cuts, last = [0.0, *itertools.accumulate(blocks)], [0], len(wanted) - 1
    for stage, goal in enumerate(itertools.accumulate(wanted[:-1]), 1):
        possible = range(cuts[-1] + 1, len(blocks) - (last - stage) + 1)
        cuts.append(min(possible, key=[abs(cost - goal) for cost in sums].__getitem__))
    return tuple(b - a for a, b in itertools.pairwise([*cuts, len(blocks)]))


def _fill(base: list[float], least: list[int], num_layers: int) -> list[int]:
    """Assign layers one by one to the part with the least cost, which minimizes the highest cost."""
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
    stages, virtual = pp * chunks, f" x --virtual-pipeline-stages {chunks}" if chunks > 1 else ""
    words, text = text.split(","), shorten(text)
    example = shorten(",".join(map(str, even_split(layers, stages))))
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"--pipeline-split {text}: must be whole numbers separated by commas, such as {example}")
    split = tuple(map(int, words))
    if len(split) != stages:
        raise ValueError(
            f"--pipeline-split {text} has {len(split)} virtual stages, but --pipeline-model-parallel-size {pp}"
            f"{virtual} makes {stages}; give {stages} numbers, such as {example}"
        )
    if sum(split) != layers:
        raise ValueError(
            f"--pipeline-split {text} has {shorten(sum(split))} layers, but --num-layers is {layers}; change one of "
            f"them, or use {example}"
        )
    if 0 in split[1:-1] or (stages == 1 and not layers):
        raise ValueError(
            f"--pipeline-split {text}: every stage but the first, which has the embedding, and the last, which has the "
            f"head, needs a layer; use {example}, or fewer stages"
        )
    return split


def layer_split(config: Config, costs: Callable[[], LayerCosts]) -> tuple[int, ...]:
    """Return the layers of each virtual stage; () means `even_split`. costs: called only for a split by cost."""
    parallel, layers = config.parallel, config.model.num_layers
    pp, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_stages
    even = even_split(layers, pp * chunks)
    if parallel.pipeline_split:
        found = given_split(config)
    elif pp > 1:
        found = split_by_cost(placement(pp, chunks, SCHEDULES[parallel.pipeline_schedule].v_shaped), costs())
    else:
        found = even
    return () if found == even else found
