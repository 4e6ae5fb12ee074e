"""Table 3's configurations C1 to C5: the savings and the largest model of each on 400 GPUs (Figure 6)."""

import functools
import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from benchmarks.reports.blocks import gb, markdown, percent
from benchmarks.reports.pictures import bars, stacks
from benchmarks.reports.published import CONFIGURATIONS, FIGURE_6, FIGURE_7
from benchmarks.reports.rehearsals import Asked, flags_of, rehearse_all, resolved
from benchmarks.reports.zero_theory import bytes_per_parameter
from megazero.engine.model.stage import declare
from megazero.flags.presets import PRESETS
from megazero.planner.bytes.estimate import stage_bytes
from megazero.planner.parameter_counts import num_parameters
from megazero.planner.time.devices import load_device

GPUS, MP, LIMIT = 400, 16, 32e9
# Terms of a system of 2020 that ours has not, or has smaller.
REST_BYTES = 3e9  # CUDA context, NCCL, the allocator's caching: mean of the bytes that C1, C3, C4 and C5 leave
BUCKET = 40_000_000  # elements, of ours
BUCKET_BYTES = 2 * 2 * 500_000_000  # DeepSpeed's default: two buckets of 5e8 elements in 16 bit
KINDS = ("parameters", "optimizer", "gradients", "activation_checkpoints", "buffers", "logits")
FIT = (3, 9)  # layers, from which memory is known as a line


def asked(number: int, layers: int, hidden: int, heads: int, batch: int = 16, **options: Any) -> Asked:
    """Configuration C`number` of the presets, at a size of the paper."""
    given = {"tensor_model_parallel_size": MP, "micro_batch_size": batch, "global_batch_size": batch * GPUS // MP}
    given["reduce_bucket_size"] = BUCKET
    return Asked(GPUS, f"--preset {PRESETS / f'c{number}.toml'} {flags_of(layers, hidden, heads, **given | options)}")


def size(each: Asked) -> int:
    return num_parameters(declare(resolved(each)[0].model))


def savings() -> dict[str, str]:
    """List bytes that each configuration holds, of the paper's 40B and 100B models (Figure 7's)."""
    tables = []
    models = {
        f"{run.model}, batch {run.micro_batch}": (run.layers, run.hidden, run.heads, run.micro_batch)
        for run in FIGURE_7
    }
    cases = [(title, number) for title in models for number in CONFIGURATIONS]
    found = dict(zip(cases, rehearse_all([asked(number, *models[title]) for title, number in cases]), strict=True))
    for title in models:
        rows = []
        for number, name in CONFIGURATIONS.items():
            each = found[title, number]
            cells = [gb(each.memory[kind]) for kind in KINDS]
            host = gb(each.memory["host"])
            rows.append([f"C{number} {name}", *cells, gb(each.allocated), host, gb(each.traffic["tp"])])
        columns = [title, *(kind.replace("_", " ") for kind in KINDS), "all tensors at once", "host", "tp traffic"]
        tables.append(markdown(columns, rows))
    first = [found["40B, batch 16", number] for number in CONFIGURATIONS]
    shown = KINDS[:4]  # buffers count the arena of checkpoints until it is filled
    parts = {kind.replace("_", " "): [each.memory[kind] / 1e9 for each in first] for kind in shown}
    known = [sum(each.memory[kind] for kind in shown) for each in first]
    parts["buffers, logits, inside a block"] = [
        (each.allocated - held) / 1e9 for each, held in zip(first, known, strict=True)
    ]
    stacks("paper-c1-c5.svg", [f"C{number}" for number in CONFIGURATIONS], parts, "GB on a GPU, 40B", LIMIT / 1e9)
    return {"savings of each configuration": "\n\n".join(tables)}


def sized(number: int, layers: int) -> Asked:
    """Configuration C`number` of Figure 6, with other layers."""
    run = FIGURE_6[number]
    return asked(number, layers, run.hidden, run.heads)


@functools.cache
def _line() -> dict[tuple[int, int], int]:
    """Rehearse bytes of a rank by configuration and layers, at both of FIT."""
    small = [(number, layers) for number in CONFIGURATIONS for layers in FIT]
    return dict(zip(small, (each.allocated for each in rehearse_all([sized(*each) for each in small])), strict=True))


def largest() -> dict[str, str]:
    """Find Figure 6: the most layers that fit, in memory that is a line in the number of layers."""
    line, most = _line(), {}
    for number in CONFIGURATIONS:
        low, high = (line[number, layers] for layers in FIT)
        most[number] = int((LIMIT - low) / (high - low) * (FIT[1] - FIT[0])) + FIT[0]
    fills = dict(
        zip(CONFIGURATIONS, rehearse_all([sized(number, most[number]) for number in CONFIGURATIONS]), strict=True)
    )
    rows, sizes = [], []
    for number, name in CONFIGURATIONS.items():
        run = FIGURE_6[number]
        held = fills[number].allocated
        assert 0.98 * LIMIT < held <= LIMIT, (number, held)
        total, theirs = size(sized(number, most[number])), size(sized(number, run.layers))
        sizes.append(total / 1e9)
        ours = f"{total / 1e9:.0f}B: {most[number]} x {run.hidden}"
        model = f"{run.model}: {run.layers} x {run.hidden} = {theirs / 1e9:.1f}B"
        rows.append([f"C{number} {name}", model, ours, gb(held), percent(total, theirs)])
    names, paper = (
        [f"C{number}" for number in CONFIGURATIONS],
        [float(run.model.rstrip("B")) for run in FIGURE_6.values()],
    )
    bars("paper-figure-6.svg", names, {"the paper's": paper, "ours": sizes}, "largest model, 1e9 parameters")
    columns = ["", "the paper's", "ours", "all tensors at once, GB", "deviation"]
    return {"figure 6": markdown(columns, rows)}


def steps() -> dict[str, str]:
    """Tabulate the way from our largest models to the paper's, a term of the paper's system added in each column."""
    line, rows, titles = _line(), [], list[str]()
    for number in CONFIGURATIONS:
        low, high = (line[number, layers] for layers in FIT)
        extra = our_terms_to_the_papers(number)
        titles = list(extra)
        row: list[object] = [f"C{number}"]
        for count in range(len(extra) + 1):
            added = list(extra.values())[:count]

            def held(layers: int, added=added, low=low, high=high) -> float:
                return low + (high - low) / (FIT[1] - FIT[0]) * (layers - FIT[0]) + sum(f(layers) for f in added)

            most = bisect_right(range(500), LIMIT, key=held) - 1
            total = _parameters(number, most)
            row.append(f"{total / 1e9:.0f}B")
        run = FIGURE_6[number]
        rows.append([*row, run.model, percent(total, _parameters(number, run.layers))])
    columns = ["", "ours", *(f"+ {title}" for title in titles), "the paper's", "not explained"]
    return {"figure 6, steps": markdown(columns, rows)}


def our_terms_to_the_papers(number: int) -> dict[str, Callable[[int], float]]:
    """Return the bytes that a system of 2020 holds besides ours, by name, as functions of the number of layers."""
    run = FIGURE_6[number]
    config, layout = resolved(asked(number, run.layers, run.hidden, run.heads))
    ours = stage_bytes(config, layout, 0, "cuda").activations
    libraries = load_device("v100-32gb").reserved_bytes(layout)
    *_, block, logits, buckets = paper_terms(number, run.layers)
    nd = GPUS // MP

    def gradient(layers: int) -> float:
        return (2 - 2 / nd) * _parameters(number, layers) / MP if number < 3 else 0.0

    return {
        f"CUDA context, cuBLAS, NCCL: {libraries / 1e9:.1f} GB": lambda _: libraries,
        "two buckets of 5e8": lambda _: buckets - 2 * 2 * BUCKET,
        "attention weights, dropout masks": lambda _: block - ours,
        "fp32 logits, their gradient": lambda _: logits,
        "a whole gradient in Pos": gradient,
    }


@functools.cache
def _parameters(number: int, layers: int) -> int:
    run = FIGURE_6[number]
    return size(asked(number, layers, run.hidden, run.heads))


def terms() -> dict[str, str]:
    """Add up the bytes of the paper's largest models in a system of 2020, and find the largest by those terms."""
    rows = []
    for number in CONFIGURATIONS:
        run = FIGURE_6[number]
        layers = run.layers
        parts = paper_terms(number, layers)
        slope = sum(paper_terms(number, layers + 1)) - sum(parts)  # all terms are lines in the number of layers
        fit = layers + math.floor((LIMIT - REST_BYTES - sum(parts)) / slope)
        total, theirs = (_parameters(number, each) for each in (fit, layers))
        found = [f"{total / 1e9:.0f}B, {fit} layers", percent(total, theirs)]
        rows.append([f"C{number}, {run.model}", *map(gb, parts), gb(sum(parts)), gb(LIMIT - sum(parts)), *found])
    columns = ["the paper's model", "states", "checkpoints", "a block", "logits", "buckets", "in all", "left of 32"]
    return {"figure 6, terms": markdown([*columns, "the largest by these terms and 3 GB", "deviation"], rows)}


def paper_terms(number: int, layers: int) -> list[float]:
    """Return bytes of a model of the paper in a system of 2020, by formulas alone.

    States (Pos holds a whole gradient), checkpoints, the activations of a block as Korthikanti 2022 counts them (with
    attention weights and dropout masks), logits and their gradient in fp32, buckets.
    """
    h, a = FIGURE_6[number].hidden, FIGURE_6[number].heads
    psi, b, s, nd = _parameters(number, layers), 16, 1024, GPUS // MP
    stage = 1 if number < 3 else 2
    kept = 2 * b * s * h * layers / {1: 1, 2: MP, 3: 1, 4: MP, 5: float("inf")}[number]
    block = s * b * h * (10 + 24 / MP + 5 * a * s / (h * MP))
    return [psi / MP * bytes_per_parameter(stage, nd), kept, block, 2 * 4 * b * s * 50257 / MP, BUCKET_BYTES]
