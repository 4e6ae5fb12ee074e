"""Compares two trees bit for bit: losses, norms, bytes, traffic and checkpoints of 28 small layouts.

    python -m tests.same_bits --write before.json     # this tree's numbers
    python -m tests.same_bits --against before.json   # names the layouts and numbers that differ from those
    python -m tests.same_bits --before v1.2           # both: of another revision, in a git worktree, and of this tree

Only the surface is used: the flags of pretrain_gpt.py, metrics.jsonl and the tensors of a checkpoint. So modules may
move between the two trees. Bits depend on the CPU and on torch: compare results of one machine.
Exits with 1 if a number differs or a layout fails.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import pkgutil
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 120  # of a layout; its ranks are ended then
SHOWN = 3  # numbers that differ, of a quantity

MODEL = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --init-method-std 0.05"
TRAINING = "--train-iters 3 --lr 1e-3 --lr-decay-style cosine --min-lr 1e-4 --weight-decay 0.1 --clip-grad 0.9"
RUN = "--matmul-backend torch --num-workers 0 --log-interval 1 --tokenizer byte --split 80,15,5"
DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.2"


class Layout(NamedTuple):
    ranks: int
    flags: str
    batch: int = 8


LAYOUTS = {
    "plain": Layout(1, "--precision fp32 --micro-batch-size 2"),
    "llama, bf16": Layout(1, "--architecture llama --num-query-groups 2 --add-qkv-bias --precision bf16"),
    "parallel, fp64, selective": Layout(1, "--architecture parallel --precision fp64 --recompute selective"),
    "fp16, dropout, ramp-up": Layout(
        1, f"--precision fp16 --initial-loss-scale 1024 {DROPOUT} --rampup-batch-size 4 2 8"
    ),
    "documents": Layout(1, f"{DOCUMENTS} --micro-batch-size 2"),
    "llama, documents, md, cpu": Layout(
        1,
        f"--architecture llama --num-query-groups 1 {DOCUMENTS} --recompute full --checkpoint-in-cpu "
        "--contiguous-checkpointing",
    ),
    "dp 2, stage 0": Layout(2, "--zero-stage 0 --precision bf16"),
    "dp 2, stage 1, bf16 gradients": Layout(2, "--zero-stage 1 --precision bf16 --grad-dtype bf16"),
    "dp 2, stage 2, buckets, a step": Layout(2, "--zero-stage 2 --zero-reduce-every step --reduce-bucket-size 1000"),
    "dp 2, stage 3, full, evaluation": Layout(
        2, "--zero-stage 3 --recompute full --eval-interval 2 --eval-iters 2 --micro-batch-size 2"
    ),
    "dp 2, stage 3, gathered a step, fp16": Layout(2, "--zero-stage 3 --zero-gather-every step --precision fp16"),
    "dp 2, stage 3, frozen, untied": Layout(
        2,
        "--zero-stage 3 --untie-embeddings --micro-batch-size 2 --freeze-parameters token_embedding.* blocks.0.* "
        "blocks.2.mlp.* blocks.3.*.bias",
    ),
    "dp 2, stage 2, frozen, tied": Layout(2, "--zero-stage 2 --freeze-parameters token_embedding.* blocks.1.*"),
    "dp 3, stage 3": Layout(3, "--zero-stage 3 --no-overlap-comm", 6),
    "dp 4, stage 2, groups of 2": Layout(4, "--zero-stage 2 --zero-shard-size 2"),
    "dp 4, stage 3, groups of 2, llama": Layout(4, "--zero-stage 3 --zero-shard-size 2 --architecture llama"),
    "tp 2, dropout": Layout(2, f"--tensor-model-parallel-size 2 --micro-batch-size 2 {DROPOUT}"),
    "tp 2, sp, llama, selective": Layout(
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --architecture llama --num-query-groups 1 "
        "--recompute selective",
    ),
    "tp 2, pa, documents": Layout(
        2, f"--tensor-model-parallel-size 2 --recompute full --partition-activations {DOCUMENTS}"
    ),
    "tp 2, pa+cpu, md, bf16": Layout(
        2,
        "--tensor-model-parallel-size 2 --recompute full --partition-activations --checkpoint-in-cpu "
        "--contiguous-checkpointing --precision bf16",
    ),
    "pp 2, 1f1b, tied": Layout(2, f"--pipeline-model-parallel-size 2 --micro-batch-size 2 {DROPOUT}"),
    "pp 2, gpipe, llama, fp64": Layout(
        2, "--pipeline-model-parallel-size 2 --pipeline-schedule gpipe --architecture llama --precision fp64"
    ),
    "pp 2, interleaved": Layout(
        2, "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved --virtual-pipeline-stages 2"
    ),
    "pp 2, zero-bubble-v, documents": Layout(
        2,
        f"--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble-v --virtual-pipeline-stages 2 {DOCUMENTS}",
    ),
    "dp 2, tp 2, stage 3, pa": Layout(
        4, "--tensor-model-parallel-size 2 --zero-stage 3 --recompute full --partition-activations"
    ),
    "pp 2, dp 2, stage 2, zero-bubble": Layout(
        4, "--pipeline-model-parallel-size 2 --zero-stage 2 --pipeline-schedule zero-bubble --zero-bubble-backlog 1"
    ),
    "pp 2, tp 2, sp, split by hand": Layout(
        4,
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-split 1,3 "
        f"--untie-embeddings {DROPOUT}",
    ),
    "pp 2, dp 2, tp 2, stage 3, fp64": Layout(
        8,
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --zero-stage 3 --precision fp64 "
        f"--recompute full {DROPOUT}",
    ),
}

# Quantity -> its numbers: per iteration, and of a checkpoint a hash per tensor.
Numbers = dict[str, Any]
Trees = dict[str, Numbers]  # layout -> Numbers


def write_corpus(prefix: Path) -> None:
    """Write 60 documents of 5 to 60 bytes, each with its end-of-document token."""
    from tests.reference_run import write_corpus

    draw = random.Random(0)
    documents = [[[*(draw.randrange(256) for _ in range(draw.randrange(5, 60))), 256]] for _ in range(60)]
    write_corpus(prefix, "<u2", documents)


def saved_tensors(folder: Path) -> dict[str, str]:
    """Return a hash of each tensor of a checkpoint, put together from the chunks NAME@OFFSET of all ranks' files."""
    about = json.loads((folder / "manifest.json").read_text())["tensors"]
    whole: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        stop = 8 + int.from_bytes(data[:8], "little")
        for key, chunk in json.loads(data[8:stop]).items():
            name, _, offset = key.partition("@")
            start, end = chunk["data_offsets"]
            if end > start:
                part = np.frombuffer(data[stop + start : stop + end], np.uint8).reshape(*chunk["shape"], -1)
                tensor = whole.setdefault(name, np.zeros((*about[name]["shape"], part.shape[-1]), np.uint8))
                at = map(int, offset.split(",")) if offset else []
                tensor[tuple(slice(a, a + size) for a, size in zip(at, chunk["shape"], strict=False))] = part
    return {name: digest([about[name], whole[name].tobytes().hex()]) for name in sorted(whole)}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def read_numbers(folder: Path) -> Numbers:
    """Return the results in the folder of a layout's run."""
    lines = [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]
    found: Numbers = {
        key: [line.get(key) for line in lines]
        for key in ("loss", "grad_norm", "consumed_samples", "validation_loss", "memory_bytes", "traffic_bytes")
    }
    latest = (folder / "saved" / "latest").read_text().strip()
    return found | {"checkpoint": saved_tensors(folder / "saved" / latest)}


# -- the ranks of one tree


def serve(tree: Path) -> None:
    """Import a tree, then fork the ranks of each line of stdin: a list of words, and the number of ranks.

    The answer to each, a line of stdout, has the exit codes. The ranks of a layout import nothing more: they are forked
    from this process, which has imported all modules and computed nothing.
    """
    os.chdir(tree)
    sys.path[0] = str(tree)
    import pretrain_gpt

    for module in pkgutil.walk_packages([str(tree / "megazero")], "megazero."):
        with contextlib.suppress(Exception):  # a kernel of a device that is not here
            importlib.import_module(module.name)
    for line in sys.stdin:
        words, ranks, output = json.loads(line)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        pids = []
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                be_rank(pretrain_gpt.main, words, rank, ranks, port, output)
            pids.append(pid)
        print(json.dumps(end_of(pids)), flush=True)


def be_rank(main: Any, words: list[str], rank: int, ranks: int, port: int, output: str) -> None:
    """Run a rank to its end, and this process with it."""
    import torch

    code = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        place |= {"MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
        if ranks > 1:
            os.environ.update({name: str(value) for name, value in place.items()})
        torch.set_num_threads(1)
        main(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code)


def end_of(pids: list[int]) -> list[int]:
    """Wait for processes; those that are left after SECONDS are killed. Return their exit codes."""
    codes: dict[int, int] = {}
    until = time.monotonic() + SECONDS
    while len(codes) < len(pids):
        for pid in (pid for pid in pids if pid not in codes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def numbers_of(tree: Path, names: list[str]) -> Trees:
    """Run layouts with a tree, and return their numbers; a layout that fails has its last lines instead."""
    found: Trees = {}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    program = [sys.executable, str(Path(__file__).resolve()), "--serve", str(tree)]
    with tempfile.TemporaryDirectory(prefix="megazero-bits-") as folder:
        corpus = Path(folder, "corpus")
        write_corpus(corpus)
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as server:
            assert server.stdin and server.stdout
            for number, name in enumerate(names, 1):
                began, layout, place = time.monotonic(), LAYOUTS[name], Path(folder, str(number))
                place.mkdir()
                ends = f"--data-path {corpus} --save {place}/saved --log-dir {place}/log"
                words = f"{MODEL} {TRAINING} {RUN} --global-batch-size {layout.batch} {layout.flags} {ends}".split()
                server.stdin.write(json.dumps([words, layout.ranks, f"{place}/output"]) + "\n")
                server.stdin.flush()
                answer = server.stdout.readline()
                if not answer:
                    raise SystemExit(f"{tree} cannot be imported")
                if any(json.loads(answer)):
                    found[name] = {"failed": (place / "output").read_text()[-2000:].splitlines()}
                else:
                    found[name] = read_numbers(place)
                hashes = " ".join(f"{quantity} {digest(value)[:8]}" for quantity, value in found[name].items())
                seconds = time.monotonic() - began
                print(f"{number:2}/{len(names)} {seconds:4.1f} s  {name}: {hashes}", file=sys.stderr, flush=True)
                if "failed" in found[name]:
                    print(*found[name]["failed"], sep="\n", file=sys.stderr, flush=True)
    return found


# -- comparison


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each number of a quantity, with its place: an iteration, a key or a tensor."""
    if isinstance(value, (dict, list)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value, 1):
            yield from leaves(each, f"{place} {key}")
    else:
        yield place, value


def differences(before: Trees, now: Trees) -> list[str]:
    """Name the layouts and numbers that differ; those that only one side has differ too."""
    found = []
    for name in before | now:
        old, new = before.get(name, {}), now.get(name, {})
        for quantity in old | new:
            olds, news = dict(leaves(old.get(quantity))), dict(leaves(new.get(quantity)))
            places = [p for p in olds | news if p not in olds or p not in news or repr(olds[p]) != repr(news[p])]
            found += [
                f"{name}: {quantity}{p}: {olds.get(p, 'missing')} before, {news.get(p, 'missing')} now"
                for p in places[:SHOWN]
            ]
            if len(places) > SHOWN:
                found.append(f"{name}: {quantity}: {len(places)} of {len(olds)} numbers differ")
    return found


@contextlib.contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """Check out a revision in a folder of its own, which goes afterwards."""
    with tempfile.TemporaryDirectory(prefix="megazero-before-") as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(tree), revision], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree to run; this one unless given")
    parser.add_argument("--write", type=Path, help="file for the tree's numbers")
    parser.add_argument("--against", type=Path, help="file of --write to compare with")
    parser.add_argument("--before", metavar="REVISION", help="revision to compare with")
    parser.add_argument("--only", default="", help="layouts whose name has this in it")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return 0
    names = [name for name in LAYOUTS if options.only in name]
    before: Trees = {}
    if options.before:
        with worktree(options.before) as tree:
            before = numbers_of(tree, names)
    elif options.against:
        before = {name: value for name, value in json.loads(options.against.read_text()).items() if name in names}
    found = numbers_of(options.tree.resolve(), names)
    if options.write:
        options.write.write_text(json.dumps(found, indent=1) + "\n")
    failed = [f"{name} fails" for name, numbers in found.items() if "failed" in numbers]
    different = differences(before, found) if options.before or options.against else []
    print(*failed, *different, f"{len(names)} layouts, {len(different)} differences", sep="\n")
    return 1 if failed or different else 0


if __name__ == "__main__":
    sys.exit(main())
