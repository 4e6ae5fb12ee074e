"""Process groups of the mesh's axes: few calls, the same on all ranks, connected before the first step.

Note [making groups]: `new_group` under NCCL splits the communicator of the whole world, once per group: at 1,024 ranks
that is a thousand splits, one after the other. A split by colour makes any number of disjoint groups in one. gloo knows
no split, and its groups cost a rank only what it takes part in.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megazero.plan.layout.topology import Ranks, disjoint


class GroupMaker:
    """Makes process groups; all ranks make the same calls in the same order."""

    def __init__(self, device: torch.device, timeout: datetime.timedelta) -> None:
        """Prepare to make groups for tensors on `device`, whose collectives fail after `timeout`."""
        self.device, self.timeout = device, timeout
        self._made: set[Ranks] = set()  # of axes, by all ranks
        self._mine: dict[Ranks, dist.ProcessGroup] = {}  # those of them that hold this rank

    def of_axis(self, groups: Sequence[Sequence[int]], name: str, urgent: bool = False) -> dist.ProcessGroup | None:
        """Return this rank's group along an axis; None if it is alone. An axis of the same ranks shares the group.

        Args:
            groups: of the axis, as `Layout.groups` has them.
            name, urgent: see `make`.
        """
        wanted = [tuple(ranks) for ranks in groups if len(ranks) > 1]
        self._mine |= self.make([ranks for ranks in wanted if ranks not in self._made], name, urgent)
        self._made.update(wanted)
        return next((self._mine[ranks] for ranks in wanted if ranks in self._mine), None)

    def make(self, groups: Sequence[Ranks], name: str, urgent: bool = False) -> dict[Ranks, dist.ProcessGroup]:
        """Return this rank's groups of `groups`, which are distinct.

        Args:
            name: of their axis, for NCCL's logs and the flight recorder.
            urgent: the backend's streams go before those of computation.
        """
        if not groups:  # a single process has no process group to ask for its rank
            return {}
        if self.device.type == "cpu":
            made = ((ranks, dist.new_group(list(ranks), timeout=self.timeout)) for ranks in groups)
            return {ranks: group for ranks, group in made if group is not dist.GroupMember.NON_GROUP_MEMBER}
        me, everyone, found = dist.get_rank(), range(dist.get_world_size()), {}
        for colour in disjoint(groups):
            # torch names a group by its ranks and by the number of groups that this rank has. A rank that a split
            # leaves out would count one less from then on, and name its later groups differently from their other
            # members, whose flight-recorder dumps then do not match. So it gets a group of its own.
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
