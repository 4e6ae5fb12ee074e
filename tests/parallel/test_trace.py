"""Traces of real ranks: the contents of the file, and no recording without the flag."""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megazero.checkpoint.messages import gather_over_mesh
from megazero.engine.plan.program.operations import Start, Wait, name_of
from megazero.engine.step.engine import Engine
from megazero.flags.config import LogConfig
from megazero.observe.profiling import Profiler
from megazero.observe.step_metrics import memory_bytes
from megazero.planner.time.simulate import axis_of
from tests.parallel.cases import Case, micro_batches, new_engine

CASES = [
    Case(dp=2, zero=3, recompute="full"),
    Case(dp=2, zero=1),
    Case(pp=2, micro_batches=3),
    Case(pp=2, dp=2, micro_batches=2),  # two senders of messages that differ only in dp
    Case(tp=2, recompute="full", host=True),
]
FIRST, LAST = 2, 3


class Seen(dict[str, Any]):
    """A rank's report of its run."""


def traced_steps(rank: int, case: Case, folder: str) -> Seen:
    """Four steps, the second and the third traced; per traced step its memory, and the program's operations."""
    config = replace(case.config(), log=LogConfig(log_dir=folder, profile_iterations=f"{FIRST}:{LAST}"))
    engine = Engine(config, new_engine(rank, case).mesh)
    profiler = Profiler(config, engine)
    memory = {}
    for iteration in range(1, 5):
        profiler.begin(iteration)
        assert (engine.interpreter.observe is not None) == (FIRST <= iteration <= LAST or case.pp > 1)
        assert (engine.tracker.watch is not None) == (FIRST <= iteration <= LAST)
        result = engine.train_step(iteration, micro_batches(case, engine.mesh, iteration - 1))
        profiler.end()
        memory[iteration] = memory_bytes(engine, result)
    step = engine.program(case.schedule, case.micro_batches)
    ops = [*step.gradients, *step.update]
    return Seen(
        memory=memory,
        operations=[name_of(op) for op in ops],
        axes={name_of(op.op): axis_of(op.op) for op in ops if isinstance(op, (Start, Wait))},
    )


@pytest.fixture(scope="module", params=CASES, ids=str)
def run(request: pytest.FixtureRequest, ranks, tmp_path_factory) -> tuple[Case, list[Seen], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("trace")
    seen = ranks(request.param.world).run(traced_steps, request.param, str(folder))
    assert [path.name for path in folder.iterdir()] == [f"trace-{FIRST}-{LAST}.json"]
    text = json.loads((folder / f"trace-{FIRST}-{LAST}.json").read_text())
    assert text["displayTimeUnit"] == "ms"
    return request.param, seen, text["traceEvents"]


def spans_of(events: list[dict[str, Any]], rank: int) -> dict[str, list[dict[str, Any]]]:
    """Track name -> its spans, by their begin."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == rank}
    found = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] == "X" and e["pid"] == rank), key=lambda e: (e["ts"], -e["dur"])):
        found[names[event["tid"]]].append(event)
    return found


def iteration_spans(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [span for span in spans if span["name"].startswith("iteration ")]


def test_every_operation_is_a_span_in_the_order_of_the_program(run) -> None:
    case, seen, events = run
    for rank in range(case.world):
        spans = spans_of(events, rank)["compute"]
        iterations = iteration_spans(spans)
        assert [span["name"] for span in iterations] == [f"iteration {FIRST}", f"iteration {LAST}"]
        for whole in iterations:
            inside = [s for s in spans if s is not whole and whole["ts"] <= s["ts"] < whole["ts"] + whole["dur"]]
            assert [span["name"] for span in inside] == seen[rank]["operations"]


def test_spans_of_a_track_nest(run) -> None:
    """The format demands that a span ends before the next begins, or is inside it."""
    case, _, events = run
    for rank in range(case.world):
        for track in spans_of(events, rank).values():
            ends: list[float] = []
            for span in track:
                begin, end = span["ts"], span["ts"] + span["dur"]
                while ends and ends[-1] <= begin + 1e-4:  # rounding of microseconds in a float
                    ends.pop()
                assert not ends or end <= ends[-1] + 1e-4, span
                ends.append(end)


def test_asynchronous_operations_lie_on_their_axes_from_start_to_wait(run) -> None:
    case, seen, events = run
    for rank in range(case.world):
        tracks = spans_of(events, rank)
        compute = tracks.pop("compute")
        found = [(track.split()[0], span["name"]) for track, spans in tracks.items() for span in spans]
        assert found and all(seen[rank]["axes"][name] == axis for axis, name in found)
        begins = {(span["name"], span["ts"]) for span in compute}
        ends = [span["ts"] + span["dur"] for span in compute]
        for spans in tracks.values():
            for span in spans:
                assert (f"start {span['name']}", span["ts"]) in begins
                until = span["ts"] + span["dur"]
                waited = any(abs(until - end) < 1e-2 for end in ends)
                assert waited or span["name"].startswith("Sync")  # the last ones are waited for in iteration 4
        started = sum(name.startswith("start ") for name in seen[rank]["operations"])
        assert len(found) == 2 * started


def test_counters_reach_the_peaks_of_metrics(run) -> None:
    case, seen, events = run
    for rank in range(case.world):
        iterations = iteration_spans(spans_of(events, rank)["compute"])
        for number, whole in zip((FIRST, LAST), iterations, strict=True):
            memory = seen[rank]["memory"][number]
            for kind, name in [*((k, k) for k in memory if k != "peak"), ("peak", "total on the device")]:
                track = [e for e in events if e["ph"] == "C" and e["pid"] == rank and e["name"] == f"memory: {name}"]
                before = [e["args"]["bytes"] for e in track if e["ts"] < whole["ts"]]
                within = [e["args"]["bytes"] for e in track if 0 <= e["ts"] - whole["ts"] <= whole["dur"]]
                assert max([*before[-1:], *within]) == memory[kind], (number, kind)


def test_ranks_are_processes_named_by_their_coordinates(run) -> None:
    case, _, events = run
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    place = [case.layout.coord(rank) for rank in range(case.world)]
    assert names == {r: f"rank {r}: pp {c.pp}, dp {c.dp}, cp {c.cp}, tp {c.tp}" for r, c in enumerate(place)}


def test_arrows_join_a_send_with_its_receive(run) -> None:
    case, _, events = run
    halves = defaultdict(dict)
    for event in events:
        if event["ph"] in ("s", "f"):
            assert event["ph"] not in halves[event["id"]]
            halves[event["id"]][event["ph"]] = event
    assert len(halves) == (2 * 2 * case.micro_batches * case.dp if case.pp == 2 else 0)
    spans = [event for event in events if event["ph"] == "X"]
    seen = Counter()
    for pair in halves.values():
        ends = [span_of(pair[half], spans) for half in ("s", "f")]
        (first, *sent), (then, *received) = (span["name"].split() for span in ends)
        assert (first, then) == ("Send", "Recv") and sent == received
        sender, receiver = (case.layout.coord(span["pid"]) for span in ends)
        assert sender._replace(pp=receiver.pp) == receiver and {sender.pp, receiver.pp} == {0, 1}
        seen[sender, *sent] += 1
        # On one machine the clocks of the ranks differ by less than the spread of a barrier.
        assert pair["f"]["ts"] > pair["s"]["ts"] - 50_000
    assert set(seen.values()) <= {2}  # one in each iteration


def span_of(half: dict[str, Any], spans: list[dict[str, Any]]) -> dict[str, Any]:
    """Find the span of a message to which a half of an arrow is bound: its track, at its time."""
    place = half["pid"], half["tid"]
    found = [s for s in spans if (s["pid"], s["tid"]) == place and s["ts"] <= half["ts"] <= s["ts"] + s["dur"]]
    return max(found, key=lambda span: span["ts"])


def cut_short(rank: int, folder: str) -> None:
    case = Case(dp=2, zero=1)
    config = replace(case.config(), log=LogConfig(log_dir=folder, profile_iterations="1:4"))
    engine = Engine(config, new_engine(rank, case).mesh)
    profiler = Profiler(config, engine)
    profiler.begin(1)
    engine.train_step(1, micro_batches(case, engine.mesh, 0))
    profiler.end()
    profiler.close()


def test_a_run_that_ends_within_the_range_writes_what_there_is(ranks, tmp_path: Path) -> None:
    ranks(2).run(cut_short, str(tmp_path))
    events = json.loads((tmp_path / "trace-1-4.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["name"].startswith("iteration")] == ["iteration 1"] * 2


def parts(rank: int) -> list[bytes]:
    return list(gather_over_mesh(b"x" * (1 + 5 * rank), new_engine(rank, Case(dp=2)).mesh))


def test_bytes_of_all_ranks_come_to_the_first(ranks) -> None:
    assert ranks(2).run(parts) == [[b"x", b"xxxxxx"], []]
