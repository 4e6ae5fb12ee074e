"""Rounding of small optimizer states, written once more in numpy: global tensors, numbers instead of codes."""

from typing import Any

import numpy as np
import torch

from megazero.engine.kernels.initial_values import seed_of

BLOCK = 32
MANTISSA = {False: 4, True: 3}  # by whether numbers are positive
ABOVE = {False: 6, True: 30}  # exponents above the least one


def lowbias32(x: np.ndarray) -> np.ndarray:
    """Wellons' hash, with another factor at its end."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0x7FEB352D)):
        x = (x ^ x >> np.uint32(shift)) * np.uint32(factor)
    return x


def halves(key: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)


def random_bits(seed: int, name: str, update: int, numel: int) -> np.ndarray:
    """32 bits for every element of a whole weight, uint32 [numel]."""
    number = np.arange(numel // BLOCK, dtype=np.uint32)
    keys = zip(halves(seed_of(seed, "moments", name)), halves(seed_of(seed, "moments", update)), strict=True)
    a, b = (lowbias32(lowbias32(number ^ weight) ^ step) for weight, step in keys)
    x = a[:, None] + np.arange(BLOCK, dtype=np.uint32) * np.uint32(0x9E3779B1)
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D) ^ b[:, None]
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return (x ^ x >> np.uint32(16)).reshape(-1)


def floor_log2(x: np.ndarray) -> np.ndarray:
    return np.frexp(x)[1] - 1


def rounded(x: np.ndarray, form: str, bits: np.ndarray, positive: bool) -> np.ndarray:
    """Round numbers to a form by 16 bits each."""
    size, mantissa = np.abs(x.astype(np.float32).astype(np.float64)), MANTISSA[positive] if form == "int8" else 7
    exponent = floor_log2(np.maximum(size, 2.0**-126))
    if form == "int8":
        largest = size.reshape(-1, BLOCK).max(1)
        step = 2.0 ** (floor_log2(np.maximum(largest, 2.0**-126)) - mantissa)
        fits = floor_log2(np.ceil(largest / step) * step + (largest == 0)) * (largest > 0) - 200 * (largest == 0)
        least = np.maximum(fits - ABOVE[positive], mantissa + 1 - 127)
        exponent = np.maximum(exponent, least.repeat(BLOCK))
    step = 2.0 ** (exponent - mantissa)
    count = np.floor(size / step + bits / 65536)
    if positive and form == "int8":
        count = np.maximum(count, size > 0)
    return np.sign(x) * count * step


def is_blocked(x: torch.Tensor) -> bool:
    return x.dim() > 1 and x.shape[-1] % BLOCK == 0


def round_moments_(moments: list[torch.Tensor], config: Any, name: str, update: int) -> None:
    """Round the moments of a weight in place, after an update, if the configuration keeps them small."""
    form = config.optimizer.adam_moments
    if form == "fp32" or not is_blocked(moments[0]):
        return
    bits = random_bits(config.training.seed, name, update, moments[0].numel())
    for number, (moment, each) in enumerate(
        zip(moments, (bits >> np.uint32(16), bits & np.uint32(0xFFFF)), strict=False)
    ):
        found = rounded(moment.double().numpy().reshape(-1), form, each.astype(np.float64), positive=number == 1)
        moment.copy_(torch.from_numpy(found).view(moment.shape))
