"""Fields of metrics.jsonl that are derived from a step's result: memory by kind, loads of experts."""

from typing import Any

import torch

from megazero.engine.step.engine import Engine
from megazero.engine.step.expert_loads import ExpertLoads
from megazero.engine.step.results import StepResult
from megazero.flags.config import ModelConfig


def memory_bytes(engine: Engine, result: StepResult) -> dict[str, int]:
    """Return this rank's memory in the iteration of `result`, by kind, as docs/metrics.md defines them."""
    now, peak = engine.tracker.now, engine.tracker.peak
    on_gpu = engine.mesh.device.type == "cuda"
    return {
        "parameters": now["parameters"],
        "optimizer": now["optimizer"],
        "gradients": result.gradient_bytes,
        "activation_checkpoints": peak["activation_checkpoints"],
        "buffers": peak["buffers"],
        "logits": peak["logits"],
        "peak": torch.cuda.max_memory_allocated(engine.mesh.device) if on_gpu else engine.tracker.total_peak,
        "host": peak["host"],
        "nvme": now["nvme"],
    }


def expert_metrics(loads: ExpertLoads, model: ModelConfig, choices: bool) -> dict[str, Any]:
    """Return the fields of metrics.jsonl for the loads of a step.

    Args:
        choices: also those of every expert, which are many numbers.
    """
    layers = list(map(str, model.expert_layers))
    return {
        "moe_load": dict(zip(layers, loads.imbalance, strict=True)),
        "moe_router_entropy": loads.entropy,
        "moe_dropped": loads.dropped,
        **({"moe_aux_loss": loads.aux_loss} if model.moe_aux_loss_coeff else {}),
        **({"moe_z_loss": loads.z_loss} if model.moe_z_loss_coeff else {}),
        **({"moe_choices": dict(zip(layers, loads.choices, strict=True))} if choices else {}),
    }
