"""The two implementations of every fused kernel. A CPU runs torch's operators, which also test Triton's."""

from __future__ import annotations

from typing import NamedTuple

from megazero.model import dropout
from megazero.model.kernels import operators


class Kernels(NamedTuple):
    """Passes over memory that are one kernel each, if Triton makes them."""

    dropout: dropout.Kernel


EAGER = Kernels(dropout=dropout.eager)
TRITON = Kernels(dropout=operators.dropout)


def kernels_named(name: str) -> Kernels:
    """Return the kernels that `TrainingConfig.kernels_on` names: triton or eager."""
    return {"eager": EAGER, "triton": TRITON}[name]
