"""Bytes of model states, of an optimizer's states and of its updates, in integers. Pure.

The account (`planner.sizes`) adds them up, and `zero` allocates them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from megazero.engine.memory import BLOCKS, PAGE
from megazero.engine.options.optimizers import BYTES, UpdateRule
from megazero.engine.options.schema import StepConfig
from megazero.engine.plan.layout.flat_layout import FlatLayout, Matrices, Range, round_up


class Rates(NamedTuple):
    """Bytes per element.

    Attributes:
        state: of a master weight.
        optimizer: of separate master weights and, if the run trains, of the optimizer's states.
        in_file: of a unit with states in a file: of all master weights and of these states.
        update: read and written by the optimizer's update.
    """

    weights: int
    gradients: int
    state: int
    optimizer: Fraction
    in_file: Fraction
    update: Fraction

    @classmethod
    def of(cls, config: StepConfig, rule: UpdateRule) -> Rates:
        w, g = BYTES[config.training.precision], BYTES[config.training.grad_dtype]
        state = max(4, w)
        states = rule.state_bytes(state) if config.trains else Fraction(0)
        masters = config.optimizer.rules.master_bytes(w, state)
        return cls(
            weights=w,
            gradients=g,
            state=state,
            optimizer=masters + states,
            in_file=state + states,
            update=rule.update_bytes(state),
        )

    @property
    def buffer(self) -> int:
        """Return those of the host's buffer for gradients and then for updated weights."""
        return max(self.weights, self.gradients)


class OwnedSizes(NamedTuple):
    """Bytes of the part of a unit that a rank owns: at rest, in a file, and in an update.

    Attributes:
        by_rule: rule -> elements.
        matrices: those that an optimizer of whole matrices updates.
        working: elements of the buffers in which the largest of them is updated.
    """

    run: OptimizerSizes
    numel: int
    by_rule: Mapping[UpdateRule, int]
    matrices: list[Matrices]
    working: int

    @property
    def buffer(self) -> int:
        """Bytes of the host's buffer for gradients and then for updated weights."""
        return self.numel * self.run.others.buffer

    @property
    def in_file(self) -> tuple[int, int]:
        """Bytes of the region in a file: of the buffer, and of master weights and states."""
        states = sum(int(n * self.run.rates[rule].in_file) for rule, n in self.by_rule.items())
        return round_up(self.buffer, PAGE), round_up(states, PAGE)

    @property
    def temporary(self) -> int:
        """Bytes that an update allocates: cast gradients, buffers of a matrix, wide copies of narrow states."""
        rates, working = self.run.others, self.working * self.run.product_bytes
        cast = self.numel * rates.state if rates.gradients < rates.state else 0
        splits = self.run.rules.splits
        return cast + max(rule.scratch_bytes(n, rates.state, splits, working) for rule, n in self.by_rule.items())


class OptimizerSizes:
    """Sizes of a run's optimizer.

    Attributes:
        others: rates of the rule of tables and vectors.
        product_bytes: of a number in the products of matrices.
    """

    def __init__(self, config: StepConfig) -> None:
        self.rules, self.clips = config.optimizer.rules, bool(config.optimizer.clip_grad)
        self.rates = {rule: Rates.of(config, rule) for rule in self.rules.rules}
        self.others, self.product_bytes = self.rates[self.rules.others], BYTES[config.training.product_precision]

    def owned(self, flat: FlatLayout, owned: Range, axes: Mapping[str, int], parts: int = 1) -> OwnedSizes:
        """Return the sizes of the part of a unit in `owned`, or of the mean of `parts` equal parts of it.

        Args:
            axes: axis -> its ranks, at least for those that divide a matrix.
        """
        by_rule = dict.fromkeys(self.rules.rules, 0)
        for rule, part in flat.by_rule(owned, self.rules):
            by_rule[rule] += part.numel
        matrices = flat.matrices_in(owned) if self.rules.matrices.whole_matrices else []
        working = max((each.working(axes[each.axis] if each.axis else 1) for each in matrices), default=0)
        return OwnedSizes(
            run=self,
            numel=owned.numel // parts,
            by_rule={rule: n // parts for rule, n in by_rule.items()},
            matrices=matrices,
            working=working,
        )


def block_sizes(regions: Sequence[int]) -> list[int]:
    """Return the bytes of each block of host memory in which units with these regions of a file take turns."""
    return [max(regions, default=0)] * min(BLOCKS, len(regions))
