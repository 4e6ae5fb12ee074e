"""Options that change no result: the order of starts, waits and computation, the types that are sent, compiling.

Seen at the edges that every engine has: `Axis` starts collectives and `Pending` waits for them; each block's forward
calls torch's attention, and each block's backward passes its output's gradient.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from megazero.engine.mesh.collectives import Axis, Pending
from megazero.engine.plan.program.operations import Op, Open
from megazero.engine.step.engine import Engine
from tests.helpers.families import of_family
from tests.parallel.cases import MODEL, Case, micro_batches, new_engine

STARTS = ("start_all_reduce", "start_all_gather", "start_reduce_scatter")
BLOCKS = MODEL.num_layers


class Event(NamedTuple):
    """`what`: a collective's name, "wait", "forward" or "backward" of a block, "step"."""

    what: str
    number: int = 0  # of the collective that is started or waited for
    axis: str = ""
    numel: int = 0  # of the larger side
    dtype: str = ""


class Recorder:
    """Records events until it is closed."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._pending: list[Pending] = []  # kept alive: so no two have one identity
        self._originals = {name: getattr(Axis, name) for name in STARTS}
        self._wait, self._attention = Pending.wait, F.scaled_dot_product_attention
        for name, original in self._originals.items():
            setattr(Axis, name, self._starting(name, original))
        recorder = self

        def wait(pending: Pending) -> Any:
            numbers = [i for i, known in enumerate(recorder._pending) if known is pending]
            if numbers and not any(e.what == "wait" and e.number == numbers[0] for e in recorder.events):
                recorder.events.append(Event("wait", numbers[0]))
            return recorder._wait(pending)

        Pending.wait = wait
        F.scaled_dot_product_attention = self._attend

    def _starting(self, name: str, original: Any) -> Any:
        def start(axis: Axis, x: torch.Tensor, *args: Any, **kwargs: Any) -> Pending:
            if axis.size == 1:
                return original(axis, x, *args, **kwargs)
            others = [t.numel() for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            number = len(self._pending)
            largest = max([x.numel(), *others[:1]])
            self.events.append(Event(name, number, axis.name, largest, str(x.dtype).removeprefix("torch.")))
            pending = original(axis, x, *args, **kwargs)
            self._pending.append(pending)
            return pending

        return start

    def _attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.events.append(Event("forward"))
        y = self._attention(*args, **kwargs)
        if y.requires_grad:
            y.register_hook(lambda _: self.events.append(Event("backward")))
        return y

    def close(self) -> list[Event]:
        for name, original in self._originals.items():
            setattr(Axis, name, original)
        Pending.wait, F.scaled_dot_product_attention = self._wait, self._attention
        return self.events


def arena_after_a_step(rank: int, case: Case, poison: bool) -> list[bool]:
    """Return, per range that weights were gathered into, whether it is NaN throughout when the iteration is over."""
    gathered: list[torch.Tensor] = []
    start = Axis.start_all_gather

    def remembering(axis: Axis, part: torch.Tensor, out: torch.Tensor, *others: Any) -> Pending:
        gathered.append(out.detach())
        return start(axis, part, out, *others)

    Axis.start_all_gather = remembering
    try:
        config = case.config()
        config = replace(config, zero=replace(config.zero, poison_buffers=poison))
        engine = Engine(config, new_engine(rank, case).mesh)
        engine.train_step(1, micro_batches(case, engine.mesh, 0))
    finally:
        Axis.start_all_gather = start
    return [bool(out.isnan().all()) for out in gathered]


def fresh_gradients(rank: int, case: Case) -> list[str]:
    """Parameters of any unit whose gradient memory holds anything but NaN before the first contribution."""
    engine = new_engine(rank, case)
    found, opened = [], set()

    @contextmanager
    def look(op: Op) -> Iterator[None]:
        yield
        if isinstance(op, Open):
            opened.add(op.unit)
            unit = engine.zero.units[op.unit]
            for member in unit.flat.members:
                if not unit.gradients.unsharded.data[member.window.slice()].isnan().all():
                    found.append(member.weight.spec.name)

    engine.interpreter.observe = look
    engine.train_step(1, micro_batches(case, engine.mesh, 0))
    assert opened == set(engine.zero.units)
    return found


def two_steps(rank: int, case: Case) -> list[Event]:
    """The events of two iterations; a "step" at the beginning of each and at the end."""
    recorder = Recorder()
    try:
        engine = new_engine(rank, case)
        for step in range(2):
            recorder.events.append(Event("step"))
            engine.train_step(step + 1, micro_batches(case, engine.mesh, step))
        recorder.events.append(Event("step"))
    finally:
        events = recorder.close()
    return events


def intervals(events: list[Event], what: str, axes: tuple[str, ...] = ("dp", "shard")) -> list[tuple[Event, Counter]]:
    """Each collective of a kind, in the order of their starts, with the events before its wait."""
    found = []
    for at, event in enumerate(events):
        if event.what == what and event.axis in axes:
            waits = [i for i, e in enumerate(events) if e.what == "wait" and e.number == event.number]
            found.append((event, Counter(e.what for e in events[at : waits[0] if waits else len(events)])))
    return found


def of_blocks(found: list[tuple[Event, Counter]]) -> list[Counter]:
    """Select those of the blocks' units, which all have one size that no other unit has."""
    sizes = Counter(event.numel for event, _ in found)
    size, count = sizes.most_common(1)[0]
    assert count >= BLOCKS
    return [between for event, between in found if event.numel == size]


def second_step(events: list[Event]) -> list[Event]:
    _, second, end = (i for i, e in enumerate(events) if e.what == "step")
    return events[second:end]


def overlapping(rank_events: list[list[Event]], what: str) -> list[Counter]:
    """Events of the first rank; all ranks issue the same collectives in the same order, or they could hang."""
    orders = [[(e.what, e.axis, e.numel) for e in events if e.what.startswith("start")] for events in rank_events]
    assert all(order == orders[0] for order in orders)
    return of_blocks(intervals(second_step(rank_events[0]), what))


ONE = {"dp": 2, "micro_batches": 1}
OFF = (("overlap_comm", False),)


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_weights_are_gathered_a_layer_ahead(recompute: str, ranks) -> None:
    """Stage 3: while a block computes, the next one's weights are on their way, in forward and in backward."""
    case = Case(zero=3, recompute=recompute, **ONE)
    found = overlapping(ranks(2).run(two_steps, case), "start_all_gather")
    assert len(found) == 2 * BLOCKS
    forward, backward = found[:BLOCKS], found[BLOCKS:]
    # The first may be preceded by nothing but the embedding, and the last of backward by the head.
    assert all(between["forward"] == 1 for between in forward[1:])
    assert all(between["backward"] == 1 for between in backward[1:])


def test_weights_arrive_before_they_are_used(ranks) -> None:
    """No block computes with weights that are on their way: a gather is waited for by its own block's forward."""
    events = second_step(ranks(2).run(two_steps, Case(zero=3, **ONE))[0])
    waits = of_blocks(intervals(events, "start_all_gather"))
    gathers = [e for e, _ in intervals(events, "start_all_gather")]
    size = Counter(e.numel for e in gathers).most_common(1)[0][0]
    numbers = {e.number for e in gathers if e.numel == size}
    computed = waited = 0
    for event in events:
        waited += event.what == "wait" and event.number in numbers
        computed += event.what in ("forward", "backward")
        assert waited >= computed
    assert len(waits) == waited == computed == 2 * BLOCKS


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_are_reduced_behind_the_backward(zero: int, ranks) -> None:
    """A block's gradients are on their way while the block before it runs its backward."""
    found = overlapping(ranks(2).run(two_steps, Case(zero=zero, **ONE)), "start_reduce_scatter")
    assert len(found) == BLOCKS
    assert all(between["backward"] >= 1 for between in found[:-1])


def test_stage_0_reduces_behind_the_backward(ranks) -> None:
    found = overlapping(ranks(2).run(two_steps, Case(zero=0, **ONE)), "start_all_reduce")
    assert len(found) == BLOCKS
    assert all(between["backward"] >= 1 for between in found[:-1])


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_updates_arrive_behind_the_next_forward(zero: int, ranks) -> None:
    """Updated parameters are gathered while the next iteration's first blocks compute: block i's until block i."""
    events = ranks(2).run(two_steps, Case(zero=zero, **ONE))[0]
    first, *_ = (i for i, e in enumerate(events) if e.what == "step")
    found = of_blocks(intervals(events[first:], "start_all_gather"))
    assert len(found) == 2 * BLOCKS
    assert sorted(between["forward"] for between in found[:BLOCKS]) == list(range(BLOCKS))
    assert all(between["step"] == 1 for between in found[:BLOCKS])


@pytest.mark.parametrize("zero", [*(pytest.param(zero, marks=pytest.mark.slow) for zero in range(3)), 3])
def test_without_overlap_nothing_is_in_flight_while_a_block_computes(zero: int, ranks) -> None:
    events = ranks(2).run(two_steps, Case(zero=zero, options=OFF, **ONE))[0]
    every = [between for what in STARTS for _, between in intervals(events, what)]
    assert len(every) > 2 * BLOCKS
    for between in every:
        assert not between["forward"] and not between["backward"]


@pytest.mark.parametrize(
    ("zero", "grad_dtype"),
    [
        pytest.param(zero, dtype, marks=[pytest.mark.slow] * ((zero + (dtype == "fp32")) % 2))
        for zero in range(4)
        for dtype in ("fp32", "bf16")
    ],
)
def test_gradients_travel_in_grad_dtype(zero: int, grad_dtype: str, ranks) -> None:
    """And weights in the type of the run."""
    names = {"fp32": "float32", "bf16": "bfloat16"}
    case = Case(zero=zero, precision="bf16", grad_dtype=grad_dtype, **ONE)
    events = second_step(ranks(2).run(two_steps, case)[0])
    sums = [e for what in ("start_all_reduce", "start_reduce_scatter") for e, _ in intervals(events, what)]
    large = [e for e in sums if e.numel > 1]  # the rest are counts and norms
    assert len(large) >= BLOCKS and {e.dtype for e in large} == {names[grad_dtype]}
    gathers = {e.dtype for e, _ in intervals(events, "start_all_gather")}
    assert gathers == ({"bfloat16"} if zero else set())


@pytest.mark.parametrize("poison", [False, True])
def test_a_poisoned_arena_holds_nothing_to_read(poison: bool, ranks) -> None:
    """Stage 3: where weights were gathered there is NaN, and nothing else, once they are released."""
    for found in ranks(2).run(arena_after_a_step, Case(zero=3, **ONE), poison):
        assert len(found) >= 2 * BLOCKS
        assert found == [poison] * len(found)


@pytest.mark.parametrize("zero", [0, 2])
def test_poisoned_gradients_hold_nothing_to_add_to(zero: int, ranks) -> None:
    """So that a parameter which is added to before it is written, or never written, is seen."""
    assert ranks(2).run(fresh_gradients, Case(zero=zero, **ONE)) == [[], []]


@pytest.mark.parametrize("compiles", [False, True])
def test_compiled_functions_are_what_runs(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that torch was asked to compile is called in a training step; nothing, if it was not asked for."""
    made: list[str] = []
    called: Counter[str] = Counter()

    def compile_(fn: Any, **_: Any) -> Any:
        made.append(fn.__name__)

        def call(*args: Any, **kwargs: Any) -> Any:
            called[fn.__name__] += 1
            return fn(*args, **kwargs)

        return call

    monkeypatch.setattr(torch, "compile", compile_)
    for architecture in ("gpt2", "llama"):  # whose activation functions differ
        made.clear()
        case = Case(compile=compiles, model=replace(MODEL, attention_dropout=0.1, **of_family(architecture)))
        engine = new_engine(0, case)
        before = called.copy()
        engine.train_step(1, micro_batches(case, engine.mesh, 0))
        assert set((called - before).values()) == ({2 * BLOCKS} if compiles else set())
        assert len(made) == len(set(made)) and bool(made) == compiles
    assert set(called) == set(made)
