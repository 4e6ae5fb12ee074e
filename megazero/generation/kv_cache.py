"""Keys and values of earlier tokens, so that the next token of a text costs one token's computation.

Where keys are their own values, as latents are, there is one tensor of both.

A layer with a window keeps as many tokens as the window has. A new token replaces the one that left the window.

Of c context-parallel ranks, rank r keeps positions r, r + c, r + 2 c, ...: as many as any other, in a window too. The
i-th of them is in slot i modulo the number of slots. A prompt's tokens are dealt as those of a sample are, and each
rank has all keys of a layer for a moment. Later tokens are computed by every rank, since they are few: each attends
to its own keys, and the results are merged by their log-sum-exp.

Shapes: b sequences, T new tokens of all sequences on this rank, n heads, g heads of keys and values, d head dim,
L slots, c context-parallel ranks; /tp = this rank's part.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F

from megazero.engine.kernels.dropout import Rows
from megazero.engine.kernels.eager import wide
from megazero.engine.mesh.collectives import Axis
from megazero.engine.model.context_parallel.dealt import DealtTokens
from megazero.engine.model.context_parallel.key_exchange import GatheredTokens
from megazero.engine.model.layers.attention import Attention, CoreAttention
from megazero.engine.model.layers.context import MicroBatchInfo
from megazero.engine.model.layers.latent_attention import LatentAttention
from megazero.engine.model.scores import Scores
from megazero.engine.plan.layout.dealing import deal

Heads = tuple[torch.Tensor, ...]  # keys and values, or keys alone, which are the values

PROMPT_SCORES = 1 << 26  # scores that are made at once


class AttendPrompt(Protocol):
    """Attention of the tokens of one prompt that `dealt` gives this rank to all of the prompt's."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dealt: DealtTokens | None) -> torch.Tensor:
        """q [1, n/tp, t, d], k and v [1, g/tp, s, d] -> [t, n/tp * d]. Without `dealt`, t is s."""
        ...


class KVCache:
    """The keys and values of b sequences in every layer of this rank.

    In `Rows`, `sample` is the number of a sequence and `first` the position of its first new token; `count` is of all
    ranks together. New tokens follow those in the cache, one at a time, or replace them from position 0 on.
    """

    def __init__(self, num_sequences: int, capacity: int, cp: Axis | None = None) -> None:
        """Have room for `capacity` tokens of each sequence on `cp` together, allocated at a layer's first use."""
        self.num_sequences, self.capacity, self.cp = num_sequences, capacity, cp or Axis("cp", [0], 0)
        self._layers: dict[int, Heads] = {}  # [b, g/tp, L, d] each
        self._deals: dict[tuple[int, torch.device], DealtTokens] = {}

    def dealt(self, count: int, device: torch.device) -> DealtTokens | None:
        """Return how `count` new tokens of a sequence are dealt; None: every rank computes all, since they are few."""
        ranks = self.cp.size
        if ranks == 1 or count < ranks:
            return None
        if (count, device) not in self._deals:
            made = DealtTokens.of([deal(count, ranks).ranges], self.cp.rank, count)
            there = made._replace(indices=made.indices.to(device), rows=made.rows.to(device))
            self._deals[count, device] = there
        return self._deals[count, device]

    def attend_heads(self, attention: Attention, heads: Sequence[torch.Tensor], tokens: MicroBatchInfo) -> torch.Tensor:
        """Attend in a layer: queries [1, n/tp, T, d], keys and values [1, g/tp, T, d] -> [T, n/tp * d]"""
        sinks = None if attention.sinks is None else attention.sinks.weight.data

        def prompt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dealt: DealtTokens | None) -> torch.Tensor:
            return attend_prompt(attention.core, q, k, v, fused=attention.is_fused(tokens, dealt), dealt=dealt)

        q, k, v = (part[0].transpose(0, 1) for part in heads)
        return self.attend(attention.number, attention.core.scores, prompt, q, k, v, tokens.rows, sinks)

    def attend_to_latents(
        self, attention: LatentAttention, q: torch.Tensor, latents: torch.Tensor, tokens: MicroBatchInfo
    ) -> torch.Tensor:
        """Attend in a layer with latents: q [1, T, n/tp, d], latents [T, r + d_r] -> [T, n/tp * d_v].

        q k = (q_n W_k) c + q_r r, so all heads attend to one key, the latent, which is the value too. Keys and values
        of heads are not made.
        """
        a = attention
        keys, values = a.kv_up.matrix.view(a.num_heads, -1, a.rank).split([a.plain_dim, a.value_dim], 1)
        plain, turned = q[0].split([a.plain_dim, a.rotary_dim], -1)
        absorbed = torch.cat([torch.einsum("tnd,ndr->tnr", plain, keys), turned], -1)  # [T, n/tp, r + d_r]

        def prompt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dealt: DealtTokens | None) -> torch.Tensor:
            return attend_prompt(a.core, q, k, v, fused=False, dealt=dealt)

        found = self.attend(a.number, a.core.scores, prompt, absorbed, latents[:, None], v=None, rows=tokens.rows)
        found = found.view(len(latents), a.num_heads, -1)[..., : a.rank]
        return torch.einsum("tnr,nvr->tnv", found, values).flatten(1)

    def attend(
        self,
        layer: int,
        scores: Scores,
        prompt: AttendPrompt,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        rows: tuple[Rows, ...],
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store new tokens' keys and values, then return the attention of their queries. Has no gradient.

        Shapes: q [T, n/tp, d], k and v [T, g/tp, d] -> [T, n/tp * d]; sinks [n/tp], which `prompt` has itself. If v is
        None, keys are the values.
        """
        given = (k,) if v is None else (k, v)
        cached = self._of(layer, given, scores.window)
        if all(row.count == 1 for row in rows):
            assert [row.sample for row in rows] == list(range(self.num_sequences)), rows
            return self._attend_once(q, given, cached, rows, scores=scores, sinks=sinks)
        deals = [self.dealt(row.count, q.device) for row in rows]
        counts = [row.count if part is None else part.indices.shape[1] for row, part in zip(rows, deals, strict=True)]
        found = []
        for row, dealt, query, *new in zip(rows, deals, *(part.split(counts) for part in (q, *given)), strict=True):
            own = tuple([part[row.sample : row.sample + 1] for part in cached])
            if row.first:
                assert row.count == 1, row
                found.append(self._attend_once(query, tuple(new), own, (row,), scores=scores, sinks=sinks))
                continue
            if dealt is not None:
                whole = GatheredTokens(self.cp, dealt).gather(torch.stack(new, 1).flatten(1))
                new = list(whole.view(row.count, len(new), *k.shape[1:]).unbind(1))
            queries, *heads = (part.transpose(0, 1)[None] for part in (query, *new))  # [1, n or g, t or s, d]
            slots = own[0].shape[2]
            mine = torch.arange(row.count, device=q.device)[self.cp.rank :: self.cp.size][-slots:]
            for part, all_tokens in zip(own, heads, strict=True):
                part[:, :, mine // self.cp.size % slots] = all_tokens[:, :, mine]
            found.append(prompt(queries, heads[0], heads[-1], dealt))
        return torch.cat(found)

    def keep(self, sequences: Sequence[int]) -> None:
        """Remove all sequences except these, which get the numbers 0, 1, ... in this order."""
        self.num_sequences = len(sequences)
        for layer, heads in self._layers.items():
            self._layers[layer] = tuple(part[list(sequences)] for part in heads)

    def _of(self, layer: int, like: Heads, window: int) -> Heads:
        if layer not in self._layers:
            slots = -(-min(window or self.capacity, self.capacity) // self.cp.size)
            self._layers[layer] = tuple([x.new_zeros(self.num_sequences, x.shape[1], slots, x.shape[2]) for x in like])
        return self._layers[layer]

    def _attend_once(
        self,
        q: torch.Tensor,
        new: Heads,
        cached: Heads,
        rows: tuple[Rows, ...],
        scores: Scores,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """One new token per sequence: q [b, n, d], `new` [b, g, d] each, `cached` [b, g, L, d] each -> [b, n * d].

        The n / g queries that share keys are rows of one product, so keys are not repeated.
        """
        (b, n, d), (_, g, slots, _), (c, rank) = q.shape, cached[0].shape, (self.cp.size, self.cp.rank)
        positions = torch.tensor([row.first for row in rows], device=q.device)
        sequences = torch.arange(b, device=q.device)
        at, mine = positions // c % slots, (positions % c == rank)[:, None, None]
        for part, added in zip(cached, new, strict=True):
            part[sequences, :, at] = torch.where(mine, added, part[sequences, :, at])
        used = min(max(row.first for row in rows) // c + 1, slots)
        keys, values = cached[0][:, :, :used], cached[-1][:, :, :used]
        last = ((positions - rank) // c)[:, None]  # number of the last of this rank's positions; -1: it has none
        held = last - (last - torch.arange(used, device=q.device)) % slots  # the same of each slot; below 0: empty
        seen = held >= 0
        if scores.window:  # slots of all ranks may be more than the window
            seen &= positions[:, None] - (held * c + rank) < scores.window
        seen = seen[:, None, None]  # [b, 1, 1, L]
        grouped = q.view(b, g, n // g, d)
        if c > 1 or sinks is not None:
            y = self._merged(grouped, keys, values, seen=seen, scores=scores, sinks=sinks)
        elif scores.softcap:
            capped = scores.cap_(grouped * scores.factor(d) @ keys.transpose(-1, -2))
            y = capped.masked_fill_(~seen, -torch.inf).softmax(-1) @ values
        else:
            y = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen, scale=scores.scale or None)
        return y.reshape(b, n * d)

    def _merged(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        scores: Scores,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend to the keys of all ranks: q [b, g, n/g, d], keys and values [b, g, L, d] -> as q. In fp32 at least.

        Sinks are added once, after all ranks' keys. The log-sum-exp of a rank that has no key of a sequence is minus
        infinity, so its weight is 0.
        """
        dtype, d = wide(q), q.shape[-1]
        capped = scores.cap_(q.to(dtype) * scores.factor(d) @ keys.to(dtype).transpose(-1, -2))
        capped.masked_fill_(~seen, -torch.inf)
        log_sums = capped.logsumexp(-1, keepdim=True)
        y = (capped - log_sums.clamp_min(torch.finfo(dtype).min)).exp_() @ values.to(dtype)
        part = torch.cat([y, log_sums], -1)
        whole = self.cp.all_gather(part, part.new_empty(self.cp.size * len(part), *part.shape[1:]))
        whole = whole.view(self.cp.size, *part.shape)
        shares, log_sums = whole[..., d:].softmax(0), whole[..., d:].logsumexp(0)
        if sinks is not None:
            shares *= torch.sigmoid(log_sums - sinks.to(dtype).view(q.shape[1], -1, 1))
        return (whole[..., :d] * shares).sum(0).to(q.dtype)


def attend_prompt(
    core: CoreAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    fused: bool,
    dealt: DealtTokens | None,
    most: int = PROMPT_SCORES,
) -> torch.Tensor:
    """Attend to keys of all ranks, without a gradient: q [1, n/tp, t, d], k and v [1, g, s, d] -> [t, n/tp * d]

    A prompt that is dealt may be long: at most `most` of its scores are made at once.
    """
    whole = replace(core, cp=None)
    if fused or dealt is None:
        return whole(q, k, v, fused=fused, rows=None, dealt=dealt)
    count = max(1, most // (q.shape[1] * k.shape[2]))
    queries, indices = q.split(count, dim=2), dealt.indices.split(count, dim=1)
    some = (dealt._replace(indices=part) for part in indices)
    return torch.cat(
        [whole(q, k, v, fused=fused, rows=None, dealt=part) for q, part in zip(queries, some, strict=True)]
    )
