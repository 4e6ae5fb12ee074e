"""`decode` returns typed values and names the file, the key and the expected type of a wrong one."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from megazero.typed_files import decode
from tests.helpers.table import for_each


@dataclass(frozen=True)
class Link:
    gpus: int
    names: tuple[str, ...] = ()


@for_each(
    ("name", "text"),
    [("a.json", '{"near": {"gpus": 3, "names": ["x"], "later": 1}}'), ("a.toml", '[near]\ngpus=3\nnames=["x"]')],
)
def test_a_file_becomes_its_dataclass(name: str, text: str) -> None:
    assert decode(text.encode(), dict[str, Link], Path(name)) == {"near": Link(3, ("x",))}


@for_each(
    ("name", "data", "named"),
    [
        ("a.json", b'{"near": {"gpus": "3"}}', r"a\.json: Expected `int`, got `str` - at `\$\[\.\.\.\]\.gpus`"),
        ("a.json", b'{"near": {}}', "a.json: Object missing required field `gpus`"),
        ("a.json", b'{"near": {"gpus":', "a.json: Input data was truncated"),
        ("a.toml", b"[near]\ngpus=3\nnames=5", "a.toml: Expected `array`, got `int`"),
        ("a.toml", b"[near", "a.toml: "),
        ("a.toml", b"\xff=1", "a.toml: "),
    ],
)
def test_a_wrong_file_is_named(name: str, data: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        decode(data, dict[str, Link], Path(name))
