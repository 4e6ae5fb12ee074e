"""Plants each fault of `mutations.toml`, one at a time, in a copy of the tree, and runs the tests that must notice it.

    python -m tests.mutate              # all: see `make mutate`
    python -m tests.mutate scale fsync  # those whose description or file has one of these words

Exits with 1 if a fault goes unnoticed, or if an entry no longer fits the code. Not part of CI: it takes a while.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRIES = Path(__file__).with_name("mutations.toml")
SECONDS = 600  # of one fault's tests; a hang counts as noticed

NOTICED, UNNOTICED, BROKEN = "noticed", "NOT NOTICED", "DOES NOT RUN"


@dataclass(frozen=True)
class Mutation:
    """A planted fault.

    Attributes:
        fault: its effect, in words.
        file: where, below the root of the repository.
        find: text of one line, which occurs exactly once in the file.
        replace: the replacement.
        tests: of the default suite, as pytest takes them; one of them at least must fail.
    """

    fault: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]

    def problem(self, root: Path = ROOT) -> str | None:
        """Why this entry does not fit the code any longer; None if it does."""
        path = root / self.file
        if not path.is_file():
            return f"{self.file} is gone: find where the code went, and change the entry"
        count = path.read_text().count(self.find)
        if count != 1:
            return f"{self.file} has {self.find!r} {count} times, not once: plant the same fault in today's code"
        if self.find == self.replace or "\n" in self.find:
            return f"{self.find!r} must be text of one line, and `replace` something else"
        for test in self.tests:
            file, _, name = test.partition("::")
            function = name.partition("[")[0]
            if not (root / file).is_file() or f"def {function}(" not in (root / file).read_text():
                return f"{test} is gone: name the test that notices this fault now"
        return None if self.tests else "it names no test"

    def status(self, root: Path) -> int | None:
        """Return `run_tests` with the fault planted in the tree at `root`, which is restored."""
        path = root / self.file
        original = path.read_text()
        path.write_text(original.replace(self.find, self.replace))
        try:
            return run_tests(root, self.tests)
        finally:
            path.write_text(original)


def read_entries() -> list[Mutation]:
    """All of `mutations.toml`."""
    with ENTRIES.open("rb") as file:
        entries = tomllib.load(file)["mutation"]
    return [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def copy_tree(target: Path) -> None:
    """Copy the files that git tracks or does not ignore, as they are now; the environment is shared."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_file() or source.is_symlink():  # a deleted one is listed until that is committed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)  # presets and devices are links to folders
    if (ROOT / ".venv").exists() and not (target / ".venv").exists():
        (target / ".venv").symlink_to((ROOT / ".venv").resolve())


def run_tests(root: Path, tests: tuple[str, ...]) -> int | None:
    """pytest's exit status; None if it did not end in time."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not gpu",
        *tests,
    ]
    # No bytecode: a file that changes twice within a second would be taken for the old one.
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with (root / ".mutate.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=root, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            return process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:  # out of time, or interrupted
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def outcome(status: int | None) -> str:
    """pytest's 1: a test failed. 2 to 5: it could not run them, which proves nothing."""
    return {0: UNNOTICED, 1: NOTICED, None: NOTICED}.get(status, BROKEN)


def main(words: list[str]) -> int:
    chosen = [m for m in read_entries() if not words or any(w in m.fault or w in m.file for w in words)]
    if not chosen:
        print(f"no entry of {ENTRIES.name} has any of these words: {' '.join(words)}", file=sys.stderr)
        return 2
    bad = 0
    with tempfile.TemporaryDirectory(prefix="megazero-mutate-") as folder:
        root = Path(folder)
        copy_tree(root)
        every = tuple(dict.fromkeys(test for m in chosen for test in m.tests))
        if run_tests(root, every) != 0:
            print((root / ".mutate.log").read_text()[-3000:])
            print("the tests fail before any fault is planted; mend them first", file=sys.stderr)
            return 1
        for number, mutation in enumerate(chosen, 1):
            found, start = mutation.problem(root), time.monotonic()
            if found is None:
                found = outcome(mutation.status(root))
            bad += found != NOTICED
            by = re.findall(r"^FAILED (.+?)(?: - |$)", (root / ".mutate.log").read_text(), re.MULTILINE)[:1]
            last = f"by {by[0].rpartition('/')[2]}" if found == NOTICED and by else ""
            seconds = time.monotonic() - start
            print(f"{number:3}/{len(chosen)}  {found:<12} {seconds:5.0f} s  {mutation.fault}  {last}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} faults are noticed")
    return 1 if bad else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes end too
    sys.exit(main(sys.argv[1:]))
