"""Megatron-LM's flags of data and tokenizers."""

from __future__ import annotations

from pathlib import PurePath

from megazero.config.foreign.table import (
    LAST,
    MEGATRON,
    Entries,
    Refused,
    Use,
    computed,
    fixed,
    refused,
    unneeded,
)

# -- data and tokenizer

GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


def _gpt2(use: Use) -> list[str]:
    vocab, merges = use.word("vocab-file"), use.word("merge-file")
    if not (vocab and merges):
        raise Refused("GPT-2's tokenizer has two files; give --vocab-file vocab.json --merge-file merges.txt")
    one, other = PurePath(vocab), PurePath(merges)
    if one.parent == other.parent and (one.name, other.name) in GPT2_FILES:
        return ["--tokenizer", f"gpt2:{one.parent}"]
    return ["--tokenizer", f"gpt2:{vocab},{merges}"]


def _vocab_file(use: Use) -> list[str]:
    return [] if use.given("tokenizer") or "tokenizer-type" in use.foreign else _gpt2(use)


def _tokenizer_type(use: Use) -> list[str]:
    kind, path = use.value.lower(), use.word("tokenizer-model") or use.word("tokenizer-name-or-path")
    if use.given("tokenizer"):
        return []
    if kind == "nulltokenizer":
        return ["--vocab-size", str(use.get_whole("vocab-size") + 1)]  # Megatron-LM's adds an end of document
    if kind == "gpt2bpetokenizer":
        return _gpt2(use)
    kinds = {
        **dict.fromkeys(("huggingfacetokenizer", "pretrainedfromhf", "hftokenizer"), ""),
        **dict.fromkeys(("sentencepiecetokenizer", "llama2tokenizer", "gptsentencepiecetokenizer"), "sentencepiece:"),
        "tiktokenizer": "tiktoken:",
    }
    if kind not in kinds:
        raise Refused(
            f"{use.value}: --tokenizer takes a Hugging Face folder, gpt2:DIR, sentencepiece:FILE.model, "
            "tiktoken:FILE or byte"
        )
    if not path:
        raise Refused(f"{use.value} needs its file: --tokenizer {kinds[kind]}PATH")
    return ["--tokenizer", kinds[kind] + path]


def _tokenizer_model(use: Use) -> list[str]:
    if "tokenizer-type" in use.foreign or use.given("tokenizer"):
        return []
    return ["--tokenizer", ("sentencepiece:" if use.value.endswith(".model") else "") + use.value]


def _tiktoken(use: Use) -> list[str]:
    if use.word("tokenizer-type").lower() == "tiktokenizer":
        raise Refused("tiktoken:FILE has FILE.json with its pattern and special tokens; drop it")
    return []


_BY_SPLIT = "--data-path with --split divides each corpus; or train on one --data-path, and --eval-only on another"
DATA: Entries = (
    *computed(MEGATRON, "vocab-file merge-file", "--tokenizer gpt2:DIR or gpt2:VOCAB,MERGES", _vocab_file, 1),
    *computed(
        MEGATRON,
        "tokenizer-type",
        "--tokenizer, with the file of its kind; NullTokenizer: --vocab-size N + 1",
        _tokenizer_type,
        LAST,
    ),
    *computed(
        MEGATRON, "tokenizer-model tokenizer-name-or-path", "--tokenizer, by --tokenizer-type", _tokenizer_model, 2
    ),
    *fixed(MEGATRON, "vocab-extra-ids", "0", "--vocab-size N, which may be more than the tokenizer has"),
    *unneeded(MEGATRON, "tokenizer-hf-* trust-remote-code", "a tokenizer's folder says it"),
    *computed(
        MEGATRON,
        "tiktoken-pattern tiktoken-num-special-tokens tiktoken-special-tokens",
        "nothing without a TikTokenizer; tiktoken:FILE has FILE.json with its pattern",
        _tiktoken,
    ),
    *fixed(MEGATRON, "data-impl", "mmap|infer", "corpora are Megatron's .bin/.idx, which are mapped"),
    *unneeded(
        MEGATRON,
        "data-cache-path no-mmap-bin-files mmap-warmup num-dataset-builder-threads dataloader-fast-cache-load "
        "dataloader-defer-npy-index-mmap object-storage-cache-path valid-num-workers "
        "no-create-attention-mask-in-dataloader create-attention-mask-in-dataloader mid-level-dataset-surplus "
        "no-data-sharding",
        "corpora are mapped, their order is computed, and nothing is cached",
    ),
    *fixed(MEGATRON, "dataloader-type", "single", "one order of samples, shuffled per epoch, whatever the layout"),
    *refused(
        MEGATRON,
        "train-data-path valid-data-path test-data-path per-split-data-args-path *-weighted-split-paths* "
        "per-dataset-sequences-path",
        _BY_SPLIT,
    ),
    *refused(MEGATRON, "fim-* sft* phase-transition-iterations", "data are documents of --data-path"),
)
