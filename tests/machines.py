"""The default suite on imitated CPUs: `make test-machines`, or `python -m tests.machines PYTEST ARGUMENTS`.

A CPU's instructions decide how a library cuts a sum, so that results differ in their last bits. Environment variables
make torch's operators, MKL and oneDNN take the code of older CPUs; MKL_CBWR gives every CPU the same code. Then twice
on a machine under load: tests/jitter.py stops random processes.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SUMMARY = re.compile(r"\d+ (?:passed|failed|error).* in [\d.]+s")


class Machine(NamedTuple):
    """Variables that imitate a machine, the number of pytest's workers, and the seed of jitter; 0: without."""

    env: dict[str, str]
    workers: int = 2
    seed: int = 0


MACHINES = (
    Machine({"ATEN_CPU_CAPABILITY": "default"}),
    Machine({"ATEN_CPU_CAPABILITY": "avx2"}, workers=1),
    Machine({"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}),
    Machine({"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, workers=8),
    Machine({"ONEDNN_MAX_CPU_ISA": "SSE41"}),
    Machine({"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    Machine({"MKL_CBWR": "COMPATIBLE"}, workers=4),
    Machine({"TEST_THREADS": "2"}),
    Machine({"TEST_THREADS": "4"}),
    Machine({}, seed=1),
    Machine({}, workers=1, seed=2),
)


def main(arguments: list[str]) -> int:
    """Run pytest on each machine, print a line for each, and return the number of those that failed."""
    failed = 0
    for machine in MACHINES:
        name = " ".join(f"{variable}={value}" for variable, value in machine.env.items()) or f"jitter {machine.seed}"
        jitter = [sys.executable, "-m", "tests.jitter", "--seed", str(machine.seed), "--"] if machine.seed else []
        start = time.monotonic()
        done = subprocess.run(
            [*jitter, sys.executable, "-m", "pytest", "-n", str(machine.workers), "--dist", "worksteal", *arguments],
            cwd=ROOT,
            env={**os.environ, **machine.env},
            capture_output=True,
            text=True,
        )
        lines = done.stdout.splitlines()
        words = next((line for line in reversed(lines) if SUMMARY.search(line)), done.stderr.strip()[-200:])
        print(f"{name}, {machine.workers} workers: {words} ({time.monotonic() - start:.0f} s)", flush=True)
        if done.returncode:
            failed += 1
            print(*(line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))), sep="\n", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
