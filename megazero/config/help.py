"""--help in two lengths: the flags of a normal run, and all of them."""

from __future__ import annotations

import inspect
import sys
import textwrap
import typing

from megazero.config.flags import Flag, flags
from megazero.config.schema import Config

# The flags of a normal run, in the order in which one thinks of them.
NORMAL = {
    "data": ("data-path", "tokenizer"),
    "model": ("preset", "hf-config", "num-layers", "hidden-size", "num-attention-heads", "seq-length"),
    "batch": ("micro-batch-size", "global-batch-size", "train-iters", "precision"),
    "parallelism": ("layout", "tensor-model-parallel-size", "pipeline-model-parallel-size", "zero-stage"),
    "learning rate": ("lr", "lr-warmup-iters", "lr-decay-style"),
    "saving": ("save", "load"),
    "logging": ("log-dir",),
}


WRAPPER = textwrap.TextWrapper(100, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def show_normal(program: str) -> None:
    """Print the help of the flags of a normal run, and the names of the others.

    Raises:
        SystemExit: always, with code 0.
    """
    usual = [name for names in NORMAL.values() for name in names]
    print(f"usage: {program} [FLAGS]\n\n{inspect.cleandoc(Config.__doc__ or '')}\n")
    print(f"These are the {len(usual)} flags of a normal run; --help-all shows all {len(flags()) + 2}.")
    print("Flags of Megatron-LM, DeepSpeed and Hugging Face are understood: docs/megatron.md.")
    for title, names in NORMAL.items():
        print(f"\n{title}:", *map(_described, names), sep="\n")
    print("\nThe other flags, which --help-all explains:")
    for group in dict.fromkeys(flag.group for flag in flags().values()):
        others = " ".join(f"--{name}" for name, flag in flags().items() if flag.group == group and name not in usual)
        print(WRAPPER.fill(f"{group}: {others}"))
    sys.exit(0)


def _described(name: str) -> str:
    """Return a flag with its values, its help and its default."""
    import docstring_parser

    flag = flags().get(name, Flag("", str, "", None))
    values = {int: "INT", float: "FLOAT", str: "STR", tuple[str, ...]: "[STR ...]"}.get(flag.kind)
    values = values or f"{{{','.join(map(str, typing.get_args(flag.kind)))}}}"
    owner = type(getattr(Config(), flag.group)) if flag.group else Config
    params = {param.arg_name: param.description or "" for param in docstring_parser.parse_from_object(owner).params}
    text = " ".join(params[name.replace("-", "_")].split())
    if flag.default:
        text += f" (default: {flag.default})"
    return f"  --{name} {values}\n{WRAPPER.fill(f'  {text}')}"
