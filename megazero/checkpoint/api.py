"""save and load: what all ranks call together. `planning` says who does what, `storage` writes the files."""

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megazero.checkpoint import folders, manifest
from megazero.checkpoint.locking import SaveLock
from megazero.checkpoint.manifest import Damaged
from megazero.checkpoint.planning import CoveredLoadPlanner, CoveredSavePlanner
from megazero.checkpoint.shards import LocalShard
from megazero.checkpoint.storage import ManifestReader, ManifestWriter

Group = dist.ProcessGroup | None
T = TypeVar("T")


class AgreedFailure(RuntimeError):
    """Failure of some ranks to write or read their files, which every rank raises with the same message.

    Any other error may be one rank's alone, in the middle of a collective: the death of a data worker raises
    RuntimeError in its parent between any two instructions.
    """


NOTHING: Mapping[str, bytes] = MappingProxyType({})


def save(
    root: Path,
    iteration: int,
    shards: Mapping[str, LocalShard],
    state: dict[str, Any],
    group: Group = None,
    attached: Mapping[str, bytes] = NOTHING,
) -> Path:
    """Write the checkpoint `root/iter_NNNNNNN` and point `root/latest` at it; returns its path.

    All ranks of `group` call it, each with the shards that it holds; `state` is JSON, and rank 0's is kept, as are its
    files `attached`: contents by path in the folder (`tokenizer/NAME`).
    `group` spans all ranks (None: the default group, or this process alone where torch.distributed was not
    started); give a gloo group of its own, with a timeout longer than the slowest rank's write, where the
    save runs in a thread. An iteration that was saved before is replaced. One save at a time for a root.

    Raises, on every rank and with nothing committed: ValueError, naming the tensor and the range, if some
    element of some tensor is held by no rank or in two different pieces; AgreedFailure with the message of
    each rank that could not write; RuntimeError with those of ranks that failed in another way.
    KeyboardInterrupt, on every rank, if one was interrupted. Any other exception is this rank's alone. Where `latest`
    names the checkpoint already when an error or an interrupt comes, it stays.
    """
    root = Path(root)
    planner = CoveredSavePlanner(shards)
    writer = ManifestWriter(root, iteration, _rank(group), state, planner, attached)
    try:
        with _together(f"saving {root / folders.folder_name(iteration)}"):
            dcp.save(
                {},  # the planner has the shards
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=not dist.is_initialized(),
            )
    except BaseException:
        if _rank(group) == 0:  # what was written is of no use, and the disk may be full
            shutil.rmtree(writer.folder, ignore_errors=True)
        raise
    return root / folders.folder_name(iteration)


def load(path: Path, shards: Mapping[str, LocalShard], group: Group = None, *, partial: bool = False) -> None:
    """Fill the `data` of every shard, in place, from the checkpoint folder `path`, whatever layout saved it.

    All ranks of `group` call it (see `save`), each with the shards that it wants; together they must name
    exactly the checkpoint's tensors, or with `partial` some of them: weights without moments, to generate text.
    A rank reads only the chunks that it needs, and checks what it reads.

    Raises, on every rank, naming --load and the tensor or file: ValueError if the checkpoint is of another
    model (a name, shape or dtype differs); Damaged, a ValueError, if it is not whole or is damaged. The data of
    the shards is then undefined.
    """
    path = Path(path)
    raw = _from_rank_0(lambda: _checked_manifest(path), group)  # bytes: objects would be slow to send
    content = manifest.parse_manifest(path, raw)
    with _together(f"loading {path}"):
        dcp.load(
            {},
            storage_reader=ManifestReader(path, content),
            planner=CoveredLoadPlanner(shards, path, content, partial),
            process_group=group,
            no_dist=not dist.is_initialized(),
        )


def find(
    load: Path, group: Group = None, *, passing_over: Mapping[str, str] | None = None, exact: bool = False
) -> Path | None:
    """`folders.find` on rank 0, for all ranks: they cannot disagree about which checkpoint is the newest."""
    return _from_rank_0(lambda: folders.find(load, passing_over, exact), group)


def read_state(path: Path, group: Group = None) -> dict[str, Any]:
    """`manifest.read_state` on rank 0, for all ranks: damage is everyone's error."""
    return _from_rank_0(lambda: manifest.read_state(path), group)


def lock(root: Path, group: Group = None) -> SaveLock | None:
    """Take the lock of a folder of checkpoints, on rank 0 for all ranks; None on the others.

    Raises ValueError, on every rank, if another run holds it or the folder cannot be written.
    """
    taken: list[SaveLock] = []
    _from_rank_0(lambda: taken.append(SaveLock(root)), group)
    return taken[0] if taken else None


def _checked_manifest(path: Path) -> bytes:
    """The manifest's bytes; raises what `read_manifest` raises."""
    raw = manifest.read_manifest_bytes(path)
    manifest.parse_manifest(path, raw)
    return raw


def _rank(group: Group) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _from_rank_0(function: Callable[[], T], group: Group) -> T:
    """Return or raise on every rank what the function returns or raises on rank 0."""
    if not dist.is_initialized():
        return function()
    outcome: list[Any] = [None, None]
    if _rank(group) == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(outcome, src=source, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


@contextlib.contextmanager
def _together(action: str) -> Iterator[None]:
    """Turn DCP's report of failed ranks, which every rank gets, into one error that says who and why."""
    with warnings.catch_warnings():
        # DCP warns of a process on its own, which for us is a layout like any other.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as exception:  # a BaseException
            errors = {rank: error for rank, (error, _) in sorted(exception.failures.items())}
            if any(isinstance(error, KeyboardInterrupt) for error in errors.values()):  # DCP catches it too
                raise KeyboardInterrupt from exception
            if all(isinstance(error, ValueError) for error in errors.values()):
                kind = Damaged if any(isinstance(error, Damaged) for error in errors.values()) else ValueError
                raise kind("; ".join(dict.fromkeys(map(str, errors.values())))) from exception
            reports = [f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items()]
            failure = AgreedFailure if all(isinstance(error, OSError) for error in errors.values()) else RuntimeError
            raise failure(f"{action} failed on {'; '.join(reports)}") from exception
