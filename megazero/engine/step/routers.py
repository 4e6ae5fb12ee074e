"""The statistics of routers in a step, summed over all ranks; and the biases that balance the experts.

Shapes: L layers with experts of the model, E experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.experts.router import Router
from megazero.engine.model.stage import Stage
from megazero.engine.options.model_options import ModelOptions
from megazero.engine.plan.layout.layers import ROUTER_SUMS


@dataclass(frozen=True)
class Routers:
    """The routers of this rank's layers, and the biases of all layers.

    Attributes:
        held: place among the L layers -> router.
        biases: of --moe-router-enable-expert-bias, [L, E] fp64, the same on all ranks. Routers have its rows.
    """

    model: ModelOptions
    held: Mapping[int, Router]
    biases: torch.Tensor | None

    @classmethod
    def of(cls, model: ModelOptions, stage: Stage, device: torch.device) -> Self:
        places = {number: place for place, number in enumerate(model.expert_layers)}
        held = {places[part.number]: part for part in stage.modules() if isinstance(part, Router)}
        if not model.moe_router_enable_expert_bias:
            return cls(model, held, None)
        biases = torch.zeros(len(places), model.num_experts, dtype=torch.float64, device=device)
        for place, router in held.items():
            router.bias = biases[place]
        return cls(model, held, biases)

    def update(self, summed: torch.Tensor) -> None:
        """Change the biases after a step, on the device: up by the rate where an expert's load is less than the mean.

        Wang et al. 2024 (arXiv:2408.15664), algorithm 1.

        Args:
            summed: the result of the method `summed`.
        """
        if self.biases is not None:
            loads = summed.view(-1, self.model.num_experts + ROUTER_SUMS)[:, : self.model.num_experts]
            ahead = (loads * self.model.num_experts - loads.sum(1, keepdim=True)).sign()  # the integers are exact
            self.biases.sub_(ahead, alpha=self.model.moe_router_bias_update_rate)

    def reset(self) -> None:
        for router in self.held.values():
            router.statistics.zero_()

    def summed(self, mesh: Mesh) -> torch.Tensor:
        """Return all statistics [L (E + ROUTER_SUMS)] fp64, summed over ranks that hold different tokens or layers."""
        width = self.model.num_experts + ROUTER_SUMS
        found = torch.zeros(len(self.model.expert_layers), width, dtype=torch.float64, device=mesh.device)
        for place, router in self.held.items():
            found[place] = router.statistics
        return mesh.control_sum(found.flatten(), mesh.data, mesh.tp, mesh.pp) if len(found) else found.flatten()
