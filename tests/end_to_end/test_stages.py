"""pretrain_gpt.py --data-stages: the options of a run change at a sample; killed and resumed, it is the same run."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.cli import metrics, pretrain
from tests.helpers.programs import WarmProgram, warm
from tests.reference_run import write_corpus

WORDS, BATCH, ITERATIONS = 61, 4, 9
SIZES = ["--architecture", "llama", "--num-layers", 2, "--hidden-size", 24, "--num-attention-heads", 3]
SIZES += [
    "--vocab-size",
    WORDS,
    "--seq-length",
    10,
    "--global-batch-size",
    BATCH,
    "--micro-batch-size",
    2,
    "--split",
    1,
]
SIZES += ["--train-iters", ITERATIONS, "--lr", 1e-2, "--seed", 5, "--precision", "fp64", "--save-interval", 2]
# The second stage begins with iteration 4: another mixture, longer samples. The third with iteration 7.
STAGES = """
[[stage]]
from-sample = 12
data-path = [3, "{folder}/a", 1, "{folder}/b"]
seq-length = 16
micro-batch-size = 1

[[stage]]
from-sample = 24
data-path = "{folder}/b"
lr = 1e-3
lr-decay-style = "linear"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    draw = random.Random(0)
    for name in "ab":
        documents = [draw.choices(range(WORDS), k=draw.randint(5, 40)) for _ in range(40)]
        write_corpus(folder / name, "<u2", [[document] for document in documents])
    (folder / "stages.toml").write_text(STAGES.format(folder=folder))
    return folder


def words(folder: Path, name: str) -> list[object]:
    """Return the flags of a run in the folder `name`."""
    out = folder / name
    data = ["--data-path", folder / "a", "--data-stages", folder / "stages.toml"]
    return [*SIZES, *data, "--save", out, "--load", out, "--log-dir", out]


def train(folder: Path, name: str, *flags: object, ranks: int = 1, code: int = 0) -> str:
    done = pretrain(*words(folder, name), *flags, ranks=ranks)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def curve(folder: Path, name: str) -> list[tuple[Any, ...]]:
    keys = ("iteration", "consumed_samples", "loss", "grad_norm", "lr", "stage")
    return [tuple(record[key] for key in keys) for record in metrics(folder / name)]


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[tuple[Any, ...]]:
    """The curve of an uninterrupted run on one rank."""
    said = train(folder, "whole")
    assert "--seq-length is 16, and was 10 when this was saved" in said and "warning" not in said.lower()
    assert f": {BATCH * 108} tokens\n" in said and "stages    1, from sample 0: samples of 10 tokens, " in said
    assert "          2, from sample 12: samples of 16 tokens, " in said
    return curve(folder, "whole")


def test_stages_change_the_options(folder: Path, whole: list[tuple[Any, ...]]) -> None:
    assert [record[-1] for record in whole] == [1] * 3 + [2] * 3 + [3] * 3
    assert [record[1] for record in whole] == [BATCH * (1 + k) for k in range(ITERATIONS)]
    rates = [record[4] for record in whole]
    assert rates[:6] == pytest.approx([1e-2] * 6) and rates[6:] == pytest.approx([1e-3 * k / 9 for k in (2, 1, 0)])
    speed = [record["tokens_per_second"] * record["step_seconds"] for record in metrics(folder / "whole")]
    page = (folder / "whole" / "report.html").read_text()
    assert "stage 2 began after iteration 3" in page and "stage 3 began after iteration 6" in page
    assert "resumed after" not in page
    assert speed == pytest.approx([BATCH * 10] * 3 + [BATCH * 16] * 3 + [BATCH * 10] * 3)
    tokens = [record["consumed_tokens"] for record in metrics(folder / "whole")]
    assert tokens == [BATCH * 10 * k for k in (1, 2, 3)] + [BATCH * (30 + 16 * k) for k in (1, 2, 3)] + [
        BATCH * (78 + 10 * k) for k in (1, 2, 3)
    ]


def test_the_first_loss_of_a_stage_is_that_of_a_run_of_its_own(folder: Path) -> None:
    """A stage on a corpus that is new to the run begins at its first sample: as a new run on the same weights does."""
    file = folder / "fresh.toml"
    file.write_text(f'[[stage]]\nfrom-sample = 12\ndata-path = "{folder}/b"\nseq-length = 16\nmicro-batch-size = 1\n')
    train(folder, "fresh", "--data-stages", file, "--exit-interval", 4)
    out = folder / "its own"
    own = ["--data-path", folder / "b", "--seq-length", 16, "--finetune", "--load", folder / "fresh" / "iter_0000003"]
    done = pretrain(*SIZES, *own, "--save", out, "--log-dir", out, "--exit-interval", 1)
    assert done.returncode == 0, done.stderr
    (record,), found = metrics(out), metrics(folder / "fresh")
    assert record["loss"] == pytest.approx(found[3]["loss"], rel=1e-12)
    assert record["grad_norm"] == pytest.approx(found[3]["grad_norm"], rel=1e-12)


def test_an_engine_is_freed_before_the_next_stage_builds_its_own(folder: Path) -> None:
    """Also with a save in the background, and with a copy in memory, which hold its tensors for a while."""
    out = folder / "freed"
    data = ["--data-path", folder / "a", "--data-stages", folder / "stages.toml", "--save", out, "--async-save"]
    memory = ["--memory-checkpoint-interval", 1, "--memory-checkpoint-dir", out / "memory"]
    done = warm("tests/end_to_end/freed_engine.py", *SIZES, *data, *memory)
    assert done.returncode == 0, done.stderr


def test_a_batch_that_misses_a_border_is_refused(folder: Path) -> None:
    name = "misses"
    train(folder, name, "--exit-interval", 1)
    said = train(folder, name, "--global-batch-size", 12, code=1)
    assert "continues at sample 4" in said and "restore the batch size" in said


@pytest.mark.parametrize(
    ("stop", "layout", "ranks"),
    [
        (2, [], 1),
        pytest.param(3, ["--pipeline-model-parallel-size", 2], 2, marks=pytest.mark.second),
        pytest.param(5, ["--zero-stage", 3], 2, marks=pytest.mark.slow),
        pytest.param(7, ["--context-parallel-size", 2], 2, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_same(
    stop: int, layout: list[object], ranks: int, folder: Path, whole: list[tuple[Any, ...]]
) -> None:
    """It stops within a stage or at a border, and continues in another layout; in the same one to the bit."""
    name = f"stopped at {stop}"
    train(folder, name, "--exit-interval", stop)
    assert len(curve(folder, name)) == stop
    train(folder, name, *layout, ranks=ranks)
    found = curve(folder, name)
    if ranks == 1:
        assert found == whole
    assert [record[:2] + record[4:] for record in found] == [record[:2] + record[4:] for record in whole]
    for ours, wanted in zip(found, whole, strict=True):
        assert ours[2:4] == pytest.approx(wanted[2:4], rel=1e-11)


@pytest.mark.second
@pytest.mark.parametrize(("iteration", "layout"), [(5, []), (7, ["--pipeline-model-parallel-size", 2])])
def test_a_killed_run_is_the_same(
    iteration: int, layout: list[object], folder: Path, whole: list[tuple[Any, ...]]
) -> None:
    """Killed at any moment after an iteration; resumed in the same layout, or in another one."""
    name = f"killed after {iteration}"
    (folder / name).mkdir()
    log = folder / name / "metrics.jsonl"
    output = folder / name / "output"
    run = WarmProgram("pretrain_gpt.py", words(folder, name), {}, (output, output))
    while run.poll() is None and not (log.exists() and log.read_text().count("\n") >= iteration):
        time.sleep(0.01)
    run.kill()
    run.wait()
    train(folder, name, *layout, ranks=1 + bool(layout))
    found = curve(folder, name)
    assert found == whole or layout
    for ours, wanted in zip(found, whole, strict=True):
        assert ours[:2] + ours[4:] == wanted[:2] + wanted[4:]
        assert ours[2:4] == pytest.approx(wanted[2:4], rel=1e-11)


@pytest.mark.second
def test_a_border_in_the_past_is_refused(folder: Path, whole: list[tuple[Any, ...]]) -> None:
    name, file = "moved", folder / "stages.toml"
    train(folder, name, "--exit-interval", 5)
    text = file.read_text()
    try:
        file.write_text(text.replace("from-sample = 12", "from-sample = 16"))
        said = train(folder, name, code=1)
    finally:
        file.write_text(text)
    assert "stage that began at sample 12" in said and "in the past" in said
    train(folder, name)
    assert curve(folder, name) == whole
