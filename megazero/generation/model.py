"""A checkpoint's model on the ranks of a mesh, without gradients and without ZeRO."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megazero import checkpoint
from megazero.checkpoint import LocalShard
from megazero.comm.mesh.mesh import Mesh
from megazero.config.schema import ModelConfig
from megazero.memory.tracker import MemoryTracker
from megazero.model.kernels.dropout import Rows
from megazero.model.layers.context import DTYPES, Context, MicroBatchInfo, ResidualStream
from megazero.model.layers.kv_cache import KVCache
from megazero.model.layers.weight import Weight
from megazero.model.stage import Stage, declare


class NewTokens(NamedTuple):
    """Tokens of one sequence that are to be computed."""

    ids: list[int]
    first: int  # position of the first of them


class InferenceModel:
    """This rank's layers, in the precision of the checkpoint's master weights, and what the ranks say to each other."""

    def __init__(self, path: Path, model: ModelConfig, mesh: Mesh, precision: str = "fp32") -> None:
        """Read the weights of the checkpoint folder `path`; all ranks call this.

        Raises:
            ValueError: see `checkpoint.load`.
        """
        self.model, self.mesh, self.dtype = model, mesh, DTYPES[precision]
        self.stream = ResidualStream(mesh.tp, sharded=False)
        context = Context(self.stream, MemoryTracker(), precision, mesh.device)
        names = declare(model, mesh.layout.tp).of_rank(mesh.layout, mesh.pp.rank)
        self.stage = Stage(model, names, context)
        shards = {}
        for weights in self.stage.units.values():
            for weight in weights:
                weight.data, shards[f"model.{weight.spec.name}"] = self._memory(weight)
        checkpoint.load(path, shards, mesh.host_group, partial=True)

    def _memory(self, weight: Weight) -> tuple[torch.Tensor, LocalShard]:
        """The memory of a weight, and the shard that fills it. The vocabulary's padding stays zero."""
        spec, block = weight.spec, weight.block
        flat = torch.zeros(block.stored_numel, dtype=self.dtype, device=self.mesh.device)
        own = LocalShard(spec.shape, block.offset, block.shape, 0, block.numel, flat[: block.numel])
        return flat.view(block.stored), own

    @torch.no_grad()
    def logits(self, new: Sequence[NewTokens], cache: KVCache | None) -> torch.Tensor | None:
        """[b, v] behind the last new token of each sequence, on the ranks of the last stage; None on the others.

        Sequence i is row i of the cache. Without one, all new tokens are whole sequences.
        """
        ids = torch.tensor([token for one in new for token in one.ids], device=self.mesh.device)
        x = self._hidden(ids[None], self._tokens(new, cache or KVCache(len(new), max(len(one.ids) for one in new))))
        if not self.mesh.pp.is_last:
            return None
        assert self.stage.head is not None
        ends = torch.tensor([len(one.ids) for one in new], device=self.mesh.device).cumsum(0) - 1
        return self.stage.head.whole_logits(x[ends])

    def _tokens(self, new: Sequence[NewTokens], cache: KVCache) -> MicroBatchInfo:
        rows = tuple(Rows(number, one.first, len(one.ids)) for number, one in enumerate(new))
        runs = tuple(range(one.first, one.first + len(one.ids)) for one in new)
        return MicroBatchInfo(0, tuple(range(len(new))), False, rows, runs, cache)

    def _hidden(self, ids: torch.Tensor, tokens: MicroBatchInfo) -> torch.Tensor:
        """ids [1, T] -> [T, h] behind this rank's layers; they are on their way to the next stage."""
        pp = self.mesh.pp
        if pp.is_first:
            x = self.stage.embed(ids, tokens)
        else:
            x = torch.empty(ids.numel(), self.model.hidden_size, dtype=self.dtype, device=self.mesh.device)
            pp.start_recv(x, -1, lane=0, tag=0).wait()
        x = self.stage.body(x, tokens)
        if not pp.is_last:
            pp.start_send(x, 1, lane=0, tag=0).wait()
        return x

    def agree(self, ids: list[int] | None, count: int) -> list[int]:
        """The ids of the last stage, on every rank of the pipeline."""
        agreed = torch.tensor(ids if self.mesh.pp.is_last else [0] * count, dtype=torch.int64, device=self.mesh.device)
        return self.mesh.pp.all_reduce_(agreed, kind="control").tolist()
