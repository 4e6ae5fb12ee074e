"""Table 3's configurations C1 to C5: what each saves, and the largest model of each on 400 GPUs (Figure 6)."""

from __future__ import annotations

import shlex
from typing import Any

from benchmarks.reports.blocks import gb, markdown, percent
from benchmarks.reports.pictures import bars, stacks
from benchmarks.reports.rehearsals import Asked, flags_of, rehearse_all, resolved, states
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
# What a system of 2020 has, and ours need not: attention weights in memory, dropout, DeepSpeed's buckets, and in Pos a
# whole gradient.
THEN = {
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "reduce_bucket_size": 500_000_000,
    "whole_gradients": True,
}
NOW = {"reduce_bucket_size": 40_000_000}
KINDS = ("parameters", "optimizer", "gradients", "activation_checkpoints", "buffers", "logits")
FIT = (3, 9)  # layers, from which memory is known as a line


def asked(number: int, layers: int, hidden: int, heads: int, batch: int = 16, **options: Any) -> Asked:
    """Configuration C`number` of the presets, at a size of the paper."""
    preset = preset_args(PRESETS / f"c{number}.toml")
    given = {"tensor_model_parallel_size": MP, "micro_batch_size": batch, "global_batch_size": batch * GPUS // MP}
    options = dict(options)
    if options.pop("whole_gradients", False) and number < 3:
        given["global_batch_size"] *= 2  # two micro-batches: stage 1 then holds a whole gradient, as the paper's does
    return Asked(GPUS, f"{shlex.join(preset)} {flags_of(layers, hidden, heads, **given, **NOW | options)}")


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
    parts = {kind.replace("_", " "): [each.memory[kind] / 1e9 for each in first] for kind in KINDS}
    inside = [max(0.0, each.allocated / 1e9 - sum(each.memory[kind] for kind in KINDS) / 1e9) for each in first]
    parts["inside the block that is computed"] = inside
    stacks("paper-c1-c5.svg", [f"C{number}" for number in NAMES], parts, "GB on a GPU, 40B", LIMIT / 1e9)
    return {"what each configuration saves": "\n\n".join(tables)}


def largest() -> dict[str, str]:
    """Figure 6: the most layers that fit, in memory that a rehearsal shows to be a line in the number of layers."""
    cases = [(number, era) for number in NAMES for era in ("now", "then")]

    def sized(number: int, era: str, layers: int) -> Asked:
        (_, hidden, heads), _ = PAPER[number]
        return asked(number, layers, hidden, heads, **(THEN if era == "then" else {}))

    small = [(case, layers) for case in cases for layers in FIT]
    measured = dict(zip(small, rehearse_all([sized(*case, layers) for case, layers in small]), strict=True))
    most = {}
    for case in cases:
        low, high = (measured[case, layers].allocated for layers in FIT)
        slope = (high - low) / (FIT[1] - FIT[0])
        most[case] = int((LIMIT - low) / slope) + FIT[0]
    ours = {number: sized(number, "now", most[number, "now"]) for number in NAMES}
    fills = dict(zip(ours, rehearse_all(list(ours.values())), strict=True))
    papers = {number: sized(number, "then", PAPER[number][0][0]) for number in NAMES}
    of_paper = dict(zip(papers, rehearse_all(list(papers.values())), strict=True))
    rows, terms = [], []
    sizes: dict[str, list[float]] = {"now": [], "then": []}
    for number, name in NAMES.items():
        (layers, hidden, _), printed = PAPER[number]
        theirs, each = size(papers[number]), of_paper[number]
        assert 0.97 * LIMIT < fills[number].allocated <= LIMIT, (number, fills[number].allocated)
        low, high = (measured[(number, "then"), at].allocated for at in FIT)
        line = low + (layers - FIT[0]) * (high - low) / (FIT[1] - FIT[0])
        assert abs(each.allocated / line - 1) < 0.01, (number, each.allocated, line)
        row: list[object] = [f"C{number} {name}", f"{printed}: {layers} x {hidden}"]
        for era in ("then", "now"):
            total = size(sized(number, era, most[number, era]))
            sizes[era].append(total / 1e9)
            row.append(f"{total / 1e9:.0f}B, {most[number, era]} layers: {percent(total, theirs)}")
        rows.append(row)
        kept = each.memory["activation_checkpoints"]
        held = states(each.memory) + each.memory["parameters"] * (number < 3)  # a gradient is as large as the weights
        rest = each.allocated - held - kept
        terms.append([f"C{number}", *map(gb, (held, kept, held + kept, rest, each.allocated, LIMIT - each.allocated))])
    names = [f"C{number}" for number in NAMES]
    paper = [float(printed.rstrip("B")) for _, printed in PAPER.values()]
    series = {"the paper's": paper, "ours, as of 2020": sizes["then"], "ours": sizes["now"]}
    bars("paper-figure-6.svg", names, series, "largest model, 1e9 parameters")
    columns = ["", "the paper's", "ours as of 2020, deviation", "ours, deviation"]
    more = ["the paper's model", "states", "checkpoints", "both", "the rest, as of 2020", "in all", "left of 32"]
    return {"figure 6": markdown(columns, rows), "figure 6, terms": markdown(more, terms)}
