"""save and load, which all ranks call together. `planning` divides the work, `storage` writes and reads the files."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megazero.checkpoint import folders, manifest
from megazero.checkpoint.agreement import Group, from_rank_0, rank_of, together
from megazero.checkpoint.locking import SaveLock
from megazero.checkpoint.planning import check_request, table_of
from megazero.checkpoint.shards import LocalShard
from megazero.checkpoint.storage import ChunkReader, Save

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
    path = Path(root) / folders.folder_name(iteration)
    job = Save(Path(root), iteration, rank_of(group), shards, state, attached)
    try:
        skipped = together(f"saving {path}", group, job.plan, job.divide)
        together(f"saving {path}", group, lambda: job.write(skipped), job.commit)
    except BaseException:
        if rank_of(group) == 0:  # a partial folder is of no use, and the disk may be full
            shutil.rmtree(job.folder, ignore_errors=True)
        raise
    return path


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
    raw = from_rank_0(lambda: _checked_manifest(path), group)  # bytes, because objects would be slow to send
    content = manifest.parse_manifest(path, raw)

    def check(tables: list[bytes]) -> list[None]:
        check_request(path, content, tables, partial)
        return [None] * len(tables)

    together(f"loading {path}", group, lambda: table_of(shards), check)
    together(f"loading {path}", group, lambda: ChunkReader(path, content).fill(shards), lambda filled: filled)


def find(
    load: Path, group: Group = None, *, passing_over: Mapping[str, str] | None = None, exact: bool = False
) -> Path | None:
    """`folders.find` on rank 0, for all ranks: they cannot disagree about which checkpoint is the newest."""
    return from_rank_0(lambda: folders.find(load, passing_over, exact), group)


def read_state(path: Path, group: Group = None) -> dict[str, Any]:
    """`manifest.read_state` on rank 0, for all ranks: damage is everyone's error."""
    return from_rank_0(lambda: manifest.read_state(path), group)


def lock(root: Path, group: Group = None) -> SaveLock | None:
    """Take the lock of a folder of checkpoints, on rank 0 for all ranks; None on the others.

    Raises ValueError, on every rank, if another run holds it or the folder cannot be written.
    """
    taken: list[SaveLock] = []
    from_rank_0(lambda: taken.append(SaveLock(root)), group)
    return taken[0] if taken else None


def _checked_manifest(path: Path) -> bytes:
    """Return the manifest's bytes; raise as `read_manifest`."""
    raw = manifest.read_manifest_bytes(path)
    manifest.parse_manifest(path, raw)
    return raw
