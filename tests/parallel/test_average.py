"""The running average of weights (--ema-interval, --ema-decay): exchanged, resumed, exported.

Its values are in the matrix.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megazero.checkpoint.engine_state import EngineState
from megazero.checkpoint.streaming import TensorReader
from megazero.data.remembered import data_tokenizer
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.flags.config import Config
from megazero.flags.resolve import resolve
from megazero.interop.huggingface.export import export
from megazero.log import log
from megazero.run.averages import averaged_weights
from megazero.run.inputs import open_data
from tests.helpers.chains import LAYOUTS, configured, make_corpus
from tests.helpers.runs import new_run
from tests.parallel.cases import EMA_DECAY, MODEL, Case, micro_batches, new_engine

SMALL = replace(MODEL, num_layers=2)


def exchanged(rank: int, case: Case) -> tuple[float, float]:
    """Train two steps, and exchange the average three times; fails where a number is lost. Return losses of both."""
    engine = new_engine(rank, case)
    for step in range(2):
        engine.train_step(step + 1, micro_batches(case, engine.mesh, step))
    engine.wait()

    def numbers() -> dict[str, torch.Tensor]:
        return {name: shard.data.clone() for name, shard in EngineState(engine).shards().items()}

    before, batches = numbers(), micro_batches(case, engine.mesh, 0)
    loss, _ = engine.evaluate(batches)
    with averaged_weights(engine):
        within, (averaged, _) = numbers(), engine.evaluate(batches)
    with contextlib.suppress(InterruptedError), averaged_weights(engine):
        raise InterruptedError  # the weights are theirs again, although other ranks may not answer
    after = numbers()
    engine.zero.sync_params()
    for name, data in before.items():
        kind, _, weight = name.partition(".")
        other = {"model": "ema", "ema": "model"}.get(kind, kind)
        assert torch.equal(within[f"{other}.{weight}"], data), name
        assert torch.equal(after[name], data), name
        if kind == "ema" and any(weight.startswith(frozen.rstrip("*")) for frozen in case.frozen):
            assert torch.equal(data, before[f"model.{weight}"]), name
    assert engine.evaluate(batches)[0] == loss
    return loss, averaged


EXCHANGES = [
    Case(dp=2, zero=3, ema=2, model=SMALL),  # master weights are the weights
    Case(dp=2, zero=2, ema=2, model=SMALL, precision="bf16", masters="split", frozen=("blocks.0.*",)),
    Case(pp=2, ema=1, model=SMALL, precision="bf16", optimizer="lion", offload=0.5, disk=True),
]


@pytest.mark.parametrize("case", EXCHANGES, ids=str)
def test_an_exchange_and_the_way_back_lose_no_bit(case: Case, ranks) -> None:
    for loss, averaged in ranks(case.world).run(exchanged, case):
        assert (averaged == loss) is (case.ema == 2)  # the first change is the weights themselves; the second is not


class Part(NamedTuple):
    """Losses of a part of a run, by iteration, and the lines of its log about averages."""

    losses: dict[int, tuple[float, float | None]]  # of the weights, and of their average
    notes: list[str]


def train(rank: int, world: int, config: Config) -> Part:
    """Train from --load to --train-iters, and save."""
    config, layout = resolve(config, world, 257, declare)
    run = new_run(config, Mesh.build(layout, rank, torch.device("cpu")), open_data(config, data_tokenizer(config)))
    losses, notes = {}, []
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), lines(notes.append):
        _, run.trainer.progress = run.loader.resume()
        while run.trainer.progress.iteration < config.training.train_iters:
            record = run.trainer.iterate()
            losses[record["iteration"]] = record["validation_loss"], record.get("validation_loss_ema")
        run.checkpoints.save(run.trainer.progress, last=True)
    run.trainer.train_batches.close()
    run.trainer.engine.wait()
    return Part(losses, [note for note in notes if "running average" in note])


@contextlib.contextmanager
def lines(see: Callable[[str], None]):
    """Within: call `see` with each line of the log."""
    written = log.info
    log.info = lambda text, *args, **kwargs: see(text)  # type: ignore[method-assign]
    try:
        yield
    finally:
        log.info = written  # type: ignore[method-assign]


@pytest.fixture
def runs(ranks: Any, tmp_path: Path) -> Callable[..., Part]:
    """Returns a function that trains a part of a run in a layout, and checks that all ranks have one result."""
    corpus = make_corpus(tmp_path)

    def run(layout: str, end: int, interval: int = 2, frozen: tuple[str, ...] = (), **checkpoint: str) -> Part:
        config = configured(layout, corpus, end, "fp64", **checkpoint)
        config = replace(config, training=replace(config.training, freeze_parameters=frozen))
        optimizer = replace(config.optimizer, ema_interval=interval, ema_decay=EMA_DECAY if interval else 0.999)
        evaluation = replace(config.evaluation, eval_interval=1, eval_iters=1)
        config = replace(
            config, optimizer=optimizer, evaluation=evaluation, data=replace(config.data, split="600,400,0")
        )
        world = LAYOUTS[layout][0]
        found = ranks(world).run(train, world, config)
        assert all(part.losses == found[0].losses for part in found)
        return found[0]

    return run


def test_a_run_resumes_its_average_in_another_layout(runs: Callable[..., Part], tmp_path: Path) -> None:
    """Stopped between two changes of the average; then a run without it, and one that begins another."""
    whole = runs("alone", 5).losses
    assert [loss for loss, _ in whole.values()] != [averaged for _, averaged in whole.values()]
    assert [averaged is None for _, averaged in whole.values()] == [True, False, False, False, False]
    assert whole[2][1] == whole[2][0] and whole[3][1] == whole[2][1] != whole[4][1]
    first = runs("tp2 sp", 3, save=str(tmp_path / "a"))
    rest = runs("dp2 zero3", 5, load=str(tmp_path / "a"), save=str(tmp_path / "b"))
    assert not first.notes and not rest.notes
    for iteration, (loss, averaged) in (first.losses | rest.losses).items():
        assert loss == pytest.approx(whole[iteration][0], rel=1e-12)  # fp64
        assert averaged is whole[iteration][1] is None or averaged == pytest.approx(whole[iteration][1], rel=1e-12)
    without = runs("alone", 5, interval=0, load=str(tmp_path / "a"), save=str(tmp_path / "c"))
    assert without.notes == ["the running average of the weights is not continued; --ema-interval would continue it"]
    assert without.losses[5] == (pytest.approx(whole[5][0], rel=1e-12), None)
    second = runs("dp2 zero0", 6, frozen=("blocks.0.*",), load=str(tmp_path / "c"))
    assert second.notes == ["the running average of the weights begins at iteration 6"]
    assert second.losses[6][0] == second.losses[6][1]  # that of frozen weights, too, is the loaded ones

    path, model = tmp_path / "b" / "iter_0000005", tmp_path / "c" / "iter_0000005"
    assert export(path, tmp_path / "hf", None, weights="ema")
    from transformers import AutoModelForCausalLM

    table = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").get_input_embeddings().weight.detach()
    averaged, weights = (TensorReader(path).read(f"{kind}.token_embedding.weight").float() for kind in ("ema", "model"))
    assert torch.equal(table, averaged) and not torch.equal(table, weights)
    with pytest.raises(ValueError, match=r"--weights ema: .* has no running average of the weights; train with"):
        export(model, tmp_path / "other", None, weights="ema")
    assert not (tmp_path / "other").exists()
