"""preprocess_data.py killed by the system, on a full disk, as an array of jobs; read by Megatron's own reader."""

import json
import os
import random
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.end_to_end.cli import ROOT
from tests.unit.data_helpers import kept_folder, numbered_documents, unpack_corpus, write_corpus

# Small chunks, each committed: so that a kill meets all kinds of moments.
DRIVER = """
import sys
from data_tools import preprocess_data, reading
reading.CHUNK_BYTES, preprocess_data.COMMIT_BYTES = 20_000, 50_000
preprocess_data.main(sys.argv[1:])
"""


def command(text: Path, prefix: Path, *more: str) -> list[str]:
    given = ["--input", str(text), "--output-prefix", str(prefix), "--tokenizer", "byte", "--append-eod", *more]
    return [sys.executable, "-c", DRIVER, *given]


def write_text(path: Path, documents: int) -> Path:
    draw = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for k in range(documents):
            text = f"{k} " + "word " * draw.randrange(300)
            file.write(json.dumps({"text": text, "answer": "yes " * (k % 60)}) + "\n")
    return path


def changed_at(path: Path) -> int | None:
    """The time of a file's last change; None if it has just disappeared."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def content(prefix: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(prefix.parent.iterdir())}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path: Path, kills: int) -> None:
    """SIGKILL to the tool and its workers, at random moments of its work, until it is done; again and again.

    Every second corpus has a loss mask.
    """
    text, wholes = write_text(tmp_path / "a.jsonl", 4000), []
    kinds = [("--workers", "2", "--dedup", "--json-keys", *keys) for keys in (("text:0", "answer:1"), ("text",))]
    for number, flags in enumerate(kinds):
        prefix = tmp_path / f"whole{number}" / "p"
        subprocess.run(command(text, prefix, *flags), cwd=ROOT, check=True, capture_output=True)
        wholes.append(content(prefix))
    assert "p_text_answer_document.mask" in wholes[0]
    draw, done, turn = random.Random(kills), 0, 0
    while done < kills:
        whole, workers = wholes[turn % 2], kinds[turn % 2]
        turn += 1
        prefix = tmp_path / f"out{turn}" / "p"
        returncode = None
        while returncode != 0:
            process = subprocess.Popen(
                command(text, prefix, *workers), cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            # A moment of its work: when the journal has changed `changes` times, or it ended.
            journal, changes, last = Path(f"{prefix}.partial/journal.json"), draw.randrange(12), None
            while done < kills and changes and process.poll() is None:
                now = changed_at(journal)
                changes -= now != last
                last = now
            if done < kills and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                done += 1
            returncode = process.wait()
        assert content(prefix) == whole
    assert turn >= 1


@pytest.mark.second
def test_a_full_disk_loses_nothing(tmp_path: Path, small_disk: Path) -> None:
    text = write_text(tmp_path / "a.jsonl", 2000)  # 1.5 MB of text, 3 MB of tokens
    subprocess.run(command(text, tmp_path / "whole" / "p"), cwd=ROOT, check=True, capture_output=True)
    given = [sys.executable, "data_tools/preprocess_data.py", *command(text, small_disk / "p")[3:]]
    driver = f"{DRIVER.replace('preprocess_data.main(sys.argv[1:])', 'from data_tools.tool import run_tool')}"
    driver += "sys.argv[0] = 'preprocess_data.py'\nrun_tool(preprocess_data.main, preprocess_data.PROGRAM)\n"
    done = subprocess.run([sys.executable, "-c", driver, *given[2:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert "No space left on device; free some space, or write elsewhere. " in line and "Traceback" not in done.stderr
    assert "are done and kept in" in line and "the same command resumes from there" in line
    assert [path.name for path in small_disk.iterdir()] == ["p.partial"]
    subprocess.run(["mount", "-o", "remount,size=20M", str(small_disk)], check=True)  # space is freed
    done = subprocess.run([sys.executable, "-c", driver, *given[2:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "resuming after" in done.stderr
    assert content(small_disk / "p") == content(tmp_path / "whole" / "p")


@pytest.mark.second
def test_an_array_of_jobs_makes_the_parts(tmp_path: Path) -> None:
    """The batch script as SLURM would run its tasks."""
    text = write_text(tmp_path / "a.jsonl", 300)
    flags = ["--input", str(text), "--output-prefix", str(tmp_path / "p"), "--tokenizer", "byte"]
    script = ["bash", "scripts/slurm/preprocess.sbatch", *flags]

    def task(**variables: str) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        env |= {"PYTHON": sys.executable, **variables}
        return subprocess.run(script, cwd=ROOT, env=env, capture_output=True, text=True)

    for index in range(3):
        numbers = {"SLURM_ARRAY_TASK_ID": str(index), "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_CPUS_PER_TASK": "1"}
        done = task(SLURM_JOB_ID="7", **numbers)
        assert done.returncode == 0, done.stderr
    parts = [str(path) for path in sorted(tmp_path.glob("p-*.idx"))]
    assert len(parts) == 3
    for tool in (
        ["merge_datasets", "--input", *parts, "--output-prefix", str(tmp_path / "joined")],
        ["preprocess_data", *flags, "--workers", "1"],
    ):
        subprocess.run(
            [sys.executable, f"data_tools/{tool[0]}.py", *tool[1:]], cwd=ROOT, check=True, capture_output=True
        )
    for end in (".bin", ".idx"):
        assert (tmp_path / f"joined{end}").read_bytes() == (tmp_path / f"p_text_document{end}").read_bytes()
    assert task().returncode == 2 and "submit it: sbatch --array=0-7" in task().stderr
    assert "not a job array" in task(SLURM_JOB_ID="7").stderr
    wrong = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "1"}
    assert "task 5 of 1 parts; submit with --array=0-0, or set PARTS" in task(SLURM_JOB_ID="7", **wrong).stderr


MEGATRON = """
import json, sys
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
import numpy, torch
ours, theirs = sys.argv[1:]
data = IndexedDataset(ours)
json.dump([[data[k].tolist() for k in range(len(data))], data.document_indices.tolist()], sys.stdout)
builder = IndexedDatasetBuilder(theirs + ".bin", dtype=numpy.uint16)
for k in range(len(data)):
    builder.add_item(torch.tensor(data[k].astype(numpy.int64)))
    builder.end_document()
builder.finalize(theirs + ".idx")
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_megatron_core_reads_our_files_and_we_read_its(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """In an environment of its own, in `kept_folder`, which sees this one's torch and numpy."""
    package = "megatron-core==0.16.1"
    folder = kept_folder(request, "megatron-core-0.16.1")
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        venv.create(folder, with_pip=True)
        done = subprocess.run(
            [str(python), "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:", package],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"pip cannot install {package}: {done.stderr.strip().splitlines()[-1:]}")
        (folder / "installed").touch()
    documents = numbered_documents(200)
    ours = write_corpus(tmp_path / "ours", documents)
    site = next(path for path in sys.path if path.endswith("site-packages"))
    env = {**os.environ, "PYTHONPATH": site}
    done = subprocess.run(
        [str(python), "-c", MEGATRON, str(ours), str(tmp_path / "theirs")], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [documents, list(range(len(documents) + 1))]
    assert unpack_corpus(tmp_path / "theirs") == (8, documents, list(range(len(documents) + 1)))
