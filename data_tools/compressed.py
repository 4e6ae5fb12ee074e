"""Compressed files, opened by their compression; the fault of a file that cannot be decompressed."""

import bz2
import gzip
import io
import lzma
import shlex
from collections.abc import Callable
from typing import Any, BinaryIO

from data_tools.sources import Source

# Bytes decompressed at once.
BLOCK_BYTES = 1 << 20


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
                raw = self._file.read(BLOCK_BYTES)
                if not raw and not ended:
                    raise EOFError("it ends within a stream")
            if ended:
                while self._padding and raw and not (raw := raw.lstrip(self._padding)):
                    raw = self._file.read(BLOCK_BYTES)
                if not raw:
                    return 0
                self._stream = self._new()
            data = self._stream.decompress(raw, len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)


def open_source(source: Source) -> tuple[BinaryIO, BinaryIO]:
    """The file on the disk, and its decompressed content."""
    raw = open(source.name, "rb")
    if source.compression == "gzip":
        return raw, gzip.open(raw)  # type: ignore[return-value]
    if source.compression in ("bzip2", "xz"):
        return raw, io.BufferedReader(_Streams(raw, source.compression), BLOCK_BYTES)
    if source.compression == "zstd":
        import pyarrow as pa

        # Read through Python, so that its place in the file is known.
        stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
        return raw, io.BufferedReader(stream, BLOCK_BYTES)
    return raw, raw


def damage(source: Source, error: Exception) -> str:
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
