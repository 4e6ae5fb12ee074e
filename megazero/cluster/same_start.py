"""Check at the start that all ranks of a run have the same configuration, code and data."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from megazero.engine.mesh.peer_errors import peer_errors, ranks_text
from megazero.world import World

MOST_NAMES = 8  # in a message
_REFUSED = "refused"


def agree(
    values: Callable[[], Mapping[str, str]],
    world: World,
    device: torch.device,
    hosts: Sequence[str],
    refused: str = "",
) -> None:
    """Check that values(), name -> value, are equal on all ranks. All ranks call it after `start`.

    Call it before any other group is made, because ranks with different layouts would make different ones, and hang.
    It costs one all-reduce of 32 bytes; only values that differ are sent.

    Args:
        refused: message with which this rank must end for another reason; empty: there is none.

    Raises:
        ValueError: on every rank, with the first rank's `refused`, or else the values that differ and their ranks.
    """
    if world.size == 1:
        if refused:
            raise ValueError(refused)
        return
    text = json.dumps({_REFUSED: refused} if refused else dict(values()), sort_keys=True)
    digest = hashlib.sha256(text.encode()).digest()
    halves = [int.from_bytes(digest[at : at + 8], "little") >> 2 for at in (0, 8)]
    extremes = torch.tensor([*halves, *(-half for half in halves)], dtype=torch.int64, device=device)
    with peer_errors("comparing the ranks' configurations"):
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        highest, lowest = extremes[:2], -extremes[2:]
        if torch.equal(highest, lowest):
            if refused:  # by all ranks
                raise ValueError(refused)
            return
        everyone: list[str] = [""] * world.size
        dist.all_gather_object(everyone, text)
    found = [json.loads(theirs) for theirs in everyone]
    raise ValueError(next((theirs[_REFUSED] for theirs in found if _REFUSED in theirs), "") or difference(found, hosts))


def difference(everyone: Sequence[Mapping[str, str]], hosts: Sequence[str] = ()) -> str:
    """Name the values that differ, and the ranks with each; the most frequent value first."""
    names = sorted({name for theirs in everyone for name in theirs})
    found = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            ranks_of.setdefault(theirs.get(name, "unknown"), []).append(rank)
        if len(ranks_of) > 1:
            each = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1]))
            found.append(f"{name} is " + ", ".join(f"{value} on {ranks_text(ranks, hosts)}" for value, ranks in each))
    if len(found) > MOST_NAMES:
        found[MOST_NAMES:] = [f"and {len(found) - MOST_NAMES} more differ"]
    return f"ranks differ: {'; '.join(found)}. Give all ranks the same flags, code and data"
