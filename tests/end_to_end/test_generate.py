"""scripts/generate.py against `transformers.generate`, with the weights of a checkpoint that pretrain_gpt.py wrote."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.generate import Options
from scripts.generate import main as generate
from tests.end_to_end.cli import pretrain
from tests.reference_run import read_checkpoint, write_corpus

LAYERS, HIDDEN, HEADS, LENGTH, WORDS = 2, 30, 3, 11, 61
PROMPT = [7, 3, 55, 12]


def write_tokenizer(folder: Path, eod: int | None) -> Path:
    """A tokenizer whose text tells every token: id i is the word w<i>; `eod` ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {f"w{i}" if i != eod else "<|endoftext|>": i for i in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("w", " w"), decoders.Fuse()])
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
    # Weights so wide that what follows depends on all words before it, and on their places; a tied table would say the
    # last word again and again.
    wide = ["--init-method-std", 1.0, "--untie-embeddings"]
    training = ["--train-iters", 2, "--lr", 1e-4, "--global-batch-size", 4]
    tokenizer = write_tokenizer(folder / "tokenizer", None)
    data = ["--data-path", folder / "words", "--tokenizer", tokenizer, "--save", folder / "saved"]
    done = pretrain(*sizes, *wide, *training, *data, ranks=1)
    assert done.returncode == 0, done.stderr
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
    generate(Options(load=str(folder / "saved"), prompt=text, **options))
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
        assert len(set(found)) > 4  # not one word again and again, which every window would say


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


@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.4, 0), (2.5, 6), (1.0, 1), (1.0, 1000)])
def test_draws_are_distributed_as_theirs(
    temperature: float, top_k: int, run, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first new word, by transformers' own temperature and top-k: within five standard deviations and one draw."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper

    folder, theirs = run
    scores = TemperatureLogitsWarper(temperature)(None, logits(theirs, PROMPT)[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    wanted = scores.softmax(-1)[0].double()
    options = {"temperature": temperature, "top_k": top_k, "num_samples": DRAWS, "max_new_tokens": 1}
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
