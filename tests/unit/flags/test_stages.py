"""Files of --data-stages: their borders, their flags, and one sentence for each mistake."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megazero.data.blending import BlendedDataset
from megazero.data.corpora import Continued, continued, open_datasets
from megazero.flags.cli import parse
from megazero.flags.config import Config
from megazero.flags.flag_names import with_values
from megazero.flags.stages import WHOLE, DataStage, last_samples, of_longest, read_stages
from tests.helpers.table import for_each
from tests.unit.data_helpers import numbered_documents, write_corpus

FLAGS = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --micro-batch-size 3"
TWO = "[[stage]]\nfrom-sample = 40\nseq-length = 64\nmicro-batch-size = 1\n[[stage]]\nfrom-sample = 60\nlr = 1e-4\n"


def config_of(file: Path, text: str, more: str = "") -> Config:
    file.write_text(text)
    more += " --global-batch-size 4" if "--global-batch-size" not in more else ""
    return parse(shlex.split(f"{FLAGS} --save somewhere --data-path c --data-stages {file} {more}"))


def test_a_stage_is_read_alone_over_the_command(tmp_path: Path) -> None:
    config = config_of(tmp_path / "s.toml", TWO, "--lr 3e-4")
    first, second, third = read_stages(config)
    assert (first.first, first.stop) == (0, 40) and (second.first, second.stop) == (40, 60)
    assert (third.number, third.first, third.stop) == (3, 60, None)
    assert first.over(config) == config
    assert (second.over(config).model.seq_length, second.over(config).optimizer.lr) == (64, 3e-4)
    assert (third.over(config).model.seq_length, third.over(config).optimizer.lr) == (16, 1e-4)
    assert [
        stage.number for k in (0, 39, 40, 59, 60, 10**12) for stage in (first, second, third) if stage.holds(k)
    ] == [*(1, 1, 2, 2, 3, 3)]
    assert read_stages(parse(shlex.split(FLAGS))) == (WHOLE,) and WHOLE.holds(10**12)


def test_a_plan_is_of_the_longest_stage(tmp_path: Path) -> None:
    config, given, note = of_longest(config_of(tmp_path / "s.toml", TWO))
    assert given == {"seq-length", "micro-batch-size"}
    assert config.model.seq_length == 64 and config.training.micro_batch_size == 1
    assert "stage 2 of 3, from sample 40" in note
    assert of_longest(parse(shlex.split(FLAGS)))[2] == ""


@for_each("command", [("data-path", ("c",)), ("data-args-path", "C")])
@for_each("stage", [("data-path", ("s",)), ("data-args-path", "S"), ("lr", 1.0)])
def test_corpora_of_a_stage_replace_those_of_the_command(tmp_path: Path, command: Any, stage: Any) -> None:
    """Whichever way each of them names its corpora."""
    name, value = stage
    written = f"[[stage]]\nfrom-sample = 4\n{name} = {json.dumps(value)}\n"
    config = with_values(
        config_of(tmp_path / "s.toml", written), {"data-path": (), "data-args-path": ""} | dict([command])
    )
    own = read_stages(config)[1]
    named = dict([command if name == "lr" else stage])
    data = own.over(config).data
    assert (data.data_path, data.data_args_path) == (named.get("data-path", ()), named.get("data-args-path", ""))


WRONG = {
    "no file": (None, "", "no such file|No such file"),
    "no TOML": ("[[stage]\n", "", "is not a TOML file"),
    "nested deeply": ("a = " + "[" * 3000, "", "is not a TOML file: maximum recursion depth"),
    "no stage": ("seq-length = 3\n", "", "expected tables"),
    "a key beside the stages": (f"lr = 1.0\n{TWO}", "", "expected tables"),
    "no first sample": ("[[stage]]\nlr = 1.0\n", "", "stage 2: from-sample is missing"),
    "a first sample that is true": ("[[stage]]\nfrom-sample = true\n", "", "no whole number"),
    "from the beginning": ("[[stage]]\nfrom-sample = 0\n", "", "begins at sample 0"),
    "out of order": (
        "[[stage]]\nfrom-sample = 8\n[[stage]]\nfrom-sample = 8\n",
        "",
        "stage 3 begins at sample 8.*in order",
    ),
    "an unknown key": ("[[stage]]\nfrom-sample = 8\nsequence-length = 4\n", "", "unknown key 'sequence-length'"),
    "a flag of the whole run": (
        "[[stage]]\nfrom-sample = 8\nhidden-size = 16\n",
        "",
        "--hidden-size holds for the whole run",
    ),
    "a value of another type": (
        '[[stage]]\nfrom-sample = 8\nseq-length = "long"\n',
        "",
        "seq-length = .*Expected `int`",
    ),
    "inside a batch": ("[[stage]]\nfrom-sample = 18\n", "", "inside a global batch of 4; use 16 or 20"),
    "inside a batch of a later stage": (
        "[[stage]]\nfrom-sample = 8\nglobal-batch-size = 6\n[[stage]]\nfrom-sample = 24\n",
        "",
        "stage 3 begins at sample 24, inside a global batch of 6; use 20 or 26",
    ),
    "a schedule of its own in a branch": (
        "[[stage]]\nfrom-sample = 8\nlr-decay-iters = 9\n",
        "--decay-from run/iter_0000002 --decay-iters 5",
        "--lr-decay-iters and --decay-from",
    ),
    "samples left out up to the middle of a batch": (TWO, "--skip-samples 2:6", "such as 2:8"),
    "samples left out over a border": (TWO, "--skip-samples 30:48", "such as 30:40"),
    "in the ramp": (
        "[[stage]]\nfrom-sample = 8\n",
        "--rampup-batch-size 2 2 100",
        "while the batch grows to sample 100",
    ),
}


def test_samples_up_to_a_border_may_be_left_out(tmp_path: Path) -> None:
    """The first and the last batches of a stage, and samples beyond all borders."""
    for samples in ("0:4", "30:40", "40:44", "41:60", "60:64", "61:100"):
        assert len(read_stages(config_of(tmp_path / "s.toml", TWO, f"--skip-samples {samples}"))) == 3, samples


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_sentence(name: str, tmp_path: Path) -> None:
    text, more, said = WRONG[name]
    file = tmp_path / "s.toml"
    config = config_of(file, text or "", more)
    if text is None:
        file.unlink()
    with pytest.raises(ValueError, match=said) as caught:
        read_stages(config)
    assert f"--data-stages {file}" in str(caught.value) and "\n" not in str(caught.value)


def test_stages_end_where_iterations_do(tmp_path: Path) -> None:
    """Stage 1 has 2 iterations of 2 samples and 9 of 4; stage 2 has 5. Later stages have no end."""
    ends = {1: [2], 10: [36], 11: [40], 12: [40, 44], 16: [40, 60], 17: [40, 60, 64]}
    for last, found in ends.items():
        config = config_of(tmp_path / "s.toml", TWO, f"--train-iters {last} --rampup-batch-size 2 2 4")
        assert last_samples(config, read_stages(config)) == found, last


def test_tokens_are_counted_with_the_length_of_their_stage(tmp_path: Path) -> None:
    """40 samples of 16 tokens, 20 of 64, and further ones of 16."""
    config = config_of(tmp_path / "s.toml", TWO)
    stages = read_stages(config)
    for samples, tokens in ((0, 0), (39, 624), (40, 640), (41, 704), (60, 1920), (70, 2080)):
        stage = next(stage for stage in stages if stage.holds(max(0, samples - 1)))
        assert stage.consumed_tokens(samples, stage.over(config).model.seq_length) == tokens


def test_a_run_without_save_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text(TWO)
    with pytest.raises(ValueError, match="needs --save"):
        read_stages(parse(shlex.split(f"{FLAGS} --global-batch-size 4 --data-path c --data-stages {file}")))


def test_a_corpus_goes_on_where_it_was(tmp_path: Path) -> None:
    """Three stages of 12, 8 and more samples; the second one's samples are half as long."""
    low, high = (str(write_corpus(tmp_path / name, numbered_documents(90))) for name in ("low", "high"))

    def opened(words: tuple[str, ...], length: int, begins: Continued | None = None) -> BlendedDataset:
        found = open_datasets(words, "1", length, 1, None, begins=begins)
        assert isinstance(found.train, BlendedDataset)
        return found

    first = opened(("1", low, "2", high), 6)
    second_begins = continued(first, 12, 6)
    assert second_begins == Continued(12, {f"{low}.bin": 24, f"{high}.bin": 48}, 6)
    second = opened(("1", high, "1", low), 3, second_begins)
    assert {second.train.locate(12), second.train.locate(13)} == {(0, 16), (1, 8)}
    assert second.train.counts(20) == [4, 4]
    third_begins = continued(second, 20, 3, second_begins)
    assert third_begins == Continued(20, {f"{low}.bin": 24 + 12, f"{high}.bin": 48 + 12}, 3)
    spelt = f"{tmp_path}/../{tmp_path.name}/low"  # the same file
    third = opened((spelt,), 6, third_begins)
    (note,) = third.notes()
    assert "low continues at its sample 6; its samples have another length" in note
    alone = open_datasets((low,), "1", 6, 1, None).train
    assert [third.train[20 + k].ids.tolist() for k in range(5)] == [alone[6 + k].ids.tolist() for k in range(5)]
    assert third.named == () and third.train.locate(23) == (0, 9)


def test_values_are_those_of_one_stage() -> None:
    assert DataStage(2, 5, 9, {"lr": 0.1}).holds(8) and not DataStage(2, 5, 9).holds(9)
