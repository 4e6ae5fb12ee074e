"""Uneven work of ranks: of updates of whole matrices, of attention over dealt samples. Pure."""

from collections.abc import Sequence

from megazero.engine.plan.layout.dealing import deal, imbalance
from megazero.engine.plan.program.rank_spec import RankSpec


def update_imbalance(spec: RankSpec) -> float:
    """Return the cost of updating matrices on the busiest rank of a sharding group, over the mean of its ranks."""
    found = [1.0]
    # Other optimizers cut matrices anywhere: their ranks have equal work.
    for name in (name for name, group in spec.groups.items() if group.whole):
        units = [unit for unit in spec.units.values() if unit.group == name]
        ranks = zip(*([unit.flat.cost(owned) for owned in unit.owned] for unit in units), strict=True)
        costs = [sum(rank) for rank in ranks]
        found += [max(costs) * len(costs) / sum(costs)] if sum(costs) else []
    return max(found)


def causal_imbalance(length: int, ranks: int, windows: Sequence[int] = (0,), multiple: int = 1) -> float:
    """Return the imbalance of samples that are one document."""
    return imbalance(deal(length, ranks, (), windows=windows, multiple=multiple).work)
