"""Check that copies of a weight or a moment are equal bit for bit.

Data-parallel ranks have copies (at ZeRO stage 0, with --zero-shard-size, and of weights in the compute dtype), as do
tensor-parallel ranks (norms and biases) and both ends of the pipeline (a tied token table). All ranks have the biases
of all routers (--moe-router-enable-expert-bias).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from megazero.checkpoint.engine_state import states_of
from megazero.engine.mesh.collectives import MAX, Axis
from megazero.engine.mesh.peer_errors import ranks_text
from megazero.engine.step.engine import Engine
from megazero.run.stopping import DeadRun

PIECE = 1 << 22  # elements hashed at once; scratch has 8 bytes per element
MOST_NAMED = 4
_MULTIPLIER, _OFFSET = 0x9E3779B97F4A7C15 - (1 << 64), 0x632BE59BD9B4E019


def checksum(x: torch.Tensor) -> torch.Tensor:
    """Return a hash of the bits of `x` [n] and their order: an int64 scalar on its device."""
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, x.numel(), PIECE):
        mixed = (x[start : start + PIECE].view(words).long() + _OFFSET) * _MULTIPLIER
        mixed ^= mixed >> 32  # bijective, like the product: different words stay different
        place = torch.arange(start, start + len(mixed), device=x.device) * 2 + 1  # odd: a changed word changes the sum
        total += (mixed * place).sum()
    return total


def copies(engine: Engine) -> Iterator[tuple[Axis, str, torch.Tensor]]:
    """Yield (axis, name, tensor [n] that is equal on all ranks of the axis), in the same order on its ranks."""
    mesh = engine.mesh
    for unit in engine.zero.units.values():
        for part in unit.flat.owned_parts():
            axes = [unit.flat.replica]
            if not unit.flat.policy.optimizer:
                axes.append(unit.flat.shard)
            if unit.flat.group.over_tp and "tp" not in part.weight.spec.axes:
                axes.append(mesh.tp)
            if unit.name == engine.layers.tied:
                axes.append(mesh.embedding)
            for state, data in states_of(unit.optimizer, part).items():
                kind = "the master weights" if state == "master" else state
                yield from ((axis, f"{kind} of {part.weight.spec.name}", data) for axis in axes)
        if unit.flat.policy.syncs and unit.weights.unsharded is not None:
            for member in unit.flat.members:
                window = unit.weights.unsharded[member.window.slice()]
                yield from (
                    (axis, f"the weights of {member.weight.spec.name}", window)
                    for axis in (unit.flat.shard, unit.flat.replica)
                )
    if engine.routers.biases is None:
        return
    for number, biases in zip(engine.config.model.expert_layers, engine.routers.biases, strict=True):
        yield from ((axis, f"the router's biases of layer {number}", biases) for axis in (mesh.data, mesh.tp, mesh.pp))


def check_replicas(engine: Engine, iteration: int) -> None:
    """Compare all copies. All ranks call this, between steps.

    Raises:
        DeadRun: on every rank, if copies differ; it names the tensor and the ranks.
    """
    engine.wait()
    mesh = engine.mesh
    found: dict[str, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    axes: dict[str, Axis] = {}
    for axis, name, data in copies(engine):
        if axis.peers:
            axes[axis.name] = axis
            found[axis.name].append((name, checksum(data)))
    faults: list[str] = []
    for axis_name, named in found.items():
        axis = axes[axis_name]
        table = torch.zeros(axis.size, len(named), dtype=torch.int64, device=mesh.device)
        table[axis.rank] = torch.stack([value for _, value in named])
        faults += differing_replicas(
            axis.all_reduce_(table, kind="control").cpu(), [n for n, _ in named], axis.ranks, axis.hosts
        )
    if mesh.agree(len(faults), MAX):
        rest = f"; and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
        fault = "; ".join(faults[:MOST_NAMED]) + rest if faults else "see the messages of other ranks"
        raise DeadRun(
            f"iteration {iteration}: copies that must be equal differ (--check-replicas-interval): {fault}. A device "
            "or a link is faulty: check these hosts, and resume from a checkpoint older than the last good check"
        )


def differing_replicas(
    table: torch.Tensor, names: Sequence[str], ranks: Sequence[int], hosts: Sequence[str]
) -> list[str]:
    """Return a sentence for each name whose column of `table` [ranks, names] has several values."""
    faults = []
    for at in (table != table[0]).any(0).nonzero().flatten().tolist():
        ranks_with: dict[int, list[int]] = {}
        for rank, value in zip(ranks, table[:, at].tolist(), strict=True):
            ranks_with.setdefault(value, []).append(rank)
        groups = sorted(ranks_with.values(), key=len, reverse=True)
        faults.append(
            f"{names[at]}: {', '.join(ranks_text(group, hosts) for group in groups[1:])} unlike "
            f"{ranks_text(groups[0], hosts)}"
        )
    return faults
