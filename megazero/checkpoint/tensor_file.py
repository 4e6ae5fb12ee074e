"""A safetensors file that is written one tensor at a time.

The files are written here rather than by the safetensors library: one tensor at a time through the host, its checksum
taken on the way, and flushed to the disk. The library reads them, and its reading checks the format.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.manifest import SAFETENSORS_CODES, dtype_name
from megazero.files import OutputFile

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
        self._checksums = ThreadPoolExecutor(1, "checksum")
        self._file = OutputFile(path)
        self._file.write(len(text).to_bytes(8, "little") + text)

    def append(self, tensor: torch.Tensor) -> int:
        """Write the next tensor, which is contiguous; returns the CRC-32 of its bytes. OSError if the disk refuses."""
        assert self._expected[self._next] == (tensor.dtype, tuple(tensor.shape)), (self._next, tensor.shape)
        self._next += 1
        data = host_bytes(tensor)
        checksum = self._checksums.submit(zlib.crc32, data)  # while the disk writes
        self._file.write(data)
        return checksum.result()

    def sync(self) -> None:
        """Wait until all is on the disk; every tensor has been appended."""
        assert self._next == len(self._expected), (self._next, len(self._expected))
        self._file.sync()

    def close(self) -> None:
        self._checksums.shutdown()
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
