"""`Progress` of a run, and `RunState`: the contents of a checkpoint's state.json."""

import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self, TypedDict

import msgspec
from msgspec import Meta

from megazero import checkpoint
from megazero.checkpoint import Damaged
from megazero.checkpoint.folders import names_checkpoint
from megazero.checkpoint.manifest import read_state_file
from megazero.data.tokenizer import Tokenizer, beside, load_tokenizer, pack
from megazero.engine.step.optimization import learning_rate
from megazero.families import with_traits
from megazero.files import read_json_object
from megazero.flags.config import Config, ModelConfig, OptimizerConfig
from megazero.flags.validate import check_values

TOKENIZER = "tokenizer"  # folder of the tokenizer in a checkpoint
SAVED_TOKENIZER = r"^((byte|((sentencepiece|llama2|megatron|tiktoken):)?tokenizer(/[A-Za-z0-9_.-]+)?)?)\Z"
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Fingerprint = Annotated[str, Meta(pattern=r"^[^:]*:[^:]*\Z")]


@dataclass
class Progress:
    """Progress of a run; saved with every checkpoint."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_in_a_row: int = 0  # iterations without an update, up to this one


class SavedScale(TypedDict):
    """The state of `optimization.LossScale`."""

    value: Annotated[float, Meta(gt=0, le=sys.float_info.max)]
    left: Count
    good: Count


@dataclass(frozen=True)
class RunState:
    """Progress of a run when it was saved, and its identity. Checkpoints of earlier versions lack later fields."""

    iteration: Count
    consumed_samples: Count
    updates: Count  # optimizer steps, for the bias correction; skipped iterations made none
    loss_scale: SavedScale | None
    model: dict[str, Any]  # fields of ModelConfig
    layout: dict[str, Any]
    config: dict[str, dict[str, Any] | str]  # group -> options, as in Config
    run: str = ""  # identifies the run that wrote it, over all its resumes in one folder
    sound: bool = True  # False: the last iterations before it made no update
    skipped_in_a_row: Count = 0
    fingerprints: tuple[Fingerprint, ...] = ()  # of the corpora of --data-path, in order
    weights_only: bool = False  # imported: there are no optimizer states to resume from
    saved_tokenizer: Annotated[str, Meta(pattern=SAVED_TOKENIZER)] = ""  # SPEC in the checkpoint; "": none
    stage: Count = 0  # the first sample of the stage that wrote it
    averages: Count = 0  # changes of the running average of the weights so far
    source_digest: str = ""  # of the config.json from which the model came, config["hf_config"]
    source_type: str = ""  # its model_type, which an export has again
    texts_begin: bool = False  # as saved_tokenizer puts it; earlier versions put nothing before a text
    # layer -> biases of its experts, of --moe-router-enable-expert-bias
    expert_biases: dict[str, list[Finite]] = field(default_factory=dict)

    @property
    def optimizer(self) -> str:
        """--optimizer of the run; versions without the flag had AdamW alone."""
        options = self.config.get("optimizer", {})
        return options.get("optimizer", "adamw") if isinstance(options, dict) else "adamw"

    @property
    def has_average(self) -> bool:
        """The checkpoint has a running average of the weights."""
        options = self.config.get("optimizer", {})
        return isinstance(options, dict) and bool(options.get("ema_interval")) and not self.weights_only

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"fingerprints": list(self.fingerprints)}

    @classmethod
    def read(cls, path: Path, group: Any = None) -> Self:
        """Read the state in checkpoint folder `path`; all ranks of `group` call it, and rank 0 reads.

        Raises:
            Damaged: it cannot be read, or a field is missing or of another type.
        """
        return cls.of(path, checkpoint.read_state(path, group))

    @classmethod
    def read_alone(cls, path: Path) -> Self:
        """Read as `read`, in this process alone."""
        return cls.of(path, read_state_file(path))

    @classmethod
    def of(cls, path: Path, content: dict[str, Any]) -> Self:
        """Return the state in parsed JSON of the checkpoint `path`; Damaged as `read`."""
        try:
            return cls.parse(content)
        except ValueError as error:
            raise Damaged(f"--load {path}: state.json is damaged: {error}; load another checkpoint") from None

    @classmethod
    def parse(cls, content: dict[str, Any]) -> Self:
        """Return the state in parsed JSON; ValueError names the field that is missing or of another type."""
        try:
            return msgspec.convert({"loss_scale": None} | content, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None

    def typed_model(self, path: Path) -> ModelConfig:
        """Return the model of the checkpoint `path`, to which this state belongs.

        Raises:
            ValueError: an option is unknown to this version.
            Damaged: an option has a value that no model can have.
        """
        unknown = self.model.keys() - asdict(ModelConfig()).keys()
        if unknown:
            raise ValueError(f"--load {path}: this version does not know the model's option {min(unknown)[:80]!r}")
        try:
            model = msgspec.convert(with_traits(self.model), ModelConfig)
            check_values(replace(Config(), model=model))
            return model
        except ValueError as error:  # msgspec's too
            raise Damaged(f"--load {path}: state.json describes no model: {error}") from None

    def model_config(self, path: Path) -> ModelConfig:
        """Return the model of the checkpoint `path`, as `typed_model`.

        Raises:
            ValueError: see `typed_model`; also if it has no vocabulary.
        """
        model = self.typed_model(path)
        if not model.vocab_size:
            raise ValueError(f"--load {path}: state.json describes no model: --vocab-size 0")
        return model

    def tokenizer(self, path: Path) -> str:
        """Return the --tokenizer SPEC of the run: of its copy in the checkpoint `path`, or else as given; "": none."""
        if self.saved_tokenizer:
            return beside(self.saved_tokenizer, path)
        spec = self._option("data", "tokenizer")
        return spec if isinstance(spec, str) else ""

    @property
    def master_precision(self) -> str:
        """The --precision of the checkpoint's weights: fp64 or fp32."""
        return "fp64" if self._option("training", "precision") == "fp64" else "fp32"

    @property
    def saved_rate(self) -> float | None:
        """The learning rate of the saved iteration; None if the state has no schedule, as that of weights alone."""
        try:
            schedule = msgspec.convert(self.config["optimizer"], OptimizerConfig)
            return learning_rate(schedule, max(1, self.iteration))
        except (KeyError, ValueError, ArithmeticError):  # msgspec's are ValueErrors
            return None

    def _option(self, group: str, name: str) -> object:
        options = self.config.get(group)
        return options.get(name) if isinstance(options, dict) else None


def attached_tokenizer(tokenizer: Tokenizer | None) -> tuple[str, dict[str, bytes]]:
    """Return a tokenizer as `RunState.saved_tokenizer` and the files to attach to checkpoints; empty for None."""
    if tokenizer is None:
        return "", {}
    spec, files = pack(tokenizer)
    return spec.replace("{}", TOKENIZER), {f"{TOKENIZER}/{name}": content for name, content in files.items()}


def run_tokenizer(path: Path, state: RunState) -> Tokenizer:
    """Load the tokenizer of the run that saved the checkpoint `path`.

    Raises:
        ValueError: the run had none; or the checkpoint holds no copy, and the run's own cannot be read here.
    """
    spec = state.tokenizer(path)
    if not spec:
        raise ValueError(f"--load {path}: that run had no tokenizer; give --tokenizer")
    try:
        found = load_tokenizer(spec)
        return found if state.texts_begin or state.config.get("hf_config") else found.prepending(False)
    except ValueError as error:
        if state.saved_tokenizer:
            raise
        raise ValueError(f"--load {path} has no copy of its run's tokenizer, and {error}; give --tokenizer") from None


def source_digest(source: str) -> str:
    """Return a hash of --hf-config, a config.json or its folder; empty if there is none."""
    file = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if source and file.is_file() else ""


def source_type(source: str) -> str:
    """Return the model_type of --hf-config; empty if there is none, or it cannot be read."""
    if not source:
        return ""
    try:
        found = read_json_object(Path(source) / "config.json" if Path(source).is_dir() else Path(source))
    except (OSError, ValueError):
        return ""
    return str(found.get("model_type", ""))


def is_hugging_face(folder: Path) -> bool:
    """Return whether `folder` holds a model of transformers, and no checkpoints."""
    return (folder / "config.json").is_file() and not names_checkpoint(folder)


def other_folder(folder: Path) -> str:
    """Return the advice for a `folder` without a checkpoint."""
    if is_hugging_face(folder):
        return (
            "it is a Hugging Face model: pretrain_gpt.py trains it, and python scripts/checkpoint.py import "
            f"--from hf {folder} --output DIR makes a checkpoint of it"
        )
    return "give the --save folder of a run, or one of its iter_NNNNNNN"


def tokenizer_for(spec: str, path: Path, state: RunState, vocab_size: int) -> Tokenizer:
    """Load --tokenizer `spec`, or the run's own if it is empty, for the model in the checkpoint `path`.

    Args:
        vocab_size: the model's.

    Raises:
        ValueError: as `run_tokenizer`; or `spec` and the run's own differ in size, or it exceeds the model's.
    """
    if not spec:
        return run_tokenizer(path, state)
    tokenizer = load_tokenizer(spec)
    found = f"--tokenizer {spec} has {tokenizer.vocab_size:,} tokens"
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(f"{found}, and the model {vocab_size:,}; give the tokenizer of its training run")
    own = run_tokenizer(path, state) if state.saved_tokenizer else None
    if own is not None and own.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"{found}, and the one of the run, {own.spec}, {own.vocab_size:,}: the model knows other ids; leave "
            "--tokenizer out to use the run's"
        )
    return tokenizer


def require_ids(where: str, encoded: Iterable[Sequence[int]], tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ValueError for a token that the model lacks: the run's own tokenizer may have more tokens than it."""
    beyond = {number for ids in encoded for number in ids if number >= vocab_size}
    if beyond:
        raise ValueError(
            f"{where}: the token {tokenizer.shown(min(beyond))} of --tokenizer {tokenizer.spec} is not among the "
            f"{vocab_size:,} of the model; leave it out"
        )
