"""Weights of a Hugging Face folder, read by each rank into its own shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from megazero.checkpoint import LocalShard
from megazero.config.flags import as_flag
from megazero.config.schema import ModelConfig
from megazero.files import read_json_object
from megazero.huggingface.architectures import SAME, TensorNames
from megazero.huggingface.configuration import CONFIG
from megazero.huggingface.families import MODELS
from megazero.huggingface.importing import Source, check_shapes, names_in
from megazero.plan.layout.regions import Region

Fill = Callable[[Mapping[str, LocalShard]], None]


def open_weights(folder: Path, model: ModelConfig) -> Fill:
    """Return a function that fills a rank's shards of `model` from the safetensors of `folder`, a tensor at a time.

    The files are mapped: a rank reads the pages of its own shards, and of tensors that are joined from several.

    Raises:
        ValueError: the folder holds no safetensors, or not the tensors of `model`. The function raises it for a file
            that cannot be read, and for values that are not finite.
    """
    flag = f"--load {folder}"
    architecture = MODELS[read_json_object(folder / CONFIG)["model_type"]]
    if wrong := architecture.differences(model):
        given = ", ".join(as_flag(name.replace("_", "-"), getattr(model, name)) for name in wrong)
        raise ValueError(f"{flag} is a {architecture.model_type}, which has no {given}; leave it out")
    files = Source(folder, flag)
    names = names_in(files, architecture, model)
    check_shapes(files, architecture, model, names)

    def read(row: TensorNames, name: str, regions: list[Region]) -> tuple[torch.Tensor, int]:
        """Return our tensor, or the rows of it that the regions are in, and the number of its first row."""
        theirs = [names[each] for each in row.theirs]
        if row.form is not SAME:
            joined = row.form.join([files.read(each) for each in theirs], model)
            return joined[row.ours.index(name)], 0
        first = min(region.offset[0] for region in regions)
        last = max(region.offset[0] + region.size[0] for region in regions)
        return files.read(theirs[0], slice(first, last)), first

    def fill(shards: Mapping[str, LocalShard]) -> None:
        for name, shard in shards.items():
            regions = shard.regions()
            if not regions:
                continue
            name = name.removeprefix("model.")
            ours, first = read(architecture.names(name), name, regions)
            for region, target in zip(regions, shard.views(regions), strict=True):
                at = [slice(offset, offset + size) for offset, size in zip(region.offset, region.size, strict=True)]
                at[0] = slice(at[0].start - first, at[0].stop - first)
                target.copy_(ours[tuple(at)])
            if not all(math.isfinite(float(end)) for end in torch.aminmax(shard.data)):
                raise ValueError(f"{flag}: {name} holds values that are not finite")

    return fill
