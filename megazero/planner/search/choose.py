"""`--layout auto`: the fastest layout of the search that keeps the given flags and fits in memory. Pure.

Every rank makes the same choice, because it depends only on the flags, the number of ranks, the vocabulary and the
device, whose memory is the same on equal nodes. `run_values` compares the chosen flags.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

from megazero.flags.config import CheckpointConfig, Config, EvaluationConfig, LogConfig
from megazero.flags.flag_names import LAYOUT_FLAGS, as_flag, value_of, with_values
from megazero.host import Machine
from megazero.planner.run_plan import Plan
from megazero.planner.search.candidates import as_given
from megazero.planner.search.search import Search
from megazero.planner.time.devices import Constant, Device, find_card, known_devices, load_device
from megazero.units import size

CPU = "cpu"  # the device file of ranks without a GPU
SHARE = 0.9  # of memory: the rest is for the system, temporaries inside layers and fragmentation, which no plan counts


class Chosen(NamedTuple):
    """A layout, and its predictions.

    Attributes:
        flags: those of LAYOUT_FLAGS that were not given -> their values.
        seconds: of a step.
        peak: bytes of the fullest device at the peak of a step.
        free: bytes that the fullest device has left.
        layout: sizes of axes, in words.
    """

    flags: dict[str, Any]
    seconds: float
    peak: int
    free: int
    layout: str

    def apply(self, config: Config) -> Config:
        """Return `config` with this layout, as if it had been given."""
        return as_given(with_values(config, self.flags))

    def names(self, config: Config) -> list[str]:
        """Return the flags that change `config`: a preset of them, and of the given ones, is this layout."""
        return [name for name, value in self.flags.items() if value != value_of(config, name)]

    def as_flags(self, config: Config, dropped: Collection[str] = ()) -> str:
        """Return the flags that make `config` this layout, as a command line. dropped: those that its preset has."""
        names = {*self.names(config), *dropped}
        return " ".join(as_flag(name, value) for name, value in self.flags.items() if name in names)

    def words(self, config: Config, device: Device, dropped: Collection[str] = ()) -> str:
        """Report the choice, and how to fix it. config, dropped: without the choice, as `Command` has them."""
        flags = self.as_flags(config, dropped)
        fixed = f"instead of --layout auto: {flags}" if flags else "leave out --layout auto"
        return (
            f"chosen by --layout auto: {self.layout}; "
            f"predicted for {device.name}: {self.seconds:.3g} s a step, "
            f"{size(self.peak)} of {size(self.peak + self.free)} per rank. To fix this layout, {fixed}"
        )


def choose_layout(config: Config, given: Collection[str], world: int, vocab_size: int, device: Device) -> Chosen:
    """Choose the flags of a layout that are not given.

    Args:
        config: checked, not resolved, with the defaults of the device.
        given: names of flags without dashes; those of LAYOUT_FLAGS keep their value in `config`.
        world: number of ranks.
        vocab_size: of the tokenizer; 0 without one.
        device: of `device_of_ranks`, or of --device-type for a plan.

    Raises:
        ValueError: no layout has the given flags, or none that has them fits; with the way out.
    """
    fixed = {name: value_of(config, name) for name in LAYOUT_FLAGS if name in given}
    # A layout fits an evaluation too, which holds less. Folders are checked once, not for each layout.
    asked = replace(config, checkpoint=CheckpointConfig(), evaluation=EvaluationConfig(), log=LogConfig())
    search = Search(config=asked, device=device, vocabulary=vocab_size, world=world, given=fixed)
    plans = search.run()
    if not plans:
        raise ValueError(_none_fits(search, fixed))
    best = plans[0]
    flags = {name: value_of(best.config, name) for name in LAYOUT_FLAGS if name not in fixed}
    return Chosen(
        flags=flags, seconds=best.seconds, peak=best.stages[best.fullest].peak, free=best.free, layout=_words(best)
    )


def _none_fits(search: Search, fixed: dict[str, Any]) -> str:
    flags = " ".join(as_flag(name, value) for name, value in fixed.items())
    asked, drop = (f" with {flags}", "drop some of these flags, ") if flags else ("", "")
    return (
        f"--layout auto{asked}: none of the {len(search.found):,} layouts of {search.world} ranks fits in a rank's "
        f"{size(int(search.device['memory.capacity']))} ({search.device.name}); {drop}use more ranks, a shorter "
        "--seq-length, a smaller model, --checkpoint-in-cpu or --optimizer-cpu-offload"
    )


def _words(plan: Plan) -> str:
    config, layout = plan.config, plan.layout
    axes = {"pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp, "ep": layout.ep}
    found = [" x ".join(f"{name} {n}" for name, n in axes.items() if n > 1) or "one rank"]
    if layout.pp > 1:
        found.append(config.parallel.pipeline_schedule)
    if layout.data > 1:
        found.append(f"ZeRO stage {config.zero.zero_stage}")
    if config.activations.recompute != "none":
        found.append(f"recompute {config.activations.recompute}")
    each = config.micro_batches(layout.dp)
    return ", ".join([*found, f"{each} micro-batch{'es' if each > 1 else ''} of {config.training.micro_batch_size}"])


def device_of_ranks(config: Config, card: str, machine: Machine, world: int) -> Device:
    """Return the device of this run's ranks: its constants from a device file, its memory from the machine.

    Ranks that start together see different amounts of free memory, and must choose the same layout. So only a rank
    alone counts the free memory; others count the whole. `check_memory` compares with the free memory later.

    Args:
        card: the name of this rank's GPU; empty for a CPU.

    Raises:
        ValueError: no device file describes the card; or --device-type describes another kind of device.
    """
    named, kind, ranks = config.plan.device_type, machine.device_type, max(1, len(machine.ranks))
    device = load_device(named or CPU) if named or not card else find_card(card)
    if device is None:
        raise ValueError(
            f"--layout auto: no device file describes {card}; add --device-type with the most similar of "
            f"{', '.join(name for name in known_devices() if name != CPU)}, or with a TOML file of your own "
            "(docs/plan.md)"
        )
    if device.kind != kind:
        raise ValueError(f"--device-type {named} describes a {device.kind} device, and this rank has {card or 'a CPU'}")
    hosts = device.devices_per_node // device.devices_per_host  # of a node
    free, measured = machine.device or machine.host, {"node.devices": float(ranks * hosts), "node.host_devices": ranks}
    memory = free.num_bytes if world == 1 and free is not None else machine.whole
    if memory is not None:
        measured["memory.capacity"] = SHARE * (memory if kind == "cuda" else memory // ranks)
    constants = {name: Constant(value, value, value, "of this machine") for name, value in measured.items()}
    return replace(device, constants=device.constants | constants).multiplying(config.training)
