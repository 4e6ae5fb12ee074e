"""Megatron-LM's words for a tokenizer, given to data_tools/preprocess_data.py."""

import pytest

from data_tools.megatron import our_words
from tests.helpers.table import for_each

FILES = "--input a.jsonl b.jsonl --output-prefix p"


@for_each(
    ("given", "ours"),
    [
        ("--tokenizer byte --append-eod", "--tokenizer byte --append-eod"),
        ("--vocab-file d/vocab.json --merge-file d/merges.txt", "--tokenizer gpt2:d"),
        (
            "--tokenizer-type GPT2BPETokenizer --vocab-file v.json --merge-file m.txt --dataset-impl mmap --append-eod",
            "--append-eod --tokenizer gpt2:v.json,m.txt",
        ),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model t.model", "--tokenizer llama2:t.model"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model folder", "--tokenizer folder"),
        ("--tokenizer-type PretrainedFromHF --tokenizer-name-or-path a/b --append-eod", "--append-eod --tokenizer a/b"),
        ("--log-interval 100 --partitions 4 --keep-sequential-samples --workers 2", "--workers 2"),
        ("--make-vocab-size-divisible-by 128 --vocab-extra-ids 0 --json-keys a b", "--json-keys a b"),
    ],
)
def test_a_tokenizer_in_megatrons_words(given: str, ours: str) -> None:
    assert our_words(f"{FILES} {given}".split()) == f"{FILES} {ours}".split()


def test_half_a_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--merge-file merges.txt"):
        our_words(f"{FILES} --vocab-file vocab.json".split())
