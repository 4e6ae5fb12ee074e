"""The loads of experts in a step, counted by the routers and summed over all ranks; and the biases that balance them.

Shapes: L layers with experts of the model, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.experts.router import Router
from megazero.engine.model.stage import Stage
from megazero.engine.options.model_options import ModelConfig
from megazero.engine.plan.layout.layers import ROUTER_SUMS


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


@dataclass(frozen=True)
class Routers:
    """The routers of this rank's layers, and the biases of all layers.

    Attributes:
        held: place among the L layers -> router.
        biases: of --moe-router-enable-expert-bias, [L, E] fp64, the same on all ranks. Routers have its rows.
    """

    model: ModelConfig
    held: Mapping[int, Router]
    biases: torch.Tensor | None

    @classmethod
    def of(cls, model: ModelConfig, stage: Stage, device: torch.device) -> Self:
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

    def state_dict(self, mesh: Mesh) -> dict[str, list[float]]:
        """Return the biases by number of their layer."""
        if self.biases is None:
            return {}
        values, experts = mesh.read(self.biases.flatten()), self.model.num_experts
        return {str(n): values[at * experts : (at + 1) * experts] for at, n in enumerate(self.model.expert_layers)}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Read the biases of a checkpoint; those of a run without biases are 0."""
        if self.biases is not None:
            none = [0.0] * self.model.num_experts
            rows = [state.get(str(number), none) for number in self.model.expert_layers]
            self.biases.copy_(torch.tensor(rows, dtype=torch.float64))

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

    def read(self, values: Sequence[float], targets: float) -> ExpertLoads | None:
        """Return the loads, given the values of `summed` and the step's targets; None without experts."""
        layers, experts = len(self.model.expert_layers), self.model.num_experts
        if not layers:
            return None
        width = experts + ROUTER_SUMS
        rows = [values[at : at + width] for at in range(0, len(values), width)]
        choices = tuple(tuple(map(int, row[:experts])) for row in rows)
        count, parts = max(1, sum(map(sum, choices))), max(1.0, targets) * layers
        entropy, dropped, aux, z = (sum(column) for column in zip(*(row[experts:] for row in rows), strict=True))
        entropy *= self.model.moe_router_topk
        return ExpertLoads(
            choices=choices, entropy=entropy / count, dropped=dropped / count, aux_loss=aux / parts, z_loss=z / parts
        )
