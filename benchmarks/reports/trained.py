"""Small runs on two and four gloo ranks, C1 to C5 among them: three witnesses of a rank's bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.reports.blocks import markdown
from benchmarks.reports.published import CONFIGURATIONS
from benchmarks.table3 import RANKS, make_corpus, measure
from megazero.config.cli import parse
from megazero.model.stage import declare
from megazero.plan.layout.resolve import resolve
from megazero.rehearse.rehearsal import RehearsalDevice, rehearse

KINDS = ("parameters", "optimizer", "gradients", "activation_checkpoints", "buffers", "logits", "peak", "host")
SENT = ("tp", "dp", "pp")


# runs of two ranks: flags beside TWO's
TWO = "--preset tiny --micro-batch-size 4 --global-batch-size 16"
TWO_RANKS = {
    "dp 2, ZeRO 0": "--zero-stage 0",
    "dp 2, ZeRO 1": "--zero-stage 1",
    "dp 2, ZeRO 2": "--zero-stage 2",
    "dp 2, ZeRO 3, recompute": "--zero-stage 3 --recompute full",
    "tp 2, Pa": "--tensor-model-parallel-size 2 --recompute full --partition-activations",
    "pp 2": "--pipeline-model-parallel-size 2",
}


def small() -> dict[str, str]:
    """Bytes of C1 to C5 on four ranks."""
    cases = {f"C{number} {what}": ["--preset", f"c{number}"] for number, what in CONFIGURATIONS.items()}
    return {"C1 to C5, trained": witnesses(cases, RANKS)}


def two_ranks() -> dict[str, str]:
    """Bytes of stages and axes on two ranks."""
    cases = {name: [*TWO.split(), *flags.split()] for name, flags in TWO_RANKS.items()}
    return {"two ranks": witnesses(cases, 2)}


def witnesses(cases: dict[str, list[str]], ranks: int) -> str:
    """Tabulate rank 0 in the last of three iterations: trained, rehearsed, estimated. The three must be equal."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = make_corpus(folder)
        for title, flags in cases.items():
            memory, traffic = measure(flags, ranks, corpus, folder / title)
            config, layout = resolve(parse([*flags, "--vocab-size", "257"]), ranks, 257, declare)
            found = rehearse(config, layout, 0, RehearsalDevice.of("cpu"), steps=1, saves=False)
            for witness, ours, sent in (
                ("trained", memory, traffic),
                ("rehearsed", found.memory, found.traffic),
                ("estimated", found.estimated_memory, found.estimated_traffic),
            ):
                cells = [f"{ours[kind]:,}" for kind in KINDS] + [f"{sent[kind]:,}" for kind in SENT]
                rows.append([title if witness == "trained" else "", witness, *cells])
            assert memory == found.memory == found.estimated_memory, title
            assert traffic == found.traffic == found.estimated_traffic, title
    columns = ["", "", *(kind.replace("_", " ") for kind in KINDS), *(f"{kind} traffic" for kind in SENT)]
    return markdown(columns, rows)
