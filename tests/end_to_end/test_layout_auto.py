"""`--layout auto` as users run it: any number of ranks, the same loss curve, and flags that make the run again."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.end_to_end.cli import metrics, pretrain
from tests.helpers.rings import by_default

TINY = (
    "--preset tiny --num-layers 4 --hidden-size 64 --seq-length 64 --tokenizer byte --mock-data --global-batch-size 8 "
    "--train-iters 3 --lr-warmup-iters 0"
)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Log folder of a single process with the default layout."""
    folder = tmp_path_factory.mktemp("given")
    done = pretrain(*TINY.split(), "--micro-batch-size", 2, "--log-dir", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    "ranks",
    [*by_default([1, 2, 3], 1), pytest.param(4, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)],
)
def test_any_number_of_ranks_trains_the_same_curve(ranks: int, given: Path, tmp_path: Path) -> None:
    """A sum of fp32 products differs between layouts by its order alone."""
    done = pretrain(*TINY.split(), "--layout", "auto", "--log-dir", tmp_path, ranks=ranks)
    assert done.returncode == 0, done.stderr
    for ours, wanted in zip(metrics(tmp_path), metrics(given), strict=True):
        assert abs(ours["loss"] - wanted["loss"]) < 1e-5 * wanted["loss"]
    said = " ".join(done.stdout.split())
    assert "auto chosen by --layout auto: " in said and " s a step, " in said and "To fix this layout, " in said
    values = tomllib.loads((tmp_path / "config.toml").read_text())
    assert "layout" not in values and values["global-batch-size"] == 8
    fixed = re.search(r"instead of --layout auto: (.*?) memory ", said)
    for flag, value in re.findall(r"--([a-z-]+)(?: (\w[\w-]*))?", fixed[1] if fixed else ""):
        assert str(values[flag]).lower() == (value or "true")


@pytest.mark.second
def test_the_config_of_a_run_is_its_layout(tmp_path: Path) -> None:
    """It trains without a choice, and with --layout auto on other ranks another is chosen."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    done = pretrain(
        *TINY.split(), *"--layout auto --recompute selective --device-type cpu --log-dir".split(), first, ranks=2
    )
    assert done.returncode == 0, done.stderr
    config = first / "config.toml"
    values = tomllib.loads(config.read_text())
    assert values["recompute"] == "selective" and values["micro-batch-size"] == 4
    done = pretrain("--preset", config, "--log-dir", second, ranks=2)
    assert done.returncode == 0 and "--layout auto" not in done.stdout, done.stderr
    assert [m["loss"] for m in metrics(second)] == [m["loss"] for m in metrics(first)]
    done = pretrain("--preset", config, "--layout", "auto", "--micro-batch-size", 2, "--log-dir", third)
    assert done.returncode == 0, done.stderr
    values = tomllib.loads((third / "config.toml").read_text())
    assert values["micro-batch-size"] == 2 and "recompute" not in values


@pytest.mark.second
def test_a_plan_and_a_rehearsal_choose_too(tmp_path: Path) -> None:
    done = pretrain(*TINY.split(), *"--plan --layout auto --world-size 6 --device-type cpu --log-dir".split(), tmp_path)
    assert done.returncode == 0 and "chosen by --layout auto: " in done.stdout, done.stderr
    layout = json.loads((tmp_path / "plan.json").read_text())["layout"]
    assert layout["pp"] * layout["dp"] * layout["tp"] == 6
    done = pretrain(*TINY.split(), *"--rehearse 4 --rehearse-on cpu --layout auto".split())
    assert done.returncode == 0 and "chosen by --layout auto: dp 4" in done.stdout, done.stderr
    done = pretrain(*TINY.split(), *"--rehearse 4 --layout auto".split())
    assert done.returncode == 1 and "--device-type is missing; name one of" in done.stderr
