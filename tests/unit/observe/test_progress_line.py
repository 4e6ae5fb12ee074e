"""The progress line, for people and for pipes; units; the peak that MFU is measured by."""

import math
import pty
import re
from dataclasses import replace

import pytest

from megazero.flags.config import Config, LogConfig, TrainingConfig
from megazero.observe.progress_line import ProgressLine, progress_line
from megazero.planner.time.devices import find_card, known_devices, load_device, peak_flops
from megazero.units import count, duration, size
from tests.helpers.programs import read_terminal
from tests.unit.observe.test_log import record

CONFIG = replace(Config(), log=LogConfig(log_interval=4), training=TrainingConfig(train_iters=10))


def test_line() -> None:
    assert progress_line(record(7), 1000, None, "1:00 left") == (
        "iteration    7/1000 | loss 4.5000 | norm 1.250 | lr 3.00e-04 | 12,346 tokens/s, 0.5 TFLOP/s | 56.0 k tokens | "
        "1:00 left"
    )
    assert "TFLOP/s, MFU 45.1% | 3.00 GB of 80.0 GB | " in progress_line(
        record(7, mfu=0.4511), 10, (3 * 10**9, 80 * 10**9), ""
    )
    assert " | 3.00 GB | " in progress_line(record(7), 10, (3 * 10**9, 0), "")
    odd = progress_line(
        record(10, validation_loss=2.5, skipped=True, grad_norm=math.nan, loss_scale=2.0**16), 10, None, ""
    )
    assert "| validation 2.5000 | norm nan |" in odd and odd.endswith("| scale 65536 | SKIPPED")
    assert progress_line(record(7, moe_load={"0": 1.5, "2": 2.25}), 10, None, "0:09 left").endswith(
        "| 0:09 left | expert load 2.25"
    )
    dropping = record(7, moe_load={"0": 1.5}, moe_dropped=0.0123)
    assert progress_line(dropping, 10, None, "").endswith(" | expert load 1.50, 1.2% dropped")


def test_units() -> None:
    assert [duration(s) for s in (0, 0.4, 59.6, 61, 3599, 3600, 90061)] == [
        *("0:00", "0:00", "1:00", "1:01", "59:59", "1:00:00", "25:01:01"),
    ]
    sizes = {
        0: "0 bytes",
        999: "999 bytes",
        1536: "1.54 kB",
        9_996_000: "10.0 MB",
        28 * 10**9: "28.0 GB",
        10**15: "1000 TB",
    }
    assert {number: size(number) for number in sizes} == sizes
    assert [count(n) for n in (7, 1_557_611_200, 124_439_808)] == ["7", "1.56 B", "124 M"]


def test_lines_come_at_the_interval_the_end_and_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressLine(CONFIG, 2, lambda: (5 * 10**8, 0))
    for i in range(3, 11):
        progress.write(record(i, step_seconds=3.0) | ({"validation_loss": 1.0} if i == 5 else {}))
    progress.close()
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\r" not in said  # into a pipe or a file: plain lines
    shown = said.splitlines()
    assert [text.split("|")[0].split()[1] for text in shown] == ["4/10", "5/10", "8/10", "10/10"]
    assert [text.split("|")[-1].strip() for text in shown] == ["0:18 left", "0:15 left", "0:06 left", "0:00 left"]
    assert all("| 500 MB |" in text for text in shown)


def test_the_time_left_is_by_recent_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """A first step that compiles, or a slow hour, is forgotten."""
    config = replace(CONFIG, training=TrainingConfig(train_iters=1000), log=LogConfig(log_interval=100))
    progress = ProgressLine(config, 0)
    for i in range(1, 101):
        progress.write(record(i, step_seconds=1000.0 if i < 50 else 1.0))
    assert capsys.readouterr().out.endswith("| 15:00 left\n")


def test_a_terminal_gets_a_bar_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with open(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        progress = ProgressLine(CONFIG, 0)
        for i in range(1, 5):
            progress.write(record(i))
        progress.close()
    said = read_terminal(ours)
    assert re.search(r"iteration  4/10 \| loss 4\.5000", said)
    assert re.search(r"[━╸╺] +4/10 \d:\d\d:\d\d 0:12 left", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", said))
    assert said.rfind("\x1b[?25h") > said.rfind("\x1b[?25l") >= 0  # the cursor is hidden, and shown again


OTHERS = ("NVIDIA GH200 480GB", "NVIDIA GB10", "AMD Instinct MI300A", "AMD Instinct MI325X", "AMD Instinct MI350X", "")


def test_every_card_of_the_device_files_has_a_peak() -> None:
    """Names as torch.cuda.get_device_name gives them; cards with other peaks are none of these."""
    names = {
        "NVIDIA H100 80GB HBM3": "h100-80gb",
        "NVIDIA H200": "h200-141gb",
        "NVIDIA B200": "b200",
        "NVIDIA GB200": "gb200",
        "NVIDIA B300 SXM6 AC": "b300",
        "NVIDIA GB300": "gb300",
        "AMD Instinct MI300X": "mi300x",
        "AMD Instinct MI355X": "mi355x",
        "NVIDIA A100-SXM4-40GB": "a100-80gb",
        "NVIDIA A100 80GB PCIe": "a100-80gb",
        "Tesla V100-SXM2-16GB": "v100-32gb",
        "NVIDIA GeForce RTX 4090": "rtx4090-24gb",
        "NVIDIA A10": "a10-24gb",
    }
    for card, name in names.items():
        found = find_card(card)
        assert found is not None and found.name == name
    assert {*names.values(), "cpu"} == {*known_devices()}
    for other in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GeForce RTX 4090 D", "NVIDIA A10G", *OTHERS):
        assert find_card(other) is None and peak_flops(other, TrainingConfig()) == 0
    for name in {*names.values()} - {"v100-32gb"}:  # emulates bf16
        assert load_device(name)["compute.bf16"] == load_device(name)["compute.fp16"]
    h100 = load_device("h100-80gb")
    assert peak_flops("NVIDIA H100 80GB HBM3", TrainingConfig(precision="bf16")) == h100["compute.bf16"]
    fp32 = TrainingConfig(precision="fp32", tf32=True)
    assert peak_flops("NVIDIA H100 80GB HBM3", fp32) == h100["compute.tf32"]
