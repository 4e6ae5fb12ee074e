"""Upcycling: the first loss of a model with experts is that of the dense model whose MLPs they are."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero import checkpoint
from megazero.checkpoint import streaming, verify
from megazero.checkpoint.streaming import TensorReader
from megazero.flags.cli import parse
from megazero.flags.config import Config, ModelConfig
from megazero.interop.upcycle import upcycle, with_experts
from megazero.run.run_state import RunState
from tests.helpers import chains
from tests.helpers.families import of_family
from tests.helpers.programs import warm
from tests.helpers.rings import by_default

DENSE = replace(chains.MODEL, **of_family("llama"), num_query_groups=2, ffn_hidden_size=24, untie_embeddings=True)
OPTIONS = {"num_experts": 6, "moe_router_topk": 3, "moe_layer_freq": "DE"}
TRAINED = 2  # iterations of the dense model
TOLERANCE = 1e-10

Train = Callable[..., list[float]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return chains.make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def train(ranks: Any, corpus: str) -> Train:
    """Train a model from --load to an iteration, in a layout; the losses."""

    def run(model: ModelConfig, end: int, layout: str = "alone", **folders: Any) -> list[float]:
        config: Config = replace(chains.configured(layout, corpus, end, "fp64", **folders), model=model)
        curves = ranks(chains.LAYOUTS[layout][0]).run(chains.train, chains.LAYOUTS[layout][0], config)
        return [loss for _, loss in curves[0]]

    return run


@pytest.fixture(scope="module")
def dense(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a dense model that has learned a little."""
    folder = tmp_path_factory.mktemp("dense")
    train(DENSE, TRAINED, save=str(folder))
    found = checkpoint.find(folder)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def upcycled(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made with chunks so small that an expert has several, and a band is a row."""
    folder = tmp_path_factory.mktemp("upcycled") / "experts"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "CHUNK_BYTES", 4 * 16 * 5)
        patch.setattr(streaming, "BAND_BYTES", 4 * 16 * 10)
        upcycle(dense, folder, with_experts(dense, DENSE, **OPTIONS), seed=7)
    return folder


@pytest.mark.second
@pytest.mark.parametrize("layout", by_default(["alone", "tp2 sp", "dp2 zero3"], 1))
def test_the_first_loss_is_the_dense_models(layout: str, dense: Path, upcycled: Path, train: Train) -> None:
    """A step later they differ, because routers and experts learn."""
    wanted = train(DENSE, 2, load=str(dense), finetune=True)
    model = replace(DENSE, **OPTIONS)  # type: ignore[arg-type]
    found = train(model, 2, layout, load=str(upcycled))
    assert abs(found[0] - wanted[0]) < TOLERANCE * wanted[0] and found[1] != wanted[1]


def test_every_expert_is_the_mlp_in_its_place(dense: Path, upcycled: Path) -> None:
    path = checkpoint.find(upcycled)
    assert path is not None and list(verify.faults(path)) == []
    state, ours, theirs = RunState.read(path), TensorReader(path), TensorReader(dense)
    assert state.weights_only and state.iteration == 0 and state.tokenizer(path) == "byte"
    assert state.model_config(path) == replace(DENSE, **OPTIONS)  # type: ignore[arg-type]
    routers = []
    for name, stored in ours.manifest.tensors.items():
        found = ours.read(name)
        assert found.dtype == torch.float64 and found.shape == stored.shape
        if name.endswith("router.weight"):
            routers.append(found)
            assert 0.03 < float(found.std()) < 0.07  # --init-method-std 0.05
        else:
            wanted = theirs.read(name.replace(".experts", ""))
            assert found.equal(wanted.expand_as(found)), name
    assert len(routers) == 2 and not routers[0].equal(routers[1])


def test_its_flags_are_a_preset(upcycled: Path) -> None:
    assert parse(["--preset", str(upcycled / "config.toml")]).model == replace(DENSE, **OPTIONS)  # type: ignore[arg-type]


@pytest.mark.long
def test_the_command(dense: Path, tmp_path: Path) -> None:
    words = "upcycle", "--load", dense.parent, "--num-experts", "4", "--save"
    new = tmp_path / "new"
    for more, message in (
        (["--moe-router-pre-softmax"], "--moe-router-pre-softmax: the weights of a token's experts would not add up"),
        (["--moe-router-topk", "5"], "--moe-router-topk 5 is more than --num-experts 4"),
    ):
        refused = warm("scripts/checkpoint.py", *words, new, *more)
        assert refused.returncode == 1 and message in refused.stderr and not new.exists()
    done = warm("scripts/checkpoint.py", *words, new)
    assert done.returncode == 0, done.stderr
    assert f"--preset {new}/config.toml --load {new}" in done.stdout
    path = checkpoint.find(new)
    assert path is not None and RunState.read(path).model["num_experts"] == 4
    again = warm("scripts/checkpoint.py", *words, new)
    assert again.returncode == 1 and "new exists already" in again.stderr


def test_only_a_dense_model_that_may_have_experts_is_upcycled(dense: Path, upcycled: Path) -> None:
    with pytest.raises(ValueError, match="the model has --num-experts 6 already; give a dense one"):
        with_experts(upcycled, replace(DENSE, **OPTIONS), num_experts=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--architecture gpt2"):
        with_experts(dense, chains.MODEL, num_experts=2)
