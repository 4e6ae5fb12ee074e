"""The layouts of an elastic run (--elastic MIN:MAX), chosen before they are needed.

The first start of a run chooses a layout for every number of nodes, and keeps the table in its --save folder. A later
start takes the row of the nodes that are left, without a search.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megazero.checkpoint.folders import save_mark
from megazero.checkpoint.shared_outcome import from_rank, gather_all
from megazero.files import read_small, write_atomically
from megazero.flags.config import Config
from megazero.flags.flag_names import LAYOUT_FLAGS
from megazero.flags.validate import elastic_nodes
from megazero.log import log
from megazero.planner.search.choose import Chosen, choose_layout
from megazero.planner.time.devices import Device
from megazero.units import size, things
from megazero.world import World, generation, mark_before, num_nodes

LAYOUTS = "layouts.json"  # in the --save folder
# Groups of options that change no layout.
OTHER_GROUPS = ("checkpoint", "log", "monitor", "plan", "evaluation")


class Table(msgspec.Struct):
    """The file: rows by number of nodes, and a digest of the question that they answer."""

    question: str
    rows: dict[int, Chosen]


class Question(NamedTuple):
    """All that the layouts of a run depend on.

    Attributes:
        config: checked, not resolved, with the defaults of the device.
        given: names of flags without dashes; layouts keep those of LAYOUT_FLAGS.
        per_node: ranks of a node.
        vocab_size: of the tokenizer; 0 without one.
        device: of the ranks, the same on all nodes.
    """

    config: Config
    given: frozenset[str]
    per_node: int
    vocab_size: int
    device: Device

    @property
    def nodes(self) -> range:
        return elastic_nodes(self.config.parallel.elastic)

    @property
    def of_all(self) -> Config:
        """The options without the numbers of nodes."""
        return replace(self.config, parallel=replace(self.config.parallel, elastic=""))

    def digest(self) -> str:
        """Return a text that changes with the question; not with the numbers of nodes, nor with less than 1 GiB."""
        options = {name: value for name, value in asdict(self.of_all).items() if name not in OTHER_GROUPS}
        memory = round(self.device["memory.capacity"] / 2**30)  # kernels differ in the memory that they keep
        device = asdict(self.device) | {"constants": self.device.constants | {"memory.capacity": memory}}
        content = [options, sorted(self.given & {*LAYOUT_FLAGS}), self.per_node, self.vocab_size, device]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def choose(self, nodes: int) -> Chosen:
        """Search the layout for `nodes`. ValueError if none fits; it names the nodes that are needed."""
        try:
            return choose_layout(
                self.of_all, self.given, nodes * self.per_node, vocab_size=self.vocab_size, device=self.device
            )
        except ValueError as error:
            raise ValueError(f"--elastic {self.config.parallel.elastic}, on {things(nodes, 'node')}: {error}") from None

    def row(self, kept: Mapping[int, Chosen], nodes: int) -> Chosen:
        """Return the layout that a start on `nodes` takes: the kept one, if there is one."""
        if nodes not in self.nodes:
            raise ValueError(
                f"--elastic {self.config.parallel.elastic}: this run has {things(nodes, 'node')}; start it with "
                "scripts/launch.sh or scripts/slurm/pretrain.sbatch, or allow that number"
            )
        return kept[nodes] if nodes in kept else self.choose(nodes)

    def missing(self, kept: Mapping[int, Chosen]) -> list[int]:
        """Return the numbers of nodes without a row, the largest first."""
        return [nodes for nodes in reversed(self.nodes) if nodes not in kept]

    def words(self, rows: Mapping[int, Chosen]) -> str:
        """Return the table, for the console."""
        lines = [f"layouts for {self.nodes[0]} to {self.nodes[-1]} nodes, predicted for {self.device.name}:"]
        for nodes in reversed(self.nodes):
            row = rows[nodes]
            memory = f"{size(row.peak)} of {size(row.peak + row.free)}"
            ranks = things(nodes * self.per_node, "rank")
            lines.append(f"  {things(nodes, 'node')}, {ranks}: {row.seconds:.3g} s a step, {memory}: {row.layout}")
        return "\n".join(lines)


def start_words(config: Config, world: World, layout: str) -> str:
    """Return the line of a start: which one, its nodes and its layout."""
    most = elastic_nodes(config.parallel.elastic)[-1]
    nodes, ranks = things(num_nodes(world), "node"), things(world.size, "rank")
    return f"generation {generation()}: {nodes} of at most {most}, {ranks}: {layout}"


def read_layouts(save: Path, digest: str) -> dict[int, Chosen]:
    """Return the rows in the --save folder; none if they answer another question, or the file is damaged."""
    try:
        kept = msgspec.json.decode(read_small(save / LAYOUTS), type=Table)
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return {}
    return {nodes: row._replace(flags=_typed(row.flags)) for nodes, row in kept.rows.items() if kept.question == digest}


def _typed(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def write_layouts(save: Path, digest: str, rows: Mapping[int, Chosen]) -> None:
    """Keep the rows, all or none."""
    write_atomically(save / LAYOUTS, msgspec.json.encode(Table(digest, dict(rows))))


def complete(question: Question, rank: int, size: int, group: Any) -> None:
    """Choose the rows that the table lacks, divided over the ranks, keep it, and print it.

    All ranks call it together.

    Raises:
        ValueError: on every rank, if no layout fits on some number of nodes.
    """
    save, digest = Path(question.config.checkpoint.save), question.digest()
    kept = from_rank(0, lambda: read_layouts(save, digest), group, dict[int, Chosen])
    missing = question.missing(kept)
    if not missing:
        return
    rows, refusals = dict(kept), []
    for found in gather_all(_part(question, missing[rank::size]), group, dict[int, Chosen] | str):
        if isinstance(found, str):
            refusals.append(found)
        else:
            rows |= found
    if refusals:
        raise ValueError(f"{refusals[0]}; or allow other numbers of nodes")
    log.info(question.words(rows))
    if rank == 0:
        write_layouts(save, digest, rows)


def _part(question: Question, numbers: list[int]) -> dict[int, Chosen] | str:
    try:
        return {nodes: question.choose(nodes) for nodes in numbers}
    except ValueError as error:
        return str(error)


def resuming(config: Config) -> dict[str, Any]:
    """Return the flags that a start of an elastic run changes.

    Without --load, and once it has saved a checkpoint after its first generation began, it resumes from --save. Until
    then every generation obeys --load and --finetune as any run.
    """
    options = config.checkpoint
    if not config.parallel.elastic:
        return {}
    if options.load and (generation() == 0 or save_mark(options.save) == mark_before()):
        return {}
    return {"load": options.save, "finetune": False}
