"""Attention over dealt tokens on one rank of several that are pretended: pieces, saved bytes, FLOPs, merges.

`tests/parallel/test_context_attention.py` has the results on real ranks.
"""

import pytest
import torch

from megazero.engine.kernels.dropout import Dropout
from megazero.engine.kernels.kernel_table import EAGER
from megazero.engine.mesh.collectives import Axis
from megazero.engine.model.context_parallel.dealt import DealtTokens
from megazero.engine.model.context_parallel.pieces import Piece, merge_, parts, pieces_of
from megazero.engine.model.documents import Documents
from megazero.engine.model.layers.attention import CoreAttention
from megazero.engine.model.scores import PLAIN, Scores
from megazero.planner.trace.kernel_records import Operator, Recorder
from megazero.planner.trace.pretend import PretendAxis
from tests.helpers import kernel_checks
from tests.parallel.test_context_attention import DIM, HEADS, B, deal, documents_of
from tests.pretended_gpu import pretended_gpu

LENGTH, GROUPS, RANKS = 200, 2, 3
# of 11 tokens, rank 0 has 4, and rank 1 five, in two ranges
DEALT = [[[range(0, 2), range(5, 7)], [range(2, 5), range(9, 11)], [range(7, 9)]]]
STARTS = torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3, 3, 3, 3]])


def test_rows_of_a_gathered_buffer() -> None:
    dealt = DealtTokens.of(DEALT * 2, 1, 11)
    assert dealt.indices.tolist() == [[2, 3, 4, 9, 10]] * 2
    buffer = torch.full((3, 2, dealt.most), -1)
    for sample in range(2):
        for rank, ranges in enumerate(DEALT[0]):
            tokens = [100 * sample + index for run in ranges for index in run]
            buffer[rank, sample, : len(tokens)] = torch.tensor(tokens)
    assert buffer.view(-1)[dealt.rows].tolist() == [*range(11), *range(100, 111)]
    with pytest.raises(AssertionError, match="a token has no rank"):
        DealtTokens.of([[[range(0, 2)], [range(3, 5)]]], 0, 5)


def test_pieces_are_runs_within_documents_and_see_what_came_before() -> None:
    every = slice(None)
    dealt = DealtTokens.of(DEALT, 1, 11)
    assert list(pieces_of(None, 11, 0, dealt)) == [Piece(every, 0, 2, 5, 0, False), Piece(every, 3, 9, 11, 0, False)]
    first = slice(0, 1)
    found = list(pieces_of(Documents.of(STARTS), 11, 0, dealt))
    wanted = [Piece(first, 0, 2, 3, 0, False), Piece(first, 1, 3, 5, 3, False), Piece(first, 3, 9, 11, 3, False)]
    assert found == wanted
    # a window of 3 tokens: kernels that know it take a run whole
    whole = list(pieces_of(None, 11, 3, dealt, chunks=False))
    assert whole == [Piece(every, 0, 2, 5, 0, False), Piece(every, 3, 9, 11, 7, False)]
    masked = list(pieces_of(None, 11, 3, dealt))
    assert masked == [Piece(every, 0, 2, 3, 0, False), Piece(every, 1, 3, 5, 0, True), Piece(every, 3, 9, 11, 6, True)]


def keys_of(piece: Piece, rank: int, own: bool, joined: bool) -> list[tuple[int, int, bool]]:
    found = parts([piece], DealtTokens.of(DEALT, 1, 11).of_rank(rank), own, joined)
    return [(part.keys[2].start, part.keys[2].stop, part.own) for part in found]


def test_a_piece_sees_rows_of_a_block() -> None:
    """The block has its own tokens, those of another rank, or of one whose tokens are all later."""
    piece = Piece(slice(0, 1), 3, 9, 11, 3, False)
    assert keys_of(piece, 1, True, False) == [(3, 5, True), (1, 3, False)]
    assert keys_of(piece, 1, True, True) == [(1, 5, True)]
    assert keys_of(piece, 0, False, False) == [(2, 4, False)] and keys_of(piece, 2, False, True) == [(0, 2, False)]
    assert keys_of(Piece(slice(0, 1), 0, 2, 3, 0, False), 2, False, False) == []


def test_merges_neither_overflow_nor_lose_digits() -> None:
    """Log-sum-exps that are far apart: the smaller part vanishes. Equal ones: the mean."""
    sums = torch.tensor([0.0, 3e4, -3e4, 7.0])
    y = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    merge_(y, sums, torch.tensor([[5.0]] * 4, dtype=torch.bfloat16), torch.tensor([0.0, 0.0, 0.0, 7.0]))
    assert y.flatten().tolist() == [3.0, 2.0, 5.0, 4.5]
    torch.testing.assert_close(sums, torch.tensor([0.6931472, 3e4, 0.0, 7.6931472]))


def heads(device: str, dtype: torch.dtype, tokens: int) -> list[torch.Tensor]:
    made = (torch.zeros(B, tokens, n, DIM, dtype=dtype, device=device) for n in (HEADS, GROUPS, GROUPS))
    return [x.requires_grad_().transpose(1, 2) for x in made]


def core(axis: Axis, again: bool = False, ring: bool = False, scores: Scores = PLAIN) -> CoreAttention:
    return CoreAttention(Dropout(0.0, 0, 0, "scores"), EAGER, again, scores, axis, ring)


@pytest.mark.second
@pytest.mark.parametrize("how", ["gathered", "gathered again", "ring"])
@pytest.mark.parametrize(
    "device, dtype, fused",
    [("cpu", torch.float32, True), ("meta", torch.bfloat16, True), ("cpu", torch.bfloat16, False)],
)
def test_saved_bytes_are_those_of_the_formula_for_any_documents(
    how: str, device: str, dtype: torch.dtype, fused: bool
) -> None:
    """Queries, outputs and log-sum-exps of this rank's tokens; keys and values of all, or gathered again, of its own.

    Explicit attention saves weights in place of outputs and log-sum-exps, or neither.
    """
    axis, again, ring = PretendAxis("cp", [0, 1, 2], 1, True), how == "gathered again", how == "ring"
    tokens = 67
    keys = LENGTH if how == "gathered" or (ring and not fused) else tokens
    results = HEADS * (DIM * dtype.itemsize + 4) if fused else 0 if again else HEADS * LENGTH * dtype.itemsize
    wanted = B * ((tokens * HEADS + keys * 2 * GROUPS) * DIM * dtype.itemsize + tokens * results)
    for kind in ("pairs", "shuffled"):
        for documents in ("", "any"):
            dealt = DealtTokens.of(deal(kind, LENGTH, RANKS), 1, LENGTH)
            dealt = dealt._replace(indices=dealt.indices.to(device), rows=dealt.rows.to(device))
            bounded = documents_of(LENGTH, RANKS, documents)
            sizes: dict[int, int] = {}

            def keep(x: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
                sizes[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
                return x

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                y = core(axis, again, ring)(*heads(device, dtype, tokens), fused, None, bounded, dealt)
            assert sum(sizes.values()) == wanted, (kind, documents)
            y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flash_attention_takes_pieces(dtype: torch.dtype) -> None:
    """The check of a GPU (`tests/gpu`), on a pretended one."""
    with pretended_gpu():
        kernel_checks.check_flash_pieces(dtype, "cuda", deal("shuffled", 61, 3), 4, 2, 8)


@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("device, dtype", [("cpu", torch.float32), ("meta", torch.bfloat16)])
def test_all_ranks_together_compute_the_scores_of_one(device: str, dtype: torch.dtype, ring: bool, window: int) -> None:
    """A triangle is half of its square, and keys before it are computed whole.

    FlashAttention computes no key outside of a window. The CPU's kernel computes masked keys too.
    """

    def flops(axis: Axis, dealt: DealtTokens | None, tokens: int) -> int:
        attend, given = core(axis, False, ring, Scores(window=window)), heads(device, dtype, tokens)
        with Recorder() as recorder:
            attend(*given, True, None, None, dealt).sum().backward()
        return sum(event.attention_flops for event in recorder.take() if isinstance(event, Operator))

    alone, several = flops(Axis("cp", [0], 0), None, LENGTH), 0
    for rank in range(RANKS):
        dealt = DealtTokens.of(deal("pairs", LENGTH, RANKS), rank, LENGTH)
        dealt = dealt._replace(indices=dealt.indices.to(device), rows=dealt.rows.to(device))
        several += flops(PretendAxis("cp", [0, 1, 2], rank, True), dealt, dealt.indices.shape[1])
    each = 7 * B * HEADS * DIM  # 2 FLOPs, of 3.5 times two products, per half a score
    if not window:
        assert several == alone == each * LENGTH**2
    elif device == "cpu":
        assert min(several, alone) > each * window * (2 * LENGTH - window)
    else:  # half a score less of each run but the first, whose first key is the first that a query sees
        assert alone == each * window * (2 * LENGTH - window) and several == alone - each * (2 * RANKS - 1)
