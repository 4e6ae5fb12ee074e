"""Checkpoints of weights alone, made from other checkpoints, from which --load starts a run."""

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.streaming import write_checkpoint
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.files import new_folder, write_atomically
from megazero.flags.config import Config, ModelConfig
from megazero.flags.flag_names import to_toml
from megazero.run.run_state import RunState, attached_tokenizer, run_tokenizer


def write_weights(
    path: Path,
    output: Path,
    model: ModelConfig,
    tensors: Iterator[Iterable[torch.Tensor]],
    dtype: torch.dtype,
    expert_biases: dict[str, list[float]] | None = None,
    **notes: Any,
) -> None:
    """Write checkpoint 0 of the folder `output`, which appears whole or not at all, and the flags of its model.

    Args:
        path: checkpoint from which the tokenizer and the data's flags come.
        tensors: as for `write_checkpoint`, in the order in which `declare` lists the model's.
        dtype: of all tensors, fp32 or fp64.
        expert_biases: as in RunState.
        notes: JSON that the state keeps about the origin of the weights.

    Raises:
        ValueError: `output` exists already.
    """
    state = RunState.read_alone(path)
    tokenizer = run_tokenizer(path, state) if state.saved_tokenizer else None
    saved, attached = attached_tokenizer(tokenizer)
    precision = "fp64" if dtype == torch.float64 else "fp32"
    new = RunState(
        *(0, 0, 0, None, asdict(model), asdict(Layout())),
        config={"data": state.config.get("data", {}), "training": {"precision": precision}} | notes,
        run=uuid.uuid4().hex,
        weights_only=True,
        saved_tokenizer=saved,
        texts_begin=True,
        source_type=state.source_type,
        expert_biases=expert_biases or {},
    )
    with new_folder(output) as folder:
        names = {field.name.replace("_", "-") for field in fields(model)}
        write_atomically(folder / "config.toml", to_toml(replace(Config(), model=model), names).encode())
        shapes = {f"model.{spec.name}": spec.shape for spec in declare(model).params()}
        write_checkpoint(folder, 0, shapes, tensors=tensors, state=new.to_json(), attached=attached, dtype=dtype)
