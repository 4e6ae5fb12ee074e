"""Facts about an option besides its type, default and help: metadata in the `Annotated` type of its field.

`flags.flag_names.flags` reads it. All other tables of flags are queries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated, Any, NamedTuple


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


class Role(Enum):
    """Part of an option in a run, its files and its pages."""

    LAYOUT = auto()  # --layout auto and a search choose it
    RECIPE = auto()  # --recipe auto chooses it
    STAGE = auto()  # it may change between the stages of a run
    LOCAL = auto()  # it may differ between ranks: rank 0 alone uses it, or its content is compared instead
    PLACE = auto()  # it names a folder or a name of one run, so that it differs between all runs
    PATH = auto()  # it names files or folders
    KIND_OF_RUN = auto()  # without it, the command would start another kind of run
    FAMILY = auto()  # a family, a preset or a config.json sets it. No help lists it; docs/results/flags.md does
    TRAIT = auto()  # each family sets it: a part of its layers
    ROTARY = auto()  # layers with rotary positions read it
    LATENT = auto()  # latent attention reads it
    ON_SCREEN = auto()  # the first lines of the start screen have it


class OnResume(Enum):
    """Consequence of another value in a run that resumes. `run.changes` has the sentences."""

    UNSAID = auto()  # none: it is not reported
    NOTED = auto()  # none: it is reported
    DATA = auto()
    ORDER = auto()
    PACKING = auto()
    BATCHES = auto()
    RATE = auto()
    STATES = auto()
    UPDATES = auto()
    MODEL = auto()
    BY_DOCUMENT = auto()  # as MODEL, unless the packing implies it
    LOSS = auto()
    ROUNDING = auto()


class Usual(NamedTuple):
    """The short --help lists the option, in the group of this title, at this place."""

    title: str
    place: int


class Written(NamedTuple):
    """Stands for a value of the option in messages, such as DIR."""

    value: str


class Requires(NamedTuple):
    """The option has no effect without another one, given by its name without dashes.

    Attributes:
        value: that the other one must have; None: any but its default.
    """

    flag: str
    value: Any = None


class RequiresAny(NamedTuple):
    """The option has no effect without one of several others: (name without dashes, value); None: as in `Requires`."""

    ways: tuple[tuple[str, Any], ...]


class OnGpu(NamedTuple):
    """The default on GPUs.

    Attributes:
        words: for --help.
        choose: (options, precision in which the GPU multiplies fastest) -> value.
    """

    words: str
    choose: Callable[[Any, str], Any]


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
