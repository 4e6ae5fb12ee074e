"""Sources that --input names: files by name, folder or glob, standard input, data sets of the `datasets` library."""

import glob
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megazero.files import explain

Kind = Literal["jsonl", "text", "csv", "tsv", "parquet", "arrow", "rows", "stream", "stdin", "stdin-text"]
Format = Literal["auto", "jsonl", "text", "csv", "tsv", "parquet", "arrow"]
KINDS: dict[str, Kind] = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson", ".jsonlines", ".jl"), "jsonl"),
    **dict.fromkeys((".txt", ".md"), "text"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
# Endings of compressed files, by format; parquet and Arrow compress within.
COMPRESSIONS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bzip2", ".xz": "xz"}
# In a folder, texts of these names are about the data.
ABOUT = re.compile(r"(readme|licen[cs]e|copying|notice|changelog)\b", re.IGNORECASE)
SHOWN_ENDINGS = 9
# A pointer is a file of three lines, which a clone without git-lfs has in place of a large file.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
STDIN = "-"
DATASETS = "datasets:"
# A folder with one of these was written by `datasets.Dataset.save_to_disk`, or `DatasetDict.save_to_disk`.
SAVED_DATASET = ("dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True)
class Source:
    """One file, or one stream, of documents.

    `begin`, `end`: the part of [0, 1) of it that is read, less than all only with --partition. `argument`: number of
    the --input value that names it. `size` in bytes on disk; 0 if unknown. `compression`: a value of COMPRESSIONS.
    """

    name: str
    kind: Kind
    argument: int
    size: int = 0
    modified: int = 0
    compression: str = ""
    split: str = ""
    begin: float = 0.0
    end: float = 1.0

    def identity(self) -> list[object]:
        """Properties that must not change between a run and the one that resumes it."""
        return [self.name, self.kind, self.size, self.modified, self.split, self.begin, self.end]


def find_sources(inputs: Sequence[str], keys: Sequence[str], input_format: Format = "auto") -> list[Source]:
    """All sources in order, those of a folder or a glob sorted by name. ValueError naming the wrong --input."""
    if len(set(keys)) != len(keys):
        raise ValueError(f"--json-keys {' '.join(keys)}: a key is given twice; give each once")
    for key in keys:
        if not key or "/" in key or "\0" in key:
            raise ValueError(f"--json-keys {key!r}: a key becomes part of a file name; rename it in the input")
    if not inputs:
        raise ValueError("--input is missing; name files, folders, globs, - or datasets:NAME")
    found: list[Source] = []
    seen: dict[Path, str] = {}
    for number, given in enumerate(inputs):
        for source in _sources_of(given, number, input_format):
            if source.kind in ("text", "stdin-text") and list(keys) != ["text"]:
                raise ValueError(
                    f"--input {source.name}: a text file has no --json-keys {' '.join(keys)}; give JSON lines, "
                    f"or leave --json-keys at text"
                )
            path = Path(source.name).resolve()
            if path in seen:
                raise ValueError(f"--input {given}: {source.name} is the same file as {seen[path]}; give each once")
            seen[path] = source.name
            found.append(source)
    return found


def _sources_of(given: str, number: int, input_format: Format) -> list[Source]:
    if given == STDIN:
        if input_format not in ("auto", "jsonl", "text"):
            raise ValueError(f"--input -: standard input cannot be {input_format}; name the files")
        return [Source(STDIN, "stdin-text" if input_format == "text" else "stdin", number)]
    if given.startswith(DATASETS):
        return [_dataset(given, number)]
    if os.path.isdir(given):
        if any(os.path.isfile(os.path.join(given, name)) for name in SAVED_DATASET):
            return [_dataset(DATASETS + given, number)]
        return _folder(given, number, input_format)
    if not os.path.lexists(given) and glob.has_magic(given):
        names = sorted(name for name in glob.glob(given, recursive=True) if not os.path.isdir(name))
        if not names:
            raise ValueError(f"--input {given}: no file has such a name")
        return [_file(name, number, input_format) for name in names]
    return [_file(given, number, input_format)]


def _folder(folder: str, number: int, input_format: Format) -> list[Source]:
    """Every file below a folder whose kind is known, or, with --input-format, every file; hidden files are left out.

    Of auto, texts about the data are left out, and all texts next to files of rows. stderr names the files left out.
    """
    names = list(_walk(folder))
    if input_format == "auto":
        names = _chosen(folder, names)
    if not names:
        raise ValueError(
            f"--input {folder}: a folder without a file whose name ends in {', '.join(KINDS)}; name files, or give "
            f"--input-format for other endings"
        )
    return [_file(name, number, input_format) for name in names]


def _chosen(folder: str, names: Sequence[str]) -> list[str]:
    kinds = {name: _kind_of(name)[0] for name in names}
    rows = any(kind not in (None, "text") for kind in kinds.values())
    about = {name for name in names if kinds[name] == "text" and ABOUT.match(os.path.basename(name))}
    texts = [name for name in names if kinds[name] == "text" and name not in about and rows]
    out = about.union(texts, (name for name, kind in kinds.items() if kind is None))
    if out:
        named = (os.path.basename(name) if name in about else os.path.splitext(name)[1] for name in out)
        counts = sorted(
            Counter(end or "without an ending" for end in named).items(), key=lambda each: (-each[1], each[0])
        )
        listed = ", ".join(f"{count} {end}" for end, count in counts[:SHOWN_ENDINGS])
        more = sum(count for _, count in counts[SHOWN_ENDINGS:])
        pattern = os.path.join(folder, f"**/*{os.path.splitext(texts[0])[1]}") if texts else ""
        print(
            f"--input {folder}: left out {listed}{f' and {more} others' if more else ''}"
            + (f"; to add the texts: --input {folder} '{pattern}'" if texts else ""),
            file=sys.stderr,
        )
    return [name for name in names if name not in out]


def _walk(folder: str) -> Iterator[str]:
    """Yield the files below a folder, sorted; links are followed, to each folder once. OSError as a ValueError."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"--input {explain(error)}") from error

    entered = set[tuple[int, int]]()
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
        else:
            entered.add((status.st_dev, status.st_ino))
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield from (os.path.join(parent, name) for name in sorted(files) if not name.startswith("."))


def _kind_of(name: str) -> tuple[Kind | None, str]:
    stem, end = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(end, "")
    kind = KINDS.get(os.path.splitext(stem)[1] if compression else end)
    return (None if compression and kind in ("parquet", "arrow") else kind), compression


def _file(name: str, number: int, input_format: Format) -> Source:
    if os.path.exists(name) and not os.path.isfile(name):
        raise ValueError(f"--input {name} is no regular file; name files, or - for standard input")
    try:
        with open(name, "rb") as file:
            status = os.fstat(file.fileno())
            pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError as error:
        raise ValueError(f"--input {explain(error)}") from error
    if pointer:
        where = os.path.dirname(name) or "."
        raise ValueError(f"--input {name} is a pointer of git-lfs, not the data; run `git lfs pull` in {where}")
    kind, compression = _kind_of(name)
    if input_format != "auto":
        kind = input_format
    if kind is None:
        compressible = [end for end, kind in KINDS.items() if kind not in ("parquet", "arrow")]
        raise ValueError(
            f"--input {name}: unknown kind of file; its name must end in {', '.join(compressible)}, these also with "
            f"{', '.join(COMPRESSIONS)}, or in {', '.join(end for end in KINDS if end not in compressible)}; or give "
            f"--input-format"
        )
    return Source(
        name=name, kind=kind, argument=number, size=status.st_size, modified=status.st_mtime_ns, compression=compression
    )


def _dataset(given: str, number: int) -> Source:
    name, _, split = given.removeprefix(DATASETS).rpartition(":")
    if not name or os.path.exists(given.removeprefix(DATASETS)):
        name, split = given.removeprefix(DATASETS), ""
    if not name:
        raise ValueError(f"--input {given}: name a data set, such as datasets:NAME or datasets:NAME:SPLIT")
    saved = any(os.path.isfile(os.path.join(name, file)) for file in SAVED_DATASET)
    if not saved:
        return Source(name, "stream", number, split=split)
    found = [path.stat() for path in Path(name).rglob("*.arrow")]
    size, modified = sum(each.st_size for each in found), max((each.st_mtime_ns for each in found), default=0)
    return Source(name=name, kind="rows", argument=number, size=size, modified=modified, split=split)


def partition(sources: Sequence[Source], given: str) -> list[Source]:
    """The sources of part I of N (`given`: "I/N", I from 0), of about equal size on disk.

    The parts, one after another, are the whole input in its order. A document belongs to the part in which its line or
    row group begins; or its file, if that cannot be read from the middle.
    """
    try:
        index, count = (int(word) for word in given.split("/"))
    except ValueError:
        index, count = -1, 0
    if not 0 <= index < count:
        raise ValueError(f"--partition {given}: give I/N with I from 0 to N - 1, such as 0/8")
    if count == 1:
        return list(sources)
    unsized = [source.name for source in sources if source.kind in ("stream", "stdin", "stdin-text")]
    if unsized:
        raise ValueError(
            f"--partition {given}: {unsized[0]} is a stream, which cannot be entered in the middle; save it as files"
        )
    sizes = [max(1, source.size) for source in sources]
    total, position, parts = sum(sizes), 0, []
    first, stop = total * index / count, total * (index + 1) / count
    for source, size in zip(sources, sizes, strict=True):
        begin, end = (min(1.0, max(0.0, (border - position) / size)) for border in (first, stop))
        if position <= first < position + size or first <= position < stop:
            parts.append(Source(**{**vars(source), "begin": begin, "end": end}))
        position += size
    return parts
