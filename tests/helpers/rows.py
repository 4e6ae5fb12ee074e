"""Rows of the table of architectures, with some that no family has yet and blocks that differ by number."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from unittest.mock import patch

from megazero.engine.model.block import BLOCK_CLASSES, Layer, ParallelBlock, SequentialBlock
from megazero.engine.options.architectures import ARCHITECTURES as TRAITS
from megazero.engine.options.architectures import ArchitectureTraits
from megazero.flags.architecture_flags import ARCHITECTURE_FLAGS, flags_of
from megazero.flags.cli import parse
from megazero.flags.config import Config
from megazero.flags.flag_names import flags
from tests.parallel.test_kinds import WIDE, AlternatingBlock

LLAMA = TRAITS["llama"]
ROWS = {
    **TRAITS,
    "after": LLAMA._replace(norms="after", biases=("qkv", "proj", "mlp", "logits")),
    "around": LLAMA._replace(norms="around", norm="rmsnorm-1p", activation="geglu-tanh", root_embedding=True),
    "two norms": LLAMA._replace(parallel=2, norm="layernorm", biases=("qkv", "proj", "mlp")),
    "fused": TRAITS["gpt2"]._replace(norms="after", norm="rmsnorm", biases=()),
    **dict.fromkeys(WIDE, LLAMA),
}
FLAGS = {"around": flags_of("llama"), "fused": flags_of("gpt2"), **dict.fromkeys(WIDE, flags_of("llama"))}


@contextlib.contextmanager
def known(architecture: str, traits: ArchitectureTraits, block: type[Layer]) -> Iterator[None]:
    """Within: the tables of architectures have this one."""
    flags_ = {architecture: FLAGS.get(architecture, flags_of(architecture))}
    with (
        patch.dict(TRAITS, {architecture: traits}),
        patch.dict(ARCHITECTURE_FLAGS, flags_),
        patch.dict(BLOCK_CLASSES, {architecture: block}),
    ):
        yield


@contextlib.contextmanager
def known_row(architecture: str) -> Iterator[None]:
    """Within: the tables have an architecture of `ROWS`."""
    general = ParallelBlock if ROWS[architecture].parallel else SequentialBlock
    block = AlternatingBlock if architecture in WIDE else BLOCK_CLASSES.get(architecture, general)
    with known(architecture, ROWS[architecture], block):
        yield


@functools.cache  # a test has the same line for each row
def _parsed(line: str) -> Config:
    return parse(line.split())


def parse_as(architecture: str, line: str) -> Config:
    """Parse flags for an architecture that the parser may not know."""
    config = _parsed(line)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, architecture=architecture))


def options_of(architecture: str) -> Iterator[str]:
    """Yield no flag, each switch of an architecture, and one group of keys and values in layers that differ."""
    yield ""
    options = FLAGS.get(architecture, flags_of(architecture)).options
    switches = (name for name in options if flags()[name].kind is bool)
    needed = {"qk-norm-all-heads": "--qk-layernorm "}
    yield from (f"{needed.get(name, '')}--{name}" for name in switches)
    if "num-query-groups" in options:
        switches = (name for name in ("add-qkv-bias", "qk-layernorm") if name in options)
        yield " ".join(
            ["--num-query-groups 1 --layer-pattern LGN --window-size 3", *(f"--{name}" for name in switches)]
        )
