"""Layers of pipeline stages: by cost, and as given."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout, even_split
from megazero.engine.plan.schedule.schedules import placement
from megazero.flags.config import ActivationConfig, Config, ModelConfig, ParallelConfig
from megazero.flags.pipeline_split import LayerCosts, layer_costs, rank_costs, split_by_cost
from megazero.flags.resolve import resolve
from megazero.planner.bytes.bytes_report import bytes_table, split_line
from megazero.planner.layouts import layout_words, rank_layers
from tests.helpers.table import for_each

SMALL = ModelConfig(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024, vocab_size=50257)


def splits(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every split in which only the last stage may have no layer."""
    for cuts in itertools.combinations(range(1, layers + 1), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, layers)))


@for_each("head", [0.0, 0.17, 0.9, 2.5, 6.0])
@for_each("v_shaped", [False, True])
@for_each(("pp", "chunks"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2)])
def test_no_split_has_a_faster_busiest_rank(pp: int, chunks: int, v_shaped: bool, head: float) -> None:
    """All splits are tried; the even one may be 1 % slower."""
    place = placement(pp, chunks, v_shaped)
    for layers in range(pp * chunks, 10):
        cost = LayerCosts(0.01, (1.0,) * layers, head)
        best = min(max(rank_costs(s, place, cost)) for s in splits(layers, pp * chunks))
        found = split_by_cost(place, cost)
        assert sum(found) == layers and 0 not in found[:-1]
        assert max(rank_costs(found, place, cost)) <= best / 0.99 + 1e-9
        if head == 0.0:
            assert found == even_split(layers, pp * chunks)


@for_each("costs", [(0.5, 1.5) * 8, (1.75,) * 4 + (0.75,) * 12, (0.5,) * 12 + (2.5,) * 4])
@for_each(("pp", "chunks"), [(2, 1), (4, 1), (3, 1), (2, 2)])
def test_blocks_that_differ_are_split_by_their_sums(pp: int, chunks: int, costs: tuple[float, ...]) -> None:
    """The busiest rank is at most a block of the costliest kind slower than by the best of all splits."""
    cost, place = LayerCosts(0.01, costs, 0.9), placement(pp, chunks, False)
    found = split_by_cost(place, cost)
    best = min(max(rank_costs(s, place, cost)) for s in splits(16, pp * chunks))
    assert sum(found) == 16 and 0 not in found[:-1]
    assert best <= max(rank_costs(found, place, cost)) < best + max(costs)
    assert max(rank_costs(found, place, cost)) <= max(rank_costs(even_split(16, pp * chunks), place, cost))


def test_the_head_is_counted_in_blocks_by_its_flops() -> None:
    """GPT-2 small: 2 v h = 77.2 M FLOPs per token against 24 h^2 + 4 s h = 17.3 M; 3/4 of it if blocks recompute."""
    cost = layer_costs(declare(SMALL), SMALL, ActivationConfig())
    assert cost.head == pytest.approx(77.19 / 17.30, rel=1e-3) and cost.embedding < 1e-3
    assert layer_costs(declare(SMALL), SMALL, ActivationConfig(recompute="full")).head == pytest.approx(
        0.75 * cost.head
    )
    assert split_by_cost(placement(4, 1, False), cost) == (4, 4, 4, 0)
    # in turn, rank 0: 8 blocks; rank 1: 4, and 4.5 for the head. As a V, rank 0: 4, and the head; rank 1: 8
    assert split_by_cost(placement(2, 2, False), cost) == (4, 4, 4, 0)
    assert split_by_cost(placement(2, 2, True), cost) == (4, 4, 4, 0)


def resolved(split: str = "", vocabulary: int = 50257, **parallel: int | str) -> tuple[Config, Layout]:
    parallel = {"pipeline_model_parallel_size": 4} | parallel
    config = Config(
        model=replace(SMALL, vocab_size=vocabulary),
        parallel=replace(ParallelConfig(), pipeline_split=split, **parallel),  # type: ignore[arg-type]
    )
    return resolve(config, 4, 0, declare)


def made(*args: Any, **options: Any) -> Layout:
    return resolved(*args, **options)[1]


def test_a_layout_has_the_split_by_cost_or_as_given() -> None:
    assert made().split == (4, 4, 4, 0) and layout_words(made()) == "pp 4 (layers 4,4,4,0) x dp 1 x tp 1"
    assert made(vocabulary=101).split == ()  # even, which is the default
    assert made("3,3,3,3").split == () and layout_words(made("3,3,3,3")) == "pp 4 x dp 1 x tp 1"
    given = made("0, 5,6,1")
    assert [rank_layers(given, 12, rank) for rank in range(4)] == [[], [*range(5)], [*range(5, 11)], [11]]
    virtual = Layout(pp=2, chunks=2, split=(1, 4, 2, 0))
    assert [rank_layers(virtual, 7, rank) for rank in range(2)] == [[0, 5, 6], [1, 2, 3, 4]]


@for_each(
    ("split", "message"),
    [
        ("4,4,4", r"--pipeline-split 4,4,4 has 3 .* --pipeline-model-parallel-size 4 makes 4; .* such as 3,3,3,3"),
        ("4,4,4,1", r"--pipeline-split 4,4,4,1 has 13 layers, but --num-layers is 12; change .* or use 3,3,3,3"),
        ("6,0,4,2", r"--pipeline-split 6,0,4,2: every stage but the first.* use 3,3,3,3, or fewer stages"),
        ("4,4,4,-0", r"--pipeline-split 4,4,4,-0: must be whole numbers separated by commas, such as 3,3,3,3"),
        ("even", r"--pipeline-split even: must be whole numbers separated by commas, such as 3,3,3,3"),
        ("3,3,3,", r"--pipeline-split 3,3,3,: must be whole numbers"),
    ],
)
def test_a_split_that_does_not_fit_is_refused_with_the_way_out(split: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(split)


def test_virtual_stages_count() -> None:
    with pytest.raises(ValueError, match=r"--pipeline-model-parallel-size 4 x --virtual-pipeline-stages 2 makes 8"):
        made("3,3,3,3", pipeline_schedule="interleaved", virtual_pipeline_stages=2)


@for_each(
    ("chunks", "given", "split"),
    [(1, "3,3,3,3", ()), (2, "2,2,2,2,1,1,1,1", ()), (2, "2,2,2,2,2,1,1,0", (2, 2, 2, 2, 2, 1, 1, 0))],
)
def test_even_virtual_stages_need_no_split(chunks: int, given: str, split: tuple[int, ...]) -> None:
    schedule = "interleaved" if chunks > 1 else "1f1b"
    assert made(given, pipeline_schedule=schedule, virtual_pipeline_stages=chunks).split == split


def test_an_uneven_split_is_reported_with_its_reason() -> None:
    config, layout = resolved()
    assert split_line(config, layout) == (
        "layers per virtual stage: 4,4,4,0; the head costs 4.5 blocks, so that pipeline ranks cost 4.0, 4.0, 4.0, 4.5 "
        "blocks (--pipeline-split changes the layers)"
    )
    assert split_line(config, layout) in bytes_table(config, layout)
    assert split_line(*resolved("3,3,3,3")) == ""
