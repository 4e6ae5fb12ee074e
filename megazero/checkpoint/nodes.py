"""The nodes of a run, in a ring, and messages between ranks of two nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megazero.checkpoint.shared_outcome import Group, gather_all, rank_of
from megazero.world import Node, this_node

END = -1  # length that follows the last message


class Nodes(NamedTuple):
    """The nodes of a run, in the order of their first ranks.

    Attributes:
        names: of each node; unlike on different nodes, and the same after a restart on the same machine.
        ranks: of each node.
        mine: number of this rank's node.
        place: of this rank in its node.
    """

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    mine: int
    place: int

    @classmethod
    def meet(cls, group: Group) -> Nodes:
        """Learn the nodes of all ranks; all ranks call it together."""
        return cls.of(gather_all(this_node(), group), rank_of(group))

    @classmethod
    def of(cls, nodes: Sequence[Node], rank: int) -> Nodes:
        """Return the nodes by the node of each rank. Of several on one machine, the launcher gives the order."""
        ranks: dict[Node, list[int]] = {}
        for each, node in enumerate(nodes):
            ranks.setdefault(node, []).append(each)
        slots: Counter[str] = Counter()
        names = []
        for node in ranks:
            names.append(f"{node.machine}-{slots[node.machine]}")
            slots[node.machine] += 1
        mine = list(ranks).index(nodes[rank])
        return cls(tuple(names), tuple(map(tuple, ranks.values())), mine, ranks[nodes[rank]].index(rank))

    @property
    def leads(self) -> bool:
        """This rank is the first of its node, and acts for the node."""
        return self.place == 0

    def copies(self) -> Iterator[tuple[int | None, int | None]]:
        """Yield, turn by turn, the rank of the next node that keeps this rank's file, and the rank whose file it keeps.

        None: there is none in this turn. A node with more ranks than the next one takes several turns.
        """
        here, count = self.ranks[self.mine], len(self.ranks)
        there, before = self.ranks[(self.mine + 1) % count], self.ranks[(self.mine - 1) % count]
        own_turn, keeper = divmod(self.place, len(there))
        kept = before[self.place :: len(here)]
        for turn in range(max(own_turn + 1, len(kept)) if count > 1 else 0):
            yield there[keeper] if turn == own_turn else None, kept[turn] if turn < len(kept) else None


def exchange(
    messages: Iterable[torch.Tensor], to: int | None, source: int | None, group: Group
) -> Iterator[torch.Tensor]:
    """Send messages, uint8 [n], to one rank, and yield those of another, which call this too; None: no such rank.

    A message is sent when one has arrived, so that neither side keeps more than one. Whoever iterates must not stop
    before the end, or the other ranks would wait for ever.
    """
    left, sending, receiving = iter(messages), to is not None, source is not None
    while sending or receiving:
        works = []
        if sending:
            message = next(left, None)
            sending = message is not None
            works.append(dist.isend(torch.tensor(END if message is None else len(message)), group_dst=to, group=group))
            if message is not None and len(message):
                works.append(dist.isend(message, group_dst=to, group=group))
        if receiving:
            length = torch.tensor(0)
            dist.recv(length, group_src=source, group=group)
            receiving = int(length) != END
            if receiving:
                arriving = torch.empty(int(length), dtype=torch.uint8)
                if len(arriving):
                    dist.recv(arriving, group_src=source, group=group)
                yield arriving
        for work in works:
            assert work is not None  # this rank is in the group
            work.wait()
