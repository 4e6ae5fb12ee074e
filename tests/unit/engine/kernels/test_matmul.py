"""Products by either library, and which one a run takes."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.engine.kernels.kernel_table import EAGER
from megazero.engine.kernels.matmul import Products, writes_wide
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.step.engine import Engine
from megazero.flags.config import Config, TrainingConfig
from megazero.flags.validate import check_device
from megazero.planner.trace.pretend import pretend_mesh
from megazero.run.kernel_choices import FASTER, choose_matmul_backend, fastest_ratio, onednn_gain
from megazero.torch_private import has_onednn
from tests.helpers.rounding import assert_sum
from tests.parallel.cases import MODEL, Case, micro_batches

LARGE = replace(MODEL, hidden_size=768, num_attention_heads=12, seq_length=64)  # 0.3 GFLOPs a product
needs_onednn = pytest.mark.skipif(not has_onednn(), reason="no oneDNN")


@pytest.mark.parametrize("onednn", [False, pytest.param(True, marks=needs_onednn)])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_products_are_those_of_fp64(onednn: bool, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """The weight's gradient is written, or added, in the gradient's type. Sums are of 20 to 33 products."""
    products, generator = Products(onednn), torch.Generator().manual_seed(0)
    shapes = ((3, 7, 20), (3, 7, 33), (33, 20), (33,))
    x, dy, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    arithmetic = torch.float64 if dtype == torch.float64 else torch.float32  # sums of 16-bit products are fp32

    def wide(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return function(x, dy, weight, bias) in fp64, and the same of their absolute values."""
        inputs = [t.double() for t in (x, dy, weight, bias)]
        return function(*inputs), function(*(t.abs() for t in inputs))

    exact = wide(lambda x, dy, weight, bias: x @ weight.t() + bias)
    assert_sum(products.output(x, weight, bias), *exact, terms=21, dtype=arithmetic)
    assert_sum(products.input_grad(dy, weight), *wide(lambda x, dy, weight, bias: dy @ weight), 33, arithmetic)
    out = torch.full((33, 20), torch.nan, dtype=grad_dtype)
    exact = wide(lambda x, dy, weight, bias: dy.flatten(0, 1).t() @ x.flatten(0, 1))
    for times in (1, 2):
        products.weight_grad(x, dy, out, add=times == 2)
        assert_sum(out, times * exact[0], times * exact[1], times * 21, arithmetic)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_gradient_may_be_narrower_than_its_factors(in_place: bool) -> None:
    """A router's factors are fp32. No GPU multiplies them into 16 bits, and torch refuses it on stand-ins too."""
    x, dy = (torch.ones(7, width, device="meta") for width in (20, 33))
    out = torch.empty(33, 20, dtype=torch.bfloat16, device="meta")
    for add in (False, True):
        Products(in_place=in_place).weight_grad(x, dy, out, add)
    x, dy, out = torch.ones(7, 20), torch.ones(7, 33), torch.zeros(33, 20, dtype=torch.bfloat16)
    for add, wanted in ((False, 7), (True, 14)):
        Products(in_place=in_place).weight_grad(x, dy, out, add)
        assert out.dtype == torch.bfloat16 and (out == wanted).all()


@needs_onednn
def test_an_engine_uses_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()
    affine = Products._affine
    monkeypatch.setattr(Products, "_affine", lambda self, *a: used.add(self.onednn) or affine(self, *a))
    case = Case(batch=2, micro_batches=1)
    for backend in ("onednn", "torch"):
        config = replace(case.config(), training=replace(case.config().training, matmul_backend=backend))
        engine = Engine(config, Mesh.build(Layout(), 0, torch.device("cpu")))
        engine.train_step(1, micro_batches(case, engine.mesh, 0))
        assert used == {backend == "onednn"}
        used.clear()


def choose(rank: int, gain: float, case: Case, backend: str = "auto") -> tuple[str, str]:
    """Choose a backend with `gain` in place of the measurement, which rank 0 makes alone."""

    def measure(*shape: int) -> float:
        assert rank == 0 and shape == (64, 768, 3072)
        return gain

    config = replace(case.config(), training=replace(case.config().training, matmul_backend=backend))
    config, said = choose_matmul_backend(config, Mesh.build(case.layout, rank, torch.device("cpu")), measure)
    return config.training.matmul_backend, said


@pytest.mark.long
@needs_onednn
def test_all_ranks_take_what_rank_0_measured(ranks) -> None:
    case = Case(dp=2, model=LARGE, batch=2, micro_batches=1)
    for gain, wanted in ((FASTER + 0.5, "onednn"), (FASTER - 0.01, "torch")):
        for chosen, said in ranks(2).run(choose, gain, case):
            assert chosen == wanted and f"--matmul-backend {wanted}: torch takes {gain:.2f} times" in said


def test_nothing_is_measured_where_nothing_can_be_gained() -> None:
    """The library is named, products are small, or the precision is fp64: else oneDNN would be chosen."""
    large = Case(model=LARGE, batch=1, micro_batches=1)
    assert choose(0, 100.0, large, "torch") == ("torch", "")
    assert choose(0, 100.0, Case()) == choose(0, 100.0, large._replace(precision="fp64")) == ("torch", "")


@pytest.mark.parametrize(
    ("precision", "tf32", "set_to", "said"),
    [("fp32", True, "high", "TF32"), ("fp32", False, "highest", ""), ("bf16", True, None, "")],
)
def test_tf32_is_set_on_a_gpu_and_said(
    precision: str, tf32: bool, set_to: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", called.append)
    flags = SimpleNamespace(allow_bf16_reduced_precision_reduction=True, allow_fp16_reduced_precision_reduction=True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", flags)
    case = Case(precision=precision)
    config = replace(case.config(), training=replace(case.config().training, tf32=tf32))
    mesh = pretend_mesh(Layout(), 0, torch.device("cuda", 0), needs_staging_buffer=False)
    chosen, found = choose_matmul_backend(config, mesh)
    assert not any(vars(flags).values())  # partial sums are added in fp32
    assert called == ([set_to] if set_to else []) and said in found and bool(found) == bool(said)
    assert chosen.training.matmul_backend == "torch"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_gradients_that_a_gpus_products_cannot_return_are_refused(precision: str) -> None:
    for grad_dtype in ("fp32", "bf16", "fp16"):
        config = replace(Config(), training=TrainingConfig(precision=precision, grad_dtype=grad_dtype))
        check_device(config, "cpu")
        if grad_dtype in ("fp32", precision) or precision == "fp64":
            check_device(config, "cuda")
        else:
            with pytest.raises(
                ValueError, match=f"--grad-dtype {grad_dtype} with --precision {precision}: .*use .*fp32"
            ):
                check_device(config, "cuda")


def test_rows_are_added_alike_on_every_device() -> None:
    """The way of a GPU, tried on a CPU tensor that reports another device."""
    rows, values = torch.randint(0, 7, (50,)), torch.randn(50, 3, dtype=torch.float64)
    wanted = torch.stack([values[rows == row].sum(0) for row in range(7)])
    for device in ("cpu", "cuda"):
        out = torch.zeros(7, 3, dtype=torch.float64)
        there = SimpleNamespace(
            device=torch.device(device, 0), dtype=out.dtype, index_add_=out.index_add_, index_put_=out.index_put_
        )
        EAGER.add_rows(there, rows, torch.ones(50, dtype=torch.bool), values)
        assert torch.allclose(out, wanted, rtol=1e-14)


def test_onednn_cannot_be_had_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--matmul-backend onednn: this torch has no oneDNN; use torch, or auto"):
        choose(0, 1.0, Case(), "onednn")
    assert choose(0, 100.0, Case(model=LARGE, batch=1, micro_batches=1)) == ("torch", "")


def test_the_fastest_of_each_counts() -> None:
    """The first of each warms up; slow turns are another process'."""
    ours, theirs = iter([0.1, 9.0, 3.0, 7.0]), iter([0.1, 2.0, 5.0, 4.0])
    assert fastest_ratio(lambda: next(ours), lambda: next(theirs), 3) == 1.5


@needs_onednn
def test_both_libraries_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    affine = Products._affine
    monkeypatch.setattr(Products, "_affine", lambda self, *a: used.append(self.onednn) or affine(self, *a))
    assert onednn_gain(8, 16, 32, turns=2) > 0
    assert used.count(True) == 9 and used.count(False) == 3  # of MKL's, both gradients are plain products


class Made(TorchDispatchMode):
    """Notes the operators that make a tensor of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "out" not in (kwargs or {}):
            self.names.append(func.__name__)
        return out


def test_16_bit_products_go_straight_into_wider_gradients() -> None:
    """On a GPU they are written, then added, without another tensor. tests/gpu compares the numbers."""
    gpu = torch.device("meta")
    x, dy = (torch.empty(7, n, device=gpu, dtype=torch.bfloat16) for n in (4, 3))
    able = writes_wide(gpu, torch.bfloat16)
    assert able or torch.__version__.startswith("2.11.")  # its stand-ins cannot; see tests/helpers/oldest_torch.py
    for in_place, wanted in ((True, []), (False, ["mm.dtype", "copy_.default", "mm.dtype", "add_.Tensor"])):
        if in_place and not able:
            continue
        with Made() as made:
            for add in (False, True):
                Products(in_place=in_place).weight_grad(x, dy, torch.empty(3, 4, device=gpu), add)
        assert [name for name in made.names if name != "empty.memory_format"] == wanted
    assert not writes_wide(gpu, torch.float32) and not writes_wide(torch.device("cpu"), torch.bfloat16)
    engine = Engine(Case(precision="bf16").config(), pretend_mesh(Layout(), 0, gpu, needs_staging_buffer=False))
    assert engine.model.head.vocabulary.table.context.products.in_place == able
