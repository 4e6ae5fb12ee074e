"""Replicated weights whose gradient is a sum over tp: an omitted or a needless `summed` is refused by the trace."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from megazero.engine.model.block import BLOCK_CLASSES
from megazero.engine.model.layers.context import Context
from megazero.engine.model.layers.weight import weights_of
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.layers import Use
from megazero.engine.plan.program.rank_spec import PlannedLayer
from megazero.flags.config import Config, ModelConfig
from megazero.flags.resolve import resolve
from megazero.planner.trace.trace import trace
from tests.helpers.rows import ROWS, known_blocks, options_of, parse_as
from tests.helpers.table import for_each

SIZES = "--num-layers 4 --hidden-size 32 --num-attention-heads 8 --seq-length 8 --vocab-size 99 --micro-batch-size 2"
LAYOUTS = ["", "--sequence-parallel", "--recompute selective", "--hidden-dropout 0.1 --attention-dropout 0.1"]


def trace_kinds(config: Config, device_type: str, replicas: int = 1) -> list[str]:
    """Trace each kind of layer, whose weights all train; where tp sums none, in one of the two orders.

    A wrong declaration raises. Returns the names of the parameters.
    """
    config, layout = resolve(config, replicas * config.parallel.tensor_model_parallel_size, 0, declare)
    declared = declare(config.model, layout.tp)
    for kind in {kind.name: kind for kind in declared.kinds.values()}.values():
        layer = PlannedLayer(
            kind.name, (), kind.use, trains=True, passes_gradient=kind.use != Use.LOOKUP, kind=kind.name
        )
        for at_once in (True, False)[: layout.tp]:
            trace(config, layout, layer, {}, device_type, at_once)
    return [spec.name for spec in declared.params()]


def cases(ring: str) -> Iterator[tuple[str, str, str]]:
    """Yield every row, layout and device once, in one of three rings.

    By default, every row is split over tp, with or without --sequence-parallel. In the second ring every row is split
    in both ways, once on each device, and every layout is on both devices, with several rows.
    """
    for row, (at, layout), device in itertools.product(range(len(ROWS)), enumerate(LAYOUTS), range(2)):
        near = (row + at) % 2 == device and (at < 2 or row % 5 == at)
        if ring == ("slow" if not near else "default" if at == row // 2 % 2 else "second"):
            yield [*ROWS][row], layout, ("cpu", "cuda")[device]


def check_row(architecture: str, layout: str, device_type: str, several: bool) -> None:
    """`several`: also without tensor parallelism, where all declarations are right."""
    with known_blocks():
        for options in options_of(architecture):
            for tp in (2, 1) if several else (2,):
                if tp > 1 or "--sequence-parallel" not in layout:
                    line = f"{SIZES} {options} {layout} --tensor-model-parallel-size {tp}"
                    trace_kinds(parse_as(architecture, line), device_type)


@pytest.mark.second
@pytest.mark.long
@pytest.mark.parametrize(
    "ring", ["default", *(pytest.param(ring, marks=getattr(pytest.mark, ring)) for ring in ("second", "slow"))]
)
def test_every_weight_is_declared_as_it_is_used(ring: str) -> None:
    check = functools.partial(check_row, several=ring == "slow")
    for_each(("architecture", "layout", "device_type"), cases(ring))(check)()


EXPERTS = (
    "--num-experts 4 --moe-layer-freq DE --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1 --sequence-parallel "
    "--moe-expert-capacity-factor 1.25 "
    "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --tensor-model-parallel-size 2"
)


@pytest.mark.second
@for_each("recompute", ["none", "selective", "full"])
@for_each("ep", [1, 2, 4])
@for_each("etp", [1, 2])
def test_routers_are_declared_as_they_are_used(ep: int, etp: int, recompute: str) -> None:
    """A difference over tp passes through the exchange of rows over ep."""
    line = f"{SIZES} {EXPERTS} --expert-model-parallel-size {ep} --expert-tensor-parallel-size {etp}"
    found = trace_kinds(parse_as("llama", f"{line} --recompute {recompute}"), "cpu", replicas=4)
    assert any("router" in name for name in found)


FORGOTTEN = [
    ("llama", "--qk-layernorm", "attention.query_norm.weight"),
    ("llama", "--qk-layernorm --num-query-groups 1", "attention.key_norm.weight"),
    ("parallel", "--qk-layernorm", "attention.query_norm.bias"),
    ("llama", "--num-query-groups 1", "attention.kv.weight"),
    ("llama", "--num-query-groups 1 --add-qkv-bias", "attention.kv.bias"),
]
NEEDLESS = [("llama", "", "norm1.weight"), ("parallel", "", "norm.bias"), ("gpt2", "", "mlp.down.bias")]


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.second)])
@for_each("layout", LAYOUTS)
@for_each(("architecture", "options", "path"), [*FORGOTTEN, *NEEDLESS])
def test_a_wrong_declaration_is_refused_by_name(
    architecture: str, options: str, path: str, layout: str, device_type: str
) -> None:
    """In every layout with tensor parallelism; without it, all declarations are right."""
    forgotten = (architecture, options, path) in FORGOTTEN

    placed = ROWS[architecture]["parallel_norms"]

    class Planted(BLOCK_CLASSES[placed]):  # type: ignore[misc]
        def __init__(self, model: ModelConfig, number: int, context: Context) -> None:
            super().__init__(model, number, context)
            weight = next(weight for name, weight in weights_of(self, "") if name == path)
            summed = frozenset[str]() if forgotten else frozenset({"tp"})
            weight.spec = dataclasses.replace(weight.spec, summed=summed)

    said = "so its gradient is a sum over tp; declare it with" if forgotten else "declare it without"
    with patch.dict(BLOCK_CLASSES, {placed: Planted}):
        # another length for each case, because traces and declarations are remembered
        case = [*FORGOTTEN, *NEEDLESS].index((architecture, options, path))
        line = f"{SIZES} {options} {layout} --seq-length {16 + 4 * case}"
        config = parse_as(architecture, line)
        if "--sequence-parallel" not in layout:
            trace_kinds(config, device_type)
        split = dataclasses.replace(config.parallel, tensor_model_parallel_size=2)
        with pytest.raises(AssertionError, match=rf"blocks\.0\.{re.escape(path)} .*{said} summed=\('tp',\)"):
            trace_kinds(dataclasses.replace(config, parallel=split), device_type)
