"""Texts that the model being trained writes to given prompts: --sample-prompts, --sample-interval.

The program of an evaluation computes them, in any layout; only its head gives tokens instead of losses. Nothing is
cached, so a token takes a forward over whole samples: this is for a few prompts, now and then. `megazero.generation`
is for texts of a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from megazero.config.schema import Config
from megazero.data.loader import MicroBatch
from megazero.data.tokenizer import Tokenizer
from megazero.files import read_regular
from megazero.generation.sampling import Sampling
from megazero.step.engine import Engine

NEW_TOKENS = 64


def read_prompts(path: str) -> list[str]:
    """Read a text file of prompts, one per line; empty lines are left out.

    Raises:
        ValueError: it cannot be read, or has none.
    """
    try:
        prompts = [line for line in read_regular(path).decode().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"--sample-prompts {path}: {error}; name a text file with a prompt per line") from None
    if not prompts:
        raise ValueError(f"--sample-prompts {path}: the file holds no prompt; write one per line")
    return prompts


class TextSampler:
    """Completes the same prompts with the same random numbers whenever it is asked; all ranks ask together."""

    def __init__(
        self, config: Config, engine: Engine, tokenizer: Tokenizer | None, num_tokens: int = NEW_TOKENS
    ) -> None:
        """ValueError without a tokenizer or a prompt."""
        path = config.log.sample_prompts
        if tokenizer is None:
            raise ValueError(f"--sample-prompts {path} needs --tokenizer, to read and write text")
        self.prompts, self.tokenizer, self.num_tokens = read_prompts(path), tokenizer, num_tokens
        self.engine, self.sampling = engine, Sampling(seed=config.training.seed)
        self.batch_size, self.window = config.training.micro_batch_size, config.model.seq_length
        try:
            self.eod = tokenizer.eod
        except ValueError:
            self.eod = -1  # no token

    def run(self) -> list[dict[str, str]]:
        """Return {"prompt", "text"} of every prompt, in order, on rank 0; nothing on the others."""
        mesh = self.engine.mesh
        found: dict[int, str] = {}
        at_once = self.batch_size * mesh.dp.size
        for first in range(0, len(self.prompts), at_once):  # every data-parallel rank as often: they gather weights
            numbers = range(first, min(first + at_once, len(self.prompts)))[mesh.dp.rank :: mesh.dp.size]
            found |= zip(numbers, self._complete(numbers), strict=True)
        speaks = mesh.tp.is_first and mesh.pp.is_first
        for data in mesh.gather_bytes(json.dumps(list(found.items()) if speaks else []).encode()):
            found |= dict(json.loads(data))
        return [{"prompt": self.prompts[n], "text": found[n]} for n in sorted(found)] if mesh.rank == 0 else []

    def _complete(self, numbers: Sequence[int]) -> list[str]:
        """Write the texts behind at most a micro-batch of prompts."""
        texts = self.tokenizer.encode_batch([self.prompts[n] for n in numbers])
        starts = [len(text) for text in texts]
        generators = [self.sampling.generator(n) for n in numbers]
        ended = [False] * len(texts)

        def draw(logits: torch.Tensor) -> torch.Tensor:
            """[b, v] -> [b]; rows behind the texts are padding."""
            drawn = torch.zeros(len(logits), dtype=torch.float64)
            for row, generator in enumerate(generators):
                drawn[row] = self.sampling.draw(logits[row].float().cpu(), generator)
            return drawn.to(logits.device)

        for _ in range(self.num_tokens):
            ids = torch.zeros(self.batch_size, self.window, dtype=torch.int64)
            lasts = [0] * self.batch_size
            for row, text in enumerate(texts):
                seen = text[-self.window :]
                ids[row, : len(seen)] = torch.tensor(seen)
                lasts[row] = len(seen) - 1
            batch = MicroBatch(ids, ids, torch.ones(ids.shape), tuple(range(self.batch_size)))
            tokens = self.engine.next_tokens(batch, lasts, draw)
            for row, text in enumerate(texts):
                ended[row] = ended[row] or tokens[row] == self.eod
                text += [] if ended[row] else [tokens[row]]
        return [self.tokenizer.decode(text[start:]) for text, start in zip(texts, starts, strict=True)]
