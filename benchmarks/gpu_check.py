"""Check and measure the GPUs of a machine in half an hour, the most informative parts first, into a Markdown file.

Each part is a command of its own: one that fails, hangs or runs out of memory is named, and the next one begins. A part
that cannot run is skipped, with the reason. The file is rewritten after every part. Without a GPU some
parts run at a tiny size. `bash scripts/gpu_check.sh` installs the packages and runs this; `--help` lists the parts.
"""

import datetime
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from megazero.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
LINES = 60  # of a part's output that are kept: its end
GPUS = "GPUS"  # among a part's words: the number of GPUs of the machine
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


class Part(NamedTuple):
    """A command of the check.

    Attributes:
        asks: the question that it answers.
        program: a Python program, or -m and a module, and its flags.
        seconds: after which it is ended.
        gpus: that it needs; with fewer it is skipped. 0: it runs on a CPU too.
        ranks: processes under torchrun; 1: the program alone.
        rehearsed: without any GPU it runs all the same, on a CPU.
        env: environment variables.
        tiny: flags behind the others that make it small enough for a CPU.
    """

    title: str
    asks: str
    program: tuple[str, ...]
    seconds: float
    gpus: int = 0
    ranks: int = 1
    rehearsed: bool = False
    env: tuple[tuple[str, str], ...] = ()
    tiny: tuple[str, ...] = ()

    def command(self, prefix: Sequence[str] = (), tiny: bool = False, gpus: int = 0) -> list[str]:
        """Return the arguments of python on a machine with `gpus` GPUs; `prefix` comes before the program."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        program = [str(gpus) if word == GPUS else word for word in self.program]
        return [*(torchrun if self.ranks > 1 else []), *prefix, *program, *(self.tiny if tiny else ())]


ONE_LAYER = "--layers 1 --hidden 32 --heads 2 --seq-length 8 --vocabulary 61 --steps 1".split()
TESTS = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu", "-k")


def _benchmark(flags: str, asks: str, title: str, seconds: float) -> Part:
    words = ("-m", "benchmarks.gpu", *flags.split())
    return Part(title, asks, words, seconds, tiny=(*ONE_LAYER, "--batch", "1", "--systems", "megazero"))


def _kernels(flags: str, title: str) -> Part:
    words = ("-m", "benchmarks.kernels", *flags.split())
    tiny = "--tokens 4 --hidden 32 --ffn 48 --vocabulary 67 --precision fp32 --rounds 1".split()
    return Part(title, "Is each kernel worth its place, and near the memory's rate?", words, 60, tiny=tuple(tiny))


def _training(flags: str, asks: str, title: str, seconds: float, gpus: int, env: tuple[str, str]) -> Part:
    """Make a part that runs pretrain_gpt.py on `gpus` ranks."""
    usual = "--mock-data --log-interval 100 --lr-warmup-iters 0 --hang-timeout 8 --log-dir= "
    tiny = "--hidden-size 32 --num-attention-heads 2 --seq-length 8 --vocab-size 61 --train-iters 2 --log-interval 1"
    words = ("pretrain_gpt.py", *(usual + flags).split())
    return Part(title, asks, words, seconds, gpus, gpus, env=(env,), tiny=(*tiny.split(), "--fused-kernels", "eager"))


def _proof(title: str, flags: str, then: str = "", gpus: int = 0) -> Part:
    """Make a part that runs megazero verify."""
    asks = "Does megazero verify pass, in fp64 and in 16 bit? If not, which operation differs first?"
    words = ("scripts/verify.py", *flags.split(), "--then", then)
    return Part(title, asks, words, 180, gpus, rehearsed=True)


PIPELINE = (
    "--pipeline-model-parallel-size 4 --pipeline-schedule zero-bubble-v --virtual-pipeline-stages 2 --num-layers 8 "
    "--hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 8000 --micro-batch-size 2 "
    "--global-batch-size 32 --train-iters 1000"
)
SMALL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 8000 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 3"
)
PA_CPU = f"{SMALL} --tensor-model-parallel-size 2 --recompute full --partition-activations --checkpoint-in-cpu"
QUEUES = "Do streams that share a hardware queue stop each other? A hang is reported with its operation"
SANITIZER = "Does torch's model of streams find two accesses that nothing orders, as the pretended GPU would?"
SANITIZED = ("TORCH_CUDA_SANITIZER", "1")
GPT2_1_5B = "--layers 48 --hidden 1600 --heads 25 --batch 8"
GPT2_345M = "--layers 24 --hidden 1024 --heads 16 --batch 8 --offload"
GPT_7B = "--layers 32 --hidden 4096 --heads 32 --batch 2 --recompute full --systems megazero"
PARTS = (
    _proof(
        "Proof on one GPU",
        "--preset llama-125m --world-size 1 --recompute full --loss-chunk-tokens 7 --optimizer-cpu-offload",
    ),
    _proof(
        "Proof on two GPUs",
        "--preset gpt2-124m --world-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        "--tensor-model-parallel-size 1 --no-sequence-parallel --pipeline-model-parallel-size 2",
        gpus=2,
    ),
    _proof("Proof on all GPUs", f"--preset gpt2-124m --world-size {GPUS} --zero-stage 3", "--zero-stage 1", gpus=2),
    Part(
        "One GPU is the same model as the CPU",
        "Are losses and norms those of plain PyTorch, in fp32?",
        (*TESTS, "one_gpu and fp32"),
        180,
        gpus=1,
        tiny=("-k", "(same_model and gpipe and fp32) or copies_to"),
    ),
    _kernels("--hidden 768 --ffn 2048", "Triton's kernels at hidden 768"),
    _kernels("", "Triton's kernels at hidden 4096"),
    Part(
        "Traces of GPT-2 with 124 M parameters",
        "Is the step flat below micro-batch 8, so that the host is the limit? How long is the end of the step?",
        ("-m", "benchmarks.step_trace", "--batches", "4", "8", "32"),
        180,
        tiny=(*ONE_LAYER, "--batches", "1", "2"),
    ),
    _benchmark("", "Is it as fast as compiled PyTorch and FSDP2?", "GPT-2 with 124 M parameters", 120),
    Part(
        "Several GPUs are the same model as one",
        "Are losses of tp, pp, dp and ZeRO those of plain PyTorch?",
        (*TESTS, "several_gpus"),
        180,
        gpus=2,
    ),
    Part(
        "Communication behind computation (345 M parameters)",
        "Which share of communication is hidden?",
        ("-m", "benchmarks.overlap"),
        150,
        gpus=2,
        rehearsed=True,
    ),
    *(
        _training(PIPELINE, QUEUES, f"1,000 steps of a V, {queues} hardware queues", 240, 4, (CONNECTIONS, queues))
        for queues in ("8", "32")
    ),
    _training(
        f"{SMALL} --zero-stage 3 --recompute full --checkpoint-in-cpu",
        SANITIZER,
        "torch's stream sanitizer: ZeRO 3, kept inputs on the host",
        90,
        1,
        SANITIZED,
    ),
    _training(f"{SMALL} --zero-stage 3", SANITIZER, "torch's stream sanitizer: ZeRO 3 on two GPUs", 90, 2, SANITIZED),
    _training(PA_CPU, SANITIZER, "torch's stream sanitizer: Pa+cpu on two GPUs", 90, 2, SANITIZED),
    _benchmark(GPT2_345M, "Are copies hidden, as planned?", "Kept inputs on the host (345 M parameters)", 90),
    _benchmark(GPT2_1_5B, "As for 124 M, near the memory's end", "GPT-2 with 1.5 B parameters", 180),
    Part(
        "The other tests of one GPU",
        "Is the rest right: 16 bit, --compile, one wait a step, the allocator?",
        (*TESTS, "not several_gpus and not (one_gpu and fp32)"),
        240,
        gpus=1,
        tiny=("-k", "added_where"),
    ),
    _benchmark(GPT_7B, "Does 7 B fit, as planned?", "7 B parameters", 120),
)


class Machine(NamedTuple):
    """The machine that is checked.

    Attributes:
        prefix: comes before each part's program.
        tiny: each part is made small, and its time is not limited.
        cannot: title of a part -> the reason why it cannot run.
    """

    gpus: int
    name: str
    prefix: tuple[str, ...] = ()
    tiny: bool = False
    cannot: Mapping[str, str] = MappingProxyType({})


class Result(NamedTuple):
    """Outcome of a part: "ok", "skipped: WHY" or "failed: HOW"; its output and its seconds."""

    part: Part
    outcome: str
    output: str
    seconds: float


def run(part: Part, machine: Machine, seconds: float) -> Result:
    """Run a part as a process group of its own, which is ended after `seconds`."""
    if part.title in machine.cannot:
        return Result(part, f"skipped: {machine.cannot[part.title]}", "", 0.0)
    if machine.gpus < part.gpus and not (part.rehearsed and machine.gpus == 0):
        return Result(part, f"skipped: it needs {part.gpus} GPUs, and there are {machine.gpus}", "", 0.0)
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *part.command(machine.prefix, machine.tiny, machine.gpus)],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ, **dict(part.env)} if part.ranks > 1 else os.environ | dict(part.env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        outcome = "ok" if process.returncode == 0 else f"failed: exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        outcome = f"failed: not done after {seconds:.0f} s"
    return Result(part, outcome, output, time.monotonic() - start)


def report(results: list[Result], machine: Machine, began: datetime.datetime) -> str:
    """Return the Markdown file."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    lines = [f"# {machine.name}", "", f"`bash scripts/gpu_check.sh`, {began:%Y-%m-%d}; {versions}."]
    lines += ["Times are of this machine in one run; a ratio above 1 is in our favour.", ""]
    lines += ["| part | outcome | seconds |", "|---|---|---|"]
    lines += [f"| {r.part.title} | {r.outcome} | {r.seconds:.0f} |" for r in results]
    for r in results:
        if not r.outcome.startswith("skipped"):
            words = [f"{name}={value}" for name, value in r.part.env]
            command = shlex.join([*words, "python", *r.part.command(machine.prefix, machine.tiny, machine.gpus)])
            kept = "\n".join(r.output.rstrip().splitlines()[-LINES:])
            table = "|---|" in kept and r.outcome == "ok"  # a table is Markdown already
            lines += ["", f"## {r.part.title}", f"{r.part.asks} `{command}`", ""]
            lines += [kept] if table else ["```", kept, "```"]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Options:
    """Check and measure the GPUs of this machine."""

    output: str = ""
    """File to write. Empty: docs/results/gpu-NAME.md of the GPU; without one, standard output."""
    minutes: float = 40.0
    """Time for all parts; those that do not fit are skipped."""
    parts: str = ""
    """Regular expression: only parts whose titles match it. Empty: all."""


def check(o: Options, machine: Machine, path: Path | None) -> int:
    """Run the parts, and write the report to `path` after each, or to standard output; return 1 if one failed."""
    began, deadline = datetime.datetime.now(), time.monotonic() + 60 * o.minutes
    results: list[Result] = []
    for part in PARTS:
        if o.parts and not re.search(o.parts, part.title):
            continue
        left = deadline - time.monotonic()
        print(f"{part.title} ...", flush=True)
        if left < 5:
            results.append(Result(part, f"skipped: {o.minutes:g} minutes are over", "", 0.0))
        else:
            results.append(run(part, machine, left if machine.tiny else min(part.seconds, left)))
        print(f"  {results[-1].outcome}, {results[-1].seconds:.0f} s", flush=True)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, report(results, machine, began).encode())
    if path is None:
        print(report(results, machine, began))
    failed = [r.part.title for r in results if r.outcome.startswith("failed")]
    print(f"failed: {', '.join(failed)}" if failed else "no part failed", flush=True)
    return 1 if failed else 0


def description() -> str:
    """Return the text of --help: how it works, and the parts in order."""
    needs = [f" ({part.gpus} GPUs)" if part.gpus > 1 else "" for part in PARTS]
    lines = [f"- {part.title}{need}: {part.asks}" for part, need in zip(PARTS, needs, strict=True)]
    return f"{__doc__}\nParts, in order:\n\n" + "\n".join(lines)


def main(o: Options) -> int:
    gpus = torch.cuda.device_count()
    if not gpus:
        return check(o, Machine(0, "No GPU: a dry run on a CPU"), Path(o.output) if o.output else None)
    card = torch.cuda.get_device_name(0)
    name = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    return check(o, Machine(gpus, f"{gpus} x {card}"), Path(o.output or ROOT / f"docs/results/gpu-{name}.md"))


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Options, description=description())))
