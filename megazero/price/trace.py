"""Costs of a layer, found by running it once on stand-in tensors along a pretended axis.

So nothing about a layer's bytes, collectives or products is written down a second time: what the layer does is counted.
Stand-ins have a shape and a dtype but no data: for a GPU meta tensors, whose operators have its kernels' shapes and
types, for a CPU fake tensors. A small layer of a CPU runs on real tensors instead: what imitates torch's operators
takes longer to import than the layer takes to run.

Not seen: scratch that a kernel takes and frees, and what a value decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megazero.comm.collectives import Axis
from megazero.comm.pretend import pretend_mesh
from megazero.config.schema import Config, ModelConfig
from megazero.memory.tracker import MemoryTracker
from megazero.model.context import Context, DeviceBatch, MicroBatchInfo, ResidualStream, kept_bytes
from megazero.model.documents import Documents
from megazero.model.kernels.table import kernels_named
from megazero.model.matmul import Products
from megazero.model.stage import Stage, declare
from megazero.model.weight import GradWriter, Owner, Weight
from megazero.plan.layers import Use, stage_units
from megazero.plan.parameters import ParamSpec
from megazero.plan.rank_spec import Layer, rank_spec
from megazero.plan.topology import Layout

SMALL = 1 << 24  # elements of a tensor, or of a layer's weights: tens of milliseconds


class LayerCost(NamedTuple):
    """Costs of one layer and micro-batch on one rank.

    Traffic is along tp, in bytes that this rank sends under a ring algorithm.
    """

    forward: int
    recompute: int
    backward: int
    logits: int  # bytes held from its forward to its backward
    queued: int  # bytes that its weight gradients keep while they wait
    saved: tuple[int, ...]  # bytes of every tensor that its forward keeps for its backward, its input left out
    saved_input: int  # bytes of its input, if that is kept too
    tables: int  # bytes of tables, which all layers of a rank share, in a run's buffers from its start on


def trace_layers(config: Config, layout: Layout, pp: int, device_type: str = "cpu") -> dict[str, LayerCost]:
    """Trace every layer of pipeline rank `pp`, each kind once; `config` is resolved."""
    layers = declare(config.model, layout.tp)
    spec = rank_spec(config, layout, pp, declare)
    specs = stage_units(layers, layout, pp, config.training.freeze_parameters)
    return {name: _trace(Kind.of(config, layout, layer, specs, device_type)) for name, layer in spec.layers.items()}


def trace_block(config: Config, layout: Layout, device_type: str) -> LayerCost:
    """Trace a block whose weights all train."""
    name = declare(config.model, layout.tp).first_block.name
    layer = Layer(name, (), Use.LAYER, trains=True, passes_gradient=True, kind=name)
    return _trace(Kind.of(config, layout, layer, {}, device_type))


class Kind(NamedTuple):
    """All that a layer's costs depend on. Layers of one kind differ in their number alone."""

    model: ModelConfig  # one block deep
    precision: str
    micro_batch_size: int
    recompute: str
    sequence_parallel: bool
    tp: int
    device_type: str
    layer: str  # the name of the first layer of this kind
    use: Use
    passes_gradient: bool
    frozen: tuple[str, ...]  # names of parameters in it that do not train
    reset_attention_mask: bool = False
    reset_position_ids: bool = False
    kernels: str = "eager"

    @property
    def small(self) -> bool:
        """True if activations and weights are few: for a CPU, the layer then runs on real tensors."""
        model, tokens = self.model, self.micro_batch_size * self.model.seq_length
        scores = tokens * model.seq_length * model.num_attention_heads
        activations = tokens * (model.vocab_size + 4 * model.hidden_size + model.ffn_size)
        weights = model.hidden_size * (model.vocab_size + 4 * model.hidden_size + 3 * model.ffn_size)
        return max(scores, activations, weights) // self.tp <= SMALL

    @contextlib.contextmanager
    def stand_in(self) -> Iterator[torch.device]:
        """Yield the device whose new tensors stand for those of this kind's device."""
        if self.device_type != "cpu":
            yield torch.device("meta")
        elif self.small:
            yield torch.device("cpu")
        else:
            from torch._subclasses.fake_tensor import FakeTensorMode

            with FakeTensorMode(allow_non_fake_inputs=True):
                yield torch.device("cpu")

    @classmethod
    def of(
        cls, config: Config, layout: Layout, layer: Layer, specs: dict[str, list[ParamSpec]], device_type: str
    ) -> Kind:
        frozen = (
            s.name.replace(layer.name, layer.kind, 1) for unit in layer.units for s in specs[unit] if not s.trains
        )
        return cls(
            dataclasses.replace(config.model, num_layers=1),
            config.training.precision,
            config.training.micro_batch_size,
            config.activations.recompute,
            config.parallel.sequence_parallel,
            layout.tp,
            device_type,
            layer.kind,
            layer.use,
            layer.passes_gradient,
            tuple(frozen),
            config.data.reset_attention_mask,
            config.data.reset_position_ids,
            config.training.kernels_on(device_type),
        )


class _Queue(list[GradWriter]):
    """Contributions to gradients, none of which is made."""

    def accumulate_grad(self, weight: Weight, write: GradWriter) -> None:
        self.append(write)


class Traced:
    """A model of one layer of a kind, on stand-ins, and a micro-batch for it."""

    def __init__(
        self,
        kind: Kind,
        device: torch.device,
        padded: bool = True,
        tp: Axis | None = None,
        owner: Owner | None = None,
    ) -> None:
        """Build the layer.

        Args:
            padded: with the rows of the vocabulary that only pad a rank's shard.
            tp: the axis of its collectives; None: one that is pretended.
            owner: takes its gradients; None: `queue`.
        """
        self.kind, model = kind, kind.model
        self.mesh = pretend_mesh(Layout(tp=kind.tp), 0, device, needs_staging_buffer=False)
        self.tracker, self.queue = MemoryTracker(), _Queue()
        self.context = Context(
            ResidualStream(tp or self.mesh.tp, sharded=kind.sequence_parallel),
            self.tracker,
            kind.precision,
            device,
            selective=kind.recompute == "selective",
            kernels=kernels_named(kind.kernels),
            products=Products(in_place=kind.device_type == "cuda"),
        )
        self.stage = Stage(model, [kind.layer], self.context, kind.frozen)
        for weight in [weight for unit in self.stage.units.values() for weight in unit]:
            shape = weight.block.stored if padded else weight.block.shape
            # not one NaN expanded, which CPU products are slow on
            weight.data = torch.zeros(shape, dtype=self.context.dtype, device=device)
            weight.owner = owner or self.queue
        self.compute = self.stage.layer(kind.layer).compute
        ids = torch.zeros(kind.micro_batch_size, model.seq_length, dtype=torch.int64, device=device)
        self.documents = Documents.whole(
            kind.micro_batch_size, model.seq_length, device
        )  # where they begin changes no bytes
        tokens = MicroBatchInfo.of(
            ids,
            tuple(range(len(ids))),
            self.context.stream,
            training=True,
            attention_documents=self.documents if kind.reset_attention_mask else None,
            position_documents=self.documents if kind.reset_position_ids else None,
        )
        self.batch = DeviceBatch(ids, ids, ids.float(), tokens)

    @property
    def sent(self) -> int:
        return self.mesh.tp.sent["tp"]

    def input(self) -> torch.Tensor:
        rows = len(self.context.stream.tokens(self.batch.ids.numel()))
        x = torch.zeros(rows, self.kind.model.hidden_size, dtype=self.context.dtype, device=self.mesh.device)
        return x.requires_grad_(self.kind.passes_gradient)

    def constants(self) -> set[int]:
        """The storages that are there whether or not the layer runs."""
        found = [weight.data for unit in self.stage.units.values() for weight in unit]
        found += [t for t in self.batch if isinstance(t, torch.Tensor)]
        found += [self.documents.starts, self.documents.positions, self.documents.bounds]
        return {_storage(t) for t in found}


def _storage(tensor: torch.Tensor) -> int:
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=256)
def _trace(kind: Kind) -> LayerCost:
    """Run a layer of this kind forward, backward and, if asked for, forward again."""
    with kind.stand_in() as device, torch.enable_grad():
        traced = Traced(kind, device)
        tables = traced.tracker.now["buffers"]
        saved: dict[int, torch.Tensor] = {}  # a tensor each, so that no storage is freed and its number used again

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved.setdefault(_storage(tensor), tensor.detach())
            return tensor

        x = traced.input()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = traced.compute(x, traced.batch, True)
        forward, logits = traced.sent, traced.tracker.now["logits"]
        saved_input = saved.pop(_storage(x), None)
        constants = traced.constants()
        kept = [t.untyped_storage().nbytes() for number, t in saved.items() if number not in constants]
        if y.requires_grad and kind.passes_gradient:
            torch.autograd.grad(y, x, torch.empty_like(y))
        elif y.requires_grad:
            torch.autograd.backward(y, torch.empty_like(y))
        backward, queued = traced.sent - forward, kept_bytes(traced.queue)
        recompute = 0
        if kind.recompute == "full" and kind.use is Use.LAYER:
            traced.compute(traced.input(), traced.batch, False)
            recompute = traced.sent - forward - backward
        input_bytes = 0 if saved_input is None else saved_input.untyped_storage().nbytes()
    return LayerCost(forward, recompute, backward, logits, queued, tuple(sorted(kept)), input_bytes, tables)


def model_flops(model: ModelConfig, samples: int) -> int:
    """FLOPs of an iteration over `samples`: the products of a forward, times 3 for the backward; recompute not counted.

    Attention counts as if it were not causal, and the lookup of tokens not at all (Narayanan 2021).
    """
    counts = Counter((kind.name, kind.use) for kind in declare(model).kinds.values())
    one = dataclasses.replace(model, num_layers=1)
    return 3 * samples * sum(count * _flops(one, *kind) for kind, count in counts.items())


@functools.lru_cache(maxsize=64)
def _flops(model: ModelConfig, layer: str, use: Use) -> int:
    """FLOPs of a layer's forward of one sample, on one rank, without padding."""
    from torch.utils.flop_counter import FlopCounterMode

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def of_attention(q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
        return 4 * q.numel() * k[2]

    kind = Kind(model, "fp32", 1, "none", False, 1, "cpu", layer, use, False, ())
    with kind.stand_in() as device, torch.no_grad():
        traced = Traced(kind, device, padded=False)
        with FlopCounterMode(display=False, custom_mapping={attention: of_attention}) as counter:
            traced.compute(traced.input(), traced.batch, True)
    return int(counter.get_total_flops())
