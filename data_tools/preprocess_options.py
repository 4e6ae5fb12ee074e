"""Options of preprocess_data.py, and the settings that follow from them."""

import os
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from tyro.conf import FlagCreatePairsOff

from data_tools.chat import cached_template
from data_tools.encoding import cached_tokenizer
from data_tools.selection import MaskFrom, Selection, select
from data_tools.sources import Format
from megazero.data.indexed import dtype_for
from megazero.data.tokenizer import Tokenizer, asked_beginning


@dataclass(frozen=True)
class Options:
    """Turn text into the .bin/.idx token files that megazero and Megatron-LM train on.

    Killed at any moment, or stopped by a full disk, it resumes when the same command is given again; the result is byte
    for byte the same. Documents without a token are left out and counted. The tokenizer is saved next to the corpus.

    example:
      python data_tools/preprocess_data.py --input wiki.jsonl.zst news/ --output-prefix data/corpus --tokenizer
      gpt2:gpt2_files --append-eod

    then:
      python pretrain_gpt.py --data-path data/corpus_text_document --tokenizer gpt2:gpt2_files ...
    """

    input: tuple[str, ...]
    """JSON lines, one object per document (.jsonl, .json, .ndjson, .jl); text, one file per document (.txt, .md);
    .csv or .tsv with a header; each may be .gz, .zst, .bz2 or .xz; .parquet; .arrow; folders (texts only if there are
    no rows) and globs of these; - for JSON lines from standard input; datasets:NAME[:SPLIT] for a data set of the
    `datasets` library: a folder of save_to_disk, a folder of data files, or one of the hub."""
    output_prefix: str
    """Writes P_KEY_document.bin, .idx and .json for each of --json-keys, and the tokenizer into P_tokenizer; with loss
    masks also .mask."""
    tokenizer: str
    """A file or its folder, recognised: tokenizer.json, vocab.json with merges.txt, a SentencePiece .model, a tiktoken
    FILE with FILE.json; or with the kind named: gpt2:DIR, sentencepiece:FILE, tiktoken:FILE; or byte."""
    input_format: Format = "auto"
    """Format of all of --input. auto: by the names of the files."""
    json_keys: tuple[str, ...] = ()
    """Keys, or columns, that hold text; a corpus for each. Default: text, or messages with --mask-from chat. KEY1:0
    KEY2:1 ...: one corpus, P_KEY1_KEY2_document, whose documents are the texts of all keys, one after another; its loss
    mask counts the tokens of the keys with :1."""
    mask_from: MaskFrom = "none"
    """chat: the keys hold conversations, lists of {"role": ..., "content": ...}, which the tokenizer's chat template
    renders; the loss mask counts the assistant's tokens. Training obeys a loss mask, P_KEY_document.mask."""
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document token."""
    prepend_bos: FlagCreatePairsOff[bool] = False
    """Begin each document with the tokenizer's beginning-of-text token, or tokens. Default: those that its
    post-processor puts before a text, or add_bos_token next to a SentencePiece model; of conversations, those that
    the chat template writes. None begins with them twice."""
    no_prepend_bos: FlagCreatePairsOff[bool] = False
    """Leave the beginning-of-text token out."""
    workers: int = 0
    """Processes that tokenize. 0: one per core."""
    on_bad_line: Literal["stop", "skip"] = "stop"
    """Action for a line that is no document. skip: leave it out, count it, and name it in P_skipped.txt."""
    dtype: Literal["auto", "uint16", "int32"] = "auto"
    """Type of a token in the file. auto: uint16 for a vocabulary below 65,500, else int32, as Megatron does."""
    dedup: bool = False
    """Leave out documents that are equal, byte for byte, to an earlier one. Takes 16 bytes of memory per document, and
    up to three times that at moments."""
    partition: str = "0/1"
    """I/N: read only part I of N, of about equal size, and write P-0000I-of-0000N_KEY_document. For N machines.
    merge_datasets.py joins the parts, in order, to the corpus that a single run would have made."""
    gigatoken: bool = True
    """Encode with gigatoken if it gives the same ids as the tokenizer: compared first on a sample of the text, then on
    a stretch of every chunk."""
    overwrite: bool = False
    """Replace finished corpora of --output-prefix that were made from other inputs or with other options."""


def workers_of(options: Options) -> int:
    return options.workers or len(os.sched_getaffinity(0))


def token_type(options: Options, tokenizer: Tokenizer) -> str:
    """Name of the type of a token. ValueError if --dtype cannot hold the vocabulary."""
    name = dtype_for(tokenizer.vocab_size).name if options.dtype == "auto" else options.dtype
    if tokenizer.vocab_size - 1 > np.iinfo(name).max:
        raise ValueError(
            f"--dtype {name} cannot hold the {tokenizer.vocab_size:,} ids of --tokenizer {options.tokenizer}; give "
            f"int32, or leave it out"
        )
    return name


def tokenizer_of(options: Options) -> Tokenizer:
    """Load the tokenizer, with the chosen beginning of a text. With --mask-from chat, the chat template decides."""
    asked = asked_beginning(options.prepend_bos, options.no_prepend_bos)
    found = cached_tokenizer(options.tokenizer)
    if asked is None and found.bos and options.mask_from == "chat":
        asked = cached_template(options.tokenizer).writes(found.bos)
    return found.prepending(asked)


def selection_of(options: Options) -> Selection:
    return select(options.json_keys, options.mask_from)


def settings_of(options: Options) -> dict[str, Any]:
    """All settings besides the inputs on which the result depends, by flag."""
    tokenizer = tokenizer_of(options)
    return {
        "--tokenizer": [options.tokenizer, tokenizer.identity],
        "--json-keys": list(options.json_keys or selection_of(options).keys),
        "--append-eod": options.append_eod,
        **({"--prepend-bos": tokenizer.bos} if tokenizer.bos else {}),  # a journal of earlier versions has none
        "--dtype": token_type(options, tokenizer),
        "--dedup": options.dedup,
        "--partition": options.partition,
        "--input-format": options.input_format,
        **({"--mask-from": ["chat", cached_template(options.tokenizer).digest]} if options.mask_from == "chat" else {}),
    }
