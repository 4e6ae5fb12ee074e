"""Start of a rank: the values that it reads from its launcher, how it joins, and the names of ranks in messages."""

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megazero.cluster import launch, meeting
from megazero.cluster import listening as listening_module
from megazero.cluster.listening import is_here, listen
from megazero.cluster.same_start import difference
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.mesh.peer_errors import PeerLost, peer_errors, ranks_text
from megazero.engine.plan.layout.topology import Layout
from megazero.world import MPI_SIZES, World, node_names, read_world, report_to_launcher
from tests.helpers.programs import free_port, listening, own_address
from tests.helpers.ranks import Program, Ranks
from tests.helpers.table import for_each

ROOT = Path(__file__).resolve().parents[3]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "TORCHELASTIC_USE_AGENT_STORE")
SLURM += ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_ID", "SLURM_PTY_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHER, *SLURM, *MPI_SIZES, "PMIX_RANK"):
        monkeypatch.setenv(name, "")  # so that a variable that the code sets is undone
        monkeypatch.delenv(name)


def set_env(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for word in text.split():
        name, _, value = word.partition("=")
        monkeypatch.setenv(name, value)


def test_a_large_job_connects_lazily_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_GLOO_LAZY_INIT"
    for given, ranks, wanted in ((None, 8, None), (None, 1024, "1"), ("0", 1024, "0"), ("1", 8, "1")):
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
        launch._connect_lazily(ranks)
        assert os.environ.get(name) == wanted


def sockets(rank: int) -> int:
    """Connections of a rank of four once the groups are made, and something was summed."""
    mesh = Mesh.build(Layout(dp=4), rank, torch.device("cpu"))
    assert float(mesh.dp.all_reduce_(torch.ones(()))) == 4
    files = (os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    return sum("socket:" in file for file in files)


@pytest.mark.slow
def test_torch_knows_the_variable() -> None:
    """Fewer connections with it: it is no documented option, and a newer torch may drop it."""
    found = []
    for given in ("0", "1"):
        ranks = Ranks(4, Program(env={"TORCH_GLOO_LAZY_INIT": given}))
        found.append(sum(ranks.run(sockets)))
        ranks.stop()
    assert found[1] < found[0]


@for_each(
    "env, rank, size",
    [
        ("", 0, 1),
        ("RANK=0 WORLD_SIZE=1", 0, 1),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=29500", 1, 2),
        ("SLURM_STEP_NUM_TASKS=3 SLURM_PROCID=2 SLURM_LOCALID=0 MASTER_ADDR=a MASTER_PORT=29500", 2, 3),
        ("SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0", 0, 1),
        ("SLURM_STEP_NUM_TASKS=1 SLURM_PTY_PORT=3", 0, 1),
        # srun in a shell of srun --pty, whose variables it inherits
        ("SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_PTY_PORT=3 MASTER_ADDR=a MASTER_PORT=1", 1, 2),
        (
            "RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=1 OMPI_COMM_WORLD_SIZE=9",
            1,
            2,
        ),
        ("OMPI_COMM_WORLD_SIZE=1 PMI_SIZE=1 PMIX_RANK=0", 0, 1),
    ],
)
def test_ranks_are_read(env: str, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_env(monkeypatch, env)
    monkeypatch.setattr(os, "isatty", lambda handle: False)
    world = read_world()
    assert (world.rank, world.size) == (rank, size)


@for_each(
    "env, words",
    [
        ("RANK=0 WORLD_SIZE=0", ["RANK=0 with WORLD_SIZE=0", "torchrun"]),
        ("RANK=5 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=29500", ["RANK=5 with WORLD_SIZE=2", "0 to WORLD_SIZE - 1"]),
        ("RANK=-1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=29500", ["RANK=-1"]),
        ("RANK=1 WORLD_SIZE=-2", ["WORLD_SIZE=-2"]),
        ("RANK=0 WORLD_SIZE=two", ["WORLD_SIZE is 'two', which is not a whole number"]),
        ("WORLD_SIZE=2", ["RANK is not set"]),
        ("RANK=0", ["WORLD_SIZE is not set"]),
        ("RANK=0 WORLD_SIZE=2", ["MASTER_ADDR and MASTER_PORT are not set"]),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=70000", ["MASTER_PORT=70000"]),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=x", ["MASTER_PORT is 'x'"]),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=-3 MASTER_ADDR=a MASTER_PORT=1", ["LOCAL_RANK=-3"]),
        ("SLURM_STEP_NUM_TASKS=3 SLURM_PROCID=2 SLURM_LOCALID=0", ["MASTER_ADDR and MASTER_PORT", "pretrain.sbatch"]),
        (
            "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0",
            ["OMPI_COMM_WORLD_SIZE=2", "scripts/launch.sh --nproc 2", "unset"],
        ),
        ("PMI_SIZE=4 PMI_RANK=0", ["PMI_SIZE=4", "launch.sh"]),
        ("MV2_COMM_WORLD_SIZE=3", ["MV2_COMM_WORLD_SIZE=3", "launch.sh"]),
        ("MPI_LOCALNRANKS=2", ["MPI_LOCALNRANKS=2", "launch.sh"]),
        ("PMIX_RANK=1", ["PMIX_RANK=1", "launch.sh"]),
        (
            "OMPI_COMM_WORLD_SIZE=2 PMI_SIZE=2 PMIX_RANK=1",
            ["one process, unset OMPI_COMM_WORLD_SIZE PMI_SIZE PMIX_RANK"],
        ),
        (
            "SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_PTY_PORT=9 PMI_SIZE=8 PMI_RANK=0",
            ["one process, unset SLURM_STEP_NUM_TASKS PMI_SIZE; else leave"],
        ),
        (
            "SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_PTY_PORT=9 MASTER_ADDR=a MASTER_PORT=1",
            ["srun --pty", "unset SLURM_STEP_NUM_TASKS"],
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=0 MASTER_ADDR=a MASTER_PORT=1",
            ["LOCAL_WORLD_SIZE=0", "1 to WORLD_SIZE=2"],
        ),
        ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3 MASTER_ADDR=a MASTER_PORT=1", ["LOCAL_WORLD_SIZE=3"]),
        ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=x MASTER_ADDR=a MASTER_PORT=1", ["LOCAL_WORLD_SIZE is 'x'"]),
        ("RANK=0 WORLD_SIZE=1 LOCAL_RANK=99", ["LOCAL_RANK=99: it must be less than 1"]),
        (
            "RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 LOCAL_RANK=2 MASTER_ADDR=a MASTER_PORT=1",
            ["LOCAL_RANK=2: it must be less than 2"],
        ),
        *(
            (f"SLURM_STEP_NUM_TASKS=3 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE={tasks}", [said])
            for tasks, said in (
                ("0", "is no list of tasks"),
                ("2(x999999999999)", "is no list"),
                ("x", "is no list"),
                ("9(x999999999)", "are 8999999991 tasks"),
                ("1,1", "are 2 tasks"),
            )
        ),
        ("SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_LOCALID=7 SLURM_STEP_TASKS_PER_NODE=2", ["SLURM_LOCALID=7"]),
        (
            "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_JOB_ID=3 SLURM_STEP_NODELIST=n[1-",
            ["SLURM's list of nodes 'n[1-'", "export MASTER_ADDR"],
        ),
    ],
)
def test_a_senseless_launch_is_refused(env: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_env(monkeypatch, env)
    monkeypatch.setattr(os, "isatty", lambda handle: True)
    with pytest.raises(ValueError) as refused:
        read_world()
    for word in words:
        assert word in str(refused.value)


def test_ranks_of_srun_meet_on_the_first_node_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step = "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_JOB_ID=20003"
    set_env(monkeypatch, f"{step} SLURM_STEP_ID=4 SLURM_STEP_NODELIST=n[07-09] SLURM_JOB_NODELIST=n[01-09]")
    assert read_world() == World(1, 2, 0, "srun")
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("n07", "10007")
    set_env(monkeypatch, "MASTER_ADDR=other MASTER_PORT=5")
    read_world()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("other", "5")


@for_each(
    ("nodes", "names"),
    [
        ("n1", "n1"),
        ("node-a.b,m2", "node-a.b m2"),
        ("n[01-03,7],m2", "n01 n02 n03 n7 m2"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101]-ib", "n098-ib n099-ib n100-ib n101-ib"),
        ("r[1-2]n[3,5]", "r1n3 r1n5 r2n3 r2n5"),
        ("a,n[2],b", "a n2 b"),
    ],
)
def test_the_nodes_of_slurms_list_are_named(nodes: str, names: str) -> None:
    assert list(node_names(nodes)) == names.split()
    assert next(node_names("n[1-999999999]")) == "n1"


@for_each("nodes", ["", "n[", "n[1-2", "n1]", "n[a-b]", "n[1--2]", "a,,b", "a b", "[n[1]]", "n[1-99999999999]"])
def test_no_list_of_nodes_is_refused(nodes: str) -> None:
    with pytest.raises(ValueError, match="export MASTER_ADDR"):
        list(node_names(nodes))


def test_the_launcher_gets_a_message_in_the_words_of_the_installed_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "argv", ["/bin/megazero", "train"])
    report_to_launcher("error: start 2 (bash scripts/launch.sh --nproc 2 ...)")
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"].endswith(
        "(megazero launch --nproc 2 ...)"
    )


# -- joining


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch):
    """A program that listens at MASTER_PORT and sends nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        set_env(monkeypatch, f"MASTER_ADDR=127.0.0.1 MASTER_PORT={listening.getsockname()[1]}")
        yield listening


def test_a_taken_port_is_named_at_once(listener: socket.socket) -> None:
    with pytest.raises(ValueError, match=rf"MASTER_PORT={listener.getsockname()[1]} is taken .* another port"):
        launch.start(World(0, 2, 0, "torchrun"), torch.device("cpu"), 10)


@pytest.mark.second
@pytest.mark.long
def test_a_port_of_another_program_is_named(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(launch, "JOIN_MINUTES", 0.01)
    with pytest.raises(PeerLost, match=r"rank 0 does not answer at MASTER_ADDR.*another program"):
        launch.start(World(1, 2, 1, "torchrun"), torch.device("cpu"), 0.01)


@pytest.mark.long
def test_a_launcher_that_is_gone_is_not_waited_for(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun listens before it starts its ranks."""
    monkeypatch.setattr(meeting, "ANSWER_SECONDS", 0.5)
    set_env(monkeypatch, "TORCHELASTIC_USE_AGENT_STORE=True")
    listener.close()
    with pytest.raises(PeerLost, match=r"torchrun does not answer at MASTER_ADDR.*was it started"):
        launch.start(World(0, 2, 0, "torchrun"), torch.device("cpu"), 10)


def test_a_store_listens_at_the_address_of_its_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that leads to a loopback address here alone, and an address of a router, must be reached from outside."""
    everywhere, own = ("::" if socket.has_dualstack_ipv6() else "0.0.0.0"), own_address()
    cases = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "192.0.2.1": everywhere}
    cases |= {own: own} if own else {}
    with contextlib.suppress(OSError):
        if socket.gethostbyname(socket.gethostname()).startswith("127."):
            cases[socket.gethostname()] = everywhere
    for host, wanted in cases.items():
        with listen(host, 0) as found:
            assert found.getsockname()[0] == wanted, host
            with pytest.raises(OSError) as taken:
                listen(host, found.getsockname()[1])
            assert taken.value.errno == errno.EADDRINUSE
    assert is_here("localhost") and is_here(socket.gethostname()) and not is_here("192.0.2.1")
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("10.9.9.8", "10.9.9.9")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)  # a name of two network cards
    monkeypatch.setattr(listening_module, "_is_own", lambda *_: True)
    with listen("cards", 0) as found:
        assert found.getsockname()[0] == everywhere


def test_the_store_of_one_node_is_for_that_node_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks find it there, also if they were given another address."""
    before, ranks = set(listening(os.getpid())), [World(rank, 2, rank, "torchrun") for rank in (0, 1)]
    for local, host in ((2, own_address() or "192.0.2.1"), (1, "127.0.0.1")):
        set_env(monkeypatch, f"MASTER_ADDR={host} MASTER_PORT={free_port()} LOCAL_WORLD_SIZE={local}")
        stores = [meeting._open_store(rank, 60) for rank in ranks]
        stores[0].set("key", "value")
        assert stores[1].get("key") == b"value"
        assert {address for address, _ in set(listening(os.getpid())) - before} == {"127.0.0.1"}


def test_the_same_rank_twice_and_another_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a second run that find the first one's store."""
    cpu, port = torch.device("cpu"), free_port()
    set_env(monkeypatch, f"MASTER_ADDR=127.0.0.1 MASTER_PORT={port}")
    store = meeting._open_store(World(0, 2, 0, "torchrun"), 60)
    for rank in (0, 1):
        meeting._take_seat(store, World(rank, 2, rank, "torchrun"), cpu)
    with pytest.raises(ValueError, match=rf"rank 1 has already joined at MASTER_ADDR=127.0.0.1, MASTER_PORT={port}:"):
        meeting._take_seat(meeting._open_store(World(1, 2, 1, "torchrun"), 60), World(1, 2, 1, "torchrun"), cpu)
    with pytest.raises(ValueError, match=r"is one of 4 ranks on cpu, but the ranks at .* are 2 ranks on cpu"):
        meeting._take_seat(store, World(3, 4, 3, "torchrun"), cpu)
    with pytest.raises(ValueError, match=r"2 ranks on cuda.*a node lacks its GPUs"):
        meeting._take_seat(store, World(1, 2, 1, "torchrun"), torch.device("cuda", 1))


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_env(monkeypatch, f"MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}")
    monkeypatch.setattr(launch, "JOIN_MINUTES", 0.01)
    with pytest.raises(PeerLost, match=r"2 of 3 ranks did not start within 0.6 s: ranks 1-2"):
        launch.start(World(0, 3, 0, "torchrun"), torch.device("cpu"), 0.01)


@pytest.mark.second
def test_ranks_meet_where_others_have_left_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torchrun's store, after failures: of three ranks one was missing; of two, one came too early."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    set_env(monkeypatch, f"MASTER_ADDR=127.0.0.1 MASTER_PORT={server.port} TORCHELASTIC_USE_AGENT_STORE=True")

    def join(rank: int, size: int, seconds: float = 60.0, kind: str = "cpu") -> torch.distributed.Store:
        return meeting.meet(World(rank, size, rank, "torchrun"), torch.device(kind), seconds)

    with ThreadPoolExecutor(3) as threads:
        in_vain = [threads.submit(join, rank, 3, 0.3) for rank in (0, 1)]
        for one in in_vain:
            assert str(one.exception()) == "1 of 3 ranks did not start within 0.3 s: rank 2"
        assert "ranks did not start within 0.2 s: rank 0" in str(threads.submit(join, 1, 2, 0.2).exception())
        early = threads.submit(join, 1, 2)
        stores = [threads.submit(join, 0, 2).result(), early.result()]
        stores[0].set("key", "of this meeting")
        assert stores[1].get("key") == b"of this meeting"
        again = [threads.submit(join, rank, 2) for rank in (1, 0)]
        assert not any(one.result().check(["key"]) for one in again)
        unlike = [threads.submit(join, rank, 2, 60.0, kind) for rank, kind in enumerate(("cpu", "cuda"))]
        assert sum("a node lacks its GPUs" in str(one.exception()) for one in unlike) == 1


def test_a_wait_has_a_limit() -> None:
    block = threading.Event()
    with pytest.raises(TimeoutError):
        meeting.within(0.1, block.wait)
    block.set()
    assert meeting.within(60, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        meeting.within(60, lambda: 1 // 0)


LIMITED = """
import threading
from megazero.cluster.launch import World, limit
from megazero.log import log_as
log_as(3, 4)
with limit(World(3, 4, 0, "torchrun"), 0.2, "joining"):
    threading.Event().wait()
"""
RANK_OF_SRUN = """
import threading
from megazero.cluster.launch import World, end_with_launcher
end_with_launcher(World(0, 2, 0, "srun"))
print("watching", flush=True)
threading.Event().wait(60)
"""


@pytest.mark.second
@pytest.mark.long
def test_a_limit_ends_the_process_and_says_why() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "rank 3: joining took more than 0.2 s; giving up" in done.stderr


@pytest.mark.second
@pytest.mark.long
def test_a_rank_of_srun_ends_if_its_parent_is_killed() -> None:
    """torchrun's ranks: tests/end_to_end/test_ranks_lost.py."""
    launcher = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {RANK_OF_SRUN!r}]).wait()"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    parent = subprocess.Popen([sys.executable, "-c", launcher], cwd=ROOT, text=True, **pipes)
    assert parent.stdout is not None and parent.stdout.readline() == "watching\n"
    parent.kill()
    parent.wait()
    assert "its launcher was killed; ending" in parent.stdout.read()  # to the end of the rank


# -- the device


def test_gpus_that_torch_cannot_use_are_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    alone = World(0, 1, 0, "single")
    monkeypatch.setattr(launch, "has_nvidia", lambda: False)
    assert launch.pick_device(alone).type == "cpu"

    def too_old() -> None:
        raise RuntimeError("the NVIDIA driver on your system is too old (found version 11040).\nUpdate it")

    monkeypatch.setattr(launch, "has_nvidia", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", too_old)
    words = r"built for CUDA 13.0, and the NVIDIA driver .* is too old .*11040\); install .* CUDA_VISIBLE_DEVICES= "
    with pytest.raises(ValueError, match=words):
        launch.pick_device(alone)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match="is built without CUDA"):
        launch.pick_device(alone)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launch.pick_device(alone).type == "cpu"


# -- words


def test_ranks_are_named_in_few_words() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([2, 0, 1, 5]) == "ranks 0-2, 5"
    assert ranks_text([0, 1, 2, 3, 5], ["a", "a", "b", "b", "c", "c"]) == "ranks 0-1 (a), 2-3 (b), 5 (c)"
    many = ranks_text(range(1024), [f"n{rank // 8}" for rank in range(1024)])
    assert many == "ranks 0-7 (n0), 8-15 (n1), 16-23 (n2), 24-31 (n3), and 124 more hosts"


def test_a_difference_names_the_flag_and_the_ranks() -> None:
    alike = {"--lr": "0.1", "--seed": "1", "code": "a"}
    everyone = [alike, alike | {"--lr": "0.2"}, alike, {"--lr": "0.1", "--seed": "1"}]
    said = difference(everyone, ["x", "x", "y", "y"])
    assert "--lr is 0.1 on ranks 0 (x), 2-3 (y), 0.2 on rank 1 (x);" in said
    assert "code is a on ranks 0-1 (x), 2 (y), unknown on rank 3 (y)." in said
    assert "--seed" not in said


def test_only_what_a_peer_caused_is_a_lost_peer() -> None:
    with pytest.raises(PeerLost, match=r"all-reduce over dp: lost one of ranks 1-2: Connection closed by peer"):
        with peer_errors("all-reduce over dp", [1, 2]):
            raise RuntimeError("Connection closed by peer [::1]:123")
    with pytest.raises(RuntimeError, match=r"^shape mismatch$") as ours:
        with peer_errors("all-reduce over dp", [1, 2]):
            raise RuntimeError("shape mismatch")
    assert not isinstance(ours.value, PeerLost)
    with pytest.raises(RuntimeError) as report, peer_errors("saving", [1]):
        raise RuntimeError("saving failed on rank 1: OSError: Connection timed out") from OSError()
    assert not isinstance(report.value, PeerLost)


def test_gloo_uses_the_interface_of_the_route_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on rank 0's own machine, whose name is often a loopback address in /etc/hosts."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((launch.OUTSIDE, 9))
        except OSError:
            pytest.skip("this machine has no route to other machines")
        address = probe.getsockname()[0]
    name = launch.interface_of(address)
    assert name in dict(socket.if_nameindex()).values() and name != launch.interface_of("127.0.0.1")
    local = launch.interface_of("127.0.0.1")  # for ranks of one node
    for given, towards, wanted in (
        (None, address, name),
        (None, "127.0.1.1", name),
        ("mine", address, "mine"),
        (None, "", local),
        ("mine", "", "mine"),
    ):
        monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": given} if given else {})
        launch.choose_interface(towards)
        assert os.environ["GLOO_SOCKET_IFNAME"] == wanted


@for_each("visible", ["", "-1", "NoDevFiles"])
def test_a_machine_whose_gpus_are_hidden_trains_on_its_cpu(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "has_nvidia", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launch.pick_device(World(0, 1, 0, "single")) == torch.device("cpu")


@for_each(("on_this_machine", "wanted"), [("2", ["node0"]), ("4", [""])])
def test_ranks_of_several_machines_need_it(
    on_this_machine: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []
    set_env(monkeypatch, f"MASTER_ADDR=node0 LOCAL_WORLD_SIZE={on_this_machine}")
    monkeypatch.setattr(launch, "choose_interface", chosen.append)
    monkeypatch.setattr(launch, "meet", lambda *_: None)
    for name in ("init_process_group", "all_gather_object"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: None)
    launch.start(World(3, 4, 1, "torchrun"), torch.device("cpu"), 1.0)
    assert chosen == wanted
