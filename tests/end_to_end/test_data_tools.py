"""The data tools as a user runs them: from the repository, as processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.programs import runs
from tests.unit.data_helpers import download_gpt2, unpack_corpus, write_corpus

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"data_tools/{name}.py", *map(str, arguments)]
    env = {**os.environ, "COLUMNS": "400"}  # so that no table folds a path
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def write_jsonl(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"text": f"Hello world, number {k}. [bold]"}) + "\n" for k in range(count)))
    return path


def test_train_preprocess_peek(tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", 300)
    done = tool("train_tokenizer", "--input", text, "--output", tmp_path / "tok", "--vocab-size", 300)
    assert done.returncode == 0, done.stderr
    done = tool(
        *(
            "preprocess_data",
            "--input",
            text,
            "--output-prefix",
            tmp_path / "p",
            "--tokenizer",
            tmp_path / "tok",
        ),
        *("--append-eod", "--workers", 2),
    )
    assert done.returncode == 0, done.stderr
    assert "300 documents" in done.stdout and "MB/s" in done.stdout
    sequences = unpack_corpus(tmp_path / "p_text_document")[1]
    assert len(sequences) == 300 and all(s[-1] == 0 and 0 not in s[:-1] for s in sequences)
    done = tool("peek", tmp_path / "p_text_document", "--documents", 2)
    assert done.returncode == 0, done.stderr
    for words in (
        "uint16",
        "Hello world, number 0. [bold]<|endoftext|>",
        "Hello world, number 150. [bold]<|endoftext|>",  # evenly spaced over the corpus
        "document 150",
        f"{tmp_path}/tok"[:20],
    ):
        assert words in done.stdout
    assert "number 2." not in done.stdout


@pytest.mark.second
def test_gpt2_vocabulary(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    files = download_gpt2(request)
    (tmp_path / "a.jsonl").write_text('{"text": "Hello world"}\n')
    arguments = ("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "p", "--append-eod")
    done = tool("preprocess_data", *arguments, "--tokenizer", f"gpt2:{files}")
    assert done.returncode == 0, done.stderr
    assert unpack_corpus(tmp_path / "p_text_document") == (8, [[15496, 995, 50256]], [0, 1])


@pytest.mark.parametrize("name", ["preprocess_data", "train_tokenizer", "peek"])
def test_help_teaches(name: str) -> None:
    done = tool(name, "--help")
    assert done.returncode == 0
    assert "example:" in done.stdout and f"python data_tools/{name}.py" in done.stdout


def test_errors_are_one_line(tmp_path: Path) -> None:
    arguments = ("--output-prefix", tmp_path / "p", "--tokenizer", "byte")
    done = tool("preprocess_data", "--input", tmp_path / "none.jsonl", *arguments)
    assert done.returncode == 2
    assert done.stderr == f"preprocess_data.py: error: --input {tmp_path}/none.jsonl: No such file or directory\n"
    done = tool("peek", tmp_path / "none")
    assert done.returncode == 2 and done.stderr.startswith("peek.py: error: --data-path")
    assert done.stderr.count("\n") == 1


def test_paths_may_look_like_markup(tmp_path: Path) -> None:
    folder = tmp_path / "[bold]x[" / "b]"
    folder.mkdir(parents=True)
    prefix = write_corpus(folder / "c[bold]", [[104, 105]])
    Path(f"{prefix}.json").write_text('{"num_tokens": 2, "note": "[/red]", "tokenizer": "byte"}')
    done = tool("peek", prefix)
    assert done.returncode == 0, done.stderr
    assert "x[/b]" in done.stdout.replace("\n", "") and "[/red]" in done.stdout and "hi" in done.stdout


@pytest.mark.second
def test_plot_leaves_out_cut_lines(tmp_path: Path) -> None:
    lines = ['{"iteration": 1, "loss": 2.5}', '{"iteration": 2, "lo', '{"iteration": 3, "x": {"y": 1}', "[1]", "\xff}"]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    command = [sys.executable, "scripts/plot_metrics.py", str(tmp_path), "--output", str(tmp_path / "loss.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_disk_full_in_train_tokenizer(tmp_path: Path, small_disk: Path) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", 300)
    (small_disk / "filler").write_bytes(bytes((1 << 20) - 12_000))
    done = tool("train_tokenizer", "--input", text, "--output", small_disk / "tok", "--vocab-size", 500)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert done.stderr.endswith("No space left on device; free some space, or write elsewhere\n")
    assert not list((small_disk / "tok").glob("*partial*")) + list((small_disk / "tok").glob(".*partial*"))
    assert not (small_disk / "tok" / "tokenizer.json").exists()


@pytest.mark.second
@pytest.mark.parametrize(
    "kind", [signal.SIGINT, *(pytest.param(k, marks=pytest.mark.slow) for k in (signal.SIGTERM, signal.SIGKILL))]
)
def test_interrupted_run_leaves_no_corpus(tmp_path: Path, kind: signal.Signals) -> None:
    """Stopped while two workers are busy with more than they can do in a moment."""
    text = tmp_path / "a.jsonl"
    text.write_bytes(b'{"text": "%s"}\n' % (b"x" * 60_000) * 1500)
    arguments = ["--input", str(text), "--output-prefix", str(tmp_path / "out" / "p"), "--tokenizer", "byte"]
    command = [sys.executable, "data_tools/preprocess_data.py", *arguments, "--workers", "2"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a suite that runs in the background of a shell has SIGINT ignored, and would hand that on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    workers = children(process.pid)
    assert workers and process.poll() is None
    process.send_signal(kind)
    assert process.wait() != 0
    left = {path.name.split(".partial")[0] for path in (tmp_path / "out").iterdir()}
    if kind == signal.SIGKILL:  # no clean-up was possible, but nothing bears a corpus's name
        assert not {path.name for path in (tmp_path / "out").iterdir()} & left
    else:
        assert left == set()
        assert process.stderr is not None and "interrupted, nothing was written" in process.stderr.read()
    try:
        while any(map(runs, workers)):
            time.sleep(0.05)
    except BaseException:  # the test's own limit
        print(f"still run: {list(filter(runs, workers))}")
        raise


def test_a_process_whose_parent_does_not_wait_has_ended() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    while runs(pid):
        time.sleep(0.01)
    assert Path(f"/proc/{pid}").exists()
    os.waitpid(pid, 0)
    assert not runs(pid)


def children(pid: int) -> list[int]:
    """The processes that a process started; waits until there are two."""
    while True:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if len(found) >= 2:
            return [int(each) for each in found]
        time.sleep(0.05)
