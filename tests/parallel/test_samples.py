"""Texts of the model being trained are those of plain PyTorch, in every layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megazero.data.tokenizer import load_tokenizer
from megazero.flags.config import LogConfig
from megazero.generation.sampling import Sampling
from megazero.run.text_samples import TextSampler, read_prompts
from tests import reference
from tests.helpers.families import of_family
from tests.helpers.rings import by_default
from tests.parallel.cases import MODEL, Case, new_engine

PROMPTS = ["To be", "a prompt that is longer than the window of eleven", "x"]
NUM_TOKENS = 9
SEED = 77  # of the texts; not the default
# The byte tokenizer's vocabulary; layers enough for a V, and weights that make other logits in every place.
BYTES = replace(MODEL, vocab_size=257, num_layers=4, init_method_std=0.3)
EXPERTS = replace(BYTES, **of_family("llama"), num_query_groups=2, num_experts=4, moe_ffn_hidden_size=24)


def sampled(rank: int, case: Case, path: str) -> list[list[dict[str, str]]]:
    """Sample twice, around an update-free evaluation step of the same engine."""
    engine = new_engine(rank, case)
    config = replace(case.config(), log=LogConfig(sample_prompts=path, sample_interval=1))
    config = replace(config, training=replace(config.training, seed=SEED))
    sampler = TextSampler(config, engine, load_tokenizer("byte"), NUM_TOKENS)
    return [sampler.run(), sampler.run()]


def expected(case: Case) -> list[str]:
    config, tokenizer = case.config(), load_tokenizer("byte")
    weights, sampling, found = reference.initial_weights(config), Sampling(seed=SEED), []
    for number, ids in enumerate(tokenizer.encode_batch(PROMPTS)):
        start, generator = len(ids), sampling.generator(number)
        for _ in range(NUM_TOKENS):
            logits = reference.forward(config, weights, torch.tensor([ids[-BYTES.seq_length :]]))[0, -1]
            token = sampling.draw(logits.float(), generator)
            if token == tokenizer.eod:
                break
            ids.append(token)
        found.append(tokenizer.decode(ids[start:]))
    return found


@pytest.mark.parametrize(
    "case",
    by_default(
        [
            Case(model=BYTES, precision="fp64", batch=4),  # two at once, so two rounds
            Case(pp=2, dp=2, zero=3, model=BYTES, precision="fp64"),
            Case(cp=2, batch=4, model=BYTES, precision="fp64"),
            Case(tp=2, cp=2, sp=True, zero=3, exchange="ring", model=BYTES, precision="fp64"),
            Case(pp=2, schedule="zero-bubble-v", chunks=2, recompute="full", model=BYTES, precision="fp64"),
            Case(dp=2, ep=2, zero=3, model=EXPERTS, precision="fp64"),  # the second rank has one text, and padding
        ],
        *(0, 1),
    )
    + [  # their logits are those of one rank (test_context_generation.py)
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            Case(tp=2, dp=2, zero=3, sp=True, micro_batches=1, model=BYTES, precision="fp64"),
            Case(tp=2, dp=2, sp=True, ep=4, etp=1, zero=2, micro_batches=1, model=EXPERTS, precision="fp64"),
            Case(pp=2, cp=2, ep=2, batch=4, recompute="full", model=EXPERTS, precision="fp64"),
        )
    ],
    ids=str,
)
def test_every_layout_writes_the_same_texts(case: Case, ranks, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(PROMPTS) + "\n")
    wanted = [{"prompt": p, "text": t} for p, t in zip(PROMPTS, expected(case), strict=True)]
    assert len({sample["text"] for sample in wanted}) == 3
    first, *others = ranks(case.world).run(sampled, case, str(path))
    assert first == [wanted, wanted]
    assert others == [[[], []]] * (case.world - 1)


def test_prompts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n \n")
    binary.write_bytes(b"\xff\xfe")
    for path, words in (
        (empty, "holds no prompt"),
        (binary, "name a text file"),
        (tmp_path / "no", "name a text file"),
    ):
        with pytest.raises(ValueError, match=f"--sample-prompts {path}: .*{words}"):
            read_prompts(str(path))
    with pytest.raises(ValueError, match="needs --tokenizer"):
        TextSampler(replace(Case().config(), log=LogConfig(sample_prompts="p")), new_engine(0, Case()), None)
