"""`Device`: the constants of a kind of device, of the node that it is in and of the cluster, read from a TOML file.

scripts/devices has a file per device; scripts/measure_device.py writes one for the machine that it runs on. Every
constant has its source beside it, and a range where it is uncertain. Pure.
"""

from __future__ import annotations

import difflib
import fnmatch
import tomllib
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megazero.config.model_options import Precision
from megazero.config.schema import TrainingConfig
from megazero.plan.layout.topology import Layout

# A link to scripts/devices; files of the package where it is installed.
DEVICES = Path(__file__).parents[1] / "device_files"

# section -> its constants, all needed
SECTIONS = {
    "memory": ("capacity", "reserved", "bandwidth", "fraction"),
    "compute": ("fp16", "bf16", "fp32", "fp64", "fraction", "attention", "units", "tile_rows", "tile_columns"),
    "overhead": ("kernel", "call", "operation"),
    "host": ("bandwidth",),
    "node": ("devices", "bandwidth", "fraction", "latency"),
    "cluster": ("bandwidth", "fraction", "latency"),
}
# section -> constants that not every device has
OPTIONAL = {"memory": ("communicator",), "compute": ("tf32", "attention_64"), "overhead": ("collective", "overlap")}
SLOWEST = 1e6  # bytes/s of an operator: less is a multiple of something, which files had before
CURVES = ("products", "elementwise", "contention", "links")


class Constant(NamedTuple):
    """A number with the range that it lies in. Whether `low` is fast or slow depends on what it is."""

    value: float
    low: float
    high: float
    source: str


Curve = tuple[tuple[float, float], ...]  # (x, y), x ascending


@dataclass(frozen=True)
class Device:
    """Constants by "section.name"; docs/plan.md says what each means. Bytes, seconds, FLOP/s and bytes/s.

    Attributes:
        kind: "cuda" or "cpu": whose kernels a layer is traced for, and which collectives it takes.
        cards: patterns of the names by which CUDA knows cards with these peaks, "NVIDIA " or "Tesla " left out.
        operators: operator of torch -> bytes/s that it reaches at most, wherever its tensors lie; those that are not
            named are as fast as memory.
        products: (FLOPs of a matrix product, FLOP/s), measured; () where the fraction of the peak is used.
        elementwise: (bytes of an operator, bytes/s), measured; () where the fraction of the bandwidth is used.
        contention: (ranks that compute on a node, time over that of one alone), measured; () where there is none.
        links: (ranks that communicate on a node, bytes/s of one), measured; () where it does not depend on them.
    """

    name: str
    kind: str
    description: str
    constants: dict[str, Constant]
    operators: dict[str, float]
    products: Curve = ()
    elementwise: Curve = ()
    contention: Curve = ()
    links: Curve = ()
    cards: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> float:
        return self.constants[name].value

    def at_end(self, fast: bool) -> Device:
        """The same device with every uncertain constant at the end of its range that is fast, or slow."""
        moved = {}
        for name, c in self.constants.items():
            less_is_fast = name.startswith("overhead.") or name.endswith((".latency", ".reserved", ".communicator"))
            if name != "memory.capacity":
                c = c._replace(value=c.low if less_is_fast == fast else c.high)
            moved[name] = c
        return replace(self, constants=moved)

    def multiplying(self, training: TrainingConfig) -> Device:
        """The same device with TF32's rate for fp32 products, where --tf32 and the device have it."""
        if not training.tf32 or "compute.tf32" not in self.constants:
            return self
        return replace(self, constants=self.constants | {"compute.fp32": self.constants["compute.tf32"]})

    @property
    def fastest_precision(self) -> Precision:
        """The first of bf16 and fp16 whose products are faster than those in fp32; older GPUs imitate bf16."""
        found: tuple[Precision, ...] = ("bf16", "fp16")
        return next((name for name in found if self[f"compute.{name}"] > self["compute.fp32"]), "fp32")

    @property
    def collective_overhead(self) -> float:
        """Seconds in which the host does not compute, for each collective or message: on CPUs."""
        return self._optional("overhead.collective", 0.0)

    @property
    def overlap(self) -> float:
        """Share by which a layer takes longer while a collective runs: on GPUs."""
        return self._optional("overhead.overlap", 0.0)

    def _optional(self, name: str, otherwise: float) -> float:
        known = self.constants.get(name)
        return known.value if known else otherwise

    def attention(self, head_dim: int) -> float:
        """Return the share of the peak that fused attention reaches; heads of up to 64 have a constant of their own."""
        usual = self["compute.attention"]
        return self._optional("compute.attention_64", usual) if head_dim <= 64 else usual

    @property
    def devices_per_node(self) -> int:
        return int(self["node.devices"])

    def reserved_bytes(self, layout: Layout) -> int:
        """Return the bytes that libraries take on a rank: fixed, and for each communicator."""
        each = self._optional("memory.communicator", 0.0)
        return int(self["memory.reserved"] + layout.communicators() * each)

    def usable_bytes(self, layout: Layout) -> int:
        """Return the bytes of a device that are left for the engine and its activations."""
        return int(self["memory.capacity"]) - self.reserved_bytes(layout)


def interpolate(curve: Curve, x: float) -> float:
    """Return y at x: linear between the points that enclose it, that of the nearest point outside of them."""
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
        ValueError: there is none of that name, or the file is no description of a device.
    """
    if not name:
        raise ValueError(f"--device-type is missing; name one of {', '.join(known_devices())}, or a TOML file")
    for path in (Path(name), DEVICES / f"{name}.toml"):
        if path.is_file():
            break
    else:
        known = known_devices()
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(
            f"--device-type {name}: no such file, nor a device of scripts/devices; {hint}there are {', '.join(known)}. "
            "For another device give a TOML file: a copy of the nearest in scripts/devices with the numbers of a GPU's "
            "data sheet, or what scripts/measure_device.py --output FILE measures of this CPU (docs/plan.md)"
        )
    try:
        return _read(path.stem, tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"--device-type {path}: not a TOML file: {error}") from None
    except ValueError as error:
        raise ValueError(f"--device-type {path}: {error}; see docs/plan.md for what a device file holds") from None


def find_card(card: str) -> Device | None:
    """Return the device of scripts/devices that CUDA names `card`, such as "NVIDIA H200"; None if there is none."""
    short = card.removeprefix("NVIDIA ").removeprefix("Tesla ")
    for name in known_devices():
        device = load_device(name)
        if any(fnmatch.fnmatchcase(short, pattern) for pattern in device.cards):
            return device
    return None


def peak_flops(card: str, training: TrainingConfig) -> float:
    """Return the peak FLOP/s of the card that CUDA names `card`, in --precision; 0 where it is not known."""
    device = find_card(card)
    return device.multiplying(training)[f"compute.{training.precision}"] if device is not None else 0.0


def _read(name: str, values: dict[str, Any]) -> Device:
    _check_keys(
        "the file", values, [*SECTIONS, "kind", "description", "cards", "curves", "operators"], {"kind", *SECTIONS}
    )
    constants: dict[str, Constant] = {}
    for section, names in SECTIONS.items():
        known = (*names, *OPTIONAL.get(section, ()))
        _check_keys(f"[{section}]", _table(section, values[section]), known, set(names))
        for key in (key for key in known if key in values[section]):
            constants[f"{section}.{key}"] = _constant(f"{section}.{key}", values[section][key])
    if values["kind"] not in ("cuda", "cpu"):
        raise ValueError(f"kind = {values['kind']!r} must be cuda or cpu")
    curves = _table("curves", values.get("curves", {}))
    _check_keys("[curves]", curves, CURVES)
    operators = _table("operators", values.get("operators", {}))
    for key, value in operators.items():
        if not _is_positive(value) or value < SLOWEST:
            raise ValueError(f"operators.{key} = {value!r} must be bytes per second, above {SLOWEST:.0g}")
    found = {key: _curve(key, points) for key, points in curves.items()}
    cards = values.get("cards", [])
    if not isinstance(cards, list) or not all(isinstance(card, str) for card in cards):
        raise ValueError(f"cards = {cards!r} must be a list of names")
    return Device(
        name, values["kind"], str(values.get("description", name)), constants, operators, cards=tuple(cards), **found
    )


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a table")
    return value


def _check_keys(where: str, table: dict[str, Any], known: Any, needed: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            raise ValueError(f"{where} has an unknown key {key!r}{f'; did you mean {close[0]}?' if close else ''}")
    for key in known:
        if key in needed and key not in table:
            raise ValueError(f"{where} lacks {key!r}")


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _constant(name: str, value: Any) -> Constant:
    table = _table(name, value)
    _check_keys(name, table, ("value", "low", "high", "source"), {"value", "source"})
    number = table["value"]
    zero_allowed = name.startswith("overhead.") or name == "memory.reserved"
    low, high = table.get("low", number), table.get("high", number)
    for what, given in (("value", number), ("low", low), ("high", high)):
        if not _is_positive(given) and not (zero_allowed and given == 0):
            raise ValueError(f"{name}: {what} = {given!r} must be a number above 0")
    if not low <= number <= high:
        raise ValueError(f"{name}: low {low}, value {number}, high {high} must ascend")
    if not isinstance(table["source"], str) or not table["source"].strip():
        raise ValueError(f"{name}: source must say where the value is from")
    return Constant(float(number), float(low), float(high), table["source"])


def _curve(name: str, points: Any) -> Curve:
    rows = points if isinstance(points, list) else []
    if not rows or not all(isinstance(row, list) and len(row) == 2 and all(map(_is_positive, row)) for row in rows):
        raise ValueError(f"curves.{name} must be a list of [x, y], numbers above 0")
    found = tuple((float(x), float(y)) for x, y in rows)
    if list(found) != sorted(found) or len({x for x, _ in found}) < len(found):
        raise ValueError(f"curves.{name}: x must ascend")
    return found
