"""metrics.jsonl, the progress line, TensorBoard and Weights & Biases."""

import json
import math
import os
import random
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero.engine.plan.layout.topology import Layout
from megazero.engine.step.results import StepResult
from megazero.files import replace_file
from megazero.flags.cli import parse
from megazero.flags.cli import read as read_command
from megazero.flags.config import Config, DataConfig, EvaluationConfig, LogConfig, ModelConfig
from megazero.flags.flag_names import to_toml
from megazero.observe.fragmentation import Fragmentation
from megazero.observe.loggers import (
    MetricsFile,
    TensorBoard,
    WeightsAndBiases,
    Writers,
    finite,
    flatten,
    open_writers,
    run_id,
)
from megazero.observe.progress_line import ProgressLine, Record
from megazero.observe.report.live import LiveReport
from megazero.planner.trace.trace import model_flops
from megazero.run import evaluation, trainer
from megazero.run.evaluation import Evaluation, Evaluator, Stopped, evaluation_line
from megazero.run.run_state import Progress
from megazero.run.stopping import Wish
from tests.helpers.table import for_each


def record(iteration: int, **changes: Any) -> Record:
    found: Record = {
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "consumed_tokens": 8000 * iteration,
        "loss": 4.5,
        "grad_norm": 1.25,
        "lr": 3e-4,
        "loss_scale": 1.0,
        "skipped": False,
        "step_seconds": 2.0,
        "tokens_per_second": 12345.6,
        "tflops_per_device": 0.5,
        "memory_bytes": {"parameters": 10, "peak": 3 << 30},
        "traffic_bytes": {"dp": 7, "tp": 0},
    }
    return found | changes


def read(path: Path) -> list[Record]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(text, parse_constant=refuse) for text in path.read_text().splitlines()]


def write(path: Path, start: int, iterations: range, **changes: Any) -> None:
    file = MetricsFile(path, start)
    for i in iterations:
        file.write(record(i, **changes))
    file.close()


# -- metrics.jsonl


@for_each("start", [0, 4, None])
@for_each("kind", ["link", "dangling link", "FIFO", "folder"])
def test_metrics_are_written_to_a_file_alone(tmp_path: Path, start: int | None, kind: str) -> None:
    """At the first start, at a resume and in an evaluation, the path is neither followed nor moved."""
    path, target = tmp_path / "metrics.jsonl", tmp_path / "theirs"
    if kind == "link":
        target.write_text("theirs")
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.mkdir() if kind == "folder" else path.symlink_to(target)
    with pytest.raises(OSError, match="it is a folder, a FIFO, a device, or a link that is not followed"):
        MetricsFile(path, start)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "metrics.jsonl",
        *(["theirs"] if kind == "link" else []),
    ]
    assert kind != "link" or (path.is_symlink() and target.read_text() == "theirs")


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    for i in (1, 2):
        file.write(record(i))
        assert read(tmp_path / "metrics.jsonl") == [record(n) for n in range(1, i + 1)]
    file.close()


def test_floats_keep_their_full_precision(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, *(random.Random(0).random() for _ in range(100))]
    file = MetricsFile(path, 0)
    for i, value in enumerate(values, 1):
        file.write(record(i, loss=value))
    file.close()
    assert [r["loss"] for r in read(path)] == values


def test_a_resumed_run_cuts_what_it_computes_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, range(1, 8))
    write(path, 4, range(5, 7), loss=1.0)
    assert [(r["iteration"], r["loss"]) for r in read(path)] == [(i, 1.0 if i > 4 else 4.5) for i in range(1, 7)]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_log_folder_that_is_moved_away_is_said_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file is made again, unless another run has made one."""
    path, away = tmp_path / "a" / "metrics.jsonl", tmp_path / "b" / "metrics.jsonl"
    path.parent.mkdir()
    file = MetricsFile(path, 0)
    file.write(record(1))
    path.parent.rename(away.parent)
    file.write(record(2))
    assert caplog.text.count("metrics.jsonl was moved, deleted or replaced before iteration 2 was logged") == 1
    assert [r["iteration"] for r in read(away)] == [1] and [r["iteration"] for r in read(path)] == [2]
    path.unlink()
    path.write_text("another run's\n")
    for iteration in (3, 4):
        file.write(record(iteration))
    file.close()
    assert path.read_text() == "another run's\n" and caplog.text.count("was moved, deleted or replaced") == 2


def test_a_resumed_run_may_find_no_file(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", 4, range(5, 6))
    assert [r["iteration"] for r in read(tmp_path / "metrics.jsonl")] == [5]


def test_a_fresh_run_keeps_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, range(1, 4))
    write(path, 0, range(1, 3), loss=1.0)
    assert [r["loss"] for r in read(path)] == [1.0, 1.0]
    assert [r["loss"] for r in read(tmp_path / "metrics.previous.jsonl")] == [4.5] * 3


@for_each("torn", ['{"iteration": 3, "lo', "{", "nul", "\0\0\0", '"x"', "3", "null", "{}"])
def test_a_torn_last_line_is_cut(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, range(1, 3))
    with path.open("a") as file:
        file.write(torn)
    write(path, 2, range(3, 4))
    assert [r["iteration"] for r in read(path)] == [1, 2, 3]


def test_a_last_line_without_its_end_is_whole_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(record(1)))
    write(path, 1, range(2, 3))
    assert [r["iteration"] for r in read(path)] == [1, 2]


@for_each("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null_and_said(value: float, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.write(record(1, loss=value, validation_loss=value))
    file.write(record(2))
    file.close()
    first, second = read(path)
    assert first == record(1, loss=None, validation_loss=None, nonfinite=True)
    assert second == record(2)
    assert "nonfinite" not in second


def test_finite_leaves_the_record_alone() -> None:
    given = record(1, loss=math.nan, loss_by_corpus={"a": 1.0, "b": math.inf})
    assert finite(given)["loss"] is None
    assert finite(given)["loss_by_corpus"] == {"a": 1.0, "b": None}
    assert math.isnan(given["loss"]) and math.isinf(given["loss_by_corpus"]["b"])
    assert finite(record(1)) == record(1)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    replace_file(path, "old")

    def fail(*_: object) -> None:
        raise OSError("disk")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk"):
        replace_file(path, "new")
    assert path.read_text() == "old"


def test_a_full_disk_loses_no_line_and_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines wait until there is room; a half-written one is written over."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.write(record(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        for i in (2, 3):
            file.write(record(i))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text().endswith('{"iteratio')
    assert f"WARNING: {path}: File too large" in capsys.readouterr().err
    file.write(record(4))
    file.close()
    assert read(path) == [record(i) for i in (1, 2, 3, 4)]
    assert capsys.readouterr().err == ""


def test_what_could_never_be_written_is_said_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        file.write(record(1))
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "metrics.jsonl lacks the last 1 iterations" in capsys.readouterr().err


def test_a_writer_that_fails_is_left_out_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    class Keeps:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def write(self, record: Record) -> None:
            self.seen.append(record["iteration"])

        def close(self) -> None:
            self.seen.append(-1)

    class Fails(Keeps):
        def write(self, record: Record) -> None:
            super().write(record)
            raise RuntimeError("the server is gone")

    fails, keeps = Fails(), Keeps()
    writers = Writers([fails, keeps])
    for i in (1, 2):
        writers.write(record(i))
    writers.close()
    assert (fails.seen, keeps.seen) == ([1], [1, 2, -1])
    assert "WARNING: Fails failed, and is not used any more" in capsys.readouterr().err


@for_each("file", ["metrics.jsonl", "config.toml"])
def test_a_log_folder_that_refuses_is_a_sentence(tmp_path: Path, file: str) -> None:
    (tmp_path / file).mkdir()
    (tmp_path / file / "x").write_text("")
    with pytest.raises(ValueError, match=rf"--log-dir {tmp_path}: .*{file}"):
        open_writers(replace(Config(), log=LogConfig(log_dir=str(tmp_path))), 3)


def test_open_writers_makes_what_is_asked_for(tmp_path: Path) -> None:
    assert [type(w) for w in open_writers(Config(), 0)] == [ProgressLine]
    folder = tmp_path / "a" / "b"
    config = replace(Config(), log=LogConfig(log_dir=str(folder), tensorboard_dir=str(tmp_path / "tb")))
    writers = open_writers(config, 0)
    assert [type(w) for w in writers] == [MetricsFile, LiveReport, TensorBoard, ProgressLine]
    for writer in writers:
        writer.close()
    assert (folder / "config.toml").read_text() == to_toml(config)
    assert replace(parse(["--preset", str(folder / "config.toml")]), preset="") == config


def test_a_run_with_nothing_to_do_leaves_config_toml(tmp_path: Path) -> None:
    log = ["--log-dir", str(tmp_path)]
    for iterations, done, kept in ((5, 0, 5), (9, 5, 9), (3, 9, 9), (9, 9, 9)):
        command = read_command([*log, "--train-iters", str(iterations)])
        for writer in open_writers(command.config, done, command=command):
            writer.close()
        assert parse(["--preset", str(tmp_path / "config.toml")]).training.train_iters == kept
    assert (tmp_path / "config.toml").read_text().count("\n") < 9  # only the given flags


def test_flatten() -> None:
    flat = flatten(record(3, loss=None))
    assert "iteration" not in flat and "loss" not in flat
    assert (flat["memory_bytes/peak"], flat["traffic_bytes/dp"], flat["lr"]) == (3 << 30, 7, 3e-4)
    assert all(isinstance(value, (int, float)) for value in flat.values())


def test_loads_of_experts_are_flattened_by_layer_and_their_choices_left_out(tmp_path: Path) -> None:
    found = record(1, moe_load={"0": 1.5, "2": 1.25}, moe_choices={"0": [3, 1], "2": [2, 2]})
    assert flatten(found) == flatten(record(1)) | {"moe_load/0": 1.5, "moe_load/2": 1.25}
    writer = TensorBoard(str(tmp_path), 0, Config())
    writer.write(found)
    writer.close()
    assert scalars(tmp_path)["moe_load/2"] == [(1, 1.25)]


def test_a_key_that_some_iterations_have_is_written_and_flattened(tmp_path: Path) -> None:
    """`fragmentation` comes every --log-interval iterations, and not on a CPU."""
    path, found = tmp_path / "metrics.jsonl", {"reserved": 30, "allocated": 10, "largest_free": 5}
    write(path, 0, range(1, 2))
    write(path, 1, range(2, 3), fragmentation=found)
    assert [r.get("fragmentation") for r in read(path)] == [None, found]
    assert flatten(record(2, fragmentation=found))["fragmentation/largest_free"] == 5
    writer = TensorBoard(str(tmp_path / "events"), 0, Config())
    writer.write(record(1))
    writer.write(record(2, fragmentation=found))
    writer.close()
    assert scalars(tmp_path / "events")["fragmentation/reserved"] == [(2, 30.0)]


def test_a_record_has_each_number_under_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 samples of 5 tokens in 8 s on 6 ranks; experts in layers 1 and 3 of 4, two of three for each of 60 tokens."""
    flags = "--architecture mixtral --num-layers 4 --moe-layer-freq DEDE --num-experts 3 --moe-router-topk 2 "
    flags += "--moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 --seq-length 5 --vocab-size 101 --log-interval 7 "
    run: Any = object.__new__(trainer.Trainer)  # no model, no data
    run.config, run.leads, run.peak_flops = parse(f"{flags} --train-iters 28".split()), True, 4e9
    now = {"parameters": 11, "optimizer": 12, "gradients": 13, "nvme": 19, "host": 20, "logits": 21, "buffers": 22}
    peak = {"activation_checkpoints": 14, "buffers": 15, "logits": 16, "host": 18, "parameters": 23, "nvme": 24}
    run.mesh = SimpleNamespace(layout=Layout(dp=6), device=torch.device("cpu"))
    tracker = SimpleNamespace(now=now, peak=peak, total_peak=17)
    run.engine = SimpleNamespace(tracker=tracker, mesh=run.mesh)
    run.profiler, run.sensors = SimpleNamespace(traces=True), SimpleNamespace(read=lambda: {"utilization": 97})
    monkeypatch.setattr(trainer, "device_fragmentation", lambda device: Fragmentation(32, 31, 30))
    run.datasets = SimpleNamespace(named=["a", "b", "c"], served=lambda consumed: {"a": consumed - 1})
    routed = [9.0, 60.0, 51.0, 36.0, 6.0, 12.0, 3.0, 24.0, 48.0, 48.0, 48.0, 18.0, 24.0, 9.0]
    result = StepResult(
        loss=2.5, grad_norm=3.5, lr=4.5, loss_scale=8.0, skipped=False, skip_reason=None, gradient_bytes=25,
        imbalance=1.25, loss_by_corpus=(1.5, None, 6.5), targets=30.0, routed=routed, mtp_losses=(7.5, 9.5),
    )  # fmt: skip
    run.progress = Progress(28, 672)
    speed = model_flops(run.config.model, 24) / 6 / 8.0
    assert run._record(result, 24, 8.0, {"dp": 41, "tp": 42}) == {
        "iteration": 28, "consumed_samples": 672, "loss": 2.5, "grad_norm": 3.5, "lr": 4.5, "loss_scale": 8.0,
        "skipped": False, "step_seconds": 8.0, "tokens_per_second": 15.0, "tflops_per_device": speed / 1e12,
        "mfu": speed / 4e9, "traffic_bytes": {"dp": 41, "tp": 42}, "cp_imbalance": 1.25,
        "memory_bytes": {
            "parameters": 11, "optimizer": 12, "gradients": 25, "activation_checkpoints": 14, "buffers": 15,
            "logits": 16, "peak": 17, "host": 18, "nvme": 19,
        },
        "mtp_losses": {"1": 7.5, "2": 9.5}, "moe_load": {"1": 1.5, "3": 1.2}, "moe_router_entropy": 0.7,
        "moe_dropped": 0.1, "moe_aux_loss": 0.6, "moe_z_loss": 0.2,
        "moe_choices": {"1": (9, 60, 51), "3": (24, 48, 48)},
        "fragmentation": {"reserved": 32, "allocated": 31, "largest_free": 30}, "device": {"utilization": 97},
        "loss_by_corpus": {"a": 1.5, "c": 6.5}, "samples_served": {"a": 671},
    }  # fmt: skip
    run.progress, run.leads = Progress(27, 648), False
    less = {"moe_choices", "fragmentation", "device", "samples_served"}
    assert not less & set(run._record(result, 24, 8.0, {}))


def test_an_evaluation_has_each_number_under_its_key() -> None:
    """The evaluation has 500 targets and takes 4 s; the console is compared, too."""
    evaluator: Any = object.__new__(Evaluator)
    evaluator.split = "test"
    by_corpus = {"a": 1.5, "b": 3.25}
    found = evaluator.record(Evaluation(1000.0, 500, by_corpus), 7, 56, 4.0)
    assert found == {
        "iteration": 7, "consumed_samples": 56, "eval_split": "test", "test_loss": 2.0, "perplexity": math.exp(2.0),
        "targets": 500, "eval_seconds": 4.0, "tokens_per_second": 125.0, "loss_by_corpus": by_corpus,
    }  # fmt: skip
    tasks = {"task_acc": {"t": 0.25, "u": 0.75}, "task_acc_norm": {"t": 0.5}, "task_perplexity": {"u": 12.345}}
    tasks |= {"task_bits_per_byte": {"t": 1.125}, "task_acc_stderr": {"u": 0.0625}}
    assert evaluation_line(found | tasks).splitlines() == [
        "iteration 7: test loss 2.0000 | perplexity 7.389 | 500 targets | 0:04 | 125 tokens/s",
        "  1.5000  a",
        "  3.2500  b",
        "  t accuracy 0.250",
        "  t accuracy by byte 0.500",
        "  t bits per byte 1.1250",
        "  u accuracy 0.750 ± 0.062",
        "  u perplexity 12.35",
    ]


def test_a_long_evaluation_reports_its_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two corpora of 2 and 3 batches, and a third whose targets do not count; 35 s a batch, a line at most every 30."""
    evaluator: Any = object.__new__(Evaluator)
    results = iter([([12.0], [2]), ([9.0], [1]), ([10.0], [5]), ([6.0], [4]), ([2.0], [3]), ([0.0], [0])])
    asked: list[int] = []
    evaluator.engine = SimpleNamespace(evaluate_by_corpus=lambda batch: next(results))
    batches = SimpleNamespace(batch=asked.append, close=lambda: None)
    evaluator.parts = [("a", batches, 2), ("b", batches, 3), ("c", batches, 1)]
    evaluator.named, evaluator.batch_size, evaluator.split = (), 8, "test"
    clock = iter(range(1000, 3000, 35))
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert evaluator.run() == Evaluation(39.0, 15, {"a": 7.0, "b": 1.5})
    assert asked == [0, 8, 0, 8, 16, 0]
    losses = (6.0, 7.0, 31 / 8, 37 / 12, 39 / 15, 39 / 15)
    assert capsys.readouterr().out.splitlines() == [
        f"evaluated {n} of 6 global batches, loss {loss:.4f}, {(6 - n) * 35 // 60}:{(6 - n) * 35 % 60:02} left"
        for n, loss in enumerate(losses, 1)
    ]
    stops = iter([None, None, "why"])
    evaluator.engine = SimpleNamespace(evaluate_by_corpus=lambda batch: ([1.0], [1]))
    assert evaluator.run(lambda: next(stops)).done == 2 / 6
    assert (
        str(Stopped(Wish.STOP_FILE, 2 / 6)) == f"stopped by {Wish.STOP_FILE.why} after 33% of the evaluation: no result"
    )


def test_model_flops_are_those_of_the_products() -> None:
    """Two a multiply-add, three times the forward, every product of a GPT written out."""
    model = ModelConfig(num_layers=3, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=1000)
    b, s, h, v = 5, 32, 64, 1000
    products = [(s, h, 3 * h), (s, h, s), (s, s, h), (s, h, h), (s, h, 4 * h), (s, 4 * h, h)]
    layer = sum(2 * rows * inner * columns for rows, inner, columns in products)
    expected = 3 * b * (3 * layer + 2 * s * h * v)
    assert model_flops(model, b) == expected


# -- services


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def texts(folder: Path, tag: str) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]


def hyperparameters(folder: Path) -> tuple[dict[str, object], set[str]]:
    """Return the values that TensorBoard's plugin reads, and the names of the metrics that it shows next to them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    events = EventAccumulator(str(folder))
    events.Reload()
    found = plugin_data_pb2.HParamsPluginData
    parts = {tag: found.FromString(content) for tag, content in events.PluginTagToContent(metadata.PLUGIN_NAME).items()}
    values = parts[metadata.SESSION_START_INFO_TAG].session_start_info.hparams
    shown = parts[metadata.EXPERIMENT_TAG].experiment.metric_infos
    assert metadata.SESSION_END_INFO_TAG in parts
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}, {
        each.name.tag for each in shown
    }


CONFIG = replace(
    Config(), model=ModelConfig(hidden_size=12, untie_embeddings=True), data=DataConfig(data_path=("0.5", "some"))
)


def test_tensorboard_has_the_options_and_the_samples(tmp_path: Path) -> None:
    """Hyperparameters are options that are not the default. TensorBoard follows one file."""
    writer = TensorBoard(str(tmp_path), 0, CONFIG)
    writer.write(record(3, validation_loss=2.0, samples=[{"prompt": "To be", "text": " or not"}]))
    writer.close()
    values, shown = hyperparameters(tmp_path)
    assert values == {"hidden-size": 12, "untie-embeddings": True, "data-path": "0.5 some"}
    assert shown == {"loss", "validation_loss"} <= set(scalars(tmp_path))
    (options,) = texts(tmp_path, "options/text_summary")
    assert "    hidden-size = 12\n" in options and "    zero-stage = 1\n" in options
    assert texts(tmp_path, "samples/0/text_summary") == ["**To be** or not"]
    assert len(list(tmp_path.iterdir())) == 1


def test_tensorboard_has_the_scalars(tmp_path: Path) -> None:
    writer = TensorBoard(str(tmp_path), 0, CONFIG)
    for i in (1, 2, 3):
        writer.write(record(i, loss=float(i), samples=[{"prompt": "To be", "text": " or not"}]))
    writer.close()
    found = scalars(tmp_path)
    assert found["loss"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert found["memory_bytes/peak"][0] == (1, 3 << 30)
    assert set(found) == set(flatten(record(1)))
    resumed = TensorBoard(str(tmp_path), 2, CONFIG)
    resumed.write(record(3, loss=7.0))
    resumed.close()
    assert scalars(tmp_path)["loss"] == [(1, 1.0), (2, 2.0), (3, 7.0)]


@for_each("evaluates", [False, True])
def test_weights_and_biases_is_given_each_number_under_its_key(
    evaluates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in replaces its package."""
    asked, given, logged = dict[str, Any](), dict[str, Any](), list[Record]()
    run = SimpleNamespace(log=logged.append, define_metric=lambda *_, **__: None, offline=False)
    run.config = SimpleNamespace(update=lambda values, **_: given.update(values))

    def init(**options: Any) -> Any:
        asked.update(options)
        return run

    table = SimpleNamespace(Table=lambda columns, data: (columns, data), Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, login=lambda prompt: True, **vars(table)))
    log = LogConfig(log_dir=str(tmp_path / "a"), wandb_project="p", wandb_name="n")
    config = replace(Config(), log=log, evaluation=EvaluationConfig(eval_only=evaluates))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "wandb-run-id").write_text("id\n")
    writer = WeightsAndBiases(config, 3, {"parameters": 5})
    assert [asked[key] for key in ("project", "name", "dir")] == ["p", "n", log.log_dir]
    assert (asked["job_type"], asked["id"]) == (("evaluation", None) if evaluates else ("training", "id"))
    assert given["parameters"] == 5 and given["log"]["wandb_name"] == "n"
    writer.write(record(7))
    writer.write(record(8, loss=9.5, samples=[{"prompt": "a", "text": "b"}, {"prompt": "c", "text": "d"}]))
    shown = (["iteration", "prompt", "text"], [[8, "a", "b"], [8, "c", "d"]])
    assert logged == [
        flatten(record(7)) | {"iteration": 7},
        flatten(record(8, loss=9.5)) | {"iteration": 8, "samples": shown},
    ]


@pytest.mark.second
@pytest.mark.long
def test_weights_and_biases_works_offline_without_an_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two starts of a run are one run there, with a name, groups of options, and a line per iteration."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    folder = tmp_path / "first-try"
    folder.mkdir()
    config = replace(
        Config(), log=LogConfig(log_dir=str(folder), wandb_project="test"), model=ModelConfig(hidden_size=12)
    )
    ids = []
    for start in (0, 2):
        writer = WeightsAndBiases(config, start, {"given": ["hidden_size"]})
        ids.append(writer.run.id)
        assert writer.run.name == "first-try"
        assert writer.run.config["model"]["hidden_size"] == 12 and writer.run.config["given"] == ["hidden_size"]
        for i in (start + 1, start + 2):
            writer.write(record(i, samples=[{"prompt": "To be", "text": " or not"}]))
        writer.close()
        sync = "wandb sync --append" if start else "wandb sync"
        said = f"wandb     offline, without an account; to upload it: {sync} {folder}/wandb/offline-run-"
        assert said in capsys.readouterr().out
    assert ids[0] == ids[1] == (folder / "wandb-run-id").read_text().strip()
    runs = list((folder / "wandb").glob(f"offline-run-*/run-{ids[0]}.wandb"))
    assert len(runs) == 2  # `wandb sync --append` joins them
    # wandb's own process writes the file, and may end it a moment after `finish` returns
    words = b"tokens_per_second", b"memory_bytes", b"hidden_size"
    try:
        while not all(word in run.read_bytes() for word in words for run in runs):
            time.sleep(0.05)
    except BaseException:  # the test's own limit
        for run in runs:
            print(run, run.stat().st_size, [word for word in words if word not in run.read_bytes()])
            print(*(log.read_text()[-3000:] for log in run.parent.glob("logs/*.log")), sep="\n")
        raise


def test_a_fresh_start_is_a_run_of_its_own(tmp_path: Path) -> None:
    ids = [run_id(tmp_path, start) for start in (5, 7, 0, 3)]
    assert ids[0] == ids[1] != ids[2] == ids[3] == (tmp_path / "wandb-run-id").read_text().strip()
