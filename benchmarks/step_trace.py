#!/usr/bin/env python3
"""A training step at several micro-batch sizes: does the GPU wait for its host, and how long is the end of the step.

Three measurements of each size, one after the other: steps as they are; one step under torch's profiler, for its
kernels; one step with CUDA events around every operation of the program, for the time after the last backward. Needs no
Nsight Systems. Prints a Markdown table. Without a GPU it runs at a tiny size, only to test the code.

    python -m benchmarks.step_trace --batches 4 8 32 --folder traces
"""

import gc
import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.autograd import DeviceType

from benchmarks import gpu
from megazero.engine.plan.program.operations import Backward, BackwardWeights, inner
from megazero.observe.timeline import Interval, Timeline

FLAT = 0.8  # of the time of twice the tokens: from there on the time hardly depends on the tokens


@dataclass(frozen=True)
class Options:
    """Time, kernels and end of a training step, by micro-batch size."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    seq_length: int = 1024
    vocabulary: int = 50257
    precision: str = "bf16"
    batches: tuple[int, ...] = (4, 8, 32)
    """Micro-batch sizes, in samples; a step has one micro-batch."""
    steps: int = 10
    """Steps that count, after three that do not."""
    folder: str = ""
    """Folder of the profiler's traces, for ui.perfetto.dev. Empty: none is written."""

    def of(self, batch: int) -> gpu.Options:
        """Return the options of `benchmarks.gpu` for a size."""
        sizes = self.layers, self.hidden, self.heads, self.seq_length, self.vocabulary
        return gpu.Options(*sizes, batch, self.precision, steps=self.steps)


class Measured(NamedTuple):
    """A size's results. `kernels` and `busy` are 0 where the profiler sees no GPU.

    Attributes:
        step: seconds of a step, median.
        kernels: of a step; copies count.
        busy: seconds in which a kernel or a copy runs.
        tail: seconds of the device from the end of the last backward to the end of the step's last operation.
        parts: kind of an operation -> seconds of it in the tail.
    """

    step: float
    kernels: int
    busy: float
    tail: float
    parts: dict[str, float]


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (begin, end)."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def tail_of(spans: Sequence[Interval]) -> tuple[float, dict[str, float]]:
    """Return the seconds from the end of the last backward to the last end of all, and its parts by operation."""
    last = max(span.end for span in spans if isinstance(span.op, (Backward, BackwardWeights)))
    parts = Counter[str]()
    for op, begin, end in spans:
        if end > last:
            parts[type(inner(op)).__name__] += (end - max(begin, last)) / 1e9
    return (max(span.end for span in spans) - last) / 1e9, dict(parts)


def measure(o: Options, batch: int, device: torch.device) -> Measured:
    options = o.of(batch)
    own = gpu.Own(options, device)
    seconds, _ = gpu.timed(own.step, options, device, on_device=False)
    inputs = gpu.work_of(options).inputs(0, 0, torch.device("cpu"))
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiler:
        own.step(*inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    if o.folder:
        Path(o.folder).mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(Path(o.folder) / f"micro-batch-{batch}.json"))
    on_gpu = [e.time_range for e in profiler.events() or () if e.device_type == DeviceType.CUDA]
    busy = covered([(each.start / 1e6, each.end / 1e6) for each in on_gpu])
    recorded = own.engine.interpreter.observe = Timeline(device)
    own.step(*inputs)
    recorded.close()
    tail, parts = tail_of(recorded.computed())
    return Measured(statistics.median(seconds), len(on_gpu), busy, tail, parts)


def row(batch: int, o: Options, found: Measured) -> str:
    """Write a size's row of the table."""
    parts = ", ".join(f"{name} {1e3 * part:.2f}" for name, part in found.parts.items() if part > 0)
    cells = [str(batch), f"{1e3 * found.step:.2f}", f"{batch * o.seq_length / found.step:,.0f}"]
    cells += [str(found.kernels), f"{found.busy / found.step:.0%}"] if found.kernels else ["", ""]
    return f"| {' | '.join([*cells, f'{1e3 * found.tail:.2f}', parts])} |"


def comparison(smaller: tuple[int, float], larger: tuple[int, float]) -> str:
    """Compare the steps, in seconds, of two sizes."""
    tokens, time = smaller[0] / larger[0], smaller[1] / larger[1]
    # Of time that grew with the tokens alone this would be 0; of time that does not depend on them, 1.
    flat = (time - tokens) / (1 - tokens)
    limit = "flat, the host is the limit" if flat > FLAT else "not flat"
    return (
        f"Micro-batch {smaller[0]} takes {time:.2f} of the time of {larger[0]} for {tokens:.2f} of its tokens: {limit}."
    )


def main(o: Options) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if not on_gpu:
        print("No GPU here: a tiny model, which tries the code and says nothing of speed.\n")
        o = replace(Options(2, 64, 4, 32, 311, "fp32", (1, 2), steps=3), folder=o.folder)
    print(f"{o.layers} layers, hidden {o.hidden}, sequence {o.seq_length}, vocabulary {o.vocabulary}, {o.precision}\n")
    print("| micro-batch | ms a step | tokens/s | kernels | kernels run | tail, ms | of it, ms |")
    print("|---|---|---|---|---|---|---|", flush=True)
    steps: dict[int, float] = {}
    for batch in o.batches:
        try:
            found = measure(o, batch, device)
        except torch.OutOfMemoryError as error:  # the other sizes are still worth a row
            print(f"| {batch} | failed: {str(error).splitlines()[0][:120]} | | | | | |", flush=True)
        else:
            steps[batch] = found.step
            print(row(batch, o, found), flush=True)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    print(
        "\nkernels: a step under torch's profiler. tail: after the last backward, by CUDA events (not Nsight Systems)."
    )
    for smaller, larger in itertools.pairwise(steps.items()):
        print(comparison(smaller, larger))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
