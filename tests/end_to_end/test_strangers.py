"""Whoever reaches the store of a launch.sh run disturbs it at most: no command of theirs runs. Ranks stand in."""

import base64
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.elastic import NEVER_LOST, ElasticRun
from tests.helpers.programs import WarmProgram, descendants, listening, own_address

STAND_IN = Path(__file__).with_name("elastic_rank.py")
STEPS = 60  # 3 s, in which an agent reads the store three times


class Touch:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Stranger:
    """Writes pickles that run a command into the store at a port."""

    def __init__(self, port: int, folder: Path) -> None:
        self.done = folder / "done"
        pickled = pickle.dumps(Touch(self.done))
        text = base64.b64encode(pickled)  # as torch's agents write it
        self.values = iter([text] * (STEPS // 2) + [pickled, b"0" * 64 + b" " + text] * 10**4)
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)

    def attack(self, *keys: str) -> None:
        rendezvous = [key for key in self.store.list_keys() if key.startswith("torch.rendezvous.")]
        value = next(self.values)
        for key in (*keys, *(key for key in rendezvous if "/" not in key)):  # those with / are JSON of one meeting
            self.store.set(key, value)


def count(folder: Path) -> int:
    path = folder / "count"
    return int(path.read_text() or 0) if path.exists() else 0


def until(happened: Callable[[], bool], run: WarmProgram, folder: Path) -> None:
    """Wait for it, as long as the launcher runs."""
    while not happened():
        assert run.poll() is None, "".join(path.read_text() for path in folder.glob("*.log"))
        time.sleep(0.01)


def while_training(run: WarmProgram, folder: Path, act: Callable[[], object]) -> None:
    """Act at each of STEPS steps."""
    began = count(folder)
    for step in range(STEPS):
        until(lambda wanted=began + step: count(folder) >= wanted, run, folder)
        act()


@contextmanager
def one_machine(folder: Path) -> Iterator[WarmProgram]:
    """launch.sh --nproc 2, whose ranks count in a file."""
    words = [folder / "ranks", "", "--nnodes", 1, "--nproc-per-node", 2, "--role", "", "--redirects", 3]
    out = folder / "out.log"
    run = WarmProgram("megazero/cluster/launch_ranks.py", [*words, STAND_IN, folder, 10**6], {}, (out, out))
    try:
        until(lambda: count(folder) > 0, run, folder)
        yield run
    finally:
        for pid in descendants(run.pid):
            os.kill(pid, 9)
        run.wait()


@pytest.mark.second
def test_a_run_of_one_machine_unpickles_nothing(tmp_path):
    """Its ranks' id in the environment, which is that of the old agreement, names no key that is read."""
    with one_machine(tmp_path) as run:
        launcher, *ranks = descendants(run.pid)
        (rank, *_) = (pid for pid in ranks if b"TORCHELASTIC_RUN_ID" in Path(f"/proc/{pid}/environ").read_bytes())
        variables = Path(f"/proc/{rank}/environ").read_text().split("\0")
        env = dict(variable.split("=", 1) for variable in variables if "=" in variable)
        port = int(env["MASTER_PORT"])
        assert {address for pid in (launcher, *ranks) for address, _ in listening(pid)} == {"127.0.0.1"}
        assert ("127.0.0.1", port) in listening(launcher)
        if own := own_address():
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((own, port))
        strangers = [Stranger(port, tmp_path) for _, port in listening(launcher)]
        key = f"torch.rendezvous.{env['TORCHELASTIC_RUN_ID']}"
        while_training(run, tmp_path, lambda: [stranger.attack(key) for stranger in strangers])
        (tmp_path / "count").write_text(str(10**6))
        assert run.wait() == 0, (tmp_path / "out.log").read_text()
    assert not strangers[0].done.exists()


@pytest.mark.second
def test_an_elastic_run_unpickles_its_nodes_values_alone(tmp_path):
    """From before its first meeting to its end, which strangers cannot announce either."""
    run = ElasticRun(tmp_path, "1:1", [10**6, "--save", tmp_path / "saved"], STAND_IN, NEVER_LOST)
    with run:
        run.start("a")
        agent = run.running["a"]
        until(lambda: any(map(listening, filter(None, [run.store()]))), agent, tmp_path)
        assert listening(run.store()) == [("127.0.0.1", run.port)]
        stranger = Stranger(run.port, tmp_path)

        def attacked(*keys: str) -> bool:
            stranger.attack("torch.rendezvous.elastic", *keys)
            return count(tmp_path) > 0

        until(attacked, agent, tmp_path)
        while_training(agent, tmp_path, lambda: attacked("megazero/end"))
        (tmp_path / "count").write_text(str(10**6))
        assert run.end() == {"a": 0}
        assert run.said("a").count("generation") == 1
    assert not stranger.done.exists()


# -- from another network


def root_in_a_namespace() -> str:
    """Return why no network namespace can be made here; empty if one can."""
    if missing := [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]:
        return f"no {missing[0]} on this machine"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return done.stderr.strip()


@contextmanager
def neighbour(ours: str, theirs: str) -> Iterator[Callable[[int], str]]:
    """A network with one other machine. Its function returns how that one's attempt to connect to a port here ends."""
    with subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE) as there:
        assert there.stdout is not None and there.stdout.readline()
        inside = ["nsenter", "--target", str(there.pid), "--net"]
        name, other = f"mz{os.getpid()}", f"my{os.getpid()}"
        try:
            for command in (
                f"ip link add {name} type veth peer name {other} netns {there.pid}",
                f"ip address add {ours}/30 dev {name}",
                f"ip link set {name} up",
            ):
                subprocess.run(command.split(), check=True)
            for command in (f"ip address add {theirs}/30 dev {other}", f"ip link set {other} up"):
                subprocess.run([*inside, *command.split()], check=True)

            def connect(port: int) -> str:
                code = "import socket, sys\ntry: socket.create_connection((sys.argv[1], int(sys.argv[2])), 30)\n"
                code += "except OSError as error: print(type(error).__name__)"
                call = [*inside, sys.executable, "-S", "-c", code, ours, str(port)]
                return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()

            yield connect
        finally:
            subprocess.run(["ip", "link", "delete", name], check=False)
            there.kill()


@pytest.mark.slow
def test_another_network_does_not_reach_a_run_of_one_machine(tmp_path):
    if why := root_in_a_namespace():
        pytest.skip(why)
    with neighbour("198.18.91.1", "198.18.91.2") as connect, one_machine(tmp_path) as run:
        (address, port), *more = [each for pid in descendants(run.pid) for each in listening(pid)]
        assert address == "127.0.0.1" and not more
        assert connect(port) == "ConnectionRefusedError"
        with socket.create_server(("", 0)) as everywhere:  # the network itself works
            assert connect(everywhere.getsockname()[1]) == ""
