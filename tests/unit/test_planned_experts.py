"""Plans and searches of models with experts: imbalance, bounds of memory, layouts of experts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megazero.config.cli import parse
from megazero.model.stage import declare
from megazero.plan.layout.layers import stage_units
from megazero.plan.program.rank_spec import rank_spec
from megazero.plan.sizes import LayerSizes
from megazero.price.plan import plan_config
from megazero.price.trace.kernels import LayerEvents, Operator
from megazero.price.trace.trace import trace

# 64 tokens, 2 experts of each: 128 rows, of width 48, in 8 experts of inner width 24
MODEL = (
    "--architecture mixtral --num-layers 2 --hidden-size 48 --num-attention-heads 4 --seq-length 64 --vocab-size 300 "
    "--num-experts 8 --moe-ffn-hidden-size 24 --micro-batch-size 1 --global-batch-size 8 --precision bf16"
)
CLUSTER = "--plan --world-size 4 --device-type h100-80gb"
ROWS = 128


def traced(flags: str) -> tuple[LayerSizes, LayerEvents]:
    config, layout, device = plan_config(parse(f"{MODEL} {CLUSTER} {flags}".split()))
    spec = rank_spec(config, layout, 0, declare)
    specs = stage_units(declare(config.model, layout.tp), layout, 0, ())
    return trace(config, layout, spec.layers["blocks.1"], specs, device.kind)


def grouped(events: LayerEvents) -> Iterator[int]:
    for event in (*events.forward, *events.backward):
        if isinstance(event, Operator) and event.product is not None and "grouped" in event.name:
            yield event.product.flops


@pytest.mark.parametrize(("ep", "given", "factor"), [(2, 1.5, 1.5), (4, 1.25, 1.25), (4, 3, 3), (2, 7, 2), (1, 3, 1)])
def test_the_busiest_rank_computes_and_keeps_more_rows(ep: int, given: float, factor: float) -> None:
    """All rows arrive at one rank at most."""
    flags = f"--expert-model-parallel-size {ep}"
    even, events = traced(flags)
    more, busy = traced(f"{flags} --moe-plan-imbalance {given}")
    products = list(grouped(events))
    inner, h = 24, 48
    assert sum(products) == 9 * 2 * ROWS * inner * h  # gate, value and down; each forward and twice backward
    assert list(grouped(busy)) == [flops * factor for flops in products]
    kept = 8 + 2 * h + 4 + 2 * 3 * inner  # place, row, weight, gate and value before and after the activation
    assert sum(more.saved) - sum(even.saved) == (factor - 1) * ROWS * kept
    # rows sent back, and their gradients; all but those of this rank's own tokens
    back = 2 * h + 2 * h + 4
    away = (ep - 1) / ep * (factor - 1) * ROWS
    sent = sum(each["ep"] for each in (more.forward, more.backward))
    assert sent - sum(each["ep"] for each in (even.forward, even.backward)) == away * back
