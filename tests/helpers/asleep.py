"""Ranks that run the real program of a pipeline; their blocks sleep a known time instead of computing."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.layers.weight import GradWriter, Weight
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.layers import Use
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.operations import COMPUTE, Op, name_of
from megazero.engine.plan.program.program import program
from megazero.engine.plan.program.rank_spec import PlannedLayer, rank_spec
from megazero.engine.plan.schedule.schedules import SCHEDULES
from megazero.engine.step.batch import MicroBatch
from megazero.engine.step.engine import Engine
from megazero.flags.config import Config, ModelConfig, ParallelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from megazero.planner.time.simulate import Timing, simulate
from scripts.draw_schedule import thirds


@dataclass(frozen=True)
class Work:
    """A pipeline of one sleeping block per virtual stage."""

    schedule: str
    ranks: int
    micro_batches: int
    seconds: float  # of a third of a block's work

    def resolved(self) -> tuple[Config, Layout]:
        chunks = 2 if SCHEDULES[self.schedule].virtual_stages else 1
        config = Config(
            model=ModelConfig(self.ranks * chunks, 8, 32, 1, 4, 16),
            training=TrainingConfig(1, self.micro_batches),
            parallel=replace(
                ParallelConfig(),
                pipeline_model_parallel_size=self.ranks,
                pipeline_schedule=self.schedule,
                virtual_pipeline_stages=chunks,
            ),
        )
        return resolve(config, self.ranks, 0, declare)

    def inputs(self, step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Arguments of a step of rank `rank`: ids of all micro-batches."""
        return (torch.zeros(self.micro_batches, 4, dtype=torch.long, device=device),)

    def simulated(self) -> Timing:
        """In sleeps; embedding and head take no time."""
        config, layout = self.resolved()
        specs = [rank_spec(config, layout, pp, declare) for pp in range(self.ranks)]
        blocks = {name for spec in specs for name, layer in spec.layers.items() if layer.use is Use.LAYER}

        def cost(op: Op) -> float:
            return thirds(op) if isinstance(op, COMPUTE) and op.layer in blocks else 0.0

        return simulate([program(spec, self.schedule, self.micro_batches).gradients for spec in specs], cost)


class _Sleep(torch.autograd.Function):
    """A block that sleeps: in its forward, for its input gradient, and for its weight gradients."""

    @staticmethod
    def forward(ctx, x, seconds, weights, *handles):
        ctx.seconds, ctx.weights = seconds, weights
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        time.sleep(ctx.seconds)
        pauses = [ctx.seconds] + [0.0] * (len(ctx.weights) - 1)
        for weight, pause in zip(ctx.weights, pauses, strict=True):
            weight.accumulate_grad(GradWriter(_slow_zero(pause), ()))
        return dy.clone(), *[None] * (2 + len(ctx.weights))


def _slow_zero(seconds: float) -> Callable[[torch.Tensor, bool], None]:
    def write(out: torch.Tensor, add: bool) -> None:
        time.sleep(seconds)
        if not add:
            out.zero_()

    return write


def sleeping(
    layer: PlannedLayer, weights: list[Weight], seconds: float
) -> tuple[PlannedLayer, Callable[..., torch.Tensor]]:
    handles = [weight.handle for weight in weights]
    return layer, lambda x, batch, output: _Sleep.apply(x, seconds, weights, *handles)


class Asleep(NamedTuple):
    """A rank whose blocks sleep."""

    step: Callable[..., float]  # ids of all micro-batches -> loss
    wait_for_all: Callable[[], None]
    check: Callable[[], dict[str, list[tuple[str, float, float]]]]


def asleep(work: Work, device: torch.device) -> Asleep:
    """Its check: (operation, begin, end) of every computation of blocks in the last step; one clock for all ranks."""
    config, layout = work.resolved()
    engine = Engine(config, Mesh.build(layout, dist.get_rank(), device))
    run, spans = engine.interpreter, list[tuple[str, float, float]]()
    blocks = {name: layer for name, layer in engine.spec.layers.items() if layer.use is Use.LAYER}
    run.layers = dict(run.layers) | {
        name: sleeping(layer, engine.model.units[name], work.seconds) for name, layer in blocks.items()
    }

    @contextlib.contextmanager
    def observe(op: Op) -> Iterator[None]:
        begin = time.monotonic()
        yield
        if isinstance(op, COMPUTE) and op.layer in blocks:
            spans.append((name_of(op), begin, time.monotonic()))

    run.observe = observe

    def step(ids: torch.Tensor) -> float:
        spans.clear()
        mask = torch.ones(1, 4)
        return engine.train_step(1, [MicroBatch(row[None], row[None], mask, (n,)) for n, row in enumerate(ids)]).loss

    return Asleep(step, engine.wait, lambda: {"spans": list(spans)})
