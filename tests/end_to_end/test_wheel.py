"""The wheel, installed into an environment of its own, from a folder that has nothing else."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.helpers.programs import ROOT

pytestmark = [pytest.mark.second, pytest.mark.long]

SOURCES = ("megazero", "data_tools", "scripts", "pretrain_gpt.py", "pyproject.toml", "README.md", "LICENSE")
MOST_BYTES = 2 << 20


def run(*words: object, cwd: Path, code: int = 0) -> str:
    """Run a program, without this repository on its path; return all that it printed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == code, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def run_each(python: Path, lines: list[list[object]], cwd: Path) -> str:
    """Run commands of `megazero` one after another in one process, which imports torch once."""
    program = "import json, sys; from megazero.console.commands import run_command; "
    program += "sys.exit(max(run_command(words) for words in json.loads(sys.argv[1])))"
    return run(python, "-P", "-c", program, json.dumps([list(map(str, words)) for words in lines]), cwd=cwd)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, because setuptools writes into the folder."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for name in SOURCES:
        source, target = ROOT / name, folder / "source" / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    pip = sys.executable, "-m", "pip", "--disable-pip-version-check"
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder / "source", cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def command(built: Path) -> Path:
    """`megazero` of an environment with the wheel, which sees the packages of this one."""
    home = built.parent / "venv"
    venv.create(home, with_pip=False)
    pip = sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", home / "bin" / "python"
    run(*pip, "install", "--no-deps", "--no-index", built, cwd=built.parent)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin" / "megazero"


def test_it_has_the_files_that_are_no_code(built: Path) -> None:
    names = {*zipfile.ZipFile(built).namelist()}
    data = [path for pattern in ("*.toml", "*.jinja", "*.json") for path in (ROOT / "megazero").rglob(pattern)]
    for folder, package in (("presets", "flags/presets"), ("devices", "planner/device_files")):
        data += [ROOT / "megazero" / package / path.name for path in (ROOT / "scripts" / folder).glob("*.toml")]
    assert len(data) > 70
    assert {path.relative_to(ROOT).as_posix() for path in data} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]
    assert built.stat().st_size < MOST_BYTES


def test_it_works_from_an_empty_folder(command: Path, tmp_path: Path) -> None:
    """Train, resume with two ranks, generate, report, plan, prove: all that the README's first page promises."""
    (tmp_path / "pretrain_gpt.py").write_text("raise SystemExit('another project, such as Megatron-LM')")
    python = command.parent / "python"
    find = "import importlib.util; print(importlib.util.find_spec('megazero').origin)"
    where = run(python, "-c", find, cwd=tmp_path)
    assert where.startswith(str(command.parent.parent))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("To be, or not to be. " * 300)
    corpus = "--input text --output-prefix corpus --tokenizer byte --append-eod --workers 1".split()
    assert "megazero train --preset tiny" in run(command, "preprocess", *corpus, cwd=tmp_path)
    small = "--preset tiny --num-layers 1 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 --seq-length 16"
    flags = [*small.split(), *"--micro-batch-size 1 --global-batch-size 2 --eval-interval 0 --log-dir run".split()]
    train = [*flags, "--save", "run", "--load", "run", "--data-path", "corpus_text_document"]
    assert "iteration 2/2" in run(command, "train", *train, "--train-iters", 2, cwd=tmp_path)
    printed = run(command, "launch", "--nproc", 2, *train, "--train-iters", 3, cwd=tmp_path)
    assert "iteration 3/3" in printed and "another project" not in printed
    words: list[object] = ["--load", "run", "--prompt", "To", "--max-new-tokens", 2]
    assert "To" in run(command, "launch", "generate", "--nproc", 2, *words, cwd=tmp_path)
    printed = run_each(
        python,
        [
            ["checkpoint", "list", "run"],
            ["report", "run"],
            ["program", *small.split(), "--vocab-size", 257, "--zero-stage", 3, "--world-size", 2],
            ["plan", "--preset", "gpt2-124m", "--device-type", "h100-80gb"],
            ["generate", *words],  # its process ends at once
        ],
        cwd=tmp_path,
    )
    for said in ("iter_0000003", "\nTo", "run/report.html", "Gather", "expected:"):
        assert said in printed, said
    assert "PASS: this layout" in run(command, "verify", *small.split(), "--zero-stage", 1, "--steps", 2, cwd=tmp_path)
    refused = run(command, "train", "--preset", "tiny", cwd=tmp_path, code=1)
    assert "megazero preprocess" in refused and ".py" not in refused
