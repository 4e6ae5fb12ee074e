"""Failures (--plan --mtbf): the formula next to a simulation of thousands of failures, and bytes counted by hand."""

import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

import pretrain_gpt
from megazero.flags.cli import parse
from megazero.planner.bytes.capacity import checkpoint_bytes
from megazero.planner.goodput import best_interval, goodput, ways
from megazero.planner.time.devices import load_device
from tests.helpers.table import for_each


def stretches(interval: float, save: float, restart: float, mtbf: float, seed: int) -> list[float]:
    """Simulate 4,000 stretches of work and save, event by event: the seconds that each takes.

    A failure loses the work since the last save; a failure during a restart begins it again.
    """
    draw, found = random.Random(seed), []
    for _ in range(4000):
        spent, restarting, left = 0.0, False, interval + save
        while True:
            failure, needed = draw.expovariate(1 / mtbf), restart if restarting else left
            if failure >= needed and not restarting:
                break
            spent += min(failure, needed)
            restarting = failure < needed
        found.append(spent + left)
    return found


CASES = [
    # interval, save, restart, mtbf: of a job that rarely fails, that fails in every stretch, that hardly progresses
    (600.0, 5.0, 90.0, 36_000.0),
    (600.0, 40.0, 300.0, 1200.0),
    (50.0, 10.0, 30.0, 20.0),
    (1.0, 0.01, 0.0, 30.0),
]


@for_each("case", CASES)
def test_the_formula_agrees_with_a_simulation(case: tuple[float, float, float, float]) -> None:
    """Compare the mean of independent stretches within 4.5 standard errors: one seed in 100,000 is further off."""
    interval, save, *_ = case
    expected = interval / goodput(*case)
    found = stretches(*case, seed=11)
    error = statistics.stdev(found) / math.sqrt(len(found))
    assert abs(statistics.fmean(found) - expected) < 4.5 * error
    assert statistics.fmean(found) > interval + save


def nested(memory: tuple[float, float, float], copies: int, save: float, mtbf: float, both: float) -> list[float]:
    """Simulate 4,000 stretches between saves to disk, of `copies` intervals with a copy to memory each.

    A share `both` of failures takes both copies: the stretch begins again, after a restart from the disk, which takes
    as long as the save and 30 s.
    """
    draw, found, (interval, copy, restart) = random.Random(7), list[float](), memory
    failure = draw.expovariate(1 / mtbf)
    for _ in range(4000):
        spent, done, restarting = 0.0, 0, 0.0
        while done <= copies:
            needed = restarting or (interval + copy if done < copies else save)
            spent += min(failure, needed)
            if failure >= needed:
                failure, done, restarting = failure - needed, done if restarting else done + 1, 0.0
                continue
            failure, lost = draw.expovariate(1 / mtbf), draw.random() < both
            done, restarting = 0 if lost else done, 30.0 + save if lost else restarting or restart
        found.append(spent)
    return found


@for_each(
    ("memory", "copies", "save", "mtbf", "both"),
    [((60.0, 1.0, 60.0), 40, 30.0, 2000.0, 0.05), ((100.0, 0.5, 60.0), 80, 40.0, 11_000.0, 0.01)],
)
def test_memory_and_rare_saves_to_disk_agree_with_a_simulation(
    memory: tuple[float, float, float], copies: int, save: float, mtbf: float, both: float
) -> None:
    """Their goodput is the product of both, as `ways` takes it. The error of a share is that of the mean stretch."""
    found = nested(memory, copies, save, mtbf, both)
    trained = copies * memory[0]
    share = trained / statistics.fmean(found)
    error = share * statistics.stdev(found) / math.sqrt(len(found)) / statistics.fmean(found)
    rare = goodput(trained, save, 30.0 + save, mtbf / both)
    assert abs(share - goodput(*memory, mtbf) * rare) < 4.5 * error < 0.02


def test_where_the_formula_of_first_order_holds() -> None:
    """It is too low by less than the square of the lost share, if saves are short next to the interval."""
    for interval, save, restart, mtbf in ((600.0, 5.0, 90.0, 36_000.0), (400.0, 4.0, 600.0, 17_800.0), CASES[1]):
        lost = save / interval + (interval / 2 + restart) / mtbf
        assert 0 < goodput(interval, save, restart, mtbf) - (1 - lost) < lost**2
    assert goodput(50.0, 10.0, 30.0, 20.0) > 0.02 and 10 / 50 + (25 + 30) / 20 > 1  # it would be below 0


def test_the_best_interval_loses_least() -> None:
    """It does so where saves are short next to the time between failures."""
    for save, mtbf in ((5.0, 36_000.0), (0.1, 1000.0), (60.0, 86_400.0)):
        best = best_interval(save, mtbf)
        assert best == pytest.approx(math.sqrt(2 * save * mtbf), rel=1e-15)
        found = goodput(best, save, 90.0, mtbf)
        others = [goodput(best * factor, save, 90.0, mtbf) for factor in (0.5, 0.8, 1.25, 2.0)]
        assert max(others) < found
        finest = max(goodput(best * (0.5 + n / 1000), save, 90.0, mtbf) for n in range(1500))
        assert finest - found < 1e-3 * (1 - found)  # of the time that is lost
    assert goodput(1e6, 1.0, 60.0, 60.0) == 0.0


FLAGS = "--num-layers 2 --hidden-size 8 --ffn-hidden-size 24 --num-attention-heads 2 --vocab-size 50 --seq-length 12"


@for_each(("optimizer", "precision"), [("adamw", "bf16"), ("lion", "fp32"), ("muon", "fp64")])
def test_bytes_of_a_checkpoint_by_hand(optimizer: str, precision: str) -> None:
    """GPT-2: q, k, v and projection, two products of the MLP, their biases, two norms; tables and the last norm."""
    matrices = 2 * (3 * 8 * 8 + 8 * 8 + 2 * 8 * 24)
    others = 2 * (3 * 8 + 8 + 24 + 8 + 4 * 8) + 50 * 8 + 12 * 8 + 2 * 8
    states = {"adamw": (2, 2), "lion": (1, 1), "muon": (1, 2)}[optimizer]
    each = 8 if precision == "fp64" else 4
    config = parse(f"{FLAGS} --optimizer {optimizer} --precision {precision}".split())
    assert checkpoint_bytes(config) == each * (matrices * (1 + states[0]) + others * (1 + states[1]))


def test_ways_of_a_job() -> None:
    """Copies to memory are cheaper and come more often; a save in the background stops training no longer than one."""
    config, device = parse(FLAGS.split()), load_device("h100-80gb")
    large = parse(
        f"{FLAGS} --num-layers 40 --hidden-size 4096 --ffn-hidden-size 16384 --num-attention-heads 32".split()
    )
    for devices in (1, 8, 512):
        disk, memory = ways(large, device, devices, 50_000)
        each, mtbf = checkpoint_bytes(large) / devices, 50_000 * 3600 / devices
        assert disk.save == pytest.approx(each / 1.2e8) and memory.save == pytest.approx(
            each / device["host.bandwidth"]
        )
        assert disk.interval == pytest.approx(math.sqrt(2 * disk.save * mtbf))
        assert disk.restart == pytest.approx(60 + disk.save) and memory.restart < disk.restart
        sent = each * min(devices, 8) / (device["cluster.bandwidth"] * device["cluster.fraction"])
        assert memory.restart == pytest.approx(60 + sent + memory.save)  # the ranks of a node share its cards
        assert memory.interval < disk.interval and memory.goodput < 1
        assert (disk.goodput < memory.goodput) is (devices > 8)  # the only node of 8 takes both copies with it
        both = 100 if devices > 8 else 1  # one failure in n takes both copies
        rare = goodput(disk.interval * math.sqrt(both), disk.save, disk.restart, mtbf * both)
        assert memory.goodput == pytest.approx(goodput(*memory[1:4], mtbf) * rare, rel=1e-14)
    background = parse(f"{FLAGS} --save s --async-save".split())
    quick, _ = ways(background, device, 8, 50_000)
    slow, _ = ways(config, device, 8, 50_000)
    assert quick.save < slow.save and quick.restart == slow.restart
    # a save ends before the next one begins, however often devices fail
    busy, _ = ways(replace(large, checkpoint=background.checkpoint), device, 512, 0.5)
    assert busy.interval == pytest.approx(checkpoint_bytes(large) / 512 / 1.2e8) and busy.save < busy.interval


@pytest.mark.second
def test_it_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(flags: str) -> str:
        pretrain_gpt.main(flags.split())
        return capsys.readouterr().out

    flags = f"--preset gpt2-124m --plan --world-size 48 --device-type h100-80gb --mtbf 30000 --log-dir {tmp_path}"
    said = planned(flags)
    assert "failures, every 30000 hours of a device" in said and "625:00:00" in said  # 30,000 / 48
    for devices in ("48", "64", "1,024", "16,384"):
        assert f"│ {devices:>7} │" in said
    plan = json.loads((tmp_path / "plan.json").read_text())
    disk, memory = plan["failures"]
    steps = [max(1, round(way["interval"] / plan["step_seconds"])) for way in (disk, memory)]
    assert f"this job: --save-interval {steps[0]}, or --memory-checkpoint-interval {steps[1]} with rare saves" in said
    assert "failures," not in planned(flags.replace(" --mtbf 30000", ""))
    assert json.loads((tmp_path / "plan.json").read_text())["failures"] == []
