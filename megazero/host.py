"""Host memory that a process can still allocate, by the kernel and by control groups; accelerators; NUMA nodes."""

import os
from pathlib import Path
from typing import NamedTuple


class Available(NamedTuple):
    """Bytes that can still be allocated, and the source of the limit."""

    num_bytes: int
    source: str  # "of host memory", "of the control group's memory limit"


class Machine(NamedTuple):
    """Memory of one node for the ranks that run on it. None: not known, so not checked."""

    ranks: range  # ranks of this node
    device_type: str
    device: Available | None  # per rank; None on a CPU, where ranks take host memory
    host: Available | None  # for all ranks of the node together
    whole: int | None = None  # bytes of the device or, on a CPU, of the host, with those that are taken
    files: Available | None = None  # for states in files, of all ranks of the node together
    copies: int = 0  # bytes of the run's checkpoints in memory, which `host` lacks and the next ones replace


def has_nvidia(root: Path = Path("/")) -> bool:
    """Return whether the system has an NVIDIA GPU with a driver."""
    return any((root / "dev").glob("nvidia[0-9]*"))


def near_cpus(address: str, root: Path = Path("/")) -> set[int]:
    """Return the CPUs of a PCI device's NUMA node; empty if the system names none.

    Args:
        address: such as 0000:1b:00.0.
        root: the folder of sys/.
    """
    try:
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())  # -1: it has none
        listed = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()  # such as 0-31,64-95
        ends = [part.split("-") for part in listed.split(",") if part]
        return {cpu for each in ends for cpu in range(int(each[0]), int(each[-1]) + 1)}
    except (OSError, ValueError):  # a system without NUMA nodes, or one that lists them in another way
        return set()


def host_memory(root: Path = Path("/"), whole: bool = False) -> Available | None:
    """Return the host memory available to this process; None if it is unknown. root: the folder of proc/ and sys/.

    That is the least of MemAvailable and of the memory left in every control group around the process (containers,
    jobs), from the innermost to the outermost. Page cache counts as available. whole: with memory that is taken, which
    does not change while ranks start.
    """
    found = [Available(num_bytes, "of host memory") for num_bytes in _kernel_memory(root, whole)]
    found += [Available(left, "of the control group's memory limit") for left in _control_groups(root, whole)]
    return min(found, default=None)


def _kernel_memory(root: Path, whole: bool) -> list[int]:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:" if whole else "MemAvailable:"):
                return [1024 * int(line.split()[1])]
    except (OSError, ValueError):
        pass
    try:  # not Linux: the whole memory
        return [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (OSError, ValueError):
        return []


def _control_groups(root: Path, whole: bool) -> list[int]:
    """Return the bytes left in every control group around this process that has a limit, or the limits."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:  # "4:memory:/path" in version 1, "0::/path" in version 2
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount, prefix = "sys/fs/cgroup/memory", "total_"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif not controllers:
            mount, prefix, limit, usage = "sys/fs/cgroup", "", "memory.max", "memory.current"
        else:
            continue
        inner = root / mount / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(root / mount):
                break
            try:  # the outermost group, and a path outside a container, have no such file; "max" is no limit
                most = int((folder / limit).read_text())
                taken = 0 if whole else int((folder / usage).read_text()) - _page_cache(folder / "memory.stat", prefix)
                left.append(max(0, most - max(0, taken)))
            except (OSError, ValueError):
                continue
    return left


def _page_cache(stat: Path, prefix: str) -> int:
    wanted = {f"{prefix}inactive_file", f"{prefix}active_file"}
    fields = [line.split() for line in stat.read_text().splitlines()]
    return sum(int(value) for name, value in fields if name in wanted)
