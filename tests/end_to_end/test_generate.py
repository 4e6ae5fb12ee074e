"""scripts/generate.py against `transformers.generate`, with the weights of a checkpoint that pretrain_gpt.py wrote."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.console.generate_tool import GenerateOptions as Options
from megazero.console.generate_tool import generate_texts
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.plan.layout.topology import Layout
from megazero.generation.generate import Generator
from megazero.generation.model import InferenceModel
from megazero.generation.sampling import Sampling
from megazero.run.run_state import RunState
from megazero.world import read_world
from tests.end_to_end.cli import pretrain
from tests.helpers.ranks import Ranks
from tests.helpers.rings import by_default
from tests.reference_run import read_checkpoint, write_corpus

LAYERS, HIDDEN, HEADS, LENGTH, WORDS = 2, 30, 3, 11, 61
PROMPT = [7, 3, 55, 12]


def write_tokenizer(folder: Path, eod: int | None, words: int = WORDS) -> Path:
    """A tokenizer whose text names every token: id i is the word w<i>; `eod` ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    ids = {f"w{i}" if i != eod else "<|endoftext|>": i for i in range(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("w", " w"), decoders.Fuse()])
    if eod is not None:
        tokenizer.add_special_tokens(["<|endoftext|>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder of checkpoints, transformers' model with the same weights)"""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("generate")
    draw = random.Random(0)
    write_corpus(folder / "words", "<u2", [[draw.choices(range(WORDS), k=50)] for _ in range(20)])
    sizes = ["--num-layers", LAYERS, "--hidden-size", HIDDEN, "--num-attention-heads", HEADS, "--seq-length", LENGTH]
    # Weights so wide that the next word depends on all words before it, and on their places; a tied table would
    # repeat the last word.
    wide = ["--init-method-std", 1.0, "--untie-embeddings"]
    training = ["--train-iters", 2, "--lr", 1e-4, "--global-batch-size", 4]
    tokenizer = write_tokenizer(folder / "tokenizer", None)
    data = ["--data-path", folder / "words", "--tokenizer", tokenizer, "--save", folder / "saved"]
    done = pretrain(*sizes, *wide, *training, *data, ranks=1)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tokenizer)  # its copy in the checkpoint is used from now on
    weights = read_checkpoint(folder / "saved" / "iter_0000002")
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, tie_word_embeddings=False
    )
    theirs = GPT2LMHeadModel(config).eval()
    theirs.load_state_dict(to_transformers(weights))
    return folder, theirs


def to_transformers(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their names and shapes: Conv1D has [in, out], and rows of queries, keys and values are [3, heads, d]."""
    names = {"token_embedding": "wte", "position_embedding": "wpe", "head.norm": "ln_f", "norm1": "ln_1"}
    names |= {"norm2": "ln_2", "attention.qkv": "attn.c_attn", "attention.proj": "attn.c_proj"}
    names |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj", "blocks.": "h."}
    found = {}
    for name, value in weights.items():
        if name.startswith("model."):
            name = name.removeprefix("model.")
            if "qkv" in name:
                value = value.transpose(0, 1).reshape(3 * HIDDEN, *value.shape[3:])
            if name.startswith("blocks.") and value.dim() == 2:
                value = value.t()
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            found["lm_head.weight" if name == "head.output.weight" else f"transformer.{name}"] = value
    return found


def tokens_of(text: str) -> list[int]:
    return [int(word) for word in text.replace("w", " ").split()]


def ours(capsys: pytest.CaptureFixture[str], folder: Path, prompt: list[int], **options: Any) -> list[list[int]]:
    """The texts of scripts/generate.py as tokens, without the prompt."""
    text = " ".join(f"w{i}" for i in prompt)
    capsys.readouterr()
    generate_texts(Options(load=str(folder / "saved"), prompt=(text,), **options), read_world())
    texts = [tokens_of(part) for part in capsys.readouterr().out.split("-" * 40) if part.strip()]
    assert all(tokens[: len(prompt)] == prompt for tokens in texts)
    return [tokens[len(prompt) :] for tokens in texts]


def logits(theirs: Any, ids: list[int]) -> torch.Tensor:
    """[v] behind the last LENGTH of `ids`; positions begin at 0 in every window."""
    with torch.no_grad():
        return theirs(torch.tensor([ids[-LENGTH:]])).logits[0, -1]


def test_the_likeliest_words_are_theirs(run, capsys: pytest.CaptureFixture[str]) -> None:
    """Token for token, from prompts of any length up to a whole window."""
    folder, theirs = run
    for length in (1, 4, LENGTH - 1):
        prompt = (PROMPT * 3)[:length]
        new = LENGTH - length
        whole = theirs.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, pad_token_id=0)
        (found,) = ours(capsys, folder, prompt, max_new_tokens=new, temperature=0)
        assert found == whole[0, length:].tolist()


def test_beyond_a_window_the_last_words_count(run, capsys: pytest.CaptureFixture[str]) -> None:
    """The window moves on by a word at a time, also within a prompt that is longer than it."""
    folder, theirs = run
    for prompt in (PROMPT, [(5 * i) % WORDS for i in range(2 * LENGTH + 3)]):
        wanted = list(prompt)
        for _ in range(3 * LENGTH):
            wanted.append(int(logits(theirs, wanted).argmax()))
        (found,) = ours(capsys, folder, prompt, max_new_tokens=3 * LENGTH, temperature=0)
        assert found == wanted[len(prompt) :]
        assert len(set(found)) > 4  # not one repeated word, which every window would give


def test_the_end_of_a_document_ends_a_text(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, theirs = run
    (free,) = ours(capsys, folder, PROMPT, max_new_tokens=7, temperature=0)
    at = next(i for i in range(1, 7) if free[i] not in (*PROMPT, *free[:i]))
    eod = free[at]
    tokenizer = write_tokenizer(tmp_path / "other", eod)
    (found,) = ours(capsys, folder, PROMPT, max_new_tokens=7, temperature=0, tokenizer=str(tokenizer))
    whole = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=7, do_sample=False, pad_token_id=0, eos_token_id=eod)
    assert [*found, eod] == whole[0, len(PROMPT) :].tolist()
    assert found == free[:at]


DRAWS = 400


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [(1.0, 0, 1.0), (0.4, 0, 1.0), (2.5, 6, 1.0), (1.0, 1, 1.0), (1.0, 1000, 1.0), (2.5, 0, 0.5), (2.0, 20, 0.7)],
)
def test_draws_are_distributed_as_theirs(
    temperature: float, top_k: int, top_p: float, run, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first new word, by transformers' own warpers: within five standard deviations and one draw."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    folder, theirs = run
    scores = TemperatureLogitsWarper(temperature)(None, logits(theirs, PROMPT)[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    wanted = scores.softmax(-1)[0].double()
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "num_samples": DRAWS, "max_new_tokens": 1}
    found = Counter(word for (word,) in ours(capsys, folder, PROMPT, **options))
    assert sum(found.values()) == DRAWS
    for word, p in enumerate(wanted.tolist()):
        if p == 0:
            assert found[word] == 0
        assert abs(found[word] - DRAWS * p) <= 5 * (DRAWS * p * (1 - p)) ** 0.5 + 1, word


def test_the_seed_decides_the_draws(run, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = run
    first, again, other = (ours(capsys, folder, PROMPT, max_new_tokens=30, seed=seed) for seed in (3, 3, 4))
    assert first == again != other


BATCH = [
    [7],
    [7, 3, 55, 12],
    [60] * 10,
    [(5 * i) % WORDS for i in range(LENGTH + 4)],
    [1, 2, 3],
    [9, 9, 4, 40, 21, 0, 8],
]


def wanted_greedy(theirs: Any, prompt: list[int], new: int, eod: int | None = None) -> list[int]:
    """The likeliest tokens by transformers, window by window."""
    ids = list(prompt)
    for _ in range(new):
        token = int(logits(theirs, ids).argmax())
        if token == eod:
            break
        ids.append(token)
    return ids[len(prompt) :]


def words(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def printed_json(capsys: pytest.CaptureFixture[str], **options: Any) -> list[dict[str, Any]]:
    capsys.readouterr()
    generate_texts(Options(json=True, **options), read_world())
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_batch_says_what_each_prompt_alone_says(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts of different lengths, some beyond the window, ended by a document's end at different times."""
    folder, theirs = run
    free = [wanted_greedy(theirs, prompt, 9) for prompt in BATCH]
    unasked = set(range(WORDS)).difference(*BATCH)
    eod = Counter(token for text in free for token in text[1:] if token in unasked).most_common(1)[0][0]
    wanted = [wanted_greedy(theirs, prompt, 9, eod) for prompt in BATCH]
    assert len({len(text) for text in wanted}) > 2  # they end at different times
    tokenizer = str(write_tokenizer(tmp_path / "other", eod))
    prompts = tuple(words(prompt) for prompt in BATCH)
    for batch_size in (2, 16):
        options = {"max_new_tokens": 9, "temperature": 0, "tokenizer": tokenizer, "batch_size": batch_size}
        found = printed_json(capsys, load=str(folder / "saved"), prompt=prompts, **options)
        assert [tokens_of(one["completion"]) for one in found] == wanted
        ends = ["length" if one["tokens"] == 9 else "end of document" for one in found]
        assert [one["finish"] for one in found] == ends and len(set(ends)) == 2


def test_each_token_is_computed_once(run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt, then one token at a time; behind the window all of it."""
    computed, logits_of = [], InferenceModel.logits

    def watched(self: Any, new: Any, cache: Any) -> Any:
        computed.append([len(one.ids) for one in new])
        return logits_of(self, new, cache)

    monkeypatch.setattr(InferenceModel, "logits", watched)
    folder, _ = run
    printed_json(capsys, load=str(folder / "saved"), prompt=(words([1] * 7), words([2] * 9)), max_new_tokens=6)
    assert computed == [[7, 9], [1, 1], [1, 1], [1, 11], [1, 11], [11, 11]]


def test_a_text_does_not_depend_on_its_batch(run, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = run
    prompts = tuple(words(prompt) for prompt in BATCH)
    found = [
        printed_json(capsys, load=str(folder / "saved"), prompt=prompts, max_new_tokens=9, batch_size=size)
        for size in (1, 4)
    ]
    assert found[0] == found[1]
    assert len({one["completion"] for one in found[0]}) == len(BATCH)


def test_prompts_of_a_file(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = run
    (tmp_path / "prompts.txt").write_text("w1 w2\nw3\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1 w2", "id": 7}\n{"prompt": "w3"}\n')
    options = {"load": str(folder / "saved"), "max_new_tokens": 3, "temperature": 0}
    direct = printed_json(capsys, prompt=("w1 w2", "w3"), **options)
    assert [one["prompt"].split() for one in direct] == [["w1", "w2"], ["w3"]]
    for name in ("prompts.txt", "prompts.jsonl"):
        assert printed_json(capsys, prompt_file=str(tmp_path / name), **options) == direct
    (tmp_path / "prompts.jsonl").write_text('{"text": "w1"}\n')
    (tmp_path / "prompts.txt").write_text("w1\n\nw2\n")
    (tmp_path / "none.txt").write_text("")
    for name, said in (
        ("prompts.jsonl", "prompts.jsonl: line 1 is no JSON object with a text as `prompt`"),
        ("prompts.txt", "--prompt is empty, or a line of --prompt-file"),
        ("none.txt", "none.txt has no line"),
        ("absent.txt", "absent.txt: No such file"),
    ):
        with pytest.raises(ValueError, match=said):
            generate_texts(Options(prompt_file=str(tmp_path / name), **options), read_world())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"temperature": -1.0}, "--temperature -1.0: must be 0"),
        ({"top_p": 0.0}, "--top-p 0.0: must be more than 0 and at most 1"),
        ({"top_k": -1}, "--top-k -1: must be 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0: must be at least 1"),
        ({"batch_size": 0}, "--batch-size 0: must be at least 1"),
        ({"tokenizer": "byte"}, "--tokenizer byte has 257 tokens, and the model"),
        ({"tensor_model_parallel_size": 3}, "= 3 does not divide the 1 ranks that were started"),
        (
            {"context_parallel_size": 2},
            "--context-parallel-size 2 x --pipeline-model-parallel-size 1 = 2 does not divide the 1 ranks .*; start 2",
        ),
        ({"context_parallel_size": 12}, "--context-parallel-size 12 is too large for --seq-length 11: .* at most 11"),
        ({"context_parallel_size": 0}, "--context-parallel-size 0"),
    ],
)
def test_bad_options_are_refused(flags: dict[str, Any], said: str, run) -> None:
    with pytest.raises(ValueError, match=said):
        generate_texts(Options(load=str(run[0] / "saved"), **flags), read_world())


def test_a_tokenizer_of_fewer_tokens_is_refused(run, tmp_path: Path) -> None:
    """Its ids are in the vocabulary, but are other words there."""
    tokenizer = write_tokenizer(tmp_path / "smaller", None, words=WORDS - 1)
    said = (
        f"--tokenizer {tokenizer} has {WORDS - 1} tokens, and the one of the run, .*, {WORDS}: .*leave --tokenizer out"
    )
    with pytest.raises(ValueError, match=said):
        generate_texts(Options(load=str(run[0] / "saved"), tokenizer=str(tokenizer)), read_world())


def test_a_hugging_face_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"a Hugging Face model: .* import --from hf {tmp_path} --output DIR"):
        generate_texts(Options(load=str(tmp_path)), read_world())


def on_a_rank(rank: int, path: Path, layout: Layout, prompts: list[list[int]]) -> list[tuple[int, list[int]]]:
    """(number, new tokens) of each text, on rank 0; runs on every rank."""
    mesh = Mesh.build(layout, rank, torch.device("cpu"))
    model = InferenceModel(path, RunState.read(path).model_config(path), mesh)
    generator = Generator(model, Sampling(temperature=0), 9, batch_size=2, ends=())
    return [(text.number, text.new_ids) for texts in generator.run(prompts) for text in texts]


@pytest.mark.parametrize(
    "layout",
    [
        *by_default([Layout(tp=3), Layout(pp=2), Layout(dp=2), Layout(cp=2)], 0, 3),
        *(pytest.param(Layout(dp=2, **more), marks=pytest.mark.slow) for more in ({"pp": 2}, {"cp": 2})),
    ],
    ids=str,
)
def test_every_layout_says_the_same(layout: Layout, run, ranks: Callable[[int], Ranks]) -> None:
    """An odd vocabulary over tp, stages, prompts divided over dp, and each of them over cp."""
    folder, theirs = run
    path = folder / "saved" / "iter_0000002"
    first, *others = ranks(layout.world_size).run(on_a_rank, path, layout, BATCH)
    assert first == [(number, wanted_greedy(theirs, prompt, 9)) for number, prompt in enumerate(BATCH)]
    assert all(found == [] for found in others)
