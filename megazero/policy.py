"""What ZeRO cuts, and how layers use their units: plain values, read by the engine and by `estimate`. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from megazero.parameters import HEAD, POSITION, TOKEN


@dataclass(frozen=True)
class ZeroPolicy:
    """What is cut over the data-parallel ranks."""

    optimizer: bool
    gradients: bool
    parameters: bool

    @classmethod
    def for_stage(cls, stage: int, size: int) -> ZeroPolicy:
        """Over one rank there is nothing to cut: every stage is stage 0."""
        assert stage in (0, 1, 2, 3), stage
        if size == 1:
            stage = 0
        return cls(stage >= 1, stage >= 2, stage >= 3)


class Use(Enum):
    """How a layer uses its weights: (kept from forward to backward, needed in backward)."""

    LOOKUP = (False, False)  # embeddings: backward needs no weights
    LAYER = (False, True)  # gathered for forward, again for backward
    HEAD = (True, True)  # nothing runs between its forward and its backward: gathered once for both


def layer_uses(units: Iterable[str], first: bool, tied: bool) -> dict[str, tuple[Use, list[str]]]:
    """layer -> its use of which units, in the order of the forward pass, on one pipeline stage.

    A layer bears its unit's name. The last stage of several holds a tied token table, but looks nothing up in it.
    """
    uses: dict[str, tuple[Use, list[str]]] = {}
    for name in units:
        if name == HEAD:
            uses[name] = Use.HEAD, [HEAD, TOKEN] if tied else [HEAD]
        elif name.startswith("blocks."):
            uses[name] = Use.LAYER, [name]
        elif first:
            assert name in (TOKEN, POSITION), name
            uses[name] = Use.LOOKUP, [name]
    return uses


RING_DEPTH = 2  # slots for gathered units of one size


def ring_slots(sizes: list[int]) -> dict[int, int]:
    """unit size -> slots of that size: RING_DEPTH, fewer where fewer units have it."""
    return {size: min(RING_DEPTH, sizes.count(size)) for size in dict.fromkeys(sizes)}
