"""One rank's part of a training that is verified: its steps, and all that they computed, by global names."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megazero.checkpoint.engine_state import EngineState
from megazero.data.corpora import Datasets
from megazero.data.loader import document_starts
from megazero.data.mock import MockSamples
from megazero.data.samples import NO_TOKEN, Sample
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.options.batch_sizes import micro_batches
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.operations import Backward, Forward, Op, Update
from megazero.engine.step.engine import Engine
from megazero.engine.zero.flat_unit import OwnedPart
from megazero.flags.batch_ramp import batch_sizes
from megazero.flags.config import CheckpointConfig, Config
from megazero.flags.corpus_flags import document_flags
from megazero.log import log_as
from megazero.observe.step_metrics import expert_loads, memory_bytes
from megazero.run.checkpoints import CheckpointLoader, Checkpoints
from megazero.run.trainer import Trainer

Array = NDArray[Any]
SPLIT = "train"
END = 0  # the end-of-document token
ENDS = 6  # one token in as many ends a document


class Task(NamedTuple):
    """A training.

    Attributes:
        config: resolved for the layout, with --train-iters.
        save: folder and iteration of a checkpoint; None: none.
        load: folder of the checkpoint to resume from; empty: begin.
        prepare: called first; a test plants a fault by it.
    """

    config: Config
    layout: Layout
    save: tuple[str, int] | None = None
    load: str = ""
    prepare: Callable[[], object] | None = None


class TensorPart(NamedTuple):
    """A part of a global tensor on a rank: the flat range [start, stop) of a block of it."""

    shape: tuple[int, ...]  # of the whole
    offset: tuple[int, ...]
    block: tuple[int, ...]
    start: int
    stop: int
    data: Array

    @classmethod
    def of(cls, part: OwnedPart, data: torch.Tensor, factor: float = 1.0) -> TensorPart:
        numbers = data.detach().double().cpu().div(factor).numpy()
        block = part.weight.block
        return cls(part.weight.spec.shape, block.offset, block.shape, start=part.start, stop=part.stop, data=numbers)


class Sums(NamedTuple):
    """Sums over the results of a layer: of the elements, of their squares, and their number."""

    total: float = 0.0
    squares: float = 0.0
    number: int = 0

    def __add__(self, other: Any) -> Sums:
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))


class VerifiedStep(NamedTuple):
    """Results of a step on one rank.

    Attributes:
        choices: of each expert, by layer with experts.
        layers: (layer, backward) -> sums over this rank's outputs of the layer, or gradients of its inputs.
        gradients: before clipping, by the names of weights.
    """

    loss: float
    norm: float
    lr: float
    samples: int
    skipped: bool
    choices: tuple[tuple[int, ...], ...]
    memory: dict[str, int]
    traffic: dict[str, int]
    layers: dict[tuple[str, bool], Sums]
    gradients: dict[str, TensorPart]


class Trained(NamedTuple):
    """Results of a training on one rank. states: after the last step, by the names of a checkpoint."""

    steps: list[VerifiedStep]
    states: dict[str, TensorPart]


class MadeUpDocuments:
    """Samples of made-up tokens, of which some end a document. packed: with its boundaries, and sometimes padding."""

    def __init__(self, samples: MockSamples, packed: bool) -> None:
        self.samples, self.seq_length, self.packed = samples, samples.seq_length, packed

    def __getitem__(self, index: int) -> Sample:
        tokens = self.samples[index].ids
        tokens = np.where(tokens < max(1, self.samples.vocab_size // ENDS), END, tokens)
        if not self.packed:
            return Sample(tokens)
        held = tokens.size - index % 3
        tokens[held - 1], tokens[held:] = END, NO_TOKEN
        return Sample(tokens, tokens[:-1] != END, document_starts(tokens[:-1], END))


class StepRecorder:
    """An observer of the interpreter that keeps gradients and sums of the layers' results.

    Attributes:
        traffic: bytes that it moves itself.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        mesh, parallel = engine.mesh, engine.config.parallel
        self.counts = mesh.tp.is_first or parallel.sequence_parallel  # else another rank has the same tokens
        self.begin(1.0)

    def begin(self, factor: float) -> None:
        """Begin a step, whose gradients are `factor` times the model's."""
        self.factor = factor
        self.layers: defaultdict[tuple[str, bool], Sums] = defaultdict(Sums)
        self.gradients: dict[str, TensorPart] = {}
        self.traffic = Counter[str]()

    @contextlib.contextmanager
    def __call__(self, op: Op) -> Iterator[None]:
        if isinstance(op, Update):
            unit, sent = self.engine.zero.units[op.unit], Counter(self.engine.mesh.sent())
            gradient = unit.gradients.sharded_grad  # which reads a file, if it exists
            self.traffic += Counter(self.engine.mesh.sent()) - sent
            for part in unit.flat.owned_parts():
                if part.weight.trains:
                    self.gradients[part.weight.spec.name] = TensorPart.of(
                        part, gradient[part.owned.slice()], self.factor
                    )
        yield
        if isinstance(op, (Forward, Backward)) and self.counts:
            run, backward = self.engine.interpreter, isinstance(op, Backward)
            x = (run.dx if backward else run.x).get(op.micro_batch)
            if x is not None:
                wide = x.double() / (self.factor if backward else 1.0)
                sums = Sums(float(wide.sum()), float(wide.square().sum()), x.numel())
                self.layers[op.layer, backward] += sums


def train_rank(rank: int, device: torch.device, task: Task) -> Trained:
    """Train as one rank of the task's layout."""
    if task.prepare is not None:
        task.prepare()
    log_as(max(rank, 1), task.layout.world_size + 1)  # errors alone
    folders = CheckpointConfig(save=task.save[0] if task.save else "", load=task.load)
    config = replace(task.config, checkpoint=folders)
    mesh = Mesh.build(task.layout, rank, device, config.parallel.distributed_timeout_minutes)
    samples: Any = MockSamples(SPLIT, config.model.seq_length, config.training.seed, config.model.vocab_size)
    documents, packed = bool(document_flags(config.data)), config.data.packing != "split"
    samples = MadeUpDocuments(samples, packed) if documents or packed else samples
    datasets = Datasets(samples, samples, samples)
    trainer = Trainer(config, mesh, datasets, END if documents else None)
    checkpoints = Checkpoints(trainer.config, trainer.engine, datasets, tokenizer=None, watchdog=trainer.watchdog)
    checkpoints.waits = ()  # a failing save is not attempted again
    if task.load:
        _, trainer.progress = CheckpointLoader(checkpoints).resume()
    recorder = StepRecorder(trainer.engine)
    trainer.engine.interpreter.observe = recorder
    steps = []
    while trainer.progress.iteration < config.training.train_iters:
        steps.append(_step(trainer, recorder))
        if task.save and trainer.progress.iteration == task.save[1]:
            checkpoints.save(trainer.progress, last=True)  # of which a failure is an error
    trainer.engine.wait()
    states = {
        name: TensorPart(
            s.global_shape, s.offset, s.local_shape, start=s.start, stop=s.stop, data=s.data.double().cpu().numpy()
        )
        for name, s in EngineState(trainer.engine).shards().items()
    }
    return Trained(steps, states)


def _step(trainer: Trainer, recorder: StepRecorder) -> VerifiedStep:
    """Make a step as `Trainer.iterate` does, which has an observer of its own."""
    engine, progress, training = trainer.engine, trainer.progress, trainer.config.training
    samples = batch_sizes(trainer.config).at(progress.consumed_samples)
    batches, sent = trainer.train_batches.batch(progress.consumed_samples), trainer.mesh.sent()
    parts = micro_batches(samples, training.micro_batch_size, 1) if engine.scale else 1
    recorder.begin((engine.scale.value if engine.scale else 1.0) * parts)
    result = engine.train_step(progress.iteration + 1, batches, samples)
    loads = expert_loads(result, engine.config.model)
    progress.iteration += 1
    progress.consumed_samples += samples
    return VerifiedStep(
        loss=result.loss,
        norm=result.grad_norm,
        lr=result.lr,
        samples=samples,
        skipped=result.skipped,
        choices=loads.choices if loads is not None else (),
        memory=memory_bytes(engine, result),
        traffic={kind: n - sent[kind] - recorder.traffic[kind] for kind, n in trainer.mesh.sent().items()},
        layers=dict(recorder.layers),
        gradients=recorder.gradients,
    )


def joined(pieces: list[dict[str, TensorPart]]) -> tuple[dict[str, Array], str]:
    """Put the tensors of all ranks together; also name the first whose copies on several ranks are not equal."""
    found: dict[str, Array] = {}
    unequal = ""
    for each in pieces:
        for name, piece in each.items():
            whole = found.setdefault(name, np.full(piece.shape, math.nan))
            window = tuple(slice(at, at + size) for at, size in zip(piece.offset, piece.block, strict=True))
            block = whole[window].reshape(-1).copy()
            old = block[piece.start : piece.stop]
            known = ~np.isnan(old)
            if not np.array_equal(old[known], piece.data[known]):
                unequal = unequal or name
            block[piece.start : piece.stop] = piece.data
            whole[window] = block.reshape(piece.block)
    return found, unequal
