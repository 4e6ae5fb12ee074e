"""Find the model of --hf-config, or of a Hugging Face folder as --load, for the command line."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megazero.families import FAMILIES
from megazero.flags.cli import ModelFlags
from megazero.flags.config import ModelConfig

if TYPE_CHECKING:
    from megazero.families.parts.model_types import HuggingFaceModel


class _ResumedModel(NamedTuple):
    """The model of a run that is resumed, as its checkpoint has it."""

    source: str  # the config.json from which it came, as it was named
    digest: str
    model: ModelConfig
    tokenizer: str


def find_model(hf_config: str, loads: list[str]) -> ModelFlags | None:
    """Return the flags of the model that a command line names by a config.json; None if it names none.

    A run that resumes has the model of its checkpoint: config.json may have changed, or be gone, and need not be named
    again. A batch script may resume by one more --load behind its own.

    Args:
        hf_config: value of --hf-config; empty: none.
        loads: values of --load, the last one last.

    Raises:
        ValueError: config.json cannot be read, or asks for another computation than ours; or --hf-config and the folder
            of --load describe different models.
    """
    folders = [load for load in loads if (Path(load) / "config.json").is_file()]
    if not (hf_config or loads):
        return None
    from megazero.interop.huggingface.configuration import config_file, read_config
    from megazero.interop.huggingface.tokenizer_files import has_tokenizer

    source = hf_config or (folders[-1] if folders else "")
    if loads and loads[-1] not in folders:
        saved = _resumed_model(loads[-1], folders)
        if saved is not None and (not source or saved.source in (hf_config, *loads)):
            return _resumed(saved)
    if not source:
        return None
    start = time.perf_counter()
    architecture, model, notes = read_config(Path(source), "--hf-config" if hf_config else "--load")
    seconds = time.perf_counter() - start
    if loads[-1:] == folders[-1:] != []:
        if hf_config:
            _require_equal(source, model, folders[-1], read_config(Path(folders[-1]), "--load").model)
        if untied := _not_tied(Path(folders[-1]), architecture, model):
            model, notes = replace(model, untie_embeddings=True), [*notes, untied]
    note = f"the model is that of {config_file(Path(source))} (read by transformers in {seconds:.1f} s)"
    tokenizer = str(config_file(Path(source)).parent) if has_tokenizer(config_file(Path(source)).parent) else ""
    return _flags(source, model, tokenizer, [note, *notes])


def _not_tied(folder: Path, architecture: HuggingFaceModel, model: ModelConfig) -> str:
    """Return the note that a head and the token table are not tied, since their values differ; empty if it is not so.

    The weights of `folder` are read if they hold both, and only then.
    """
    from megazero.interop.huggingface.importing import NOT_TIED, Source, own_head

    flag = f"--load {folder}"
    try:
        head = own_head(Source(folder, flag), architecture, model)
        return NOT_TIED.format(flag, head) if head else ""
    except ValueError:  # without weights, a plan needs none, and a run is refused when it loads them
        return ""


def _resumed(saved: _ResumedModel) -> ModelFlags:
    from megazero.run.run_state import source_digest

    digest = source_digest(saved.source)
    change = "has changed" if digest else "is gone"
    note = f"{saved.source} {change} since this run began; the model is that of the checkpoint"
    return _flags(saved.source, saved.model, saved.tokenizer, [] if digest == saved.digest else [note])


def _flags(source: str, model: ModelConfig, tokenizer: str, notes: list[str]) -> ModelFlags:
    traits = FAMILIES[model.architecture].traits.items()  # --architecture sets them
    values = {name.replace("_", "-"): value for name, value in asdict(model).items() if (name, value) not in traits}
    return ModelFlags(source, values, tokenizer, notes)


def _resumed_model(load: str, folders: list[str]) -> _ResumedModel | None:
    """Return the model of the checkpoint that --load names, if it came from a config.json.

    Raises:
        ValueError: there is no checkpoint, and earlier values of --load name `folders` of Hugging Face.
    """
    from megazero import checkpoint
    from megazero.checkpoint.manifest import unchecked_state
    from megazero.run.run_state import RunState

    found = [Path(load)] if Path(load).name.startswith("iter_") else checkpoint.checkpoints(Path(load))[::-1]
    if folders and not found:
        raise ValueError(
            f"--load {load} holds no checkpoint, and is given last, so that --load {folders[-1]} has no effect; "
            "leave out one of them"
        )
    for folder in found:
        try:
            state = RunState.parse(unchecked_state(folder))
            model = state.typed_model(folder)
        except ValueError:  # damaged: another checkpoint of the run has the same model
            continue
        source = state.config.get("hf_config", "")
        return _ResumedModel(str(source), state.source_digest, model, state.tokenizer(folder)) if source else None
    return None


def _require_equal(source: str, model: ModelConfig, folder: str, other: ModelConfig) -> None:
    """Refuse a --hf-config that is not the model of the folder whose weights are loaded."""
    theirs = asdict(other)
    found = [f"--{name.replace('_', '-')} {value}, not {theirs[name]}" for name, value in asdict(model).items()
             if value != theirs[name]]  # fmt: skip
    if found:
        raise ValueError(
            f"--hf-config {source} describes another model than --load {folder}: {'; '.join(found)}; leave out "
            "--hf-config to train the model of the folder, or --load to begin from random weights"
        )
