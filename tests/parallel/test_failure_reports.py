"""Reports of a rank whose step fails: the operation; when memory runs out, also the memory held."""

import re
import threading
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from megazero.cluster.watchdog import Activity
from megazero.command.errors import place_of
from megazero.engine.memory.tracker import KINDS
from megazero.engine.mesh.peer_errors import PeerLost
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.operations import GradNorm, Keep, Op, Open, Recompute
from megazero.engine.plan.program.program import Program
from megazero.engine.step.engine import Engine
from megazero.flags.config import Config
from megazero.observe import memory_report
from tests.parallel.cases import Case, micro_batches, new_engine

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError("std::bad_alloc"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory: you tried to allocate"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"),
]


def fail_in(engine: Engine, block: str, error: BaseException, call: int) -> None:
    """Make the `call`-th forward of a block (recomputes count) raise."""
    layer, calls = engine.model.blocks[block], []
    forward = layer.forward

    def raising(*args: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == call:
            raise error
        return forward(*args)

    layer.forward = raising


def fail_after(engine: Engine, operation: type[Op], call: int) -> None:
    """Make the interpreter fail after the `call`-th operation of a type."""
    execute, calls = engine.interpreter._do[operation], []

    def failing(op: Op) -> None:
        execute(op)
        calls.append(op)
        if len(calls) == call:
            raise MemoryError

    engine.interpreter._do[operation] = failing


def numbers(report: str) -> dict[str, list[float]]:
    """The rows of the table."""
    rows = [re.fullmatch(r"  (\w[\w ]*?) +(-?[\d.,]+(?: +-?[\d.,]+)*)", line) for line in report.splitlines()]
    return {row[1]: [float(x.replace(",", "")) for x in row[2].split()] for row in rows if row}


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: str(e)[:12])
def test_memory_that_runs_out_is_reported_once_with_the_operation(error: BaseException) -> None:
    case = Case(micro_batches=2)
    engine = new_engine(0, case)
    fail_in(engine, "3", error, call=1)
    with pytest.raises(type(error)) as raised:
        engine.train_step(1, micro_batches(case, engine.mesh, 0))
    operation, report = raised.value.__notes__
    assert operation == "in operation 'Forward blocks.3 mb 0' of the step"
    assert report.startswith("memory of rank 0 in Forward blocks.3 mb 0, MiB:")
    assert {"parameters", "optimizer", "activation_checkpoints", "host", "total on the device"} <= set(numbers(report))


@pytest.mark.parametrize(
    "case",
    [
        Case(recompute="full", micro_batches=2),
        Case(recompute="full", md=True, micro_batches=3),
        Case(recompute="full", host=True, zero=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("operation", [Recompute, Keep, Open])
def test_what_was_held_is_what_was_predicted_for_that_operation(
    case: Case, operation: type[Op], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bytes: in MiB, one operation of so small a model is rounded off. The operation fails when it has allocated."""
    monkeypatch.setattr(memory_report, "MIB", 1)
    engine = new_engine(0, case)
    fail_after(engine, operation, call=3)
    with pytest.raises(MemoryError) as raised:
        engine.train_step(1, micro_batches(case, engine.mesh, 0))
    table = numbers(raised.value.__notes__[1])
    assert any(now > 0 for now, *_ in table.values())
    for kind, (now, peak, predicted, predicted_peak) in table.items():
        assert (now, peak) == (predicted, predicted_peak), kind


class Held(NamedTuple):
    """A memory tracker."""

    now: dict[str, int]
    peak: dict[str, int]
    total: int
    total_peak: int


def made_tracker(first: int) -> Held:
    """Return made-up bytes: first + 0, 1, ... MiB, each and half a MiB."""
    values = [(first + n) * 2**20 + 2**19 for n in range(2 * len(KINDS) + 2)]
    return Held(dict(zip(KINDS, values[::2], strict=False)), dict(zip(KINDS, values[1::2], strict=False)), *values[-2:])


def test_a_memory_report_has_each_number_under_its_heading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now, at the peak and as predicted: no two are equal. The prediction is for the operation that failed."""
    op, update = Keep("blocks.1", 0), Open("blocks.2")
    step = Program([Open("blocks.1"), Keep("blocks.1", 0), op, GradNorm()], [update], 0, 0)
    mesh = SimpleNamespace(rank=3, layout=Layout(), device=torch.device("cuda"))
    engine: Any = SimpleNamespace(config=Config(), mesh=mesh, tracker=made_tracker(1000))
    asked = []

    def predicted(*_: Any, needs_staging_buffer: bool, num_ops: int) -> Held:
        asked.append((num_ops, needs_staging_buffer))
        return made_tracker(5000)

    monkeypatch.setattr(memory_report, "predicted_after", predicted)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7 * 2**20)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9 * 2**20)
    report = memory_report.memory_report(engine, step, op)
    assert report.splitlines()[1].split() == ["now", "peak", "predicted", "its", "peak"]
    for n, kind in enumerate([*KINDS, "total on the device"]):
        assert numbers(report)[kind] == [first + 2 * n + more + 0.5 for first in (1000, 5000) for more in (0, 1)], kind
    assert "the allocator has 7.0 MiB in use of 9.0 MiB reserved" in report
    memory_report.memory_report(engine, step, update)
    assert asked == [(3, False), (5, False)]


def test_memory_in_use_is_the_peak_and_the_devices_size(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: SimpleNamespace(ru_maxrss=3000))
    monkeypatch.setattr(memory_report, "resource", usage)
    monkeypatch.setattr(memory_report, "sys", SimpleNamespace(platform="linux"))
    assert memory_report.device_in_use(torch.device("cpu")) == (3000 * 1024, 0)
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"))
    assert memory_report._allocated(on_cpu) == "the process has had at most 2.9 MiB resident"
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=9))
    assert memory_report.device_in_use(torch.device("cuda")) == (7, 9)


def test_an_evaluation_is_reported_without_a_prediction() -> None:
    case = Case(micro_batches=2)
    engine = new_engine(0, case)
    fail_in(engine, "1", MemoryError(), call=2)
    with pytest.raises(MemoryError) as raised:
        engine.evaluate(micro_batches(case, engine.mesh, 0))
    operation, report = raised.value.__notes__
    assert "Forward blocks.1 mb 1" in operation and "predicted" not in report
    assert len(numbers(report)["parameters"]) == 2


def test_another_error_names_the_operation_alone() -> None:
    case = Case(micro_batches=2)
    engine = new_engine(0, case)
    fail_in(engine, "1", RuntimeError("shapes differ"), call=2)
    with pytest.raises(RuntimeError) as raised:
        engine.train_step(1, micro_batches(case, engine.mesh, 0))
    assert len(raised.value.__notes__) == 1


def test_a_rank_that_is_stopped_by_another_says_where() -> None:
    case = Case(micro_batches=2)
    engine = new_engine(0, case)
    fail_in(engine, "1", PeerLost("axis dp, ranks [0, 1]: Connection closed by peer"), call=2)
    with pytest.raises(PeerLost) as raised:
        engine.train_step(1, micro_batches(case, engine.mesh, 0))
    assert place_of(raised.value) == " in operation 'Forward blocks.1 mb 1' of the step"
    assert place_of(ValueError("--lr")) == ""


def test_the_watchdogs_thread_sees_the_operation_that_is_carried_out() -> None:
    case = Case(micro_batches=2)
    engine, seen = new_engine(0, case), []
    run = engine.interpreter

    def watch() -> None:
        seen.append(Activity("iteration 1", run.current, run.since))

    forward = engine.model.blocks["2"].forward

    def watched(*args: Any) -> torch.Tensor:
        thread = threading.Thread(target=watch)
        thread.start()
        thread.join()
        return forward(*args)

    engine.model.blocks["2"].forward = watched
    before = time.monotonic()
    engine.train_step(1, micro_batches(case, engine.mesh, 0))
    assert run.current is None
    assert [str(place) for place in seen] == [
        "operation 'Forward blocks.2 mb 0' of iteration 1",
        "operation 'Forward blocks.2 mb 1' of iteration 1",
    ]
    assert before <= seen[0].since < seen[1].since <= time.monotonic()
