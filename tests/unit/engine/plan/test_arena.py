"""The arena of gathered weights: offsets and size."""

import itertools
import random
from dataclasses import replace

from megazero.engine.model.stage import TOKEN_EMBEDDING, declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.arena import Life, extent, fit, most_alive, place_weights
from megazero.engine.plan.program.operations import Forward, Gather, Ops, Release, Start, Wait
from megazero.engine.plan.program.program import program
from megazero.engine.plan.program.rank_spec import RankSpec, rank_spec
from megazero.engine.plan.schedule.schedules import EVALUATION
from megazero.flags.config import Config, ModelConfig, ParallelConfig, TrainingConfig, ZeroConfig
from tests.helpers.table import for_each


def test_lives_that_overlap_in_time_do_not_in_memory() -> None:
    for seed in range(200):
        r = random.Random(seed)
        lives = [Life(at := r.randrange(40), at + r.randrange(12), r.choice([1, 2, 7, 16])) for _ in range(25)]
        offsets = fit(lives)
        assert extent(lives, offsets) >= most_alive(lives)
        for one, at in zip(lives, offsets, strict=True):
            assert at >= 0
            for other, there in zip(lives, offsets, strict=True):
                if one is not other and one.first <= other.last and other.first <= one.last:
                    assert at + one.numel <= there or there + other.numel <= at, seed


def test_what_is_alive_at_once() -> None:
    assert most_alive([]) == extent([], fit([])) == 0
    assert most_alive([Life(0, 3, 16), Life(4, 6, 12), Life(5, 8, 12)]) == 24
    assert most_alive([Life(0, 4, 16), Life(4, 6, 12)]) == 28  # the last operation of a life is in it
    assert most_alive([Life(2, 9, 1), Life(0, 1, 5), Life(3, 3, 2)]) == 5


def chain(*sizes: int) -> list[Life]:
    """Each overlaps the one before it and the one after it."""
    return [Life(2 * i, 2 * i + 3, size) for i, size in enumerate(sizes)]


@for_each(
    "lives",
    [
        chain(12, 12, 12, 16, 12, 12, 12),
        chain(12, 12, 16, 12, 12, 16, 12, 12, 16),  # an odd ring: an offset per unit would need all three
        chain(12, 12, 1, 12, 12, 1),
        chain(3, 9, 4, 7, 7, 1, 9, 3, 5),
        [Life(0, 99, 5), *chain(12, 12, 16, 12, 12)],  # one that stays
        [Life(i, 99 - i, 3 + i % 4) for i in range(20)],  # all stay
    ],
)
def test_the_arena_is_as_small_as_can_be(lives: list[Life]) -> None:
    assert extent(lives, fit(lives)) == most_alive(lives)


def test_a_gather_its_wait_and_every_other_one_have_an_offset() -> None:
    def use(unit: str) -> Ops:
        return [Start(Gather(unit)), Wait(Gather(unit)), Forward(unit, 0, True), Release(unit)]

    ops, numel = place_weights(
        [*use("a"), *use("b"), Start(Gather("a")), *use("b"), Wait(Gather("a")), Release("a")], {"a": 8, "b": 4}
    )
    assert [op.op for op in ops if isinstance(op, Start)] == [
        Gather("a", 0),
        Gather("b", 0),
        Gather("a", 0),
        Gather("b", 8),
    ]
    assert [op.op for op in ops if isinstance(op, Wait)] == [
        Gather("a", 0),
        Gather("b", 0),
        Gather("b", 8),
        Gather("a", 0),
    ]
    assert numel == 12
    assert place_weights([Forward("a", 0, True)], {}) == ([Forward("a", 0, True)], 0)


MODEL = ModelConfig(6, 512, 0, 8, 128, 8192)  # a block is smaller than the token table


def spec(model: ModelConfig = MODEL, pp: int = 1, rank: int = 0, chunks: int = 1, **zero: object) -> RankSpec:
    config = Config(
        model=model,
        training=TrainingConfig(global_batch_size=8),
        parallel=replace(ParallelConfig(), pipeline_model_parallel_size=pp),
        zero=ZeroConfig(**{"zero_stage": 3} | zero),  # type: ignore[arg-type]
    )
    return rank_spec(config, Layout(pp, 2, chunks=chunks), rank, declare)


def arena(made: RankSpec, micro_batches: int = 4, schedule: str = "1f1b") -> int:
    return program(made, schedule, micro_batches).arena_numel


def test_what_one_layer_uses_and_with_overlap_the_next_ones_too() -> None:
    block, table, norm = 12 * 512**2 + 13 * 512, 8192 * 512, 2 * 512
    assert arena(spec(overlap_comm=False)) == table + norm
    assert arena(spec(overlap_comm=True)) == table + norm + block
    wide = replace(MODEL, vocab_size=64)
    assert arena(spec(wide, overlap_comm=False)) == block
    assert arena(spec(wide, overlap_comm=True)) == 2 * block


def test_an_evaluation_fits_the_arena_of_a_step() -> None:
    """Also where the first table of a micro-batch would come while the other one of the one before is used: that gather
    starts when there is room. Others still start ahead.
    """
    made = spec(replace(MODEL, untie_embeddings=True))
    limit = arena(made)
    assert arena(made, 4, EVALUATION) > limit
    evaluation = program(made, EVALUATION, 4, limit)
    assert evaluation.arena_numel == limit
    ops = evaluation.gradients
    ahead = {
        op.op.unit
        for at, op in enumerate(ops)
        if isinstance(op, Start) and isinstance(op.op, Gather)
        if any(isinstance(between, Forward) for between in ops[at : ops.index(Wait(op.op), at)])
    }
    assert ahead == {*made.units} - {TOKEN_EMBEDDING}
    assert program(made, "1f1b", 4, limit) == program(made, "1f1b", 4)


@for_each("overlap", [False, True])
def test_it_does_not_grow_with_the_layers_or_the_micro_batches(overlap: bool) -> None:
    few = spec(replace(MODEL, num_layers=3), overlap_comm=overlap)
    many = spec(replace(MODEL, num_layers=40), overlap_comm=overlap)
    assert arena(few) == arena(many) == arena(many, 1) == arena(many, 9)


def test_what_stays_gathered_for_a_step_all_lies_there() -> None:
    made = spec(zero_gather_every="step")
    assert arena(made) == sum(unit.numel for unit in made.units.values())
    assert arena(made, 4, EVALUATION) == arena(spec(), 4, EVALUATION)


def test_nothing_is_gathered_at_other_stages() -> None:
    for stage in (0, 1, 2):
        assert arena(spec(zero_stage=stage)) == 0


def most_gathered(made: RankSpec, ops: Ops) -> int:
    """The most elements gathered at once."""
    alive = most = 0
    for op in ops:
        if isinstance(op, Start) and isinstance(op.op, Gather):
            alive += made.units[op.op.unit].numel
            most = max(most, alive)
        elif isinstance(op, Release):
            alive -= made.units[op.unit].numel
    return most


@for_each("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble", EVALUATION])
def test_it_holds_no_more_than_what_is_gathered_at_once(schedule: str) -> None:
    """On every stage, for tables smaller and larger than a block."""
    for vocabulary, untied, overlap, pp in itertools.product((64, 4096, 8192, 50304), (0, 1), (0, 1), (1, 2, 3)):
        if schedule == "interleaved" and pp == 1:
            continue
        model = replace(MODEL, vocab_size=vocabulary, untie_embeddings=bool(untied))
        for rank in range(pp):
            made = spec(model, pp, rank, chunks=2 if schedule == "interleaved" else 1, overlap_comm=bool(overlap))
            step = program(made, schedule, 6)
            assert step.arena_numel == most_gathered(made, step.gradients), (model, overlap, pp, rank)
