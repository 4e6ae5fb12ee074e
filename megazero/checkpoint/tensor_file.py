"""A safetensors file that is written one tensor at a time.

The safetensors library only reads the files. They are written here, so that one tensor at a time passes through the
host, gets its checksum, and is flushed to the disk.

Note [The pace of a save]
A write copies into the system's cache, and a flush waits for the disk: one after the other takes the sum of both. So a
thread flushes the tensors written so far while the next ones are written. The writing thread computes checksums with
isal, at about 10 GB/s, because zlib's 1 to 2 GB/s are slower than the disk (docs/results/benchmarks.md).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, Self

import torch

from megazero.checkpoint.manifest import SAFETENSORS_CODES, dtype_name
from megazero.files import OutputFile, crc32

FLUSH_BYTES = 16 << 20  # flush no less at once

# Name, dtype and shape of a tensor.
Announced = tuple[str, torch.dtype, Sequence[int]]


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, copied only if it is not in host memory."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data


class TensorFile:
    """A safetensors file of the tensors that are announced; `append` takes them in that order.

    The format: u64 length of the header, little-endian; the header, JSON, padded with spaces so that data begins at a
    multiple of 8; data. Leaving the context closes the file, once it is on the disk unless an exception is raised.
    """

    def __init__(self, path: Path, announced: Sequence[Announced], metadata: Mapping[str, str] | None = None) -> None:
        """Write the header. OSError if the disk refuses."""
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        position = 0
        self._expected = []
        for name, dtype, shape in announced:
            stop = position + prod(shape) * dtype.itemsize
            code = SAFETENSORS_CODES[dtype_name(dtype)]
            header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [position, stop]}
            self._expected.append((dtype, tuple(shape)))
            position = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.num_bytes = 8 + len(text) + position
        self._next = 0
        self._flusher = ThreadPoolExecutor(1, "flush")
        self._flushing: Future[None] | None = None
        self._flushed = 0  # bytes that were written when the last flush began
        self._file = OutputFile(path)
        self._file.write(len(text).to_bytes(8, "little") + text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                assert self._next == len(self._expected), (self._next, len(self._expected))
                self._await_flush()
                self._file.sync()
        finally:
            self._flusher.shutdown()
            self._file.close()

    def append(self, bands: Iterable[torch.Tensor]) -> int:
        """Write the next tensor, given as contiguous bands of rows; return its CRC-32. OSError if the disk refuses."""
        dtype, shape = self._expected[self._next]
        checksum = numel = 0
        for band in bands:
            assert band.dtype == dtype, (self._next, band.dtype)
            data = host_bytes(band)
            checksum, numel = crc32(data, checksum), numel + band.numel()
            self._file.write(data)
            if self._file.size - self._flushed >= FLUSH_BYTES and (self._flushing is None or self._flushing.done()):
                self._await_flush()
                self._flushed = self._file.size
                self._flushing = self._flusher.submit(self._file.sync)
        assert numel == prod(shape), (self._next, numel, shape)
        self._next += 1
        return checksum

    def _await_flush(self) -> None:
        """Raise the exception of the last flush, because the system reports it only once."""
        flushing, self._flushing = self._flushing, None
        if flushing is not None:
            flushing.result()


def write_safetensors(path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[list[int], int]:
    """Write (name, contiguous tensor) pairs as a safetensors file, durably.

    Returns the CRC-32 of each tensor and the bytes of the file. OSError if the disk refuses.
    """
    with TensorFile(path, [(name, tensor.dtype, tensor.shape) for name, tensor in tensors]) as file:
        checksums = [file.append([tensor]) for _, tensor in tensors]
    return checksums, file.num_bytes
