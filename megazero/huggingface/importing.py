"""A Hugging Face model as a checkpoint of weights alone, for a run to begin with."""

from __future__ import annotations

import functools
import math
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megazero.checkpoint.streaming import bands, write_checkpoint
from megazero.config.flags import to_toml
from megazero.config.schema import Config, DataConfig, ModelConfig
from megazero.data.tokenizer import hub_hint
from megazero.files import new_folder, open_regular, read_json_object, write_atomically
from megazero.huggingface.architectures import ARCHITECTURES, SAME, Architecture, Row
from megazero.huggingface.export import INDEX, WEIGHTS, shapes_of
from megazero.huggingface.tokenizer import read_tokenizer
from megazero.plan.layout.topology import Layout
from megazero.run.run_state import TOKENIZER, RunState, attached_tokenizer

WHOLE = slice(None)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Imported(NamedTuple):
    """Result of an import."""

    model: ModelConfig
    has_tokenizer: bool


class Source:
    """The safetensors of a Hugging Face folder, read one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        """ValueError if there are none, or their index names what is no file of the folder."""
        self.folder = folder
        index = folder / INDEX
        if index.is_file():
            content = read_json_object(index).get("weight_map")
            if not isinstance(content, dict) or not all(
                isinstance(file, str) and Path(file).name == file for file in content.values()
            ):
                raise ValueError(f"{index} has no weight_map of names to files of this folder")
            self.files: dict[str, str] = content
        elif (folder / WEIGHTS).is_file():
            with _opened(folder / WEIGHTS) as file:
                self.files = dict.fromkeys(file.keys(), WEIGHTS)
        else:
            pickles = sorted(path.name for path in folder.glob("*.bin"))
            found = f"only {pickles[0]}, a pickle, which could run code" if pickles else "none"
            raise ValueError(
                f"--from hf {folder}: expected {WEIGHTS} or {INDEX}, and found {found}; save the model with "
                "transformers' save_pretrained, which writes safetensors"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape. ValueError if the file cannot be read."""
        with _opened(self.folder / self.files[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def read(self, name: str, rows: slice = WHOLE) -> torch.Tensor:
        """The tensor, or rows of it, in its own dtype.

        Raises:
            ValueError: it cannot be read, or holds no floating-point numbers.
        """
        path = self.folder / self.files[name]
        with _opened(path) as file:
            found: torch.Tensor = file.get_tensor(name) if rows == WHOLE else file.get_slice(name)[rows]
        if found.dtype not in FLOATS:
            raise ValueError(
                f"{path}: {name} is of {str(found.dtype).removeprefix('torch.')}, a quantised weight perhaps; import a "
                "model in fp32, bf16 or fp16"
            )
        return found


class _opened:
    """A safetensors file; ValueErrors that name it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Any:
        try:
            os.close(open_regular(self.path))
            self.file = safe_open(self.path, "pt")
            return self.file.__enter__()
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.path} cannot be read: {error}") from None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.file.__exit__(kind, error, trace)
        if isinstance(error, SafetensorError):
            raise ValueError(f"{self.path} cannot be read: {error}") from None


def read_config(folder: Path) -> tuple[Architecture, ModelConfig]:
    """The model that config.json describes.

    Raises:
        ValueError: there is none, it is of another architecture, or it asks for what ours does not compute.
    """
    from transformers import AutoConfig

    if not folder.exists():
        raise ValueError(f"--from hf {folder}: no such folder{hub_hint(str(folder))}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"--from hf {folder}: it has no config.json; name the folder of a Hugging Face model")
    model_type = read_json_object(folder / "config.json").get("model_type")
    architecture = next((a for a in ARCHITECTURES.values() if a.model_type == model_type), None)
    if architecture is None:
        known = ", ".join(a.model_type for a in ARCHITECTURES.values())
        raise ValueError(f"--from hf {folder}: its model_type is {str(model_type)[:80]!r}; known are {known}")
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    try:
        return architecture, ModelConfig(**architecture.from_config(config))
    except ValueError as error:
        raise ValueError(f"--from hf {folder}: {error}") from None


def import_model(source: Path, output: Path, advance: Callable[[int], None] = lambda _: None) -> Imported:
    """Write the Hugging Face model `source` as checkpoint 0 of the folder `output`, which appears whole or not at all.

    The folder also has the model's tokenizer, and its flags as config.toml. Weights are fp32, as master weights are.
    One tensor is in memory at a time, of a table that is the same in both a band of rows.

    Args:
        advance: told the bytes of each tensor that is written.

    Raises:
        ValueError: `source` is not a model that this version computes, or `output` is there already.
    """
    architecture, model = read_config(source)
    files = Source(source)
    names = _theirs(architecture, model, files)
    shapes = {f"model.{name}": shape for name, shape in shapes_of(model).items()}
    with new_folder(output) as folder:
        (folder / TOKENIZER).mkdir()
        tokenizer = read_tokenizer(source, folder / TOKENIZER)
        spec = str(Path(output).absolute() / TOKENIZER) if tokenizer is not None else ""
        if tokenizer is None:
            (folder / TOKENIZER).rmdir()
        elif tokenizer.vocab_size > model.vocab_size:
            raise ValueError(
                f"--from hf {source}: its tokenizer has {tokenizer.vocab_size} tokens, and its model {model.vocab_size}"
            )
        config = Config(model=model, data=DataConfig(tokenizer=spec))
        flags = [field.name.replace("_", "-") for field in fields(model)] + ["tokenizer"] * bool(spec)
        write_atomically(folder / "config.toml", to_toml(config, flags).encode())
        tensors = _tensors(architecture, model, files, names, advance)
        saved, attached = attached_tokenizer(tokenizer)
        write_checkpoint(folder, 0, shapes, tensors, _state(config, saved).to_json(), attached)
    return Imported(model, tokenizer is not None)


def _state(config: Config, saved_tokenizer: str) -> RunState:
    saved = {"data": {"tokenizer": config.data.tokenizer}, "training": {"precision": "fp32"}}
    layout = asdict(Layout())
    model, run = asdict(config.model), uuid.uuid4().hex
    return RunState(0, 0, 0, None, model, layout, saved, run, weights_only=True, saved_tokenizer=saved_tokenizer)


def _theirs(architecture: Architecture, model: ModelConfig, files: Source) -> dict[str, str]:
    """Name of theirs -> the name that the files give it. ValueError unless they hold the model's tensors alone."""
    wanted = [theirs for name in shapes_of(model) for theirs in architecture.row(name).theirs]
    names = {name: name for name in wanted}
    if wanted[0] not in files.files:  # saved as the base model alone
        names = {name: name.removeprefix(architecture.prefix) for name in wanted}
    missing = [name for name in names.values() if name not in files.files]
    left = files.files.keys() - names.values() - {architecture.output}
    left = {name for name in left if not name.endswith(architecture.buffers)}
    if missing or left:
        raise ValueError(
            f"--from hf {files.folder} does not hold the tensors of its config.json: missing {_some(missing)}, "
            f"unknown {_some(sorted(left))}"
        )
    return names


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more if names else "none"


def _tensors(
    architecture: Architecture,
    model: ModelConfig,
    files: Source,
    names: dict[str, str],
    advance: Callable[[int], None],
) -> Iterator[Iterator[torch.Tensor]]:
    """Yield ours, one after another, each as bands of its rows."""
    for name, shape in shapes_of(model).items():
        row = architecture.row(name)
        wanted = row.form.split(torch.empty(shape, device="meta"), model)
        for each, expected in zip(row.theirs, wanted, strict=True):
            found = files.shape(names[each])
            if found != expected.shape:
                raise ValueError(
                    f"--from hf {files.folder}: {each} is {list(found)}, and config.json makes it "
                    f"{list(expected.shape)}"
                )
        theirs = functools.partial(_join, row, model, files, [names[each] for each in row.theirs])
        yield _checked(theirs, bands(shape) if row.form is SAME else [WHOLE], f"{files.folder}: {row.ours}", advance)


def _join(row: Row, model: ModelConfig, files: Source, names: list[str], rows: slice) -> torch.Tensor:
    return row.form.join([files.read(name, rows) for name in names], model)


def _checked(
    read: Callable[[slice], torch.Tensor], ranges: list[slice], name: str, advance: Callable[[int], None]
) -> Iterator[torch.Tensor]:
    """Yield ranges of rows of one of ours, in fp32. ValueError if a number is not finite."""
    for rows in ranges:
        ours = read(rows).to(torch.float32).contiguous()
        if not all(math.isfinite(float(end)) for end in torch.aminmax(ours)):  # without a temporary of its size
            raise ValueError(f"--from hf {name} holds values that are not finite")
        advance(ours.nbytes)
        yield ours
        del ours
