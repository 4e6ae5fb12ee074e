#!/usr/bin/env python3
"""Generate text from a checkpoint, whatever layout saved it, in one process.

Example: python scripts/generate.py --load runs/quickstart/checkpoints --prompt "HAMLET:" --max-new-tokens 100
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from megazero import checkpoint
from megazero.checkpoint import LocalShard
from megazero.comm import launch
from megazero.comm.mesh import Mesh
from megazero.config.schema import ModelConfig
from megazero.data.tokenizer import Tokenizer, load_tokenizer
from megazero.memory.tracker import MemoryTracker
from megazero.model.context import Context, MicroBatchInfo, ResidualStream
from megazero.model.stage import Stage
from megazero.plan.topology import Layout
from megazero.train.run_state import RunState


@dataclass(frozen=True)
class Options:
    """Generate text from a checkpoint, whatever layout saved it, in one process."""

    load: str
    """Folder of checkpoints, or one of its iter_NNNNNNN."""
    prompt: str = "\n"
    """Text to go on from."""
    tokenizer: str = ""
    """Empty: that of the checkpoint's run."""
    max_new_tokens: int = 100
    """Tokens to generate at most; an end-of-document token ends the text."""
    temperature: float = 0.8
    """Divides the logits. 0: always the likeliest token."""
    top_k: int = 50
    """Draw among this many likeliest tokens. 0: among all."""
    num_samples: int = 1
    """Texts to generate."""
    seed: int = 1234
    """Seed of the draws."""


def load_model(path: Path, model: ModelConfig, device: torch.device, precision: str = "fp32") -> Stage:
    """The whole model in the precision of a checkpoint's master weights, read from there."""
    alone = Mesh.build(Layout(), 0, device)
    context = Context(ResidualStream(alone.tp, sharded=False), MemoryTracker(), precision, device)
    stage = Stage(model, range(model.num_layers), context)
    shards = {}
    for weights in stage.units.values():
        for weight in weights:
            spec, block = weight.spec, weight.block
            flat = torch.zeros(block.stored_numel, dtype=context.dtype, device=device)  # padding rows stay zero
            weight.data = flat.view(block.stored)
            shards[f"model.{spec.name}"] = LocalShard(
                spec.shape, block.offset, block.shape, 0, block.numel, flat[: block.numel]
            )
    checkpoint.load(path, shards, partial=True)
    return stage


@torch.no_grad()
def generate(
    stage: Stage, model: ModelConfig, ids: list[int], options: Options, generator: torch.Generator, eod: int | None
) -> list[int]:
    """`ids` and what follows. Each step computes the last --seq-length tokens anew."""
    for _ in range(options.max_new_tokens):
        window = torch.tensor([ids[-model.seq_length :]], device=generator.device)
        tokens = MicroBatchInfo.of(window, (0,), stage.stream, training=False)
        x = stage.body(stage.embed(window, tokens), tokens)  # [s, h]
        assert stage.head is not None
        logits = stage.head.logits(x[-1])  # [v]
        if options.temperature == 0:
            token = int(logits.argmax())
        else:
            kept, which = logits.topk(min(options.top_k or len(logits), len(logits)))
            drawn = torch.multinomial((kept / options.temperature).softmax(-1), 1, generator=generator)
            token = int(which[drawn])
        if token == eod:
            break
        ids = [*ids, token]
    return ids


def end_of_document(tokenizer: Tokenizer) -> int | None:
    try:
        return tokenizer.eod
    except ValueError:  # it has none: only --max-new-tokens ends a text
        return None


def main(options: Options) -> None:
    if options.temperature < 0 or options.top_k < 0 or options.max_new_tokens < 1:
        raise ValueError("--temperature and --top-k must not be negative, and --max-new-tokens must be at least 1")
    path = checkpoint.find(Path(options.load))
    if path is None:
        raise ValueError(f"--load {options.load} holds no checkpoint; give the --save folder of a run")
    state = RunState.read(path)
    model = state.model_config(path)
    tokenizer = load_tokenizer(options.tokenizer or state.tokenizer(path))
    if options.tokenizer and tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"--tokenizer {options.tokenizer} has {tokenizer.vocab_size} tokens, the model {model.vocab_size}"
        )
    device = launch.pick_device(launch.World(0, 1, 0, "single"))
    stage = load_model(path, model, device, state.master_precision)
    generator = torch.Generator(device).manual_seed(options.seed)
    prompt = tokenizer.encode(options.prompt)
    if not prompt:
        raise ValueError("--prompt is empty; give at least one character")
    for _ in range(options.num_samples):
        text = tokenizer.decode(generate(stage, model, prompt, options, generator, end_of_document(tokenizer)))
        print(f"{text}\n{'-' * 40}" if options.num_samples > 1 else text, flush=True)


if __name__ == "__main__":
    import tyro

    try:
        main(tyro.cli(Options))
    except ValueError as error:
        sys.exit(f"ValueError: {error}")
