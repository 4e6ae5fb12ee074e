"""Triton's kernels against torch's operators, in its interpreter; and how they are chosen."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero.engine.kernels.dropout import Dropout, Rows
from megazero.engine.kernels.eager import LogitMap
from megazero.engine.kernels.kernel_table import EAGER, TRITON
from megazero.engine.kernels.rotary import Rotary
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.layers import stage_units
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.flags.config import Config, ModelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from megazero.flags.validate import check_device
from megazero.planner.trace.kernel_records import Operator
from megazero.planner.trace.pretend import pretend_mesh
from megazero.planner.trace.trace import trace
from megazero.run.kernel_choices import choose_compile, choose_kernels, triton_complaint
from tests.helpers import kernel_checks
from tests.helpers.families import of_family
from tests.helpers.table import for_each
from tests.helpers.traces import trace_layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def has_triton(request: pytest.FixtureRequest) -> None:
    kernel_checks.require_triton(interprets="compiles" not in request.node.name)


# Rows up to the last there may be; blocks that end within a row; one column; more segments than a launch takes.
DROPOUTS = [
    ((Rows(0, 0, 2), Rows(77, 2**31 - 4, 3)), 50, torch.float32),
    ((Rows(3, 5, 2),), 2049, torch.float16),
    ((Rows(3, 5, 1), Rows(1 << 40, 0, 1)), 64, torch.bfloat16),
    (tuple(Rows(i, 3 * i, i % 3 != 2) for i in range(13)), 1, torch.float32),
]


@for_each(("rows", "columns", "dtype"), DROPOUTS)
def test_dropout_is_the_same_bits(rows: tuple[Rows, ...], columns: int, dtype: torch.dtype) -> None:
    kernel_checks.check_dropout(rows, columns, dtype, DEVICE)


def test_dropout_of_nothing_hides_nothing() -> None:
    """No rows; and NaN times 0 stays NaN, as torch's."""
    dropout = Dropout(0.5, 0, 0, "mlp", TRITON.dropout)
    assert dropout(torch.ones(0, 8, device=DEVICE), (Rows(0, 0, 0),)).shape == (0, 8)
    assert dropout(torch.full((2, 8), torch.nan, device=DEVICE), (Rows(0, 0, 2),)).isnan().all()


@for_each("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_cross_entropy(dtype: torch.dtype) -> None:
    """Shards of uneven length, one without a column, labels that name others' padding; a shard of several blocks."""
    kernel_checks.check_loss(10, [41, 48, 0], 48, dtype, DEVICE)
    if dtype == torch.float32:
        kernel_checks.check_loss(4, [4500], 4500, dtype, DEVICE)


MAPS = [LogitMap(1 / 6), LogitMap(1.0, 2.5), LogitMap(0.5, 30.0)]


@pytest.mark.second
@for_each("to_logits", MAPS)
@for_each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_loss_of_divided_and_capped_logits(dtype: torch.dtype, to_logits: LogitMap) -> None:
    """Also of products that a cap makes equal, and whose exponentials are 0 in fp16."""
    for spread in (3.0, 40.0):
        kernel_checks.check_loss(10, [41, 48, 0], 48, dtype, DEVICE, to_logits, spread)


def test_a_loss_that_is_not_finite_shows() -> None:
    """Infinity and NaN among the logits make the row's loss NaN, as torch's; the other rows keep theirs."""
    logits = torch.zeros(3, 16, device=DEVICE)
    logits[0, 5], logits[1, 6] = torch.inf, torch.nan
    labels = torch.full((3,), 2, device=DEVICE)
    loss, _ = kernel_checks.cross_entropy(TRITON.loss, [logits], [16], labels, torch.ones(3, device=DEVICE))
    assert loss.isnan().tolist() == [True, True, False]


@for_each("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_swiglu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with several turns, one of them with fewer; turns of one, two and four rows; columns that end within a
    block.
    """
    monkeypatch.setattr("megazero.engine.kernels.triton.triton_norm.PROGRAMS", 2)
    kernel_checks.check_norms(11, 50, dtype, DEVICE)
    monkeypatch.setattr("megazero.engine.kernels.triton.triton_norm.TURN", (128, 4))
    kernel_checks.check_norms(5, 50, dtype, DEVICE)
    monkeypatch.setattr("megazero.engine.kernels.triton.triton_norm.TURN", (64, 4))
    kernel_checks.check_norms(5, 50, dtype, DEVICE)
    kernel_checks.check_swiglu(2, 2100 if dtype == torch.float32 else 5, dtype, DEVICE)


def test_weight_gradients_do_not_depend_on_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are added in a fixed order: row p, p + programs, ... by each program, then the programs."""
    monkeypatch.setattr("megazero.engine.kernels.triton.triton_norm.PROGRAMS", 2)
    monkeypatch.setattr("megazero.engine.kernels.triton.triton_norm.TURN", (4096, 1))
    rstd = torch.ones(5, 1, device=DEVICE)
    x = torch.tensor([1e8, 1.0, 1.0, 2.0, -1e8], device=DEVICE)[:, None].expand(5, 16).contiguous()
    ones = torch.ones(5, 16, device=DEVICE)
    _, dweight = TRITON.rms_norm_grad(ones, x, ones[0], rstd, None)
    assert dweight.tolist() == [3.0] * 16  # (1e8 + 1 - 1e8) + (1 + 2), the first 1 lost in fp32


@for_each("dtype", [torch.float32, torch.bfloat16])
def test_gelus_gradient_and_its_sum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs with several rows, one of them with fewer; two blocks of columns, one of which ends within."""
    monkeypatch.setattr("megazero.engine.kernels.triton.triton_activations.GELU_BLOCK", 32)
    monkeypatch.setattr("megazero.engine.kernels.triton.triton_activations.PROGRAMS", 4)
    kernel_checks.check_gelu(5, 50, dtype, DEVICE)


@pytest.mark.second
@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each(
    "rotary",
    [
        Rotary(12, 100.0),
        Rotary(12, 100.0, interleaved=True),
        Rotary(6, 100.0, 4.0, "yarn", 32),
        Rotary(2, 100.0, interleaved=True),
        Rotary(0, 100.0),
    ],
)
def test_rotary_positions(rotary: Rotary, dtype: torch.dtype) -> None:
    kernel_checks.check_rotary(dtype, DEVICE, rotary=rotary)


@for_each("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_to_a_table(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of two places, of which runs cover several; a last piece that is not full."""
    for size in (2, 3, 32):
        monkeypatch.setattr("megazero.engine.kernels.triton.triton_rows.SIZE", size)
        kernel_checks.check_add_rows(dtype, DEVICE)


def test_wide_norms_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel has a row of more than 8192 in registers."""
    monkeypatch.setattr("megazero.engine.kernels.operators.WIDEST", 7)
    x, weight = torch.randn(2, 8), torch.ones(8)
    y, rstd = TRITON.rms_norm(x, weight, 1e-5)
    assert torch.equal(y, EAGER.rms_norm(x, weight, 1e-5)[0])
    found, wanted = (k.rms_norm_grad(y, x, weight, rstd, None) for k in (TRITON, EAGER))
    assert all(map(torch.equal, found, wanted))


def test_a_trace_sees_what_a_launch_moves() -> None:
    """Operators of a block and of the head on stand-ins for a GPU: bytes, kept ones too."""
    moved: dict[str, set[int]] = {}
    kept = []
    model = ModelConfig(1, 64, 192, 4, 32, 448, **of_family("llama"), hidden_dropout=0.1)
    for kernels in ("triton", "eager"):
        training = TrainingConfig(micro_batch_size=4, precision="bf16", fused_kernels=kernels)  # type: ignore[arg-type]
        config, layout = resolve(Config(model=model, training=training), 1, 0, declare)
        layers, specs = (
            rank_spec(config, layout, 0, declare).layers,
            stage_units(declare(model, layout.tp), layout, 0, ()),
        )
        kept.append({name: cost.saved for name, cost in trace_layers(config, layout, 0, "cuda").items()})
        for name in ("blocks.0", "head"):
            events = trace(config, layout, layers[name], specs, "cuda").events
            for operator in (*events.forward, *events.backward):
                if isinstance(operator, Operator) and kernels == "triton":
                    moved.setdefault(operator.name, set()).add(operator.num_bytes)
    x, logits, inner = 2 * 128 * 64, 2 * 128 * 448, 2 * 128 * 192  # bytes
    row, weight = 4 * 128, 2 * 64  # a number per token in fp32; a norm's weight
    assert moved["dropout"] == {3 * x, 2 * x}
    assert moved["loss_sums"] == {logits + 2 * row + 3 * row} and moved["loss_grad_"] == {2 * logits + 4 * row}
    assert moved["rms_norm"] == {2 * x + row + weight}
    # the head's, and a block's, which adds the residual's gradient
    assert moved["rms_norm_grad"] == {passes * x + row + 3 * weight for passes in (3, 4)}
    assert moved["swiglu"] == {3 * inner} and moved["swiglu_grad_"] == {5 * inner}
    cosines, sines = 2 * 32 * 16, 2 * 32 * 8
    assert moved["rotary_"] == {2 * 3 * x + cosines + sines}
    assert kept[0] == kept[1]


class OnGPU(TrainingConfig):
    """Names the kernels of a GPU, though the test's device is a CPU."""

    def kernels_on(self, device_type: str) -> str:
        return super().kernels_on("cuda")


def choose(asked: str, complaint: str = "", others_fail: bool = False) -> tuple[str, str]:
    """Return the choice and the messages."""

    def all_reduce_(x: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.ones_like(x) if others_fail else x

    mesh: Any = SimpleNamespace(device=torch.device("cpu"), world=SimpleNamespace(all_reduce_=all_reduce_))
    config = Config(training=OnGPU(fused_kernels=asked))  # type: ignore[arg-type]
    chosen, said = choose_kernels(config, mesh, lambda device: complaint)
    return chosen.training.fused_kernels, said


def test_auto_is_triton_where_it_works_on_every_rank() -> None:
    chosen, said = choose("auto")
    assert chosen == "auto" and said.startswith("--fused-kernels triton: ")
    chosen, said = choose("auto", "no C compiler")
    assert chosen == "eager" and "--fused-kernels eager: Triton does not work here (no C compiler)" in said
    chosen, said = choose("auto", others_fail=True)
    assert chosen == "eager" and "does not work on another rank" in said
    for reason in ({"complaint": "no C compiler"}, {"others_fail": True}):
        with pytest.raises(ValueError, match=r"--fused-kernels triton: Triton does not work .*; use auto or eager"):
            choose("triton", **reason)  # type: ignore[arg-type]
    assert choose("eager", "not asked") == ("eager", "")


EVERYWHERE = "cpu fp32, cpu bf16, cpu fp16, cpu fp64, cuda fp32, cuda bf16, cuda fp16, cuda fp64"


@for_each(
    ("options", "fused_kernels", "wanted"),
    [
        ({}, "auto", "cpu fp32, cpu bf16, cpu fp16, cpu fp64, cuda fp64"),
        ({}, "eager", EVERYWHERE),
        ({"activation": "relu"}, "eager", "cpu bf16, cpu fp16, cuda fp64"),
        ({"activation": "relu", "attention_dropout": 0.1}, "auto", EVERYWHERE),
        (of_family("llama") | {"attention_softcap": 5.0}, "auto", EVERYWHERE),
        (of_family("gpt-oss"), "auto", "cpu bf16, cpu fp16, cuda fp32, cuda fp64"),
    ],
)
def test_compile_is_left_out_where_it_compiles_nothing(
    options: dict[str, Any], fused_kernels: Any, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch compiles GELU and SwiGLU if Triton has not fused them, and attention that is not fused."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found = []
    for name in EVERYWHERE.split(", "):
        device, precision = name.split()
        training = TrainingConfig(precision=precision, compile=True, fused_kernels=fused_kernels)  # type: ignore[arg-type]
        chosen, said = choose_compile(Config(model=ModelConfig(**options), training=training), device)
        assert (said == "") == chosen.training.compile
        found += [name] * chosen.training.compile
    assert ", ".join(found) == wanted


def test_a_cpu_and_fp64_have_torchs_operators() -> None:
    found = {
        (device, precision): TrainingConfig(precision=precision).kernels_on(device)  # type: ignore[arg-type]
        for device in ("cpu", "cuda", "meta")
        for precision in ("bf16", "fp64")
    }
    assert [key for key, kernels in found.items() if kernels == "triton"] == [("cuda", "bf16"), ("meta", "bf16")]
    mesh = pretend_mesh(Layout(), 0, torch.device("cpu"), needs_staging_buffer=True)
    chosen, said = choose_kernels(Config(), mesh)
    assert (chosen.training.fused_kernels, said) == ("auto", "")
    with pytest.raises(
        ValueError, match=r"--fused-kernels triton needs a GPU, and the device is cpu; use auto or eager"
    ):
        check_device(Config(training=TrainingConfig(fused_kernels="triton")), "cpu")


def test_the_trial_tells_a_wrong_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device(DEVICE)
    assert triton_complaint(device) == ""

    def fails(*_: Any) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler.\nSet CC")

    monkeypatch.setattr("megazero.run.kernel_choices.TRITON", TRITON._replace(dropout=fails))
    assert triton_complaint(device) == "RuntimeError: Failed to find C compiler."
    monkeypatch.setattr("megazero.run.kernel_choices.TRITON", TRITON._replace(dropout=lambda x, *_: x))
    assert triton_complaint(device) == "its mask is not torch's"


@pytest.mark.slow
@for_each("capability", [80, 90, 100, 120])
def test_every_kernel_compiles_for_gpus_that_are_not_there(capability: int) -> None:
    """Machine code from the launches' arguments: no atomics, no spilled registers; 16-byte loads of aligned rows."""
    command = [sys.executable, "-m", "tests.helpers.compile_kernels", str(capability)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} == {
        *("_dropout", "_sums", "_grad", "_rms_norm", "_norm_grad", "_swiglu", "_swiglu_grad", "_gelu_grad"),
        *("_rotary", "_pieces", "_runs"),
    }
    assert all(line.endswith(" 0 atomics, 0 spilled") for line in lines), done.stdout
    assert {line.split()[0] for line in lines if "16-byte loads" in line} == {line.split()[0] for line in lines}
