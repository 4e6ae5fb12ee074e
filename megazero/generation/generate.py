"""The loop: prompts in, texts out, a batch at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megazero.generation.model import InferenceModel, NewTokens
from megazero.generation.sampling import Sampling
from megazero.model.layers.kv_cache import KVCache


@dataclass
class Text:
    """A text that is being generated."""

    number: int  # among all of the run
    ids: list[int]  # prompt, and what follows
    num_prompt: int
    generator: torch.Generator
    finish: str = ""  # "end of document" or "length"
    in_cache: bool = field(default=False)

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.num_prompt :]


@dataclass(frozen=True)
class Generator:
    """Generates texts of at most `max_new_tokens` new tokens, `batch_size` at once per data-parallel rank.

    Note [beyond the window]: a text may grow longer than --seq-length. From then on its last --seq-length tokens are
    computed anew for every token, as a window that moves: positions of all tokens in it change, so that nothing in the
    cache is of use.
    """

    model: InferenceModel
    sampling: Sampling
    max_new_tokens: int
    batch_size: int
    eod: int | None  # ends a text

    def run(self, prompts: Sequence[list[int]]) -> Iterator[list[Text]]:
        """Yield batch after batch of texts, on rank 0 in the order of the prompts; all ranks iterate to the end."""
        dp = self.model.mesh.dp
        at_once = self.batch_size * dp.size
        for first in range(0, len(prompts), at_once):
            numbers = range(first, min(first + at_once, len(prompts)))[dp.rank :: dp.size]
            texts = [Text(n, list(prompts[n]), len(prompts[n]), self.sampling.generator(n)) for n in numbers]
            self._generate(texts)
            yield self._gathered(texts)

    def _generate(self, texts: list[Text]) -> None:
        """Complete the texts of this rank."""
        window = self.model.model.seq_length
        longest = max((len(text.ids) for text in texts), default=0) + self.max_new_tokens
        cache, growing = KVCache(len(texts), min(window, longest)), texts
        while growing:
            logits = self.model.logits([_new_tokens(text, window) for text in growing], cache)
            drawn = None
            if logits is not None:
                rows = zip(logits.float().cpu(), growing, strict=True)
                drawn = [self.sampling.draw(row, text.generator) for row, text in rows]
            for text, token in zip(growing, self.model.agree(drawn, len(growing)), strict=True):
                text.in_cache = True
                if token == self.eod:
                    text.finish = "end of document"
                    continue
                text.ids.append(token)
                text.finish = "length" if len(text.new_ids) == self.max_new_tokens else ""
            left = [row for row, text in enumerate(growing) if not text.finish]
            if len(left) < len(growing):
                cache.keep(left)
                growing = [growing[row] for row in left]

    def _gathered(self, texts: list[Text]) -> list[Text]:
        """Texts of all data-parallel ranks, on rank 0; nothing on the others."""
        mesh = self.model.mesh
        speaks = mesh.tp.is_first and mesh.pp.is_first
        told = [(t.number, t.ids, t.num_prompt, t.finish) for t in texts] if speaks else []
        found = []
        for data in mesh.gather_bytes(json.dumps(told).encode()):
            for number, ids, num_prompt, finish in json.loads(data):
                found.append(Text(number, ids, num_prompt, self.sampling.generator(number), finish))
        return sorted(found, key=lambda text: text.number)


def packed_prompts(data: Mapping[str, Any], prompts: Sequence[Sequence[int]], eod: int | None) -> str:
    """Say that all of a prompt is one text here, if it holds several documents that were apart in training.

    Args:
        data: the data options of the run that made the checkpoint.
    """
    flags = [f"--{name.replace('_', '-')}" for name in ("reset_attention_mask", "reset_position_ids") if data.get(name)]
    if not flags or not any(eod in ids[:-1] for ids in prompts):
        return ""
    return (
        f"a prompt holds an end-of-document token, and the model was trained with {' '.join(flags)}: here attention "
        "and positions go on behind that token; give the text behind the last one alone to have it as in training"
    )


def _new_tokens(text: Text, window: int) -> NewTokens:
    """Tokens to compute: the last one, or all in the window where the cache has none of them."""
    if text.in_cache and len(text.ids) <= window:
        return NewTokens(text.ids[-1:], len(text.ids) - 1)
    return NewTokens(text.ids[-window:], 0)
