"""A run that stops and resumes in another layout has the curve of an uninterrupted run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.checkpoint.streaming import TensorReader
from tests.helpers.chains import LAYOUTS, MODEL, TOLERANCE, Curve, configured, deviation, make_corpus, train
from tests.helpers.families import of_family

STOP, END = 2, 4  # iterations
NAMES = list(LAYOUTS)
# Each layout resumes from three others, 1, 4 and 6 places before it, hence also from other numbers of ranks.
PAIRS = [(NAMES[at - back], name) for at, name in enumerate(NAMES) for back in (1, 4, 6)]
DEFAULT = [("dp2 zero1", "pp2 interleaved"), ("dp3 zero3", "dp2 zero3"), ("pp4 by hand", "cp3 zero2")]
assert set(DEFAULT) <= set(PAIRS)


class Runs:
    """Runs of layouts, each made once."""

    def __init__(self, ranks: Any, folder: Path) -> None:
        self.ranks, self.folder, self.corpus = ranks, folder, make_corpus(folder)
        self.made: dict[tuple[object, ...], list[tuple[int, float]]] = {}

    def __call__(self, precision: str, end: int, *names: str, ramp: tuple[int, ...] = ()) -> list[tuple[int, float]]:
        """The last part of a run over these layouts, each resuming from the previous one's checkpoint."""
        key = precision, end, *names, *ramp
        if key not in self.made:
            save, load = self.at(precision, end, *names, *ramp), ""
            if len(names) > 1:
                self(precision, end - STOP, *names[:-1], ramp=ramp)
                load = str(self.at(precision, end - STOP, *names[:-1], *ramp))
            world = LAYOUTS[names[-1]][0]
            config = configured(names[-1], self.corpus, end, precision, save=str(save), load=load)
            config = replace(config, training=replace(config.training, rampup_batch_size=ramp))
            per_rank = self.ranks(world).run(train, world, config)
            assert all(found == per_rank[0] for found in per_rank)
            self.made[key] = per_rank[0]
        return self.made[key]

    def at(self, *key: object) -> Path:
        return self.folder / "-".join(map(str, key)).replace(" ", "_")


@pytest.fixture(scope="module")
def runs(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize(
    ("first", "second"), [pytest.param(*p, marks=() if p in DEFAULT else pytest.mark.slow) for p in PAIRS]
)
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "fp64"])
def test_a_run_goes_on_in_another_layout(runs: Runs, precision: str, first: str, second: str) -> None:
    """Against the single process that never stopped."""
    whole, rest = runs(precision, END, "alone"), runs(precision, END, first, second)
    assert [iteration for iteration, _ in rest] == [3, 4]
    assert deviation(rest, whole) < TOLERANCE[precision]
    assert whole[-1][1] < whole[0][1] - 0.001  # something is learned: a resume that forgot it would show


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "tp2 dp2 zero3" else pytest.mark.slow) for n in NAMES]
)
def test_the_same_layout_goes_on_to_the_bit(runs: Runs, name: str) -> None:
    assert runs("fp32", END, name, name) == runs("fp32", END, name)[STOP:]


RAMP = 4, 4, 10  # batches of 4, 4 | 4, 8 samples: the stop is in the ramp
RAMPS = [DEFAULT[1], *((name, name) for name in NAMES)]


@pytest.mark.parametrize(
    ("first", "second"), [pytest.param(*p, marks=() if p in RAMPS[:1] else pytest.mark.slow) for p in [*RAMPS, *PAIRS]]
)
def test_a_growing_batch_is_the_same_in_every_layout(runs: Runs, first: str, second: str) -> None:
    """--rampup-batch-size: against the single process that never stopped; in one layout, to the bit."""
    whole, rest = runs("fp64", END, "alone", ramp=RAMP), runs("fp64", END, first, second, ramp=RAMP)
    assert [iteration for iteration, _ in rest] == [3, 4] and deviation(rest, whole) < TOLERANCE["fp64"]
    constant = runs("fp64", END, "alone")
    assert abs(constant[0][1] - whole[0][1]) > 1e-6  # of other samples
    assert rest == runs("fp64", END, second, ramp=RAMP)[STOP:] or first != second


@pytest.mark.second
def test_mock_data_goes_on_in_another_layout(ranks: Any, tmp_path: Path) -> None:
    """Without a corpus and a tokenizer: the same samples in every layout, before and after a stop."""

    def curve(name: str, end: int, **options: str) -> list[tuple[int, float]]:
        config = configured(name, "", end, "fp64", **options)
        data = replace(config.data, data_path=(), tokenizer="", mock_data=True)
        found = ranks(LAYOUTS[name][0]).run(train, LAYOUTS[name][0], replace(config, data=data))
        return found[0]

    whole = curve("alone", END)
    assert all(4 < loss < 7 for _, loss in whole)  # ln(257) = 5.5
    curve("pp2", STOP, save=str(tmp_path / "a"))
    assert deviation(curve("tp2 sp", END, load=str(tmp_path / "a")), whole) < TOLERANCE["fp64"]


@pytest.mark.slow
@pytest.mark.parametrize("at", range(len(NAMES)))
def test_chains_of_three(runs: Runs, at: int) -> None:
    names = [NAMES[at - 4], NAMES[at - 1], NAMES[at]]
    whole, rest = runs("fp32", END + STOP, "alone"), runs("fp32", END + STOP, *names)
    assert [iteration for iteration, _ in rest] == [5, 6]
    assert deviation(rest, whole) < TOLERANCE["fp32"]


# Four experts on four ranks; then parts of all experts on two; then pairs of experts on each of two stages.
OF_EXPERTS: tuple[tuple[int, dict[str, Any], dict[str, Any]], ...] = (
    (4, {"expert_model_parallel_size": 4}, {"zero_stage": 2}),
    (2, {"tensor_model_parallel_size": 2}, {"zero_stage": 1}),
    (4, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}, {"zero_stage": 3}),
)


@pytest.mark.second
def test_experts_resume_on_other_ranks(ranks: Any, tmp_path: Path) -> None:
    model = replace(
        MODEL,
        **of_family("mixtral"),
        num_experts=4,
        moe_ffn_hidden_size=24,
        moe_layer_freq="DEE",
        moe_aux_loss_coeff=0.1,
    )
    corpus = make_corpus(tmp_path)

    def part(end: int, world: int, parallel: dict[str, Any], zero: dict[str, Any], **folders: str) -> Curve:
        config = configured("alone", corpus, end, "fp64", **folders)
        config = replace(config, model=model, parallel=replace(config.parallel, **parallel))
        return ranks(world).run(train, world, replace(config, zero=replace(config.zero, **zero)))[0]

    whole, rest, before = part(6, 1, {}, {}), Curve(), ""
    for end, layout in zip((2, 4, 6), OF_EXPERTS, strict=True):
        rest += part(end, *layout, save=str(tmp_path / str(end)), load=before)
        before = str(tmp_path / str(end))
    assert [iteration for iteration, _ in rest] == [1, 2, 3, 4, 5, 6]
    assert deviation(rest, whole) < TOLERANCE["fp64"]


MUON_CHAIN = ("dp4 zero2", "tp2 sp", "dp3 zero3", "pp2 dp2 zero-bubble")


@pytest.mark.second
def test_muon_resumes_in_other_layouts(ranks: Any, tmp_path: Path) -> None:
    """Momenta of whole matrices: from four owners to parts of two ranks, to three owners, to two on each stage."""
    corpus = make_corpus(tmp_path)

    def part(name: str, end: int, **folders: str) -> Curve:
        config = configured(name, corpus, end, "fp64", **folders)
        config = replace(config, optimizer=replace(config.optimizer, optimizer="muon", muon_momentum=0.8))
        return ranks(LAYOUTS[name][0]).run(train, LAYOUTS[name][0], config)[0]

    whole, rest, before = part("alone", 8), Curve(), ""
    for end, name in zip((2, 4, 6, 8), MUON_CHAIN, strict=True):
        rest += part(name, end, save=str(tmp_path / str(end)), load=before)
        before = str(tmp_path / str(end))
    assert [iteration for iteration, _ in rest] == list(range(1, 9))
    assert deviation(rest, whole) < 6e-9  # nats of 5.5: 1e-9, see WITH_MUON


def test_another_optimizer_begins_with_the_weights(ranks: Any, tmp_path: Path) -> None:
    """From AdamW to Muon and back: AdamW's next update moves every weight by the rate, as a first one does."""
    corpus = make_corpus(tmp_path)

    def part(optimizer: str, end: int, load: str = "") -> Curve:
        folders = {"save": str(tmp_path / f"{optimizer}{end}"), "load": load and str(tmp_path / load)}
        config = configured("alone", corpus, end, "fp64", **folders)
        config = replace(config, optimizer=replace(config.optimizer, optimizer=optimizer))
        return ranks(1).run(train, 1, config)[0]

    def table(folder: str, end: int) -> torch.Tensor:
        return TensorReader(tmp_path / folder / f"iter_{end:07}").read("model.blocks.1.mlp.up.weight")

    whole = part("adamw", 4)
    part("adamw", 2)
    moved = part("muon", 4, "adamw2")
    assert [iteration for iteration, _ in moved] == [3, 4]
    assert abs(moved[0][1] - whole[2][1]) < 1e-10 and abs(moved[1][1] - whole[3][1]) > 1e-5
    assert [iteration for iteration, _ in part("adamw", 5, "muon4")] == [5]
    steps = (table("adamw5", 5) - table("muon4", 4)).abs()
    assert 0.98e-3 < steps.median() < 1.02e-3  # --lr 1e-3, and a decay of 1e-5 of a weight


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
def test_weights_that_a_resume_freezes_stay(optimizer: str, ranks: Any, tmp_path: Path) -> None:
    """Moments of earlier steps do not move them, in a block of which others train; nor is their unfreezing refused."""
    corpus = make_corpus(tmp_path)

    def part(end: int, load: str, frozen: tuple[str, ...]) -> None:
        config = configured("alone", corpus, end, "fp64", save=str(tmp_path / str(end)), load=load)
        training = replace(config.training, freeze_parameters=frozen)
        config = replace(config, training=training, optimizer=replace(config.optimizer, optimizer=optimizer))
        ranks(1).run(train, 1, config)

    def weight(end: int, name: str) -> torch.Tensor:
        return TensorReader(tmp_path / str(end) / f"iter_{end:07}").read(f"model.blocks.1.{name}.weight")

    part(1, "", ())
    part(3, str(tmp_path / "1"), ("blocks.1.mlp.*", "blocks.1.norm1.*"))
    part(4, str(tmp_path / "3"), ())
    for name in ("mlp.up", "norm1"):
        assert torch.equal(weight(3, name), weight(1, name)) and not torch.equal(weight(4, name), weight(3, name))
    assert not torch.equal(weight(3, "attention.proj"), weight(1, "attention.proj"))
