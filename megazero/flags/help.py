"""--help in two lengths: the flags of a normal run, and all of them."""

import contextlib
import dataclasses
import inspect
import os
import signal
import sys
import textwrap
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from megazero.called_as import in_own_words
from megazero.flags.config import Config, PlanConfig
from megazero.flags.flag_names import Flag, flags

# The flags of a normal run, in the order in which one thinks of them.
NORMAL = {
    "data": ("data-path", "tokenizer"),
    "model": ("preset", "hf-config", "num-layers", "hidden-size", "num-attention-heads", "seq-length"),
    "batch": ("micro-batch-size", "global-batch-size", "train-iters", "train-tokens", "precision"),
    "parallelism": ("layout", "tensor-model-parallel-size", "pipeline-model-parallel-size", "zero-stage"),
    "learning rate": ("recipe", "lr", "lr-warmup-iters", "lr-decay-style"),
    "evaluation": ("eval-interval", "eval-iters"),
    "saving": ("save", "load"),
    "logging": ("log-dir",),
}

# More of them for --plan and --plan-search.
PLANNING = {"predictions": ("plan", "plan-search", "world-size", "device-type", "mtbf")}

# Flags of the model that only a family, a preset or a config.json sets. They are valid everywhere, but no help lists
# them: docs/results/flags.md does.
FAMILY = (
    "max-position-embeddings",
    "rotary-percent",
    "rotary-interleaved",
    "local-rotary-base",
    "add-qkv-bias",
    "qk-layernorm",
    "qk-norm-all-heads",
    "attention-softcap",
    "attention-scale",
    "multi-latent-attention",
    "q-lora-rank",
    "kv-lora-rank",
    "qk-head-dim",
    "qk-pos-emb-head-dim",
    "v-head-dim",
    "beta-fast",
    "yarn-correction-range-round-to-int",
    "mscale",
    "mscale-all-dim",
    "norm-epsilon",
    "embedding-multiplier",
    "logits-divisor",
    "final-softcap",
    "residual-multiplier",
    "moe-router-pre-softmax",
    "moe-router-num-groups",
    "moe-router-group-topk",
    "moe-router-topk-scaling-factor",
    "moe-shared-expert-gate",
)

# Defaults that depend on the device (`gpu_defaults`).
DEVICE_DEFAULTS = {
    "precision": "fp32 on CPUs; on GPUs bf16, or fp16 if they lack bf16",
    "lr-warmup-iters": "0 on CPUs; on GPUs 1 % of the iterations, at most 2000",
}

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
    groups = PLANNING | NORMAL if plans else NORMAL
    usual = [name for names in groups.values() for name in names]
    text = (PlanConfig if plans else Config).__doc__ or ""
    print(f"usage: {program} [FLAGS]\n\n{in_own_words(inspect.cleandoc(text))}\n")
    kind, count = "prediction" if plans else "run", len(flags()) + 2 - len(FAMILY)
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


def _described(name: str) -> str:
    """Return a flag with its values, its help and its default."""
    flag = flags().get(name, Flag("", str, "", None))
    values = {int: "INT", float: "FLOAT", str: "STR", tuple[str, ...]: "[STR ...]", bool: ""}.get(flag.kind)
    values = f"{{{','.join(map(str, typing.get_args(flag.kind)))}}}" if values is None else values
    text = help_of(name)
    if default := DEVICE_DEFAULTS.get(name, flag.default):
        text += f" (default: {default})"
    return f"  --{name} {values}".rstrip() + f"\n{WRAPPER.fill(f'  {text}')}"


def help_of(name: str) -> str:
    """Return the help of a flag in one line."""
    group = flags()[name].group if name in flags() else ""
    return _texts(type(getattr(Config(), group)) if group else Config)[name.replace("-", "_")]


def _texts(options: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, in one line."""
    import docstring_parser

    params = docstring_parser.parse_from_object(options).params
    return {param.arg_name: in_own_words(" ".join((param.description or "").split())) for param in params}


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
        elif field.name.replace("_", "-") in FAMILY:
            hint = Annotated[hint, tyro.conf.Suppress]
        elif value in (None, field.default) and (default := DEVICE_DEFAULTS.get(field.name.replace("_", "-"))):
            hint = Annotated[hint, tyro.conf.arg(help_behavior_hint=f"(default: {default})")]
        metadata = {"help": texts[field.name]} if texts.get(field.name) else {}
        defaults: dict[str, Any] = {"default": field.default, "default_factory": field.default_factory}
        fields.append((field.name, hint, dataclasses.field(**defaults, metadata=metadata)))
    namespace = {"__doc__": in_own_words(kind.__doc__ or "")}
    made = dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True, namespace=namespace)
    return made if instance is None else made(**(vars(instance) | parts))
