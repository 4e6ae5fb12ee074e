"""Checkpoints in the memory of nodes are loaded after a failure, in any layout, on any nodes.

Ranks of a test are on nodes that they name themselves (MEGAZERO_NODE), with folders of their own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megazero.config.schema import Config
from megazero.run.resume import find_checkpoint
from tests.helpers.chains import LAYOUTS, Curve, configured, deviation, make_corpus
from tests.parallel.runs import run_of


class Outcome(NamedTuple):
    """Losses and messages of a rank of `attempt`."""

    curve: Curve
    said: list[str]  # messages, "WARNING: " before those of that level


class Heard(logging.Handler):
    """Keeps all messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        warns = "WARNING: " if record.levelno == logging.WARNING else ""
        self.texts.append(warns + record.getMessage())


@contextlib.contextmanager
def hearing() -> Iterator[list[str]]:
    handler = Heard()
    logging.getLogger("megazero").addHandler(handler)
    try:
        yield handler.texts
    finally:
        logging.getLogger("megazero").removeHandler(handler)


def attempt(rank: int, config: Config, nodes: Sequence[str], until: int, waits: bool = True) -> Outcome:
    """Resume, and train until iteration `until`, as a run that is then killed: it saves nothing more.

    Args:
        nodes: each rank's.
        waits: for every copy, before the next step.
    """
    os.environ["MEGAZERO_NODE"] = nodes[rank]
    options, found = config.checkpoint, Curve()
    run = run_of(rank, len(nodes), config)
    with hearing() as said, contextlib.redirect_stdout(open(os.devnull, "w")):
        _, run.trainer.progress = run.checkpoints.resume(find_checkpoint(run.config, run.mesh.host_group))
        while run.trainer.progress.iteration < until:
            record = run.trainer.iterate()
            found.append((record["iteration"], record["loss"]))
            if run.trainer.due(options.save_interval):
                run.checkpoints.save(run.trainer.progress)
            if run.trainer.due(options.memory_checkpoint_interval):
                run.checkpoints.save_in_memory(run.trainer.progress, wait=waits)
        run.checkpoints.finish_save()
        run.trainer.train_batches.close()
        run.trainer.engine.wait()
    return Outcome(found, said)


class Runs:
    """Attempts at one run."""

    def __init__(self, ranks: Any, folder: Path) -> None:
        self.ranks, self.corpus = ranks, make_corpus(folder)
        self.disk, self.memory = folder / "saved", folder / "memory"

    def __call__(
        self, name: str, until: int, nodes: str, save_interval: int = 100, precision: str = "fp64", **options: Any
    ) -> Outcome:
        """Make an attempt in a layout of `chains`; nodes: a letter for each rank."""
        options = {"load": str(self.disk), "memory_checkpoint_interval": 2, "save_interval": save_interval} | options
        options |= {"save": str(self.disk), "memory_checkpoint_dir": str(self.memory)}
        config = configured(name, self.corpus, 20, precision, **options)
        found = self.ranks(LAYOUTS[name][0]).run(attempt, config, list(nodes), until)
        assert all(each.curve == found[0].curve for each in found)
        return found[0]

    def whole(self, name: str, until: int, precision: str = "fp64") -> Curve:
        """The curve of a run that nothing interrupts."""
        config = configured(name, self.corpus, 20, precision)
        world = LAYOUTS[name][0]
        return self.ranks(world).run(attempt, config, ["x"] * world, until)[0].curve

    def folder(self, node: str) -> Path:
        """The folder of a node."""
        (run,) = self.memory.iterdir()
        return run / f"{node}-0"

    def lose(self, *nodes: str) -> None:
        for node in nodes:
            shutil.rmtree(self.folder(node))


@pytest.fixture
def runs(ranks: Any, tmp_path: Path) -> Runs:
    return Runs(ranks, tmp_path)


# -- loaded from memory


@pytest.mark.parametrize(("nodes", "words"), [("aa", "1 node"), ("ab", "2 nodes")])
def test_the_same_layout_goes_on_to_the_bit(runs: Runs, nodes: str, words: str) -> None:
    """Killed after iteration 7: 6 is in memory, 5 on the disk."""
    wanted = runs.whole("dp2 zero1", 8, "fp32")
    first = runs("dp2 zero1", 7, nodes, save_interval=5, precision="fp32")
    rest = runs("dp2 zero1", 8, nodes, save_interval=5, precision="fp32")
    assert first.curve + rest.curve == wanted[:7] + wanted[6:]
    assert any(text.startswith(f"loaded iteration 6 from the memory of {words} in ") for text in rest.said)
    assert any(text.endswith("(the disk has 5)") for text in rest.said)


@pytest.mark.parametrize(
    ("first", "before", "second", "after"),
    [
        ("dp4 zero2", "abcd", "dp3 zero3", "abc"),  # a node is gone, and the next one has its part
        ("dp4 zero2", "abcd", "pp2 interleaved", "ca"),  # two that are no neighbours are gone; the others change places
        ("pp2 tp2", "aabb", "dp4 zero2", "ebbb"),  # another number of ranks on a node, and a new node, with rank 0
        ("tp2 dp2 zero3", "abbb", "alone", "a"),
        ("dp2 zero1", "ab", "pp2 dp2 zero-bubble", "dacb"),
    ],
)
def test_another_layout_goes_on(runs: Runs, first: str, before: str, second: str, after: str) -> None:
    """Killed after iteration 5; the nodes that are no letter of `after` are lost."""
    wanted = runs.whole("alone", 6)
    assert deviation(runs(first, 5, before).curve, wanted) < 1e-10
    runs.lose(*set(before) - set(after))
    rest = runs(second, 6, after)
    assert [iteration for iteration, _ in rest.curve] == [5, 6], rest.said
    assert deviation(rest.curve, wanted) < 1e-10
