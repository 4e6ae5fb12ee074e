"""Values that all ranks of a run must have in common, as text that `comm.launch.agreement.agree` compares."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

import megazero
from megazero.config.flags import flags, value_of
from megazero.config.schema import Config
from megazero.data.corpora import Datasets, parse_data_path, read_data_args
from megazero.data.tokenizer import Tokenizer

# Flags that may differ between ranks. Only rank 0 writes logs. A preset's name says nothing once its values are there.
# Processes that read ahead, and where a node keeps its copy of the data and of the tokenizer, change no result: both
# are compared by content.
LOCAL_FLAGS = {
    *("log-dir", "log-interval", "tensorboard-dir", "wandb-project", "wandb-name", "preset"),
    *("num-workers", "data-path", "data-args-path", "tokenizer"),
}


def run_values(config: Config, datasets: Datasets, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Return the values to compare, by the name that a message gives them. `config` is resolved.

    --save and --load must be the same: both name one folder that all ranks share.
    """
    values = {f"--{name}": str(value_of(config, name)) for name in flags() if name not in LOCAL_FLAGS}
    data = config.data
    words = () if data.mock_data else data.data_path or read_data_args(data.data_args_path)
    weights = [weight for weight, _ in parse_data_path(words)] if words else []
    for number, (weight, content) in enumerate(zip(weights, datasets.fingerprints(), strict=True), 1):
        values[f"the weight of --data-path's corpus {number}"] = "by tokens" if weight is None else str(weight)
        values[f"the content of --data-path's corpus {number}"] = content
    values["the content of --tokenizer"] = tokenizer.identity if tokenizer is not None else "none"
    values["megazero's code"] = code_digest(Path(megazero.__file__).parent)
    values["torch's version"] = torch.__version__
    return values


def code_digest(folder: Path) -> str:
    """A hash of all Python files below `folder`, with their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
