"""Costs of a layer, found by running it once on stand-in tensors along a pretended axis.

So nothing about a layer's collectives or its logits is written down a second time: what the layer does is counted.
Stand-ins are meta tensors, which have a shape and a dtype but no data. A small layer runs on real tensors instead:
torch's meta operators import its compiler, which takes longer than the layer.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch

from megazero.comm.pretend import pretend_mesh
from megazero.config.schema import Config, ModelConfig
from megazero.memory.tracker import MemoryTracker
from megazero.model.context import Context, DeviceBatch, GradWriter, MicroBatchInfo, ResidualStream, kept_bytes
from megazero.model.gpt2 import GPTStage
from megazero.plan.parameters import ParamSpec, stage_units
from megazero.plan.rank_spec import Layer, rank_spec
from megazero.plan.topology import Layout

SMALL = 1 << 24  # elements: tens of milliseconds


class LayerCost(NamedTuple):
    """Costs of one layer and micro-batch on one rank.

    Traffic is along tp, in bytes that this rank sends under a ring algorithm.
    """

    forward: int
    recompute: int
    backward: int
    logits: int  # bytes held from its forward to its backward
    queued: int  # bytes that its weight gradients keep while they wait


def trace_layers(config: Config, layout: Layout, pp: int) -> dict[str, LayerCost]:
    """Trace every layer of pipeline rank `pp`, each kind once; `config` is resolved."""
    spec = rank_spec(config, layout, pp)
    specs = stage_units(config.model, layout, pp, config.training.freeze_parameters)
    return {name: _trace(_Kind.of(config, layout, layer, specs)) for name, layer in spec.layers.items()}


class _Kind(NamedTuple):
    """All that a layer's costs depend on. Layers of one kind differ in their number alone."""

    model: ModelConfig  # one block deep
    precision: str
    micro_batch_size: int
    recompute: str
    sequence_parallel: bool
    tp: int
    layer: str  # of all layers of this kind, the name of a block is that of the model's first
    passes_gradient: bool
    frozen: tuple[str, ...]  # names of parameters in it that do not train

    @property
    def device(self) -> torch.device:
        """Return the device of the stand-ins: meta where activations are more than SMALL elements."""
        tokens = self.micro_batch_size * self.model.seq_length
        scores = tokens * self.model.seq_length * self.model.num_attention_heads
        activations = tokens * (self.model.vocab_size + 4 * self.model.hidden_size + self.model.ffn_size)
        return torch.device("cpu" if max(scores, activations) // self.tp <= SMALL else "meta")

    @classmethod
    def of(cls, config: Config, layout: Layout, layer: Layer, specs: dict[str, list[ParamSpec]]) -> _Kind:
        kind = "blocks.0" if layer.name.startswith("blocks.") else layer.name
        frozen = (s.name.replace(layer.name, kind, 1) for unit in layer.units for s in specs[unit] if not s.trains)
        return cls(
            dataclasses.replace(config.model, num_layers=1),
            config.training.precision,
            config.training.micro_batch_size,
            config.activations.recompute,
            config.parallel.sequence_parallel,
            layout.tp,
            kind,
            layer.passes_gradient,
            tuple(frozen),
        )


@functools.lru_cache(maxsize=256)
def _trace(kind: _Kind) -> LayerCost:
    """Build a model of one layer of this kind, and run that forward, backward and, if asked for, forward again."""
    model = kind.model
    mesh = pretend_mesh(Layout(tp=kind.tp), 0, kind.device, needs_staging_buffer=False)
    stream, tracker = ResidualStream(mesh.tp, sharded=kind.sequence_parallel), MemoryTracker()
    queue: list[GradWriter] = []

    def accumulate_grad(parameter: torch.nn.Parameter, write: GradWriter) -> None:
        if parameter.requires_grad:
            queue.append(write)

    context = Context(stream, accumulate_grad, tracker, kind.precision, mesh.device, kind.recompute == "selective")
    stage = GPTStage(model, mesh, 0, context, kind.frozen)
    for p in stage.parameters():  # not one NaN expanded, which CPU products are slow on
        p.data = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
    compute = stage.compute(kind.layer)
    ids = torch.zeros(kind.micro_batch_size, model.seq_length, dtype=torch.int64, device=mesh.device)
    tokens = MicroBatchInfo.of(ids, tuple(range(len(ids))), stream, training=True)
    batch = DeviceBatch(ids, ids, ids.float(), tokens)
    rows = len(stream.tokens(ids.numel()))

    def sent() -> int:
        return mesh.tp.sent["tp"]

    def run(output: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.zeros(rows, model.hidden_size, dtype=context.dtype, device=mesh.device)
        x.requires_grad_(kind.passes_gradient)
        return x, compute(x, batch, output)

    with torch.enable_grad():
        x, y = run(output=True)
        forward, logits = sent(), tracker.now["logits"]
        if y.requires_grad and kind.passes_gradient:
            torch.autograd.grad(y, x, torch.empty_like(y))
        elif y.requires_grad:
            torch.autograd.backward(y, torch.empty_like(y))
        backward, queued = sent() - forward, kept_bytes(queue)
        recompute = 0
        if kind.recompute == "full" and kind.layer == "blocks.0":
            run(output=False)
            recompute = sent() - forward - backward
    return LayerCost(forward, recompute, backward, logits, queued)
