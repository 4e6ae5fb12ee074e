"""Activations that a block saves for its backward, against `planner.trace.trace`: tensor by tensor, to the byte."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from megazero.engine.activations.store import KeptInputs
from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import ActivationConfig, Config, ModelConfig, ParallelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from tests.helpers.block_bytes import block_saves, kept_by_a_block, korthikanti
from tests.helpers.families import of_family
from tests.parallel.cases import MODEL, Case, new_engine, train

LLAMA = replace(MODEL, **of_family("llama"), num_query_groups=2)
SCORES = replace(MODEL, attention_dropout=0.1, hidden_dropout=0.1)


def kept(rank: int, case: Case) -> tuple[list[int], int]:
    """(sizes of the tensors that a block keeps, bytes that the tracker has in host memory)"""
    engine = new_engine(rank, case)
    return kept_by_a_block(engine), engine.tracker.now["host"]


def cases() -> list[Case]:
    """Modes, tensor parallelism, architectures, scores that are kept, types: every two of them meet in some case."""
    return [
        Case(tp=2, sp=True),
        Case(tp=2, sp=True, recompute="selective", model=SCORES),
        Case(tp=3, recompute="selective"),
        Case(tp=3, sp=True, recompute="full"),
        Case(model=SCORES),
        Case(recompute="selective", precision="fp16"),
        Case(tp=2, recompute="none", model=SCORES),
        Case(tp=2, recompute="selective", model=LLAMA),
        Case(model=LLAMA, precision="bf16"),
        Case(tp=2, recompute="full", pa=True, precision="bf16"),
        Case(tp=3, recompute="full", pa=True, host=True),
        Case(recompute="full", host=True),
    ]


def all_modes() -> list[Case]:
    modes = ("none", "selective", "full")
    found = [Case(tp=n, sp=sp, recompute=m) for n in (2, 3) for sp in (False, True) for m in modes]
    found += [Case(recompute=m, model=model) for m in modes for model in (MODEL, SCORES)]
    found += [Case(tp=2, sp=sp, recompute=m, model=SCORES) for sp in (False, True) for m in modes]
    found += [Case(recompute=m, precision=p) for m in modes for p in ("bf16", "fp16")]
    found += [Case(tp=2, recompute=m, model=LLAMA) for m in modes]
    found += [Case(tp=2, recompute="full", pa=True)]
    return [case for case in found if case not in cases()]


@pytest.mark.parametrize(
    "case", cases() + [pytest.param(case, marks=pytest.mark.slow) for case in all_modes()], ids=str
)
def test_a_block_keeps_what_is_said(case: Case, ranks) -> None:
    saves = block_saves(case.config(), case.layout, "cpu")
    for sizes, on_host in ranks(case.world).run(kept, case):
        if case.host:  # which is this device here, too
            assert saves == [] and sizes == [on_host]
        else:
            assert sizes == saves and on_host == 0


SHAPES = [(5, 7), (12,), (1,), (2, 1), (3, 3, 5)]


def partitioned(rank: int, how: dict[str, bool]) -> bool:
    """Return whether inputs of any shape and type come back, each rank having kept a third."""
    tp, same = Mesh.build(Layout(tp=3), rank, torch.device("cpu")).tp, True
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.arange(math.prod(shape)).view(shape).to(dtype)
            inputs = KeptInputs(x.numel(), dtype, x.device, MemoryTracker(), tp=tp, sent=Counter(), **how)
            slotted = any(how.values())
            inputs.begin(2 * slotted)
            for i, value in enumerate((x, x + 1)):
                inputs.keep(("block", i), value, i if slotted else None)
            same &= inputs.kept["block", 0].data.numel() == -(-x.numel() // 3)
            for i, value in ((1, x + 1), (0, x)):
                if how["on_host"]:
                    inputs.start_fetch(("block", i)).wait()
                inputs.rebuild(("block", i))
                same &= torch.equal(inputs.take(("block", i)), value)
                inputs.drop(("block", i), i if slotted else None)
    return same


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
def test_any_shape_is_partitioned(on_host: bool, contiguous: bool, ranks) -> None:
    assert ranks(3).run(partitioned, {"on_host": on_host, "contiguous": contiguous}) == [True] * 3


EIGHT = replace(MODEL, num_attention_heads=8, num_layers=4)


@pytest.mark.parametrize(
    ("tp", "precision", "host"),
    [
        pytest.param(
            tp, p, host, marks=() if (tp, p, host) in ((2, "bf16", False), (2, "fp32", True)) else (pytest.mark.slow,)
        )
        for tp in (1, 2, 4)
        for p in ("fp32", "bf16")
        for host in (False, True)
    ],
)
def test_the_papers_formula_of_checkpoints(tp: int, precision: str, host: bool, ranks) -> None:
    """2 b s h L / tp with Pa in 16 bit, 4 in fp32; with Pa+cpu nothing on the device, and as much on the host."""
    case = Case(tp=tp, recompute="full", pa=tp > 1, host=host, precision=precision, model=EIGHT, micro_batches=1)
    b, s, h, layers = 12, EIGHT.seq_length, EIGHT.hidden_size, EIGHT.num_layers
    wanted = {"fp32": 4, "bf16": 2}[precision] * b * s * h * layers // tp
    for outcome in ranks(tp).run(train, case, 2):
        for memory in outcome.memory:
            assert memory["activation_checkpoints"] == (0 if host else wanted)
            assert memory["host"] == (wanted if host else 0)


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_papers_formula_of_pas_traffic(tp: int, ranks) -> None:
    """One all-gather of b s h for each block and micro-batch."""
    plain = Case(tp=tp, recompute="full", model=EIGHT, micro_batches=3)
    whole, parted = (ranks(tp).run(train, case, 1)[0].sent[0] for case in (plain, plain._replace(pa=True)))
    gathered = 4 * 12 * EIGHT.seq_length * EIGHT.hidden_size * EIGHT.num_layers * (tp - 1) // tp
    assert parted["tp"] - whole["tp"] == gathered


def paper(tp: int, sequence: bool, recompute: str) -> tuple[Config, Layout]:
    """Without dropout and with fused attention in 16 bit, as on a GPU."""
    model = ModelConfig(4, 1024, 4096, 16, 512, 50257)
    config = Config(
        model=model,
        training=TrainingConfig(2, precision="bf16"),
        parallel=ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sequence),
        activations=ActivationConfig(recompute),  # type: ignore[arg-type]
    )
    return resolve(config, tp, 0, declare)


@pytest.mark.parametrize(("tp", "sequence"), [(1, False), (2, False), (8, False), (2, True), (8, True)])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_the_difference_from_korthikanti_is_named(tp: int, recompute: str, sequence: bool) -> None:
    """Ours saves no dropout masks (2 s b h, which sequence parallelism alone divides) and no attention weights
    (5 a s / h), but the statistics of norms and one number per query and head. Korthikanti's selective recompute covers
    attention alone, ours the outputs of norms and GELU."""
    config, layout = paper(tp, sequence, recompute)
    b, s, h, a = 2, 512, 1024, 16
    ours, theirs = sum(block_saves(config, layout, "cuda")), korthikanti(config, layout)
    cut = tp if sequence else 1
    masks, statistics, queries = 2 * b * s * h / cut, 4 * 4 * b * s / cut, 4 * b * a * s / tp
    weights = 5 * a * s * s * b / tp if recompute == "none" else 0
    again = 0 if recompute == "none" else 2 * b * s * h * (2 / cut + 4 / tp)
    random_state = 16 + 8  # the fused kernel saves its state even without dropout
    assert ours == theirs - masks - weights - again + statistics + queries + random_state
