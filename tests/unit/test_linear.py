"""Linear layers by themselves: what their gradients are rounded to."""

from __future__ import annotations

import pytest
import torch

from megazero.comm.pretend import pretend_mesh
from megazero.memory.tracker import MemoryTracker
from megazero.model.context import Context, ResidualStream
from megazero.model.linear import Call, ColumnLinear, ResidualRows, RowLinear
from megazero.model.weight import GradWriter, Weight
from megazero.plan.topology import Layout

CPU = torch.device("cpu")


class Collected(dict[Weight, torch.Tensor]):
    """Gradients in fp32."""

    def accumulate_grad(self, weight: Weight, write: GradWriter) -> None:
        self[weight] = torch.full(weight.block.stored, torch.nan)
        write(self[weight], False)


@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
@pytest.mark.parametrize("dtype, step", [("bf16", 2.0**-7), ("fp16", 2.0**-10)])
def test_a_bias_gradient_is_not_rounded_to_the_precision(kind: type, dtype: str, step: float) -> None:
    """Three tokens whose sum, 3 + step, has one bit more than the precision."""
    stream = ResidualStream(pretend_mesh(Layout(), 0, CPU, needs_staging_buffer=False).tp, sharded=False)
    context = Context(stream, MemoryTracker(), dtype, CPU)
    layer = kind(context, 4, 5, std=0.02, bias=True)
    owner = Collected()
    for weight in (layer.weight, layer.bias):
        weight.data = torch.ones(weight.block.stored, dtype=context.dtype)
        weight.owner = owner
    dy = torch.ones(3, 5, dtype=context.dtype)
    dy[1] += step
    x = torch.ones(3, 4, dtype=context.dtype)
    if isinstance(layer, ColumnLinear):
        layer.add_gradients(x, dy)
    else:
        rows = ResidualRows((layer,), (None,), context.dropout(0.0, 0, "mlp"))
        rows.backward(dy, Call(mask=None, output=True), (True,), (x,))
    assert owner[layer.bias].tolist() == [3 + step] * 5
