"""Ranks agree that they are one run, in one small all-reduce, before any other group is made."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazero.cluster.same_start import agree
from megazero.world import World

CPU = torch.device("cpu")
ALIKE = {"--lr": "0.1", "--tensor-model-parallel-size": "1", "--seed": "5"}


def compare(rank: int, own: dict[int, dict[str, str]], world: int) -> tuple[str, list[int]]:
    """Return this rank's error, and the bytes of each all-reduce that it took; -1: the values were sent."""
    sent: list[int] = []
    all_reduce, all_gather_object = dist.all_reduce, dist.all_gather_object

    def counted(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(x.nbytes)
        return all_reduce(x, *args, **kwargs)

    def spelled_out(*args: Any, **kwargs: Any) -> Any:
        sent.append(-1)
        return all_gather_object(*args, **kwargs)

    dist.all_reduce, dist.all_gather_object = counted, spelled_out
    try:
        agree(lambda: ALIKE | own.get(rank, {}), World(rank, world, rank, "torchrun"), CPU, ["a", "a", "b", "b"])
    except ValueError as error:
        return str(error), sent
    finally:
        dist.all_reduce, dist.all_gather_object = all_reduce, all_gather_object
    return "", sent


def refuse(rank: int, world: int, refusing: list[int]) -> str:
    try:
        agree(lambda: ALIKE, World(rank, world, rank, "torchrun"), CPU, ["a"], "no disk" if rank in refusing else "")
    except ValueError as error:
        return str(error)
    return "continued"


@pytest.mark.parametrize("refusing", [[0], [1], [0, 1]], ids=str)
def test_what_some_or_all_ranks_refuse_is_raised_on_all(refusing: list[int], ranks) -> None:
    assert ranks(2).run(refuse, 2, refusing) == ["no disk"] * 2


def test_what_the_only_rank_refuses_is_raised() -> None:
    assert refuse(0, 1, [0]) == "no disk"
    assert refuse(0, 1, []) == "continued"


def test_ranks_that_are_alike_send_32_bytes(ranks) -> None:
    assert ranks(4).run(compare, {}, 4) == [("", [32])] * 4


@pytest.mark.parametrize(
    "own, words",
    [
        ({3: {"--lr": "0.2"}}, "--lr is 0.1 on ranks 0-1 (a), 2 (b), 0.2 on rank 3 (b)."),
        ({0: {"--lr": "0.2"}}, "--lr is 0.1 on ranks 1 (a), 2-3 (b), 0.2 on rank 0 (a)."),
        ({1: {"--tensor-model-parallel-size": "4"}, 2: {"--seed": "6"}}, "--seed is 5 on ranks 0-1 (a), 3 (b), 6 on"),
        ({r: {"--seed": str(r)} for r in range(4)}, "0 on rank 0 (a), 1 on rank 1 (a), 2 on rank 2 (b), 3 on rank 3"),
        ({2: {"new": "x"}}, "new is unknown on ranks 0-1 (a), 3 (b), x on rank 2 (b)"),
    ],
    ids=str,
)
def test_a_rank_that_is_unlike_is_named_on_all(own: dict[int, dict[str, str]], words: str, ranks) -> None:
    for said, sent in ranks(4).run(compare, own, 4):
        assert said.startswith("ranks differ: ") and words in said, said
        assert sent == [32, -1]
