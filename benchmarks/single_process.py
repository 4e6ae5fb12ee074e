#!/usr/bin/env python3
"""Tokens/s of one process against transformers' GPT2LMHeadModel with torch's fused AdamW: same shape, batch and steps.

Side by side in one process, in turn; the ratio is taken pair by pair, so that a machine whose speed drifts slows both.
Prints a JSON object: medians, the ratio and its 95 % bootstrap interval. Example:

    python benchmarks/single_process.py --layers 6 --hidden 512 --rounds 15
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.measure import interval
from megazero.cluster import launch
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.layers.context import DTYPES
from megazero.engine.model.stage import declare
from megazero.engine.options.schema import Config, ModelConfig, TrainingConfig
from megazero.engine.step.batch import MicroBatch
from megazero.engine.step.engine import Engine
from megazero.flags.resolve import resolve
from megazero.run.kernel_choices import choose_matmul_backend


@dataclass(frozen=True)
class Options:
    """Tokens/s of one process against transformers' GPT2LMHeadModel."""

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


def ours(o: Options, batch: MicroBatch, device: torch.device) -> Callable[[], object]:
    model = ModelConfig(o.layers, o.hidden, 0, o.heads, o.seq_length, o.vocabulary)
    training = TrainingConfig(micro_batch_size=o.batch, precision=o.precision)
    config, layout = resolve(Config(model=model, training=training), 1, 0, declare)
    mesh = Mesh.build(layout, 0, device)
    config, said = choose_matmul_backend(config, mesh)
    print(said)
    engine = Engine(config, mesh)
    return lambda: engine.train_step(1, [batch])


def theirs(o: Options, batch: MicroBatch, device: torch.device) -> Callable[[], object]:
    """bf16: autocast over fp32 weights, as its users do."""
    from transformers import GPT2Config, GPT2LMHeadModel

    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": None, "eos_token_id": None}
    sizes = {"n_layer": o.layers, "n_embd": o.hidden, "n_head": o.heads, "n_positions": o.seq_length}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=o.vocabulary, **sizes, **off, **ends)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01, fused=True)
    ids, labels = batch.ids.to(device), batch.labels.to(device)

    def step() -> float:
        with torch.autocast(device.type, torch.bfloat16, enabled=o.precision == "bf16"):
            logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item() + norm.item()

    return step


def main(o: Options) -> None:
    torch.set_num_threads(o.threads)
    device = launch.pick_device(launch.World(0, 1, 0, "single"))
    assert o.precision in DTYPES, o.precision
    ids = torch.randint(0, o.vocabulary, (o.batch, o.seq_length + 1), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(o.batch, o.seq_length)
    batch = MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), mask, tuple(range(o.batch)))
    steps = {"megazero": ours(o, batch, device), "transformers": theirs(o, batch, device)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(o.rounds + 2):
        for name in steps if i % 2 else reversed(steps):  # each goes first half of the time
            start = time.perf_counter()
            steps[name]()
            if i >= 2:
                seconds[name].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(seconds["megazero"], seconds["transformers"], strict=True)]
    tokens = o.batch * o.seq_length
    low, high = interval(ratios)
    found = {name: round(tokens / statistics.median(s)) for name, s in seconds.items()}
    print(
        json.dumps(
            {
                "device": device.type,
                "precision": o.precision,
                "tokens_per_second": found,
                "ratio": round(statistics.median(ratios), 3),
                "interval": [round(low, 3), round(high, 3)],
                "rounds": o.rounds,
            }
        )
    )


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
