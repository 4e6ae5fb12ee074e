"""fp16's range: small gradients of large global batches, on one rank of a pretended world."""

import json
from dataclasses import fields, replace

import torch

from megazero.checkpoint.engine_state import EngineState
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.step.batch import MicroBatch
from megazero.engine.step.engine import Engine
from megazero.planner.trace.pretend import pretend_mesh
from tests.helpers.table import for_each
from tests.parallel.cases import MODEL, Case, micro_batches

CPU = torch.device("cpu")


def alone_of(case: Case) -> Mesh:
    """Make rank 0's mesh without its peers, whose numbers are read as they are."""
    mesh = pretend_mesh(case.layout, 0, CPU, needs_staging_buffer=True)
    return Mesh(**{field.name: getattr(mesh, field.name) for field in fields(mesh)})


@for_each("ranks", [1, 2, 3, 5, 10])
def test_the_divisor_of_a_micro_batch_is_that_of_every_layout(ranks: int) -> None:
    """8 samples are 8 micro-batches, however many of padding the ranks compute besides."""
    case = Case(dp=ranks, precision="fp16", micro_batches=-(-8 // ranks), batch=8, micro_batch_size=1)
    engine = Engine(case.config(), alone_of(case))
    batches = micro_batches(case, engine.mesh, 0)
    assert engine._parts(batches, 8) == 8
    assert engine._parts(batches, 0) == ranks * len(batches)


@for_each("grad_dtype", ["fp32", "fp16"])
def test_gradients_of_a_large_batch_are_those_of_a_small_one(grad_dtype: str) -> None:
    """4,096 data-parallel ranks with the same samples: the norm is the same, but for a power of two, to the bit.

    At a scale of 1 the first gradients, over all 45,056 targets, would be about 2e-7, and fp16 has multiples of 6e-8.
    """
    norms = []
    for ranks in (1, 4096):
        case = Case(dp=ranks, precision="fp16", grad_dtype=grad_dtype, micro_batches=1, batch=ranks)
        config = case.config()
        config = replace(config, training=replace(config.training, initial_loss_scale=1.0))
        engine = Engine(config, alone_of(case))
        count = engine._count_targets
        engine._count_targets = lambda own, count=count, ranks=ranks: ranks * count(own)  # of all
        alone = Case(precision="fp16", micro_batches=1, batch=1)
        result = engine.train_step(1, micro_batches(alone, Mesh.build(alone.layout, 0, CPU), 0))
        assert not result.skipped
        norms.append(result.grad_norm * ranks)  # nothing is summed over pretended ranks
    assert norms[0] == norms[1] > 0


def in_fp16(**training: float) -> tuple[Engine, list[MicroBatch]]:
    """Return an engine of one rank, and its batch."""
    case = Case(model=replace(MODEL, num_layers=1), precision="fp16", grad_dtype="fp16", micro_batches=1, batch=1)
    config = case.config()
    engine = Engine(replace(config, training=replace(config.training, **training)), Mesh.build(case.layout, 0, CPU))
    return engine, micro_batches(case, engine.mesh, 0)


def test_a_batch_without_targets_is_no_overflow() -> None:
    """The scale stays, and so do the counts until it halves or doubles."""
    engine, batches = in_fp16()
    engine.train_step(1, batches, 1)
    before = engine.scale
    empty = [batch._replace(loss_mask=torch.zeros_like(batch.loss_mask)) for batch in batches]
    result = engine.train_step(2, empty, 1)
    assert result.skipped and result.skip_reason == "no target counts in this batch"
    assert before is not None and engine.scale == before.after(False)


def test_a_run_that_resumes_scales_as_one_that_does_not() -> None:
    """Wherever it was saved: before and after overflows, and between them and the end of a window."""
    flags = {"initial_loss_scale": 2.0**40, "loss_scale_window": 4, "hysteresis": 2}
    engine, batches = in_fp16(**flags)
    overflows = [engine.train_step(n, batches, 1).skipped for n in (1, 2, 3)]
    assert overflows == [True] * 3 and engine.scale is not None and engine.scale.value == 2.0**38
    for overflow in (False, False, False, True, False, True, False):
        engine.scale = engine.scale.after(overflow)
        other, _ = in_fp16(**flags)
        EngineState(other).load(json.loads(json.dumps(EngineState(engine).numbers())), EngineState(other).shards())
        assert other.scale == engine.scale
