"""`Progress` of a run, and `RunState`: state.json of a checkpoint, which a schema parses."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megazero import checkpoint
from megazero.checkpoint import Damaged
from megazero.config.architectures import ARCHITECTURES
from megazero.config.schema import Config, ModelConfig
from megazero.config.validate import check_values
from megazero.data.tokenizer import Tokenizer, beside, load_tokenizer, pack

TOKENIZER = "tokenizer"  # folder of the tokenizer in a checkpoint


@dataclass
class Progress:
    """Progress of a run; saved with every checkpoint."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_in_a_row: int = 0  # iterations without an update, up to this one


@dataclass(frozen=True)
class RunState:
    """Progress of a run when it was saved, and its identity."""

    iteration: int
    consumed_samples: int
    updates: int  # optimizer steps, for the bias correction; skipped iterations made none
    loss_scale: dict[str, Any] | None  # value, left and good of `optimization.LossScale`
    model: dict[str, Any]  # fields of ModelConfig
    layout: dict[str, Any]
    config: dict[str, Any]  # group -> options, as in Config
    run: str = ""  # identifies the run that wrote it, over all its resumes in one folder
    sound: bool = True  # False: the last iterations before it made no update
    skipped_in_a_row: int = 0
    fingerprints: tuple[str, ...] = ()  # of the corpora of --data-path, in order
    weights_only: bool = False  # imported: there are no moments to go on with
    saved_tokenizer: str = ""  # SPEC of the tokenizer in the checkpoint, its path relative to the folder; "": none

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"fingerprints": list(self.fingerprints)}

    @classmethod
    def read(cls, path: Path, group: Any = None) -> RunState:
        """Read the state in checkpoint folder `path`; all ranks of `group` call it, and rank 0 reads.

        Raises:
            Damaged: it cannot be read, or is not what a run writes.
        """
        content = checkpoint.read_state(path, group)
        try:
            return cls.parse(content)
        except ValueError as error:
            raise Damaged(f"--load {path}: state.json is damaged: {error}; load another checkpoint") from None

    @classmethod
    def parse(cls, content: dict[str, Any]) -> RunState:
        """ValueError, saying what is wrong, unless every field is there and of its type. Others are left out."""
        for name in ("iteration", "consumed_samples", "updates"):
            if name not in content:
                raise ValueError(f"it lacks {name!r}")
        known = {field.name: content[field.name] for field in fields(cls) if field.name in content}
        for name in ("iteration", "consumed_samples", "updates", "skipped_in_a_row"):
            _require(_is_count(known.get(name, 0)), name, "a whole number")
        for name in ("model", "layout", "config"):
            _require(isinstance(known.get(name), dict), name, "an object")
        for group, options in known["config"].items():
            _require(isinstance(options, (dict, str)), f"config.{group}", "an object")
        _require(isinstance(known.get("run", ""), str), "run", "a text")
        copy = known.get("saved_tokenizer", "")
        _require(isinstance(copy, str) and _SAVED.fullmatch(copy) is not None, "saved_tokenizer", "of the folder")
        for name in ("sound", "weights_only"):
            _require(isinstance(known.get(name, True), bool), name, "true or false")
        prints = known.get("fingerprints", [])
        _require(isinstance(prints, list) and all(isinstance(p, str) and p.count(":") == 1 for p in prints), *_PRINTS)
        scale = known.get("loss_scale")
        if scale is not None:
            _require(isinstance(scale, dict) and _is_scale(scale), "loss_scale", "an object with value, left and good")
        return cls(**known | {"loss_scale": scale, "fingerprints": tuple(prints)})

    def model_config(self, path: Path) -> ModelConfig:
        """The model of the checkpoint `path`, which this state was read from.

        Raises:
            ValueError: it is not what this version's ModelConfig holds, or no model can have these sizes.
        """
        defaults = asdict(ModelConfig())
        for name, value in self.model.items():
            default = defaults.get(name)
            if type(value) is not type(default) and not (isinstance(default, float) and type(value) is int):
                fault = "another type than" if name in defaults else "no meaning in"
                raise ValueError(f"--load {path}: the model's option {name[:80]!r} has {fault} this version knows")
        model = ModelConfig(**self.model)
        if model.architecture not in ARCHITECTURES or not model.vocab_size:
            raise ValueError(
                f"--load {path}: state.json describes no model: --architecture {model.architecture[:80]} with "
                f"--vocab-size {model.vocab_size}; load another checkpoint"
            )
        try:
            check_values(replace(Config(), model=model))
        except ValueError as error:
            raise ValueError(f"--load {path}: state.json describes no model: {error}") from None
        return model

    def tokenizer(self, path: Path) -> str:
        """Return the --tokenizer that reads the run's: its copy in the checkpoint `path`, or what the run was given.

        "": the run had none.
        """
        data = self.config.get("data")
        spec = data.get("tokenizer") if isinstance(data, dict) else None
        return beside(self.saved_tokenizer, path) if self.saved_tokenizer else spec if isinstance(spec, str) else ""

    @property
    def master_precision(self) -> str:
        """The type of the checkpoint's weights, fp64 or fp32, as --precision names it."""
        training = self.config.get("training")
        return "fp64" if isinstance(training, dict) and training.get("precision") == "fp64" else "fp32"


def attached_tokenizer(tokenizer: Tokenizer | None) -> tuple[str, dict[str, bytes]]:
    """A run's tokenizer as `RunState.saved_tokenizer` and the files to attach to its checkpoints; empty for None."""
    if tokenizer is None:
        return "", {}
    spec, files = pack(tokenizer)
    return spec.replace("{}", TOKENIZER), {f"{TOKENIZER}/{name}": content for name, content in files.items()}


def run_tokenizer(path: Path, state: RunState) -> Tokenizer:
    """Load the tokenizer of the run that saved the checkpoint `path`.

    Raises:
        ValueError: the run had none, or what it was given cannot be read here, and the checkpoint holds no copy.
    """
    spec = state.tokenizer(path)
    if not spec:
        raise ValueError(f"--load {path}: that run had no tokenizer; give --tokenizer")
    try:
        return load_tokenizer(spec)
    except ValueError as error:
        if state.saved_tokenizer:
            raise
        raise ValueError(
            f"--load {path} has no copy of its run's tokenizer, as newer ones have, and {error}; give --tokenizer"
        ) from None


def is_hugging_face(folder: Path) -> bool:
    """Return whether `folder` holds a model that transformers saved; a run writes config.toml."""
    return (folder / "config.json").is_file()


def other_folder(folder: Path) -> str:
    """Say what to give instead of a `folder` without a checkpoint."""
    if is_hugging_face(folder):
        return (
            "it is a Hugging Face model, which becomes a checkpoint first: python scripts/checkpoint.py import "
            f"--from hf {folder} --output DIR"
        )
    return "give the --save folder of a run, or one of its iter_NNNNNNN"


def tokenizer_for(spec: str, path: Path, state: RunState, vocab_size: int) -> Tokenizer:
    """Load --tokenizer `spec`, or the run's own where it is empty, for the model in the checkpoint `path`.

    Args:
        vocab_size: the model's.

    Raises:
        ValueError: as `run_tokenizer`; or `spec` has not as many tokens as the run's own, or more than the model.
    """
    if not spec:
        return run_tokenizer(path, state)
    tokenizer = load_tokenizer(spec)
    found = f"--tokenizer {spec} has {tokenizer.vocab_size:,} tokens"
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"{found}, and the model {vocab_size:,}; name the tokenizer that the run was trained with")
    own = run_tokenizer(path, state) if state.saved_tokenizer else None
    if own is not None and own.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"{found}, and the one of the run, {own.spec}, {own.vocab_size:,}: its ids mean something else to the "
            "model; leave --tokenizer out to use the run's"
        )
    return tokenizer


_SAVED = re.compile(r"(byte|((sentencepiece|tiktoken):)?tokenizer(/[A-Za-z0-9_.-]+)?)?")
_PRINTS = ("fingerprints", "a list of fingerprints")


def _require(holds: bool, name: str, kind: str) -> None:
    if not holds:
        raise ValueError(f"its {name[:80]!r} is not {kind}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_scale(scale: dict[str, Any]) -> bool:
    value = scale.get("value")
    positive = type(value) in (int, float) and math.isfinite(value) and value > 0
    return positive and _is_count(scale.get("left")) and _is_count(scale.get("good"))
