"""--rehearse: output, files and refusals; and the bytes of GPUs, which only a rehearsal can count here.

tests/parallel/test_rehearsal.py compares the counts of real and rehearsed ranks.
"""

import gc
import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from megazero.command.rehearsal import rehearsal_report
from megazero.command.rehearsal.allocated import Allocated
from megazero.command.rehearsal.rehearsal import CollectiveCount, Rehearsal, RehearsalDevice
from megazero.command.rehearsal.rehearsal_report import rehearsal_table, run_rehearsal
from megazero.command.rehearsal.rehearsed_save import PlannedSave
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Coord, Layout
from megazero.flags.cli import parse
from megazero.flags.config import Config
from megazero.flags.resolve import resolve
from megazero.world import World

SINGLE = World(0, 1, 0, "single")
SMALL = "--preset c5 --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 16 --vocab-size 101".split()


def test_the_table_of_a_rank_has_its_own_numbers() -> None:
    """No two are equal."""
    sent = [
        CollectiveCount("shard", "dp", "all-gather", 31, 32),
        CollectiveCount("tp", "control", "all-reduce", 33, 34),
    ]
    found = Mock(
        rank=5, coord=Coord(1, 2, 3, 4), memory={"host": 11, "peak": 1200}, estimated_memory={"host": 14, "peak": 1100},
        traffic={"dp": 21}, estimated_traffic={"dp": 26}, allocated=41, allocated_in="Forward", collectives=sent,
        build_seconds=51.0, step_seconds=52.0,
        save=PlannedSave(
            checkpoint_bytes=61, written_bytes=62, written_chunks=63, rank_plan_bytes=64, rank_seconds=0.65,
            coordinator_seconds=0.66,
        ),
    )  # fmt: skip
    head, names, *rows, ways, last = rehearsal_table(found).splitlines()
    assert names.split() == ["bytes", "rehearsal", "estimate", "difference"]
    assert head == "rank 5: pp 1, dp 2, cp 3, tp 4"
    assert [row.split() for row in rows] == [
        ["host", "11", "14", "-3"],
        ["peak", "1,200", "1,100", "100"],
        ["dp", "traffic", "21", "26", "-5"],
        ["all", "tensors", "at", "once", "41", "in", "Forward"],
        ["sent", "in", "an", "iteration", "calls", "bytes"],
        ["all-gather", "over", "shard", "31", "32"],
        ["all-reduce", "over", "tp,", "control", "33", "34"],
    ]
    assert ways.strip() == (
        "a checkpoint of 61 bytes: this rank writes 62 in 63 chunks. Its plan of 64 bytes takes 0.65 s; rank 0 joins "
        "all plans in 0.66 s"
    )
    assert last.strip() == "built in 51.0 s, a step in 52.0 s"


def test_rehearsal_json_has_the_numbers_of_the_ranks_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's numbers are made of its own number; no two are equal."""

    def made(config: Config, layout: Layout, rank: int, on: RehearsalDevice) -> Rehearsal:
        (a, b, c, d, e, f, g, h, i, j), sizes = (100 * rank + n for n in range(10)), ("dp", "dp", "all-reduce")
        return Rehearsal(
            rank=rank, coord=layout.coord(rank), memory={"peak": a}, estimated_memory={"peak": b}, allocated=c,
            allocated_in="Update", allocated_host=d, traffic={"dp": e}, estimated_traffic={"dp": f},
            collectives=(CollectiveCount(*sizes, g, h),), save=None, build_seconds=i, step_seconds=j,
            host_peak_bytes=10**7 * rank,
        )  # fmt: skip

    monkeypatch.setattr(rehearsal_report, "rehearse_rank", made)
    flags = "--context-parallel-size 3 --pipeline-model-parallel-size 2 --cp-exchange ring --zero-stage 1"
    flags += f" --precision bf16 --seq-length 18 --rehearse 36:17,30 --rehearse-on gpu --log-dir {tmp_path}"
    assert [each.rank for each in run_rehearsal(parse([*SMALL, *flags.split()]), SINGLE, 0)] == [17, 30]
    said = capsys.readouterr().out
    assert "rehearsing 36 ranks, pp 2 x dp 3 x cp 3 x tp 2, --cp-exchange ring, ZeRO stage 1, with stand-ins" in said
    assert "this process took 0.30 GB" in said and "GPU\n" in said
    report = json.loads((tmp_path / "rehearsal.json").read_text())
    assert (report["world_size"], report["rehearse_on"]) == (36, "gpu")
    assert [report["layout"][axis] for axis in ("pp", "dp", "cp", "tp")] == [2, 3, 3, 2]
    places = ({"pp": 0, "dp": 2, "cp": 2, "tp": 1}, {"pp": 1, "dp": 2, "cp": 0, "tp": 0})
    for rank, place, found in zip((17, 30), places, report["ranks"], strict=True):
        a, b, c, d, e, f, g, h, i, j = (100 * rank + n for n in range(10))
        assert found == {
            "rank": rank, "coord": place, "allocated_in": "Update", "save": None,
            "memory_bytes": {"peak": a}, "estimated_memory_bytes": {"peak": b}, "allocated_bytes": c,
            "allocated_host_bytes": d, "traffic_bytes": {"dp": e}, "estimated_traffic_bytes": {"dp": f},
            "collectives": [{"axis": "dp", "kind": "dp", "operation": "all-reduce", "calls": g, "bytes": h}],
            "build_seconds": i, "step_seconds": j, "host_peak_bytes": 10**7 * rank,
        }  # fmt: skip


@pytest.mark.second
@pytest.mark.long
def test_a_gpus_rank_is_rehearsed_without_one(tmp_path, capsys) -> None:
    """Pa+cpu with its staging buffers, on two ranks of 64: no byte differs from the estimate."""
    flags = [*SMALL, "--global-batch-size", "128", "--rehearse", "64:0,63", "--log-dir", str(tmp_path)]
    config = parse(flags)
    first, last = run_rehearsal(config, SINGLE, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["rehearsal.json"]
    written = json.loads((tmp_path / "rehearsal.json").read_text())
    assert (written["world_size"], [each["rank"] for each in written["ranks"]]) == (64, [0, 63])
    for found, text in zip((first, last), written["ranks"], strict=True):
        assert text["memory_bytes"] == found.memory == found.estimated_memory
        assert text["traffic_bytes"] == found.traffic == found.estimated_traffic
        assert found.memory["host"] > 0 and found.memory["activation_checkpoints"] == 0
        assert found.allocated > found.memory["peak"]  # activations inside a block, and temporary tensors
        assert found.traffic["pcie"] > 0  # of copies, which are no collectives
        sent = dict.fromkeys(found.traffic, 0) | {"pcie": found.traffic["pcie"]}
        for each in text["collectives"]:
            sent[each["kind"]] += each["bytes"]
        assert sent == found.traffic
    assert last.coord == (0, 31, 0, 1)
    # fp32: 12 bytes of master weights and moments a parameter, each written by one of its ranks
    _, layout = resolve(config, 64, 0, declare)
    assert layout.dp == 32
    assert first.save.checkpoint_bytes == last.save.checkpoint_bytes > 20 * first.save.written_bytes > 0
    printed = capsys.readouterr().out
    assert "rank 63: pp 0, dp 31, cp 0, tp 1" in printed and f"{last.memory['host']:,}" in printed


@pytest.mark.second
@pytest.mark.long
def test_a_rank_with_experts_holds_what_is_estimated() -> None:
    """Its router has biases, its tokens are taken as balanced, and its step has statistics per layer."""
    flags = "--architecture mixtral --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 16 "
    flags += "--vocab-size 101 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --recompute full "
    flags += "--moe-aux-loss-coeff 0.01 --expert-model-parallel-size 2 --rehearse 4:0,3 --precision bf16 "
    flags += "--stats-interval 3"
    for found in run_rehearsal(parse(flags.split()), SINGLE, 0):
        assert found.memory == found.estimated_memory and found.traffic == found.estimated_traffic


@pytest.mark.second
@pytest.mark.parametrize(("asked", "rehearsed"), [("ring", "ring"), ("auto", "all-gather")])
def test_an_exchange_of_keys_is_rehearsed_as_on_a_gpu(asked: str, rehearsed: str, capsys) -> None:
    """Its kernels take bf16, which a CPU's do not. Without speeds, auto is all-gather."""
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 33 --vocab-size 101 --precision bf16 "
    flags += f"--context-parallel-size 3 --rehearse 6:4 --rehearse-on gpu --cp-exchange {asked}"
    (found,) = run_rehearsal(parse(flags.split()), SINGLE, 0)
    assert (found.memory, found.traffic) == (found.estimated_memory, found.estimated_traffic)
    shifts = {each.operation for each in found.collectives if each.axis == "cp"}
    assert shifts == {"ring": {"shift"}, "all-gather": {"all-gather", "reduce-scatter"}}[rehearsed]
    assert f"cp 3 x tp 1, --cp-exchange {rehearsed}, ZeRO stage 1" in capsys.readouterr().out


def test_what_cannot_be_rehearsed_is_refused() -> None:
    config = parse(SMALL)
    refusals = [
        ("4:9", SINGLE, "--rehearse 4:9: there is no rank 9; ranks are 0 to 3"),
        ("5", SINGLE, "5 ranks are not divisible by --tensor-model-parallel-size 2 .* rehearse 4 or 6"),
        ("2:1,0,2", SINGLE, "there is no rank 2; ranks are 0 to 1"),
        ("1", SINGLE, "rehearse 2, or change either"),
        ("many", SINGLE, "--rehearse many: not a number of ranks; write WORLD"),
        ("4", World(1, 2, 1, "torchrun"), "needs a single process, and torchrun started 2"),
    ]
    for text, world, message in refusals:
        asked = replace(config, plan=replace(config.plan, rehearse=text))
        with pytest.raises(ValueError, match=message):
            run_rehearsal(asked, world, 0)


def test_a_rehearsal_refuses_what_its_device_does() -> None:
    """On a GPU gradients have the type of the matrix products, or fp32; on a CPU there are no Triton kernels."""
    for device, flags, message in (
        (
            "gpu",
            "--precision fp32 --grad-dtype bf16",
            "--grad-dtype bf16 with --precision fp32: a GPU's matrix products",
        ),
        ("cpu", "--fused-kernels triton", "--fused-kernels triton needs a GPU"),
    ):
        words = f"--num-layers 1 --vocab-size 101 --rehearse 2 --rehearse-on {device} {flags}"
        with pytest.raises(ValueError, match=message):
            run_rehearsal(parse(words.split()), SINGLE, 0)


@pytest.mark.long
def test_all_tensors_are_counted_for_as_long_as_their_memory_lives() -> None:
    """Views share it; autograd keeps it; another device's is counted apart."""
    kept = torch.ones(10)
    gc.collect()
    with Allocated(torch.device("cpu"), place=lambda: "here") as allocated:
        x = torch.zeros(100, requires_grad=True)
        view = x[:50]
        assert allocated.now == 400
        y = (x * 2).exp()  # the product is freed; autograd and y keep the result of exp
        assert (allocated.now, allocated.peak, allocated.peak_at) == (800, 1200, "here")
        edge = y.grad_fn
        del y
        assert allocated.now == 800
        del edge, view
        assert allocated.now == 400
        on_gpu = torch.empty(5, device="meta")
        assert (allocated.now, allocated.host_now) == (400, 20)
        kept += 1
        assert allocated.now == 440
        allocated.begin()
        assert allocated.peak == 440
    assert on_gpu.numel() == 5
