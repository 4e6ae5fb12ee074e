"""Import of a Hugging Face model as a checkpoint of weights alone, from which a run starts."""

import contextlib
import functools
import math
import os
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from megazero.checkpoint.streaming import bands, write_checkpoint
from megazero.engine.plan.layout.topology import Layout
from megazero.families.parts.model_types import MODULE, TABLE, HuggingFaceModel
from megazero.files import new_folder, open_regular, read_regular, write_atomically
from megazero.flags.config import Config, DataConfig, ModelConfig
from megazero.flags.flag_names import to_toml
from megazero.interop.huggingface.configuration import read_config
from megazero.interop.huggingface.export import INDEX, WEIGHTS, shapes_of
from megazero.interop.huggingface.tokenizer_files import read_tokenizer
from megazero.log import log
from megazero.run.run_state import TOKENIZER, RunState, attached_tokenizer
from megazero.typed_files import decode

WHOLE = slice(None)
NOT_TIED = (
    "{}: {} differs from the token table, although tie_word_embeddings is true in config.json; they are not tied "
    "(--untie-embeddings), as in transformers"
)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Index(msgspec.Struct):
    """model.safetensors.index.json: the file of each tensor, in the same folder."""

    weight_map: dict[str, Annotated[str, msgspec.Meta(pattern=r"\A[^/\\]+\Z")]]


class Source:
    """The safetensors of a Hugging Face folder, read one tensor at a time."""

    def __init__(self, folder: Path, where: str) -> None:
        """`where`: names the folder in messages. ValueError if there are none, or the index names a file elsewhere."""
        self.folder, self.where = folder, where
        self.shapes: dict[str, dict[str, tuple[int, ...]]] = {}  # file -> tensor -> shape
        index = folder / INDEX
        if index.is_file():
            self.files = decode(read_regular(index), Index, index).weight_map
        elif (folder / WEIGHTS).is_file():
            with _opened(folder / WEIGHTS) as file:
                self.files = dict.fromkeys(file.keys(), WEIGHTS)
        else:
            pickles = sorted(path.name for path in folder.glob("*.bin"))
            found = f"only {pickles[0]}, a pickle, which could run code" if pickles else "none"
            for name in (WEIGHTS, INDEX):
                if (folder / name).is_symlink():  # as in a hub cache whose blobs were deleted
                    raise ValueError(f"{where}: {name} is a link to a missing file; download the model again")
            raise ValueError(
                f"{where}: expected {WEIGHTS} or {INDEX}, and found {found}; save the model with "
                "transformers' save_pretrained, which writes safetensors"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. ValueError if the file cannot be read, or lacks it."""
        held = self.files[name]
        if held not in self.shapes:  # the header of a file takes milliseconds, and experts are thousands of tensors
            with _opened(self.folder / held) as file:
                self.shapes[held] = {each: tuple(file.get_slice(each).get_shape()) for each in file.keys()}
        if name not in self.shapes[held]:
            raise ValueError(f"{self.folder / held} has no {name}, which {INDEX} names")
        return self.shapes[held][name]

    def read(self, name: str, rows: slice = WHOLE) -> torch.Tensor:
        """Return a tensor, or rows of it. ValueError if it cannot be read, or is not floating-point."""
        path = self.folder / self.files[name]
        with _opened(path) as file:
            found: torch.Tensor = file.get_tensor(name) if rows == WHOLE else file.get_slice(name)[rows]
        if found.dtype not in FLOATS:
            raise ValueError(
                f"{path}: {name} is of {str(found.dtype).removeprefix('torch.')}, a quantised weight perhaps; import a "
                "model in fp32, bf16 or fp16"
            )
        return found


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; ValueError, naming it, if it cannot be opened or read."""
    try:
        os.close(open_regular(path))
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def import_model(source: Path, output: Path, advance: Callable[[int], None] = lambda _: None) -> bool:
    """Write the Hugging Face model `source` as checkpoint 0 of the folder `output`, which appears whole or not at all.

    The folder also has the model's tokenizer, and its flags as config.toml. Weights are fp32, as master weights are.
    One tensor is in memory at a time, or a band of its rows if it is the same in both.

    Args:
        advance: called with the bytes of each tensor or band.

    Returns:
        False if the model has no tokenizer.

    Raises:
        ValueError: this version cannot compute the model `source`, or `output` exists already.
    """
    architecture, model, notes = read_config(source)
    files = Source(source, f"--from hf {source}")
    if head := own_head(files, architecture, model):
        model, notes = replace(model, untie_embeddings=True), [*notes, NOT_TIED.format(files.where, head)]
    for note in notes:
        log.warning(note)
    model = replace(model, mtp_num_layers=modules_in(files, architecture, model))
    names = names_in(files, architecture, model)
    check_shapes(files, architecture, model, names)
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
        flags = {field.name.replace("_", "-") for field in fields(model)} | ({"tokenizer"} if spec else set())
        write_atomically(folder / "config.toml", to_toml(config, flags).encode())
        tensors = _tensors(architecture, model, files, names=names, advance=advance)
        saved, attached = attached_tokenizer(tokenizer)
        state = replace(
            _state(config, saved),
            expert_biases=read_biases(files, architecture, model, names),
            source_type=architecture.model_type,
        )
        write_checkpoint(folder, 0, shapes, tensors=tensors, state=state.to_json(), attached=attached)
    return tokenizer is not None


def _state(config: Config, saved_tokenizer: str) -> RunState:
    saved: dict[str, dict[str, Any] | str] = {
        "data": {"tokenizer": config.data.tokenizer},
        "training": {"precision": "fp32"},
    }
    layout = asdict(Layout())
    model, run = asdict(config.model), uuid.uuid4().hex
    return RunState(
        iteration=0,
        consumed_samples=0,
        updates=0,
        loss_scale=None,
        model=model,
        layout=layout,
        config=saved,
        run=run,
        weights_only=True,
        saved_tokenizer=saved_tokenizer,
        texts_begin=True,
    )


def modules_in(files: Source, architecture: HuggingFaceModel, model: ModelConfig) -> int:
    """Return the number of modules of multi-token prediction that the files hold."""
    name, found = MODULE + "projection.weight", 0
    held = {prefix + each for each in files.files for prefix in ("", architecture.prefix)}  # or of the base model alone
    while architecture.predicts and architecture.names(name.format(found), model)[0].theirs[0] in held:
        found += 1
    return found


def names_in(files: Source, architecture: HuggingFaceModel, model: ModelConfig) -> dict[str, str]:
    """Return their name -> its name in the files. ValueError unless these hold the model's tensors and no others."""
    if model.mtp_num_layers > (held_modules := modules_in(files, architecture, model)):
        raise ValueError(
            f"--mtp-num-layers {model.mtp_num_layers}: {files.where} holds {held_modules} modules of multi-token "
            "prediction; give at most as many"
        )
    shapes = shapes_of(model)
    first = architecture.names(next(iter(shapes)), model)[0].theirs[0]
    prefix = "" if first in files.files else architecture.prefix  # saved as the base model alone
    held = {prefix + name for name in files.files}
    wanted = (theirs for name in shapes for row in architecture.names(name, model, held) for theirs in row.theirs)
    names = {name: name.removeprefix(prefix) for name in (*wanted, *architecture.bias_names(model).values())}
    missing = [name for name in names.values() if name not in files.files]
    left = {name for name in files.files.keys() - names.values() if not name.endswith(architecture.buffers)}
    if architecture.further_layers:
        left = {name for name in left if _layer_of(name) < model.num_layers}
    if not missing and not model.untie_embeddings:
        left -= set(architecture.head_names())
        if head := own_head(files, architecture, model):
            raise ValueError(
                f"{files.where}: {head} differs from the token table, and --no-untie-embeddings would replace it; "
                "leave out --no-untie-embeddings"
            )
    if missing or left:
        raise ValueError(
            f"{files.where} does not hold the tensors of its config.json: missing {_some(missing)}, "
            f"unknown {_some(sorted(left))}"
        )
    return names


def _layer_of(name: str) -> int:
    """Return the number of the layer of one of their tensors; -1 outside layers."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def read_biases(
    files: Source, architecture: HuggingFaceModel, model: ModelConfig, names: dict[str, str]
) -> dict[str, list[float]]:
    """Return the biases of experts in the files by number of the layer, as `RunState` has them.

    Raises:
        ValueError: they are not finite, or not one for each expert.
    """
    found = {}
    for number, name in architecture.bias_names(model).items():
        values = files.read(names[name]).double()
        if values.shape != (model.num_experts,) or not bool(values.isfinite().all()):
            raise ValueError(f"{files.where}: {name} is not {model.num_experts} finite numbers, one for each expert")
        found[str(number)] = values.tolist()
    return found


def own_head(files: Source, architecture: HuggingFaceModel, model: ModelConfig) -> str:
    """Return the name of a head in the files that differs from the token table, although `model` ties them.

    transformers does not tie them then. Empty if there is none.
    """
    (table,) = architecture.names(TABLE, model)[0].theirs
    held = [name for name in architecture.head_names() if name in files.files]
    if model.untie_embeddings or not held or table not in files.files:
        return ""
    shape = files.shape(table)
    if files.shape(held[0]) == shape and all(
        torch.equal(files.read(table, rows), files.read(held[0], rows)) for rows in bands(shape)
    ):
        return ""
    return held[0]


def check_shapes(files: Source, architecture: HuggingFaceModel, model: ModelConfig, names: dict[str, str]) -> None:
    """Refuse tensors of other shapes than the model's. `names`: as `names_in` returns them."""
    shapes = shapes_of(model)
    for row in dict.fromkeys(row for name in shapes for row in architecture.names(name, model, names)):
        empty = [torch.empty(shapes[ours], device="meta")[row.rows] for ours in row.ours]
        wanted = row.form.split(empty, model)
        for each, expected in zip(row.theirs, wanted, strict=True):
            found = files.shape(names[each])
            if found != expected.shape:
                raise ValueError(
                    f"{files.where}: {each} is {list(found)}, and the model of config.json and the flags needs "
                    f"{list(expected.shape)}"
                )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more if names else "none"


def read_rows(
    files: Source, architecture: HuggingFaceModel, model: ModelConfig, names: dict[str, str], name: str, asked: slice
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the rows `asked` of our tensor, or all, in parts, each with the number of its first row.

    A part is an expert, if files hold experts apart. names: as `names_in` returns them.
    """
    for row in architecture.names(name, model, names):
        if row.expert is not None and not asked.start <= row.expert < asked.stop:
            continue
        rows, first = (asked, asked.start) if row.form.by_rows else (WHOLE, row.expert or 0)
        joined = row.form.join([files.read(names[each], rows) for each in row.theirs], model)
        yield first, joined[row.ours.index(name)]


def _tensors(
    architecture: HuggingFaceModel,
    model: ModelConfig,
    files: Source,
    names: dict[str, str],
    advance: Callable[[int], None],
) -> Iterator[Iterator[torch.Tensor]]:
    """Yield our tensors, one after another, each as bands of its rows in fp32. ValueError if a number is not finite."""

    def read(name: str, rows: slice) -> torch.Tensor:
        parts = [part.float() for _, part in read_rows(files, architecture, model, names=names, name=name, asked=rows)]
        ours = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        if not all(math.isfinite(float(end)) for end in torch.aminmax(ours)):  # allocates no tensor of its size
            raise ValueError(f"{files.where}: {name} holds values that are not finite")
        advance(ours.nbytes)
        return ours

    for name, shape in shapes_of(model).items():
        row = architecture.names(name, model, names)[0]
        in_parts = row.form.by_rows or row.expert is not None
        yield map(functools.partial(read, name), bands(shape) if in_parts else [slice(0, shape[0])])
