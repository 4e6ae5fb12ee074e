"""Replicated weights whose gradient is a sum over tp: an omitted or a needless `summed` is refused by the trace."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from megazero.config.architectures import ARCHITECTURES as TRAITS
from megazero.config.cli import parse
from megazero.config.flags import flags
from megazero.config.schema import Config, ModelConfig
from megazero.model.architectures.table import ARCHITECTURES
from megazero.model.layers.block import Architecture, Layer
from megazero.model.layers.context import Context
from megazero.model.layers.weight import weights_of
from megazero.model.stage import declare
from megazero.plan.layout.layers import Use
from megazero.plan.layout.resolve import resolve
from megazero.plan.program.rank_spec import PlannedLayer
from megazero.price.trace.trace import trace

SIZES = "--num-layers 4 --hidden-size 32 --num-attention-heads 8 --seq-length 8 --vocab-size 99 --micro-batch-size 2"
LAYOUTS = ["", "--sequence-parallel", "--recompute selective", "--hidden-dropout 0.1 --attention-dropout 0.1"]


def trace_kinds(config: Config, device_type: str) -> None:
    """Trace each kind of layer; all weights train."""
    config, layout = resolve(config, config.parallel.tensor_model_parallel_size, 0, declare)
    for kind in {kind.name: kind for kind in declare(config.model, layout.tp).kinds.values()}.values():
        layer = PlannedLayer(
            kind.name, (), kind.use, trains=True, passes_gradient=kind.use != Use.LOOKUP, kind=kind.name
        )
        for at_once in (True, False):
            trace(config, layout, layer, {}, device_type, at_once)


def options_of(architecture: str) -> Iterator[str]:
    """Yield its flags as they are, with a group for each head, with one group, and with each of its switches."""
    yield ""
    known = TRAITS[architecture].options
    yield from (f"--{name}" for name in known if flags()[name].kind is bool)
    if "num-query-groups" in known:
        switches = (name for name in ("add-qkv-bias", "qk-layernorm") if name in known)
        yield " ".join(["--num-query-groups 1", *(f"--{name}" for name in switches)])


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", TRAITS)
def test_every_weight_is_declared_as_it_is_used(architecture: str, layout: str, device_type: str) -> None:
    for options in options_of(architecture):
        for tp in (1, 2, 4):
            if tp > 1 or "--sequence-parallel" not in layout:
                line = f"--architecture {architecture} {SIZES} {options} {layout} --tensor-model-parallel-size {tp}"
                trace_kinds(parse(line.split()), device_type)


FORGOTTEN = [
    ("llama", "--qk-layernorm", "attention.query_norm.weight"),
    ("llama", "--qk-layernorm --num-query-groups 1", "attention.key_norm.weight"),
    ("parallel", "--qk-layernorm", "attention.query_norm.bias"),
    ("llama", "--num-query-groups 1", "attention.kv.weight"),
    ("llama", "--num-query-groups 1 --add-qkv-bias", "attention.kv.bias"),
]
NEEDLESS = [("llama", "", "norm1.weight"), ("parallel", "", "norm.bias"), ("gpt2", "", "mlp.down.bias")]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("architecture", "options", "path"), [*FORGOTTEN, *NEEDLESS])
def test_a_wrong_declaration_is_refused_by_name(
    architecture: str, options: str, path: str, layout: str, device_type: str
) -> None:
    """In every layout with tensor parallelism; without it, all declarations are right."""
    made = ARCHITECTURES[architecture]
    forgotten = (architecture, options, path) in FORGOTTEN

    def planted(model: ModelConfig, number: int, context: Context) -> Layer:
        block = made.block(model, number, context)
        weight = next(weight for name, weight in weights_of(block, "") if name == path)
        weight.spec = dataclasses.replace(weight.spec, summed=frozenset() if forgotten else frozenset({"tp"}))
        return block

    said = "so its gradient is a sum over tp; declare it with" if forgotten else "declare it without"
    with (
        patch.dict(ARCHITECTURES, planted=Architecture(planted, made.norm, made.positions, made.kind)),
        patch.dict(TRAITS, planted=TRAITS[architecture]),
    ):
        # another length for each case, because traces and declarations are remembered
        case = [*FORGOTTEN, *NEEDLESS].index((architecture, options, path))
        line = f"{SIZES} {options} {layout} --seq-length {16 + 4 * case}"
        config = parse(line.split())
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, architecture="planted"))
        if "--sequence-parallel" not in layout:
            trace_kinds(config, device_type)
        split = dataclasses.replace(config.parallel, tensor_model_parallel_size=2)
        with pytest.raises(AssertionError, match=rf"blocks\.0\.{re.escape(path)} .*{said} summed=\('tp',\)"):
            trace_kinds(dataclasses.replace(config, parallel=split), device_type)
