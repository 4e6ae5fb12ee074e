"""Packages that only some options need, imported at their use; a message names a missing one."""

import importlib.util
import sys
import traceback
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
OURS = ("megazero", "data_tools")


def load_optional(module: str, purpose: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: its name, such as `matplotlib.figure`.
        purpose: the flag or the file that needs it, which begins the message.

    Raises:
        ValueError: the package is not installed, with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{purpose}: {missing_package(error)}") from error


def require_optional(package: str, purpose: str) -> None:
    """Raise the ValueError of `load_optional` if a package is not installed; it is not imported yet."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{purpose}: {missing_package(ModuleNotFoundError(name=package))}")


def missing_package(error: ModuleNotFoundError) -> str:
    """Return one sentence for a package that could not be imported, with the command that installs it."""
    package = (error.name or "").partition(".")[0]
    if package in ("", *OURS) or (package != error.name and importlib.util.find_spec(package)):
        traceback.print_exception(error)  # the installation, or this code, is broken
        return f"lacks a Python module: {error}"
    if package in EXTRAS:
        way = f"pip install {package}, or, in a clone of megazero, pip install -e '.[{EXTRAS[package]}]'"
    else:
        way = "in a clone of megazero, pip install ., or bash scripts/quickstart.sh and then . .venv/bin/activate"
    return f"needs the Python package {package}, which is not installed for {sys.executable}; {way}"
