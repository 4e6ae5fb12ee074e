"""Random numbers by coordinate: the same whatever the cut, the micro-batch and the pass."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from megazero.config import ModelConfig
from megazero.layout import Layout
from megazero.parameters import ParamSpec, stage_units
from megazero.rng import BLOCK, Dropout, draw, seed_of, standard_normal

SEED = 1234
# The table is longer than a block, and 1009 rows are prime: no cut falls on one.
MODEL = ModelConfig(
    num_layers=1, hidden_size=96, num_attention_heads=24, seq_length=7, vocab_size=1009, untie_embeddings=True
)
SPECS = [spec for specs in stage_units(MODEL, Layout(), 0).values() for spec in specs]
# Cut on columns, and large enough that its rows are drawn in several pieces.
TALL = ParamSpec("tall", (3001, 384), 1, True, std=0.5, mean=2.0)


def drawn(spec: ParamSpec, tp: int = 1, rank: int = 0, seed: int = SEED) -> torch.Tensor:
    block = spec.local(tp, rank)
    return draw(seed, spec, block, 0, block.numel).view(block.shape)


def test_any_range_of_a_block_is_part_of_the_whole() -> None:
    """Cut over rows, over columns, not at all; ranges within a row, over several, empty."""
    matrix = next(spec for spec in SPECS if spec.name == "blocks.0.mlp.down.weight")
    for spec in (replace(matrix, cut_dim=cut) for cut in (None, 0, 1)):
        block = spec.local(3, 1) if spec.cut_dim is not None else spec.local(1, 0)
        whole = draw(SEED, spec, block, 0, block.numel)
        for start, stop in ((0, 1), (5, 5), (7, 300), (1, block.numel), (block.numel - 3, block.numel)):
            assert torch.equal(draw(SEED, spec, block, start, stop), whole[start:stop]), (spec, start, stop)


# -- initial values


@pytest.mark.parametrize("tp", [2, 3, 4, 8, 24])
@pytest.mark.parametrize("spec", [*SPECS, TALL], ids=lambda spec: spec.name)
def test_a_rank_draws_its_part_of_the_global_tensor(spec: ParamSpec, tp: int) -> None:
    whole = drawn(spec)
    parts = [drawn(spec, tp, rank) for rank in range(tp)]
    if spec.cut_dim is None:
        assert all(torch.equal(part, whole) for part in parts)
    else:
        assert torch.equal(torch.cat(parts, spec.cut_dim), whole)


def test_elements_are_numbered_in_the_order_of_the_global_tensor() -> None:
    for spec in (TALL, replace(TALL, cut_dim=0), replace(TALL, cut_dim=None)):
        expected = standard_normal(SEED, TALL.name, 0, math.prod(TALL.shape)).view(TALL.shape) * TALL.std + TALL.mean
        assert torch.equal(drawn(spec), expected)


def test_any_range_is_a_part_of_the_whole() -> None:
    total = 3 * BLOCK + 17
    whole = standard_normal(SEED, "x", 0, total)
    edges = [0, 1, 63, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK, total - 1, total]
    for start, stop in itertools.combinations_with_replacement(edges, 2):
        assert torch.equal(standard_normal(SEED, "x", start, stop), whole[start:stop]), (start, stop)


def test_seed_name_and_block_matter() -> None:
    base = standard_normal(SEED, "x", 0, 2 * BLOCK)
    assert not torch.equal(base[:BLOCK], base[BLOCK:])
    for other in (standard_normal(SEED, "y", 0, BLOCK), standard_normal(SEED + 1, "x", 0, BLOCK)):
        correlation = float((base[:BLOCK] * other).mean())
        assert abs(correlation) < 5 / math.sqrt(BLOCK)
    model = replace(MODEL, num_layers=2)
    first, second = (stage_units(model, Layout(), 0)[f"blocks.{layer}"][2] for layer in (0, 1))
    assert not torch.equal(drawn(first), drawn(second))
    assert not torch.equal(drawn(first), drawn(first, seed=SEED + 1))


def test_mean_and_deviation() -> None:
    n = math.prod(TALL.shape)
    values = drawn(TALL).double()
    assert abs(float(values.mean()) - TALL.mean) < 5 * TALL.std / math.sqrt(n)
    assert abs(float(values.std()) / TALL.std - 1) < 5 / math.sqrt(2 * n)
    normal = (values - TALL.mean) / TALL.std
    assert abs(float(normal.pow(4).mean()) - 3) < 5 * math.sqrt(96 / n)  # the fourth moment: it is a normal one
    for spec in SPECS:
        if spec.std == 0.0:
            assert torch.equal(drawn(spec), torch.full(spec.shape, spec.mean))


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    drawn(TALL)
    Dropout(0.5, SEED, 0, "mlp")(torch.ones(1, 2, 3), (0,))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_numbers_are_those_of_yesterday() -> None:
    """Another derivation of seeds, or another order of drawing, would change every loss curve."""
    assert seed_of(1234, "token_embedding.weight", 0) == 6739153766545046966
    values = standard_normal(1234, "token_embedding.weight", BLOCK - 2, BLOCK + 2)
    expected = torch.tensor([0.11637362, 0.04003835, 0.32873982, -0.17392848])
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6)


def test_seeds_do_not_collide_or_overflow() -> None:
    coordinates = list(itertools.product(range(3), ("a", "b", ""), range(-1, 9)))
    seeds = [seed_of(*c) for c in coordinates]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert seed_of(1, 23) != seed_of(12, 3)


# -- dropout

DROPOUT = Dropout(0.25, SEED, 3, "mlp")
SCORES = Dropout(0.25, SEED, 3, "scores")


def mask(dropout: Dropout, shape: tuple[int, ...], samples: tuple[int, ...], first_head: int | None = None):
    return dropout(torch.ones(shape), samples, first_head)


def test_a_sample_has_its_mask_in_any_micro_batch() -> None:
    together = mask(DROPOUT, (3, 5, 8), (10, 4, 7))
    for at, sample in enumerate((10, 4, 7)):
        assert torch.equal(mask(DROPOUT, (1, 5, 8), (sample,))[0], together[at])
    assert torch.equal(mask(DROPOUT, (2, 5, 8), (7, 10)), together[[2, 0]])
    assert not torch.equal(together[0], together[1])


@pytest.mark.parametrize("tp", [2, 3])
def test_a_head_has_its_mask_on_any_rank(tp: int) -> None:
    whole = mask(SCORES, (2, 6, 9, 9), (3, 8), 0)
    each = 6 // tp
    parts = [mask(SCORES, (2, each, 9, 9), (3, 8), rank * each) for rank in range(tp)]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert all(not torch.equal(whole[:, a], whole[:, b]) for a, b in itertools.combinations(range(6), 2))


def test_every_coordinate_matters() -> None:
    base = mask(DROPOUT, (1, 5, 8), (0,))
    for other in (replace(DROPOUT, layer=4), replace(DROPOUT, site="attention"), replace(DROPOUT, seed=SEED + 1)):
        assert not torch.equal(mask(other, (1, 5, 8), (0,)), base)
    assert torch.equal(mask(replace(DROPOUT), (1, 5, 8), (0,)), base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [False, True])
def test_backward_uses_the_mask_of_forward(dtype: torch.dtype, heads: bool) -> None:
    shape, first_head = ((2, 3, 7, 7), 3) if heads else ((2, 7, 6), None)
    x = torch.randn(shape).to(dtype).transpose(-1, -2).requires_grad_()  # not contiguous
    dropout = SCORES if heads else DROPOUT
    y = dropout(x, (5, 9), first_head)
    dy = torch.randn(y.shape).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    made = dropout.mask(x, (5, 9), first_head)
    assert set(made.unique().tolist()) == {0.0, float(torch.tensor(1, dtype=dtype) / 0.75)}
    assert torch.equal(y, x * made) and torch.equal(dx, dy * made)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_it_keeps_as_many_as_it_says(probability: float) -> None:
    made = Dropout(probability, SEED, 0, "mlp")(torch.ones(4, 200, 500), (0, 1, 2, 3))
    n, keep = made.numel(), 1 - probability
    kept = float((made != 0).double().mean())
    assert abs(kept - keep) < 5 * math.sqrt(keep * probability / n)
    assert abs(float(made.double().mean()) - 1) < 5 * math.sqrt(probability / keep / n)


def test_without_dropout_nothing_happens() -> None:
    x = torch.ones(2, 3, 4)
    assert Dropout(0.0, SEED, 0, "mlp")(x, (0, 1)) is x
    assert DROPOUT(x, None) is x  # evaluation


def test_every_sample_needs_a_number() -> None:
    with pytest.raises(AssertionError):
        DROPOUT(torch.ones(2, 3, 4), (0,))
