"""`megazero verify` on real ranks: layouts that train the same model pass, and planted faults are found and named."""

import functools
import json
import os
import resource
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megazero.verify.verification import Proof, Verification, Wanted, to_json
from tests.helpers.planted import Fault, plant
from tests.helpers.rings import SECOND

TP, PP, CP, EP = (f"--{axis}-model-parallel-size" for axis in ("tensor", "pipeline", "context", "expert"))
CP = "--context-parallel-size"
SMALL = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 64 --init-method-std 0.1"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
MIXTURE = "--architecture mixtral --num-experts 8 --moe-aux-loss-coeff 0.01"


def verify(flags: str, world: int = 0, prepare: Any = None, **options: Any) -> Proof:
    return Verification(Wanted(flags.split(), world, **options), prepare).run()


def failed(verdict: Proof) -> list[str]:
    return [row.what for rows in verdict.tables.values() for row in rows if not row.passed]


SAME = {
    "pp 2, zero 1": (f"{PP} 2 --zero-stage 1 --packing best-fit {DROPOUT}", 4, ""),
    "zero 3": (f"--zero-stage 3 --precision bf16 {DROPOUT}", 2, f"--zero-stage 1 {TP} 2"),
    "cp 2": (f"{CP} 2 --zero-stage 2 --reset-attention-mask --reset-position-ids --eod-mask-loss", 4, f"{CP} 1"),
    "ep 2": (f"{MIXTURE} {EP} 2 --zero-stage 2 --global-batch-size 10", 2, f"{PP} 2 --expert-model-parallel-size 1"),
    "muon": ("--optimizer muon --zero-stage 3 --global-batch-size 8 --ema-interval 9", 2, f"{TP} 2 --zero-stage 0"),
    "lion, sp, padding": (f"--optimizer lion {TP} 2 --sequence-parallel --recompute full --global-batch-size 7", 4, ""),
    "fp16, ramp-up, offload": (
        "--precision fp16 --rampup-batch-size 32 32 1000 --global-batch-size 64 --optimizer-cpu-offload", 2, "",
    ),
    "states in a file": (
        f"{SMALL} --zero-stage 2 --optimizer-cpu-offload --optimizer-nvme-offload {tempfile.gettempdir()}", 2, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=SECOND) for name in SAME])
def test_a_layout_trains_the_same_model(name: str) -> None:
    flags, world, then = SAME[name]
    verdict = verify(flags, world, then=then)
    assert verdict.passed, (failed(verdict), verdict.first, verdict.lost)
    assert len(verdict.tables) == 4
    first = verdict.tables["the layout next to one process, fp64"]
    # If these were 0, the two trainings would be the same one.
    assert all(row.tolerance < 1e-9 for row in first if row.what == "loss")


def test_a_small_layout_passes() -> None:
    verdict = verify(f"{SMALL} {TP} 2 --zero-stage 0 --precision fp64", 2)
    assert verdict.passed, (failed(verdict), verdict.first, verdict.lost)
    assert verdict.words[0] == "verifying pp 1 x dp 1 x tp 2 (2 ranks)"
    rows = {row.what: row for row in verdict.tables["the layout next to one process, fp64"]}
    assert 0 < rows["gradients of 28 weights"].difference < rows["gradients of 28 weights"].tolerance < 1e-9
    found = json.loads(json.dumps(to_json(verdict, Wanted([])), allow_nan=False))
    assert found["passed"] and len(found["rows"]) > 10


PARTIAL = Fault(
    "megazero.engine.zero.gradients", "UnitGradients", "start_sum_replicated",
    "[self.mesh.tp.start_all_reduce(part) for part in parts]", "[]",
)  # fmt: skip
NO_UPDATES = Fault(
    "megazero.checkpoint.engine_state", "EngineState", "load", 'engine.updates = state["updates"]', "engine.updates = 0"
)  # Adam then corrects the bias of its moments as if they had just begun


def test_a_partial_gradient_is_named() -> None:
    """Norms see a part of the tokens under sequence parallelism: their gradients are sums over tp."""
    flags = f"{SMALL} {TP} 2 --sequence-parallel --zero-stage 0 --precision fp64"
    verdict = verify(flags, 2, functools.partial(plant, PARTIAL), steps=1)
    assert not verdict.passed
    assert "the first thing that differs is the gradient of position_embedding.weight, step 1" in verdict.first
    rows = {row.what: row.passed for row in verdict.tables["the layout next to one process, fp64"]}
    assert rows["loss"] and rows["outputs of layers"] and rows["gradients of their inputs"]
    assert not rows["gradients of 28 weights"] and not rows["copies on several ranks"]


@pytest.mark.second
def test_a_resume_that_forgets_is_named() -> None:
    verdict = verify(f"{SMALL} --zero-stage 1 --precision fp64", 2, functools.partial(plant, NO_UPDATES))
    assert not verdict.passed
    assert verdict.first.startswith("resumed after step 1, fp64, in one process: ")
    tables = list(verdict.tables.values())
    assert all(row.passed for row in tables[0]) and not all(row.passed for row in tables[1])


def end_of_rank_1(how: str) -> None:
    if dist.is_initialized() and dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("out of luck")


@pytest.mark.second
@pytest.mark.parametrize(
    ("how", "words"),
    [("killed", "was killed by signal 9"), ("raises", "raised RuntimeError: RuntimeError: out of luck")],
)
def test_a_rank_that_ends_is_one_sentence(how: str, words: str) -> None:
    verdict = verify(f"{SMALL} --zero-stage 1 --precision fp64", 2, functools.partial(end_of_rank_1, how))
    assert not verdict.passed
    assert verdict.lost == f"the layout, fp64: rank 1 {words}"


def without_room() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


@pytest.mark.second
def test_a_full_disk_is_one_sentence() -> None:
    """A run trains on after a save that fails; here, a resume would find nothing."""
    verdict = verify(f"{SMALL} --zero-stage 1 --precision fp64", 2, without_room)
    assert not verdict.passed
    assert verdict.lost.startswith("the layout, fp64: rank ") and "File too large" in verdict.lost


PRESETS = {
    "zero-100b": ("--preset zero-100b", 400),
    "llama-3.1-8b-128k": ("--preset llama-3.1-8b-128k", 64),
    "qwen3-30b-a3b": ("--preset qwen3-30b-a3b", 64),
    "gpt2-1.5b": (f"--preset gpt2-1.5b {PP} 4 --pipeline-schedule zero-bubble-v --virtual-pipeline-stages 2", 16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_presets_pass(name: str, tmp_path: Path) -> None:
    verdict = verify(*PRESETS[name])
    assert verdict.passed, (failed(verdict), verdict.first, verdict.lost)
