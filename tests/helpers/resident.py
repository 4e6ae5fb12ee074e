"""Resident memory of this process, on Linux. Imports nothing else: benchmarks use it in environments of others."""

from pathlib import Path


def resident(field: str) -> int:
    """Bytes from /proc/self/status: VmRSS, or VmHWM, its peak since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"no {field} in /proc/self/status")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
