"""Linear layers by themselves: rounding of their gradients; an MLP with its norm, as one Function."""

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from megazero.engine.kernels.eager import wide
from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.model.block import MLP
from megazero.engine.model.layers.context import Context, MicroBatchInfo, ResidualStream
from megazero.engine.model.layers.linear import ColumnLinear, Residual, ResidualRows, RowLinear
from megazero.engine.model.layers.norm import NORMS, NoNorm
from megazero.engine.model.layers.weight import GradWriter, Weight, named_weights
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import ModelConfig
from megazero.planner.trace.pretend import pretend_mesh
from tests.helpers.table import for_each
from tests.reference import ACTIVATIONS

CPU = torch.device("cpu")
H = 6


class Collected(dict[Weight, torch.Tensor]):
    """Gradients in fp32, or fp64 of fp64."""

    def accumulate_grad(self, weight: Weight, write: GradWriter) -> None:
        self[weight] = torch.full(weight.block.stored, torch.nan, dtype=wide(weight.data))
        write(self[weight], False)


@for_each("kind", [ColumnLinear, RowLinear])
@for_each("dtype, step", [("bf16", 2.0**-7), ("fp16", 2.0**-10)])
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
        rows = ResidualRows((layer,), (None,), Residual(context.dropout(0.0, 0, "mlp")), mask=None)
        rows.backward(dy, (True,), (x,))
    assert owner[layer.bias].tolist() == [3 + step] * 5


class MLPCase(NamedTuple):
    """An MLP, the norms before and after it, and the factor of its result."""

    activation: str
    bias: bool = False
    before: str = "layernorm"
    after: str = ""
    multiplier: float = 1.0


MLPS = [
    MLPCase("gelu-tanh", bias=True),
    MLPCase("swiglu"),
    MLPCase("gelu", before="rmsnorm", after="layernorm", multiplier=0.3),
    MLPCase("geglu-tanh", bias=True, before="rmsnorm-1p", after="rmsnorm-1p"),
    MLPCase("swiglu", bias=True, before="", after="rmsnorm", multiplier=1.7),
    MLPCase("squared-relu", before="rmsnorm"),
]


def plain_norm(kind: str, x: torch.Tensor, w: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if kind == "layernorm":
        return F.layer_norm(x, (H,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)
    return F.rms_norm(x, (H,), w[f"{name}.weight"] + (kind == "rmsnorm-1p"), 1e-5) if kind else x


def plain_mlp(case: MLPCase, x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    y = plain_norm(case.before, x, w, "norm")
    up, bias = w["mlp.up.weight"].reshape(-1, H), w["mlp.up.bias"].flatten() if case.bias else None
    result = F.linear(ACTIVATIONS[case.activation](F.linear(y, up, bias)), w["mlp.down.weight"], w.get("mlp.down.bias"))
    return x + case.multiplier * plain_norm(case.after, result, w, "after")


@for_each("frozen", [(), ("norm.*", "mlp.up.*"), ("norm.*",), ("mlp.down.*",), ("after.*",)])
@for_each("needs_dx", [True, False])
@for_each("selective", [True, False])
@for_each("case", MLPS)
def test_an_mlp_and_its_norms_are_one_function(
    case: MLPCase, selective: bool, needs_dx: bool, frozen: tuple[str, ...]
) -> None:
    """Output and every gradient against plain PyTorch, for any combination of trained parts; without dropout."""
    stream = ResidualStream(pretend_mesh(Layout(), 0, CPU, needs_staging_buffer=False).tp, sharded=False)
    context = Context(stream, MemoryTracker(), "fp64", CPU, selective=selective)
    model = ModelConfig(1, H, 9, 2, 5, 11)
    layers = nn.ModuleDict({"mlp": MLP(model, context, case.activation, case.bias)})
    layers["norm"] = NORMS[case.before](model, context) if case.before else NoNorm()
    after = layers["after"] = NORMS[case.after](model, context) if case.after else None
    owner, generator = Collected(), torch.Generator().manual_seed(0)
    weights = {weight.spec.name[2:]: weight for weight in named_weights(layers, "l", tuple(f"l.{f}" for f in frozen))}
    for weight in weights.values():
        weight.data = torch.randn(weight.block.stored, generator=generator, dtype=torch.float64)
        weight.owner = owner
    x, dy = (torch.randn(7, H, generator=generator, dtype=torch.float64) for _ in range(2))
    x.requires_grad_(needs_dx)
    residual = Residual(context.dropout(0.0, 0, "mlp"), after, case.multiplier)
    given = dy.clone()
    y = layers["mlp"](x, layers["norm"], residual, MicroBatchInfo(0, (), training=False, rows=(), runs=()), True)
    y.backward(given)

    theirs = {name: weight.data.clone().requires_grad_() for name, weight in weights.items()}
    leaf = x.detach().clone().requires_grad_()
    wanted = plain_mlp(case, leaf, theirs)
    wanted.backward(dy)
    assert torch.equal(given, dy)
    assert torch.allclose(y.detach(), wanted.detach(), rtol=1e-12, atol=1e-12)
    assert (x.grad is not None) == needs_dx
    assert not needs_dx or torch.allclose(x.grad, leaf.grad, rtol=1e-12, atol=1e-12)
    assert set(owner) == {weight for weight in weights.values() if weight.trains}
    for name, weight in weights.items():
        assert not weight.trains or torch.allclose(owner[weight], theirs[name].grad, rtol=1e-12, atol=1e-12), name
