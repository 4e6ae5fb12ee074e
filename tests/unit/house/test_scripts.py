"""scripts/slurm/pretrain_*.sbatch and scripts/pretrain_*.sh: each starts the preset of its name."""

import os
import re
import signal
import subprocess
from pathlib import Path

from megazero.cluster.launcher import read_words
from megazero.flags.cli import parse
from tests.helpers.table import for_each
from tests.unit.flags.test_presets import LAYOUTS, PAPER, TODAY

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
    assert asked["nodes"] * asked["ntasks-per-node"] == LAYOUTS[preset][0]
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


# Stands in for srun: a run that knows its --save, a preset's, begins, saves and is ended by a signal of its scheduler.
BEGINS_AND_SAVES = """\
#!/bin/bash
echo "flags: ${@: -2}"
[ -z "$SAVES_IN" ] || { echo "$SAVES_IN"; stat -c %Y "$SAVES_IN/latest" 2>/dev/null || echo; } >"$MEGAZERO_BEGUN"
if [ -n "$SAVES_AT" ]; then echo iter_7 >"$SAVES_IN/latest"; touch -d @"$SAVES_AT" "$SAVES_IN/latest"; fi
exit 75
"""


def test_a_job_is_requeued_if_the_run_saved_wherever_its_save_folder_comes_from(tmp_path: Path) -> None:
    """It may be in a preset, Hugging Face's flag, or --save=DIR; a later start resumes there. SLURM has stand-ins."""
    programs = {"srun": BEGINS_AND_SAVES, "scontrol": '#!/bin/bash\n[ "$1" = show ] || kill -TERM $PPID\necho node1\n'}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "true", "PROGRAM": "srun", "SLURM_JOB_NODELIST": "node1"}

    def start(restarts: int, saves_at: str, *flags: str, knows: bool = True, job: str = "7") -> str:
        job_env = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restarts), "SAVES_AT": saves_at}
        job_env["SAVES_IN"] = str(tmp_path / "s") if knows else ""
        command = ["bash", ROOT / "scripts" / "slurm" / "pretrain.sbatch", "--log-dir", "l", *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
        said = ""
        with subprocess.Popen(command, cwd=tmp_path, env=env | job_env, text=True, **pipes) as job:
            for line in job.stdout:
                said += line
                if line.startswith("requeued"):  # then the script waits for SLURM to end it
                    os.killpg(job.pid, signal.SIGKILL)
        return said

    (tmp_path / "s").mkdir()
    assert "not requeued: nothing was saved since the start" in start(0, "", "--preset", "p.toml")
    assert "requeued: resumes from iter_7" in start(0, "100", "--preset", "p.toml")
    requeued = start(1, "200", "--preset", "p.toml")  # it saved in its first start
    assert f"flags: {tmp_path / 's'} --no-finetune" in requeued and "resumes from iter_7" in requeued
    assert "not requeued: nothing was saved since iter_7" in start(2, "", "--preset", "p.toml")
    assert "flags: --preset p.toml" in start(0, "", "--preset", "p.toml", job="8")  # another job, in the same folder
    assert "flags: --preset p.toml" in start(1, "", "--preset", "p.toml", job="8")  # which has not saved
    for flags in (["--output_dir", "s"], ["--output_dir=s"], ["--output-dir", "s"], ["--save=s"]):
        at = str(300 + len(flags) + len(flags[0]))
        assert "requeued: resumes from iter_7" in start(0, at, *flags), flags


# Stands in for srun: ranks that begin when the file `go` exists, and end at the signal.
BEGINS_LATE = """\
#!/bin/bash
until [ -e go ]; do sleep 0.02; done
[ -e dies ] && exit 143
printf '\\n\\n' >"$MEGAZERO_BEGUN"
until [ -e signalled ]; do sleep 0.02; done
exit 75
"""


def test_ranks_that_have_not_begun_are_not_signalled_until_they_have(tmp_path: Path) -> None:
    """USR1 would end them without a word. The job belongs to an array. Stand-ins for SLURM."""
    programs = {"srun": BEGINS_LATE, "scontrol": "#!/bin/bash\necho node1\n"}
    programs |= {"scancel": '#!/bin/bash\ntest -e l/ranks/5_3/begun && echo "$1" >said && mv said signalled\n'}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "pretrain_gpt.py").touch()
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "true", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_ID": "8"}
    env |= {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "REQUEUE": "0"}
    command = ["bash", ROOT / "scripts" / "slurm" / "pretrain.sbatch", "--log-dir", "l"]
    for dies in (False, True):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **pipes) as job:
            lines = iter(job.stdout.readline, "")
            assert any("meeting at" in line for line in lines)
            job.send_signal(signal.SIGUSR1)
            assert any("the ranks have not begun to train yet" in line for line in lines)
            if dies:
                (tmp_path / "dies").touch()
            (tmp_path / "go").touch()
            rest = "".join(lines)
        assert job.returncode == (143 if dies else 75)
        assert ("give more --time" in rest) == dies
        assert dies or (tmp_path / "signalled").read_text() == "--signal=USR1\n"
        (tmp_path / "go").unlink()
        (tmp_path / "signalled").unlink(missing_ok=True)
