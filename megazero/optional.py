"""Packages that only some options need: imported where they are used, and asked for by name where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

# Package to install -> the extra of megazero that brings it, as pyproject.toml lists them.
EXTRAS = {
    "transformers": "hf",
    "sentencepiece": "hf",
    "tiktoken": "hf",
    "matplotlib": "plots",
    "tensorboard": "plots",
    "wandb": "wandb",
    "datasets": "data",
    "pyarrow": "data",
    "gigatoken": "data",
    "isal": "data",
}


def load_optional(module: str, purpose: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: its name, such as `matplotlib.figure`.
        purpose: what needs it: the flag or the file, which begins the message.

    Raises:
        ValueError: the package is not installed, with the command that installs it.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or package
        if missing.partition(".")[0] in (package, "megazero"):
            missing = package
        raise ValueError(
            f"{purpose}: needs the Python package {missing}, which is not installed; "
            f"pip install 'megazero[{EXTRAS[package]}]' brings it (from a clone: pip install -e '.[{EXTRAS[package]}]')"
        ) from error
