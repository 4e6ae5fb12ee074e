"""The table of parameters: shapes, cuts, counts, and the stage of each."""

import math
from dataclasses import replace

import pytest

from megazero.checkpoint.regions import Region, coverage_fault
from megazero.engine.model.stage import HEAD, POSITION_EMBEDDING, TOKEN_EMBEDDING, declare
from megazero.engine.plan.layout.layers import stage_units
from megazero.engine.plan.layout.parameters import ParamSpec, unit_layout
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import ModelConfig
from megazero.planner.parameter_counts import num_parameters
from tests.helpers.table import for_each

# 840 heads of one dim: every tp from 1 to 8 divides them.
MODEL = ModelConfig(num_layers=7, hidden_size=840, num_attention_heads=840, seq_length=13, vocab_size=50257)
PRIMES = (2, 61, 257, 8191, 50257)


def every_spec(model: ModelConfig) -> dict[str, ParamSpec]:
    return {spec.name: spec for specs in stage_units(declare(model), Layout(), 0).values() for spec in specs}


@for_each("tp", range(1, 9))
@for_each("vocab_size", PRIMES)
def test_local_blocks_tile_the_global_tensor(tp: int, vocab_size: int) -> None:
    model = replace(MODEL, vocab_size=vocab_size, untie_embeddings=True)
    for spec in every_spec(model).values():
        blocks = [spec.local({"tp": rank}, {"tp": tp}) for rank in range(tp)]
        if not spec.sharded:
            assert all(block.shape == block.stored == spec.shape and not any(block.offset) for block in blocks)
            continue
        assert coverage_fault(spec.shape, [Region(b.offset, b.shape) for b in blocks]) is None, spec.name
        assert len({block.stored for block in blocks}) == 1
        for block in blocks:
            assert block.numel == math.prod(block.shape) and block.stored_numel == math.prod(block.stored)
            assert all(0 <= start <= size for start, size in zip(block.offset, spec.shape, strict=True))
            padded = [
                d for d, (true, stored) in enumerate(zip(block.shape, block.stored, strict=True)) if true < stored
            ]
            assert padded in ([], [0]) and (not padded or spec.pads), spec.name
            assert all(0 <= true <= stored for true, stored in zip(block.shape, block.stored, strict=True))
        if spec.pads:
            rows = blocks[0].stored[0]
            assert rows % 64 == 0 and rows * tp < vocab_size + 64 * tp


def test_a_cut_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(AssertionError):
        ParamSpec("w", (10, 3), ((0, "tp"),), True).local({"tp": 0}, {"tp": 3})


@for_each(
    ("layers", "hidden", "heads", "count"),
    [
        (12, 768, 12, 124_439_808),
        (24, 1024, 16, 354_823_168),
        (36, 1280, 20, 774_030_080),
        (48, 1600, 25, 1_557_611_200),
    ],
)
def test_counts_are_gpt2s(layers: int, hidden: int, heads: int, count: int) -> None:
    model = ModelConfig(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=50257)
    assert num_parameters(declare(model)) == count
    assert num_parameters(declare(replace(model, untie_embeddings=True))) == count + 50257 * hidden
    h, f = hidden, 3 * hidden
    narrower = replace(model, ffn_hidden_size=f)
    assert num_parameters(declare(narrower)) == count - layers * (4 * h - f) * (2 * h + 1)


@for_each("untied", [False, True])
def test_stages_partition_the_units(untied: bool) -> None:
    """But for a tied token table, which both ends hold."""
    model = replace(MODEL, untie_embeddings=untied)
    whole = stage_units(declare(model), Layout(), 0)
    assert list(whole) == [
        TOKEN_EMBEDDING,
        POSITION_EMBEDDING,
        *(f"blocks.{layer}" for layer in range(model.num_layers)),
        HEAD,
    ]
    for pp in range(1, model.num_layers + 1):
        stages = [stage_units(declare(model), Layout(pp=pp), stage) for stage in range(pp)]
        held = [name for units in stages for name in units]
        second = [TOKEN_EMBEDDING] if pp > 1 and not untied else []
        assert sorted(held) == sorted([*whole, *second])
        if second:
            assert TOKEN_EMBEDDING in stages[0] and TOKEN_EMBEDDING in stages[-1]
        assert all(specs == whole[name] for units in stages for name, specs in units.items())
        assert [name for name in held if name.startswith("blocks.")] == list(whole)[2:-1]
        assert POSITION_EMBEDDING in stages[0] and HEAD in stages[-1]


def test_names_are_unique_and_say_the_unit() -> None:
    for untied in (False, True):
        units = stage_units(declare(replace(MODEL, untie_embeddings=untied)), Layout(), 0)
        names = [spec.name for specs in units.values() for spec in specs]
        assert len(set(names)) == len(names)
        assert all(spec.name.startswith(f"{unit}.") for unit, specs in units.items() for spec in specs)


def test_what_decays_is_matrices_and_tables() -> None:
    for spec in every_spec(replace(MODEL, untie_embeddings=True)).values():
        assert spec.decays == (spec.name.endswith("weight") and "norm" not in spec.name), spec.name


def test_what_is_cut_is_what_megatron_cuts() -> None:
    cuts = {spec.name.removeprefix("blocks.0."): dict(spec.sharded) for spec in every_spec(MODEL).values()}
    assert {name: dims for name, dims in cuts.items() if dims and "blocks" not in name} == {
        f"{TOKEN_EMBEDDING}.weight": {0: "tp"},
        "attention.qkv.weight": {0: "tp"},
        "attention.qkv.bias": {0: "tp"},
        "attention.proj.weight": {1: "tp"},
        "mlp.up.weight": {0: "tp"},
        "mlp.up.bias": {0: "tp"},
        "mlp.down.weight": {1: "tp"},
    }


def test_initial_distributions_are_gpt2s() -> None:
    model = replace(MODEL, num_layers=8, init_method_std=0.04, untie_embeddings=True)
    for spec in every_spec(model).values():
        if "norm" in spec.name or spec.name.endswith("bias"):
            std, mean = 0.0, float(spec.name.endswith("weight"))
        elif "proj" in spec.name or "down" in spec.name:
            std, mean = 0.01, 0.0  # 0.04 / sqrt(2 x 8)
        else:
            std, mean = 0.04, 0.0
        assert (spec.std, spec.mean) == (std, mean), spec.name


def test_a_units_layout_is_the_same_on_every_tensor_parallel_rank() -> None:
    for tp, dp in ((1, 1), (2, 3), (7, 4)):
        for specs in stage_units(declare(replace(MODEL, vocab_size=257)), Layout(), 0).values():
            sizes = {"tp": tp}
            flat = unit_layout(specs, sizes, dp)
            assert set(flat.windows) == {spec.name for spec in specs}
            for rank in range(tp):
                assert {s.name: s.local({"tp": rank}, sizes).stored_numel for s in specs} == {
                    name: window.numel for name, window in flat.windows.items()
                }
            for spec in specs:
                start = flat.windows[spec.name].start
                assert (start in range(*flat.decayed)) == spec.decays
                assert any(start in range(*r) for r in flat.replicated("tp")) == (not spec.sharded)
