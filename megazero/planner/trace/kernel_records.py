"""Operators and collectives of a layer's passes, in order, recorded while `planner.trace.trace` runs it on stand-ins.

An operator's bytes are those of the tensors that it reads and writes; only torch's own fusions count. Views, and
allocations without a write, are not recorded.
"""

import math
from typing import Any, NamedTuple

import torch

from megazero.engine.mesh.collectives import Pending
from megazero.engine.model.layers.context import DTYPES
from megazero.planner.trace.differences import Differences, tensors_in
from megazero.planner.trace.pretend import PretendAxis
from megazero.torch_private import TorchDispatchMode

PRODUCTS = ("mm", "addmm", "addmm_", "bmm")
GROUPED = "_grouped_mm"  # of rows with the matrix of their group, or of the groups' rows with each other
NO_WORK = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view", "promote_types", "resize_")
RESULTS = ("out", "grad_input")  # names of output arguments
OVERWRITES = ("copy_", "zero_", "fill_")  # operators that do not read their output
ATTENTION = ("attention", "varlen_attn")  # in the names of fused kernels: torch's, and that of documents
LOOKUPS = ("embedding", "index_select", "gather", "index_add_", "index_copy_", "scatter_add_", "add_rows_")


class Product(NamedTuple):
    """`batch` products of an [m, k] with a [k, n] matrix."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


class Operator(NamedTuple):
    """One operator: a kernel of the device, or a few."""

    name: str
    num_bytes: int  # read and written
    dtype: str  # of its products: fp16, bf16, fp32, fp64
    product: Product | None = None
    attention_flops: int = 0  # of fused attention: of the scores that the kernel computes
    head_dim: int = 0  # of fused attention


class Issue(NamedTuple):
    """A collective is started."""

    number: int
    axis: str
    collective: str  # all-reduce, all-gather, reduce-scatter, shift
    num_bytes: int  # of the whole buffer; of a shift, of a rank's message


class Arrive(NamedTuple):
    """The computation waits for a collective."""

    number: int


Event = Operator | Issue | Arrive
Events = tuple[Event, ...]


class LayerEvents(NamedTuple):
    """Events of a layer's passes, for one micro-batch on one rank."""

    forward: Events
    recompute: Events
    backward: Events
    weight_gradients: Events  # queued by a backward of the input alone


class _Recording:
    """The method of `Recorder`. In a subclass of TorchDispatchMode, torch would wrap it and import its compiler."""

    events: list[Event]
    differences: Differences

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if not func.is_view and name not in NO_WORK:
            self.events.append(_operator(func, args, kwargs or {}, out))
            self.differences.follow(func, args, kwargs or {}, out)
        return out


class Recorder(_Recording, TorchDispatchMode):
    """A context that records every operator, and every collective of its axes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.differences = Differences()
        self.issued = 0

    def take(self) -> Events:
        events, self.events = tuple(self.events), []
        return events

    def axis(self, name: str, ranks: list[int], rank: int, needs_staging_buffer: bool) -> PretendAxis:
        """Return a pretended axis whose collectives are recorded."""
        return _RecordedAxis(
            recorder=self, name=name, ranks=ranks, rank=rank, needs_staging_buffer=needs_staging_buffer
        )


def _size(x: torch.Tensor) -> int:
    """Return the bytes of a tensor in memory; an expanded tensor has only those of its storage."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Operator:
    name = func.__name__.split(".")[0]
    read = tensors_in((*args, *(value for key, value in kwargs.items() if key not in RESULTS)))
    written = tensors_in([out])
    dtype = next((key for key, value in DTYPES.items() if read and read[0].dtype == value), "fp32")
    if name in LOOKUPS:  # the rows, not the table: indices, read, written
        rows = read[-1] if name.endswith("_") else written[0]
        return Operator(name, 3 * _size(rows), dtype)
    num_bytes = sum(map(_size, [*read[name in OVERWRITES :], *written]))
    if name in PRODUCTS:
        a, b = read[-2:]
        dtype = next(key for key, value in DTYPES.items() if a.dtype == value)  # an addend may be wider
        return Operator(name, num_bytes, dtype, Product(math.prod(a.shape[:-2]), a.shape[-2], b.shape[-1], a.shape[-1]))
    if name == GROUPED:
        a, b = read[:2]
        return Operator(name, num_bytes, dtype, Product(1, a.shape[0], b.shape[-1], a.shape[-1]))
    if any(word in name for word in ATTENTION):
        backward = "backward" in name  # its first argument is the gradient of the output
        q, k = read[backward], read[backward + 1]
        names = (argument.name for argument in func._schema.arguments)
        given = dict(zip(names, args, strict=False)) | kwargs
        flops = 4 * q.shape[-1] * _num_scores(name, q, k, given)
        return Operator(
            name=name,
            num_bytes=num_bytes,
            dtype=dtype,
            product=None,
            attention_flops=flops * 5 // 2 if backward else flops,
            head_dim=q.shape[-1],
        )
    return Operator(name, num_bytes, dtype)


def _num_scores(name: str, q: torch.Tensor, k: torch.Tensor, given: dict[str, Any]) -> int:
    """Return the scores that a fused kernel computes, of all heads.

    Causal queries see half of the last keys, of as many as there are queries, and all keys before; in a window, if the
    kernel knows it, its width at most. Keys that a mask hides are computed.
    """
    if k.dim() == 3:  # documents as long as the longest: [T, heads, d]
        length, window = int(given["max_q"]), int(given["window_size"][0]) + 1
        return q.shape[0] * q.shape[1] * _twice_seen(0, length, window) // (2 * length)
    dim = 1 if name.startswith("_flash_attention") else 2  # [b, s, heads, d], or [b, heads, s, d]
    queries, keys, before = q.shape[dim], k.shape[dim], given.get("window_size_left")
    heads = q.numel() // (queries * q.shape[-1])
    if not given.get("is_causal") and before is None:
        return heads * queries * keys
    return heads * _twice_seen(keys - queries, keys, 0 if before is None else before + 1) // 2


def _twice_seen(first: int, stop: int, window: int) -> int:
    """Return twice the keys that the causal queries [first, stop) see, half a key per query less; window 0: none."""
    window = window or stop
    full = min(max(window, first), stop)  # the first query that sees a whole window
    return full**2 - first**2 + 2 * (stop - full) * window


class _RecordedAxis(PretendAxis):
    """An axis whose collectives become events."""

    def __init__(self, recorder: Recorder, name: str, ranks: list[int], rank: int, needs_staging_buffer: bool) -> None:
        super().__init__(name, ranks, rank, needs_staging_buffer)
        self.recorder = recorder

    def _start(self, name: str, collective: Any, **options: Any) -> Pending:
        results = options.get("writes", ())
        if options.get("result") is not None:
            results = (*results, options["result"])
        touched = (*options.get("reads", ()), *results)
        recorder = self.recorder
        number = recorder.issued
        recorder.issued += 1
        recorder.events.append(Issue(number, self.name, name, max(x.numel() * x.element_size() for x in touched)))
        recorder.differences.join(results, self.name, options.get("reads", ()))
        then = options.get("then")

        def arrive() -> None:
            recorder.events.append(Arrive(number))
            if then is not None:
                then()
                recorder.differences.join(results, self.name)

        return super()._start(name, collective, **(options | {"then": arrive}))
