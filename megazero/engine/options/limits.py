"""The ranges of numbers, declared next to their flags."""

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Bounds:
    """Values from `least` to `most`, both included unless they are marked open.

    `why` is the reason for the upper bound and ends the message: "--lr 1e+300: must be at most 10: " + why.
    """

    least: float
    most: float
    why: str = ""
    least_open: bool = False
    most_open: bool = False


# Kinds of numbers that several flags share. 0 stands for a derived value or for "never".
FEW = "no published model has as many"
ITERATIONS = "iterations are numbered in 9 digits"
Positive = Annotated[int, Bounds(1, 10**9, ITERATIONS)]
Iterations = Annotated[int, Bounds(0, 10**9, ITERATIONS)]
MOST_LAYERS = 4096
Ranks = Annotated[int, Bounds(1, 10**6, "no job has as many ranks")]
Probability = Annotated[float, Bounds(0, 1, "1 would drop everything", most_open=True)]
DecayRate = Annotated[float, Bounds(0, 1, "a mean with weight 1 on its past never changes", most_open=True)]
LearningRate = Annotated[float, Bounds(0, 10, "AdamW moves every weight by about --lr per update")]
LossScaleValue = Annotated[float, Bounds(0, 2**48, "the scaled loss would overflow fp32", least_open=True)]
