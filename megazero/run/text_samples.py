"""Texts of the model being trained, after given prompts: --sample-prompts, --sample-interval."""

from collections.abc import Sequence

import torch

from megazero.data.tokenizer import Tokenizer, end_of_document
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
        return self.engine.next_logits(batch, lasts)


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
            eod=end_of_document(tokenizer),
        )

    def run(self) -> list[dict[str, str]]:
        """Return {"prompt", "text"} of every prompt, in order, on rank 0; nothing on the others."""
        texts = [text for batch in self.generator.run(self.tokenizer.encode_batch(self.prompts)) for text in batch]
        return [{"prompt": self.prompts[t.number], "text": self.tokenizer.decode(t.new_ids)} for t in texts]
