"""CUDA graphs of blocks (--cuda-graph-impl local): the host launches a block's Forward, or Backward, in one call.

A graph replays kernels with the addresses and numbers of its capture. So all tensors that a block reads and writes keep
their memory: weights (stages 0 to 2), input, saved tensors and output. Each *slot* has a set of these, and a
micro-batch has a slot of its chunk from its Forward to its Backward. See decision 0017.

Note [pools of graphs]: memory that a capture frees is used again by later captures of the same pool. So a tensor that
outlives its graph, such as a saved one, may share memory with temporary tensors of earlier graphs of its pool, and a
replay of those overwrites it. Therefore Forwards have a pool per slot: when one is replayed, the tensors that later
layers have saved in that slot are no longer needed. Backwards share one pool, because nothing in it outlives its graph.
Outputs and saved tensors of Forwards are referenced here for good, so that no other graph gets their memory.

Shapes: T' tokens of the residual stream on this rank, h hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megazero.kernels.gradient import gradient
from megazero.memory.tracker import Allocation, MemoryTracker
from megazero.model.layers.weight import GradWriter, Weight
from megazero.plan.program.program import Program
from megazero.plan.program.rank_spec import RankSpec
from megazero.zero.zero import ParamUnit, Zero

WARM_UPS = 3  # calls of a layer before its first capture, in which libraries and kernels are loaded

Compute = Callable[[torch.Tensor, Any, bool], torch.Tensor]
Call = Callable[[], None]


class Capturer:
    """Captures calls. This one is for tensors without values, such as on the meta device: a replay does nothing."""

    def warm_up(self, call: Call) -> None:
        """Make the calls that a capture needs beforehand."""

    def new_pool(self) -> Any:
        """Return a new pool of memory: see Note [pools of graphs]."""
        return None

    def capture(self, call: Call, pool: Any) -> Call:
        """Return a function that repeats the operations of `call`."""
        call()
        return lambda: None


class CudaCapturer(Capturer):
    """Captures CUDA graphs on a stream of its own. A capture executes nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def warm_up(self, call: Call) -> None:
        compute = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UPS):
                call()
        compute.wait_stream(self.stream)

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, call: Call, pool: Any) -> Call:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, such as NCCL's watchdog, may use CUDA meanwhile
        with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
            call()
        return graph.replay


class ActivationSpec(NamedTuple):
    """Shape of the tensors between layers and between pipeline stages: [T', h]."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class Shared:
    """Buffers that the graphs of all blocks use in turn.

    Attributes:
        dx: gradient of a block's output, which its Backward replaces by that of the input, [T', h].
        gradients: weight gradients of a block, laid out as its unit, [largest unit].
    """

    def __init__(self, activation: ActivationSpec, numel: int, dtype: torch.dtype, tracker: MemoryTracker) -> None:
        self.dx = activation.zeros()
        self.gradients = torch.zeros(numel, dtype=dtype, device=activation.device)
        self._allocation = tracker.allocate("buffers", self.dx.nbytes + self.gradients.nbytes)


class Computed(NamedTuple):
    """The result of a block's Forward."""

    y: torch.Tensor
    x: torch.Tensor | None  # the leaf, if a gradient passes through
    edge: GradientEdge


class Slot(NamedTuple):
    """A block's graphs, and the tensors whose memory they use."""

    x: torch.Tensor  # [T', h]: the output of the block before it, if that is in the same chunk
    y: torch.Tensor  # [T', h]
    forward: Call  # replays a graph
    backward: Call
    saved: tuple[torch.Tensor, ...]
    allocation: Allocation  # of the tensors that no other slot has


class CapturedChunk:
    """The captured blocks of a chunk, and the slots of its micro-batches in flight."""

    def __init__(self) -> None:
        self.blocks: list[CapturedBlock] = []
        self.free: list[int] = []
        self.slot_of: dict[int, int] = {}  # micro-batch -> slot

    @property
    def num_slots(self) -> int:
        return len(self.blocks[-1].slots) if self.blocks else 0

    def reset(self) -> None:
        """Free all slots."""
        self.free, self.slot_of = list(range(self.num_slots))[::-1], {}


class CapturedBlock:
    """A block whose Forward and Backward are replayed."""

    def __init__(
        self, chunk: CapturedChunk, compute: Compute, unit: ParamUnit, passes_gradient: bool, shared: Shared
    ) -> None:
        self.chunk, self.compute, self.unit, self.shared = chunk, compute, unit, shared
        self.passes_gradient = passes_gradient
        self.first, self.last = not chunk.blocks, True
        if chunk.blocks:
            chunk.blocks[-1].last = False
        chunk.blocks.append(self)
        self.slots: list[Slot] = []
        self.gradients = shared.gradients[: unit.flat.numel]
        members = unit.flat.members
        self._windows = {m.weight: self.gradients[m.window.slice()].view(m.block.stored) for m in members}
        self._written: set[Weight] = set()
        # ranges that no weight gradient writes, where a unit of another shape may have left values
        self._others = [*unit.flat.layout.gaps, *(m.window for m in members if not m.trains)]

    # -- a step

    def forward(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """x [T', h] of micro-batch i -> [T', h]: the slot's own tensor, unless the block is the chunk's last."""
        chunk = self.chunk
        if self.first:
            chunk.slot_of[i] = chunk.free.pop()
        slot = self.slots[chunk.slot_of[i]]
        if x is not slot.x:
            assert self.first, "the input is not the output of the block before"
            slot.x.copy_(x)
        slot.forward()
        return slot.y.clone() if self.last else slot.y  # it may be sent while the slot is used again

    def backward(self, i: int, dy: torch.Tensor) -> torch.Tensor | None:
        """dy [T', h] of micro-batch i -> [T', h], or None if no gradient passes. Hands over the weight gradients."""
        chunk, shared = self.chunk, self.shared
        if dy is not shared.dx:
            assert self.last, "the gradient is not that of the next block"
            shared.dx.copy_(dy)
        self.slots[chunk.slot_of[i]].backward()
        if self.unit.flat.trains:
            self.unit.gradients.accumulate_all(self.gradients)
        if not self.first:
            return shared.dx
        chunk.free.append(chunk.slot_of.pop(i))
        return shared.dx.clone() if self.passes_gradient else None

    # -- capture

    def capture(
        self, x: torch.Tensor, micro_batch: Any, by: Capturer, pools: tuple[Any, Any], tracker: MemoryTracker
    ) -> None:
        """Capture another slot, whose input is x [T', h]. pools: of Forward and of Backward."""
        made: list[Computed] = []
        saved: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved.setdefault(_storage(tensor), tensor.detach())
            return tensor

        def forward() -> None:
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                made.append(self._forward(x, micro_batch))

        with self._taking_gradients():
            if not self.slots:
                by.warm_up(lambda: self._backward(self._forward(x, micro_batch)))
            replays = by.capture(forward, pools[0]), by.capture(lambda: self._backward(made[0]), pools[1])
        saved.pop(_storage(x), None)
        y, own = made[0].y, tuple(saved.values())
        num_bytes = y.nbytes + sum(t.untyped_storage().nbytes() for t in own)
        if self.first:
            num_bytes += x.nbytes
        self.slots.append(Slot(x, y, *replays, own, tracker.allocate("buffers", num_bytes)))

    def _forward(self, x: torch.Tensor, micro_batch: Any) -> Computed:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_(self.passes_gradient)
            y = self.compute(leaf, micro_batch, True)
        return Computed(y.detach(), leaf if self.passes_gradient else None, get_gradient_edge(y))

    def _backward(self, computed: Computed) -> None:
        """Read `shared.dx`; write it and the weight gradients."""
        self._written.clear()
        for window in self._others:
            self.gradients[window.slice()].zero_()
        dx = gradient(computed.edge, computed.x, self.shared.dx)
        if dx is not None:
            self.shared.dx.copy_(dx)

    @contextlib.contextmanager
    def _taking_gradients(self) -> Iterator[None]:
        """Within: own the block's weights, so that their gradients go into `gradients`."""
        owners = {weight: weight.owner for weight in self._windows}
        for weight in owners:
            weight.owner = self
        try:
            yield
        finally:
            for weight, owner in owners.items():
                weight.owner = owner

    def accumulate_grad(self, weight: Weight, write: GradWriter) -> None:
        """Take a weight gradient, in a capture."""
        write(self._windows[weight], weight in self._written)
        self._written.add(weight)


class BlockGraphs:
    """The captured blocks of a rank.

    Attributes:
        blocks: layer -> its block.
    """

    def __init__(
        self,
        spec: RankSpec,
        compute: Mapping[str, Compute],
        activation: ActivationSpec,
        zero: Zero,
        tracker: MemoryTracker,
    ) -> None:
        self.activation, self.tracker, self.blocks = activation, tracker, dict[str, CapturedBlock]()
        captured = [[layer for layer in chunk if spec.captures(layer)] for chunk in spec.chunks]
        units = {layer.name: zero.units[layer.units[0]] for layers in captured for layer in layers}
        numel = max((unit.flat.numel for unit in units.values()), default=0)
        self.shared = Shared(activation, numel, zero.options.grad_dtype, tracker)
        self.chunks = [CapturedChunk() for _ in captured]
        for chunk, layers in zip(self.chunks, captured, strict=True):
            for layer in layers:
                name = layer.name
                self.blocks[name] = CapturedBlock(chunk, compute[name], units[name], layer.passes_gradient, self.shared)
        self._capturer: Capturer | None = None
        self._backwards: Any = None  # their pool

    def reset(self) -> None:
        """Free all slots at the start of a step, because the one before may have failed."""
        for chunk in self.chunks:
            chunk.reset()

    def lacks(self, program: Program) -> bool:
        """Return whether a program needs slots that are not captured yet."""
        return any(chunk.blocks and chunk.num_slots < count for chunk, count in self._needed(program))

    def capture(self, program: Program, micro_batch: Any, progress: Call = lambda: None) -> None:
        """Capture the missing slots of a program, while nothing is in flight.

        Args:
            micro_batch: any one, because without dropout and documents a block reads only its sizes.
            progress: called after each block, because the capture of a deep model may exceed --hang-timeout.
        """
        if self._capturer is None:
            on_gpu = self.activation.device.type == "cuda"
            self._capturer = CudaCapturer(self.activation.device) if on_gpu else Capturer()
            self._backwards = self._capturer.new_pool()
        for chunk, count in self._needed(program):
            for number in range(chunk.num_slots, count):
                x, pools = self.activation.zeros(), (self._capturer.new_pool(), self._backwards)
                for block in chunk.blocks:
                    block.capture(x, micro_batch, self._capturer, pools, self.tracker)
                    x = block.slots[number].y
                    progress()
            chunk.reset()

    def _needed(self, program: Program) -> Iterator[tuple[CapturedChunk, int]]:
        return zip(self.chunks, program.live_by_chunk, strict=True)


def _storage(tensor: torch.Tensor) -> int:
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)
