#!/usr/bin/env python3
"""Tokens/s of one process against transformers' model with torch's fused AdamW: same weights, batch and steps.

The model is a GPT-2, or that of a preset. Both losses of the first step must agree. The two take turns in one process;
ratios are taken pair by pair, so that a machine whose speed drifts slows both. Prints a JSON object: medians, and the
ratios, transformers / megazero, of seconds and of CPU seconds with their 95 % bootstrap intervals. Examples:

    python benchmarks/single_process.py --layers 6 --hidden 512 --rounds 15
    python benchmarks/single_process.py --preset tiny-deepseek --seq-length 128 --vocabulary 2048 --batch 8
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.measure import interval
from benchmarks.peer_models import initial_weights
from megazero.cluster import launch
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.layers.context import DTYPES
from megazero.engine.model.stage import declare
from megazero.engine.step.batch import MicroBatch
from megazero.engine.step.engine import Engine
from megazero.flags.cli import parse
from megazero.flags.config import Config, ModelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from megazero.interop.huggingface.families import family_of
from megazero.run.kernel_choices import choose_matmul_backend


@dataclass(frozen=True)
class Options:
    """Tokens/s of one process against transformers' model."""

    preset: str = ""
    """Train this preset's model, of its own layers, hidden size and heads. Empty: a GPT-2."""
    layers: int = 6
    hidden: int = 512
    heads: int = 8
    seq_length: int = 256
    vocabulary: int = 8192
    batch: int = 4
    rounds: int = 15
    """Pairs of steps that count; two more warm up."""
    threads: int = 2
    precision: str = "fp32"
    """fp32, or bf16 (on a GPU; on a CPU 16-bit speed means nothing)."""
    matmul_backend: Literal["auto", "torch", "onednn"] = "auto"
    """Library of megazero's products; torch is the same as transformers'."""


def model_of(o: Options) -> ModelConfig:
    if o.preset:
        return replace(parse(["--preset", o.preset]).model, seq_length=o.seq_length, vocab_size=o.vocabulary)
    return ModelConfig(o.layers, o.hidden, 0, o.heads, o.seq_length, o.vocabulary)


def ours(o: Options, model: ModelConfig, batch: MicroBatch, device: torch.device) -> Callable[[], float]:
    training = TrainingConfig(micro_batch_size=o.batch, precision=o.precision, matmul_backend=o.matmul_backend)
    config, layout = resolve(Config(model=model, training=training), 1, 0, declare)
    mesh = Mesh.build(layout, 0, device)
    config, said = choose_matmul_backend(config, mesh)
    print(said)
    engine = Engine(config, mesh)
    return lambda: engine.train_step(1, [batch]).loss


def theirs(o: Options, shape: ModelConfig, batch: MicroBatch, device: torch.device) -> Callable[[], float]:
    """bf16: autocast over fp32 weights, as its users do."""
    from transformers import AutoModelForCausalLM

    family = family_of(shape)
    config = family.to_config(shape, None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    weights = dict(initial_weights(shape, TrainingConfig().seed))
    given = model.load_state_dict(family.split(weights, shape, model.state_dict()), strict=False)
    # not given: a tied head, and biases of routers, which are 0
    assert not given.unexpected_keys and all("bias" in name or name == "lm_head.weight" for name in given.missing_keys)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01, fused=True)
    ids, labels = batch.ids.to(device), batch.labels.to(device)

    def step() -> float:
        with torch.autocast(device.type, torch.bfloat16, enabled=o.precision == "bf16"):
            logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()  # a run prints it, as megazero does
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def compare(found: dict[str, list[float]]) -> tuple[float, list[float]]:
    """Return the median of transformers / megazero, pair by pair, and its interval."""
    ratios = [b / a for a, b in zip(found["megazero"], found["transformers"], strict=True)]
    return round(statistics.median(ratios), 3), [round(bound, 3) for bound in interval(ratios)]


def main(o: Options) -> None:
    torch.set_num_threads(o.threads)
    device = launch.pick_device(launch.World(0, 1, 0, "single"))
    assert o.precision in DTYPES, o.precision
    model = model_of(o)
    ids = torch.randint(0, o.vocabulary, (o.batch, o.seq_length + 1), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(o.batch, o.seq_length)
    batch = MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), mask, tuple(range(o.batch)))
    steps = {"megazero": ours(o, model, batch, device), "transformers": theirs(o, model, batch, device)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    computed: dict[str, list[float]] = {name: [] for name in steps}  # CPU seconds of all threads
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(o.rounds + 2):
        for name in steps if i % 2 else reversed(steps):  # each goes first half of the time
            start, cpu = time.perf_counter(), time.process_time()
            losses[name].append(steps[name]())
            if i >= 2:
                seconds[name].append(time.perf_counter() - start)
                computed[name].append(time.process_time() - cpu)
    first = [losses[name][0] for name in steps]
    assert abs(first[0] - first[1]) < (1e-5 if o.precision == "fp32" else 1e-2) * first[1], first
    tokens = o.batch * o.seq_length
    (ratio, bounds), (cpu_ratio, cpu_bounds) = compare(seconds), compare(computed)
    found = {name: round(tokens / statistics.median(s)) for name, s in seconds.items()}
    print(
        json.dumps(
            {
                "device": device.type,
                "precision": o.precision,
                "tokens_per_second": found,
                "ratio": ratio,
                "interval": bounds,
                "cpu_ms": {name: round(1000 * statistics.median(s), 1) for name, s in computed.items()},
                "cpu_ratio": cpu_ratio,
                "cpu_interval": cpu_bounds,
                "rounds": o.rounds,
            }
        )
    )


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
