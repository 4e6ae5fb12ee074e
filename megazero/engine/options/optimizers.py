"""Optimizers by name, as values: states and cost. Their updates are in `engine.optim.updates`. Pure.

Memory, traffic, time, checkpoints and ZeRO read them here.
"""

import itertools
from fractions import Fraction
from typing import NamedTuple, Self

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}  # of a number, by --precision or --grad-dtype
BLOCK = 32  # neighbours in a row of a weight, whose int8 states share an exponent
MOST_BLOCKS = 1 << 31  # of a weight with small states: random bits are numbered in 32 bits
SMALL_BYTES = {"bf16": Fraction(2), "int8": 1 + Fraction(1, BLOCK)}
TOGETHER = 1 << 20  # elements that are updated at once, if an update needs buffers of their size
ROUNDING_BYTES = {"bf16": 12, "int8": 33}  # per element: buffers in which numbers are rounded at random


class State(NamedTuple):
    """A tensor that an optimizer keeps, with a number for each element of a weight.

    Attributes:
        name: prefix of a weight's name in a checkpoint: "exp_avg.blocks.3.mlp.up.weight".
        precision: bf16, or int8 in blocks (`engine.optim.small`); None: that of the master weights.
        positive: no number is negative, and one above 0 is never rounded to 0, because updates divide by it.
    """

    name: str
    precision: str | None = None
    positive: bool = False

    def num_bytes(self, master: int) -> Fraction:
        """Return the bytes of an element, whose master weight has `master` bytes."""
        return SMALL_BYTES[self.precision] if self.precision else Fraction(master)


AVERAGE = State("ema")  # of --ema-interval: a running average of the master weights


class WeightKind(NamedTuple):
    """The properties of a weight that choose its update rule.

    Attributes:
        is_matrix: it is a matrix inside a block, or several, as its layer declares.
        blocked: its rows are whole blocks of small states.
    """

    is_matrix: bool = False
    blocked: bool = False


class UpdateRule(NamedTuple):
    """The rule by which weights are updated, as far as it can be described without torch.

    Attributes:
        states: kept besides master weights by a run that trains.
        whole_matrices: each matrix is updated by one data-parallel rank: owned ranges begin and end between matrices.
        copies: buffers that an update allocates, each as large as the weights.
        averages: updates between two changes of the running average of the weights; 0: it is not kept.
        takes_sign: an update is a sign, so that rounding noise around 0 decides it.
    """

    name: str
    states: tuple[State, ...]
    whole_matrices: bool = False
    copies: int = 0
    averages: int = 0
    takes_sign: bool = False

    @property
    def kept(self) -> tuple[State, ...]:
        """The states, and last the running average if there is one."""
        return (*self.states, AVERAGE) if self.averages else self.states

    def small(self, precision: str) -> Self:
        """Return the rule with states of this precision."""
        return self._replace(states=tuple(state._replace(precision=precision) for state in self.states))

    @property
    def is_small(self) -> bool:
        return any(state.precision for state in self.states)

    def scratch_bytes(self, numel: int, master: int, splits: bool, working: int) -> int:
        """Return the bytes of buffers in which `numel` elements are updated.

        Numbers are made wide, updated, and then rounded; the buffers of both are not alive at once.

        Args:
            master: bytes of a master weight.
            splits: master weights are split.
            working: bytes of the buffers of whole matrices.
        """
        together = numel if self.whole_matrices else min(numel, TOGETHER)
        wide, rounding = splits * master, splits * master
        if self.is_small:
            wide += len(self.states) * master
            rounding = max(ROUNDING_BYTES[s.precision] for s in self.states if s.precision) + master - 4
        computing = working if self.whole_matrices else self.copies * master * together
        return wide * together + max(computing, rounding * together)

    def state_bytes(self, master: int) -> Fraction:
        """Return the bytes of all states of an element, whose master weight has `master` bytes."""
        return sum((state.num_bytes(master) for state in self.kept), Fraction(0))

    def update_bytes(self, master: int) -> Fraction:
        """Return the bytes that an update reads and writes per element; of the gradient, those that it reads."""
        moments = sum((state.num_bytes(master) for state in self.states), Fraction(0))
        average = Fraction(3 * master, self.averages) if self.averages else Fraction(0)  # with the master weights
        return 3 * master + 2 * moments + average


class Optimizer(NamedTuple):
    """The rules of a run. Where their states are is a property of each unit: `zero_policy.host_units`.

    Attributes:
        matrices: rule of the matrices inside blocks, as their layers declare them; experts are matrices of their own.
        others: rule of tables, head, norms, biases and routers.
        moments: precision of the states of weights in whole blocks; fp32: that of master weights.
        master_weights: fp32, or split: the bf16 compute weights have their upper bits.
        as_adamw: source by which AdamW's laws of the learning rate and its decay hold; None: none is known.
    """

    matrices: UpdateRule
    others: UpdateRule
    moments: str = "fp32"
    master_weights: str = "fp32"
    as_adamw: str | None = None

    @property
    def rules(self) -> tuple[UpdateRule, ...]:
        """Each rule once."""
        both = True, False
        return tuple(dict.fromkeys(self.rule(WeightKind(*kind)) for kind in itertools.product(both, both)))

    def rule(self, kind: WeightKind) -> UpdateRule:
        """Return the rule of a weight."""
        rule = self.matrices if kind.is_matrix else self.others
        return rule.small(self.moments) if kind.blocked and self.moments != "fp32" else rule

    @property
    def states(self) -> tuple[State, ...]:
        """Each state once, of weights that are not in whole blocks."""
        return tuple(dict.fromkeys(state for rule in (self.matrices, self.others) for state in rule.states))

    def averaged(self, interval: int) -> Self:
        """Return these rules with a running average that changes in every `interval`-th update; 0: without."""
        matrices, others = (rule._replace(averages=interval) for rule in (self.matrices, self.others))
        return self._replace(matrices=matrices, others=others)

    @property
    def splits(self) -> bool:
        return self.master_weights == "split"

    def master_bytes(self, weights: int, master: int) -> int:
        """Return the bytes of an element of master weights on the device, besides those of the compute weights.

        Args:
            weights, master: bytes of an element.
        """
        if self.splits:
            return master - weights
        return master if master != weights else 0  # else master weights are the compute weights themselves


ADAMW = UpdateRule("adamw", (State("exp_avg"), State("exp_avg_sq", positive=True)))
LION = UpdateRule("lion", (State("direction"),), copies=1, takes_sign=True)
MUON = UpdateRule("muon", (State("momentum"),), whole_matrices=True)
OPTIMIZERS = {
    "adamw": Optimizer(ADAMW, ADAMW, as_adamw=""),
    "lion": Optimizer(LION, LION),
    "muon": Optimizer(MUON, ADAMW, as_adamw="with updates as large as AdamW's (arXiv:2502.16982)"),
}
