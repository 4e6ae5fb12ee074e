"""A safetensors file that is written one tensor at a time.

The files are written here rather than by the safetensors library: one tensor at a time through the host, its checksum
taken on the way, and flushed to the disk. The library reads them, and its reading checks the format.

Note [The pace of a save]
A write copies into the system's cache, and a flush waits for the disk: one after the other takes the sum of both. So a
thread flushes what is written while the next tensors are. Checksums are taken by isal, at some 10 GB/s, in the thread
that writes: zlib's 1 to 2 GB/s were slower than the disk (docs/results/benchmarks.md).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.manifest import SAFETENSORS_CODES, dtype_name
from megazero.files import OutputFile, crc32

FLUSH_BYTES = 16 << 20  # written before a flush of it is worth while

# Name, dtype and shape of a tensor.
Announced = tuple[str, torch.dtype, Sequence[int]]


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor; a copy only where it is not in host memory."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data


class TensorFile:
    """A safetensors file of the tensors that are announced, which `append` takes in that order.

    It is: u64 length of the header, little-endian; the header, JSON, padded with spaces so that data begins at a
    multiple of 8; data.
    """

    def __init__(self, path: Path, announced: Sequence[Announced], metadata: Mapping[str, str] | None = None) -> None:
        """Write the header. OSError if the disk refuses."""
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        position = 0
        self._expected = []
        for name, dtype, shape in announced:
            stop = position + torch.Size(shape).numel() * dtype.itemsize
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

    def append(self, tensor: torch.Tensor) -> int:
        """Write the next tensor, which is contiguous; returns the CRC-32 of its bytes. OSError if the disk refuses."""
        assert self._expected[self._next] == (tensor.dtype, tuple(tensor.shape)), (self._next, tensor.shape)
        self._next += 1
        return self._write(tensor)

    def append_bands(self, bands: Iterable[torch.Tensor]) -> None:
        """Write the next tensor, given as contiguous bands of its rows, in order. OSError if the disk refuses."""
        dtype, shape = self._expected[self._next]
        rows = 0
        for band in bands:
            assert (band.dtype, tuple(band.shape[1:])) == (dtype, shape[1:]), (self._next, band.shape)
            rows += len(band)
            self._write(band)
        assert rows == shape[0], (self._next, rows)
        self._next += 1

    def _write(self, tensor: torch.Tensor) -> int:
        data = host_bytes(tensor)
        checksum = crc32(data)
        self._file.write(data)
        if self._file.size - self._flushed >= FLUSH_BYTES and (self._flushing is None or self._flushing.done()):
            self._await_flush()
            self._flushed = self._file.size
            self._flushing = self._flusher.submit(self._file.sync)
        return checksum

    def _await_flush(self) -> None:
        """Raise what the last flush met: the system says it once, and a later flush would not know of it."""
        flushing, self._flushing = self._flushing, None
        if flushing is not None:
            flushing.result()

    def sync(self) -> None:
        """Wait until all is on the disk; every tensor has been appended."""
        assert self._next == len(self._expected), (self._next, len(self._expected))
        self._await_flush()
        self._file.sync()

    def close(self) -> None:
        self._flusher.shutdown()
        self._file.close()


def write_safetensors(path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[list[int], int]:
    """Write (name, contiguous tensor) pairs as a safetensors file, durably.

    Returns the CRC-32 of each tensor and the bytes of the file. OSError if the disk refuses.
    """
    file = TensorFile(path, [(name, tensor.dtype, tensor.shape) for name, tensor in tensors])
    try:
        checksums = [file.append(tensor) for _, tensor in tensors]
        file.sync()
    finally:
        file.close()
    return checksums, file.num_bytes
