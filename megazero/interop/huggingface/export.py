"""Export of a checkpoint as a folder that transformers reads: safetensors, configuration, tokenizer."""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from megazero.checkpoint.streaming import TensorReader, bands
from megazero.checkpoint.tensor_file import TensorFile
from megazero.data.tokenizer import GENERATION, Tokenizer, read_generation
from megazero.engine.model.layers.context import DTYPES
from megazero.engine.model.stage import declare
from megazero.engine.options.optimizers import AVERAGE
from megazero.families.parts.model_types import SAME, HuggingFaceModel, TensorNames
from megazero.files import new_folder, write_atomically
from megazero.flags.config import ModelConfig
from megazero.interop.huggingface.families import family_of
from megazero.interop.huggingface.tokenizer_files import (
    SpecialIds,
    check_tokenizer,
    generation_config,
    special_ids,
    write_tokenizer,
)
from megazero.log import log
from megazero.run.run_state import RunState, run_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Shard(NamedTuple):
    """A safetensors file of an export."""

    rows: list[TensorNames]
    announced: list[tuple[str, torch.dtype, torch.Size]]  # their tensors
    num_bytes: int


def shapes_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the model by its global name, in the order of the forward pass."""
    return {spec.name: spec.shape for spec in declare(model).params()}


def exported(model: ModelConfig, family: HuggingFaceModel) -> ModelConfig:
    """Return the model as an export holds it, and warn of modules that are left out."""
    found = model
    if model.mtp_num_layers and not family.predicts:
        found = replace(model, mtp_num_layers=0)
        log.warning(
            f"--mtp-num-layers {model.mtp_num_layers}: its modules are not exported, because {family.model_class} has "
            "no place for them; the next token does not depend on them"
        )
    return found


def plan_shards(family: HuggingFaceModel, model: ModelConfig, dtype: torch.dtype, shard_bytes: int) -> list[Shard]:
    """Divide the model's tensors, in order, into files of at most `shard_bytes`, or of one tensor that is larger."""
    shapes, shards = shapes_of(model), [Shard([], [], 0)]
    for row in dict.fromkeys(row for name in shapes for row in family.names(name, model)):
        ours = [torch.empty(shapes[name], dtype=dtype, device="meta")[row.rows] for name in row.ours]
        parts = row.form.split(ours, model)
        announced = [(theirs, dtype, part.shape) for theirs, part in zip(row.theirs, parts, strict=True)]
        size = sum(part.nbytes for part in parts)
        if shards[-1].rows and shards[-1].num_bytes + size > shard_bytes:
            shards.append(Shard([], [], 0))
        rows, before, num_bytes = shards.pop()
        shards.append(Shard([*rows, row], before + announced, num_bytes + size))
    biases = [(name, torch.float32, torch.Size([model.num_experts])) for name in family.bias_names(model).values()]
    rows, before, num_bytes = shards.pop()
    return [*shards, Shard(rows, before + biases, num_bytes + 4 * model.num_experts * len(biases))]


def export(
    path: Path,
    output: Path,
    tokenizer: Tokenizer | None,
    dtype: str = "fp32",
    shard_bytes: int = 5 << 30,
    weights: str = "model",
    advance: Callable[[int], None] = lambda _: None,
) -> bool:
    """Write the checkpoint folder `path` as the Hugging Face model `output`, which appears whole or not at all.

    One tensor is in memory at a time, or a band of its rows if it is the same in both: memory grows neither with the
    number of layers nor with the vocabulary.

    Args:
        tokenizer: of the run; None: the export has none.
        dtype: of the weights, as --precision names it.
        shard_bytes: of a safetensors file.
        weights: model, or ema: their running average.
        advance: called with the bytes of each tensor or band.

    Returns:
        False if transformers gives other ids than `tokenizer` for some texts.

    Raises:
        ValueError: the checkpoint is damaged or has no running average, `output` exists already, or a weight is beyond
            the range of the dtype.
    """
    state = RunState.read_alone(path)
    if weights == AVERAGE.name and not state.averages:
        raise ValueError(
            f"--weights ema: {path} has no running average of the weights; train with --ema-interval N, and export a "
            "checkpoint of at least N updates"
        )
    model = state.model_config(path)
    family = family_of(model, state.source_type)
    model = exported(model, family)
    shards = plan_shards(family, model, DTYPES[dtype], shard_bytes)
    with new_folder(output) as folder:
        same = tokenizer is None or write_tokenizer(tokenizer, folder)
        source_folder = str(state.config.get("hf_config", ""))
        _write_config(family, model, folder, dtype=dtype, tokenizer=tokenizer, source=source_folder)
        biases = [torch.tensor(state.expert_biases[str(number)]) for number in family.bias_names(model)]
        source = ExportSource(TensorReader(path), weights, dtype, advance)
        _write_weights(source, model, shards, biases, folder=folder)
    return same


def export_run(path: Path, output: Path, dtype: str) -> bool:
    """Export as `export`, with the tokenizer of the run, if it has one."""
    state = RunState.read_alone(path)
    return export(path, output, run_tokenizer(path, state) if state.tokenizer(path) else None, dtype)


def check_export(model: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Refuse a run whose export would compute another model. ValueError names the options, or the tokenizer."""
    family = family_of(model)
    family.to_config(exported(model, family), None)
    if tokenizer is not None:
        check_tokenizer(tokenizer)


class ExportSource(NamedTuple):
    """The weights of a checkpoint, in the dtype of an export; see `export`."""

    reader: TensorReader
    weights: str
    dtype: str
    advance: Callable[[int], None]

    def read(self, name: str, rows: slice) -> torch.Tensor:
        """Return a weight, or rows of it; ValueError if one is beyond the range of the dtype."""
        ours = self.reader.read(f"{self.weights}.{name}", rows).to(DTYPES[self.dtype])
        if self.dtype == "fp16" and not all(math.isfinite(float(end)) for end in torch.aminmax(ours)):
            raise ValueError(
                f"--dtype fp16: {name} holds values beyond {torch.finfo(ours.dtype).max:.0f}, the largest of fp16; "
                "use bf16 or fp32"
            )
        self.advance(ours.nbytes)
        return ours


def _write_weights(
    source: ExportSource, model: ModelConfig, shards: list[Shard], biases: list[torch.Tensor], folder: Path
) -> None:
    """Write the files of an export; `biases` of experts are at the end of the last one."""
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        index = {theirs: name for name, shard in zip(names, shards, strict=True) for theirs, _, _ in shard.announced}
        total = sum(shard.num_bytes for shard in shards)
        content = {"metadata": {"total_size": total}, "weight_map": index}
        write_atomically(folder / INDEX, (json.dumps(content, indent=2) + "\n").encode())
    for name, shard in zip(names, shards, strict=True):
        with TensorFile(folder / name, shard.announced, {"format": "pt"}) as file:
            for _, rows in itertools.groupby(shard.rows, key=lambda row: row.ours):
                for part in _parts(source, list(rows), model):
                    file.append(part)
            for bias in biases if shard is shards[-1] else ():
                file.append([bias])


def _parts(source: ExportSource, same: list[TensorNames], model: ModelConfig) -> Iterator[Iterable[torch.Tensor]]:
    """Yield their tensors of rows with the same tensors of ours, in their dtype, each as bands of its rows."""
    read, name, row = source.read, same[0].ours[0], same[0]
    in_bands = bands(source.reader.manifest.tensors[f"{source.weights}.{name}"].shape)
    if row.form is SAME:
        yield map(functools.partial(read, name), in_bands)
    elif row.form.by_rows:
        yield (row.form.split([read(name, band)], model)[0].contiguous() for band in in_bands)
    elif row.expert is None:
        parts = row.form.split([read(name, slice(None)) for name in row.ours], model)
        yield from ([part.contiguous()] for part in parts)
    else:
        for band in in_bands:
            experts = [each for each in same if band.start <= each.rows.start < band.stop]
            if experts:
                ours = read(name, slice(experts[0].rows.start, experts[-1].rows.stop))
                for each, expert in zip(experts, ours.split(1), strict=True):
                    yield from ([part] for part in each.form.split([expert], model))


def _write_config(
    family: HuggingFaceModel, model: ModelConfig, folder: Path, dtype: str, tokenizer: Tokenizer | None, source: str
) -> None:
    """Write both configurations. `source`: the config.json from which the run began, or its folder; "": none."""
    ids = SpecialIds()
    if tokenizer is not None:
        ids, generation = special_ids(tokenizer, folder), tokenizer.generation
    else:
        generation = read_generation(source) if source else b""
    config = family.to_config(model, ids.eos)
    config.bos_token_id = ids.bos
    if ids.pad is not None and ids.pad < model.vocab_size:
        config.pad_token_id = ids.pad
    config.architectures, config.dtype = [family.model_class], str(DTYPES[dtype]).removeprefix("torch.")
    config.save_pretrained(folder)
    content = generation_config(generation, ids)
    write_atomically(folder / GENERATION, json.dumps(content, indent=2).encode())
