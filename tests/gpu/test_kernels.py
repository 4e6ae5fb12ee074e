"""Triton's kernels on a GPU against torch's operators. Run by `make test-gpu`."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megazero.engine.kernels.dropout import Rows
from megazero.engine.kernels.eager import LogitMap
from megazero.engine.kernels.grouped import GroupedProducts, RowGroups
from megazero.engine.kernels.matmul import Products
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.layers.fused_attention import FLASH_CAPABILITY
from megazero.engine.step.engine import Engine
from tests.helpers import kernel_checks
from tests.helpers.families import of_family
from tests.parallel.cases import MODEL, STEPS, Case, micro_batches
from tests.parallel.test_parity import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DROPPING = replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_kernels_on_one_gpu_are_torchs_operators(dtype: torch.dtype) -> None:
    """Dropout to the bit, in a tensor of more than 2^31 elements too; the others by plain PyTorch in fp64."""
    whole = tuple(Rows(i, 0, 1024) for i in range(12))
    for rows, columns in ((whole, 1600), ((Rows(77, 2**31 - 400, 300),), 1023), ((Rows(1, 5, 1 << 16),), 1)):
        kernel_checks.check_dropout(rows, columns, dtype, "cuda")
    if dtype == torch.bfloat16 and torch.cuda.mem_get_info()[0] > 30 << 30:
        kernel_checks.check_large_dropout("cuda")
    for to_logits, spread in ((LogitMap(), 3.0), (LogitMap(0.5, 30.0), 20.0)):
        kernel_checks.check_loss(200, [25129, 25128], 25152, dtype, "cuda", to_logits, spread)
    for columns in (50, 768, 1600, 8192):
        kernel_checks.check_norms(700, columns, dtype, "cuda")
    for columns in (5, 11008):
        kernel_checks.check_swiglu(100, columns, dtype, "cuda")
        kernel_checks.check_gelu(700, columns, dtype, "cuda")
    kernel_checks.check_rotary(dtype, "cuda", 32, 8, 128)
    kernel_checks.check_add_rows(dtype, "cuda", 1100, 1600)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < FLASH_CAPABILITY, reason="no FlashAttention"
)
def test_flash_attention_takes_pieces(dtype: torch.dtype) -> None:
    """Runs of queries, of one too, within more keys, whose last is the last query's."""
    pairs = [[range(0, 171), range(855, 1025)], [range(171, 342), range(684, 855)], [range(342, 684)]]
    for ranges in (pairs, [[range(0, 1), range(300, 900)], [range(1, 300), range(900, 901)], [range(901, 1025)]]):
        for heads, groups, width in ((8, 8, 64), (8, 2, 128)):
            kernel_checks.check_flash_pieces(dtype, "cuda", [ranges] * 2, heads, groups, width)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "how",
    [{}, {"recompute": "full"}, {"recompute": "selective"}, {"architecture": "llama"}, {"compile": True}],
    ids=str,
)
def test_steps_on_one_gpu_are_those_of_torchs_operators(precision: str, how: dict[str, Any]) -> None:
    """Equal to 1e-4 in fp32: sums in another order, and updates; in 16 bit to the rounding of the others' results."""
    model = replace(DROPPING, **of_family(how.get("architecture", "gpt2")))
    case = Case(precision=precision, model=model, **{k: v for k, v in how.items() if k != "architecture"})
    found = {}
    for kernels in ("triton", "eager"):
        engine = Engine(case._replace(kernels=kernels).config(), Mesh.build(case.layout, 0, torch.device("cuda", 0)))
        results = [engine.train_step(i + 1, micro_batches(case, engine.mesh, i)) for i in range(STEPS)]
        found[kernels] = [r.loss for r in results], [r.grad_norm for r in results]
    tolerance = 1e-4 if precision == "fp32" else 2**-7
    for ours, theirs in zip(found["triton"], found["eager"], strict=True):
        assert relative_error(ours, theirs) < tolerance


@pytest.mark.parametrize("sizes", [(300, 0, 17, 707), (0, 0, 0, 1024), (256, 256, 256, 256)], ids=str)
def test_grouped_products_are_those_of_each_group(sizes: tuple[int, ...]) -> None:
    """torch's grouped kernel in bf16, with groups without rows, against a product for each group."""
    products, generator = GroupedProducts(Products()), torch.Generator("cuda").manual_seed(1)
    x, dy, weight = (
        torch.randn(*shape, dtype=torch.bfloat16, device="cuda", generator=generator)
        for shape in ((sum(sizes), 64), (sum(sizes), 96), (len(sizes), 96, 64))
    )
    counts = torch.tensor(sizes, device="cuda")
    fused, looped = RowGroups.of(counts, None), RowGroups.of(counts, sizes)
    for add in (False, True):
        for found, wanted in zip(*(_three(products, x, dy, weight, g, add) for g in (fused, looped)), strict=True):
            error = (found.double() - wanted.double()).abs().max()
            assert error <= 2**-7 * wanted.double().abs().max()  # both round a sum in fp32 to bf16


def _three(
    products: GroupedProducts, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, groups: RowGroups, add: bool
) -> tuple[torch.Tensor, ...]:
    gradient = torch.ones_like(weight, dtype=torch.float32)
    products.weight_grad(groups, x, dy, gradient, add)
    return products.output(x, weight, groups), products.input_grad(dy, weight, groups), gradient
