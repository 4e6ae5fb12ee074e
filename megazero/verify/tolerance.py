"""Differences that rounding allows between two trainings of one model, from the sizes that are added up.

Note [tolerances]: a layout changes the order of sums alone. A sum of n terms in floating point is wrong by at most
n u times the sum of their absolute values, where u is the unit roundoff (Higham, Accuracy and Stability of Numerical
Algorithms, section 4.2). A gradient is behind a chain of such sums, through the model and back; `terms` adds up their
lengths. Of n terms with random signs, the sum of the absolute values is about sqrt(n) times the sum. So

    fp64   u n sqrt(n)     the bound itself: about 1e-11. A mistake is 1e-6 and more.
    else   8 u sqrt(n)     for independent roundings, exceeded with a probability of 2 exp(-32) (Higham and Mary, A New
                           Approach to Probabilistic Rounding Error Analysis, 2019). In 16 bit, n counts the results
                           that are rounded to 16 bit, because products are added up in fp32.

A difference of a tensor is compared with its largest element, but at least with `FLOOR` of the largest gradient of its
layer: some gradients are 0 in theory and rounding in practice, such as those of biases of keys.

An update divides by the gradient's own size. AdamW moves a weight by lr g / (|g| + eps), so that a difference d of g
moves it by 2 lr d / (|g| + eps), at most by 2 lr; elements with g near 0 move by their rounding. Lion takes signs.
Muon's Newton-Schulz iterations multiply small singular values by 3.4 each, and their rounding with them.

Below fp64, one update makes weights differ by up to 2 lr where gradients are rounding. Later gradients then differ by
more than rounding, so only the first step's are compared, and later losses to first order: sum of |g| x difference.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, Self

import numpy as np

from megazero.engine.plan.layout.parameters import ParamSpec
from megazero.flags.config import Config
from megazero.verify.training import Array, VerifiedStep

ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "tf32": 2.0**-11, "bf16": 2.0**-8}
FLOOR = 1e-3
SIGMAS = 8.0
GROWTH = 3.4  # of a small singular value in a Newton-Schulz iteration
RESULTS = 12  # of a block that are rounded: norms, products, attention, activations, sums


def terms(config: Config) -> int:
    """Return the number of terms that are added up in a chain of sums through the model, back, and over the batch."""
    model = config.model
    inner = model.num_attention_heads * model.head_dim
    widths = model.ffn_size + model.moe_router_topk * model.expert_size * (model.num_experts > 0)
    block = 4 * model.hidden_size + inner + 2 * model.seq_length + widths
    depths = model.mtp_num_layers
    chain = 3 * ((model.num_layers + depths) * block + model.hidden_size + (1 + depths) * model.vocab_size)
    return chain + config.training.global_batch_size * model.seq_length


class Tolerance(NamedTuple):
    """Tolerances of a training.

    Attributes:
        relative: of a gradient, compared with the largest element.
        exact: fp64; otherwise only values before the first update are compared closely.
    """

    config: Config
    relative: float
    exact: bool

    @classmethod
    def of(cls, config: Config, on_gpu: bool) -> Self:
        """Return the tolerances of a resolved configuration."""
        precision, number = config.training.precision, terms(config)
        roundoff = ROUNDOFF["tf32" if on_gpu and precision == "fp32" and config.training.tf32 else precision]
        if precision == "fp64":
            return cls(config, roundoff * number * math.sqrt(number), True)
        if precision in ("bf16", "fp16"):
            number = 3 * RESULTS * (config.model.num_layers + config.model.mtp_num_layers)
        return cls(config, SIGMAS * roundoff * math.sqrt(number), False)

    def loss(self, step: int, steps: list[VerifiedStep], gradients: list[dict[str, Array]]) -> float:
        """Return the relative tolerance of the loss of a step, counted from 0."""
        tokens = self.config.training.global_batch_size * self.config.model.seq_length
        found = self.relative if self.exact else self.relative / math.sqrt(tokens)
        for at in range(0 if self.exact else step):
            moved = sum(g.size * float(np.abs(g).max()) for g in gradients[at].values())
            found += 2 * steps[at].lr * self.relative * moved / abs(steps[step].loss)
        return found

    def moved(self, spec: ParamSpec, steps: list[VerifiedStep], scale: float, gradients: list[Array]) -> Array:
        """Return how far each element of a weight may be moved apart by all updates.

        Args:
            scale: of the weight's gradients: see Note [tolerances].
            gradients: of each step.
        """
        optimizer = self.config.optimizer
        rule = optimizer.rules.rule(spec.kind)
        rate = sum(step.lr for step in steps)
        if not self.exact:
            return np.full(spec.shape, 2 * rate * self._factor(spec, rule.whole_matrices))
        if rule.whole_matrices:
            grown = self.relative * GROWTH**optimizer.muon_num_ns_steps
            return np.full(spec.shape, rate * self._factor(spec, True) * min(2.0, grown))
        clip = min([1.0, *(optimizer.clip_grad / step.norm for step in steps if optimizer.clip_grad and step.norm)])
        least = np.min([np.abs(each) for each in gradients], axis=0) * clip
        wrong = self.relative * scale * clip
        if rule.takes_sign:
            found: Array = np.where(least <= wrong, 2.0, self.relative)
        else:
            found = np.minimum(2.0, 2 * wrong / (least + optimizer.adam_eps))
        return rate * found

    def _factor(self, spec: ParamSpec, matrix: bool) -> float:
        """Return the largest change of an element in units of the learning rate."""
        if not matrix:
            return 1.0
        columns = spec.shape[-1]
        rows = math.prod(spec.shape) // columns // math.prod(spec.shape[dim] for dim in spec.matrices or ())
        if self.config.optimizer.muon_scale == "moonlight":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns, columns / rows))


def scales(gradients: Mapping[str, Array], layer_of: Mapping[str, str]) -> dict[str, float]:
    """Return the size that differences of each weight's gradient are compared with: see Note [tolerances]."""
    own = {name: float(np.abs(each).max()) for name, each in gradients.items()}
    largest: dict[str, float] = {}
    for name, value in own.items():
        largest[layer_of[name]] = max(value, largest.get(layer_of[name], 0.0))
    return {name: max(value, FLOOR * largest[layer_of[name]]) for name, value in own.items()}
