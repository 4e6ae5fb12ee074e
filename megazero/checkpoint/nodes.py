"""The nodes of a run, in a ring, and messages between ranks of two nodes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self

import torch

from megazero.checkpoint.messages import Group, rank_of, receive, start_send
from megazero.checkpoint.shared_outcome import gather_all
from megazero.world import Node, this_node


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
    def meet(cls, group: Group) -> Self:
        """Learn the nodes of all ranks; all ranks call it together."""
        return cls.of(gather_all(this_node(), group, Node), rank_of(group))

    @classmethod
    def of(cls, nodes: Sequence[Node], rank: int) -> Self:
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
        if to is not None and sending:
            message = next(left, None)
            sending, works = message is not None, start_send(message, to, group)
        if source is not None and receiving:
            arriving = receive(source, group)
            receiving = arriving is not None
            if arriving is not None:
                yield arriving
        for work in works:
            work.wait()
