"""What a ZeRO stage cuts, how layers use their units, how many slots the ring has."""

from __future__ import annotations

import pytest

from megazero.config import ModelConfig
from megazero.layout import Layout
from megazero.parameters import HEAD, POSITION, TOKEN, stage_units
from megazero.policy import RING_DEPTH, Use, ZeroPolicy, layer_uses, ring_slots


def test_a_stage_is_three_booleans() -> None:
    cuts = [ZeroPolicy.for_stage(stage, 2) for stage in range(4)]
    assert [(c.optimizer, c.gradients, c.parameters) for c in cuts] == [
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    ]
    with pytest.raises(AssertionError):
        ZeroPolicy.for_stage(4, 2)


def test_one_rank_has_nothing_to_cut() -> None:
    assert {ZeroPolicy.for_stage(stage, 1) for stage in range(4)} == {ZeroPolicy(False, False, False)}


@pytest.mark.parametrize("untied", [False, True])
def test_uses(untied: bool) -> None:
    """A layer uses its own unit, a tied head the token table too; a last stage that holds it looks nothing up."""
    model = ModelConfig(num_layers=4, hidden_size=8, num_attention_heads=2, vocab_size=9, untie_embeddings=untied)
    for pp in (1, 2, 4):
        for stage in range(pp):
            units = stage_units(model, Layout(pp=pp), stage)
            uses = layer_uses(units, stage == 0, not untied)
            expected = {}
            if stage == 0:
                expected |= {TOKEN: (Use.LOOKUP, [TOKEN]), POSITION: (Use.LOOKUP, [POSITION])}
            for layer in Layout(pp=pp).layers(4, stage):
                expected[f"blocks.{layer}"] = (Use.LAYER, [f"blocks.{layer}"])
            if stage == pp - 1:
                expected[HEAD] = (Use.HEAD, [HEAD] if untied else [HEAD, TOKEN])
            assert list(uses.items()) == list(expected.items())
            assert {name for _, names in uses.values() for name in names} == set(units), "a unit nobody uses"


def test_an_unknown_unit_is_an_error() -> None:
    with pytest.raises(AssertionError):
        layer_uses(["surprise"], True, True)


def test_what_a_use_keeps() -> None:
    """(kept from forward to backward, needed in backward)"""
    assert {use.name: use.value for use in Use} == {
        "LOOKUP": (False, False),
        "LAYER": (False, True),
        "HEAD": (True, True),
    }


def test_ring_slots() -> None:
    """A few of each size, however many units have it; so the sum does not grow with the layers."""
    assert RING_DEPTH == 2
    assert ring_slots([]) == {}
    assert ring_slots([64, 128, 128, 128, 128, 192, 192]) == {64: 1, 128: 2, 192: 2}
    assert ring_slots([64] + [128] * 100) == ring_slots([64] + [128] * 2)
