"""Process groups of the mesh's axes, made in few calls.

Note [making groups]: `new_group` under NCCL splits the communicator of the whole world once per group: at 1,024 ranks
a thousand splits, one after the other. A split by colour makes any number of disjoint groups at once. gloo has no
split, and its groups cost only their members.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megazero.engine.plan.layout.topology import Ranks, disjoint


class GroupMaker:
    """Makes process groups; all ranks make the same calls in the same order."""

    def __init__(self, device: torch.device, timeout: datetime.timedelta) -> None:
        """`device`: of the groups' tensors; `timeout`: after which their collectives fail."""
        self.device, self.timeout = device, timeout
        self._made: set[Ranks] = set()  # groups of axes, on all ranks
        self._mine: dict[Ranks, dist.ProcessGroup] = {}  # the groups of this rank

    def of_axis(self, groups: Sequence[Sequence[int]], name: str, urgent: bool = False) -> dist.ProcessGroup | None:
        """Return this rank's group along an axis; None if it is alone. Axes with the same ranks share a group.

        Args:
            groups: ranks of each group along the axis, as from `Layout.groups`.
            name, urgent: see `make`.
        """
        wanted = [tuple(ranks) for ranks in groups if len(ranks) > 1]
        self._mine |= self.make([ranks for ranks in wanted if ranks not in self._made], name, urgent)
        self._made.update(wanted)
        return next((self._mine[ranks] for ranks in wanted if ranks in self._mine), None)

    def make(self, groups: Sequence[Ranks], name: str, urgent: bool = False) -> dict[Ranks, dist.ProcessGroup]:
        """Make `groups`, which are distinct, and return those with this rank.

        Args:
            name: axis, for NCCL's logs and the flight recorder.
            urgent: give the backend's streams priority over those of computation.
        """
        if not groups:  # a single process has no process group to ask for its rank
            return {}
        if self.device.type == "cpu":
            made = ((ranks, dist.new_group(list(ranks), timeout=self.timeout)) for ranks in groups)
            return {ranks: group for ranks, group in made if group is not dist.GroupMember.NON_GROUP_MEMBER}
        me, everyone, found = dist.get_rank(), range(dist.get_world_size()), {}
        for colour in disjoint(groups):
            # torch names a group by its ranks and by this rank's number of groups. A rank outside a split would count
            # one group less, and name its later groups differently from their other members; flight-recorder dumps
            # would then not match. So it gets a group of its own.
            alone = set(everyone).difference(*colour)
            group = dist.split_group(
                split_ranks=[list(ranks) for ranks in colour] + [[rank] for rank in sorted(alone)],
                timeout=self.timeout,
                pg_options=_urgent_options() if urgent else None,
                group_desc=name,
            )
            if me not in alone:
                found[next(ranks for ranks in colour if me in ranks)] = group
        return found


def _urgent_options() -> dist.ProcessGroup.Options:
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options
