"""The router of a mixture of experts: the experts that a token passes, their weights, and the losses that balance them.

Note [scores]: the score of an expert is its probability, softmax(logits)_i, or sigmoid(logit_i), as in DeepSeek-V3.
l_i is the log of the score, up to a summand that all experts of a token share: the logit or log sigmoid(logit). So
softmax(l) are the scores divided by their sum, over all experts or over a token's. It is defined where scores
underflow, and so it needs no 1e-20 in the divisor, which DeepSeek-V3's code has: a router cannot switch its experts off
by small scores.

Note [balance]: the losses are defined per sample, so they are the same in every layout and micro-batching. A whole
batch's balance is unknown when the first backward begins. They are no part of the printed loss. Their gradient is added
to that of the logits in backward:

    objective = sum over samples of n / N * (mean cross-entropy + sum over layers of aux * E * sum_i f_i P_i
                                             + z * mean over tokens of logsumexp(logits)^2)

with n targets of the sample and N of the global batch, f_i the share of expert i in the sample's choices, and P_i the
mean over tokens of its share in the scores: its probability, or with sigmoid scores s_i / sum_j s_j, as in DeepSeek-V3
(arXiv:2412.19437, equations 17 to 20). There and here, f_i counts the experts with the largest scores, without bias and
groups. A sample without targets, such as padding, counts nothing.

Note [capacity]: with --moe-expert-capacity-factor, an expert takes the choices of a sample with the largest weights. It
takes the same ones in every layout, because the ranks that share the sample exchange its weights. Equal tokens at the
begin of a document have equal weights but for rounding, which depends on the layout; so weights are compared to half
their digits, and the earlier token comes first. Balance losses, loads and biases count choices before any is dropped.
A later token can displace an earlier one, which is not causal, so only training drops choices.

Shapes: b micro-batch, s sequence, T tokens that this rank routes, E experts, G groups of them, k experts of a token,
h hidden.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megazero.engine.kernels.eager import wide
from megazero.engine.kernels.grouped import is_fused
from megazero.engine.mesh.collectives import MAX
from megazero.engine.model.dispatch import Choices, Dispatch
from megazero.engine.model.layers.context import Context, MicroBatchInfo
from megazero.engine.model.layers.weight import GradWriter, WeightedModule
from megazero.engine.options.model_options import ModelOptions
from megazero.engine.plan.layout.layers import ROUTER_SUMS

GROUP_BEST = 2  # experts whose scores make that of their group


@dataclass(frozen=True)
class ExpertScores:
    """The scores of a model's routers, of logits [T, E]."""

    model: ModelOptions

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


class Routed(NamedTuple):
    """A router's results for T tokens."""

    logits: torch.Tensor  # [T, E] in fp32, or fp64 of fp64
    choices: Choices
    weights: torch.Tensor  # of the chosen experts' results, [T, k]


class Router(WeightedModule):
    """x @ weight.T, plus a bias if experts have biases. A token passes the k experts with the largest scores.

    The ranks that share each expert (etp) route the same T tokens. Each has a part of the experts' inner width, so the
    gradient of a chosen expert's weight in the sum is a summand of that rank, and the router's gradients are too.

    Attributes:
        statistics: of this step, of the samples with targets, [E + 4] fp64: choices of each expert, the sum over tokens
            of the entropy, dropped choices, and sums over samples of n times the balance losses without their factors.
        bias: added to the scores for the choice, [E] fp64, see `Routers`; None: nothing is.
    """

    def __init__(self, model: ModelOptions, number: int, context: Context) -> None:
        super().__init__()
        self.model, self.number, self.context = model, number, context
        self.experts, self.top, self.scores = model.num_experts, model.moe_router_topk, ExpertScores(model)
        self.weight = context.weight(
            self.experts, model.hidden_size, std=model.init_method_std, decays=True, summed=("tp",)
        )
        self.logit_bias = None
        if "experts" in model.linear_biases:
            self.logit_bias = context.weight(self.experts, std=model.init_method_std, summed=("tp",))
        widths = model.hidden_size, model.expert_size // context.etp.size
        self.on_host = not is_fused(context.dtype, context.device, *widths)
        self.statistics = torch.zeros(self.experts + ROUTER_SUMS, dtype=torch.float64, device=context.device)
        self.bias: torch.Tensor | None = None
        if model.moe_router_enable_expert_bias:
            self.bias = self.statistics.new_zeros(self.experts)

    def forward(self, x: torch.Tensor, tokens: MicroBatchInfo, has_graph: bool) -> Routed:
        """x [T, h], equal on all ranks of etp. Runs below autograd."""
        exact, choices = wide(x), None
        bias = None if self.logit_bias is None else self.logit_bias.data.to(exact)
        logits = F.linear(x.to(exact), self.weight.data.to(exact), bias)
        if has_graph and tokens.balance is not None:
            choices = tokens.balance.take(self.number)  # choices of the Forward that this Recompute repeats
        if choices is None:
            choices = self._choose(logits, tokens, has_graph)
        return Routed(logits, choices, self.mixed(logits, choices))

    def _choose(self, logits: torch.Tensor, tokens: MicroBatchInfo, has_graph: bool) -> Choices:
        ids, balance, context = self.scores.choose(logits, self.bias), tokens.balance, self.context
        whole = self.model.seq_length
        capacity = whole if balance is None else self.model.expert_capacity
        limited = self._limited(ids, logits, capacity, tokens) if capacity < whole else ids
        most = len(ids) * self.experts * capacity // whole
        dispatch = Dispatch.of(context.ep, limited, self.experts, most=most, on_host=self.on_host)
        choices = Choices(limited.to(torch.int16), None, dispatch)
        if balance is None:
            return choices
        samples = torch.zeros(len(balance.targets), len(ids), dtype=logits.dtype, device=ids.device)
        samples.scatter_(0, self._places(len(ids), tokens)[None] // tokens.length, float(context.etp.is_first))
        loads = samples @ torch.zeros_like(logits).scatter_(1, ids, 1.0)
        if self.model.moe_aux_loss_coeff:
            best = self.scores.best(logits) if self.scores.are_restricted else ids
            counts = context.cp.all_reduce_(samples @ torch.zeros_like(logits).scatter_(1, best, 1.0))
            choices = choices._replace(counts=context.tp.all_reduce_(counts) if context.shares_tokens else counts)
        self._record(logits, samples, loads, choices=choices, tokens=tokens)
        if not has_graph and self.number in context.recomputed:
            balance.keep(self.number, choices, context.tracker)
        return choices

    def _limited(self, ids: torch.Tensor, logits: torch.Tensor, capacity: int, tokens: MicroBatchInfo) -> torch.Tensor:
        """ids [T, k] -> the same, and E more for choices to drop; see Note [capacity]."""
        context, places, count = self.context, self._places(len(ids), tokens), len(tokens.samples)
        whole = logits.new_zeros(2, count * tokens.length, self.top)
        whole.index_copy_(1, places, torch.stack([self.scores.weights(logits, ids), ids.to(logits.dtype)]))
        context.cp.all_reduce_(whole, MAX)
        if context.shares_tokens:
            context.tp.all_reduce_(whole, MAX)
        weights, experts = whole.flatten(1)
        sample = torch.arange(len(weights), device=ids.device) // (tokens.length * self.top)
        rounded = weights.to(torch.float32 if weights.dtype == torch.float64 else torch.bfloat16)
        late = without_room(rounded, sample * self.experts + experts.long(), count * self.experts, capacity)
        return ids + self.experts * late.view(-1, self.top)[places]

    def _places(self, count: int, tokens: MicroBatchInfo) -> torch.Tensor:
        """Return the place of each of this rank's `count` tokens in the whole samples of the micro-batch, [T]."""
        stream = self.context.stream
        first = stream.tp.rank // self.context.etp.size * count if stream.sharded else 0
        own = torch.arange(first, first + count, device=self.weight.data.device)
        if tokens.dealt is None:
            return own
        each = tokens.dealt.indices.shape[1]
        return own // each * tokens.length + tokens.dealt.indices.flatten()[own]

    def _record(
        self, logits: torch.Tensor, samples: torch.Tensor, loads: torch.Tensor, choices: Choices, tokens: MicroBatchInfo
    ) -> None:
        """Add a micro-batch to the statistics. samples [b, T]: 1 for a sample's tokens; loads [b, E]: their choices."""
        assert tokens.balance is not None
        targets, length = tokens.balance.targets, tokens.length
        counted = (targets > 0).to(logits.dtype)
        logs = self.scores.logs(logits)
        shares = logs.softmax(-1)
        entropy = samples @ (logs.logsumexp(-1) - (shares * logs).sum(-1))
        dropped = samples @ (choices.ids >= self.experts).sum(-1).to(samples.dtype)
        aux = z = torch.zeros_like(entropy)
        if choices.counts is not None:
            aux = self._aux_factor(length) * (choices.counts * (samples @ shares)).sum(1)
        if self.model.moe_z_loss_coeff:
            z = samples @ logits.logsumexp(-1).square() / length
        sums = [each.double() @ counted.double() for each in (entropy, dropped)]
        sums += [each.double() @ targets for each in (aux, z)]
        self.statistics += torch.cat([counted.double() @ loads.double(), torch.stack(sums)])

    def _aux_factor(self, length: int) -> float:
        """Return the factor of sum over experts of choices x sum of shares, of a sample of `length` tokens."""
        return self.experts / (self.top * length**2)

    def mixed(self, logits: torch.Tensor, choices: Choices) -> torch.Tensor:
        """Return the weights of the chosen experts' results, [T, k]."""
        return self.scores.weights(logits, self._experts(choices))

    def _experts(self, choices: Choices) -> torch.Tensor:
        """Return the experts of all choices, dropped ones too, [T, k] int64."""
        return choices.ids.long() % self.experts

    def backward(self, dweights: torch.Tensor, x: torch.Tensor, routed: Routed, tokens: MicroBatchInfo) -> torch.Tensor:
        """Hand over the gradient of the router. dweights [T, k]: summands of this rank. Return that of x [T, h]."""
        logits, choices, weights = routed
        dlogits = self.scores.weights_grad(dweights, weights, logits, self._experts(choices))
        if self.context.etp.is_first:  # ranks with the same tokens have the same balance losses
            self._add_balance_grad(dlogits, logits, choices, tokens)
        self.weight.accumulate_grad(GradWriter(self.context.products.weight_grad, (x.to(logits.dtype), dlogits)))
        if self.logit_bias is not None:
            self.logit_bias.add_grad(dlogits.sum(0))
        return self.context.products.input_grad(dlogits, self.weight.data.to(logits.dtype)).to(x.dtype)

    def _add_balance_grad(
        self, dlogits: torch.Tensor, logits: torch.Tensor, choices: Choices, tokens: MicroBatchInfo
    ) -> None:
        """Add the gradient of the balance losses to dlogits [T, E]."""
        balance, model = tokens.balance, self.model
        if balance is None or not (model.moe_aux_loss_coeff or model.moe_z_loss_coeff):
            return
        sample = self._places(len(logits), tokens) // tokens.length
        scale = (balance.targets * balance.seed).to(logits.dtype)[sample, None]  # weight of a sample's mean losses
        if choices.counts is not None:
            slope = choices.counts[sample] * (model.moe_aux_loss_coeff * self._aux_factor(tokens.length))
            shares = self.scores.logs(logits).softmax(-1)
            slope -= (slope * shares).sum(-1, keepdim=True)
            dlogits += self.scores.logits_grad(scale * slope * shares, logits)
        if model.moe_z_loss_coeff:
            norm, probabilities = logits.logsumexp(-1, keepdim=True), logits.softmax(-1)
            dlogits += (2 * model.moe_z_loss_coeff / tokens.length) * scale * norm * probabilities
