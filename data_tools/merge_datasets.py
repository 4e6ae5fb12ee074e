#!/usr/bin/env python3
"""Join corpora into one: the parts of `preprocess_data.py --partition`, or any of the same tokenizer."""

import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_tools.finished import digest, refuse_files_of_others
from data_tools.tool import parse, progress_bar, run_tool
from megazero.data.about import read_about, verify
from megazero.data.indexed import CHUNK, IndexedDataset
from megazero.data.writer import IndexedWriter
from megazero.units import things

PROGRAM = "merge_datasets.py"
# Keys of PREFIX.json that must agree in all parts, and keys that are summed.
SAME = ("tokenizer_hash", "vocab_size", "eod", "bos")
SUMS = ("text_bytes", "empty_documents", "duplicate_documents", "skipped_lines")


@dataclass(frozen=True)
class Options:
    """Join corpora into one, in the order in which they are given.

    The parts of `preprocess_data.py --partition I/N`, in order, give the files that one run over all would have made.
    The checksums of the parts are checked first. Needs the space of the result, and little memory.

    example:
      python data_tools/merge_datasets.py --input data/wiki-*-of-00008_text_document.idx
      --output-prefix data/wiki_text_document
    """

    input: tuple[str, ...]
    """Prefixes of corpora. PREFIX.idx is accepted, so that a glob of the shell works."""
    output_prefix: str
    """Prefix of the corpus to write: P.bin, P.idx and P.json, and P.mask if the parts have loss masks."""


def merge(inputs: Sequence[str], output_prefix: str) -> IndexedWriter:
    """Write the joined corpus and return its writer, which has the counts. ValueError if the parts do not match."""
    prefixes = [given.removesuffix(".idx") for given in inputs]
    if not prefixes:
        raise ValueError("--input is missing; name the corpora to join")
    double = [prefix for k, prefix in enumerate(prefixes) if prefix in prefixes[:k]]
    if double:
        raise ValueError(f"--input {double[0]} is named twice; name each once")
    if output_prefix in prefixes:
        raise ValueError(f"--output-prefix {output_prefix} is also an --input; give another")
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    abouts = [read_about(part) for part in parts]
    _check_fit(parts, abouts)
    with progress_bar("checking", sum(part.num_tokens * part.dtype.itemsize for part in parts)) as bar:
        for part in parts:
            verify(part, advance=lambda done: bar.advance(done, done))
    about = _joined(abouts) if all(abouts) else None
    if about is not None:
        _copy_tokenizer(about, prefixes[0], output_prefix)
    writer = IndexedWriter(output_prefix, parts[0].dtype, about, masked=parts[0].masked)
    with writer, progress_bar("joining", sum(part.num_tokens * part.dtype.itemsize for part in parts)) as bar:
        for part in parts:
            for start, stop, lengths, ends in pieces(part):
                ids = part.tokens(start, stop)
                writer.add_documents(ids, lengths, ends, part.mask(start, stop) if part.masked else None)
                bar.advance(ids.nbytes, ids.nbytes, ids.size)
    return writer


def pieces(data: IndexedDataset) -> Iterator[tuple[int, int, Any, Any]]:
    """Yield a corpus in pieces of whole documents: range of tokens, sequence lengths, sequences up to each end."""
    bounds, starts = data.document_indices, data.document_starts
    document = 0
    while document < data.num_documents:
        # As many documents as make about CHUNK tokens, at least one.
        many = min(document + CHUNK, data.num_documents)
        tokens = starts(document, many + 1)
        count = max(1, int(np.searchsorted(tokens, tokens[0] + CHUNK, side="right")) - 1)
        stop = min(document + count, data.num_documents)
        first, last = int(bounds[document]), int(bounds[stop])
        ends = np.asarray(bounds[document + 1 : stop + 1]) - first
        yield int(tokens[0]), int(tokens[stop - document]), np.asarray(data.lengths[first:last]), ends
        document = stop


def _check_fit(parts: Sequence[IndexedDataset], abouts: Sequence[dict[str, Any]]) -> None:
    for part, about in zip(parts, abouts, strict=True):
        if part.dtype != parts[0].dtype:
            raise ValueError(
                f"--input {part.prefix} has {part.dtype.name} tokens, and {parts[0].prefix} {parts[0].dtype.name}; "
                f"preprocess one of them again with --dtype"
            )
        if part.masked != parts[0].masked:
            one, other = (part, parts[0]) if part.masked else (parts[0], part)
            raise ValueError(
                f"--input {one.prefix} has a loss mask, and {other.prefix} has none; preprocess one of them again, or "
                f"train on both: --data-path {parts[0].prefix} {part.prefix}"
            )
        for key in SAME:
            if about and abouts[0] and about.get(key) != abouts[0].get(key):
                raise ValueError(
                    f"--input {part.prefix} was made with another tokenizer than {parts[0].prefix}: {key} "
                    f"{about.get(key)}, not {abouts[0].get(key)}; preprocess one of them again"
                )


def _joined(abouts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The description of the joined corpus, as `preprocess_data.py` would have written it."""
    first = abouts[0]
    written = ("version", "dtype", "num_documents", "num_tokens", "max_id", "num_targets", "checksum")
    joined = {key: value for key, value in first.items() if key not in written}
    sources: dict[str, dict[str, Any]] = {}
    for about in abouts:
        for source in about.get("sources") or []:
            known = sources.setdefault(str(source.get("input")), {**source, "documents": 0, "tokens": 0})
            for key in ("documents", "tokens"):
                known[key] += source.get(key, 0)
    joined["sources"] = list(sources.values())
    for key in SUMS:
        joined[key] = sum(about.get(key, 0) for about in abouts)
    partitions = [str(about.get("partition", "0/1")) for about in abouts]
    whole = [f"{k}/{len(abouts)}" for k in range(len(abouts))]
    if partitions == whole or all(part == "0/1" for part in partitions):
        joined["partition"] = "0/1"
    else:
        joined["partition"] = " ".join(partitions)
    records = [{**about.get("made_with", {}), "--partition": digest(joined["partition"])} for about in abouts]
    if "made_with" in joined and all(record == records[0] for record in records):
        joined["made_with"] = records[0]
    else:
        joined.pop("made_with", None)
    return joined


def _copy_tokenizer(about: dict[str, Any], part: str, output_prefix: str) -> None:
    """Copy the tokenizer next to the first part to the folder of the joined corpus, and name it in `about`."""
    kind, colon, path = str(about.get("saved_tokenizer", "byte")).rpartition(":")
    folder, *file = Path(path).parts
    if (Path(part).parent / folder).is_dir():
        base = Path(output_prefix.removesuffix(f"_{about.get('key')}_document"))
        refuse_files_of_others(str(base), copied=Path(part).parent / folder)
        base.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(Path(part).parent / folder, f"{base}_tokenizer", dirs_exist_ok=True)
        about["saved_tokenizer"] = f"{kind}{colon}{Path(f'{base.name}_tokenizer', *file)}"


def main(arguments: Sequence[str]) -> None:
    """The tool. ValueError for corpora that cannot be read or do not match."""
    options = parse(Options, arguments, PROGRAM)
    writer = merge(options.input, options.output_prefix)
    documents, tokens = things(writer.num_documents, "document"), things(writer.num_tokens, "token")
    print(f"{writer.prefix}: {documents}, {tokens}, {writer.dtype.name}")


if __name__ == "__main__":
    run_tool(main, PROGRAM)
