#!/usr/bin/env python3
"""Look into a .bin/.idx corpus: its size, its sources, the lengths of its documents, and their text."""

import html
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_tools.tool import parse, run_tool
from megazero.data.about import read_about
from megazero.data.indexed import CHUNK, IndexedDataset
from megazero.data.remembered import remembered_tokenizer
from megazero.data.tokenizer import Tokenizer, load_tokenizer
from megazero.files import write_atomically

if TYPE_CHECKING:
    from rich.table import Table

PROGRAM = "peek.py"
# Tokens shown of each document, from its beginning.
SHOWN_TOKENS = 200


@dataclass(frozen=True)
class Options:
    """Look into a .bin/.idx corpus: its size, its sources, the lengths of its documents, and their text.

    example:
      python data_tools/peek.py data/corpus_text_document --documents 2 --html corpus.html
    """

    prefix: Annotated[str, tyro.conf.Positional]
    """The corpus, without .bin or .idx."""
    tokenizer: str = ""
    """Tokenizer to decode with; a checkpoint has its own in RUN/iter_NNNNNNN/tokenizer. Empty: the one that PREFIX.json
    names, or its copy beside the corpus."""
    documents: int = 3
    """Documents to show, evenly spaced over the corpus, the first among them."""
    html: str = ""
    """Write all of it as one page of HTML, too."""


class Span(NamedTuple):
    """The documents of [low, high] tokens: how many, and how many tokens they have together."""

    low: int
    high: int
    documents: int
    tokens: int


def facts(data: IndexedDataset) -> dict[str, str]:
    """Counts of a corpus, and what PREFIX.json says of it."""
    shortest, longest = data.num_tokens, 0
    for at in range(0, data.num_documents, CHUNK):
        lengths = np.diff(data.document_starts(at, min(at + CHUNK, data.num_documents) + 1))
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


def sources(data: IndexedDataset) -> list[tuple[str, int, int]]:
    """(--input, documents, tokens) of each, as PREFIX.json says."""
    found = read_about(data).get("sources")
    rows = []
    for source in found if isinstance(found, list) else []:
        if isinstance(source, dict):
            counts = [source.get(key) for key in ("documents", "tokens")]
            rows.append((str(source.get("input")), *(count if isinstance(count, int) else 0 for count in counts)))
    return rows  # type: ignore[return-value]


def histogram(data: IndexedDataset) -> list[Span]:
    """Documents by length, in powers of two."""
    documents, tokens = np.zeros(64, np.int64), np.zeros(64, np.int64)
    for at in range(0, data.num_documents, CHUNK):
        lengths = np.diff(data.document_starts(at, min(at + CHUNK, data.num_documents) + 1))
        powers = np.zeros(lengths.shape, dtype=np.int64)  # 0: empty; k: 2^(k - 1) to 2^k - 1 tokens
        powers[lengths > 0] = np.log2(lengths[lengths > 0]).astype(np.int64) + 1
        documents += np.bincount(powers, minlength=64)
        tokens += np.bincount(powers, weights=lengths, minlength=64).astype(np.int64)
    spans = []
    for power in np.flatnonzero(documents).tolist():
        low, high = (0, 0) if power == 0 else (1 << (power - 1), (1 << power) - 1)
        spans.append(Span(low, high, int(documents[power]), int(tokens[power])))
    return spans


def find_tokenizer(data: IndexedDataset, spec: str) -> Tokenizer | None:
    """The given tokenizer; else the one that made the corpus; None if it cannot be read here."""
    if spec:
        return load_tokenizer(spec)
    try:
        return remembered_tokenizer(data)
    except ValueError as error:
        print(f"{error}, to see text", file=sys.stderr)
        return None


def samples(data: IndexedDataset, count: int, tokenizer: Tokenizer | None) -> list[tuple[int, int, str, int]]:
    """(number, tokens, text of the beginning, tokens not shown) of a few documents."""
    count = min(count, data.num_documents)
    found = []
    for k in range(count):
        number = data.num_documents * k // count
        shown = data.document(number, 0, SHOWN_TOKENS).tolist()
        start, stop = data.document_starts(number, number + 2).tolist()
        text = tokenizer.decode(shown) if tokenizer else " ".join(map(str, shown))
        found.append((number, stop - start, text, stop - start - len(shown)))
    return found


# -- in the terminal


def table_of(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> "Table":
    """A table whose cells are no markup, whatever square brackets they hold."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(*map(escape, columns))
    for row in rows:
        table.add_row(*(escape(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row))
    return table


def spans_as_rows(spans: Sequence[Span], num_tokens: int) -> list[list[object]]:
    most = max((span.documents for span in spans), default=1)
    return [
        [
            f"{span.low:,} to {span.high:,}" if span.high else "0",
            span.documents,
            f"{span.tokens / max(1, num_tokens):.1%}",
            "#" * round(20 * span.documents / most),
        ]
        for span in spans
    ]


# -- as a page


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } td.bar { width: 24rem; }
.bar div { background: #4a7ab5; height: .9rem; } pre { background: #f4f4f4; padding: .8rem; white-space: pre-wrap; }
"""


def page(
    data: IndexedDataset, about: dict[str, str], shown: Sequence[tuple[int, int, str, int]], spans: Sequence[Span]
) -> str:
    """One HTML page without a script: facts, tokens per source, the histogram, samples."""

    def rows(lines: Sequence[Sequence[Any]], largest: int) -> str:
        made = []
        for *cells, size in lines:
            tds = "".join(
                f'<td class="n">{cell:,}</td>' if isinstance(cell, int) else f"<td>{html.escape(str(cell))}</td>"
                for cell in cells
            )
            width = 100 * size / max(1, largest)
            made.append(f'<tr>{tds}<td class="bar"><div style="width:{width:.1f}%"></div></td></tr>')
        return "\n".join(made)

    by_source = sources(data)
    title = html.escape(Path(data.prefix).name)
    facts_rows = "\n".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in about.items())
    source_rows = rows([(n, d, t, t) for n, d, t in by_source], max((t for _, _, t in by_source), default=1))
    span_rows = rows(
        [
            (f"{s.low:,} to {s.high:,}", s.documents, f"{s.tokens / max(1, data.num_tokens):.1%}", s.documents)
            for s in spans
        ],
        max((span.documents for span in spans), default=1),
    )
    texts = "\n".join(
        f"<h3>document {number:,}: {size:,} tokens</h3><pre>{html.escape(text)}</pre>"
        + (f"<p>... and {left:,} tokens more</p>" if left else "")
        for number, size, text, left in shown
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head><body>
<h1>{title}</h1><p>{html.escape(data.prefix)}</p>
<table>{facts_rows}</table>
<h2>Tokens per source</h2><table><tr><th>--input</th><th>documents</th><th>tokens</th></tr>{source_rows}</table>
<h2>Lengths of documents</h2>
<table><tr><th>tokens</th><th>documents</th><th>share of tokens</th></tr>{span_rows}</table>
<h2>Samples</h2>
{texts}
</body></html>
"""


def main(arguments: Sequence[str]) -> None:
    """The tool. ValueError for a corpus or tokenizer that cannot be read."""
    options = parse(Options, arguments, PROGRAM)
    if options.documents < 0:
        raise ValueError(f"--documents {options.documents}: give 0 or more")
    from rich.console import Console

    data = IndexedDataset(options.prefix.removesuffix(".idx"))
    console = Console()
    about, spans = facts(data), histogram(data)
    console.print(table_of(["", data.prefix], list(about.items())))
    if by_source := sources(data):
        share = [(n, d, t, f"{t / max(1, data.num_tokens):.1%}") for n, d, t in by_source]
        console.print(table_of(["--input", "documents", "tokens", "share"], share))
    rows = spans_as_rows(spans, data.num_tokens)
    console.print(table_of(["tokens in document", "documents", "share of tokens", ""], rows))
    tokenizer = find_tokenizer(data, options.tokenizer) if options.documents else None
    shown = samples(data, options.documents, tokenizer)
    for number, size, text, left in shown:
        console.rule(f"document {number}: {size:,} tokens")
        # Plain print: square brackets in a text are no markup.
        print(text.encode("utf-8", "replace").decode(), flush=True)
        if left:
            print(f"... and {left:,} tokens more", flush=True)
    if options.html:
        made = page(data, about, shown, spans)
        write_atomically(options.html, made.encode("utf-8", "replace"))
        print(f"wrote {options.html}")


def command() -> None:
    """Run as a script, or as the console command megazero-peek."""
    run_tool(main)


if __name__ == "__main__":
    command()
