"""Passes of `engine.plan.program`. Each maps a list of operations to a new list. Pure: no torch."""

import bisect
from collections.abc import Iterator
from dataclasses import replace

from megazero.engine.plan.layout.layers import Use
from megazero.engine.plan.layout.topology import Route
from megazero.engine.plan.program.operations import (
    COMPUTE,
    Backward,
    BackwardWeights,
    Drop,
    Fetch,
    FetchWeights,
    Forward,
    Gather,
    GradNorm,
    Keep,
    LayerOp,
    Op,
    Open,
    Ops,
    ReadStates,
    Rebuild,
    Recompute,
    Recv,
    Reduce,
    ReduceReplicas,
    Release,
    Send,
    Start,
    StoreGradient,
    SumReplicated,
    SumTied,
    Sync,
    Update,
    Wait,
    WriteStates,
)
from megazero.engine.plan.program.rank_spec import PlannedLayer, RankSpec
from megazero.engine.plan.schedule.schedules import Order, Pass


def expand_layers(spec: RankSpec, order: Order, trains: bool = True) -> Ops:
    """Expand each scheduled chunk into per-layer operations, transfers and kept inputs."""
    ops: Ops = []
    for kind, i, c in order:
        stage, chunk = spec.stages[c], spec.chunks[c]
        if kind is Pass.FORWARD:
            if spec.is_remote(stage - 1):
                ops.append(Recv("x", stage, i))
            for layer in chunk:
                recomputes = trains and spec.recomputes(layer)
                if recomputes:
                    ops.append(Keep(layer.name, i))
                ops.append(Forward(layer.name, i, graph=trains and layer.has_backward and not recomputes))
            if spec.is_remote(stage + 1):
                ops.append(Send("x", stage + 1, i))
        elif kind is Pass.BACKWARD_WEIGHTS:
            ops += [BackwardWeights(layer.name, i) for layer in reversed(chunk) if layer.queues_weights]
        else:
            if spec.is_remote(stage + 1):
                ops.append(Recv("dx", stage, i))
            for layer in reversed(chunk):
                if layer.has_backward:
                    ops += _backward(spec, layer, i, whole=kind is Pass.BACKWARD)
            if spec.is_remote(stage - 1):
                ops.append(Send("dx", stage - 1, i))
    return ops


def _backward(spec: RankSpec, layer: PlannedLayer, i: int, whole: bool) -> Ops:
    """Return one layer's backward. If `whole` is False, a block's weight gradients are queued for BackwardWeights."""
    backward = Backward(layer.name, i, weights=whole or not layer.queues_weights)
    if not spec.recomputes(layer):
        return [backward]
    ops: Ops = []
    if spec.on_host:
        ops.append(Fetch(layer.name, i))
    if spec.partitioned:
        ops.append(Rebuild(layer.name, i))
    return [*ops, Recompute(layer.name, i), backward, Drop(layer.name, i)]


def assign_slots(spec: RankSpec, ops: Ops) -> Ops:
    """Assign a slot to each kept input in host memory or in an arena."""
    if not (spec.on_host or spec.arena):
        return ops
    free: list[int] = []
    num_slots, slot_of, placed = 0, {}, []
    for op in ops:
        if isinstance(op, Keep):
            if not free:
                free.append(num_slots)
                num_slots += 1
            slot = slot_of[op.key] = free.pop()
            op = replace(op, slot=slot)
        elif isinstance(op, Drop):
            slot = slot_of.pop(op.key)
            free.append(slot)
            op = replace(op, slot=slot)
        placed.append(op)
    return placed


def _uses(spec: RankSpec, ops: Ops) -> dict[str, list[int]]:
    """Return the indices of the operations that compute with each unit's weights."""
    found: dict[str, list[int]] = {unit: [] for unit in spec.units}
    for at, op in enumerate(ops):
        if isinstance(op, (Forward, Recompute, Backward)):
            for unit in spec.layers[op.layer].units:
                found[unit].append(at)
    return found


def _intervals(spec: RankSpec, ops: Ops, uses: list[int], whole_step: bool) -> Iterator[tuple[int, int]]:
    """Yield the first and last operation of each interval that needs a unit's weights; see `Use`.

    A block needs them in its Forward, and again from its Recompute to its Backward. An embedding and the head need them
    in Forward only. Intervals that overlap are joined.

    Args:
        uses: indices of the operations that compute with them.
        whole_step: one interval for the whole step.
    """
    recompute_at: int | None = None
    needs: list[tuple[int, int]] = []
    for at in uses:
        op = ops[at]
        assert isinstance(op, (Forward, Recompute, Backward))
        if isinstance(op, Forward):
            needs.append((at, at))
        elif isinstance(op, Recompute):
            recompute_at = at
        elif spec.layers[op.layer].use is Use.LAYER:
            needs.append((at if recompute_at is None else recompute_at, at))
            recompute_at = None
    first, last = None, -1
    for begin, end in sorted(needs):
        if first is not None and begin > last and not whole_step:
            yield first, last
            first = None
        first, last = begin if first is None else first, max(last, end)
    if first is not None:
        yield first, last


def insert_gathers(spec: RankSpec, ops: Ops) -> Ops:
    """Insert the operations that make weights available.

    Stage 3 all-gathers before each use and releases after it. Stages 1 and 2 wait before the first use for the
    all-gather that follows an update.
    """
    before: dict[int, Ops] = {}
    after: dict[int, Ops] = {}
    trains = any(isinstance(op, Backward) for op in ops)
    for unit, uses in _uses(spec, ops).items():
        policy = spec.policy(unit)
        for first, last in _intervals(spec, ops, uses, policy.gathers_once and trains):
            if policy.parameters:
                before.setdefault(first, []).append(Gather(unit))
                after.setdefault(last, []).append(Release(unit))
            elif policy.syncs:
                before.setdefault(first, []).append(Wait(Sync(unit)))
                break
    return _weave(ops, before, after)


def merge_gathers(ops: Ops) -> Ops:
    """Remove a Release and the next Gather of its unit if nothing is computed between them."""
    dropped: set[int] = set()
    released: dict[str, int] = {}
    for at, op in enumerate(ops):
        if isinstance(op, COMPUTE):
            released.clear()
        elif isinstance(op, Release):
            released[op.unit] = at
        elif isinstance(op, Gather) and op.unit in released:
            dropped |= {released.pop(op.unit), at}
    return [op for at, op in enumerate(ops) if at not in dropped]


def insert_reductions(spec: RankSpec, ops: Ops) -> Ops:
    """Open a unit's gradient buffer before its first contribution and reduce it after the last.

    Sharded gradients (stages 2 and 3) are reduced once per micro-batch, unless --zero-reduce-every is step; others once
    per step.
    """
    due: dict[str, dict[int, list[int]]] = {unit: {} for unit in spec.trained_units}  # unit -> micro-batch -> indices
    for at, op in enumerate(ops):
        if isinstance(op, COMPUTE) and _adds_gradients(spec, op):
            for unit in spec.layers[op.layer].units:
                if unit in due:
                    part = op.micro_batch if spec.reduces_each(unit) else -1
                    due[unit].setdefault(part, []).append(at)
    before: dict[int, Ops] = {}
    after: dict[int, Ops] = {}
    for unit, parts in due.items():
        contributions = sorted(at for made in parts.values() for at in made)
        reduced_at = -1
        for made in sorted(parts.values(), key=lambda made: made[-1]):
            # Queued weight gradients of two micro-batches may interleave; they then share one buffer.
            first = contributions[bisect.bisect_right(contributions, reduced_at)]
            before.setdefault(first, []).append(Open(unit))
            after.setdefault(made[-1], []).insert(0, Reduce(unit))  # reverse order of forward
            reduced_at = made[-1]
    return _weave(ops, before, after)


def _adds_gradients(spec: RankSpec, op: LayerOp) -> bool:
    if spec.layers[op.layer].use is Use.HEAD:
        return isinstance(op, Forward) and op.graph
    return isinstance(op, BackwardWeights) or (isinstance(op, Backward) and op.weights)


def _weave(ops: Ops, before: dict[int, Ops], after: dict[int, Ops]) -> Ops:
    return [op for at, own in enumerate(ops) for op in (*before.get(at, ()), own, *after.get(at, ()))]


def _layer_before(spec: RankSpec, ops: Ops) -> list[int]:
    """Return, for each operation, the index at which the previous layer's computation starts.

    A Recompute and its Backward are one computation. The head's Backward does not count, because its Forward computed
    the gradients.
    """
    found, begin, then, key = [], 0, 0, None
    for at, op in enumerate(ops):
        if isinstance(op, Backward) and spec.layers[op.layer].use is Use.HEAD:
            found.append(begin)
            continue
        if isinstance(op, COMPUTE) and key != (op.key, isinstance(op, Forward)):
            key = op.key, isinstance(op, Forward)
            begin, then = then, at
        found.append(begin if isinstance(op, COMPUTE) else then)
    return found


def start_early(spec: RankSpec, ops: Ops) -> Ops:
    """Split asynchronous operations: Start one layer ahead, Wait where the result is needed.

    Messages are always asynchronous, because two neighbours that block in sends to each other would wait forever.
    """
    early, overlap = _layer_before(spec, ops), spec.overlap
    released: dict[str, int] = {}  # unit -> earliest index of its next gather
    started: dict[int, Ops] = {}  # index -> operations started before it
    reducing: dict[str, list[str]] = {}  # sharding group -> units whose reduction is in flight
    sending: dict[Route, Send] = {}  # the last send, which ends before the next one on its route starts
    split: list[Ops] = [[op] for op in ops]
    for at, op in enumerate(ops):
        if isinstance(op, Gather):
            start = max(released.get(op.unit, 0), early[at]) if overlap else at
            started.setdefault(start, []).append(Start(op))
            split[at] = [Wait(op)]
        elif isinstance(op, Release):
            released[op.unit] = at + 1
        elif isinstance(op, (Fetch, Recv)):
            started.setdefault(early[at] if overlap else at, []).append(Start(op))
            split[at] = [Wait(op)]
        elif isinstance(op, Send):
            way = spec.route(op)
            split[at] = [Wait(sending[way]), Start(op)] if way in sending else [Start(op)]
            sending[way] = op
        elif isinstance(op, (Open, Reduce)) and overlap:
            busy = reducing.setdefault(spec.units[op.unit].group, [])
            # Before a Reduce, wait for the reduction that uses the group's buckets. Before an Open, wait for the one
            # that still reads the unit's buffer.
            if spec.policy(op.unit).optimizer and (busy if isinstance(op, Reduce) else op.unit in busy):
                split[at].insert(0, Wait(Reduce(busy.pop())))
            if isinstance(op, Reduce):
                split[at][-1] = Start(op)
                busy.append(op.unit)
    found: Ops = [op for at in range(len(ops)) for op in (*started.get(at, ()), *split[at])]
    found += [Wait(op) for op in sending.values()]
    in_flight = {unit for busy in reducing.values() for unit in busy}
    return found + [Wait(Reduce(unit)) for unit in spec.trained_units if unit in in_flight]


def start_replica_sums(spec: RankSpec, ops: Ops) -> Ops:
    """Start a unit's all-reduce over replicas once its gradients are summed over shards.

    It overlaps with the backward of earlier layers; `finish_gradients` waits for it.
    """
    if not spec.overlap:
        return ops
    complete = {op.op.unit: at for at, op in enumerate(ops) if isinstance(op, Wait) and isinstance(op.op, Reduce)}
    replicated = {
        unit: at for unit, at in complete.items() if spec.group(unit).replicas > 1 and not spec.units[unit].on_host
    }
    return _weave(ops, {}, {at: [Start(ReduceReplicas(unit))] for unit, at in replicated.items()})


def finish_gradients(spec: RankSpec) -> Ops:
    """Complete the gradient sums once per step: over replicas, over tp, then over the stages that share a tied table.

    Gradients in host memory were complete before they were copied (`store_gradients`), except that of the tied table.
    The norm is last, because it reads complete gradients.
    """
    trained, ops = [u for u in spec.trained_units if not spec.units[u].on_host], list[Op]()
    replicated = [u for u in trained if spec.group(u).replicas > 1]
    if not spec.overlap:
        ops += [Start(ReduceReplicas(u)) for u in replicated]
    ops += [Wait(ReduceReplicas(u)) for u in replicated]
    summed = [u for u in trained if spec.units[u].sums_over_tp]
    ops += [Start(SumReplicated(u)) for u in summed] + [Wait(SumReplicated(u)) for u in summed]
    if spec.tied in spec.trained_units:
        ops += [SumTied(spec.tied), *([StoreGradient(spec.tied)] if spec.tied in spec.offloaded_units else [])]
    return [*ops, GradNorm()]


def update_units(spec: RankSpec) -> Ops:
    """Step the optimizer unit by unit, and start the all-gather of its updated weights.

    The next step waits for it before their first use. The host updates last, while the device computes its own updates.
    The copy of a unit's weights overlaps with the next unit's update. So do the writing of its states to a file, and
    then the reading of the unit after the next into the same memory.
    """
    host, on_disk = spec.offloaded_units, spec.on_disk
    ops: Ops = [Start(ReadStates(unit)) for unit in host[:2]] if on_disk and spec.overlap else []
    for unit in spec.trained_units:
        if not spec.units[unit].on_host:
            ops += [Update(unit), *_sync(spec, unit)]
    for number, unit in enumerate(host):
        if not spec.overlap:
            read, write = ([ReadStates(unit)], [WriteStates(unit)]) if on_disk else ([], [])
            ops += [*read, Update(unit), FetchWeights(unit), *write, *_sync(spec, unit)]
            continue
        ops += [*([Wait(ReadStates(unit))] if on_disk else []), Update(unit)]
        ops += _finish_update(spec, host[number - 1]) if number else []
        ops.append(Start(FetchWeights(unit)))
        if on_disk:
            ops += [Start(WriteStates(unit)), *(Start(ReadStates(ahead)) for ahead in host[number + 2 : number + 3])]
    return ops + (_finish_update(spec, host[-1]) if host and spec.overlap else [])


def _finish_update(spec: RankSpec, unit: str) -> Ops:
    written: Ops = [Wait(WriteStates(unit))] if spec.on_disk else []
    return [Wait(FetchWeights(unit)), *_sync(spec, unit), *written]


def _sync(spec: RankSpec, unit: str) -> Ops:
    if not spec.policy(unit).syncs:
        return []
    return [Start(Sync(unit)) if spec.overlap else Sync(unit)]
