"""Learned positions."""

from __future__ import annotations

import torch
import torch.nn as nn

from megazero.config.schema import ModelConfig
from megazero.model.context import Context, MicroBatchInfo
from megazero.model.dropout import Dropout, Rows
from megazero.model.weight import GradWriter


class _AddPositions(torch.autograd.Function):
    """`rows`: which positions the tokens of x have."""

    @staticmethod
    def forward(ctx, x, weight, rows, handle):
        ctx.weight, ctx.rows = weight, rows
        y = torch.empty_like(x)
        for part, into, row in zip(*(_split(t, rows) for t in (x, y)), rows, strict=True):
            torch.add(part, weight.data[row.first : row.first + row.count], out=into)
        return y

    @staticmethod
    def backward(ctx, dy):
        def write(dy: torch.Tensor, out: torch.Tensor, add: bool) -> None:
            if not add:
                out.zero_()
            for part, row in zip(_split(dy, ctx.rows), ctx.rows, strict=True):
                out[row.first : row.first + row.count] += part

        ctx.weight.accumulate_grad(GradWriter(write, (dy,)))
        return dy, None, None, None


def _split(x: torch.Tensor, rows: tuple[Rows, ...]) -> tuple[torch.Tensor, ...]:
    return x.split([row.count for row in rows])


class PositionEmbedding(nn.Module):
    """Adds the learned positions; then the embedding's dropout."""

    def __init__(self, model: ModelConfig, context: Context) -> None:
        super().__init__()
        self.weight = context.weight(model.seq_length, model.hidden_size, std=model.init_method_std, decays=True)
        self.dropout = Dropout(model.hidden_dropout, context.seed, -1, "embedding")

    def forward(self, x: torch.Tensor, tokens: MicroBatchInfo) -> torch.Tensor:
        """x [T', h] -> [T', h]"""
        return self.dropout(_AddPositions.apply(x, self.weight, tokens.rows, self.weight.handle), tokens.dropout_rows)
