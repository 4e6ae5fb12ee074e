"""The expected speed of a plan: from published runs, printed first, and with a range in which all of them are."""

import json
import re
from pathlib import Path

import pytest

import pretrain_gpt
from megazero.planner.expected import reached


@pytest.mark.second
def test_a_plan_prints_the_expected_speed_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torchtitan's Llama 3 8B reaches 5,605 and 6,514 tokens/s on an H100."""
    asked = f"--preset llama-3.1-8b --plan --world-size 64 --device-type h100-80gb --log-dir {tmp_path}"
    pretrain_gpt.main(asked.split())
    printed = capsys.readouterr().out
    assert "no GPU run has confirmed this" in printed.splitlines()[1] and "compute takes" not in printed
    speeds = re.match(
        r"expected: ([\d,]+) tokens/s per device \(([\d,]+) to ([\d,]+)\), MFU ([\d.]+)%", printed.splitlines()[1]
    )
    expected, least, most = (int(word.replace(",", "")) for word in speeds.groups()[:3])
    assert least < 5605 < 6514 < expected < most
    plan = json.loads((tmp_path / "plan.json").read_text())
    found = plan["expected"]
    assert round(found["tokens_per_second"] / 64) == expected and float(speeds[4]) == round(100 * found["mfu"], 1)
    assert [round(each / 64) for each in found["tokens_per_second_range"]] == [least, most]
    for name in ("tokens_per_second", "tflops_per_device", "mfu", "step_seconds", "days"):
        low, high = found[f"{name}_range"]
        assert low < found[name] < high and low < plan[name] < high
        slower = name in ("step_seconds", "days")
        assert (plan[name] / found[name] if slower else found[name] / plan[name]) == pytest.approx(reached().median)


@pytest.mark.second
def test_only_a_layout_that_fits_has_a_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = f"--preset llama-3.1-8b --plan --device-type h100-80gb --mtbf 50000 --log-dir {tmp_path}"
    pretrain_gpt.main(asked.split())
    printed = capsys.readouterr().out
    assert "DOES NOT FIT" in printed and "it fits with" in printed
    assert not re.search(r"seconds|MFU|tokens|days|step:|goodput|--save-interval", printed)
    assert json.loads((tmp_path / "plan.json").read_text())["expected"] is None


def test_a_cpu_has_measured_constants_and_no_expectation(capsys: pytest.CaptureFixture[str]) -> None:
    pretrain_gpt.main("--preset tiny --vocab-size 512 --plan --device-type cpu".split())
    printed = capsys.readouterr().out
    assert "planned step:" in printed and "expected" not in printed
    pattern = r"^--train-iters 300: 0.00 B tokens, ([\d.]+) (?:minutes|hours|days)$"  # how long: this machine's speed
    (length,) = re.findall(pattern, printed, re.MULTILINE)
    assert float(length) > 0
