"""Measurements of this machine's CPU as a device for --plan, for scripts/measure_device.py and `predict.py`."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from msgspec.structs import asdict
from torch.optim.adamw import adamw

from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.operations import COMPUTE
from megazero.engine.plan.program.program import program
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.engine.step.batch import MicroBatch
from megazero.engine.step.engine import Engine
from megazero.flags.config import Config, ModelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from megazero.host import Available, host_memory
from megazero.planner.time.costs import StepCosts
from megazero.planner.time.devices import SECTIONS, Constant, Curves, Device
from tests.helpers.ranks import Program, Ranks

SIDES = (32, 64, 128, 256, 512, 1024)  # of square products
ELEMENTS = tuple(4**n for n in range(5, 13))  # of element-wise operators: 4 KB to 64 MB a tensor
IN_CACHE = 1 << 16  # elements of an operator in cache, where its own speed is measured
ATTENTION = (4, 4, 128, 64)  # b, n, s, d
MESSAGE = 1 << 22  # elements of a large collective: 16 MB


Times = dict[str, float]  # name of a measurement -> seconds


def seconds_of(function: Callable[[], Any], least: float = 0.01) -> float:
    """CPU seconds of one call in this thread: the mean over as many as take `least`, the first not counted.

    A rank computes in one thread. Other processes take none of its CPU time, only caches and bandwidth.
    """
    function()
    count, start = 0, time.thread_time()
    while count == 0 or time.thread_time() - start < least:
        function()
        count += 1
    return (time.thread_time() - start) / count


def operators(n: int) -> dict[str, Callable[[], Any]]:
    """Operators of a training step on n elements, as rows of 256; with `planner.trace.kernel_records`' names."""
    x = torch.randn(n // 256 or 1, min(n, 256))
    dy, out, w = torch.randn_like(x), torch.empty_like(x), torch.ones(x.shape[1])
    _, mean, rstd = torch.native_layer_norm(x, x.shape[1:], w, w, 1e-5)
    back, rows = torch.ops.aten, torch.zeros(len(x), 1, dtype=torch.int64)
    flat = [t.reshape(-1).clone() for t in (x, dy, x, x.abs())]
    step = torch.ones(())
    return {
        "add": lambda: torch.add(x, dy, out=out),
        "copy_": lambda: out.copy_(x),
        "mul_": lambda: out.mul_(1.5),
        "sub_": lambda: out.sub_(1.0),
        "exp_": lambda: out.clamp_(-1, 1).exp_(),
        "amax": lambda: x.amax(-1),
        "sum": lambda: x.sum(0),
        "gelu": lambda: F.gelu(x, approximate="tanh"),
        "gelu_backward": lambda: back.gelu_backward(dy, x, approximate="tanh"),
        "native_layer_norm": lambda: torch.native_layer_norm(x, x.shape[1:], w, w, 1e-5),
        "native_layer_norm_backward": lambda: back.native_layer_norm_backward(
            dy, x, x.shape[1:], mean, rstd, w, w, [True, True, True]
        ),
        "scatter_add_": lambda: out.scatter_add_(-1, rows, x[:, :1]),
        "adamw": lambda: adamw(
            *([t] for t in flat), [], [step], fused=True, amsgrad=False, beta1=0.9, beta2=0.9, lr=0.0, weight_decay=0.0,
            eps=1e-8, maximize=False,
        ),
    }  # fmt: skip


# tensors of n elements that an operator moves, as `planner.trace.kernel_records` counts
MOVED = {"add": 3, "mul_": 2, "sub_": 2, "exp_": 5, "amax": 1, "sum": 1, "gelu_backward": 3, "adamw": 7}
MOVED |= {"native_layer_norm_backward": 3}


def computing(rank: int) -> Times:
    """Measure computations of a rank; several ranks run this at the same time."""
    found: Times = {}
    one = torch.zeros(1)
    found["call"] = seconds_of(lambda: torch.add(one, one, out=one))
    for side in SIDES:
        a, b, c = (torch.randn(side, side) for _ in range(3))
        found[f"product {side}"] = seconds_of(lambda a=a, b=b: F.linear(a, b), 0.02)
        found[f"product {side}"] += seconds_of(lambda a=a, b=b, c=c: torch.mm(a.t(), b, out=c), 0.02)
    for n in ELEMENTS:
        x, y, z = (torch.randn(n) for _ in range(3))
        found[f"add {n}"] = seconds_of(lambda x=x, y=y, z=z: torch.add(x, y, out=z), 0.005)
    for name, function in operators(IN_CACHE).items():
        found[f"operator {name}"] = seconds_of(function)
    q = torch.randn(ATTENTION, requires_grad=True)
    attend = lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()  # noqa: E731
    found["attention"] = seconds_of(attend, 0.02)
    return found


def communicating(rank: int, world: int) -> Times:
    """Measure collectives among `world` ranks: small ones and large ones, seconds of the fastest turn.

    And CPU seconds of the thread that asks for them, which does not compute meanwhile.
    """
    axis = Mesh.build(Layout(dp=world), rank, torch.device("cpu")).dp
    found: Times = {}
    for size, n in (("small", 64 * world), ("large", MESSAGE // world * world)):
        x, part = torch.zeros(n), torch.zeros(n // world)
        for name, function in (
            ("all_reduce", lambda x=x: axis.all_reduce_(x)),
            ("all_gather", lambda x=x, part=part: axis.all_gather(part, x)),
        ):
            count, turns = 8 if size == "small" else 2, list[tuple[float, float]]()
            for _ in range(4):
                function()
                axis.all_reduce_(torch.zeros(1))
                start, computing = time.perf_counter(), time.thread_time()
                for _ in range(count):
                    function()
                turns.append(((time.perf_counter() - start) / count, (time.thread_time() - computing) / count))
            found[f"{name} {size}"], found[f"{name} {size}, this thread"] = map(min, zip(*turns, strict=True))
    return found


def stepping(rank: int) -> Times:
    """Measure a step of a model that is next to nothing: its operations."""
    config, layout = resolve(tiny(), 1, 0, declare)
    engine = Engine(config, Mesh.build(layout, 0, torch.device("cpu")))
    ids = torch.zeros(1, 8, dtype=torch.int64)
    batches = [MicroBatch(ids, ids, torch.ones(1, 8), (n,)) for n in range(4)]
    return {"step": seconds_of(lambda: engine.train_step(1, batches), 0.3)}


def tiny() -> Config:
    return Config(
        model=ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=64),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=4),
    )


# -- from times to constants


class Measured:
    """Times of several rounds, by the number of ranks that computed at once.

    The median of CPU seconds counts: other work takes none of them, but caches, as it does from a step. The least
    seconds of a collective count, because other work makes it wait.
    """

    def __init__(self) -> None:
        self.rounds: dict[tuple[int, str], list[float]] = {}

    def add(self, ranks: int, found: list[Times]) -> None:
        """Add a round: the mean over ranks, which wait for each other in training."""
        for name in found[0]:
            self.rounds.setdefault((ranks, name), []).append(statistics.mean(times[name] for times in found))

    def least(self, ranks: int, name: str) -> float:
        return min(self.rounds[ranks, name])

    def median(self, ranks: int, name: str) -> float:
        return statistics.median(self.rounds[ranks, name])

    def spread(self, ranks: int, name: str) -> tuple[float, float]:
        """The quartiles over the median."""
        low, middle, high = statistics.quantiles(self.rounds[ranks, name], n=4)
        return low / middle, high / middle


def measure(ranks: int, rounds: int) -> Measured:
    """Measure with 1, 2 and `ranks` processes at once."""
    found, worlds = Measured(), sorted({1, 2, ranks} if ranks > 1 else {1})
    groups = {world: Ranks(world, Program(env={"OMP_NUM_THREADS": "1"}), seconds=600) for world in worlds}
    try:
        for _ in range(rounds):
            measure_round(found, groups)
    finally:
        for group in groups.values():
            group.stop()
    return found


def measure_round(found: Measured, groups: dict[int, Ranks]) -> None:
    """Add a round of all measurements; `groups`: number of ranks -> ranks, 1 among them."""
    for world, group in groups.items():
        found.add(world, group.run(computing))
        if world > 1:
            found.add(world, group.run(communicating, world))
    found.add(1, groups[1].run(stepping))


def device_of(m: Measured, ranks: int) -> Device:
    """Fit the constants of a device file."""
    call, worlds = m.median(1, "call"), sorted({world for world, _ in m.rounds})
    products = [[2.0 * n**3, 4 * n**3 / max(m.median(1, f"product {n}") - 2 * call, call)] for n in SIDES]
    adds = [[12.0 * n, 12 * n / max(m.median(1, f"add {n}") - call, call / 4)] for n in ELEMENTS]
    names = [name.split()[1] for world, name in m.rounds if world == 1 and name.startswith("operator ")]
    speeds = {
        name: 4 * IN_CACHE * MOVED.get(name, 2) / (m.median(1, f"operator {name}") - call)
        for name in names
        if name != "scatter_add_"
    }
    speeds["norm"] = speeds["sum"]
    compared = [*(f"product {side}" for side in SIDES[2:]), *(f"operator {name}" for name in names)]
    contention = [[1.0, 1.0]]
    for w in worlds[1:]:
        slower = statistics.geometric_mean([m.median(w, name) / m.median(1, name) for name in compared])
        contention.append([float(w), max(slower, contention[-1][1])])  # more ranks are no faster
    b, heads, s, d = ATTENTION
    attention = 3.5 * 2 * b * heads * s * s * d / m.median(1, "attention")
    links = []
    for w in worlds[1:]:
        sent = 4 * MESSAGE * (w - 1) / w
        links.append([float(w), statistics.geometric_mean([
            2 * sent / m.least(w, "all_reduce large"), sent / m.least(w, "all_gather large")
        ])])  # fmt: skip
    most = worlds[-1]
    asked = [m.median(most, f"{name} small, this thread") for name in ("all_reduce", "all_gather") if most > 1]
    latency = m.least(most, "all_gather small") / 2 if most > 1 else 1e-5
    best = max(rate for _, rate in products)
    product, memory = m.spread(1, f"product {SIDES[-2]}"), m.spread(1, f"add {ELEMENTS[4]}")
    source = "measured by scripts/measure_device.py"

    def constant(value: float, low: float = 1.0, high: float = 1.0) -> Constant:
        return Constant(value, value * low, value * high, source)

    constants = {f"{section}.{name}": constant(1.0) for section, names in SECTIONS.items() for name in names}
    constants |= {
        "memory.capacity": constant(float((host_memory() or Available(1 << 34, "")).num_bytes // ranks)),
        "memory.reserved": Constant(3e8, 2e8, 5e8, "assumed: Python and torch in a process"),
        "memory.bandwidth": constant(max(rate for _, rate in adds)),
        "memory.fraction": constant(1.0, 1 / memory[1], 1 / memory[0]),
        **{f"compute.{name}": constant(best) for name in ("fp16", "bf16", "fp32")},
        "compute.fp64": Constant(best / 2, best / 2, best / 2, "assumed: half of fp32"),
        "compute.fraction": constant(1.0, 1 / product[1], 1 / product[0]),
        "compute.attention": constant(attention / best),
        "overhead.kernel": constant(0.0),
        "overhead.call": constant(call, *m.spread(1, "call")),
        "overhead.operation": constant(0.0),
        "overhead.collective": constant(statistics.mean(asked) if asked else 0.0),
        "host.bandwidth": constant(adds[-1][1]),
        "node.devices": Constant(float(ranks), ranks, ranks, "--ranks"),
        "node.bandwidth": constant(links[-1][1] if links else 1e9),
        "node.latency": constant(latency),
        "cluster.bandwidth": Constant(1.25e9, 1.25e9, 1.25e9, "assumed: 10 Gb/s Ethernet, there is one node"),
        "cluster.latency": Constant(5e-5, 5e-5, 5e-5, "assumed: TCP"),
    }
    curves = {"products": products, "elementwise": adds, "contention": contention, "links": links}
    device = Device("cpu", "cpu", constants, speeds, Curves(**{c: tuple((x, y) for x, y in curves[c]) for c in curves}))
    operation = constant(max(0.0, per_operation(device, m.median(1, "step"))), *m.spread(1, "step"))
    return replace(device, constants=constants | {"overhead.operation": operation})


def per_operation(device: Device, seconds: float) -> float:
    """Seconds that a computation of the program takes besides its operators, from a step of `tiny`."""
    config, layout = resolve(tiny(), 1, 0, declare)
    spec = rank_spec(config, layout, 0, declare)
    costs = StepCosts(config, layout, spec, device)
    step = program(spec, config.parallel.pipeline_schedule, 4)
    ops = [*step.gradients, *step.update]
    count = sum(isinstance(op, COMPUTE) for op in ops)
    return (seconds - sum(costs(op) for op in ops)) / count


def cpu_name() -> str:
    return next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                 if line.startswith("model name")), platform.processor())  # fmt: skip


def to_toml(device: Device, name: str) -> str:
    """Return the file of a device. name: of the processor or the card, and how it was measured."""
    lines = [
        f"# {name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}",
        f'kind = "{device.kind}"',
        f"description = {json.dumps(name)}",
    ]
    lines += [f"cards = {json.dumps(device.cards)}"] if device.cards else []
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        for key in (key.split(".")[1] for key in device.constants if key.startswith(f"{section}.")):
            c = device.constants[f"{section}.{key}"]
            bounds = f", low = {c.low:.6g}, high = {c.high:.6g}" if c.low != c.high else ""
            lines.append(f"{key} = {{ value = {c.value:.6g}{bounds}, source = {json.dumps(c.source)} }}")
    curves = {curve: points for curve, points in asdict(device.curves).items() if points}
    lines += ["", "[curves]"] if curves else []
    lines += [f"{curve} = [{', '.join(f'[{x:.6g}, {y:.6g}]' for x, y in curves[curve])}]" for curve in curves]
    lines += ["", "[operators]"] if device.operators else []
    lines += [f"{key} = {speed:.4g}" for key, speed in device.operators.items()]
    return "\n".join(lines) + "\n"
