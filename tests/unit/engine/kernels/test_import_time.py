"""The start of a process: modules that it does not import."""

import subprocess
import sys

import pytest

from tests.helpers.programs import ROOT

HEAVY = "datasets jinja2 matplotlib pandas rich scipy sentencepiece sympy tokenizers transformers triton wandb".split()
FLAGS = (
    "--architecture gpt-oss --num-experts 4 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--vocab-size 50 --mock-data --train-iters 2 --micro-batch-size 1 --global-batch-size 2"
)


@pytest.mark.second
@pytest.mark.long
def test_a_start_imports_no_heavy_modules() -> None:
    """A step of training needs none of them; `torch` itself imports parts of some others."""
    program = f"""
import gc, sys
from megazero.console.commands import run_command
run_command(["train", *"{FLAGS}".split()])
print(sorted(set({HEAVY}) & set(sys.modules)), "torch._dynamo" in sys.modules, gc.isenabled(), gc.get_freeze_count())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[] False True 0", done.stdout + done.stderr
    assert "iteration 2/2" in done.stdout
