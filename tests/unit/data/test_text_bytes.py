"""Bytes of text per token of a corpus."""

from pathlib import Path

import pytest

from megazero.data.corpora import mock_datasets, open_datasets
from megazero.data.text_bytes import bytes_per_token
from megazero.data.tokenizer import Tokenizer, load_tokenizer
from tests.unit.data_helpers import write_byte_tokenizer, write_corpus

DOCUMENTS = ["naïve 日本 🙂" * 3, "plain words", "end"]


class Pairs(Tokenizer):
    """Two letters of ASCII a token, and an end of document."""

    def __init__(self) -> None:
        super().__init__("pairs", 128 * 128 + 1, 128 * 128)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[ord(text[k]) * 128 + ord(text[k + 1]) for k in range(0, len(text), 2)] for text in texts]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token // 128) + chr(token % 128) for token in ids)

    def vocabulary(self) -> dict[str, int]:
        raise NotImplementedError

    def _save(self, folder: Path) -> str:
        raise NotImplementedError


def test_a_byte_is_a_byte_and_an_end_has_none(tmp_path: Path) -> None:
    """The split is read in a random order and without end, so that all of its documents are read equally often."""
    tokenizer = load_tokenizer("byte")
    ids = [[*tokenizer.encode(text), tokenizer.eod] for text in DOCUMENTS * 10]
    tokens = sum(map(len, ids))
    data = open_datasets(
        (str(write_corpus(tmp_path / "c", ids)),), "0,1,0", tokens - 1, 1, None, needed=("validation",)
    )
    assert bytes_per_token(data, tokenizer) == pytest.approx(
        (tokens - len(ids)) / tokens, rel=0.01
    )  # a cut character has at most 4 of 700 bytes


def test_a_beginning_has_no_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_byte_tokenizer(tmp_path / "t", ["<s>", "</s>"], begins=["<s>"])))
    corpus = write_corpus(tmp_path / "c", [[*ids, tokenizer.eod] for ids in tokenizer.encode_texts(["abcd"] * 50)])
    data = open_datasets((str(corpus),), "0,1,0", 299, 1, None, needed=("validation",))
    assert bytes_per_token(data, tokenizer) == pytest.approx(4 / 6, rel=0.01)


@pytest.mark.second
def test_text_of_longer_tokens_and_of_the_training_split(tmp_path: Path) -> None:
    """Nine tokens of two bytes to an end; no validation split. Without any text there is no number."""
    tokenizer = Pairs()
    ids = [[*tokenizer.encode("abcdefghijklmnopqr"), tokenizer.eod]] * 50
    data = open_datasets((str(write_corpus(tmp_path / "c", ids)),), "1,0,0", 10, 1, None, needed=("train",))
    assert bytes_per_token(data, tokenizer) == pytest.approx(1.8, rel=1e-3)
    ends = open_datasets((str(write_corpus(tmp_path / "e", [[tokenizer.eod] * 50])),), "1,0,0", 10, 1, None)
    assert bytes_per_token(ends, tokenizer) is None
    assert bytes_per_token(mock_datasets(8, 1, 100), tokenizer) == pytest.approx(2, rel=1e-3)
