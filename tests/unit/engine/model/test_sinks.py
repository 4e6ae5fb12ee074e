"""Attention sinks against plain PyTorch, in which each is one more key, whose value is 0.

`tests/parallel/matrix.py` has them in layouts, as a part of gpt-oss; `test_families.py` compares with transformers.
"""

from typing import Any

import torch

from megazero.engine.kernels.dropout import Dropout, Rows
from megazero.engine.kernels.kernel_table import EAGER
from megazero.engine.model.documents import Documents
from megazero.engine.model.layers.attention import CoreAttention
from megazero.engine.model.layers.sinks import Sinks
from megazero.engine.model.scores import Scores
from megazero.flags.config import ModelConfig
from megazero.generation.kv_cache import KVCache, attend_prompt
from tests.helpers.table import for_each
from tests.pretended_gpu import GPU, pretended_gpu
from tests.unit.engine.model.test_experts import context_of
from tests.unit.engine.model.test_linear import Collected

B, HEADS, GROUPS, LENGTH, DIM = 2, 4, 2, 150, 8
VALUES = torch.tensor([-6.0, 0.5, 3.0, 6.0], dtype=torch.float64)  # from little of the softmax to almost all of it


def plain(parts: list[torch.Tensor], sinks: torch.Tensor, scores: Scores, starts: torch.Tensor) -> torch.Tensor:
    """q [b, n, s, d], k and v [b, g, s, d], sinks [n], starts [b, s] -> [b s, n d]"""
    q, k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in parts)
    at = torch.arange(LENGTH)
    seen = (at <= at[:, None]) & (at >= starts[:, None, :, None])
    if scores.window:
        seen = seen & (at > at[:, None] - scores.window)
    products = (q @ k.mT * scores.factor(DIM)).masked_fill(~seen, -torch.inf)
    keys = torch.cat([products, sinks[:, None, None].expand(B, HEADS, LENGTH, 1)], -1)
    values = torch.cat([v, torch.zeros(B, HEADS, 1, DIM, dtype=v.dtype)], 2)
    return (keys.softmax(-1) @ values).transpose(1, 2).reshape(B * LENGTH, -1)


def sinks_of(precision: str = "fp64", device: str = "cpu") -> tuple[Sinks, Collected]:
    """Return sinks of VALUES, and the owner of their gradient."""
    made, owner = Sinks(ModelConfig(1, 32, 0, HEADS), context_of(precision)), Collected()
    made.weight.data = VALUES.to(made.weight.data.dtype).to(device)
    made.weight.owner = owner
    return made, owner


def heads(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, n, LENGTH, DIM) for n in (HEADS, GROUPS, GROUPS))
    return [torch.randn(shape, generator=generator).mul(1.5).to(dtype).requires_grad_() for shape in shapes]


def wanted_of(dtype: torch.dtype, scores: Scores, starts: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Return output and gradients of queries, keys, values and sinks, in fp64."""
    wide = [x.detach().double().requires_grad_() for x in (*heads(dtype), VALUES)]
    y = plain(wide[:3], wide[3], scores, starts)
    return [y.detach(), *torch.autograd.grad(y, wide, dy.double())]


@for_each("documents", [False, True])
@for_each("scores", [Scores(), Scores(window=7, scale=0.3), Scores(window=70)])
@for_each(
    ("precision", "device", "fused", "again"),
    [
        ("fp64", "cpu", True, False),
        ("fp64", "cpu", False, False),
        ("fp64", "cpu", False, True),
        ("bf16", "cpu", False, False),
        ("bf16", GPU, True, False),
    ],
)
def test_a_sink_is_a_key_without_a_value(
    precision: str, device: Any, fused: bool, again: bool, scores: Scores, documents: bool
) -> None:
    """Results of kernels are corrected; explicit weights have it, saved or made again."""
    starts = torch.zeros(B, LENGTH, dtype=torch.int64)
    if documents:
        starts[0, 20:], starts[1, 110:] = 20, 110
    with pretended_gpu((9, 0)):
        sinks, owner = sinks_of(precision, device)
        dtype = sinks.weight.data.dtype
        dy = torch.randn(B * LENGTH, HEADS * DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
        core = CoreAttention(Dropout(0.0, 0, 0, "scores"), EAGER, again, scores, sinks=sinks)
        parts = [part.detach().to(device).requires_grad_() for part in heads(dtype)]
        y = core(*parts, fused, None, Documents.of(starts) if documents else None)
        found = [y.detach(), *torch.autograd.grad(y, parts, dy.to(device)), owner[sinks.weight]]
        found = [x.cpu().double() for x in found]
    tolerance = 1e-12 if precision == "fp64" else 4 * torch.finfo(dtype).eps
    for ours, theirs in zip(found, wanted_of(dtype, scores, starts, dy), strict=True):
        assert (ours - theirs).norm() < tolerance * theirs.norm()
    # Each sink alone: a small share has the rounding of its own size. Queries' summands cancel each other in part.
    assert ((ours - theirs).abs() < 16 * tolerance * theirs.abs()).all()


def test_a_cache_has_the_sinks_once() -> None:
    """A prompt, then one token at a time."""
    parts, (sinks, _) = [part.detach() for part in heads(torch.float64)], sinks_of()
    whole = plain(parts, VALUES, Scores(window=7), torch.zeros(B, LENGTH, dtype=torch.int64)).view(B, LENGTH, -1)
    core = CoreAttention(Dropout(0.0, 0, 0, "scores"), EAGER, False, Scores(window=7), sinks=sinks)
    cache = KVCache(1, LENGTH)
    for first, stop in ((0, 9), *((at, at + 1) for at in range(9, 20))):
        given = [part[0, :, first:stop].transpose(0, 1) for part in parts]
        found = cache.attend(
            *(0, core.scores, lambda q, k, v, dealt: attend_prompt(core, q, k, v, True, dealt), *given),
            rows=(Rows(0, first, stop - first),),
            sinks=VALUES,
        )
        torch.testing.assert_close(found, whole[0, first:stop])
