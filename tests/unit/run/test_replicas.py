"""--check-replicas-interval: the hash of a copy, and the sentence for copies that differ."""

import itertools

import pytest
import torch

from megazero.run import replicas
from megazero.run.replicas import checksum, differing_replicas
from tests.helpers.table import for_each


@for_each("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@for_each("piece", [4, 5, 1 << 22])
def test_a_hash_is_of_the_bits_and_their_places(
    dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not depend on the pieces in which it is computed, and sees two whole pieces that change places."""
    x = torch.arange(13).to(dtype)
    whole = checksum(x)
    monkeypatch.setattr(replicas, "PIECE", piece)
    assert checksum(x) == whole and checksum(x.clone()) == whole
    found = {int(whole), int(checksum(x.flip(0))), int(checksum(x[:-1])), int(checksum(torch.zeros_like(x)))}
    swaps = list(itertools.combinations(range(13), 2))
    for one, other in swaps:
        changed = x.clone()
        changed[one], changed[other] = x[other], x[one]
        found.add(int(checksum(changed)))
    for size in (4, 5):
        found.add(int(checksum(torch.cat([x[size : 2 * size], x[:size], x[2 * size :]]))))
    assert len(found) == 4 + len(swaps) + 2


def test_the_fewest_ranks_that_differ_are_named() -> None:
    table = torch.tensor([[1, 7, 3], [1, 8, 4], [1, 7, 5], [1, 7, 3], [1, 7, 4], [1, 7, 3]])
    hosts = [f"node{rank // 4}" for rank in range(12)]
    assert differing_replicas(table, ["a", "b", "c"], range(0, 12, 2), hosts) == [
        "b: rank 2 (node0) unlike ranks 0 (node0), 4, 6 (node1), 8, 10 (node2)",
        "c: ranks 2 (node0), 8 (node2), rank 4 (node1) unlike ranks 0 (node0), 6 (node1), 10 (node2)",
    ]
