"""Everything that layers share: how they declare weights, the layout of the residual stream, a batch's tokens."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megazero.comm.collectives import Axis, Pending
from megazero.memory.tracker import Allocation, MemoryTracker
from megazero.model.documents import Documents
from megazero.model.dropout import Dropout, Rows
from megazero.model.fused_ops import PLAIN, FusedOps
from megazero.model.kernels.table import EAGER, Kernels
from megazero.model.kv_cache import KVCache
from megazero.model.matmul import TORCH, Products
from megazero.model.rotary import Rotary, RotaryTables
from megazero.model.weight import GradWriter, Weight
from megazero.plan.parameters import ParamSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class AsyncTensor(NamedTuple):
    """A collective's result, which may be in flight."""

    data: torch.Tensor
    pending: Pending

    def wait(self) -> torch.Tensor:
        self.pending.wait()
        return self.data


@dataclass(frozen=True)
class ResidualStream:
    """Layout of the residual stream on the tensor-parallel ranks, and so the collectives of a sharded layer.

    Whole: all T tokens on every rank; nothing is gathered, sums are all-reduces. Sharded (sequence parallelism): rank r
    has the r-th T/tp of the tokens; they are gathered where a layer needs all of them, sums are reduce-scatters. Either
    way the gradient of a gather is a sum, and that of a sum a gather.

    The cut is through the tokens of all samples one below the other, not through every sample's sequence: so what is
    gathered lies in order, without a copy, and tp must divide b s only. Norms, dropout and residual sums work on single
    tokens; what depends on a token's place asks `tokens`.
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
        """part [T, c], each rank's summand -> [T', c]. Where the stream is whole, in place."""
        if not self.sharded:
            return AsyncTensor(part, self.tp.start_all_reduce(part))
        out = part.new_empty(part.shape[0] // self.tp.size, *part.shape[1:])
        scratch = part.new_empty(self.tp.scratch_numel(out.numel()) if self.tp.needs_staging_buffer else 0)
        return AsyncTensor(out, self.tp.start_reduce_scatter(part.view(-1), out.view(-1), False, scratch))

    def tokens(self, total: int) -> tuple[range, ...]:
        """Return the ranges of a micro-batch's T tokens that this rank holds, in the order of its rows."""
        if not self.sharded:
            return (range(total),)
        assert total % self.tp.size == 0, (total, self.tp.size)
        each = total // self.tp.size
        return (range(self.tp.rank * each, (self.tp.rank + 1) * each),)

    def num_tokens(self, total: int) -> int:
        """Return T', the number of those tokens."""
        return sum(map(len, self.tokens(total)))


@dataclass(frozen=True)
class Context:
    """Dependencies that every layer is built with.

    Attributes:
        seed: of initial weights and dropout masks.
        selective: recompute in backward what is cheap and large.
    """

    stream: ResidualStream
    tracker: MemoryTracker
    precision: str
    device: torch.device
    seed: int = 0
    selective: bool = False
    fused_ops: FusedOps = PLAIN
    products: Products = TORCH
    kernels: Kernels = EAGER

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def tp(self) -> Axis:
        return self.stream.tp

    def dropout(self, probability: float, layer: int, site: str) -> Dropout:
        return Dropout(probability, self.seed, layer, site, self.kernels.dropout)

    @functools.cached_property
    def released(self) -> torch.Tensor:
        """One NaN, to which every weight without memory is expanded."""
        return torch.full((), torch.nan, dtype=self.dtype, device=self.device)

    @functools.cached_property
    def _tables(self) -> dict[tuple[Rotary, int], tuple[RotaryTables, Allocation]]:
        return {}

    def rotary_tables(self, rotary: Rotary, length: int) -> RotaryTables:
        """Return the tables of positions 0 to length - 1, which all layers share. A buffer, at rest."""
        key = rotary, length
        if key not in self._tables:
            made = rotary.tables(length, self.dtype, self.device)
            self._tables[key] = made, self.tracker.allocate("buffers", made.cos.nbytes + made.sin.nbytes)
        return self._tables[key][0]

    @property
    def table_bytes(self) -> dict[Hashable, int]:
        """Bytes of each table that was asked for; layers that ask for the same share one."""
        return {key: allocation.num_bytes for key, (_, allocation) in self._tables.items()}

    def weight(
        self,
        *shape: int,
        sharded: Mapping[int, str] | None = None,
        std: float = 0.0,
        mean: float = 0.0,
        decays: bool = False,
        pads: bool = False,
        summed: Iterable[str] = (),
    ) -> Weight:
        """Declare a weight of the global `shape`, without memory. Its name is the path at which it is assigned.

        Args:
            sharded: dim -> the axis that shards it.
            std, mean: of the initial normal distribution.
            decays: weight decay applies.
            pads: rows of the shard may be padded: the vocabulary.
            summed: axes besides the data-parallel ones over which its gradient is a sum.
        """
        spec = ParamSpec("", shape, tuple((sharded or {}).items()), decays, std, mean, pads, frozenset(summed))
        block = spec.local({"tp": self.tp.rank}, {"tp": self.tp.size})
        return Weight(spec, block, self.seed, self.released)


def kept_bytes(writes: Iterable[GradWriter]) -> int:
    """Bytes that contributions keep until they are made; what two of them share counts once."""
    storages = [t.untyped_storage() for write in writes for t in write.tensors]
    return sum({StorageWeakRef(storage).cdata: storage.nbytes() for storage in storages}.values())


class MicroBatchInfo(NamedTuple):
    """A micro-batch as its layers see it: b samples of s tokens."""

    length: int  # s
    samples: tuple[int, ...]  # their global numbers, for dropout
    training: bool  # else an evaluation, without dropout
    rows: tuple[Rows, ...]  # the tokens of the residual stream on this rank, sample by sample; a row is a place
    runs: tuple[range, ...]  # the positions of the same tokens: consecutive ones, run by run
    cache: KVCache | None = None  # generation: attention reads earlier tokens there, and puts these there
    attention_documents: Documents | None = None  # what attention is bounded by; None: samples
    position_documents: Documents | None = None  # where positions restart; None: with every sample

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
    ) -> MicroBatchInfo:
        """ids [b, s]"""
        assert len(samples) == len(ids), (samples, ids.shape)
        ranges, length, rows = stream.tokens(ids.numel()), ids.shape[1], []
        for held in ranges:
            at = held.start
            while at < held.stop:
                sample, first = divmod(at, length)
                stop = min(held.stop, at - first + length)
                rows.append(Rows(samples[sample], first, stop - at))
                at = stop
        runs = tuple(range(row.first, row.first + row.count) for row in rows)
        if position_documents is not None:
            runs = tuple(run for held in ranges for run in position_documents.runs(held))
        return cls(length, samples, training, tuple(rows), runs, None, attention_documents, position_documents)

    def positions(self, device: torch.device) -> torch.Tensor:
        """Position of each of the residual stream's tokens, [T'] int64."""
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.runs])

    @property
    def dropout_rows(self) -> tuple[Rows, ...] | None:
        """The rows of the residual stream's dropout masks; None in evaluation."""
        return self.rows if self.training else None


class DeviceBatch(NamedTuple):
    """A micro-batch on this rank's device, as layers read it."""

    ids: torch.Tensor  # [b, s] int64
    labels: torch.Tensor  # [b, s] int64
    loss_mask: torch.Tensor  # [b, s] fp32, 1 where the target counts
    tokens: MicroBatchInfo
