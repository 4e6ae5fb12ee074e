"""`Device`: constants of a kind of device, of its node and of its cluster, read from a TOML file.

scripts/devices has a file per device; scripts/measure_device.py writes one for the machine that it runs on. Every
constant has a source, and a range if it is uncertain. Pure.
"""

import fnmatch
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from msgspec import Meta, Struct, defstruct
from msgspec.structs import asdict

from megazero.engine.options.schema import Precision
from megazero.engine.plan.layout.topology import Layout, Ranks, disjoint
from megazero.files import read_small
from megazero.flags.config import TrainingConfig
from megazero.typed_files import decode
from megazero.units import did_you_mean

# A link to scripts/devices; files of the package where it is installed.
DEVICES = Path(__file__).parents[1] / "device_files"

# section of a device file -> its required constants
SECTIONS = {
    "memory": ("capacity", "reserved", "bandwidth", "fraction"),
    "compute": ("fp16", "bf16", "fp32", "fp64", "fraction", "attention", "units", "tile_rows", "tile_columns"),
    "overhead": ("kernel", "call", "operation"),
    "host": ("bandwidth",),
    "node": ("devices", "bandwidth", "fraction", "latency"),
    "cluster": ("bandwidth", "fraction", "latency"),
}
OPTIONAL = {
    "memory": ("communicator",),
    "host": ("memory_bandwidth", "nvme_bandwidth"),
    "node": ("host_devices", "link"),
    "cluster": ("disk_bandwidth",),
    "compute": ("tf32", "attention_64"),
    "overhead": ("collective", "overlap"),
}

# Bytes/s of a rank. ZeRO-Infinity (arXiv 2104.07857) reaches about 25 GB/s of NVMe on a DGX-2 node, for 16 GPUs.
NVME_BANDWIDTH = 1.6e9
# Bytes/s of a device that writes to the cluster's file system, while all do. Llama 3's storage sustains 2 TB/s, for up
# to 16,384 GPUs (arXiv 2407.21783, section 3.3.1).
DISK_BANDWIDTH = 1.2e8

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Curve = tuple[tuple[Positive, Positive], ...]  # (x, y), x ascending


class Constant(NamedTuple):
    """A number and its range. Whether `low` is the fast or the slow end depends on the constant."""

    value: float
    low: float
    high: float
    source: str


class _Given(Struct, forbid_unknown_fields=True):
    """A constant in a device file."""

    value: NotNegative
    source: Annotated[str, Meta(min_length=1)]
    low: NotNegative | None = None  # None: `value`
    high: NotNegative | None = None

    def __post_init__(self) -> None:
        found = self.constant()
        if not found.low <= found.value <= found.high:
            raise ValueError(f"low {found.low}, value {found.value}, high {found.high} must ascend")

    def constant(self) -> Constant:
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        return Constant(self.value, low, high, self.source)


def _section(name: str) -> type[Struct]:
    optional = [(key, _Given | None, None) for key in OPTIONAL.get(name, ())]
    return defstruct(name, [*((key, _Given) for key in SECTIONS[name]), *optional], forbid_unknown_fields=True)


class Curves(Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements, each empty on devices that are described by their constants alone."""

    products: Curve = ()  # FLOPs of a matrix product -> FLOP/s
    elementwise: Curve = ()  # bytes of an operator -> bytes/s
    contention: Curve = ()  # ranks that compute on a node -> time over that of one alone
    links: Curve = ()  # ranks that communicate on a node -> bytes/s of one

    def __post_init__(self) -> None:
        for name, curve in asdict(self).items():
            if list(curve) != sorted(curve):
                raise ValueError(f"{name}: x must ascend")


_DeviceFile = defstruct(
    "_DeviceFile",
    [
        ("kind", Literal["cuda", "cpu"]),
        *((name, _section(name)) for name in SECTIONS),
        ("description", str, ""),
        ("cards", tuple[str, ...], ()),
        ("operators", dict[str, Positive], {}),
        ("curves", Curves, Curves()),
    ],
    forbid_unknown_fields=True,
)


@dataclass(frozen=True)
class Device:
    """Constants by "section.name", explained in docs/plan.md. Bytes, seconds, FLOP/s and bytes/s.

    Attributes:
        kind: "cuda" or "cpu"; decides the kernels and the collectives of a traced layer.
        cards: patterns of the names of these cards in CUDA, without "NVIDIA " or "Tesla ".
        operators: operator of torch -> its highest bytes/s, in cache or in memory; others are as fast as memory.
    """

    name: str
    kind: str
    constants: dict[str, Constant]
    operators: dict[str, float]
    curves: Curves = field(default_factory=Curves)
    cards: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> float:
        return self.constants[name].value

    def get(self, name: str, default: float) -> float:
        return self[name] if name in self.constants else default

    def at_end(self, fast: bool) -> Self:
        """Return the device with every constant at the fast, or at the slow, end of its range."""
        moved = {}
        for name, c in self.constants.items():
            less_is_fast = name.startswith("overhead.") or name.endswith((".latency", ".reserved", ".communicator"))
            if name != "memory.capacity":
                c = c._replace(value=c.low if less_is_fast == fast else c.high)
            moved[name] = c
        return replace(self, constants=moved)

    def multiplying(self, training: TrainingConfig) -> Self:
        """Return the device with TF32's rate for fp32 products, if --tf32 is on and the device has it."""
        if not training.tf32 or "compute.tf32" not in self.constants:
            return self
        return replace(self, constants=self.constants | {"compute.fp32": self.constants["compute.tf32"]})

    @property
    def fastest_precision(self) -> Precision:
        """The first of bf16 and fp16 whose products are faster than those in fp32. Older GPUs emulate bf16."""
        found: tuple[Precision, ...] = ("bf16", "fp16")
        return next((name for name in found if self[f"compute.{name}"] > self["compute.fp32"]), "fp32")

    @property
    def collective_overhead(self) -> float:
        """Seconds of computation that starting a collective or a message costs: on CPUs."""
        return self.get("overhead.collective", 0.0)

    @property
    def overlap(self) -> float:
        """Fraction by which a layer slows down while a collective runs: on GPUs."""
        return self.get("overhead.overlap", 0.0)

    @property
    def host_memory_bandwidth(self) -> float:
        """Bytes/s at which a rank's cores read and write host memory; the device's memory if it is a CPU."""
        own = self["memory.bandwidth"] * self["memory.fraction"] if self.kind == "cpu" else self["host.bandwidth"]
        return self.get("host.memory_bandwidth", own)

    @property
    def nvme_bandwidth(self) -> float:
        """Bytes/s at which a rank reads and writes files, while all ranks of its node do."""
        return self.get("host.nvme_bandwidth", NVME_BANDWIDTH)

    @property
    def disk_bandwidth(self) -> float:
        """Bytes/s at which a device writes to the cluster's file system and reads from it, while all do."""
        return self.get("cluster.disk_bandwidth", DISK_BANDWIDTH)

    def attention(self, head_dim: int) -> float:
        """Return the fraction of the peak that fused attention reaches; heads of up to 64 have their own constant."""
        usual = self["compute.attention"]
        return self.get("compute.attention_64", usual) if head_dim <= 64 else usual

    @property
    def devices_per_node(self) -> int:
        return int(self["node.devices"])

    @property
    def devices_per_host(self) -> int:
        """Devices of one operating system: fewer than the node's if the node is a rack of hosts, as in NVL72."""
        return int(self.get("node.host_devices", self["node.devices"]))

    def ranks_per_host(self, world: int) -> int:
        """Return the ranks that a host starts, as many on each."""
        return _equal_parts(world, self.devices_per_host)

    def ranks_per_node(self, world: int) -> int:
        """Return the ranks that share a node's links, on as many hosts in each node."""
        each = self.ranks_per_host(world)
        return each * _equal_parts(world // each, self.devices_per_node // self.devices_per_host)

    def reserved_bytes(self, layout: Layout) -> int:
        """Return the bytes of libraries on a rank: a fixed amount, and one for each communicator."""
        return int(self["memory.reserved"] + communicators(layout) * self.get("memory.communicator", 0.0))

    def usable_bytes(self, layout: Layout) -> int:
        """Return the bytes of a device that are left for the engine and its activations."""
        return int(self["memory.capacity"]) - self.reserved_bytes(layout)


def _equal_parts(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`, or 1."""
    return next((n for n in range(min(most, number), 0, -1) if number % n == 0), 1)


def communicators(layout: Layout) -> int:
    """Return the number of NCCL communicators of a rank: the world's, and one per split of `GroupMaker`.

    Axes with the same ranks share one. A rank without a link in a split has one of its own.
    """
    if layout.world_size == 1:
        return 0
    parts = {axis: size for axis, size in layout.sizes.items() if axis != "pp"}
    inner = len({(size, layout.stride(axis)) for axis, size in parts.items() if size > 1})
    tied = layout.pp > 2 and layout.last_pp > 0
    pairs: dict[tuple[int, int], list[Ranks]] = {}
    for first, *way in layout.links():
        pairs.setdefault((way[0], way[1]), []).append((first, (first + 1) % layout.pp))
    return 1 + inner + (layout.pp > 1) + tied + sum(map(len, map(disjoint, pairs.values())))


def interpolate(curve: Curve, x: float) -> float:
    """Return y at x: linear between the two nearest points, constant outside the curve."""
    at = bisect_left(curve, (x,))
    if at == 0 or at == len(curve):
        return curve[min(at, len(curve) - 1)][1]
    (x0, y0), (x1, y1) = curve[at - 1], curve[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def known_devices() -> list[str]:
    return sorted(path.stem for path in DEVICES.glob("*.toml"))


def load_device(name: str) -> Device:
    """Read the device of --device-type: a name in scripts/devices, or a TOML file.

    Raises:
        ValueError: there is no such device or file, or the file does not describe a device.
    """
    known = known_devices()
    if not name:
        raise ValueError(f"--device-type is missing; name one of {', '.join(known)}, or a TOML file")
    path = Path(name) if name.endswith(".toml") else DEVICES / f"{name}.toml"
    if not path.is_file():
        hint = did_you_mean(name, known) or f"there are {', '.join(known)}."
        raise ValueError(
            f"--device-type {name}: no such TOML file, nor a device of scripts/devices; {hint} For another device give "
            "a TOML file: a copy of a similar device with the numbers of the data sheet, or the output of "
            "scripts/measure_device.py for this CPU (docs/plan.md)"
        )
    try:
        file: Any = decode(read_small(path), _DeviceFile, path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--device-type {error}; docs/plan.md describes device files") from None
    given = {f"{s}.{key}": c for s in SECTIONS for key, c in asdict(getattr(file, s)).items() if c is not None}
    constants = {key: constant.constant() for key, constant in given.items()}
    return Device(
        name=path.stem,
        kind=file.kind,
        constants=constants,
        operators=file.operators,
        curves=file.curves,
        cards=file.cards,
    )


def find_card(card: str) -> Device | None:
    """Return the device of scripts/devices that CUDA names `card`, such as "NVIDIA H200"; None if it is unknown."""
    short = card.removeprefix("NVIDIA ").removeprefix("Tesla ")
    for name in known_devices() if card else ():  # a CPU has no card
        device = load_device(name)
        if any(fnmatch.fnmatchcase(short, pattern) for pattern in device.cards):
            return device
    return None


def peak_flops(card: str, training: TrainingConfig) -> float:
    """Return the peak FLOP/s of the card that CUDA names `card`, in --precision; 0 if the card is unknown."""
    device = find_card(card)
    return device.multiplying(training)[f"compute.{training.precision}"] if device is not None else 0.0
