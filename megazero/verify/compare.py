"""Compare two trainings of one model, quantity by quantity, and find the first thing that differs."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np

from megazero.engine.options.optimizers import AVERAGE
from megazero.engine.plan.layout.layers import Layers
from megazero.engine.plan.layout.parameters import ParamSpec
from megazero.flags.config import Config
from megazero.units import things
from megazero.verify.tolerance import Tolerance, scales
from megazero.verify.training import Array, Sums, Trained, VerifiedStep, joined

MODEL, AVERAGED = "model.", f"{AVERAGE.name}."  # prefixes of weights among the names of a checkpoint


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        difference, tolerance: relative, at `where`, which is nearest to its tolerance, or above it.
        note: instead of numbers.
    """

    what: str
    difference: float
    where: str
    tolerance: float
    passed: bool
    note: str = ""


class Whole(NamedTuple):
    """A training on all ranks, put together.

    Attributes:
        layers: of each step, (layer, backward) -> sums over all ranks.
        unequal: the first weight or state whose copies on several ranks differ; empty: none.
    """

    steps: list[VerifiedStep]
    layers: list[dict[tuple[str, bool], Sums]]
    gradients: list[dict[str, Array]]
    states: dict[str, Array]
    unequal: str

    @classmethod
    def of(cls, ranks: Sequence[Trained]) -> Self:
        steps, layers = ranks[0].steps, []
        for number, _ in enumerate(steps):
            sums: dict[tuple[str, bool], Sums] = {}
            for rank in ranks:
                for key, each in rank.steps[number].layers.items():
                    sums[key] = sums.get(key, Sums()) + each
            layers.append(sums)
        gradients = [joined([rank.steps[n].gradients for rank in ranks])[0] for n, _ in enumerate(steps)]
        return cls(steps, layers, gradients, *joined([rank.states for rank in ranks]))


class Difference(NamedTuple):
    """A difference of one thing, divided by its size, and its tolerance."""

    where: str
    relative: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.relative <= self.tolerance  # False for NaN

    @property
    def badness(self) -> float:
        """The difference in tolerances."""
        found = self.relative / self.tolerance if self.tolerance else self.relative
        return found if math.isfinite(found) else math.inf


def row(what: str, differences: Sequence[Difference]) -> Row:
    """Return the line of things of one kind, with the one that is nearest to its tolerance."""
    worst = max(differences, key=lambda each: each.badness)
    passed = all(each.passed for each in differences)
    return Row(what, worst.relative, worst.where, tolerance=worst.tolerance, passed=passed)


def noted(what: str, passed: bool, note: str, where: str = "") -> Row:
    """Return a line without numbers."""
    return Row(what, 0.0, where, tolerance=0.0, passed=passed, note=note)


def numbers(found: float, wanted: float) -> float:
    return abs(found - wanted) / abs(wanted) if wanted else abs(found)


class Comparison:
    """A training next to its reference."""

    def __init__(
        self, reference: Whole, found: Whole, config: Config, layers: Layers, tolerance: Tolerance, before: int = 0
    ) -> None:
        """Take two trainings.

        Args:
            config: resolved, of either training.
            before: steps before the first of these.
        """
        self.reference, self.found, self.tolerance, self.before = reference, found, tolerance, before
        self.specs: dict[str, ParamSpec] = {}
        self.layer_of: dict[str, str] = {}
        for layer, kind in layers.kinds.items():
            for spec in kind.params_of(layer, config.training.freeze_parameters):
                self.specs[spec.name], self.layer_of[spec.name] = spec, layer
        self.layers = list(layers.kinds)
        self.scales = [scales(each, self.layer_of) for each in reference.gradients]

    # -- of a step, counted from 0

    def _step(self, step: int) -> str:
        return f"step {self.before + step + 1}"

    @property
    def last(self) -> str:
        return self._step(len(self.reference.steps) - 1)

    def loss(self, step: int) -> Difference:
        ours, theirs = self.found.steps[step], self.reference.steps[step]
        tolerance = self.tolerance.loss(step, self.reference.steps, self.reference.gradients)
        return Difference(self._step(step), numbers(ours.loss, theirs.loss), tolerance)

    def norm(self, step: int) -> Difference:
        ours, theirs = self.found.steps[step], self.reference.steps[step]
        return Difference(self._step(step), numbers(ours.norm, theirs.norm), self.tolerance.relative)

    def gradients(self, step: int) -> Iterator[Difference]:
        """Yield the difference of every weight's gradient, in the order of the model."""
        ours, theirs = self.found.gradients[step], self.reference.gradients[step]
        for name in self.specs:
            if name in theirs or name in ours:
                place = f"{name}, {self._step(step)}"
                yield Difference(place, self._apart(ours, theirs, name, self.scales[step].get(name, 0.0)), self.limit)

    @property
    def limit(self) -> float:
        return self.tolerance.relative

    @staticmethod
    def _apart(ours: Mapping[str, Array], theirs: Mapping[str, Array], name: str, scale: float) -> float:
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape:
            return math.inf
        apart = float(np.abs(ours[name] - theirs[name]).max())
        return apart / scale if scale else apart

    def results(self, step: int, backward: bool) -> Iterator[Difference]:
        """Yield the differences of the layers' outputs, or of the gradients of their inputs, in the order of a step."""
        ours, theirs = self.found.layers[step], self.reference.layers[step]
        for layer in reversed(self.layers) if backward else self.layers:
            if (layer, backward) not in theirs:
                continue
            a, b = ours.get((layer, backward), Sums()), theirs[layer, backward]
            size = math.sqrt(b.number * b.squares)
            apart = max(numbers(a.squares, b.squares), abs(a.total - b.total) / size if size else abs(a.total))
            what = "gradient of the input" if backward else "output"
            yield Difference(f"the {what} of {layer}, {self._step(step)}", apart, 4 * self.limit)

    # -- after the last step

    def weights(self) -> Iterator[Difference]:
        """Yield the difference of every weight, and of every running average of one."""
        steps, largest = self.reference.steps, {n: max(s.get(n, 0.0) for s in self.scales) for n in self.specs}
        kinds = [MODEL, AVERAGED] if any(key.startswith(AVERAGED) for key in self.reference.states) else [MODEL]
        for kind, (name, spec) in itertools.product(kinds, self.specs.items()):
            label = name if kind == MODEL else f"the average of {name}"
            ours, theirs = (whole.states.get(kind + name) for whole in (self.found, self.reference))
            missing = spec.trains and any(name not in each for each in self.reference.gradients)  # a skipped step
            if missing or ours is None or theirs is None or ours.shape != theirs.shape:
                yield Difference(label, math.inf, self.limit)
                continue
            size = float(np.abs(theirs).max()) or 1.0
            allowed = np.full(spec.shape, self.limit * size)
            if spec.trains:
                history = [each[name] for each in self.reference.gradients]
                allowed = allowed + self.tolerance.moved(spec, steps, largest[name], history)
            apart = np.nan_to_num(np.abs(ours - theirs), nan=math.inf)
            worst = np.unravel_index(np.argmax(apart / allowed), apart.shape)
            yield Difference(label, float(apart[worst]) / size, float(allowed[worst]) / size)

    def states(self) -> Iterator[Difference]:
        """Yield the difference of every state of the optimizer."""
        ours, theirs = self.found.states, self.reference.states
        for key in dict.fromkeys([*theirs, *ours]):
            kind, _, name = key.partition(".")
            if kind + "." in (MODEL, AVERAGED) or name not in self.specs or not self.specs[name].trains:
                continue
            squared = 2 if kind == "exp_avg_sq" else 1
            own = float(np.abs(theirs[key]).max()) if key in theirs else 0.0
            # A mean of gradients is as large as they are, or smaller; its rounding is theirs.
            largest = max(each.get(name, 0.0) for each in self.scales) ** squared
            scale = max(own, largest * (1e-3 if squared == 1 else 1e-6))
            yield Difference(key, self._apart(ours, theirs, key, scale), squared * 10 * self.limit)

    # -- all

    def rows(self, whole_batches: Sequence[bool]) -> list[Row]:
        """Return the table.

        Args:
            whole_batches: of each step, whether no rank computes padding: else sums over layers' results differ.
        """
        steps = range(len(self.reference.steps))
        exact = self.tolerance.exact
        found = [row("loss", [self.loss(n) for n in steps])]
        if not exact and self.found.steps[0].choices != self.reference.steps[0].choices:
            return [*found, noted("gradients", True, "not compared: rounding chose other experts")]
        near = steps if exact else steps[:1]
        found.append(row("gradient norm", [self.norm(n) for n in near]))
        whole = [n for n in near if whole_batches[n] and exact]
        if whole:
            found.append(row("outputs of layers", [d for n in whole for d in self.results(n, False)]))
            backward = [d for n in whole for d in self.results(n, True)]
            if backward:
                found.append(row("gradients of their inputs", backward))
        gradients = [d for n in near for d in self.gradients(n)]
        count = things(len(self.reference.gradients[0]), "weight")
        found.append(row(f"gradients of {count}", gradients))
        if exact:  # an optimizer makes full steps of the rounding of small gradients
            found += [self.weights_row(), *self.states_row()]
        unequal = self.found.unequal
        found.append(noted("copies on several ranks", not unequal, "differ" if unequal else "equal", unequal))
        return found

    def weights_row(self) -> Row:
        return row(f"weights after {self.last}", list(self.weights()))

    def states_row(self) -> list[Row]:
        states = list(self.states())
        return [row(f"optimizer states after {self.last}", states)] if states else []

    def first(self, whole_batches: Sequence[bool]) -> str:
        """Name the first thing that differs, in the order in which a step computes."""
        for step, _ in enumerate(self.reference.steps):
            ordered: list[tuple[str, list[Difference]]] = []
            if whole_batches[step]:
                ordered.append(("", list(self.results(step, False))))
            ordered.append(("the loss of ", [self.loss(step)]))
            if whole_batches[step]:
                ordered.append(("", list(self.results(step, True))))
            gradients = list(self.gradients(step))
            ordered += [("the gradient of ", gradients), ("the gradient norm of ", [self.norm(step)])]
            for words, differences in ordered:
                wrong = [each for each in differences if not each.passed]
                if wrong:
                    return self._words(words, wrong, [each for each in gradients if not each.passed], len(gradients))
        wrong = [each for each in (*self.weights(), *self.states()) if not each.passed]
        if wrong:
            return f"all gradients agree; the first value that differs after {self.last} is {self._value(wrong[0])}"
        return ""

    @staticmethod
    def _value(one: Difference) -> str:
        return f"{one.where} (by {one.relative:.1e} of its size; rounding gives at most {one.tolerance:.1e})"

    def _words(self, words: str, wrong: list[Difference], gradients: list[Difference], count: int) -> str:
        text = f"the first thing that differs is {words}{self._value(wrong[0])}"
        if gradients and gradients[0] is not wrong[0]:
            text += f"; the first gradient in the order of the model is that of {gradients[0].where}"
        if gradients:
            text += f"; {len(gradients)} of {count} gradients differ in that step"
        return text
