"""Documents of a chunk: the values under the --json-keys, or the faults of a line."""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from data_tools.reading import Chunk
from megazero.files import first_line

Value = TypeVar("Value")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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
            yield Bad(chunk.where(0), f"{_codec_fault(error, at_start=True)}; it is no UTF-8 text")
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
    first = True
    for number, line in enumerate(chunk.raw.split(b"\n")):
        if not line or line.isspace():
            continue
        line = line.removeprefix(BYTE_ORDER_MARK)  # of this file, or of one that was appended to it
        if first and chunk.at.offset == 0:
            _refuse_other_json(chunk, number)
        first = False
        try:
            document = json.loads(line.decode())
        except UnicodeDecodeError as error:
            yield Bad(chunk.where(number), _codec_fault(error, at_start=number == chunk.at.offset == 0))
        except (ValueError, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            if reason.startswith("Extra data"):
                reason += "; `jq -c .` writes each value of a line, or of lines that end in CR alone, into its own"
            yield Bad(chunk.where(number), f"malformed JSON: {reason}")
        else:
            if isinstance(document, dict):
                yield _values(document, keys, read, chunk.where(number), "key")
            else:
                yield Bad(chunk.where(number), f"expected a JSON object, found {type(document).__name__}")


def _refuse_other_json(chunk: Chunk, number: int) -> None:
    """Raise ValueError if a file is not JSON lines but one array, or objects over several lines.

    number: of its first line that is not blank.
    """

    def parsed(line: bytes) -> Any:
        try:
            return json.loads(line.decode())
        except (ValueError, RecursionError):
            return None

    line, following = (*chunk.raw.split(b"\n", number + 2)[number : number + 2], b"")[:2]
    line = line.removeprefix(BYTE_ORDER_MARK).strip()
    found = parsed(line)
    if line.startswith(b"["):
        if found is None or (isinstance(found, list) and found and isinstance(found[0], dict)):
            _refuse_for_jq(chunk, "a JSON array", ".[]")
    elif found is None and line.startswith(b"{") and line.endswith((b"{", b"[", b",")) and parsed(following) is None:
        inner = re.match(rb'\{\s*"(\w+)"\s*:\s*\[', chunk.raw.lstrip())
        _refuse_for_jq(chunk, "JSON over several lines", f".{inner[1].decode()}[]" if inner else ".")


def _refuse_for_jq(chunk: Chunk, kind: str, program: str) -> None:
    name, compression = chunk.source.name, chunk.source.compression
    way = f"jq -c '{program}' {shlex.quote(name)}"
    if compression:
        way = f"{compression} -dc {shlex.quote(name)} | jq -c '{program}'"
    elif chunk.source.kind == "stdin":
        way = f"... | jq -c '{program}'"
    raise ValueError(f"--input {name} is {kind}, not one object a line; make lines of it: `{way} |`, with --input -")


def _values(
    document: dict[str, Any], keys: Sequence[str], read: Callable[[Any], Value], where: str, noun: str
) -> tuple[Value, ...] | Bad:
    values = []
    for key in keys:
        try:
            if key not in document:
                raise Malformed(f"is missing, there are {_shown(document)}{_perhaps(document, key, read)}")
            values.append(read(document[key]))
        except Malformed as error:
            return Bad(where, f"--json-keys {key}: the {noun} {error}")
        except RecursionError:
            return Bad(where, f"--json-keys {key}: the {noun} is nested too deeply")
    return tuple(values)


def _shown(names: Iterable[str]) -> str:
    return ", ".join(map(str, names))[:200] or "none"


def _perhaps(document: dict[str, Any], key: str, read: Callable[[Any], Value]) -> str:
    """Return advice for a document without the key, from its other values; or ""."""
    readable = []
    for name, value in document.items():
        inner, each = (value[:1], "[]") if isinstance(value, list) else ([value], "")
        if inner and isinstance(inner[0], dict):
            if key in inner[0]:
                return f"; perhaps `jq -c '.{name}{each}'`"
            if each and "role" in inner[0] and read is text_of:
                return f"; perhaps --mask-from chat --json-keys {name}"
        with suppress(Malformed, ValueError):
            read(value)
            readable.append(name)
    return f"; perhaps --json-keys {_shown(readable)}" if readable else ""


def _of_rows(chunk: Chunk, keys: Sequence[str], read: Callable[[Any], Value]) -> Iterator[tuple[Value, ...] | Bad]:
    import pyarrow as pa

    table = pa.ipc.open_stream(chunk.raw).read_all()
    columns = [_values_of(table.column(key)) for key in keys]

    def of_row(value: Any) -> Value:
        if isinstance(value, Unreadable):
            raise Malformed(f"cannot be read: {value.fault}")
        if value is None:
            raise Malformed("is empty (null)")
        return read(value)

    for number, row in enumerate(zip(*columns, strict=True)):
        yield _values(dict(zip(keys, row, strict=True)), keys, of_row, chunk.where(number), "column")


@dataclass(frozen=True)
class Unreadable:
    """A value of a table that no Python object can hold, such as a string that is no UTF-8."""

    fault: str


def _values_of(column: Any) -> list[Any]:
    """Return the values of a column; `Unreadable` for one that pyarrow fails on."""

    def value_of(scalar: Any) -> Any:
        try:
            return scalar.as_py()
        except (ValueError, OverflowError, RecursionError) as error:
            return Unreadable(first_line(error))

    try:
        found: list[Any] = column.to_pylist()
    except (ValueError, OverflowError, RecursionError):
        found = [value_of(scalar) for scalar in column]
    return found


def _codec_fault(error: UnicodeDecodeError, at_start: bool) -> str:
    byte = error.object[error.start]
    if at_start and error.object.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "begins as UTF-16; `iconv -f UTF-16 -t UTF-8` converts it"
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
