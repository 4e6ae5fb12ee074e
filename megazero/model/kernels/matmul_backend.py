"""Choice of matrix products: --tf32 on a GPU; on a CPU --matmul-backend, which may be measured, once for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megazero.comm.mesh.collectives import MAX
from megazero.comm.mesh.mesh import Mesh
from megazero.config.schema import Config
from megazero.model.kernels.matmul import FASTER, has_onednn, onednn_gain

LEAST, MOST = 10**8, 2 * 10**9  # FLOPs of a product: under the first nothing is gained, and the second is long enough


def choose_matmul_backend(
    config: Config, mesh: Mesh, measure: Callable[[int, int, int], float] = onednn_gain
) -> tuple[Config, str]:
    """Replace `auto` by torch or onednn, the same on all ranks; and what to say about it, if anything.

    Raises:
        ValueError: onednn is asked for and cannot be had here.
    """
    asked, device = config.training.matmul_backend, mesh.device.type
    if asked == "onednn" and not (device == "cpu" and has_onednn()):
        reason = "this torch has no oneDNN" if device == "cpu" else f"the device is {device}"
        raise ValueError(f"--matmul-backend onednn: {reason}; use torch, or auto")
    if device == "cuda":
        # Settings of the process, as --tf32 is: where cuBLAS divides a sum into parts, it would add these in 16 bit.
        settings = torch.backends.cuda.matmul
        settings.allow_bf16_reduced_precision_reduction = False
        settings.allow_fp16_reduced_precision_reduction = False
        said = set_tf32(config)
        return replace(config, training=replace(config.training, matmul_backend="torch")), said
    if asked != "auto":
        return config, ""
    gain = _gain(config, mesh.layout.tp, measure) if mesh.rank == 0 else 0.0
    agreed = torch.tensor(gain, dtype=torch.float64, device=mesh.device)
    gain = float(mesh.world.all_reduce_(agreed, op=MAX, kind="control"))
    chosen = "onednn" if gain >= FASTER else "torch"
    said = f"--matmul-backend {chosen}: torch takes {gain:.2f} times as long as oneDNN" if gain else ""
    return replace(config, training=replace(config.training, matmul_backend=chosen)), said


def set_tf32(config: Config) -> str:
    """Set the precision of fp32 products on a GPU as --tf32 says; returns what to say about it, if anything."""
    if config.training.precision != "fp32":
        return ""
    torch.set_float32_matmul_precision("high" if config.training.tf32 else "highest")
    return "fp32 products in TF32; --no-tf32 multiplies in full fp32" if config.training.tf32 else ""


def _gain(config: Config, tp: int, measure: Callable[[int, int, int], float]) -> float:
    """Time of torch over time of oneDNN, of an MLP's first product; 0 where there is nothing to choose or to gain."""
    model, training = config.model, config.training
    tokens, outer = training.micro_batch_size * model.seq_length, model.ffn_size // tp
    per_token = 2 * model.hidden_size * outer
    if training.precision == "fp64" or not has_onednn() or tokens * per_token < LEAST:
        return 0.0
    return measure(min(tokens, max(64, MOST // per_token)), model.hidden_size, outer)
