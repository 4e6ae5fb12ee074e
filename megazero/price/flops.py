"""Model FLOPs by the closed formula."""

from __future__ import annotations

from megazero.config.schema import ModelConfig


def model_flops(model: ModelConfig, samples: int) -> float:
    """Return 72 B L s h^2 (1 + s/6h + V/12hL) of an iteration over `samples`, without recompute (Narayanan 2021)."""
    b, s, h = samples, model.seq_length, model.hidden_size
    layers, v = model.num_layers, model.vocab_size
    return 72 * b * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
