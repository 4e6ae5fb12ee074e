"""The agent of a node of an elastic run (--elastic MIN:MAX), for scripts/launch.sh: torchrun's agent, with additions.

Note [Agents]
torchrun's agents meet at a store, start the ranks of their nodes, and meet again when ranks have failed. Added here:
- The store is a process of its own on the named host, so that no node's agent takes it along. All ranks use it too.
- A node whose agent gives no sign of life is lost: the ranks of the others learn it, and end even within a collective.
- Nodes that come back: the ranks are asked to stop after their step and to save, for as long as that takes.
- Only failures of ranks count, and only those in a row without a new checkpoint: the third ends the run.
- A node with another command does not join: it would end the ranks of all.
Agents and ranks exchange notes as files (`megazero.cluster.agent_notes`). Private names of torch: those that `Agent`
overrides, `_pcontext`, `_stop_workers` and `_remaining_restarts`; `_state_holder`, `_bootstrap_store_info` and
`_shared_tcp_store_server` of its rendezvous.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import config_from_args, parse_args

from megazero.checkpoint.folders import save_mark
from megazero.cluster import agent_notes as notes
from megazero.cluster.elastic import secret, store_process
from megazero.cluster.elastic.same_command import absolute_save, first_difference
from megazero.cluster.elastic.secret import Seal
from megazero.cluster.elastic.signed_state import SignedState
from megazero.cluster.elastic.store_process import COMMAND, END, JOINED, LEFT, RUN, SILENCE
from megazero.cluster.listening import LOOPBACK, host_store, is_here
from megazero.world import BEFORE, STARTED, this_node

LOST_SECONDS = 8  # after which an agent without a sign of life is lost; ELASTIC_LOST_SECONDS sets another number
BEATS = 4  # signs of life in that time
FIRST_CALL, LAST_CALL = 20.0, 2.0  # seconds to wait for more nodes than MIN: at first; later, all have met before
SETTLE_SECONDS = 3.0  # in which several nodes that come back are taken in together
ANSWER_SECONDS = 60.0  # until the store answers
SAY_SECONDS = 5.0  # of waiting, before a line is printed
SAVE_SECONDS = 600  # that ranks have to end their step and save, once this agent is asked to end
TRIES = 3  # failures in a row without a new checkpoint
MANY = 10**6  # restarts
SAVED_EARLY, INTERRUPTED = 75, 130  # exit codes of ranks


Report = Callable[[ChildFailedError], tuple[str, int]]


class Ended(Exception):
    """The run is over on this node, with a sentence and an exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Limits(RendezvousTimeout):
    """torchrun's limits, with another one for the first meeting: then nodes start at different times."""

    meeting: Meeting

    @property
    def last_call(self) -> timedelta:
        return timedelta(seconds=LAST_CALL if self.meeting.state.round else FIRST_CALL)


class Meeting(DynamicRendezvousHandler):
    """The agents' agreement on the nodes of each generation. Made by `meeting`.

    Attributes:
        endpoint: host and port of the store.
        store, seal: the store, and the MAC of the agents' values in it.
        members: nodes of this generation.
        generation: its number, the same on all nodes.
    """

    endpoint: tuple[str, int]
    store: dist.Store
    seal: Seal
    members: frozenset[Any] = frozenset()
    generation = 0
    waiting_since: float | None = None

    @property
    def state(self) -> Any:
        return self._state_holder.state

    @property
    def has_nodes(self) -> bool:
        """A node gives signs of life, or the first one is about to."""
        silence = float(self.seal.read(self.store, SILENCE) or 0)
        return silence < self.settings.keep_alive_interval.total_seconds() * self.settings.keep_alive_max_attempt

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for enough nodes. Raises Ended: the run is over, there are too few, or the store is gone."""
        with self.explained(), self._saying():
            info = super().next_rendezvous()
            while info.world_size < self.settings.min_nodes:  # a node was lost since the agreement
                info = super().next_rendezvous()
        self.members, self.generation, self.waiting_since = frozenset(self.state.participants), self.state.round, None
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(*self.endpoint))

    def num_nodes_waiting(self) -> int:
        """Leave the ranks notes of changes. Always 0: torchrun kills ranks that save for more than 30 s."""
        with self.explained():
            waiting = super().num_nodes_waiting()
            if self.state.closed:
                raise RendezvousClosedError
        gone = self.members - frozenset(self.state.participants)
        if gone:
            names = ", ".join(sorted(node.addr for node in gone))
            notes.leave(notes.LOST, f"{names}: the agent of this node stopped, or its ranks ended; this rank ends")
        self.waiting_since = (self.waiting_since or time.monotonic()) if waiting else None
        if self.waiting_since and not gone and time.monotonic() - self.waiting_since > SETTLE_SECONDS:
            notes.leave(notes.CHANGED, f"{waiting}")
        return 0

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Within the block, raise Ended in place of torchrun's errors."""
        host, port = self.endpoint
        try:
            yield
        except (RendezvousClosedError, RendezvousGracefulExitError):
            raise last_words(self.store, self.seal) or Ended("the run has ended") from None
        except RendezvousTimeoutError:
            minutes = self.settings.timeout.join.total_seconds() / 60
            why = f"fewer than {self.settings.min_nodes} nodes" if not self.state.complete else "no end of a step"
            raise Ended(
                f"{why} for {minutes:g} minutes (--wait); start the nodes again: the run resumes from --save"
            ) from None
        except (RendezvousConnectionError, dist.DistError) as error:
            raise Ended(
                f"the store at {host}:{port} is gone, with its process or its machine ({type(error).__name__}); start "
                "all nodes again: the run resumes from --save"
            ) from None

    @contextlib.contextmanager
    def _saying(self) -> Iterator[None]:
        """Print a line if the block takes long."""
        least, most = self.settings.min_nodes, self.settings.max_nodes
        needed = f"{least} to {most}" if most > least else f"{least}"
        minutes = self.settings.timeout.join.total_seconds() / 60
        line = f"launch.sh: waiting for {needed} nodes, for at most {minutes:g} minutes (--wait)"
        timer = threading.Timer(SAY_SECONDS, lambda: print(line, file=sys.stderr, flush=True))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def end(self, message: str, code: int = 1) -> Ended:
        """Leave the last words of the run for all nodes, and return them."""
        with contextlib.suppress(RuntimeError):
            ours = self.seal.close(END, f"{code} {message}".encode())
            if self.seal.open(END, self.store.compare_set(END, "", ours)) is None:
                self.store.set(END, ours)  # in place of a stranger's
        return Ended(message, code)


def last_words(store: dist.Store, seal: Seal) -> Ended | None:
    """Return the end of the run of this store; None: it has not ended."""
    found = seal.read(store, END)
    if found is None:
        return None
    code, _, message = found.decode().partition(" ")
    return Ended(message, int(code))


def meeting(endpoint: str, least: int, most: int, wait_seconds: float, save: str) -> Meeting:
    """Connect to the store, and start it if this is its host.

    Args:
        endpoint: HOST:PORT; port 0: the store lives in this process, for a run of one node.
        save: the folder of the run's secret.
    """
    host, port = parse_rendezvous_endpoint(endpoint, default_port=29400)
    try:
        seal = Seal(secret.shared_secret(save) if port else secret.draw_secret())
    except (OSError, ValueError) as error:
        raise Ended(str(error)) from None
    if port:
        store = connect_to_store(host, port, seal)
    else:
        host, store = LOOPBACK, host_store(LOOPBACK, 0, timeout=timedelta(seconds=ANSWER_SECONDS))
    limits = Limits(join=timedelta(seconds=wait_seconds))
    lost = int(os.environ.get("ELASTIC_LOST_SECONDS", LOST_SECONDS))
    beat = max(1, lost // BEATS)
    beats = {"keep_alive_interval": beat, "keep_alive_max_attempt": max(2, lost // beat)}
    backend = SignedState(store, seal, beat)
    found: Meeting = Meeting.from_backend(RUN, store, backend, least, most, this_node().machine, limits, **beats)
    found.endpoint, found.store, found.seal, limits.meeting = (host, store.port), store, seal, found
    # Ranks use the store of the agents. Else torchrun makes another on the first node, and does not follow that node's
    # changes: the others keep the address of a lost one.
    found._bootstrap_store_info, found._shared_tcp_store_server = RendezvousStoreInfo(*found.endpoint), store
    return found


def admit(found: Meeting, words: Sequence[str]) -> bool:
    """Leave the command of this node for those that come later, or compare it with that of the first one.

    The environment of ranks has the time of the first start, and the mark of --save then.

    Args:
        words: the command, as far as it is the same on all nodes.

    Returns:
        False if this is the store of another command, which has no nodes any more; it goes away within seconds.

    Raises:
        Ended: it has nodes.
    """
    words, save = absolute_save(words)
    ours = json.dumps({"words": words, "started": time.time(), "before": save_mark(save)})
    where = "{}:{}".format(*found.endpoint)
    kept = found.seal.open(COMMAND, found.store.compare_set(COMMAND, "", found.seal.close(COMMAND, ours.encode())))
    if kept is None:
        raise Ended(
            f"--rdzv-endpoint {where} serves another run, whose secret is not that of {save or 'this node'}: give all "
            "nodes the same --save folder, or this run another port"
        )
    first = json.loads(kept)
    if first["words"] == words:
        os.environ.update({STARTED: str(first["started"]), BEFORE: first["before"]})
        return True
    if not found.has_nodes:
        found.end("all nodes of the run have left")
        return False
    here, there = first_difference(words, first["words"])
    raise Ended(
        f"this node has {here}, and the run at {where} has {there}; start the same command on every node, or end that "
        "run first"
    )


def connect_to_store(host: str, port: int, seal: Seal) -> dist.TCPStore:
    """Return the store of a run that has not ended; the store of an ended one goes away within seconds."""
    timeout, until = timedelta(seconds=ANSWER_SECONDS), time.monotonic() + ANSWER_SECONDS
    ended, why = None, ""
    while time.monotonic() < until:
        try:
            if is_here(host):
                start_store(host, port, seal)
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            ended, why = last_words(store, seal), "it serves another run, which has ended"
            if ended is None and not (store.check([END]) and seal.read(store, COMMAND) is None):
                return store
        except (dist.DistError, OSError) as error:  # it may have gone away just now
            why = str(error).splitlines()[0]
        time.sleep(1)
    raise ended or Ended(
        f"no store answers at --rdzv-endpoint {host}:{port}: start launch.sh on {host} too, and check that this "
        f"machine reaches that port ({why})"
    )


def start_store(host: str, port: int, seal: Seal) -> None:
    """Start the store as a process of its own, which outlives this agent. A second one ends at once."""
    command, nowhere = [sys.executable, "-m", store_process.__name__, host, str(port)], subprocess.DEVNULL
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, secret.VARIABLE: seal.secret}  # not an argument, which all users see
    subprocess.Popen(command, env=env, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)


class Agent(LocalElasticAgent):
    """torchrun's agent of one node, which starts its ranks again for as long as the run makes progress."""

    def __init__(self, spec: WorkerSpec, report: Report, **options: Any) -> None:
        super().__init__(spec, **options)
        self.meeting = cast(Meeting, spec.rdzv_handler)
        self.report = report
        self.failed: RunResult | None = None  # of the generation before this one
        self.began, self.in_a_row, self.trained = "", 0, False
        self.ended_at: tuple[str, frozenset[Any]] = ("", frozenset())  # the iteration it began with, and its nodes

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = [rank.proc.poll() for rank in cast(Any, self._pcontext).subprocess_handlers.values()]
        if any(code not in (None, 0, SAVED_EARLY) for code in codes):  # its peers may hang, deaf to TERM
            notes.leave(notes.LOST, "another rank of this node has failed; ending")
        if None in codes and not any(codes):  # torchrun asks again, and ends the peers of a rank that has just failed
            result = RunResult(WorkerState.HEALTHY)
        else:
            result = super()._monitor_workers(worker_group)
        self.failed = result if result.state == WorkerState.FAILED else None
        return result

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """End the ranks. death_sig: the signal to this agent; None: it ends by itself, and its ranks may hang."""
        if death_sig and self._pcontext:  # first, because the method of torch 2.11 has no timeout, but its default
            self._pcontext.close(death_sig, SAVE_SECONDS)
        super()._shutdown(death_sig or signal.SIGTERM)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Meet the other agents, and start the ranks again, unless the ranks were asked to end."""
        self._stop_workers(worker_group)
        codes = {failure.exitcode for failure in self.failed.failures.values()} if self.failed else set()
        why = notes.read_note(notes.STOPPED)
        if INTERRUPTED in codes or (SAVED_EARLY in codes and why not in ("STOP_SIGTERM", "STOP_NODES")):
            code = INTERRUPTED if INTERRUPTED in codes else SAVED_EARLY
            raise self.meeting.end(f"the run was asked to end ({why or 'SIGINT'})", code)
        if SAVED_EARLY in codes:
            self.failed = None
        self.ended_at = notes.read_note(notes.BEGAN), self.meeting.members
        self.trained |= self.ended_at[0] != ""
        super()._restart_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> Any:
        """Start the ranks of the next generation, unless the last one failed as those before it."""
        if self.failed is not None:
            self._judge(*self.ended_at)
        # torchrun's count of restarts is a node's own, and names the folders of logs. Here it is the generation.
        self._remaining_restarts = worker_group.spec.max_restarts - self.meeting.generation
        for name in (notes.LOST, notes.CHANGED, notes.BEGAN, notes.STOPPED):
            Path(os.environ[notes.FOLDER], name).unlink(missing_ok=True)
        return super()._start_workers(worker_group)

    def _judge(self, began: str, before: frozenset[Any]) -> None:
        """Count a failure of ranks whose nodes are all here. Raises Ended at the last one."""
        assert self.failed is not None
        if not before <= self.meeting.members:
            return
        self.in_a_row = self.in_a_row + 1 if began == self.began else 1
        self.began = began
        if self.in_a_row < TRIES and self.trained:
            return
        text, code = self.report(ChildFailedError("", self.failed.failures))
        if self.trained:
            text = f"{self.in_a_row} failures in a row, each after iteration {began or 'unknown'}; the last: {text}"
        raise self.meeting.end(text, code)


def run_agent(log_dir: Path, arguments: list[str], wait_seconds: float, report: Report) -> None:
    """Run torchrun's `arguments` with an agent of this file.

    Args:
        log_dir: of the ranks.
        wait_seconds: for enough nodes.
        report: returns the message and the exit code of a failure.

    Raises:
        Ended: the run ended before its last iteration.
    """
    parsed = parse_args(["--log-dir", str(log_dir), *arguments])
    config, command, words = config_from_args(parsed)
    same = ["--nproc", str(config.nproc_per_node), *parsed.training_script_args]
    admitted = False
    while not admitted:
        found = meeting(
            config.rdzv_endpoint,
            config.min_nodes,
            config.max_nodes,
            wait_seconds=wait_seconds,
            save=absolute_save(same)[1],
        )
        with found.explained():
            admitted = admit(found, same)
            found.store.add(JOINED, int(admitted))
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=command,
        args=tuple(words),
        rdzv_handler=found,
        max_restarts=MANY,
        monitor_interval=config.monitor_interval,
        numa_options=config.numa_options,
    )
    folder = notes.make_folder()
    os.environ.update(
        {
            "TORCHELASTIC_SIGNALS_TO_HANDLE": config.signals_to_handle,
            "TORCH_ELASTIC_WORKER_IDENTICAL": "1",  # the same number of ranks on each node
            notes.FOLDER: str(folder),
        }
    )
    agent = Agent(
        spec,
        report,
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        exit_barrier_timeout=ANSWER_SECONDS,
        log_line_prefix_template=config.log_line_prefix_template,
    )
    try:
        agent.run()
        found.end("the run is done", 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(RuntimeError):
            if last_words(found.store, found.seal):  # else this node leaves, and the others continue
                found.shutdown()
            found.store.add(LEFT, 1)
