"""Scores of attention: their scale and soft cap, and the keys that a query sees.

Shapes: b micro-batch, s tokens of a sample, t those of a sample on this rank.
"""

from typing import NamedTuple, Self

import torch

from megazero.engine.kernels.rotary import yarn_growth
from megazero.engine.model.documents import Documents
from megazero.engine.options.model_options import ModelOptions


class Scores(NamedTuple):
    """The options of one layer's scores. The defaults are scores q k / sqrt(d) of all earlier keys."""

    window: int = 0  # tokens that a query sees, itself included; 0: all
    softcap: float = 0.0  # C of C tanh(score / C); 0: none
    scale: float = 0.0  # 0: 1 / sqrt(d)

    @classmethod
    def of(cls, model: ModelOptions, number: int) -> Self:
        """Return the options of layer `number`. A window of all of a sample is none."""
        local = model.attention_kind(number) == "L" and model.window_size < model.seq_length
        scale = model.attention_scale
        if model.multi_latent_attention:
            grown = model.rope_scaling_type == "yarn" and model.mscale_all_dim > 0
            growth = yarn_growth(model.rope_scaling_factor, model.mscale_all_dim) if grown else 1.0
            scale = (scale or model.head_dim**-0.5) * growth**2
        return cls(model.window_size if local else 0, model.attention_softcap, scale)

    @classmethod
    def windows(cls, model: ModelOptions) -> tuple[int, ...]:
        """Return the window of every layer."""
        return tuple(cls.of(model, number).window for number in range(model.num_layers))

    def factor(self, head_dim: int) -> float:
        """Return the factor of q k."""
        return self.scale or head_dim**-0.5

    def cap_(self, scores: torch.Tensor) -> torch.Tensor:
        """Bound scores by the soft cap, in place."""
        return scores.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap else scores

    def uncap_grad_(self, gradient: torch.Tensor, capped: torch.Tensor) -> torch.Tensor:
        """Turn the gradient of capped scores into that of the scores, in place: tanh' = 1 - tanh^2."""
        return gradient.sub_(gradient * (capped / self.softcap).square_())

    def first_seen(
        self, scores: torch.Tensor, documents: Documents | None, indices: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the first key that each query of `scores` [.., t, s] sees, [b, t] or [1, t]; None: the first of all.

        It is negative where a window begins before its sample.

        Args:
            indices: of the queries in their samples, [b, t]; None: 0 to s - 1.
        """
        starts = None if documents is None else documents.starts
        if starts is not None and indices is not None:
            starts = starts.gather(1, indices)
        if not self.window:
            return starts
        if indices is None:
            indices = torch.arange(scores.shape[-1], device=scores.device)[None]
        begins = indices - (self.window - 1)
        return begins if starts is None else begins.maximum(starts)


PLAIN = Scores()
