"""Copies of kept inputs to host memory and back, behind the computation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megazero.ledger import Ledger
from megazero.policy import COPY_DEPTH


class Fetch(NamedTuple):
    """A copy on its way to the device."""

    data: torch.Tensor  # [each]
    arrived: torch.cuda.Event | None = None

    def wait(self) -> torch.Tensor:
        """The computation waits, this process does not."""
        if self.arrived is not None:
            torch.cuda.current_stream(self.data.device).wait_event(self.arrived)
        return self.data


class Copies:
    """Where device and host are one: to keep is to copy, to fetch is to look."""

    def out(self, part: torch.Tensor, host: torch.Tensor) -> None:
        """Copy `part` [n] to the beginning of `host`, n or more elements."""
        host[: part.numel()].copy_(part)

    def start_fetch(self, host: torch.Tensor) -> Fetch:
        """Begin to bring `host` back. What it gives is overwritten by the next fetch but one."""
        return Fetch(host)

    def finish(self) -> None:
        """Wait for all copies: before buffers are used for something else."""


class StreamCopies(Copies):
    """Between a GPU and pinned memory, on a stream of their own.

    Each way goes by way of COPY_DEPTH buffers on the device, which are never freed: so a block's input can be let go as
    soon as the computation has copied it into one, and no tensor is freed while another stream reads it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, ledger: Ledger) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.outgoing = [torch.empty(numel, dtype=dtype, device=device) for _ in range(COPY_DEPTH)]
        self.incoming = [torch.empty(numel, dtype=dtype, device=device) for _ in range(COPY_DEPTH)]
        self.left: list[torch.cuda.Event | None] = [None] * COPY_DEPTH  # when an outgoing buffer's last copy was done
        self.lease = ledger.lease("buffers", 2 * COPY_DEPTH * numel * dtype.itemsize)

    def out(self, part: torch.Tensor, host: torch.Tensor) -> None:
        compute = torch.cuda.current_stream(self.device)
        buffer, left = self.outgoing.pop(0), self.left.pop(0)
        if left is not None:
            compute.wait_event(left)
        buffer[: part.numel()].copy_(part)
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            host.copy_(buffer, non_blocking=True)
        self.outgoing.append(buffer)
        self.left.append(self.stream.record_event())

    def start_fetch(self, host: torch.Tensor) -> Fetch:
        buffer = self.incoming.pop(0)
        self.incoming.append(buffer)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # whose work with this buffer is issued by now
        with torch.cuda.stream(self.stream):
            buffer.copy_(host, non_blocking=True)
        return Fetch(buffer, self.stream.record_event())

    def finish(self) -> None:
        self.stream.synchronize()
