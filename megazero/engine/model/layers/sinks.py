"""Attention sinks: each head has a learned score that takes a share of every query's softmax, and has no value.

Attention without it gives y and the log of the sum of exp(score), l. With the sink's score c, the sum is exp(l) +
exp(c): y is multiplied by sigmoid(l - c), and l becomes the log of the new sum. Fused kernels are corrected so, after
their parts are merged. Their backwards compute probabilities from l and their mean gradient from y, so with these
values they return the gradients of queries, keys and values as they are. The gradient of c is -sum over queries of its
probability times dy y, since its value is 0.

Shapes: b micro-batch, t tokens of a sample on this rank, s keys, n/tp heads of this rank, d head dim.
"""

import torch

from megazero.engine.kernels.eager import unseen, wide
from megazero.engine.model.layers.context import Context
from megazero.engine.model.layers.weight import WeightedModule
from megazero.engine.options.model_options import ModelOptions


class Sinks(WeightedModule):
    """The sinks of a layer's heads, sharded over tp like them."""

    def __init__(self, model: ModelOptions, context: Context) -> None:
        super().__init__()
        self.weight = context.weight(model.num_attention_heads, sharded={0: "tp"}, std=model.init_method_std)

    def join_(self, y: torch.Tensor, log_sums: torch.Tensor) -> None:
        """Add the sinks to attention y [b, n/tp, t, d] and its log-sum-exp [b, n/tp, t], once for every query."""
        scores = self._like(log_sums)
        y.mul_(torch.sigmoid(log_sums - scores)[..., None])
        log_sums.copy_(torch.logaddexp(log_sums, scores))

    def softmax(
        self, scores: torch.Tensor, starts: torch.Tensor | None, indices: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the softmax of scores [b, n/tp, t, s] with the sinks, and their shares; see `causal_softmax`.

        Shares are not 1 less the sum of the weights, whose rounding may be larger.
        """
        exact = scores.masked_fill_(unseen(scores, starts, indices), -torch.inf).to(wide(scores))
        sums = exact.logsumexp(-1)
        totals = torch.logaddexp(sums, self._like(sums))
        return (exact - totals[..., None]).exp_().to(scores.dtype), self.shares(totals)

    def shares(self, log_sums: torch.Tensor) -> torch.Tensor:
        """Return the sinks' shares of the softmax: log_sums [b, n/tp, t], with the sinks."""
        return (self._like(log_sums) - log_sums).exp_()

    def add_grad(self, shares: torch.Tensor, means: torch.Tensor) -> None:
        """Hand over the gradient: shares and dy y, both [b, n/tp, t]."""
        self.weight.add_grad(-(shares * means).sum((0, 2)))

    def _like(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores for x [b, n/tp, t]."""
        return self.weight.data.to(x.dtype)[:, None]
