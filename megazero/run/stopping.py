"""Why a run ends before its last iteration: it makes no progress, or it is asked to, by a signal, a clock or a file.

Note [Exit codes]
0   the last iteration is done; or --exit-interval, --exit-duration-minutes or the stop file ended the run as planned.
75  (EX_TEMPFAIL) a signal or the job's time limit ended the run early. What was done is saved, and --load goes on.
1   an error; the last message says which.
124 no progress for --hang-timeout minutes (`comm.launch.failures.HUNG`). --load goes on from the last checkpoint.
130 a second SIGINT: stopped at once, without saving.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from megazero.config.schema import CheckpointConfig

SAVED_EARLY = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class DeadRun(Exception):
    """The run makes no progress: its weights are not finite, or too many iterations in a row made no update."""


class Signals:
    """Notes the signals that ask for a stop, for as long as the context lasts.

    The running step ends in good order. A signal that comes again changes nothing, but for SIGINT: the second one
    raises KeyboardInterrupt. Only for the main thread. A forked process that inherits the handlers dies of the signal
    as it would without them.
    """

    def __init__(self) -> None:
        self.noted: signal.Signals | None = None
        self._process = os.getpid()

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number == signal.SIGINT and self.noted == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            self.noted = signal.Signals(number)


class Stop(NamedTuple):
    """Reason that a run ended."""

    why: str
    exit_code: int


# What ranks tell each other is a place in this list; where they differ, the last one counts.
STOPS = (
    Stop("--exit-duration-minutes", 0),
    Stop("the stop file", 0),
    Stop("--exit-before-minutes: the end of the job is near", SAVED_EARLY),
    *(Stop(number.name, SAVED_EARLY) for number in SIGNALS),
)


def stopped_words(iteration: int, why: str, kept: CheckpointConfig | None) -> str:
    """Say where a run stopped, and how it goes on.

    Args:
        kept: the options of its checkpoints; None: nothing was saved.
    """
    said = f"stopped after iteration {iteration} by {why}: "
    if kept is None:
        return said + "nothing saved"
    loads = bool(kept.load) and Path(kept.load).resolve() == Path(kept.save).resolve() and not kept.finetune
    fresh = " without --finetune" * kept.finetune
    again = "the same command" if loads else f"the same command{fresh} with --load {kept.save}"
    return f"{said}saved; {again} goes on"


class Clock:
    """Says when a limit of time is reached. Rank 0 alone asks it."""

    def __init__(
        self,
        duration_minutes: float,
        before_minutes: float,
        job_end: Callable[[], float | None],
        now: float | None = None,
        save_minutes: float = 0.0,
    ) -> None:
        """`job_end`: when the job ends, in seconds since the epoch; asked again before it is believed, for a job's
        limit can be changed. `now`: when the run began. `save_minutes`: between checkpoints; 0: no time asks for one.

        Raises:
            ValueError: --exit-before-minutes without a job that has a limit.
        """
        begin = time.time() if now is None else now
        self._until = begin + 60 * duration_minutes if duration_minutes else float("inf")
        self._save_seconds, self._saved = 60 * save_minutes, begin
        self._margin, self._job_end = 60 * before_minutes, job_end
        self._end = job_end() if before_minutes else float("inf")
        if self._end is None:
            raise ValueError(
                f"--exit-before-minutes {before_minutes:g}: this is no SLURM job with a time limit; "
                "use --exit-duration-minutes"
            )

    def save_due(self, now: float) -> bool:
        """Return whether the time between checkpoints has passed since the start or the last call of `saved`."""
        return self._save_seconds > 0 and now - self._saved >= self._save_seconds

    def saved(self, now: float) -> None:
        """Begin the time between checkpoints anew."""
        self._saved = now

    def reached(self, now: float) -> int | None:
        """The place in STOPS of the limit that is reached."""
        if now >= self._end - self._margin:
            self._end = self._job_end() or float("inf")
            if now >= self._end - self._margin:
                return 2
        return 0 if now >= self._until else None


def asked_to_stop(signals: Signals, clock: Clock | None, stop_file: Path | None) -> int:
    """The place in STOPS of what this rank sees, or -1. `clock` and `stop_file`: of rank 0."""
    if signals.noted is not None:
        return 3 + SIGNALS.index(signals.noted)
    limit = clock.reached(time.time()) if clock is not None else None
    if limit is not None:
        return limit
    return 1 if stop_file is not None and stop_file.exists() else -1
