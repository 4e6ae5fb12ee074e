"""Generation by ranks that share the tokens of a text: logits, texts, memory and traffic are those of plain PyTorch."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megazero import checkpoint
from megazero.checkpoint.engine_state import EngineState
from megazero.engine.kernels.dropout import Dropout, Rows
from megazero.engine.kernels.kernel_table import EAGER
from megazero.engine.mesh.collectives import Axis
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.context_parallel.dealt import DealtTokens
from megazero.engine.model.layers.attention import CoreAttention
from megazero.engine.model.scores import Scores
from megazero.engine.plan.layout.topology import Layout
from megazero.families.parts.relatives import SMALL_LATENTS
from megazero.flags.config import ModelConfig
from megazero.generation.generate import Generator, NewTokens, Text
from megazero.generation.kv_cache import KVCache, attend_prompt
from megazero.generation.model import InferenceModel
from megazero.generation.sampling import Sampling
from tests import reference
from tests.helpers.families import of_family
from tests.helpers.ranks import Ranks
from tests.parallel.cases import MODEL, Case, new_engine

LENGTH, WORDS, NEW = MODEL.seq_length, MODEL.vocab_size, 9
# Weights so wide that the next token depends on all before it.
GPT2 = replace(MODEL, num_layers=2, init_method_std=0.4, untie_embeddings=True)
LLAMA = replace(GPT2, num_layers=3, **of_family("llama"), num_query_groups=2)
IN_TURNS = replace(LLAMA, window_size=4, layer_pattern="LLG", attention_scale=0.3)
LATENTS = replace(LLAMA, num_query_groups=0, **SMALL_LATENTS)
CAPPED = replace(IN_TURNS, attention_softcap=0.8, window_size=5)
SINKS = replace(IN_TURNS, **of_family("gpt-oss"), num_experts=4, ffn_hidden_size=24)
# Of one token, fewer than ranks, as many as a window of the model, and more.
PROMPTS = [
    [(31 * i + 7 * i * i + length) % WORDS for i in range(length)] for length in (1, 2, 4, LENGTH, LENGTH + 4, 7)
]
GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=1.5, top_k=0, seed=5)


def case_of(model: ModelConfig) -> Case:
    return Case(model=model, precision="fp64")


def saved(model: ModelConfig, folder: Path) -> Path:
    """A checkpoint of the initial weights."""
    engine = new_engine(0, case_of(model))
    return Path(checkpoint.save(folder, 1, EngineState(engine).shards(), EngineState(engine).numbers(), None))


class Wanted(NamedTuple):
    texts: list[Text]
    logits: list[list[torch.Tensor]]  # [text][step] -> [v]


def wanted(model: ModelConfig, sampling: Sampling, eod: int | None) -> Wanted:
    config = case_of(model).config()
    weights, found = reference.initial_weights(config), Wanted([], [])
    for number, prompt in enumerate(PROMPTS):
        text, generator, steps = Text(number, list(prompt), len(prompt)), sampling.generator(number), []
        while not text.finish:
            steps.append(reference.forward(config, weights, torch.tensor([text.ids[-LENGTH:]]))[0, -1])
            token = sampling.draw(steps[-1].float(), generator)
            if token == eod:
                text.finish = "end of document"
                continue
            text.ids.append(token)
            text.finish = "length" if len(text.new_ids) == NEW else ""
        found.texts.append(text)
        found.logits.append(steps)
    return found


class Watched(InferenceModel):
    """Keeps all logits."""

    seen: list[torch.Tensor | None]

    def logits(self, new: Sequence[NewTokens], cache: KVCache) -> torch.Tensor | None:
        self.seen.append(super().logits(new, cache))
        return self.seen[-1]


def mesh_of(rank: int, layout: Layout) -> Mesh:
    return Mesh.build(layout, rank, torch.device("cpu"))


def generated(
    rank: int, path: Path, model: ModelConfig, layout: Layout, sampling: Sampling, eod: int | None
) -> tuple[list[Text], list[torch.Tensor | None]]:
    watched = Watched(path, model, mesh_of(rank, layout), "fp64")
    watched.seen = []
    [texts] = Generator(watched, sampling, NEW, len(PROMPTS), (eod,)).run(PROMPTS)
    return texts, watched.seen


CASES = [
    (Layout(cp=2), GPT2, GREEDY),
    (Layout(cp=3), IN_TURNS, DRAWN),
    (Layout(tp=2, cp=2), CAPPED, GREEDY),
    (Layout(pp=2, cp=2), IN_TURNS, GREEDY),
    (Layout(tp=2, cp=2), SINKS, GREEDY),
    (Layout(cp=2), LATENTS, GREEDY),
    *(
        pytest.param(layout, model, sampling, marks=pytest.mark.slow)
        for layout in (Layout(cp=2), Layout(cp=3), Layout(cp=4), Layout(tp=2, cp=2), Layout(pp=2, cp=3))
        for model in (GPT2, LLAMA, IN_TURNS, CAPPED, SINKS, LATENTS)
        for sampling in (GREEDY, DRAWN)
    ),
]


def name(part: object) -> str:
    """A part of a case's name; equal for cases that differ in the model's options, which pytest numbers."""
    if isinstance(part, ModelConfig):
        kind = "latents" if part.multi_latent_attention else part.architecture
        return f"{kind}-{part.layer_pattern}-{part.attention_softcap}"
    return "greedy" if part == GREEDY else "drawn" if part == DRAWN else str(part)


@pytest.mark.second
@pytest.mark.parametrize(("layout", "model", "sampling"), CASES, ids=name)
def test_every_rank_has_the_logits_of_one(
    layout: Layout, model: ModelConfig, sampling: Sampling, tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    """Prompts and new tokens within the window and behind it, of texts that end at different times."""
    free = [text.new_ids for text in wanted(model, sampling, None).texts]
    eod = Counter(token for new in free for token in set(new[1:])).most_common(1)[0][0]
    texts, logits = wanted(model, sampling, eod)
    assert len({len(text.new_ids) for text in texts}) > 2
    found = ranks(layout.world_size).run(generated, saved(model, tmp_path), model, layout, sampling, eod)
    assert [of_rank for of_rank, _ in found] == [texts] + [[]] * (layout.world_size - 1)
    for rank, (_, steps) in enumerate(found):
        assert len(steps) == max(map(len, logits))
        for step, ours in enumerate(steps):
            if layout.coord(rank).pp < layout.pp - 1:
                assert ours is None
                continue
            growing = torch.stack([each[step] for each in logits if len(each) > step])
            assert ours is not None
            assert (ours - growing).abs().max() < 1e-10 * growing.abs().max(), (rank, step)


def drawn_of_unlike_ranks(rank: int, path: Path, layout: Layout) -> list[list[int]]:
    """The texts on each rank, whose ranks but the first have other logits."""

    class Unlike(InferenceModel):
        def logits(self, new: Sequence[NewTokens], cache: KVCache) -> torch.Tensor | None:
            found = super().logits(new, cache)
            return found if found is None or self.mesh.cp.is_first else found.roll(1, dims=1)

    generator = Generator(Unlike(path, GPT2, mesh_of(rank, layout), "fp64"), GREEDY, 3, 16, ())
    texts = [Text(number, list(prompt), len(prompt)) for number, prompt in enumerate(PROMPTS)]
    generator._generate(texts)
    return [text.new_ids for text in texts]


def test_the_first_rank_draws_for_all(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """Ranks whose logits differ in the last bits would draw other tokens, and then have other texts."""
    first, second = ranks(2).run(drawn_of_unlike_ranks, saved(GPT2, tmp_path), Layout(cp=2))
    assert first == second == [text.new_ids[:3] for text in wanted(GPT2, GREEDY, None).texts]


# -- memory and traffic


def cache_bytes(rank: int, path: Path, model: ModelConfig, layout: Layout) -> list[int]:
    """Bytes of keys and values, sent for prompts of 10 and 2 tokens, and sent for a token of each."""
    model = InferenceModel(path, model, mesh_of(rank, layout), "fp64")
    cache = model.new_cache(2, 10)
    sent = []
    for new in ([NewTokens(list(range(10)), 0), NewTokens([3, 4], 0)], [NewTokens([5], 9), NewTokens([5], 2)]):
        before = model.mesh.cp.sent["cp"]
        model.logits(new, cache)
        sent.append(model.mesh.cp.sent["cp"] - before)
    return [sum(part.nbytes for heads in cache._layers.values() for part in heads), *sent]


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bytes_are_those_of_the_formulas(tp: int, tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """A rank keeps a third of the capacity, or of the window, rounded up, and so no more than any other."""
    layers, groups, heads, dim, hidden = 3, 2 // tp, 6 // tp, 8, 48
    slots = 2 + 2 + 4  # of 4, 4 and 10 tokens
    kept = 2 * 2 * groups * dim * slots * 8  # keys and values of two sequences
    gathered = 2 * layers * 2 * groups * dim * 4 * 8  # to two others, of a prompt of 10; that of 2 is whole everywhere
    summed = 2 * 2 * (2 * hidden * 8) // 3  # the last tokens: an all-reduce
    merged = 2 * layers * 2 * heads * (dim + 1) * 8
    wanted = [kept, gathered + summed, merged]
    layout = Layout(cp=3, tp=tp)
    assert ranks(3 * tp).run(cache_bytes, saved(IN_TURNS, tmp_path), IN_TURNS, layout) == [wanted] * 3 * tp


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_latent_is_kept_and_sent_once(tp: int, tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """A latent of 20 elements and the rotary key of 6 are key and value of all heads, on every tensor-parallel rank."""
    layers, heads, latent, hidden = 3, 6 // tp, 20 + 6, 48
    kept = 2 * layers * latent * 4 * 8  # of two sequences of up to 10 tokens, a third of each
    gathered = 2 * layers * latent * 4 * 8  # to two others, of a prompt of 10; that of 2 is whole everywhere
    summed = 2 * 2 * (2 * hidden * 8) // 3  # the last tokens: an all-reduce
    merged = 2 * layers * 2 * heads * (latent + 1) * 8
    wanted, layout = [kept, gathered + summed, merged], Layout(cp=3, tp=tp)
    assert ranks(3 * tp).run(cache_bytes, saved(LATENTS, tmp_path), LATENTS, layout) == [wanted] * 3 * tp


# -- 16 bit, and prompts whose scores are made in parts


def attended(rank: int, dtype: torch.dtype, scores: Scores) -> list[float]:
    """Error of 40 tokens after a prompt of 60, relative to that of fp64; of 3 ranks and of one."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(100, n, 8, generator=generator).mul(1.5).to(dtype) for n in (4, 2, 2)]

    def run(parts: list[torch.Tensor], cp: Axis | None) -> torch.Tensor:
        cache = KVCache(1, 100, cp)
        core = CoreAttention(Dropout(0.0, 0, 0, "scores"), EAGER, False, scores, cp)

        def prompt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dealt: DealtTokens | None) -> torch.Tensor:
            return attend_prompt(core, q, k, v, False, dealt, most=4 * 60 * 7)  # 20 queries in parts of 7

        own = cache.dealt(60, torch.device("cpu"))
        first = torch.arange(60) if own is None else own.indices[0]
        whole = parts[0].new_zeros(100, 4 * 8)
        with torch.no_grad():
            whole[first] = cache.attend(0, scores, prompt, *(x[first] for x in parts), (Rows(0, 0, 60),))
            for at in range(60, 100):
                whole[at] = cache.attend(0, scores, prompt, *(x[at : at + 1] for x in parts), (Rows(0, at, 1),))[0]
        return whole

    cp = mesh_of(rank, Layout(cp=3)).cp
    exact = run([x.double() for x in parts], None)
    ours, alone = run(parts, cp).double(), run(parts, None).double()
    mine = cp.all_reduce_((ours[:60] != 0).any(1).double())
    assert (mine == 1).all()  # each token of the prompt on one rank
    ours[:60] = cp.all_reduce_(ours[:60].clone())
    return [float((x - exact).norm() / exact.norm()) for x in (ours, alone)]


@pytest.mark.second
@pytest.mark.parametrize("scores", [Scores(), Scores(window=7, softcap=2.0, scale=0.5)], ids=["plain", "capped"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_merge_errs_no_more_than_one_rank(dtype: torch.dtype, scores: Scores, ranks: Callable[[int], Ranks]) -> None:
    """Results are rounded once, after the merge in fp32."""
    for ours, alone in ranks(3).run(attended, dtype, scores):
        assert ours <= (1e-14 if dtype == torch.float64 else alone * (1 + 2**-6)), (ours, alone)
