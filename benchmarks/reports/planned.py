"""Plans next to runs that others published, and the share of its plan that a run is expected to reach.

A plan has our kernels. So each run is planned twice: with the program that its authors ran, as far as that is known and
counted (their recompute, their operators, the speed of their attention kernel, their cards), and as `--plan` does, with
ours on the device file of such cards.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import NamedTuple

from benchmarks.paper_speed import executed
from benchmarks.reports.blocks import markdown, percent
from benchmarks.reports.published import EAGER, TRAINED, TrainedRun
from benchmarks.reports.searches import NARAYANAN_CASES, Case
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.operations import Forward, Gather, Recompute
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.files import replace_file
from megazero.flags.cli import parse
from megazero.flags.config import Config
from megazero.planner.expected import PUBLISHED, reached
from megazero.planner.run_plan import Plan, make_plan, plan_config
from megazero.planner.time.costs import StepCosts
from megazero.planner.time.devices import Constant, Device, load_device


class Variant(NamedTuple):
    """A device of scripts/devices but for some constants: those of another card, or of another attention kernel."""

    base: str
    values: dict[str, float]
    source: str


# FlashAttention 2 on an H100: 35 % of its peak (Shah 2024, arXiv 2407.08608, abstract), 335 of 989 TFLOP/s forward and
# backward (Dao 2023, arXiv 2307.08691), both at best: 0.33. It is 1.3 to 2.5 times as fast as the Triton kernel of
# version 1 (Dao 2023), the default of MPT's benchmarks: the middle, 1.9.
TRITON = "Dao 2023: FlashAttention 2 is 1.3 to 2.5 times as fast as version 1 in Triton, taken as 1.9"
VARIANTS = {
    "gh200": Variant(
        "h100-80gb",
        {
            "memory.capacity": 1.02e11,
            "memory.bandwidth": 4e12,
            "node.devices": 4,
            "node.bandwidth": 1.5e11,
            "cluster.bandwidth": 1e11,
        },
        "GH200 data sheet: 96 GB of HBM3 at 4 TB/s; Alps: nodes of 4 (Fusco 2024, arXiv 2408.11556) with a 200 Gb/s "
        "card each, and no NVSwitch: of a GPU's 18 links of 25 GB/s 6 lead to each of the others",
    ),
    "h100-500w": Variant(
        "h100-80gb",
        {"memory.capacity": 1.02e11, "memory.bandwidth": 2.4e12, "compute.fraction": 0.54, "compute.attention": 0.33},
        "torchtitan's benchmarks: 96 GB of HBM2e at 2.4 TB/s, limited to 500 W. One script multiplies at 720 TFLOP/s "
        "on a card of 700 W and at 472 and 487 on two of 350 W (bf16, 10240; zzc0721/torch-performance-test-data, "
        "issues 79, 95, 112): speed goes with power to the 0.58, at 500 W 0.82 of that at 700 W. FlashAttention 2, "
        "which torch takes again since 2.5.1",
    ),
    "a100-400g": Variant("a100-80gb", {"cluster.bandwidth": 5e10}, "fms-fsdp, README: 400 Gb/s a node"),
    "h100, FlashAttention 1": Variant("h100-80gb", {"compute.attention": 0.17}, TRITON),
    "a100, FlashAttention 1": Variant("a100-80gb", {"compute.attention": 0.26}, TRITON),
}
# preset -> H100s
PRESETS = {"gpt2-124m": 8, "gpt2-345m": 8, "gpt2-1.5b": 8, "llama-1b": 8, "llama-7b": 64, "gpt-100b-h100": 512}
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"  # Megatron-LM's defaults; its attention was not fused


class Times(NamedTuple):
    """Seconds of a step, as planned: expected, and at the two ends of the range."""

    expected: float
    fast: float
    slow: float

    @classmethod
    def of(cls, plan: Plan) -> Times:
        return cls(plan.seconds, plan.time.fast, plan.time.slow)

    def plus(self, seconds: float) -> Times:
        return Times(*(time + seconds for time in self))


def device_of(name: str) -> Device:
    """Return a device of scripts/devices or of `VARIANTS`."""
    if name not in VARIANTS:
        return load_device(name)
    variant = VARIANTS[name]
    device = load_device(variant.base)
    changed = {}
    for key, value in variant.values.items():
        known = device.constants[key]
        low, high = (value * end / known.value for end in (known.low, known.high))  # as uncertain as the base's
        changed[key] = Constant(value, low, high, variant.source)
    return replace(device, name=name, constants=device.constants | changed)


def plan_of(flags: str, gpus: int, device: str) -> Plan:
    """Plan a command line on a device of `device_of`."""
    known = VARIANTS[device].base if device in VARIANTS else device
    config, layout, _ = plan_config(parse([*flags.split(), f"--world-size={gpus}", f"--device-type={known}", "--plan"]))
    return make_plan(config, layout, device_of(device))


def price(run: TrainedRun) -> tuple[Plan, Times]:
    """Plan a run with the recompute, the loss and the prefetch that its program has."""
    plan = plan_of(run.flags, run.gpus, run.device)
    times, device = Times.of(plan), plan.device
    if run.recomputed:
        full = Times.of(plan_of(f"{run.flags} --recompute full", run.gpus, run.device))
        times = Times(*(a + run.recomputed * (b - a) for a, b in zip(times, full, strict=True)))
    moved = plan.tokens / run.gpus * plan.config.model.vocab_size * run.loss_bytes
    times = times.plus(moved / (device["memory.bandwidth"] * device["memory.fraction"]))
    return plan, times.plus(late_gathers(plan)) if run.late_gathers else times


def late_gathers(plan: Plan) -> float:
    """Seconds of a step in which others wait for the weights of blocks in the backward, minus the cost of overlap."""
    costs = StepCosts(plan.config, plan.layout, rank_spec(plan.config, plan.layout, 0, declare), plan.device)
    each = [costs(Gather(unit)) for unit in costs.spec.units if unit.startswith("blocks.")]
    return sum(each) * plan.config.micro_batches(plan.layout.dp) / (1 + plan.device.overlap)


def left_out(config: Config, layout: Layout, device: Device) -> float:
    """Seconds of a step in which others recompute the end of each block: last product, sum over tp, residual.

    The first stage of a pipeline recomputes it for each micro-batch, and waits for the other stages' as long as 1F1B.
    """
    costs = StepCosts(config, layout, rank_spec(config, layout, 0, declare), device)
    block = next(name for name in costs.spec.layers if name.startswith("blocks."))
    forward, again = (costs.of_layer(op) for op in (Forward(block, 0, graph=True), Recompute(block, 0)))
    turns = config.micro_batches(layout.dp) + layout.pp - 1
    return (forward.seconds - again.seconds) * turns * config.model.num_layers / layout.pp


class Compared(NamedTuple):
    """A published rate next to the planned one, per GPU.

    Attributes:
        predicted: with the program that its authors ran.
        ours: by `--plan`.
    """

    run: str
    cards: str
    source: str
    published: float
    unit: str
    predicted: float
    low: float
    high: float
    ours: float

    @classmethod
    def of(
        cls, run: str, cards: str, source: str, published: float, unit: str, predicted: float, times: Times, ours: float
    ) -> Compared:
        low, high = (predicted * times.expected / time for time in (times.slow, times.fast))
        return cls(run, cards, source, published, unit, predicted, low, high, ours)

    @property
    def reached(self) -> float:
        """Share of the speed that `--plan` predicts."""
        return self.published / self.ours

    def row(self) -> list[object]:
        """Return a row of the table: the planned rate, its range and error, the rate of `--plan` and the share."""
        numbers = [f"{self.published:.4g} {self.unit}", f"{self.predicted:.4g}", f"{self.low:.4g} to {self.high:.4g}"]
        errors = [percent(self.predicted, self.published), f"{self.ours:.4g}", f"{self.reached:.3f}"]
        return [self.run, self.cards, self.source, *numbers, *errors]


def rate(run: TrainedRun, plan: Plan, seconds: float) -> float:
    """Return the planned rate of a GPU, in the unit of the published one, if a step takes `seconds`."""
    if run.tflops:
        return plan.tflops * plan.seconds / seconds
    return plan.tokens / seconds / run.gpus / 1e3


def compare(run: TrainedRun) -> Compared:
    """Compare a run with its plans."""
    plan, times = price(run)
    unit, published = ("TFLOP/s", run.tflops) if run.tflops else ("k tokens/s", run.tokens / run.gpus / 1e3)
    own = plan_of(
        run.flags.replace(EAGER, ""), run.gpus, VARIANTS[run.device].base if run.device in VARIANTS else run.device
    )
    predicted, ours = rate(run, plan, times.expected), rate(run, own, own.seconds)
    return Compared.of(run.name, f"{run.gpus} x {run.device}", run.source, published, unit, predicted, times, ours)


def compare_case(case: Case) -> Compared:
    """Compare a run of Narayanan 2021, in TFLOP/s with recompute counted."""
    plan, own = (plan_of(f"{case.model} {case.layout} {more}", case.gpus, case.device) for more in (DROPOUT, ""))
    times = Times.of(plan).plus(left_out(plan.config, plan.layout, plan.device))
    predicted = executed(plan.config, plan.time.expected, case.gpus) * plan.seconds / times.expected
    ours = executed(own.config, own.time.expected, case.gpus)
    name, source = case.name.split(", ")
    cards, unit = f"{case.gpus} x {case.device}", "TFLOP/s, with recompute"
    return Compared.of(name, cards, source, case.tflops or 0.0, unit, predicted, times, ours)


def write_reached(found: list[Compared]) -> None:
    """Write the shares that `megazero.planner.expected` reads."""
    rows = [f'"{each.run}, {each.cards}" = {each.reached:.3f}' for each in found]
    head = "# Published speed over the speed that --plan predicts for the run with this engine's kernels.\n"
    head += "# Written by `python -m benchmarks.reports.paper planned`; docs/results/plans.md has the sources.\n"
    text = head + "\n".join(rows) + "\n"
    assert len(tomllib.loads(text)) == len(found)
    replace_file(PUBLISHED, text)
    reached.cache_clear()


def planned() -> dict[str, str]:
    """Compare plans with published runs, and print the expected MFU of presets on H100s."""
    found = [*map(compare, TRAINED), *map(compare_case, NARAYANAN_CASES)]
    write_reached(found)
    expected = []
    for preset, gpus in PRESETS.items():
        plan = plan_of(f"--preset {preset}", gpus, "h100-80gb")
        low, high = (plan.mfu * plan.seconds / time for time in (plan.time.slow, plan.time.fast))
        median, least, most = reached().of(plan.mfu)
        cells = [f"{plan.mfu:.0%}", f"{low:.0%} to {high:.0%}", f"{median:.0%} ({least:.0%} to {most:.0%})"]
        expected.append([f"`{preset}`", gpus, f"{plan.seconds:.3g}", *cells])
    columns = ["run", "cards", "published by", "per GPU", "predicted", "range", "error", "`--plan`", "share"]
    presets = ["preset", "H100s", "s a step", "MFU of the plan", "range of the constants", "expected"]
    return {
        "planned": markdown(columns, [each.row() for each in found]),
        "planned, presets": markdown(presets, expected),
    }
