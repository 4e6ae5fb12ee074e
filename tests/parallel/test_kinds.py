"""Blocks that differ by number: every second one has a wider MLP, wider heads, and norms of its queries and keys.

They are declared, traced and priced once per kind, and every layout is the same model.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest

from megazero.engine.model.block import BLOCK_CLASSES, MLP, SequentialBlock
from megazero.engine.model.layers.attention import GroupedAttention
from megazero.engine.model.layers.context import Context
from megazero.engine.model.layers.norm import LayerNorm, RMSNorm
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.zero_policy import DENSE
from megazero.flags.cli import parse
from megazero.flags.config import ModelConfig
from megazero.flags.pipeline_split import layer_costs, rank_costs
from megazero.planner.search.candidates import Sizes
from megazero.planner.search.search import ClosedTerms
from megazero.planner.time.devices import load_device
from megazero.planner.trace.trace import model_flops
from tests.helpers.families import of_family
from tests.helpers.rings import by_default
from tests.helpers.traces import trace_layers
from tests.parallel.cases import Case, Outcome, train
from tests.parallel.test_parity import TOLERANCE, check_bytes, fp64, relative_error

HEAD_DIM, FFN = 14, 102  # not h / n = 8, not the model's 96
MODEL = ModelConfig(
    num_layers=5,
    hidden_size=48,
    ffn_hidden_size=96,
    num_attention_heads=6,
    num_query_groups=2,
    seq_length=11,
    vocab_size=101,
    init_method_std=0.05,
    **of_family("llama") | {"parallel_norms": "alternating"},
)


# FLOPs per token of a block's forward: 6 heads, 2 groups of keys and values; up and down, or gate, value and down
NARROW = 2 * 48 * (2 * 6 + 2 * 2) * 8 + 2 * 2 * 48 * 96 + 4 * 11 * 6 * 8
WIDER = 2 * 48 * (2 * 6 + 2 * 2) * HEAD_DIM + 2 * 3 * 48 * FFN + 4 * 11 * 6 * HEAD_DIM


class AlternatingBlock(SequentialBlock):
    def __init__(self, model: ModelConfig, number: int, context: Context) -> None:
        super().__init__(model, number, context)
        self.norm1, self.norm2 = LayerNorm(model, context), RMSNorm(model, context)
        if self.kind(model, number):
            wide = replace(model, kv_channels=HEAD_DIM, qk_layernorm=True, ffn_hidden_size=FFN)
            self.attention, self.mlp = GroupedAttention(wide, number, context), MLP(wide, context)
        else:
            self.attention = GroupedAttention(model, number, context)
            self.mlp = MLP(model, context, "gelu-tanh", bias=True)

    @staticmethod
    def kind(model: ModelConfig, number: int) -> bool:
        return WIDE[model.parallel_norms](model, number)


WIDE: dict[str, Callable[[ModelConfig, int], bool]] = {
    "alternating": lambda model, number: number % 2 == 1,
    "last": lambda model, number: number + 3 >= model.num_layers,
}


@contextlib.contextmanager
def known() -> Iterator[None]:
    """Within: the table of blocks has those of this file."""
    with patch.dict(BLOCK_CLASSES, dict.fromkeys(WIDE, AlternatingBlock)):
        yield


@pytest.fixture(autouse=True)
def known_here() -> Iterator[None]:
    with known():
        yield


def train_known(rank: int, case: Case) -> Outcome:
    with known():
        return train(rank, case)


CASES = [
    Case(tp=2, zero=1, model=MODEL),
    Case(tp=2, sp=True, recompute="selective", model=replace(MODEL, hidden_dropout=0.1, attention_dropout=0.2)),
    Case(pp=2, dp=2, zero=3, recompute="full", model=MODEL),
    Case(pp=2, tp=2, zero=1, schedule="zero-bubble", micro_batches=3, model=MODEL),
    Case(dp=2, zero=3, frozen=("blocks.0.*", "blocks.3.attention.*"), model=MODEL),
]


@functools.cache
def alone(case: Case) -> Outcome:
    """One process, which is no special case of a layout."""
    return train(0, case._replace(pp=1, dp=1, tp=1, zero=0, sp=False, recompute="none", schedule="1f1b"))


@pytest.mark.parametrize("case", by_default(map(fp64, CASES), 1), ids=str)
def test_a_model_of_two_kinds_is_the_same_in_every_layout(case: Case, ranks) -> None:
    wanted = alone(case)
    outcomes = ranks(case.world).run(train_known, case)
    for outcome in outcomes:
        assert relative_error(outcome.losses, wanted.losses) < TOLERANCE
        assert relative_error(outcome.norms, wanted.norms) < TOLERANCE
    check_bytes(case, outcomes)


def test_each_kind_is_declared_once() -> None:
    layers = declare(MODEL)
    assert [kind.name for kind in layers.kinds.values()] == [
        "token_embedding",
        *("blocks.0", "blocks.1", "blocks.0", "blocks.1", "blocks.0"),
        "head",
    ]
    shapes = {spec.name: spec.shape for spec in layers.params()}
    assert shapes["blocks.3.attention.query.weight"] == (6, HEAD_DIM, 48)
    assert shapes["blocks.3.attention.proj.weight"] == (48, 6 * HEAD_DIM)
    assert shapes["blocks.3.attention.query_norm.weight"] == (HEAD_DIM,)
    assert shapes["blocks.3.mlp.up.weight"] == (2, FFN, 48) and shapes["blocks.2.mlp.up.weight"] == (96, 48)
    assert "blocks.2.attention.query_norm.weight" not in shapes


@pytest.mark.parametrize(("architecture", "num_wide"), [("alternating", 2), ("last", 3)])
def test_flops_are_those_of_each_kind(architecture: str, num_wide: int) -> None:
    model = replace(MODEL, parallel_norms=architecture)
    assert model_flops(model, 7) == 3 * 7 * 11 * ((5 - num_wide) * NARROW + num_wide * WIDER + 2 * 101 * 48)


def test_each_kind_is_traced_once() -> None:
    config, layout = Case(tp=2, model=MODEL).resolved()
    costs = trace_layers(config, layout, 0)
    assert costs["blocks.0"] is costs["blocks.4"] and costs["blocks.1"] is costs["blocks.3"] != costs["blocks.0"]
    found, mean = layer_costs(declare(MODEL), MODEL, config.activations), (3 * NARROW + 2 * WIDER) / 5
    assert found.blocks == pytest.approx([each / mean for each in (NARROW, WIDER, NARROW, WIDER, NARROW)])
    assert found.head == pytest.approx(2 * 101 * 48 / mean)


def test_a_search_ranks_layouts_by_the_mean_block() -> None:
    config = parse("--plan-search --world-size 2 --global-batch-size 4 --device-type h100-80gb".split())
    saved = []
    for layers in (1, 2, 5):
        model = replace(MODEL, num_layers=layers)
        terms = ClosedTerms(replace(config, model=model), 2, load_device("h100-80gb"))
        one = Sizes(1, 1)
        saved.append(terms.block(one, 2, False, False)._replace(hidden=0) + terms.numel(one)[DENSE][:1])
    narrow, pair, five = saved
    for one, two, all_five in zip(narrow, pair, five, strict=True):
        wide = 2 * two - one
        assert 5 * all_five == pytest.approx(3 * one + 2 * wide, abs=6 if isinstance(one, int) else 0, rel=1e-9)
    assert pair[2] > narrow[2] and pair[-1] > narrow[-1]


def test_stages_are_split_by_the_cost_of_each_block() -> None:
    """Three wide blocks at the end, of twelve: half of the cost is behind the seventh."""
    config, layout = Case(pp=2, model=replace(MODEL, num_layers=12, vocab_size=16, parallel_norms="last")).resolved()
    costs = layer_costs(declare(config.model), config.model, config.activations)
    assert layout.split == (7, 5)
    uneven, even = (max(rank_costs(split, layout.placement, costs)) for split in ((7, 5), (6, 6)))
    assert uneven < even == pytest.approx(sum(costs.blocks[6:]) + costs.head)
