"""Families of models: a file each, which has all that is known of a family. To add one: docs/extending.md."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping

from megazero.families.parts.family import TRAITS as TRAITS
from megazero.families.parts.family import Family as Family
from megazero.families.parts.model_types import HuggingFaceModel, Options


def _families() -> Iterator[Family]:
    """Yield FAMILY of each file of this folder."""
    for module in pkgutil.iter_modules(__path__):
        if not module.ispkg:
            yield importlib.import_module(f"{__name__}.{module.name}").FAMILY


FAMILIES: Mapping[str, Family] = {
    family.name: family for family in sorted(_families(), key=lambda family: (family.place, family.name))
}
# The classes of transformers, by model_type
MODELS: Mapping[str, HuggingFaceModel] = {row.model_type: row for family in FAMILIES.values() for row in family.models}


def with_traits(model: Options) -> Options:
    """Return fields of ModelOptions with the traits of their family, where they are missing or --activation is auto."""
    family = FAMILIES.get(str(model.get("architecture", "gpt2")))
    given = {name: value for name, value in model.items() if (name, value) != ("activation", "auto")}
    return (family.traits if family else {}) | given
