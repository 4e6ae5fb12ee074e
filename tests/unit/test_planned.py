"""Plans next to published runs: the error, the range, and cards that are an H100 but for some constants."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.reports.planned import device_of, plan_of, row
from benchmarks.reports.published import TRAINED, TrainedRun
from megazero.config.cli import parse
from megazero.model.stage import declare
from megazero.plan.layers import num_parameters
from megazero.plan.resolve import resolve
from megazero.price.devices import load_device

FLAGS = "--num-layers 2 --hidden-size 512 --num-attention-heads 4 --seq-length 256 --vocab-size 512 --precision bf16"


def test_the_error_of_a_published_run_is_that_of_its_rate() -> None:
    """Published at half and at four times the planned rate: by tokens of all devices, by FLOPs of one."""
    plan = plan_of(f"{FLAGS} --global-batch-size 12", 4, "gh200")
    tokens = 12 * 256 / plan.seconds
    run = TrainedRun("a run", "someone", "gh200", 4, f"{FLAGS} --global-batch-size 12", tokens=tokens / 2)
    low, high = (12 * 256 / seconds / 4e3 for seconds in (plan.time.slow, plan.time.fast))
    assert row(run) == [
        "a run",
        "4 x gh200",
        "someone",
        f"{tokens / 8e3:.4g} k tokens/s",
        f"{tokens / 4e3:.4g}",
        f"{low:.4g} to {high:.4g}",
        "+100.0 %",
    ]
    by_flops = row(run._replace(tokens=0.0, tflops=4 * plan.tflops, chose=True))
    assert (by_flops[0], by_flops[-1]) == ("a run *", "-75.0 %")


def test_a_variant_is_an_h100_but_for_its_constants() -> None:
    h100, slow = load_device("h100-80gb"), device_of("h100-500w")
    changed = {name for name, constant in slow.constants.items() if constant.value != h100[name]}
    assert changed == {"memory.capacity", "memory.bandwidth"} and slow["memory.bandwidth"] == 2.4e12
    assert dataclasses.replace(slow, name=h100.name, constants=h100.constants) == h100
    assert device_of("a100-80gb") == load_device("a100-80gb")


def test_published_shapes_have_the_published_numbers_of_parameters() -> None:
    """Compare with llm-foundry's table, and with the names of GPT-2's sizes."""
    found = {}
    for run in TRAINED:
        config, _ = resolve(parse(run.flags.split()), run.gpus, 0, declare)
        found[run.name] = num_parameters(declare(config.model))
    published = {"MPT 125M, 1k": 124_525_056, "MPT 760M, 1k": 758_897_664, "MPT 3B, 8k": 2_667_566_080}
    published |= {"MPT 7B, 2k": 6_658_859_008, "MPT 13B, 2k": 12_853_954_560}
    for name, number in published.items():
        assert found[name] == pytest.approx(number, rel=1e-3), name
    assert [round(found[f"GPT-2 {name}"] / 1e6) for name in ("350M", "774M")] == [355, 774]
    assert found["Llama 3 8B, eager"] == 8_030_261_248
