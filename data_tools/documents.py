"""Documents of a chunk: the texts under the --json-keys, or the faults of a line."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data_tools.reading import Chunk

Texts = tuple[str, ...]


@dataclass(frozen=True)
class Bad:
    """A line, or row, that is no document: its place and its fault."""

    where: str
    fault: str

    def __str__(self) -> str:
        return f"{self.where}: {self.fault}"


def documents_of(chunk: Chunk, keys: Sequence[str]) -> Iterator[Texts | Bad]:
    """Each document's texts, one per key, in order. Blank lines are not documents."""
    if chunk.source.kind in ("text", "stdin-text"):
        yield _text_of(chunk)
    elif chunk.source.kind in ("jsonl", "stdin"):
        yield from _of_lines(chunk, keys)
    else:
        yield from _of_rows(chunk, keys)


def _text_of(chunk: Chunk) -> Texts | Bad:
    try:
        return (chunk.raw.decode("utf-8-sig"),)
    except UnicodeDecodeError as error:
        return Bad(chunk.where(0), f"{_codec_fault(error)}; it is no UTF-8 text")


def _of_lines(chunk: Chunk, keys: Sequence[str]) -> Iterator[Texts | Bad]:
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
            yield _texts(document, keys, chunk, number)


def _texts(document: Any, keys: Sequence[str], chunk: Chunk, number: int) -> Texts | Bad:
    if not isinstance(document, dict):
        return Bad(chunk.where(number), f"expected a JSON object, found {type(document).__name__}")
    texts = []
    for key in keys:
        text = document.get(key)
        if not isinstance(text, str):
            known = ", ".join(map(str, document))[:200]
            found = "is no string" if key in document else f"is missing, there are {known or 'none'}"
            return Bad(chunk.where(number), f"--json-keys {key}: the key {found}")
        texts.append(text if text.isascii() else _well_formed(text))
    return tuple(texts)


def _of_rows(chunk: Chunk, keys: Sequence[str]) -> Iterator[Texts | Bad]:
    import pyarrow as pa

    table = pa.ipc.open_stream(chunk.raw).read_all()
    columns = [table.column(key).to_pylist() for key in keys]
    for number, row in enumerate(zip(*columns, strict=True)):
        texts = tuple(_decoded(text) for text in row)
        wrong = [k for k, text in enumerate(texts) if text is None]
        if wrong:
            found = "is empty (null)" if row[wrong[0]] is None else "is no string"
            yield Bad(chunk.where(number), f"--json-keys {keys[wrong[0]]}: the column {found}")
        else:
            yield texts  # type: ignore[misc]


def _decoded(value: Any) -> str | None:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return value if isinstance(value, str) else None


def _codec_fault(error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"invalid start byte or sequence: byte {byte:#04x} at {error.start} is no UTF-8"


def _well_formed(text: str) -> str:
    """Replace half a surrogate pair, which JSON allows and tokenizers refuse, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
