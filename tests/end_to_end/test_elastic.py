"""--elastic: nodes come and go, all on this machine. Agents and stores are real; most ranks stand in."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.end_to_end.cli import metrics, pretrain
from tests.helpers.elastic import LOST_SECONDS, NEVER_LOST, ElasticRun
from tests.helpers.programs import ROOT, runs

STAND_IN = Path(__file__).with_name("elastic_rank.py")


def counting(folder: Path, nodes: str, *words: object, lost: int = NEVER_LOST) -> ElasticRun:
    """A run of the stand-in, which does 20 steps per second."""
    return ElasticRun(folder, nodes, list(words), STAND_IN, lost)


@pytest.mark.second
def test_a_lost_node_is_noticed_and_one_that_comes_back_is_taken_in(tmp_path):
    with counting(tmp_path, "2:3", 10**6, lost=20) as run:
        run.start("a", "b")
        run.ahead = 60  # no node may be lost because of that
        run.start("c")
        run.ahead = -12
        first = run.together("a", "b", "c")
        run.kill("b")
        without = run.together("a", "c", after=first)
        run.start("b")
        run.together("a", "b", "c", after=without)
        assert len(set(re.findall(r"launched (\S+),", run.everything()))) == 1
        assert re.search(r"^(\w, )*b(, \w)*: the agent of this node stopped", run.everything(), re.MULTILINE)
        assert "failure" not in run.everything()
        (tmp_path / "count").write_text(str(10**6))
        assert run.end() == {"a": 0, "b": 0, "c": 0}
        while run.store() is not None:  # it ends too
            time.sleep(0.2)


@pytest.mark.second
def test_failures_without_progress_end_the_run(tmp_path):
    """The third in a row at iteration 5 is the last. Peers on the node learn of each, and need not be killed."""
    with counting(tmp_path, "1:1", 9, 5) as run:
        run.ranks = 2
        (tmp_path / "count").write_text("5")
        run.start("a")
        assert run.end() == {"a": 1}
        said = run.said("a")
        assert said.count("generation") == 6 and said.count("another rank of this node has failed; ending") == 3
        assert "forcefully exiting" not in (tmp_path / "ranks" / "torchrun.log").read_text()
        assert "launch.sh: 3 failures in a row, each after iteration 5; the last: rank 0 ended with exit code 1" in said
        assert said.count("a fault in iteration 5") == 3  # once for each, by the rank alone


@pytest.mark.second
def test_a_run_that_never_trained_is_not_tried_again(tmp_path):
    with counting(tmp_path, "2:2", 9, 0) as run:
        run.start("a", "b")
        assert run.end() == {"a": 1, "b": 1}
        for name in "ab":
            assert "launch.sh: rank 0 ended with exit code 1" in run.said(name)
            assert "failures in a row" not in run.said(name)


@pytest.mark.second
def test_a_node_with_another_command_does_not_join(tmp_path):
    """It is refused at once, and the run does not notice. The same folder by a relative path is no difference."""
    steps, save, lr = [str(10**6)], ["--save", str(tmp_path / "s")], ["--lr", "1e-3"]
    with counting(tmp_path, "2:2", *steps, *save, *lr) as run:
        run.start("a")
        run.flags[2] = os.path.relpath(tmp_path / "s", ROOT)
        run.start("b")
        run.generation(0, "a", "b")
        run.wait, where = 0.1, f"localhost:{run.port}"
        others = (
            ("c", [*save, "--lr", "2e-3"], f"this node has --lr 2e-3, and the run at {where} has --lr 1e-3; start the"),
            ("d", [*save, *lr, "--swiglu"], f"this node has --swiglu, and the run at {where} has no further flag; sta"),
            (
                "e",
                ["--save", f"{tmp_path}/t"],
                f"--rdzv-endpoint {where} serves another run, whose secret is not that of",
            ),
        )
        for name, flags, _ in others:
            run.flags = [*steps, *flags]
            run.start(name)
        for name, _, words in others:
            assert run.running.pop(name).wait() == 1 and f"launch.sh: {words}" in run.said(name)
        assert run.everything().count("generation") == 2
        (tmp_path / "count").write_text(str(10**6))
        assert run.end() == {"a": 0, "b": 0}


@pytest.mark.slow
def test_another_command_starts_anew_once_all_nodes_have_left(tmp_path):
    """Their store is still there, and has counted a generation."""
    with counting(tmp_path, "1:1", 10**6, lost=LOST_SECONDS) as run:
        run.start("a")
        run.generation(0, "a")
        run.kill("a")
        run.flags = [str(10**6 + 1)]
        run.start("b")
        assert run.running.pop("b").wait() == 1 and "or end that run first" in run.said("b")
        time.sleep(LOST_SECONDS + 1)
        run.start("c")
        run.generation(0, "c")


def test_a_store_that_goes_away_is_asked_again(monkeypatch):
    """The store of an ended run, in the moment when it is asked whether the run has ended."""
    from megazero.cluster.elastic import node_agent

    answer, gone = node_agent.last_words, [dist.DistNetworkError("gone")]
    monkeypatch.setattr(node_agent, "last_words", lambda *it: answer(*it) if not gone else fail(gone.pop()))
    monkeypatch.setattr(node_agent, "is_here", lambda host: False)  # else it starts a store
    new = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    node_agent.connect_to_store("127.0.0.1", new.port, node_agent.Seal("secret")).set("key", "value")
    assert new.get("key") == b"value"


def fail(error: Exception) -> None:
    raise error


@pytest.mark.slow
def test_too_few_nodes_wait_for_a_while(tmp_path):
    with counting(tmp_path, "2:2", 10**6, lost=LOST_SECONDS) as run:
        run.start("b")
        run.until(lambda: "waiting for 2 nodes, for at most 5 minutes" in run.said("b"))
        run.wait = 0.2
        run.start("a")
        run.generation(0, "a", "b")
        run.kill("b")
        assert run.end() == {"a": 1}
        assert "launch.sh: waiting for 2 nodes, for at most 0.2 minutes (--wait)" in run.said("a")
        assert run.said("a").rstrip().endswith("the run resumes from --save")
        assert "launch.sh: fewer than 2 nodes for 0.2 minutes (--wait)" in run.said("a")


@pytest.mark.slow
def test_a_newcomer_that_gives_up_does_not_end_the_run(tmp_path):
    """The ranks are frozen, so that they do not let it in; then another one comes."""
    with counting(tmp_path, "1:2", 10**6) as run:
        run.start("a")
        run.generation(0, "a")
        (rank,) = run.processes("a")[1:]
        os.kill(rank, signal.SIGSTOP)
        run.wait = 0.1
        run.start("b")
        assert run.running.pop("b").wait() == 1 and "no end of a step for 0.1 minutes" in run.said("b")
        os.kill(rank, signal.SIGCONT)
        run.wait = 5
        run.start("c")
        run.generation(1, "a", "c")


@pytest.mark.second
def test_a_lost_store_ends_the_run(tmp_path):
    with counting(tmp_path, "2:2", 10**6) as run:
        run.start("a", "b")
        run.generation(0)
        run.kill_store()
        assert run.end() == {"a": 1, "b": 1}
        assert "is gone, with its process or its machine" in run.said("a") + run.said("b")


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_frozen_moment_changes_nothing(tmp_path, which):
    """An agent or a rank is frozen for less time than makes a node a lost one."""
    with counting(tmp_path, "2:2", 100) as run:
        run.start("a", "b")
        run.generation(0, "a", "b")
        frozen = run.processes("b")[which]
        os.kill(frozen, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(frozen, signal.SIGCONT)
        assert run.end() == {"a": 0, "b": 0} and run.everything().count("generation") == 2


# -- real runs

MODEL = "--mock-data --num-layers 3 --hidden-size 48 --num-attention-heads 6 --seq-length 33 --vocab-size 257 --seed 3"
TRAINING = "--global-batch-size 10 --lr 1e-3 --log-interval 100 --precision fp64 --zero-stage 2 --init-method-std 0.05"
INTERVAL = 8


def training(folder: Path, nodes: str, steps: int, *more: object) -> ElasticRun:
    where = ["--save", folder / "saved", "--log-dir", folder / "log", "--train-iters", steps, *more]
    return ElasticRun(folder, nodes, [*MODEL.split(), *TRAINING.split(), *where])


def check_curve(run: ElasticRun, steps: int, alone: Path) -> None:
    """Check that each step was logged once, with the samples and the loss of a run that nothing has disturbed."""
    found = {record["iteration"]: record for record in run.metrics()}
    assert [record["iteration"] for record in run.metrics()] == list(range(1, steps + 1))
    done = pretrain(
        *MODEL.split(), *TRAINING.split(), "--train-iters", steps, "--log-dir", alone, "--micro-batch-size", 1
    )
    assert done.returncode == 0, done.stderr
    for wanted in metrics(alone):
        ours = found[wanted["iteration"]]
        assert ours["consumed_samples"] == wanted["consumed_samples"] == 10 * wanted["iteration"]
        assert ours["loss"] == pytest.approx(wanted["loss"], rel=1e-10)
        assert ours["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-8)


def starts(run: ElasticRun) -> list[tuple[int, int, int]]:
    """Generation, nodes, and the iteration from which it trained."""
    lines = re.findall(r"generation (\d+): (\d+) nodes? of at most .* from iteration (\d+)", run.everything())
    return sorted({tuple(map(int, line)) for line in lines})


@pytest.mark.slow  # half a minute
@pytest.mark.parametrize("memory", [False, True])
def test_the_loss_does_not_notice_a_node_that_goes_and_comes_back(tmp_path, memory):
    """Three nodes, two, three: of the checkpoints on the disk, and of those in memory, at most the interval is lost."""
    save = ["--save-interval", INTERVAL]
    if memory:
        save = [
            "--save-interval",
            10**6,
            "--memory-checkpoint-interval",
            INTERVAL,
            "--memory-checkpoint-dir",
            tmp_path / "m",
        ]
    with training(tmp_path, "2:3", 600, *save) as run:
        run.start("a", "b", "c")
        run.trained(3 * INTERVAL)
        run.kill("b")
        reached = run.iteration
        run.generation(1)
        (_, _, began) = starts(run)[1]
        assert 0 < began and began % INTERVAL == 0 and reached - 2 * INTERVAL <= began <= reached
        run.trained(began + 2)
        run.start("b")
        assert run.end() == {"a": 0, "b": 0, "c": 0}
        assert [start[:2] for start in starts(run)] == [(0, 3), (1, 2), (2, 3)]
        assert "by nodes that came back: saved" in run.everything()
        assert ("from the memory of 2 nodes" in run.everything()) == memory
        check_curve(run, 600, tmp_path / "alone")
        assert len(json.loads((tmp_path / "saved" / "layouts.json").read_text())["rows"]) == 2


@pytest.mark.slow
def test_a_run_that_returns_to_its_layout_is_the_same_to_the_bit(tmp_path):
    """Two of two nodes: one is killed, and comes back; the checkpoint in the memory of the other one is loaded."""
    curves = []
    for disturbed in (False, True):
        folder = tmp_path / f"disturbed-{disturbed}"
        folder.mkdir()
        save = ["--save-interval", 10**6, "--memory-checkpoint-interval", INTERVAL]
        with training(folder, "2:2", 60, *save, "--memory-checkpoint-dir", folder / "m") as run:
            run.start("a", "b")
            if disturbed:
                run.trained(3 * INTERVAL)
                run.kill("b")
                for part in (folder / "m").glob("*/b-*"):
                    shutil.rmtree(part)
                run.start("b")
            assert run.end() == {"a": 0, "b": 0}
            assert [nodes for _, nodes, _ in starts(run)] == [2] * (1 + disturbed)
            assert ("from the memory of 1 node" in run.everything()) == disturbed
            curves.append([(record["loss"], record["grad_norm"]) for record in run.metrics()])
    assert len(curves[0]) == 60 and curves[0] == curves[1]


@pytest.mark.slow
def test_agents_killed_two_at_once_and_the_last(tmp_path):
    """The rank of a killed agent ends by itself; then two nodes at once; then the last one, and a new start."""
    with training(tmp_path, "1:3", 400, "--save-interval", INTERVAL) as run:
        run.start("a", "b", "c")
        run.trained(10)
        agent, *ranks = run.processes("a")
        os.kill(agent, signal.SIGKILL)
        run.running.pop("a").wait()
        run.generation(1)
        logs = (tmp_path / "log" / "ranks").glob("*/attempt_0/0/stderr.log")
        assert not any(map(runs, ranks))
        assert any("its launcher was killed; ending" in log.read_text() for log in logs)
        run.start("a")
        run.generation(2)
        run.kill("b", "c")
        run.generation(3)
        run.trained(starts(run)[3][2] + 2)
        run.kill("a")
        run.start("c")
        assert run.end() == {"c": 0}
        assert [nodes for _, nodes, _ in starts(run)] == [3, 2, 3, 1, 1]
        check_curve(run, 400, tmp_path / "alone")


@pytest.mark.slow
def test_a_frozen_node_with_rank_0_does_not_stop_the_others(tmp_path):
    """They take its lock at once, train on and save. When it runs again, it changes nothing, and joins them."""
    with training(tmp_path, "1:3", 400, "--save-interval", INTERVAL) as run:
        run.start("a", "b", "c")
        run.trained(3 * INTERVAL)
        (first,) = [name for name in "abc" if "generation 0: " in run.said(name)]
        frozen = run.processes(first)
        for process in frozen:
            os.kill(process, signal.SIGSTOP)
        run.generation(1)
        assert starts(run)[1][1] == 2
        run.trained(starts(run)[1][2] + 2 * INTERVAL)
        for process in frozen:
            os.kill(process, signal.SIGCONT)
        assert run.end() == {"a": 0, "b": 0, "c": 0}
        assert [start[:2] for start in starts(run)] == [(0, 3), (1, 2), (2, 3)]
        check_curve(run, 400, tmp_path / "alone")


@pytest.mark.slow
def test_a_node_leaves_and_the_run_is_stopped(tmp_path):
    """TERM takes a node out after a saved step; the stop file ends the run; the same command resumes it."""
    with training(tmp_path, "1:2", 10**5, "--save-interval", 10**5) as run:
        run.start("a", "b")
        run.trained(5)
        os.kill(run.processes("b")[0], signal.SIGTERM)
        run.generation(1)
        assert run.running.pop("b").wait() == 128 + signal.SIGTERM
        assert starts(run)[1][1] == 1 and starts(run)[1][2] >= 5  # nothing was lost
        run.trained(starts(run)[1][2] + 2)
        (tmp_path / "log" / "stop").touch()
        assert run.end() == {"a": 0}
        last = run.iteration
        assert run.metrics()[-1]["consumed_samples"] == 10 * last
        run.kill_store()
        run.flags += ["--train-iters", str(last + 2)]
        run.start("b")
        assert run.end()["b"] == 0 and run.iteration == last + 2


@pytest.mark.slow
def test_a_run_that_went_back_goes_back_again(tmp_path):
    """It loads iteration 8 of 8 and 16, and fails before it saves: the next generation begins at 8 too."""
    with training(tmp_path, "1:1", 16, "--save-interval", INTERVAL) as run:
        run.start("a")
        assert run.end() == {"a": 0}
        while run.store() is not None:
            time.sleep(0.2)
        run.flags += ["--train-iters", str(10**5), "--save-interval", str(10**5)]
        run.flags += ["--load", str(tmp_path / "saved" / "iter_0000008")]
        run.start("a")
        run.trained(20)
        os.kill(run.processes("a")[1], signal.SIGKILL)
        run.generation(1)
        run.until(lambda: len(starts(run)) == 3)
        assert starts(run) == [(0, 1, 0), (0, 1, 8), (1, 1, 8)]


@pytest.mark.slow
def test_a_refusal_is_the_last_word_of_every_node(tmp_path):
    with training(tmp_path, "1:2", 10, "--tensor-model-parallel-size", 2) as run:
        run.start("a", "b")
        assert run.end() == {"a": 1, "b": 1}
        for name in "ab":
            assert re.search(
                r"launch.sh: rank [01] ended .*--elastic 1:2, on 1 node: .* does not divide", run.said(name)
            )
