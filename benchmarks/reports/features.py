"""Table 3's configurations C1 to C5: what each saves, and the largest model of each on 400 GPUs (Figure 6)."""

from __future__ import annotations

import math
import shlex
from typing import Any

from benchmarks.reports.blocks import gb, markdown, percent
from benchmarks.reports.pictures import bars, stacks
from benchmarks.reports.rehearsals import Asked, flags_of, rehearse_all, resolved
from benchmarks.reports.zero_theory import bytes_per_parameter
from megazero.config.cli import PRESETS, preset_args
from megazero.plan.parameters import num_parameters

GPUS, MP, LIMIT = 400, 16, 32e9
NAMES = {1: "Pos", 2: "Pos, Pa", 3: "Pos+g", 4: "Pos+g, Pa", 5: "Pos+g, Pa+cpu"}  # all with CB and MD
# configuration -> (layers, hidden size, heads) of the paper's largest model, and its size as the paper has it
PAPER = {
    1: ((50, 8192, 32), "40B"),
    2: ((132, 6144, 64), "60B"),
    3: ((62, 8192, 32), "50B"),
    4: ((175, 8192, 64), "140B"),
    5: ((187, 8192, 64), "150B"),
}
# Terms of a system of 2020 that ours has not, or has smaller.
REST_BYTES = 3e9  # CUDA context, NCCL, the allocator's caching: what C1, C3, C4 and C5 have left on the mean
BUCKET_BYTES = 2 * 2 * 500_000_000  # DeepSpeed's default: two buckets of 5e8 elements in 16 bit
KINDS = ("parameters", "optimizer", "gradients", "activation_checkpoints", "buffers", "logits")
FIT = (3, 9)  # layers, from which memory is known as a line


def asked(number: int, layers: int, hidden: int, heads: int, batch: int = 16, **options: Any) -> Asked:
    """Configuration C`number` of the presets, at a size of the paper."""
    preset = preset_args(PRESETS / f"c{number}.toml")
    given = {"tensor_model_parallel_size": MP, "micro_batch_size": batch, "global_batch_size": batch * GPUS // MP}
    given["reduce_bucket_size"] = 40_000_000
    return Asked(GPUS, f"{shlex.join(preset)} {flags_of(layers, hidden, heads, **given | options)}")


def size(each: Asked) -> int:
    return num_parameters(resolved(each)[0].model)


def savings() -> dict[str, str]:
    """List bytes that each configuration holds, of the paper's 40B and 100B models (Figure 7's)."""
    tables = []
    models = {"40B, batch 16": (50, 8192, 32, 16), "100B, batch 32": (125, 8192, 64, 32)}
    cases = [(title, number) for title in models for number in NAMES]
    found = dict(zip(cases, rehearse_all([asked(number, *models[title]) for title, number in cases]), strict=True))
    for title in models:
        rows = []
        for number, name in NAMES.items():
            each = found[title, number]
            cells = [gb(each.memory[kind]) for kind in KINDS]
            host = gb(each.memory["host"])
            rows.append([f"C{number} {name}", *cells, gb(each.allocated), host, gb(each.traffic["tp"])])
        columns = [title, *(kind.replace("_", " ") for kind in KINDS), "all tensors at once", "host", "tp traffic"]
        tables.append(markdown(columns, rows))
    first = [found["40B, batch 16", number] for number in NAMES]
    shown = KINDS[:4]  # buffers count the arena of checkpoints until it is filled
    parts = {kind.replace("_", " "): [each.memory[kind] / 1e9 for each in first] for kind in shown}
    known = [sum(each.memory[kind] for kind in shown) for each in first]
    parts["buffers, logits, inside a block"] = [
        (each.allocated - held) / 1e9 for each, held in zip(first, known, strict=True)
    ]
    stacks("paper-c1-c5.svg", [f"C{number}" for number in NAMES], parts, "GB on a GPU, 40B", LIMIT / 1e9)
    return {"what each configuration saves": "\n\n".join(tables)}


def largest() -> dict[str, str]:
    """Find Figure 6: the most layers that fit, in memory that is a line in the number of layers."""
    small = [(number, layers) for number in NAMES for layers in FIT]

    def sized(number: int, layers: int) -> Asked:
        (_, hidden, heads), _ = PAPER[number]
        return asked(number, layers, hidden, heads)

    line = dict(zip(small, (each.allocated for each in rehearse_all([sized(*each) for each in small])), strict=True))
    most = {}
    for number in NAMES:
        low, high = (line[number, layers] for layers in FIT)
        most[number] = int((LIMIT - low) / (high - low) * (FIT[1] - FIT[0])) + FIT[0]
    fills = dict(zip(NAMES, rehearse_all([sized(number, most[number]) for number in NAMES]), strict=True))
    rows, sizes = [], []
    for number, name in NAMES.items():
        (layers, hidden, _), printed = PAPER[number]
        held = fills[number].allocated
        assert 0.98 * LIMIT < held <= LIMIT, (number, held)
        total, theirs = size(sized(number, most[number])), size(sized(number, layers))
        sizes.append(total / 1e9)
        ours = f"{total / 1e9:.0f}B: {most[number]} x {hidden}"
        model = f"{printed}: {layers} x {hidden} = {theirs / 1e9:.1f}B"
        rows.append([f"C{number} {name}", model, ours, gb(held), percent(total, theirs)])
    names, paper = [f"C{number}" for number in NAMES], [float(printed.rstrip("B")) for _, printed in PAPER.values()]
    bars("paper-figure-6.svg", names, {"the paper's": paper, "ours": sizes}, "largest model, 1e9 parameters")
    columns = ["", "the paper's", "ours", "all tensors at once, GB", "deviation"]
    return {"figure 6": markdown(columns, rows)}


def terms() -> dict[str, str]:
    """Add up the bytes of the paper's largest models in a system of 2020, and find the largest by those terms."""
    rows = []
    for number in NAMES:
        (layers, *_), printed = PAPER[number]
        parts = paper_terms(number, layers)
        slope = sum(paper_terms(number, layers + 1)) - sum(parts)  # all terms are lines in the number of layers
        fit = layers + math.floor((LIMIT - REST_BYTES - sum(parts)) / slope)
        (_, hidden, heads), _ = PAPER[number]
        total, theirs = (size(asked(number, each, hidden, heads)) for each in (fit, layers))
        found = [f"{total / 1e9:.0f}B, {fit} layers", percent(total, theirs)]
        rows.append([f"C{number}, {printed}", *map(gb, parts), gb(sum(parts)), gb(LIMIT - sum(parts)), *found])
    columns = ["the paper's model", "states", "checkpoints", "a block", "logits", "buckets", "in all", "left of 32"]
    return {"figure 6, terms": markdown([*columns, "the largest by these terms and 3 GB", "deviation"], rows)}


def paper_terms(number: int, layers: int) -> list[float]:
    """Return bytes of a model of the paper in a system of 2020, by formulas alone.

    States (Pos holds a whole gradient), checkpoints, the activations of a block as Korthikanti 2022 counts them (with
    attention weights and dropout masks), logits and their gradient in fp32, buckets.
    """
    (_, h, a), _ = PAPER[number]
    psi, b, s, nd = size(asked(number, layers, h, a)), 16, 1024, GPUS // MP
    stage = 1 if number < 3 else 2
    kept = 2 * b * s * h * layers / {1: 1, 2: MP, 3: 1, 4: MP, 5: float("inf")}[number]
    block = s * b * h * (10 + 24 / MP + 5 * a * s / (h * MP))
    return [psi / MP * bytes_per_parameter(stage, nd), kept, block, 2 * 4 * b * s * 50257 / MP, BUCKET_BYTES]
