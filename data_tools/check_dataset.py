#!/usr/bin/env python3
"""Check whole corpora: the index, the checksums, that every id is in the vocabulary, the loss mask."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_tools.tool import parse, progress_bar, run_tool
from megazero.data.about import read_about, verify
from megazero.data.indexed import CHUNK, IndexedDataset
from megazero.data.tokenizer import differing_tokens, load_tokenizer
from megazero.units import things

PROGRAM = "check_dataset.py"


@dataclass(frozen=True)
class Options:
    """Check whole corpora: the index, the checksums in PREFIX.json, every id, the bytes of the loss mask.

    Exit code 0 without a fault, 2 at the first fault, which is named. Reads every byte once or twice.

    example:
      python data_tools/check_dataset.py --input data/corpus_text_document --tokenizer gpt2:gpt2_files
    """

    input: tuple[str, ...]
    """Prefixes of corpora. PREFIX.idx is accepted, so that a glob of the shell works."""
    tokenizer: str = ""
    """Also check that the corpora were made with this tokenizer. Empty: check by the vocabulary in PREFIX.json."""


def check(prefix: str, tokenizer: str = "") -> str:
    """One line on a corpus without fault. ValueError naming the fault."""
    data = IndexedDataset(prefix)
    about = read_about(data)
    vocab_size = about.get("vocab_size")
    if tokenizer:
        loaded = load_tokenizer(tokenizer)
        vocab_size = loaded.vocab_size
        made_by = about.get("tokenizer_hash", loaded.identity)
        if made_by != loaded.identity:
            if difference := differing_tokens(loaded, made_by):
                raise ValueError(f"--input {prefix} {difference}")
            raise ValueError(
                f"--input {prefix} was made with another tokenizer than --tokenizer {tokenizer}: "
                f"{about.get('tokenizer', 'unknown')}; name that one"
            )
    size = data.num_tokens * data.dtype.itemsize
    with progress_bar("checking", 2 * size) as bar:
        checked = verify(data, advance=lambda done: bar.advance(done, done))
        largest, targets = -1, 0
        for at in range(0, data.num_tokens, CHUNK):
            ids = data.tokens(at, min(at + CHUNK, data.num_tokens))
            high, low = int(ids.max()), int(ids.min())
            largest = max(largest, high)
            if low < 0 or (vocab_size is not None and high >= vocab_size):
                wrong = low if low < 0 else high
                raise ValueError(
                    f"--input {prefix}: {prefix}.bin holds token id {wrong} among tokens {at:,} to {at + ids.size:,}, "
                    f"outside the vocabulary of {vocab_size}; preprocess the text again"
                )
            targets += int(data.mask(at, at + ids.size).sum())
            bar.advance(ids.nbytes, ids.nbytes, ids.size)
    if about.get("max_id", largest) != largest:
        raise ValueError(
            f"--input {prefix}: {prefix}.json has max_id {about['max_id']}, and the largest id is {largest}"
        )
    if about.get("num_targets", targets) != targets:
        raise ValueError(
            f"--input {prefix}: {prefix}.json has num_targets {about['num_targets']}, and {targets} tokens count in "
            f"{prefix}.mask"
        )
    masked = f", {things(targets, 'target')}" if data.masked else ""
    within = f"ids 0 to {largest:,}" + (f" of a vocabulary of {vocab_size:,}" if vocab_size is not None else "")
    sums = "checksums right" if checked else "no checksums, because PREFIX.json is missing or has none"
    documents, tokens = things(data.num_documents, "document"), things(data.num_tokens, "token")
    return f"{prefix}: {documents}, {tokens}{masked}, {within}; {sums}"


def main(arguments: Sequence[str]) -> None:
    """The tool. ValueError for the first fault."""
    options = parse(Options, arguments, PROGRAM)
    if not options.input:
        raise ValueError("--input is missing; name the corpora to check")
    for prefix in options.input:
        print(check(prefix.removesuffix(".idx"), options.tokenizer), flush=True)


if __name__ == "__main__":
    run_tool(main, PROGRAM)
