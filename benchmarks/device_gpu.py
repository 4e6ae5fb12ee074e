"""Measurements of this machine's GPU in about 20 s, in place of the assumed constants of its file in scripts/devices.

Shapes: b batch, n heads, s sequence, d head dim.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.layers import Use
from megazero.engine.plan.program.rank_spec import PlannedLayer
from megazero.engine.step.batch import MicroBatch
from megazero.engine.step.engine import Engine
from megazero.flags.config import Config, ModelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from megazero.planner.time.costs import Roofline
from megazero.planner.time.devices import Constant, Device
from megazero.planner.trace.kernel_records import Operator, Product
from megazero.planner.trace.trace import trace

SOURCE = "measured by scripts/measure_device.py"


class Sizes(NamedTuple):
    """Sizes of the measurements.

    Attributes:
        elements: of an element-wise operator and of a copy.
        sides: of square products.
        lengths: of sequences of attention, of 16 k tokens.
        tokens: of a call of attention.
        layers: of the two narrow models whose steps are compared.
        rounds: of each measurement, of which the median counts.
    """

    elements: int = 1 << 27
    sides: tuple[int, ...] = (2048, 4096, 8192)
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    tokens: int = 1 << 14
    layers: tuple[int, int] = (4, 16)
    rounds: int = 7


USUAL = Sizes()
TINY = Sizes(elements=1 << 10, sides=(32, 64), lengths=(16, 32), tokens=32, layers=(1, 2), rounds=3)


class Clock:
    """Seconds of work on a device, by its own clock; on a CPU by the host's."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds = device, rounds

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def of(self, work: Callable[[], Any], calls: int = 1) -> float:
        """Return the seconds of a call of `work`. The device is busy while the host issues the calls."""
        work()
        found = []
        for _ in range(self.rounds):
            self.wait()
            if self.device.type == "cuda":
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(2_000_000)
                first.record()
                for _ in range(calls):
                    work()
                last.record()
                self.wait()
                found.append(first.elapsed_time(last) / 1e3 / calls)
            else:
                start = time.perf_counter()
                for _ in range(calls):
                    work()
                found.append((time.perf_counter() - start) / calls)
        return statistics.median(found)

    def on_host(self, work: Callable[[], Any]) -> float:
        """Return the seconds of a call by the host's clock, until the device has done the work."""
        work()
        found = []
        for _ in range(self.rounds):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            found.append(time.perf_counter() - start)
        return statistics.median(found)


def measured(like: Device, device: torch.device, sizes: Sizes = USUAL) -> Device:
    """Return `like` with the constants that were measured: fractions of its peaks, copies to the host, launches."""
    clock, dtype = Clock(device, sizes.rounds), torch.bfloat16
    found = {"memory.fraction": _constant([_bandwidth(clock, sizes, dtype) / like["memory.bandwidth"]])}
    plain = replace(like, constants=like.constants | {"compute.fraction": Constant(1.0, 1.0, 1.0, SOURCE)})
    found["compute.fraction"] = _constant([_product(clock, side, dtype, plain) for side in sizes.sides])
    for name, dim in (("compute.attention", 128), ("compute.attention_64", 64)):
        rates = [_attention(clock, sizes.tokens, length, dim, dtype) for length in sizes.lengths]
        found[name] = _constant([rate / like["compute.bf16"] for rate in rates])
    found["host.bandwidth"] = _constant(_pinned_copies(clock, sizes))
    few = torch.zeros(64, device=device)
    found["overhead.kernel"] = _constant([clock.of(lambda: few.add_(1.0), calls=100)])
    found["overhead.call"] = _constant([_call(clock, sizes, like)])
    return replace(like, constants=like.constants | found)


def _constant(values: list[float]) -> Constant:
    """Return their geometric mean, and their range."""
    low, high = min(values), max(values)
    return Constant(min(max(statistics.geometric_mean(values), low), high), low, high, SOURCE)


def _bandwidth(clock: Clock, sizes: Sizes, dtype: torch.dtype) -> float:
    """Return the bytes/s of a sum of two tensors."""
    x, y, out = (torch.ones(sizes.elements, dtype=dtype, device=clock.device) for _ in range(3))
    return 3 * x.nbytes / clock.of(lambda: torch.add(x, y, out=out))


def _product(clock: Clock, side: int, dtype: torch.dtype, plain: Device) -> float:
    """Return the planned seconds of a square product at the peak, over the measured ones."""
    a, b = (torch.randn(side, side, device=clock.device).to(dtype) for _ in range(2))
    planned = Roofline(plain).product(Product(1, side, side, side), "bf16")
    return planned / clock.of(lambda: a @ b, calls=max(1, 8192**2 // side**2 // 4))


def _attention(clock: Clock, tokens: int, length: int, dim: int, dtype: torch.dtype) -> float:
    """Return the FLOP/s of causal attention, forward and backward, of 2,048 columns of heads."""
    shape = max(1, tokens // length), 2048 // dim, length, dim  # [b, n, s, d]
    q, k, v = (torch.randn(shape, device=clock.device).to(dtype).requires_grad_() for _ in range(3))

    def both() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    return 3.5 * 2 * math.prod(shape) * length / clock.of(both)


def _pinned_copies(clock: Clock, sizes: Sizes) -> list[float]:
    """Return the bytes/s of copies to the device, and from it."""
    on_host = torch.ones(sizes.elements, pin_memory=clock.device.type == "cuda")
    there = torch.empty(sizes.elements, device=clock.device)
    ways = (lambda: there.copy_(on_host, non_blocking=True)), (lambda: on_host.copy_(there, non_blocking=True))
    return [on_host.nbytes / clock.of(way) for way in ways]


def _call(clock: Clock, sizes: Sizes, like: Device) -> float:
    """Return the host's seconds of an operator, from the blocks by which two narrow models differ."""
    seconds = [_narrow_step(clock, layers) for layers in sizes.layers]
    config, layout = resolve(_narrow(sizes.layers[0]), 1, 0, declare)
    name = declare(config.model).blocks[0]
    block = PlannedLayer(name, (), Use.LAYER, trains=True, passes_gradient=True, kind=name)
    found = trace(config, layout, block, specs={}, device_type=like.kind).events
    operators = sum(isinstance(event, Operator) for event in (*found.forward, *found.backward))
    return max(seconds[1] - seconds[0], 1e-9) / (sizes.layers[1] - sizes.layers[0]) / operators


def _narrow(layers: int) -> Config:
    """Return a model whose operators take the device no time."""
    model = ModelConfig(num_layers=layers, hidden_size=64, num_attention_heads=1, seq_length=64, vocab_size=64)
    return Config(model=model, training=TrainingConfig(micro_batch_size=1, global_batch_size=1, precision="bf16"))


def _narrow_step(clock: Clock, layers: int) -> float:
    config, layout = resolve(_narrow(layers), 1, 0, declare)
    engine = Engine(config, Mesh.build(layout, 0, clock.device))
    ids = torch.zeros(1, config.model.seq_length, dtype=torch.int64)
    batch = [MicroBatch(ids, ids, torch.ones(ids.shape), (0,))]
    return clock.on_host(lambda: engine.train_step(1, batch))
