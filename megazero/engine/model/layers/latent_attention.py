"""Multi-head latent attention, as in DeepSeek-V2 and V3: all heads share a latent of keys and values per token.

A block projects its input down to narrow latents, norms them, and projects them up to queries, keys and values:

    [c, r] = kv_down norm1(x)        q_c = query_down norm1(x)
    [k, v] = kv_up kv_norm(c)        q = query_up query_norm(q_c), or without a latent of queries query norm1(x)

A key is k of its head, then r rotated by position, which all heads share; of a query the last dims are rotated.

Heads, so query_up, kv_up and proj, are sharded over tp. Each rank computes the latents of its own tokens of the
residual stream, with whole down-projections. Under sequence parallelism it gathers latents, not the wider x. The
gradients of latents are summed over tp, so those of the down-projections and of the norms are as those of norm1.

Context-parallel ranks gather latents too, where these are narrower than the keys and values of a rank's heads, and each
computes the keys and values of whole samples. A ring exchanges keys and values.

Values are padded with zeros to the width of keys, because fused kernels have one width.

Shapes: b micro-batch, s tokens of a sample, t those of a sample on this rank, T = b t, T' tokens of the residual stream
on this rank, h hidden, n/tp heads of this rank, r elements of a latent, d_n and d_r dims of a key without positions and
rotary ones, d = d_n + d_r, d_v dims of a value.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megazero.engine.kernels.eager import Tensors, wide
from megazero.engine.kernels.rotary import Rotary, rotate
from megazero.engine.model.context_parallel.key_exchange import GatheredTokens
from megazero.engine.model.layers.attention import Attention
from megazero.engine.model.layers.context import Context, MicroBatchInfo
from megazero.engine.model.layers.linear import (
    ColumnLinear,
    NormedColumns,
    Residual,
    ResidualRows,
    RowLinear,
    rows_onto,
)
from megazero.engine.model.layers.norm import Norm, RMSNorm
from megazero.engine.model.layers.weight import handle_of
from megazero.engine.options.model_options import ModelOptions

LATENT_EPSILON = 1e-6  # of the norms of latents with any --norm-epsilon, as in published models


class LatentAttention(Attention):
    """Latent attention of a block; see the module."""

    def __init__(self, model: ModelOptions, number: int, context: Context) -> None:
        super().__init__(model, number, context)
        h, n, std = model.hidden_size, model.num_attention_heads, model.init_method_std
        self.rank, self.rotary_dim, self.value_dim = model.kv_lora_rank, model.qk_pos_emb_head_dim, model.v_head_dim
        self.plain_dim = model.qk_head_dim
        alone, width = context.of_one_rank, self.rank + self.rotary_dim

        def down(rank: int) -> ColumnLinear:
            return ColumnLinear(alone, h, rank, std=std, bias=False, tp_dim=None, matrices=())

        def up(rank: int, dims: int) -> ColumnLinear:
            return ColumnLinear(context, rank, n, dims, std=std, bias=False, matrices=())

        def norm(rank: int) -> Norm:
            made = RMSNorm(model, context, rank)
            made.eps = LATENT_EPSILON
            return made

        self.query_norm = None
        if model.q_lora_rank:
            self.query_down, self.query_norm = down(model.q_lora_rank), norm(model.q_lora_rank)
            self.query_up = up(model.q_lora_rank, model.head_dim)
        else:
            self.query = up(h, model.head_dim)
        self.kv_down, self.kv_norm = down(width), norm(self.rank)
        self.kv_up = up(self.rank, self.plain_dim + self.value_dim)
        self.proj = RowLinear(context, n * self.value_dim, h, std=model.residual_std, bias=False)
        self.tables = context.rotary_tables(Rotary.of(model, number), model.seq_length)
        self.gathers = gathers_latents(model, self.num_heads, context.ring)
        if self.gathers:
            self.core = replace(self.core, cp=None)

    def forward(self, x: torch.Tensor, norm: Norm, residual: Residual, tokens: MicroBatchInfo) -> torch.Tensor:
        """x [T', h] -> x + attention(norm(x)) [T', h]; `residual` joins them."""
        if self.query_norm is None:
            down, query = NormedColumns(norm, (self.kv_down,)), NormedColumns(norm, (self.query,))
        else:
            down = NormedColumns(norm, (self.kv_down, self.query_down))
            query = NormedColumns(self.query_norm, (self.query_up,))
        exchange = None
        if self.gathers and tokens.dealt is not None:
            exchange = GatheredTokens(self.context.cp, tokens.dealt)
        columns = LatentColumns(attention=self, down=down, query=query, exchange=exchange, tokens=tokens)
        if tokens.cache is None:
            handle = handle_of(norm, *down.layers, query.norm, *query.layers, self.kv_norm, self.kv_up)
            q, k, v, x = _LatentColumns.apply(x, columns, handle)
            y = self.attend([q, k, v], tokens)  # [T, n/tp * d]
            if self.value_dim < q.shape[-1]:
                y = y.unflatten(-1, (-1, q.shape[-1]))[..., : self.value_dim].flatten(-2)
        else:
            y = tokens.cache.attend_to_latents(self, *columns.latents(x)[:2], tokens)
        return rows_onto(x, (y,), ResidualRows((self.proj,), (None,), residual, tokens.dropout_rows))


def gathers_latents(model: ModelOptions, heads: int, ring: bool) -> bool:
    """Return whether context-parallel ranks gather latents: narrower than keys and values of a rank's heads."""
    return not ring and model.kv_lora_rank + model.qk_pos_emb_head_dim < 2 * heads * model.head_dim


class LatentColumns(NamedTuple):
    """x -> queries, keys and values, below autograd."""

    attention: LatentAttention
    down: NormedColumns  # x -> latents
    query: NormedColumns  # the latent of queries, or x -> queries
    exchange: GatheredTokens | None  # of latents; None: keys and values are exchanged, or there is one rank
    tokens: MicroBatchInfo

    def turned(self, x: torch.Tensor, back: bool) -> torch.Tensor:
        """Rotate the last d_r dims of heads or keys x [b, t, heads, ..] by the positions of their tokens, or back."""
        a, plain = self.attention, x.shape[-1] - self.attention.rotary_dim
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        out[..., :plain] = x[..., :plain]
        rotate(x[..., plain:], a.tables.at(self.tokens.head_positions, x.shape[1]), back, out[..., plain:])
        return out

    def latents(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Tensors, list[int]]:
        """x [T', h] -> q [b, t, n/tp, d], latents [T, r + d_r]: normed, and rotated; and the saved tensors."""
        a, batch = self.attention, len(self.tokens.samples)
        found, kept = self.down.forward(x)
        (query,), more = self.query.forward(x if a.query_norm is None else found[1])
        q = self.turned(query.view(batch, -1, a.num_heads, a.plain_dim + a.rotary_dim), back=False)
        narrow = found[0][:, : a.rank].contiguous()
        normed, *statistics = a.kv_norm.normalise(narrow)
        joined = torch.cat([normed, found[0][:, a.rank :]], -1)
        latents = a.context.stream.start_unshard(joined).wait()
        keys = latents[:, a.rank :].unflatten(0, (batch, -1))[:, :, None]  # [b, t, 1, d_r]
        latents[:, a.rank :] = self.turned(keys, back=False).view(len(latents), -1)
        saved = (narrow, *statistics) if a.context.selective else (narrow, *statistics, normed)
        return q, latents, (*kept, *more, *saved), [len(kept), len(more)]

    def forward(self, x: torch.Tensor) -> tuple[Tensors, Tensors, list[int]]:
        """x [T', h] -> q [b, n/tp, t, d], k and v [b, n/tp, t or s, d], the tensors for `backward`, their numbers."""
        a, exchange, batch = self.attention, self.exchange, len(self.tokens.samples)
        q, latents, kept, counts = self.latents(x)
        latents = latents if exchange is None else exchange.gather(latents)
        kv = a.kv_up.output(latents[:, : a.rank]).view(batch, -1, a.num_heads, a.plain_dim + a.value_dim)
        k = kv.new_empty(*kv.shape[:3], q.shape[-1])
        k[..., : a.plain_dim] = kv[..., : a.plain_dim]
        k[..., a.plain_dim :] = latents[:, a.rank :].view(*kv.shape[:2], 1, a.rotary_dim)
        v = F.pad(kv[..., a.plain_dim :], (0, q.shape[-1] - a.value_dim))
        return tuple(part.transpose(1, 2) for part in (q, k, v)), kept, counts

    def backward(
        self, grads: Tensors, residual: torch.Tensor, wanted: bool, kept: Tensors, counts: list[int]
    ) -> torch.Tensor | None:
        """Hand over the weights' gradients. Return the gradient of x plus `residual`; None unless it is wanted."""
        a, exchange, context = self.attention, self.exchange, self.attention.context
        dq, dk, dv = (part.transpose(1, 2) for part in grads)  # [b, t or s, n/tp, d]
        of_down, of_query, of_norm = kept[: counts[0]], kept[counts[0] : sum(counts)], kept[sum(counts) :]
        dkv = dk.new_empty(*dk.shape[:3], a.plain_dim + a.value_dim)
        dkv[..., : a.plain_dim], dkv[..., a.plain_dim :] = dk[..., : a.plain_dim], dv[..., : a.value_dim]
        dkv = dkv.view(-1, dkv.shape[2] * dkv.shape[3])
        shared = dk[..., a.plain_dim :].sum(2, dtype=wide(dk)).flatten(0, 1)  # [b t or b s, d_r]
        dlatents = torch.cat([context.products.input_grad(dkv, a.kv_up.matrix).to(shared.dtype), shared], -1)
        if exchange is not None:
            dlatents = exchange.reduce(dlatents)
        keys = dlatents[:, a.rank :].unflatten(0, (len(self.tokens.samples), -1))[:, :, None]
        dlatents[:, a.rank :] = self.turned(keys, back=True).view(len(dlatents), -1)
        reducing = context.stream.start_reduce(dlatents.to(dk.dtype))
        statistics = of_norm[1:] if context.selective else of_norm[1:-1]
        if a.kv_up.weight.trains:
            normed = a.kv_norm.normalise(of_norm[0])[0] if context.selective else of_norm[-1]
            normed = context.stream.start_unshard(normed).wait()
            a.kv_up.add_gradients(normed if exchange is None else exchange.gather(normed), dkv)
        dnarrow = reducing.wait()
        dnormed = a.kv_norm.input_grad(dnarrow[:, : a.rank].contiguous(), None, of_norm[0], *statistics)
        downs = [torch.cat([dnormed, dnarrow[:, a.rank :]], -1)]
        dquery = [(self.turned(dq, back=True).view(-1, dq.shape[2] * dq.shape[3]), None)]
        if a.query_norm is None:
            residual = self.query.backward(dquery, residual, True, *of_query)
        else:
            downs.append(self.query.backward(dquery, None, True, *of_query))
        return self.down.backward([(each, None) for each in downs], residual, wanted, *of_down)


class _LatentColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, columns, handle):
        heads, kept, counts = columns.forward(x)
        ctx.save_for_backward(*kept)
        ctx.columns, ctx.counts = columns, counts
        return *heads, x

    @staticmethod
    def backward(ctx, *grads):
        *heads, residual = grads
        return ctx.columns.backward(heads, residual, ctx.needs_input_grad[0], ctx.saved_tensors, ctx.counts), None, None
