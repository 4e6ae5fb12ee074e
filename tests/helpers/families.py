"""Small models of all families."""

from dataclasses import replace
from typing import Any

from megazero.families import FAMILIES, with_traits
from megazero.flags.config import ModelConfig

# Families that transformers has -> options of a small model, each with a value that is no default
SMALL = {name: family.small for name, family in FAMILIES.items() if family.models}


def of_family(name: str) -> dict[str, Any]:
    """Return the options that make a model one of a family: its traits, without its other defaults."""
    return with_traits({"architecture": name})


def dense(name: str) -> dict[str, Any]:
    """Return the options of a family without experts."""
    return {option: v for option, v in SMALL[name].items() if option != "num_experts" and "moe_" not in option}


def family(name: str, model: ModelConfig) -> ModelConfig:
    """Return the model of a family with the sizes of `model`."""
    return replace(model, **of_family(name), **SMALL[name])
