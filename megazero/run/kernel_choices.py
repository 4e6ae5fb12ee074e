"""Choices that all ranks make together when a run starts: --fused-kernels, --compile, --matmul-backend, --tf32.

Each returns the configuration with the choice in place of `auto`, and a line for the start of the run, or "".
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megazero.engine.kernels.compiled import ACTIVATIONS
from megazero.engine.kernels.dropout import Dropout, Rows
from megazero.engine.kernels.kernel_table import EAGER, KERNELS, TRITON
from megazero.engine.kernels.matmul import TORCH, Products
from megazero.engine.mesh.collectives import MAX
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.layers.fused_attention import is_attention_fused
from megazero.engine.plan.layout.dealing import rank_tokens
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import Config
from megazero.torch_private import has_onednn

LEAST, MOST = 10**8, 2 * 10**9  # FLOPs of a product: below the first oneDNN gains nothing; the second takes long enough
FASTER = 1.25  # least gain at which oneDNN is chosen. A smaller one may be noise, and a resumed run would differ


def _with(config: Config, **options: Any) -> Config:
    return replace(config, training=replace(config.training, **options))


def _highest(mesh: Mesh, number: float) -> float:
    """Return the highest number of any rank."""
    shared = torch.tensor(number, dtype=torch.float64, device=mesh.device)
    return float(mesh.world.all_reduce_(shared, op=MAX, kind="control"))


def choose_kernels(
    config: Config, mesh: Mesh, complaint: Callable[[torch.device], str] | None = None
) -> tuple[Config, str]:
    """Replace `auto` by eager if Triton fails on any rank. Otherwise `auto` stays: it is right on other devices too.

    Args:
        complaint: device -> why Triton does not work there, or ""; None: `triton_complaint`.

    Raises:
        ValueError: triton is requested and does not work on some rank's device.
    """
    training = config.training
    if training.kernels_on(mesh.device.type) == "eager" or mesh.device.type == "meta":  # meta: no GPU to try
        return config, ""
    reason = (complaint or triton_complaint)(mesh.device)
    if not _highest(mesh, float(bool(reason))):
        return config, "--fused-kernels triton: fewer passes over memory; eager takes torch's operators"
    reason = f"Triton does not work {f'here ({reason})' if reason else 'on another rank'}"
    if training.fused_kernels == "triton":
        raise ValueError(f"--fused-kernels triton: {reason}; use auto or eager")
    return _with(config, fused_kernels="eager"), f"--fused-kernels eager: {reason}; a step takes longer"


def fuses_attention(config: Config, device_type: str) -> bool:
    """Return whether a fused kernel computes attention in training."""
    model = config.model
    return is_attention_fused(
        device_type,
        config.training.precision,
        dropout=model.attention_dropout > 0,
        documents=config.data.reset_attention_mask,
        softcap=model.attention_softcap > 0,
        log_sums=config.parallel.context_parallel_size > 1 or model.attention_sinks,
    )


def choose_compile(config: Config, device_type: str) -> tuple[Config, str]:
    """Drop --compile if this model has no operation that torch would compile. `config`: of `choose_kernels`."""
    training = config.training
    eager = KERNELS[training.kernels_on(device_type)].activations is EAGER.activations
    gains = (eager and config.model.activation in ACTIVATIONS) or not fuses_attention(config, device_type)
    if gains or not training.compile:
        return config, ""
    line = "--compile compiles nothing: it is for unfused attention, and for GELU and SwiGLU by torch's operators"
    return _with(config, compile=False), line


def triton_complaint(device: torch.device) -> str:
    """Compile and run a kernel on this device. Return why that failed, or ""."""
    rows, x = (Rows(0, 0, 8),), torch.ones(8, 64, device=device)
    try:
        if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs a GPU of compute capability 8.0"
        ours, theirs = (
            Dropout(probability=0.5, seed=0, layer=0, site="trial", kernel=k.dropout).mask(x, rows)
            for k in (TRITON, EAGER)
        )
        same = torch.equal(ours, theirs)
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return "" if same else "its mask is not torch's"


def onednn_gain(tokens: int, inner: int, outer: int, turns: int = 5) -> float:
    """Return torch's CPU time over oneDNN's for the three products of x [tokens, inner] and weight [outer, inner].

    The time is this thread's. Other threads of a product have equal parts of it.
    """
    x, dy, weight = torch.randn(tokens, inner), torch.randn(tokens, outer), torch.randn(outer, inner)
    gradient = torch.empty(outer, inner)

    def seconds(products: Products) -> float:
        start = time.thread_time()  # on a loaded machine, the time on a clock varies by a factor of 6
        products.output(x, weight)
        products.input_grad(dy, weight)
        products.weight_grad(x, dy, gradient, add=False)
        return time.thread_time() - start

    return fastest_ratio(lambda: seconds(TORCH), lambda: seconds(Products(onednn=True)), turns)


def fastest_ratio(ours: Callable[[], float], theirs: Callable[[], float], turns: int) -> float:
    """Return the least of `turns` results of `ours` over the least of `theirs`.

    They take turns, after one turn that does not count. The least counts, because other work only slows down.
    """
    ours(), theirs()
    found = [(ours(), theirs()) for _ in range(turns)]
    return min(a for a, _ in found) / min(b for _, b in found)


def choose_matmul_backend(
    config: Config, mesh: Mesh, measure: Callable[[int, int, int], float] = onednn_gain
) -> tuple[Config, str]:
    """Replace `auto` by torch or onednn, which rank 0 measures; on a GPU, set the precision of products.

    Raises:
        ValueError: onednn is requested and missing.
    """
    training, device = config.training, mesh.device.type
    if training.matmul_backend == "onednn" and not (device == "cpu" and has_onednn()):
        reason = "this torch has no oneDNN" if device == "cpu" else f"the device is {device}"
        raise ValueError(f"--matmul-backend onednn: {reason}; use torch, or auto")
    if device == "cuda":
        settings = torch.backends.cuda.matmul  # with other settings, cuBLAS would add partial sums in 16 bit
        settings.allow_bf16_reduced_precision_reduction = False
        settings.allow_fp16_reduced_precision_reduction = False
        line = ""
        if training.precision == "fp32":
            torch.set_float32_matmul_precision("high" if training.tf32 else "highest")
            line = "fp32 products in TF32; --no-tf32 multiplies in full fp32" if training.tf32 else ""
        return _with(config, matmul_backend="torch"), line
    if training.matmul_backend != "auto":
        return config, ""
    gain = _highest(mesh, _gain(config, mesh.layout, measure) if mesh.rank == 0 else 0.0)
    chosen = "onednn" if gain >= FASTER else "torch"
    line = f"--matmul-backend {chosen}: torch takes {gain:.2f} times as long as oneDNN" if gain else ""
    return _with(config, matmul_backend=chosen), line


def _gain(config: Config, layout: Layout, measure: Callable[[int, int, int], float]) -> float:
    """Return torch's time over oneDNN's for an MLP's first product; 0 if there is no choice or no gain."""
    model, training = config.model, config.training
    tokens, outer = rank_tokens(config, layout), model.ffn_size // layout.tp
    per_token = 2 * model.hidden_size * outer
    if training.precision == "fp64" or not has_onednn() or tokens * per_token < LEAST:
        return 0.0
    return measure(min(tokens, max(64, MOST // per_token)), model.hidden_size, outer)
