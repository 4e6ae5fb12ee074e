"""Merging: a checkpoint whose weights are a weighted sum of those of others.

Warmup-Stable and Merge (Tian et al. 2025, arXiv:2507.17634).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from megazero.checkpoint.streaming import TensorReader, bands
from megazero.engine.model.stage import declare
from megazero.engine.options.option import OnResume
from megazero.engine.step.optimization import DECAYS
from megazero.flags.config import ModelConfig
from megazero.flags.flag_names import flags
from megazero.interop.weights_only import write_weights
from megazero.run.resume import check_same_model
from megazero.run.run_state import RunState


def same_model(paths: Sequence[Path], states: Sequence[RunState]) -> ModelConfig:
    """Return the model of the checkpoints `paths`.

    Raises:
        ValueError: fewer than two; one is given twice; or options differ that change the values of a model.
    """
    if len(paths) < 2:
        raise ValueError(f"a merge needs at least 2 checkpoints, not {len(paths)}; name more after OUT")
    for one, other in itertools.combinations(paths, 2):
        if one.resolve() == other.resolve():
            raise ValueError(f"{other} is given twice; name every checkpoint once")
    model = states[0].model_config(paths[0])
    for path, state in zip(paths[1:], states[1:], strict=True):
        found = state.model_config(path)
        check_same_model(path, found, model)
        for name, ours in asdict(model).items():
            flag, theirs = name.replace("_", "-"), getattr(found, name)
            if ours != theirs and flags()[flag].on_resume is OnResume.MODEL:
                raise ValueError(
                    f"{path} is of another model than {paths[0]}: it has --{flag} {theirs}, not {ours}; merge "
                    "checkpoints of one model"
                )
    return model


def merge_weights(kind: str, style: str, paths: Sequence[Path], states: Sequence[RunState]) -> list[float]:
    """Return the weight of each checkpoint; they sum to 1.

    Let w_0 ... w_n be the weights of the model in the checkpoints, at iterations t_0 < ... < t_n, and u_i = w_i -
    w_(i-1) the update of interval i. A decay from t_0 multiplies the update of iteration t by the factor
    f((t - t_0) / (t_n - t_0)) of DECAYS: 1 at t_0, 0 at t_n. An interval knows only the sum of its updates, so its
    factor e_i is the mean of f over its iterations t_(i-1) + 1 ... t_i. Then

        w_0 + e_1 u_1 + ... + e_n u_n = (1 - e_1) w_0 + (e_1 - e_2) w_1 + ... + (e_(n-1) - e_n) w_(n-1) + e_n w_n.

    It equals the decayed run if the updates are those of the run with the constant rate.

    Args:
        kind: mean, decay, or numbers separated by commas.
        style: of the decay, a key of DECAYS.

    Raises:
        ValueError: numbers that are not one for each checkpoint, finite, with the sum 1; or a decay over checkpoints
            that are not in the order of their iterations, or between which the learning rate changes.
    """
    if kind == "mean":
        return [1 / len(paths)] * len(paths)
    if kind != "decay":
        return _numbers(kind, len(paths))
    at = [state.iteration for state in states]
    for one, other in itertools.pairwise(range(len(at))):
        if at[one] >= at[other]:
            raise ValueError(
                f"--weights decay: {paths[other]}, of iteration {at[other]}, is after {paths[one]}, of {at[one]}; name "
                "checkpoints in the order of their iterations"
            )
    rates = [rate for state in states if (rate := state.saved_rate) is not None]
    if rates and not math.isclose(min(rates), max(rates), rel_tol=1e-9):
        raise ValueError(
            f"--weights decay: the learning rates of the checkpoints are {min(rates):g} to {max(rates):g}, and a merge "
            "equals a decay only of a constant one; name checkpoints from before the decay, or use --weights mean or a "
            "list"
        )
    span = at[-1] - at[0]
    factors = [
        math.fsum(DECAYS[style]((t - at[0]) / span) for t in range(begin + 1, end + 1)) / (end - begin)
        for begin, end in itertools.pairwise(at)
    ]
    return [before - after for before, after in itertools.pairwise([1.0, *factors, 0.0])]


def _numbers(kind: str, count: int) -> list[float]:
    example = [f"{1 / count:.2g}"] * (count - 1)
    example.append(f"{1 - sum(map(float, example)):.2g}")
    form = f"--weights {kind}: give mean, decay, or {count} numbers with the sum 1, such as {','.join(example)}"
    try:
        found = [float(word) for word in kind.split(",")]
    except ValueError:
        raise ValueError(form) from None
    if len(found) != count:
        raise ValueError(f"{form}; these are {len(found)}")
    if not all(map(math.isfinite, found)) or abs(math.fsum(found) - 1) > 1e-9:  # as exact as 1/3 in ten digits
        raise ValueError(f"{form}; the sum of these is {math.fsum(found):g}")
    return found


def merge(
    paths: Sequence[Path],
    output: Path,
    weights: Sequence[float],
    states: Sequence[RunState],
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Write checkpoint 0 of the folder `output`, which appears whole or not at all, and the flags of its model.

    It holds weights alone, in fp64 if a checkpoint has fp64 weights, otherwise in fp32. Sums are in fp64, in the order
    of `paths`. One tensor of one checkpoint is in memory at a time, or a band of its rows, with its sum.

    Args:
        weights: see `merge_weights`.
        states: of `paths`, whose models `same_model` has compared.
        advance: called with the bytes of each band that was read.

    Raises:
        ValueError: `output` exists already.
        Damaged: a checkpoint is damaged.
    """
    dtype = torch.float64 if "fp64" in {state.master_precision for state in states} else torch.float32
    terms = list(zip(map(TensorReader, paths), weights, strict=True))

    def scaled(reader: TensorReader, weight: float, name: str, rows: slice) -> torch.Tensor:
        part = reader.read(name, rows)
        advance(part.nbytes)
        return part.double().mul_(weight)

    def summed(name: str, rows: slice) -> torch.Tensor:
        total = scaled(*terms[0], name, rows)
        for term in terms[1:]:
            total += scaled(*term, name, rows)
        return total.to(dtype)

    model = states[0].model_config(paths[0])
    tensors = (
        map(functools.partial(summed, f"model.{spec.name}"), bands(spec.shape)) for spec in declare(model).params()
    )
    biases = {
        layer: [math.fsum(w * x for w, x in zip(weights, terms, strict=True)) for terms in zip(*each, strict=True)]
        for layer, each in _biases(states).items()
    }
    merged = {"checkpoints": [str(path) for path in paths], "weights": list(weights)}
    write_weights(paths[-1], output, model, tensors=tensors, dtype=dtype, expert_biases=biases, merged=merged)


def _biases(states: Sequence[RunState]) -> dict[str, list[list[float]]]:
    """Return layer -> the biases of its experts in each checkpoint; 0 if it has none yet, as after an upcycling."""
    found = {layer: len(biases) for state in states for layer, biases in state.expert_biases.items()}
    return {
        layer: [state.expert_biases.get(layer, [0.0] * count) for state in states] for layer, count in found.items()
    }
