"""Weights of a Hugging Face folder, read by each rank into its own shards."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from megazero.checkpoint.regions import Region, intersection
from megazero.checkpoint.shards import LocalShard, owned_regions, views_of
from megazero.files import read_json_object
from megazero.flags.config import ModelConfig
from megazero.flags.flag_names import as_flag
from megazero.interop.huggingface.configuration import CONFIG, architecture_of
from megazero.interop.huggingface.importing import Source, check_shapes, names_in, read_biases, read_rows


class OpenedWeights(NamedTuple):
    """The weights of a Hugging Face folder.

    Attributes:
        fill: fills a rank's shards, a tensor at a time. ValueError for a file that cannot be read, and for values that
            are not finite.
        expert_biases: by number of the layer; see `RunState`.
    """

    fill: Callable[[Mapping[str, LocalShard]], None]
    expert_biases: dict[str, list[float]]


def open_weights(folder: Path, model: ModelConfig) -> OpenedWeights:
    """Open the safetensors of `folder` as weights of `model`.

    The files are mapped: a rank reads the pages of its own shards, and of tensors that are joined from several.

    Raises:
        ValueError: the folder holds no safetensors, or not the tensors of `model`.
    """
    flag = f"--load {folder}"
    architecture = architecture_of(read_json_object(folder / CONFIG), flag)
    if wrong := architecture.differences(model):
        given = ", ".join(as_flag(name.replace("_", "-"), getattr(model, name)) for name in wrong)
        raise ValueError(f"{flag} is a {architecture.model_type}, which has no {given}; leave it out")
    files = Source(folder, flag)
    names = names_in(files, architecture, model)
    check_shapes(files, architecture, model, names)

    def fill(shards: Mapping[str, LocalShard]) -> None:
        for name, shard in shards.items():
            regions = owned_regions(shard)
            if not regions:
                continue
            name, targets = name.removeprefix("model."), list(views_of(shard, regions))
            rows = slice(min(r.offset[0] for r in regions), max(r.offset[0] + r.size[0] for r in regions))
            for first, ours in read_rows(files, architecture, model, names=names, name=name, asked=rows):
                part = Region((first, *[0] * (ours.dim() - 1)), tuple(ours.shape))
                for region, target in zip(regions, targets, strict=True):
                    if common := intersection(region, part):
                        target[_within(common, region)] = ours[_within(common, part)]
            if not all(math.isfinite(float(end)) for end in torch.aminmax(shard.data)):
                raise ValueError(f"{flag}: {name} holds values that are not finite")

    return OpenedWeights(fill, read_biases(files, architecture, model, names))


def _within(part: Region, region: Region) -> tuple[slice, ...]:
    """Return the indices of `part` in a tensor of `region`."""
    starts = [offset - first for offset, first in zip(part.offset, region.offset, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, part.size, strict=True))
