"""--rehearse: output, files and refusals; and the bytes of GPUs, which only a rehearsal can count here.

tests/parallel/test_rehearsal.py compares the counts of real and rehearsed ranks.
"""

import gc
import json
from dataclasses import replace

import pytest
import torch

from megazero.command.rehearsal.allocated import Allocated
from megazero.command.rehearsal.rehearsal_report import run_rehearsal
from megazero.engine.model.stage import declare
from megazero.flags.cli import parse
from megazero.flags.resolve import resolve
from megazero.world import World

SINGLE = World(0, 1, 0, "single")
SMALL = "--preset c5 --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 16 --vocab-size 101".split()


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


@pytest.mark.second
def test_what_cannot_be_rehearsed_is_refused() -> None:
    config = parse(SMALL)
    refusals = [
        ("4:9", SINGLE, "--rehearse 4:9: there is no rank 9; ranks are 0 to 3"),
        ("5", SINGLE, "5 ranks are not divisible by --tensor-model-parallel-size 2 .* rehearse 4 or 6"),
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
