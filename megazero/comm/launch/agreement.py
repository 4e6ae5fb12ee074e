"""All ranks of a run are the same run: the same configuration, code and data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from megazero.comm.launch.errors import peer_errors, ranks_text
from megazero.comm.launch.world import World

MOST_NAMES = 8  # in a message
_REFUSED = "refused"


def agree(
    values: Callable[[], Mapping[str, str]],
    world: World,
    device: torch.device,
    hosts: Sequence[str],
    refused: str = "",
) -> None:
    """Check that values(), name -> value, are the same on all ranks. All ranks call it after `start`.

    A rank that must end for another reason gives it as `refused`.

    Done before any other group is made: ranks with different layouts would make different ones, and hang. It costs one
    all-reduce of 32 bytes; the values themselves are sent only when they differ.

    Raises:
        ValueError: on every rank, `refused` of the first rank that has it; or naming what differs, and the ranks with
            their values.
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
            if refused:  # by all, alike
                raise ValueError(refused)
            return
        everyone: list[str] = [""] * world.size
        dist.all_gather_object(everyone, text)
    found = [json.loads(theirs) for theirs in everyone]
    raise ValueError(next((theirs[_REFUSED] for theirs in found if _REFUSED in theirs), "") or difference(found, hosts))


def difference(everyone: Sequence[Mapping[str, str]], hosts: Sequence[str] = ()) -> str:
    """One sentence: which values differ, and the ranks with each; the value of the most ranks first."""
    names = sorted({name for theirs in everyone for name in theirs})
    found = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            ranks_of.setdefault(theirs.get(name, "not known"), []).append(rank)
        if len(ranks_of) > 1:
            each = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1]))
            found.append(f"{name} is " + ", ".join(f"{value} on {ranks_text(ranks, hosts)}" for value, ranks in each))
    if len(found) > MOST_NAMES:
        found[MOST_NAMES:] = [f"and {len(found) - MOST_NAMES} more differ"]
    return f"the ranks were not started alike: {'; '.join(found)}. Give all ranks the same flags, code and data"
