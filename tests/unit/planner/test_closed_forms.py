"""Formulas that stand for a trace where one would take too long: they hold for every row and every kind of block."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.layers import LayerKind, Layers, Use, pass_costs
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.rank_spec import PlannedLayer
from megazero.flags.config import ActivationConfig
from megazero.flags.pipeline_split import layer_costs
from megazero.flags.resolve import resolve
from megazero.planner.bytes.capacity import estimated, least
from megazero.planner.bytes.estimate import stage_bytes
from megazero.planner.search.candidates import candidates
from megazero.planner.search.search import ClosedTerms
from megazero.planner.time.devices import load_device
from megazero.planner.trace.kernel_records import Events, Operator
from megazero.planner.trace.trace import _matrix_flops, trace
from tests.helpers.rows import ROWS, known_blocks, options_of, parse_as
from tests.helpers.table import for_each
from tests.parallel.test_kinds import WIDE

pytestmark = pytest.mark.second


SIZES = "--num-layers 6 --hidden-size 64 --num-attention-heads 8 --kv-channels 12 --ffn-hidden-size 200 --seq-length 32"
SEARCHED = f"{SIZES} --plan-search --world-size 8 --global-batch-size 16 --device-type h100-80gb --precision bf16"
H100 = load_device("h100-80gb")


def blocks(layers: Layers) -> Iterator[LayerKind]:
    yield from {kind.name: kind for kind in layers.kinds.values() if kind.end is None}.values()


def flops(events: Events) -> int:
    return sum(event.product.flops for event in events if isinstance(event, Operator) and event.product is not None)


@for_each("architecture", ROWS)
def test_flops_of_a_layer_are_those_of_its_trace(architecture: str) -> None:
    """Stages are split by them."""
    with known_blocks():
        for options in options_of(architecture):
            config = parse_as(architecture, f"{SIZES} --vocab-size 130 {options}")
            model, layers = replace(config.model, attention_softcap=0.0), declare(config.model)  # fused attention
            mean = 0.0
            for kind in blocks(layers):
                traced = _matrix_flops(model, kind.name, Use.LAYER)
                assert 32 * kind.matrix_flops == traced, kind.name
                share = sum(layers.kinds[name] is kind for name in layers.blocks) / len(layers.blocks)
                mean += share * (traced + 32 * kind.score_flops)
            costs = layer_costs(layers, model, ActivationConfig())
            assert costs.head == pytest.approx(_matrix_flops(model, "head", Use.HEAD) / mean)


@for_each("recompute", ["none", "selective", "full"])
@for_each("architecture", ROWS)
def test_costs_of_passes_are_those_of_their_trace(architecture: str, recompute: str) -> None:
    """Zero-bubble schedules plan by them. With explicit attention they are equal; a full recompute may omit
    the last products, which the formula counts."""
    line = f"{SIZES} --vocab-size 130 --attention-dropout 0.1 --recompute {recompute} --precision fp64"
    with known_blocks():
        config, _ = resolve(parse_as(architecture, line), 1, 0, declare)
        layers = declare(config.model)
        kinds = {kind.name for kind in blocks(layers)}
        layer = {name: PlannedLayer(name, (), Use.LAYER, True, True, name) for name in kinds}
        traced = {name: trace(config, Layout(), layer[name], {}, "cpu", at_once=False).events for name in kinds}
        found = [traced[layers.kinds[name].name] for name in layers.blocks]
        forward = sum(flops(events.forward) for events in found)
        inputs = sum(flops(events.recompute) + flops(events.backward) for events in found) / forward
        weights = sum(flops(events.weight_gradients) for events in found) / forward
        costs = pass_costs(layers, config.activations)
        assert costs[::2] == pytest.approx((1.0, weights))
        if recompute == "full":
            assert inputs <= costs[1] * (1 + 1e-9) < inputs + 1
        else:
            assert costs[1] == pytest.approx(inputs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("vocabulary", "tried"), [(130, 1), *(pytest.param(v, 8, marks=pytest.mark.slow) for v in (129, 5000))]
)
@pytest.mark.parametrize("architecture", ROWS)
def test_bounds_of_memory_are_bounds(architecture: str, vocabulary: int, tried: int) -> None:
    """A search leaves layouts out by one, and a run is refused by another; neither is more than the estimate."""
    rng, (*_, options) = random.Random(f"{architecture} {vocabulary}"), options_of(architecture)
    with known_blocks():
        for num_layers in (5, 9) if tried > 1 else [rng.choice((5, 9))]:
            line = f"{SEARCHED} {options} --num-layers {num_layers} --vocab-size {vocabulary}"
            config = parse_as(architecture, line)
            terms = ClosedTerms(config, 8, H100)
            # the wider blocks of some rows are shared by two ranks only
            found = [c for c in candidates(config, 8, H100) if c.tp <= 2 or architecture not in WIDE]
            for candidate in rng.sample(found, tried):
                changed, layout = resolve(candidate.apply(config), 8, 0, declare)
                stages = range(layout.pp)
                peak = max(stage_bytes(changed, layout, stage, "cuda").peak for stage in stages)
                assert terms.memory(candidate) <= peak, (candidate, layout.split)
                for stage in stages:
                    bound, whole = least(changed, layout, stage), estimated(changed, layout, stage, "cuda")
                    assert bound.total <= whole.total, (candidate, stage)
