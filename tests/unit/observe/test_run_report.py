"""report.html and the comparison of runs: the values read from a log folder, and their drawing."""

import hashlib
import http.client
import json
import random
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero.observe.loggers import MetricsFile
from megazero.observe.report import page as pages
from megazero.observe.report import runs as reading
from megazero.observe.report.comparison import comparison
from megazero.observe.report.curves import POINTS, chart_data, short_names
from megazero.observe.report.heat_map import BOTTOM, LEFT, RIGHT, TOP, heat_map, ticks
from megazero.observe.report.live import RELOAD_SECONDS, SHARE, LiveReport
from megazero.observe.report.lost_time import goodput_line
from megazero.observe.report.page import cards, write_report
from megazero.observe.report.report_command import PageServer
from megazero.observe.report.runs import Curve, Run, curve, read_run, short, smooth, thin
from scripts.plot_metrics import dashes, plot, twins
from tests.helpers.table import for_each

ROOT = Path(__file__).parents[3]
VOID = {"meta", "br", "hr", "link", "img", "input"}


def record(iteration: int, **changes: Any) -> dict[str, Any]:
    found = {
        "iteration": iteration,
        "loss": 8.0 / iteration,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "step_seconds": 0.5,
        "tokens_per_second": 2048.0,
        "memory_bytes": {"parameters": 4_000_000, "peak": 9_000_000, "host": 0},
        "traffic_bytes": {"dp": 1500, "tp": 0},
    }
    return found | changes


def write_run(folder: Path, records: list[dict[str, Any]], events: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    if events is not None:
        (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    return folder


START = {
    "event": "start",
    "time": "2026-11-22 08:00:00 UTC",
    "iteration": 0,
    "command": ["pretrain_gpt.py", "--data-path", "<b>& 'x'"],
    "config": {
        "model": {"num_layers": 6, "hidden_size": 48},
        "zero": {"zero_stage": 2},
        "preset": "",
        "data": {"data_path": ["corpus"], "data_args_path": "", "tokenizer": ""},
    },
    "parameters": 1_560_000_000,
    "given": ["hidden_size"],
    "layout": {"pp": 2, "dp": 2, "tp": 2, "shards": 0, "chunks": 1, "split": [], "v_shaped": False},
    "environment": {"torch": "2.13.0"},
    "bytes_per_token": 4.0,
}


class Page(HTMLParser):
    """Collects the text; fails where elements are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.comments: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.words.append(data)

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def report_of(folder: Path) -> tuple[str, Page]:
    text = write_report(folder).read_text()
    return text, Page(text)


def data_of(text: str) -> dict[str, Any]:
    """Return the numbers of the curves of a page."""
    (line,) = re.findall(r"^const DATA = (.*);$", text, re.MULTILINE)
    return json.loads(line)


def series_of(data: dict[str, Any], title: str) -> list[dict[str, Any]]:
    (chart,) = (chart for chart in data["charts"] if chart["title"] == title)
    return chart["series"]


def test_a_report_says_what_the_folder_holds(tmp_path: Path) -> None:
    """Also with lines that are cut off, values that are not finite, and names that look like HTML."""
    by_corpus = {"data/a<i>/text": 2.0, "data/b/text": 3.0}
    records = [record(i, loss_by_corpus=by_corpus) for i in range(1, 301)]
    records[4] |= {"loss": None, "skipped": True, "nonfinite": True}
    records[199] |= {"validation_loss": 1.25}
    records[299] |= {"validation_loss": 1.5}
    records[198] |= {"samples": [{"prompt": "To be<", "text": " or not&"}]}
    again = START | {"iteration": 200, "time": "2026-11-22 09:00:00 UTC"}
    end = {"event": "end", "time": "2026-11-22 10:00:00 UTC", "iteration": 300, "why": "done"}
    folder = write_run(tmp_path / "a<script>", records, [START, again, end])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 301, "lo')
    text, page = report_of(folder)
    for words in (
        "a<script>",
        "resumed once 2026-11-22 09:00:00 UTC; ended 2026-11-22 10:00:00 UTC: done",
        "1.5000 validation loss",
        "4.48 validation perplexity",
        "0.5410 validation, bits per byte",
        "1.56 B parameters",
        "2:30 training time",
        "--tokenizer of the corpus",
        "1.2500 at iteration 200 its least",
        "307 k tokens",
        "9.00 MB peak memory of rank 0",
        "1 iterations without an update",
        "Training loss by corpus",
        "8 ranks: pp 2 x dp 2 x tp 2, ZeRO stage 2; optimizer states and gradients sharded over 2 data-parallel ranks",
        "stage 1 layers 3-5 4 5 6 7",
        "data-parallel and ZeRO 1.50 kB",
        "--hidden-size 48",
        "torch 2.13.0",
        """pretrain_gpt.py --data-path '<b>& '"'"'x'"'"''""",
        "resumed after iteration 200",
        "After iteration 199 To be< or not&",
    ):
        assert words in page.text, words
    assert "This page is final." in page.text and "reload" not in page.text
    data = data_of(text)
    assert data["bytes"] == [4.0]
    assert [mark["text"] for mark in data["marks"]] == ["resumed after iteration 200"]
    assert data["marks"][0]["at"] == {"iteration": 200, "tokens": 200 * 1024, "hours": 100 / 3600}
    assert [one["label"] for one in series_of(data, "Training loss by corpus")] == ["a<i>/text", "b/text"]
    assert "a<i>/text" not in text  # in the numbers, a "<" could end the script
    assert len(text) < 200_000


def test_a_page_needs_no_network_and_has_the_licence(tmp_path: Path) -> None:
    text, page = report_of(write_run(tmp_path / "run", [record(1)]))
    assert page.addresses == [] and not re.search(r"url\(|@import|\bimport\(|fetch\(|XMLHttpRequest", text)
    assert re.findall(r"https?:[^\s*]*", text) == ["https://github.com/leeoniya/uPlot"]  # in a comment of the library
    assert any("Permission is hereby granted" in comment for comment in page.comments)


def test_the_vendored_library_is_the_published_one() -> None:
    """The archive's checksum is in the folder's README; these are those of its files."""
    folder = ROOT / "megazero" / "observe" / "report" / "uplot"
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in folder.iterdir()}
    assert sums.pop("README.md") and sums == {
        "LICENSE": "8f989229699b4fe2",
        "uPlot.iife.min.js": "19c8d4c6ad88929a",
        "uPlot.min.css": "df630c6a8d6f8eea",
    }


@pytest.mark.second
def test_a_folder_of_an_older_version_has_a_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "old", [record(1)])
    _, page = report_of(folder)
    assert "metrics.jsonl has 1 iteration." in page.text
    assert "Layout" not in page.text and "Configuration" not in page.text


@pytest.mark.second
@for_each("event", [{}, {"event": "start"}, START | {"layout": {"pp": 2}}])
def test_an_event_may_lack_keys(event: dict[str, Any], tmp_path: Path) -> None:
    report_of(write_run(tmp_path / "run", [record(1), record(2, loss=None, memory_bytes=None)], [event]))


@pytest.mark.second
def test_a_report_of_many_iterations_is_small_and_keeps_spikes(tmp_path: Path) -> None:
    """A point of 10,000 iterations has five of them: their mean, and the least and the greatest."""
    draw = random.Random(0)
    records = [record(i, loss=draw.random(), grad_norm=draw.random()) for i in range(1, 10_001)]
    records[4321]["loss"] = 50.0
    records[77]["loss"] = None
    text, _ = report_of(write_run(tmp_path / "run", records))
    assert len(text) < 300_000
    data = data_of(text)
    (loss,), (lr,) = series_of(data, "Loss"), series_of(data, "Learning rate")
    assert len(loss["y"]) == len(loss["low"]) == POINTS and loss["high"][864] == 50.0
    five = [each["loss"] for each in records[4320:4325]]
    assert loss["y"][864] == pytest.approx(sum(five) / 5, rel=1e-5)
    assert loss["y"][15] == pytest.approx(sum(each["loss"] or 0 for each in records[75:80]) / 4, rel=1e-5)
    assert "low" not in lr and lr["grid"] == loss["grid"]
    grid = data["grids"][0][loss["grid"]]
    assert grid["iteration"] == list(range(5, 10_001, 5)) and grid["tokens"][-1] == 10_000 * 1024


def test_curves_have_the_places_of_their_values() -> None:
    """A loss that is missing, a validation every third iteration, a value that never changes, and names of layers."""
    records = [record(i, loss_scale=1.0, moe_load={"0": 1.0, "2": i / 2}) for i in range(1, 7)]
    records[1]["loss"] = None
    for each in records[2::3]:
        each["validation_loss"] = 2.0
    data = chart_data([Run("a", tuple(records))], ["a"])
    training, validation = series_of(data, "Loss")
    grids = data["grids"][0]
    assert grids[training["grid"]]["iteration"] == [1, 3, 4, 5, 6] and training["y"][1] == pytest.approx(
        8 / 3, rel=1e-5
    )
    assert grids[validation["grid"]]["iteration"] == [3, 6] and validation["points"] and validation["y"] == [2, 2]
    assert series_of(data, "Load of the busiest expert; 1 is balanced")[0]["y"] == [1, 1, 1.5, 2, 2.5, 3]
    assert "Loss scale" not in [chart["title"] for chart in data["charts"]] and len(grids) == 3


def test_which_numbers_stand_on_a_page(tmp_path: Path) -> None:
    """Values differ between iterations and starts: the last, the least, the median or the largest is shown."""
    records = [
        record(
            i,
            loss=10.0 - i,
            step_seconds=float(i),
            consumed_tokens=1000 * i,
            tokens_per_second=[5.0, 40.0, 30.0, 10.0, 20.0][i - 1],
            mfu=[0.5, 0.1, 0.2, 0.4, 0.3][i - 1],
            memory_bytes={"parameters": 1000 * i, "peak": [3000, 9000, 5000, 4000, 6000][i - 1]},
            traffic_bytes={"dp": 7000 - 1000 * i},
            skipped=i in (2, 3),
        )
        for i in range(1, 6)
    ]
    for i, validation, accuracy in ((1, 3.0, 0.25), (3, 1.0, 0.75), (4, 2.0, 0.5)):
        records[i - 1] |= {"validation_loss": validation, "task_acc": {"t": accuracy}, "task_items": {"t": 10 * i}}
        records[i - 1] |= {"samples": [{"prompt": "p", "text": f"sample {i}"}], "moe_choices": {"0": [i, 9]}}
    again = START | {"iteration": 2, "parameters": 2_000_000, "active_parameters": 500_000, "bytes_per_token": 2.0}
    again |= {"time": "2026-11-22 11:00:00 UTC"}
    earlier = [START | {"stage": 2, "time": "of a stage"}, START | {"iteration": 1, "time": "2026-11-22 09:00:00 UTC"}]
    again |= {"config": START["config"] | {"training": {"train_iters": 9}}, "environment": {"torch": "2.14.0"}}
    folder = write_run(tmp_path / "run", records, [START, *earlier, again])
    assert dict(cards(read_run(folder))) == {
        "iterations": "5 of 9",
        "time left, without evaluation and saving": "0:12",
        "parameters": "2.00 M",
        "parameters active per token": "500 k",
        "training loss, mean of the last hundredth": "5.0000",
        "validation loss": "2.0000",
        "validation perplexity": "7.39",
        "validation, bits per byte": "1.4427",
        "its least": "1.0000 at iteration 3",
        "t, accuracy": "0.500 (40 items)",
        "tokens": "5.00 k",
        "training time, without evaluation and saving": "0:15",
        "tokens/s, median": "20",
        "MFU, median": "30.0%",
        "peak memory of rank 0": "9.00 kB",
        "iterations without an update": "2",
    }
    _, shown = report_of(folder)
    assert "Started 2026-11-22 08:00:00 UTC; resumed 2 times, last 2026-11-22 11:00:00 UTC; its end" in shown.text
    for words in ("parameters 5.00 kB", "peak of all at one instant 6.00 kB", "ZeRO 2.00 kB", "torch 2.14.0"):
        assert words in shown.text, words
    assert "After iteration 4 p sample 4" in shown.text and "sample 3" not in shown.text
    assert "Loads of all experts in iteration 4" in shown.text
    other = write_run(tmp_path / "other", [record(1, memory_bytes={"parameters": 1}, traffic_bytes={"dp": 3000})])
    text = Page(comparison([folder, other])).text
    assert "parameters 5.00 kB 1 bytes" in text and "ZeRO 2.00 kB 3.00 kB" in text and "loss 2.0000 -" in text


# A key of metrics.jsonl -> words in the title of its chart, and the label of its line.
DRAWN = {
    "loss": ("Loss", "training"), "validation_loss": ("Loss", "validation"),
    "validation_loss_ema": ("Loss", "validation, averaged weights"), "mtp_losses/x": ("further ahead", "x"),
    "loss_by_corpus/x": ("Training loss by corpus", "x"), "validation_loss_by_corpus/x": ("Validation loss by", "x"),
    "task_acc/x": ("Accuracy in tasks", "x"), "task_acc_norm/x": ("options by their nats per byte", "x"),
    "task_perplexity/x": ("Perplexity", "x"), "task_bits_per_byte/x": ("Bits per byte", "x"),
    "grad_norm": ("Gradient norm", ""), "layer_update_ratio/x": ("Update over weight", ""),
    "layer_max_activation/x": ("Largest activation", ""), "layer_max_logit/x": ("Largest attention logit", ""),
    "lr": ("Learning rate", ""), "tokens_per_second": ("Throughput", ""), "memory_bytes/peak": ("Peak memory", ""),
    "device/utilization": ("percent", ""), "device/temperature": ("Celsius", ""), "moe_load/x": ("busiest expert", ""),
    "moe_router_entropy": ("Entropy", ""), "moe_dropped": ("drop", ""), "moe_aux_loss": ("Balance", "auxiliary loss"),
    "moe_z_loss": ("Balance", "z-loss"), "loss_scale": ("Loss scale", ""),
}  # fmt: skip


def test_every_chart_has_the_values_of_its_own_key() -> None:
    """The run has 2 iterations; no two values are equal, and the second differs from the first."""
    records: list[dict[str, Any]] = [{"iteration": i, "step_seconds": 1.0} for i in (1, 2)]
    for number, key in enumerate(DRAWN, 1):
        outer, _, inner = key.partition("/")
        for i, each in enumerate(records):
            value = 10.0 * number + i
            each.setdefault(outer, {}).update({inner: value}) if inner else each.update({outer: value})
    data = chart_data([Run("a", tuple(records))], ["a"])
    drawn = {(each["title"], line["label"]): line["y"] for each in data["charts"] for line in each["series"]}
    assert len(drawn) == len(DRAWN)
    for number, (words, label) in enumerate(DRAWN.values(), 1):
        ((title, _),) = (each for each, values in drawn.items() if values == [10 * number, 10 * number + 1])
        assert words in title and drawn[title, label][0] == 10 * number, (title, label)
    assert {each["title"] for each in data["charts"] if each["loss"]} == {
        *("Loss", "Loss of modules that predict further ahead", "Training loss by corpus", "Validation loss by corpus"),
    }


def test_every_bar_has_the_amount_of_its_own_key(tmp_path: Path) -> None:
    """In the page of a run, and next to another in a comparison, which has the double."""
    memory = {"parameters": "parameters", "optimizer": "optimizer", "gradients": "gradients", "buffers": "buffers",
              "activation_checkpoints": "inputs kept", "logits": "logits", "peak": "peak", "host": "host memory",
              "nvme": "files"}  # fmt: skip
    traffic = {"dp": "ZeRO", "cp": "context", "ep": "expert", "tp": "tensor", "pp": "pipeline", "control": "norms",
               "pcie": "copies", "nvme": "files"}  # fmt: skip
    kinds = {"memory_bytes": memory, "traffic_bytes": traffic}
    sizes = {kind: {key: 100 + 10 * n for n, key in enumerate(words)} for kind, words in kinds.items()}
    for factor, name in enumerate(("one", "two"), 1):
        amounts = {kind: {key: factor * n for key, n in values.items()} for kind, values in sizes.items()}
        write_run(
            tmp_path / name,
            [record(1, **{kind: dict.fromkeys(v, 7) for kind, v in sizes.items()}), record(2, **amounts)],
        )
    _, shown = report_of(tmp_path / "one")
    both = Page(comparison([tmp_path / "one", tmp_path / "two"])).text
    for kind, words in kinds.items():
        for key, word in words.items():
            n = sizes[kind][key]
            assert re.search(rf"{word}[^\d]* {n} bytes", shown.text), (kind, key)
            assert re.search(rf"{word}[^\d]* {n} bytes {2 * n} bytes", both), (kind, key)
    bars = pages._bars({"a": 30, "b": 0, "peak": 120}, pages.MEMORY)
    assert [(share, amount) for _, share, amount in bars] == [(0.25, "30 bytes"), (1.0, "120 bytes")]
    assert pages._shares({"x": 30.0, "y": 0.0, "z": 90.0}) == [("x", 1 / 3, "0:30, 25.0%"), ("z", 1.0, "1:30, 75.0%")]


def test_a_page_of_a_part_of_its_lines_says_which_part(tmp_path: Path) -> None:
    run = Run("b", (record(1), record(2)), stride=3, faults=("one", "two"))
    text = Page(pages.page(run)).text
    assert "One of 3 iterations of b was read." in text and "b has 2 lines that no run wrote" in text
    assert "such as: one" in text and "metrics.jsonl has 2 iterations." in text


# A key, in a record or in the last start, and its value, by which a page once ended in a traceback.
FORGED: list[tuple[str, Any]] = [
    ("iteration", 10**400), ("iteration", "x"), ("loss", "x"), ("loss", 10**400), ("step_seconds", "x"),
    ("step_seconds", 1e308), ("consumed_tokens", [1]), ("tokens_per_second", {}), ("memory_bytes", "x"),
    ("memory_bytes", {"peak": "x"}), ("traffic_bytes", [1]), ("samples", "x"), ("samples", [1]), ("moe_load", 5),
    ("moe_load", {"0": "x", "1": 1.0}), ("moe_choices", {"0": [1], "1": [1, 2]}), ("moe_choices", {"0": "x"}),
    ("task_acc", {"t": "x"}), ("task_acc", "x"), ("loss_by_corpus", 5), ("layer_grad_norm", {"0": -1.0}),
    ("pause_seconds", {"save": "x"}), ("at", "x"), ("validation_loss", 10**400), ("start command", [1]),
    ("start config", "x"), ("start config", {"training": "x"}),
    ("start config", {"training": {"train_iters": 10**400}}),
    ("start parameters", "x"), ("start layout", {"pp": 10**9, "split": []}), ("start layout", {"pp": 0, "split": []}),
    ("start layout", "x"), ("start environment", "x"), ("start iteration", "x"), ("start bytes_per_token", 0),
    ("start seconds", {"process": "x"}), ("start lost_iterations", 3), ("start given", [[1]]), ("start at", 1e308),
    ("start stage", "x"), ("start time", [1]),
]  # fmt: skip


@for_each(("key", "value"), FORGED)
def test_a_forged_log_has_a_report_without_the_line(key: str, value: Any, tmp_path: Path) -> None:
    """Or with it, where the value is of no account. The page names the lines that were left out."""
    name = key.removeprefix("start ")
    records, start = [record(i, pause_seconds={"save": 1.0}, at=1000.0 + i) for i in (1, 2, 3)], dict(START)
    (records[1] if name == key else start).update({name: value})
    folder = write_run(tmp_path / "run", records, [START | {"seconds": {"process": 1.0}, "at": 999.0}, start])
    run = read_run(folder)
    _, shown = report_of(folder)
    assert len(run.faults) == 3 + 2 - len(run.records) - len(run.events) <= 1
    assert ("1 line that no run wrote, which were left out" in shown.text) == bool(run.faults)
    Page(comparison([folder, folder]))
    goodput_line(run)
    MetricsFile(folder / "metrics.jsonl", 1).close()


@pytest.mark.second
def test_a_config_of_an_older_run_that_is_nested_deeply_is_a_sentence(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [record(1)])
    (folder / "config.toml").write_text("a = " + "[" * 3000)
    with pytest.raises(ValueError, match=r"config.toml is not a TOML file: maximum recursion depth"):
        comparison([folder, folder])


# -- while the run trains


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_page_of_a_run_that_trains_is_rewritten_by_one_process_at_a_time(tmp_path: Path) -> None:
    """After half a minute, and later not before 50 times the time that the last one took."""
    folder, clock = write_run(tmp_path / "run", [record(1)], [START]), Clock()
    live = LiveReport(folder, clock)
    live.write({})
    clock.now = RELOAD_SECONDS - 1
    live.write({})
    assert live.process is None
    clock.now += 1
    live.write({})
    first = live.process
    live.write({})
    assert first is not None and live.process is first
    assert first.wait() == 0
    text = (folder / "report.html").read_text()
    assert f"reload every {RELOAD_SECONDS} s" in Page(text).text and data_of(text)["live"] == RELOAD_SECONDS
    clock.now += 10
    live.write({})
    assert live.process is None and live.due == clock.now + 10 * SHARE
    clock.now = live.due
    live.write({})
    assert (second := live.process) is not None
    live.close()
    assert second.returncode is not None and sorted(path.name for path in folder.iterdir()) == [
        *("events.jsonl", "metrics.jsonl", "report.html"),
    ]


@pytest.mark.second
def test_the_time_left_is_shown_while_the_run_trains(tmp_path: Path) -> None:
    start = START | {"config": START["config"] | {"training": {"train_iters": 1000}}}
    folder = write_run(tmp_path / "run", [record(i) for i in range(1, 101)], [start])
    assert "100 of 1,000 iterations 7:30 time left" in report_of(folder)[1].text
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "end", "time": "t", "why": "the stop file"}\n')
    text = Page(write_report(folder, live=7).read_text()).text
    assert "100 of 1,000 iterations" in text and "time left" not in text
    assert "Stopped. Written just now . reload every 7 s" in text  # because it may be resumed


@pytest.mark.second
def test_a_page_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    folder, clock = write_run(tmp_path / "run", []), Clock()
    live = LiveReport(folder, clock)
    clock.now = RELOAD_SECONDS
    live.write({})
    assert live.process is not None and live.process.wait() == 1
    with pytest.raises(RuntimeError, match="has no iteration yet"):
        live.write({})


def test_a_long_file_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third iteration, and each with a value that few have; hours and tokens are those of all."""
    records = [record(i) | ({"validation_loss": 1.0} if i == 100 else {}) for i in range(1, 301)]
    rare = "moe_choices", "samples", "pause_seconds", "task_acc", "task_bits_per_byte"
    for number, key in enumerate(rare):
        samples = [{"prompt": "a", "text": "b"}]
        records[199 - 3 * number][key] = {"moe_choices": {"x": [1, 2]}, "samples": samples}.get(key, {"x": 1.0})
    folder = write_run(tmp_path / "run", records)
    whole = read_run(folder)
    monkeypatch.setattr(reading, "MAX_BYTES", (folder / "metrics.jsonl").stat().st_size // 2 - 1)
    part = read_run(folder)
    assert (part.stride, len(part.records)) == (3, 101 + len(rare)) and list(curve(part, "validation_loss").x) == [100]
    for axis in ("iteration", "tokens", "hours"):
        assert part.axes[axis][-1] == pytest.approx(whole.axes[axis][-1], rel=1e-12)
    assert whole.axes["tokens"][-1] == 300 * 1024 and whole.axes["hours"][-1] == 150 / 3600


# -- several runs


def three_runs(folder: Path) -> list[Path]:
    """Two runs of one name, one of which is older and has config.toml alone, and one that has not ended."""
    end = {"event": "end", "time": "2026-11-22 10:00:00 UTC", "iteration": 3, "why": "done"}
    other = START | {"config": START["config"] | {"zero": {"zero_stage": 3}, "log": {"log_dir": "elsewhere"}}}
    records = [record(i) for i in range(1, 4)]
    (folder / "x").mkdir(parents=True)
    found = [
        write_run(folder / "a", records, [START, end]),
        write_run(folder / "x" / "a", [each | {"loss": 2.0} for each in records]),
        write_run(folder / "b", [*records, record(4, validation_loss=1.5)], [other]),
    ]
    (found[1] / "config.toml").write_text('num-layers = 6\nzero-stage = 1\ndata-path = ["corpus"]\n')
    return found


def test_a_comparison_has_the_curves_the_numbers_and_the_options_that_differ(tmp_path: Path) -> None:
    text = comparison(three_runs(tmp_path))
    page, data = Page(text), data_of(text)
    assert data["runs"] == ["a (1)", "a (2)", "b"]
    assert [(one["run"], one["label"], one["y"][-1]) for one in series_of(data, "Loss")] == [
        *((0, "training", 2.66667), (1, "training", 2), (2, "training", 2), (2, "validation", 1.5)),
    ]
    for words in (
        "1 of 3 runs have ended.",
        "training loss, mean of the last hundredth 2.6667 2.0000 2.0000",
        "validation loss - - 1.5000",
        "--zero-stage 2 1 3",
        "--hidden-size 48 - 48",
        "parameters 4.00 MB 4.00 MB 4.00 MB",
    ):
        assert words in page.text, words
    assert "--num-layers" not in page.text and "--log-dir" not in page.text and "--data-path corpus" not in page.text


@pytest.mark.second
def test_a_served_page_is_made_again_when_metrics_grow(tmp_path: Path) -> None:
    """Not for other paths, nor under another name of the address; and a run without an iteration has a sentence."""
    folder = write_run(tmp_path / "run", [])
    server = PageServer([folder], 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def get(path: str = "/", host: str = "localhost") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
        connection.request("GET", path, headers={"Host": f"{host}:80"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    try:
        status, text = get()
        assert status == 503 and "has no iteration yet" in text
        for number in (1, 2):
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record(number)) + "\n")
            server.due = 0.0
            status, text = get()
            assert status == 200 and data_of(text)["grids"][0][0]["iteration"] == list(range(1, number + 1))
        made = server.page
        assert get()[1] == made and get("/etc/passwd")[0] == get(host="evil.example")[0] == 404
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# -- curves


@pytest.mark.second
def test_smoothing_is_the_mean_of_the_last_values() -> None:
    found = Curve(np.arange(5.0), np.array([1.0, 2.0, 6.0, 4.0, 5.0]))
    assert list(smooth(found, 3).y) == [1.0, 1.5, 3.0, 4.0, 5.0]
    assert list(smooth(found, 1).y) == list(smooth(found, 0).y) == list(found.y)
    assert list(smooth(found, 99).y)[-1] == pytest.approx(3.6)
    assert len(smooth(Curve(np.array([]), np.array([])), 3).y) == 0


@pytest.mark.second
def test_thinning_keeps_the_ends_and_the_spikes() -> None:
    y = np.zeros(10_000)
    y[4321], y[77] = 5.0, -5.0
    found = thin(Curve(np.arange(10_000.0), y), 100)
    assert len(found.x) <= 102 and {0, 77, 4321, 9999} <= set(found.x) and list(found.x) == sorted(found.x)


@pytest.mark.second
def test_equal_curves_are_found_and_dashed_in_turn() -> None:
    x, y = np.arange(1.0, 9.0), np.linspace(5, 3, 8)
    curves = [Curve(x, y), Curve(x, y * 1.1), Curve(x[4:], y[4:]), Curve(x, y * (1 + 1e-7)), Curve(x + 100, y)]
    found = twins(curves)
    assert [twin and twin.of for twin in found] == [None, None, 0, 0, None]
    assert found[2].label("abcde") == "identical to a" and found[3].label("abcde") == "as a, to 1e-07"
    assert dashes(found) == [(0, 3), (0, 1), (1, 3), (2, 3), (0, 1)]


@pytest.mark.second
@for_each("low, high", [(0, 1), (2.31, 2.33), (-5, 1e6), (0.0, 3e-4), (1e-9, 2e-9)])
def test_ticks_are_round_and_within(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 7 and low - 1e-6 * (high - low) <= found[0] and found[-1] <= high + 1e-6 * (high - low)
    assert all(float(f"{tick:.4g}") == pytest.approx(tick, abs=1e-9 * high) for tick in found)


@pytest.mark.second
def test_short() -> None:
    assert [short(v) for v in (0, 0.25, 999, 1500, -2e6, 3e9)] == ["0", "0.25", "999", "1.5 k", "-2 M", "3 G"]


@pytest.mark.second
def test_common_folders_are_left_out_of_names() -> None:
    assert short_names(["d/a/text", "d/b/text"]) == ["a/text", "b/text"] and short_names(["x/y"]) == ["y"]


# -- heat maps of experts


def cells(page: str, title: str = "Experts") -> list[list[tuple[int, float, float, float, float]]]:
    """Read back the cells of every heat map from a section on: colour, left and right edge, middle, height."""
    section = page[page.index(f"<h2>{title}") :]
    found = []
    for svg in re.findall(r"<svg.*?</svg>", section, re.DOTALL):
        paths = re.findall(r'<path class="h(\d)" stroke-width="([\d.]+)" d="([^"]*)"', svg)
        found.append(
            [
                (int(color), float(x), float(x) + float(width), float(y), float(height))
                for color, height, steps in paths
                for x, y, width in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)", steps)
            ]
        )
    return found


@pytest.mark.second
def test_a_report_of_experts_draws_loads_by_layer_over_the_iterations_and_by_expert(tmp_path: Path) -> None:
    """Layer 3 is balanced from iteration 5 on, of 10. Of four experts of layer 1 one is idle, another is chosen 2.4 x
    the mean."""
    choices = {"1": [10, 0, 24, 6], "3": [5, 5, 5, 5]}
    records = [record(i, moe_load={"1": 2.4, "3": 1.7 if i < 5 else 1.0}) for i in range(1, 11)]
    records[3] |= {"moe_choices": {"1": [1, 1, 1, 1], "3": [9, 0, 0, 0]}}
    records[6] |= {"moe_choices": choices}
    text, page = report_of(write_run(tmp_path / "run", records, [START | {"active_parameters": 300_000_000}]))
    assert "300 M parameters active per token" in page.text and "Loads of all experts in iteration 7" in page.text
    assert "layer 1 layer 3" in page.text
    over, last = cells(text)
    step, upper, lower = (RIGHT - LEFT) / 10, TOP + (BOTTOM - TOP) / 4, TOP + (BOTTOM - TOP) * 3 / 4
    near = [(color, round(left), round(right), round(middle)) for color, left, right, middle, _ in over]
    changes = round(LEFT + 4 * step)
    assert sorted(near) == sorted(
        [(6, LEFT, RIGHT, round(upper)), (5, LEFT, changes, round(lower)), (3, changes, RIGHT, round(lower))]
    )
    by_place = {(round(middle), round((left - LEFT) / (RIGHT - LEFT) * 4)): color for color, left, _, middle, _ in last}
    first = [by_place[round(upper), expert] for expert in range(4)]
    assert first == [3, 0, 6, 2] and by_place[round(lower), 0] == 3 and len(last) == 5
    for words in ("below 0.1", "0.5 to 0.8", "0.8 to 1.25", "1.5 to 2", "2 to 3"):
        assert words in page.text
    assert "0.1 to 0.5" not in page.text


def test_loads_of_experts_are_over_the_mean_of_their_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(pages, "heat_map", lambda *words, **values: drawn.update(values, words=words))
    pages._last_loads(Run("a", (record(1, moe_choices={"1": [1, 3], "4": [30, 10]}), record(2))))
    assert drawn["values"].tolist() == [[0.5, 1.5], [1.5, 0.5]] and drawn["columns"] == (0, 1)
    assert drawn["words"] == ("Loads of all experts in iteration 1", "expert", ["layer 1", "layer 4"])


@pytest.mark.second
@pytest.mark.long
def test_a_large_heat_map_keeps_the_largest_of_what_it_joins(tmp_path: Path) -> None:
    """94 layers of 256 experts over 5,000 iterations, of which one has an idle layer's peak."""
    layers = [str(number) for number in range(94)]
    records = [record(i, moe_load=dict.fromkeys(layers, 1.1)) for i in range(1, 5001)]
    records[1234]["moe_load"]["93"] = 40.0
    records[-1]["moe_choices"] = {layer: [10] * 255 + [11] for layer in layers}
    text, _ = report_of(write_run(tmp_path / "run", records))
    over, last = cells(text)
    (peak,) = [cell for cell in over if cell[0] == 8]
    assert peak[1] <= LEFT + 1234 / 5000 * (RIGHT - LEFT) <= peak[2] and peak[3] > BOTTOM - 5
    assert {cell[0] for cell in last} == {3} and len(text) < 300_000
    draw = random.Random(0)
    worst = np.array([[draw.choice([0.0, 1.0, 9.0]) for _ in range(4000)] for _ in range(200)])
    drawn = heat_map("t", "x", layers * 3, worst, (0, 3999))
    assert drawn is not None and [text for _, text, _ in drawn.bands] == ["from 5"]  # each cell joins 93 loads


@pytest.mark.second
def test_unknown_loads_are_not_drawn() -> None:
    assert heat_map("t", "x", [], np.empty((0, 0)), (0, 0)) is None
    assert heat_map("t", "x", ["a"], np.full((1, 3), np.nan), (0, 2)) is None
    drawn = heat_map("t", "x", ["a"], np.array([[1.0, np.nan, 1.0]]), (7, 9))
    assert drawn is not None and [len(found) for _, _, found in drawn.bands] == [2]
    assert [text for _, text in drawn.x_ticks] == ["7", "8", "9"]
    alone = heat_map("t", "x", ["a"], np.array([[1.0]]), (5, 5))
    assert alone is not None and alone.x_ticks == [((LEFT + RIGHT) / 2, "5")]


def test_a_report_draws_statistics_by_layer_every_few_iterations(tmp_path: Path) -> None:
    """Every tenth of 40 iterations has them. The head's update grows tenfold each time; the table has no logit."""
    records = [record(i) for i in range(1, 41)]
    for place, each in enumerate(records[9::10]):
        each["layer_update_ratio"] = {"token_embedding": 1e-3, "head": 1e-3 * 10**place}
        each["layer_max_logit"] = {"blocks.0": -0.5 if place else None}
    text, page = report_of(write_run(tmp_path / "run", records))
    assert "Layers Update over weight token head" in page.text and "Largest attention logit blocks.0" in page.text
    ratios, logits = cells(text, "Layers")
    table, head = ([cell for cell in ratios if (cell[3] > (TOP + BOTTOM) / 2) == low] for low in (False, True))
    quarters = [LEFT + (RIGHT - LEFT) * part / 4 for part in range(5)]
    assert [(color, round(left), round(right)) for color, left, right, *_ in table] == [(0, LEFT, RIGHT)]
    assert [color for color, *_ in sorted(head, key=lambda cell: cell[1])] == [0, 3, 6, 8]
    assert [round(left) for _, left, *_ in head] == [round(at) for at in quarters[:4]]
    assert [(color, left, right) for color, left, right, *_ in logits] == [(0, LEFT, RIGHT)]  # from the first known one
    data = chart_data([read_run(tmp_path / "run")], ["run"])
    largest = next(chart for chart in data["charts"] if chart["title"].startswith("Update over weight"))
    assert largest["series"][0]["y"] == pytest.approx([1e-3, 1e-2, 0.1, 1])


# -- the scripts


def script(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / name, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.second
def test_runs_are_compared(tmp_path: Path) -> None:
    """Two equal runs and another; the values are read back from the SVG's text."""
    records = [record(i) for i in range(1, 400)]
    names = "one", "two", "three"
    for name in names:
        other = [r | {"loss": r["loss"] * 1.5, "validation_loss": 2.0} for r in records]
        write_run(tmp_path / name, other if name == "three" else records)
    found = [read_run(tmp_path / name) for name in names]
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot(found, tmp_path / "loss.svg", "tokens")
    drawn = (tmp_path / "loss.svg").read_text()
    for text in (
        "identical to one",
        "three: validation, 2.0000",
        "tokens/s",
        "parameters",
        "peak of all at one instant",
    ):
        assert text in drawn, text
    assert "optimizer states" not in drawn  # of which there are none
    assert drawn.count("stroke-dasharray") >= 2


@pytest.mark.second
@pytest.mark.long
def test_bad_arguments_are_a_sentence(tmp_path: Path) -> None:
    empty = write_run(tmp_path / "empty", [])
    for name, words, said in (
        ("plot_metrics.py", [tmp_path / "no"], "no/metrics.jsonl does not exist; give the --log-dir folder"),
        ("plot_metrics.py", [empty], "has no iteration yet"),
        ("report.py", [tmp_path / "no"], "no/metrics.jsonl does not exist; give the --log-dir folder"),
        ("report.py", [empty], "has no iteration yet"),
    ):
        done = script(name, *words)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_folder_of_evaluations_alone_is_named(tmp_path: Path) -> None:
    """--eval-only writes no iteration, so there is nothing to compare."""
    trained = write_run(tmp_path / "a", [{"iteration": 1, "loss": 2.0}])
    write_run(tmp_path / "b", [{"iteration": 9, "validation_loss": 2.5, "perplexity": 12.2}])
    with pytest.raises(
        ValueError, match=r"b/metrics.jsonl has evaluations alone \(--eval-only\), .*; name the --log-dir"
    ):
        comparison([trained, tmp_path / "b"])


@pytest.mark.second
def test_the_report_needs_no_heavy_library() -> None:
    code = (
        "import sys, megazero.observe.report.page; print(sorted({'torch', 'matplotlib', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
