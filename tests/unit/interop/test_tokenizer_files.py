"""Tokenizers of exports: names and ids of special tokens, ends of a text, the source's generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from megazero.data.tokenizer import end_of_document, load_tokenizer
from megazero.interop.huggingface.tokenizer_files import generation_config, special_ids, write_tokenizer
from tests.helpers.table import for_each
from tests.unit.data_helpers import write_byte_tokenizer

CHATML = {
    "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "tokenizer_config": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
}
GEMMA = {
    "special": ["<pad>", "<eos>", "<bos>", "<end_of_turn>"],
    "ordinary": ["</s>"],
    "begins": ["<bos>"],
    "tokenizer_config": {"eos_token": "<end_of_turn>", "bos_token": "<bos>", "pad_token": "<pad>"},
}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "transformers_version": "4.5"}


@for_each(
    ("folder", "source", "ends", "expected"),
    [
        # kept, with the ends that it lacks
        (CHATML, {"eos_token_id": [258, 256], "pad_token_id": 256} | SAMPLED, (258, 256), {}),
        (GEMMA, {"eos_token_id": 257, "bos_token_id": 258, "cache_implementation": "x"}, (257, 259),
         {"eos_token_id": [257, 259]}),
        (CHATML, SAMPLED, (256, 258), {"eos_token_id": [256, 258]}),
        (CHATML, {"eos_token_id": None}, (256, 258), {"eos_token_id": [256, 258]}),
        # made of the tokenizer's names, none of which is invented
        (CHATML, None, (256, 258), {"eos_token_id": [256, 258], "bos_token_id": None, "pad_token_id": 256}),
        (GEMMA, None, (257, 259), {"eos_token_id": [257, 259], "bos_token_id": 258, "pad_token_id": 256}),
        ({"special": ["</s>"]}, None, (256,), {"eos_token_id": 256, "bos_token_id": None, "pad_token_id": None}),
        ({}, None, (), {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}),
    ],
)  # fmt: skip
def test_an_export_stops_where_its_source_does(
    tmp_path: Path, folder: dict[str, Any], source: dict[str, Any] | None, ends: tuple[int, ...], expected: dict
) -> None:
    """After the copies of a corpus and a checkpoint, too."""
    files = {} if source is None else {"generation_config": source}
    first, second = tmp_path / "copy", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    load_tokenizer(str(write_byte_tokenizer(tmp_path / "t", **folder, **files))).save(first)
    load_tokenizer(str(first)).save(second)
    tokenizer = load_tokenizer(str(second))
    assert tokenizer.ends == ends
    made = generation_config(tokenizer.generation, special_ids(tokenizer, second))
    assert made == (source or {}) | expected


@for_each("ends", ["2", [1, "2"], {"a": 1}, True, 1.5])
def test_ends_that_are_no_ids_are_refused(tmp_path: Path, ends: object) -> None:
    write_byte_tokenizer(tmp_path / "t", generation_config={"eos_token_id": ends})
    with pytest.raises(
        ValueError, match=r"generation_config.json: eos_token_id .* is no token id, and no list of them"
    ):
        load_tokenizer(str(tmp_path / "t"))


@for_each(
    ("options", "names", "eod"),
    [
        ({}, ("<s>", "</s>", "<unk>", None), 2),
        ({"eos_piece": "<|endoftext|>", "bos_piece": "<begin>", "unk_piece": "<?>"}, ("<begin>", "<|endoftext|>", "<?>",
         None), 2),
        ({"eos_piece": "<eos>", "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}, ("<s>", "<eos>", "<unk>",
         "<pad>"), 1),
        ({"bos_id": -1, "eos_id": 1}, (None, "</s>", "<unk>", None), 1),
        ({"bos_id": -1, "eos_id": -1}, (None, None, "<unk>", None), None),
        ({"eos_id": -1, "control_symbols": "<eos>"}, ("<s>", "<eos>", "<unk>", None), 2),
    ],
)  # fmt: skip
def test_a_sentencepiece_model_keeps_its_own_names(
    tmp_path: Path, options: dict[str, Any], names: tuple[str | None, ...], eod: int | None
) -> None:
    """transformers adds no token, and begins texts as the run did."""
    from sentencepiece import SentencePieceTrainer
    from transformers import AutoTokenizer

    lines = [f"the quick brown fox number {k} jumps over lazy dogs" for k in range(200)]
    settings = {"model_type": "bpe", "vocab_size": 320, "byte_fallback": True, "minloglevel": 2}
    settings |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    SentencePieceTrainer.train(sentence_iterator=iter(lines), model_prefix=str(tmp_path / "t"), **settings, **options)
    for kind in ("sentencepiece", "megatron", *(["llama2"] if names[0] else [])):
        tokenizer, output = load_tokenizer(f"{kind}:{tmp_path}/t.model"), tmp_path / kind
        output.mkdir()
        write_tokenizer(tokenizer, output)
        theirs = AutoTokenizer.from_pretrained(output)
        assert end_of_document(tokenizer) == (tokenizer.vocabulary()["<EOD>"] if kind == "megatron" else eod)
        expected = "<EOD>" if kind == "megatron" else names[1]
        assert (theirs.bos_token, theirs.eos_token, theirs.unk_token, theirs.pad_token) == (
            names[0],
            expected,
            *names[2:],
        )
        assert theirs.eos_token_id == end_of_document(tokenizer) and len(theirs) == tokenizer.vocab_size
        assert [theirs("the fox").input_ids] == tokenizer.encode_texts(["the fox"])
        ids = special_ids(tokenizer, output)
        assert ids.bos == (1 if names[0] == "<s>" and "pad_id" not in options else theirs.bos_token_id)


def test_only_the_saved_tokenizer_decides(tmp_path: Path) -> None:
    """A folder that is copied file by file keeps all of its files."""
    theirs = write_byte_tokenizer(tmp_path / "t", **CHATML, generation_config={"eos_token_id": [258, 256]})
    (tmp_path / "out").mkdir()
    assert write_tokenizer(load_tokenizer(str(theirs)), tmp_path / "out")
    assert {path.name: path.read_text() for path in theirs.iterdir()} == {
        path.name: path.read_text() for path in (tmp_path / "out").iterdir()
    }
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
