"""Tolerances from theory: how far a sum in floating point may be from the exact one, on any machine.

A sum of n terms, in any order and with or without fused multiply-adds, has an error of at most n u / (1 - n u) times
the sum of the terms' absolute values, where u = eps / 2 (Higham, Accuracy and Stability of Numerical Algorithms,
2002, sections 3.1 and 4.2). `eps` in place of u covers the denominator, and a reference that is rounded too.
Errors of a long chain of sums are independent, and add up to at most lambda sqrt(n) u but for a probability of
2 exp(-lambda^2 / 2) (Higham and Mary, A new approach to probabilistic rounding error analysis, 2019).
"""

import math

import torch

from megazero.flags.config import ModelConfig

LAMBDA = 10.0  # exceeded with a probability of 4e-22


def error_bound(
    magnitude: torch.Tensor | float, terms: int, dtype: torch.dtype, stored: torch.dtype | None = None
) -> torch.Tensor | float:
    """Return the largest error that rounding can cause in a sum.

    Args:
        magnitude: sum of the absolute values of all that is added; a number, or one per element of the result.
        terms: number of terms; a product that is added counts once.
        dtype: of the arithmetic.
        stored: dtype of the result, if it is narrower: it is rounded once more, and again where it is added to.
    """
    rounded = torch.finfo(stored).eps if stored is not None and stored != dtype else 0.0
    return (terms * torch.finfo(dtype).eps + rounded) * magnitude


def assert_sum(
    found: torch.Tensor, wanted: torch.Tensor, magnitude: torch.Tensor, terms: int, dtype: torch.dtype | None = None
) -> None:
    """Require sums to equal `wanted`, of fp64, but for rounding.

    Args:
        found: the sums, in any dtype.
        wanted, magnitude: their exact values, and `error_bound`'s magnitude; shapes as found.
        terms: see `error_bound`.
        dtype: of the arithmetic; None: that of `found`.
    """
    bound = error_bound(magnitude, terms, dtype or found.dtype, found.dtype)
    error = (found.double() - wanted).abs()
    assert bool((error <= bound).all()), f"off by {(error / bound).max():.3g} times the bound"  # NaN is no less


def model_tolerance(model: ModelConfig, dtype: torch.dtype) -> float:
    """Return the relative error that rounding causes in a model's logits, losses and gradients before any update.

    Relative to the largest logit or gradient of a tensor. A layer's deepest chain of roundings is its longest sum, and
    each layer has one in the forward pass and one in the backward pass.
    """
    longest = max(model.hidden_size, model.ffn_size, model.vocab_size, model.seq_length)
    roundings = 2 * (model.num_layers + 1) * longest
    return LAMBDA * math.sqrt(roundings) * torch.finfo(dtype).eps / 2
