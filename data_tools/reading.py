"""Sources read as chunks: a piece of a file of about a megabyte, with the position after it.

A chunk's content depends on its position alone, so that a resumed run reads the same chunks.
"""

import bz2
import gzip
import io
import lzma
import shlex
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from data_tools.sources import Source
from megazero.files import explain

if TYPE_CHECKING:
    import pyarrow as pa

# Size of the chunks that workers encode: large enough to outweigh the transport, small enough for a queue of them. A
# longer document is a chunk of its own.
CHUNK_BYTES = 1 << 20
# Rows decoded at once of a parquet file or a data set.
ROWS = 256


@dataclass(frozen=True)
class Position:
    """A position in the input: the number of the source, the offset (decompressed bytes, or rows), the line.

    `line` is -1 if it is unknown, because a --partition begins in the middle of a file.
    """

    source: int = 0
    offset: int = 0
    line: int = 1


BEGINNING = Position()


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
            raise ValueError(f"--input {source.name}: {_damage(source, error)}") from error


def _damage(source: Source, error: Exception) -> str:
    """Return the fault of a compressed file, and the way out."""
    if "requires too much memory" in str(error):
        return (
            "zstd's window of this file is longer than 128 MiB, which only the command zstd reads: "
            f"`zstd -dc --long=31 {shlex.quote(source.name)} |`, with --input -"
        )
    with open(source.name, "rb") as file:
        head = file.read(8)
    if head.lstrip()[:1] in (b"{", b"["):
        return f"it is no {source.compression} file, but JSON that is not compressed; rename it"
    return f"damaged {source.compression} file: {error}; fetch it again"


# -- bytes


class _Streams(io.RawIOBase):
    """The content of the bzip2 or xz streams of a file; Python's own readers end silently at damage between two."""

    def __init__(self, file: BinaryIO, compression: str) -> None:
        self._file, self._padding = file, b"\0" if compression == "xz" else b""
        self._new: Callable[[], Any] = lzma.LZMADecompressor if compression == "xz" else bz2.BZ2Decompressor
        self._stream: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            raw, ended = b"", self._stream is None or self._stream.eof
            if ended:
                raw = self._stream.unused_data if self._stream is not None else b""
            if not raw and (ended or self._stream.needs_input):
                raw = self._file.read(CHUNK_BYTES)
                if not raw and not ended:
                    raise EOFError("it ends within a stream")
            if ended:
                while self._padding and raw and not (raw := raw.lstrip(self._padding)):
                    raw = self._file.read(CHUNK_BYTES)
                if not raw:
                    return 0
                self._stream = self._new()
            data = self._stream.decompress(raw, len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)


def _open(source: Source) -> tuple[BinaryIO, BinaryIO]:
    """The file on the disk, and its decompressed content."""
    raw = open(source.name, "rb")
    if source.compression == "gzip":
        return raw, gzip.open(raw)  # type: ignore[return-value]
    if source.compression in ("bzip2", "xz"):
        return raw, io.BufferedReader(_Streams(raw, source.compression), CHUNK_BYTES)
    if source.compression == "zstd":
        import pyarrow as pa

        # Read through Python, so that its place in the file is known.
        stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        return raw, io.BufferedReader(stream, CHUNK_BYTES)
    return raw, raw


def _skip(file: BinaryIO, count: int, name: str) -> None:
    while count:
        part = file.read(min(count, CHUNK_BYTES))
        if not part:
            raise ValueError(f"--input {name}: it is shorter than when this work began; start again from the beginning")
        count -= len(part)


def _read_lines(source: Source, at: Position, keys: Sequence[str]) -> Iterator[Chunk]:
    if source.compression and source.begin:
        return  # begins in another part of a --partition
    raw, file = _open(source)
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
    raw, file = _open(source)
    with raw:
        text = file.read()
        yield Chunk(source=source, at=at, behind=Position(at.source, len(text) + 1), raw=text, disk_bytes=raw.tell())


# -- rows


def _read_parquet(source: Source, at: Position, keys: Sequence[str]) -> Iterator[Chunk]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def damaged(error: Exception) -> ValueError:
        return ValueError(f"--input {source.name}: damaged parquet file: {_first_line(error)}; fetch it again")

    try:
        file = pq.ParquetFile(source.name, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise damaged(error) from error
    with file:
        _check_columns(source, file.schema_arrow.names, keys)
        groups, row = file.num_row_groups, 0
        for number in range(groups):
            here = number / groups
            count = file.metadata.row_group(number).num_rows
            if source.begin <= here < source.end and row + count > at.offset:
                tables = _batches(file, number, keys)
                first = row
                while True:
                    try:
                        table = next(tables, None)
                    except (pa.ArrowException, OSError) as error:
                        raise damaged(error) from error
                    if table is None:
                        break
                    disk = round(source.size / groups * table.num_rows / max(1, count))
                    yield from _row_chunks(source, at, table, row=first, disk_bytes=disk)
                    first += table.num_rows
            row += count


def _batches(file: Any, group: int, keys: Sequence[str]) -> Iterator["pa.Table"]:
    import pyarrow as pa

    for batch in file.iter_batches(ROWS, row_groups=[group], columns=list(keys), use_threads=False):
        yield pa.Table.from_batches([batch])


def _read_arrow(source: Source, at: Position, keys: Sequence[str]) -> Iterator[Chunk]:
    """Arrow's file format, or its stream format, in which `datasets` stores."""
    import pyarrow as pa

    if source.begin:
        return
    with open(source.name, "rb") as raw:
        try:
            head = raw.read(6)
            raw.seek(0)
            if head == b"ARROW1":
                reader = pa.ipc.open_file(raw)
                batches = (reader.get_batch(k) for k in range(reader.num_record_batches))
            else:
                reader = pa.ipc.open_stream(raw)
                batches = iter(reader)
            _check_columns(source, reader.schema.names, keys)
            row, disk = 0, 0
            for batch in batches:
                table = pa.Table.from_batches([batch]).select(list(keys))
                yield from _row_chunks(source, at, table, row=row, disk_bytes=raw.tell() - disk)
                row, disk = row + table.num_rows, raw.tell()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"--input {source.name}: damaged Arrow file: {_first_line(error)}; fetch it again"
            ) from error


def _read_rows(source: Source, at: Position, keys: Sequence[str]) -> Iterator[Chunk]:
    """A folder of `save_to_disk`, mapped by `datasets`."""
    data = _load(source)
    _check_columns(source, data.column_names, keys)
    data = data.select_columns(list(keys)).with_format("arrow")
    stop = round(len(data) * source.end)
    at = Position(at.source, max(at.offset, round(len(data) * source.begin)))
    for row in range(at.offset // ROWS * ROWS, stop, ROWS):
        table = data[row : min(row + ROWS, stop)]
        yield from _row_chunks(
            source, at, table, row=row, disk_bytes=round(source.size * table.num_rows / max(1, len(data)))
        )


def _read_stream(source: Source, at: Position, keys: Sequence[str]) -> Iterator[Chunk]:
    """A data set of the hub, or a folder of files, streamed by `datasets`."""
    import pyarrow as pa

    data = _load(source)
    row, texts = at.offset, []
    waiting = 0
    columns = getattr(data, "column_names", None)
    if columns:
        _check_columns(source, columns, keys)
    for document in data.skip(row) if row else data:
        texts.append({key: document.get(key) for key in keys})
        waiting += sum(len(text) for text in texts[-1].values() if isinstance(text, str))
        if waiting >= CHUNK_BYTES or len(texts) == ROWS:
            yield from _row_chunks(source, at, pa.Table.from_pylist(texts), row=row, disk_bytes=0)
            row, texts, waiting = row + len(texts), [], 0
    if texts:
        yield from _row_chunks(source, at, pa.Table.from_pylist(texts), row=row, disk_bytes=0)


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
            f"--input {spec}: `datasets` cannot read it: {_first_line(error)}; give a folder of save_to_disk, a folder "
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
        if key not in names:
            raise ValueError(f"--json-keys {key}: {source.name} has no such column; give one of {', '.join(names)}")


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


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


_READERS: dict[str, Callable[[Source, Position, Sequence[str]], Iterator[Chunk]]] = {
    "jsonl": _read_lines,
    "text": _read_text,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "rows": _read_rows,
    "stream": _read_stream,
    "stdin": _read_stdin,
    "stdin-text": _read_stdin_text,
}
