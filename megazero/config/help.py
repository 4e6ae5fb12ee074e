"""--help in two lengths: the flags of a normal run, and all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import textwrap
from typing import Annotated, Any

from megazero.config.flags import flags
from megazero.config.schema import Config

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


def show_normal(program: str) -> None:
    """Print the help of the flags of a normal run, and the names of the others.

    Raises:
        SystemExit: always, with code 0.
    """
    import docstring_parser
    import tyro

    config = Config()

    def declare(flag: str) -> tuple[str, Any, Any]:
        kind, default, owner = (
            (str, "", config)
            if flag == "preset"
            else (flags()[flag].kind, flags()[flag].default, getattr(config, flags()[flag].group))
        )
        name = flag.replace("-", "_")
        params = docstring_parser.parse_from_object(type(owner)).params
        text = next(" ".join((param.description or "").split()) for param in params if param.arg_name == name)
        return name, Annotated[kind, tyro.conf.arg(help=text)], dataclasses.field(default=default)

    made = {title: dataclasses.make_dataclass(title, map(declare, names)) for title, names in NORMAL.items()}
    normal = dataclasses.make_dataclass(
        "Normal", [(title, cls, dataclasses.field(default_factory=cls)) for title, cls in made.items()]
    )
    usual, about = {flag for names in NORMAL.values() for flag in names}, inspect.cleandoc(Config.__doc__ or "")
    description = (
        f"{about}\n\nThese are the {len(usual)} flags of a normal run; --help-all shows all {len(flags()) + 1}. Flags "
        "of Megatron-LM, DeepSpeed and Hugging Face are understood: docs/megatron.md."
    )
    with contextlib.suppress(SystemExit):
        tyro.cli(normal, args=["--help"], prog=program, description=description, config=(tyro.conf.OmitArgPrefixes,))
    print("The other flags, which --help-all explains:")
    wrapper = textwrap.TextWrapper(80, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    for group in dict.fromkeys(flag.group for flag in flags().values()):
        names = " ".join(f"--{name}" for name, flag in flags().items() if flag.group == group and name not in usual)
        print(wrapper.fill(f"{group}: {names}"))
    sys.exit(0)
