"""Draws of next tokens."""

from dataclasses import dataclass

import torch

from megazero.engine.kernels.initial_values import seed_of


@dataclass(frozen=True)
class Sampling:
    """Draws a token from logits: temperature, then top-k, then top-p, in the order of transformers.

    Attributes:
        temperature: divides the logits. 0: the likeliest token.
        top_k: number of likeliest tokens to draw from. 0: all.
        top_p: draw from the fewest likeliest tokens whose probabilities reach this sum.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        """ValueError, naming the flag, for a value out of range."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature {self.temperature}: must be 0, for the likeliest token, or more")
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k}: must be 0, for all tokens, or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p}: must be more than 0 and at most 1, which leaves out nothing")

    def generator(self, text: int) -> torch.Generator:
        """Return the random numbers of text number `text`, which do not depend on other texts."""
        return torch.Generator().manual_seed(seed_of(self.seed, "text", text))

    def draw(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """logits [v] on the CPU -> a token."""
        if self.temperature == 0:
            return int(logits.argmax())
        values, which = logits.sort(descending=True, stable=True)
        values = values[: self.top_k or len(values)].to(torch.float64)
        probabilities = ((values - values[0]) / self.temperature).softmax(-1)  # a difference of 0 stays finite
        # Keep a token if the sum of those before it is below top_p; so the first is always kept.
        kept = int((probabilities.cumsum(-1) - probabilities < self.top_p).sum())
        return int(which[torch.multinomial(probabilities[:kept], 1, generator=generator)])
