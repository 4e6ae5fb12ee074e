"""Bytes and traffic of ranks next to the plan's, which are equal to the byte."""

from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import Config
from megazero.planner.bytes.estimate import estimate
from megazero.verify.training import Trained

# Bytes that depend on the loads of a rank's experts.
UNBALANCED = ("ep", "activation_checkpoints", "buffers", "peak", "host")


def unplanned(config: Config, layout: Layout, on_gpu: bool) -> tuple[str, ...]:
    """Return the kinds of bytes that depend on the tokens of a step, or on the allocator of a GPU.

    Experts are loaded evenly if a token passes all of them, and if ranks have equally many tokens.
    """
    model = config.model
    drops = model.num_experts > 0 and model.expert_capacity < model.seq_length
    all_chosen = model.moe_router_topk == model.num_experts and model.seq_length % layout.cp == 0
    even_drops = not drops or (layout.cp == 1 and layout.etp == layout.tp)
    even = (layout.ep == 1 and not drops) or (all_chosen and even_drops)
    return (*(() if even else UNBALANCED), *(("peak",) if on_gpu else ()))


def byte_difference(
    config: Config, layout: Layout, ranks: list[Trained], on_gpu: bool, traffic: bool
) -> tuple[str, str]:
    """Return the place of the first bytes that are not the planned ones, and both numbers; empty texts if all are.

    Steps of a smaller batch than the planned one are left out.
    """
    skipped = unplanned(config, layout, on_gpu)
    for rank, trained in enumerate(ranks):
        planned = estimate(config, layout, rank, needs_staging_buffer=not on_gpu)[traffic]
        for number, step in enumerate(trained.steps, 1):
            measured = step.traffic if traffic else step.memory
            for kind in (kind for kind in planned if kind not in skipped):
                if step.samples == config.training.global_batch_size and measured[kind] != planned[kind]:
                    return f"{kind}, rank {rank}, step {number}", f"{measured[kind]} bytes, planned {planned[kind]}"
    return "", ""
