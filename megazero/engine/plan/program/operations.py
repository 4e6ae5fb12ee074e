"""Operations of a training step, as frozen values. A program (`engine.plan.program`) is a list of them. Pure: no torch.

x (activations) and dx (their gradient) are registers, one of each per micro-batch. An operation reads the register that
its predecessor wrote.

Operations are not NamedTuples, because those compare equal across types: Sync("head") and Reduce("head") would be one
key among the operations in flight.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class LayerOp:
    """An operation on a layer and a micro-batch."""

    layer: str
    micro_batch: int

    @property
    def key(self) -> tuple[str, int]:
        return self.layer, self.micro_batch


@dataclass(frozen=True)
class UnitOp:
    """An operation on a unit: parameters that are gathered, reduced and updated together."""

    unit: str


@dataclass(frozen=True)
class Transfer:
    """A message with `what` ("x" or "dx") from a pipeline neighbour to virtual stage `to`."""

    what: str
    to: int
    micro_batch: int


# -- layers


@dataclass(frozen=True)
class Forward(LayerOp):
    """x = layer(x). If `graph`, keep the autograd graph for Backward. The last layer adds to the loss instead."""

    graph: bool


class Recompute(LayerOp):
    """Rebuild the layer's autograd graph from its kept input, without its output."""


@dataclass(frozen=True)
class Backward(LayerOp):
    """dx = d layer(dx). Weight gradients go into their buffers; if `weights` is False, into a queue."""

    weights: bool = True


class BackwardWeights(LayerOp):
    """Compute the weight gradients that Backward queued."""


# -- kept inputs


@dataclass(frozen=True)
class Keep(LayerOp):
    """Keep the layer's input x until Drop: x itself, this rank's part of it, or a copy in slot `slot`."""

    slot: int | None = None


class Fetch(LayerOp):
    """Copy a kept input from host memory to the device."""


class Rebuild(LayerOp):
    """All-gather a kept input from its parts on the tensor-parallel ranks."""


@dataclass(frozen=True)
class Drop(LayerOp):
    """Free a kept input, and its slot."""

    slot: int | None = None


# -- between stages


class Recv(Transfer):
    """Receive a register from a neighbour."""


class Send(Transfer):
    """Send a register to the neighbour that holds virtual stage `to`, and empty the register."""


# -- weights


@dataclass(frozen=True)
class Gather(UnitOp):
    """All-gather a unit's weights into the arena at element `offset`."""

    offset: int = 0


class Release(UnitOp):
    """Free a unit's part of the arena."""


class Sync(UnitOp):
    """All-gather a unit's updated weights to all ranks that keep them whole."""


# -- gradients


class Open(UnitOp):
    """Allocate a buffer for the unit's gradients. The first contribution overwrites it, later ones add."""


class Reduce(UnitOp):
    """Sum the unit's gradients over its sharding group, and free the buffer."""


class ReduceReplicas(UnitOp):
    """Sum the sharded gradients over the replicas of the sharding group (--zero-shard-size)."""


class SumReplicated(UnitOp):
    """Sum the gradients of tp-replicated parameters over tp (sequence parallelism)."""


class SumTied(UnitOp):
    """Sum the gradient of the tied token table over the first and the last pipeline stage."""


class StoreGradient(UnitOp):
    """Copy the reduced gradient to host memory, and free it (--optimizer-cpu-offload).

    With --optimizer-nvme-offload, a thread then writes it to the file; the next use of the same host memory waits.
    """


class FetchGradient(UnitOp):
    """Copy the gradient of earlier micro-batches from host memory to the device, where the next Reduce adds to it."""


@dataclass(frozen=True)
class GradNorm:
    """Compute the norm of all gradients over all ranks. The engine then decides whether to update."""


class Update(UnitOp):
    """Step the optimizer on the owned range of the unit, and free its gradient. The host computes within it."""


class FetchWeights(UnitOp):
    """Copy the weights of the owned range, which the host has updated, to the device."""


class ReadStates(UnitOp):
    """Read master weights, optimizer states and gradient of the unit from a file (--optimizer-nvme-offload)."""


class WriteStates(UnitOp):
    """Write updated master weights and optimizer states to the file."""


# -- asynchronous operations. Without Start and Wait, one is started and waited for at once.

Asynchronous = (Gather | Fetch | Reduce | Recv | Send | Sync | ReduceReplicas | SumReplicated | SumTied) | (
    StoreGradient | FetchGradient | FetchWeights | ReadStates | WriteStates
)


@dataclass(frozen=True)
class Start:
    """Start an asynchronous operation."""

    op: Asynchronous


@dataclass(frozen=True)
class Wait:
    """Wait for a started operation."""

    op: Asynchronous


Op = (
    Asynchronous
    | (Forward | Recompute | Backward | BackwardWeights | Keep | Rebuild | Drop | Release)
    | (Open | GradNorm | Update | Start | Wait)
)
Ops = list[Op]
# Copies of a unit between the device, host memory and a file
HOST_COPIES = (StoreGradient, FetchGradient, FetchWeights, ReadStates, WriteStates)
COMPUTE = (Forward, Recompute, Backward, BackwardWeights)


def inner(op: Op) -> Op:
    """Return the operation inside a Start or a Wait; any other operation itself."""
    return op.op if isinstance(op, (Start, Wait)) else op


def name_of(op: Op) -> str:
    """Return an operation as text: "Forward blocks.0 mb 1", "start Gather blocks.1 offset 64"."""
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
