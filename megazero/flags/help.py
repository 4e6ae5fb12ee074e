"""--help in two lengths: the flags of a normal run, and all of them."""

import contextlib
import dataclasses
import functools
import inspect
import os
import signal
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from megazero.called_as import in_own_words
from megazero.engine.options.option import OnGpu, Role, Usual
from megazero.flags.config import Config, PlanConfig
from megazero.flags.flag_names import Flag, all_flags, flags, flags_with

# Titles of the flags in the short help, in the order in which one thinks of them. Predictions come with --plan alone.
PREDICTIONS = "predictions"
TITLES = ("data", "model", "batch", "parallelism", "learning rate", "evaluation", "saving", "logging")
FAMILY = flags_with(Role.FAMILY)

WRAPPER = textwrap.TextWrapper(100, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


@contextlib.contextmanager
def until_reader_ends() -> Iterator[None]:
    """Print in this block.

    Raises:
        SystemExit: the reader of a pipe, such as `head`, has ended; with the code that a shell has for SIGPIPE.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again at its end
        raise SystemExit(128 + signal.SIGPIPE) from None


def show_normal(program: str, plans: bool = False) -> None:
    """Print the help of the flags of a normal run, or of predictions, and the names of the others.

    Raises:
        SystemExit: always, with code 0.
    """
    groups = usual_flags(plans)
    usual = [name for names in groups.values() for name in names]
    text = (PlanConfig if plans else Config).__doc__ or ""
    print(f"usage: {program} [FLAGS]\n\n{in_own_words(inspect.cleandoc(text))}\n")
    kind, count = "prediction" if plans else "run", len(all_flags()) - len(FAMILY)
    print(f"These are the {len(usual)} flags of a normal {kind}; --help-all shows {count}.")
    print("Flags of Megatron-LM, DeepSpeed and Hugging Face are understood: docs/megatron.md.")
    for title, names in groups.items():
        print(f"\n{title}:", *map(_described, names), sep="\n")
    print("\nThe other flags, which --help-all explains:")
    for group in dict.fromkeys(flag.group for flag in flags().values()):
        listed = [name for name, flag in flags().items() if flag.group == group and name not in (*usual, *FAMILY)]
        others = " ".join(f"--{name}" for name in listed)
        print(WRAPPER.fill(f"{group}: {others}"))
    sys.exit(0)


def usual_flags(plans: bool = False) -> dict[str, list[str]]:
    """Return the flags of the short help by title. plans: those of predictions too."""
    found: dict[str, dict[int, str]] = {title: {} for title in ([PREDICTIONS] if plans else []) + [*TITLES]}
    for name, flag in all_flags().items():
        for usual in flag.all(Usual):
            found.get(usual.title, {})[usual.place] = name
    return {title: [names[place] for place in sorted(names)] for title, names in found.items()}


def default_words(flag: Flag) -> str:
    """Return the default of a flag that depends on the device; empty if it does not."""
    on_gpu = flag.first(OnGpu)
    return f"{flag.default} on CPUs; on GPUs {on_gpu.words}" if on_gpu else ""


def _described(name: str) -> str:
    """Return a flag with its values, its help and its default."""
    flag = all_flags()[name]
    values = {int: "INT", float: "FLOAT", str: "STR", tuple[str, ...]: "[STR ...]", bool: ""}.get(flag.kind)
    values = f"{{{','.join(map(str, typing.get_args(flag.kind)))}}}" if values is None else values
    text = help_of(name)
    if default := default_words(flag) or flag.default:
        text += f" (default: {default})"
    return f"  --{name} {values}".rstrip() + f"\n{WRAPPER.fill(f'  {text}')}"


def help_of(name: str) -> str:
    """Return the help of a flag in one line."""
    group = all_flags()[name].group
    return _texts(type(getattr(Config(), group)) if group else Config)[name.replace("-", "_")]


def _texts(options: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, in one line."""
    return {name: in_own_words(text) for name, text in _docstrings(options).items()}


@functools.cache
def _docstrings(options: type) -> Mapping[str, str]:
    import docstring_parser

    parts = [part for part in reversed(options.__mro__) if dataclasses.is_dataclass(part)]
    params = [param for part in parts for param in docstring_parser.parse_from_object(part).params]
    return {param.arg_name: " ".join((param.description or "").split()) for param in params}


def with_whole_lines(options: Any) -> Any:
    """Return a dataclass, or an instance, for which tyro prints help without the line breaks of the source.

    tyro keeps the line breaks of a field's docstring, and then breaks the lines again at the width of the terminal.
    """
    import tyro

    instance, kind = (None, options) if isinstance(options, type) else (options, type(options))
    hints, texts, parts, fields = typing.get_type_hints(kind, include_extras=True), _texts(kind), {}, []
    for field in dataclasses.fields(kind):
        hint, value = hints[field.name], getattr(instance, field.name, None)
        if dataclasses.is_dataclass(value):
            parts[field.name] = value = with_whole_lines(value)
            hint = type(value)
        elif (flag := all_flags().get(field.name.replace("_", "-"))) and Role.FAMILY in flag.facts:
            hint = Annotated[hint, tyro.conf.Suppress]
        elif flag and value in (None, field.default) and (default := default_words(flag)):
            hint = Annotated[hint, tyro.conf.arg(help_behavior_hint=f"(default: {default})")]
        metadata = {"help": texts[field.name]} if texts.get(field.name) else {}
        defaults: dict[str, Any] = {"default": field.default, "default_factory": field.default_factory}
        fields.append((field.name, hint, dataclasses.field(**defaults, metadata=metadata)))
    namespace = {"__doc__": in_own_words(kind.__doc__ or "")}
    made = dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True, namespace=namespace)
    return made if instance is None else made(**(vars(instance) | parts))
