"""Fields of metrics.jsonl that are derived from a step's result: memory by kind, loads of experts."""

from typing import Any, NamedTuple

import torch

from megazero.engine.options.model_options import ModelOptions
from megazero.engine.plan.layout.layers import ROUTER_SUMS
from megazero.engine.step.engine import Engine
from megazero.engine.step.results import StepResult


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


class ExpertLoads(NamedTuple):
    """Loads of a step, the same on all ranks.

    Attributes:
        choices: of each expert, by layer with experts; samples without targets do not count.
        entropy: of the routers' probabilities in nats, the mean over tokens and layers.
        dropped: the share of choices that experts had no room for.
        aux_loss, z_loss: without their factors, means over samples, weighted by targets, and over layers; 0 if their
            factor is 0.
    """

    choices: tuple[tuple[int, ...], ...]
    entropy: float
    dropped: float
    aux_loss: float
    z_loss: float

    @property
    def imbalance(self) -> tuple[float, ...]:
        """Layer by layer, the choices of the busiest expert over the mean of all experts."""
        return tuple(max(each) * len(each) / max(1, sum(each)) for each in self.choices)


def expert_loads(result: StepResult, model: ModelOptions) -> ExpertLoads | None:
    """Return the loads of a step; None without experts."""
    layers, experts, values = len(model.expert_layers), model.num_experts, result.routed
    if not layers:
        return None
    width = experts + ROUTER_SUMS
    rows = [values[at : at + width] for at in range(0, len(values), width)]
    choices = tuple(tuple(map(int, row[:experts])) for row in rows)
    count, parts = max(1, sum(map(sum, choices))), max(1.0, result.targets) * layers
    entropy, dropped, aux, z = (sum(column) for column in zip(*(row[experts:] for row in rows), strict=True))
    entropy *= model.moe_router_topk
    return ExpertLoads(
        choices=choices, entropy=entropy / count, dropped=dropped / count, aux_loss=aux / parts, z_loss=z / parts
    )


def expert_metrics(loads: ExpertLoads, model: ModelOptions, choices: bool) -> dict[str, Any]:
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
