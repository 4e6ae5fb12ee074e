"""Traces of the layers of a pipeline rank."""

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.flags.config import Config
from megazero.planner.sizes import LayerSizes
from megazero.planner.trace.trace import layer_sizes


def trace_layers(config: Config, layout: Layout, pp: int, device_type: str = "cpu") -> dict[str, LayerSizes]:
    """Trace every layer of pipeline rank `pp`, each kind once; `config` is resolved."""
    return layer_sizes(config, layout, rank_spec(config, layout, pp, declare), device_type)
