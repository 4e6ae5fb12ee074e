"""Rehearsals for reports: many, in a few parallel processes."""

import multiprocessing
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

PROCESSES = min(2, os.cpu_count() or 1)


class Asked(NamedTuple):
    """A rank to rehearse: flags of its run, and where it is."""

    world: int
    flags: str
    rank: int = 0


def flags_of(layers: int, hidden: int, heads: int, **options: Any) -> str:
    """Flags of a model of the paper; vocabulary and sequence are our assumption, because it states neither."""
    shape = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    given = shape | {"vocab_size": 50257, "seq_length": 1024, "precision": "fp16", "grad_dtype": "fp16"} | options
    words = []
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [] if value is False else [flag, str(value)]
    return " ".join(words)


def resolved(asked: Asked) -> tuple[Any, Any]:
    """Return the configuration and the layout of a rehearsal."""
    from megazero.engine.model.stage import declare
    from megazero.flags.cli import parse
    from megazero.flags.resolve import resolve

    return resolve(parse(asked.flags.split()), asked.world, 0, declare)


def rehearse_one(asked: Asked) -> Any:
    """Rehearse a step of a GPU's rank."""
    import torch

    from megazero.command.rehearsal.rehearsal import RehearsalDevice, rehearse_rank

    torch.set_num_threads(1)
    return rehearse_rank(*resolved(asked), asked.rank, RehearsalDevice.of("gpu"), steps=1, saves=False)


def rehearse_all(asked: Sequence[Asked]) -> list[Any]:
    """Rehearse each, in order; one process serves several."""
    if len(asked) == 1:
        return [rehearse_one(asked[0])]
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        return pool.map(rehearse_one, asked, chunksize=1)


def states(memory: dict[str, int], accumulates: bool = False) -> int:
    """Bytes of model states: parameters, optimizer states, gradients.

    Args:
        accumulates: the rank is of stage 1 and has several micro-batches: their whole gradient is added up in buffers,
            and only the sum is sharded. Its few buckets are counted too.
    """
    return memory["parameters"] + memory["optimizer"] + memory["buffers" if accumulates else "gradients"]
