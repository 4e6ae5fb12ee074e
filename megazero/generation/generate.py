"""The loop of generation: prompts in, texts out, a batch at a time, from any model that computes logits."""

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, Protocol

import torch

from megazero.checkpoint.messages import gather_over_mesh
from megazero.engine.mesh.mesh import Mesh
from megazero.generation.kv_cache import KVCache
from megazero.generation.sampling import Sampling


class NewTokens(NamedTuple):
    """Tokens of one sequence that are to be computed."""

    ids: list[int]
    first: int  # position of the first of them


class TokenModel(Protocol):
    """A model that computes the logits of next tokens, on all ranks of `mesh` together.

    Attributes:
        window: tokens that it attends to at most.
        lockstep: every data-parallel rank must call `logits` equally often, because they gather weights.
    """

    mesh: Mesh
    window: int
    lockstep: bool

    def new_cache(self, num_sequences: int, capacity: int) -> KVCache | None:
        """Return an empty cache; None if every call of `logits` needs whole sequences."""

    def logits(self, new: Sequence[NewTokens], cache: KVCache | None) -> torch.Tensor | None:
        """Return [b, v] after the last new token of each sequence, on one pipeline rank; None on the others.

        Context-parallel ranks all return it. The first of them draws, so that the last bits of the others do not count.
        """


@dataclass
class Text:
    """A text that is being generated."""

    number: int  # among all of the run
    ids: list[int]  # the prompt, then new tokens
    num_prompt: int
    finish: str = ""  # "end of document" or "length"

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.num_prompt :]


@dataclass(frozen=True)
class Generator:
    """Generates texts of at most `max_new_tokens` new tokens, `batch_size` at once per data-parallel rank.

    Note [beyond the window]
    A text may grow longer than the model's window. From then on each token takes a forward over the whole window,
    because positions of all its tokens change, so that the cache is of no use.
    """

    model: TokenModel
    sampling: Sampling
    max_new_tokens: int
    batch_size: int
    ends: Container[int]  # tokens that end a text
    on_batch: Callable[[list[Text]], None] = lambda texts: None  # gets complete texts of this rank, for statistics

    def run(self, prompts: Sequence[list[int]]) -> Iterator[list[Text]]:
        """Yield batch after batch of texts, on rank 0 in the order of the prompts; all ranks iterate to the end."""
        dp = self.model.mesh.dp
        at_once = self.batch_size * dp.size
        for first in range(0, len(prompts), at_once):
            numbers = range(first, min(first + at_once, len(prompts)))[dp.rank :: dp.size]
            texts = [Text(n, list(prompts[n]), len(prompts[n])) for n in numbers]
            self._generate(texts)
            self.on_batch(texts)
            yield self._gathered(texts)

    def _generate(self, texts: list[Text]) -> None:
        """Complete the texts of this rank."""
        model, growing = self.model, texts
        generators = {text.number: self.sampling.generator(text.number) for text in texts}
        longest = max((len(text.ids) for text in texts), default=0) + self.max_new_tokens
        cache = model.new_cache(len(texts), min(model.window, longest))
        for step in range(self.max_new_tokens):
            if not growing and not model.lockstep:
                break
            in_cache = cache is not None and step > 0
            logits = model.logits([_new_tokens(text, model.window, in_cache) for text in growing], cache)
            if not growing:
                continue
            drawn = torch.zeros(len(growing), dtype=torch.int64)
            if logits is not None and model.mesh.cp.is_first:
                for row, text in enumerate(growing):
                    drawn[row] = self.sampling.draw(logits[row].float().cpu(), generators[text.number])
            agreed = model.mesh.control_sum(drawn.to(model.mesh.device), model.mesh.pp, model.mesh.cp)
            for text, token in zip(growing, agreed.tolist(), strict=True):
                if token in self.ends:
                    text.finish = "end of document"
                    continue
                text.ids.append(token)
                text.finish = "length" if len(text.new_ids) == self.max_new_tokens else ""
            left = [row for row, text in enumerate(growing) if not text.finish]
            if cache is not None and len(left) < len(growing):
                cache.keep(left)
            growing = [growing[row] for row in left]

    def _gathered(self, texts: list[Text]) -> list[Text]:
        """Return the texts of all data-parallel ranks, on rank 0; nothing on the others."""
        mesh = self.model.mesh
        own = [astuple(text) for text in texts] if mesh.tp.is_first and mesh.cp.is_first and mesh.pp.is_first else []
        parts = gather_over_mesh(json.dumps(own).encode(), mesh)
        found = [Text(*each) for data in parts for each in json.loads(data)]
        return sorted(found, key=lambda text: text.number)


def packed_prompts(data: Mapping[str, Any], prompts: Sequence[Sequence[int]], eod: int | None) -> str:
    """Return a warning if a prompt holds several documents, which training kept apart; else nothing.

    Args:
        data: the data options of the run that made the checkpoint.
    """
    flags = [f"--{name.replace('_', '-')}" for name in ("reset_attention_mask", "reset_position_ids") if data.get(name)]
    if not flags or not any(eod in ids[:-1] for ids in prompts):
        return ""
    return (
        f"a prompt holds an end-of-document token, and the model was trained with {' '.join(flags)}: here attention "
        "and positions continue after that token; for the behaviour of training, give only the text after the last one"
    )


def _new_tokens(text: Text, window: int, in_cache: bool) -> NewTokens:
    """Return the tokens to compute: the last one, or all in the window if the cache has none of them."""
    if in_cache and len(text.ids) <= window:
        return NewTokens(text.ids[-1:], len(text.ids) - 1)
    return NewTokens(text.ids[-window:], 0)
