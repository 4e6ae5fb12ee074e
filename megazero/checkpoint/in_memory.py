"""Checkpoints in the memory of the nodes, which outlive the ranks; each rank's file is on two nodes.

Note [In memory]
Every node has a folder of its own in --memory-checkpoint-dir. A save writes the files of a checkpoint on disk, divided
over these folders: `iter_0000100` on a node has the manifest, the state, the tensor files that the node's ranks wrote,
and copies of those of the node before it in the ring. A checkpoint is *whole* if all files that its manifest lists are
on some nodes that are left. So one lost node costs nothing, nor do several that are no neighbours.
A node's part is written in `.iter_0000100.partial`. It gets its name when every node has its files, and only then is an
older one deleted. So at most two exist, and a kill at any moment leaves one that is whole.
A run that resumes takes the newest one that is whole and newer than the disk's, with the order of Note [Which one] in
`folders`. Another run may have left it: its `saved_into` must be the content of the file IDENTITY in the --save folder,
which is gone when a user deletes that folder. A start that loads no copy writes a new IDENTITY, which invalidates
copies on absent nodes.
Chunks that no local file has are asked of ranks that have them, so that
any layout on any nodes loads it, and no node needs memory for files of others.
"""

import contextlib
import hashlib
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from megazero.checkpoint.api import check
from megazero.checkpoint.chunk_files import Asked, Wanted, chunk_bytes, copy_chunks, file_pieces, write_pieces
from megazero.checkpoint.folders import checkpoints, delete, folder_name, iteration_of, next_save_number, save_number
from megazero.checkpoint.locking import check_owner
from megazero.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Count,
    Damaged,
    Manifest,
    parse_manifest,
    read_manifest_bytes,
    read_state_file,
    write_durably,
)
from megazero.checkpoint.manifest import manifest_text as text_of
from megazero.checkpoint.messages import Group, rank_of, tensor_of
from megazero.checkpoint.nodes import Nodes, exchange
from megazero.checkpoint.planning import RankPlan, SaveLayout, Skipped, file_name
from megazero.checkpoint.shards import LocalShard
from megazero.checkpoint.shared_outcome import from_rank, gather_all, message_of, together, value_of_message
from megazero.checkpoint.storage import ChunkReader, Save, WrittenFile
from megazero.files import crc32, explain, read_regular, replacing
from megazero.log import log
from megazero.units import size, things

IDENTITY = "memory-checkpoints.id"
MAX_PER_NODE = 2  # the newest whole one and the one in progress
SHARED_MEMORY = "/dev/shm/megazero-{}"  # of a user


class Stamp(NamedTuple):
    """The fields of a state in memory by which copies are found and ordered."""

    iteration: Count
    save_number: Count
    saved_time: float
    saved_into: str


class Held(NamedTuple):
    """The part of a checkpoint that a node holds."""

    order: tuple[int, float]  # number of the save, as on disk; time
    iteration: int
    digest: int  # of the manifest
    files: tuple[str, ...]
    absent: tuple[str, ...]


class InMemory(NamedTuple):
    """A whole checkpoint in the memory of `nodes`: at least one has each file."""

    save_number: int
    iteration: int
    digest: int
    nodes: tuple[int, ...]
    holders: dict[str, list[int]]  # file -> nodes
    disk: int = 0  # iteration of the newest on the disk; 0: there is none
    path: Path = Path()  # its folder on this rank's node

    @property
    def key(self) -> str:
        """A name that no checkpoint on the disk has."""
        return f"{self.iteration}-{self.digest}"

    def loaded(self, seconds: float) -> str:
        where = f"the memory of {things(len(self.nodes), 'node')}"
        disk = f"the disk has {self.disk or 'none'}"
        return f"loaded iteration {self.iteration} from {where} in {seconds:.1f} s ({disk})"


def whole(inventories: Sequence[Sequence[Held]]) -> tuple[list[InMemory], dict[int, str]]:
    """Return the whole checkpoints, newest first, and the faults of others by iteration; inventories: of each node."""
    parts: dict[tuple[tuple[int, float], int, int], dict[int, Held]] = {}
    for node, inventory in enumerate(inventories):
        for held in inventory:
            parts.setdefault((held.order, held.iteration, held.digest), {})[node] = held
    found, faults, last = [], {}, None
    for (order, iteration, digest), nodes in sorted(parts.items(), reverse=True):
        if last is not None and iteration >= last[1] and (order, iteration) != last:
            continue  # abandoned, as in Note [Which one]
        last = order, iteration  # copies that differ are both kept, because one of them is damaged
        holders: dict[str, list[int]] = {}
        for node, held in nodes.items():
            for file in held.files:
                holders.setdefault(file, []).append(node)
        lost = sorted(set.intersection(*(set(held.absent) for held in nodes.values())))
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            faults[iteration] = f"iteration {iteration} in memory has lost both copies of {lost[0]}{more}"
        else:
            found.append(
                InMemory(save_number=order[0], iteration=iteration, digest=digest, nodes=tuple(nodes), holders=holders)
            )
    return found, faults


class MemoryCheckpoints:
    """One rank's part in the checkpoints in memory of a run; all ranks call each method together.

    Attributes:
        folder: of this rank's node.
        number: of saves to the disk so far, as in Note [Which one] in `folders`; rank 0 counts.
        newest: iteration of the one that all nodes have; None: there is none.
    """

    def __init__(self, base: str, save: Path, group: Group) -> None:
        """Make the folder. ValueError, on every rank, if a node cannot.

        Args:
            base: --memory-checkpoint-dir; "": the default.
            save: the --save folder.
        """
        self.nodes, self.group = Nodes.meet(group), group
        path, self.identity, self.number = from_rank(
            0, lambda: (os.path.abspath(save), _identity(save), next_save_number(save)), group, tuple[str, str, int]
        )
        self.given, self.save_folder = base, save
        self.folder = run_folder(base, path) / self.nodes.names[self.nodes.mine]
        self.base = self.folder.parents[1]
        self.newest: int | None = None
        together("making --memory-checkpoint-dir", group, self._make)

    def _make(self) -> None:
        try:
            _private(self.base, given=bool(self.given))
            _private(self.folder.parent)
            _private(self.folder)
        except OSError as error:
            raise ValueError(f"--memory-checkpoint-dir {self.base}: {explain(error)}") from None

    def bytes_per_node(self, shards: Mapping[str, LocalShard]) -> list[int]:
        """Return the most bytes of tensors that each node holds: twice its own files and its neighbour's."""

        def count(plans: list[RankPlan]) -> list[list[int]]:
            written = SaveLayout(plans).num_bytes
            own = [sum(written[rank] for rank in ranks) for ranks in self.nodes.ranks]
            return [[MAX_PER_NODE * (n + (own[at - 1] if len(own) > 1 else 0)) for at, n in enumerate(own)]] * len(
                plans
            )

        plan, action = lambda: RankPlan.of(shards), "planning copies in memory"
        return list(together(action, self.group, plan, count, sends=RankPlan, answers=list[int]))

    def announce(self, shards: Mapping[str, LocalShard]) -> None:
        """Report the memory of the fullest node, and warn if it has not as much."""
        needed = self.bytes_per_node(shards)
        room = shutil.disk_usage(self.folder).free + bytes_below(self.folder)
        rooms = gather_all(room, self.group, int)
        left, node = min((rooms[ranks[0]] - needed[at], at) for at, ranks in enumerate(self.nodes.ranks))
        rest = f"{size(rooms[self.nodes.ranks[node][0]])} are free for them in {self.base}"
        text = f"checkpoints in memory take at most {size(needed[node])} of node {self.nodes.names[node]}; {rest}"
        if left < 0:
            log.warning(f"{text}: copies will fail; give a --memory-checkpoint-dir with more room, or use more nodes")
        else:
            log.info(text + ("" if len(needed) > 1 else "; they are lost with it, because there is no other node"))

    # -- save

    def stamp(self) -> dict[str, Any]:
        """Return the fields of a state in memory that one on disk lacks."""
        return {"saved_into": self.identity, "saved_time": time.time(), "save_number": self.number}

    def save(
        self, iteration: int, shards: Mapping[str, LocalShard], state: dict[str, Any], group: Group = None
    ) -> Path:
        """Save into the folders of all nodes, and copy each rank's file to the next node. Raises as `api.save`.

        `state`: with `stamp()`. The tokenizer is left out, because the run that resumes has its own.
        """
        job = Save(root=self.folder, iteration=iteration, rank=rank_of(group), shards=shards, state=state, attached={})
        action = f"copying iteration {iteration} to memory"
        manifests: list[Manifest] = []  # on rank 0
        try:
            skipped = together(action, group, lambda: self._plan(job), job.divide, sends=RankPlan, answers=Skipped)
            together(
                action,
                group,
                lambda: job.write(skipped),
                lambda files: manifests.append(job.manifest(files)),
                sends=WrittenFile,
            )
            together(action, group, lambda: self._copy(job.folder, group))
            texts = from_rank(0, lambda: (text_of(manifests[0]).encode(), job.state_text), group, tuple[bytes, bytes])
            together(action, group, lambda: self._write_texts(job.folder, *texts))
            together(action, group, lambda: self._publish(job))
        except BaseException:
            if self.nodes.leads:
                shutil.rmtree(job.folder, ignore_errors=True)
            raise
        self.newest = iteration
        return self.folder / folder_name(iteration)

    def _plan(self, job: Save) -> RankPlan:
        if self.nodes.leads:
            for path in checkpoints(self.folder):
                if path.name != folder_name(self.newest or 0):
                    delete(path)
            if job.rank:  # rank 0 makes its folder when it has planned
                job.make_folder()
        return job.plan()

    def _copy(self, folder: Path, group: Group) -> None:
        """Send this rank's file to the next node, and write those of the node before. OSError once all have arrived."""
        failures: list[OSError] = []
        pieces: Sequence[torch.Tensor] = ()
        try:
            pieces = file_pieces(folder / file_name(rank_of(group)))
        except OSError as error:
            failures.append(error)
        for to, source in self.nodes.copies():
            path = folder / file_name(source) if source is not None else folder
            failure = write_pieces(path, exchange(pieces, to, source, group))
            failures += [failure] if failure is not None else []
        if failures:
            raise failures[0]

    def _write_texts(self, folder: Path, manifest: bytes, state: bytes) -> None:
        if self.nodes.leads:
            write_durably(folder / STATE, state)
            write_durably(folder / MANIFEST, manifest)

    def _publish(self, job: Save) -> None:
        if self.nodes.leads:
            named = self.folder / folder_name(job.iteration)
            if named.is_symlink() or named.is_file():  # of a user: it would be in the way for good
                delete(named)
            job.folder.rename(named)

    def settle(self, found: InMemory | None) -> None:
        """Delete all checkpoints but the one that was loaded; if there is none, also those of nodes that are absent."""
        self.newest = found.iteration if found else None
        if found is None:
            self.identity = from_rank(0, lambda: _identity(self.save_folder, anew=True), self.group, str)
        if self.nodes.leads:
            for path in checkpoints(self.folder):
                held = self._held(path)
                if not (found and held and (held.iteration, held.digest) == (found.iteration, found.digest)):
                    delete(path)

    def remove(self) -> None:
        """Delete the folder of this node."""
        if self.nodes.leads:
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # that of the run has other nodes' folders, if they are simulated
                self.folder.parent.rmdir()

    # -- load

    def find(self, older: Path | None, faults: Mapping[str, str]) -> Iterator[InMemory]:
        """Yield the whole checkpoints that are newer than `older`, on the disk; then log why there are no others."""
        mine = [held for held in map(self._held, checkpoints(self.folder) if self.nodes.leads else []) if held]
        everyone = gather_all(mine, self.group, list[Held])
        found, lost = whole([everyone[ranks[0]] for ranks in self.nodes.ranks])
        number, iteration = from_rank(
            0, lambda: (save_number(older), iteration_of(older)) if older else (0, 0), self.group, tuple[int, int]
        )
        newer = [each for each in found if each.save_number > number and each.iteration > iteration]
        for each in newer:
            if each.key not in faults:
                yield each._replace(path=self.folder / folder_name(each.iteration), disk=iteration)
        reasons = [fault for of, fault in lost.items() if of > iteration]
        if found and not newer:
            reasons.append(f"iteration {found[0].iteration} in memory is not newer")
        reasons += [faults[each.key] for each in newer if each.key in faults]
        if older is not None or reasons:
            why = "; ".join(reasons) or "no node has a checkpoint in memory"
            log.info(f"{why}: {f'{older} is loaded' if older else 'the run starts from the beginning'}")

    def _held(self, path: Path) -> Held | None:
        """Return this node's part of a checkpoint; None if it is damaged, or another run's."""
        try:
            raw, state = read_manifest_bytes(path), read_state_file(path)
            sizes = parse_manifest(path, raw).files
            stamp = msgspec.convert([state.get(name) for name in Stamp._fields], Stamp)
        except ValueError:  # msgspec's too
            return None
        if stamp.saved_into != self.identity or stamp.iteration != iteration_of(path):
            return None
        here = tuple(file for file, length in sizes.items() if _size(path / file) == length)
        order = stamp.save_number, stamp.saved_time
        return Held(
            order=order,
            iteration=stamp.iteration,
            digest=crc32(raw),
            files=here,
            absent=tuple(sizes.keys() - set(here)),
        )

    def read_state(self, found: InMemory) -> dict[str, Any]:
        """Return the state of a checkpoint, from a node that has it."""
        holder = self.nodes.ranks[found.nodes[0]][0]
        return from_rank(holder, lambda: read_state_file(found.path), self.group, dict[str, Any])

    def load(self, found: InMemory, shards: Mapping[str, LocalShard], *, partial: bool = False) -> None:
        """Fill the shards, as `api.load`; a damaged chunk is taken from the other copy, with a warning."""
        path, group = found.path, self.group
        raw = from_rank(self.nodes.ranks[found.nodes[0]][0], lambda: read_manifest_bytes(path), group, bytes)
        content = parse_manifest(path, raw)
        check(path, content, shards, group=group, partial=partial)
        reader, count = ChunkReader(path, content), len(self.nodes.ranks)
        left = sorted((each for chunks in reader.plan(shards).values() for each in chunks.items()), key=_file)
        nearest = {  # this node, if it has the file, then those that follow it in the ring
            file: sorted(nodes, key=lambda node: (node - self.nodes.mine) % count)
            for file, nodes in found.holders.items()
        }
        for turn in range(max(map(len, nearest.values()), default=0)):
            holder = {file: nodes[min(turn, len(nodes) - 1)] for file, nodes in nearest.items()}
            left = self._fill(reader, left, holder)
            faults = {f"{_file(each)} of {self.nodes.names[holder[_file(each)]]}" for each in left}
            everyone = sorted(set[str]().union(*gather_all(faults, group, set[str])))
            if not everyone:
                return
            log.warning(f"iteration {found.iteration} in memory is damaged: {', '.join(everyone)}; trying other copies")

        def refuse() -> None:
            if left:
                (name, chunk), _ = left[0]
                raise Damaged(
                    f"iteration {found.iteration} in memory is damaged: tensor {name!r} in every {chunk.file}"
                )

        together(f"loading {path}", group, refuse)

    def _fill(self, reader: ChunkReader, wanted: list[Wanted], holder: Mapping[str, int]) -> list[Wanted]:
        """Read chunks from the node `holder` of each file; return those that are damaged there."""
        me, asked = rank_of(self.group), dict[int, list[Wanted]]()
        for each in wanted:
            ranks = self.nodes.ranks[holder[_file(each)]]
            rank = me if me in ranks else ranks[self.nodes.place % len(ranks)]
            asked.setdefault(rank, []).append(each)
        local = asked.pop(me, [])
        left = copy_chunks(local, chunk_bytes(reader, [each for each, _ in local]))
        everyone = gather_all(sorted(asked), self.group, list[int])
        for distance in range(1, len(everyone)):
            to, source = (me + distance) % len(everyone), (me - distance) % len(everyone)
            mine = to if to in asked else None
            theirs = source if me in everyone[source] else None
            request = tensor_of(message_of([each for each, _ in asked.get(to, [])]))
            arrived = exchange([request], mine, theirs, self.group)
            wants = [each for text in arrived for each in value_of_message(text.numpy().tobytes(), Asked)]
            left += copy_chunks(asked.get(to, []), exchange(chunk_bytes(reader, wants), theirs, mine, self.group))
        return left


def run_folder(base: str, save: str) -> Path:
    """Return the folder of a run's nodes on this machine.

    Args:
        base: --memory-checkpoint-dir; "": the default.
    """
    return (
        Path(base or SHARED_MEMORY.format(os.getuid()))
        / hashlib.sha256(os.path.realpath(save).encode()).hexdigest()[:12]
    )


def _private(path: Path, given: bool = False) -> None:
    """Make a folder that only this user can enter, or check one, because everyone can make entries in /dev/shm.

    Args:
        given: by the user, who may let others read it, because the folders in it are private.

    Raises:
        ValueError: it is no folder, or others could write to it.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    faults = {
        "is a link": stat.S_ISLNK(found.st_mode),
        "is no folder": not stat.S_ISDIR(found.st_mode),
        "belongs to another user": found.st_uid != os.getuid(),
        "can be written by others": bool(given and found.st_mode & 0o022),
    }
    if fault := next((fault for fault, is_so in faults.items() if is_so), ""):
        raise ValueError(f"--memory-checkpoint-dir: {path} {fault}; name a folder of your own with mode 0700")
    if not given and found.st_mode & 0o077:
        path.chmod(0o700)


def bytes_below(folder: Path) -> int:
    return sum(_size(path) or 0 for path in folder.rglob("*"))


def _file(wanted: Wanted) -> str:
    return wanted[0][1].file


def _identity(save: Path, anew: bool = False) -> str:
    """Return the content of IDENTITY in the --save folder, which is made if it is missing, or `anew`."""
    path = save / IDENTITY
    if anew or not path.exists():
        save.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(uuid.uuid4().hex.encode())
            check_owner(save)
    return read_regular(path, limit=100).decode(errors="replace")


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None
