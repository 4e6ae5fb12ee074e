"""Sources read as chunks: a piece of a file of about a megabyte, with the position after it.

A chunk's content depends on its position alone, so that a resumed run reads the same chunks.
"""

import csv
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from data_tools.compressed import damage, open_source
from data_tools.sources import Source
from megazero.files import explain, first_line
from megazero.units import things

if TYPE_CHECKING:
    import pyarrow as pa

# Size of the chunks that workers encode: large enough to outweigh the transport, small enough for a queue of them. A
# longer document is a chunk of its own.
CHUNK_BYTES = 1 << 20
# Faults of a source that a library reads.
DAMAGED = "damaged KIND file: {}; fetch it again"
UNREADABLE = "`datasets` cannot read it: {}"
# Rows decoded at once of a table.
ROWS = 256
# A longer field of a CSV file is a quote that nothing closes.
FIELD_CHARACTERS = 1 << 28


@dataclass(frozen=True)
class Position:
    """A position in the input: the number of the source, the offset (decompressed bytes, or rows), the line.

    `line` is -1 if it is unknown, because a --partition begins in the middle of a file.
    """

    source: int = 0
    offset: int = 0
    line: int = 1


BEGINNING = Position()
Value = TypeVar("Value")


@dataclass(frozen=True)
class Chunk:
    """Some documents of one source.

    `raw`: lines, or a whole text, or an Arrow stream of rows; `behind`: the position after them; `disk_bytes`: their
    size on the disk, compressed if the file is.
    """

    source: Source
    at: Position
    behind: Position
    raw: bytes
    disk_bytes: int

    def where(self, number: int) -> str:
        """The place of line, or row, `number` of the chunk, counted from 0, for a message."""
        name = "standard input" if self.source.kind.startswith("stdin") else self.source.name
        if self.source.kind in ("text", "stdin-text"):
            return name
        if self.source.kind in ("jsonl", "stdin"):
            if self.at.line < 0:
                return f"{name}, line {number + 1} behind byte {self.at.offset}"
            return f"{name}:{self.at.line + number}"
        return f"{name}, row {self.at.offset + number}"


def read_chunks(sources: Sequence[Source], keys: Sequence[str], start: Position = BEGINNING) -> Iterator[Chunk]:
    """Yield all chunks from `start`. ValueError naming the --input that is missing, damaged or without a key."""
    for number in range(start.source, len(sources)):
        source = sources[number]
        at = start if number == start.source else Position(number)
        try:
            yield from _READERS[source.kind](source, at, keys)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, OSError) and (error.errno or not source.compression):
                raise ValueError(f"--input {explain(error)}") from error
            raise ValueError(f"--input {source.name}: {damage(source, error)}") from error


# -- bytes


def _skip(file: BinaryIO, count: int, name: str) -> None:
    while count:
        part = file.read(min(count, CHUNK_BYTES))
        if not part:
            raise ValueError(f"--input {name}: it is shorter than when this work began; start again from the beginning")
        count -= len(part)


def _read_lines(source: Source, at: Position, keys: Sequence[str]) -> Iterator[Chunk]:
    if source.compression and source.begin:
        return  # begins in another part of a --partition
    raw, file = open_source(source)
    with raw:
        stop = sys.maxsize
        if not source.compression:
            stop = _border(source, source.end)
            if at.offset == 0 and source.begin:
                at = Position(at.source, _line_start(file, _border(source, source.begin)), -1)
            file.seek(at.offset)
        else:
            _skip(file, at.offset, source.name)
        yield from _line_chunks(source, at, file, stop=stop, tell=raw.tell)


def _border(source: Source, share: float) -> int:
    return sys.maxsize if share >= 1 else round(source.size * share)


def _line_start(file: BinaryIO, offset: int) -> int:
    """The start of the first line that begins at or after `offset`."""
    file.seek(max(0, offset - 1))
    file.readline()
    return file.tell() if offset else 0


def _line_chunks(source: Source, at: Position, file: BinaryIO, stop: int, tell: Callable[[], int]) -> Iterator[Chunk]:
    """The lines that begin before `stop`."""
    disk = tell()
    while at.offset < stop:
        block = file.read(min(CHUNK_BYTES, stop - at.offset))
        if not block:
            return
        if not block.endswith(b"\n"):
            block += file.readline()  # a line of any length
        line = at.line + block.count(b"\n") if at.line > 0 else -1
        behind = Position(at.source, at.offset + len(block), line)
        yield Chunk(source=source, at=at, behind=behind, raw=block, disk_bytes=tell() - disk)
        at, disk = behind, tell()


def _read_stdin(source: Source, at: Position, keys: Sequence[str]) -> Iterator[Chunk]:
    file = sys.stdin.buffer
    _skip(file, at.offset, source.name)
    yield from _line_chunks(source, at, file, stop=sys.maxsize, tell=lambda: 0)


def _read_stdin_text(source: Source, at: Position, keys: Sequence[str]) -> Iterator[Chunk]:
    if at.offset == 0:
        text = sys.stdin.buffer.read()
        yield Chunk(source=source, at=at, behind=Position(at.source, len(text) + 1), raw=text, disk_bytes=0)


def _read_text(source: Source, at: Position, keys: Sequence[str]) -> Iterator[Chunk]:
    if at.offset or source.begin:
        return
    raw, file = open_source(source)
    with raw:
        text = file.read()
        yield Chunk(source=source, at=at, behind=Position(at.source, len(text) + 1), raw=text, disk_bytes=raw.tell())


# -- rows


@contextmanager
def _library(source: Source, fault: str) -> Iterator[None]:
    """Turn any exception of a library into a ValueError. The block has no code of ours, whose faults would be hidden.

    fault: of the input, with a place {} for the exception's text.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"--input {source.name}: {fault.format(first_line(error))}") from error


def _guarded(source: Source, fault: str, items: Iterator[Value]) -> Iterator[Value]:
    """Yield the values of a library's iterator; see `_library`."""
    nothing = object()
    while True:
        with _library(source, fault):
            item = next(items, nothing)
        if item is nothing:
            return
        yield item  # type: ignore[misc]


def _read_parquet(source: Source, at: Position, keys: Sequence[str]) -> Iterator[Chunk]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fault = DAMAGED.replace("KIND", "parquet")
    with _library(source, fault):
        file = pq.ParquetFile(source.name, page_checksum_verification=True)
        names, sizes = (
            file.schema_arrow.names,
            [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)],
        )
    with file:
        _check_columns(source, names, keys)
        row = 0
        for number, count in enumerate(sizes):
            if source.begin <= number / len(sizes) < source.end and row + count > at.offset:
                with _library(source, fault):
                    batches = file.iter_batches(ROWS, row_groups=[number], columns=list(keys), use_threads=False)
                first = row
                for batch in _guarded(source, fault, batches):
                    table = pa.Table.from_batches([batch])
                    disk = round(source.size / len(sizes) * table.num_rows / max(1, count))
                    yield from _row_chunks(source, at, table, row=first, disk_bytes=disk)
                    first += table.num_rows
            row += count


def _read_arrow(source: Source, at: Position, keys: Sequence[str]) -> Iterator[Chunk]:
    """Arrow's file format, or its stream format, in which `datasets` stores."""
    import pyarrow as pa

    if source.begin:
        return
    fault = DAMAGED.replace("KIND", "Arrow")
    with open(source.name, "rb") as raw:
        head = raw.read(6)
        raw.seek(0)
        with _library(source, fault):
            reader = pa.ipc.open_file(raw) if head == b"ARROW1" else pa.ipc.open_stream(raw)
            names = reader.schema.names
        _check_columns(source, names, keys)

        def tables() -> Iterator[pa.Table]:
            mapped = head == b"ARROW1"
            for batch in map(reader.get_batch, range(reader.num_record_batches)) if mapped else reader:
                table = pa.Table.from_batches([batch]).select(list(keys))
                table.validate(full=True)  # offsets outside the buffers would end the process
                yield table

        row, disk = 0, 0
        for table in _guarded(source, fault, tables()):
            yield from _row_chunks(source, at, table, row=row, disk_bytes=raw.tell() - disk)
            row, disk = row + table.num_rows, raw.tell()


def _read_csv(source: Source, at: Position, keys: Sequence[str]) -> Iterator[Chunk]:
    """Rows below a header, with commas between fields, or tabs in a .tsv."""
    if source.begin:
        return
    raw, file = open_source(source)
    with raw:
        row, disk = 0, 0
        for table in _csv_tables(source, file, keys):
            yield from _row_chunks(source, at, table, row=row, disk_bytes=raw.tell() - disk)
            row, disk = row + table.num_rows, raw.tell()


def _csv_tables(source: Source, file: BinaryIO, keys: Sequence[str]) -> Iterator["pa.Table"]:
    """Yield the columns of `keys` as bytes. ValueError for a row with more or fewer fields than the header."""
    import pyarrow as pa

    lines = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")  # whether it is UTF-8 is seen per row
    rows = csv.reader(lines, "excel-tab" if source.kind == "tsv" else "excel", strict=True)
    texts: list[list[bytes]] = []
    before = csv.field_size_limit(FIELD_CHARACTERS)
    try:
        header = next(rows, [])
        if "\ufffd" in "".join(header).encode(errors="surrogateescape").decode(errors="replace"):
            raise csv.Error("the header is no UTF-8 text")
        _check_columns(source, header, keys)
        places, waiting = [header.index(key) for key in keys], 0
        for fields in filter(None, rows):
            if len(fields) != len(header):
                raise csv.Error(f"{things(len(fields), 'field')}, and the header has {len(header)}")
            texts.append([fields[place].encode(errors="surrogateescape") for place in places])
            waiting += sum(map(len, texts[-1]))
            if waiting >= CHUNK_BYTES or len(texts) == ROWS:
                yield pa.table(dict(zip(keys, zip(*texts, strict=True), strict=True)))
                texts, waiting = [], 0
    except csv.Error as error:
        raise ValueError(
            f"--input {source.name}, line {rows.line_num}: {error}; correct it (a field with a separator, a quote or "
            f"the end of a line is quoted, and a quote in it doubled), or save it as JSON lines"
        ) from error
    finally:
        csv.field_size_limit(before)
    if texts:
        yield pa.table(dict(zip(keys, zip(*texts, strict=True), strict=True)))


def _read_rows(source: Source, at: Position, keys: Sequence[str]) -> Iterator[Chunk]:
    """A folder of `save_to_disk`, mapped by `datasets`."""
    data = _load(source)
    _check_columns(source, data.column_names, keys)
    with _library(source, UNREADABLE):
        data = data.select_columns(list(keys)).with_format("arrow")
    stop = round(len(data) * source.end)
    at = Position(at.source, max(at.offset, round(len(data) * source.begin)))
    for row in range(at.offset // ROWS * ROWS, stop, ROWS):
        with _library(source, UNREADABLE):
            table = data[row : min(row + ROWS, stop)]
        yield from _row_chunks(
            source, at, table, row=row, disk_bytes=round(source.size * table.num_rows / max(1, len(data)))
        )


def _read_stream(source: Source, at: Position, keys: Sequence[str]) -> Iterator[Chunk]:
    """A data set of the hub, or a folder of files, streamed by `datasets`."""
    import pyarrow as pa

    def table() -> pa.Table:
        with _library(source, f"rows from {row:,} on have no common type: {{}}; save it as JSON lines"):
            return pa.Table.from_pylist(texts)

    data = _load(source)
    row, texts = at.offset, []
    waiting = 0
    columns = getattr(data, "column_names", None)
    if columns:
        _check_columns(source, columns, keys)
    for document in _guarded(source, UNREADABLE, iter(data.skip(row) if row else data)):
        texts.append({key: document.get(key) for key in keys})
        waiting += sum(len(text) for text in texts[-1].values() if isinstance(text, str))
        if waiting >= CHUNK_BYTES or len(texts) == ROWS:
            yield from _row_chunks(source, at, table(), row=row, disk_bytes=0)
            row, texts, waiting = row + len(texts), [], 0
    if texts:
        yield from _row_chunks(source, at, table(), row=row, disk_bytes=0)


def _load(source: Source) -> Any:
    """The data set of a `datasets:` source. ValueError for any exception of the library."""
    import datasets

    spec = f"datasets:{source.name}" + (f":{source.split}" if source.split else "")
    try:
        if source.kind == "rows":
            data = datasets.load_from_disk(source.name)
        else:
            data = datasets.load_dataset(source.name, streaming=True)
    except Exception as error:
        raise ValueError(
            f"--input {spec}: `datasets` cannot read it: {first_line(error)}; give a folder of save_to_disk, a folder "
            f"of data files, or the name of a data set of the hub where there is a network"
        ) from error
    if isinstance(data, dict):
        split = source.split or ("train" if "train" in data else next(iter(data)) if len(data) == 1 else "")
        if split not in data:
            raise ValueError(f"--input {spec}: it has the splits {', '.join(data)}; give datasets:{source.name}:SPLIT")
        return data[split]
    if source.split:
        raise ValueError(f"--input {spec}: it has no splits; leave :{source.split} out")
    return data


def _check_columns(source: Source, names: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        if list(names).count(key) > 1:
            raise ValueError(f"--json-keys {key}: {source.name} has several columns of this name; rename them")
        if key not in names:
            raise ValueError(
                f"--json-keys {key}: {source.name} has no such column; give one of {', '.join(names)[:200]}"
            )


def _row_chunks(source: Source, at: Position, table: "pa.Table", row: int, disk_bytes: int) -> Iterator[Chunk]:
    """Yield the rows of a table from position `at` in chunks of about `CHUNK_BYTES`; its first row is number `row`."""
    import pyarrow as pa

    if at.offset > row:
        table, row = table.slice(at.offset - row), at.offset
    while table.num_rows:
        count = table.num_rows
        while count > 1 and table.slice(0, count).nbytes > CHUNK_BYTES:
            count = (count + 1) // 2
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(0, count))
        share = round(disk_bytes * count / table.num_rows)
        yield Chunk(
            source=source,
            at=Position(at.source, row),
            behind=Position(at.source, row + count),
            raw=sink.getvalue().to_pybytes(),
            disk_bytes=share,
        )
        table, row, disk_bytes = table.slice(count), row + count, disk_bytes - share


_READERS: dict[str, Callable[[Source, Position, Sequence[str]], Iterator[Chunk]]] = {
    "jsonl": _read_lines,
    "text": _read_text,
    "csv": _read_csv,
    "tsv": _read_csv,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "rows": _read_rows,
    "stream": _read_stream,
    "stdin": _read_stdin,
    "stdin-text": _read_stdin_text,
}
