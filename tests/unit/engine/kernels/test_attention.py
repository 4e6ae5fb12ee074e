"""Attention with its weights in the open, against plain PyTorch: scores, dropout, and the backward of both."""

import math

import pytest
import torch

from megazero.engine.kernels.compiled import compiled
from megazero.engine.kernels.dropout import Dropout, Rows
from megazero.engine.kernels.kernel_table import EAGER
from megazero.engine.model.layers.attention import CoreAttention, Heads
from tests.reference_run import dropout_mask

B, S, D, SEED, LAYER = 2, 9, 8, 5, 3
SAMPLES = [40, 41]
SLOW = pytest.mark.slow


def plain(qkv: torch.Tensor, heads: int, mask: torch.Tensor | None) -> torch.Tensor:
    """qkv [T, n * 3 * d] in fp64; mask [b, n, s, s] -> [T, n * d]"""
    q, k, v = qkv.view(B, S, heads, 3, D).permute(3, 0, 2, 1, 4)
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)
    weights = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf).softmax(-1)
    if mask is not None:
        weights = weights * mask
    return (weights @ v).transpose(1, 2).reshape(B * S, heads * D)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("pieces", ["plain", pytest.param("compiled", marks=SLOW)])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("first, heads", [(0, 6), (4, 2)])
def test_open_attention_is_plain_attention(
    first: int, heads: int, dtype: torch.dtype, p: float, again: bool, pieces: str
) -> None:
    """All heads, or a tensor-parallel rank's, of two samples; output and gradient, with the mask of the documentation.

    Scores that are not scaled, not causal, or a softmax whose gradient leaves out its mean are far off.
    """
    generator = torch.Generator().manual_seed(first)
    qkv = torch.randn(B * S, heads * 3 * D, generator=generator).mul(1.5).to(dtype).requires_grad_()
    dy = torch.randn(B * S, heads * D, generator=generator).to(dtype)
    made = EAGER if pieces == "plain" else compiled(EAGER, qkv.device)
    core = CoreAttention(Dropout(p, SEED, LAYER, "scores"), made, again)
    rows = tuple(Rows(sample, first * S, heads * S) for sample in SAMPLES) if p else None
    y = core(*Heads(B, heads).forward(qkv)[0], False, rows)
    y.backward(dy)

    mask = None
    if p:
        flags = {"seed": SEED}
        whole = dropout_mask(flags, p, SAMPLES, LAYER, "scores", (first + heads) * S, S)
        mask = whole.view(B, -1, S, S)[:, first:]
        assert 0.1 < float((mask == 0).double().mean()) < 0.5
    theirs = qkv.detach().double().requires_grad_()
    wanted = plain(theirs, heads, mask)
    wanted.backward(dy.double())
    # A result is the sum of a few rounded numbers: the tolerance in units of the type's last place.
    tolerance = 4 * torch.finfo(dtype).eps
    assert relative(y.detach(), wanted.detach()) < tolerance
    for part in range(3):  # queries, keys, values: all are of similar size
        ours, other = (g.grad.view(B * S, heads, 3, D)[:, :, part] for g in (qkv, theirs))
        assert relative(ours, other) < tolerance, part


def test_the_first_token_sees_itself_alone() -> None:
    """Its output is its value and its query has no gradient, for any scores."""
    qkv = torch.randn(B * S, 3 * D, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = CoreAttention(Dropout(0.0, 0, 0, "scores"), EAGER, False)(*Heads(B, 1).forward(qkv)[0], False, None)
    values = qkv.detach().view(B, S, 3, D)[:, 0, 2]
    torch.testing.assert_close(y.detach().view(B, S, D)[:, 0], values)
    y.sum().backward()
    assert not qkv.grad.view(B, S, 3, D)[:, 0, 0].any()
