"""Kept inputs: slots, the arena through all that a run does to it, prefetch from the host, selective recompute."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megazero.engine.activations.store import KeptInputs
from megazero.engine.kernels.kernel_table import EAGER
from megazero.engine.memory.copies import Copies, DeviceCopy, HostCopy
from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.model.layers.norm import LayerNorm
from megazero.engine.plan.program.operations import Backward, Forward, Op, Recompute
from megazero.engine.step.engine import Engine
from tests.helpers.families import of_family
from tests.helpers.table import for_each
from tests.parallel.cases import STEPS, Case, micro_batches, new_engine, train

CPU = torch.device("cpu")


def inputs(contiguous: bool, tracker: MemoryTracker, on_host: bool = False) -> KeptInputs:
    return KeptInputs(6, torch.float32, CPU, tracker, tp=None, on_host=on_host, contiguous=contiguous, sent=Counter())


def test_an_arena_is_one_allocation() -> None:
    tracker = MemoryTracker()
    arena = inputs(True, tracker)
    arena.begin(3)
    assert len({slot.untyped_storage().data_ptr() for slot in arena.slots.slots}) == 1
    assert len({slot.data_ptr() for slot in arena.slots.slots}) == 3
    assert tracker.now["buffers"] == 3 * 24
    arena.keep(("a", 0), torch.arange(6.0), 1)
    assert (tracker.now["buffers"], tracker.now["activation_checkpoints"]) == (2 * 24, 24)
    assert torch.equal(arena.take(("a", 0)), torch.arange(6.0)) and torch.equal(arena.slots[1], torch.arange(6.0))
    arena.drop(("a", 0), 1)
    assert (tracker.now["buffers"], tracker.now["activation_checkpoints"]) == (3 * 24, 0)


def test_an_arena_grows_between_steps_and_never_shrinks() -> None:
    tracker = MemoryTracker()
    arena = inputs(True, tracker)
    for count, wanted in ((2, 2), (5, 5), (3, 5)):
        arena.begin(count)
        assert len(arena.slots) == wanted and tracker.now["buffers"] == wanted * 24


@for_each("contiguous", [True, False])
def test_inputs_left_by_a_failed_step_are_dropped(contiguous: bool) -> None:
    tracker = MemoryTracker()
    kept = inputs(contiguous, tracker)
    kept.begin(2 * contiguous)
    for i in range(2):
        kept.keep(("a", i), torch.zeros(6), i if contiguous else None)
    kept.begin(2 * contiguous)
    assert not kept.kept and tracker.now["activation_checkpoints"] == 0
    assert tracker.now["buffers"] == 2 * 24 * contiguous


# -- the arena in an engine

ARENA = Case(recompute="full", md=True, micro_batches=1, batch=6, precision="fp64")


def arena_of(engine: Engine) -> KeptInputs:
    return engine.interpreter.kept


def is_whole(arena: KeptInputs, slots: int = 5) -> bool:
    """Return whether nothing is kept, and every slot is counted as free."""
    kind = arena.free_kind
    return len(arena.slots) == slots and not arena.kept and arena.tracker.now[kind] == slots * arena.slots.slot_bytes


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
        assert is_whole(arena_of(engine))
    assert found == plain


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("host", [False, True])
def test_an_exception_leaves_the_arena_whole(where: str, host: bool, plain: list[float]) -> None:
    """Even while its traceback is held: the failed call is repeated, and counted once."""
    engine = new_engine(0, ARENA._replace(host=host))
    found = [step(engine, 0)]
    calls = []

    def fail(*_: object) -> None:
        calls.append(None)
        if len(calls) == {"forward": 4, "backward": 7}[where]:  # five blocks' forwards, then their recomputes
            raise MemoryError("out of memory")

    for block in engine.model.blocks.values():
        block.mlp.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError) as held:
        step(engine, 1)
    peak = engine.tracker.peak["host" if host else "activation_checkpoints"]
    found += [step(engine, number) for number in range(1, STEPS)]
    arena = arena_of(engine)
    assert engine.tracker.peak["host" if host else "activation_checkpoints"] == 5 * arena.slots.slot_bytes >= peak
    assert is_whole(arena)
    assert found == plain
    del held


def test_the_number_of_micro_batches_may_change() -> None:
    """gpipe holds them all: the arena follows. Their order of summation is the only difference."""
    engine = new_engine(0, ARENA._replace(schedule="gpipe"))
    wanted = train(0, ARENA._replace(md=False), 4).losses
    found = []
    for number, count in enumerate((1, 3, 2, 1)):
        found.append(step(engine, number, ARENA._replace(micro_batches=count)))
        assert len(arena_of(engine).slots) == 5 * max((1, 3, 2, 1)[: number + 1])
    assert found == pytest.approx(wanted, rel=1e-10)


def test_a_skipped_step_leaves_the_arena_whole() -> None:
    engine = new_engine(0, ARENA)
    batches = micro_batches(ARENA, engine.mesh, 0)
    masked = [batch._replace(loss_mask=torch.zeros_like(batch.loss_mask)) for batch in batches]
    assert engine.train_step(1, masked).skipped
    assert is_whole(arena_of(engine))
    assert step(engine, 0) == train(0, ARENA).losses[0]


def test_gradients_and_checkpoints_stay_where_they_are() -> None:
    """Step after step, in the same places, of one allocation each."""
    case = ARENA._replace(micro_batches=2)
    engine = new_engine(0, case)
    seen = []
    for number in range(2):
        places = []
        unit = engine.zero.units["blocks.2"]

        @contextlib.contextmanager
        def look(op: Op, places=places, unit=unit):
            yield
            if isinstance(op, Backward) and op.layer == "blocks.2":
                places.append(unit.gradients.unsharded.data.data_ptr())

        engine.interpreter.observe = look
        step(engine, number, case)
        seen.append((set(places), {slot.data_ptr() for slot in arena_of(engine).slots.slots}))
    assert seen[0] == seen[1] and len(seen[0][0]) == 1
    bound = [unit.gradients._persistent[0] for unit in engine.zero.units.values()]
    assert len({buffer.untyped_storage().data_ptr() for buffer in bound}) == 1


# -- offloading


class Watched(Copies):
    """Records its calls."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(Counter())
        self.events = events

    def start_fetch(self, stored: HostCopy) -> DeviceCopy:
        self.events.append("fetch")
        return super().start_fetch(stored)


def test_the_host_is_asked_one_block_ahead() -> None:
    """While block i is recomputed, the input of block i - 1 is on its way; the last during the head's backward."""
    engine = new_engine(0, ARENA._replace(md=False, host=True, micro_batches=2))
    events: list[str] = []
    engine.interpreter.kept.copies = Watched(events)

    @contextlib.contextmanager
    def observe(op: Op):
        if isinstance(op, (Recompute, Backward)):
            events.append(f"{type(op).__name__} {op.layer}")
        yield

    engine.interpreter.observe = observe
    step(engine, 0, ARENA._replace(micro_batches=2))
    order = ["fetch", "Backward head", "fetch"]
    for n in (4, 3, 2, 1, 0):
        order += [f"Recompute blocks.{n}", f"Backward blocks.{n}", *(["fetch"] if n > 1 else [])]
    order += ["Backward position_embedding", "Backward token_embedding"]
    assert events == order * 2


def test_host_memory_is_used_again() -> None:
    """Step after step the same buffers: pinning is slow."""
    engine = new_engine(0, ARENA._replace(md=False, host=True))
    places = []
    for number in range(3):
        step(engine, number)
        places.append({slot.data_ptr() for slot in arena_of(engine).slots.slots})
    assert places[0] == places[1] == places[2] and len(places[0]) == 5
    assert engine.tracker.peak["activation_checkpoints"] == 0


# -- selective


@for_each("recompute", ["none", "selective"])
def test_selective_recompute_computes_the_cheap_parts_twice(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine(0, ARENA._replace(recompute=recompute, md=False))
    calls, normalise, gelu = [], LayerNorm.normalise, EAGER.activations["gelu-tanh"]
    monkeypatch.setattr(LayerNorm, "normalise", lambda *given: calls.append("norm") or normalise(*given))
    counted = gelu._replace(forward=lambda x: calls.append("gelu") or gelu.forward(x))
    for block in engine.model.blocks.values():
        block.mlp.activation = counted
    step(engine, 0)
    layers, times = ARENA.model.num_layers, 2 if recompute == "selective" else 1
    assert Counter(calls) == {"gelu": times * layers, "norm": times * 2 * layers + 1}  # the head's is kept


# -- full


@for_each("architecture", ["gpt2", "parallel"])
def test_a_recompute_leaves_out_the_products_that_only_its_output_needs(architecture: str) -> None:
    model = replace(ARENA.model, **of_family(architecture), untie_embeddings=True)
    engine, flops = new_engine(0, ARENA._replace(model=model)), {}

    @contextlib.contextmanager
    def count(op: Op) -> Iterator[None]:
        with FlopCounterMode(display=False) as counter:
            yield
        flops[type(op), getattr(op, "layer", "")] = counter.get_total_flops()

    engine.interpreter.observe = count
    step(engine, 0)
    tokens, h, f = ARENA.batch * model.seq_length, model.hidden_size, model.ffn_size
    last = 2 * tokens * h * (f if architecture == "gpt2" else f + h)  # with attention's, which is added to the MLP's
    assert flops[Forward, "blocks.1"] - flops[Recompute, "blocks.1"] == last
