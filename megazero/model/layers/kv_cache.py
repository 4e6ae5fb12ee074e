"""Keys and values of earlier tokens, so that the next token of a text costs one token's computation.

A layer with a window keeps as many tokens as the window has. Position p is in slot p modulo the number of slots, so a
new token replaces the one that left the window.

Shapes: b sequences, T new tokens of all sequences, n heads, g heads of keys and values, d head dim, L slots;
/tp = this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from megazero.kernels.dropout import Rows
from megazero.model.layers.scores import Scores


class KVCache:
    """The keys and values of b sequences in every layer of this rank.

    In `Rows`, `sample` is the number of a sequence and `first` the position of its first new token. New tokens follow
    those in the cache, one at a time, or replace them from position 0 on.
    """

    def __init__(self, num_sequences: int, capacity: int) -> None:
        """Have room for `capacity` tokens of each sequence, allocated at a layer's first use."""
        self.num_sequences, self.capacity = num_sequences, capacity
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # [b, g/tp, L, d] each

    def attend(
        self,
        layer: int,
        scores: Scores,
        prompt: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: tuple[Rows, ...],
    ) -> torch.Tensor:
        """Store new tokens' keys and values, then return the attention of their queries. Has no gradient.

        Shapes: q [T, n/tp, d], k and v [T, g/tp, d] -> [T, n/tp * d].

        Args:
            prompt: attention of whole sequences, [1, n/tp or g/tp, count, d] -> [count, n/tp * d].
        """
        keys, values = self._of(layer, k, scores.window)
        if all(row.count == 1 for row in rows):
            assert [row.sample for row in rows] == list(range(self.num_sequences)), rows
            return _attend_once(q, k, v, keys, values, rows, scores)
        parts = (part.split([row.count for row in rows]) for part in (q, k, v))
        found = []
        for row, *heads in zip(rows, *parts, strict=True):
            own = keys[row.sample : row.sample + 1], values[row.sample : row.sample + 1]
            if row.first:
                assert row.count == 1, row
                found.append(_attend_once(*heads, *own, (row,), scores))
                continue
            new = [part.transpose(0, 1)[None] for part in heads]  # [1, n or g, count, d]
            first = max(0, row.count - keys.shape[2])
            slots = torch.arange(first, row.count, device=q.device) % keys.shape[2]
            for cached, part in zip(own, new[1:], strict=True):
                cached[:, :, slots] = part[:, :, first:]
            found.append(prompt(*new))
        return torch.cat(found)

    def keep(self, sequences: Sequence[int]) -> None:
        """Remove all sequences except these, which get the numbers 0, 1, ... in this order."""
        self.num_sequences = len(sequences)
        for layer, pair in self._layers.items():
            self._layers[layer] = tuple(part[list(sequences)] for part in pair)

    def _of(self, layer: int, like: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self._layers:
            slots = min(window or self.capacity, self.capacity)
            shape = self.num_sequences, like.shape[1], slots, like.shape[2]
            self._layers[layer] = like.new_zeros(shape), like.new_zeros(shape)
        return self._layers[layer]


def _attend_once(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: tuple[Rows, ...],
    scores: Scores,
) -> torch.Tensor:
    """One new token per sequence: q [b, n, d], k and v [b, g, d], keys and values [b, g, L, d] -> [b, n * d].

    The n / g queries that share keys are rows of one product, so keys are not repeated.
    """
    (b, n, d), (_, g, slots, _) = q.shape, keys.shape
    positions = torch.tensor([row.first for row in rows], device=q.device)
    sequences = torch.arange(b, device=q.device)
    keys[sequences, :, positions % slots], values[sequences, :, positions % slots] = k, v
    used = min(max(row.first for row in rows) + 1, slots)
    keys, values = keys[:, :, :used], values[:, :, :used]
    seen = (torch.arange(used, device=q.device) <= positions[:, None])[:, None, None]  # [b, 1, 1, L]
    grouped = q.view(b, g, n // g, d)
    if scores.softcap:
        capped = scores.cap_(grouped * scores.factor(d) @ keys.transpose(-1, -2))
        y = capped.masked_fill_(~seen, -torch.inf).softmax(-1) @ values
    else:
        y = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen, scale=scores.scale or None)
    return y.reshape(b, n * d)
