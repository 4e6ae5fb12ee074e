"""Sizes and operators of a layer, measured by running it once on stand-in tensors along pretended axes.

So a layer's bytes, collectives and products are not written down a second time. Stand-ins have a shape and a dtype but
no data: meta tensors for a GPU, because their operators have its kernels' shapes and types, and fake tensors for a CPU.
A small layer of a CPU runs on real tensors instead, because torch's fake tensors take longer to import.

A trace does not show scratch memory inside a kernel, nor anything that depends on values.
"""

import contextlib
import dataclasses
import functools
import math
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import NamedTuple, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megazero.engine.kernels.gradient import gradient
from megazero.engine.kernels.kernel_table import KERNELS
from megazero.engine.kernels.matmul import Products, writes_wide
from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.model.context_parallel.dealt import DealtTokens
from megazero.engine.model.documents import Documents, DocumentSpan
from megazero.engine.model.layers.context import (
    DTYPES,
    Ahead,
    Context,
    DeviceBatch,
    MicroBatchInfo,
    ResidualStream,
    kept_bytes,
)
from megazero.engine.model.layers.weight import GradWriter, Owner, Weight
from megazero.engine.model.stage import Stage, block_numbers, declare
from megazero.engine.plan.layout.dealing import deal, dealt_multiple, dealt_tokens, share
from megazero.engine.plan.layout.layers import Use, stage_units
from megazero.engine.plan.layout.parameters import ParamSpec
from megazero.engine.plan.layout.topology import Coord, Layout
from megazero.engine.plan.program.rank_spec import PlannedLayer, RankSpec
from megazero.flags.config import Config, ModelConfig
from megazero.planner.layouts import least_layout
from megazero.planner.sizes import LayerSizes
from megazero.planner.trace.differences import Differences
from megazero.planner.trace.kernel_records import Events, LayerEvents, Operator, Recorder
from megazero.planner.trace.pretend import pretend_mesh
from megazero.torch_private import fake_tensors

SMALL, SMALL_FLOPS = 1 << 24, 1 << 32  # elements of a layer's weights, FLOPs of its forward: tenths of a second


def whole_samples(batch: int, length: int, device: torch.device) -> Documents:
    """Return samples of one document each."""
    starts = torch.zeros(batch, length, dtype=torch.int64, device=device)
    bounds = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
    return Documents(starts, bounds, tuple(DocumentSpan(sample, 0, length) for sample in range(batch)))


class LayerTrace(NamedTuple):
    """A layer's passes for one micro-batch on one rank."""

    sizes: LayerSizes
    events: LayerEvents


def layer_sizes(
    config: Config, layout: Layout, spec: RankSpec, device_type: str, cp_rank: int = 0
) -> dict[str, LayerSizes]:
    """Trace every layer of a rank, each kind once. spec: of its pipeline rank; cp_rank: 0 has the most tokens."""
    specs = stage_units(declare(config.model, layout.tp), layout, spec.pipeline.rank, config.training.freeze_parameters)
    traces = {
        name: trace(config, layout, layer, specs=specs, device_type=device_type, cp_rank=cp_rank)
        for name, layer in spec.layers.items()
    }
    return {name: traced.sizes for name, traced in traces.items()}


def trace_block(config: Config, layout: Layout, device_type: str, name: str = "") -> LayerSizes:
    """Trace a block whose weights all train. name: of the first block of its kind; empty: the model's first block."""
    name = name or declare(config.model, layout.tp).blocks[0]
    layer = PlannedLayer(name, (), Use.LAYER, trains=True, passes_gradient=True, kind=name)
    return trace(config, layout, layer, specs={}, device_type=device_type).sizes


def trace(
    config: Config,
    layout: Layout,
    layer: PlannedLayer,
    specs: dict[str, list[ParamSpec]],
    device_type: str,
    cp_rank: int = 0,
    at_once: bool = True,
) -> LayerTrace:
    """Trace a layer of `engine.plan.program.rank_spec`.

    Args:
        config: resolved.
        specs: of its pipeline rank.
        cp_rank: of the rank; 0 has the most tokens.
        at_once: whether the backward computes the weight gradients, instead of queueing them.
    """
    training = config.training
    kind = Kind.of(config, layout, layer, specs=specs, device_type=device_type, cp_rank=cp_rank)
    return _trace(kind, training.grad_dtype, config.micro_batches(layout.dp) > 1, at_once)


class Kind(NamedTuple):
    """Everything that a layer's costs depend on. Layers of one kind differ only in their number."""

    model: ModelConfig  # see `shallow`
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
    cp: int = 1
    tokens: int = 0  # of a sample on this rank; 0: all
    multiple: int = 1  # see `engine.plan.layout.dealing.dealt_multiple`
    ring: bool = False
    ep: int = 1
    expert_tp: int = 0
    imbalance: float = 1.0  # of the ranks of ep, see `Axis`
    loss_chunk: int = 0  # of the head, see `Context`
    trains: bool = True  # False: an evaluation, in which the head computes no gradients

    @property
    def small(self) -> bool:
        """True if all layers have few weights and products; on a CPU, they then run on real tensors."""
        kinds, tokens = declare(self.model, self.tp).kinds.values(), self.micro_batch_size * self.model.seq_length
        flops = [kind.matrix_flops + kind.score_flops for kind in kinds]
        weights = [math.prod(spec.shape) for kind in kinds for spec in kind.params]
        return max(weights) <= SMALL * self.tp and tokens * max(flops) <= SMALL_FLOPS * self.tp

    @contextlib.contextmanager
    def stand_in(self) -> Iterator[torch.device]:
        """Yield the device of the stand-in tensors."""
        if self.device_type != "cpu":
            yield torch.device("meta")
        elif self.small:
            yield torch.device("cpu")
        else:
            with fake_tensors():
                yield torch.device("cpu")

    @classmethod
    def of(
        cls,
        config: Config,
        layout: Layout,
        layer: PlannedLayer,
        specs: dict[str, list[ParamSpec]],
        device_type: str,
        cp_rank: int = 0,
    ) -> Self:
        frozen = (
            s.name.replace(layer.name, layer.kind, 1) for unit in layer.units for s in specs[unit] if not s.trains
        )
        return cls(
            model=shallow(config.model),
            precision=config.training.precision,
            micro_batch_size=config.training.micro_batch_size,
            recompute=config.activations.recompute,
            sequence_parallel=config.parallel.sequence_parallel,
            tp=layout.tp,
            device_type=device_type,
            layer=layer.kind,
            use=layer.use,
            passes_gradient=layer.passes_gradient,
            frozen=tuple(frozen),
            reset_attention_mask=config.data.reset_attention_mask,
            reset_position_ids=config.data.reset_position_ids,
            kernels=config.training.kernels_on(device_type),
            cp=layout.cp,
            tokens=dealt_tokens(config, layout, cp_rank),
            multiple=dealt_multiple(config),
            ring=config.parallel.cp_exchange == "ring",
            ep=layout.ep,
            expert_tp=layout.expert_tp,
            loss_chunk=config.loss_chunk(device_type, layout.tp) if layer.use is Use.HEAD else 0,
            trains=config.trains,
            imbalance=min(config.plan.moe_plan_imbalance, layout.ep),  # at most all rows arrive at one rank
        )


class _Gradients:
    """Owner of the traced weights: computes their gradients at once, or queues them.

    Attributes:
        taken: all contributions to gradients.
    """

    def __init__(self, grad_dtype: str, add: bool, at_once: bool, differences: Differences) -> None:
        self.dtype, self.add, self.at_once, self.differences = DTYPES[grad_dtype], add, at_once, differences
        self.taken: list[tuple[Weight, GradWriter]] = []

    def accumulate_grad(self, weight: Weight, write: GradWriter) -> None:
        self.differences.check(weight, write)
        self.taken.append((weight, write))
        if self.at_once:
            self._compute(weight, write)

    def compute_queued(self) -> None:
        if not self.at_once:
            for weight, write in self.taken:
                self._compute(weight, write)

    def _compute(self, weight: Weight, write: GradWriter) -> None:
        write(torch.empty(weight.block.stored, dtype=self.dtype, device=weight.data.device), self.add)


class Traced:
    """A model of one layer of a kind, on stand-ins, and a micro-batch for it."""

    def __init__(
        self, kind: Kind, device: torch.device, recorder: Recorder, owner: Owner | None = None, padded: bool = True
    ) -> None:
        """Build the layer.

        Args:
            recorder: records its collectives.
            owner: of its gradients.
            padded: include the rows that pad a rank's shard of the vocabulary.
        """
        self.kind, model = kind, kind.model
        staging, recomputed = kind.device_type == "cpu", frozenset[int]()
        if kind.recompute == "full" and kind.use is Use.LAYER:
            recomputed = block_numbers([kind.layer])
        length, layout = model.seq_length, least_layout(kind.tp, kind.cp, kind.ep, kind.expert_tp)
        recorder.differences.sums_replicated = kind.sequence_parallel and layout.etp < layout.tp
        most = kind.tokens in (0, share(length, kind.cp, 0, kind.multiple))
        rank = layout.rank(Coord(0, 0, 0 if most else kind.cp - 1, 0))  # ranks with as many tokens cost the same
        self.mesh = pretend_mesh(layout, rank, device, needs_staging_buffer=staging, make=recorder.axis)
        self.mesh.ep.imbalance = kind.imbalance
        self.tracker = MemoryTracker()
        self.context = Context(
            ResidualStream(self.mesh.tp, sharded=kind.sequence_parallel),
            self.tracker,
            kind.precision,
            device,
            selective=kind.recompute == "selective",
            kernels=KERNELS[kind.kernels],
            products=Products(in_place=writes_wide(device, DTYPES[kind.precision])),
            cp=self.mesh.cp,
            ring=kind.ring,
            loss_chunk=kind.loss_chunk,
            recomputed=recomputed,
            ep=self.mesh.ep,
            expert_tp=self.mesh.etp,
        )
        self.stage = Stage(model, [kind.layer], self.context, kind.frozen)
        for weight in [weight for unit in self.stage.units.values() for weight in unit]:
            shape = weight.block.stored if padded else weight.block.shape
            # zeros instead of the default, an expanded NaN, because CPU products of NaN are slow
            weight.data = torch.zeros(shape, dtype=self.context.dtype, device=device)
            weight.owner = owner
            recorder.differences.start_from([weight])
        self.compute = self.stage.layer(kind.layer).compute
        ids = torch.zeros(kind.micro_batch_size, length, dtype=torch.int64, device=device)
        # the bytes do not depend on where documents begin
        self.documents, self.dealt = whole_samples(kind.micro_batch_size, length, device), None
        if kind.cp > 1:
            ranges = deal(length, kind.cp, multiple=kind.multiple).ranges
            dealt = DealtTokens.of((ranges,) * kind.micro_batch_size, self.mesh.cp.rank, length)
            self.dealt = dealt._replace(indices=dealt.indices.to(device), rows=dealt.rows.to(device))
        tokens = MicroBatchInfo.of(
            ids,
            tuple(range(len(ids))),
            self.context.stream,
            training=True,
            attention_documents=self.documents if kind.reset_attention_mask else None,
            position_documents=self.documents if kind.reset_position_ids else None,
            dealt=self.dealt,
        )
        if self.dealt is not None:
            ids = torch.zeros_like(self.dealt.indices)
        depths = model.mtp_num_layers if kind.trains else 0
        ahead = (Ahead(ids, ids, ids.float()),) * depths
        self.batch = DeviceBatch(ids, ids, ids.float(), tokens, ahead=ahead)
        numbers = torch.zeros(kind.micro_batch_size + 1 + depths, dtype=torch.float64, device=device)
        if model.num_experts:
            self.batch = self.batch._replace(targets=numbers[1 + depths :])
        if kind.trains:
            self.batch = self.batch.seeded(numbers[: 1 + depths])

    def take_sent(self) -> Counter[str]:
        """Return axis -> bytes sent since the last call."""
        found: Counter[str] = Counter()
        for axis in self.mesh.axes:
            found.update(axis.sent)
            axis.sent.clear()
        return found

    def input(self) -> torch.Tensor:
        rows = len(self.context.stream.tokens(self.batch.ids.numel()))
        x = torch.zeros(rows, self.kind.model.hidden_size, dtype=self.context.dtype, device=self.mesh.device)
        return x.requires_grad_(self.kind.passes_gradient)

    def constants(self) -> set[int]:
        """Return the storages that exist before the layer runs."""
        found = [weight.data for unit in self.stage.units.values() for weight in unit]
        found += [t for part in (self.batch, *self.batch.ahead) for t in part if isinstance(t, torch.Tensor)]
        found += [self.documents.starts, self.documents.positions, self.documents.bounds]
        if self.dealt is not None:
            found += [self.dealt.indices, self.dealt.rows]
            found += [t for t in self.batch.tokens if isinstance(t, torch.Tensor)]
        return {_storage(t) for t in found}


def _storage(tensor: torch.Tensor) -> int:
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


class _Holder:
    """Stands for a saved tensor in a graph, until autograd frees it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _SavedStorages:
    """The storages of the tensors that autograd saves in a forward.

    Attributes:
        tensors: storage -> a tensor of it, so that its number is not reused.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self._holders: list[tuple[int, weakref.ref[_Holder]]] = []

    def keep(self, tensor: torch.Tensor) -> _Holder:
        number, holder = _storage(tensor), _Holder(tensor)
        self.tensors.setdefault(number, tensor.detach())
        self._holders.append((number, weakref.ref(holder)))
        return holder

    def alive(self) -> set[int]:
        """Return the storages that a graph still holds."""
        return {number for number, holder in self._holders if holder() is not None}


@functools.lru_cache(maxsize=1024)
def _trace(kind: Kind, grad_dtype: str, add: bool, at_once: bool) -> LayerTrace:
    """Run a layer of this kind forward, backward and, with full recompute, forward again."""
    with kind.stand_in() as device, torch.enable_grad():
        recorder = Recorder()
        gradients = _Gradients(grad_dtype, add, at_once, recorder.differences)
        traced = Traced(kind, device, recorder, gradients)
        made = traced.context.tables.items()
        tables: dict[Hashable, int] = {key: allocation.num_bytes for key, (_, allocation) in made}
        saved, x = _SavedStorages(), traced.input()
        with recorder:
            with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda holder: holder.tensor):
                y = traced.compute(x, traced.batch, True)
            alive = saved.alive()
            forward, sent_forward = recorder.take(), traced.take_sent()
            logits = traced.tracker.peak["logits"]
            dy = torch.empty_like(y)
            if y.requires_grad and kind.trains:
                gradient(y, x if kind.passes_gradient else None, dy)
            backward, sent_backward = recorder.take(), traced.take_sent()
            with torch.no_grad():
                gradients.compute_queued()
            queued = recorder.take()
            recompute, routes = Events(), 0
            if traced.context.recomputed:
                again = traced.input()
                if kind.model.num_experts:
                    with torch.no_grad():
                        traced.compute(again, traced.batch, True)
                    routes = traced.tracker.now["activation_checkpoints"]
                recorder.take(), traced.take_sent()
                traced.compute(again, traced.batch, False)
                recompute = recorder.take()
        saved_input = x.untyped_storage().nbytes() if _storage(x) in alive else 0
        others = saved.tensors.keys() - traced.constants() - {_storage(x)}
        num_bytes = {number: saved.tensors[number].untyped_storage().nbytes() for number in others}
        sizes = LayerSizes(
            forward=sent_forward,
            recompute=traced.take_sent(),
            backward=sent_backward,
            logits=logits,
            queued=kept_bytes(write for _, write in gradients.taken),
            saved=tuple(sorted(num_bytes[number] for number in others & alive)),
            saved_input=saved_input,
            freed=sum(num_bytes[number] for number in others - alive),
            tables=tables,
            routes=routes,
        )
    return LayerTrace(sizes, LayerEvents(forward, recompute, backward, queued))


def model_flops(model: ModelConfig, samples: int) -> int:
    """Return the FLOPs of an iteration over `samples`, as Narayanan 2021: three times the products of a forward.

    Attention counts as if it were not causal: all keys of a sample, or of a window. Recompute and the lookup of tokens
    do not count.
    """
    kinds = list(declare(model).kinds.values())
    counts = Counter((kind.name, kind.use) for kind in kinds)
    fused = dataclasses.replace(shallow(model), attention_dropout=0.0, attention_softcap=0.0)
    matrices = sum(count * _matrix_flops(fused, *kind) for kind, count in counts.items())
    return 3 * samples * (matrices + model.seq_length * sum(kind.score_flops for kind in kinds))


@functools.lru_cache(maxsize=64)
def shallow(model: ModelConfig) -> ModelConfig:
    """Return the model with one block, so that all depths share a trace; unchanged if its blocks differ."""
    kinds = {kind.name for kind in declare(model).kinds.values() if kind.end is None}
    return dataclasses.replace(model, num_layers=1) if len(kinds) == 1 else model


@functools.lru_cache(maxsize=64)
def _matrix_flops(model: ModelConfig, layer: str, use: Use) -> int:
    """Return the FLOPs of a forward of one sample without those of fused attention, on one rank, without padding."""
    kind = Kind(
        model=model,
        precision="fp32",
        micro_batch_size=1,
        recompute="none",
        sequence_parallel=False,
        tp=1,
        device_type="cpu",
        layer=layer,
        use=use,
        passes_gradient=False,
        frozen=(),
    )
    if not kind.small:  # on a GPU in bf16, the products of all experts are one operator
        kind = kind._replace(precision="bf16", device_type="cuda")
    with kind.stand_in() as device, torch.no_grad():
        recorder = Recorder()
        traced = Traced(kind, device, recorder, padded=False)
        batch = traced.batch._replace(tokens=traced.batch.tokens._replace(balance=None))  # no statistics of routers
        with recorder:
            traced.compute(traced.input(), batch, True)
    operators = (event for event in recorder.take() if isinstance(event, Operator))
    return sum(op.product.flops for op in operators if op.product is not None)
