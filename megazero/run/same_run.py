"""Values that all ranks of a run must have in common, as text that `cluster.same_start.agree` compares."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

import megazero
from megazero.data.corpora import Datasets, parse_data_path, read_data_args
from megazero.data.tokenizer import Tokenizer
from megazero.engine.options.option import Role
from megazero.flags.config import Config
from megazero.flags.flag_names import flags, flags_with, value_of
from megazero.flags.stages import DataStage

# Only rank 0 writes logs; data, tokenizers and tasks are compared by their content.
LOCAL_FLAGS = flags_with(Role.LOCAL)


def run_values(
    config: Config,
    datasets: Datasets,
    tokenizer: Tokenizer | None,
    stages: Sequence[tuple[DataStage, Datasets]] = (),
    tasks: str = "",
) -> dict[str, str]:
    """Return the values to compare, by their names in messages. `config` is resolved.

    They include --save and --load, which name folders that all ranks share.

    Args:
        stages: the second one and later ones, with their data.
        tasks: a hash of the files of --tasks; empty without them.
    """
    values = {f"--{name}": str(value_of(config, name)) for name in flags() if name not in LOCAL_FLAGS}
    data = config.data
    words = () if data.mock_data else data.data_path or read_data_args(data.data_args_path)
    weights = [weight for weight, _ in parse_data_path(words)] if words else []
    for number, (weight, content) in enumerate(zip(weights, datasets.fingerprints(), strict=True), 1):
        values[f"the weight of --data-path's corpus {number}"] = "by tokens" if weight is None else str(weight)
        values[f"the content of --data-path's corpus {number}"] = content
    for stage, later in stages:
        values[f"stage {stage.number} of --data-stages"] = f"from sample {stage.first}: {stage.values}"
        values[f"the content of stage {stage.number}'s corpora"] = str(later.fingerprints())
    values["the content of --tokenizer"] = tokenizer.identity if tokenizer is not None else "none"
    values["the content of --tasks"] = tasks or "none"
    values["megazero's code"] = code_digest(Path(megazero.__file__).parent)
    values["torch's version"] = torch.__version__
    return values


def code_digest(folder: Path) -> str:
    """Return a hash of all Python files below `folder`, with their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
