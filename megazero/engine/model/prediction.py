"""Multi-token prediction, as in DeepSeek-V3: modules behind the final norm predict tokens further ahead, one each.

    h_0 = norm(x)                                                        x: the output of the last block
    h_k = norm_k block_k projection_k [norm E(t_(i+k)), norm h_(k-1)]    for the token at i; depths k = 1 to D
    objective = loss(h_0) + factor / D * (loss(h_1) + ... + loss(h_D))

E is the token table, and all depths have the same output matrix: https://arxiv.org/abs/2412.19437, section 2.2. h_0 and
the inputs of deeper modules are normed twice, as in published checkpoints.

The divisors of all losses are known before the forward. So the head stays a layer whose forward computes all of its
gradients: `Depths.losses` runs the graph of all depths and then its backward, and keeps the gradient of x alone.

Every tensor-parallel rank computes the projection of its own tokens of the residual stream, with the whole matrix.

Shapes: b micro-batch, T' tokens of the residual stream on this rank, h hidden.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn as nn

from megazero.engine.kernels.gradient import gradient
from megazero.engine.model.block import BLOCK_CLASSES
from megazero.engine.model.layers.context import Context, DeviceBatch, MicroBatchInfo
from megazero.engine.model.layers.linear import ColumnLinear
from megazero.engine.model.layers.norm import NORMS, NoNorm, Norm
from megazero.engine.model.layers.vocabulary import Output, VocabularyTable
from megazero.engine.model.layers.weight import Weight, handle_of, weights_of
from megazero.engine.options.model_options import ModelOptions


class Prediction(nn.Module):
    """The module of one depth. `number`: that of its block, behind those of the model."""

    def __init__(self, model: ModelOptions, number: int, context: Context) -> None:
        super().__init__()
        norm, h = NORMS[model.norm], model.hidden_size
        self.token_norm, self.state_norm = norm(model, context), norm(model, context)
        self.projection = ColumnLinear(
            context.of_one_rank, 2 * h, h, std=model.init_method_std, bias=False, tp_dim=None, matrices=()
        )
        self.block = BLOCK_CLASSES[model.parallel_norms](model, number, context)
        self.norm = norm(model, context)

    def forward(self, state: torch.Tensor, embedded: torch.Tensor, tokens: MicroBatchInfo) -> torch.Tensor:
        """state, embedded [T', h]: of the depth before, and of the next tokens -> [T', h]"""
        handle = handle_of(self.token_norm, self.state_norm, self.projection)
        return self.norm(self.block(_Joined.apply(embedded, state, self, handle), tokens))


class _Joined(torch.autograd.Function):
    """projection [norm(embedded), norm(state)]"""

    @staticmethod
    def forward(ctx, embedded, state, module, handle):
        a, *of_tokens = module.token_norm.normalise(embedded)
        b, *of_states = module.state_norm.normalise(state)
        joined = torch.cat([a, b], -1)
        ctx.save_for_backward(embedded, *of_tokens, state, *of_states, joined)
        ctx.module, ctx.split = module, 1 + len(of_tokens)
        return module.projection.output(joined)

    @staticmethod
    def backward(ctx, dy):
        module, (*kept, joined) = ctx.module, ctx.saved_tensors
        dtokens, dstates = module.projection.context.products.input_grad(dy, module.projection.matrix).chunk(2, -1)
        module.projection.add_gradients(joined, dy)
        dembedded = module.token_norm.input_grad(dtokens.contiguous(), None, *kept[: ctx.split])
        return dembedded, module.state_norm.input_grad(dstates.contiguous(), None, *kept[ctx.split :]), None, None


class Depths(NamedTuple):
    """The losses of a head at all depths."""

    norm: Norm
    vocabulary: Output
    tokens: VocabularyTable
    modules: tuple[Prediction, ...]

    @property
    def weights(self) -> tuple[Weight, ...]:
        own = (weight for module in self.modules for _, weight in weights_of(module, ""))
        return *self.norm.weights, *self.vocabulary.weights, self.tokens.weight, *own

    def losses(self, x: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        """x [T', h] -> the losses of each sample at depth 0, then at the others, [(1 + D) b] fp64: `Output.loss`."""
        seeded = torch.is_grad_enabled() and batch.seed is not None
        return _Losses.apply(x, self, batch, seeded, handle_of(self))

    def states(
        self, x: torch.Tensor, following: Sequence[torch.Tensor], tokens: MicroBatchInfo
    ) -> Iterator[torch.Tensor]:
        """x [T', h], following: ids [b, s] that each module reads -> h_0, h_1 and so on, [T', h]."""
        state = self.norm(x)
        yield state
        for module, ids in zip(self.modules, following, strict=True):
            state = module(state, self.tokens.look_up(ids), tokens)
            yield state

    def graph(self, x: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        """`losses`, with a graph whose backward computes all gradients."""
        states = self.states(x, [ahead.ids for ahead in batch.ahead], batch.tokens)
        of_depths = ((each.labels, each.loss_mask, each.seed) for each in (batch, *batch.ahead))
        return torch.cat(
            [self.vocabulary.loss(state, NoNorm(), *targets) for state, targets in zip(states, of_depths, strict=True)]
        )


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depths, batch, seeded, handle):
        with torch.set_grad_enabled(seeded):
            leaf = x.detach().requires_grad_(ctx.needs_input_grad[0])
            found = depths.graph(leaf, batch)
        if seeded:
            # Not for x alone: lookups in the token table are on no path to it, and would get no gradient.
            gradient(found, None, torch.ones_like(found))
            if leaf.grad is not None:
                ctx.save_for_backward(leaf.grad)
        return found.detach()

    @staticmethod
    def backward(ctx, dlosses):
        return *(ctx.saved_tensors or (None,)), *(None,) * 4
