"""Texts of the model being trained, after given prompts: --sample-prompts, --sample-interval."""

from collections.abc import Sequence

import torch

from megazero.data.tokenizer import Tokenizer
from megazero.engine.model.layers.context import DeviceBatch
from megazero.engine.step.batch import MicroBatch
from megazero.engine.step.engine import Engine
from megazero.files import read_regular
from megazero.flags.config import Config
from megazero.generation.generate import Generator, NewTokens
from megazero.generation.kv_cache import KVCache
from megazero.generation.sampling import Sampling

NEW_TOKENS = 64


def read_prompts(path: str) -> list[str]:
    """Read a text file of prompts, one per line; empty lines are left out.

    Raises:
        ValueError: it cannot be read, or has no prompt.
    """
    try:
        prompts = [line for line in read_regular(path).decode().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"--sample-prompts {path}: {error}; name a text file with a prompt per line") from None
    if not prompts:
        raise ValueError(f"--sample-prompts {path}: the file holds no prompt; write one per line")
    return prompts


def next_logits(engine: Engine, batch: MicroBatch, places: Sequence[int]) -> torch.Tensor | None:
    """Return the logits [b, v] after one place in each sample of a micro-batch, on the last stage; else None."""
    found, mesh = [], engine.mesh
    wanted = torch.tensor(places, device=mesh.device)

    def head(x: torch.Tensor | None, micro_batch: DeviceBatch, output: bool) -> torch.Tensor:
        assert x is not None and engine.model.head is not None
        dealt, width = micro_batch.tokens.dealt, micro_batch.ids.shape[1]
        own = torch.arange(width, device=mesh.device).expand(len(places), -1) if dealt is None else dealt.indices
        here = own == wanted[:, None]  # [b, t]: in each sample one token, of one context-parallel rank
        rows = torch.arange(len(places), device=mesh.device) * width + here.int().argmax(1)
        logits = engine.model.head.whole_logits(engine.model.stream.start_unshard(x).wait()[rows])
        found.append(mesh.cp.all_reduce_(logits * here.any(1)[:, None]))
        return torch.zeros(len(places), dtype=torch.float64, device=mesh.device)

    engine.forward([batch], head)
    return found[0] if found else None


class TrainedModel:
    """The model being trained, as a `TokenModel`. It runs the program of an evaluation, in any layout.

    Nothing is cached, so a token takes a forward over whole samples. That is fast enough for a few prompts.
    """

    lockstep = True

    def __init__(self, engine: Engine) -> None:
        self.engine, self.mesh = engine, engine.mesh
        self.batch_size, self.window = engine.config.training.micro_batch_size, engine.config.model.seq_length

    def new_cache(self, num_sequences: int, capacity: int) -> None:
        return None

    def logits(self, new: Sequence[NewTokens], cache: KVCache | None) -> torch.Tensor | None:
        """Return [b, v] for a micro-batch of b samples; those after the last sequence are padding."""
        ids = torch.zeros(self.batch_size, self.window, dtype=torch.int64)
        lasts = [0] * self.batch_size
        for row, one in enumerate(new):
            ids[row, : len(one.ids)] = torch.tensor(one.ids)
            lasts[row] = len(one.ids) - 1
        batch = MicroBatch(ids, ids, torch.ones(ids.shape), tuple(range(self.batch_size)))
        return next_logits(self.engine, batch, lasts)


class TextSampler:
    """Completes the same prompts with the same random numbers at every call; all ranks call it together."""

    def __init__(
        self, config: Config, engine: Engine, tokenizer: Tokenizer | None, num_tokens: int = NEW_TOKENS
    ) -> None:
        """ValueError without a tokenizer or a prompt."""
        path = config.log.sample_prompts
        if tokenizer is None:
            raise ValueError(f"--sample-prompts {path} needs --tokenizer, to read and write text")
        self.prompts, self.tokenizer, model = read_prompts(path), tokenizer, TrainedModel(engine)
        sampling = Sampling(seed=config.training.seed)
        self.generator = Generator(
            model=model,
            sampling=sampling,
            max_new_tokens=num_tokens,
            batch_size=model.batch_size,
            ends=tokenizer.ends,
        )

    def run(self) -> list[dict[str, str]]:
        """Return {"prompt", "text"} of every prompt, in order, on rank 0; nothing on the others."""
        texts = [text for batch in self.generator.run(self.tokenizer.encode_texts(self.prompts)) for text in batch]
        return [{"prompt": self.prompts[t.number], "text": self.tokenizer.decode(t.new_ids)} for t in texts]
