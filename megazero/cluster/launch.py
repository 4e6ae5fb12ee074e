"""Start and stop of a rank: its device, how it joins the other ranks, how it ends."""

import contextlib
import datetime
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megazero.cluster import agent_notes
from megazero.cluster.listening import LOOPBACK
from megazero.cluster.meeting import meet
from megazero.engine.mesh.peer_errors import peer_errors
from megazero.engine.options.schema import Precision
from megazero.environment import check_allocator_settings
from megazero.host import has_nvidia
from megazero.log import log
from megazero.world import World, one_node, under_torchrun

JOIN_MINUTES = 10.0  # until all ranks have started; a collective's limit may be shorter
LAZY_RANKS = 64  # gloo connects the ranks of larger jobs when they first communicate
LOST_SECONDS = 2.0  # from the loss of a node to the end of a rank that waits for it
OUTSIDE = "192.0.2.1"  # an address reserved for documentation (RFC 5737): never in the own network
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
TENSOR_CORES = (7, 0)  # the first compute capability with them


def pick_device(world: World) -> torch.device:
    """Return this rank's own GPU, or the CPU if there are no GPUs.

    Raises:
        ValueError: this node has more ranks than GPUs, or GPUs that this torch cannot use.
    """
    if not torch.cuda.is_available():
        # CPU builds of torch are common on laptops with another maker's GPU; only NVIDIA's are refused.
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        if has_nvidia() and re.match(r"\d|GPU-|MIG-", wanted):  # "", -1 and NoDevFiles hide all GPUs
            raise ValueError(
                f"torch {torch.__version__} cannot use this machine's NVIDIA GPUs: {_why_no_cuda()}; install "
                "a torch for the driver's CUDA version (see nvidia-smi), or export CUDA_VISIBLE_DEVICES= to train on "
                "the CPU"
            )
        return torch.device("cpu")
    if world.launcher == "torchrun" and world.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {world.local_rank} has no GPU, because this node has {torch.cuda.device_count()}; "
            "start as many ranks per node as it has GPUs (--nproc)"
        )
    check_allocator_settings()
    index = world.local_rank % torch.cuda.device_count()  # srun --gpus-per-task shows each task only its own GPU
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def card_name(device: torch.device) -> str:
    """Return the name of a GPU, such as "NVIDIA H200"; empty for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def make_deterministic() -> None:
    """Make torch, cuBLAS and NCCL use deterministic algorithms on a GPU. Call it before the first matrix product.

    torch then uses FlashAttention's deterministic backward instead of cuDNN's, which accumulates with atomics.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it
    os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree")  # they sum inside switches, in no fixed order
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False  # costs time; nothing reads such memory
    torch.use_deterministic_algorithms(True)


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "it is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"it is built for CUDA {torch.version.cuda}, and {str(error).splitlines()[0].rstrip('.')}"
    return f"it is built for CUDA {torch.version.cuda}, and finds no device"


def fastest_precision(device: torch.device) -> Precision:
    """Return the precision in which a GPU multiplies fastest. Before compute capability 8.0, GPUs emulate bf16."""
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "fp16" if torch.cuda.get_device_capability(device) >= TENSOR_CORES else "fp32"


# -- limits


@contextlib.contextmanager
def limit(world: World, seconds: float, action: str) -> Iterator[None]:
    """End this process with a message if the block takes longer than `seconds`.

    Note [waits without a limit]: if the host of a TCPStore is frozen (SIGSTOP, a hung node), `get`, `check`, `add` and
    `wait` block for ever despite their time-outs, because the client waits for the server's answer without one.
    """

    def expire() -> None:
        log.error(f"{action} took more than {seconds:g} s; giving up")
        exit_now(1)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# -- start and stop


def start(world: World, device: torch.device, timeout_minutes: float) -> tuple[str, ...]:
    """Join the other ranks: NCCL on GPUs, gloo on CPUs. A single process needs no group.

    Returns:
        Each rank's host.

    Raises:
        ValueError: the port is taken, or its store belongs to another run.
        PeerLost: some ranks did not start.
    """
    if world.size == 1:
        return (socket.gethostname(),)
    minutes = max(JOIN_MINUTES, timeout_minutes)
    with limit(world, 60 * (minutes + timeout_minutes + 1), "joining the other ranks"):
        store = meet(world, device, 60 * minutes)
        _connect_lazily(world.size)
        choose_interface("" if one_node(world) else os.environ["MASTER_ADDR"])
        with peer_errors("joining the other ranks"):
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=world.rank,
                world_size=world.size,
                timeout=datetime.timedelta(minutes=timeout_minutes),
                device_id=device if device.type == "cuda" else None,
            )
            hosts = [""] * world.size
            dist.all_gather_object(hosts, socket.gethostname())
            return tuple(hosts)


def _connect_lazily(num_ranks: int) -> None:
    """Let gloo connect two ranks of a large job when they first communicate.

    By default gloo connects each rank to all others of a group: thousands of sockets per rank, of which collectives
    use a few. Small jobs keep that default, because it detects faults of the network at the start.
    """
    if num_ranks >= LAZY_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # torch reads it when it makes the first group


def choose_interface(address: str) -> None:
    """Make gloo use the network interface of the route to rank 0, or the loopback one if all ranks are on one node.

    By default gloo resolves this machine's own name, which is often a loopback address in /etc/hosts or a slow card.

    Args:
        address: of rank 0; empty: this node.
    """
    if not address:
        if name := interface_of(LOOPBACK):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        return
    # On rank 0's machine its address may be a loopback one; the default route then leads to OUTSIDE.
    for target in (address, OUTSIDE):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((target, 9))  # sends nothing
            name = interface_of(probe.getsockname()[0])
            if name not in ("", "lo"):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                return


def interface_of(address: str) -> str:
    """Return the name of the network interface with an IPv4 address; empty if there is none, or not on Linux."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                request = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, name.encode().ljust(256, b"\0"))
                if socket.inet_ntoa(request[20:24]) == address:
                    return name
    return ""


def stop(world: World, timeout_minutes: float) -> None:
    """Leave the process group; a gloo process that skips this sometimes aborts on exit."""
    if dist.is_initialized():
        with limit(world, 60 * (timeout_minutes + 1), "leaving the other ranks"), peer_errors("waiting for the end"):
            dist.barrier()
            dist.destroy_process_group()


def exit_now(code: int) -> NoReturn:
    """End this process at once: after a failure, because other ranks may wait for it, or when all ranks are done.

    Skips the clean-up of Python and of the backend, which can hang, or abort and so change the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def end_with_launcher(world: World) -> None:
    """End this rank if its parent is killed: torchrun or srun, which then cannot end its ranks itself.

    With --elastic, also if its agent reports a lost node: this rank may hang in a collective with its ranks.
    """
    parent = os.getppid()
    if not under_torchrun() and world.launcher != "srun":
        return

    def watch() -> None:
        while os.getppid() == parent and not agent_notes.read_note(agent_notes.LOST):
            time.sleep(0.5)
        if os.getppid() == parent:
            time.sleep(LOST_SECONDS)  # in which this rank may end by itself, with a message of its own
        log.error(agent_notes.read_note(agent_notes.LOST) or "its launcher was killed; ending")
        exit_now(1)

    threading.Thread(target=watch, name="launcher's end", daemon=True).start()
