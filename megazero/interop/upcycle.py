"""Upcycling: a checkpoint of a dense model becomes one of a model with experts, which computes the same.

Every expert is a copy of the MLP in its place. The weights of a token's experts add up to 1, and so the sum of their
results is that of the MLP for any choice of the router. Sparse Upcycling (Komatsuzaki et al. 2022, arXiv:2212.05055).
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from megazero.checkpoint.streaming import TensorReader, bands
from megazero.engine.kernels import initial_values
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.parameters import LocalBlock, ParamSpec
from megazero.flags.config import Config, ModelConfig
from megazero.flags.validate import check_values
from megazero.interop.weights_only import write_weights
from megazero.run.run_state import RunState

EXPERTS, MLP = ".mlp.experts.", ".mlp."  # in names of the same weights: with experts, without


def with_experts(path: Path, dense: ModelConfig, **options: int | str) -> ModelConfig:
    """Return the upcycled model of the checkpoint `path`.

    Args:
        options: fields of ModelConfig.

    Raises:
        ValueError: the checkpoint has experts already; or no model can have these options.
    """
    if dense.expert_layers:
        raise ValueError(f"--load {path}: the model has --num-experts {dense.num_experts} already; give a dense one")
    plain = {"moe_router_pre_softmax": False, "moe_router_topk_scaling_factor": 1.0, "moe_ffn_hidden_size": 0}
    shared = {"moe_shared_expert_intermediate_size": 0, "moe_shared_expert_gate": False}
    model = replace(dense, **plain | shared | options)  # type: ignore[arg-type]
    check_values(replace(Config(), model=model))
    return model


def upcycle(
    path: Path, output: Path, model: ModelConfig, seed: int, advance: Callable[[int], None] = lambda _: None
) -> None:
    """Write checkpoint 0 of the folder `output`, which appears whole or not at all, and the flags of its model.

    It holds weights alone, in the precision of `path`. One tensor is in memory at a time, or a band of its rows; of
    experts, the MLP and a band.

    Args:
        path: of the dense checkpoint.
        model: see `with_experts`.
        seed: of the routers' initial weights.
        advance: called with the bytes of each band.

    Raises:
        ValueError: `output` exists already.
        Damaged: the checkpoint is damaged.
    """
    dtype = torch.float64 if RunState.read_alone(path).master_precision == "fp64" else torch.float32
    tensors = (_counted(_tensor(TensorReader(path), spec, seed, dtype), advance) for spec in declare(model).params())
    write_weights(path, output, model, tensors=tensors, dtype=dtype)


def _tensor(reader: TensorReader, spec: ParamSpec, seed: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield the bands of a tensor."""
    found, name = reader.manifest.tensors, f"model.{spec.name}"
    if name in found:
        yield from map(functools.partial(reader.read, name), bands(spec.shape))
    elif name.replace(EXPERTS, MLP) in found:
        mlp = reader.read(name.replace(EXPERTS, MLP))
        yield from (mlp.expand(len(range(spec.shape[0])[rows]), *mlp.shape) for rows in bands(spec.shape))
    else:
        whole = LocalBlock((0,) * len(spec.shape), spec.shape, spec.shape)
        yield initial_values.draw(seed, spec, whole, start=0, stop=whole.numel).view(spec.shape).to(dtype)


def _counted(parts: Iterator[torch.Tensor], advance: Callable[[int], None]) -> Iterator[torch.Tensor]:
    for part in parts:
        yield part
        advance(part.nbytes)
