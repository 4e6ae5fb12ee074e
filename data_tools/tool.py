"""Common parts of the tools: flags made from a dataclass, errors of one line, progress on stderr."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from megazero.called_as import in_own_words, program_name
from megazero.files import explain
from megazero.flags.cli import read_flags
from megazero.optional import missing_package
from megazero.units import visible

if TYPE_CHECKING:
    from rich.progress import Progress

Options = TypeVar("Options")
# Seconds between two lines of progress if stderr is a file.
LOG_SECONDS = 30.0


def parse(options: type[Options], arguments: Sequence[str], program: str) -> Options:
    """Parse the flags of a tool: a dataclass whose docstrings are the help. SystemExit(2) for a mistyped flag.

    Raises:
        ValueError: a value has a null character, which no file name can have.
    """
    found = read_flags(options, list(arguments), f"data_tools/{program}")
    for name, value in vars(found).items():
        if "\0" in "".join(value) if isinstance(value, tuple) else "\0" in str(value):
            raise ValueError(f"--{name.replace('_', '-')} {value!r}: contains a null character; remove it")
    return found


def run_tool(main: Callable[[Sequence[str]], None], program: str, arguments: Sequence[str] | None = None) -> None:
    """Run a tool's `main(arguments)`, by default those of the process. An error is one line and an exit code.

    2 for a ValueError, 1 for an error of the system (a full disk), 130 after an interrupt.
    """
    name, code, line = program_name(f"data_tools/{program}"), 0, ""
    try:
        main(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except ValueError as error:
        code, line = 2, f"error: {error}{_notes(error)}"
    except ModuleNotFoundError as error:
        code, line = 2, f"error: this {missing_package(error)}"
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        code, line = 1, f"error: {explain(error)}{_notes(error)}"
    except MemoryError:
        code, line = 1, "error: out of memory; give fewer --workers, or more memory"
    except KeyboardInterrupt as error:
        code, line = 130, f"interrupted, {error if error.args else 'nothing was written'}"
    if code:
        if line:
            print(visible(f"{name}: {in_own_words(line)}".replace("\n", " ")), file=sys.stderr, flush=True)
        sys.exit(code)


def _notes(error: Exception) -> str:
    return "".join(f". {note}" for note in getattr(error, "__notes__", ()))


def check_workers(workers: int) -> None:
    """ValueError for an unreasonable number of processes."""
    most = 4 * (os.cpu_count() or 1)
    if not 1 <= workers <= most:
        raise ValueError(f"--workers {workers}: give 1 to {most} processes, as this machine has {most // 4} cores")


@contextmanager
def progress_bar(verb: str, total: int) -> Iterator["Reporter"]:
    """Show progress over `total` bytes of files on stderr; 0: unknown."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%  {task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield Reporter(bar, bar.add_task(verb, total=total or None, rate=""), total)


class Reporter:
    """Counts bytes and tokens, and shows them in a bar on a terminal, or else in a line now and then."""

    def __init__(self, bar: "Progress", task: object, total: int) -> None:
        self._bar, self._task, self._total = bar, task, total
        self._start = self._logged = time.monotonic()
        self._text = self._disk = self._read = self._tokens = 0

    def advance(self, text_bytes: int, disk_bytes: int, tokens: int = 0, *, counts: bool = True) -> None:
        """Add progress. If `counts` is False, an earlier run made it, and it does not enter the rate."""
        self._disk += disk_bytes
        if counts:
            self._text, self._tokens = self._text + text_bytes, self._tokens + tokens
            self._read += disk_bytes
        now = time.monotonic()
        passed = max(now - self._start, 1e-9)
        rate = f"{self._text / 1e6:,.0f} MB, {self._text / 1e6 / passed:.1f} MB/s"
        if self._tokens:
            rate += f", {self._tokens / passed:,.0f} tokens/s"
        self._bar.update(self._task, completed=self._disk, rate=rate)  # type: ignore[arg-type]
        if self._bar.disable and now - self._logged > LOG_SECONDS:
            share = f"{self._disk / self._total:.0%}, " if self._total else ""
            left = ""
            if self._total and self._read:
                seconds = passed * max(0, self._total - self._disk) / self._read
                left = f", about {seconds / 60:,.0f} min left"
            print(f"{share}{rate}{left}", file=sys.stderr, flush=True)
            self._logged = now
