"""What the tools share: documents out of JSON lines and text files, progress on stderr, one-line errors."""

import gzip
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from megazero.files import explain

if TYPE_CHECKING:
    from rich.progress import Progress

JSON_ENDS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
TEXT_ENDS = (".txt", ".md", ".txt.gz", ".md.gz")
# A chunk is what a worker gets at once: enough to outweigh its transport, little enough that a queue of
# them is.
CHUNK_BYTES = 1 << 20
# Seconds between two lines of progress where stderr is a file and no bar can be drawn.
LOG_SECONDS = 30.0


@dataclass(frozen=True)
class Chunk:
    """Some lines of one file, or the whole of a text file as one "line".

    `disk_bytes`: by how much reading it moved on in the file, compressed where the file is.
    """

    path: str
    first_line: int
    lines: list[bytes]
    is_json: bool
    disk_bytes: int

    @property
    def text_bytes(self) -> int:
        """Size as read, decompressed."""
        return sum(map(len, self.lines))


def check_inputs(inputs: Sequence[str], keys: Sequence[str]) -> int:
    """Size of all --input files on disk, bytes. ValueError if one is missing, unknown or double."""
    if len(set(keys)) != len(keys):
        raise ValueError(f"--json-keys {' '.join(keys)}: a key is given twice; give each once")
    seen: dict[Path, str] = {}
    for given in inputs:
        path = Path(given)
        if not path.is_file():
            raise ValueError(f"--input {given}: no such file")
        if not given.endswith(JSON_ENDS + TEXT_ENDS):
            ends = ", ".join(JSON_ENDS + TEXT_ENDS)
            raise ValueError(f"--input {given}: unknown kind of file; its name must end in {ends}")
        if given.endswith(TEXT_ENDS) and list(keys) != ["text"]:
            raise ValueError(
                f"--input {given}: a text file has no --json-keys {' '.join(keys)}; give JSON lines, "
                f"or leave --json-keys at text"
            )
        if path.resolve() in seen:
            raise ValueError(f"--input {given}: the same file as {seen[path.resolve()]}; give each once")
        seen[path.resolve()] = given
    return sum(path.stat().st_size for path in seen)


def check_workers(workers: int) -> None:
    """ValueError unless so many processes can be started and have something to do."""
    most = 4 * (os.cpu_count() or 1)
    if not 1 <= workers <= most:
        raise ValueError(f"--workers {workers}: give 1 to {most} processes, as this machine has {most // 4} cores")


def read_chunks(inputs: Sequence[str]) -> Iterator[Chunk]:
    """All documents in order, in chunks of about `CHUNK_BYTES`; a text file is one chunk."""
    for path in inputs:
        with open(path, "rb") as raw:
            file: BinaryIO = gzip.open(raw) if path.endswith(".gz") else raw  # type: ignore[assignment]
            try:
                yield from _chunks_of(path, raw, file)
            except (gzip.BadGzipFile, EOFError) as error:
                raise ValueError(f"--input {path}: damaged gzip file: {error}") from error


def _chunks_of(path: str, raw: BinaryIO, file: BinaryIO) -> Iterator[Chunk]:
    if path.endswith(TEXT_ENDS):
        yield Chunk(path, 1, [file.read()], is_json=False, disk_bytes=raw.tell())
        return
    line, read = 1, 0
    while lines := file.readlines(CHUNK_BYTES):
        yield Chunk(path, line, lines, is_json=True, disk_bytes=raw.tell() - read)
        line, read = line + len(lines), raw.tell()


def texts_of(chunk: Chunk, keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The texts under `keys` of each document. ValueError naming file:line for what is no such document."""
    for number, line in enumerate(chunk.lines, start=chunk.first_line):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if not chunk.is_json:
                yield (text,)
            elif text.strip():
                yield _texts_of_line(text, keys)
        except ValueError as error:  # of the codec, of JSON, and our own
            where = f"{chunk.path}:{number}" if chunk.is_json else chunk.path
            raise ValueError(f"{where}: {error}") from error


def _texts_of_line(line: str, keys: Sequence[str]) -> tuple[str, ...]:
    try:
        document = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"expected a JSON object, found {type(document).__name__}")
    for key in keys:
        if not isinstance(document.get(key), str):
            found = "is no string" if key in document else f"is missing, there are {', '.join(document)}"
            raise ValueError(f"--json-keys {key}: the key {found}")
    return tuple(_well_formed(document[key]) for key in keys)


def _well_formed(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no text; it becomes U+FFFD, as tokenizers refuse it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@contextmanager
def progress_bar(verb: str, total: int) -> Iterator[Callable[[Chunk], None]]:
    """Shows work on `total` bytes of files on stderr; yields the function to call after each chunk."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%  {task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield _Reporter(bar, bar.add_task(verb, total=total, rate="")).advance


class _Reporter:
    """Counts chunks: into a bar on a terminal, into a line now and then elsewhere."""

    def __init__(self, bar: "Progress", task: object) -> None:
        self._bar, self._task = bar, task
        self._start = self._logged = time.monotonic()
        self._text = self._disk = 0

    def advance(self, chunk: Chunk) -> None:
        self._text += chunk.text_bytes
        self._disk += chunk.disk_bytes
        now = time.monotonic()
        rate = f"{self._text / 1e6:,.0f} MB, {self._text / 1e6 / max(now - self._start, 1e-9):.1f} MB/s"
        self._bar.update(self._task, completed=self._disk, rate=rate)  # type: ignore[arg-type]
        if self._bar.disable and now - self._logged > LOG_SECONDS:
            print(rate, file=sys.stderr, flush=True)
            self._logged = now


def run_tool(main: Callable[[Sequence[str]], None]) -> None:
    """Run a tool's `main(arguments)`. What a user can mend comes out as one line and an exit code:

    2 for a ValueError, 1 for an error of the system (a full disk), 130 when interrupted.
    """
    name, code = Path(sys.argv[0]).name, 0
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except ValueError as error:
        code, line = 2, f"error: {error}"
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code, line = 1, ""
    except OSError as error:
        code, line = 1, f"error: {explain(error)}"
    except MemoryError:
        code, line = 1, "error: out of memory; give fewer --workers, or more memory"
    except KeyboardInterrupt as error:
        code, line = 130, f"interrupted, {error if error.args else 'nothing was written'}"
    if code:
        if line:
            print(f"{name}: {line}".replace("\n", " "), file=sys.stderr, flush=True)
        sys.exit(code)
