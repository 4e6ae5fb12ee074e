"""Scores of experts: the experts that a token passes, and the weights of their results.

The score of an expert is its probability, softmax(logits)_i, or sigmoid(logit_i), as in DeepSeek-V3. l_i is the log of
the score, up to a summand that all experts of a token share: the logit or log sigmoid(logit). So softmax(l) are the
scores divided by their sum, over all experts or over a token's. It is defined where scores underflow, and so it needs
no 1e-20 in the divisor, which DeepSeek-V3's code has: a router cannot switch its experts off by small scores.

Shapes: T tokens, E experts, G groups of them, k experts of a token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megazero.engine.options.schema import ModelConfig

GROUP_BEST = 2  # experts whose scores make that of their group


@dataclass(frozen=True)
class ExpertScores:
    """The scores of a model's routers, of logits [T, E]."""

    model: ModelConfig

    @property
    def _sigmoid(self) -> bool:
        return self.model.moe_router_score_function == "sigmoid"

    @property
    def are_restricted(self) -> bool:
        """True if biases or groups decide the choice besides the scores."""
        return self.model.moe_router_enable_expert_bias or self.model.moe_router_num_groups > 0

    def logs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return l [T, E], whose softmax is the share of each expert in a token's scores."""
        return F.logsigmoid(logits) if self._sigmoid else logits

    def logits_grad(self, dlogs: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the gradient of logits, given that of `logs`."""
        return dlogs * (-logits).sigmoid() if self._sigmoid else dlogs

    def choose(self, logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the k experts of each token, [T, k].

        With groups, a token passes experts of a few groups alone: those with the largest sums of their best two.

        Args:
            bias: added to the scores, [E]; None: nothing is.
        """
        model = self.model
        if not self.are_restricted:
            return self.best(logits)
        scores = logits.sigmoid() if self._sigmoid else logits.softmax(-1)
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        if model.moe_router_num_groups:
            groups = scores.unflatten(-1, (model.moe_router_num_groups, -1))
            sums = groups.topk(min(GROUP_BEST, groups.shape[-1])).values.sum(-1)
            others = torch.ones_like(sums, dtype=torch.bool)
            others.scatter_(1, sums.topk(model.moe_router_group_topk).indices, False)
            scores = groups.masked_fill(others[..., None], -torch.inf).flatten(1)
        return self.best(scores)

    def best(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the k experts with the largest scores, [T, k]; their logits are in the same order."""
        return scores.topk(self.model.moe_router_topk).indices

    def weights(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the weights of the results of experts `ids` [T, k]."""
        if not self.model.moe_router_pre_softmax:
            weights = self.logs(logits.gather(1, ids)).softmax(-1)
        elif self._sigmoid:
            weights = logits.gather(1, ids).sigmoid()
        else:
            weights = logits.softmax(-1).gather(1, ids)
        return weights * self.model.moe_router_topk_scaling_factor

    def weights_grad(
        self, dweights: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of logits, given that of `weights` [T, k]."""
        dlogs = dweights * weights
        total = dlogs.sum(-1, keepdim=True)
        if not self.model.moe_router_pre_softmax:
            dlogs -= weights * (total / self.model.moe_router_topk_scaling_factor)
        dlogits = torch.zeros_like(logits).scatter_(1, ids, self.logits_grad(dlogs, logits.gather(1, ids)))
        if self.model.moe_router_pre_softmax and not self._sigmoid:
            dlogits -= logits.softmax(-1) * total
        return dlogits


def without_room(values: torch.Tensor, groups: torch.Tensor, num_groups: int, room: int) -> torch.Tensor:
    """Return which values [N] are not among the `room` largest of their group [N]; of equal ones, the first are."""
    order = values.argsort(descending=True, stable=True)
    order = order[groups[order].argsort(stable=True)]
    sizes = groups.new_zeros(num_groups).scatter_add_(0, groups, torch.ones_like(groups))
    starts = sizes.cumsum(0) - sizes
    places = torch.arange(len(order), device=order.device) - starts[groups[order]]
    return torch.empty_like(order, dtype=torch.bool).index_copy_(0, order, places >= room)
