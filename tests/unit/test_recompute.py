"""What is kept from forward to backward, and where: slots, the arena through all that a run does to it, prefetch."""

from __future__ import annotations

import pytest
import torch

from megazero.activations.offload import Copies, Fetch, Stored
from megazero.activations.store import Checkpoints, recomputed
from megazero.memory.pool import Slots
from megazero.memory.tracker import Ledger
from megazero.model.recompute import through
from megazero.train.engine import Engine
from tests.parallel.cases import STEPS, Case, micro_batches, new_engine, train

CPU = torch.device("cpu")


def slots(contiguous: bool, ledger: Ledger | None = None) -> Slots:
    return Slots(6, torch.float32, CPU, ledger or Ledger(), idle="buffers", contiguous=contiguous)


def test_an_arena_is_one_allocation_and_suffices() -> None:
    arena = slots(contiguous=True)
    arena.begin(3)
    taken = [arena.take() for _ in range(3)]
    assert len({slot.data.untyped_storage().data_ptr() for slot in taken}) == 1
    assert len({slot.data.data_ptr() for slot in taken}) == 3
    with pytest.raises(AssertionError, match="all 3 slots are in use"):
        arena.take()
    address = taken.pop().data.data_ptr()
    assert arena.take().data.data_ptr() == address


def test_separate_slots_are_made_when_needed_and_used_again() -> None:
    ledger = Ledger()
    pool = slots(contiguous=False, ledger=ledger)
    pool.begin(3)
    assert ledger.now["buffers"] == 0
    first, second = pool.take(), pool.take()
    assert ledger.now["buffers"] == 0  # those in use are their users' to enter
    addresses = {first.data.data_ptr(), second.data.data_ptr()}
    del first, second
    assert ledger.now["buffers"] == 2 * 24
    pool.begin(3)
    kept = [pool.take() for _ in range(2)]
    assert {slot.data.data_ptr() for slot in kept} == addresses


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_slot_that_outlives_its_step_does_not_come_back(contiguous: bool) -> None:
    """A traceback may hold on to a graph: the next step has all slots, and the late one is not free twice."""
    ledger = Ledger()
    pool = slots(contiguous, ledger)
    pool.begin(2)
    late = [pool.take(), pool.take()]
    pool.begin(2)
    taken = [pool.take(), pool.take()]
    late.clear()
    assert len(pool.free) == 0 and len({slot.data.data_ptr() for slot in taken}) == 2
    taken.clear()
    assert len(pool.free) == 2 and ledger.now["buffers"] == 2 * 24


def test_an_arena_grows_between_steps() -> None:
    ledger = Ledger()
    arena = slots(True, ledger)
    arena.begin(2)
    arena.begin(5)
    assert len(arena.free) == 5 and ledger.now["buffers"] == 5 * 24
    arena.begin(3)
    assert len(arena.free) == 5


# -- the arena in an engine

ARENA = Case(recompute="full", md=True, micro_batches=1, batch=6)


def arena_of(engine: Engine) -> Slots:
    assert engine.checkpoints is not None and engine.checkpoints.slots is not None
    return engine.checkpoints.slots


def step(engine: Engine, number: int, case: Case = ARENA) -> float:
    return engine.train_step(number + 1, micro_batches(case, engine.mesh, number)).loss


@pytest.fixture
def plain() -> list[float]:
    return train(0, ARENA._replace(md=False)).losses


def test_evaluation_does_not_touch_the_arena(plain: list[float]) -> None:
    engine = new_engine(0, ARENA)
    found = []
    for number in range(STEPS):
        engine.evaluate(micro_batches(ARENA, engine.mesh, 0) * 3)
        found.append(step(engine, number))
        arena = arena_of(engine)
        assert len(arena.free) == len(arena.buffers) == 5
    assert found == plain


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("host", [False, True])
def test_an_exception_leaves_the_arena_whole(where: str, host: bool, plain: list[float]) -> None:
    """Even while its traceback is held: what failed is simply done again, and counted once."""
    engine = new_engine(0, ARENA._replace(host=host))
    found = [step(engine, 0)]
    calls = []

    def fail(*_: object) -> None:
        calls.append(None)
        if len(calls) == {"forward": 4, "backward": 7}[where]:  # five blocks' forwards, then their recomputes
            raise MemoryError("out of memory")

    for block in engine.model.blocks.values():
        block.norm2.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError) as held:
        step(engine, 1)
    peak = engine.ledger.peak["host" if host else "activation_checkpoints"]
    found += [step(engine, number) for number in range(1, STEPS)]
    arena = arena_of(engine)
    assert engine.ledger.peak["host" if host else "activation_checkpoints"] == 5 * arena.each_bytes >= peak
    assert len(arena.free) == len(arena.buffers) == 5
    assert found == plain
    del held


def test_the_number_of_micro_batches_may_change() -> None:
    """gpipe holds them all: the arena follows. Their order of summation is the only difference."""
    engine = new_engine(0, ARENA._replace(schedule="gpipe"))
    wanted = train(0, ARENA._replace(md=False)).losses
    found = []
    for number, count in enumerate((1, 3, 2, 1)):
        found.append(step(engine, number, ARENA._replace(micro_batches=count)))
        assert len(arena_of(engine).buffers) == 5 * max((1, 3, 2, 1)[: number + 1])
    assert found == pytest.approx(wanted, rel=1e-5)


def test_a_skipped_step_leaves_the_arena_whole() -> None:
    engine = new_engine(0, ARENA)
    batches = micro_batches(ARENA, engine.mesh, 0)
    masked = [batch._replace(loss_mask=torch.zeros_like(batch.loss_mask)) for batch in batches]
    assert engine.train_step(1, masked).skipped
    assert len(arena_of(engine).free) == 5
    assert step(engine, 0) == train(0, ARENA).losses[0]


def test_gradients_and_checkpoints_stay_where_they_are() -> None:
    """Step after step, in the same places, of one allocation each."""
    case = ARENA._replace(micro_batches=2)
    engine = new_engine(0, case)
    seen = []
    for number in range(2):
        places = []
        contribute = engine.zero.units["blocks.2"].contribute

        def look(parameter, write, contribute=contribute, places=places):
            done = contribute(parameter, write)
            places.append(engine.zero.units["blocks.2"].full.data.data_ptr())
            return done

        engine.zero.units["blocks.2"].contribute = look
        step(engine, number, case)
        engine.zero.units["blocks.2"].contribute = contribute
        seen.append((set(places), {buffer.data_ptr() for buffer in arena_of(engine).buffers}))
    assert seen[0] == seen[1] and len(seen[0][0]) == 1
    homes = [unit.full_home for unit in engine.zero.units.values()]
    assert len({home.untyped_storage().data_ptr() for home in homes}) == 1


# -- offloading


class Watched(Copies):
    """Notes what is asked of it."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def start_store(self, part: torch.Tensor, host: torch.Tensor) -> Stored:
        self.events.append(f"store {int(part[0])}")
        return super().start_store(part, host)

    def start_fetch(self, stored: Stored) -> Fetch:
        self.events.append(f"fetch {int(stored.host[0])}")
        return super().start_fetch(stored)


def test_the_host_is_asked_one_block_ahead() -> None:
    """While block i is computed again, the input of block i - 1 is on its way; the last one's since backward began.

    Of two micro-batches in flight, whose values are 0, 1, 2 and 10, 11, 12.
    """
    events: list[str] = []
    checkpoints = Checkpoints(4, torch.float32, CPU, Ledger(), tp=None, on_host=True, contiguous=False)
    checkpoints.copies = Watched(events)

    def block(x: torch.Tensor) -> torch.Tensor:
        events.append(f"compute {int(x[0])}")
        return (x + 1).square().sqrt()

    outputs = []
    for first in (0.0, 10.0):
        y, keep = torch.full((4,), first, requires_grad=True), checkpoints.keep()
        for _ in range(3):
            y = recomputed(block, y, keep=keep)
        outputs.append(y)
    assert events == [f"{what} {first + i}" for first in (0, 10) for i in range(3) for what in ("store", "compute")]
    for first, y in zip((0, 10), outputs, strict=True):
        events.clear()
        checkpoints.fetch_ahead()
        events.append("head")
        y.sum().backward()
        order = ["fetch 2", "head", "fetch 1", "compute 2", "fetch 0", "compute 1", "compute 0"]
        assert events == [
            " ".join([word, *(str(first + int(n)) for n in rest)]) for word, *rest in map(str.split, order)
        ]


def test_host_memory_is_used_again() -> None:
    """Step after step the same buffers: pinning is slow."""
    engine = new_engine(0, ARENA._replace(md=False, host=True))
    places = []
    for number in range(3):
        step(engine, number)
        places.append({buffer.data_ptr() for buffer in arena_of(engine).buffers})
    assert places[0] == places[1] == places[2] and len(places[0]) == 5
    assert engine.ledger.peak["activation_checkpoints"] == 0


# -- selective


def test_through_keeps_what_is_not_the_whole_of_it() -> None:
    """A part of what `prepare` gave begins at the same address."""
    x = torch.linspace(1, 2, 7, requires_grad=True)
    through(torch.exp, lambda y: y[:3] * y[:3], x, again=True).sum().backward()
    wanted = torch.where(torch.arange(7) < 3, 2 * (2 * x).exp(), 0.0)
    assert x.grad is not None and torch.allclose(x.grad, wanted)


def test_through_makes_again_what_it_does_not_keep() -> None:
    calls = []

    def prepare(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return x.exp()

    def gradient(again: bool) -> torch.Tensor:
        x = torch.linspace(-1, 1, 7, requires_grad=True)
        through(prepare, torch.square, x, again=again).sum().backward()
        assert x.grad is not None
        return x.grad

    kept = gradient(False)
    assert calls == [True]
    assert torch.equal(gradient(True), kept)
    assert calls == [True, True, False]


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_selective_recompute_computes_the_cheap_parts_twice(recompute: str) -> None:
    engine = new_engine(0, ARENA._replace(recompute=recompute, md=False))
    calls: list[bool] = []
    for block in engine.model.blocks.values():
        for norm in (block.norm1, block.norm2):
            norm.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    step(engine, 0)
    assert calls.count(True) == 2 * ARENA.model.num_layers
    assert calls.count(False) == (2 * ARENA.model.num_layers if recompute == "selective" else 0)
