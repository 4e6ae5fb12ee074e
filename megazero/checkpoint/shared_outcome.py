"""Work that all ranks do together: a failure on one rank becomes the same error on every rank.

Results cross the network as JSON, and become the types that the receiver expects.
"""

import json
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

from megazero.checkpoint.manifest import Damaged
from megazero.checkpoint.messages import Group, broadcast_bytes, gather_bytes, rank_of, scatter_bytes
from megazero.files import explain

T = TypeVar("T")

# An exception is sent as the first of these that it is an instance of.
KINDS = {kind.__name__: kind for kind in (KeyboardInterrupt, Damaged, ValueError, OSError, RuntimeError)}
MOST_REPORTS = 4  # ranks that a message quotes


class AgreedFailure(RuntimeError):
    """Failure of some ranks to write or read their files, which every rank raises with the same message.

    Any other error may be one rank's alone, in the middle of a collective.
    """


class Failure(NamedTuple):
    """An exception of one rank, as it is sent to the others."""

    kind: str  # a key of KINDS
    name: str  # of the exception's own class
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Self:
        kind = next((name for name, kind in KINDS.items() if isinstance(error, kind)), RuntimeError.__name__)
        return cls(kind, type(error).__name__, explain(error) if isinstance(error, OSError) else str(error))


def message_of(value: Any) -> bytes:
    """Return a value as JSON. By `json`, because `msgspec` refuses paths that are not UTF-8."""
    return json.dumps(msgspec.to_builtins(value, str_keys=True)).encode()


def value_of_message(message: bytes, kind: Any) -> Any:
    """Return the value of type `kind` in a message; ValueError if it is of another type."""
    return msgspec.convert(json.loads(message), kind, str_keys=True)


def together(
    action: str,
    group: Group,
    local: Callable[[], Any],
    combine: Callable[[list[Any]], Sequence[Any] | None] | None = None,
    *,
    sends: Any = NoneType,
    answers: Any = NoneType,
) -> Any:
    """Call `local` on every rank of `group`, then `combine` on rank 0 with the results of all ranks.

    Args:
        sends, answers: types of the results of `local` and of the items of `combine`.

    Returns:
        This rank's item of the list that `combine` returns; None if it returns none.

    Raises, the same on every rank:
        KeyboardInterrupt: one rank was interrupted.
        Damaged, ValueError: every failure is one of these.
        AgreedFailure: every failure is an OSError.
        RuntimeError: any other failure. The message names the action and the failed ranks.
    """
    message, error = _attempt(local)
    outcomes = [_outcome(each, sends) for each in gather_bytes(message, group)]  # on rank 0
    failures = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None}
    parts: Sequence[Any] | None = None
    try:
        if outcomes and not failures and combine is not None:
            parts = combine([value for value, _ in outcomes])
        messages = [message_of((part, failures)) for part in parts or [None] * len(outcomes)]
    except BaseException as caught:
        error, failures = caught, {0: Failure.of(caught)}
        messages = [message_of((None, failures))] * len(outcomes)
    answer, failures = value_of_message(scatter_bytes(messages, group), tuple[answers | None, dict[int, Failure]])
    if failures:
        raise _agreed_error(action, failures) from error
    return answer


def from_rank(source: int, function: Callable[[], T], group: Group, kind: Any = NoneType) -> T:
    """Call the function on rank `source` alone; return its result, of type `kind`, or raise its exception, everywhere.

    The other ranks raise an exception of KINDS.
    """
    message, error = _attempt(function) if rank_of(group) == source else (b"", None)
    value: T
    value, failure = _outcome(broadcast_bytes(message, source, group), kind)
    if failure is not None:
        raise error or KINDS[failure.kind](failure.text)
    return value


def gather_all(value: T, group: Group, kind: Any) -> list[T]:
    """Return the values of all ranks, which are of type `kind`, on every rank."""
    everyone = b"[" + b",".join(gather_bytes(message_of(value), group)) + b"]"
    found: list[T] = value_of_message(broadcast_bytes(everyone, 0, group), list[kind])
    return found


def _attempt(function: Callable[[], Any]) -> tuple[bytes, BaseException | None]:
    """Return the message of the function's result; or of its failure, and the exception."""
    try:
        return message_of((function(), None)), None
    except BaseException as error:
        return message_of((None, Failure.of(error))), error


def _outcome(message: bytes, kind: Any) -> tuple[Any, Failure | None]:
    found: tuple[Any, Failure | None] = value_of_message(message, tuple[kind | None, Failure | None])
    return found


def _agreed_error(action: str, failures: dict[int, Failure]) -> BaseException:
    kinds = {KINDS[failure.kind] for failure in failures.values()}
    if KeyboardInterrupt in kinds:
        return KeyboardInterrupt()
    if kinds <= {Damaged, ValueError}:
        shared = Damaged if Damaged in kinds else ValueError
        return shared("; ".join(dict.fromkeys(failure.text for failure in failures.values())))
    kind = AgreedFailure if kinds == {OSError} else RuntimeError
    reports = [
        f"rank {rank}: {failure.text}" if failure.kind == "OSError" else f"rank {rank}: {failure.name}: {failure.text}"
        for rank, failure in failures.items()
    ]
    if len(reports) > MOST_REPORTS:
        reports[MOST_REPORTS:] = [f"{len(reports) - MOST_REPORTS} more ranks"]
    return kind(f"{action} failed on {'; '.join(reports)}")
