"""--help in two lengths: the flags of a normal run, and all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import textwrap
import typing
from collections.abc import Mapping
from typing import Annotated, Any

# The flags of a normal run, in the order in which one thinks of them.
NORMAL = {
    "data": ("data-path", "tokenizer"),
    "model": ("preset", "num-layers", "hidden-size", "num-attention-heads", "seq-length"),
    "batch": ("micro-batch-size", "global-batch-size", "train-iters", "precision"),
    "parallelism": ("tensor-model-parallel-size", "pipeline-model-parallel-size", "zero-stage"),
    "learning_rate": ("lr", "lr-warmup-iters", "lr-decay-style"),
    "saving": ("save", "load"),
    "logging": ("log-dir",),
}


def show_normal(config: Any, groups: Mapping[str, str], program: str) -> None:
    """Print the help of the flags of a normal run, and the names of the others.

    Args:
        config: a configuration of defaults.
        groups: all flags of the configuration's groups -> their group.

    Raises:
        SystemExit: always, with code 0.
    """
    import tyro

    def declare(flag: str) -> tuple[str, Any, Any]:
        owner, name = getattr(config, groups[flag]) if flag in groups else config, flag.replace("-", "_")
        kind: Any = typing.get_type_hints(type(owner))[name]
        annotated = Annotated[kind, tyro.conf.arg(help=_help(type(owner), name))]
        return name, annotated, dataclasses.field(default=getattr(owner, name))

    made = {title: dataclasses.make_dataclass(title, map(declare, names)) for title, names in NORMAL.items()}
    normal = dataclasses.make_dataclass(
        "Normal", [(title, cls, dataclasses.field(default_factory=cls)) for title, cls in made.items()]
    )
    count, about = sum(map(len, NORMAL.values())), inspect.cleandoc(type(config).__doc__ or "")
    description = (
        f"{about}\n\nThese are the {count} flags of a normal run; --help-all shows all {len(groups) + 1}. Flags of "
        "Megatron-LM, DeepSpeed and Hugging Face are understood: docs/megatron.md."
    )
    with contextlib.suppress(SystemExit):
        config_of_parser = (tyro.conf.OmitArgPrefixes,)
        tyro.cli(normal, args=["--help"], prog=program, description=description, config=config_of_parser)
    usual = {flag for names in NORMAL.values() for flag in names}
    print("The other flags, which --help-all explains:")
    wrapper = textwrap.TextWrapper(80, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    for group in dict.fromkeys(groups.values()):
        names = " ".join(f"--{flag}" for flag, owner in groups.items() if owner == group and flag not in usual)
        print(wrapper.fill(f"{group}: {names}"))
    sys.exit(0)


def _help(cls: type, name: str) -> str:
    import docstring_parser

    params = docstring_parser.parse_from_object(cls).params
    return next(" ".join((param.description or "").split()) for param in params if param.arg_name == name)
