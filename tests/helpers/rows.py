"""Rows of traits: those of all families, some that no family has, and blocks that differ by number."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from megazero.engine.model.block import BLOCK_CLASSES
from megazero.families import FAMILIES
from megazero.flags.cli import parse
from megazero.flags.config import Config, ModelConfig
from megazero.flags.flag_names import flags
from megazero.flags.validate_model import layer_flags
from tests.helpers.families import of_family
from tests.parallel.test_kinds import WIDE, AlternatingBlock

LLAMA = of_family("llama")
ROWS: dict[str, dict[str, Any]] = {
    **{name: of_family(name) for name in FAMILIES},
    "after": LLAMA | {"norm_place": "after", "linear_biases": ("qkv", "proj", "mlp", "logits")},
    "around": LLAMA
    | {"norm_place": "around", "norm": "rmsnorm-1p", "activation": "geglu-tanh", "root_embedding": True},
    "two norms": LLAMA | {"parallel_norms": 2, "norm": "layernorm", "linear_biases": ("qkv", "proj", "mlp")},
    "fused": of_family("gpt2") | {"norm_place": "after", "norm": "rmsnorm", "linear_biases": ()},
    **{name: LLAMA | {"parallel_norms": name} for name in WIDE},
}


@contextlib.contextmanager
def known_blocks() -> Iterator[None]:
    """Within: the table of blocks has those that differ by number."""
    with patch.dict(BLOCK_CLASSES, dict.fromkeys(WIDE, AlternatingBlock)):
        yield


@functools.cache  # a test has the same line for each row
def _parsed(line: str) -> Config:
    return parse(line.split())


def parse_as(row: str, line: str) -> Config:
    """Parse flags for the traits of a row."""
    config = _parsed(line)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **ROWS[row]))


def options_of(row: str) -> Iterator[str]:
    """Yield no flag, each switch of a row, and one group of keys and values in layers that differ."""
    yield ""
    options = layer_flags(ModelConfig(**ROWS[row]))
    switches = (name for name in options if flags()[name].kind is bool)
    needed = {"qk-norm-all-heads": "--qk-layernorm "}
    yield from (f"{needed.get(name, '')}--{name}" for name in switches)
    if "num-query-groups" in options:
        switches = (name for name in ("add-qkv-bias", "qk-layernorm") if name in options)
        yield " ".join(
            ["--num-query-groups 1 --layer-pattern LGN --window-size 3", *(f"--{name}" for name in switches)]
        )
