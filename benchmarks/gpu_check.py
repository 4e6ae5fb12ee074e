"""Check and measure the GPUs of a machine, the most informative parts first, into a folder and a Markdown file.

Parts that ask whether results are right run together, because they need no quiet machine; meanwhile the compile caches
of other systems fill. Then each part that is timed runs alone. Each is a command of its own: one that fails, hangs or
runs out of memory is named, and the next one begins. A part that cannot run, or is expected to outlast --minutes, is
skipped, with the reason. Outputs are written as they come; they are packed, and the file is rewritten, after every
part. Without a GPU some parts run at a tiny size. `bash scripts/gpu_check.sh` installs the packages and runs this;
`--help` lists the parts.
"""

import concurrent.futures
import datetime
import itertools
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from benchmarks.gpu_parts import PARTS, Part
from megazero.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
LINES = 60  # of a part's output that are kept: its end


class Machine(NamedTuple):
    """The machine that is checked.

    Attributes:
        prefix: comes before each part's program.
        tiny: each part is made small, and its time is not limited.
        cannot: title of a part -> the reason why it cannot run.
    """

    gpus: int
    name: str
    prefix: tuple[str, ...] = ()
    tiny: bool = False
    cannot: Mapping[str, str] = MappingProxyType({})


class Result(NamedTuple):
    """Outcome of a part: "ok", "skipped: WHY" or "failed: HOW"; the end of its output, and its seconds."""

    part: Part
    outcome: str
    output: str = ""
    seconds: float = 0.0


def obstacle(part: Part, machine: Machine, left: float) -> str:
    """Return why a part cannot run, with `left` seconds; empty if it can."""
    if part.title in machine.cannot:
        return machine.cannot[part.title]
    if machine.gpus < part.gpus and not (part.rehearsed and machine.gpus == 0):
        return f"it needs {part.gpus} GPUs, and there are {machine.gpus}"
    if left < part.expected and not machine.tiny:
        return f"it takes about {part.expected:.0f} s, and {max(left, 0):.0f} s are left"
    return ""


def run(part: Part, machine: Machine, seconds: float, folder: Path) -> Result:
    """Run a part as a process group of its own, which is ended after `seconds`; its output is in `folder`."""
    start, files = time.monotonic(), [folder / f"{part.name}.{end}" for end in ("out", "err")]
    with files[0].open("w") as out, files[1].open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *part.command(machine.prefix, machine.tiny, machine.gpus)],
            cwd=ROOT,
            env={**({"OMP_NUM_THREADS": "1"} if part.ranks > 1 else {}), **os.environ, **dict(part.env)},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
            outcome = "ok" if code == 0 else f"failed: exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            outcome = f"failed: not done after {seconds:.0f} s"
    out_lines, err_lines = (path.read_text(errors="replace").rstrip().splitlines() for path in files)
    shown = out_lines if outcome == "ok" and out_lines else [*out_lines, *err_lines]
    return Result(part, outcome, "\n".join(shown[-LINES:]), time.monotonic() - start)


def tables(text: str) -> Iterator[dict[str, str]]:
    """Yield the rows of Markdown tables, by their headings."""
    headings: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            headings = []
        elif not headings:
            headings = cells
        elif not set(line) <= set("|-"):
            yield dict(zip(headings, cells, strict=False))


def next_to_plans(results: Sequence[Result]) -> list[str]:
    """Return a table of all steps and peaks that were planned and measured."""
    lines = ["", "## Planned and measured", "", "| part | run | ms | planned | ratio | GB | planned | ratio |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for result in results:
        for row in tables(result.output):
            names = ("ms per step", "planned ms"), ("GB at the peak", "planned GB")
            pairs = [(row.get(measured, ""), row.get(planned, "")) for measured, planned in names]
            if any(measured and planned for measured, planned in pairs) and not pairs[0][0].startswith("failed"):
                cells = [result.part.title, next(iter(row.values()))]
                for measured, planned in pairs:
                    ratio = f"{float(measured) / float(planned):.2f}" if measured and planned and float(planned) else ""
                    cells += [measured, planned, ratio]
                lines.append(f"| {' | '.join(cells)} |")
    return lines if len(lines) > 5 else []


def report(results: list[Result], machine: Machine, began: datetime.datetime) -> str:
    """Return the Markdown file."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    lines = [f"# {machine.name}", "", f"`bash scripts/gpu_check.sh`, {began:%Y-%m-%d}; {versions}."]
    lines += ["Times are of this machine in one run; a ratio above 1 is in our favour.", ""]
    lines += ["| part | outcome | seconds |", "|---|---|---|"]
    lines += [f"| {r.part.title} | {r.outcome} | {r.seconds:.0f} |" for r in results]
    lines += next_to_plans(results)
    for r in results:
        if not r.outcome.startswith("skipped"):
            words = [f"{name}={value}" for name, value in r.part.env]
            command = shlex.join([*words, "python", *r.part.command(machine.prefix, machine.tiny, machine.gpus)])
            table = "|---|" in r.output and r.outcome == "ok"  # a table is Markdown already
            lines += ["", f"## {r.part.title}", f"{r.part.asks} `{command}`", ""]
            lines += [r.output] if table else ["```", r.output, "```"]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Options:
    """Check and measure the GPUs of this machine."""

    folder: str = "runs/gpu_check"
    """Folder of each part's whole output, and of outputs.tgz, which has all of them and the report."""
    output: str = ""
    """Report to write. Empty: docs/results/gpu-NAME.md of the GPU; without one, standard output."""
    minutes: float = 0.0
    """Time for all parts; those that would outlast it are skipped. 0: as long as all of them may take."""
    parts: str = ""
    """Regular expression: only parts whose titles match it. Empty: all."""


class Check:
    """Runs the parts, and writes the report after each."""

    def __init__(self, o: Options, machine: Machine, path: Path | None) -> None:
        """path: of the report; None: standard output."""
        self.machine, self.path, self.folder = machine, path, Path(o.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.parts = [part for part in PARTS if not o.parts or re.search(o.parts, part.title)]
        self.began, self.start = datetime.datetime.now(), time.monotonic()
        self.deadline = self.start + (60 * o.minutes or math.inf)
        self.results: dict[str, Result] = {}
        self.lock = threading.Lock()

    def take(self, part: Part) -> None:
        """Run a part, or skip it."""
        left = self.deadline - time.monotonic()
        if why := obstacle(part, self.machine, left):
            result = Result(part, f"skipped: {why}")
        else:
            limit = None if self.machine.tiny else min(part.seconds, left)
            result = run(part, self.machine, math.inf if limit is None else limit, self.folder)
        with self.lock:
            self.results[part.title] = result
            at = time.monotonic() - self.start
            print(f"{part.title}: {result.outcome}, {result.seconds:.0f} s, at {at:.0f} s", flush=True)
            self.write()

    def text(self) -> str:
        done = [self.results[part.title] for part in self.parts if part.title in self.results]
        return report(done, self.machine, self.began)

    def write(self) -> None:
        """Write the report, and pack it with all outputs."""
        write_atomically(self.folder / "report.md", self.text().encode())
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, self.text().encode())
        with tarfile.open(self.folder / ".outputs.tgz", "w:gz") as packed:
            for file in sorted(self.folder.glob("*.*")):
                if file.suffix in (".out", ".err", ".md"):
                    packed.add(file, file.name)
        os.replace(self.folder / ".outputs.tgz", self.folder / "outputs.tgz")

    def run(self) -> int:
        """Return 1 if a part failed."""
        first, together, rest = in_order(self.parts)
        for part in first:  # torch is in the page cache then
            self.take(part)
        if self.machine.gpus and not self.machine.tiny:
            with concurrent.futures.ThreadPoolExecutor(max(1, len(together))) as pool:
                list(pool.map(self.take, together))
        else:
            for part in together:
                self.take(part)
        for part in rest:
            self.take(part)
        if self.path is None:
            print(self.text())
        failed = [title for title, result in self.results.items() if result.outcome.startswith("failed")]
        print(f"failed: {', '.join(failed)}" if failed else "no part failed", flush=True)
        return 1 if failed else 0


def in_order(parts: Sequence[Part]) -> tuple[list[Part], list[Part], list[Part]]:
    """Return the part that comes before those that run together, these, and the others, each of which runs alone."""
    together = [part for part in parts if part.together]
    alone = [part for part in parts if not part.together]
    count = 1 if together else 0
    return alone[:count], together, alone[count:]


def description() -> str:
    """Return the text of --help: how it works, and the parts in order."""
    lines = []
    for part in itertools.chain(*in_order(PARTS)):
        needs = f", {part.gpus} GPUs" if part.gpus > 1 else ""
        lines.append(f"- {part.title} (about {part.expected:.0f} s{needs}): {part.asks}")
    return f"{__doc__}\nParts, in order:\n\n" + "\n".join(lines)


def main(o: Options) -> int:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are here, perhaps without a network
    gpus = torch.cuda.device_count()
    if not gpus:
        machine = Machine(0, "No GPU: a dry run on a CPU")
        return Check(o, machine, Path(o.output) if o.output else None).run()
    card = torch.cuda.get_device_name(0)
    name = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    return Check(o, Machine(gpus, f"{gpus} x {card}"), Path(o.output or ROOT / f"docs/results/gpu-{name}.md")).run()


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Options, description=description())))
