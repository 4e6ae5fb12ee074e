#!/usr/bin/env python3
"""Host time and launches of a block, forward and backward, a micro-batch; next to transformers' eager model.

The model is so narrow that computing costs nothing; the rest is the time of Python and torch's dispatcher, for which a
GPU with short kernels waits. Times are CPU seconds of the computing thread, in fp32 on a CPU. Systems take turns; a
turn is the minimum of several calls, and a result the median of the turns with its 95 % bootstrap interval. Launches
are computing operators, counted on meta tensors in bf16; views and allocations do not count, a Triton kernel counts as
one. megazero's time is that of the interpreter's Forward and Backward with weight gradients. transformers' model uses
torch's fused attention and accumulates gradients. `norm`: the gradient norm of --layers blocks, both embeddings and
the head.

    python -m benchmarks.host_time
"""

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import interval
from megazero.engine.model.layers.context import DeviceBatch, MicroBatchInfo
from megazero.engine.model.stage import declare
from megazero.engine.plan.program.operations import Backward, Forward, GradNorm, Open
from megazero.engine.step.engine import Engine
from megazero.families import with_traits
from megazero.flags.config import Config, ModelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from megazero.planner.trace.pretend import pretend_mesh


@dataclass(frozen=True)
class Options:
    """Host time and launches of a block."""

    architectures: tuple[str, ...] = ("gpt2", "llama")
    layers: int = 12
    hidden: int = 64
    heads: int = 4
    seq_length: int = 8
    turns: int = 15
    """Turns of every system that count, after one that does not."""
    calls: int = 40
    """Calls of a turn, of which the fastest counts."""


Part = tuple[str, Callable[[], object]]  # name, measured function


class System(NamedTuple):
    """Parts are called in this order, again and again: a backward follows its forward."""

    name: str
    make: Callable[[Options, str, torch.device], list[Part]]


def model_of(o: Options, architecture: str) -> ModelConfig:
    model = ModelConfig(o.layers, o.hidden, 4 * o.hidden, o.heads, o.seq_length, vocab_size=64)
    if architecture == "gpt2":
        return model
    return replace(model, **with_traits({"architecture": "llama"}), num_query_groups=o.heads, untie_embeddings=True)


def own(o: Options, architecture: str, device: torch.device) -> list[Part]:
    precision = "fp32" if device.type == "cpu" else "bf16"
    training = TrainingConfig(micro_batch_size=1, precision=precision, matmul_backend="torch")
    config, layout = resolve(Config(model=model_of(o, architecture), training=training), 1, 0, declare)
    engine = Engine(config, pretend_mesh(layout, 0, device, needs_staging_buffer=False))
    run = engine.interpreter
    ids = torch.zeros(1, o.seq_length, dtype=torch.int64, device=device)
    tokens = MicroBatchInfo.of(ids, (0,), engine.model.stream, training=True)
    run.micro_batches = [DeviceBatch(ids, ids, ids.float(), tokens)]
    x = torch.randn(run.activation.shape, device=device).to(run.activation.dtype)

    def execute(*ops: Any) -> None:
        with torch.no_grad():
            run.execute(ops)

    def forward() -> None:
        run.x[0] = x
        execute(Forward("blocks.0", 0, graph=True))

    def backward() -> None:
        run.dx[0] = x
        execute(Backward("blocks.0", 0))

    def of_a_step() -> None:
        execute(GradNorm())

    execute(*[Open(name) for name in run.units])
    for unit in run.units.values():
        unit.gradients.reduced = unit.gradients.unsharded
    return [("forward", forward), ("backward", backward), ("norm", of_a_step)]


def transformers_model(o: Options, architecture: str) -> torch.nn.Module:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
    if architecture == "gpt2":
        sizes |= {"n_embd": o.hidden, "n_layer": o.layers, "n_head": o.heads, "n_positions": o.seq_length}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops))
    sizes |= {"hidden_size": o.hidden, "num_hidden_layers": o.layers, "num_attention_heads": o.heads}
    sizes |= {"intermediate_size": 4 * o.hidden, "max_position_embeddings": o.seq_length}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def theirs(o: Options, architecture: str, device: torch.device) -> list[Part]:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model: Any = transformers_model(o, architecture).to(device, dtype)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    x = torch.randn(1, o.seq_length, o.hidden, device=device).to(dtype)
    given: dict[str, Any] = {}
    if architecture == "llama":  # as their model does, which makes the tables once a micro-batch
        given["position_embeddings"] = model.model.rotary_emb(x, torch.arange(o.seq_length, device=device)[None])
    block = model.transformer.h[0] if architecture == "gpt2" else model.model.layers[0]
    kept: list[torch.Tensor] = []

    def forward() -> None:
        y = block(x.detach().requires_grad_(), **given)
        kept[:] = [y if isinstance(y, torch.Tensor) else y[0]]

    def of_a_step() -> None:
        torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])

    return [("forward", forward), ("backward", lambda: kept.pop().backward(x)), ("norm", of_a_step)]


SYSTEMS = [
    System("megazero", own),
    System("transformers", theirs),
]


class Launches(TorchDispatchMode):
    """Counts operators that compute: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, out = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        computes = not is_view and name not in ("_unsafe_view", "promote_types")
        self.found[name] += computes and not name.startswith(("empty", "new_empty"))
        return out


def as_on_a_gpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """One kernel, where torch's own choice for meta tensors is a dozen operators."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def launches(parts: list[Part]) -> dict[str, Counter[str]]:
    """Operators of each part."""
    found = {}
    with mock.patch("torch.nn.functional.scaled_dot_product_attention", as_on_a_gpu):
        for name, call in parts:
            with Launches() as counting:
                call()
            found[name] = +counting.found
    return found


def turn(parts: list[Part], calls: int) -> dict[str, float]:
    """Least CPU seconds of each part, and of `both`, a block's forward and backward."""
    least: dict[str, float] = {}
    for _ in range(calls):
        took = {}
        for name, call in parts:
            start = time.thread_time()
            call()
            took[name] = time.thread_time() - start
        took["both"] = took["forward"] + took["backward"]
        least = {name: min(seconds, least.get(name, seconds)) for name, seconds in took.items()}
    return least


def main(o: Options) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print("| architecture | part | system | us | launches | of transformers' time |\n|---|---|---|---|---|---|")
    for architecture in o.architectures:
        counted = {s.name: launches(s.make(o, architecture, torch.device("meta"))) for s in SYSTEMS}
        made = {s.name: s.make(o, architecture, torch.device("cpu")) for s in SYSTEMS}
        turns = [{name: turn(parts, o.calls) for name, parts in made.items()} for _ in range(o.turns + 1)][1:]
        for part in ("forward", "backward", "both", "norm"):
            for name in made:
                seconds = [each[name][part] for each in turns]
                low, high = interval(seconds)
                of = ("forward", "backward") if part == "both" else (part,)
                number = sum(counted[name][each].total() for each in of)
                cells = [architecture, part, name, f"{1e6 * statistics.median(seconds):.0f}"]
                cells[-1] += f" [{1e6 * low:.0f}, {1e6 * high:.0f}]"
                ratios = [each[name][part] / each["transformers"][part] for each in turns]
                low, high = interval(ratios)
                ratio = f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]" if name != "transformers" else ""
                print(f"| {' | '.join([*cells, str(number), ratio])} |", flush=True)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
