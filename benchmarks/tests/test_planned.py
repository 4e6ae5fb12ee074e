"""Plans next to published runs: the error, the range, their programs, and cards that differ in some constants."""

import dataclasses

import pytest

from benchmarks.reports.planned import Times, compare, device_of, left_out, plan_of, price
from benchmarks.reports.published import EAGER, TRAINED, TrainedRun
from megazero.engine.model.stage import declare
from megazero.flags.cli import parse
from megazero.flags.resolve import resolve
from megazero.planner.parameter_counts import num_parameters
from megazero.planner.time.costs import Roofline
from megazero.planner.time.devices import Constant, load_device
from megazero.planner.trace.kernel_records import Operator, Product
from tests.helpers.table import for_each

pytestmark = pytest.mark.second


FLAGS = "--num-layers 2 --hidden-size 512 --num-attention-heads 4 --seq-length 256 --vocab-size 512 --precision bf16"


def test_the_error_of_a_published_run_is_that_of_its_rate() -> None:
    """Published at half and at four times the planned rate: by tokens of all devices, by FLOPs of one."""
    plan = plan_of(f"{FLAGS} --global-batch-size 12", 4, "gh200")
    tokens = 12 * 256 / plan.seconds
    run = TrainedRun("a run", "someone", "gh200", 4, f"{FLAGS} --global-batch-size 12", tokens=tokens / 2)
    low, high = (12 * 256 / seconds / 4e3 for seconds in (plan.time.slow, plan.time.fast))
    base = plan_of(f"{FLAGS} --global-batch-size 12", 4, "h100-80gb")  # of the cards' device file, as --plan has it
    assert compare(run).row() == [
        "a run",
        "4 x gh200",
        "someone",
        f"{tokens / 8e3:.4g} k tokens/s",
        f"{tokens / 4e3:.4g}",
        f"{low:.4g} to {high:.4g}",
        "+100.0 %",
        f"{12 * 256 / base.seconds / 4e3:.4g}",
        f"{base.seconds / plan.seconds / 2:.3f}",
    ]
    assert compare(run._replace(flags=f"{run.flags} {EAGER}")).ours == compare(run).ours
    faster = compare(run._replace(tokens=0.0, tflops=4 * plan.tflops))
    assert faster.row()[6] == "-75.0 %" and faster.reached == pytest.approx(4 * plan.tflops / base.tflops)


def test_a_published_program_has_its_recompute_its_loss_and_its_prefetch() -> None:
    """A quarter of a full recompute; 8 bytes more for each logit; all-gathers of blocks once more, not overlapped."""
    run = TrainedRun("a run", "someone", "gh200", 4, f"{FLAGS} --global-batch-size 12 --zero-stage 3", tflops=1.0)
    plan, times = price(run)
    assert times == Times.of(plan)
    full = Times.of(plan_of(f"{run.flags} --recompute full", 4, "gh200"))
    quarter = [a + 0.25 * (b - a) for a, b in zip(times, full, strict=True)]
    assert price(run._replace(recomputed=0.25))[1] == pytest.approx(quarter) and quarter[0] > times.expected
    loss = price(run._replace(loss_bytes=8))[1]
    assert loss.slow - times.slow == pytest.approx(3 * 256 * 512 * 8 / (4e12 * 0.88))
    late = price(run._replace(late_gathers=True))[1]
    weights = 2 * (12 * 512**2 + 13 * 512)  # bytes of a block in bf16
    gathers = 2 * 3 * (3 * 5e-6 + weights * 3 / 4 / (1.5e11 * 0.82))  # of 2 blocks, for 3 micro-batches
    assert late.expected - times.expected == pytest.approx(gathers / 1.19, rel=1e-3)


@for_each("pp", [1, 2])
def test_others_recompute_the_last_product_of_each_block(pp: int) -> None:
    """[256, 4 x 512] x [4 x 512, 512] and the residual, for 12 micro-batches, and once more behind another stage."""
    flags = f"{FLAGS} --global-batch-size 12 --recompute full --pipeline-model-parallel-size {pp}"
    plan = plan_of(flags, pp, "a100-80gb")
    nothing = Constant(0.0, 0.0, 0.0, "")
    device = dataclasses.replace(
        plan.device, constants=plan.device.constants | {f"overhead.{name}": nothing for name in ("call", "operation")}
    )
    x, w, y = 256 * 2048, 2048 * 512, 256 * 512
    product = Operator("addmm", 2 * (x + w + y + 512), "bf16", Product(1, 256, 512, 2048))
    seconds = sum(map(Roofline(device).seconds, (product, Operator("add", 2 * 3 * y, "bf16"))))
    assert left_out(plan.config, plan.layout, device) == pytest.approx({1: 12 * 2, 2: 13}[pp] * seconds)


def test_a_variant_is_its_base_but_for_its_constants() -> None:
    """Its constants are as uncertain as the base's."""
    h100, slow = load_device("h100-80gb"), device_of("h100-500w")
    changed = {name for name, constant in slow.constants.items() if constant.value != h100[name]}
    assert changed == {"memory.capacity", "memory.bandwidth", "compute.fraction", "compute.attention"}
    assert slow["memory.bandwidth"] == 2.4e12
    known, found = (device.constants["compute.fraction"] for device in (h100, slow))
    assert (found.low / found.value, found.high / found.value) == pytest.approx(
        (known.low / known.value, known.high / known.value)
    )
    assert dataclasses.replace(slow, name=h100.name, constants=h100.constants) == h100
    assert device_of("a100-80gb") == load_device("a100-80gb")
    assert device_of("a100-400g")["cluster.bandwidth"] == 5e10


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
    assert [found[f"Llama 2 {size}"] for size in ("7B", "13B")] == [6_738_415_616, 13_015_864_320]
