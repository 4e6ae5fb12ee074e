"""All that a machine with GPUs can tell in ten minutes, the most telling first, as a Markdown file.

Each part is a command of its own: one that fails, hangs or runs out of memory is named, and the next one begins. The
file is written anew after every part. Without a GPU every part runs at a tiny size, or says why it is skipped.
`bash scripts/gpu_check.sh` installs what is needed and runs this.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from megazero.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
LINES = 60  # of a part's output that are kept: its end


class Part(NamedTuple):
    """A command of the check.

    Attributes:
        arguments: of python.
        seconds: after which it is ended.
        gpus: that it needs; with fewer it is skipped. 0: it runs on a CPU too.
    rehearsed: without any GPU it runs all the same, on a CPU.
    """

    title: str
    arguments: tuple[str, ...]
    seconds: float
    gpus: int = 0
    rehearsed: bool = False


def _benchmark(*flags: str) -> tuple[str, ...]:
    return ("-m", "benchmarks.gpu", *flags)


GPT2_1_5B = ("--layers", "48", "--hidden", "1600", "--heads", "25")
GPT2_345M = ("--layers", "24", "--hidden", "1024", "--heads", "16", "--batch", "8")
GPT_7B = ("--layers", "32", "--hidden", "4096", "--heads", "32", "--batch", "2")
TESTS = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")
PARTS = (
    Part("One GPU is the same model as the CPU", (*TESTS, "tests/gpu", "-k", "one_gpu and fp32"), 120, 1),
    Part("GPT-2 with 124 M parameters", _benchmark(), 120),
    Part("Triton's kernels beside torch's operators", ("-m", "benchmarks.kernels"), 60),
    Part("GPT-2 with 1.5 B parameters", _benchmark(*GPT2_1_5B, "--batch", "8"), 180),
    Part("Several GPUs are the same model as one", (*TESTS, "tests/gpu", "-k", "several_gpus"), 180, 2),
    Part("Communication behind computation (345 M parameters)", ("-m", "benchmarks.overlap"), 150, 2, True),
    Part("Kept inputs on the host (345 M parameters)", _benchmark(*GPT2_345M, "--offload"), 60),
    Part("The other tests", (*TESTS, "tests/gpu", "-k", "not several_gpus"), 180, 1),
    Part("7 B parameters", _benchmark(*GPT_7B, "--recompute", "full", "--systems", "megazero"), 120),
)


class Result(NamedTuple):
    """Outcome of a part: "ok", "skipped: WHY" or "failed: HOW"; its output and its seconds."""

    part: Part
    outcome: str
    output: str
    seconds: float


def run(part: Part, gpus: int, seconds: float) -> Result:
    """Run a part as a process group of its own, which is ended after `seconds`."""
    if gpus < part.gpus and not (part.rehearsed and gpus == 0):
        return Result(part, f"skipped: it needs {part.gpus} GPUs, and there are {gpus}", "", 0.0)
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *part.arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        outcome = "ok" if process.returncode == 0 else f"failed: exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        outcome = f"failed: not done after {seconds:.0f} s"
    return Result(part, outcome, output, time.monotonic() - start)


def report(results: list[Result], device: str, began: datetime.datetime) -> str:
    """The Markdown file."""
    lines = [f"# {device}", ""]
    lines += [
        f"`bash scripts/gpu_check.sh`, {began:%Y-%m-%d}; Python {platform.python_version()}, torch {torch.__version__}."
    ]
    lines += ["Times are of this machine in one run; a ratio above 1 is in our favour.", ""]
    lines += ["| part | outcome | seconds |", "|---|---|---|"]
    lines += [f"| {r.part.title} | {r.outcome} | {r.seconds:.0f} |" for r in results]
    for r in results:
        if not r.outcome.startswith("skipped"):
            command = shlex.join(("python", *r.part.arguments))
            kept = "\n".join(r.output.rstrip().splitlines()[-LINES:])
            table = "|---|" in kept and r.outcome == "ok"  # a table is Markdown already
            lines += ["", f"## {r.part.title}", f"`{command}`", ""] + ([kept] if table else ["```", kept, "```"])
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Options:
    """Check and measure the GPUs of this machine."""

    output: str = ""
    """File to write. Empty: docs/results/gpu-NAME.md of the GPU; without one, standard output."""
    minutes: float = 10.0
    """Time for all parts; those that do not fit are skipped."""
    parts: str = ""
    """Regular expression: only parts whose titles match it. Empty: all."""


def main(o: Options) -> int:
    gpus, began = torch.cuda.device_count(), datetime.datetime.now()
    device = f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "No GPU: a dry run on a CPU"
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-") if gpus else ""
    path = Path(o.output or (ROOT / "docs/results" / f"gpu-{name}.md" if name else ""))
    results: list[Result] = []
    deadline = time.monotonic() + 60 * o.minutes
    for part in PARTS:
        if o.parts and not re.search(o.parts, part.title):
            continue
        left = deadline - time.monotonic()
        print(f"{part.title} ...", flush=True)
        if left < 5:
            results.append(Result(part, f"skipped: {o.minutes:g} minutes are over", "", 0.0))
        else:
            results.append(run(part, gpus, min(part.seconds, left)))
        print(f"  {results[-1].outcome}, {results[-1].seconds:.0f} s", flush=True)
        if path != Path():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, report(results, device, began).encode())
    if path == Path():
        print(report(results, device, began))
    failed = [r.part.title for r in results if r.outcome.startswith("failed")]
    print(f"failed: {', '.join(failed)}" if failed else "no part failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Options)))
