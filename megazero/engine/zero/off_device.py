"""Homes of units off the device: host memory (--optimizer-cpu-offload), or a file (--optimizer-nvme-offload).

The file of a rank has a region for each unit: its HostBuffer, then its master weights and optimizer states. Units take
turns in two *blocks* of host memory, so that one is updated while the other is written and read. One thread does this,
in the order in which the program asks. Checkpoints read and write the file itself, mapped into memory.
"""

import contextlib
import fcntl
import itertools
import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megazero.engine.memory import PAGE
from megazero.engine.memory.copies import DeviceCopy, HostLink
from megazero.engine.mesh.collectives import Pending
from megazero.engine.plan.optimizer_sizes import block_sizes
from megazero.engine.zero.flat_unit import FlatUnit, ZeroOptions
from megazero.engine.zero.home import Buffer, Home, Pieces, Reduced
from megazero.engine.zero.norms import norm
from megazero.files import CALL_BYTES, explain
from megazero.units import size

NVME = "nvme"  # the kind of traffic
FLAG = "--optimizer-nvme-offload"


class HostBuffer(Home):
    """Memory of copies to and from the device, pinned on a GPU: first of gradients, then of updated weights.

    As a `Reduced`, it is the gradient that was stored last.

    gradient  [owned]  in --grad-dtype: summed so far, from the first StoreGradient to the update
    weights   [owned]  in --precision: the same memory, from the update to the end of FetchWeights
    """

    kind, scratch_kind, on_device = "host", "host", False

    def __init__(
        self, unit: FlatUnit, options: ZeroOptions, link: HostLink, memory: torch.Tensor | None = None
    ) -> None:
        """memory: uint8 [OwnedSizes.buffer or more], tracked elsewhere; None: allocate it."""
        super().__init__(torch.device("cpu"))
        self.link, self.tracker, numel = link, options.tracker, unit.owned.numel
        if memory is None:
            num_bytes = unit.sizes(options).buffer
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=options.mesh.device.type != "cpu")
            self.allocation = options.tracker.allocate("host", num_bytes)
        dtypes = options.grad_dtype, options.dtype
        self.gradient, self.weights = (memory[: numel * dtype.itemsize].view(dtype) for dtype in dtypes)

    def compute_weights(self, weights: torch.Tensor) -> torch.Tensor:
        return self.weights

    def release(self) -> None:
        self.link.finish_fetches()

    def start_store(self, gradient: Buffer, pieces: Pieces) -> tuple[Reduced, Pending]:
        copy = self.copy_gradient(gradient.data, pieces)

        def stored() -> None:
            copy.wait()
            gradient.free()

        return self, Pending(held=(gradient.data,), then=stored)

    def copy_gradient(self, source: torch.Tensor, pieces: Pieces) -> DeviceCopy:
        """Start to copy a reduced gradient, [owned], from the device."""
        return self.link.start_store(source, self.gradient)

    def start_fetch(self, out: torch.Tensor) -> Pending:
        return Pending(then=self.link.start_fetch(self.gradient, out).wait)

    def start_fetch_weights(self, out: torch.Tensor) -> Pending:
        return Pending(then=self.link.start_fetch(self.weights, out).wait)

    def read(self) -> torch.Tensor:
        """Return the stored gradient, complete after `HostLink.finish_stores`."""
        return self.gradient

    def counted(self, pieces: Pieces) -> Sequence[torch.Tensor | float]:
        """Return the pieces of the stored gradient, or their norms if its memory has another use already."""
        self.link.finish_stores()
        return pieces(self.gradient)

    def take(self) -> Buffer:
        return Buffer(self.gradient, self.tracker.allocate("host", 0))  # tracked since it was made

    def free(self) -> None:
        """Discard the gradient; its memory stays."""


class StatesLost(Exception):
    """The file of the optimizer states cannot be read or written; the message is a sentence for the user."""


class StateFile:
    """A file without a name, which ends with its process, however that ends.

    Attributes:
        data: the file, uint8 [num_bytes], mapped. In a rehearsal, a stand-in without a file.
        sent: bytes read and written so far, under NVME.
    """

    def __init__(self, folder: str, num_bytes: int, sent: Counter[str]) -> None:
        """Reserve space in `folder`. ValueError if it cannot."""
        self.folder, self.sent = folder, sent
        self._thread: ThreadPoolExecutor | None = None
        if type(torch.empty(0)) is not torch.Tensor:
            self.data = torch.empty(num_bytes, dtype=torch.uint8)
            return
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)
            self._handle = self._file.fileno()
            os.posix_fallocate(self._handle, 0, num_bytes)
        except OSError as error:
            raise ValueError(
                f"{FLAG} {folder}: cannot reserve {size(num_bytes)} for this rank: {explain(error)}"
            ) from None
        self._map = mmap.mmap(self._handle, num_bytes)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)
        with contextlib.suppress(OSError):  # a file system without it reads and writes through the system's cache
            fcntl.fcntl(self._handle, fcntl.F_SETFL, fcntl.fcntl(self._handle, fcntl.F_GETFL) | os.O_DIRECT)
        self._thread = ThreadPoolExecutor(1, "states")

    def flush(self) -> None:
        """Write changes of `data`, before the file is read in another way."""
        if self._thread is not None:
            self._map.flush()

    def submit(self, num_bytes: int, task: Callable[[], None]) -> Future[None]:
        """Do a task of reads and writes after all that were submitted before. num_bytes: that it reads and writes."""
        self.sent[NVME] += num_bytes
        if self._thread is not None:
            return self._thread.submit(task)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read(self, memory: torch.Tensor, at: int) -> None:
        """Fill `memory`, uint8 [n], from byte `at`. In the thread."""
        self._transfer("read", os.preadv, memory, at)

    def write(self, memory: torch.Tensor, at: int) -> None:
        """Write `memory`, uint8 [n], to byte `at`. In the thread."""
        self._transfer("write", os.pwritev, memory, at)

    def _transfer(self, verb: str, call: Callable[..., int], memory: torch.Tensor, at: int) -> None:
        view, done = memory.numpy().data, 0
        while done < len(view):
            try:
                count = call(self._handle, [view[done : done + CALL_BYTES]], at + done)
            except OSError as error:
                raise self._lost(verb, error.strerror or str(error)) from None
            if count == 0:
                raise self._lost(verb, "the file ends too early")
            done += count

    def _lost(self, verb: str, reason: str) -> StatesLost:
        return StatesLost(
            f"{FLAG} {self.folder}: cannot {verb} optimizer states: {reason}; the run ends, and resumes from the last "
            "checkpoint in --save, with a sound folder or without this flag"
        )


class Block:
    """Host memory in which units take turns, and its uses that have not ended.

    Attributes:
        tasks: of the file's thread.
        then: to be done after them, before another use.
        fetched: the end of the last copy to the device.
    """

    def __init__(self, num_bytes: int, options: ZeroOptions) -> None:
        pinned = options.mesh.device.type != "cpu"
        memory = torch.empty(num_bytes + PAGE, dtype=torch.uint8, pin_memory=pinned)  # O_DIRECT wants whole pages
        self.allocation = options.tracker.allocate("host", num_bytes)
        begin = -memory.data_ptr() % PAGE if type(memory) is torch.Tensor else 0
        self.memory = memory[begin : begin + num_bytes]
        self.tasks: list[Future[None]] = []
        self.then: Callable[[], object] | None = None
        self.fetched: torch.cuda.Event | None = None

    def settle(self) -> None:
        """Wait until the file's thread has ended its tasks, and then call `then`. Raises StatesLost."""
        while self.tasks:
            self.tasks.pop(0).result()
        then, self.then = self.then, None
        if then is not None:
            then()

    def release(self) -> None:
        """Wait until the device has read it."""
        if self.fetched is not None:
            self.fetched.synchronize()


class FileBuffer(HostBuffer):
    """A file as the home of a unit: its region of the file, and the block in which it is updated.

    Attributes:
        resident: memory of master weights and optimizer states in the block.
    """

    def __init__(
        self, unit: FlatUnit, options: ZeroOptions, link: HostLink, file: StateFile, block: Block, at: int
    ) -> None:
        """at: the first byte of the region."""
        self.file, self.block, self.at = file, block, at
        buffer, states = unit.sizes(options).in_file
        self.allocation = options.tracker.allocate("nvme", buffer + states)
        super().__init__(unit, options, link, block.memory[:buffer])
        self.whole, self.buffer = block.memory[: buffer + states], block.memory[:buffer]
        self.resident = self.whole[buffer:]
        self.states = self.resident, file.data[at + buffer : at + buffer + states]
        self._norms: Sequence[float] = ()

    def copy_gradient(self, source: torch.Tensor, pieces: Pieces) -> DeviceCopy:
        """Copy to the block, and from there to the file. The norms of `pieces` are computed in between."""
        self.block.settle()
        copy = super().copy_gradient(source, pieces)

        def write() -> None:
            if copy.done is not None:
                copy.done.synchronize()
            self._norms = [norm(piece).item() for piece in pieces(self.gradient)]
            self.file.write(self.buffer, self.at)

        self._submit(len(self.buffer), write)
        return copy

    def start_fetch(self, out: torch.Tensor) -> Pending:
        self.block.settle()
        self._read(self.buffer)

        self.block.then = lambda: self._fetch(self.gradient, out).wait()
        return Pending(then=self.block.settle)

    def start_fetch_weights(self, out: torch.Tensor) -> Pending:
        return Pending(then=self._fetch(self.weights, out).wait)

    def start_read(self) -> Pending:
        self._read(self.whole)
        return Pending(then=self.block.settle)

    def start_write(self) -> Pending:
        at = self.at + len(self.buffer)
        return Pending(then=self._submit(len(self.resident), lambda: self.file.write(self.resident, at)).result)

    def read(self) -> torch.Tensor:
        self.block.settle()
        self._read(self.buffer)
        self.block.settle()
        return self.gradient

    def counted(self, pieces: Pieces) -> Sequence[torch.Tensor | float]:
        self.block.settle()
        return self._norms

    def flush(self) -> None:
        self.file.flush()

    def compute_weights(self, weights: torch.Tensor) -> torch.Tensor:
        self.block.settle()
        self.block.release()
        return self.weights

    def _read(self, memory: torch.Tensor) -> None:
        def read() -> None:
            self.block.release()
            self.file.read(memory, self.at)

        self._submit(len(memory), read)

    def _submit(self, num_bytes: int, task: Callable[[], None]) -> Future[None]:
        self.block.tasks.append(self.file.submit(num_bytes, task))
        return self.block.tasks[-1]

    def _fetch(self, source: torch.Tensor, out: torch.Tensor) -> DeviceCopy:
        copy = self.link.start_fetch(source, out)
        self.block.fetched = copy.done
        return copy


def file_buffers(units: Sequence[FlatUnit], options: ZeroOptions, link: HostLink) -> dict[str, FileBuffer]:
    """Make the file and the blocks of a rank, and return the buffers of its units.

    units: in the order of their updates, in which they take turns.
    """
    sizes = [sum(unit.sizes(options).in_file) for unit in units]
    file = StateFile(options.config.optimizer.optimizer_nvme_offload, sum(sizes), options.mesh.copied)
    blocks = [Block(num_bytes, options) for num_bytes in block_sizes(sizes)]
    starts = itertools.accumulate(sizes, initial=0)
    found = zip(units, itertools.cycle(blocks), starts, strict=False)
    return {
        unit.name: FileBuffer(unit=unit, options=options, link=link, file=file, block=block, at=at)
        for unit, block, at in found
    }
