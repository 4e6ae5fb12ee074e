"""The tokens of a micro-batch dealt to the ranks of context parallelism.

Shapes: b micro-batch, s tokens of a sample, t those of a sample on this rank, t_max most of any rank, c ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch

from megazero.engine.kernels.dropout import Rows

Ranges = tuple[range, ...]  # ascending indices in a sample, without overlap


class DealtTokens(NamedTuple):
    """The tokens of each rank. Ranks may have different numbers of them; a rank has as many of every sample."""

    ranges: tuple[tuple[Ranges, ...], ...]  # [sample of the micro-batch][rank] -> indices in the sample
    rank: int  # of this process
    length: int  # s
    indices: torch.Tensor  # of this rank's tokens in their samples, [b, t] int64 on the device
    rows: torch.Tensor  # of all tokens in a buffer of the ranks' tokens, [c, b, t_max]: [b * s] int64 on the device

    @classmethod
    def of(cls, ranges: Sequence[Sequence[Sequence[range]]], rank: int, length: int) -> Self:
        """Return the tokens of `ranges`, with tensors on the CPU."""
        dealt = tuple(tuple(tuple(filter(len, own)) for own in sample) for sample in ranges)
        indices = [torch.cat([torch.arange(run.start, run.stop) for run in sample[rank]]) for sample in dealt]
        most = max(num_tokens(own) for sample in dealt for own in sample)
        assert all(sum(map(num_tokens, sample)) == length for sample in dealt), "a token has no rank, or two"
        rows = torch.empty(len(dealt), length, dtype=torch.int64)
        for number, sample in enumerate(dealt):
            for holder, own in enumerate(sample):
                row = (holder * len(dealt) + number) * most
                for run in own:
                    rows[number, run.start : run.stop] = torch.arange(row, row + len(run))
                    row += len(run)
        return cls(ranges=dealt, rank=rank, length=length, indices=torch.stack(indices), rows=rows.view(-1))

    @property
    def most(self) -> int:
        """Return t_max."""
        return max(num_tokens(own) for own in self.ranges[0])

    def of_rank(self, rank: int) -> tuple[Ranges, ...]:
        """Return a rank's ranges of each sample."""
        return tuple(sample[rank] for sample in self.ranges)


def num_tokens(ranges: Ranges) -> int:
    return sum(map(len, ranges))


def score_rows(samples: Sequence[int], heads: range, length: int, dealt: DealtTokens | None) -> tuple[Rows, ...]:
    """Return the rows of the dropout masks of scores [b, heads, t, s]: head * s + query; s is `length`.

    samples: their global numbers; heads: of the model. Without `dealt`, this rank has all tokens.
    """
    if dealt is None:
        return tuple(Rows(sample, heads.start * length, len(heads) * length) for sample in samples)
    return tuple(
        Rows(sample, head * length + run.start, len(run))
        for sample, own in zip(samples, dealt.of_rank(dealt.rank), strict=True)
        for head in heads
        for run in own
    )
