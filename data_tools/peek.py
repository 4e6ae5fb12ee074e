"""Look into a .bin/.idx corpus: its size, the lengths of its documents, and their text."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_tools.tool import run_tool
from megazero.data.about import read_about
from megazero.data.indexed import IndexedDataset
from megazero.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from rich.table import Table

EPILOG = """\
example:
  python data_tools/peek.py data/corpus_text_document --documents 2
"""
# Tokens shown of each document, from its beginning.
SHOWN_TOKENS = 200


def summary(data: IndexedDataset) -> "Table":
    """Counts of a corpus."""
    from rich.markup import escape
    from rich.table import Table

    lengths = np.diff(data.document_starts(0, data.num_documents + 1))
    rows = {
        "documents": data.num_documents,
        "sequences": data.lengths.shape[0],
        "tokens": data.num_tokens,
        "shortest document": int(lengths.min(initial=data.num_tokens)),
        "longest document": int(lengths.max(initial=0)),
        "mean document": round(data.num_tokens / max(1, data.num_documents)),
    }
    table = Table("", escape(data.prefix))
    table.add_row("token type", data.dtype.name)
    for name, value in rows.items():
        table.add_row(name, f"{value:,}")
    for name, value in read_about(data).items():
        if name not in ("num_tokens", "num_documents", "dtype", "checksum"):
            table.add_row(name, escape(str(value)))
    return table


def histogram(data: IndexedDataset) -> "Table":
    """Documents and tokens by length, in powers of two."""
    from rich.table import Table

    lengths = np.diff(data.document_starts(0, data.num_documents + 1))
    powers = np.zeros(lengths.shape, dtype=np.int64)  # 0: empty; k: 2^(k - 1) to 2^k - 1 tokens
    powers[lengths > 0] = np.log2(lengths[lengths > 0]).astype(np.int64) + 1
    counts = np.bincount(powers)
    tokens = np.bincount(powers, weights=lengths).astype(np.int64)
    table = Table("tokens in document", "documents", "share of tokens", "")
    for power in np.flatnonzero(counts).tolist():
        span = "0" if power == 0 else f"{1 << (power - 1):,} to {(1 << power) - 1:,}"
        share = tokens[power] / max(1, data.num_tokens)
        bar = "#" * round(20 * counts[power] / counts.max())
        table.add_row(span, f"{counts[power]:,}", f"{share:.1%}", bar)
    return table


def find_tokenizer(data: IndexedDataset, spec: str | None) -> Tokenizer | None:
    """The given tokenizer; else the one PREFIX.json names; None if that cannot be read here."""
    if spec is not None:
        return load_tokenizer(spec)
    named = read_about(data).get("tokenizer")
    try:
        return load_tokenizer(named) if named else None
    except ValueError as error:
        print(f"{error}; give --tokenizer to see text", file=sys.stderr)
        return None


def main(arguments: Sequence[str]) -> None:
    """The tool. ValueError for a corpus or tokenizer that cannot be read."""
    parser = argparse.ArgumentParser(
        prog="peek.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("prefix", metavar="PREFIX", help="the corpus, without .bin or .idx")
    parser.add_argument("--tokenizer", metavar="SPEC", help="to decode with (default: as PREFIX.json says)")
    parser.add_argument("--documents", type=int, default=3, metavar="N", help="to show (default: 3)")
    given = parser.parse_args(arguments)
    if given.documents < 0:
        raise ValueError(f"--documents {given.documents}: give 0 or more")

    from rich.console import Console

    data = IndexedDataset(given.prefix)
    console = Console()
    console.print(summary(data))
    console.print(histogram(data))
    tokenizer = find_tokenizer(data, given.tokenizer) if given.documents else None
    for index in range(min(given.documents, data.num_documents)):
        ids = data.document(index)
        shown = ids[:SHOWN_TOKENS].tolist()
        console.rule(f"document {index}: {ids.size:,} tokens")
        # Plain print: square brackets in a text are no markup.
        print(tokenizer.decode(shown) if tokenizer else " ".join(map(str, shown)), flush=True)
        if ids.size > len(shown):
            print(f"... and {ids.size - len(shown):,} tokens more", flush=True)


if __name__ == "__main__":
    run_tool(main)
