"""Nothing touches a buffer in flight: `InFlight` refuses it, and late collectives show the wrong results without it."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.data.corpora import open_datasets
from megazero.engine.mesh.in_flight import OverlapError
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import CheckpointConfig
from megazero.run.training_run import TrainingRun
from tests.helpers.late import late_collectives
from tests.helpers.rings import by_default
from tests.helpers.runs import new_run
from tests.parallel.cases import Case
from tests.unit.data_helpers import write_corpus

CPU = torch.device("cpu")


def refusal(start: Any) -> str:
    """Return the message that `start` is refused with; "" where it is not."""
    try:
        start().wait()
    except OverlapError as error:
        return str(error)
    return ""


def overlaps(rank: int) -> dict[str, str]:
    """Operations during an all-gather of `own` into `whole`, of which it is a part, and during a reduce-scatter."""
    mesh = Mesh.build(Layout(dp=2), rank, CPU)
    axis, found = mesh.dp, {}
    whole, other = torch.arange(8.0), torch.zeros(8)
    own = whole[4 * rank : 4 * rank + 4]
    gather = axis.start_all_gather(own, whole)
    found["all-reduce of its input"] = refusal(lambda: axis.start_all_reduce(own))
    found["read of its output"] = refusal(lambda: axis.start_all_gather(whole, torch.zeros(16)))
    found["elsewhere"] = refusal(lambda: axis.start_all_reduce(other))
    try:
        mesh.in_flight.check("loading", writes=[own])
    except OverlapError as error:
        found["loading"] = str(error)
    gather.wait()
    gather.wait()
    found["after the wait"] = refusal(lambda: axis.start_all_reduce(own))
    mesh.in_flight.check("loading", writes=[own])

    full, out, scratch = torch.ones(8), torch.zeros(4), torch.zeros(8)
    scatter = axis.start_reduce_scatter(full, out, True, scratch)
    found["its scratch"] = refusal(lambda: axis.start_reduce_scatter(torch.ones(4), torch.zeros(2), False, scratch))
    found["its result"] = refusal(lambda: axis.start_all_reduce(out))
    found["its input, read too"] = refusal(lambda: axis.start_all_gather(full, torch.zeros(16)))
    scatter.wait()

    axis.start_all_reduce(other)  # dropped
    found["one not waited for"] = refusal(lambda: axis.start_all_reduce(other))
    free = Mesh.build(Layout(dp=2), rank, CPU, check_buffers=False)
    first = free.dp.start_all_reduce(out)
    found["without checks"] = refusal(lambda: free.dp.start_all_reduce(out))
    first.wait()
    return found


def test_an_overlap_is_refused_and_named(ranks) -> None:
    for found in ranks(2).run(overlaps):
        allowed = {"elsewhere", "after the wait", "its input, read too", "without checks"}
        assert {name for name, message in found.items() if not message} == allowed, found
        assert (
            "all-reduce over dp would write 16 bytes that all-gather over dp, in flight, reads"
            in found["all-reduce of its input"]
        )
        assert "loading would write" in found["loading"] and "wait for it first" in found["loading"]
        assert "reduce-scatter over dp, in flight, writes" in found["its result"]


# -- a run that resumes from a checkpoint


def run_of(rank: int, case: Case, folder: Path, check_buffers: bool = True) -> TrainingRun:
    saved = str(folder / "saved")
    config = replace(case.config(), checkpoint=CheckpointConfig(save=saved, load=saved))
    data = open_datasets([str(folder / "corpus")], "1,0,0", case.model.seq_length, 1, case.model.vocab_size)
    return new_run(config, Mesh.build(case.layout, rank, CPU, check_buffers=check_buffers), data)


def begin(rank: int, case: Case, folder: Path) -> tuple[float, float]:
    """One iteration, a checkpoint, one more: the loss and the norm of that."""
    run = run_of(rank, case, folder)
    run.trainer.iterate()
    run.checkpoints.save(run.trainer.progress)
    record = run.trainer.iterate()
    run.trainer.engine.wait()
    return record["loss"], record["grad_norm"]


def go_on(rank: int, case: Case, folder: Path, late: bool, check_buffers: bool) -> tuple[float, float]:
    """The second iteration, from the checkpoint."""
    with late_collectives(checks=False) if late else nullcontext():
        run = run_of(rank, case, folder, check_buffers)
        _, run.trainer.progress = run.loader.resume()
        record = run.trainer.iterate()
        run.trainer.engine.wait()
    return record["loss"], record["grad_norm"]


RESUMED = [
    Case(dp=2, zero=1),
    Case(dp=2, zero=2, precision="fp16"),
    Case(dp=2, zero=3),
    Case(pp=2, dp=2, zero=2, micro_batches=3),
]


@pytest.mark.parametrize("case", by_default(RESUMED, 2), ids=str)
def test_a_resumed_run_begins_with_the_weights_that_it_loaded(case: Case, ranks, tmp_path: Path) -> None:
    """Late collectives of its construction do not restore the initial weights."""
    tokens = torch.randint(0, 101, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    write_corpus(tmp_path / "corpus", [tokens[at : at + 50] for at in range(0, 2000, 50)])
    wanted = ranks(case.world).run(begin, case, tmp_path)
    assert ranks(case.world).run(go_on, case, tmp_path, False, True) == wanted
    assert ranks(case.world).run(go_on, case, tmp_path, True, False) == wanted
