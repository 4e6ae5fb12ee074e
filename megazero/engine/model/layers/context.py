"""Values that layers share: declaration of weights, layout of the residual stream, tokens of a micro-batch.

Shapes: b micro-batch, s sequence, t tokens of a sample on this context-parallel rank, T = b t tokens, T' those of the
residual stream on this rank, c any width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megazero.engine.kernels.compiled import compiled
from megazero.engine.kernels.dropout import Dropout, Rows
from megazero.engine.kernels.kernel_table import EAGER, KERNELS, Kernels
from megazero.engine.kernels.matmul import TORCH, Products, writes_wide
from megazero.engine.kernels.rotary import Rotary, RotaryTables
from megazero.engine.memory.tracker import Allocation, MemoryTracker
from megazero.engine.mesh.collectives import AsyncTensor, Axis, Pending
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.context_parallel.dealt import DealtTokens
from megazero.engine.model.dispatch import Balance
from megazero.engine.model.documents import Documents
from megazero.engine.model.layers.weight import GradWriter, Weight
from megazero.engine.options.schema import StepConfig
from megazero.engine.plan.layout.parameters import ParamSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class ResidualStream:
    """Layout of the residual stream on the tensor-parallel ranks, and so the collectives of a sharded layer.

    Whole: every rank has all T tokens. Nothing is gathered, and sums are all-reduces. Sharded (sequence parallelism):
    rank r has the r-th T/tp of the tokens. They are gathered where a layer needs all of them, and sums are
    reduce-scatters. The gradient of a gather is a sum, and that of a sum a gather.

    The ranks share the T tokens of all samples, not the s tokens of each sample. So gathered tokens are in order
    without a copy, and tp must divide T only. Norms, dropout and residual sums work on single tokens; `tokens` has the
    numbers of this rank's.
    """

    tp: Axis
    sharded: bool

    def start_unshard(self, x: torch.Tensor) -> AsyncTensor:
        """x [T', c] -> [T, c]"""
        if not self.sharded:
            return AsyncTensor(x, Pending())
        whole = x.new_empty(x.shape[0] * self.tp.size, *x.shape[1:])
        return AsyncTensor(whole, self.tp.start_all_gather(x.contiguous(), whole))

    def start_reduce(self, part: torch.Tensor) -> AsyncTensor:
        """part [T, c], each rank's summand -> [T', c]. In place if the stream is whole."""
        if not self.sharded:
            return AsyncTensor(part, self.tp.start_all_reduce(part))
        out = part.new_empty(part.shape[0] // self.tp.size, *part.shape[1:])
        scratch = part.new_empty(self.tp.scratch_numel(out.numel()) if self.tp.needs_staging_buffer else 0)
        return AsyncTensor(out, self.tp.start_reduce_scatter(part.view(-1), out.view(-1), False, scratch))

    def tokens(self, total: int) -> range:
        """Return which of T = `total` tokens this rank has: T' of them."""
        if not self.sharded:
            return range(total)
        assert total % self.tp.size == 0, (total, self.tp.size)
        each = total // self.tp.size
        return range(self.tp.rank * each, (self.tp.rank + 1) * each)


@dataclass(frozen=True)
class Context:
    """Dependencies that every layer is built with."""

    stream: ResidualStream
    tracker: MemoryTracker
    precision: str
    device: torch.device
    seed: int = 0  # seed for initial weights and dropout masks
    selective: bool = False  # recompute large and cheap tensors in backward
    products: Products = TORCH
    kernels: Kernels = EAGER
    cp: Axis = field(default_factory=lambda: Axis("cp", [0], 0))  # the ranks that share the tokens of a sample
    ring: bool = False  # exchange keys and values in a ring, not all at once
    loss_chunk: int = 0  # tokens whose logits are in memory together; 0: all of a micro-batch
    recomputed: frozenset[int] = frozenset()  # numbers of the blocks that backward computes again
    ep: Axis = field(default_factory=lambda: Axis("ep", [0], 0))  # the ranks that share a layer's experts
    expert_tp: Axis | None = None  # the ranks that share the inner width of an expert; None: tp

    @classmethod
    def of(cls, config: StepConfig, mesh: Mesh, tracker: MemoryTracker, recomputed: frozenset[int]) -> Context:
        """Return the context of a training engine; `config` is resolved."""
        training = config.training
        kernels = KERNELS[training.kernels_on(mesh.device.type)]
        return cls(
            stream=ResidualStream(mesh.tp, sharded=config.parallel.sequence_parallel),
            tracker=tracker,
            precision=training.precision,
            device=mesh.device,
            seed=training.seed,
            selective=config.activations.recompute == "selective",
            products=Products(
                onednn=training.matmul_backend == "onednn",
                in_place=writes_wide(mesh.device, DTYPES[training.precision]),
            ),
            kernels=compiled(kernels, mesh.device) if training.compile else kernels,
            cp=mesh.cp,
            ring=config.parallel.cp_exchange == "ring",
            loss_chunk=config.loss_chunk(mesh.device.type, mesh.tp.size),
            recomputed=recomputed,
            ep=mesh.ep,
            expert_tp=mesh.etp,
        )

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def tp(self) -> Axis:
        return self.stream.tp

    @functools.cached_property
    def of_one_rank(self) -> Context:
        """The context of layers that every tensor-parallel rank computes for its own tokens of the residual stream."""
        return replace(self, stream=ResidualStream(Axis("tp", [0], 0), sharded=False))

    @property
    def etp(self) -> Axis:
        return self.expert_tp or self.tp

    @property
    def shares_tokens(self) -> bool:
        """True if tensor-parallel ranks route different tokens to experts."""
        return self.stream.sharded and self.etp.size < self.tp.size

    @property
    def expert_stream(self) -> ResidualStream:
        """The residual stream as experts read it: gathered over the ranks that share each expert alone."""
        return ResidualStream(self.etp, self.stream.sharded and bool(self.etp.peers))

    def dropout(self, probability: float, layer: int, site: str) -> Dropout:
        return Dropout(probability=probability, seed=self.seed, layer=layer, site=site, kernel=self.kernels.dropout)

    @functools.cached_property
    def released(self) -> torch.Tensor:
        """One NaN. Every weight without memory is this, expanded."""
        return torch.full((), torch.nan, dtype=self.dtype, device=self.device)

    @functools.cached_property
    def tables(self) -> dict[tuple[Rotary, int], tuple[RotaryTables, Allocation]]:
        """The tables that layers have asked for: see `rotary_tables`."""
        return {}

    def rotary_tables(self, rotary: Rotary, length: int) -> RotaryTables:
        """Return the tables of positions 0 to length - 1, which all layers share."""
        key = rotary, length
        if key not in self.tables:
            made = rotary.tables(length, self.dtype, self.device)
            self.tables[key] = made, self.tracker.allocate("buffers", made.cos.nbytes + made.sin.nbytes)
        return self.tables[key][0]

    def weight(
        self,
        *shape: int,
        sharded: Mapping[int, str] | None = None,
        std: float = 0.0,
        mean: float = 0.0,
        decays: bool = False,
        pads: bool = False,
        summed: Iterable[str] = (),
        per_token: tuple[int, int] = (1, 1),
        matrices: tuple[int, ...] | None = None,
    ) -> Weight:
        """Declare a weight of the global `shape`, without memory. Its name will be its path in the model.

        Args:
            sharded: dim -> the axis that shards it.
            std, mean: of the initial normal distribution.
            decays: weight decay applies.
            pads: rows of the shard may be padding, as of the vocabulary.
            summed: axes over which its gradient is a sum, besides the data-parallel ones.
            per_token: the share of it that a token is multiplied with: (experts of a token, all experts).
            matrices: dims that number matrices of their own, such as those of q, k and v; None: it is a vector, or a
                matrix that an optimizer of matrices leaves to AdamW: a table, a head, a router.
        """
        axes = tuple((sharded or {}).items())
        spec = ParamSpec(
            name="",
            shape=shape,
            sharded=axes,
            decays=decays,
            std=std,
            mean=mean,
            pads=pads,
            summed=frozenset(summed),
            trains=True,
            per_token=per_token,
            matrices=matrices,
        )
        held = {"tp": self.tp, "ep": self.ep, "etp": self.etp}
        block = spec.local(
            {name: axis.rank for name, axis in held.items()}, {name: axis.size for name, axis in held.items()}
        )
        return Weight(spec, block, self.seed, self.released)


def kept_bytes(writes: Iterable[GradWriter]) -> int:
    """Return the bytes that contributions hold until they are computed; a storage counts once."""
    storages = [t.untyped_storage() for write in writes for t in write.tensors]
    return sum({StorageWeakRef(storage).cdata: storage.nbytes() for storage in storages}.values())


class AttentionCache(Protocol):
    """Keys and values of earlier tokens, in generation: `generation.kv_cache`. Attention to them has no gradient."""

    def attend_heads(self, attention: Any, heads: Sequence[torch.Tensor], tokens: MicroBatchInfo) -> torch.Tensor: ...

    def attend_to_latents(
        self, attention: Any, q: torch.Tensor, latents: torch.Tensor, tokens: MicroBatchInfo
    ) -> torch.Tensor: ...


class MicroBatchInfo(NamedTuple):
    """A micro-batch as its layers see it: b samples of s tokens; in generation, all new tokens as one sample."""

    length: int  # s
    samples: tuple[int, ...]  # their global numbers, for dropout
    training: bool  # False: an evaluation, without dropout
    rows: tuple[Rows, ...]  # the T' tokens, by sample; a row is a token's index in its sample
    runs: tuple[range, ...]  # the positions of the T' tokens, as ranges of consecutive ones
    cache: AttentionCache | None = None  # in generation
    attention_documents: Documents | None = None  # attention is restricted to them; None: whole samples
    position_documents: Documents | None = None  # positions restart with them; None: with every sample
    dealt: DealtTokens | None = None  # this rank's part of each sample; None: all of it
    balance: Balance | None = None  # set in training steps of models with experts
    head_positions: torch.Tensor | None = None  # positions of the T tokens, [b, t]; None: 0 to s - 1 in every sample

    @classmethod
    def of(
        cls,
        ids: torch.Tensor,
        samples: tuple[int, ...],
        stream: ResidualStream,
        *,
        training: bool,
        attention_documents: Documents | None = None,
        position_documents: Documents | None = None,
        dealt: DealtTokens | None = None,
    ) -> MicroBatchInfo:
        """ids [b, s]: of whole samples"""
        assert len(samples) == len(ids), (samples, ids.shape)
        length, positions = ids.shape[1], None if position_documents is None else position_documents.positions
        parts = [(sample, range(length)) for sample in range(len(samples))]
        if dealt is not None:
            parts = [(sample, part) for sample in range(len(samples)) for part in dealt.ranges[sample][dealt.rank]]
            positions = dealt.indices if positions is None else positions.gather(1, dealt.indices)
        held = stream.tokens(sum(len(part) for _, part in parts))
        rows, runs, begin = [], [], 0
        for sample, whole in parts:
            part = whole[max(0, held.start - begin) : max(0, held.stop - begin)]
            begin += len(whole)
            if part:
                rows.append(Rows(samples[sample], part.start, len(part)))
                at = range(sample * length + part.start, sample * length + part.stop)
                runs += [part] if position_documents is None else position_documents.runs(at)
        documents = attention_documents, position_documents
        return cls(
            length, samples, training, tuple(rows), tuple(runs), None, *documents, dealt, head_positions=positions
        )

    @property
    def dropout_rows(self) -> tuple[Rows, ...] | None:
        """Return the rows of the residual stream's dropout masks; None: no dropout."""
        return self.rows if self.training else None


class Ahead(NamedTuple):
    """Inputs and targets of module k of multi-token prediction, for a micro-batch's tokens."""

    ids: torch.Tensor  # [b, t] int64: the k-th token after each
    labels: torch.Tensor  # [b, t] int64: the token after that one
    loss_mask: torch.Tensor  # [b, t] fp32, 1 where the target counts
    seed: torch.Tensor | None = None  # as `DeviceBatch.seed`

    def gather(self, indices: torch.Tensor) -> Ahead:
        """Return the tokens of these indices in their sample, [b, t]."""
        return Ahead(*(x.gather(1, indices) for x in (self.ids, self.labels, self.loss_mask)))


class DeviceBatch(NamedTuple):
    """A micro-batch on this rank's device, as layers read it."""

    ids: torch.Tensor  # [b, t] int64
    labels: torch.Tensor  # [b, t] int64
    loss_mask: torch.Tensor  # [b, t] fp32, 1 where the target counts
    tokens: MicroBatchInfo
    targets: torch.Tensor | None = None  # number of targets of each whole sample, [b] fp64; None without experts
    seed: torch.Tensor | None = None  # d objective / d loss, a scalar in fp64; None in an evaluation
    ahead: tuple[Ahead, ...] = ()  # by depth of multi-token prediction; empty in an evaluation

    def seeded(self, seeds: torch.Tensor) -> DeviceBatch:
        """Return the micro-batch of a training step; seeds [1 + depths]: d objective / d loss of each depth."""
        seed, *others = seeds.unbind()
        balance = None if self.targets is None else Balance(self.targets, seed)
        ahead = tuple(each._replace(seed=other) for each, other in zip(self.ahead, others, strict=True))
        return self._replace(seed=seed, ahead=ahead, tokens=self.tokens._replace(balance=balance))
