"""Copies between a device and host memory, which overlap with computation."""

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch

from megazero.engine.memory import COPY_DEPTH
from megazero.engine.memory.pool import BufferPool
from megazero.engine.memory.tracker import MemoryTracker


class HostCopy(NamedTuple):
    """Data in host memory, or being copied there."""

    host: torch.Tensor
    done: torch.cuda.Event | None = None


class DeviceCopy(NamedTuple):
    """Data on the device, or being copied there."""

    data: torch.Tensor
    done: torch.cuda.Event | None = None

    def wait(self) -> torch.Tensor:
        """Make the computation stream wait; this process does not."""
        if self.done is not None:
            torch.cuda.current_stream(self.data.device).wait_event(self.done)
        return self.data


PCIE = "pcie"  # the kind of traffic of all copies but those of `upload`
ALIGN = 16  # bytes: a part of an upload may be read as any dtype


class Copies:
    """CPU implementation: storing copies into the buffer, fetching returns it.

    Attributes:
        sent: bytes of copies so far, under PCIE. Slots of host memory are copied whole.
    """

    def __init__(self, sent: Counter[str]) -> None:
        self.sent = sent

    def start_store(self, part: torch.Tensor, host: torch.Tensor) -> HostCopy:
        """Start to copy `part` [n] to the beginning of `host`, n or more elements."""
        self.sent[PCIE] += host.nbytes
        host[: part.numel()].copy_(part)
        return HostCopy(host)

    def start_fetch(self, copy: HostCopy) -> DeviceCopy:
        """Start to copy it to the device. The result is valid until two more fetches start."""
        self.sent[PCIE] += copy.host.nbytes
        return DeviceCopy(copy.host)

    def finish(self) -> None:
        """Wait for all copies; call before buffers are reused."""


class NoStream:
    """The stream of the meta device, which computes nothing."""

    def wait_event(self, event: None) -> None:
        pass

    def wait_stream(self, stream: Self) -> None:
        pass

    def record_event(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Streams:
    """CUDA streams of a device; those of the meta device do nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_meta = device, device.type == "meta"

    def new(self) -> Any:
        return NoStream() if self.is_meta else torch.cuda.Stream(self.device)

    @property
    def compute(self) -> Any:
        """The stream to which computations are issued."""
        return NoStream() if self.is_meta else torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        """Issue the operations of the block to `stream`."""
        return contextlib.nullcontext() if self.is_meta else torch.cuda.stream(stream)


class HostLink:
    """Copies between tensors of the device and of host memory, without buffers; on a GPU, a stream for each direction.

    A copy starts after all operations that the computation has issued. Its `wait` makes the computation wait for it;
    until then, neither tensor may be written, and the source not freed.
    """

    def __init__(self, device: torch.device, sent: Counter[str]) -> None:
        """sent: bytes of copies so far, under PCIE."""
        self.sent = sent
        self.streams = None if device.type == "cpu" else Streams(device)
        self.stores = self.fetches = False  # since `finish_stores`, `finish_fetches`
        if self.streams is not None:
            self.storing, self.fetching = self.streams.new(), self.streams.new()

    def start_store(self, source: torch.Tensor, host: torch.Tensor) -> DeviceCopy:
        """Start to copy `source` to `host`."""
        self.stores = True
        return self._start(source, host, source, None if self.streams is None else self.storing)

    def start_fetch(self, host: torch.Tensor, out: torch.Tensor) -> DeviceCopy:
        """Start to copy `host` to `out`."""
        self.fetches = True
        return self._start(host, out, out, None if self.streams is None else self.fetching)

    def _start(self, source: torch.Tensor, out: torch.Tensor, on_device: torch.Tensor, stream: Any) -> DeviceCopy:
        self.sent[PCIE] += out.nbytes
        if self.streams is None:
            out.copy_(source)
            return DeviceCopy(on_device)
        stream.wait_stream(self.streams.compute)
        with self.streams.on(stream):
            out.copy_(source, non_blocking=True)
        return DeviceCopy(on_device, stream.record_event())

    def finish_stores(self) -> None:
        """Wait until the host can read all that was stored; later calls do nothing."""
        if self.streams is not None and self.stores:
            self.storing.synchronize()
        self.stores = False

    def finish_fetches(self) -> None:
        """Wait until the host can write all that was fetched; later calls do nothing."""
        if self.streams is not None and self.fetches:
            self.fetching.synchronize()
        self.fetches = False


class StreamCopies(Copies):
    """Copies between a GPU and pinned memory, with one CUDA stream for each direction.

    Each direction uses COPY_DEPTH buffers on the device, which are never freed. So a block's input can be freed as soon
    as the computation has copied it into one, and no tensor is freed while another stream reads it.

    A host slot is rewritten only after the computation has waited for its fetch, because `start_store` waits for all
    operations that the computation has issued. So does `start_fetch`, before it rewrites a buffer.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, tracker: MemoryTracker, sent: Counter[str]
    ) -> None:
        super().__init__(sent)
        self.streams, self.link = Streams(device), HostLink(device, sent)
        self.outgoing, self.incoming = (
            BufferPool(numel=numel, dtype=dtype, device=device, tracker=tracker, kind="buffers", count=COPY_DEPTH)
            for _ in range(2)
        )
        self.left: list[torch.cuda.Event | None] = [None] * COPY_DEPTH  # end of the last copy from each outgoing buffer
        self.stores = self.fetches = 0  # so far; buffers take turns

    def start_store(self, part: torch.Tensor, host: torch.Tensor) -> HostCopy:
        turn = self.stores % COPY_DEPTH
        self.stores += 1
        buffer, left = self.outgoing[turn], self.left[turn]
        if left is not None:
            self.streams.compute.wait_event(left)
        buffer[: part.numel()].copy_(part)
        done = self.left[turn] = self.link.start_store(buffer, host).done
        return HostCopy(host, done)

    def start_fetch(self, copy: HostCopy) -> DeviceCopy:
        buffer = self.incoming[self.fetches % COPY_DEPTH]
        self.fetches += 1
        if copy.done is not None:
            self.link.fetching.wait_event(copy.done)
        return self.link.start_fetch(copy.host, buffer)

    def finish(self) -> None:
        self.link.finish_stores()
        self.link.finish_fetches()


def upload(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return host tensors on `device`, copied at once from page-locked memory.

    A copy from other memory blocks the process. torch keeps the page-locked buffer until the copy is done, and reuses
    it. On a CPU the tensors are returned as they are.
    """
    if device.type == "cpu":
        return list(tensors)
    starts, total = [], 0
    for x in tensors:
        starts.append(total)
        total += math.ceil(x.nbytes / ALIGN) * ALIGN
    packed = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for x, start in zip(tensors, starts, strict=True):
        _part(packed, start, x).copy_(x)
    packed = packed.to(device, non_blocking=True)
    return [_part(packed, start, x) for x, start in zip(tensors, starts, strict=True)]


def _part(packed: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    return packed[start : start + like.nbytes].view(like.dtype).view(like.shape)
