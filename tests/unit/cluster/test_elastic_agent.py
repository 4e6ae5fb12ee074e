"""Decisions of the agent of an elastic run, as tables of cases without processes."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megazero.cluster import agent_notes as notes
from megazero.cluster.elastic.same_command import absolute_save, first_difference
from tests.helpers.table import for_each

A, B, C = "abc"


class Meeting(SimpleNamespace):
    """Stands in for the agents' agreement: the nodes of this generation, and the last words of the run."""

    members = frozenset(A)
    generation = 0

    def end(self, message: str, code: int = 1) -> Exception:
        return self.ended(message, code)


class Ranks:
    """Stands in for the processes of a node's ranks.

    Attributes:
        subprocess_handlers: of each rank; its exit code is the next one of `answers`, or the last.
        closed: the signals that ended the ranks, and the seconds that they then had.
        noted: the note that ranks had when they were ended.
    """

    def __init__(self, *answers: list[int | None]) -> None:
        self.closed: list[tuple[signal.Signals, int]] = []
        self.noted: list[str] = []
        handlers = [SimpleNamespace(proc=SimpleNamespace(poll=partial(next_of, each))) for each in answers]
        self.subprocess_handlers = dict(enumerate(handlers))

    def pids(self) -> dict[int, int]:
        return {rank: rank for rank in self.subprocess_handlers}

    def wait(self, timeout: float) -> RunProcsResult | None:
        """Answer as torchrun's does: if a rank has failed, end its peers."""
        codes = {rank: handler.proc.poll() for rank, handler in self.subprocess_handlers.items()}
        failures = {rank: ProcessFailure(rank, 0, code, "") for rank, code in codes.items() if code}
        if None in codes.values() and not failures:
            return None
        self.close()
        return RunProcsResult(failures=failures)

    def close(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.closed.append((death_sig, timeout))
        self.noted.append(notes.read_note(notes.LOST))


def next_of(answers: list[int | None]) -> int | None:
    return answers.pop(0) if len(answers) > 1 else answers[0]


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module of the agent, whose notes are in a folder of the test."""
    monkeypatch.setenv(notes.FOLDER, str(tmp_path))
    from megazero.cluster.elastic import node_agent

    return node_agent


@pytest.fixture
def new_agent(elastic: Any) -> Callable[[], Any]:
    """new_agent() -> an agent of node a, whose ranks and peers stand in. `started` counts its generations."""

    class Agent(elastic.Agent):
        started = 0

        def _initialize_workers(self, worker_group: WorkerGroup) -> None:
            self.started += 1
            self.meeting.members = self.next_members
            if self.failed is not None:
                self._judge(*self.ended_at)

        def end_ranks(self, *codes: int, next_members: str = A) -> None:
            """Have the ranks end with `codes`, and start them again with the agents that meet then."""
            self.next_members = frozenset(next_members)
            failures = {rank: ProcessFailure(rank, 0, code, "") for rank, code in enumerate(codes)}
            self.failed = RunResult(WorkerState.FAILED, {}, failures) if any(codes) else None
            self._restart_workers(self._worker_group)

    def make() -> Agent:
        spec = WorkerSpec("", 2, Meeting(ended=elastic.Ended), entrypoint="true", max_restarts=elastic.MANY)
        agent = Agent(spec, lambda error: ("rank 0 failed", 7), logs_specs=DefaultLogsSpecs())
        agent._pcontext = Ranks()
        return agent

    return make


# Each failure: the iteration with which the generation began, its nodes, and the nodes of the next one.
# -> the failure that ends the run (0: none), and the number in its message.
HISTORIES: dict[str, tuple[list[tuple[str, str, str]], int, str]] = {
    "two at one iteration": ([("5", A, A)] * 2, 0, ""),
    "three at one iteration": ([("5", A, A)] * 3, 3, "3 failures in a row, each after iteration 5; "),
    "progress between them": ([("5", A, A), ("5", A, A), ("8", A, A), ("8", A, A)], 0, ""),
    "three after progress": ([("5", A, A), ("5", A, A), *[("8", A, A)] * 3], 5, "3 failures in a row, each after it"),
    "a run that went back": ([("8", A, A), ("5", A, A), ("8", A, A), ("5", A, A)], 0, ""),
    "three lost nodes in a row": ([("5", A + B, A)] * 3, 0, ""),
    "lost nodes until one is left": ([("5", A + B + C, A + B), ("5", A + B, A), ("5", A, A), ("5", A, A)], 0, ""),
    "a lost node in between": ([("5", A, A), ("5", A + B, A), ("5", A, A), ("5", A, A)], 4, "3 failures in a row"),
    "one that came back": ([("5", A, A + B), ("5", A + B, A + B), ("5", A + B, A + B)], 3, "3 failures in a row"),
    "another node in its place": ([("5", A + B, A + C)] * 3, 0, ""),
    "nothing was trained": ([("", A, A)], 1, "rank 0 failed"),
    "a lost node before the first step": ([("", A + B, A), ("", A + B, A)], 0, ""),
    "a start that fails after training": ([("5", A, A), ("", A, A), ("", A, A)], 0, ""),
    "three such starts": ([("5", A, A), *[("", A, A)] * 3], 4, "3 failures in a row, each after iteration unknown; "),
}


def test_only_failures_of_ranks_without_progress_end_the_run(new_agent: Callable[[], Any], elastic: Any) -> None:
    for name, (failures, last, words) in HISTORIES.items():
        agent, end = new_agent(), None
        for number, (began, before, after) in enumerate(failures, 1):
            notes.leave(notes.BEGAN, began)
            agent.meeting.members = frozenset(before)
            try:
                agent.end_ranks(1, next_members=after)
            except elastic.Ended as error:
                end = number, str(error), error.code
                break
        assert (end[0] if end else 0) == last, name
        if end:
            assert end[1].startswith(words) and end[1].endswith("rank 0 failed") and end[2] == 7, name


# Exit codes of the ranks, the wish with which they stopped -> the exit code of the run (None: they start again), and
# whether a failure is then counted.
STOPS: dict[str, tuple[tuple[int, ...], str, int | None, bool]] = {
    "Ctrl-C": ((130, 130), "", 130, False),
    "Ctrl-C, heard by one rank first": ((75, 130), "STOP_FILE", 130, False),
    "the stop file": ((75, 75), "STOP_FILE", 75, False),
    "a limit of time": ((75,), "STOP_TIME", 75, False),
    "an unknown wish": ((75,), "", 75, False),
    "nodes that came back": ((75, 75), "STOP_NODES", None, False),
    "TERM of this node": ((75,), "STOP_SIGTERM", None, False),
    "a failure": ((1, -15), "", None, True),
    "a kill": ((-9,), "", None, True),
    "a failure while nodes came back": ((1, 1), "STOP_NODES", None, True),
    "other nodes alone": ((0,), "", None, False),
}


def test_the_ranks_start_again_unless_they_were_asked_to_end(new_agent: Callable[[], Any], elastic: Any) -> None:
    for name, (codes, wish, code, counted) in STOPS.items():
        agent = new_agent()
        notes.leave(notes.BEGAN, "5")
        notes.leave(notes.STOPPED, wish)
        if code is None:
            agent.end_ranks(*codes)
            assert (agent.started, agent.in_a_row, agent.trained) == (1, counted, True), name
        else:
            with pytest.raises(elastic.Ended, match=wish or "SIGINT") as end:
                agent.end_ranks(*codes)
            assert (end.value.code, agent.started) == (code, 0), name


def test_peers_of_a_rank_that_fails_learn_it_before_they_are_ended(new_agent: Callable[[], Any]) -> None:
    """Whenever it fails: peers may wait for it, deaf to TERM, and are killed after half a minute."""
    for answers in ([1], [None, 1], [None, None, 1], [None, None, None, -9]):
        agent = new_agent()
        Path(os.environ[notes.FOLDER], notes.LOST).unlink(missing_ok=True)
        agent._pcontext, seen = Ranks(answers, [None]), []
        group = agent._worker_group
        group.workers = [SimpleNamespace(id=rank, global_rank=rank) for rank in range(2)]
        while WorkerState.FAILED not in seen:
            seen.append(agent._monitor_workers(group).state)
        assert agent._pcontext.noted == ["another rank of this node has failed; ending"]
        assert set(seen[:-1]) <= {WorkerState.HEALTHY} and agent.failed.state == WorkerState.FAILED


def test_ranks_have_time_to_save_if_their_agent_is_asked_to_end(new_agent: Callable[[], Any]) -> None:
    """Ten minutes after a signal; half a minute if the agent ends by itself, because then ranks may hang."""

    def stop(number: signal.Signals | None) -> tuple[signal.Signals, int]:
        agent = new_agent()
        error = SignalException("", number) if number else ValueError()

        def run(role: str) -> None:
            raise error

        agent._invoke_run = run
        with pytest.raises(type(error)):
            agent.run()
        return agent._pcontext.closed[0]  # then no rank is alive

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        assert stop(number) == (number, 600)
    assert stop(None) == (signal.SIGTERM, 30)


def test_the_first_meeting_waits_longer_for_more_nodes(elastic: Any) -> None:
    limits = elastic.Limits(join=timedelta(minutes=5))
    calls = []
    for number in range(3):
        limits.meeting = SimpleNamespace(state=SimpleNamespace(round=number))
        calls.append(limits.last_call.total_seconds())
    assert calls == [20, 2, 2] and limits.join == timedelta(minutes=5)


@for_each(
    "words", ["--save runs/a --load x", "--save=runs/a", "--save b --lr 1 --save=./runs/a/", "--save runs/b/../a"]
)
def test_nodes_in_other_folders_have_one_save_folder(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each spelling of the flag; the last one counts. Other words stay as they are."""
    monkeypatch.chdir(tmp_path)
    found, save = absolute_save(words.split())
    assert save == f"{tmp_path}/runs/a" and absolute_save(found) == (found, save)
    assert len(found) == len(words.split()) and ("--load" not in words or found[-2:] == ["--load", "x"])
    monkeypatch.chdir("/")
    assert absolute_save(found) == (found, save)
    assert absolute_save(["--save-interval", "runs/a"]) == (["--save-interval", "runs/a"], "")


def test_commands_of_two_nodes_are_compared_with_their_flags() -> None:
    """Megatron-style lists of words, a flag with =, and a command that ends earlier."""
    ours = "--data-path 1 a 2 b --lr=1 --bf16".split()
    for words, here, there in (
        ("--data-path 1 a 3 b --lr=1 --bf16", "--data-path 1 a 2", "--data-path 1 a 3"),
        ("--data-path 1 a 2 b --lr=2 --bf16", "--lr=1", "--lr=2"),
        ("--data-path 1 a 2 b --lr=1", "--bf16", "no further flag"),
    ):
        assert first_difference(ours, words.split()) == (here, there)
        assert first_difference(words.split(), ours) == (there, here)
