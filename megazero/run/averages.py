"""The running average of the weights in the place of the weights: --ema-decay."""

import contextlib
from collections.abc import Iterator

import torch

from megazero.engine.step.engine import Engine
from megazero.engine.zero.optimizer_shard import OptimizerShard, cut


@contextlib.contextmanager
def averaged_weights(engine: Engine) -> Iterator[None]:
    """Within: the weights are their running average. All ranks enter and leave together."""
    _exchange_all(engine)
    engine.zero.sync_params()
    try:
        yield
    finally:  # without a message, because a peer may have failed
        _exchange_all(engine)
    engine.zero.sync_params()


@torch.no_grad()
def _exchange_all(engine: Engine) -> None:
    engine.wait()
    for unit in engine.zero.units.values():
        _exchange(unit.at_rest)


def _exchange(unit: OptimizerShard) -> None:
    """Exchange the master weights and their running average, exactly."""
    for part in unit.parts:
        if part.average is None:
            continue
        for piece in cut(part.owned):
            average = part.average.read(part.within(piece).slice())
            master = unit.master.read(piece.slice()).clone()
            unit.master.write(piece.slice(), average, None)
            average.copy_(master)
