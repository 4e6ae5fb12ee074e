"""Cost of observing a run: statistics per layer, the page while the run trains, the page of a long run and of ten.

    python -m benchmarks.observing

Steps with and without statistics, and next to a process that writes the page or alone, take turns in one process.
Ratios are of its CPU time, which other work on the machine changes least.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.measure import ratio_interval
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.step.batch import MicroBatch
from megazero.engine.step.engine import Engine
from megazero.flags.cli import parse
from megazero.flags.resolve import resolve
from megazero.observe.layer_statistics import KEYS, LayerStatistics

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ["token_embedding", *(f"blocks.{number}" for number in range(24)), "head"]
MEASURED = """
import time
from pathlib import Path
{imports}
start = time.process_time()
{call}
seconds = time.process_time() - start
print(seconds, Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""


@dataclass(frozen=True)
class Options:
    """Cost of observing a run."""

    rounds: int = 15
    steps: int = 3
    """Steps of a turn."""
    iterations: int = 100_000
    """Iterations of the runs whose pages are written."""
    runs: int = 10
    """Runs in one page."""
    flags: str = "--preset tiny --vocab-size 257 --global-batch-size 8 --micro-batch-size 4"
    """Model whose steps are measured."""


class Steps:
    """Steps of one engine on random tokens."""

    def __init__(self, flags: str) -> None:
        config, layout = resolve(parse([*flags.split(), "--mock-data"]), 1, 0, declare)
        self.engine = Engine(config, Mesh.build(layout, 0, torch.device("cpu")))
        self.statistics, self.done = LayerStatistics(self.engine), 0
        size, number = config.training.micro_batch_size, config.micro_batches(1)
        tokens = torch.randint(0, config.model.vocab_size, (number, size, config.model.seq_length + 1))
        self.batches = [
            MicroBatch(each[:, :-1], each[:, 1:], torch.ones(size, config.model.seq_length), tuple(range(size)))
            for each in tokens
        ]

    def run(self, number: int, observed: bool = False) -> None:
        for _ in range(number):
            self.done += 1
            if observed:
                self.statistics.begin()
            result = self.engine.train_step(self.done, self.batches)
            if observed:
                self.statistics.end(result.grad_norm)


def compared(turns: dict[str, Callable[[], None]], rounds: int) -> str:
    """Return the ratio of the median CPU times of two kinds of turns, the second over the first, and its interval."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    for turn in range(rounds):
        for name, run in list(turns.items())[:: 1 if turn % 2 else -1]:
            start = time.process_time()
            run()
            found[name].append(time.process_time() - start)
    first, second = found.values()
    low, high = ratio_interval(first, second)
    return f"{statistics.median(second) / statistics.median(first):.3f} [{low:.3f}, {high:.3f}]"


def write_run(folder: Path, iterations: int, seed: int) -> None:
    """Write the metrics of a run: statistics every 100 iterations, an evaluation every 1,000."""
    folder.mkdir()
    draw = random.Random(seed)
    with (folder / "metrics.jsonl").open("w") as file:
        for i in range(1, iterations + 1):
            record: dict[str, Any] = {"iteration": i, "consumed_samples": 256 * i, "consumed_tokens": 262144 * i}
            record |= {"loss": 3 + 8 / i**0.3 + draw.gauss(0, 0.03), "grad_norm": 1 + draw.random(), "lr": 3e-4}
            record |= {"loss_scale": 1.0, "skipped": False, "step_seconds": 1 + 0.1 * draw.random(), "at": 1e9 + i}
            record |= {"tokens_per_second": 250_000.0 * draw.random(), "tflops_per_device": 300.0 * draw.random()}
            record |= {"memory_bytes": {"parameters": 10**9, "peak": 9 * 10**9}, "traffic_bytes": {"dp": 10**9}}
            if i % 100 == 0:
                record |= {key: {layer: draw.random() for layer in LAYERS} for key in KEYS}
            if i % 1000 == 0:
                record["validation_loss"] = record["loss"] + 0.05
            file.write(json.dumps(record) + "\n")


def cost(imports: str, call: str) -> tuple[float, float]:
    """Run a call in a process of its own; return its CPU seconds, and the most MB of memory that it held."""
    code = MEASURED.format(imports=imports, call=call)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    seconds, peak = done.stdout.split()
    return float(seconds), int(peak) / 1000


def next_to_page(steps: Steps, number: int, folder: Path) -> None:
    """Run steps while a process writes the page, which takes longer."""
    process = subprocess.Popen([sys.executable, "-m", "megazero.observe.report.live", str(folder)], cwd=ROOT)
    try:
        steps.run(number)
    finally:
        process.kill()
        process.wait()


def main(o: Options) -> None:
    torch.set_num_threads(1)
    steps = Steps(o.flags)
    steps.run(2)
    steps.run(1, observed=True)
    turns: dict[str, Callable[[], None]] = {"without": lambda: steps.run(o.steps)}
    ratio = compared(turns | {"with": lambda: steps.run(o.steps, True)}, o.rounds)
    print(f"a step with statistics over one without: {ratio}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / f"run{number}" for number in range(o.runs)]
        write_run(folders[0], o.iterations, 0)
        ratio = compared(turns | {"next": lambda: next_to_page(steps, o.steps, folders[0])}, o.rounds)
        print(f"a step next to the process that writes the page over one alone: {ratio}", flush=True)
        here = "from megazero.observe.report"
        seconds, memory = cost(f"{here}.page import write_report", f"write_report(Path('{folders[0]}'))")
        size = (folders[0] / "report.html").stat().st_size
        print(
            f"page of {o.iterations:,} iterations: {seconds:.1f} s, {memory:.0f} MB, page {size / 1e6:.2f} MB",
            flush=True,
        )
        for number, folder in enumerate(folders[1:], 1):
            write_run(folder, o.iterations, number)
        names, out = [str(folder) for folder in folders], Path(place) / "comparison.html"
        call = f"Path('{out}').write_text(comparison([Path(name) for name in {names}]))"
        seconds, memory = cost(f"{here}.comparison import comparison", call)
        size = out.stat().st_size
        print(f"page of {o.runs} of them: {seconds:.1f} s, {memory:.0f} MB, page {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main(tyro.cli(Options))
