"""save and load, which all ranks call together. `planning` divides the work, `storage` writes and reads the files."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megazero.checkpoint import folders, manifest
from megazero.checkpoint.locking import SaveLock
from megazero.checkpoint.messages import Group, rank_of
from megazero.checkpoint.planning import RankPlan, Skipped, check_request, table_of
from megazero.checkpoint.shards import LocalShard
from megazero.checkpoint.shared_outcome import from_rank, together
from megazero.checkpoint.storage import ChunkReader, Save, WrittenFile
from megazero.world import this_generation

NOTHING: Mapping[str, bytes] = MappingProxyType({})


def save(
    root: Path,
    iteration: int,
    shards: Mapping[str, LocalShard],
    state: dict[str, Any],
    group: Group = None,
    attached: Mapping[str, bytes] = NOTHING,
) -> Path:
    """Write the checkpoint `root/iter_NNNNNNN` and point `root/latest` at it; return its path.

    All ranks call it. An iteration that was saved before is replaced. Only one save into a root may run at a time.

    Args:
        shards: that this rank holds.
        state: JSON; rank 0's is written.
        group: all ranks; None: the default group, or this process alone if torch.distributed is not initialized. A save
            in a thread needs a gloo group of its own, with a timeout longer than the slowest rank's write.
        attached: files of rank 0, by path in the folder (`tokenizer/NAME`).

    Raises, on every rank, with nothing committed unless `latest` already names the checkpoint:
        ValueError: no rank holds some element of a tensor, or two different pieces do; it names tensor and range.
        AgreedFailure: files cannot be written; it has the message of each such rank.
        RuntimeError: ranks failed in another way.
        KeyboardInterrupt: a rank was interrupted.
    Any other exception is this rank's alone.
    """
    path = Path(root) / folders.folder_name(iteration)
    job = Save(root=Path(root), iteration=iteration, rank=rank_of(group), shards=shards, state=state, attached=attached)
    try:
        skipped = together(f"saving {path}", group, job.plan, job.divide, sends=RankPlan, answers=Skipped)
        together(f"saving {path}", group, lambda: job.write(skipped), job.commit, sends=WrittenFile)
    except BaseException:
        if rank_of(group) == 0:  # a partial folder is of no use, and the disk may be full
            shutil.rmtree(job.folder, ignore_errors=True)
        raise
    return path


def load(path: Path, shards: Mapping[str, LocalShard], group: Group = None, *, partial: bool = False) -> None:
    """Fill the `data` of every shard, in place, from the checkpoint folder `path`, saved by any layout.

    All ranks of `group` call it (see `save`), each with the shards that it needs. Together they must name all tensors
    of the checkpoint, or if `partial` some of them: to generate text, weights without moments. A rank reads only the
    chunks that it needs, and checks their checksums.

    Raises, on every rank, naming --load and the tensor or file:
        ValueError: the checkpoint is of another model (a name, shape or dtype differs).
        Damaged: it is not whole or is damaged. The data of the shards is then undefined.
    """
    path = Path(path)
    raw = from_rank(
        0, lambda: manifest.read_manifest_bytes(path), group, bytes
    )  # as it is, because ranks parse at once
    content = manifest.parse_manifest(path, raw)
    check(path, content, shards, group=group, partial=partial)
    together(f"loading {path}", group, lambda: ChunkReader(path, content).fill(shards))


def check(
    path: Path, content: manifest.Manifest, shards: Mapping[str, LocalShard], group: Group, partial: bool = False
) -> None:
    """Compare the shards of all ranks with a checkpoint's manifest; ValueError, on every rank, as `load` raises."""

    def compare(tables: list[bytes]) -> None:
        check_request(path, content, tables, partial)

    together(f"loading {path}", group, lambda: table_of(shards), compare, sends=bytes)


def find(
    load: Path, group: Group = None, *, passing_over: Mapping[str, str] | None = None, exact: bool = False
) -> Path | None:
    """Call `folders.find_copy` on rank 0, so that all ranks load the same checkpoint."""
    found = from_rank(0, lambda: str(folders.find_copy(load, passing_over, exact) or ""), group, str)
    return Path(found) if found else None


def read_state(path: Path, group: Group = None) -> dict[str, Any]:
    """Call `manifest.read_state_file` on rank 0; every rank raises its errors."""
    return from_rank(0, lambda: manifest.read_state_file(path), group, dict[str, Any])


def lock(root: Path, group: Group = None, patience: float = 0.0) -> SaveLock | None:
    """Take the lock of a folder of checkpoints, on rank 0 for all ranks; None on the others.

    patience: seconds to wait for another holder, unless it is an earlier generation of this run.

    Raises ValueError, on every rank, if another run holds it or the folder cannot be written.
    """
    taken: list[SaveLock] = []

    def take() -> None:
        taken.append(SaveLock(root, patience))
        if this_generation() is not None:
            folders.clear_leftovers(root)  # before anything is read: Note [Later generations]

    from_rank(0, take, group)
    return taken[0] if taken else None
