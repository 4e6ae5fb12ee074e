"""Report the largest model of one device by plan, with states on the device and in host memory.

python -m benchmarks.reports.offload          # writes the table of docs/results/memory.md
"""

from collections.abc import Callable
from pathlib import Path

from benchmarks.reports.blocks import markdown, write_blocks
from megazero.engine.model.stage import declare
from megazero.engine.options.option import MOST_LAYERS
from megazero.flags.cli import parse
from megazero.planner.parameter_counts import num_parameters
from megazero.planner.run_plan import Plan, make_plan, plan_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "memory.md"
MODEL = (
    "--architecture llama --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --vocab-size 32000 "
    "--seq-length 2048 --precision bf16 --recompute full --micro-batch-size 4 --global-batch-size 512"
)
DEVICES = ("rtx4090-24gb", "h100-80gb")
WAYS = {  # row -> flags
    "states on the device": "",
    "half of them in host memory": "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
    "in host memory": "--optimizer-cpu-offload",
    "gradients too": "--optimizer-cpu-offload --zero-stage 2",
    "and bf16 gradients": "--optimizer-cpu-offload --zero-stage 2 --grad-dtype bf16",
    "and kept inputs": "--optimizer-cpu-offload --zero-stage 2 --checkpoint-in-cpu",
    "in a file": "--optimizer-cpu-offload --optimizer-nvme-offload /nvme",
    "in a file, gradients too": "--optimizer-cpu-offload --optimizer-nvme-offload /nvme --zero-stage 2",
}
COLUMNS = ("device", "states", "layers", "parameters", "GB of the device", "GB of the host", "s a step", "TFLOP/s")


def planned(device: str, flags: str, layers: int) -> Plan:
    words = f"{MODEL} {flags} --num-layers {layers} --device-type {device} --world-size 1 --plan"
    return make_plan(*plan_config(parse(words.split())))


def fitting(device: str, flags: str) -> Callable[[int], bool]:
    """Return whether a number of layers fits."""
    return lambda layers: planned(device, flags, layers).free >= 0


def most_layers(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, at least 1 by assumption."""
    least, above = 1, 2
    while above <= MOST_LAYERS and fits(above):
        least, above = above, 2 * above
    while above - least > 1:
        middle = (least + above) // 2
        least, above = (middle, above) if fits(middle) else (least, middle)
    return least


def table() -> str:
    rows = []
    for device in DEVICES:
        for name, flags in WAYS.items():
            layers = most_layers(fitting(device, flags))
            plan = planned(device, flags, layers)
            [stage] = plan.stages
            billions = num_parameters(declare(plan.config.model)) / 1e9
            gigabytes = stage.peak / 1e9, stage.memory["host"] / 1e9
            numbers = f"{billions:.2f} B", *(f"{each:.1f}" for each in gigabytes)
            rows.append((device, name, layers, *numbers, f"{plan.seconds:.1f}", f"{plan.tflops:.0f}"))
    return markdown(COLUMNS, rows)


def main() -> None:
    write_blocks(PAGE, {"offload": table()})
    print(PAGE)


if __name__ == "__main__":
    main()
