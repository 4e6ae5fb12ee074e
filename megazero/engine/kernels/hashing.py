"""Integer hashes in 32 bits that wrap around, on any device: the rounds of lowbias32.

lowbias32 is of Wellons, "Prospecting for Hash Functions". torch has no unsigned 32-bit arithmetic. int32 wraps around
in the same way. Its `>>` fills in copies of the sign bit, which are masked out.
"""

import torch

Constants = tuple[torch.Tensor, ...]


def signed(value: int) -> int:
    """Return the lowest 32 bits as an int32."""
    return (value & 0xFFFFFFFF ^ 1 << 31) - (1 << 31)


def scalars(*values: int) -> Constants:
    """Return the lowest 32 bits of each as int32 scalars, which any device takes. Python numbers cost 2 us more."""
    return torch.tensor([signed(v) for v in values], dtype=torch.int32, device="cpu").unbind()


(GOLDEN,) = scalars(0x9E3779B1)  # 2^32 / the golden ratio: adjacent columns get distant hash inputs
# a shift, a mask of the bits that it does not fill, an odd factor
FIRST_ROUND, SECOND_ROUND = scalars(16, 0xFFFF, 0x7FEB352D), scalars(15, 0x1FFFF, 0x846CA68B)


def round_(
    x: torch.Tensor, spare: torch.Tensor, shift: torch.Tensor, low: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    """x = (x ^ x >> shift) * factor, as if x were unsigned. `low` masks the bits that the shift does not fill."""
    torch.bitwise_right_shift(x, shift, out=spare)
    return x.bitwise_xor_(spare.bitwise_and_(low)).mul_(factor)


def mix_(x: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Replace every x by its hash, lowbias32 and a factor."""
    for constants in (FIRST_ROUND, SECOND_ROUND, FIRST_ROUND):
        round_(x, spare, *constants)
    return x
