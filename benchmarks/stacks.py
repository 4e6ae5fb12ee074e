"""A stack of transformer blocks, sharded over tensor-parallel ranks by megazero and by torch's DTensor.

There is no embedding and no head, so only sharded blocks are compared. A step is forward, backward from a fixed
gradient and one AdamW update without clipping, the same on both sides; its input needs a gradient, as a block's does.

Every system exists in three forms:

- on `ranks` ranks. The stream between blocks is `whole` on each of them, or `sharded` (sequence parallelism).
- `-silent`: the same code on as many ranks at once, over a group of torch's `fake` backend, whose collectives answer at
  once with tensors of the right shape, at most copied from this rank's own. It lacks only communication: the
  bytes, the threads that move them, the waiting for the other rank.
- `-alone`: whole blocks, one process.

Shapes: b micro-batch, s sequence, T = b s tokens, T' those of the stream on this rank, h hidden.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

from benchmarks.peer_models import PlainBlock, draw_weights
from benchmarks.peers import Training
from benchmarks.peers import Work as GPTWork
from megazero.engine.mesh.collectives import Axis
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.layers.context import DeviceBatch, MicroBatchInfo
from megazero.engine.model.stage import declare
from megazero.engine.optim.step import StepParams
from megazero.engine.plan.layout.layers import Use
from megazero.engine.plan.program.operations import GradNorm, Open, Update
from megazero.engine.plan.program.program import Program, program
from megazero.engine.plan.program.rank_spec import RankSpec
from megazero.engine.step.engine import Engine
from megazero.flags.config import Config, ModelConfig
from megazero.flags.resolve import resolve
from megazero.run.kernel_choices import choose_matmul_backend

NOT_BLOCKS = ("*_embedding.weight", "head.*")
LR = 1e-6  # so small that hundreds of steps from one fixed gradient do not move the numbers to where they are slow


class Work(GPTWork):
    def config(self, stage: int = 0) -> Config:
        config = super().config(stage)
        return dataclasses.replace(
            config,
            parallel=dataclasses.replace(config.parallel, tensor_model_parallel_size=self.ranks),
            training=dataclasses.replace(config.training, freeze_parameters=NOT_BLOCKS),
            optimizer=dataclasses.replace(config.optimizer, lr=LR),
        )

    def inputs(self, step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """A step has the same input and output gradient every time, and holds them itself."""
        return ()

    def ends(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole input and a whole output gradient, [b, s, h], the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        shape = self.micro_batch_size, self.seq_length, self.hidden_size
        return tuple(torch.randn(shape, generator=generator).to(device) for _ in range(2))  # type: ignore[return-value]


class Gradient(NamedTuple):
    """Gradient of one parameter on this rank, by both systems."""

    name: str
    ours: torch.Tensor
    part: Callable[[torch.Tensor], torch.Tensor]  # the whole parameter's gradient -> the expected `ours`


class Stack(NamedTuple):
    """One rank's part of the blocks under one system."""

    part: Callable[[torch.Tensor], torch.Tensor]  # [b, s, h] -> this rank's part between blocks
    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]  # (y, dy) -> dx, or None: it is x.grad
    gradients: Callable[[], Iterator[Gradient]]
    update: Callable[[], None]  # after which the gradients are gone


class PlainStack(nn.Module):
    def __init__(self, model: ModelConfig, seed: int, block: type[PlainBlock] = PlainBlock) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(model) for _ in range(model.num_layers))
        draw_weights(self, model, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def distance(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """L2, relative to the reference."""
    a, b = ours.detach().double(), reference.detach().double()
    return float((a - b).norm() / b.norm())


def training(work: Work, device: torch.device, stack: Stack) -> Training:
    whole_x, whole_dy = work.ends(device)
    x, dy = (stack.part(t).contiguous() for t in (whole_x, whole_dy))
    x.requires_grad_()

    def passes() -> torch.Tensor:
        x.grad = None
        y = stack.forward(x)
        dx = stack.backward(y, dy)
        if dx is not None:
            x.grad = dx
        return y

    def step() -> float:
        passes()
        stack.update()
        return 0.0

    def check() -> dict[str, float]:
        """Against whole plain blocks on this rank. Gradients are compared element by element, the worst one counts."""
        y = passes()
        config = work.config()
        reference = PlainStack(config.model, config.training.seed).to(device)
        plain_x = whole_x.clone().requires_grad_()
        plain_y = reference(plain_x)
        plain_y.backward(whole_dy)
        assert x.grad is not None and plain_x.grad is not None
        weights = {name: p.grad for name, p in reference.named_parameters()}
        far = {g.name: distance(g.ours, g.part(weights.pop(g.name))) for g in stack.gradients()}  # type: ignore[arg-type]
        assert not weights, f"no gradient: {list(weights)}"
        stack.update()
        return {
            "output": distance(y, stack.part(plain_y)),
            "input gradient": distance(x.grad, stack.part(plain_x.grad)),
            "weight gradients": max(far.values()),
        }

    return Training(step, check=check)


def _fake_group(ranks: list[int]) -> dist.ProcessGroup:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    group = dist.new_group(ranks, backend="fake")
    assert isinstance(group, dist.ProcessGroup)
    return group


# -- megazero


class _SilentAxis(Axis):
    """Axis of a fake group that takes the paths of the real one: on a CPU, gloo's."""

    @property
    def needs_staging_buffer(self) -> bool:
        return self.size > 1 and dist.get_backend() == "gloo"


def megazero(
    work: Work, device: torch.device, sharded: bool, silent: bool, own_products: bool, exchange: str = ""
) -> Training:
    """The Engine's own blocks, ZeRO stage 0, with gradients, sums and update as in a training step.

    exchange: of keys, by ranks of context parallelism; empty: they are ranks of tensor parallelism.
    """
    config = work.config()
    parallel: dict[str, Any] = {"sequence_parallel": sharded}
    if exchange and work.ranks > 1:
        parallel = {"tensor_model_parallel_size": 1, "context_parallel_size": work.ranks, "cp_exchange": exchange}
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **parallel))
    config, layout = resolve(config, work.ranks, 0, declare)
    mesh = Mesh.build(layout, dist.get_rank(), device)
    if own_products:
        config, _ = choose_matmul_backend(config, mesh)
    if silent:
        mesh = dataclasses.replace(mesh, tp=_SilentAxis("tp", mesh.tp.ranks, mesh.rank, _fake_group(mesh.tp.ranks)))
    engine = Engine(config, mesh)
    zero, stage = engine.zero, engine.model
    ids = torch.zeros(work.micro_batch_size, work.seq_length, dtype=torch.long)  # blocks see their number alone
    dealt = None
    if layout.cp > 1:
        dealt, _ = engine.dealer.deal(work.seq_length, ((),) * work.micro_batch_size)
    tokens = MicroBatchInfo.of(ids, tuple(range(len(ids))), stage.stream, training=False, dealt=dealt)
    own = torch.arange(work.seq_length).expand_as(ids) if dealt is None else dealt.indices
    held = stage.stream.tokens(own.numel())
    change = {device: StepParams(config.optimizer, config.optimizer.lr, torch.ones((), device=device))}
    spec = _blocks_alone(engine.spec)
    step = program(spec, "1f1b", 1)
    turn = next(at for at, op in enumerate(step.gradients) if isinstance(op, Open))
    run = engine.interpreter
    run.layers = {name: (layer, run.layers[name][1]) for name, layer in spec.layers.items()}

    def forward(x: torch.Tensor) -> torch.Tensor:
        run.reset()
        run.micro_batches, run.x = [DeviceBatch(ids, ids, ids, tokens)], {0: x.detach()}
        with torch.no_grad():
            run.execute(step.gradients[:turn])
        return run.x[0]

    def backward(y: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        run.dx = {0: dy}
        with torch.no_grad():
            run.execute([op for op in step.gradients[turn:] if not isinstance(op, GradNorm)])
        return run.dx[0]

    def gradients() -> Iterator[Gradient]:
        for name in step_units(step):
            unit = zero.units[name]
            for member in unit.flat.members:
                spec, block = member.weight.spec, member.weight.block
                ours = unit.gradients.sharded_grad[member.window.slice()].view(block.stored)
                where = tuple(slice(at, at + n) for at, n in zip(block.offset, block.shape, strict=True))
                yield Gradient(spec.name, ours, partial(_window, shape=spec.shape, where=where))

    return training(
        work,
        device,
        Stack(
            part=lambda whole: _tokens(whole, own).flatten(0, 1)[held.start : held.stop],
            forward=forward,
            backward=backward,
            gradients=gradients,
            update=lambda: run.update(step, change),
        ),
    )


def _tokens(whole: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Whole samples [b, s, h], indices [b, t] -> [b, t, h]"""
    return whole.detach().gather(1, indices[..., None].expand(-1, -1, whole.shape[-1]))


def _blocks_alone(spec: RankSpec) -> RankSpec:
    """Describe a stack of blocks: the engine's own layers, without embeddings and head."""
    blocks = tuple(layer._replace(passes_gradient=True) for layer in spec.chunks[0] if layer.use is Use.LAYER)
    units = {name: spec.units[name] for layer in blocks for name in layer.units}
    return dataclasses.replace(spec, chunks=(blocks,), units=units, tied=None)


def step_units(step: Program) -> list[str]:
    return [op.unit for op in step.update if isinstance(op, Update)]


def _window(whole: torch.Tensor, shape: tuple[int, ...], where: tuple[slice, ...]) -> torch.Tensor:
    return whole.view(shape)[where]


# -- torch


def _plan(sharded: bool) -> dict[str, Any]:
    """Parallelize a block as torch's tensor-parallel tutorial and torchtitan do. They gather a sharded stream by
    PrepareModuleInput on the whole attention or MLP, because two or three matrices read it; here one does, and its own
    style gathers it, once.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if not sharded:
        column, row = ColwiseParallel, RowwiseParallel
        return {"attention.qkv": column(), "attention.proj": row(), "mlp.up": column(), "mlp.down": row()}
    return {
        "norm1": SequenceParallel(),
        "attention.qkv": ColwiseParallel(input_layouts=Shard(1)),
        "attention.proj": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "mlp.up": ColwiseParallel(input_layouts=Shard(1)),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def dtensor(work: Work, device: torch.device, sharded: bool, silent: bool) -> Training:
    """Plain blocks, parallelised; torch's fused AdamW, which sums the norms' gradients if the stream is sharded."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    if silent:
        mesh = DeviceMesh.from_group(_fake_group(list(range(work.ranks))), device.type)
    else:
        mesh = init_device_mesh(device.type, (work.ranks,))
    config, rank = work.config(), dist.get_rank()
    stack = PlainStack(config.model, config.training.seed).to(device)
    for block in stack.blocks:
        parallelize_module(block, mesh, _plan(sharded))
        # Rows of qkv are ordered by head: their first half is the first half of the heads, whole.
        block.num_heads = config.model.num_attention_heads // work.ranks  # type: ignore[assignment]
    each = work.seq_length // work.ranks
    mine = slice(rank * each, (rank + 1) * each) if sharded else slice(None)
    return _torch_training(work, device, stack, lambda whole: whole.detach()[:, mine].clone())


def plain(work: Work, device: torch.device) -> Training:
    """Whole blocks, for one process."""
    config = work.config()
    stack = PlainStack(config.model, config.training.seed).to(device)
    return _torch_training(work, device, stack, lambda whole: whole.detach().clone())


def _torch_training(
    work: Work,
    device: torch.device,
    stack: PlainStack,
    part: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor, torch.Tensor], None] = lambda y, dy: y.backward(dy),
) -> Training:
    optimizer = _adamw(stack, work)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def gradients() -> Iterator[Gradient]:
        for name, p in stack.named_parameters():
            grad = p.grad
            assert grad is not None, name
            yield Gradient(name, grad.full_tensor() if hasattr(grad, "full_tensor") else grad, lambda whole: whole)

    return training(work, device, Stack(part, stack, backward, gradients, update))


def _adamw(stack: PlainStack, work: Work) -> torch.optim.Optimizer:
    """Fused; matrices decay. A fused group is all DTensors or none: with a whole stream the norms are plain tensors."""
    from torch.distributed.tensor import DTensor

    c = work.config().optimizer
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, p in stack.named_parameters():
        groups.setdefault((name.endswith("bias") or "norm" in name, isinstance(p, DTensor)), []).append(p)
    settings = [
        {"params": members, "weight_decay": 0.0 if exempt else c.weight_decay}
        for (exempt, _), members in groups.items()
    ]
    return torch.optim.AdamW(settings, lr=c.lr, betas=(c.adam_beta1, c.adam_beta2), eps=c.adam_eps, fused=True)


class System(NamedTuple):
    """`make(work, device)` gives a rank's training."""

    label: str
    make: Callable[[Work, torch.device], Training]


# -- context parallelism


class _RingAttention(torch.autograd.Function):
    """torch's ring attention, heads and tails on each rank, around torch's kernel for CPUs.

    torch's `context_parallel` replaces scaled_dot_product_attention on GPUs only: its table of kernels (`custom_ops` in
    torch/distributed/tensor/experimental/_context_parallel/_attention.py) lacks that for CPUs. The ring itself takes
    any kernel. By torch's default, keys are all-gathered, and gradients go round by all-to-all.
    """

    @staticmethod
    def forward(ctx, q, k, v):
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        y, log_sums = ring._templated_ring_attention(dist.group.WORLD, 2, kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, y, log_sums)
        return y

    @staticmethod
    def backward(ctx, dy):
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        def kernel(*, grad_out, query, key, value, out, logsumexp, is_causal):
            inputs = grad_out, query, key, value, out, logsumexp.contiguous()
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, is_causal)

        return ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, kernel, dy.contiguous(), "grad_out", *ctx.saved_tensors, is_causal=True
        )


class _RingBlock(PlainBlock):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _RingAttention.apply(q, k, v)
        return y


def ring(work: Work, device: torch.device) -> Training:
    """Plain blocks with torch's ring attention. Gradients of weights are summed by one all-reduce."""
    config, rank, each = work.config(), dist.get_rank(), work.seq_length // (2 * work.ranks)
    stack = PlainStack(config.model, config.training.seed, _RingBlock).to(device)
    places = [torch.arange(piece * each, (piece + 1) * each) for piece in (rank, 2 * work.ranks - 1 - rank)]
    indices = torch.cat(places).expand(work.micro_batch_size, -1)

    def backward(y: torch.Tensor, dy: torch.Tensor) -> None:
        y.backward(dy)
        gradients = [p.grad for p in stack.parameters() if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in gradients])
        dist.all_reduce(flat)
        for grad, summed in zip(gradients, flat.split([grad.numel() for grad in gradients]), strict=True):
            grad.copy_(summed.view_as(grad))

    return _torch_training(work, device, stack, lambda whole: _tokens(whole, indices), backward)


def _systems() -> dict[str, System]:
    """Named system-stream, with -silent behind; system-alone."""
    systems = {
        "torch-alone": System("plain torch, one process", plain),
        "megazero-alone": System(
            "megazero, one process", partial(megazero, sharded=False, silent=False, own_products=True)
        ),
        "megazero/torch-alone": System(
            "megazero, torch's products, one process",
            partial(megazero, sharded=False, silent=False, own_products=False),
        ),
    }
    for sharded in (False, True):
        for silent in (False, True):
            end = f"-{'sharded' if sharded else 'whole'}{'-silent' if silent else ''}"
            here = {"sharded": sharded, "silent": silent}
            systems[f"dtensor{end}"] = System("torch DTensor", partial(dtensor, **here))
            systems[f"megazero{end}"] = System("megazero", partial(megazero, **here, own_products=True))
            systems[f"megazero/torch{end}"] = System(
                "megazero, torch's products", partial(megazero, **here, own_products=False)
            )
    systems["ring"] = System("torch's ring attention", ring)
    for name, exchange in (("megazero-gathered", "all-gather"), ("megazero-ring", "ring")):
        options = {"sharded": False, "silent": False, "own_products": False, "exchange": exchange}
        systems[name] = System(f"megazero, {exchange}", partial(megazero, **options))
    return systems


SYSTEMS = _systems()
