"""What benchmarks share."""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazero.model.context import Tokens
from megazero.train.engine import Engine


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[round(0.025 * draws)], medians[round(0.975 * draws) - 1]


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that any operation makes, for as long as they live.

    Attributes:
        peak: the most at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                ref = StorageWeakRef(storage)
                self.made.setdefault(ref.cdata, (ref, storage.nbytes()))
        self.peak = max(self.peak, sum(self.sizes()))
        return out

    def sizes(self, but: Sequence[torch.Tensor] = ()) -> list[int]:
        """Bytes of each storage that is alive now, those of `but` left out."""
        self.made = {key: made for key, made in self.made.items() if not made[0].expired()}
        left_out = {StorageWeakRef(t.untyped_storage()).cdata for t in but}
        return [num_bytes for key, (_, num_bytes) in self.made.items() if key not in left_out]


def kept_by_a_block(engine: Engine) -> list[int]:
    """Bytes of each tensor that the first block keeps between its forward and its backward, ascending.

    Counted as storages that are alive after the forward, the block's output and its weights left out; of an arena, the
    slots that are taken.
    """
    training, model = engine.config.training, engine.config.model
    ids = torch.zeros(training.micro_batch_size, model.seq_length, dtype=torch.long)
    tokens = Tokens.of(ids, tuple(range(len(ids))), engine.model.stream, drops=True)
    engine.begin(micro_batches=1)
    keep = engine.checkpoints.keep() if engine.checkpoints is not None else None
    block = next(iter(engine.model.blocks.values()))
    with Alive() as alive:
        message = engine.message
        anchor = torch.zeros((), device=message.device, requires_grad=True)
        x = (
            torch.randn(message.shape, device=message.device).to(message.dtype).add(anchor)
        )  # not a leaf: autograd keeps those anyway
        y = engine.run_layer(keep, block, x, tokens)
        del x
        gc.collect()
        for _ in range(4):  # gloo's threads may hold a tensor a moment after it was waited for: until their next work
            engine.mesh.tp.all_reduce_(anchor.detach())
        weights = [unit.whole for unit in engine.zero.units.values() if unit.whole is not None]
        slots = engine.checkpoints.slots if engine.checkpoints is not None else None
        arena = slots.buffers if slots is not None else []
        sizes = alive.sizes(but=[anchor, y, *weights, *arena])
        if slots is not None:
            sizes += [slots.each_bytes] * (len(arena) - len(slots.free))
    return sorted(sizes)
