#!/usr/bin/env python3
"""Memory and time of export to, and import from, a Hugging Face model, for the shape of a preset.

Example: python benchmarks/huggingface.py --presets gpt2-124m gpt2-345m --folder /tmp/models
"""

import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import tyro

from megazero.checkpoint.streaming import bands, write_checkpoint
from megazero.engine.model.stage import declare
from megazero.flags.cli import parse
from megazero.flags.config import ModelConfig
from megazero.interop.huggingface.export import shapes_of
from megazero.planner.parameter_counts import num_parameters
from megazero.run.run_state import RunState

ROOT = Path(__file__).resolve().parent.parent
# In a process of its own, whose memory is that of imports before each step.
STEPS = """
import resource, sys, time
from pathlib import Path
import transformers.models.auto.modeling_auto, transformers.models.gpt2.configuration_gpt2
from transformers import AutoConfig, GPT2Config, GenerationConfig
from megazero.console.checkpoint_tool import Export, Import, export_checkpoint, import_checkpoint
here, peak = Path(sys.argv[1]), lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, start = peak(), time.perf_counter()
export_checkpoint(Export(here / "run", here / "export", tokenizer="none"))
exported, between = peak(), time.perf_counter()
import_checkpoint(Import(here / "export", here / "back"))
print("found", exported - before, peak() - before, between - start, time.perf_counter() - between)
"""


@dataclass(frozen=True)
class Options:
    """Measure export and import of weights of a preset's shape; they are drawn at random."""

    presets: tuple[str, ...] = ("gpt2-124m", "gpt2-345m")
    """Names of presets."""
    vocab_size: int = 50257
    """Vocabulary."""
    num_layers: int = 0
    """Blocks. 0: those of the preset."""
    folder: Path = Path("runs/benchmark-huggingface")
    """Folder for three copies of the weights; deleted afterwards."""


class Measured(NamedTuple):
    """MB by which the process grew at most: up to the end of the export, and of the import. Seconds of each."""

    export_mb: float
    import_mb: float
    export_seconds: float
    import_seconds: float


def draw(shape: tuple[int, ...], rows: slice) -> torch.Tensor:
    """Random rows of a tensor."""
    return torch.randn(len(range(*rows.indices(shape[0]))), *shape[1:])


def measure(model: ModelConfig, folder: Path) -> Measured:
    """Export and import a model of this shape, in a new folder."""
    shapes = {f"model.{name}": shape for name, shape in shapes_of(model).items()}
    tensors = ((draw(shape, rows) for rows in bands(shape)) for shape in shapes.values())
    state = RunState(0, 0, 0, None, asdict(model), {}, {}, weights_only=True)
    write_checkpoint(folder / "run", 0, shapes, tensors, state.to_json(), {})
    command = [sys.executable, "-c", STEPS, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return Measured(*map(float, done.stdout.split("found")[-1].split()))


def main(options: Options) -> None:
    print("preset        weights   largest tensor   export: peak, speed      import: peak, speed")
    for preset in options.presets:
        model = replace(parse(["--preset", preset]).model, vocab_size=options.vocab_size)
        model = replace(model, num_layers=options.num_layers or model.num_layers)
        folder = options.folder / preset
        try:
            found = measure(model, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        mb = 4 * num_parameters(declare(model)) / 2**20
        largest = max(torch.Size(shape).numel() for shape in shapes_of(model).values()) / 2**18
        exported = f"{found.export_mb:6.0f} MiB, {mb / found.export_seconds:5.0f} MiB/s"
        imported = f"{found.import_mb:6.0f} MiB, {mb / found.import_seconds:5.0f} MiB/s"
        print(f"{preset:12}{mb:6.0f} MiB{largest:12.0f} MiB   {exported:24} {imported}")


if __name__ == "__main__":
    main(tyro.cli(Options))
