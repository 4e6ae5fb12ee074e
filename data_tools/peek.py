#!/usr/bin/env python3
"""Show a .bin/.idx corpus: its size, its sources, the lengths of its documents, their text and targets."""

import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_tools.tool import parse, run_tool
from megazero.data.about import read_about
from megazero.data.indexed import CHUNK, IndexedDataset
from megazero.data.packing import pack_documents
from megazero.data.remembered import remembered_tokenizer
from megazero.data.tokenizer import Tokenizer, load_tokenizer
from megazero.files import write_atomically
from megazero.units import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PROGRAM = "peek.py"
# Tokens shown of each document, from its beginning.
SHOWN_TOKENS = 200
# Marks around, and the style of, tokens that a loss mask counts as targets.
TARGETS, TARGET_STYLE = ("[[", "]]"), "bold green"
# rich's page, with long lines wrapped.
PAGE_WIDTH = 160
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>corpus</title><style>
{stylesheet}
body {{ color: {foreground}; background: {background}; }} pre {{ white-space: pre-wrap; }}
</style></head><body><pre>{code}</pre></body></html>
"""


@dataclass(frozen=True)
class Options:
    """Show a .bin/.idx corpus: its size, its sources, the lengths of its documents, and their text.

    If it has a loss mask, [[ ]] are around the tokens that count as targets.

    example:
      python data_tools/peek.py data/corpus_text_document --documents 2 --html corpus.html
    """

    prefix: Annotated[str, tyro.conf.Positional]
    """The corpus, without .bin or .idx."""
    tokenizer: str = ""
    """Tokenizer to decode with; a checkpoint has its own in RUN/iter_NNNNNNN/tokenizer. Empty: the one that PREFIX.json
    names, or its copy next to the corpus."""
    documents: int = 3
    """Documents to show, evenly spaced over the corpus, the first among them."""
    seq_length: int = 0
    """Also show how --packing best-fit would fill samples of N tokens. 0: leave it out."""
    html: str = ""
    """Also write the output as an HTML page."""


class LengthBin(NamedTuple):
    """The documents of [low, high] tokens: their number, and the sum of their tokens."""

    low: int
    high: int
    documents: int
    tokens: int


def lengths_of(data: IndexedDataset) -> Iterator[npt.NDArray[np.int64]]:
    """Tokens of each document, a chunk of documents at a time."""
    for at in range(0, data.num_documents, CHUNK):
        yield np.diff(data.document_starts(at, min(at + CHUNK, data.num_documents) + 1))


def facts(data: IndexedDataset) -> dict[str, str]:
    """Counts of a corpus, and the contents of PREFIX.json."""
    shortest, longest = data.num_tokens, 0
    for lengths in lengths_of(data):
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    found = {
        "token type": data.dtype.name,
        "documents": f"{data.num_documents:,}",
        "sequences": f"{data.lengths.shape[0]:,}",
        "tokens": f"{data.num_tokens:,}",
        "shortest document": f"{shortest:,}",
        "longest document": f"{longest:,}",
        "mean document": f"{round(data.num_tokens / max(1, data.num_documents)):,}",
    }
    for name, value in read_about(data).items():
        if name not in ("num_tokens", "num_documents", "dtype", "checksum", "sources"):
            found[name] = str(value)
    return found


def packed(data: IndexedDataset, length: int) -> dict[str, str]:
    """Counts of the samples of `length` tokens in which --packing best-fit would put the whole corpus."""
    found = pack_documents(
        data.document_lengths(0, data.num_documents), length + 1, np.random.PCG64(0).random_raw
    ).filling
    return {
        "samples per epoch": f"{found.samples:,}",
        "padding": f"{found.padding:.2%}",
        "targets": f"{found.targets:,}",
        "documents longer than a sample, cut": f"{found.cut:,}",
    }


def sources(data: IndexedDataset) -> list[tuple[str, int, int]]:
    """(--input, documents, tokens) of each source in PREFIX.json."""
    found = read_about(data).get("sources", [])
    return [(str(each["input"]), int(each["documents"]), int(each["tokens"])) for each in found]


def histogram(data: IndexedDataset) -> list[LengthBin]:
    """Documents by length, in powers of two."""
    documents, tokens = np.zeros(64, np.int64), np.zeros(64, np.int64)
    for lengths in lengths_of(data):
        powers = np.zeros(lengths.shape, dtype=np.int64)  # 0: empty; k: 2^(k - 1) to 2^k - 1 tokens
        powers[lengths > 0] = np.log2(lengths[lengths > 0]).astype(np.int64) + 1
        documents += np.bincount(powers, minlength=64)
        tokens += np.bincount(powers, weights=lengths, minlength=64).astype(np.int64)
    return [
        LengthBin((1 << power) >> 1, (1 << power) - 1, int(documents[power]), int(tokens[power]))
        for power in np.flatnonzero(documents).tolist()
    ]


def find_tokenizer(data: IndexedDataset, spec: str) -> Tokenizer | None:
    """The given tokenizer; else the one that made the corpus; None if it cannot be read here."""
    if spec:
        return load_tokenizer(spec)
    try:
        return remembered_tokenizer(data)
    except ValueError as error:
        print(f"{visible(str(error))}, to see text", file=sys.stderr)
        return None


def print_table(console: "Console", columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table. Square brackets in its cells are text, not markup."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(*(escape(visible(column)) for column in columns))
    for row in rows:
        table.add_row(*(escape(f"{cell:,}" if isinstance(cell, int) else visible(str(cell))) for cell in row))
    console.print(table, highlight=False)


def print_corpus(
    console: "Console", data: IndexedDataset, count: int, tokenizer: Tokenizer | None, seq_length: int = 0
) -> None:
    """Print the facts, the sources, the histogram, the packing and the beginnings of `count` documents."""
    total, bins = max(1, data.num_tokens), histogram(data)
    print_table(console, ["", data.prefix], list(facts(data).items()))
    if by_source := sources(data):
        share = [(n, d, t, f"{t / max(1, data.num_tokens):.1%}") for n, d, t in by_source]
        print_table(console, ["--input", "documents", "tokens", "share"], share)
    most = max((each.documents for each in bins), default=1)
    rows = [
        (f"{b.low:,} to {b.high:,}", b.documents, f"{b.tokens / total:.1%}", "#" * round(20 * b.documents / most))
        for b in bins
    ]
    print_table(console, ["tokens in document", "documents", "share of tokens", ""], rows)
    if seq_length:
        print_table(console, ["packed by --seq-length", f"{seq_length:,}"], list(packed(data, seq_length).items()))
    count = min(count, data.num_documents)
    for number in (data.num_documents * k // count for k in range(count)):
        start, stop = data.span(number)
        targets = f", {int(data.mask(start, stop).sum()):,} of them targets" if data.masked else ""
        console.rule(f"document {number}: {stop - start:,} tokens{targets}")
        shown = min(stop, start + SHOWN_TOKENS)
        console.print(*beginning(data, start, shown, tokenizer), sep="", highlight=False, soft_wrap=True)
        if left := stop - shown:
            console.print(f"... and {left:,} tokens more", highlight=False)


def beginning(data: IndexedDataset, start: int, stop: int, tokenizer: Tokenizer | None) -> Iterator["Text"]:
    """Yield the text of tokens [start, stop), or their ids; with a mask, in runs of targets and of other tokens."""
    from rich.text import Text

    mask = data.mask(start, stop) if data.masked else np.zeros(stop - start, np.bool_)
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), stop - start]
    for first, end in pairwise(borders):
        ids = data.tokens(start + first, start + end).tolist()
        text = (tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))).encode("utf-8", "replace").decode()
        text = visible(text)
        yield Text(text.join(TARGETS), TARGET_STYLE) if mask[first:end].any() else Text(text)


def main(arguments: Sequence[str]) -> None:
    """The tool. ValueError for a corpus or tokenizer that cannot be read."""
    options = parse(Options, arguments, PROGRAM)
    if options.documents < 0:
        raise ValueError(f"--documents {options.documents}: give 0 or more")
    if options.seq_length < 0:
        raise ValueError(f"--seq-length {options.seq_length}: give 1 or more, or 0 to leave packing out")
    from rich.console import Console

    data = IndexedDataset(options.prefix.removesuffix(".idx"))
    tokenizer = find_tokenizer(data, options.tokenizer) if options.documents else None
    print_corpus(Console(), data, options.documents, tokenizer, options.seq_length)
    if options.html:
        page = Console(record=True, width=PAGE_WIDTH, file=io.StringIO())
        print_corpus(page, data, options.documents, tokenizer, options.seq_length)
        write_atomically(options.html, page.export_html(code_format=PAGE).encode())
        print(f"wrote {options.html}")


def command(arguments: Sequence[str] | None = None) -> None:
    """Run as a program; `arguments` are by default those of the process."""
    run_tool(main, PROGRAM, arguments)


if __name__ == "__main__":
    command()
