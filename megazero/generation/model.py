"""A checkpoint's model on the ranks of a mesh, without gradients and without ZeRO."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from megazero import checkpoint
from megazero.checkpoint.engine_state import load_biases
from megazero.checkpoint.shards import LocalShard
from megazero.data.task_requests import Pair
from megazero.engine.kernels.dropout import Rows
from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.context_parallel.dealt import Ranges, num_tokens
from megazero.engine.model.layers.context import DTYPES, Context, MicroBatchInfo, ResidualStream
from megazero.engine.model.layers.weight import Weight
from megazero.engine.model.stage import Stage, declare
from megazero.engine.options.model_options import ModelOptions
from megazero.engine.options.schema import LEAST_CHUNK
from megazero.engine.plan.layout.flat_layout import Range
from megazero.engine.step.routers import Routers
from megazero.generation.generate import NewTokens
from megazero.generation.kv_cache import KVCache
from megazero.generation.target_scores import target_scores


class InferenceModel:
    """This rank's layers, in the precision of the checkpoint's master weights; a `TokenModel` with a cache."""

    lockstep = False

    def __init__(self, path: Path, model: ModelOptions, mesh: Mesh, precision: str = "fp32") -> None:
        """Read the weights of the checkpoint folder `path`; all ranks call this.

        Raises:
            ValueError: see `checkpoint.load`.
        """
        self.model, self.mesh, self.dtype, self.window = model, mesh, DTYPES[precision], model.seq_length
        self.stream = ResidualStream(mesh.tp, sharded=False)
        context = Context(self.stream, MemoryTracker(), precision, mesh.device, cp=mesh.cp, loss_chunk=LEAST_CHUNK)
        names = declare(model, mesh.layout.tp).of_rank(mesh.layout, mesh.pp.rank)
        self.stage = Stage(model, names, context)
        shards = {}
        for weights in self.stage.units.values():
            for weight in weights:
                weight.data, shards[f"model.{weight.spec.name}"] = self._memory(weight)
        checkpoint.load(path, shards, mesh.host.group, partial=True)
        if model.moe_router_enable_expert_bias:
            biases = checkpoint.read_state(path, mesh.host.group)["expert_biases"]
            load_biases(Routers.of(model, self.stage, mesh.device), biases)

    def _memory(self, weight: Weight) -> tuple[torch.Tensor, LocalShard]:
        """Return the memory of a weight, and the shard that fills it. The vocabulary's padding stays zero."""
        spec, block = weight.spec, weight.block
        flat = torch.zeros(block.stored_numel, dtype=self.dtype, device=self.mesh.device)
        own = LocalShard.of(spec, block, Range(0, block.numel), flat[: block.numel])
        return flat.view(block.stored), own

    def new_cache(self, num_sequences: int, capacity: int) -> KVCache:
        return KVCache(num_sequences, capacity, self.mesh.cp)

    @torch.no_grad()
    def logits(self, new: Sequence[NewTokens], cache: KVCache | None) -> torch.Tensor | None:
        """Return [b, v] after the last new token of each sequence, on the last stage. Cache row i is sequence i."""
        assert cache is not None, "new_cache makes one"
        device, cp = self.mesh.device, self.mesh.cp
        deals = [cache.dealt(len(one.ids), device) for one in new]
        own = [
            (range(len(one.ids)),) if dealt is None else dealt.ranges[0][cp.rank]
            for one, dealt in zip(new, deals, strict=True)
        ]
        ids = torch.tensor([one.ids[i] for one, part in zip(new, own, strict=True) for run in part for i in run])
        x = self._hidden(ids[None].to(device), self._tokens(new, own, cache))
        if self.stage.head is None:
            return None
        last = x[torch.tensor([num_tokens(part) for part in own], device=device).cumsum(0) - 1]
        if any(deals):  # one rank has the last token of a dealt sequence, all have that of another
            here = [
                part[-1].stop == len(one.ids) and (dealt is not None or cp.is_first)
                for one, dealt, part in zip(new, deals, own, strict=True)
            ]
            cp.all_reduce_(last.masked_fill_(~torch.tensor(here, device=device)[:, None], 0))
        return self.stage.head.whole_logits(last)

    @torch.no_grad()
    def guessed(self, ids: list[int], num_prompt: int) -> torch.Tensor | None:
        """Return how many tokens behind a prompt are the likeliest of each module of multi-token prediction.

        The result is [modules, 2], of tokens that are and of tokens, on the last stage; None on the others. Only the
        last tokens of a text that is longer than the window count. Computes all of the text at once, on one
        context-parallel rank.
        """
        first = max(0, len(ids) - self.window)
        ids, num_prompt = ids[first:], max(1, num_prompt - first)
        whole = torch.tensor([ids], device=self.mesh.device)
        tokens = self._tokens([NewTokens(ids, 0)], [(range(len(ids)),)], KVCache(1, len(ids)))
        x, head = self._hidden(whole, tokens), self.stage.head
        if head is None or head.depths is None:
            return None
        modules = range(1, 1 + self.model.mtp_num_layers)
        following = [F.pad(whole, (0, k))[:, k : k + len(ids)] for k in modules]
        _, *states = head.depths.states(x, following, tokens)
        found = torch.zeros(len(modules), 2, dtype=torch.float64)
        for k, state in zip(modules, states, strict=True):
            first = max(num_prompt, k + 1)  # the first token that this module guesses
            if first < len(ids):
                guesses = head.vocabulary.whole_logits(state[first - k - 1 : len(ids) - k - 1]).argmax(-1)
                found[k - 1] = torch.tensor([int((guesses == whole[0, first:]).sum()), len(guesses)])
        return found

    @torch.no_grad()
    def target_scores(self, pairs: Sequence[Pair]) -> list[torch.Tensor]:
        """Return `target_scores` of each continuation of n tokens, [2, n], on the last stage; nothing elsewhere.

        Computes all tokens at once, without padding, on one context-parallel rank.
        """
        device, inputs = self.mesh.device, [[*context, *continuation[:-1]] for context, continuation in pairs]
        new, own = [NewTokens(ids, 0) for ids in inputs], [(range(len(ids)),) for ids in inputs]
        flat = torch.tensor([[token for ids in inputs for token in ids]], device=device)
        x, head = self._hidden(flat, self._tokens(new, own, KVCache(len(new), max(map(len, inputs))))), self.stage.head
        if head is None:
            return []
        labels = [[*context[1:], *continuation] for context, continuation in pairs]
        targets = torch.tensor([[token for ids in labels for token in ids]], device=device)
        counts = [[0.0] * (len(context) - 1) + [1.0] * len(continuation) for context, continuation in pairs]
        weights = torch.tensor([[each for counted in counts for each in counted]], device=device)
        found = target_scores(head, x, targets, weights)[:, 0].split([len(ids) for ids in inputs], dim=1)
        return [each[:, -len(pair.continuation) :] for each, pair in zip(found, pairs, strict=True)]

    def _tokens(self, new: Sequence[NewTokens], own: Sequence[Ranges], cache: KVCache) -> MicroBatchInfo:
        """own: this rank's of the new tokens"""
        rows = tuple(Rows(number, one.first, len(one.ids)) for number, one in enumerate(new))
        runs = tuple(
            range(one.first + run.start, one.first + run.stop)
            for one, part in zip(new, own, strict=True)
            for run in part
        )
        positions = torch.cat([torch.arange(run.start, run.stop, device=self.mesh.device) for run in runs])[None]
        return MicroBatchInfo(
            length=0, samples=(0,), training=False, rows=rows, runs=runs, cache=cache, head_positions=positions
        )

    def _hidden(self, ids: torch.Tensor, tokens: MicroBatchInfo) -> torch.Tensor:
        """ids [1, T] -> [T, h] after this rank's layers; also sent to the next stage."""
        pp = self.mesh.pp
        received = None
        if not pp.is_first:
            received = torch.empty(ids.numel(), self.model.hidden_size, dtype=self.dtype, device=self.mesh.device)
            pp.start_recv(received, -1, lane=0, tag=0).wait()
        x = hidden_states(self.stage, ids, tokens, received)
        if self.stage.head is None:
            pp.start_send(x, 1, lane=0, tag=0).wait()
        return x


def hidden_states(
    stage: Stage, ids: torch.Tensor, tokens: MicroBatchInfo, received: torch.Tensor | None = None
) -> torch.Tensor:
    """ids [b, s] -> [T', h] after a rank's embeddings and blocks; `received` [T', h]: from the stage before."""
    x = received
    if x is None:
        assert stage.token_embedding is not None
        x = stage.token_embedding(ids, tokens)
        x = x if stage.position_embedding is None else stage.position_embedding(x, tokens)
    for block in stage.blocks.values():
        x = block(x, tokens)
    return x
