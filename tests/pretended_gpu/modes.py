"""The two modes through which a session sees a program: torch's functions, and the dispatcher's operators.

`Placing` sees functions as Python calls them. It answers `x.device`, and keeps the place of new tensors where a device
or pinned memory is asked for. `Watching` sees every operator, autograd's among them, and notes the bytes that it reads
and writes, and on which stream.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.engine.plan.program.operations import Op
from tests.pretended_gpu.attention import flash_backward, flash_forward
from tests.pretended_gpu.clocks import HOST, Clocks, Line
from tests.pretended_gpu.communicators import Communicators
from tests.pretended_gpu.findings import MIXED_DEVICES, Findings
from tests.pretended_gpu.memory import Memory, Operator, Place, tensors_in
from tests.pretended_gpu.streams import Streams

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
NO_ACCESS = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh"}
COPIES = ("copy_", "_to_copy")
# Operators whose result's shape or value the host must know.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "bincount"}
INSTEAD = {  # operators that a build for CPUs computes in another way
    # products of 16-bit matrices in fp32
    aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
    aten.mm.dtype_out: lambda a, b, dtype, out: out.copy_(a.to(dtype) @ b.to(dtype)),
    aten.addmm.dtype_out: lambda c, a, b, dtype, out: out.copy_(c + a.to(dtype) @ b.to(dtype)),
    # means and deviations of 16-bit numbers are fp32
    aten.native_layer_norm.default: lambda *args: _widened(*aten.native_layer_norm(*args)),
    aten.native_layer_norm_backward.default: lambda dy, x, shape, mean, rstd, *args: aten.native_layer_norm_backward(
        dy, x, shape, mean.to(x.dtype), rstd.to(x.dtype), *args
    ),
    aten._flash_attention_forward.default: flash_forward,
    aten._flash_attention_backward.default: flash_backward,
}


def _widened(y: torch.Tensor, *statistics: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return y, *(x.to(torch.promote_types(x.dtype, torch.float32)) for x in statistics)


class Session:
    """The parts of a pretended GPU, and how an operator is issued to it.

    Attributes:
        device: the one that this rank computes on.
        findings: the result.
        interpreter: of the program that runs, whose current operation findings name.
        paused: nothing is watched; the machinery itself computes.
    """

    def __init__(self) -> None:
        self.device = GPU
        self.findings, self.clocks = Findings(), Clocks()
        self.memory = Memory(self.clocks, self.findings)
        self.streams = Streams(self.clocks, self.findings)
        self.communicators = Communicators(self.streams, self.memory, self.findings, self.pausing)
        self.interpreter: Any = None
        self.paused = False

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def operator(self, name: str) -> Operator:
        op: Op | None = None if self.interpreter is None else self.interpreter.current
        return Operator(name, op)

    def run(self, line: Line, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Note an operator on a stream, or on the host."""
        tick, operator = self.clocks.issue(line), self.operator(name)
        for x in reads:
            self.memory.touch(x, False, line, tick, operator)
        for x in writes:
            self.memory.touch(x, True, line, tick, operator)

    def host_waits(self, name: str) -> None:
        """Note that the host waits for the current stream."""
        self.findings.waits.append(str(self.operator(name)))
        self.clocks.host_waits_for_line(self.streams.current.line)


class _Watching:
    """The method of `Watching`. In a subclass of TorchDispatchMode, torch would wrap it, at a cost per operator."""

    session: Session

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, session = kwargs or {}, self.session
        if session.paused:
            return func(*args, **kwargs)
        session.paused = True
        try:
            if func.namespace == "c10d":
                given = dict(zip(_schema(func).arguments, args, strict=False)) | kwargs
                session.communicators.issue(func, args, given.get("async_op", True), session.operator)
                return func(*args, **kwargs)
            return self._carry_out(func, args, kwargs)
        finally:
            session.paused = False

    def _carry_out(self, func: Any, args: Any, kwargs: Any) -> Any:
        session, memory, name = self.session, self.session.memory, func.overloadpacket.__name__
        schema = _schema(func)
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for value, argument in zip(args, schema.arguments, strict=False):
            (writes if argument in schema.written else reads).extend(tensors_in(value))
        for argument, value in kwargs.items():
            (writes if argument in schema.written else reads).extend(tensors_in(value))
        inputs = reads + writes
        known = [x.untyped_storage()._cdata for x in inputs]
        places = [memory.place_of(number) for number in known]
        run = INSTEAD.get(func, func)
        out = run(*args, **kwargs)
        if all(place is Place.HOST for place in places):
            return out
        on_device, current = Place.DEVICE in places, session.streams.current.line
        new = [x for x in tensors_in(out) if x.untyped_storage()._cdata not in known]
        if on_device:
            for x in new:
                memory.put(x, Place.DEVICE, current)
            if name not in COPIES:
                self._refuse_mixed(name, inputs, places)
        if schema.is_view or name in NO_ACCESS:
            return out
        if schema.is_factory:
            reads = []  # only their shape and type count
        session.run(current if on_device else HOST, name, reads, writes + new)
        if on_device and (reason := _host_waits(schema, name, args, kwargs, inputs, places)):
            session.host_waits(reason)
        return out

    def _refuse_mixed(self, name: str, inputs: list[torch.Tensor], places: list[Place]) -> None:
        """Report tensors of the host in an operator of the device, where only scalars may be."""
        for x, place in zip(inputs, places, strict=True):
            if place is not Place.DEVICE and x.dim() > 0 and x.numel() > 0:
                stream = self.session.clocks.names[self.session.streams.current.line]
                self.session.findings.report(
                    MIXED_DEVICES,
                    f"{self.session.operator(name)} on {stream} has a tensor {list(x.shape)} in {place.value} next to "
                    "one on the device",
                )


class Watching(_Watching, TorchDispatchMode):
    """Sees every operator."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session


class _Schema(NamedTuple):
    """An operator's arguments, by name, those that it writes, and the kind of its result."""

    arguments: tuple[str, ...]
    written: frozenset[str]
    is_view: bool
    is_factory: bool


@functools.cache
def _schema(func: torch._ops.OpOverload) -> _Schema:
    arguments, returns = func._schema.arguments, func._schema.returns
    written = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return _Schema(
        tuple(a.name for a in arguments),
        frozenset(written),
        bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns),
        FACTORY_FUNCTION_REGEX.match(func.overloadpacket.__name__) is not None,
    )


def _host_waits(
    schema: _Schema, name: str, args: Any, kwargs: Any, inputs: list[torch.Tensor], places: list[Place]
) -> str | None:
    """Return why the host waits for an operator of the device, or None."""
    if name in WAITS:
        return name
    if name in ("index", "index_put_") and any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1])):
        return f"{name} by a mask"
    # A scalar of the host stands for a number: on a CPU, `x[0] = 1` copies one.
    others = {place for x, place in zip(inputs, places, strict=True) if place is not Place.DEVICE and x.dim() > 0}
    if name in COPIES and others:
        given = dict(zip(schema.arguments, args, strict=False)) | kwargs
        if Place.HOST in others:
            return f"{name} of pageable memory"
        if not given.get("non_blocking"):
            return f"{name} that blocks"
    return None


class Placing(TorchFunctionMode):
    """Sees torch's functions, keeps the place of new tensors, and answers for tensors on the device."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        memory = session.memory
        self._instead: dict[Any, Callable[..., Any]] = {
            torch.Tensor.device.__get__: lambda get, x, *a: session.device if memory.on_device(x) else get(x, *a),
            torch.Tensor.is_cuda.__get__: lambda get, x, *a: memory.on_device(x),
            torch.Tensor.is_cpu.__get__: lambda get, x, *a: not memory.on_device(x) and get(x, *a),
            torch.Tensor.is_pinned: lambda get, x: memory.place(x) is Place.PINNED,
            torch.Tensor.pin_memory: lambda get, x: self._copied(x, Place.PINNED, x.dtype, False),
            torch.Tensor.to: self._to,
            torch.Tensor.cpu: lambda get, x: self._to(torch.Tensor.to, x, CPU),
            torch.Tensor.cuda: lambda get, x, *, non_blocking=False: self._to(
                torch.Tensor.to, x, GPU, non_blocking=non_blocking
            ),
            torch.Tensor.numpy: self._numpy,
            torch.Tensor.__array__: self._numpy,
            **{getattr(torch.Tensor, name): self._read for name in ("tolist", "item")},
            **{getattr(torch.Tensor, f"__{name}__"): self._read for name in ("bool", "float", "int", "index")},
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.session.paused:
            return func(*args, **kwargs)
        instead = self._instead.get(func)
        if instead is not None:
            return instead(func, *args, **kwargs)
        device = kwargs.get("device")
        kind = None if device is None else torch.device(device).type
        if kind == "cuda":
            return self._make(func, args, {**kwargs, "device": CPU}, Place.DEVICE)
        if kwargs.get("pin_memory"):
            return self._make(func, args, {**kwargs, "pin_memory": False}, Place.PINNED)
        if kind == "cpu":
            return self._make(func, args, kwargs, Place.HOST)
        return func(*args, **kwargs)

    def _make(self, func: Any, args: Any, kwargs: Any, place: Place) -> torch.Tensor:
        """Make a tensor at a place that was asked for."""
        session, name = self.session, func.__name__
        with session.pausing():
            out = func(*args, **kwargs)
        line = session.streams.current.line if place is Place.DEVICE else HOST
        session.memory.put(out, place, line)
        if name not in NO_ACCESS:
            session.run(line, name, [], [out])
        if place is Place.DEVICE and func in (torch.tensor, torch.as_tensor):
            session.host_waits(f"{name} of numbers of the host")
        return out

    def _to(self, to: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is None or device.type not in ("cpu", "cuda"):
            return to(x, *args, **kwargs)
        if (device.type == "cuda") == self.session.memory.on_device(x):
            return x if dtype is None else to(x, dtype)
        return self._copied(x, Place.DEVICE if device.type == "cuda" else Place.HOST, dtype or x.dtype, non_blocking)

    def _copied(self, x: torch.Tensor, place: Place, dtype: torch.dtype, non_blocking: bool) -> torch.Tensor:
        with self.session.pausing():
            out = torch.empty_like(x, dtype=dtype)
        self.session.memory.put(out, place, self.session.streams.current.line)
        return out.copy_(x, non_blocking=non_blocking)

    def _read(self, read: Any, x: torch.Tensor) -> Any:
        """Return values as numbers of Python."""
        if self.session.memory.on_device(x):
            self.session.host_waits(read.__name__)
        self.session.run(HOST, read.__name__, [x], [])
        with self.session.pausing():
            return read(x)

    def _numpy(self, numpy: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.session.memory.on_device(x):
            raise TypeError("a tensor on the device has no NumPy array; copy it to the host first")
        return numpy(x, *args, **kwargs)
