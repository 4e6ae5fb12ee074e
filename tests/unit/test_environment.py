"""Environment variables of torch's libraries: set before torch is imported, unless the user has set them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megazero.environment import DEFAULTS, set_defaults
from tests.end_to_end.cli import ROOT


@pytest.mark.parametrize(
    ("given", "variable", "wanted"),
    [
        ({}, "GOMP_SPINCOUNT", "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "GOMP_SPINCOUNT", "7"),
        ({"OMP_WAIT_POLICY": "active"}, "GOMP_SPINCOUNT", None),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "PYTORCH_CUDA_ALLOC_CONF", None),
        ({}, "CUDA_DEVICE_MAX_CONNECTIONS", "32"),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, "TORCH_FR_BUFFER_SIZE", "0"),
    ],
)
def test_a_users_own_setting_stands(
    given: dict[str, str], variable: str, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    set_defaults()
    assert os.environ.get(variable) == wanted


def test_cached_pinned_memory_is_always_rounded() -> None:
    """torch 2.13 hands out too small a block otherwise: Note [pinned memory]."""
    (settings,) = (default.value for default in DEFAULTS if default.variable == "PYTORCH_CUDA_ALLOC_CONF")
    limits = dict(setting.split(":") for setting in settings.split(","))
    threshold = int(limits["pinned_max_round_threshold_mb"])
    assert threshold == int(limits["pinned_max_cached_size_mb"]) and threshold & (threshold - 1) == 0


@pytest.mark.parametrize(
    "program", ["pretrain_gpt", "scripts.generate", "data_tools.preprocess_data", "tests.conftest"]
)
def test_openmp_reads_the_setting_when_a_program_loads_torch(program: str) -> None:
    """GNU OpenMP prints its settings as it is loaded."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    code = f"import {program}, torch"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch has another OpenMP than GNU's")
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr
