"""Operations of a training step: frozen values, of which a program (`plan.program`) is a list. Pure: no torch.

x (activations) and dx (their gradient) are registers, one each per micro-batch: an operation reads the register that
the one before it wrote.

Not NamedTuples: those of different types compare equal, so that Sync("head") and Reduce("head") would be one key of
the operations in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class LayerOp:
    """An operation on a layer and a micro-batch."""

    layer: str
    micro_batch: int

    @property
    def key(self) -> tuple[str, int]:
        return self.layer, self.micro_batch


@dataclass(frozen=True, slots=True)
class UnitOp:
    """An operation on a unit: the parameters that are gathered, reduced and updated together."""

    unit: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """`what` ("x" or "dx") between pipeline neighbours, to virtual stage `to`."""

    what: str
    to: int
    micro_batch: int


# -- layers


@dataclass(frozen=True, slots=True)
class Forward(LayerOp):
    """x = layer(x). `graph`: keep the graph that its Backward needs. The last layer adds to the loss instead."""

    graph: bool


@dataclass(frozen=True, slots=True)
class Recompute(LayerOp):
    """Rebuild the layer's graph from its kept input. Its output is not made."""


@dataclass(frozen=True, slots=True)
class Backward(LayerOp):
    """dx = d layer(dx). Weight gradients go into their buffers or, with `weights` False, into a queue."""

    weights: bool = True


@dataclass(frozen=True, slots=True)
class BackwardWeights(LayerOp):
    """Compute the weight gradients that Backward queued."""


# -- kept inputs


@dataclass(frozen=True, slots=True)
class Keep(LayerOp):
    """Keep x, the layer's input, until Drop: itself, this rank's part of it, or a copy in slot `slot`."""

    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Fetch(LayerOp):
    """Copy a kept input from host memory to the device."""


@dataclass(frozen=True, slots=True)
class Rebuild(LayerOp):
    """All-gather a kept input from its parts on the tensor-parallel ranks."""


@dataclass(frozen=True, slots=True)
class Drop(LayerOp):
    """Free a kept input, and its slot."""

    slot: int | None = None


# -- between stages


@dataclass(frozen=True, slots=True)
class Recv(Transfer):
    """Receive a register from a neighbour."""


@dataclass(frozen=True, slots=True)
class Send(Transfer):
    """Send a register to the neighbour that holds virtual stage `to`. The register is empty then."""


# -- weights


@dataclass(frozen=True, slots=True)
class Gather(UnitOp):
    """All-gather a unit's weights into the arena, from element `offset` on."""

    offset: int = 0


@dataclass(frozen=True, slots=True)
class Release(UnitOp):
    """Free the part of the arena that a unit's weights were gathered into."""


@dataclass(frozen=True, slots=True)
class Sync(UnitOp):
    """All-gather a unit's updated weights to all ranks that hold them whole."""


# -- gradients


@dataclass(frozen=True, slots=True)
class Open(UnitOp):
    """Take a buffer for the unit's gradients. The first contribution to it writes, later ones add."""


@dataclass(frozen=True, slots=True)
class Reduce(UnitOp):
    """Sum the unit's gradients over the ranks that share a copy of it, and free the buffer."""


@dataclass(frozen=True, slots=True)
class ReduceReplicas(UnitOp):
    """Sum the sharded gradients over the groups of ranks that each hold a whole copy (--zero-shard-size)."""


@dataclass(frozen=True, slots=True)
class SumReplicated(UnitOp):
    """Sum the gradients of tp-replicated parameters over tp (sequence parallelism)."""


@dataclass(frozen=True, slots=True)
class SumTied(UnitOp):
    """Sum the gradient of the tied token table over the first and the last pipeline stage."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Compute the norm of all gradients over all ranks. After it the engine decides whether to update."""


@dataclass(frozen=True, slots=True)
class Update(UnitOp):
    """Step the optimizer on the owned range of the unit, and free its gradient."""


# -- asynchronous operations. One that stands alone is started and waited for at once.

Asynchronous = Gather | Fetch | Reduce | Recv | Send | Sync | ReduceReplicas | SumReplicated | SumTied | Update


@dataclass(frozen=True, slots=True)
class Start:
    """Start an asynchronous operation."""

    op: Asynchronous


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for an operation that Start has started."""

    op: Asynchronous


Op = (
    Asynchronous
    | (Forward | Recompute | Backward | BackwardWeights | Keep | Rebuild | Drop | Release)
    | (Open | Norm | Start | Wait)
)
Ops = list[Op]
COMPUTE = (Forward, Recompute, Backward, BackwardWeights)


def inner(op: Op) -> Op:
    """The operation that a Start or a Wait is about; any other operation itself."""
    return op.op if isinstance(op, (Start, Wait)) else op


def axis_of(op: Op) -> str:
    """Return the stream of an operation that may be in flight: dp, tp, pp, or the host's copies and updates."""
    if isinstance(op, (Fetch, Update)):
        return "host"
    if isinstance(op, (Transfer, SumTied)):
        return "pp"
    return "tp" if isinstance(op, SumReplicated) else "dp"


def name_of(op: Op) -> str:
    """An operation in words: "Forward blocks.0 mb 1", "start Gather blocks.1 slot 0"."""
    about = inner(op)
    words = [type(about).__name__]
    for field in fields(about):
        value = getattr(about, field.name)
        if field.name in ("layer", "unit", "what"):
            words.append(str(value))
        elif field.name == "micro_batch":
            words.append(f"mb {value}")
        elif value is not None and value is not True:
            words.append(f"{field.name}={value}" if isinstance(value, bool) else f"{field.name} {value}")
    prefix = {Start: "start ", Wait: "wait "}.get(type(op), "")
    return prefix + " ".join(words)
