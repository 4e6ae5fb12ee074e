"""Learned positions.

Shapes: h hidden, T' tokens of the residual stream on this rank.
"""

import torch

from megazero.engine.model.layers.context import Context, DeviceBatch, MicroBatchInfo
from megazero.engine.model.layers.layer import Layer
from megazero.engine.model.layers.weight import GradWriter
from megazero.engine.options.schema import ModelConfig
from megazero.engine.plan.layout.layers import End, Use


class _AddPositions(torch.autograd.Function):
    """`runs`: the positions of the tokens of x."""

    @staticmethod
    def forward(ctx, x, weight, runs, handle):
        ctx.weight, ctx.runs = weight, runs
        y = torch.empty_like(x)
        for part, into, run in zip(*(_split(t, runs) for t in (x, y)), runs, strict=True):
            torch.add(part, weight.data[run.start : run.stop], out=into)
        return y

    @staticmethod
    def backward(ctx, dy):
        def write(dy: torch.Tensor, out: torch.Tensor, add: bool) -> None:
            if not add:
                out.zero_()
            for part, run in zip(_split(dy, ctx.runs), ctx.runs, strict=True):
                out[run.start : run.stop].add_(part)

        ctx.weight.accumulate_grad(GradWriter(write, (dy,)))
        return dy, None, None, None


def _split(x: torch.Tensor, runs: tuple[range, ...]) -> tuple[torch.Tensor, ...]:
    return x.split([len(run) for run in runs])


class PositionEmbedding(Layer):
    """Adds learned positions, then applies the embedding's dropout."""

    use, end = Use.LOOKUP, End.FIRST

    def __init__(self, model: ModelConfig, context: Context) -> None:
        super().__init__()
        self.weight = context.weight(model.seq_length, model.hidden_size, std=model.init_method_std, decays=True)
        self.dropout = context.dropout(model.hidden_dropout, -1, "embedding")

    def forward(self, x: torch.Tensor, tokens: MicroBatchInfo) -> torch.Tensor:
        """x [T', h] -> [T', h]"""
        return self.dropout(_AddPositions.apply(x, self.weight, tokens.runs, self.weight.handle), tokens.dropout_rows)

    def compute(self, x: torch.Tensor | None, batch: DeviceBatch, output: bool) -> torch.Tensor:
        return self(x, batch.tokens)
