#!/usr/bin/env python3
"""Time of every Triton kernel next to torch's operators, and bytes per second that it has to move.

The two take turns, each behind a pass over a buffer larger than the GPU's cache; medians. The first table shows
which kernels deserve their place in `engine.kernels.kernel_table.TRITON`: a ratio above 1, and most of the memory's
bandwidth.
Without a GPU it runs at a tiny size in Triton's interpreter, only to test the code. Example:

    python -m benchmarks.kernels --tokens 8192 --hidden 1600 --vocabulary 50257
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megazero.engine.kernels.dropout import Dropout, Rows
from megazero.engine.kernels.kernel_table import EAGER, TRITON, Kernels
from megazero.engine.kernels.rotary import Rotary
from megazero.engine.model.layers.context import DTYPES
from megazero.planner.time.devices import find_card


@dataclass(frozen=True)
class Options:
    """Triton kernels next to torch's operators."""

    tokens: int = 8192
    hidden: int = 4096
    ffn: int = 11008
    """Width of SwiGLU's product."""
    vocabulary: int = 50257
    precision: str = "bf16"
    rounds: int = 20
    """Calls that count, after three that do not."""


SLEEP = 2_000_000  # cycles: about a millisecond
TINY = Options(4, 32, 48, 67, "fp32", 2)


class Pass(NamedTuple):
    """A pass over memory, as either implementation makes it.

    Attributes:
        num_bytes: read and written by one kernel that reads and writes everything once.
        run: called with the implementation.
    """

    name: str
    num_bytes: int
    run: Callable[[Kernels], object]


def randn(o: Options, device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32, device=device).to(DTYPES[o.precision])


def of_tokens(o: Options, device: torch.device) -> list[Pass]:
    """Passes that depend on the tokens' positions or numbers."""
    dim = min(o.hidden // 2, 128)
    heads = tuple(randn(o, device, 1, o.tokens, n, dim) for n in (o.hidden // dim, 2, 2))
    turned = tuple(torch.empty_like(part) for part in heads)
    tables = Rotary(dim, 1e4).tables(o.tokens, DTYPES[o.precision], device)
    places = torch.arange(o.tokens, device=device) % o.vocabulary
    places[::20] = 1  # a twentieth of a text is one token
    table, mine = torch.zeros(o.vocabulary, o.hidden, device=device), places >= 0
    values = randn(o, device, o.tokens, o.hidden)
    moved = 2 * sum(part.nbytes for part in heads)
    return [
        Pass("rotary positions", moved, lambda k: k.rotary(heads, turned, tables, None, False)),
        Pass("rotary positions, backward", moved, lambda k: k.rotary(heads, turned, tables, None, True)),
        Pass(
            "token table's gradient",
            values.nbytes + 8 * values.numel(),
            lambda k: k.add_rows(table, places, mine, values),
        ),
    ]


def passes(o: Options, device: torch.device) -> list[Pass]:
    x, dy, residual = (randn(o, device, o.tokens, o.hidden) for _ in range(3))
    weight, bias = (randn(o, device, o.hidden) for _ in range(2))
    rows = tuple(Rows(i, 0, o.tokens // 4) for i in range(4))
    width = -(-o.vocabulary // 64) * 64
    logits = randn(o, device, o.tokens, width)
    labels = torch.arange(o.tokens, device=device) % o.vocabulary
    inner, dinner = randn(o, device, o.tokens, 2 * o.ffn), randn(o, device, o.tokens, o.ffn)
    _, mean, rstd = torch.native_layer_norm(x, (o.hidden,), weight, bias, 1e-5)
    numbers = torch.full((o.tokens,), 10.0, device=device)
    each, result = x.nbytes, dinner.nbytes

    def dropout(kernels: Kernels) -> Dropout:
        return Dropout(0.1, 1234, 0, "benchmark", kernels.dropout)

    def gelu_grad(kernels: Kernels) -> torch.Tensor:
        """Return the gradient of the bias before GELU, which is made of GELU's."""
        dx, summed = kernels.activations["gelu-tanh"].grad(dgelu, into_gelu)
        return dx.sum(0, dtype=torch.float32) if summed is None else summed

    into_gelu, dgelu = (randn(o, device, o.tokens, 4 * o.hidden) for _ in range(2))
    return [
        Pass("dropout + residual", 3 * each, lambda k: dropout(k).times(x, rows, dy)),
        Pass("dropout, backward", 2 * each, lambda k: dropout(k).times(dy, rows)),
        Pass("loss: sums", logits.nbytes, lambda k: k.loss.sums(logits, labels, o.vocabulary)),
        Pass(
            "loss: gradient",
            2 * logits.nbytes,
            lambda k: k.loss.grad_(logits, labels, o.vocabulary, numbers, numbers),
        ),
        Pass("RMSNorm", 2 * each, lambda k: k.rms_norm(x, weight, 1e-5)),
        Pass(
            "RMSNorm, backward + residual", 4 * each, lambda k: k.rms_norm_grad(dy, x, weight, rstd.float(), residual)
        ),
        Pass(
            "LayerNorm, backward + residual",
            4 * each,
            lambda k: k.layer_norm_grad(dy, x, weight, bias, mean, rstd, residual),
        ),
        Pass("SwiGLU", 3 * result, lambda k: k.activations["swiglu"].forward(inner)),
        Pass(
            "SwiGLU, backward", 5 * result, lambda k: k.activations["swiglu"].grad(dinner, inner)
        ),  # in place: other numbers later
        Pass("GELU, backward + bias", 12 * each, gelu_grad),  # in place too
        *of_tokens(o, device),
    ]


def seconds(
    run: Callable[[Kernels], object], kernels: Kernels, device: torch.device, flush: torch.Tensor | None
) -> float:
    """Return the time of a call; on a GPU, by its own clock, behind a pass over `flush`."""
    if flush is None:
        begin = time.perf_counter()
        run(kernels)
        return time.perf_counter() - begin
    torch.cuda._sleep(SLEEP)  # the device is busy while the host issues the launches of the call
    flush.zero_()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run(kernels)
    last.record()
    torch.cuda.synchronize(device)
    return first.elapsed_time(last) / 1e3


def main(o: Options) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    peak = None
    if on_gpu:
        card = find_card(torch.cuda.get_device_name(device))
        peak = None if card is None else card["memory.bandwidth"]
    else:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, at the first launch
        print("No GPU here: tiny sizes in Triton's interpreter, which try the code and say nothing of speed.\n")
        o = TINY
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=device) if on_gpu else None
    print(f"{o.tokens} tokens, hidden {o.hidden}, SwiGLU {o.ffn}, vocabulary {o.vocabulary}, {o.precision}\n")
    print("| pass | us, torch | us, Triton | torch / Triton | GB/s | of the memory's rate |")
    print("|---|---|---|---|---|---|", flush=True)
    for one in passes(o, device):
        found: dict[str, list[float]] = {"torch": [], "Triton": []}
        try:
            for n in range(o.rounds + 3):
                for name, kernels in (("torch", EAGER), ("Triton", TRITON)):
                    took = seconds(one.run, kernels, device, flush)
                    if n >= 3:
                        found[name].append(took)
        except Exception as error:  # no memory, no compiler, a kernel that Triton refuses: the others are worth a row
            print(f"| {one.name} | failed: {str(error).splitlines()[0][:120]} | | | | |", flush=True)
            continue
        theirs, ours = (statistics.median(found[name]) for name in ("torch", "Triton"))
        share = f"{one.num_bytes / ours / peak:.0%}" if peak else ""
        cells = [
            f"{1e6 * theirs:.0f}",
            f"{1e6 * ours:.0f}",
            f"{theirs / ours:.2f}",
            f"{one.num_bytes / ours / 1e9:.0f}",
        ]
        print(f"| {one.name} | {' | '.join(cells)} | {share} |", flush=True)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
