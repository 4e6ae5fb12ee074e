"""One rank's training engine: model, ZeRO, recompute and pipeline put together; a training step; an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn as nn

from megazero.activations.store import Checkpoints, Keep, recomputed
from megazero.comm.collectives import MIN
from megazero.comm.mesh import Mesh
from megazero.config.schema import Config
from megazero.memory.tracker import Ledger
from megazero.model import initial_values
from megazero.model.context import DTYPES, Context, Stream, Tokens
from megazero.model.fused_ops import PLAIN, compiled
from megazero.model.gpt2 import Block, GPTStage
from megazero.plan.parameters import TOKEN, stage_units
from megazero.plan.schedules import Plan, peak_live, plan
from megazero.plan.topology import Layout
from megazero.plan.zero_policy import Use, ZeroPolicy, fixed_gradients, layer_uses
from megazero.train.optimization import LossScale, clip_factor, learning_rate
from megazero.train.pipeline import Message
from megazero.train.pipeline import run as run_pipeline
from megazero.zero.adamw import Update
from megazero.zero.unit import ZeroOptions
from megazero.zero.zero import Zero


class Batch(Protocol):
    """A micro-batch of b samples; see `data.loader.MicroBatch`."""

    ids: torch.Tensor  # [b, s] int64
    labels: torch.Tensor  # [b, s] int64
    loss_mask: torch.Tensor  # [b, s] fp32, 1 where the target counts
    samples: tuple[int, ...]  # global numbers


class LossScaleExhausted(Exception):
    """fp16 gradients overflow, and the loss scale cannot be lowered. No update was made."""


class StepResult(NamedTuple):
    """Of one iteration, the same on all ranks but for the bytes."""

    loss: float  # nats a target, before the update
    grad_norm: float
    lr: float
    loss_scale: float  # that the gradients were made with
    skipped: bool  # no update: the gradients are not finite
    culprit: str | None  # why: where a gradient is not finite, tensor and rank
    gradient_bytes: int  # accumulated, just before the update


class Engine:
    """One rank's part of the model, and how it learns."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        """Weights are the initial ones, on this rank's device; `config` is resolved."""
        self.config, self.mesh, self.ledger = config, mesh, Ledger()
        self.updates = 0  # made so far: for Adam's bias correction
        self.scale = LossScale.of(config.training)
        self.tied = None if config.model.untie_embeddings else TOKEN  # the unit that both pipeline ends hold
        dtype, zero = DTYPES[config.training.precision], config.zero
        policy, arena = ZeroPolicy.for_stage(zero, mesh.shard.size), config.activations.contiguous_checkpointing
        self.zero = Zero(
            ZeroOptions(
                policy,
                mesh,
                self.ledger,
                dtype,
                DTYPES[config.training.grad_dtype],
                zero.reduce_bucket_size,
                zero.overlap_comm,
                fixed_gradients(policy, arena, config.micro_batches(mesh.layout.dp)),
                config.parallel.sequence_parallel,
                zero.poison_buffers,
            )
        )
        stream = Stream(mesh.tp, cut=config.parallel.sequence_parallel)
        selective = config.activations.recompute == "selective"
        pieces = compiled(mesh.device) if config.training.compile else PLAIN
        context = Context(
            stream, self.zero.contribute, self.ledger, config.training.precision, mesh.device, selective, pieces
        )
        seed, model = config.training.seed, config.model
        self.model = GPTStage(model, mesh, seed, context, config.training.freeze_parameters)
        self.zero.adopt(self.model.named_units(), self._uses(), partial(initial_values.draw, seed))
        tokens = len(stream.tokens(config.training.micro_batch_size * model.seq_length))
        self.message = Message((tokens, model.hidden_size), dtype, mesh.device)
        self.checkpoints = self._checkpoints() if config.activations.recompute == "full" else None

    def _checkpoints(self) -> Checkpoints:
        activations, message = self.config.activations, self.message
        return Checkpoints(
            math.prod(message.shape),
            message.dtype,
            message.device,
            self.ledger,
            tp=self.mesh.tp if activations.partition_activations else None,
            on_host=activations.checkpoint_in_cpu,
            contiguous=activations.contiguous_checkpointing,
        )

    def _uses(self) -> dict[nn.Module, tuple[Use, list[str]]]:
        model, first = self.model, self.mesh.pp.is_first
        uses = layer_uses(model.units, first, self.tied is not None)
        return {model.get_submodule(name): use for name, use in uses.items()}

    # -- what the pipeline calls

    def run_layer(self, keep: Keep | None, layer: nn.Module, *args: Any) -> torch.Tensor:
        """Recompute outside, gather inside: so a recompute gathers again."""
        gathered = partial(self.zero.run, layer)
        if isinstance(layer, Block) and keep is not None:
            return recomputed(gathered, *args, keep=keep)
        return gathered(*args)

    def forward(self, x: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        model, device, learns = self.model, self.mesh.device, torch.is_grad_enabled()
        tokens = Tokens.of(batch.ids, batch.samples, model.stream, drops=learns)
        run = partial(self.run_layer, self.checkpoints.keep() if self.checkpoints is not None and learns else None)
        if x is None:
            x = model.embed(batch.ids.to(device, non_blocking=True), tokens, run)
        x = model.body(x, tokens, run)
        if model.head is None:
            return x
        labels, mask = (t.to(device, non_blocking=True) for t in (batch.labels, batch.loss_mask))
        return run(model.head, x, labels, mask)

    def backward(self, final: bool) -> AbstractContextManager[None]:
        if self.checkpoints is not None:
            self.checkpoints.fetch_ahead()
        return self.zero.backward(final)

    # -- what the trainer calls

    def train_step(self, iteration: int, batches: Sequence[Batch]) -> StepResult:
        """One iteration, counted from 1, over this rank's micro-batches."""
        zero, optimizer = self.zero, self.config.optimizer
        scale = self.scale.value if self.scale else 1.0
        self.begin(len(batches))
        targets = self._count_targets(batches)
        loss = self._run(self.config.parallel.pipeline_schedule, batches, seed_gradient=scale / max(1, targets))
        zero.sum_gradients(self.tied)
        norm = zero.gradient_norm(self.tied) / scale
        gradient_bytes = self.ledger.now["gradients"]
        lr, culprit = learning_rate(optimizer, iteration), None
        skipped = targets == 0 or not math.isfinite(norm)
        if skipped:
            culprit = self._first_nonfinite() if targets else "no target counts in this batch"
            zero.discard_gradients()
        else:
            made = torch.tensor(float(self.updates), device=self.mesh.device)
            zero.update(Update(optimizer, lr, made, clip_factor(norm, optimizer.clip_grad) / scale))
            self.updates += 1
        mean = self._global_loss(loss) / targets if targets else math.nan
        if self.scale and skipped and targets and self.scale.exhausted:
            raise LossScaleExhausted(
                f"iteration {iteration}: gradients overflow at the smallest loss scale (--min-loss-scale {scale:g}), "
                f"first: {culprit}; the loss is {mean:g}. Lower --lr, or train in bf16"
            )
        self.scale = self.scale and self.scale.after(skipped and targets > 0)
        return StepResult(mean, norm, lr, scale, skipped, culprit, gradient_bytes)

    def begin(self, micro_batches: int) -> None:
        """Peaks are an iteration's; nothing is kept yet, whatever became of the step before."""
        self.zero.discard_gradients()
        if self.checkpoints is not None:
            actions = self._plan(self.config.parallel.pipeline_schedule, micro_batches)
            self.checkpoints.begin(peak_live(actions) * len(self.model.blocks))
        self.ledger.begin_iteration()
        if self.mesh.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.mesh.device)

    def _first_nonfinite(self) -> str:
        """Of the whole model, in the order of its layers: on the lowest rank that sees it. Agreed over the world."""
        mesh, mine = self.mesh, self.zero.first_nonfinite()
        names = [s.name for specs in stage_units(self.config.model, Layout(), 0).values() for s in specs]
        at = names.index(mine) if mine is not None else len(names)
        seen = torch.tensor(at * mesh.world.size + mesh.rank, device=mesh.device)
        at, rank = divmod(int(mesh.world.all_reduce_(seen, op=MIN, kind="control")), mesh.world.size)
        return f"the gradient of {names[at]} is not finite on rank {rank}" if at < len(names) else "a sum of gradients"

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """(sum of the cross-entropies, number of targets) of a global batch, on all ranks."""
        targets = self._count_targets(batches)
        return self._global_loss(self._run("forward-only", batches, seed_gradient=0.0)), targets

    def _run(self, schedule: str, batches: Sequence[Batch], seed_gradient: float) -> torch.Tensor:
        actions = self._plan(schedule, len(batches))
        return run_pipeline(actions, self, batches, self.mesh.pp, self.message, self.ledger, seed_gradient)

    def _plan(self, schedule: str, micro_batches: int) -> Plan:
        return plan(schedule, self.mesh.pp.rank, self.mesh.pp.size, micro_batches)

    def _count_targets(self, batches: Sequence[Batch]) -> int:
        """Unmasked targets of the global batch: the one divisor of the loss and of every gradient."""
        count = sum(batch.loss_mask.sum(dtype=torch.float64) for batch in batches)
        assert isinstance(count, torch.Tensor), "no micro-batch"
        return int(self.mesh.control_sum(count.to(self.mesh.device), self.mesh.dp))

    def _global_loss(self, loss: torch.Tensor) -> float:
        """The sum over data-parallel ranks; from the last stage to all."""
        return float(self.mesh.control_sum(loss, self.mesh.dp, self.mesh.pp))

    def wait(self) -> None:
        """Wait for everything in flight: before other hands touch the weights, and before the ranks part."""
        self.zero.wait()

    def memory_bytes(self, result: StepResult) -> dict[str, int]:
        """This rank's memory in the iteration that gave `result`, by kind, as docs/metrics.md defines them."""
        now, peak = self.ledger.now, self.ledger.peak
        on_gpu = self.mesh.device.type == "cuda"
        return {
            "parameters": now["parameters"],
            "optimizer": now["optimizer"],
            "gradients": result.gradient_bytes,
            "activation_checkpoints": peak["activation_checkpoints"],
            "buffers": peak["buffers"],
            "logits": peak["logits"],
            "peak": torch.cuda.max_memory_allocated(self.mesh.device) if on_gpu else self.ledger.total_peak,
            "host": peak["host"],
        }
