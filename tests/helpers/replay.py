"""A rank's allocations in a training step, replayed on a simulated allocator: its program, operation by operation.

Shapes: b micro-batch, s sequence, h hidden, n heads, v vocabulary. Sizes are bytes, 16 bit unless noted.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megazero.engine.model.stage import HEAD, POSITION_EMBEDDING, TOKEN_EMBEDDING, declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.operations import (
    Backward,
    Drop,
    Forward,
    Keep,
    Op,
    Open,
    Recompute,
    Recv,
    Reduce,
    Send,
    Start,
    Transfer,
    Update,
    Wait,
    inner,
)
from megazero.engine.plan.program.program import program
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.engine.plan.schedule.schedules import EVALUATION
from megazero.flags.config import ActivationConfig, Config, ModelConfig, ZeroConfig
from tests.caching_allocator import Block, CachingAllocator


class Shape(NamedTuple):
    """GPT-3 XL (1.3 B) by its width, half as deep to be quick; ZeRO stage 2 over 8 ranks, bf16 throughout."""

    layers: int = 12  # of this rank
    h: int = 2048
    n: int = 16
    v: int = 50257
    b: int = 8  # the largest micro-batch of a run
    s: int = 1024  # its longest sequence
    dp: int = 8


class MicroBatch(NamedTuple):
    b: int
    s: int


class Graph(NamedTuple):
    """Blocks of memory that a recomputed layer holds until its backward."""

    norm1: list[Block]
    qkv: Block
    attention: Block
    sums: Block
    middle: Block
    norm2: list[Block]
    up: Block
    gelu: Block


class Rank:
    """One rank: the only one of its pipeline, or the first of `in_flight`, which holds as many micro-batches in 1F1B.

    Per block, in forward: norm, qkv, attention, projection, sum; norm, up, gelu, down, sum. Each goes when its reader
    is done, but the sum: it is the next block's input, and kept for recompute. In backward the same again, kept until
    their gradients exist; the unit's unsharded gradient, of which 1/dp stays until the update. Units are larger
    than a reduce bucket, so an unsharded gradient is packed and goes when its reduction starts.

    Left out: tensors below a few KiB, buckets, units of the position table and of the head.

    `in_arena`: the long-lived kinds ("checkpoints", "gradients") that are in slots of one allocation made at the start.
    """

    def __init__(self, shape: Shape, capacity: int, in_arena: Sequence[str] = (), in_flight: int = 1) -> None:
        self.shape, self.in_arena = shape, in_arena
        model = ModelConfig(shape.layers * in_flight, shape.h, 0, shape.n, shape.s, shape.v)
        config = Config(model=model, zero=ZeroConfig(2), activations=ActivationConfig("full"))
        self.spec = rank_spec(config, Layout(pp=in_flight, dp=shape.dp), 0, declare)
        block, table = 2 * 12 * shape.h**2, 2 * shape.v * shape.h
        self.units = {
            n: table if n == TOKEN_EMBEDDING else block for n in self.spec.units if n not in (POSITION_EMBEDDING, HEAD)
        }
        self.allocator = CachingAllocator(capacity)
        self.new = self.allocator.malloc
        for unit in self.units.values():
            self.new(unit)  # weights
            for _ in range(3):
                self.new(2 * unit // shape.dp)  # master and moments, fp32
        self.at_rest = self.allocator.allocated
        slots = {
            "checkpoints": in_flight * shape.layers * 2 * shape.b * shape.s * shape.h,
            "gradients": sum(self.units.values()) // shape.dp,
        }
        if in_arena:
            self.new(sum(slots[kind] for kind in in_arena))
        self.play = {
            Forward: self._forward,
            Recompute: self._recompute,
            Backward: self._backward,
            Keep: self._keep,
            Drop: lambda op: self.drop(self.kept.pop(op.key)),
            Open: self._open,
            Reduce: self._reduce,
            Update: self._update,
        }

    def drop(self, *blocks: Block | None) -> None:
        for block in blocks:
            if block is not None:
                self.allocator.free(block)

    def steps(self, steps: Sequence[Sequence[MicroBatch]], evaluate: bool) -> None:
        for micro_batches in steps:
            self.step("1f1b", micro_batches)
            if evaluate:
                self.step(EVALUATION, [MicroBatch(self.shape.b, self.shape.s)])

    def step(self, schedule: str, micro_batches: Sequence[MicroBatch]) -> None:
        self.micro_batches = micro_batches
        self.x: dict[int, Block] = {}
        self.dx: dict[int, Block] = {}
        self.kept: dict[tuple[str, int], Block | None] = {}
        self.graphs: dict[tuple[str, int], Graph] = {}
        self.heads: dict[int, Block] = {}  # the gradients of their inputs
        self.messages: dict[Op, Block] = {}
        self.unsharded: dict[str, Block] = {}
        self.sharded: dict[str, Block | None] = {}
        made = program(self.spec, schedule, len(micro_batches))
        for op in [*made.gradients, *made.update]:
            about = inner(op)
            if isinstance(about, Transfer):
                self._transfer(op, about)
            elif not isinstance(op, Wait) and type(about) in self.play:
                self.play[type(about)](about)

    def _bytes(self, micro_batch: int) -> tuple[int, int]:
        """([b, s, h], [b, s] in fp32)"""
        size = self.micro_batches[micro_batch]
        return 2 * size.b * size.s * self.shape.h, 4 * size.b * size.s

    def _transfer(self, op: Op, about: Transfer) -> None:
        """A message's buffer lives from Start to Wait; a received one then is the register."""
        register = self.x if about.what == "x" else self.dx
        if isinstance(op, Start) and isinstance(about, Send):
            self.messages[about] = register.pop(about.micro_batch)
        elif isinstance(op, Start):
            assert isinstance(about, Recv)
            self.messages[about] = self.new(self._bytes(about.micro_batch)[0])
        elif isinstance(about, Send):
            self.drop(self.messages.pop(about))
        else:
            register[about.micro_batch] = self.messages.pop(about)

    def _forward(self, op: Forward) -> None:
        i = op.micro_batch
        u, _ = self._bytes(i)
        if op.layer == TOKEN_EMBEDDING:
            self.x[i] = self.new(u)
        elif op.layer == POSITION_EMBEDDING:
            tokens, positions = self.x[i], self.new(u // self.micro_batches[i].b)
            self.x[i] = self.new(u)
            self.drop(tokens, positions)
        elif op.layer == HEAD:
            size = self.micro_batches[i]
            x, norm, logits = self.x.pop(i), self.new(u), self.new(2 * size.b * size.s * self.shape.v)
            if op.graph:  # gradients in 16 bit are not added up over chunks, so all logits exist together
                d_norm = self.new(u)
                self.drop(logits)  # their gradient was in their place
                self.heads[i] = self.new(u)
                self.drop(d_norm, norm, x)
            else:
                self.drop(x, norm, logits)
        else:
            x = self.x[i]
            self.x[i] = self._block_forward(i)
            if self.kept.get(op.key) is None:  # read for the last time, or copied into its slot
                self.drop(x)

    def _keep(self, op: Keep) -> None:
        self.kept[op.key] = None if "checkpoints" in self.in_arena else self.x[op.micro_batch]

    def _block_forward(self, i: int) -> Block:
        u, row = self._bytes(i)
        norm = [self.new(u), self.new(row), self.new(row)]
        qkv = self.new(3 * u)
        self.drop(*norm)
        attention, sums = self.new(u), self.new(row * self.shape.n)
        self.drop(qkv, sums)
        projection = self.new(u)
        self.drop(attention)
        middle = self.new(u)
        self.drop(projection)
        norm = [self.new(u), self.new(row), self.new(row)]
        up = self.new(4 * u)
        self.drop(*norm)
        gelu = self.new(4 * u)
        self.drop(up)
        down = self.new(u)
        self.drop(gelu)
        y = self.new(u)
        self.drop(down, middle)
        return y

    def _recompute(self, op: Recompute) -> None:
        u, row = self._bytes(op.micro_batch)
        norm1 = [self.new(u), self.new(row), self.new(row)]
        qkv, attention, sums = self.new(3 * u), self.new(u), self.new(row * self.shape.n)
        projection = self.new(u)
        middle = self.new(u)
        self.drop(projection)
        norm2 = [self.new(u), self.new(row), self.new(row)]
        self.graphs[op.key] = Graph(
            norm1, qkv, attention, sums, middle, norm2, up=self.new(4 * u), gelu=self.new(4 * u)
        )

    def _backward(self, op: Backward) -> None:
        i = op.micro_batch
        if op.layer == TOKEN_EMBEDDING:
            self.drop(self.dx.pop(i))
        elif op.layer == HEAD:
            self.dx[i] = self.heads.pop(i)
        elif op.layer != POSITION_EMBEDDING:
            self.dx[i] = self._block_backward(i, self.graphs.pop(op.key), self.dx.pop(i))

    def _block_backward(self, i: int, graph: Graph, dy: Block) -> Block:
        u, _ = self._bytes(i)
        d_gelu = self.new(4 * u)
        self.drop(graph.gelu)
        d_up = self.new(4 * u)
        self.drop(d_gelu, graph.up)
        d_norm = self.new(u)
        self.drop(d_up)
        d_middle = self.new(u)
        self.drop(d_norm, *graph.norm2)
        total = self.new(u)
        self.drop(d_middle, dy, graph.middle)
        d_attention, d_parts, wide = self.new(u), [self.new(u) for _ in "qkv"], self.new(2 * u)  # dq is summed in fp32
        self.drop(wide, graph.attention, graph.sums, graph.qkv, d_attention)
        d_qkv = self.new(3 * u)
        self.drop(*d_parts)
        d_norm = self.new(u)
        self.drop(d_qkv)
        d_x = self.new(u)
        self.drop(d_norm, *graph.norm1)
        dx = self.new(u)
        self.drop(d_x, total)
        return dx

    def _open(self, op: Open) -> None:
        if op.unit in self.units:
            self.unsharded[op.unit] = self.new(self.units[op.unit])

    def _reduce(self, op: Reduce) -> None:
        """The first micro-batch's shard stays, and the others' are added to it."""
        if op.unit in self.units:
            if op.unit not in self.sharded:
                in_arena = "gradients" in self.in_arena
                self.sharded[op.unit] = None if in_arena else self.new(self.units[op.unit] // self.shape.dp)
            self.drop(self.unsharded.pop(op.unit))

    def _update(self, op: Update) -> None:
        if op.unit in self.units:
            widened = self.new(2 * self.units[op.unit] // self.shape.dp)  # the gradient in fp32
            self.drop(widened, self.sharded.pop(op.unit))
