"""The pass that copies reduced gradients to host memory, behind the backward: --optimizer-cpu-offload. Pure."""

from collections import Counter

from megazero.engine.plan.program.operations import (
    Asynchronous,
    FetchGradient,
    Op,
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
from megazero.engine.plan.program.rank_spec import RankSpec


def store_gradients(spec: RankSpec, ops: Ops) -> Ops:
    """Copy every reduced gradient of `spec.offloaded_units` to host memory, and free it on the device.

    If a unit is reduced once per micro-batch, the sum so far returns to the device when the unit's next gradients are
    opened, and its next Reduce adds to it: neither the host's cores nor the order of additions take part. A sum that
    is not sharded takes the place of the buffer, to which the backward adds; it returns one unit ahead. After the last
    Reduce of a step, the gradient is first summed over replicas and over tp. The tied table stays on the device, until
    `finish_gradients` has summed it over its two stages.

    These operations of a unit are a chain. With overlap, each is in flight until the next Reduce of a unit starts.
    """
    chains, units = _Chains(spec, ops), set(spec.offloaded_units)
    for op in ops:
        about = inner(op)
        if not isinstance(about, (Open, Reduce)) or about.unit not in units:
            chains.found.append(op)
        elif isinstance(about, Open):
            chains.open(about)
        elif isinstance(op, Wait):
            chains.wait(about)
        else:
            chains.reduce(op, about)
    chains.finish(*chains.flying)
    return chains.found


class _Chains:
    """Operations found so far, and the state of each unit at their end.

    Attributes:
        flying: unit -> the operation in flight, and those that follow it.
        waited: units whose chain already advanced with the next Reduce.
        stored: units with gradients of earlier micro-batches; those whose gradients are being fetched, and those with
            gradients that are open.
        left: unit -> Reduces to come; units to come that are opened.
    """

    def __init__(self, spec: RankSpec, ops: Ops) -> None:
        self.spec = spec
        self.found: Ops = []
        self.flying: dict[str, list[Asynchronous]] = {}
        self.waited: set[str] = set()
        self.stored, self.fetching, self.opened = set[str](), set[str](), set[str]()
        reduces = (about.unit for op in ops if isinstance(about := inner(op), Reduce) and not isinstance(op, Wait))
        self.left, offloaded = Counter(reduces), set(spec.offloaded_units)
        self.to_open = [op.unit for op in ops if isinstance(op, Open) and op.unit in offloaded]

    def open(self, op: Open) -> None:
        unit = op.unit
        self.to_open.pop(0)
        self.finish(unit)
        self.opened.add(unit)
        if unit in self.stored:
            self._fetch(unit)
        if unit not in self.stored or self.spec.policy(unit).optimizer:
            self.found.append(op)
            return
        self._fetched(unit)
        for ahead in self.to_open[:1] if self.spec.overlap else []:
            at_rest = self.stored - self.opened - self.flying.keys()
            if ahead in at_rest and not self.spec.policy(ahead).optimizer:
                self._fetch(ahead)

    def wait(self, reduce: Reduce) -> None:
        if self.flying.get(reduce.unit, [None])[0] == reduce:  # else it was waited for
            self._advance(reduce.unit)
            self.waited.add(reduce.unit)

    def reduce(self, op: Op, about: Reduce) -> None:
        unit = about.unit
        self.left[unit] -= 1
        self.opened.remove(unit)
        chain = [] if self.left[unit] else _sums(self.spec, unit)
        if self.left[unit] or unit != self.spec.tied:
            chain.append(StoreGradient(unit))
        for other in [other for other in self.flying if other not in self.waited]:
            self._advance(other)
        self.waited.clear()
        self._fetched(unit)
        self.stored.add(unit)
        self.found.append(op)
        if self.spec.overlap:
            self.flying[unit] = [about, *chain]
        else:
            self.found += chain

    def finish(self, *units: str) -> None:
        for unit in units:
            while unit in self.flying:
                self._advance(unit)

    def _advance(self, unit: str) -> None:
        done, *rest = self.flying.pop(unit)
        self.found.append(Wait(done))
        if rest:
            self.found.append(Start(rest[0]))
            self.flying[unit] = rest

    def _fetch(self, unit: str) -> None:
        if not self.spec.overlap:
            self.found.append(FetchGradient(unit))
        elif unit not in self.fetching:
            self.fetching.add(unit)
            self.found.append(Start(FetchGradient(unit)))

    def _fetched(self, unit: str) -> None:
        if unit in self.fetching:
            self.fetching.remove(unit)
            self.found.append(Wait(FetchGradient(unit)))


def _sums(spec: RankSpec, unit: str) -> list[Asynchronous]:
    """Return the sums that complete a unit's gradient."""
    replicas: list[Asynchronous] = [ReduceReplicas(unit)] if spec.group(unit).replicas > 1 else []
    return [*replicas, SumReplicated(unit)] if spec.units[unit].sums_over_tp else replicas
