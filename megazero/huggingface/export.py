"""Export of a checkpoint as a folder that transformers reads: safetensors, configuration, tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from megazero.checkpoint.streaming import TensorReader, bands
from megazero.checkpoint.tensor_file import TensorFile
from megazero.config.schema import ModelConfig
from megazero.data.tokenizer import Tokenizer
from megazero.files import new_folder, write_atomically
from megazero.huggingface.architectures import SAME, HuggingFaceModel, TensorNames, architecture_of
from megazero.huggingface.tokenizer import check_tokenizer, special_ids, write_tokenizer
from megazero.model.layers.context import DTYPES
from megazero.model.stage import declare
from megazero.run.run_state import RunState, run_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Options of training alone; and the architecture, which several of theirs may share.
NOT_EXPORTED = ("hidden_dropout", "attention_dropout", "init_method_std", "architecture")


class Shard(NamedTuple):
    """A safetensors file of an export."""

    rows: list[TensorNames]
    announced: list[tuple[str, torch.dtype, torch.Size]]  # their tensors
    num_bytes: int


def shapes_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the model by its global name, in the order of the forward pass."""
    return {spec.name: spec.shape for spec in declare(model).params()}


def plan_shards(model: ModelConfig, dtype: torch.dtype, shard_bytes: int) -> list[Shard]:
    """Divide the model's tensors, in order, into files of at most `shard_bytes`, or of one tensor that is larger."""
    architecture, shards = architecture_of(model), [Shard([], [], 0)]
    for name, shape in shapes_of(model).items():
        row = architecture.names(name)
        parts = row.form.split(torch.empty(shape, dtype=dtype, device="meta"), model)
        announced = [(theirs, dtype, part.shape) for theirs, part in zip(row.theirs, parts, strict=True)]
        size = sum(part.nbytes for part in parts)
        if shards[-1].rows and shards[-1].num_bytes + size > shard_bytes:
            shards.append(Shard([], [], 0))
        rows, before, num_bytes = shards.pop()
        shards.append(Shard([*rows, row], before + announced, num_bytes + size))
    return shards


def export(
    path: Path,
    output: Path,
    tokenizer: Tokenizer | None,
    dtype: str = "fp32",
    shard_bytes: int = 5 << 30,
    advance: Callable[[int], None] = lambda _: None,
) -> bool:
    """Write the checkpoint folder `path` as the Hugging Face model `output`, which appears whole or not at all.

    One tensor is in memory at a time, or a band of its rows if it is the same in both: memory grows neither with the
    number of layers nor with the vocabulary.

    Args:
        tokenizer: of the run; None: the export has none.
        dtype: of the weights, as --precision names it.
        shard_bytes: of a safetensors file.
        advance: called with the bytes of each tensor or band.

    Returns:
        False if transformers gives other ids than `tokenizer` for some texts.

    Raises:
        ValueError: the checkpoint is damaged, `output` exists already, or a weight is beyond the range of the dtype.
    """
    state = RunState.read_alone(path)
    model = state.model_config(path)
    exported(model)
    shards = plan_shards(model, DTYPES[dtype], shard_bytes)
    with new_folder(output) as folder:
        same = tokenizer is None or write_tokenizer(tokenizer, folder)
        _write_config(model, folder, dtype, special_ids(tokenizer, folder) if tokenizer is not None else {})
        _write_weights(TensorReader(path), model, shards, folder, dtype, advance)
    return same


def export_run(path: Path, output: Path, dtype: str) -> bool:
    """Export as `export`, with the tokenizer of the run, if it has one."""
    state = RunState.read_alone(path)
    return export(path, output, run_tokenizer(path, state) if state.tokenizer(path) else None, dtype)


def check_export(model: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Refuse a run whose export would compute another model. ValueError names the options, or the tokenizer."""
    exported(model)
    if tokenizer is not None:
        check_tokenizer(tokenizer)


def exported(model: ModelConfig) -> HuggingFaceModel:
    """Return their architecture that computes `model`, as its own conversion back proves. ValueError if none does."""
    architecture = architecture_of(model)
    back = ModelConfig(**architecture.from_config(architecture.to_config(model, None)))
    ours, theirs = _computation(model), _computation(back)
    lost = [f"--{name.replace('_', '-')} {value}" for name, value in ours.items() if value != theirs[name]]
    if lost:
        raise ValueError(
            f"{', '.join(lost)}: Hugging Face's {architecture.model_type}, the export of --architecture "
            f"{model.architecture}, has no such option; leave it out, or the export"
        )
    return architecture


def _computation(model: ModelConfig) -> dict[str, object]:
    """Return the options on which the loss of given weights depends, without synonyms."""
    found = {name: value for name, value in asdict(model).items() if name not in NOT_EXPORTED}
    kinds = [model.attention_kind(number) for number in range(model.num_layers)]
    found |= {"ffn_hidden_size": model.ffn_size, "num_query_groups": model.query_groups, "kv_channels": model.head_dim}
    found |= {"layer_pattern": "".join(kinds), "window_size": model.window_size if "L" in kinds else 0}
    return found


def _write_weights(
    reader: TensorReader, model: ModelConfig, shards: list[Shard], folder: Path, dtype: str, advance: Callable
) -> None:
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        index = {theirs: name for name, shard in zip(names, shards, strict=True) for theirs, _, _ in shard.announced}
        total = sum(shard.num_bytes for shard in shards)
        content = {"metadata": {"total_size": total}, "weight_map": index}
        write_atomically(folder / INDEX, json.dumps(content, indent=2).encode())
    for name, shard in zip(names, shards, strict=True):
        with TensorFile(folder / name, shard.announced, {"format": "pt"}) as file:
            for row in shard.rows:
                for part in _parts(reader, row, model, dtype, advance):
                    file.append(part)


def _parts(
    reader: TensorReader, row: TensorNames, model: ModelConfig, dtype: str, advance: Callable[[int], None]
) -> Iterator[Iterable[torch.Tensor]]:
    """Yield their tensors that hold one of ours, in their dtype, each as bands of its rows."""

    def read(rows: slice) -> torch.Tensor:
        ours = reader.read(f"model.{row.ours}", rows).to(DTYPES[dtype])
        if dtype == "fp16" and not all(math.isfinite(float(end)) for end in torch.aminmax(ours)):
            raise ValueError(
                f"--dtype fp16: {row.ours} holds values beyond {torch.finfo(ours.dtype).max:.0f}, the largest of fp16; "
                "use bf16 or fp32"
            )
        advance(ours.nbytes)
        return ours

    if row.form is SAME:
        yield map(read, bands(reader.manifest.tensors[f"model.{row.ours}"].shape))
    else:
        yield from ([part.contiguous()] for part in row.form.split(read(slice(None)), model))


def _write_config(model: ModelConfig, folder: Path, dtype: str, ids: dict[str, int | None]) -> None:
    from transformers import GenerationConfig

    architecture = architecture_of(model)
    config = architecture.to_config(model, ids.get("eos_token_id"))
    config.bos_token_id = ids.get("bos_token_id")
    config.architectures, config.dtype = [architecture.model_class], str(DTYPES[dtype]).removeprefix("torch.")
    config.save_pretrained(folder)
    GenerationConfig(**ids).save_pretrained(folder)
