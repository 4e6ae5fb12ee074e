"""Commands of pages, as they are typed in an empty folder, with small numbers: the last value of a flag counts."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.programs import ROOT

TRAINING = "megazero train --preset tiny "
ITERATIONS = 50  # instead of the section's; one evaluation, and more than the preset's warm-up


def lines_of(page: str, section: str) -> list[str]:
    """The command lines of a section, without those under its smaller headings."""
    text = re.split(r"\n#", (ROOT / page).read_text().split(f"\n{section}\n")[1])[0]
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@pytest.fixture
def typed(tmp_path: Path) -> dict[str, str]:
    """The environment of a user: `megazero`, `torchrun` and `python` of this interpreter on the path."""
    (tmp_path / "bin").mkdir()
    for name, words in (("megazero", "-m megazero"), ("torchrun", "-m torch.distributed.run"), ("python", "")):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        command.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def type_in(line: str, folder: Path, env: dict[str, str]) -> str:
    done = subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_your_own_text_becomes_a_model_that_transformers_loads(tmp_path: Path, typed: dict[str, str]) -> None:
    documents = (path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    (tmp_path / "input.txt").write_text("\n".join(documents))
    lines = lines_of("README.md", "## Your own text")
    assert len(lines) == 6 and sum(line.startswith(TRAINING) for line in lines) == 1
    lines = [f"{line} --train-iters {ITERATIONS}" if line.startswith(TRAINING) else line for line in lines]
    said = {line: type_in(line, tmp_path, typed) for line in lines}
    evaluated = next(out for line, out in said.items() if "--eval-only" in line)
    assert f"iteration {ITERATIONS}: validation loss " in evaluated and "| perplexity " in evaluated
    assert next(out for line, out in said.items() if " generate " in line).startswith("Once")
    assert "const DATA = {" in (tmp_path / "runs" / "a" / "report.html").read_text()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exports" / "a", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exports" / "a", local_files_only=True)
    text = (tmp_path / "input.txt").read_text()[:600]
    ids = tokenizer(text, return_tensors="pt").input_ids
    loss = model(input_ids=ids, labels=ids).loss.item()
    untrained = type(model)(model.config)(input_ids=ids, labels=ids).loss.item()
    assert loss < untrained - 1  # the weights are those that were trained


@pytest.mark.second
def test_torchrun_trains_on_two_nodes_and_resumes(tmp_path: Path, typed: dict[str, str]) -> None:
    """Two of its agents, here both on this machine, with the same command; the second time from the checkpoint."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{probe.getsockname()[1]}"
    (line,) = (line for line in lines_of("docs/containers.md", "## Nodes without SLURM") if line.startswith("torchrun"))
    line = line.replace("node0:29400", meeting).replace("/shared/run", "run")
    flags = "--preset tiny --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data"
    flags += " --vocab-size 64 --micro-batch-size 1 --global-batch-size 2 --zero-stage 2 --lr-warmup-iters 0"
    for last, begun in ((2, 0), (3, 2)):
        words = f"{flags} --train-iters {last}"
        typed_line = line.replace("--nproc-per-node=8", "--nproc-per-node=1").replace("FLAGS", words)
        nodes = [
            subprocess.Popen(
                ["bash", "-c", f"exec {typed_line}"],
                cwd=tmp_path,
                env=typed,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for _ in range(2)
        ]
        printed = "".join(node.communicate()[0] for node in nodes)
        assert [node.returncode for node in nodes] == [0, 0], printed
        assert f"iteration {last}/{last}" in printed and "2 data-parallel" in printed, printed
        assert (f"iter_{begun:07d}" in printed) == bool(begun), printed
