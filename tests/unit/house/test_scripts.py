"""scripts/slurm/pretrain_*.sbatch and scripts/pretrain_*.sh: each starts the preset of its name."""

import os
import re
import subprocess
from pathlib import Path

from megazero.cluster.launcher import read_words
from megazero.flags.cli import parse
from tests.helpers.table import for_each
from tests.unit.flags.test_presets import PAPER, SHAPES, TODAY

ROOT = Path(__file__).parents[3]
SLURM = sorted((ROOT / "scripts" / "slurm").glob("pretrain_*.sbatch"))
ONE_MACHINE = sorted((ROOT / "scripts").glob("pretrain_*.sh"))


def preset_of(path: Path) -> str:
    """pretrain_100b.sbatch -> zero-100b, pretrain_gpt_100b_h100.sbatch -> gpt-100b-h100"""
    name = path.stem.removeprefix("pretrain_").replace("_", "-")
    return name if name.startswith("gpt-") else f"zero-{name}"


def test_every_run_of_many_gpus_has_a_script() -> None:
    assert {preset_of(path) for path in SLURM} == {*PAPER, *TODAY}
    assert len(ONE_MACHINE) == 4


@for_each("path", SLURM)
def test_a_slurm_script_asks_for_the_ranks_of_its_preset(path: Path) -> None:
    """The flags that it adds are parsed, and handed to pretrain.sbatch with the user's behind them."""
    text = path.read_text()
    asked = {key: int(number) for key, number in re.findall(r"^#SBATCH --([a-z-]+)=(\d+)$", text, re.MULTILINE)}
    preset = preset_of(path)
    assert asked["nodes"] * asked["ntasks-per-node"] == SHAPES[preset][0]
    assert asked["gpus-per-node"] == asked["ntasks-per-node"] == 64 / asked["cpus-per-task"]
    flags = re.search(r"pretrain\.sbatch (.*) \"\$@\"", text, re.DOTALL)[1].replace("\\\n", "").split()
    config = parse([*flags, "--save", "runs/a"])
    assert config.preset == preset and config.checkpoint.async_save and config.monitor.hang_timeout == 8
    done = subprocess.run(["bash", path], cwd=ROOT, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 2 and "not inside a SLURM job" in done.stderr


@for_each("path", ONE_MACHINE)
def test_a_script_for_one_machine_prints_its_command_and_runs_it(path: Path, tmp_path: Path) -> None:
    """The interpreter is a stand-in that prints its arguments."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    command = ["bash", path, "--nproc", "2", "--lr", "5e-4"]
    env = {"PATH": "/usr/bin:/bin", "PYTHON": str(python)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    said, *words = done.stdout.splitlines()
    assert said.startswith("command: bash ") and "--nproc 2 --lr 5e-4" in said
    assert words[:2] == [str(ROOT / "scripts" / "launch.py"), str(ROOT / "pretrain_gpt.py")]
    own, flags = read_words(words[2:])
    assert own == {"--nproc": "2"} and parse([*flags, "--save", "runs/a"]).optimizer.lr == 5e-4


def test_a_requeued_job_that_has_not_saved_starts_where_it_did(tmp_path: Path) -> None:
    """It went back to iteration 3 of 9, and its node was lost before and after its first save. Stand-ins for SLURM."""
    for name, line in (("srun", 'echo "flags: ${*: -4}"'), ("scontrol", "echo node1")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "true", "PROGRAM": "srun", "SLURM_JOB_NODELIST": "node1"}
    command = ["bash", ROOT / "scripts" / "slurm" / "pretrain.sbatch", "--save", "s", "--load", "s/iter_0000003"]
    (tmp_path / "s").mkdir()
    flags = []
    for restarts, latest in ((0, 9), (1, 9), (2, 5)):
        (tmp_path / "s" / "latest").write_text(f"iter_000000{latest}\n")
        os.utime(tmp_path / "s" / "latest", (latest, latest))
        job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env | job)
        assert done.returncode == 0, done.stderr
        flags += re.findall("flags: (.*)", done.stdout)
    given = "--save s --load s/iter_0000003"
    assert flags == [given, given, "s/iter_0000003 --load s --no-finetune"]
