"""`--cp-exchange auto`: whether a ring of keys and values hides behind attention. Pure."""

from __future__ import annotations

from megazero.engine.options.schema import Config
from megazero.engine.plan.layout.dealing import dealt_tokens
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.flag_names import with_values
from megazero.flags.validate import ring_refusal
from megazero.planner.sizes import keys_bytes
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
    ring = (
        device is not None
        and device.kind == "cuda"
        and not (documents or ring_refusal(config, device.kind))
        and ring_hides(config, layout, device)
    )
    return with_values(config, {"cp-exchange": "ring" if ring else "all-gather"})


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
