"""Rehearsal: ranks of a world that does not exist run steps on stand-in tensors (--rehearse).

The trainer, the model, ZeRO, the program and the planning of checkpoints are those of a run. Replaced are the tensors,
by stand-ins with shapes and types but no data; the axes of the mesh, by ones that count traffic instead of sending it
(`planner.trace.pretend`); the values that a step reads from tensors (`PretendMesh.read`); and the corpus. So a rank of
hundreds fits one process, and its counts are an independent check of `planner.bytes.estimate`.
"""

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from megazero.checkpoint.engine_state import EngineState
from megazero.command.rehearsal.allocated import Allocated
from megazero.command.rehearsal.rehearsed_save import PlannedSave, plan_save
from megazero.data.corpora import Datasets
from megazero.data.samples import Sample, Samples
from megazero.engine.plan.layout.topology import Coord, Layout
from megazero.engine.plan.program.operations import name_of
from megazero.flags.config import CheckpointConfig, Config, DataConfig, EvaluationConfig, LogConfig, MonitorConfig
from megazero.planner.bytes.estimate import estimate
from megazero.planner.trace.pretend import PretendMesh, pretend_mesh
from megazero.planner.trace.trace import model_flops
from megazero.run.trainer import Trainer
from megazero.torch_private import fake_tensors

STEPS = 2  # by default: the second step starts with the state that the first has left
NEVER = 10**9  # iterations


@dataclass(frozen=True)
class RehearsalDevice:
    """Device of a rehearsal's tensors.

    Attributes:
        device: meta stands for a GPU.
        real: tensors have data, and take memory.
    """

    device: torch.device
    real: bool

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the device of --rehearse-on: gpu, cpu or here."""
        if name != "here":
            return cls(torch.device("cpu" if name == "cpu" else "meta"), real=False)
        return cls(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"), real=True)

    @property
    def kind(self) -> str:
        """Return the kind of device whose options, kernels and collectives are rehearsed: cuda or cpu."""
        return "cpu" if self.device.type == "cpu" else "cuda"

    @property
    def needs_staging_buffer(self) -> bool:
        """True if collectives are gloo's, as on CPUs; else they are NCCL's."""
        return self.device.type == "cpu"

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make every new tensor a stand-in, also on the host, unless tensors are real."""
        if self.real:
            yield
            return
        with fake_tensors():
            yield


@dataclass(frozen=True)
class CollectiveCount:
    """Calls of one collective in an iteration, and the bytes that this rank sends for them."""

    axis: str
    kind: str  # of traffic, as in traffic_bytes
    operation: str
    calls: int
    num_bytes: int


@dataclass(frozen=True)
class Rehearsal:
    """Counts of one rank in its last step; bytes by kind as in metrics.jsonl."""

    rank: int
    coord: Coord
    memory: dict[str, int]
    estimated_memory: dict[str, int]
    allocated: int  # peak bytes of all tensors, including temporary ones and activations inside layers
    allocated_in: str  # the operation of that peak
    allocated_host: int
    traffic: dict[str, int]
    estimated_traffic: dict[str, int]
    collectives: tuple[CollectiveCount, ...]
    save: PlannedSave | None  # None: not planned
    build_seconds: float  # of this process
    step_seconds: float
    host_peak_bytes: int  # of this process, so far

    def to_json(self) -> dict[str, Any]:
        """Return the contents of rehearsal.json for this rank."""
        found = asdict(self) | {"coord": self.coord._asdict(), "save": self.save and self.save._asdict()}
        for old in ("memory", "estimated_memory", "traffic", "estimated_traffic", "allocated", "allocated_host"):
            found[f"{old}_bytes"] = found.pop(old)
        found["collectives"] = [
            {("bytes" if key == "num_bytes" else key): value for key, value in each.items()}
            for each in found["collectives"]
        ]
        return found


class _Zeros:
    """Samples without a corpus: token 0 everywhere."""

    def __init__(self, seq_length: int) -> None:
        self.seq_length = seq_length

    def __getitem__(self, index: int) -> Sample:
        return Sample(np.zeros(self.seq_length + 1, dtype=np.int64))


def rehearsed(config: Config, device: RehearsalDevice) -> Config:
    """Return the configuration of a rehearsal, without options that change no byte of a step.

    Nothing is loaded, saved, evaluated, logged or compiled; every sample is one document; tensors without data get no
    initial values.
    """
    model = config.model if device.real else replace(config.model, init_method_std=0.0)
    training = replace(config.training, matmul_backend="torch", compile=False, train_iters=STEPS)
    return replace(
        config,
        model=model,
        training=training,
        data=DataConfig(num_workers=0),
        evaluation=EvaluationConfig(),
        checkpoint=CheckpointConfig(),
        monitor=MonitorConfig(straggler_interval=0),
        log=LogConfig(log_interval=NEVER, stats_interval=min(1, config.log.stats_interval)),
    )


def rehearse_rank(
    config: Config, layout: Layout, rank: int, on: RehearsalDevice, *, steps: int = STEPS, saves: bool = True
) -> Rehearsal:
    """Run steps of `rank` of `layout`, and count the last. Nothing is sent, and nothing is written.

    Args:
        config: resolved.
        saves: also plan a checkpoint, which needs the plans of all ranks.
    """
    config, start = rehearsed(config, on), time.perf_counter()
    estimated = estimate(config, layout, rank, on.needs_staging_buffer)
    model_flops(config.model, config.training.global_batch_size)  # cached before the rank's tensors are counted
    samples: Samples = _Zeros(config.model.seq_length)
    allocated = Allocated(on.device)
    with on.active(), allocated:
        mesh = pretend_mesh(layout, rank, on.device, on.needs_staging_buffer)
        trainer = Trainer(config, mesh, Datasets(samples, samples, samples), eod=None)
        interpreter = trainer.engine.interpreter
        allocated.place = lambda: name_of(interpreter.current) if interpreter.current is not None else "between steps"
        built = time.perf_counter()
        for _ in range(steps):
            allocated.begin()
            issued, begun = mesh.issued(), time.perf_counter()
            record = trainer.iterate()
        stopped = time.perf_counter()
    return Rehearsal(
        rank=rank,
        coord=layout.coord(rank),
        memory=record["memory_bytes"],
        estimated_memory=estimated.memory,
        allocated=allocated.peak,
        allocated_in=str(allocated.peak_at),
        allocated_host=allocated.host_peak,
        traffic=record["traffic_bytes"],
        estimated_traffic=estimated.traffic,
        collectives=_since(issued, mesh),
        save=plan_save(config, layout, rank, EngineState(trainer.engine).shards()) if saves else None,
        build_seconds=built - start,
        step_seconds=stopped - begun,
        host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    )


def _since(before: dict[tuple[str, str, str], tuple[int, int]], mesh: PretendMesh) -> tuple[CollectiveCount, ...]:
    """Return the collectives that were issued since `before`."""
    found = []
    for key, (calls, num_bytes) in mesh.issued().items():
        old_calls, old_bytes = before.get(key, (0, 0))
        if calls > old_calls:
            found.append(CollectiveCount(*key, calls - old_calls, num_bytes - old_bytes))
    return tuple(found)
