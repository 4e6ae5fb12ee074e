"""Ranks that are stopped, killed, orphaned, started with other flags or at a taken port: reactions of the others.

Real processes and signals. Time-outs are short, because the tests wait for them; no test measures time.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.cli import metrics
from tests.helpers.programs import (
    ROOT,
    STACKS,
    WarmProgram,
    can_print_stacks,
    descendants,
    free_port,
    rank_environment,
    runs,
)

LASTING = ["--train-iters", 100000, "--log-interval", 1]
FOREVER = [*LASTING, "--distributed-timeout-minutes", 0.15]  # a time-out is waited for


class Rank:
    """A running program whose output goes to a file, one of those that a test `started`."""

    def __init__(self, log: Path, process: Any, started: list[Rank] | None = None) -> None:
        self.log, self.process, self.started = log, process, [self] if started is None else started

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def iterations(self) -> int:
        return self.said.count("| loss ")

    def wait_for_iterations(self, number: int) -> None:
        wait(lambda: self.iterations >= number or self.process.poll() is not None, self)
        assert self.iterations >= number, self.said

    def end(self, exit_code: int = 1) -> str:
        """Return its whole output once it has ended by itself with an error."""
        wait(lambda: self.process.poll() is not None, self)
        assert self.process.returncode == exit_code, self.said
        return self.said


def wait(happened: Callable[[], bool], *ranks: Rank) -> None:
    """Wait for it; if that is ended, by the test's own limit, print the logs of all ranks, with their stacks."""
    try:
        while not happened():
            time.sleep(0.05)
    except BaseException:
        started = list(dict.fromkeys(each for rank in ranks for each in rank.started))
        for rank in started:
            print_stacks(rank)
            print(f"{rank.log.name}:\n{rank.said}")
        raise


def print_stacks(rank: Rank) -> None:
    """Have a rank and its data workers write their stacks to its log. One that is frozen does not."""
    for pid in descendants(rank.process.pid):
        if runs(pid) and can_print_stacks(pid):
            before, until = rank.said.count("Current thread"), time.monotonic() + 60
            os.kill(pid, STACKS)
            while rank.said.count("Current thread") == before and time.monotonic() < until:
                time.sleep(0.05)


Start = Callable[..., list[Rank]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(flags of each rank) starts them as srun would, rank 0 being the host of the store."""
    started: list[Rank] = []

    def run(flags: list[list[object]], port: int = 0, program: tuple[object, ...] = ("pretrain_gpt.py",)) -> list[Rank]:
        port = port or free_port()
        ranks = []
        for rank, words in enumerate(flags):
            log = tmp_path / f"{len(started)}.log"
            env = rank_environment(rank, len(flags), port)
            ranks.append(Rank(log, WarmProgram(program[0], [*program[1:], *words], env, (log, log)), started))
            started.append(ranks[-1])
        return ranks

    yield run
    for rank in started:
        rank.process.kill()
        rank.process.wait()


def test_a_wait_that_is_ended_prints_all_logs_and_stacks(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """Wait for one of two ranks, each with a data worker."""
    ranks = start([["operation 7"], ["operation 8"]], program=("tests/end_to_end/waiting_rank.py",))

    def limit() -> bool:
        if all("the worker waits" in rank.said and "operation" in rank.said for rank in ranks):
            pytest.fail("time-out")
        return False

    with pytest.raises(pytest.fail.Exception):
        wait(limit, ranks[0])
    printed = capsys.readouterr().out
    assert "0.log:\n" in printed and "1.log:\n" in printed
    assert "waits in operation 7" in printed and "waits in operation 8" in printed
    for function in ("in_the_rank", "in_its_worker"):
        assert printed.count(f" in {function}\n") == 2, printed


@pytest.mark.slow  # half a minute of time-outs
def test_a_frozen_host_of_the_store_does_not_hang_the_others(model: list[Any], start: Start) -> None:
    first, second = start([[*model, *FOREVER]] * 2)
    first.wait_for_iterations(2)
    first.process.send_signal(signal.SIGSTOP)
    said, host = second.end(), re.escape(socket.gethostname())
    assert re.search(rf"rank 1: [a-z-]+ over \w+: lost rank 0 \({host}\): .*; asking the others why\n", said), said
    assert "rank 0's store does not answer: its process is frozen" in said


@pytest.mark.slow  # the same, of three ranks
def test_a_frozen_rank_is_named_by_the_others(model: list[Any], start: Start) -> None:
    ranks = start([[*model, *FOREVER]] * 3)
    ranks[0].wait_for_iterations(2)
    ranks[1].process.send_signal(signal.SIGSTOP)
    host = re.escape(socket.gethostname())
    for rank in (ranks[0], ranks[2]):
        said = rank.end()
        assert re.search(r"rank [02]: [a-z-]+ over \w+: lost one of ranks \d.*; asking the others why\n", said), said
        assert re.search(rf"rank 1 \({host}\) does not respond: frozen, gone or busy elsewhere", said), said


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("SIGSTOP", marks=pytest.mark.slow), "SIGKILL"])
def test_a_rank_lost_in_a_save_is_named(how: str, model: list[Any], start: Start, tmp_path: Path) -> None:
    flags = [*model, *FOREVER, "--save", tmp_path / "saved", "--save-interval", 2]
    first, second = start([flags] * 2, program=("tests/end_to_end/stricken_rank.py", how, 1))
    said = first.end()
    assert f"rank 0: saving iteration 2: lost rank 1 ({socket.gethostname()}): " in said, said
    assert f"rank 1 ({socket.gethostname()}) does not respond" in said
    assert not (tmp_path / "saved" / "latest").exists()
    second.process.kill()


def test_a_rank_that_is_interrupted_in_a_save_ends_the_run(model: list[Any], start: Start, tmp_path: Path) -> None:
    """End all ranks at once, although their time-out is half an hour."""
    flags = [*model, *FOREVER, "--distributed-timeout-minutes", 30, "--num-workers", 1]
    flags += ["--save", tmp_path / "saved", "--save-interval", 2]
    sentence = f"rank 0: interrupted without saving: --save {tmp_path / 'saved'} has no checkpoint\n"
    ranks = start([flags] * 2, program=("tests/end_to_end/stricken_save.py", 1))
    for rank, wanted in zip(ranks, (sentence, "rank 1: interrupted\n"), strict=True):
        said = rank.end(130)
        assert wanted in said, said
        assert "Training continues" not in said, said
    assert not (tmp_path / "saved" / "latest").exists()


def rank_processes(torchrun: int) -> list[int]:
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    return [int(pid) for pid in children if b"pretrain_gpt" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.second
def test_ranks_end_when_torchrun_is_killed(model: list[Any], tmp_path: Path) -> None:
    torchrun = "-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint localhost:0 --nproc-per-node 2".split()
    command = [sys.executable, *torchrun, "pretrain_gpt.py", *model, *LASTING]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen([*map(str, command)], cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
    launcher = Rank(log, process)
    ranks: list[int] = []
    try:
        launcher.wait_for_iterations(2)
        ranks = rank_processes(launcher.process.pid)
        assert len(ranks) == 2
        launcher.process.kill()
        wait(lambda: not any(map(runs, ranks)), launcher)
        assert "its launcher was killed; ending" in launcher.said
    finally:
        launcher.process.kill()
        launcher.process.wait()
        for pid in filter(runs, ranks):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_plain_torchrun_starts_the_ranks_of_two_nodes_again(model: list[Any], tmp_path: Path) -> None:
    """It counts the restarts of each node separately, and its store keeps the entries of ranks that were killed."""
    torchrun = f"-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint localhost:{free_port()} --nnodes 2"
    saves = ["--save", tmp_path / "saved", "--load", tmp_path / "saved", "--save-interval", 5]
    flags = [*model, *saves, "--train-iters", 400, "--log-interval", 1, "--log-dir", tmp_path / "log"]
    command = [sys.executable, *torchrun.split(), "--max-restarts", 3, "pretrain_gpt.py", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    nodes: list[Rank] = []
    try:
        for name in "ab":
            with (tmp_path / name).open("w") as out:
                process = subprocess.Popen([*map(str, command)], cwd=ROOT, env=env, stdout=out, stderr=out)
            nodes.append(Rank(tmp_path / name, process, nodes))
        for times in (1, 2):
            wait(lambda count=times: sum(node.iterations for node in nodes) >= 40 * count, nodes[0])
            os.kill(rank_processes(nodes[times - 1].process.pid)[0], signal.SIGKILL)
            wait(lambda count=times: sum(n.said.count("resuming after") for n in nodes) >= count, nodes[0])
        for node in nodes:
            node.end(0)
    finally:
        for node in nodes:
            for pid in (node.process.pid, *rank_processes(node.process.pid)) if node.process.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
    assert list(losses(tmp_path / "log")) == list(range(1, 401))


def losses(log_dir: Path) -> dict[int, float]:
    return {line["iteration"]: line["loss"] for line in metrics(log_dir) if "loss" in line}


@pytest.mark.second
def test_a_disk_that_fails_or_a_kill_loses_no_more_than_other_runs_do(
    model: list[Any], start: Start, tmp_path: Path
) -> None:
    """States are in a file without a name. A run whose writes fail prints this; a killed run has the same curve."""
    folder = tmp_path / "nvme"
    folder.mkdir()
    flags = [*model, "--optimizer-cpu-offload", "--optimizer-nvme-offload", folder, "--log-interval", 1]
    saves = [
        "--save",
        tmp_path / "saved",
        "--load",
        tmp_path / "saved",
        "--save-interval",
        2,
        "--log-dir",
        tmp_path / "a",
    ]
    killed, failing, whole = (
        start([[*flags, "--train-iters", iterations, *more]])[0]
        for iterations, more in ((100000, saves), (100000, []), (9, ["--log-dir", tmp_path / "b"]))
    )
    killed.wait_for_iterations(5)
    killed.process.kill()
    killed.process.wait()
    failing.wait_for_iterations(1)
    resource.prlimit(failing.process.pid, resource.RLIMIT_FSIZE, (1 << 19, resource.RLIM_INFINITY))
    sentence = f"--optimizer-nvme-offload {folder}: cannot write optimizer states: File too large; the run ends, and"
    assert sentence in failing.end() and "Traceback" not in failing.said
    assert list(folder.iterdir()) == []
    whole.end(0)
    recorded = len(losses(tmp_path / "a"))
    resumed = start([[*flags, "--train-iters", 9, *saves]])[0]
    goodput = re.search(r"goodput   [0-9.]+% of \d+:\d\d in steps that are kept; ", resumed.end(0))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    again = [event for event in events if event["event"] == "start"][1]
    assert again["lost_iterations"] == recorded - again["iteration"]
    assert bool(goodput) == (again["lost_iterations"] > 0)  # none if the kill came just after a save
    assert list(again["seconds"]) == ["process", "checks", "joining", "model", "checkpoint"]


@pytest.mark.slow
def test_a_second_run_on_a_taken_port_says_so_and_disturbs_nobody(model: list[Any], start: Start) -> None:
    port = free_port()
    running = start([[*model, *LASTING]] * 2, port)
    running[0].wait_for_iterations(1)
    second = start([[*model, *LASTING]] * 2, port)
    assert f"error: MASTER_PORT={port} is taken on this machine, perhaps by another run" in second[0].end()
    assert "rank 1 has already joined at MASTER_ADDR=127.0.0.1" in second[1].end()
    running[0].wait_for_iterations(running[0].iterations + 2)


UNLIKE: dict[str, tuple[list[list[Any]], list[str]]] = {
    "a flag of the optimizer": (
        [["--weight-decay", 0.2], [], []],
        ["--weight-decay is 0.01 on ranks 1-2 (HOST), 0.2 on rank 0 (HOST)."],
    ),
    "the layout": (
        [[], ["--tensor-model-parallel-size", 3], []],
        ["--tensor-model-parallel-size is 1 on ranks 0, 2 (HOST), 3 on rank 1 (HOST)"],
    ),
    "the vocabulary and the stage": (
        [["--vocab-size", 300], ["--zero-stage", 2], []],
        ["--vocab-size is 257 on ranks 1-2 (HOST), 300 on rank 0 (HOST)", "--zero-stage is 1 on ranks 0, 2 (HOST), 2"],
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "the layout" else pytest.mark.slow) for n in UNLIKE])
def test_ranks_with_different_flags_are_refused(name: str, model: list[Any], start: Start, tmp_path: Path) -> None:
    flags, words = UNLIKE[name]
    for rank in start([[*model, *LASTING, "--log-dir", tmp_path / "run", *own] for own in flags]):
        said = rank.end()
        for text in words:
            assert text.replace("HOST", socket.gethostname()) in said, said
        assert rank.iterations == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--load {0}/typo", "error: --load {0}/typo: there is no such folder, only {0}; correct it"),
        ("--exit-before-minutes 5", "error: --exit-before-minutes 5: this is no SLURM job with a time limit"),
    ],
    ids=["load", "job"],
)
def test_a_refusal_of_rank_0_is_every_ranks(
    flags: str, words: str, model: list[Any], start: Start, tmp_path: Path
) -> None:
    """Start ranks by hand, so that no launcher ends the others. Rank 0 alone looks at --load and at the job."""
    common = [*model, *LASTING, "--save", tmp_path / "saved", "--log-dir", tmp_path / "run"]
    for rank in start([[*common, *flags.format(tmp_path).split()]] * 2):
        assert words.format(tmp_path) in rank.end()
    assert not (tmp_path / "run").exists() and not (tmp_path / "saved").exists()


@pytest.mark.slow
def test_another_corpus_under_the_same_name_is_refused(
    model: list[Any], corpus: Path, start: Start, tmp_path: Path
) -> None:
    """Every node has a corpus of its own: the path may differ between ranks, the tokens may not."""
    flags = []
    for rank in range(2):
        copy = tmp_path / str(rank)
        copy.mkdir()
        for suffix in (".bin", ".idx"):  # without PREFIX.json, whose checksum would be asked first
            source = corpus.with_name(corpus.name + suffix)
            (copy / f"corpus{suffix}").write_bytes(source.read_bytes())
        flags.append([*model, "--data-path", copy / "corpus", "--train-iters", 1, "--log-dir", copy / "log"])
    good = start(flags)
    for rank in good:
        wait(lambda rank=rank: rank.process.poll() is not None, rank)
        assert rank.process.returncode == 0, rank.said
    with (tmp_path / "1" / "corpus.bin").open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    for rank in start(flags):
        assert "the content of --data-path's corpus 1 is" in rank.end()


@pytest.mark.second
def test_a_hang_says_who_is_where_and_ends_the_run(model: list[Any], start: Start) -> None:
    """Rank 1 computes for ever, and rank 0 waits for it: both know it before a collective's time-out does."""
    flags = [*model, "--train-iters", 9, "--hang-timeout", 0.1]
    ranks = start([["1", *flags]] * 2, program=("tests/end_to_end/stuck_rank.py",))
    said = [rank.end(exit_code=124) for rank in ranks]
    host = re.escape(socket.gethostname())
    (line,) = [line for line in said[0].splitlines() if line.startswith("rank 0: HANG (--hang-timeout): ")]
    assert re.search(rf"rank 1 \({host}\) has been in operation 'Forward \S+ mb 0' of iteration 3 for \d+ s", line), (
        line
    )
    assert re.search(rf"rank 0 \({host}\) has been in operation '[^']+' of iteration 3 for \d+ s", line), line
    assert "HANG" not in said[1]
    for text in said:  # the stacks of all threads
        assert "most recent call first" in text and "interpreter.py" in text
    assert "stuck_rank.py" in said[1]


def test_a_rank_that_hears_nothing_ends_when_another_fails(start: Start) -> None:
    """It waits as in a kernel of NCCL, and no launcher ends it. With rank 0 its store is gone."""
    for failing, words in ((1, "rank 1: error: --data-path: a bad token"), (0, "rank 0 is gone, and its store")):
        ranks = start([[failing]] * 2, program=("tests/end_to_end/deaf_rank.py",))
        said = ranks[1 - failing].end(1)
        assert f"rank {1 - failing}: stopping because another rank failed: " in said and "unwound" not in said
        assert words in said or (failing == 0 and "a bad token" in said)


@pytest.mark.second
def test_a_killed_run_resumes_from_memory(start: Start, model: list[object], tmp_path: Path) -> None:
    """Kill both ranks after 5 iterations at least; the same command then continues from a later one than the disk's."""
    flags: list[object] = [*model, "--log-interval", 1, "--train-iters", 40]
    saves = ["--save", tmp_path / "saved", "--load", tmp_path / "saved", "--save-interval", 1000]
    saves += ["--memory-checkpoint-interval", 2, "--memory-checkpoint-dir", tmp_path / "memory"]
    ranks = start([[*flags, *saves, "--log-dir", tmp_path / "killed"]] * 2)
    ranks[0].wait_for_iterations(5)
    wait(lambda: bool([*(tmp_path / "memory").rglob("iter_*")]), *ranks)
    for rank in ranks:
        rank.process.kill()
    again = start([[*flags, *saves, "--log-dir", tmp_path / "killed"]] * 2)
    said = again[0].end(exit_code=0)
    loaded = re.search(r"loaded iteration (\d+) from the memory of 1 node in \S+ s \(the disk has none\)", said)
    assert loaded and f"resuming after iteration {loaded[1]}" in said, said
    whole = start([[*flags, "--log-dir", tmp_path / "whole"]] * 2)
    whole[0].end(exit_code=0)
    losses = [[(each["iteration"], each["loss"]) for each in metrics(tmp_path / name)] for name in ("killed", "whole")]
    assert losses[0] == losses[1] and len(losses[0]) == 40
    assert not [*(tmp_path / "memory").iterdir()]
