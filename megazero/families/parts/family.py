"""A family of models: all that is known of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

from megazero.engine.options.model_options import ModelOptions
from megazero.engine.options.option import Role
from megazero.families.parts.model_types import HuggingFaceModel, Options

_HINTS = get_type_hints(ModelOptions, include_extras=True)
# Fields of ModelOptions that each family sets. Of their flags --help lists --activation alone.
TRAITS = tuple(name for name, hint in _HINTS.items() if Role.TRAIT in getattr(hint, "__metadata__", ()))
DEFAULTS = {field.name: field.default for field in fields(ModelOptions)}


class Published(NamedTuple):
    """A published model of a family. A preset of its name has the same options.

    Attributes:
        weights: as transformers counts them; 0: it is ours, and was not published.
        sizes: layers, hidden size, heads, width of the MLP, groups of heads that share keys, vocabulary, context.
        others: further fields of ModelOptions that differ from the family's.
    """

    weights: int
    sizes: tuple[int, int, int, int, int, int, int]
    others: Mapping[str, Any] = MappingProxyType({})

    @property
    def options(self) -> Options:
        """Its fields of ModelOptions that differ from the family's."""
        names = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups")
        return {**dict(zip((*names, "vocab_size", "seq_length"), self.sizes, strict=True)), **self.others}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: its --architecture.
        options: fields of ModelOptions that differ from the defaults, TRAITS among them. A preset overrides them.
        models: its rows in transformers.
        published: by name, for tests.
        small: options of a small model for tests, each with a value that is no default.
        place: in lists of families. Those with the same are sorted by name.
    """

    name: str
    options: Options
    models: tuple[HuggingFaceModel, ...] = ()
    published: Mapping[str, Published] = field(default_factory=dict)
    small: Options = field(default_factory=dict)
    place: int = 100

    def __post_init__(self) -> None:
        rows = tuple(replace(row, architecture=self.name, traits=self.traits) for row in self.models)
        object.__setattr__(self, "models", rows)

    @property
    def traits(self) -> Options:
        """The values of TRAITS."""
        return {name: self.options.get(name, DEFAULTS[name]) for name in TRAITS}

    @property
    def trait_flags(self) -> Options:
        """The values of TRAITS by the names of their flags, without dashes."""
        return _by_flag(self.traits)

    @property
    def defaults(self) -> Options:
        """Its options by the names of their flags, without dashes."""
        return _by_flag(self.options)


def _by_flag(options: Options) -> Options:
    return {name.replace("_", "-"): value for name, value in options.items()}
