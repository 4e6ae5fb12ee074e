"""Attention over tokens that are dealt to several ranks is attention over whole samples, however they are dealt.

Explicit and fused, keys gathered or sent round in a ring: output, gradients and bytes.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby, product
from typing import Any, NamedTuple

import pytest
import torch

from megazero.engine.kernels.dropout import Dropout
from megazero.engine.kernels.kernel_table import EAGER
from megazero.engine.mesh.collectives import Axis
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.context_parallel.dealt import DealtTokens, score_rows
from megazero.engine.model.documents import Documents
from megazero.engine.model.layers.attention import CoreAttention
from megazero.engine.model.layers.fused_attention import is_attention_fused
from megazero.engine.model.scores import Scores
from megazero.engine.plan.layout.topology import Layout
from tests.helpers.late import late_collectives
from tests.helpers.rings import by_default
from tests.helpers.rounding import error_bound
from tests.pretended_gpu import GPU, pretended_gpu

B, HEADS, DIM = 2, 4, 8
SAMPLES = (40, 41)  # global numbers
CPU = torch.device("cpu")
Deal = list[list[list[range]]]


# -- deals, none of them that of a run


def runs(tokens: list[int]) -> list[range]:
    """Return ascending tokens as ranges."""
    groups = groupby(enumerate(tokens), key=lambda pair: pair[1] - pair[0])
    found = [[token for _, token in group] for _, group in groups]
    return [range(group[0], group[-1] + 1) for group in found]


def share(length: int, ranks: int, rank: int) -> int:
    return (length + rank) // ranks  # the last ranks have one more


def head_and_tail(length: int, ranks: int) -> list[list[range]]:
    """Piece r and piece 2 c - 1 - r of 2 c, which are not equally long."""
    sizes = [share(length, ranks, rank) for rank in range(ranks)]
    heads = [size // 2 for size in sizes]
    at, found = 0, [list[range]() for _ in range(ranks)]
    order = [(rank, heads[rank]) for rank in range(ranks)]
    order += [(rank, sizes[rank] - heads[rank]) for rank in reversed(range(ranks))]
    for rank, size in order:
        found[rank].append(range(at, at + size))
        at += size
    return found


def in_order(length: int, ranks: int) -> list[list[range]]:
    """The first rank sees no key of another."""
    at, found = 0, []
    for rank in range(ranks):
        found.append([range(at, at + share(length, ranks, rank))])
        at += share(length, ranks, rank)
    return found


def shuffled(length: int, ranks: int, seed: int) -> list[list[range]]:
    holders = [rank for rank in range(ranks) for _ in range(share(length, ranks, rank))]
    random.Random(seed).shuffle(holders)
    return [runs([token for token, holder in enumerate(holders) if holder == rank]) for rank in range(ranks)]


def deal(kind: str, length: int, ranks: int) -> Deal:
    if kind == "shuffled":
        return [shuffled(length, ranks, sample) for sample in range(B)]
    return [{"pairs": head_and_tail, "in order": in_order}[kind](length, ranks)] * B


def documents_of(length: int, ranks: int, kind: str) -> Documents | None:
    """Documents of any length, or as long as the ranges of ranks in order: these see no key of another rank."""
    if not kind:
        return None
    generator, starts = torch.Generator().manual_seed(length), torch.zeros(B, length, dtype=torch.int64)
    for row in starts:
        firsts = torch.randint(1, length, (3,), generator=generator).sort().values.tolist()
        if kind == "aligned":
            firsts = [own[0].start for own in in_order(length, ranks)]
        for first in firsts:
            row[first:] = first
    return Documents.of(starts)


# -- one rank, and the same by several


class Case(NamedTuple):
    length: int
    deal: str = "pairs"
    documents: str = ""
    fused: bool = True
    ring: bool = False
    groups: int = 2
    scores: Scores = Scores()
    dropout: float = 0.0
    again: bool = False  # --recompute selective


class Given(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dy: torch.Tensor  # [b, heads, s, d]


Found = tuple[torch.Tensor, ...]  # output, dq, dk, dv, as [b, heads, s, d]


def given(case: Case, dtype: torch.dtype) -> Given:
    generator = torch.Generator().manual_seed(case.length)
    sizes = (HEADS, case.groups, case.groups, HEADS)
    return Given(*(torch.randn(B, n, case.length, DIM, generator=generator).mul(1.5).to(dtype) for n in sizes))


def attend(
    case: Case, parts: Given, documents: Documents | None, axis: Axis | None = None, dealt: DealtTokens | None = None
) -> Found:
    core = CoreAttention(
        Dropout(case.dropout, 5, 3, "scores"), EAGER, case.again, case.scores, axis, case.ring and axis is not None
    )
    rows = score_rows(SAMPLES, range(2, 2 + HEADS), case.length, dealt) if case.dropout else None
    heads = [x.clone().requires_grad_() for x in parts[:3]]
    y = core(*heads, case.fused, rows, documents, dealt)
    dy = parts.dy.transpose(1, 2).reshape(y.shape)
    out = y.detach().view(B, -1, HEADS, DIM).transpose(1, 2)
    return out, *torch.autograd.grad(y, heads, dy)


def of_this_rank(whole: torch.Tensor, dealt: DealtTokens) -> torch.Tensor:
    return torch.stack([x[:, at] for x, at in zip(whole, dealt.indices, strict=True)])


def parted(case: Case, axis: Axis, parts: Given, documents: Documents | None) -> tuple[DealtTokens, Found]:
    dealt = DealtTokens.of(deal(case.deal, case.length, axis.size), axis.rank, case.length)
    return dealt, attend(case, Given(*(of_this_rank(x, dealt) for x in parts)), documents, axis, dealt)


def errors(rank: int, ranks: int, cases: list[Case], late: bool = False) -> list[list[float]]:
    """Largest differences of the output and the gradients from those of one rank, over the largest element."""
    axis, found = Mesh.build(Layout(dp=ranks), rank, CPU).dp, []
    for case in cases:
        parts, documents = given(case, torch.float64), documents_of(case.length, ranks, case.documents)
        with late_collectives(checks=True) if late else nullcontext():
            dealt, ours = parted(case, axis, parts, documents)
        wanted = attend(case, parts, documents)
        pairs = ((mine, of_this_rank(whole, dealt), whole) for mine, whole in zip(ours, wanted, strict=True))
        found.append([float((mine - theirs).abs().max() / whole.abs().max()) for mine, theirs, whole in pairs])
    return found


NARROW, WIDE = Scores(window=5, scale=0.3), Scores(window=70, scale=0.3)
WAYS: list[dict[str, Any]] = [
    *({"groups": groups, **how} for groups in (1, 2) for how in ({}, {"ring": True}, {"fused": False})),
    {"again": True},
    *({"scores": window, **how} for window in (NARROW, WIDE) for how in ({}, {"ring": True}, {"fused": False})),
    *({"scores": Scores(softcap=2.0), "fused": False, "again": again} for again in (False, True)),
    {"dropout": 0.3, "fused": False},
    {"dropout": 0.3, "fused": False, "again": True, "groups": 1},
]


def cases(lengths: Sequence[int], every: bool) -> Iterator[Case]:
    """Yield every way at every deal, with documents and without: at each length, or at the next one of them."""
    deals = list(product(("pairs", "shuffled"), ("", "any")))
    for number, (how, (kind, documents)) in enumerate(product(WAYS, deals)):
        at = (number + number // len(deals)) % len(lengths)  # every way, and every deal, at each length
        for length in lengths if every else lengths[at : at + 1]:
            yield Case(length, kind, documents, **how)
    for length, documents, ring in product(lengths, ("", "aligned"), (False, True)):
        yield Case(length, "in order", documents, ring=ring)


# Lengths modulo ranks: every remainder of two ranks, and unequal shares of three.
@pytest.mark.parametrize(
    ("count", "every"),
    [
        *by_default([(n, False) for n in (1, 2, 3)], 1),
        *(pytest.param(n, True, marks=pytest.mark.slow) for n in (1, 2, 3, 4)),
    ],
)
def test_dealt_tokens_attend_as_whole_samples_do(count: int, every: bool, ranks) -> None:
    """Masks of dropout are those of one rank, too."""
    wanted = list(cases((11, 13, 37, 200) if count == 4 else (11, 37, 200), every))
    for rank, found in enumerate(ranks(count).run(errors, count, wanted)):
        for case, differences in zip(wanted, found, strict=True):
            assert all(difference < 1e-10 for difference in differences), (rank, case, differences)


def test_exchanges_are_waited_for(ranks) -> None:
    """Collectives finish as late as they may; nothing is read or written before."""
    wanted = [Case(37, "shuffled", "any"), Case(37, ring=True), Case(13, "shuffled", fused=False, again=True)]
    for found in ranks(3).run(errors, 3, wanted, True):
        assert all(difference < 1e-10 for differences in found for difference in differences), found


# -- bytes


def sent(rank: int, ranks: int, case: Case, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that a rank sends in forward and in backward."""
    axis, parts = Mesh.build(Layout(dp=ranks), rank, CPU).dp, given(case, dtype)
    dealt = DealtTokens.of(deal(case.deal, case.length, ranks), rank, case.length)
    core = CoreAttention(Dropout(0.0, 0, 0, "scores"), EAGER, case.again, case.scores, axis, case.ring)
    heads = [of_this_rank(x, dealt).requires_grad_() for x in parts[:3]]
    y = core(*heads, case.fused, None, None, dealt)
    forward = axis.sent["dp"]
    y.sum().backward()
    return forward, axis.sent["dp"] - forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["gathered", "gathered again", "ring"])
def test_bytes_are_those_of_the_formulas(how: str, dtype: torch.dtype, ranks) -> None:
    """Keys and values of the rank with the most tokens, c - 1 times; gradients as often, in fp32."""
    case = Case(13, ring=how == "ring", again=how == "gathered again", fused=dtype == torch.float32 or how == "ring")
    keys = 2 * B * 5 * 2 * DIM  # both, b, t_max = ceil(13 / 3), g
    forward, gradients = 2 * keys * dtype.itemsize, 2 * keys * 4
    backward = gradients if how == "gathered" else forward + gradients
    assert ranks(3).run(sent, 3, case, dtype) == [(forward, backward)] * 3


# -- rounding


def rounding(rank: int, ranks: int, cases: list[Case]) -> list[list[float]]:
    """Errors of fp32 over their bounds."""
    axis, found = Mesh.build(Layout(dp=ranks), rank, CPU).dp, []
    for case in cases:
        parts, documents = given(case, torch.float32), documents_of(case.length, ranks, case.documents)
        wide = Given(*(x.double() for x in parts))
        dealt, ours = parted(case, axis, parts, documents)
        wanted, bounds = attend(case, wide, documents), bounds_of(case, wide, documents, ranks)
        pairs = zip(ours, wanted, bounds, strict=True)
        found.append(
            [float(((x.double() - of_this_rank(y, dealt)).abs() / of_this_rank(z, dealt)).max()) for x, y, z in pairs]
        )
    return found


def bounds_of(case: Case, parts: Given, documents: Documents | None, merges: int) -> list[torch.Tensor]:
    """Sums of s terms, whose weights have the relative error of a score, a sum of d products, and of the merges."""
    repeats = HEADS // case.groups
    q, k, v, dy = parts.q, *(x.repeat_interleave(repeats, 1) for x in parts[1:3]), parts.dy
    at = torch.arange(case.length)
    seen = at <= at[:, None]
    if documents is not None:
        seen = seen & (documents.starts[:, :, None] == documents.starts[:, None])[:, None]
    scores = q @ k.mT * DIM**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    largest = float((q.abs() @ k.abs().mT * DIM**-0.5).max())
    terms = case.length + DIM + 4 * merges + int(2 * (DIM + 2) * largest)
    dweights = dy.abs() @ v.abs().mT
    dscores = weights * (dweights + (weights * dweights).sum(-1, keepdim=True)) * DIM**-0.5
    products = [weights @ v.abs(), dscores @ k.abs(), dscores.mT @ q.abs(), weights.mT @ dy.abs()]
    products[2:] = [x.unflatten(1, (-1, repeats)).sum(2) for x in products[2:]]
    return [error_bound(x, 2 * terms, torch.float32) for x in products]


def test_fp32_is_as_exact_as_its_sums(ranks) -> None:
    wanted = [Case(37, "shuffled", "any", ring=ring) for ring in (False, True)] + [Case(200, fused=False), Case(200)]
    for found in ranks(3).run(rounding, 3, wanted):
        assert all(error <= 1 for errors in found for error in errors), found


def rounded(rank: int, ranks: int, case: Case) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Squared errors of a rank's elements: of several ranks, and of one."""
    axis = Mesh.build(Layout(dp=ranks), rank, CPU).dp
    parts = given(case, torch.bfloat16)
    dealt, ours = parted(case, axis, parts, None)
    alone, exact = attend(case, parts, None), attend(case, Given(*(x.double() for x in parts)), None)
    found = []
    for mine, one, wanted in zip(ours, alone, exact, strict=True):
        wanted = of_this_rank(wanted, dealt)
        found.append([float((x.double() - wanted).square().sum()) for x in (mine, of_this_rank(one, dealt))])
    return found


@pytest.mark.second
def test_16_bit_errs_no_more_on_eight_ranks(ranks) -> None:
    """Every number is rounded to 16 bit as often, gradients of keys after they are summed in fp32 over ranks and heads.

    Sums in fp32 are in another order. That moves a number over a border between two 16-bit ones, both as far off, in
    s 2^-24 of 2^-8, the spacing of 16 bit: for less than 1 in 256 of the numbers.
    """
    found = torch.tensor(ranks(8).run(rounded, 8, Case(96, "shuffled", fused=False, groups=1)))
    several, alone = found.sum(0).unbind(-1)
    assert (several <= alone * (1 + 2**-8)).all(), (several, alone)


# -- a GPU


def on_a_gpu(rank: int, ranks: int, cases: list[Case]) -> tuple[list[list[float]], dict[str, int]]:
    """Norms of errors against fp64, over the norms of all; and findings."""
    found = []
    with pretended_gpu() as findings:
        axis = Mesh.build(Layout(dp=ranks), rank, GPU).dp
        for case in cases:
            documents, parts = documents_of(case.length, ranks, case.documents), given(case, torch.bfloat16)
            dealt = DealtTokens.of(deal(case.deal, case.length, ranks), rank, case.length)
            wanted = attend(case, Given(*(x.double() for x in parts)), documents)
            there = dealt._replace(indices=dealt.indices.to(GPU), rows=dealt.rows.to(GPU))
            mine = Given(*(of_this_rank(x, dealt).to(GPU) for x in parts))
            ours = [x.cpu().double() for x in attend(case, mine, documents, axis, there)]
            wanted = [of_this_rank(x, dealt) for x in wanted]
            found.append([float((x - y).norm() / y.norm()) for x, y in zip(ours, wanted, strict=True)])
    return found, dict(findings.found)


@pytest.mark.second
def test_flash_attention_takes_the_pieces_of_a_gpu(ranks) -> None:
    """One call per run of queries and document; the ring merges. A result is a sum of a few roundings."""
    wanted = [
        Case(length, kind, documents, ring=ring, again=again)
        for length, kind, again in ((37, "pairs", False), (67, "shuffled", True))
        for documents in ("", "any")
        for ring in (False, True)
    ]
    wanted += [Case(200, documents=kind, scores=Scores(window=20, scale=0.3)) for kind in ("", "any")]
    for found, findings in ranks(3).run(on_a_gpu, 3, wanted):
        assert findings == {}
        for case, errors in zip(wanted, found, strict=True):
            assert all(error < 4 * torch.finfo(torch.bfloat16).eps for error in errors), (case, errors)


def test_a_gpu_without_flash_attention_has_explicit_weights() -> None:
    with pretended_gpu((7, 0)):
        assert is_attention_fused("cuda", "fp16", False) and not is_attention_fused(
            "cuda", "fp16", False, log_sums=True
        )
    with pretended_gpu((8, 0)):
        assert is_attention_fused("cuda", "bf16", False, True, log_sums=True)
        assert is_attention_fused("cuda", "fp32", False)
        assert not is_attention_fused("cuda", "fp32", False, log_sums=True)
    assert is_attention_fused("meta", "bf16", False, log_sums=True) and is_attention_fused(
        "cpu", "fp32", False, log_sums=True
    )
