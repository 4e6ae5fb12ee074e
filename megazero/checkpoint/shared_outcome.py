"""Work that all ranks do together: a failure on one rank becomes the same error on every rank.

Results cross the network pickled. Nothing that is pickled touches a disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from megazero.checkpoint.manifest import Damaged
from megazero.files import explain

Group = dist.ProcessGroup | None
T = TypeVar("T")
R = TypeVar("R")

# An exception is sent as the first of these that it is an instance of, because others may not be picklable.
KINDS = (KeyboardInterrupt, Damaged, ValueError, OSError)
MOST_REPORTS = 4  # ranks that a message quotes


class AgreedFailure(RuntimeError):
    """Failure of some ranks to write or read their files, which every rank raises with the same message.

    Any other error may be one rank's alone, in the middle of a collective.
    """


class Failure(NamedTuple):
    """An exception of one rank, as it is sent to the others."""

    kind: type[BaseException]  # one of KINDS, or RuntimeError
    name: str  # of the exception's own class
    text: str

    @classmethod
    def of(cls, error: BaseException | None) -> Failure | None:
        if error is None:
            return None
        kind = next((kind for kind in KINDS if isinstance(error, kind)), RuntimeError)
        return cls(kind, type(error).__name__, explain(error) if isinstance(error, OSError) else str(error))


def together(action: str, group: Group, local: Callable[[], T], combine: Callable[[list[T]], Sequence[R]]) -> R:
    """Call `local` on every rank of `group`, then `combine` on rank 0 with the results of all ranks.

    Returns:
        This rank's item of the list that `combine` returns.

    Raises, the same on every rank:
        KeyboardInterrupt: one rank was interrupted.
        Damaged, ValueError: every failure is one of these.
        AgreedFailure: every failure is an OSError.
        RuntimeError: any other failure. The message names the action and the failed ranks.
    """
    value, error = _attempt(local)
    outcomes = gather((value, Failure.of(error)), group)
    answers: list[Any] = []
    if rank_of(group) == 0:
        failures = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None}
        parts: Sequence[R] | None = None
        if not failures:
            parts, error = _attempt(lambda: combine([value for value, _ in outcomes]))
            failures = {0: Failure.of(error)} if error is not None else {}
        answers = [(None, failures)] * len(outcomes) if parts is None else [(part, {}) for part in parts]
    answer: R
    answer, failures = _scatter(answers, group)
    if failures:
        raise _agreed_error(action, failures) from error
    return answer


def from_rank_0(function: Callable[[], T], group: Group) -> T:
    """Call the function on rank 0 alone; return its result, or raise its exception, on every rank."""
    return from_rank(0, function, group)


def from_rank(source: int, function: Callable[[], T], group: Group) -> T:
    """Call the function on rank `source` alone; return its result, or raise its exception, on every rank."""
    outcome: list[Any] = [None, None]
    if rank_of(group) == source:
        outcome = list(_attempt(function))
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, group_src=source, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    value: T = outcome[0]
    return value


def rank_of(group: Group) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _attempt(function: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Return the function's result, or its exception."""
    try:
        return function(), None
    except BaseException as error:
        return None, error


def gather(value: Any, group: Group) -> list[Any]:
    """Return the values of all ranks on rank 0, and an empty list on the others."""
    if not dist.is_initialized():
        return [value]
    found = [None] * dist.get_world_size(group) if rank_of(group) == 0 else None
    dist.gather_object(value, found, group_dst=0, group=group)
    return found or []


def gather_all(value: T, group: Group) -> list[T]:
    """Return the values of all ranks, on every rank."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def _scatter(values: list[Any], group: Group) -> Any:
    """Return this rank's item of a list that rank 0 has."""
    if not dist.is_initialized():
        return values[0]
    mine = [None]
    dist.scatter_object_list(mine, values or None, group_src=0, group=group)
    return mine[0]


def _agreed_error(action: str, failures: dict[int, Failure]) -> BaseException:
    kinds = {failure.kind for failure in failures.values()}
    if KeyboardInterrupt in kinds:
        return KeyboardInterrupt()
    if kinds <= {Damaged, ValueError}:
        shared = Damaged if Damaged in kinds else ValueError
        return shared("; ".join(dict.fromkeys(failure.text for failure in failures.values())))
    kind = AgreedFailure if kinds == {OSError} else RuntimeError
    reports = [
        f"rank {rank}: {failure.text}" if failure.kind is OSError else f"rank {rank}: {failure.name}: {failure.text}"
        for rank, failure in failures.items()
    ]
    if len(reports) > MOST_REPORTS:
        reports[MOST_REPORTS:] = [f"{len(reports) - MOST_REPORTS} more ranks"]
    return kind(f"{action} failed on {'; '.join(reports)}")
