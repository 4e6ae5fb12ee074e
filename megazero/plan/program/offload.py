"""The pass that copies reduced gradients to host memory, behind the backward: --optimizer-cpu-offload. Pure."""

from __future__ import annotations

from collections import Counter

from megazero.plan.program.operations import (
    Asynchronous,
    FetchGradient,
    Open,
    Ops,
    Reduce,
    ReduceReplicas,
    Start,
    StoreGradient,
    SumReplicated,
    Wait,
    inner,
)
from megazero.plan.program.rank_spec import RankSpec


def store_gradients(spec: RankSpec, ops: Ops) -> Ops:
    """Copy every reduced gradient of `spec.offloaded_units` to host memory, and free it on the device.

    If a unit is reduced once per micro-batch, the sum so far returns to the device when the unit's next gradients are
    opened, and its next Reduce adds to it: neither the host's cores nor the order of additions take part. A sum that
    is not sharded takes the place of the buffer, to which the backward adds; it returns one unit ahead. After the last
    Reduce of a step, the gradient is first summed over replicas and over tp. The tied table stays on the device, until
    `finish_gradients` has summed it over its two stages.

    These operations of a unit are a chain. With overlap, each is in flight until the next Reduce of a unit starts.
    """
    units = set(spec.offloaded_units)
    left = Counter(about.unit for op in ops if isinstance(about := inner(op), Reduce) and not isinstance(op, Wait))
    chains: dict[str, list[Asynchronous]] = {}  # unit -> the operation in flight, and those that follow it
    stored: set[str] = set()
    fetching: set[str] = set()
    busy: set[str] = set()  # units with gradients on the device, from Open to Reduce
    opened = [op.unit for op in ops if isinstance(op, Open) and op.unit in units]
    waited: set[str] = set()  # units whose chains the next Reduce has advanced already
    found: Ops = []

    def advance(unit: str) -> None:
        done, *rest = chains.pop(unit)
        found.append(Wait(done))
        if rest:
            found.append(Start(rest[0]))
            chains[unit] = rest

    def finish(unit: str) -> None:
        while unit in chains:
            advance(unit)

    def fetch(unit: str) -> None:
        if unit not in fetching:
            fetching.add(unit)
            found.append(Start(FetchGradient(unit)))

    def fetched(unit: str) -> None:
        if unit in fetching:
            fetching.remove(unit)
            found.append(Wait(FetchGradient(unit)))

    for op in ops:
        about = inner(op)
        if not isinstance(about, (Open, Reduce)) or about.unit not in units:
            found.append(op)
            continue
        unit = about.unit
        if isinstance(about, Open):
            finish(unit)
            sharded, ahead = spec.policy(unit).optimizer, opened[1:2]
            opened.pop(0)
            busy.add(unit)
            if unit in stored and spec.overlap:
                fetch(unit)
            elif unit in stored:
                found.append(FetchGradient(unit))
            if sharded or unit not in stored:
                found.append(op)
            else:
                fetched(unit)
                for other in ahead if spec.overlap else []:
                    if other in stored - busy - chains.keys() and not spec.policy(other).optimizer:
                        fetch(other)
        elif isinstance(op, Wait):
            if unit in chains and chains[unit][0] == about:  # else it was waited for
                advance(unit)
                waited.add(unit)
        else:
            left[unit] -= 1
            busy.remove(unit)
            chain = [] if left[unit] else _sums(spec, unit)
            if left[unit] or unit != spec.tied:
                chain.append(StoreGradient(unit))
            for other in [other for other in chains if other not in waited]:
                advance(other)
            waited.clear()
            fetched(unit)
            stored.add(unit)
            found.append(op)
            if spec.overlap:
                chains[unit] = [about, *chain]
            else:
                found += chain
    for unit in list(chains):
        finish(unit)
    return found


def _sums(spec: RankSpec, unit: str) -> list[Asynchronous]:
    """Return the sums that complete a unit's gradient."""
    replicas: list[Asynchronous] = [ReduceReplicas(unit)] if spec.group(unit).replicas > 1 else []
    return [*replicas, SumReplicated(unit)] if spec.units[unit].sums_over_tp else replicas
