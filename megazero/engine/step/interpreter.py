"""The interpreter: executes a program, one short method per operation.

Between its Forward (or Recompute) and its Backward, a layer of a micro-batch is an autograd graph of its own, whose
leaf is the layer's input. The interpreter keeps a GradientEdge in place of the output tensor, so that the output's
memory can be freed. The program, not autograd, determines the order of operations.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megazero.engine.activations.store import KeptInputs
from megazero.engine.kernels.gradient import gradient
from megazero.engine.memory.tracker import Allocation, MemoryTracker
from megazero.engine.mesh.collectives import Axis, Pending
from megazero.engine.model.layers.context import kept_bytes
from megazero.engine.model.layers.weight import GradWriter, Weight
from megazero.engine.optim.step import StepParams
from megazero.engine.plan.layout.layers import Use
from megazero.engine.plan.layout.topology import Route
from megazero.engine.plan.program import operations as ops
from megazero.engine.plan.program.program import Program
from megazero.engine.plan.program.rank_spec import PlannedLayer
from megazero.engine.zero.zero import Zero

Observer = Callable[[ops.Op], contextlib.AbstractContextManager[object]]
# A layer: (x, micro-batch, output) -> y. If `output` is False, the interpreter uses the graph and not the result.
Compute = Callable[[torch.Tensor | None, Any, bool], torch.Tensor]


class ActivationSpec(NamedTuple):
    """Shape of the tensors between layers and between pipeline stages: [T', h]."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


class Graph(NamedTuple):
    """A layer of a micro-batch, between its Forward and its Backward."""

    x: torch.Tensor | None  # the layer's input; None if it needs no gradient
    y: GradientEdge


class Queued(NamedTuple):
    """Postponed weight gradients of a layer and a micro-batch, and the memory of their factors x and dy."""

    writes: list[tuple[Weight, GradWriter]]
    allocation: Allocation


class Interpreter:
    """The registers of one rank, and the effect of each operation on them.

    Attributes:
        x, dx: the registers: micro-batch -> the activation and the gradient that its next operation reads.
        graphs: (layer, micro-batch) -> its autograd graph.
        losses: micro-batch -> the loss of each of its samples, [b] fp64; on the last stage only. With multi-token
            prediction then those of each module, [(1 + D) b].
        queued: (layer, micro-batch) -> weight gradients that BackwardWeights will compute.
        pending: asynchronous operations in flight.
        current: the operation being executed, for reports of hangs and errors. None between steps.
        since: the time at which it began, by time.monotonic.
        square_sum: of all gradients, a scalar in fp64 on the device: set by GradNorm.
        observe: a context manager around every operation, for profilers, traces and tests.
    """

    def __init__(
        self,
        *,
        layers: Mapping[str, tuple[PlannedLayer, Compute]],
        zero: Zero,
        kept: KeptInputs | None,
        pp: Axis,
        route: Callable[[ops.Transfer], Route],
        activation: ActivationSpec,
        tracker: MemoryTracker,
        tied: str | None,
    ) -> None:
        self.layers, self.zero, self.units, self._kept = layers, zero, zero.units, kept
        self.pp, self.route, self.activation, self.tracker, self.tied = pp, route, activation, tracker, tied
        self.pending: dict[ops.Op, Pending] = {}
        self.gathered: set[str] = set()
        self.current: ops.Op | None = None
        self.since = 0.0
        self.observe: Observer | None = None
        self.square_sum: torch.Tensor
        self._step_params: Mapping[torch.device, StepParams] = {}
        self.reset()
        self._start: dict[type, Callable[[Any], Pending]] = {
            ops.Gather: self._gather,
            ops.Sync: lambda op: self.units[op.unit].weights.start_sync(),
            ops.Reduce: lambda op: self.zero.start_reduce(op.unit),
            ops.ReduceReplicas: lambda op: self.units[op.unit].gradients.start_reduce_replicas(),
            ops.SumReplicated: lambda op: self.units[op.unit].gradients.start_sum_replicated(),
            ops.SumTied: lambda op: self.units[op.unit].gradients.start_sum_tied(),
            ops.Fetch: lambda op: self.kept.start_fetch(op.key),
            ops.StoreGradient: lambda op: self.units[op.unit].gradients.start_store(),
            ops.FetchGradient: lambda op: self.units[op.unit].gradients.start_fetch(),
            ops.FetchWeights: lambda op: self.units[op.unit].optimizer.start_fetch(),
            ops.ReadStates: lambda op: self.units[op.unit].home.start_read(),
            ops.WriteStates: lambda op: self.units[op.unit].home.start_write(),
            ops.Recv: self._recv,
            ops.Send: self._send,
        }
        self._do: dict[type, Callable[[Any], None]] = {
            ops.Forward: self._forward,
            ops.Recompute: self._recompute,
            ops.Backward: self._backward,
            ops.BackwardWeights: self._backward_weights,
            ops.Keep: lambda op: self.kept.keep(op.key, self.x[op.micro_batch], op.slot),
            ops.Rebuild: lambda op: self.kept.rebuild(op.key),
            ops.Drop: lambda op: self.kept.drop(op.key, op.slot),
            ops.Release: self._release,
            ops.Open: lambda op: self.units[op.unit].gradients.open(),
            ops.GradNorm: self._norm,
            ops.Update: self._update,
            ops.Start: self._begin,
            ops.Wait: self._wait,
            **dict.fromkeys(self._start, self._at_once),
        }

    @property
    def kept(self) -> KeptInputs:
        assert self._kept is not None, "the program recomputes, but nothing is kept"
        return self._kept

    def reset(self) -> None:
        """Discard the state of the previous step, which may have failed.

        Only the all-gathers of updated weights (Sync) stay in flight: the next step waits for them.
        """
        for op in [op for op in self.pending if not isinstance(op, ops.Sync)]:
            self.pending.pop(op).wait()
        for name in list(self.gathered):
            self.units[name].weights.release()
        self.gathered.clear()
        self.current = None
        self.x: dict[int, torch.Tensor] = {}
        self.dx: dict[int, torch.Tensor] = {}
        self.graphs: dict[tuple[str, int], Graph] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.queued: dict[tuple[str, int], Queued] = {}
        self.zero.discard_gradients()

    def run(
        self,
        program: Program,
        micro_batches: Sequence[Any],
        seed_gradient: torch.Tensor | None,
        head: Compute | None = None,
    ) -> dict[int, torch.Tensor]:
        """Carry out the first part of a program: all but the update.

        Args:
            seed_gradient: d objective / d loss, of every sample: a scalar in fp64. None: an evaluation.
            head: replaces the model's head in an evaluation; returns a vector in place of the losses.

        Returns:
            Micro-batch -> the loss of each of its samples, [b] in fp64; empty on all stages but the last.
        """
        self.reset()
        self.zero.reserve(program.arena_numel)
        if self._kept is not None:
            self._kept.begin(program.num_slots)
        self.micro_batches, self.seed_gradient, self.head = micro_batches, seed_gradient, head
        with torch.no_grad():
            self.execute(program.gradients)
        losses, self.losses = self.losses, {}
        return losses

    def update(self, program: Program, params: Mapping[torch.device, StepParams]) -> None:
        """Carry out the second part of a program. params: by the device that updates."""
        self._step_params = params
        with torch.no_grad():
            self.execute(program.update)

    def execute(self, operations: ops.Ops) -> None:
        """Execute operations in order. An exception gets a note that names the operation."""
        do, observe, now = self._do, self.observe, time.monotonic
        try:
            for op in operations:
                self.current, self.since = op, now()
                if observe is None:
                    do[type(op)](op)
                else:
                    with observe(op):
                        do[type(op)](op)
        except Exception as error:
            error.add_note(f"in operation {ops.name_of(self.current)!r} of the step" if self.current else "in a step")
            raise
        self.current = None

    # -- asynchronous operations

    def _begin(self, op: ops.Start) -> None:
        assert op.op not in self.pending, f"{ops.name_of(op)}: in flight already"
        self.pending[op.op] = self._start[type(op.op)](op.op)

    def _wait(self, op: ops.Wait) -> None:
        pending = self.pending.pop(op.op, None)
        if pending is not None:
            pending.wait()
        else:  # an evaluation or the first step may have waited for it, or there was no update yet
            assert isinstance(op.op, ops.Sync), f"{ops.name_of(op)}: was never started"

    def _at_once(self, op: ops.Op) -> None:
        self._start[type(op)](op).wait()

    def wait_all(self) -> None:
        """Wait for every operation in flight: before ranks exit, and before weights are replaced."""
        while self.pending:
            self.pending.popitem()[1].wait()

    # -- layers

    def _forward(self, op: ops.Forward) -> None:
        i = op.micro_batch
        x = self.x.pop(i, None)  # popped first, so that the layer's input is freed unless a Keep or the graph needs it
        if op.graph:
            y = self._compute(op.layer, x, i)
        else:
            layer, compute = self.layers[op.layer]
            if layer.use is Use.HEAD and self.head is not None:
                compute = self.head
            y = compute(x, self.micro_batches[i], True)
        if y.dim() == 1:  # the head's losses; other layers return [T', h]
            self.losses[i] = y.detach()
        else:
            self.x[i] = y.detach()

    def _compute(self, name: str, x: torch.Tensor | None, i: int, output: bool = True) -> torch.Tensor:
        layer, compute = self.layers[name]
        with torch.enable_grad():
            if x is not None:
                x = x.detach().requires_grad_(layer.passes_gradient)
            y = compute(x, self.micro_batches[i], output)
        self.graphs[name, i] = Graph(x if layer.passes_gradient else None, get_gradient_edge(y))
        return y

    def _recompute(self, op: ops.Recompute) -> None:
        self._compute(op.layer, self.kept.take(op.key), op.micro_batch, output=False)

    def _backward(self, op: ops.Backward) -> None:
        x, y = self.graphs.pop(op.key)
        dy = self.dx.pop(op.micro_batch, None)
        if dy is None:
            assert self.seed_gradient is not None, "an evaluation has no Backward"
            dy = self.seed_gradient.expand_as(self.losses[op.micro_batch]).contiguous()
        if not op.weights:
            self.zero.queue = []
        # autograd runs only the nodes on paths from y to x. Every Function with a weight is on such a path, and writes
        # the weight's gradient itself.
        dx = gradient(y, x, dy)
        if dx is not None:
            self.dx[op.micro_batch] = dx
        if self.zero.queue is not None:
            num_bytes = kept_bytes(write for _, write in self.zero.queue)
            self.queued[op.key] = Queued(self.zero.queue, self.tracker.allocate("buffers", num_bytes))
        self.zero.queue = None

    def _backward_weights(self, op: ops.BackwardWeights) -> None:
        queued = self.queued.pop(op.key)
        for weight, write in queued.writes:
            self.zero.accumulate_grad(weight, write)
        queued.allocation.end()

    # -- weights

    def _gather(self, op: ops.Gather) -> Pending:
        self.gathered.add(op.unit)
        return self.units[op.unit].weights.start_all_gather(self.zero.arena, op.offset)

    def _release(self, op: ops.Release) -> None:
        self.gathered.discard(op.unit)
        self.units[op.unit].weights.release()

    # -- between stages

    def _tag(self, op: ops.Recv | ops.Send) -> int:
        """Return a number that differs for each message of a step: gloo matches messages by it."""
        return (op.to * len(self.micro_batches) + op.micro_batch) * 2 + (op.what == "dx")

    def _recv(self, op: ops.Recv) -> Pending:
        shape, dtype, device = self.activation
        x = torch.empty(shape, dtype=dtype, device=device)
        allocation = self.tracker.allocate("buffers", x.nbytes)
        step, lane = self.route(op)  # from the sender to this rank, so the sender is at -step
        receive = self.pp.start_recv(x, -step, lane, self._tag(op))

        def received() -> None:
            receive.wait()
            allocation.end()
            (self.x if op.what == "x" else self.dx)[op.micro_batch] = x

        return Pending(then=received)

    def _send(self, op: ops.Send) -> Pending:
        x = (self.x if op.what == "x" else self.dx).pop(op.micro_batch).contiguous()
        allocation = self.tracker.allocate("buffers", x.nbytes)
        send = self.pp.start_send(x, *self.route(op), self._tag(op))

        def sent() -> None:
            send.wait()
            allocation.end()

        return Pending(then=sent)

    # -- the end of a step

    def _norm(self, op: ops.GradNorm) -> None:
        self.square_sum = self.zero.gradient_square_sum(self.tied)

    def _update(self, op: ops.Update) -> None:
        unit = self.units[op.unit]
        unit.optimizer.step(self._step_params[unit.home.device], unit.gradients.take())
