"""First and last tokens of a sample of documents, compared with those of the tokenizer.

A corpus of other programs has no PREFIX.json, and that of an earlier version may name another end.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megazero.data.indexed import IndexedDataset
from megazero.data.tokenizer import Tokenizer

DOCUMENTS, LEAST = 64, 8  # sampled of a corpus, evenly spaced: at most; of a blend of thousands
READ = 1 << 14  # documents of all corpora, if these are not too many: reads of a slow disk
TOKENS = 1 << 24  # of all samples that are searched at most: some hundredths of a second
SHOWN = 3  # corpora with a sentence each


class Edges(NamedTuple):
    """Counts of sampled documents with tokens.

    Attributes:
        begun: those that begin with the tokens asked for.
        ended: those that end with the token asked for.
        holds_end: any token of them is that one.
        usual_end: the most frequent last token.
    """

    sampled: int
    begun: int
    ended: int
    holds_end: bool
    usual_end: int


def read_edges(data: IndexedDataset, bos: Sequence[int], eod: int | None, corpora: int) -> Edges:
    """Read a sample of documents, and search their tokens; without an `eod`, read their first ones alone.

    corpora: among which reads and `TOKENS` are shared out.
    """
    count = min(DOCUMENTS, max(LEAST, READ // corpora), data.num_documents)
    limit = TOKENS // corpora
    sampled, begun, holds, ends = 0, 0, False, Counter[int]()
    for number in range(count):
        start, stop = data.span(number * (data.num_documents - 1) // max(1, count - 1))
        if start == stop:
            continue
        sampled += 1
        begun += data.tokens(start, min(stop, start + len(bos))).tolist() == list(bos)
        if eod is not None:
            holds = holds or bool((data.tokens(start, min(stop, start + limit // count)) == eod).any())
            ends[int(data.tokens(stop - 1, stop)[0])] += 1
    usual, ended = ends.most_common(1)[0][0] if ends else -1, 0 if eod is None else ends[eod]
    return Edges(sampled=sampled, begun=begun, ended=ended, holds_end=holds or ended > 0, usual_end=usual)


def check_edges(
    corpora: Sequence[IndexedDataset], abouts: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, flags: Sequence[str]
) -> tuple[str, ...]:
    """Compare documents with the beginning of a text and the end of a document.

    Args:
        abouts: contents of PREFIX.json.
        flags: those given that need the end of a document.

    Returns:
        Sentences on corpora whose documents differ.

    Raises:
        ValueError: a sample of a corpus does not hold the end of a document, and `flags` need it.
    """
    bos, eod = tokenizer.own_bos or tokenizer.bos, tokenizer.eod if flags else None
    bos = bos or (tokenizer.beginning if len(corpora) > 1 else ())  # corpora of a blend may disagree
    name, given = f"--tokenizer {tokenizer.spec}", " ".join(flags)
    shown = functools.cache(tokenizer.shown)  # which makes a table of the vocabulary
    begins, ends, others, begun = list[str](), list[str](), list[str](), False
    why = f"{name} puts before a text; if the model was trained with it, preprocess them with --prepend-bos"
    if not tokenizer.own_bos:
        why = "other corpora begin with; preprocess all with --prepend-bos, or all with --no-prepend-bos"
    for data, about in zip(corpora, abouts, strict=True):
        if (known := about.get("eod")) is not None and known not in tokenizer.ends:
            others.append(
                f"documents of --data-path {data.prefix} end with {shown(known)}, and {name} has another end "
                "of a document; preprocess them again"
            )
        if not (bos or flags):
            continue
        edges = read_edges(data, bos, eod, len(corpora))
        of = f"{edges.sampled} sampled documents of --data-path {data.prefix}"
        begun = begun or edges.begun > 0
        if bos and edges.begun < edges.sampled:
            begins.append(f"{edges.sampled - edges.begun} of {of} do not begin with {shown(*bos)}, which {why}")
        if eod is None or edges.ended == edges.sampled:
            continue
        end, usual = shown(eod), shown(edges.usual_end)
        if not edges.holds_end:
            raise ValueError(
                f"{given}: none of {of} has the end-of-document token {end} of {name}; most end with {usual}; "
                "preprocess them again with --append-eod, name the tokenizer that made them, or drop these flags"
            )
        ends.append(
            f"{edges.sampled - edges.ended} of {of} do not end with {end}; most end with {usual}: at such an end "
            f"{given} {'have' if len(flags) > 1 else 'has'} no effect"
        )
    if not (tokenizer.own_bos or begun):
        begins = []
    if tokenizer.bos and not begins:
        begins.append(f"texts begin with {shown(*tokenizer.bos)}")
    return tuple(note for notes in (others, begins, ends) for note in _few(notes))


def _few(notes: list[str]) -> list[str]:
    more = len(notes) - SHOWN
    return notes if more <= 0 else [*notes[:SHOWN], f"{more} more corpora differ in this way"]
