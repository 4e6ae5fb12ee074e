"""The loads of experts in a step, counted by the routers and summed over all ranks.

Shapes: L layers with experts of the model, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megazero.comm.mesh.mesh import Mesh
from megazero.config.schema import ModelConfig
from megazero.model.layers.router import Router
from megazero.model.stage import Stage
from megazero.plan.sizes import ROUTER_SUMS


class ExpertLoads(NamedTuple):
    """Loads of a step, the same on all ranks.

    Attributes:
        choices: of each expert, by layer with experts; samples without targets do not count.
        entropy: of the routers' probabilities in nats, the mean over tokens and layers.
        aux_loss, z_loss: without their factors, means over samples, weighted by targets, and over layers; 0 if their
            factor is 0.
    """

    choices: tuple[tuple[int, ...], ...]
    entropy: float
    aux_loss: float
    z_loss: float

    @property
    def imbalance(self) -> tuple[float, ...]:
        """Layer by layer, the choices of the busiest expert over the mean of all experts."""
        return tuple(max(each) * len(each) / max(1, sum(each)) for each in self.choices)

    def metrics(self, model: ModelConfig, choices: bool) -> dict[str, Any]:
        """Return the fields of metrics.jsonl.

        Args:
            choices: also those of every expert, which are many numbers.
        """
        layers = list(map(str, model.expert_layers))
        return {
            "moe_load": dict(zip(layers, self.imbalance, strict=True)),
            "moe_router_entropy": self.entropy,
            **({"moe_aux_loss": self.aux_loss} if model.moe_aux_loss_coeff else {}),
            **({"moe_z_loss": self.z_loss} if model.moe_z_loss_coeff else {}),
            **({"moe_choices": dict(zip(layers, self.choices, strict=True))} if choices else {}),
        }


@dataclass(frozen=True)
class Routers:
    """The routers of this rank's layers.

    Attributes:
        held: place among the L layers -> router.
    """

    model: ModelConfig
    held: Mapping[int, Router]

    @classmethod
    def of(cls, model: ModelConfig, stage: Stage) -> Routers:
        places = {number: place for place, number in enumerate(model.expert_layers)}
        return cls(model, {places[part.number]: part for part in stage.modules() if isinstance(part, Router)})

    def reset(self) -> None:
        for router in self.held.values():
            router.statistics.zero_()

    def summed(self, mesh: Mesh) -> torch.Tensor:
        """Return all statistics, summed over the ranks that hold different tokens or layers: [L (E + 3)] fp64."""
        width = self.model.num_experts + ROUTER_SUMS
        found = torch.zeros(len(self.model.expert_layers), width, dtype=torch.float64, device=mesh.device)
        for place, router in self.held.items():
            found[place] = router.statistics
        return mesh.control_sum(found.flatten(), mesh.data, mesh.tp, mesh.pp) if len(found) else found.flatten()

    def read(self, values: Sequence[float], targets: float) -> ExpertLoads | None:
        """Return the loads, given the values of `summed` and the step's targets; None without experts."""
        layers, experts = len(self.model.expert_layers), self.model.num_experts
        if not layers:
            return None
        rows = torch.tensor(values, dtype=torch.float64).view(layers, -1)
        tokens = float(rows[:, :experts].sum()) / self.model.moe_router_topk
        entropy, aux, z = rows[:, experts:].sum(0).tolist()
        choices = tuple(tuple(map(int, row)) for row in rows[:, :experts].tolist())
        parts = max(1.0, targets) * layers
        return ExpertLoads(choices, entropy / max(1.0, tokens), aux / parts, z / parts)
