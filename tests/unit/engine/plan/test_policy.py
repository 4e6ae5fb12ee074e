"""ZeRO policy: sharded states of a stage, uses of units, number of buckets."""

from dataclasses import replace

from megazero.engine.model.stage import HEAD, POSITION_EMBEDDING, TOKEN_EMBEDDING, declare
from megazero.engine.plan.layout.flat_layout import equal_ranges
from megazero.engine.plan.layout.layers import Use
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.layout.zero_policy import Buckets, ZeroPolicy, plan_buckets
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.flags.config import Config, ModelConfig, ZeroConfig
from megazero.planner.layouts import rank_layers
from tests.helpers.table import for_each

CUT = ZeroPolicy(True, True, True)


def test_a_stage_is_three_booleans() -> None:
    cuts = [ZeroPolicy.for_stage(ZeroConfig(zero_stage=stage), 2) for stage in range(4)]
    assert [(c.optimizer, c.gradients, c.parameters) for c in cuts] == [
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    ]


def test_one_rank_has_nothing_to_cut() -> None:
    assert {ZeroPolicy.for_stage(ZeroConfig(zero_stage=stage), 1) for stage in range(4)} == {
        ZeroPolicy(False, False, False)
    }


@for_each("untied", [False, True])
def test_uses(untied: bool) -> None:
    """A layer uses its own unit, a tied head the token table too; a last stage that holds it looks nothing up."""
    model = ModelConfig(num_layers=4, hidden_size=8, num_attention_heads=2, vocab_size=9, untie_embeddings=untied)
    for pp in (1, 2, 4):
        for stage in range(pp):
            spec = rank_spec(replace(Config(), model=model), Layout(pp=pp), stage, declare)
            uses = {name: (layer.use, layer.units) for name, layer in spec.layers.items()}
            expected = {}
            if stage == 0:
                expected |= {
                    TOKEN_EMBEDDING: (Use.LOOKUP, (TOKEN_EMBEDDING,)),
                    POSITION_EMBEDDING: (Use.LOOKUP, (POSITION_EMBEDDING,)),
                }
            for layer in rank_layers(Layout(pp=pp), 4, stage):
                expected[f"blocks.{layer}"] = (Use.LAYER, (f"blocks.{layer}",))
            if stage == pp - 1:
                expected[HEAD] = (Use.HEAD, (HEAD,) if untied else (HEAD, TOKEN_EMBEDDING))
            assert list(uses.items()) == list(expected.items())
            assert {name for _, names in uses.values() for name in names} == set(spec.units), "an unused unit"


def test_a_choice_of_when() -> None:
    once = ZeroConfig(zero_stage=3, zero_reduce_every="step", zero_gather_every="step")
    assert ZeroPolicy.for_stage(once, 2) == ZeroPolicy(True, False, True, gathers_once=True)
    assert ZeroPolicy.for_stage(once, 1) == ZeroPolicy(False, False, False)


def test_buckets() -> None:
    """At most the size asked for, in whole multiples of ALIGN for every rank; never less than that; none is idle."""
    two = [equal_ranges(6400, 2), equal_ranges(640, 2)]
    assert plan_buckets(10**6, two, 0, overlap=True) == Buckets(3200, 1, False, 3200, 0)
    assert plan_buckets(6400, two, 1, overlap=True) == Buckets(3200, 1, False, 3200, 0)
    assert plan_buckets(1000, two, 0, overlap=False) == Buckets(448, 1, True, 448, 896)
    assert plan_buckets(1, [equal_ranges(6400, 4)], 0, overlap=True) == Buckets(64, 2, True, 64, 256)
    assert plan_buckets(10**6, [], 0, overlap=True).columns == 0


def test_communication_buffers_are_constant() -> None:
    """CB: for 8 times the layers, and for 4 times the width, once a unit is larger than a bucket."""
    blocks = [equal_ranges(12 * h * h // 64 * 64, 8) for h in (512, 1024, 2048)]
    assert len({plan_buckets(100_000, [block], 0, True) for block in blocks}) == 1
    assert plan_buckets(100_000, blocks[:1] * 8, 0, True) == plan_buckets(100_000, blocks[:1], 0, True)
