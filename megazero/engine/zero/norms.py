"""Norms of reduced gradients, on the device and in host memory."""

from collections.abc import Sequence

import torch

from megazero.engine.plan.layout.flat_layout import ALIGN


def norm(values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the norm of numbers [n], in fp64, where they are. ALIGN divides n.

    Note [norms in fp32]: torch's vector_norm of 4 M fp32 numbers on a CPU has an error of 1e-4, because it
    accumulates sequentially in fp32. Rows of ALIGN elements in fp32, and their sum in fp64, have an error of 1e-10 at
    the same cost, and are the same rows in every layout. torch's `_foreach_norm` has no rows.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    rows = torch.linalg.vector_norm(values.view(-1, ALIGN), dim=1, dtype=dtype)
    found: torch.Tensor = torch.linalg.vector_norm(rows, dtype=torch.float64, out=out)
    return found


def square_sums(groups: Sequence[Sequence[torch.Tensor | float]], device: torch.device) -> torch.Tensor:
    """Return the sum of squares of each group's pieces, in fp64 on the device: [groups].

    Pieces are on the device or in host memory, or are norms, which the host knows.
    """
    pieces = [piece for group in groups for piece in group]
    norms = {
        place: torch.zeros(len(pieces), dtype=torch.float64, device=place)
        for place in {device, *(_place(piece) for piece in pieces)}
    }
    for number, piece in enumerate(pieces):
        if isinstance(piece, torch.Tensor):
            norm(piece, out=norms[_place(piece)][number])
        else:
            norms[_place(piece)][number] = piece
    total = norms.pop(device)
    for others in norms.values():  # which have 0 for the pieces of this one
        total += others.to(device)
    return torch.stack([part.sum() for part in total.square_().split([len(group) for group in groups])])


def _place(piece: torch.Tensor | float) -> torch.device:
    return piece.device if isinstance(piece, torch.Tensor) else torch.device("cpu")
