"""Configurations C1 to C5 really trained, at a small size on four gloo ranks: three witnesses of a rank's bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.reports.blocks import markdown
from benchmarks.reports.published import CONFIGURATIONS
from benchmarks.table3 import RANKS, make_corpus, measure
from megazero.config.cli import parse
from megazero.plan.resolve import resolve
from megazero.train.rehearsal import Place, rehearse

KINDS = ("parameters", "optimizer", "gradients", "activation_checkpoints", "buffers", "logits", "peak", "host")


def small() -> dict[str, str]:
    """Bytes of rank 0 in the last of three iterations, measured; the estimate and the rehearsal must be equal."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = make_corpus(folder)
        for number, what in CONFIGURATIONS.items():
            memory, traffic = measure(number, corpus, folder)
            config, layout = resolve(parse(["--preset", f"c{number}", "--vocab-size", "257"]), RANKS, 257)
            found = rehearse(config, layout, 0, Place.of("cpu"), steps=1, saves=False)
            for witness, ours, sent in (
                ("trained", memory, traffic),
                ("rehearsed", found.memory, found.traffic),
                ("estimated", found.estimated_memory, found.estimated_traffic),
            ):
                cells = [f"{ours[kind]:,}" for kind in KINDS] + [f"{sent[kind]:,}" for kind in ("tp", "dp")]
                rows.append([f"C{number} {what}" if witness == "trained" else "", witness, *cells])
            assert memory == found.memory == found.estimated_memory, number
            assert traffic == found.traffic == found.estimated_traffic, number
    columns = ["", "", *(kind.replace("_", " ") for kind in KINDS), "tp traffic", "dp traffic"]
    return {"C1 to C5, trained": markdown(columns, rows)}
