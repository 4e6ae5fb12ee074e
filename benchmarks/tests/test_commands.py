"""The commands that make the numbers in the documents still run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import device_gpu, gpu_check, gpu_parts
from benchmarks.device import to_toml
from benchmarks.reports.trained import small
from megazero.planner.time.devices import load_device
from tests.end_to_end.cli import run
from tests.helpers.programs import ROOT

pytestmark = pytest.mark.second


@pytest.mark.slow  # benchmarks/tests/test_paper.py rehearses such ranks
def test_the_table_of_bytes_on_real_and_pretended_ranks() -> None:
    """The program asserts that measured bytes equal the estimate's; the test compares them with the paper's."""
    done = run(sys.executable, "-m", "benchmarks.zero_table", "--real", 2, "--pretended", 64)
    assert done.returncode == 0, done.stderr
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line.startswith("| ")
    ]
    states = {(row[0], row[1]): (float(row[5]), float(row[6])) for row in table[1:]}
    assert states["64 (pretended)", "3"] == (16 / 64, 16 / 64)
    assert states["64 (pretended)", "2"] == (round(2 + 14 / 64, 4),) * 2
    assert states["2", "0"] == (16.0, 16.0)
    sent = {(row[0], row[1]): (float(row[7]), float(row[8])) for row in table[1:]}
    for stage in ("0", "1", "2"):
        assert sent["64 (pretended)", stage][0] == sent["64 (pretended)", stage][1]
    assert 2.9 < sent["64 (pretended)", "3"][0] <= sent["64 (pretended)", "3"][1]


@pytest.mark.slow
def test_the_papers_configurations_run_by_flags_alone() -> None:
    """The program asserts that measured bytes equal the estimate's; the test checks the configurations."""
    (table,) = small().values()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    found = {row[0][:2]: [int(cell.replace(",", "")) for cell in row[2:]] for row in rows if row[0]}
    assert set(found) == {"C1", "C2", "C3", "C4", "C5"}
    checkpoints, buffers, host, sent = ({c: row[i] for c, row in found.items()} for i in (3, 4, 7, 8))
    assert checkpoints["C1"] == checkpoints["C3"] == 2 * checkpoints["C2"] == 2 * checkpoints["C4"] == 2 * host["C5"]
    assert checkpoints["C5"] == host["C1"] == host["C4"] == 0
    assert buffers["C3"] < buffers["C1"]  # no full gradients that add up
    assert sent["C1"] == sent["C3"] < sent["C2"] == sent["C4"] == sent["C5"]


@pytest.mark.slow
def test_the_cost_of_observing_is_measured() -> None:
    small = "--rounds 2 --steps 1 --iterations 200 --runs 2".split()
    done = run(sys.executable, "-m", "benchmarks.observing", *small)
    assert done.returncode == 0, done.stderr
    assert "a step with statistics over one without: " in done.stdout and "page of 2 of them: " in done.stdout


@pytest.mark.slow
def test_one_process_against_transformers_runs() -> None:
    small = "--layers 1 --hidden 32 --heads 2 --seq-length 16 --vocabulary 64 --batch 1 --rounds 2".split()
    done = run(sys.executable, "benchmarks/single_process.py", *small)
    assert done.returncode == 0, done.stderr
    assert '"ratio"' in done.stdout


@pytest.mark.slow
def test_host_time_of_a_block_next_to_transformers_runs() -> None:
    """Launches do not depend on the machine: a GPT-2 block's two norms, four products, attention, GELU and two sums."""
    done = run(sys.executable, "-m", "benchmarks.host_time", "--layers", 2, "--turns", 2, "--calls", 3)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    found = {tuple(row[:3]): (row[3], row[4]) for row in rows}
    assert len(found) == 2 * 4 * 2 and all(float(us.split()[0]) > 0 for us, _ in found.values())
    assert found["gpt2", "forward", "megazero"][1] == "10"
    assert int(found["llama", "both", "transformers"][1]) > int(found["llama", "both", "megazero"][1])


@pytest.mark.slow
def test_zero_against_its_peers_runs() -> None:
    """The program itself asserts that all systems train the same model."""
    done = run(sys.executable, "benchmarks/zero.py", "--quick", "--stages", 3, "--no-memory")
    assert done.returncode == 0, done.stderr
    assert "FSDP2" in done.stdout


@pytest.mark.slow
def test_tensor_parallelism_against_dtensor_runs() -> None:
    """The program refuses to time a block whose results differ from the plain blocks'."""
    done = run(sys.executable, "benchmarks/tensor_parallel.py", "--quick")
    assert done.returncode == 0, done.stderr
    assert "DTensor" in done.stdout


@pytest.mark.slow
def test_context_parallelism_against_torchs_ring_runs() -> None:
    """The program refuses to time blocks whose results differ from the plain blocks'."""
    done = run(sys.executable, "benchmarks/context_parallel.py", "--quick")
    assert done.returncode == 0, done.stderr
    assert "torch's ring attention" in done.stdout


@pytest.mark.slow
def test_experts_against_transformers_under_fsdp2_run() -> None:
    """The program refuses to time systems that train another model; in one process, all rows stay where they are."""
    done = run(sys.executable, "benchmarks/experts.py", "--quick")
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    found = {row[0]: row[1:] for row in rows}
    assert {"transformers, eager, FSDP2", "transformers, grouped_mm, FSDP2", "megazero, ep, stage 1"} <= set(found)
    for part in ("route", "sort, exchange", "products", "activation, weighting", "combine", "norm, residual"):
        assert len(found[part]) == 3 and all(float(cell.split()[0]) > 0 for cell in found[part]), (
            f"{part} was not timed"
        )
    assert found["8"][:3] == ["2", "64", "64"] and found["64"][:3] == ["16", "512", "8"]


@pytest.mark.slow
def test_checkpoints_of_ranks_that_are_not_there() -> None:
    """400 ranks of the 100B preset take half a minute; here a model of 4 layers on 8."""
    small = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 257 --tensor-model-parallel-size 2"
    done = run(sys.executable, "benchmarks/checkpoint.py", "--pretend", 8, *small.split(), "--zero-stage", 2)
    assert done.returncode == 0, done.stderr
    tensors = 3 * (12 * 4 + 2 + 2)  # weights and two moments of the blocks, both tables, the last norm
    assert f" chunks of {tensors} tensors" in done.stdout and "PLANNING of a load" in done.stdout


@pytest.mark.slow
def test_speed_of_checkpoints_runs() -> None:
    done = run(sys.executable, "benchmarks/checkpoint.py", "--mb", 12, "--rounds", 2)
    assert done.returncode == 0, done.stderr
    assert "read ours" in done.stdout and "stall of async" in done.stdout


# Each of two parts ends once it sees the other's file: they run together.
MEETS = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).touch()
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.01)
print("met")
"""
PACKED = "import sys, tarfile; print(*sorted(tarfile.open(sys.argv[1]).getnames()))"


def test_the_check_of_gpus_goes_on_after_a_failing_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that fails and one that hangs are named, and the others run. Outputs are packed after each part."""
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    hangs = "import time; print('begun', flush=True); time.sleep(1000)"
    works = "print('| run | ms per step | planned ms |\\n|---|---|---|\\n| a | 30.0 | 20.0 |')"
    parts = (
        gpu_parts.Part("begins", "Does it?", ("-c", "print('begins')"), 1, 60),
        gpu_parts.Part("meets", "Does it?", ("-c", MEETS, here, there), 1, 300, together=True),
        gpu_parts.Part("is met", "Does it?", ("-c", MEETS, there, here), 1, 300, together=True),
        gpu_parts.Part("breaks", "Does it?", ("-c", "print('before'); raise SystemExit(3)"), 1, 60),
        gpu_parts.Part("hangs", "Does it?", ("-c", hangs), 1, 5),
        gpu_parts.Part("needs more", "Does it?", ("-c", "print('never')"), 1, 60, gpus=1000),
        gpu_parts.Part("outlasts", "Does it?", ("-c", "print('never')"), 3000, 3000),
        gpu_parts.Part("works", "Does it?", ("-c", works), 1, 60),
        gpu_parts.Part("packs", "Does it?", ("-c", PACKED, str(tmp_path / "outputs.tgz")), 1, 60),
    )
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    options = gpu_check.Options(folder=str(tmp_path), minutes=40)
    assert gpu_check.Check(options, gpu_check.Machine(1, "a machine"), tmp_path / "gpu.md").run() == 1
    text = (tmp_path / "gpu.md").read_text()
    assert "| breaks | failed: exit code 3 |" in text and "before" in text
    assert "| hangs | failed: not done after 5 s |" in text and "begun" in text
    assert "| needs more | skipped: it needs 1000 GPUs, and there are 1 |" in text
    assert "| outlasts | skipped: it takes about 3000 s, and " in text
    assert not (tmp_path / "needs-more.out").exists() and not (tmp_path / "outlasts.out").exists()
    assert "| works | ok |" in text and "| works | a | 30.0 | 20.0 | 1.50 |  |  |  |" in text
    ended = {"begins", "meets", "is-met", "breaks", "hangs", "works"}
    outputs = {f"{name}.{end}" for name in ended for end in ("out", "err")}
    assert outputs < {*(tmp_path / "packs.out").read_text().split()}


def test_help_lists_the_parts_in_order() -> None:
    titles = [line[2:].split(" (about")[0] for line in gpu_check.description().splitlines() if line.startswith("- ")]
    together = [part.title for part in gpu_check.PARTS if part.together]
    assert titles[0] == "Versions" and titles[1 : 1 + len(together)] == together
    assert sorted(titles) == sorted(part.title for part in gpu_check.PARTS)


def test_one_gpu_is_checked_in_eight_and_a_half_minutes() -> None:
    """Add up expected seconds of all but the stream sanitizer; parts that run together last as long as the longest."""
    one = [part for part in gpu_check.PARTS if part.gpus < 2 and "sanitizer" not in part.title]
    alone = sum(part.expected for part in one if not part.together)
    assert 450 < alone + max(part.expected for part in one if part.together) <= 510
    assert len({part.name for part in gpu_check.PARTS}) == len(gpu_check.PARTS)


def test_a_gpus_assumed_constants_are_replaced_by_measured_ones(tmp_path: Path) -> None:
    """Here the CPU stands in for it, so that the numbers have no meaning."""
    h100, file = load_device("h100-80gb"), tmp_path / "mine.toml"
    found = device_gpu.measured(h100, torch.device("cpu"), device_gpu.TINY)
    file.write_text(to_toml(found, 'a "card"'))
    read = load_device(str(file))
    measured = {name for name, constant in read.constants.items() if constant.source == device_gpu.SOURCE}
    compute = {f"compute.{name}" for name in ("fraction", "attention", "attention_64")}
    assert measured == compute | {"memory.fraction", "host.bandwidth", "overhead.kernel", "overhead.call"}
    assert all(read[name] == pytest.approx(found[name], rel=1e-5) and read[name] > 0 for name in measured)
    kept = read.constants.keys() - measured
    assert read.cards == h100.cards and all(read.constants[name] == h100.constants[name] for name in kept)


def test_the_command_for_a_machine_without_a_network(tmp_path: Path) -> None:
    """A stand-in for its python writes down its arguments, and the folders of packages."""
    python, wheels = tmp_path / "python3", tmp_path / "wheels"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH | $*"\n')
    python.chmod(0o755)
    wheels.mkdir()
    (wheels / "tyro-1-py3-none-any.whl").touch()
    env = {"PATH": os.environ["PATH"], "PYTHON": str(python), "WHEELS": str(wheels)}
    words = ["bash", "scripts/gpu_check.sh", "--minutes", "8.5", "--folder", "out"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    unpacks, checks = done.stdout.splitlines()
    site = checks.partition(":")[0]
    assert checks == f"{site}:{ROOT} | -m benchmarks.gpu_check --minutes 8.5 --folder out"
    assert "--no-index" in unpacks and unpacks.endswith(f"--target {site} {wheels}/tyro-1-py3-none-any.whl")


@pytest.mark.slow
def test_the_check_of_gpus_runs_dry_on_a_cpu(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "benchmarks.gpu_check", "--folder", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no part failed" in done.stdout and done.stdout.count("| megazero") >= 3
    assert "skipped: it needs 1 GPUs, and there are 0" in done.stdout or torch.cuda.is_available()
    assert "An iteration takes" in done.stdout and "for 0.50 of its tokens" in done.stdout


@pytest.mark.slow
def test_the_check_of_gpus_runs_dry_on_pretended_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On four of them, at tiny sizes: every part runs, and finds no fault of order, or is skipped with its reason."""
    findings = tmp_path / "findings"
    prefix = "-m", "tests.end_to_end.on_pretended_gpu", str(findings)
    proofs = [part.title for part in gpu_check.PARTS if part.title.startswith("Proof")]
    starts = "it starts processes, which the pretended GPU is not in"
    cannot = dict.fromkeys(["Several GPUs are the same model as one", *proofs], starts)
    machine = gpu_check.Machine(4, "four pretended GPUs", prefix, True, cannot)
    output = tmp_path / "gpu.md"
    code = gpu_check.Check(gpu_check.Options(folder=str(tmp_path)), machine, output).run()
    text = output.read_text()
    assert code == 0, text
    for part in gpu_check.PARTS:
        reason = f"skipped: {cannot[part.title]}" if part.title in cannot else "ok"
        assert f"| {part.title} | {reason} |" in text
    ranks = sum(part.ranks for part in gpu_check.PARTS if part.title not in cannot)
    lines = [json.loads(line) for line in findings.read_text().splitlines()]
    assert [line["findings"] for line in lines] == [[]] * ranks
    assert "failed:" not in text and "No GPU here" not in text and "[100%]" in text


@pytest.mark.slow
def test_a_run_next_to_busy_processes() -> None:
    done = run(sys.executable, "-m", "benchmarks.busy_neighbours", "--neighbours", 1, "--rounds", 1, "--iters", 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n| ") == 4 and "next to 1 busy processes" in done.stdout


@pytest.mark.slow
def test_a_chosen_layout_next_to_others() -> None:
    few = "--ranks 2 --layouts 2 --best 1 --rounds 1 --steps 1".split()
    done = run(sys.executable, "benchmarks/layouts.py", *few, "--flags=--num-layers 1 --seq-length 16")
    assert done.returncode == 0, done.stderr
    assert "**auto** `" in done.stdout and "chosen / fastest: " in done.stdout
