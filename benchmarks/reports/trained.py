"""Small runs on two and four gloo ranks, C1 to C5 among them: three witnesses of a rank's bytes."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.reports.blocks import markdown
from benchmarks.reports.published import CONFIGURATIONS
from megazero.command.rehearsal.rehearsal import RehearsalDevice, rehearse_rank
from megazero.engine.model.stage import declare
from megazero.flags.cli import parse
from megazero.flags.resolve import resolve
from megazero.planner.bytes.estimate import estimate

KINDS = ("parameters", "optimizer", "gradients", "activation_checkpoints", "buffers", "logits", "peak", "host")
SENT = ("tp", "dp", "pp")
ROOT = Path(__file__).resolve().parents[2]
RANKS, ITERATIONS = 4, 3  # C1 to C5: tensor parallelism of 2, data parallelism of 2


# runs of two ranks: flags added to TWO
TWO = "--preset tiny --micro-batch-size 4 --global-batch-size 16"
TWO_RANKS = {
    "dp 2, ZeRO 0": "--zero-stage 0",
    "dp 2, ZeRO 1": "--zero-stage 1",
    "dp 2, ZeRO 2": "--zero-stage 2",
    "dp 2, ZeRO 3, recompute": "--zero-stage 3 --recompute full",
    "tp 2, Pa": "--tensor-model-parallel-size 2 --recompute full --partition-activations",
    "pp 2": "--pipeline-model-parallel-size 2",
}


def run(command: list[object]) -> None:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


def make_corpus(folder: Path) -> Path:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    tool = ROOT / "data_tools" / "preprocess_data.py"
    run([sys.executable, tool, "--input", *documents, "--output-prefix", folder / "c", "--tokenizer", "byte"])
    return folder / "c_text_document"


def measure(flags: list[object], ranks: int, corpus: Path, log: Path) -> list[dict[str, int]]:
    """Return memory and traffic of rank 0 in the last iteration of a run, which must equal `estimate`."""
    flags = [*flags, "--data-path", corpus, "--tokenizer", "byte", "--train-iters", ITERATIONS, "--lr-warmup-iters", 1]
    run(["bash", ROOT / "scripts" / "launch.sh", "--nproc", ranks, *flags, "--log-dir", log])
    last = json.loads((log / "metrics.jsonl").read_text().splitlines()[-1])
    config, layout = resolve(parse([str(flag) for flag in flags]), ranks, 257, declare)
    assert [last["memory_bytes"], last["traffic_bytes"]] == list(estimate(config, layout)), flags
    return [last["memory_bytes"], last["traffic_bytes"]]


def small() -> dict[str, str]:
    """Bytes of C1 to C5 on four ranks."""
    cases = {f"C{number} {name}": ["--preset", f"c{number}"] for number, name in CONFIGURATIONS.items()}
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
            found = rehearse_rank(config, layout, 0, RehearsalDevice.of("cpu"), steps=1, saves=False)
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
