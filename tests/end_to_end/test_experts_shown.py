"""The loads of experts that a run shows: in metrics.jsonl, progress lines, the start screen and report.html."""

import json
import math
import re
from pathlib import Path

import pytest

from tests.end_to_end.cli import metrics, pretrain

EXPERTS, TOP, LENGTH, SAMPLES = 5, 3, 24, 4
SIZES = ["--architecture", "mixtral", "--num-layers", 3, "--hidden-size", 32, "--num-attention-heads", 4]
SIZES += ["--ffn-hidden-size", 48, "--seq-length", LENGTH, "--vocab-size", 61, "--mock-data", "--lr", 1e-2]
SIZES += ["--global-batch-size", SAMPLES, "--train-iters", 3, "--eval-interval", 2, "--eval-iters", 1]
SIZES += ["--num-experts", EXPERTS, "--moe-router-topk", TOP, "--moe-layer-freq", "EDE", "--init-method-std", 0.3]


@pytest.mark.second
@pytest.mark.parametrize(("factor", "absent", "capacity"), [("aux", "z", 0), ("z", "aux", 0.9)])
def test_the_fields_are_those_of_the_global_batch(factor: str, absent: str, capacity: float, tmp_path: Path) -> None:
    given = f"--moe-{factor}-loss-coeff", 0.01, "--moe-expert-capacity-factor", capacity
    done = pretrain(*SIZES, *given, "--log-dir", tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    records = metrics(tmp_path)
    assert ["moe_choices" in record for record in records] == [False, True, True]  # an evaluation, and the last
    for record in records:
        loads, choices = record["moe_load"], record.get("moe_choices", {})
        assert loads.keys() == {"0", "2"} and all(1 <= load <= EXPERTS / TOP for load in loads.values())
        assert 0 < record["moe_router_entropy"] < math.log(EXPERTS) and record[f"moe_{factor}_loss"] > 0
        assert f"moe_{absent}_loss" not in record
        for layer, counts in choices.items():
            assert len(counts) == EXPERTS and sum(counts) == SAMPLES * LENGTH * TOP  # of both ranks
            assert loads[layer] == pytest.approx(max(counts) * EXPERTS / sum(counts), rel=1e-12)
        dropped = record["moe_dropped"]
        assert 0 < 1 - capacity < dropped < 1 if capacity else dropped == 0
        shown = f", {dropped:.1%} dropped" if capacity else ""
        assert re.search(rf"expert load {max(loads.values()):.2f}{shown}( |$)", done.stdout, re.MULTILINE)
    assert f"experts   {EXPERTS} in each of 2 layers, {TOP} active per token: " in done.stdout
    start = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])
    unused = 2 * (EXPERTS - TOP) * 3 * 32 * 48
    assert start["parameters"] - start["active_parameters"] == unused
    page = (tmp_path / "report.html").read_text()
    assert "Loads of all experts in iteration 3" in page and "parameters active per token" in page
    assert ("Choices that experts drop" in page) == (capacity > 0)


def test_a_dense_run_shows_no_experts(tmp_path: Path) -> None:
    done = pretrain(*SIZES[: SIZES.index("--num-experts")], "--num-experts", 0, "--log-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert not any(key.startswith("moe") for record in metrics(tmp_path) for key in record)
    assert "expert" not in done.stdout.replace("--num-experts 0", "")
    page = (tmp_path / "report.html").read_text()
    assert "Loads of all experts" not in page and "active per token" not in page
