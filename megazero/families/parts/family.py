"""A family of models."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from megazero.engine.options.model_options import ModelConfig
from megazero.engine.options.option import Role

_HINTS = get_type_hints(ModelConfig, include_extras=True)
# Fields of ModelConfig that each family sets. Of their flags --help lists --activation alone.
TRAITS = tuple(name for name, hint in _HINTS.items() if Role.TRAIT in getattr(hint, "__metadata__", ()))
DEFAULTS = {field.name: field.default for field in fields(ModelConfig)}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: its --architecture.
        options: fields of ModelConfig whose defaults differ for it. A preset overrides them.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def traits(self) -> dict[str, Any]:
        """The values of TRAITS."""
        return {name: self.options.get(name, DEFAULTS[name]) for name in TRAITS}

    @property
    def trait_flags(self) -> dict[str, Any]:
        """The values of TRAITS by the names of their flags, without dashes."""
        return {name.replace("_", "-"): value for name, value in self.traits.items()}

    @property
    def defaults(self) -> dict[str, Any]:
        """Its options by the names of their flags, without dashes."""
        return {name.replace("_", "-"): value for name, value in self.options.items()}
