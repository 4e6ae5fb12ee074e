"""A real SLURM of a few virtual nodes on this one machine, for tests: munged, slurmctld, one slurmd a node.

Nothing outside the cluster's own temporary folder is touched. Each node lives in its own UTS, PID and mount
namespace: it has a host name and an address (127.0.77.x) of its own, sees its own /etc/hosts, and ending its
first process ends every task on it, as a power cut would. Ports are free ones, chosen at start.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGES = "munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins"
PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "unshare", "setpriv")
FINAL_STATES = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
UNSHARE = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")

# No cgroups, no accounting database, no task binding; more CPUs a node than the machine has; quick reactions.
SLURM_CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
MinJobAge=3600
FirstJobId={first_job_id}
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
PropagateResourceLimits=NONE
ReturnToService=2
KillWait=5
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=10
BatchStartTimeout=20
GresTypes=gpu
"""

# The first process of a node: it names the node, reaps orphans of job steps, and ends with slurmd.
NODE_INIT = """\
hostname "$1" && mount --bind "$2/hosts" /etc/hosts || exit 1
slurmd -D -f "$2/slurm.conf" -N "$1" &
wait $!
"""


def missing() -> str | None:
    """Why no cluster can be started here, as the reason of a skip; None where one can."""
    if os.geteuid() != 0:
        return "a SLURM cluster for tests needs root"
    if absent := [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]:
        return f"not installed: {', '.join(absent)} (apt-get install {PACKAGES})"
    probe = [*UNSHARE, "sh", "-c", "hostname probe && mount --bind /etc/hosts /etc/hosts"]
    if subprocess.run(probe, env=_environment(), capture_output=True).returncode != 0:
        return "namespaces with mounts of their own are not allowed here (needs CAP_SYS_ADMIN)"
    return None


@dataclass(frozen=True)
class Job:
    """A job at one moment, as `scontrol show job` describes it."""

    id: int
    fields: Mapping[str, str]

    @property
    def state(self) -> str:
        return self.fields["JobState"]

    @property
    def exit_code(self) -> str:
        """`code:signal` of the batch script."""
        return self.fields["ExitCode"]


class SlurmCluster:
    """A running cluster; made by `slurm_cluster`. `env` is the environment of its commands."""

    def __init__(self, folder: Path, num_nodes: int, cpus_per_node: int, gpus_per_node: int) -> None:
        self.folder = folder
        self.nodes = [f"node{i}" for i in range(num_nodes)]
        self.env = {**_environment(), "SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []  # in the order of their start
        self._nodes: list[subprocess.Popen[bytes]] = []  # those of them that are nodes
        self._write_configuration(cpus_per_node, gpus_per_node)

    def run(self, *command: str | Path, cwd: Path | None = None, **env: str) -> str:
        """Run a client command such as `scontrol`, and return its output. Raises RuntimeError if it fails."""
        env = {**self.env, **env}
        done = subprocess.run(command, cwd=cwd or self.folder, env=env, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{command} exited with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, *arguments: str | Path, cwd: Path | None = None, **env: str) -> int:
        """`sbatch ARGUMENTS` from the folder `cwd`; returns the job's number."""
        return int(self.run("sbatch", "--parsable", *arguments, cwd=cwd, **env))

    def job(self, job_id: int) -> Job:
        text = self.run("scontrol", "-o", "show", "job", str(job_id))
        return Job(job_id, dict(re.findall(r"(?<!\S)([\w:/]+)=(\S*)", text)))

    def wait(self, job_id: int, states: set[str] = FINAL_STATES) -> Job:
        """Poll until the job is in one of `states`. Raises RuntimeError if it ended in another; prints logs if so."""
        try:
            while (job := self.job(job_id)).state not in states:
                if job.state in FINAL_STATES:
                    raise RuntimeError(f"job {job_id} is not in {states}: {dict(job.fields)}")
                time.sleep(0.1)
        except BaseException:  # the test's own limit, too
            print(f"waited for job {job_id} to be in {states}", self._logs(), sep="\n")
            raise
        return job

    def _logs(self) -> str:
        """The ends of the daemons' logs."""
        logs = [path for pattern in ("*.out", "*.log") for path in sorted(self.folder.glob(pattern))]
        return "\n".join(f"{path.name}: {path.read_text()[-500:]}" for path in logs)

    def start(self) -> None:
        """Start the daemons and wait until every node is idle. Raises RuntimeError, with logs, otherwise."""
        at = self.folder
        self.run("mungekey", "--create", f"--keyfile={at}/munge.key")
        files = [f"--{name}-file={at}/{file}" for name, file in _MUNGE_FILES.items()]
        # --force: the folder is private to root, which munged otherwise refuses.
        self._spawn("munged", "munged", "--foreground", "--force", f"--socket={at}/munge.socket", *files)
        self.poll(lambda: (at / "munge.socket").exists(), "munged")
        self._spawn("slurmctld", "slurmctld", "-D", "-f", f"{at}/slurm.conf")
        for node in self.nodes:
            self._nodes.append(self._start_node(node))
        self.poll(self._all_idle, "slurmctld and slurmd")

    def _start_node(self, node: str) -> subprocess.Popen[bytes]:
        return self._spawn(node, *UNSHARE, "bash", "-c", NODE_INIT, "node-init", node, str(self.folder))

    def come_back(self, node: str) -> None:
        """Start a node that has failed, as after a reboot."""
        self._nodes[self.nodes.index(node)] = self._start_node(node)

    def fail(self, node: str) -> None:
        """End a node with all its tasks, as by a power cut."""
        process = self._nodes[self.nodes.index(node)]
        process.kill()
        process.wait()
        self._processes.remove(process)

    def stop(self) -> None:
        """End only the processes of `start`: the nodes with all their tasks, then the two daemons."""
        for process in reversed(self._processes):
            # A node ends as by a power cut, since `unshare` ignores TERM; the daemons may tidy up.
            process.send_signal(signal.SIGKILL if process in self._nodes else signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self._nodes.clear()

    def _write_configuration(self, cpus_per_node: int, gpus_per_node: int) -> None:
        port, *node_ports = _free_ports(1 + len(self.nodes))
        conf = SLURM_CONF.format(folder=self.folder, port=port, first_job_id=random.randrange(1, 10**6))
        hosts = ["127.0.0.1 localhost"]
        for i, (node, node_port) in enumerate(zip(self.nodes, node_ports, strict=True)):
            address = f"127.0.77.{i + 1}"
            hosts.append(f"{address} {node}")
            conf += (
                f"NodeName={node} NodeHostname={node} NodeAddr={address} Port={node_port} State=UNKNOWN"
                f" CPUs={cpus_per_node} RealMemory=1000000 Gres=gpu:{gpus_per_node}\n"
            )
        conf += f"PartitionName=test Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE State=UP\n"
        # Pretend GPUs: slurmd wants a device for each (these are /dev/null), and numbers it by its name.
        gres = "AutoDetect=off\n"
        for i in range(gpus_per_node):
            device = self.folder / f"gpu{i}"
            os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))
            gres += f"Name=gpu Flags=nvidia_gpu_env File={device}\n"
        files = {"slurm.conf": conf, "hosts": "\n".join(hosts) + "\n", "gres.conf": gres}
        if _slurm_version() >= (23, 2):
            files["cgroup.conf"] = "CgroupPlugin=disabled\n"
        for name, text in files.items():
            (self.folder / name).write_text(text)
        (self.folder / "state").mkdir()

    def _spawn(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        # --pdeathsig: should this process be killed, its daemons do not stay behind.
        command = ("setpriv", "--pdeathsig", "KILL", *command)
        with open(self.folder / f"{name}.out", "wb") as out:
            process = subprocess.Popen(
                command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def _all_idle(self) -> bool:
        try:
            states = self.run("sinfo", "--noheader", "--Node", "--format=%T").split()
        except RuntimeError:  # slurmctld does not answer yet
            return False
        return states == ["idle"] * len(self.nodes)

    def poll(self, ready: Callable[[], bool], what: str, job_id: int | None = None) -> None:
        """Wait until it is ready. Raises RuntimeError, with logs, where a daemon or the job ends before."""
        while not ready():
            dead: list[object] = [process.args for process in self._processes if process.poll() is not None]
            if job_id is not None and self.job(job_id).state in FINAL_STATES and not ready():
                dead.append(f"job {job_id}")
            if dead:
                raise RuntimeError(f"{what} did not come up; ended: {dead}\n{self._logs()}")
            time.sleep(0.05)


@contextlib.contextmanager
def slurm_cluster(num_nodes: int, cpus_per_node: int = 16, gpus_per_node: int = 8) -> Iterator[SlurmCluster]:
    """A cluster for the length of a `with`. Check `missing()` first."""
    # A short path: munge's socket must fit in 108 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        cluster = SlurmCluster(Path(folder), num_nodes, cpus_per_node, gpus_per_node)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


_MUNGE_FILES = {"key": "munge.key", "pid": "munged.pid", "log": "munged.log", "seed": "munged.seed"}


def _path() -> str:
    return os.pathsep.join(["/usr/local/sbin", "/usr/sbin", "/sbin", os.environ.get("PATH", "")])


def _environment() -> dict[str, str]:
    """This process's environment, without the variables of another SLURM or a torchrun."""
    foreign = ("SLURM", "SBATCH", "SRUN", "MASTER_", "TORCHELASTIC", "OMP_NUM_THREADS")
    ranks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign) and k not in ranks}
    return {**kept, "PATH": _path()}


def _slurm_version() -> tuple[int, int]:
    done = subprocess.run(["slurmd", "-V"], env=_environment(), capture_output=True, text=True, check=True)
    major, minor = re.findall(r"\d+", done.stdout)[:2]
    return int(major), int(minor)


def _free_ports(count: int) -> list[int]:
    """Ports without a listener: above those of pretrain.sbatch's MASTER_PORT, below the ephemeral ones."""
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.sample(range(30000, 32768), 2768):
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("0.0.0.0", port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise RuntimeError("no free ports between 30000 and 32767")
