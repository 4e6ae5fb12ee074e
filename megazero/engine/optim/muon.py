"""Muon (Jordan 2024): matrices move along their orthogonalized momentum, as `torch.optim.Muon` does.

A matrix whose parts are on several ranks moves as a whole one. If the side that is not divided is the shorter one, the
ranks sum the Gram matrices of their parts: each multiplies its own part alone. Else they gather the matrix, and each
computes all of it. So every rank reads and writes only its part of momentum and weight.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megazero.engine.mesh.collectives import Axis
from megazero.engine.optim.step import StepParams
from megazero.engine.options.schema import OptimizerConfig
from megazero.engine.plan.layout.flat_layout import Matrices, Range

# Coefficients of X, (X X') X and (X X')^2 X: singular values between 0 and 1 go near 1
COEFFICIENTS = 3.4445, -4.7750, 2.0315
LEAST_NORM = 1e-7


class OwnedMatrices(NamedTuple):
    """Matrices of one weight that this rank updates, or its part of each.

    Attributes:
        owned: their elements in a flat slice.
        shape: of these elements.
        numbers: the dims of `shape` that number matrices.
        ranks: the ranks that have parts of each.
    """

    matrices: Matrices
    owned: Range
    shape: tuple[int, ...]
    numbers: tuple[int, ...]
    ranks: Axis | None

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of each matrix, [.., columns], in a slice."""
        dims = self.numbers
        moved = flat[self.owned.slice()].view(self.shape).movedim(dims, tuple(range(len(dims))))
        found = [moved]
        for _ in dims:
            found = [each for several in found for each in several.unbind()]
        return found


def update(
    params: StepParams,
    master: torch.Tensor,
    gradient: torch.Tensor,
    states: tuple[torch.Tensor, ...],
    decayed: int,
    owned: Sequence[OwnedMatrices],
    dtype: torch.dtype,
) -> None:
    """Update `master` and the momentum in place, all [n]; see `engine.optim.step.UpdateFunction`.

    Args:
        owned: the matrices of the slice.
        dtype: of the products.
    """
    c, (momentum,) = params.config, states
    if params.divisor is not None:
        gradient.div_(params.divisor)
    momentum.lerp_(gradient, 1 - c.muon_momentum)
    gradient.lerp_(momentum, c.muon_momentum)  # Nesterov's
    master[:decayed].mul_(1 - params.lr * c.weight_decay)
    for several in owned:
        rate = params.lr * scale(c, several.matrices)
        for weight, direction in zip(several.views(master), several.views(gradient), strict=True):
            flat = direction.reshape(-1, direction.shape[-1])
            # no name is left for the result, which would be alive during the next matrix
            weight.sub_(orthogonal(flat, several, c.muon_num_ns_steps, dtype).reshape(weight.shape), alpha=rate)


def scale(config: OptimizerConfig, matrices: Matrices) -> float:
    """Return the factor of the learning rate for a matrix."""
    rows, columns = matrices.rows, matrices.columns
    if config.muon_scale == "moonlight":
        return float(0.2 * max(rows, columns) ** 0.5)
    return float(max(1, rows / columns) ** 0.5)


def orthogonal(part: torch.Tensor, of: OwnedMatrices, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the rank's part of a matrix with all singular values near 1 and the same singular vectors.

    Args:
        part: [rows, columns] that the rank has.
    """
    matrices, ranks = of.matrices, of.ranks
    rows, columns = matrices.rows, matrices.columns
    x = part.to(dtype)
    if matrices.sums_grams:
        return newton_schulz(x.T, steps, ranks).T if matrices.by_rows else newton_schulz(x, steps, ranks)
    if ranks is not None:  # no name is left for the gathered parts, of which a copy is made
        x = ranks.all_gather(x.contiguous(), x.new_empty(ranks.size * len(x), x.shape[1])).view(ranks.size, *x.shape)
        x = x.reshape(rows, columns) if matrices.by_rows else x.movedim(0, 1).reshape(rows, columns)
    x = newton_schulz(x.T, steps, None).T if rows > columns else newton_schulz(x, steps, None)
    if ranks is not None:
        x = x.chunk(ranks.size, 0 if matrices.by_rows else 1)[ranks.rank]
    return x


def newton_schulz(x: torch.Tensor, steps: int, ranks: Axis | None) -> torch.Tensor:
    """Return x [m, n] with its singular values near 1; m <= n. `ranks`: each has some of the columns."""
    a, b, c = COEFFICIENTS
    exact = torch.promote_types(x.dtype, torch.float32)
    square = torch.linalg.vector_norm(x, dtype=exact).square()
    if ranks is not None:
        ranks.all_reduce_(square)
    x = (x / square.sqrt().clamp(min=LEAST_NORM)).to(x.dtype)
    out = torch.empty_like(x)
    gram, polynomial = x.new_empty(len(x), len(x)), x.new_empty(len(x), len(x))
    for _ in range(steps):
        torch.mm(x, x.T, out=gram)
        if ranks is not None:
            ranks.all_reduce_(gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.addmm(x, polynomial, x, beta=a, out=out)
        x, out = out, x
    return x
