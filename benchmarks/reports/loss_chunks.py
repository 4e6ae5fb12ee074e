"""Report the deepest model and the longest sample of one device by plan, with the loss of all tokens and in chunks.

python -m benchmarks.reports.loss_chunks      # writes the table of docs/results/memory.md
"""

from benchmarks.reports.blocks import markdown, write_blocks
from benchmarks.reports.offload import PAGE, most_layers
from megazero.flags.cli import parse
from megazero.planner.run_plan import Plan, make_plan, plan_config

# Of Llama 3.1 8B, optimizer states and gradients are in host memory, since those of 32 layers do not fit.
MODELS = {
    "llama-3.1-8b": "--recompute full --optimizer-cpu-offload --zero-stage 2",
    "gemma3-1b": "--recompute full",
}
CASES = (("llama-3.1-8b", 8192), ("llama-3.1-8b", 32768), ("llama-3.1-8b", 131072), ("gemma3-1b", 8192))
STEP = 1024  # tokens, of which the longest sample is a multiple
COLUMNS = ("model", "tokens of a sample", "GB of logits", "layers that fit", "longest sample")


def planned(preset: str, whole: bool, *flags: object) -> Plan:
    chunk = "--loss-chunk-tokens 0" if whole else ""
    words = f"--preset {preset} {MODELS[preset]} {chunk} --global-batch-size 1 --world-size 1 --device-type h100-80gb"
    return make_plan(*plan_config(parse([*words.split(), "--plan", *map(str, flags)])))


def row(preset: str, length: int) -> list[str]:
    found: list[list[str]] = []
    for whole in (True, False):
        logits = planned(preset, whole, "--seq-length", length).stages[0].memory["logits"]

        def layers_fit(layers: int, whole: bool = whole) -> bool:
            return planned(preset, whole, "--seq-length", length, "--num-layers", layers).free >= 0

        def length_fits(steps: int, whole: bool = whole) -> bool:
            return planned(preset, whole, "--seq-length", STEP * steps).free >= 0

        layers = most_layers(layers_fit) if layers_fit(1) else 0
        found.append([f"{logits / 1e9:.2f}", str(layers), f"{STEP * most_layers(length_fits):,}"])
    return [preset, f"{length:,}", *(f"{before} to {after}" for before, after in zip(*found, strict=True))]


def main() -> None:
    write_blocks(PAGE, {"loss chunks": markdown(COLUMNS, [row(*case) for case in CASES])})
    print(PAGE)


if __name__ == "__main__":
    main()
