"""Packages that only some options need, imported at their use; a message names a missing one."""

import importlib.util
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
    if package not in EXTRAS:
        traceback.print_exception(error)  # not an optional package: the installation, or this code, is broken
        return f"lacks a Python module: {error}"
    extra = EXTRAS[package]
    return (
        f"needs the Python package {package}, which is not installed; pip install {package}, or, in a clone of "
        f"megazero, pip install -e '.[{extra}]'"
    )
