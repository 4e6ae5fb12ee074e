"""scripts/launch.sh, on a stand-in program."""

import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.programs import read_terminal

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "scripts" / "launch.sh"
RANK_REPORT = Path(__file__).with_name("rank_report.py")


def launch(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", 'ulimit -S -n 256; exec "$@"', "-", "bash", LAUNCH, *arguments]
    env = environment(**env)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def environment(**env: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return {**inherited, "PYTHON": sys.executable, "PROGRAM": str(RANK_REPORT), **env}


def reports(folder: Path) -> list[dict]:
    """Return the text of each rank's log, by rank."""
    logs = sorted(folder.glob("*/attempt_0/*/stdout.log"), key=lambda path: int(path.parent.name))
    return [json.loads(log.read_text().splitlines()[0]) for log in logs]


def test_ranks_meet_and_log_under_the_log_dir(tmp_path):
    # --nproc may stand among the flags; those go to the program untouched, empty and quoted ones too.
    done = launch("--lr", "1e-3", "--nproc", "2", "--log-dir", "my run", "--name", "a  b", "", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = reports(tmp_path / "my run" / "ranks")
    assert [r["rank"] for r in ranks] == [r["local_rank"] for r in ranks] == [0, 1]
    for rank in ranks:
        assert rank["world_size"] == 2 and rank["total"] == 1 + 2
        assert rank["argv"] == ["--lr", "1e-3", "--log-dir", "my run", "--name", "a  b", ""]
        assert int(rank["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
        assert rank["TORCH_FR_DUMP_TEMP_FILE"] == "my run/nccl_trace_rank_"
        most = rank["most_open_files"]
        assert rank["open_files"] == (65536 if most == resource.RLIM_INFINITY else min(most, 65536))
    assert done.stdout.count('"total": 3') == 1 and done.stdout.startswith("{")  # rank 0 alone, without a prefix
    assert done.stderr == ""  # torchrun prints nothing


@pytest.mark.second
def test_the_last_words_are_those_of_the_rank_that_failed_first(tmp_path):
    """Its exit code is the launcher's. Without a message left for torchrun, the end of its stderr."""
    failing = ("--fail-rank", "1", "--fail-code", "7", "--gate", "gate")
    done = launch("--nproc", "2", *failing, "--hang", "--alone", cwd=tmp_path)
    assert done.returncode == 7
    end = done.stderr.splitlines()[-2:]
    assert re.fullmatch(r"rank 1 ended with exit code 7 \(.*/1/stderr\.log\):", end[0]) and end[1] == "rank 1 fails"
    assert "Traceback" not in done.stderr and "closing signal" not in done.stderr
    assert "closing signal SIGTERM" in (tmp_path / "runs" / "ranks" / "torchrun.log").read_text()
    assert [r["rank"] for r in reports(tmp_path / "runs" / "ranks")] == [0, 1]


@pytest.mark.second
def test_a_refusal_is_printed_once_and_leaves_no_logs(tmp_path):
    """Every rank refuses. The rank that fails first may be another than rank 0, whose stderr is on the console."""
    for flags, said in ((["--lr", "1e30"], "error: --lr 1e+30: must be at most 10: "), (["--bogus"], "no such flag")):
        done = launch("--nproc", "2", *flags, cwd=tmp_path, PROGRAM=str(ROOT / "pretrain_gpt.py"))
        assert done.returncode in (1, 2) and "Traceback" not in done.stderr
        assert done.stderr.count(said) == 1 and said in done.stderr.splitlines()[-1]
        assert "ended with" not in done.stderr
        assert [path.name for path in (tmp_path / "runs" / "ranks").iterdir()] == ["torchrun.log"]


@pytest.mark.second
def test_an_error_of_rank_0_is_on_the_console_once(tmp_path):
    done = launch("--nproc", "1", "--fail-rank", "0", "--fail-code", "7", cwd=tmp_path)
    assert done.returncode == 7 and done.stderr.count("rank 0 fails") == 1
    assert re.fullmatch(r"rank 0 ended with exit code 7 \(.*/0/stderr\.log\)", done.stderr.splitlines()[-1])


@pytest.mark.second
def test_ranks_that_are_done_skip_pythons_clean_up(tmp_path):
    """There a rank can abort after its save; so a SLURM job ended with 143, and was not requeued."""
    program = tmp_path / "planted.py"
    program.write_text(
        f"import atexit, os, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport pretrain_gpt\n"
        "atexit.register(os._exit, 9)\npretrain_gpt.main(sys.argv[1:])\n"
    )
    model = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --vocab-size 257 --mock-data"
    flags = [*model.split(), "--global-batch-size", "2", "--train-iters", "1", "--save", "saved"]
    done = launch("--nproc", "2", *flags, cwd=tmp_path, PROGRAM=str(program))
    assert done.returncode == 0, done.stderr
    assert "saved/iter_0000001" in done.stdout


@pytest.mark.second
def test_on_a_terminal_rank_0_has_it(tmp_path):
    """So its progress bar is one; the other rank's output is in its file."""
    ours, theirs = pty.openpty()
    command = ["bash", LAUNCH, "--nproc", "2", "--alone"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = read_terminal(ours)
    assert done.returncode == 0 and '"rank": 0' in said and '"tty": true' in said and '"rank": 1' not in said
    assert [(r["rank"], r["tty"]) for r in reports(tmp_path / "runs" / "ranks")] == [(1, False)]


@pytest.mark.second
def test_term_reaches_the_ranks(tmp_path):
    """An empty --log-dir keeps their logs here."""
    process = subprocess.Popen(
        ["bash", LAUNCH, "--nproc", "1", "--hang", "--log-dir", ""],
        cwd=tmp_path,
        env=environment(TORCH_FR_DUMP_TEMP_FILE="x"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    before = []
    for line in process.stdout:
        before.append(line)
        if "waiting" in line:
            break
    process.send_signal(signal.SIGTERM)
    after = process.communicate()[0]
    assert "rank 0 got TERM" in after, "".join(before) + after
    assert process.returncode == 128 + signal.SIGTERM and after.endswith("launch.sh: ended by SIGTERM\n")
    (rank,) = reports(tmp_path / "runs" / "ranks")
    assert rank["argv"] == ["--hang", "--log-dir", ""] and rank["TORCH_FR_DUMP_TEMP_FILE"] == "x"
    # The rank ended by itself, not when torchrun's patience did.
    assert "forcefully exiting" not in (tmp_path / "runs" / "ranks" / "torchrun.log").read_text()


@pytest.mark.parametrize("arguments", [["--help"], ["--lr", "1", "-h"]])
def test_help(tmp_path, arguments):
    done = launch(*arguments, cwd=tmp_path)
    assert done.returncode == 0 and "--nproc N" in done.stdout


@pytest.mark.slow
def test_help_after_dashes_is_the_programs(tmp_path):
    done = launch("--nproc", "1", "--", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "--fail-rank" in done.stdout


@pytest.mark.parametrize("nproc", ["--nproc 0", "--nproc=two", "--nproc", "--nproc -1", "--nproc="])
def test_a_bad_nproc_is_refused(tmp_path, nproc):
    done = launch(*nproc.split(), cwd=tmp_path)
    assert done.returncode == 2 and "--nproc" in done.stderr and "such as --nproc 2" in done.stderr


def test_a_missing_program_or_interpreter_is_named(tmp_path):
    done = launch(cwd=tmp_path, PROGRAM="nowhere.py")
    assert done.returncode == 2 and "nowhere.py" in done.stderr
    done = launch(cwd=tmp_path, PYTHON="/bin/false")
    assert done.returncode == 2 and "/bin/false" in done.stderr and "quickstart.sh" in done.stderr
    done = launch(cwd=tmp_path, PYTHON="no-apptainer exec image python")
    assert done.returncode == 2 and done.stderr.startswith("launch.sh: no command no-apptainer; ")
    bare = tmp_path / "without torch"  # a name with a space is one word
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    for nproc in ([], ["--nproc", "1"]):
        done = launch(*nproc, cwd=tmp_path, PYTHON=str(bare))
        assert done.returncode == 2 and re.match(r"launch.sh: \S+ cannot import torch; run `bash", done.stderr)


@pytest.mark.second
def test_the_interpreter_can_have_several_words(tmp_path):
    done = launch("--nproc", "1", cwd=tmp_path, PYTHON=f"env IN_IMAGE=1 {sys.executable}")
    assert done.returncode == 0, done.stderr
