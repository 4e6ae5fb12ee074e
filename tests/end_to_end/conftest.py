"""A small real corpus, made by the real tool."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import pretrain_gpt
from megazero.cluster import launch
from megazero.log import log_as
from tests.end_to_end.cli import ROOT, run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a .bin/.idx pair: the repository's own documents, and shuffled ones, as bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    words = (ROOT / "LICENSE").read_text().split()
    draw = random.Random(0)
    files = []
    for i in range(40):
        files.append(folder / f"{i:02}.txt")
        files[-1].write_text(" ".join(draw.choices(words, k=draw.randrange(40, 400))))
    done = run(
        *(sys.executable, "data_tools/preprocess_data.py", "--input", *files, "--output-prefix", folder / "small"),
        *("--tokenizer", "byte", "--append-eod", "--workers", "2"),
    )
    assert done.returncode == 0, done.stderr
    return folder / "small_text_document"


@pytest.fixture(scope="session")
def model(corpus: Path) -> list[object]:
    """Flags of a small odd model on the corpus: 5 layers, 6 heads, a prime vocabulary (257)."""
    sizes = "--num-layers 5 --hidden-size 48 --num-attention-heads 6 --seq-length 33 --init-method-std 0.05"
    training = (
        "--global-batch-size 12 --micro-batch-size 2 --lr 1e-3 --tokenizer byte --log-interval 5 --poison-buffers"
    )
    return [*sizes.split(), *training.split(), "--data-path", corpus]


@pytest.fixture
def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """refusal(*flags): pretrain_gpt.py with `flags`, which end it, in this process."""

    def exit_now(code: int) -> NoReturn:
        sys.exit(code)

    def get(*flags: object) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        argv = [str(flag) for flag in flags]
        with pytest.raises(SystemExit) as end:
            pretrain_gpt.main(argv)
        assert isinstance(end.value.code, int)
        return subprocess.CompletedProcess(argv, end.value.code, *capsys.readouterr())

    monkeypatch.setattr(launch, "exit_now", exit_now)
    yield get
    log_as(0, 1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MB; skips where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("no right to mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a run in this process holds the lock
