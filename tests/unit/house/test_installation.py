"""Installations: the core, the extras, the packages of the two commands, and the message of a missing package."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megazero.command.prepare import prepare
from megazero.flags.cli import read
from megazero.flags.foreign.flag_table import FOLDER
from megazero.flags.presets import PRESETS
from megazero.optional import EXTRAS, load_optional, require_optional
from megazero.planner.expected import PUBLISHED
from megazero.planner.time.devices import DEVICES
from megazero.world import World
from tests.helpers.table import for_each

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~ ]", line)[0] for line in requirements}


def test_the_two_commands_install_the_core_and_all_extras() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    core, listed = names(PROJECT["project"]["dependencies"]), [line for line in lines if line and line[0] != "#"]
    assert core == {"torch", "numpy", "safetensors", "tokenizers", "tyro", "rich", "msgspec", "jinja2"}
    assert names([line for line in listed if line and not line.startswith("#")]) == core.union(
        *map(names, extras.values())
    )
    assert {package: extra for extra, lines in extras.items() for package in names(lines)} == EXTRAS


def test_console_commands_and_their_files_are_in_the_package() -> None:
    targets = [target.split(":") for target in PROJECT["project"]["scripts"].values()]
    code = "".join(f"import {module}; assert callable({module}.{function})\n" for module, function in targets)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    data = ((PRESETS, "megazero.flags"), (FOLDER, "megazero.flags.foreign"), (DEVICES, "megazero.planner"))
    for folder, package in data:
        *beside, pattern = PROJECT["tool"]["setuptools"]["package-data"][package]
        packaged = {path.name for path in (ROOT / package.replace(".", "/")).glob(pattern)}
        assert packaged == {path.name for path in folder.glob("*.toml")} != set()
        assert not beside or PUBLISHED in (ROOT / package.replace(".", "/")).glob(*beside)


@for_each(("module", "extra"), [("matplotlib.figure", "plots"), ("tiktoken", "hf"), ("datasets", "data")])
def test_a_missing_package_is_asked_for(monkeypatch: pytest.MonkeyPatch, module: str, extra: str) -> None:
    package = module.partition(".")[0]
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were missing
    message = rf"^--flag x: needs the Python package {package}, .*; pip install {package}, or, .* -e '\.\[{extra}\]'$"
    for look in (lambda: load_optional(module, "--flag x"), lambda: require_optional(package, "--flag x")):
        with pytest.raises(ValueError, match=message):
            look()


def test_the_pinned_torch_is_one_that_every_installation_may_have() -> None:
    """It is in the range of the package, as is the newest tested one; README names both, and the CPU build."""
    (range_,) = (Requirement(line) for line in PROJECT["project"]["dependencies"] if line.startswith("torch"))
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "requirements.txt").read_text(), re.M)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"`requirements.txt` (for the scripts below) pins {pinned}" in readme
    assert f"pip install torch=={pinned} --index-url https://download.pytorch.org/whl/cpu" in readme
    first, last, tested, newest = re.search(
        r"torch (\S+) to (\S+); it is tested with (\S+) and (\S+)\.", readme
    ).groups()
    assert tested == pinned and newest.startswith(f"{last}.")
    major, minor = map(int, last.split("."))
    allowed = [f"{first}.0", pinned, newest]
    assert all(version in range_.specifier for version in allowed)
    assert f"{major}.{minor + 1}.0" not in range_.specifier


def test_a_missing_logger_is_noticed_before_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The corpus is missing too, and the message is about the package."""
    for package, flag in (("tensorboard", "--tensorboard-dir"), ("wandb", "--wandb-project")):
        monkeypatch.setitem(sys.modules, package, None)
        words = ["--preset", "tiny", "--data-path", str(tmp_path / "none"), "--log-dir", str(tmp_path), flag, "t"]
        with pytest.raises(ValueError, match=f"^{flag} t: needs the Python package {package}, which is not installed"):
            prepare(read(words), World(0, 1, 0, "single"))


# A run of the core alone: no module of an extra can be imported.
CORE = """
import sys
for package in {packages}:
    sys.modules[package] = None
sys.argv[1:] = {argv!r}
import pretrain_gpt
pretrain_gpt.command()
"""


def core(*argv: object) -> subprocess.CompletedProcess[str]:
    code = CORE.format(packages=sorted(EXTRAS), argv=list(map(str, argv)))
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_core_alone_trains(tmp_path: Path) -> None:
    """Metrics, a report, a checkpoint and its resume need no extra; --wandb-project does, and names it."""
    model = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 50".split()
    common = [*model, "--mock-data", "--save", tmp_path, "--load", tmp_path, "--log-dir", tmp_path]
    done = core(*common, "--train-iters", 2)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "iter_0000002").is_dir() and (tmp_path / "metrics.jsonl").read_text().count("\n") == 2
    refused = core(*common, "--train-iters", 4, "--wandb-project", "p")
    assert refused.returncode == 1 and "needs the Python package wandb" in refused.stderr
    assert "pip install wandb" in refused.stderr
