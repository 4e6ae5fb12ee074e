"""Check and measure the GPUs of a machine, the most informative parts first, into a folder and a Markdown file.

Parts that ask whether results are right run together, because they need no quiet machine; meanwhile the compile caches
of other systems fill. Then each part that is timed runs alone. Each is a command of its own: one that fails, hangs or
runs out of memory is named, and the next one begins. A part that cannot run, or is expected to outlast --minutes, is
skipped, with the reason. Outputs are written as they come; they are packed, and the file is rewritten, after every
part. Without a GPU some parts run at a tiny size. `bash scripts/gpu_check.sh` installs the packages and runs this;
`--help` lists the parts.
"""

import concurrent.futures
import datetime
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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
        expected: seconds on one H100, a guess; a part begins only if as many are left.
        seconds: after which it is ended.
        together: it runs next to others, before those that are timed.
        gpus: that it needs; with fewer it is skipped. 0: it runs on a CPU too.
        ranks: processes under torchrun; 1: the program alone.
        rehearsed: without any GPU it runs all the same, on a CPU.
        env: environment variables.
        tiny: flags behind the others that make it small enough for a CPU.
    """

    title: str
    asks: str
    program: tuple[str, ...]
    expected: float
    seconds: float
    together: bool = False
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

    @property
    def name(self) -> str:
        """Its title as the name of a file."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


ONE_LAYER = "--layers 1 --hidden 32 --heads 2 --seq-length 8 --vocabulary 61 --steps 1".split()
TESTS = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu", "-k")


def _benchmark(flags: str, asks: str, title: str, expected: float, **options: Any) -> Part:
    words = ("-m", "benchmarks.gpu", *flags.split())
    tiny = (*ONE_LAYER, "--batch", "1", "--systems", "megazero")
    return Part(title, asks, words, expected, 2 * expected + 30, tiny=tiny, **options)


def _runs(title: str, asks: str, expected: float, *words: str) -> Part:
    """Make a part of runs of pretrain_gpt.py in one process, next to their plans."""
    return Part(title, asks, ("-m", "benchmarks.gpu_runs", *words), expected, 2 * expected + 30, tiny=("--tiny",))


def _kernels(flags: str, title: str) -> Part:
    words = ("-m", "benchmarks.kernels", *flags.split())
    tiny = "--tokens 4 --hidden 32 --ffn 48 --vocabulary 67 --precision fp32 --rounds 1".split()
    return Part(title, "Is each kernel worth its place, and near the memory's rate?", words, 20, 60, tiny=tuple(tiny))


def _training(flags: str, asks: str, title: str, expected: float, gpus: int, env: tuple[str, str]) -> Part:
    """Make a part that runs pretrain_gpt.py on `gpus` ranks."""
    usual = "--mock-data --log-interval 100 --lr-warmup-iters 0 --hang-timeout 8 --log-dir= "
    tiny = "--hidden-size 32 --num-attention-heads 2 --seq-length 8 --vocab-size 61 --train-iters 2 --log-interval 1"
    words = ("pretrain_gpt.py", *(usual + flags).split())
    small = (*tiny.split(), "--fused-kernels", "eager")
    return Part(title, asks, words, expected, 2 * expected, gpus=gpus, ranks=gpus, env=(env,), tiny=small)


def _proof(title: str, flags: str, then: str = "", gpus: int = 0) -> Part:
    """Make a part that runs megazero verify."""
    asks = "Does megazero verify pass, in fp64 and in 16 bit? If not, which operation differs first?"
    words = ("scripts/verify.py", *flags.split(), "--then", then)
    return Part(title, asks, words, 80, 180, together=gpus == 0, gpus=gpus, rehearsed=True)


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
GPT2_1_5B = "--layers 48 --hidden 1600 --heads 25 --batch 8 --systems megazero"
GPT2_345M = "--layers 24 --hidden 1024 --heads 16"
CACHES = "Compiled kernels, for the parts that are timed"
EXACT = "(fp32 or fp64)"
PARTS = (
    Part(
        "Versions",
        "Which card, NCCL and cuDNN are these?",
        (
            "-c",
            "import torch; c = torch.cuda; print(torch.__version__, *([c.get_device_properties(0), c.nccl.version(), "
            "torch.backends.cudnn.version()] if c.is_available() else ['no GPU']))",
        ),
        15,
        60,
    ),
    _proof(
        "Proof on one GPU",
        "--preset llama-125m --world-size 1 --recompute full --loss-chunk-tokens 7 --optimizer-cpu-offload",
    ),
    Part(
        "One GPU is the same model as the CPU",
        "Are losses and norms those of plain PyTorch on the CPU, in fp64 and in fp32?",
        (*TESTS, f"one_gpu and {EXACT}"),
        110,
        180,
        together=True,
        gpus=1,
        tiny=("-k", "(same_model and gpipe and fp32) or copies_to"),
    ),
    Part(
        "The other tests of one GPU",
        "Is the rest right: 16 bit, --compile, one wait a step, the allocator?",
        (*TESTS, f"not several_gpus and not (one_gpu and {EXACT})"),
        150,
        180,
        together=True,
        gpus=1,
        tiny=("-k", "added_where"),
    ),
    _benchmark("--systems compiled --steps 1", CACHES, "Caches of 124 M parameters", 60, together=True),
    _benchmark(f"{GPT2_345M} --systems compiled --steps 1", CACHES, "Caches of 345 M parameters", 90, together=True),
    _benchmark("", "Is it as fast as compiled PyTorch and FSDP2?", "GPT-2 with 124 M parameters", 45),
    _benchmark(
        f"{GPT2_345M} --systems megazero compiled",
        "Is it as fast as compiled PyTorch?",
        "GPT-2 with 345 M parameters",
        38,
    ),
    _runs(
        "Runs next to their plans",
        "Are steps as long, and peaks as high, as planned: a llama, fp16, 7 B cut to 8 layers, optimizer offload?",
        70,
        "--runs",
        "llama-1b --global-batch-size 8",
        "gpt2-124m --precision fp16 --micro-batch-size 16 --global-batch-size 16",
        "llama-7b --num-layers 8 --global-batch-size 2 --recompute full --zero-stage 0",
        "gpt2-345m --optimizer-cpu-offload --global-batch-size 16",
    ),
    _kernels("--hidden 768 --ffn 2048", "Triton's kernels at hidden 768"),
    _benchmark(GPT2_1_5B, "As planned, near the memory's end?", "GPT-2 with 1.5 B parameters", 36),
    _kernels("", "Triton's kernels at hidden 4096"),
    _runs(
        "The same bits twice",
        "Does --deterministic-mode repeat a run bit for bit?",
        22,
        *("--compare", "twice", "--iterations", "6", "--runs"),
        "gpt2-124m --micro-batch-size 8 --global-batch-size 16",
    ),
    _runs(
        "Save and load of 345 M parameters",
        "Does a run that resumes continue bit for bit? How long is a save?",
        35,
        *("--compare", "resume", "--iterations", "8", "--runs"),
        "gpt2-345m --global-batch-size 16",
    ),
    _benchmark(
        f"{GPT2_345M} --batch 8 --offload",
        "Are copies hidden, as planned?",
        "Kept inputs on the host (345 M parameters)",
        25,
    ),
    Part(
        "Traces of GPT-2 with 124 M parameters",
        "Is the step flat below micro-batch 8, so that the host is the limit? How long is the end of the step?",
        ("-m", "benchmarks.step_trace", "--batches", "4", "8", "32"),
        30,
        180,
        tiny=(*ONE_LAYER, "--batches", "1", "2"),
    ),
    _training(
        f"{SMALL} --zero-stage 3 --recompute full --checkpoint-in-cpu",
        SANITIZER,
        "torch's stream sanitizer: ZeRO 3, kept inputs on the host",
        50,
        1,
        SANITIZED,
    ),
    _proof(
        "Proof on two GPUs",
        "--preset gpt2-124m --world-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        "--tensor-model-parallel-size 1 --no-sequence-parallel --pipeline-model-parallel-size 2",
        gpus=2,
    ),
    _proof("Proof on all GPUs", f"--preset gpt2-124m --world-size {GPUS} --zero-stage 3", "--zero-stage 1", gpus=2),
    Part(
        "Several GPUs are the same model as one",
        "Are losses of tp, pp, dp and ZeRO those of plain PyTorch?",
        (*TESTS, "several_gpus"),
        100,
        180,
        gpus=2,
    ),
    Part(
        "Communication behind computation (345 M parameters)",
        "Which share of communication is hidden?",
        ("-m", "benchmarks.overlap"),
        80,
        150,
        gpus=2,
        rehearsed=True,
    ),
    *(
        _training(PIPELINE, QUEUES, f"1,000 steps of a V, {queues} hardware queues", 120, 4, (CONNECTIONS, queues))
        for queues in ("8", "32")
    ),
    _training(f"{SMALL} --zero-stage 3", SANITIZER, "torch's stream sanitizer: ZeRO 3 on two GPUs", 50, 2, SANITIZED),
    _training(PA_CPU, SANITIZER, "torch's stream sanitizer: Pa+cpu on two GPUs", 50, 2, SANITIZED),
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
    """Outcome of a part: "ok", "skipped: WHY" or "failed: HOW"; the end of its output, and its seconds."""

    part: Part
    outcome: str
    output: str = ""
    seconds: float = 0.0


def obstacle(part: Part, machine: Machine, left: float) -> str:
    """Return why a part cannot run, with `left` seconds; empty if it can."""
    if part.title in machine.cannot:
        return machine.cannot[part.title]
    if machine.gpus < part.gpus and not (part.rehearsed and machine.gpus == 0):
        return f"it needs {part.gpus} GPUs, and there are {machine.gpus}"
    if left < part.expected and not machine.tiny:
        return f"it takes about {part.expected:.0f} s, and {max(left, 0):.0f} s are left"
    return ""


def run(part: Part, machine: Machine, seconds: float, folder: Path) -> Result:
    """Run a part as a process group of its own, which is ended after `seconds`; its output is in `folder`."""
    start, files = time.monotonic(), [folder / f"{part.name}.{end}" for end in ("out", "err")]
    with files[0].open("w") as out, files[1].open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *part.command(machine.prefix, machine.tiny, machine.gpus)],
            cwd=ROOT,
            env={**({"OMP_NUM_THREADS": "1"} if part.ranks > 1 else {}), **os.environ, **dict(part.env)},
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
            outcome = "ok" if code == 0 else f"failed: exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            outcome = f"failed: not done after {seconds:.0f} s"
    out_lines, err_lines = (path.read_text(errors="replace").rstrip().splitlines() for path in files)
    shown = out_lines if outcome == "ok" and out_lines else [*out_lines, *err_lines]
    return Result(part, outcome, "\n".join(shown[-LINES:]), time.monotonic() - start)


def tables(text: str) -> Iterator[dict[str, str]]:
    """Yield the rows of Markdown tables, by their headings."""
    headings: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            headings = []
        elif not headings:
            headings = cells
        elif not set(line) <= set("|-"):
            yield dict(zip(headings, cells, strict=False))


def next_to_plans(results: Sequence[Result]) -> list[str]:
    """Return a table of all steps and peaks that were planned and measured."""
    lines = ["", "## Planned and measured", "", "| part | run | ms | planned | ratio | GB | planned | ratio |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for result in results:
        for row in tables(result.output):
            names = ("ms per step", "planned ms"), ("GB at the peak", "planned GB")
            pairs = [(row.get(measured, ""), row.get(planned, "")) for measured, planned in names]
            if any(measured and planned for measured, planned in pairs) and not pairs[0][0].startswith("failed"):
                cells = [result.part.title, next(iter(row.values()))]
                for measured, planned in pairs:
                    ratio = f"{float(measured) / float(planned):.2f}" if measured and planned and float(planned) else ""
                    cells += [measured, planned, ratio]
                lines.append(f"| {' | '.join(cells)} |")
    return lines if len(lines) > 5 else []


def report(results: list[Result], machine: Machine, began: datetime.datetime) -> str:
    """Return the Markdown file."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    lines = [f"# {machine.name}", "", f"`bash scripts/gpu_check.sh`, {began:%Y-%m-%d}; {versions}."]
    lines += ["Times are of this machine in one run; a ratio above 1 is in our favour.", ""]
    lines += ["| part | outcome | seconds |", "|---|---|---|"]
    lines += [f"| {r.part.title} | {r.outcome} | {r.seconds:.0f} |" for r in results]
    lines += next_to_plans(results)
    for r in results:
        if not r.outcome.startswith("skipped"):
            words = [f"{name}={value}" for name, value in r.part.env]
            command = shlex.join([*words, "python", *r.part.command(machine.prefix, machine.tiny, machine.gpus)])
            table = "|---|" in r.output and r.outcome == "ok"  # a table is Markdown already
            lines += ["", f"## {r.part.title}", f"{r.part.asks} `{command}`", ""]
            lines += [r.output] if table else ["```", r.output, "```"]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Options:
    """Check and measure the GPUs of this machine."""

    folder: str = "runs/gpu_check"
    """Folder of each part's whole output, and of outputs.tgz, which has all of them and the report."""
    output: str = ""
    """Report to write. Empty: docs/results/gpu-NAME.md of the GPU; without one, standard output."""
    minutes: float = 0.0
    """Time for all parts; those that would outlast it are skipped. 0: as long as all of them may take."""
    parts: str = ""
    """Regular expression: only parts whose titles match it. Empty: all."""


class Check:
    """Runs the parts, and writes the report after each."""

    def __init__(self, o: Options, machine: Machine, path: Path | None) -> None:
        """path: of the report; None: standard output."""
        self.machine, self.path, self.folder = machine, path, Path(o.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.parts = [part for part in PARTS if not o.parts or re.search(o.parts, part.title)]
        self.began, self.start = datetime.datetime.now(), time.monotonic()
        self.deadline = self.start + (60 * o.minutes or math.inf)
        self.results: dict[str, Result] = {}
        self.lock = threading.Lock()

    def take(self, part: Part) -> None:
        """Run a part, or skip it."""
        left = self.deadline - time.monotonic()
        if why := obstacle(part, self.machine, left):
            result = Result(part, f"skipped: {why}")
        else:
            limit = None if self.machine.tiny else min(part.seconds, left)
            result = run(part, self.machine, math.inf if limit is None else limit, self.folder)
        with self.lock:
            self.results[part.title] = result
            at = time.monotonic() - self.start
            print(f"{part.title}: {result.outcome}, {result.seconds:.0f} s, at {at:.0f} s", flush=True)
            self.write()

    def text(self) -> str:
        done = [self.results[part.title] for part in self.parts if part.title in self.results]
        return report(done, self.machine, self.began)

    def write(self) -> None:
        """Write the report, and pack it with all outputs."""
        write_atomically(self.folder / "report.md", self.text().encode())
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, self.text().encode())
        with tarfile.open(self.folder / ".outputs.tgz", "w:gz") as packed:
            for file in sorted(self.folder.glob("*.*")):
                if file.suffix in (".out", ".err", ".md"):
                    packed.add(file, file.name)
        os.replace(self.folder / ".outputs.tgz", self.folder / "outputs.tgz")

    def run(self) -> int:
        """Return 1 if a part failed."""
        together = [part for part in self.parts if part.together]
        alone = [part for part in self.parts if not part.together]
        first, rest = (alone[:1], alone[1:]) if together and alone else ([], alone)
        for part in first:  # torch is in the page cache then
            self.take(part)
        if self.machine.gpus and not self.machine.tiny:
            with concurrent.futures.ThreadPoolExecutor(max(1, len(together))) as pool:
                list(pool.map(self.take, together))
        else:
            for part in together:
                self.take(part)
        for part in rest:
            self.take(part)
        if self.path is None:
            print(self.text())
        failed = [title for title, result in self.results.items() if result.outcome.startswith("failed")]
        print(f"failed: {', '.join(failed)}" if failed else "no part failed", flush=True)
        return 1 if failed else 0


def description() -> str:
    """Return the text of --help: how it works, and the parts in order."""
    lines = []
    for part in sorted(PARTS, key=lambda part: not part.together):
        needs = f", {part.gpus} GPUs" if part.gpus > 1 else ""
        lines.append(f"- {part.title} (about {part.expected:.0f} s{needs}): {part.asks}")
    return f"{__doc__}\nParts, those together first:\n\n" + "\n".join(lines)


def main(o: Options) -> int:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are here, perhaps without a network
    gpus = torch.cuda.device_count()
    if not gpus:
        machine = Machine(0, "No GPU: a dry run on a CPU")
        return Check(o, machine, Path(o.output) if o.output else None).run()
    card = torch.cuda.get_device_name(0)
    name = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    return Check(o, Machine(gpus, f"{gpus} x {card}"), Path(o.output or ROOT / f"docs/results/gpu-{name}.md")).run()


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Options, description=description())))
