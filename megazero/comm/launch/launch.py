"""Start and stop of a rank: what launched it, its device, how it joins the others, how it ends."""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from megazero.comm.launch.errors import PeerLost, peer_errors
from megazero.comm.launch.world import World, local_size, number
from megazero.config.model_options import Precision
from megazero.environment import check_allocator_settings
from megazero.log import log
from megazero.memory.host import has_nvidia

JOIN_MINUTES = 10.0  # for all ranks to start; a collective's limit may be shorter
ANSWER_SECONDS = 30.0  # for a store that listens to answer; a torchrun that is alive has one
LAZY_RANKS = 64  # from as many on, gloo connects two ranks when they first talk
OUTSIDE = "192.0.2.1"  # an address kept for documentation (RFC 5737): never in the own network
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
TENSOR_CORES = (7, 0)  # the first compute capability with them
HOST_BYTES = 64  # of a host's name, in the table of hosts

T = TypeVar("T")


def pick_device(world: World) -> torch.device:
    """This rank's own GPU where there are GPUs, else the CPU.

    Raises:
        ValueError: more ranks on this node than GPUs, or GPUs that this torch cannot use.
    """
    if not torch.cuda.is_available():
        # A GPU of another maker is often a laptop's own, next to a torch for CPUs: then the CPU is meant.
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        if has_nvidia() and re.match(r"\d|GPU-|MIG-", wanted):  # "", -1 and NoDevFiles leave no GPU
            raise ValueError(
                f"this machine has NVIDIA GPUs, which torch {torch.__version__} cannot use: {_why_no_cuda()}; install "
                "a torch for the driver's CUDA version (see nvidia-smi), or export CUDA_VISIBLE_DEVICES= to train on "
                "the CPU"
            )
        return torch.device("cpu")
    if world.launcher == "torchrun" and world.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {world.local_rank} has no GPU of its own: there are {torch.cuda.device_count()} here; "
            "start as many ranks on a node as it has GPUs (--nproc)"
        )
    check_allocator_settings()
    index = world.local_rank % torch.cuda.device_count()  # srun with --gpus-per-task shows a task only its own
    torch.cuda.set_device(index)
    capability, kernels = torch.cuda.get_device_capability(index), torch.cuda.get_arch_list()
    if torch.version.hip is None and not has_kernels(capability, kernels):
        raise ValueError(
            f"{torch.cuda.get_device_name(index)} has compute capability {capability[0]}.{capability[1]}, for which "
            f"torch {torch.__version__} has no kernels (it has {', '.join(kernels)}); install another build of torch: "
            "those for CUDA 12.6 (pip install torch --index-url https://download.pytorch.org/whl/cu126) have kernels "
            "from 5.0 on"
        )
    return torch.device("cuda", index)


def has_kernels(capability: tuple[int, int], kernels: Sequence[str]) -> bool:
    """Return whether a GPU can run one of `kernels`, named as `torch.cuda.get_arch_list` names them.

    A binary, sm_XY, runs on the same major version from minor version Y on; PTX, compute_XY, on every later GPU. With
    the suffix a, both run on that version alone.
    """
    for kernel in kernels:
        kind, major, minor, suffix = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", kernel).groups()
        version = int(major), int(minor)
        if capability == version or (
            suffix != "a" and capability > version and (kind == "compute" or capability[0] == version[0])
        ):
            return True
    return False


def make_deterministic() -> None:
    """Have torch, cuBLAS and NCCL use deterministic algorithms on a GPU. Call it before the first product.

    torch then takes FlashAttention's deterministic backward instead of cuDNN's, which adds with atomics.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it
    os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree")  # sums in switches, whose order is not fixed
    settings = torch.utils.deterministic
    settings.fill_uninitialized_memory = False  # costs time; nothing reads such memory
    torch.use_deterministic_algorithms(True)


def _why_no_cuda() -> str:
    """Return why this torch finds no GPU."""
    if torch.version.cuda is None:
        return "it is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"it is built for CUDA {torch.version.cuda}, and {str(error).splitlines()[0].rstrip('.')}"
    return f"it is built for CUDA {torch.version.cuda}, and finds no device"


def fastest_precision(device: torch.device) -> Precision:
    """Return the precision that a GPU multiplies fastest in; before compute capability 8.0, GPUs imitate bf16."""
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "fp16" if torch.cuda.get_device_capability(device) >= TENSOR_CORES else "fp32"


# -- limits


@contextlib.contextmanager
def limit(world: World, seconds: float, action: str) -> Iterator[None]:
    """End this process, with a message, if the block takes longer than `seconds`.

    Note [waits without a limit]: a TCPStore whose host is frozen (SIGSTOP, a hung node) lets `get`, `check`, `add` and
    `wait` block for ever, whatever time-out they were given: the client waits for the server's answer without one.
    """

    def expire() -> None:
        log.error(f"{action} took more than {seconds:g} s; giving up")
        abort(1)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def within(seconds: float, function: Callable[[], T]) -> T:
    """Return function(), computed in another thread; TimeoutError, leaving that thread behind, after `seconds`."""
    outcome: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()

    def compute() -> None:
        try:
            outcome.put((function(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=compute, daemon=True).start()
    try:
        value, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


# -- start and stop


def start(world: World, device: torch.device, timeout_minutes: float) -> tuple[str, ...]:
    """Join the other ranks: NCCL on GPUs, gloo on CPU. A single process needs no group.

    Returns:
        Each rank's host.

    Raises:
        ValueError: the port is taken, or its store is another run's.
        PeerLost: not all ranks came.
    """
    if world.size == 1:
        return (socket.gethostname(),)
    minutes = max(JOIN_MINUTES, timeout_minutes)
    with limit(world, 60 * (minutes + timeout_minutes + 1), "joining the other ranks"):
        store = _open_store(world, 60 * minutes)
        _take_seat(store, world, device)
        _wait_for_all(store, world, datetime.timedelta(minutes=minutes))
        _connect_lazily(world.size)
        if world.size > local_size(world):
            _choose_interface(os.environ["MASTER_ADDR"])
        with peer_errors("joining the other ranks"):
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=world.rank,
                world_size=world.size,
                timeout=datetime.timedelta(minutes=timeout_minutes),
                device_id=device if device.type == "cuda" else None,
            )
            return _hosts(world, device)


def _connect_lazily(num_ranks: int) -> None:
    """Let gloo connect two ranks of a large job when they first talk, unless the environment says otherwise.

    Else each rank of a group is connected to all others when the group is made: thousands of sockets per rank, of which
    its collectives use those of a few neighbours. Small jobs connect at once, so that a fault of the network is found
    at the start. torch reads the variable when it makes the first group.
    """
    if num_ranks >= LAZY_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def _choose_interface(address: str) -> None:
    """Have gloo use the network interface of the route to rank 0, unless the environment names one.

    gloo itself takes the interface of this machine's own name, which is often the loopback address in /etc/hosts, or
    a slow card.
    """
    # On rank 0's own machine that address may be a loopback one; then any outside address, by the default route.
    for towards in (address, OUTSIDE):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((towards, 9))  # sends nothing
            name = interface_of(probe.getsockname()[0])
            if name not in ("", "lo"):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                return


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an IPv4 address; empty if there is none, or not on Linux."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without such an address
                request = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, name.encode().ljust(256, b"\0"))
                if socket.inet_ntoa(request[20:24]) == address:
                    return name
    return ""


def agent_store() -> bool:
    """Return true if torchrun, and not rank 0, hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open_store(world: World, seconds: float) -> dist.Store:
    host, port = os.environ["MASTER_ADDR"], number("MASTER_PORT")
    hosts_it = world.rank == 0 and not agent_store()
    if not hosts_it:
        _wait_for_listener(host, port, ANSWER_SECONDS if agent_store() else seconds)
    limit_of_operations = datetime.timedelta(seconds=seconds)
    try:
        store = within(
            ANSWER_SECONDS,
            lambda: dist.TCPStore(host, port, is_master=hosts_it, wait_for_workers=False, timeout=limit_of_operations),
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise PeerLost(f"cannot reach the store at MASTER_ADDR={host}, MASTER_PORT={port}: {error}") from None
        raise ValueError(
            f"MASTER_PORT={port} is taken on this machine, perhaps by another run; export another port before the "
            f"ranks are started, such as {_free_port()}, or end what listens there (see `ss -ltnp 'sport = :{port}'`)"
        ) from None
    except TimeoutError:
        raise ValueError(
            f"what listens at MASTER_ADDR={host}, MASTER_PORT={port} does not answer as rank 0 would: another program "
            "uses that port, or rank 0 is frozen; export another port before the ranks are started"
        ) from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store may outlive a restart of its ranks
    return dist.PrefixStore(f"megazero/{attempt}", store)


def _wait_for_listener(host: str, port: int, seconds: float) -> None:
    """Return when something listens there."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=10).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                host_of = "torchrun" if agent_store() else "rank 0"
                raise PeerLost(
                    f"nothing listens at MASTER_ADDR={host}, MASTER_PORT={port} after {seconds:g} s ({error}); "
                    f"{host_of} should: was it started, and can this machine reach it?"
                ) from None
            time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def _take_seat(store: dist.Store, world: World, device: torch.device) -> None:
    """Refuse a store that is another run's, and a rank that is there already.

    Raises:
        ValueError: naming MASTER_PORT, or the rank.
    """
    where = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
    job = os.environ.get("SLURM_JOB_ID")
    ours = f"{world.size} ranks on {device.type}" + (f" of SLURM job {job}" if job else "")
    theirs = store.compare_set("run", "", ours).decode()
    if theirs != ours:
        raise ValueError(
            f"rank {world.rank} on {socket.gethostname()} is one of {ours}, but the ranks at {where} are {theirs}: "
            "another run uses that port (export another before the ranks are started), or a node lacks its GPUs"
        )
    if store.add(f"seat/{world.rank}", 1) > 1 and not agent_store():
        raise ValueError(
            f"rank {world.rank} is at {where} already: another run uses that port, or two processes were started with "
            f"RANK={world.rank}; export another port before the ranks are started, such as {_free_port()}"
        )


def _wait_for_all(store: dist.Store, world: World, timeout: datetime.timedelta) -> None:
    """Return when all ranks are here."""
    round_, arrived = divmod(store.add("arrived", 1) - 1, world.size)
    if arrived == world.size - 1:
        store.set(f"all/{round_}", "here")
    try:
        store.wait([f"all/{round_}"], timeout)
    except dist.DistStoreError:
        missing = [rank for rank in range(world.size) if not store.check([f"seat/{rank}"])]
        raise PeerLost(
            f"{len(missing)} of {world.size} ranks did not start within {timeout.total_seconds():g} s: "
            f"{', '.join(map(str, missing[:16]))}{', ...' if len(missing) > 16 else ''}"
        ) from None


def _hosts(world: World, device: torch.device) -> tuple[str, ...]:
    """Every rank's host, in one all-gather."""
    name = socket.gethostname().encode()[:HOST_BYTES].ljust(HOST_BYTES, b"\0")
    mine = torch.tensor(list(name), dtype=torch.uint8, device=device)
    table = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(table, mine)
    return tuple(bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in table)


def stop(world: World, timeout_minutes: float) -> None:
    """Leave in good order; a gloo process that ends without this sometimes aborts on its way out."""
    if dist.is_initialized():
        with limit(world, 60 * (timeout_minutes + 1), "leaving the other ranks"), peer_errors("waiting for the end"):
            dist.barrier()
            dist.destroy_process_group()


def abort(code: int) -> NoReturn:
    """End this process after a failure: at once, for the others may wait for it, and without the backend's own
    clean-up, which can hang on them or replace the exit code by an abort's.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


# -- the launcher's end


def end_with_launcher(world: World) -> None:
    """End this rank when torchrun or srun, its parent, is gone: killed, it cannot end its ranks itself.

    Note [a parent's death]: a rank whose parent is gone is handed to another process, so `getppid` changes. Asking for
    a signal instead (Linux' PR_SET_PDEATHSIG) is no better: it comes when the *thread* that forked ends, and says
    nothing. A parent that died before the first look has been replaced already, by process 1 as a rule. Where process
    1 is not a launcher, that is seen here; elsewhere a lost torchrun is noticed because its store is gone as well.
    """
    launched = "TORCHELASTIC_RUN_ID" in os.environ or world.launcher == "srun"
    parent = os.getppid()
    if not launched or parent == 0:  # 0: a process of another namespace, which cannot be watched
        return
    orphan = parent == 1 and not _is_launcher(parent)

    def watch() -> None:
        while os.getppid() == parent and not orphan:
            time.sleep(0.5)
        log.error("its launcher is gone; ending")
        abort(1)

    threading.Thread(target=watch, name="launcher's end", daemon=True).start()


def _is_launcher(process: int) -> bool:
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return True  # not to be known
    return b"torch" in command or b"slurm" in command
