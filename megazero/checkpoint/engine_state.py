"""The state of an engine in a checkpoint: master weights and optimizer states by global names, and a few numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from megazero.checkpoint.shards import LocalShard
from megazero.engine.optim.small import Kept, Wide
from megazero.engine.plan.layout.flat_layout import Range
from megazero.engine.step.engine import Engine
from megazero.engine.step.routers import Routers
from megazero.engine.zero.flat_unit import OwnedPart
from megazero.engine.zero.optimizer_shard import LOWER, OptimizerShard, RuledPart, cut


class EngineState:
    """Reads and replaces the state of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def shards(self) -> dict[str, LocalShard]:
        """Return this rank's master weights, as `model.NAME`, and optimizer states, under global names.

        A checkpoint reads them, or fills them before `load`. They are the engine's own tensors, or copies in host
        memory of numbers in a small form.
        """
        found = {}
        for unit, part in self._parts():
            for state, numbers, place, _ in _kept(unit, part):
                data = numbers.read(place.slice())
                data = data if isinstance(numbers, Wide) else data.cpu()
                found[_name(state, part)] = LocalShard.of(
                    part.weight.spec, part.weight.block, Range(part.start, part.stop), data
                )
        return found

    def numbers(self) -> dict[str, Any]:
        """Return the state besides `shards`, the same on all ranks."""
        engine = self.engine
        scale = asdict(engine.scale) if engine.scale else None
        biases = _biases(engine)
        return {"updates": engine.updates, "loss_scale": scale, "expert_biases": biases, "averages": engine.averages}

    def load(self, state: dict[str, Any], shards: Mapping[str, LocalShard]) -> None:
        """Resume from a checkpoint whose tensors have been read into `shards`. All ranks call this."""
        engine = self.engine
        engine.wait()
        for unit, part in self._parts():
            _load(unit, part, shards, state["updates"])
        engine.zero.sync_params()
        engine.updates = state["updates"]
        engine.averages = state["averages"]
        load_biases(engine.routers, state["expert_biases"])
        if engine.scale and state["loss_scale"]:
            known = state["loss_scale"]
            engine.scale = replace(engine.scale, **{key: known[key] for key in ("value", "left", "good")})

    def _parts(self) -> Iterator[tuple[OptimizerShard, OwnedPart]]:
        """Yield every part that this rank owns, and the states at rest of its unit."""
        for unit in self.engine.zero.units.values():
            for part in unit.flat.owned_parts():
                yield unit.at_rest, part


def load_biases(routers: Routers, state: Mapping[str, Sequence[float]]) -> None:
    """Read the biases of a checkpoint; those of a run without biases are 0."""
    if routers.biases is not None:
        none = [0.0] * routers.model.num_experts
        rows = [state.get(str(number), none) for number in routers.model.expert_layers]
        routers.biases.copy_(torch.tensor(rows, dtype=torch.float64))


def _biases(engine: Engine) -> dict[str, list[float]]:
    """Return the biases of routers by number of their layer."""
    biases, model = engine.routers.biases, engine.config.model
    if biases is None:
        return {}
    values, experts = engine.mesh.read(biases.flatten()), model.num_experts
    return {str(n): values[at * experts : (at + 1) * experts] for at, n in enumerate(model.expert_layers)}


def states_of(unit: OptimizerShard, part: OwnedPart) -> dict[str, torch.Tensor]:
    """Return the tensors of a part in a checkpoint, [stop - start] each; no states if the run does not train.

    They are copies of numbers that are kept in another form.
    """
    return {name: numbers.read(place.slice()) for name, numbers, place, _ in _kept(unit, part)}


def _name(state: str, part: OwnedPart) -> str:
    """Return the name of a tensor in a checkpoint."""
    return f"{'model' if state == 'master' else state}.{part.weight.spec.name}"


def _kept(unit: OptimizerShard, part: OwnedPart) -> Iterator[tuple[str, Kept, Range, RuledPart | None]]:
    """Yield the name, the numbers and the place in them of each state of a part, and the rule's part."""
    yield "master", unit.master, part.owned, None
    if not unit.options.config.trains:
        return
    rule = unit.options.optimizer.rule(part.weight.spec.kind)
    mine = (each for each in unit.parts if each.rule == rule)
    ruled = next(each for each in mine if each.within(part.owned).numel == part.owned.numel)
    for state, numbers in zip(rule.kept, ruled.kept, strict=True):
        yield state.name, numbers, ruled.within(part.owned), ruled


def _load(unit: OptimizerShard, part: OwnedPart, shards: Mapping[str, LocalShard], updates: int) -> None:
    """Take over the copies that `EngineState.shards` has returned and a checkpoint has filled.

    Args:
        shards: those that are missing keep their numbers, but a running average begins at the weights.
        updates: of the run so far; they decide how numbers that have another form are rounded.
    """
    for name, numbers, place, ruled in _kept(unit, part):
        shard = shards.get(_name(name, part))
        if shard is None and ruled is not None and numbers is ruled.average:
            unit.begin_average(ruled, part.owned)
        if shard is None or isinstance(numbers, Wide):
            continue
        for piece in cut(place):
            values = shard.data[piece.start - place.start : piece.stop - place.start].to(unit.device, unit.dtype)
            bits = ruled.noise.bits(piece, updates) & LOWER if ruled and ruled.noise else None
            numbers.write(piece.slice(), values, bits)
