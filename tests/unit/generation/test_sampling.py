"""Draws of next tokens."""

import torch

from megazero.generation.sampling import Sampling
from tests.helpers.table import for_each

LOGITS = torch.tensor([1.0, 3.0, -torch.inf, 2.0, -1e30])


@for_each("temperature", [0.0, 5e-324, 1e-320, 1e-45, 1e-38, 1e-4])
def test_a_tiny_temperature_takes_the_likeliest_token(temperature: float) -> None:
    sampling = Sampling(temperature, top_k=0)
    assert {sampling.draw(LOGITS, sampling.generator(text)) for text in range(20)} == {1}


def test_temperature_divides_the_logits() -> None:
    """The shares of 4,000 draws are those of the softmax, within 5 standard deviations."""
    sampling, generator = Sampling(2.0, top_k=3), torch.Generator().manual_seed(0)
    found = torch.tensor([sampling.draw(LOGITS, generator) for _ in range(4000)]).bincount(minlength=5) / 4000
    wanted = (LOGITS / 2).masked_fill(LOGITS < 0, -torch.inf).softmax(-1)
    assert ((found - wanted).abs() <= 5 * (wanted * (1 - wanted) / 4000).sqrt()).all()
