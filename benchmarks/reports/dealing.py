"""Make the tables of docs/results/context_parallelism.md: how even attention is over ranks, on real documents.

Example: python -m benchmarks.reports.dealing runs/preprocess
(the folder for packages and corpora, which are made if they are missing)
"""

import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.corpus import FILES, dictionary, documents_of, make_corpus
from benchmarks.preprocess import get_tokenizer
from benchmarks.reports.blocks import markdown, write_blocks
from megazero.data.indexed import IndexedDataset
from megazero.data.samples import GPTDataset
from megazero.engine.plan.layout.dealing import deal, deal_samples, imbalance
from megazero.planner.imbalance import causal_imbalance

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "context_parallelism.md"
LENGTH, RANKS = 32_768, 8
END = 50_256  # GPT-2's end-of-document token
NAMES = {  # of the corpora, with the mean length of their documents from short to long
    "dictionary": "a dictionary",
    "mixed": "all, shuffled",
    "Linux": "Linux's documentation",
    "Python": "Python's documentation",
    "Perl": "Perl's documentation",
    "plays": "plays of Shakespeare",
}

Documents = Sequence[int]  # first tokens of a sample's documents
Parts = list[list[range]]  # by rank


class Dealt(NamedTuple):
    """Pairs of a query and a key by rank, and the runs of queries of one document that the ranks have together."""

    work: Sequence[int]
    runs: int


def prepared(name: str, folder: Path) -> IndexedDataset:
    """Return a corpus, made if it is missing."""
    corpus = make_corpus(folder)
    if name != "mixed":
        corpus, root = folder / f"{name}.jsonl", folder / "packages"
        texts = list(dictionary(root) if name not in FILES else documents_of(root, name))
        random.Random(0).shuffle(texts)
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    get_tokenizer(folder / "gpt2")
    tool = [sys.executable, ROOT / "data_tools" / "preprocess_data.py", "--append-eod", "--tokenizer"]
    command = [*tool, f"gpt2:{folder / 'gpt2'}", "--input", corpus, "--output-prefix", folder / name]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return IndexedDataset(folder / f"{name}_text_document")


def samples_of(data: IndexedDataset, length: int) -> list[Documents]:
    """Return the documents of every sample of an epoch, as a run with --reset-attention-mask has them."""
    dataset = GPTDataset(data, "1", "train", length, seed=1234)
    return [starts(dataset[number].ids[:-1]) for number in range(data.num_tokens // length)]


def starts(ids: np.ndarray) -> Documents:
    behind = np.flatnonzero(ids == END) + 1
    return [0, *behind[behind < len(ids)].tolist()]


def in_documents(documents: Documents, tokens: range) -> Iterator[range]:
    """Yield the parts of a range of tokens, counted from the start of their document."""
    at = bisect_right(documents, tokens.start) - 1
    last = bisect_left(documents, tokens.stop)
    edges = [tokens.start, *documents[at + 1 : last], tokens.stop] if tokens else []
    for document, (start, stop) in zip(documents[at:], itertools.pairwise(edges), strict=False):
        yield range(start - document, stop - document)


def pairs(run: range) -> int:
    return (run.stop * (run.stop + 1) - run.start * (run.start + 1)) // 2


def of_parts(documents: Documents, parts: Iterable[Iterable[range]]) -> Dealt:
    runs = [[run for part in own for run in in_documents(documents, part)] for own in parts]
    return Dealt([sum(map(pairs, own)) for own in runs], sum(map(len, runs)))


def heads_and_tails(length: int) -> Parts:
    """Cut a sequence into 2 RANKS pieces, of which the last ones may be short: rank r has r and 2 RANKS - 1 - r."""
    piece = -(-length // (2 * RANKS))
    cut = [range(min(at * piece, length), min((at + 1) * piece, length)) for at in range(2 * RANKS)]
    return [[cut[rank], cut[-1 - rank]] for rank in range(RANKS)]


def contiguous(documents: Documents) -> Dealt:
    share = LENGTH // RANKS
    return of_parts(documents, [[range(at, at + share)] for at in range(0, LENGTH, share)])


def of_the_sample(documents: Documents) -> Dealt:
    return of_parts(documents, heads_and_tails(LENGTH))


def of_each_document(documents: Documents) -> Dealt:
    """Documents are padded to multiples of 2 RANKS. Padding counts as no work."""
    parts: Parts = [[] for _ in range(RANKS)]
    for start, stop in itertools.pairwise([*documents, LENGTH]):
        for own, pieces in zip(parts, heads_and_tails(stop - start), strict=True):
            own += [range(start + piece.start, start + piece.stop) for piece in pieces]
    return of_parts(documents, parts)


def ours(micro_batch: Sequence[Documents]) -> list[Dealt]:
    deals = deal_samples(LENGTH, RANKS, micro_batch)
    counted = [of_parts(documents, done.ranges) for documents, done in zip(micro_batch, deals, strict=True)]
    assert [tuple(each.work) for each in counted] == [done.work for done in deals], "the deal miscounts its work"
    return counted


# a way to divide the samples of a micro-batch -> the work and the runs of its ranks
WAYS: dict[str, Callable[[Sequence[Documents]], list[Dealt]]] = {
    "contiguous": lambda samples: [contiguous(each) for each in samples],
    "heads and tails": lambda samples: [of_the_sample(each) for each in samples],
    "of each document": lambda samples: [of_each_document(each) for each in samples],
    "the deal": ours,
}


def padding(documents: Documents) -> float:
    """Return the padding of `of_each_document`, over the sample's length."""
    lengths = (stop - start for start, stop in itertools.pairwise([*documents, LENGTH]))
    return sum(-length % (2 * RANKS) for length in lengths) / LENGTH


def mean_and_worst(values: Sequence[float]) -> str:
    return f"{100 * statistics.mean(values):.1f}, {100 * max(values):.1f}"


def uneven(dealt: Iterable[list[Dealt]]) -> str:
    """Format the imbalance of micro-batches: a rank's work is that in all samples."""
    return mean_and_worst([imbalance([sum(own) for own in zip(*(each.work for each in batch), strict=True)])
                           for batch in dealt])  # fmt: skip


def real_documents(folder: Path) -> dict[str, str]:
    """All samples of an epoch of each corpus, alone and in pairs."""
    even, runs = [], []
    for name, title in NAMES.items():
        data = prepared(name, folder)
        samples = samples_of(data, LENGTH)
        for size in (1, 2):
            batches = list(zip(*[iter(samples)] * size, strict=False))
            found = {way: [divide(batch) for batch in batches] for way, divide in WAYS.items()}
            even.append([title, size, f"{len(batches):,}", *map(uneven, found.values())])
            if size == 1:
                counts = list(map(len, samples))
                row = [title, f"{data.num_tokens / data.num_documents:,.0f}"]
                row += [
                    f"{statistics.median(counts):,.0f}, {max(counts):,}",
                    mean_and_worst(list(map(padding, samples))),
                ]
                lengths = [sum(one.runs for batch in found[way] for one in batch) for way in WAYS]
                runs.append([*row, *(f"{len(samples) * LENGTH / each:,.0f}" for each in lengths)])
        print(f"{title}: {len(samples)} samples", file=sys.stderr, flush=True)
    columns = ["corpus", "samples", "micro-batches", *WAYS]
    described = ["corpus", "tokens of a document", "documents in a sample: median, most", "padding, %", *WAYS]
    return {"imbalance": markdown(columns, even), "runs": markdown(described, runs)}


def larger(folder: Path) -> dict[str, str]:
    """The deal of longer samples and of more ranks, on the corpora of the shortest and of middling documents."""
    rows = []
    for name in ("dictionary", "mixed", "Linux"):
        data = prepared(name, folder)
        for length, ranks in ((32_768, 32), (32_768, 64), (131_072, 32), (131_072, 64)):
            deals = [deal(length, ranks, documents) for documents in samples_of(data, length)]
            pieces = [len(own) for done in deals for own in done.ranges]
            row = [NAMES[name], f"{length:,}", ranks, len(deals)]
            rows.append([*row, mean_and_worst([imbalance(done.work) for done in deals]), max(pieces)])
    return {"larger": markdown(["corpus", "tokens", "ranks", "samples", "the deal", "most ranges of a rank"], rows)}


def one_document() -> dict[str, str]:
    """Samples without boundaries of documents: lengths that 2 ranks divides, and others."""
    rows = []
    for ranks in (2, 3, 8, 24, 64):
        lengths = (LENGTH - LENGTH % (2 * ranks), *range(LENGTH - 2 * ranks, LENGTH), 131_071)
        cells = [100 * causal_imbalance(length, ranks) for length in lengths]
        rows.append([ranks, f"{cells[0]:.2f}", f"{max(cells[1:-1]):.2f}", f"{cells[-1]:.2f}"])
    columns = [
        "ranks",
        "a multiple of 2 ranks below 32,769",
        "the worst of the 2 ranks lengths below 32,768",
        "131,071",
    ]
    return {"one document": markdown(columns, rows)}


def times() -> dict[str, str]:
    """CPU milliseconds of one deal, the least of five."""
    rows = []
    draws = random.Random(1)
    for length, ranks, count in ((LENGTH, RANKS, 1), (LENGTH, RANKS, 100), (131_072, 64, 300), (2**20, 512, 3_000)):
        documents = sorted({0, *(draws.randrange(length) for _ in range(count - 1))})
        took = []
        for _ in range(5):
            start = time.process_time()
            deal(length, ranks, documents)
            took.append(1000 * (time.process_time() - start))
        rows.append([f"{length:,}", ranks, f"{count:,}", f"{min(took):.1f}"])
    return {"times": markdown(["tokens", "ranks", "documents", "ms"], rows)}


if __name__ == "__main__":
    blocks = one_document() | times()
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
        blocks |= real_documents(folder) | larger(folder)
    print("\n\n".join(blocks.values()))
    write_blocks(PAGE, blocks)
