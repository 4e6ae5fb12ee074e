"""Documents packed into the samples of a micro-batch: attention is restricted to them, or positions restart.

Shapes: b micro-batch, s sequence, N documents.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch


class DocumentSpan(NamedTuple):
    """The tokens [first, stop) of one sample: a document, or the part of it that is in the sample."""

    sample: int  # its index in the micro-batch
    first: int
    stop: int


@dataclass(frozen=True)
class Documents:
    """The documents of a micro-batch."""

    starts: torch.Tensor  # per token, the index in its sample at which its document begins, [b, s] int64 on the device
    bounds: torch.Tensor  # of the documents among the T = b s tokens, [N + 1] int32 on the device
    spans: tuple[DocumentSpan, ...]  # the same as Python numbers, in the order of the tokens

    @classmethod
    def of(cls, starts: torch.Tensor) -> Self:
        """Return the documents of `starts` [b, s] int64. Its tensors, and those of the result, are on the CPU."""
        length, found = starts.shape[1], []
        firsts = (starts == torch.arange(length)).nonzero().tolist()
        for (sample, first), following in zip(firsts, [*firsts[1:], [-1, 0]], strict=True):
            found.append(DocumentSpan(sample, first, following[1] if following[0] == sample else length))
        firsts_of_all = [span.sample * length + span.first for span in found]
        return cls(starts, torch.tensor([*firsts_of_all, starts.numel()], dtype=torch.int32), tuple(found))

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each token in its document, [b, s] int64."""
        return torch.arange(self.starts.shape[1], device=self.starts.device) - self.starts

    @cached_property
    def longest(self) -> int:
        return max(span.stop - span.first for span in self.spans)

    def runs(self, tokens: range) -> tuple[range, ...]:
        """Return the positions of a range of the T tokens, as ranges of consecutive ones."""
        length, found = self.starts.shape[1], []
        for sample, first, stop in self.spans:
            begin = sample * length + first
            part = range(max(tokens.start, begin) - begin, min(tokens.stop, begin + stop - first) - begin)
            if part:
                found.append(part)
        return tuple(found)
