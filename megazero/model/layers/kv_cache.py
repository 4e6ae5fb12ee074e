"""Keys and values of earlier tokens, so that the next token of a text costs one token's computation.

Shapes: b sequences, T new tokens of all sequences, n heads, g heads of keys and values, d head dim, L longest sequence;
/tp = this rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from megazero.kernels.dropout import Rows


class KVCache:
    """The keys and values of b sequences in every layer of this rank.

    In `Rows`, `sample` is the number of a sequence and `first` the position of its first new token. New tokens follow
    those in the cache, one at a time, or replace them from position 0 on.
    """

    def __init__(self, num_sequences: int, capacity: int) -> None:
        """Have room for `capacity` tokens of each sequence, allocated at a layer's first use."""
        self.num_sequences, self.capacity = num_sequences, capacity
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # [b, g/tp, capacity, d] each

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: tuple[Rows, ...]
    ) -> torch.Tensor:
        """Store new tokens' keys and values, then return the attention of their queries. Has no gradient.

        Shapes: q [T, n/tp, d], k and v [T, g/tp, d] -> [T, n/tp * d].
        """
        keys, values = self._of(layer, k)
        if all(row.count == 1 for row in rows):
            assert [row.sample for row in rows] == list(range(self.num_sequences)), rows
            sequences = torch.arange(len(rows), device=q.device)
            positions = torch.tensor([row.first for row in rows], device=q.device)
            keys[sequences, :, positions], values[sequences, :, positions] = k, v
            return _attend_once(q, keys, values, positions).flatten(1)
        parts = (part.split([row.count for row in rows]) for part in (q, k, v))
        found = []
        for row, *heads in zip(rows, *parts, strict=True):
            own, place = slice(row.sample, row.sample + 1), slice(row.first, row.first + row.count)
            new_q, new_k, new_v = (part.transpose(0, 1)[None] for part in heads)  # [1, n or g, count, d]
            keys[own, :, place], values[own, :, place] = new_k, new_v
            if row.first:
                assert row.count == 1, row
                positions = torch.tensor([row.first], device=q.device)
                found.append(_attend_once(heads[0], keys[own], values[own], positions))
            else:
                y = F.scaled_dot_product_attention(new_q, new_k, new_v, is_causal=True, enable_gqa=True)
                found.append(y[0].transpose(0, 1))
        return torch.cat(found).flatten(1)

    def keep(self, sequences: Sequence[int]) -> None:
        """Remove all sequences except these, which get the numbers 0, 1, ... in this order."""
        self.num_sequences = len(sequences)
        for layer, pair in self._layers.items():
            self._layers[layer] = tuple(part[list(sequences)] for part in pair)

    def _of(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self._layers:
            shape = self.num_sequences, like.shape[1], self.capacity, like.shape[2]
            self._layers[layer] = like.new_zeros(shape), like.new_zeros(shape)
        return self._layers[layer]


def _attend_once(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One query per sequence: q [b, n, d], keys and values [b, g, capacity, d], positions [b] -> [b, n, d].

    The n / g queries that share keys are rows of one product, so keys are not repeated.
    """
    (b, n, d), g = q.shape, keys.shape[1]
    longest = int(positions.max()) + 1
    seen = torch.arange(longest, device=q.device) <= positions[:, None]  # [b, L]
    grouped = q.view(b, g, n // g, d)
    y = F.scaled_dot_product_attention(
        grouped, keys[:, :, :longest], values[:, :, :longest], attn_mask=seen[:, None, None]
    )
    return y.reshape(b, n, d)
