"""Environment variables of torch's libraries: set before torch is imported, unless the user has set them."""

import os
import subprocess
import sys

import pytest
import torch

from megazero.cluster import launch
from megazero.environment import set_defaults
from megazero.world import World
from tests.end_to_end.cli import ROOT
from tests.helpers.table import for_each


@for_each(
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


@for_each(
    ("release", "wanted"),
    [
        ("2.13.0+cu130", "expandable_segments:True,pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64"),
        ("2.14.1", "expandable_segments:True,pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64"),
        ("2.12.0", "expandable_segments:True"),  # an unknown limit would be an error
    ],
)
def test_limits_of_pinned_memory_that_torch_knows(release: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr("megazero.environment.version", lambda name: release)
    set_defaults()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == wanted


@for_each(
    ("settings", "refused"),
    [
        ("pinned_max_round_threshold_mb:1", True),  # of megazero's own launchers, once
        ("pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:128", True),
        ("expandable_segments:True,pinned_max_cached_size_mb:8,pinned_max_round_threshold_mb:8", False),
        ("pinned_max_cached_size_mb:8", False),
        ("", False),
    ],
)
def test_limits_that_make_torch_overwrite_memory_are_refused(
    settings: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Note [pinned memory]; by the start of a rank on a GPU."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    answers = {"is_available": True, "device_count": 1, "set_device": None, "get_device_name": "a card"}
    answers |= {"get_device_capability": (9, 0), "get_arch_list": ["sm_90"]}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    if refused:
        with pytest.raises(ValueError, match=r"^PYTORCH_CUDA_ALLOC_CONF has .* without pinned_max_cached_size_mb:"):
            launch.pick_device(World(0, 1, 0, "single"))
    else:
        assert launch.pick_device(World(0, 1, 0, "single")) == torch.device("cuda", 0)


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a new process without settings of OpenMP."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env | variables, capture_output=True, text=True)


AT_IMPORT_OF_TORCH = """
import os, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
"""


@for_each(
    "program",
    ["pretrain_gpt", "megazero.console.generate_tool", "data_tools.preprocess_data", "scripts.measure_device"],
)
def test_a_program_sets_its_defaults_before_it_imports_torch(program: str) -> None:
    done = python(f"{AT_IMPORT_OF_TORCH}\nimport {program}, torch")
    assert (done.returncode, done.stdout) == (0, "1000\n"), done.stderr


@pytest.mark.second
@pytest.mark.long
def test_openmp_reads_the_setting_when_a_program_loads_torch() -> None:
    """GNU OpenMP prints its settings as it is loaded."""
    done = python("import megazero, torch", OMP_DISPLAY_ENV="verbose")
    assert done.returncode == 0, done.stderr
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch has another OpenMP than GNU's")
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr
