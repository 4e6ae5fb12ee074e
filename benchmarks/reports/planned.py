"""Plans next to runs that others published, and the range of MFU that GPU presets are expected to reach."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.paper_speed import executed
from benchmarks.reports.blocks import markdown, percent
from benchmarks.reports.published import TRAINED, TrainedRun
from benchmarks.reports.searches import NARAYANAN_CASES, Case
from megazero.config.cli import parse
from megazero.price.devices import Constant, Device, load_device
from megazero.price.plan import Plan, make_plan, plan_config

# Cards of published runs that are an H100 but for this; all else is taken from h100-80gb.
VARIANTS = {
    "gh200": (
        {"memory.capacity": 1.02e11, "memory.bandwidth": 4e12, "node.devices": 4, "cluster.bandwidth": 1e11},
        "GH200 data sheet: 96 GB of HBM3 at 4 TB/s; Alps: nodes of 4, a 200 Gb/s card each",
    ),
    "h100-500w": (
        {"memory.capacity": 1.02e11, "memory.bandwidth": 2.4e12},
        "torchtitan's benchmarks: 96 GB of HBM2e at 2.4 TB/s, limited to 500 W",
    ),
}
# preset -> H100s
PRESETS = {"gpt2-124m": 8, "gpt2-345m": 8, "gpt2-1.5b": 8, "llama-1b": 8, "llama-7b": 64, "gpt-100b-h100": 512}


def device_of(name: str) -> Device:
    """Return a device of scripts/devices, or an H100 with the constants of `VARIANTS`."""
    if name not in VARIANTS:
        return load_device(name)
    values, source = VARIANTS[name]
    device = load_device("h100-80gb")
    changed = {key: Constant(value, value, value, source) for key, value in values.items()}
    return replace(device, name=name, constants=device.constants | changed)


def plan_of(flags: str, gpus: int, device: str) -> Plan:
    """Plan a command line on a device of `device_of`."""
    known = "h100-80gb" if device in VARIANTS else device
    config, layout, _ = plan_config(parse([*flags.split(), f"--world-size={gpus}", f"--device-type={known}", "--plan"]))
    return make_plan(config, layout, device_of(device))


def range_of(plan: Plan, rate: float) -> tuple[float, float]:
    """Return the least and the most of a rate that the expected time of a step gives."""
    return rate * plan.seconds / plan.time.slow, rate * plan.seconds / plan.time.fast


def row(run: TrainedRun) -> list[object]:
    """Return a row of the table: a run as published, as planned with the plan's range, and the error."""
    plan = plan_of(run.flags, run.gpus, run.device)
    if run.tflops:
        unit, published, expected = "TFLOP/s", run.tflops, plan.tflops
    else:
        unit, published = "k tokens/s", run.tokens / run.gpus / 1e3
        expected = plan.tokens / plan.seconds / run.gpus / 1e3
    return _cells(f"{run.name}{' *' * run.chose}", run.gpus, run.device, run.source, published, expected, plan, unit)


def row_of_case(case: Case) -> list[object]:
    """Return the row of a run of Narayanan 2021, in TFLOP/s with recompute counted."""
    plan = plan_of(f"{case.model} {case.layout}", case.gpus, case.device)
    expected = executed(plan.config, plan.time.expected, case.gpus)
    name, source = case.name.split(", ")
    return _cells(name, case.gpus, case.device, source, case.tflops or 0.0, expected, plan, "TFLOP/s, with recompute")


def _cells(
    name: str, gpus: int, device: str, source: str, published: float, expected: float, plan: Plan, unit: str
) -> list[object]:
    low, high = range_of(plan, expected)
    numbers = [f"{published:.4g} {unit}", f"{expected:.4g}", f"{low:.4g} to {high:.4g}", percent(expected, published)]
    return [name, f"{gpus} x {device}", source, *numbers]


def planned() -> dict[str, str]:
    """Compare plans with published runs; print the expected MFU of presets on H100s."""
    rows = [*map(row, TRAINED), *map(row_of_case, NARAYANAN_CASES)]
    columns = ["run", "cards", "published by", "per GPU", "predicted", "range", "error"]
    expected = []
    for preset, gpus in PRESETS.items():
        plan = plan_of(f"--preset {preset}", gpus, "h100-80gb")
        low, high = range_of(plan, plan.mfu)
        expected.append([f"`{preset}`", gpus, f"{plan.seconds:.3g}", f"{plan.mfu:.0%}", f"{low:.0%} to {high:.0%}"])
    presets = markdown(["preset", "H100s", "s a step", "MFU", "range"], expected)
    return {"planned": markdown(columns, rows), "planned, presets": presets}
