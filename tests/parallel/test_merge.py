"""Merges of checkpoints that runs in different layouts and precisions saved, next to sums of numpy in fp64."""

import functools
import itertools
import json
import shutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megazero import checkpoint
from megazero.checkpoint import streaming, verify
from megazero.checkpoint.streaming import TensorReader
from megazero.engine.step.optimization import learning_rate
from megazero.flags.cli import parse
from megazero.flags.config import Config, OptimizerConfig
from megazero.interop.merge import merge, merge_weights, same_model
from megazero.run.run_state import RunState
from tests.helpers import chains
from tests.helpers.families import of_family
from tests.helpers.programs import warm
from tests.helpers.table import for_each

MODEL = replace(chains.MODEL, num_layers=2, **of_family("mixtral"), num_experts=4, moe_router_enable_expert_bias=True)
MODEL = replace(MODEL, moe_router_score_function="sigmoid", moe_router_bias_update_rate=0.01, ffn_hidden_size=24)
STAGES = ("alone", "dp2 zero3", "tp2 sp", "pp2", "alone")  # the layouts of one run: each saves its last iteration
AT = (2, 3, 5, 6, 9)
WEIGHTS = (0.3, -0.25, 0.15, 0.1, 0.7)

Saved = Sequence[Path]


def saved_states(paths: Saved) -> list[RunState]:
    return [RunState.read(path) for path in paths]


@pytest.fixture(scope="module")
def saved(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """The checkpoints of a run with a constant learning rate, by precision; its layout changes."""
    corpus = chains.make_corpus(tmp_path_factory.mktemp("corpus"))

    @functools.cache
    def run(precision: str) -> Saved:
        folder = str(tmp_path_factory.mktemp(precision))
        for layout, end in zip(STAGES, AT, strict=True):
            config: Config = chains.configured(layout, corpus, end, precision, save=folder, load=folder)
            ranks(chains.LAYOUTS[layout][0]).run(chains.train, chains.LAYOUTS[layout][0], replace(config, model=MODEL))
        return checkpoint.checkpoints(Path(folder))

    return run


def merged(paths: Saved, output: Path, weights: Sequence[float], **options: Any) -> Path:
    merge(paths, output, weights, saved_states(paths), **options)
    found = checkpoint.find(output)
    assert found is not None and list(verify.faults(found)) == []
    return found


def sums(paths: Saved, weights: Sequence[float]) -> dict[str, Any]:
    """Sums of numpy in fp64."""
    readers = list(map(TensorReader, paths))
    names = [name for name in readers[0].manifest.tensors if name.startswith("model.")]
    return {
        n: sum(w * r.read(n).numpy().astype(np.float64) for w, r in zip(weights, readers, strict=True)) for n in names
    }


MIXED = ("bf16", "fp64", "fp32", "fp64", "bf16")


@pytest.mark.parametrize(
    ("precisions", "dtype"),
    [(("fp32",) * 5, torch.float32), pytest.param(MIXED, torch.float64, marks=pytest.mark.second)],
)
def test_a_merge_is_the_sum_of_numpy(
    precisions: Sequence[str], dtype: torch.dtype, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    """Checkpoints are of different layouts, and in one case precisions; bands are smaller than tensors."""
    paths = [saved(precision)[at] for at, precision in enumerate(precisions)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "CHUNK_BYTES", 4 * 16 * 5)
        patch.setattr(streaming, "BAND_BYTES", 4 * 16 * 10)
        path = merged(paths, tmp_path / "merged", WEIGHTS)
    found, wanted = TensorReader(path), sums(paths, WEIGHTS)
    assert found.manifest.tensors.keys() == wanted.keys() and "model.head.output.weight" not in wanted
    for name, total in wanted.items():
        tensor = found.read(name)
        assert tensor.dtype == dtype and tensor.equal(torch.from_numpy(np.asarray(total)).to(dtype)), name
    state, states = RunState.read(path), saved_states(paths)
    assert state.weights_only and state.iteration == 0 and state.model_config(path) == MODEL
    assert state.config["merged"] == {"checkpoints": [str(p) for p in paths], "weights": list(WEIGHTS)}
    assert list(state.expert_biases) == ["0", "1"] and parse(["--preset", f"{path.parent}/config.toml"]).model == MODEL
    for layer, biases in state.expert_biases.items():
        total = sum(w * np.array(s.expert_biases[layer]) for w, s in zip(WEIGHTS, states, strict=True))
        assert np.abs(biases - total).max() < 5 * 2**-53 * 0.15 and np.abs(total).max() > 0


def test_biases_of_experts_that_never_moved_are_zero(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    paths = saved("fp32")[:2]
    first, second = saved_states(paths)
    merge(paths, tmp_path / "m", (0.25, 0.75), (replace(first, expert_biases={}), second))
    for layer, biases in RunState.read(tmp_path / "m" / "iter_0000000").expert_biases.items():
        assert biases == [0.75 * bias for bias in second.expert_biases[layer]]


class Resident(TorchDispatchMode):
    """The most bytes of tensors that operators have made and that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.most = dict[int, int](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self.alive:
            storage = result.untyped_storage()
            at, self.alive[storage.data_ptr()] = storage.data_ptr(), storage.nbytes()
            weakref.finalize(storage, self.alive.pop, at, None)
            self.most = max(self.most, sum(self.alive.values()))
        return result


def test_one_tensor_is_in_memory_at_a_time(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    """The tensor as read and in fp64, and its sum, are five times its bytes in fp32; checkpoints are five."""
    paths, reads = saved("fp32"), list[int]()
    with Resident() as memory:
        merged(paths, tmp_path / "merged", WEIGHTS, advance=reads.append)
    largest, whole = 4 * 257 * 16, sum(4 * total.size for total in sums(paths, WEIGHTS).values())
    assert max(reads) == largest and sum(reads) == 5 * whole and whole > 1.5 * largest
    assert largest < memory.most <= 5 * largest, memory.most / largest


@for_each("style, every", [(s, n) for s in ("linear", "cosine", "exponential", "minus_sqrt") for n in (1, 5)])
def test_a_merge_with_the_weights_of_a_decay_is_the_decay(style: Any, every: int) -> None:
    """If updates do not depend on weights; of an interval of several iterations, checkpoints know only the sum."""
    first, last = 12, 36
    at = [*range(first, last, every), last]
    schedule = OptimizerConfig(lr=1.0, lr_decay_style="wsd", lr_decay_iters=last)
    schedule = replace(schedule, lr_wsd_decay_iters=last - first, lr_wsd_decay_style=style)
    updates = np.random.default_rng(3).normal(size=last + 1)
    for begin, end in itertools.pairwise(at):
        updates[begin + 1 : end + 1] = updates[begin + 1]
    stable = np.cumsum(updates)
    decayed = stable[first] + sum(learning_rate(schedule, t) * updates[t] for t in range(first + 1, last + 1))
    weights = merge_weights("decay", style, [Path(f"iter_{t}") for t in at], [state_at(t) for t in at])
    found = sum(w * stable[t] for w, t in zip(weights, at, strict=True))
    assert abs(sum(weights) - 1) < 1e-14 and abs(found - decayed) < 1e-14 * np.abs(updates).sum() * len(at)


def test_the_weights_of_a_linear_decay() -> None:
    """About 1/4, 1/2, 1/4: the trapezoidal rule."""
    weights = merge_weights("decay", "linear", list(map(Path, "abc")), [state_at(t) for t in (0, 10, 20)])
    assert np.allclose(weights, [0.275, 0.5, 0.225], rtol=1e-14)


def state_at(iteration: int, **optimizer: Any) -> RunState:
    config = {"optimizer": {"lr": 0.5} | optimizer} if optimizer else {}
    return RunState(iteration, 8 * iteration, iteration, None, model={}, layout={}, config=config)  # type: ignore[arg-type]


def test_refusals(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    paths = saved("fp32")
    states, three = saved_states(paths), list(paths[:3])
    stretched = [states[0], replace(states[1], model=states[1].model | {"rotary_base": 5e5})]
    wider = [*states[:2], replace(states[2], model=states[2].model | {"ffn_hidden_size": 32})]
    longer = [states[0], replace(states[1], model=states[1].model | {"seq_length": 64, "moe_z_loss_coeff": 0.1})]
    cosine = [state_at(t, lr_decay_style="cosine", lr_decay_iters=9) for t in (2, 3, 5)]

    rows: list[tuple[Callable[[], object], str]] = [
        (lambda: same_model(paths[:1], states[:1]), "needs at least 2 checkpoints, not 1"),
        (lambda: same_model([*three, paths[0]], [*states[:3], states[0]]), "iter_0000002 is given twice"),
        (lambda: same_model(three, wider), "another model: it has --ffn-hidden-size 32, not 24"),
        (lambda: same_model(paths[:2], stretched), "another model than .* has --rotary-base 500000.0, not 10000.0"),
        (lambda: merge_weights("0.5,x", "linear", paths[:2], states[:2]), "give mean, decay, or 2 numbers"),
        (lambda: merge_weights("0.5,0.5", "linear", three, states[:3]), "such as 0.33,0.33,0.34; these are 2"),
        (lambda: merge_weights("0.5,0.4", "linear", paths[:2], states[:2]), "sum 1, such as .* sum of these is 0.9"),
        (lambda: merge_weights("nan,1", "linear", paths[:2], states[:2]), "sum of these is nan"),
        (lambda: merge_weights("decay", "linear", three[::-1], states[2::-1]), "in the order of their iterations"),
        (lambda: merge_weights("decay", "linear", three, cosine), "rates of the checkpoints are .*only of a constant"),
    ]
    for call, message in rows:
        with pytest.raises(ValueError, match=message):
            call()
    assert same_model(paths[:2], longer) == MODEL  # neither changes values of these weights
    assert merge_weights("mean", "linear", three, cosine) == [1 / 3] * 3
    assert merge_weights("-0.5,1.5", "linear", paths[:2], states[:2]) == [-0.5, 1.5]


def test_the_command(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    paths, new = saved("fp32"), tmp_path / "new"
    broken = tmp_path / "broken"
    shutil.copytree(paths[1], broken / paths[1].name)
    for file in (broken / paths[1].name).glob("*.safetensors"):
        half = file.stat().st_size // 2
        file.write_bytes(file.read_bytes()[:half] + bytes(file.stat().st_size - half))
    words = "scripts/checkpoint.py", "merge", "--weights", "decay"
    refused = warm(*words, new, paths[0], broken / paths[1].name)
    assert refused.returncode == 1 and "checksum" in refused.stderr and sorted(tmp_path.iterdir()) == [broken]
    done = warm(*words, new, *paths)
    assert done.returncode == 0, done.stderr
    assert f"--preset {new}/config.toml --load {new}" in done.stdout
    state = json.loads((new / "iter_0000000" / "state.json").read_text())
    weights = state["config"]["merged"]["weights"]
    assert np.allclose(weights, [1 / 7, 3 / 14, 3 / 14, 2 / 7, 1 / 7], rtol=1e-14)
    again = warm(*words, new, *paths)
    assert again.returncode == 1 and "new exists already" in again.stderr
