"""Traces of the layers of a pipeline rank."""

from __future__ import annotations

from megazero.config.schema import Config
from megazero.model.stage import declare
from megazero.plan.layout.topology import Layout
from megazero.plan.program.rank_spec import rank_spec
from megazero.plan.sizes import LayerSizes
from megazero.price.trace.trace import layer_sizes


def trace_layers(config: Config, layout: Layout, pp: int, device_type: str = "cpu") -> dict[str, LayerSizes]:
    """Trace every layer of pipeline rank `pp`, each kind once; `config` is resolved."""
    return layer_sizes(config, layout, rank_spec(config, layout, pp, declare), device_type)
