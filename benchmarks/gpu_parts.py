"""The parts of `benchmarks.gpu_check`: commands, in order of worth, with the seconds that are expected of each."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

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
