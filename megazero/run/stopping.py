"""Reasons to end a run before its last iteration: it makes no progress; or a signal, a clock or a file asks for it.

Note [Exit codes]
0   the last iteration is done; or --exit-interval, --exit-duration-minutes or the stop file ended the run as planned.
75  (EX_TEMPFAIL) a signal or the job's time limit ended the run early. The run was saved; --load resumes it.
1   an error; the last message names it.
124 no progress for --hang-timeout minutes (`cluster.failures.HUNG`). --load resumes from the last checkpoint.
130 a second SIGINT: stopped at once, without saving.
"""

import enum
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Self

from megazero.cluster import agent_notes
from megazero.files import explain
from megazero.flags.config import CheckpointConfig, Config
from megazero.flags.validate import plans
from megazero.log import log

SAVED_EARLY = 75
LOOK_SECONDS = 3.0  # for the newest checkpoint, in a folder whose server may not respond
EXIT_SECONDS = 1.0  # for a line in print, which a full pipe may block
AGAIN = "Press Ctrl-C again to stop at once, without saving"
STARTING = "stopping before the first step"
ENDING = "the run ends after its last save, which is in progress"
EVALUATING = "stopping after this batch, without a result"
AHEAD = time.time() - time.monotonic()
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class DeadRun(Exception):
    """The run makes no progress: its weights are not finite, or too many iterations in a row made no update."""


class Wish(enum.IntEnum):
    """A rank's wish between two iterations. Ranks agree on the highest.

    A planned end is higher than an interruption, after which a launcher may start the run again.
    """

    CONTINUE = 0
    SAVE = 1  # and continue
    STOP_NODES = 2
    STOP_JOB_END = 3
    STOP_SIGTERM = 4
    STOP_SIGUSR1 = 5
    STOP_SIGINT = 6
    STOP_DURATION = 7
    STOP_FILE = 8

    @property
    def stops(self) -> bool:
        return self > Wish.SAVE

    @property
    def why(self) -> str:
        """The reason of a stop, for messages."""
        reasons = {
            Wish.STOP_DURATION: "--exit-duration-minutes",
            Wish.STOP_FILE: "the stop file",
            Wish.STOP_NODES: "nodes that came back",
            Wish.STOP_JOB_END: "--exit-before-minutes: the end of the job is near",
        }
        return reasons.get(self, self.name.removeprefix("STOP_"))

    @property
    def exit_code(self) -> int:
        return 0 if self >= Wish.STOP_DURATION else SAVED_EARLY


class Signals:
    """Notes the signals that ask for a stop, for as long as the context lasts.

    The run finishes its current step. Repeated signals change nothing, except SIGINT: the second one raises
    KeyboardInterrupt. Until the ranks have `joined` each other, TERM ends the process: there is nothing to save, and a
    launcher that lost another rank waits for it. Use it in the main thread only.

    Attributes:
        noted: the newest signal.
        promise: the reaction to a SIGINT, which rank 0 prints at the first one.
    """

    def __init__(self, again: str = AGAIN) -> None:
        """`again`: the reaction to a second SIGINT."""
        self.noted: signal.Signals | None = None
        self.promise, self.again = STARTING, again

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._announce, args=(reader,), name="signals", daemon=True)
        self._thread.start()
        for number in (signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)
        return self

    def joined(self) -> None:
        """Note TERM too from now on."""
        signal.signal(signal.SIGTERM, self._note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writer)
        self._thread.join(EXIT_SECONDS)

    def _announce(self, reader: int) -> None:
        """Print the promise at the first SIGINT, in a thread: the handler runs once the main thread is in Python again.

        Until then, a wait for a GPU or for another rank may last a whole step.
        """
        first = True
        with open(reader, "rb", buffering=0) as numbers:
            while number := numbers.read(1):  # the system's handler writes the number of each signal
                if first and number[0] == signal.SIGINT:
                    first = False
                    log.info(f"SIGINT: {self.promise}. {self.again}")

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.noted == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            self.noted = signal.Signals(number)


def steady_time() -> float:
    """Return the Unix time by a clock that is never set: that of the start of this process, and the seconds since."""
    return AHEAD + time.monotonic()


class Clock:
    """The time limits of a run, and the time between its checkpoints. Only rank 0 has one."""

    def __init__(
        self,
        duration_minutes: float,
        before_minutes: float,
        job_end: Callable[[], float | None],
        began: float = 0.0,
        save_minutes: float = 0.0,
    ) -> None:
        """Set the limits; 0 minutes: no such limit.

        Args:
            duration_minutes: from `began`.
            before_minutes: before the end of the job.
            job_end: returns the end of the job, in seconds since the epoch. It is called again before a stop, because
                a job's limit can be changed.
            began: when the run was launched.
            save_minutes: between checkpoints.

        Raises:
            ValueError: --exit-before-minutes in a job without a limit.
        """
        self._until = began + 60 * duration_minutes if duration_minutes else float("inf")
        self._save_seconds, self._saved = 60 * save_minutes, steady_time()
        self._margin, self._job_end = 60 * before_minutes, job_end
        end = job_end() if before_minutes else float("inf")
        if end is None:
            raise ValueError(
                f"--exit-before-minutes {before_minutes:g}: this is no SLURM job with a time limit; "
                "use --exit-duration-minutes"
            )
        self._end = end

    def wish(self, now: float, set_time: float | None = None) -> Wish:
        """Return the wish at the time `now`.

        set_time: by the system's clock, of which the job's end is; None: `now`.
        """
        if now >= self._until:
            return Wish.STOP_DURATION
        real = now if set_time is None else set_time
        if real >= self._end - self._margin:
            self._end = self._job_end() or float("inf")
            if real >= self._end - self._margin:
                return Wish.STOP_JOB_END
        save_due = self._save_seconds > 0 and now - self._saved >= self._save_seconds
        return Wish.SAVE if save_due else Wish.CONTINUE

    def saved(self, now: float) -> None:
        """Restart the time between checkpoints."""
        self._saved = now


class Wishes:
    """The sources of a rank's wishes: signals, its node's agent_notes, and on rank 0 also a clock and the stop file."""

    def __init__(self, signals: Signals | None = None, clock: Clock | None = None, stop_file: Path | None = None):
        self.signals, self.clock, self.stop_file = signals or Signals(), clock, stop_file

    def now(self) -> Wish:
        """Return this rank's highest wish."""
        found = [Wish.CONTINUE]
        if self.signals.noted is not None:
            found.append(Wish[f"STOP_{self.signals.noted.name}"])
        if self.clock is not None:
            found.append(self.clock.wish(steady_time(), time.time()))
        if agent_notes.read_note(agent_notes.CHANGED):
            found.append(Wish.STOP_NODES)
        if self.stop_file is not None and self.stop_file.exists():
            found.append(Wish.STOP_FILE)
        return max(found)

    def obey(self, agreed: Wish) -> None:
        """Withdraw the requests that the ranks' agreed wish fulfils, so that they are not obeyed twice."""
        if agreed == Wish.SAVE and self.clock is not None:
            self.clock.saved(steady_time())
        if agreed == Wish.STOP_FILE and self.stop_file is not None:
            try:
                folder = self.stop_file.is_dir() and not self.stop_file.is_symlink()
                self.stop_file.rmdir() if folder else self.stop_file.unlink(missing_ok=True)
            except OSError as error:
                log.warning(f"{explain(error)}. Delete it, or the next start stops at once")


def again_words(launched: bool, elastic: str) -> str:
    """Return the reaction to a second SIGINT, which torchrun does not pass on; `elastic`: the value of --elastic."""
    if not launched:
        return AGAIN
    return f"The launcher kills ranks that have not ended after {'10 minutes' if elastic else '30 s'}"


def training_promise(save: str) -> str:
    """Return the promise of a run that trains, with the value of --save."""
    then = f"saving to --save {save}" if save else "stopping; nothing is saved, because --save is not given"
    return f"finishing this step, then {then}"


def interrupted_words(config: Config) -> str:
    """Return the message of a run that a second SIGINT ended."""
    if plans(config.plan) or config.plan.rehearse or not config.trains:
        return "interrupted"
    return f"interrupted without saving: {newest_words(config.checkpoint.save)}"


def newest_words(save: str) -> str:
    """Return a clause that names the newest checkpoint in --save."""
    from megazero.checkpoint import folders
    from megazero.cluster.meeting import within

    if not save:
        return "--save is not given"
    try:
        newest = within(LOOK_SECONDS, lambda: folders.find_copy(Path(save)))
    except (OSError, ValueError) as error:  # OSError: also a time-out
        return f"--save {save} cannot be read: {error or 'it does not respond'}"
    if newest is None:
        return f"--save {save} has no checkpoint"
    return f"the newest checkpoint in --save {save} is {newest.name}; --load {save} resumes from it"


def stopped_words(iteration: int, why: str, kept: CheckpointConfig | None) -> str:
    """Return the message of a stopped run, with the command that resumes it.

    Args:
        kept: the options of its checkpoints; None: nothing was saved.
    """
    stopped = f"stopped after iteration {iteration} by {why}: "
    if kept is None:
        return stopped + "nothing saved"
    again = "the same command"
    if kept.finetune:
        again += " without --finetune"
    if kept.finetune or not kept.load or Path(kept.load).resolve() != Path(kept.save).resolve():
        again += f" with --load {kept.save}"
    return f"{stopped}saved; {again} resumes it"
