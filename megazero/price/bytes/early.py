"""Refuse, before torch is imported, a model that no setting of its flags fits here; and name settings that fit.

The account's own states (`plan.sizes.States`) of element counts in closed form, because the exact counts need the
layers, and so torch, which takes seconds to import. The settings that are named fit by an upper bound, which adds to
the account's states and kept inputs as much as one block and the logits can take. `capacity` decides the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megazero.config.architectures import ARCHITECTURES
from megazero.config.flags import with_values
from megazero.config.presets import preset_names, preset_values
from megazero.config.schema import Config, ModelConfig
from megazero.memory.host import Available
from megazero.plan.layout.flat_layout import ALIGN, round_up
from megazero.plan.layout.resolve import make_layout
from megazero.plan.layout.topology import Layout
from megazero.plan.sizes import Rates, States, kept_bytes
from megazero.units import size

USABLE = 0.85  # of the memory that is available: the rest is for libraries and for gaps between tensors
MOST_RANKS = 4096
SHORT = "--micro-batch-size 1 --recompute full"  # the flags that lower activations most
SHARDED = f"--zero-stage 3 {SHORT}"


def parameter_bounds(model: ModelConfig) -> tuple[int, int]:
    """Return a lower and an upper bound of the model's elements: its matrices; with vectors and padding."""
    h, f, groups = model.hidden_size, model.ffn_size, model.num_query_groups or model.num_attention_heads
    q, kv = model.head_dim * model.num_attention_heads, model.head_dim * groups
    matrices = h * (q + 2 * kv) + q * h + ARCHITECTURES[model.architecture].mlp_matrices * h * f
    vectors = 6 * h + q + 2 * kv + 2 * f
    tables, rows = 1 + model.untie_embeddings, round_up(model.vocab_size, ALIGN)
    least = model.num_layers * matrices + tables * model.vocab_size * h
    return least, model.num_layers * (matrices + vectors) + tables * rows * h + (model.seq_length + 2) * h


def floor(config: Config, world_size: int) -> dict[str, int]:
    """Return a lower bound of a rank's states at the end of an iteration, by kind, without model parallelism."""
    states, elements = States.of(config, make_layout(config, world_size)), parameter_bounds(config.model)[0]
    return states.at_rest(elements) | {"gradients": states.gradients.of(elements)}


def ceiling(config: Config, ranks: int) -> int:
    """Return an upper bound of a rank's bytes under SHARDED over `ranks` data-parallel ranks; of one under SHORT."""
    replace = dataclasses.replace
    config = replace(
        config,
        training=replace(config.training, micro_batch_size=1),
        zero=replace(config.zero, zero_stage=3, zero_shard_size=0),
        activations=replace(config.activations, recompute="full", partition_activations=False),
    )
    model, layout, rates = config.model, Layout(dp=ranks), Rates.of(config)
    padding, elements = 4 * ALIGN * ranks, parameter_bounds(model)[1]
    whole = round_up(elements + padding * (model.num_layers + 4), ranks)
    states = sum(share.of(whole) for share in States.of(config, layout)[:3])
    rows, tokens = round_up(model.vocab_size, ALIGN), model.seq_length
    unit = max(max(rows, tokens) * model.hidden_size, elements // model.num_layers) + padding  # the largest
    gathered = 3 * unit * (rates.weights + 2 * rates.gradients) if ranks > 1 else unit * rates.gradients
    scores = 2 * model.num_attention_heads * tokens * tokens
    block = (tokens * (16 * model.hidden_size + 8 * model.ffn_size) + scores) * rates.state
    logits = 2 * tokens * rows * rates.weights
    return states + gathered + model.num_layers * kept_bytes(config, layout) + max(block, logits)


def check_at_once(config: Config, world_size: int, local_ranks: int, host: Available | None) -> None:
    """Raise if the states of a run on CPUs of one machine alone need more than its memory.

    Args:
        config: not resolved. What `counts` refuses is left to `price.bytes.capacity`, as are ranks on several machines.
        host: the memory of all ranks of this machine together.

    Raises:
        ValueError: with the bytes needed, the bytes available, and flags that make it fit.
    """
    if host is None or local_ranks < world_size or not counts(config):
        return
    needed = {kind: world_size * num_bytes for kind, num_bytes in floor(config, world_size).items()}
    total = sum(needed.values())
    if total <= host.num_bytes:
        return
    model = config.model
    several = f"{world_size} ranks need" if world_size > 1 else "a rank needs"
    names = {"parameters": "weights", "optimizer": "optimizer states"}
    kinds = ", ".join(f"{names.get(kind, kind)} {size(num_bytes)}" for kind, num_bytes in needed.items() if num_bytes)
    fits = "; or ".join(way_out(config, world_size, host.num_bytes)) or "a smaller --hidden-size or --vocab-size"
    raise ValueError(
        f"--num-layers {model.num_layers} --ffn-hidden-size {model.ffn_size} --vocab-size {model.vocab_size} "
        f"--hidden-size {model.hidden_size}: {several} at least {size(total)} ({kinds}), and {size(host.num_bytes)} "
        f"{host.source} are available; what fits: {fits}"
    )


def counts(config: Config) -> bool:
    """Return whether the closed forms hold: all of a model of known size is trained, without model parallelism."""
    parallel, zero, usual = config.parallel, config.zero, Config()
    return (
        config.trains
        and not config.training.freeze_parameters
        and not config.plan.rehearse
        and config.model.vocab_size > 0
        and parallel.tensor_model_parallel_size == parallel.pipeline_model_parallel_size == 1
        and not config.activations.contiguous_checkpointing
        and zero.zero_reduce_every == usual.zero.zero_reduce_every
    )


def way_out(config: Config, world_size: int, available: int) -> Iterator[str]:
    """Yield changes to the command line with which a run fits, by `ceiling`, largest model first."""
    usable, most = int(USABLE * available), world_size * ceiling(config, world_size)
    if world_size > 1 and most <= usable:
        yield f"this model on these ranks with {SHARDED}"
        return
    powers = (2**n for n in range(1, MOST_RANKS.bit_length()))
    ranks = next((n for n in powers if ceiling(config, n) <= usable), 0)
    if ranks and (config.training.global_batch_size or ranks) >= ranks:
        each = size(ceiling(config, ranks))
        yield f"this model on {ranks} machines like this one, a rank on each, with {SHARDED} (at most {each} per rank)"
    lower = SHARDED if world_size > 1 else SHORT
    for name, smaller in presets(config):
        if world_size * ceiling(smaller, world_size) <= usable:
            yield f"here --preset {name} {lower} (at most {size(ceiling(smaller, world_size))} per rank)"
            break
    layers = config.model.num_layers
    while layers > 2:
        layers = min(layers - 1, int(0.9 * layers))
        fewer = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=layers))
        if world_size * ceiling(fewer, world_size) <= usable:
            yield f"here --num-layers {layers} {lower}"
            break


def presets(config: Config) -> list[tuple[str, Config]]:
    """Return the presets of the same architecture that name their vocabulary, largest first."""
    found = []
    for name in preset_names():
        values = preset_values(name)
        if values.get("architecture", "gpt2") == config.model.architecture and "vocab-size" in values:
            preset = with_values(Config(), values)
            found.append((name, dataclasses.replace(Config(), model=preset.model, training=preset.training)))
    return sorted(found, key=lambda preset: -parameter_bounds(preset[1].model)[1])
