"""Silent bugs of other systems, and their planted equivalents: tests/silent_bugs.toml."""

import functools
import tomllib
from pathlib import Path
from typing import NamedTuple

from megazero.verify.verification import Proof, Verification, Wanted
from tests.helpers.planted import Fault, plant

FILE = Path(__file__).parents[1] / "silent_bugs.toml"


class SilentBug(NamedTuple):
    """A bug of another system.

    Attributes:
        where: issues and pull requests, OWNER/NAME#NUMBER.
        date: of the first of them that was read; empty if none was.
        wrong, effect: the error, and how large its effect was; empty: unknown.
        ours: the reason why our design has no such bug.
        flags, world: the run that is verified with the fault; 0: as many ranks as the flags need.
        read: the thread was read.
        test: fails with the fault planted, if megazero verify does not; empty: none was tried.
    """

    where: tuple[str, ...]
    date: str
    wrong: str
    effect: str
    ours: str
    fault: Fault
    flags: str
    world: int
    read: bool
    test: str

    def verify(self, planted: bool = True) -> Proof:
        """Run megazero verify with the fault, or without it."""
        prepare = functools.partial(plant, self.fault) if planted else None
        return Verification(Wanted(self.flags.split(), self.world), prepare).run()


def read_bugs() -> list[SilentBug]:
    found = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return [
        SilentBug(
            where=tuple(bug["where"]),
            date=bug.get("date", ""),
            wrong=bug["wrong"],
            effect=bug["effect"],
            ours=bug["ours"],
            fault=Fault(bug["module"], bug.get("owner", ""), bug["function"], find=bug["find"], replace=bug["replace"]),
            flags=f"{found['common']} {bug['flags']}",
            world=bug.get("world", 0),
            read=bug.get("read", True),
            test=bug.get("test", ""),
        )
        for bug in found["bug"]
    ]
