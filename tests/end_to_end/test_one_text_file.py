"""README's section "Your own text", as it is typed: from input.txt to a model that transformers loads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.programs import ROOT

TRAINING = "megazero train --preset tiny "
ITERATIONS = 50  # instead of the section's; one evaluation, and more than the preset's warm-up


def section() -> list[str]:
    """The command lines of the section, with fewer iterations: the last value of a flag counts."""
    text = (ROOT / "README.md").read_text().split("\n## Your own text\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = block.replace("\\\n", " ").splitlines()
    assert sum(line.startswith(TRAINING) for line in lines) == 1
    return [f"{line} --train-iters {ITERATIONS}" if line.startswith(TRAINING) else line for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_section_runs_as_it_is_written(tmp_path: Path) -> None:
    """In an empty folder, with `megazero` of this interpreter on the path."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "megazero"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megazero "$@"\n')
    command.chmod(0o755)
    documents = (path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    (tmp_path / "input.txt").write_text("\n".join(documents))
    path = f"{command.parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    said: dict[str, str] = {}
    for line in section():
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        said[line] = done.stdout
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
