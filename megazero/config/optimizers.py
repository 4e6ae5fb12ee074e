"""Optimizers by name, as values: states and cost. Their updates are in `optim.updates`. Pure.

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
    """The rule by which weights are updated, as far as it can be described without torch.

    Attributes:
        states: kept besides master weights by a run that trains.
        whole_matrices: each matrix is updated by one data-parallel rank: owned ranges begin and end between matrices.
    """

    name: str
    states: tuple[State, ...]
    whole_matrices: bool = False

    def state_bytes(self, master: int) -> int:
        """Return the bytes of all states of an element, whose master weight has `master` bytes."""
        return sum(BYTES[state.precision] if state.precision else master for state in self.states)

    def update_bytes(self, master: int) -> int:
        """Return the bytes that an update reads and writes per element; of the gradient, those that it reads."""
        return 3 * master + 2 * self.state_bytes(master)


class Optimizer(NamedTuple):
    """The rules of a run. Where their states are is a property of each unit: `plan.layout.zero_policy.host_units`.

    Attributes:
        matrices: rule of the matrices inside blocks, as their layers declare them; experts are matrices of their own.
        others: rule of tables, head, norms, biases and routers.
    """

    matrices: UpdateRule
    others: UpdateRule

    @property
    def rules(self) -> tuple[UpdateRule, ...]:
        """Each rule once."""
        return tuple(dict.fromkeys((self.matrices, self.others)))

    def rule(self, is_matrix: bool) -> UpdateRule:
        return self.matrices if is_matrix else self.others

    @property
    def states(self) -> tuple[State, ...]:
        """Each state once."""
        return tuple(dict.fromkeys(state for rule in self.rules for state in rule.states))


ADAMW = UpdateRule("adamw", (State("exp_avg"), State("exp_avg_sq")))
LION = UpdateRule("lion", (State("direction"),))
MUON = UpdateRule("muon", (State("momentum"),), whole_matrices=True)
OPTIMIZERS = {"adamw": Optimizer(ADAMW, ADAMW), "lion": Optimizer(LION, LION), "muon": Optimizer(MUON, ADAMW)}
