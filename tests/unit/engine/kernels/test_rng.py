"""Random numbers by coordinate: equal for every cut, micro-batch and pass."""

import functools
import itertools
import math
import threading
from dataclasses import replace

import pytest
import torch

from megazero.engine.kernels import initial_values
from megazero.engine.kernels.dropout import CORE_ELEMENTS, Dropout, Rows
from megazero.engine.kernels.initial_values import BLOCK, draw, seed_of, standard_normal
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.layers import stage_units
from megazero.engine.plan.layout.parameters import ParamSpec
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import ModelConfig
from tests.helpers.table import for_each

SEED = 1234
# The table is longer than a block, and 1009 rows are prime: no cut falls on one.
MODEL = ModelConfig(
    num_layers=1, hidden_size=96, num_attention_heads=24, seq_length=7, vocab_size=1009, untie_embeddings=True
)
SPECS = [spec for specs in stage_units(declare(MODEL), Layout(), 0).values() for spec in specs]
# Cut on columns, and large enough that its rows are drawn in several pieces.
TALL = ParamSpec("tall", (3001, 384), ((1, "tp"),), True, std=0.5, mean=2.0)


def drawn(spec: ParamSpec, tp: int = 1, rank: int = 0, seed: int = SEED) -> torch.Tensor:
    block = spec.local({"tp": rank}, {"tp": tp})
    return draw(seed, spec, block, 0, block.numel).view(block.shape)


def test_any_range_of_a_block_is_part_of_the_whole() -> None:
    """Cut over rows, over columns, not at all; ranges within a row, over several, empty."""
    matrix = next(spec for spec in SPECS if spec.name == "blocks.0.mlp.down.weight")
    for spec in (replace(matrix, sharded=cut) for cut in ((), ((0, "tp"),), ((1, "tp"),))):
        block = spec.local({"tp": 1}, {"tp": 3})
        whole = draw(SEED, spec, block, 0, block.numel)
        for start, stop in ((0, 1), (5, 5), (7, 300), (1, block.numel), (block.numel - 3, block.numel)):
            assert torch.equal(draw(SEED, spec, block, start, stop), whole[start:stop]), (spec, start, stop)


# -- initial values


@for_each("tp", [2, 3, 4, 8, 24])
@for_each("spec", [*SPECS, TALL])
def test_a_rank_draws_its_part_of_the_global_tensor(spec: ParamSpec, tp: int) -> None:
    whole = drawn(spec)
    parts = [drawn(spec, tp, rank) for rank in range(tp)]
    if not spec.sharded:
        assert all(torch.equal(part, whole) for part in parts)
    else:
        assert torch.equal(torch.cat(parts, spec.sharded[0][0]), whole)


@for_each("shape", [(6, 10, 48), (6, 5, 3 * BLOCK)])
def test_a_rank_draws_its_part_of_what_two_axes_shard(shape: tuple[int, ...]) -> None:
    """Experts over ep, and their columns over tp: rows of the last dim, narrow and wide."""
    spec = ParamSpec("experts", shape, ((0, "ep"), (2, "tp")), True, std=0.5, mean=2.0)
    sizes = {"ep": 2, "tp": 3}
    parts = [
        [draw(SEED, spec, b, 0, b.numel).view(b.shape) for b in blocks]
        for blocks in ([spec.local({"ep": e, "tp": t}, sizes) for t in range(3)] for e in range(2))
    ]
    assert torch.equal(torch.cat([torch.cat(part, 2) for part in parts]), drawn(replace(spec, sharded=())))
    block = spec.local({"ep": 1, "tp": 2}, sizes)
    assert torch.equal(draw(SEED, spec, block, 37, block.numel - 5), parts[1][2].flatten()[37:-5])


def test_elements_are_numbered_in_the_order_of_the_global_tensor() -> None:
    for spec in (TALL, replace(TALL, sharded=((0, "tp"),)), replace(TALL, sharded=())):
        expected = standard_normal(SEED, TALL.name, 0, math.prod(TALL.shape)).view(TALL.shape) * TALL.std + TALL.mean
        assert torch.equal(drawn(spec), expected)


def test_any_range_is_a_part_of_the_whole() -> None:
    total = 3 * BLOCK + 17
    whole = standard_normal(SEED, "x", 0, total)
    edges = [0, 1, 63, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK, total - 1, total]
    for start, stop in itertools.combinations_with_replacement(edges, 2):
        assert torch.equal(standard_normal(SEED, "x", start, stop), whole[start:stop]), (start, stop)


def test_threads_draw_together_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks are drawn at the same time: each waits for the other."""
    expected = standard_normal(SEED, "x", 5, 2 * BLOCK)
    met = threading.Barrier(2, timeout=300)

    def waiting(*coordinates: object) -> int:
        met.wait()
        return seed_of(*coordinates)

    monkeypatch.setattr(initial_values, "seed_of", waiting)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(standard_normal(SEED, "x", 5, 2 * BLOCK), expected)


def test_seed_name_and_block_matter() -> None:
    base = standard_normal(SEED, "x", 0, 2 * BLOCK)
    assert not torch.equal(base[:BLOCK], base[BLOCK:])
    for other in (standard_normal(SEED, "y", 0, BLOCK), standard_normal(SEED + 1, "x", 0, BLOCK)):
        correlation = float((base[:BLOCK] * other).mean())
        assert abs(correlation) < 5 / math.sqrt(BLOCK)
    model = replace(MODEL, num_layers=2)
    first, second = (stage_units(declare(model), Layout(), 0)[f"blocks.{layer}"][2] for layer in (0, 1))
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
    Dropout(0.5, SEED, 0, "mlp")(torch.ones(1, 2, 3), (Rows(0, 0, 2),))
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


def whole(count: int, *samples: int) -> tuple[Rows, ...]:
    """Select the first `count` rows of each sample."""
    return tuple(Rows(sample, 0, count) for sample in samples)


def mask(dropout: Dropout, rows: tuple[Rows, ...], columns: int) -> torch.Tensor:
    """[R, columns]"""
    return dropout.mask(torch.ones(sum(r.count for r in rows), columns), rows)


@functools.cache
def kept(dropout: Dropout, sample: int = 0, count: int = 1024, columns: int = 1024) -> torch.Tensor:
    """Return which elements are kept, [count, columns], of mean 0 and deviation 1 if the mask is right."""
    p = dropout.probability
    keep = (mask(dropout, whole(count, sample), columns) != 0).float()
    return (keep - (1 - p)) / math.sqrt(p * (1 - p))


def deviations(values: torch.Tensor) -> float:
    """Return the distance from 0, in standard deviations, of the mean of independent values of deviation 1 each."""
    return float(values.mean(dtype=torch.float64)) * math.sqrt(values.numel())


PART_OF_SAMPLE = [
    (Rows(4, 0, 50),),
    (Rows(4, 49, 1),),
    (Rows(4, 7, 20), Rows(9, 0, 3)),  # a slice of the flattened tokens: it starts in the middle of a sample
    (Rows(9, 3, 5), Rows(4, 0, 50), Rows(9, 0, 3)),
    (Rows(4, 5, 0), Rows(9, 5, 5)),
]


@for_each("rows", PART_OF_SAMPLE)
def test_any_rows_are_part_of_the_whole(rows: tuple[Rows, ...]) -> None:
    samples = {sample: mask(DROPOUT, whole(50, sample), 31) for sample in (4, 9)}
    expected = torch.cat([samples[r.sample][r.first : r.first + r.count] for r in rows])
    assert torch.equal(mask(DROPOUT, rows, 31), expected)


def test_a_row_does_not_depend_on_its_length() -> None:
    assert torch.equal(mask(DROPOUT, whole(9, 2), 100)[:, :37], mask(DROPOUT, whole(9, 2), 37))


@for_each("columns", [257, CORE_ELEMENTS // 4, 2 * CORE_ELEMENTS])
def test_chunks_do_not_show(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several, the last of them shorter; rows longer than a chunk."""
    rows = (Rows(0, 3, 2 + CORE_ELEMENTS // columns), Rows(1, 0, 2 + CORE_ELEMENTS // columns))
    found = mask(DROPOUT, rows, columns)
    assert torch.equal(found, torch.cat([mask(DROPOUT, (r,), columns) for r in rows]))
    monkeypatch.setattr("megazero.engine.kernels.dropout.CORE_ELEMENTS", found.numel())
    assert torch.equal(mask(DROPOUT, rows, columns), found)


def test_a_sample_has_its_mask_in_any_micro_batch() -> None:
    together = DROPOUT(torch.ones(3, 5, 8), whole(5, 10, 4, 7))
    for at, sample in enumerate((10, 4, 7)):
        assert torch.equal(DROPOUT(torch.ones(1, 5, 8), whole(5, sample))[0], together[at])
    assert torch.equal(DROPOUT(torch.ones(2, 5, 8), whole(5, 7, 10)), together[[2, 0]])
    assert not torch.equal(together[0], together[1])


@for_each("tp", [2, 3])
def test_a_head_has_its_mask_on_any_rank(tp: int) -> None:
    s, each = 9, 6 // tp
    together = DROPOUT(torch.ones(2, 6, s, s), whole(6 * s, 3, 8))
    parts = [
        DROPOUT(torch.ones(2, each, s, s), tuple(Rows(sample, rank * each * s, each * s) for sample in (3, 8)))
        for rank in range(tp)
    ]
    assert torch.equal(torch.cat(parts, 1), together)
    assert all(not torch.equal(together[:, a], together[:, b]) for a, b in itertools.combinations(range(6), 2))


@for_each("dtype", [torch.float32, torch.bfloat16, torch.float64])
@for_each("heads", [False, True])
def test_backward_uses_the_mask_of_forward(dtype: torch.dtype, heads: bool) -> None:
    shape = (2, 3, 7, 7) if heads else (2, 7, 6)
    rows = (Rows(5, 21, 21), Rows(9, 21, 21)) if heads else (Rows(5, 0, 6), Rows(9, 0, 6))
    x = torch.randn(shape).to(dtype).transpose(-1, -2).requires_grad_()  # not contiguous
    y = DROPOUT(x, rows)
    dy = torch.randn(y.shape).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    made = DROPOUT.mask(x, rows)
    assert made.shape == y.shape == x.shape and made.dtype == y.dtype == dx.dtype == dtype
    assert set(made.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75, dtype=torch.float64).to(dtype))}
    exact = (made != 0) / torch.tensor(0.75, dtype=torch.promote_types(dtype, torch.float32))  # bf16 is rounded once
    assert torch.equal(y, (x * exact).to(dtype)) and torch.equal(dx, (dy * exact).to(dtype))


def test_no_mask_is_kept_for_backward() -> None:
    saved = []
    x = torch.ones(2, 3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        DROPOUT(x, whole(3, 0, 1))
    assert not saved


@for_each("heads", [1, 4])
def test_what_is_not_a_number_stays_so(heads: int) -> None:
    """Dropout hides no overflow, as x * mask does not."""
    x = torch.full((1, heads, 5, 8), math.nan)
    assert DROPOUT(x, whole(5 * heads, 0)).isnan().all()


@for_each("probability", [1e-3, 0.1, 0.5, 0.9])
def test_it_keeps_as_many_as_it_says(probability: float) -> None:
    """In all, in each row and in each column; the spread over rows and over columns is that of independent draws."""
    x = kept(Dropout(probability, SEED, 0, "mlp"))
    assert abs(deviations(x)) < 4
    for dim in (0, 1):
        sums = x.sum(dim).double() / math.sqrt(x.shape[dim])  # of deviation 1 each
        skew = 0.5 / math.sqrt(min(probability, 1 - probability) * x.shape[dim])  # how far from normal their tail is
        assert float(sums.abs().max()) < 5 * (1 + skew)
        spread = sums.square() - 1  # its variance: 2, plus a fourth moment's part if few are dropped
        assert abs(float(spread.mean())) < 4 * math.sqrt((2 + 4 * skew**2) / len(sums))
    made = mask(Dropout(probability, SEED, 0, "mlp"), whole(512, 0, 1), 512)
    assert abs(float(made.double().mean()) - 1) < 4 * math.sqrt(probability / (1 - probability) / made.numel())
    assert made.max() == torch.tensor(1 / (1 - probability))


def test_the_ends_of_what_may_be_asked_for() -> None:
    assert (mask(Dropout(1e-12, SEED, 0, "mlp"), whole(100, 0), 100) == 1).all()
    assert (mask(Dropout(1 - 1e-12, SEED, 0, "mlp"), whole(100, 0), 100) == 0).all()


def test_every_sample_keeps_as_many() -> None:
    made = mask(DROPOUT, whole(16, *range(1000)), 64).view(1000, -1)
    rate = ((made != 0).double().mean(1) - 0.75) / math.sqrt(0.75 * 0.25 / made.shape[1])
    assert float(rate.abs().max()) < 4.5
    assert abs(float(rate.square().mean()) - 1) < 4 * math.sqrt(2 / 1000)


@for_each("probability", [0.1, 0.5])
def test_neighbours_know_nothing_of_each_other(probability: float) -> None:
    """Along columns, along rows, and aslant."""
    x = kept(Dropout(probability, SEED, 3, "mlp"))
    for row, column in itertools.product((0, 1, 2, 3, 64, 256), (0, 1, 2, 3, 5, 8, 64, 233, 256)):
        if row or column:
            a, b = x[row:, column:], x[: len(x) - row, : x.shape[1] - column]
            assert abs(deviations(a * b)) < 4, (row, column)
            a, b = x[row:, : x.shape[1] - column], x[: len(x) - row, column:]
            assert abs(deviations(a * b)) < 4, (row, -column)


@for_each("axis", ["eight columns", "eight rows", "two rows of four columns"])
def test_every_pattern_is_as_frequent(axis: str) -> None:
    """Chi squared over the 256 patterns of eight neighbours: no relation between two, three, ... of them."""
    rows, columns = {"eight columns": (1, 8), "eight rows": (8, 1), "two rows of four columns": (2, 4)}[axis]
    x = kept(Dropout(0.5, SEED, 3, "mlp"))
    parts = [x[i::rows, j::columns] > 0 for i in range(rows) for j in range(columns)]
    pattern = sum(part.long() << i for i, part in enumerate(parts)).flatten()
    found, expected = torch.bincount(pattern, minlength=256).double(), pattern.numel() / 256
    chi_squared = float(((found - expected) ** 2 / expected).sum())
    assert abs(chi_squared - 255) < 4 * math.sqrt(2 * 255)


OTHERS = {
    "sample": (DROPOUT, 1),
    "far sample": (DROPOUT, 1 << 40),
    "layer": (replace(DROPOUT, layer=4), 0),
    "embedding": (replace(DROPOUT, layer=-1), 0),
    "site": (replace(DROPOUT, site="attention"), 0),
    "seed": (replace(DROPOUT, seed=SEED + 1), 0),
}


@for_each("name", OTHERS)
def test_every_coordinate_gives_another_mask(name: str) -> None:
    """Unrelated to the first, also where one is moved by a row or a column."""
    x, y = kept(DROPOUT), kept(*OTHERS[name])
    for row, column in itertools.product((0, 1), (0, 1)):
        assert abs(deviations(x[row:, column:] * y[: len(x) - row, : x.shape[1] - column])) < 4
    assert torch.equal(mask(replace(DROPOUT), whole(5, 0), 8), mask(DROPOUT, whole(5, 0), 8))


def test_the_masks_are_those_of_yesterday_and_of_any_device() -> None:
    """Compute the formula of the note in Python's integers; rows up to the last that there may be."""
    full, probability = 1 << 32, 0.3

    def mix(x: int) -> int:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0x7FEB352D)):
            x = (x ^ x >> shift) * factor % full
        return x

    def is_kept(sample: int, row: int, column: int) -> bool:
        key = seed_of(SEED, "dropout", sample, 2, "mlp")
        a = mix(row ^ key % full)
        x = (a + column * 0x9E3779B1) % full
        x = (x ^ x >> 16) * 0x7FEB352D % full ^ mix(row ^ key >> 32)
        x = (x ^ x >> 15) * 0x846CA68B % full
        return (x ^ 1 << 31) < (1 - probability) * full  # compared as signed numbers

    rows = (Rows(0, 0, 4), Rows(77, 2**31 - 4, 3))
    expected = [[is_kept(r.sample, r.first + i, column) for column in range(50)] for r in rows for i in range(r.count)]
    dropout = Dropout(probability, SEED, 2, "mlp")
    assert (mask(dropout, rows, 50) != 0).tolist() == expected
    with pytest.raises(AssertionError):
        mask(dropout, (Rows(77, 2**31 - 4, 4),), 50)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@for_each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_makes_the_same_masks(dtype: torch.dtype) -> None:
    rows = (Rows(3, 5, 300), Rows(4, 0, 212))
    x = torch.randn(512, 1000).to(dtype)
    assert torch.equal(DROPOUT(x.cuda(), rows).cpu(), DROPOUT(x, rows))


def test_without_dropout_nothing_happens() -> None:
    x = torch.ones(2, 3, 4)
    assert Dropout(0.0, SEED, 0, "mlp")(x, whole(3, 0, 1)) is x
    assert DROPOUT(x, None) is x  # evaluation


@for_each("rows", [(), whole(3, 0), whole(4, 0, 1), (Rows(0, -1, 3), Rows(1, 0, 3))])
def test_every_row_needs_a_number(rows: tuple[Rows, ...]) -> None:
    with pytest.raises(AssertionError):
        DROPOUT(torch.ones(2, 3, 4), rows)
