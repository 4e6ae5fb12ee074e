"""Intervals that benchmarks share."""

import random
import statistics


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[round(0.025 * draws)], medians[round(0.975 * draws) - 1]


def ratio_interval(ours: list[float], theirs: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the ratio of medians, theirs over ours."""
    rng = random.Random(0)
    found = sorted(
        statistics.median(rng.choices(theirs, k=len(theirs))) / statistics.median(rng.choices(ours, k=len(ours)))
        for _ in range(draws)
    )
    return found[round(0.025 * draws)], found[round(0.975 * draws) - 1]
