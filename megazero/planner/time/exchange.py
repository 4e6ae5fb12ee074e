"""`--cp-exchange auto`: whether a ring of keys and values hides behind attention, or is cheaper than latents. Pure."""

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.dealing import dealt_tokens
from megazero.engine.plan.layout.layers import Use
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.operations import Backward, Forward, Recompute
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.flags.config import Config
from megazero.flags.flag_names import with_values
from megazero.flags.validate import ring_refusal
from megazero.planner.sizes import keys_bytes
from megazero.planner.time.costs import StepCosts
from megazero.planner.time.devices import Device
from megazero.planner.time.network import Network


def choose_exchange(config: Config, layout: Layout, device: Device | None) -> Config:
    """Return a resolved configuration with another --cp-exchange in place of auto.

    Args:
        device: None: unknown, and so are its speeds. Then keys are gathered, as on a CPU.
    """
    if config.parallel.cp_exchange != "auto" or config.parallel.context_parallel_size == 1:
        return config
    documents = config.data.reset_attention_mask  # pieces of documents in each block are many small kernels
    gathering, ring = (with_values(config, {"cp-exchange": name}) for name in ("all-gather", "ring"))
    if device is None or device.kind != "cuda" or documents or ring_refusal(config, device.kind):
        return gathering
    if config.model.multi_latent_attention:
        prefers_ring = blocks_seconds(ring, layout, device) < blocks_seconds(gathering, layout, device)
    else:
        prefers_ring = ring_hides(config, layout, device)
    return ring if prefers_ring else gathering


def blocks_seconds(config: Config, layout: Layout, device: Device) -> float:
    """Return the seconds of a micro-batch in the blocks of the first pipeline rank.

    Latents are few bytes. But a rank that gathers them computes the keys and values of whole samples, and one with a
    ring those of its own tokens. So neither the bytes nor a hidden ring decides.
    """
    costs = StepCosts(config, layout, rank_spec(config, layout, 0, declare), device)
    full, seconds = config.activations.recompute == "full", 0.0
    for name, layer in costs.spec.layers.items():
        if layer.use is Use.LAYER:
            seconds += costs.of_layer(Forward(name, 0, graph=not full)).seconds
            seconds += costs.of_layer(Recompute(name, 0)).seconds if full else 0.0
            seconds += costs.of_layer(Backward(name, 0)).seconds
    return seconds


def ring_hides(config: Config, layout: Layout, device: Device) -> bool:
    """Return whether a block of keys and values is sent in less time than attention to the last one takes.

    A rank's queries see half of a block's keys on average: 2 b T^2 n d FLOPs for T tokens, against 2 b T g d elements.
    So a ring hides if T is at least e F / (B n / g), with FLOP/s F, bytes/s B and e bytes of an element.
    """
    model, training, tokens = config.model, config.training, dealt_tokens(config, layout)
    heads = max(1, model.num_attention_heads // layout.tp)
    flops = 2 * training.micro_batch_size * tokens**2 * heads * model.head_dim
    speed = device[f"compute.{training.precision}"] * device.attention(model.head_dim)
    sent = Network(device, layout).collective("cp", "shift", keys_bytes(config, layout))
    return flops / speed >= sent
