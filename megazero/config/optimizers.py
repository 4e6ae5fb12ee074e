"""Optimizers by name, as values: states, cost, place. Their updates are in `optim.updates`. Pure.

Memory, traffic, time, checkpoints and ZeRO read them here.
"""

from __future__ import annotations

from typing import NamedTuple

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}  # of a number, by --precision or --grad-dtype


class State(NamedTuple):
    """A tensor that an optimizer keeps, with a number for each element of a weight.

    Attributes:
        name: prefix of a weight's name in a checkpoint: "exp_avg.blocks.3.mlp.up.weight".
        precision: None: that of the master weights.
    """

    name: str
    precision: str | None = None


class UpdateRule(NamedTuple):
    """An optimizer, as far as it can be described without torch.

    Attributes:
        states: kept besides master weights by a run that trains.
        whole_matrices: each matrix is updated by one rank: owned ranges begin and end between weights.
        place: of master weights and states, and of the update: "device", or "host" memory.
    """

    name: str
    states: tuple[State, ...]
    whole_matrices: bool = False
    place: str = "device"

    def copies_master(self, weights: int, master: int) -> bool:
        """Return True if master weights are a copy; else they are the compute weights themselves.

        Args:
            weights, master: bytes of an element.
        """
        return self.place != "device" or weights != master

    def state_bytes(self, master: int) -> int:
        """Return the bytes of all states of an element, whose master weight has `master` bytes."""
        return sum(BYTES[state.precision] if state.precision else master for state in self.states)

    def update_bytes(self, master: int) -> int:
        """Return the bytes that an update reads and writes per element; of the gradient, those that it reads."""
        return 3 * master + 2 * self.state_bytes(master)


OPTIMIZERS = {"adamw": UpdateRule("adamw", (State("exp_avg"), State("exp_avg_sq")))}
