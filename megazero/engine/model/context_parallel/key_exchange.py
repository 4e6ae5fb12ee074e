"""Exchange of keys and values over the ranks of context parallelism: gathered, or in a ring.

Gathered: every rank has the keys of whole samples, in order. Ring: a rank has the keys of one rank at a time, and those
of the next rank arrive while it attends to them. Gradients of keys are sums over the ranks, in fp32 if keys are 16 bit.

Shapes: b micro-batch, s tokens of a sample, t those of a sample on this rank, t_max most of any rank, c ranks, g groups
of keys and values of this rank, d head dim.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megazero.engine.kernels.eager import wide
from megazero.engine.mesh.collectives import Axis, Pending
from megazero.engine.model.context_parallel.dealt import DealtTokens, Ranges

Pair = tuple[torch.Tensor, torch.Tensor]


class AllKeys:
    """No exchange: this rank has all tokens.

    Attributes:
        again: whether a backward exchanges keys again. Else it uses those that `gather` returned, which are saved.
        merges: whether attention of a query is merged from several blocks.
        sums_over_ranks: whether gradients are summed over ranks.
    """

    again = merges = sums_over_ranks = False

    def gather(self, k: torch.Tensor, v: torch.Tensor) -> Pair:
        """Keys and values [b, g, t, d] of this rank -> those of which `blocks` are made."""
        return k, v

    def blocks(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Pair]:
        """Yield blocks of all keys and values, [b, g, L, d] each. The first has this rank's own."""
        yield k, v

    def tokens(self, batch: int, length: int) -> list[tuple[Ranges, ...]]:
        """Return the indices of the tokens of each block, per sample of s = `length` tokens."""
        return [((range(length),),) * batch]

    def grad_dtype(self, k: torch.Tensor) -> torch.dtype:
        """Return the type in which gradients are summed."""
        return wide(k) if self.sums_over_ranks else k.dtype

    def reduce(self, gradients: Iterable[Pair]) -> Pair:
        """Gradients of the keys and values of each block, this rank's summands -> those of this rank's tokens."""
        (found,) = gradients
        return found


@dataclass(frozen=True)
class GatheredKeys(AllKeys):
    """One all-gather of all keys and values, and in backward one reduce-scatter."""

    axis: Axis
    dealt: DealtTokens
    again: bool = False
    sums_over_ranks = True

    def gather(self, k: torch.Tensor, v: torch.Tensor) -> Pair:
        whole = _gather(self.axis, self.dealt, _packed((k, v), self.dealt.most))
        return _unpacked(whole.unflatten(0, (len(k), self.dealt.length)))

    def reduce(self, gradients: Iterable[Pair]) -> Pair:
        (found,) = gradients
        b, g, _, d = found[0].shape
        buffer = found[0].new_zeros(self.axis.size, b, self.dealt.most, 2, g, d)
        for number, x in enumerate(found):
            buffer.view(-1, 2, g, d)[:, number].index_copy_(0, self.dealt.rows, x.transpose(1, 2).flatten(0, 1))
        return _unpacked(_sum_own(self.axis, buffer)[:, : self.dealt.indices.shape[1]])


@dataclass(frozen=True)
class RingKeys(AllKeys):
    """c steps. In step i, rank r has the keys of rank r - i. In backward, gradients of keys follow them a step later.

    A rank sums its own gradients at the end, so gradients are sent c - 1 times, as keys are.
    """

    axis: Axis
    dealt: DealtTokens
    again = merges = sums_over_ranks = True

    def blocks(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Pair]:
        buffer = _packed((k, v), self.dealt.most)
        for step in range(self.axis.size):
            arriving, pending = buffer, Pending()
            if step + 1 < self.axis.size:
                arriving = torch.empty_like(buffer)
                pending = self.axis.start_shift(buffer, arriving, 1)
            yield _unpacked(buffer)
            pending.wait()
            buffer = arriving

    def tokens(self, batch: int, length: int) -> list[tuple[Ranges, ...]]:
        return [self.dealt.of_rank((self.axis.rank - step) % self.axis.size) for step in range(self.axis.size)]

    def reduce(self, gradients: Iterable[Pair]) -> Pair:
        steps = iter(gradients)
        own = next(steps)
        b, g, most, d = own[0].shape
        travelling, pending = own[0].new_zeros(b, most, 2, g, d), Pending()
        for pair in steps:
            pending.wait()
            for x, summand in zip(_unpacked(travelling), pair, strict=True):
                x += summand
            arriving = torch.empty_like(travelling)
            pending = self.axis.start_shift(travelling, arriving, 1)
            travelling = arriving
        pending.wait()
        dk, dv = (x.add_(arrived) for x, arrived in zip(own, _unpacked(travelling), strict=True))
        tokens = slice(self.dealt.indices.shape[1])
        return dk[:, :, tokens], dv[:, :, tokens]


@dataclass(frozen=True)
class GatheredTokens:
    """The latents of keys and values: one all-gather of those of all tokens, and in backward one reduce-scatter.

    Shapes: c elements of a token's latent.
    """

    axis: Axis
    dealt: DealtTokens

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [b t, c] of this rank's tokens -> [b s, c] of whole samples."""
        b, t = self.dealt.indices.shape
        part = x.new_zeros(b, self.dealt.most, x.shape[1])
        part[:, :t] = x.view(b, t, -1)
        return _gather(self.axis, self.dealt, part)

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's summands [b s, c], in fp32 at least -> the sums over ranks of its tokens [b t, c]."""
        b, t = self.dealt.indices.shape
        buffer = gradient.new_zeros(self.axis.size, b, self.dealt.most, gradient.shape[1])
        buffer.view(-1, gradient.shape[1]).index_copy_(0, self.dealt.rows, gradient)
        return _sum_own(self.axis, buffer)[:, :t].flatten(0, 1)


def _gather(axis: Axis, dealt: DealtTokens, part: torch.Tensor) -> torch.Tensor:
    """part [b, t_max, ..] of this rank's tokens -> [b s, ..] of whole samples."""
    part = part.flatten(0, 1)
    whole = part.new_empty(axis.size * len(part), *part.shape[1:])
    axis.all_gather(part, whole)
    return whole.index_select(0, dealt.rows)


def _sum_own(axis: Axis, buffer: torch.Tensor) -> torch.Tensor:
    """This rank's summands [c, b, t_max, ..] of all tokens -> the sums over ranks of its own tokens [b, t_max, ..]."""
    own = torch.empty_like(buffer[0])
    scratch = own.new_empty(axis.scratch_numel(own.numel()) if axis.needs_staging_buffer else 0)
    axis.start_reduce_scatter(buffer.view(-1), own.view(-1), False, scratch).wait()
    return own


def _packed(pair: Pair, most: int) -> torch.Tensor:
    """Keys and values [b, g, t, d] -> [b, t_max, 2, g, d], with zeros after t."""
    b, g, t, d = pair[0].shape
    buffer = pair[0].new_empty(b, most, 2, g, d)
    for number, x in enumerate(pair):
        buffer[:, :t, number] = x.transpose(1, 2)
    buffer[:, t:] = 0
    return buffer


def _unpacked(buffer: torch.Tensor) -> Pair:
    """[b, t, 2, g, d] -> views [b, g, t, d]"""
    keys, values = buffer.transpose(1, 3).unbind(2)
    return keys, values
