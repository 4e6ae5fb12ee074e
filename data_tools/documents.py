"""Documents of a chunk: the values under the --json-keys, or the faults of a line."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from data_tools.reading import Chunk

Value = TypeVar("Value")


class Malformed(Exception):
    """A value that is no document. `args[0]`: its fault, after "the key"."""


@dataclass(frozen=True)
class Bad:
    """A line, or row, that is no document: its place and its fault."""

    where: str
    fault: str

    def __str__(self) -> str:
        return f"{self.where}: {self.fault}"


def documents_of(chunk: Chunk, keys: Sequence[str], read: Callable[[Any], Value]) -> Iterator[tuple[Value, ...] | Bad]:
    """Each document's values, one per key, in order. Blank lines are not documents.

    Args:
        read: makes a value of the object under a key, such as `text_of`; raises `Malformed`.
    """
    if chunk.source.kind in ("text", "stdin-text"):
        try:
            yield (read(chunk.raw.decode("utf-8-sig")),)
        except UnicodeDecodeError as error:
            yield Bad(chunk.where(0), f"{_codec_fault(error)}; it is no UTF-8 text")
    elif chunk.source.kind in ("jsonl", "stdin"):
        yield from _of_lines(chunk, keys, read)
    else:
        yield from _of_rows(chunk, keys, read)


def text_of(value: Any) -> str:
    """The text of a string, or of bytes in UTF-8."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise Malformed("is no string") from error
    if not isinstance(value, str):
        raise Malformed("is no string")
    return well_formed(value)


def _of_lines(chunk: Chunk, keys: Sequence[str], read: Callable[[Any], Value]) -> Iterator[tuple[Value, ...] | Bad]:
    for number, line in enumerate(chunk.raw.split(b"\n")):
        if not line or line.isspace():
            continue
        if number == 0 and chunk.at.offset == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
        try:
            document = json.loads(line.decode())
        except UnicodeDecodeError as error:
            yield Bad(chunk.where(number), _codec_fault(error))
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            yield Bad(chunk.where(number), f"malformed JSON: {reason}")
        else:
            if isinstance(document, dict):
                yield _values(document, keys, read, chunk.where(number), "key")
            else:
                yield Bad(chunk.where(number), f"expected a JSON object, found {type(document).__name__}")


def _values(
    document: dict[str, Any], keys: Sequence[str], read: Callable[[Any], Value], where: str, noun: str
) -> tuple[Value, ...] | Bad:
    values = []
    for key in keys:
        try:
            if key not in document:
                raise Malformed(f"is missing, there are {', '.join(map(str, document))[:200] or 'none'}")
            values.append(read(document[key]))
        except Malformed as error:
            return Bad(where, f"--json-keys {key}: the {noun} {error}")
    return tuple(values)


def _of_rows(chunk: Chunk, keys: Sequence[str], read: Callable[[Any], Value]) -> Iterator[tuple[Value, ...] | Bad]:
    import pyarrow as pa

    table = pa.ipc.open_stream(chunk.raw).read_all()
    columns = [table.column(key).to_pylist() for key in keys]

    def of_row(value: Any) -> Value:
        if value is None:
            raise Malformed("is empty (null)")
        return read(value)

    for number, row in enumerate(zip(*columns, strict=True)):
        yield _values(dict(zip(keys, row, strict=True)), keys, of_row, chunk.where(number), "column")


def _codec_fault(error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"invalid start byte or sequence: byte {byte:#04x} at {error.start} is no UTF-8"


def well_formed(text: str) -> str:
    """Replace half a surrogate pair, which JSON allows and tokenizers refuse, by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
