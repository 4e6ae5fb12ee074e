"""Refuse, before torch is imported, a model that no setting of its flags fits here; and name what does fit.

Closed forms from below and from above, since the exact counts need the layers, and so torch, which takes seconds to
import. What lies between them is left to `price.capacity`. The tests hold them on either side of the estimate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from megazero.config.architectures import ARCHITECTURES
from megazero.config.cli import flags, preset_names, preset_values
from megazero.config.schema import BYTES, Config, ModelConfig
from megazero.memory.host import Available
from megazero.plan.resolve import make_layout
from megazero.units import size

ALIGN = 64  # rows of the vocabulary
USABLE = 0.85  # of the memory that is there: the rest is for libraries and for what allocators leave between tensors
MOST_RANKS = 4096
FEWEST_LAYERS = 2
SHORT = "--micro-batch-size 1 --recompute full"  # the flags that lower activations most
SHARDED = f"--zero-stage 3 {SHORT}"


class States(NamedTuple):
    """Bytes of the whole model's states."""

    weights: int
    optimizer: int
    gradients: int


def parameter_bounds(model: ModelConfig) -> tuple[int, int]:
    """Return at most and at least as many elements as the model has: its matrices; with vectors and padding."""
    h, f, groups = model.hidden_size, model.ffn_size, model.num_query_groups or model.num_attention_heads
    kv = h // model.num_attention_heads * groups
    matrices = h * (h + 2 * kv) + h * h + ARCHITECTURES[model.architecture].mlp_matrices * h * f
    vectors = 7 * h + 2 * kv + 2 * f
    tables = 1 + model.untie_embeddings
    rows = -(-model.vocab_size // ALIGN) * ALIGN
    least = model.num_layers * matrices + tables * model.vocab_size * h
    return least, model.num_layers * (matrices + vectors) + tables * rows * h + (model.seq_length + 2) * h


def states(config: Config, elements: int) -> States:
    """Bytes of all copies' states, once each: weights, moments and a master of 16-bit weights, gradients."""
    training = config.training
    w, g = BYTES[training.precision], BYTES[training.grad_dtype]
    each = max(4, w)
    return States(elements * w, elements * each * (2 + (w != each)), elements * g)


def floor(config: Config, world_size: int) -> States:
    """Return a lower bound of the states that all ranks together hold at the end of an iteration."""
    layout = make_layout(config, world_size)
    whole, stage = states(config, parameter_bounds(config.model)[0]), config.zero.zero_stage
    copies, owned = layout.dp, layout.replica if stage else layout.dp
    return States(whole.weights * (owned if stage == 3 else copies), whole.optimizer * owned, whole.gradients * owned)


def ceiling(config: Config, ranks: int) -> int:
    """Return an upper bound of a rank's bytes under SHARDED over `ranks` data-parallel ranks; of one under SHORT."""
    model, w, g = config.model, BYTES[config.training.precision], BYTES[config.training.grad_dtype]
    elements = parameter_bounds(model)[1]
    rows = -(-model.vocab_size // ALIGN) * ALIGN
    unit = max(rows, model.seq_length) * model.hidden_size
    unit = max(unit, elements // max(1, model.num_layers)) + 4 * 64 * ranks  # the largest that is gathered at once
    sharded = sum(states(config, elements + 4 * 64 * ranks * (model.num_layers + 4))) // ranks
    gathered = 3 * unit * (w + 2 * g) if ranks > 1 else unit * g
    tokens, each = model.seq_length, max(4, w)
    scores = 2 * model.num_attention_heads * tokens * tokens * each
    block = tokens * (16 * model.hidden_size + 8 * model.ffn_size) * each + scores
    logits = 2 * tokens * rows * w
    return sharded + gathered + model.num_layers * tokens * model.hidden_size * w + max(block, logits)


def check_at_once(config: Config, world_size: int, local_ranks: int, host: Available | None) -> None:
    """Raise if the states of a run on CPUs of one machine alone need more than its memory.

    Args:
        config: not resolved. What `counts` refuses is left to `price.capacity`, as are ranks on several machines.
        host: what the ranks of this machine have together.

    Raises:
        ValueError: with the bytes needed, the bytes available, and flags that make it fit.
    """
    if host is None or local_ranks < world_size or not counts(config):
        return
    needed = floor(config, world_size)
    if sum(needed) <= host.num_bytes:
        return
    model = config.model
    several = f"{world_size} ranks need" if world_size > 1 else "a rank needs"
    fits = "; or ".join(way_out(config, world_size, host.num_bytes)) or "a smaller --hidden-size or --vocab-size"
    raise ValueError(
        f"--num-layers {model.num_layers} --ffn-hidden-size {model.ffn_size} --vocab-size {model.vocab_size} "
        f"--hidden-size {model.hidden_size}: {several} at least {size(sum(needed))} (weights {size(needed.weights)}, "
        f"optimizer states {size(needed.optimizer)}, gradients {size(needed.gradients)}), and {size(host.num_bytes)} "
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
    usable, flat = int(USABLE * available), config
    if world_size > 1 and world_size * ceiling(flat, world_size) <= usable:
        yield f"this model on these ranks with {SHARDED}"
        return
    ranks = next((n for n in _powers(MOST_RANKS) if n > 1 and ceiling(flat, n) <= usable), 0)
    if ranks and (flat.training.global_batch_size or ranks) >= ranks:
        each = size(ceiling(flat, ranks))
        yield f"this model on {ranks} machines like this one, a rank on each, with {SHARDED} (at most {each} per rank)"
    lower = SHARDED if world_size > 1 else SHORT
    for name, smaller in presets(config):
        if world_size * ceiling(smaller, world_size) <= usable:
            yield f"here --preset {name} {lower} (at most {size(ceiling(smaller, world_size))} per rank)"
            break
    layers = next(
        (n for n in _fewer(config.model.num_layers) if world_size * ceiling(_layers(flat, n), world_size) <= usable), 0
    )
    if layers:
        yield f"here --num-layers {layers} {lower}"


def _layers(config: Config, number: int) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=number))


def _powers(most: int) -> Iterator[int]:
    n = 1
    while n <= most:
        yield n
        n *= 2


def _fewer(layers: int) -> Iterator[int]:
    """Yield fewer and fewer layers, a tenth less each time."""
    while layers > FEWEST_LAYERS:
        layers = min(layers - 1, int(0.9 * layers))
        yield layers


def presets(config: Config) -> list[tuple[str, Config]]:
    """Return the presets of the same architecture that name their vocabulary, largest first."""
    found = []
    for name in preset_names():
        values = {key.replace("-", "_"): value for key, value in preset_values(name).items()}
        if values.get("architecture", "gpt2") != config.model.architecture or "vocab_size" not in values:
            continue
        groups: dict[str, dict[str, Any]] = {group: {} for group, _ in flags().values()}
        for key, value in values.items():
            groups[flags()[key.replace("_", "-")][0]][key] = value
        sections = {
            group: dataclasses.replace(getattr(Config(), group), **groups[group]) for group in ("model", "training")
        }
        found.append((name, dataclasses.replace(Config(), **sections)))
    return sorted(found, key=lambda preset: -parameter_bounds(preset[1].model)[1])
