"""Rank and world size of this process, as its launcher set them in the environment. Needs no torch."""

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megazero.called_as import in_own_words

# Variables of launchers of MPI: Open MPI, MPICH and Hydra, MVAPICH, Intel MPI, LSF's jsrun, Cray's PALS.
MPI_SIZES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "JSM_NAMESPACE_SIZE",
    "PALS_LOCAL_SIZE",
)
TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")  # tasks of a node, and of how many nodes
NODE = r"(?:[\w.-]|\[\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*\])+"

WAY_OUT = "start ranks with torchrun, srun or scripts/launch.sh, or unset RANK and WORLD_SIZE to train with one process"

# Variables that the launcher of an elastic run sets when it begins, for the ranks of all generations.
STARTED = "MEGAZERO_STARTED"  # Unix time
BEFORE = "MEGAZERO_BEFORE"  # `checkpoint.folders.save_mark` of --save
# Variable of a launcher: a file that rank 0 writes once all ranks have begun.
BEGUN = "MEGAZERO_BEGUN"


class World(NamedTuple):
    """Rank and world size as set by the launcher."""

    rank: int
    size: int
    local_rank: int  # on its node: which of the node's devices is its own
    launcher: str  # torchrun, srun or single

    @property
    def has_peers(self) -> bool:
        return self.size > 1


class Node(NamedTuple):
    """A node: its ranks share memory, and are lost together."""

    machine: str  # keeps its name when the run is started again
    group: str  # number that torchrun gave it, because tests simulate several nodes on one machine


def this_node() -> Node:
    """Return the node of this process. MEGAZERO_NODE overrides the name that SLURM or the system gives."""
    env = os.environ
    machine = env.get("MEGAZERO_NODE") or env.get("SLURMD_NODENAME") or socket.gethostname()
    return Node(re.sub(r"[^A-Za-z0-9_.-]", "_", machine), env.get("GROUP_RANK", "0"))


class Generation(NamedTuple):
    """One start of the ranks of a run, whose launcher may start them again."""

    run: str  # the time of its launch, or its process
    number: int


def read_world() -> World:
    """Read torchrun's variables, or else those of an srun step; without either, this is a single process.

    A plain process inside a batch script or an salloc shell is single: only the tasks of a step have peers. They meet
    on the first node of the step, unless MASTER_ADDR and MASTER_PORT are set, which this function sets then.

    Raises:
        ValueError: a variable that is missing, no number or out of range; or another launcher's.
    """
    env = os.environ
    if "RANK" in env or "WORLD_SIZE" in env:
        world = World(number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK", 0), "torchrun")
    elif "SLURM_STEP_NUM_TASKS" in env and number("SLURM_STEP_NUM_TASKS") > 1:  # a batch shell has SLURM_NTASKS too
        world = World(number("SLURM_PROCID"), number("SLURM_STEP_NUM_TASKS"), number("SLURM_LOCALID"), "srun")
        # A step that is started in an interactive one has this variable too, and its standard input is no terminal.
        if "SLURM_PTY_PORT" in env and os.isatty(0):
            raise ValueError(
                f"this process belongs to an interactive step of {world.size} tasks (srun --pty), and would wait for "
                f"the others; to train with one process, unset {' '.join(['SLURM_STEP_NUM_TASKS', *_set_by_mpi()])}; "
                "else leave --pty out"
            )
    else:
        _refuse_other_launchers()
        return World(0, 1, 0, "single")
    if world.size < 1 or not 0 <= world.rank < world.size or world.local_rank < 0:
        raise ValueError(
            f"RANK={world.rank} with WORLD_SIZE={world.size} and LOCAL_RANK={world.local_rank}: ranks are numbered "
            f"from 0 to WORLD_SIZE - 1; {WAY_OUT}"
        )
    _check_local(world)
    if world.size > 1:
        if world.launcher == "srun":
            _meet_on_first_node()
        if not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
            raise ValueError(
                f"{world.size} ranks were started, but MASTER_ADDR and MASTER_PORT are not set; use "
                "scripts/launch.sh or scripts/slurm/pretrain.sbatch, or export both before the ranks are started"
            )
        if not 0 < number("MASTER_PORT") < 1 << 16:
            raise ValueError(f"MASTER_PORT={env['MASTER_PORT']}: a port is a number from 1 to 65535; export another")
    return world


def _refuse_other_launchers() -> None:
    """Refuse several processes of mpirun or another launcher, because each would train alone."""
    if not (names := _set_by_mpi()):
        return
    size = "" if names[0] == "PMIX_RANK" else f" --nproc {number(names[0])}"
    raise ValueError(
        f"{names[0]}={os.environ[names[0]]}: a launcher of MPI started this process and others, and each would train "
        f"alone; start ranks with scripts/launch.sh{size}, torchrun or srun; to train with one process, unset "
        f"{' '.join(names)}"
    )


def _set_by_mpi() -> list[str]:
    """Return the variables by which a launcher of MPI reports several processes."""
    sizes = {name: number(name) for name in MPI_SIZES if os.environ.get(name)}
    several = [name for name, size in sizes.items() if size > 1]
    other = os.environ.get("PMIX_RANK", "0") != "0"  # without a size, a rank other than 0 proves several
    return several + (["PMIX_RANK"] if other and (several or not sizes) else [])


def _check_local(world: World) -> None:
    """Refuse numbers of ranks on this node that are impossible."""
    name, env = "LOCAL_WORLD_SIZE", os.environ
    if world.launcher == "srun":
        name, counts = "SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_STEP_TASKS_PER_NODE", "1")
        found = [(int(n), int(times or 1)) for n, times in TASKS.findall(counts)]
        total = sum(n * times for n, times in found)
        if not re.fullmatch(rf"{TASKS.pattern}(,{TASKS.pattern})*", counts) or not all(map(all, found)):
            raise ValueError(f"{name}={counts[:80]} is no list of tasks, such as 4(x2),3; {WAY_OUT}")
        if name in env and total != world.size:
            raise ValueError(
                f"{name}={counts[:80]} are {total} tasks, and SLURM_STEP_NUM_TASKS={world.size}; {WAY_OUT}"
            )
    elif name in env and not 0 < number(name) <= world.size:
        raise ValueError(f"{name}={env[name]}: a node has 1 to WORLD_SIZE={world.size} ranks; {WAY_OUT}")
    most = world.size if name not in env else local_size(world)
    if world.local_rank >= most:
        variable = "SLURM_LOCALID" if world.launcher == "srun" else "LOCAL_RANK"
        raise ValueError(
            f"{variable}={world.local_rank}: it must be less than {most}, the ranks of this node; {WAY_OUT}"
        )


def _meet_on_first_node() -> None:
    """Set MASTER_ADDR and MASTER_PORT, unless they are set: the first node of the step, and a port of job and step."""
    env = os.environ
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if nodes and "SLURM_JOB_ID" in env:
        env.setdefault("MASTER_ADDR", next(node_names(nodes)))
        env.setdefault("MASTER_PORT", str(10000 + (number("SLURM_JOB_ID") + number("SLURM_STEP_ID", 0)) % 20000))


def node_names(nodes: str) -> Iterator[str]:
    """Yield the names in SLURM's list of nodes, such as "n[01-03,7],m2".

    Raises:
        ValueError: it is no such list.
    """
    if not re.fullmatch(rf"{NODE}(,{NODE})*", nodes):
        raise ValueError(
            f"SLURM's list of nodes {nodes[:80]!r} cannot be read; export MASTER_ADDR, the first node's name"
        )
    for name in re.findall(NODE, nodes):
        yield from _expanded(name)


def _expanded(name: str) -> Iterator[str]:
    begin, bracket, rest = name.partition("[")
    ranges, _, end = rest.partition("]")
    if not bracket:
        yield name
        return
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for tail in _expanded(end):
                yield f"{begin}{number:0{len(first)}}{tail}"


def number(name: str, default: int | None = None) -> int:
    """Read a whole number from the environment.

    Raises:
        ValueError: it is no number, or missing without a default.
    """
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        found = "is not set" if text is None else f"is {text!r}, which is not a whole number"
        raise ValueError(f"{name} {found}; {WAY_OUT}") from None


def local_size(world: World) -> int:
    """Return the number of ranks on this node; 1 if the launcher does not set it."""
    env = os.environ
    if world.launcher == "srun":
        node = env.get("SLURM_NODEID", "0")
        return tasks_of_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""), int(node) if node.isdecimal() else 0)
    size = env.get("LOCAL_WORLD_SIZE", "1") if world.launcher == "torchrun" else "1"
    return int(size) if size.isdecimal() else 1


def one_node(world: World) -> bool:
    """Return whether all ranks are on this node."""
    return world.size == local_size(world)


def num_nodes(world: World) -> int:
    """Return the number of nodes of the run. ValueError if they have unequal numbers of ranks."""
    nodes, rest = divmod(world.size, local_size(world))
    if rest:
        raise ValueError(
            f"--elastic: {world.size} ranks, {local_size(world)} of them on this node; start as many on every node"
        )
    return nodes


def generation() -> int:
    """Return how often the ranks of this run were started before, by --elastic."""
    count = os.environ.get("MEGAZERO_GENERATION") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0


def this_generation() -> Generation | None:
    """Return the generation of this process; None if its launcher counts none."""
    run = os.environ.get(STARTED)
    return Generation(run, generation()) if run else None


def agent_store() -> bool:
    """Return true if torchrun, and not rank 0, hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def under_torchrun() -> bool:
    """Return true if an agent of torchrun, or of scripts/launch.sh, started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def first_start(iteration: int) -> bool:
    """Return whether a start after `iteration` is the first one of its run."""
    return iteration == 0 and generation() == 0


def launched() -> float:
    """Return the Unix time at which the first generation of an elastic run began; of any other run, the time now."""
    return float(os.environ.get(STARTED) or time.time())


def mark_before() -> str:
    """Return the mark of the --save folder before an elastic run was launched; empty if it had no checkpoint."""
    return os.environ.get(BEFORE, "")


def tasks_of_node(tasks_per_node: str, node: int) -> int:
    """Return the number of tasks on a node by SLURM's list, such as "4(x2),3"; 1 if there is no such list."""
    for count, times in TASKS.findall(tasks_per_node):
        node -= int(times or 1)
        if node < 0:
            return int(count)
    return 1


def report_to_launcher(message: str) -> None:
    """Leave the message of a failed rank in the file that torchrun reads. Never raises."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = in_own_words(message)
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
