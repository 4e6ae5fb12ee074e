"""Fine-tuning on conversations equals a loop of transformers and torch, in every layout."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from data_tools import preprocess_data
from megazero.data.corpora import open_datasets
from tests.end_to_end.cli import metrics, pretrain
from tests.end_to_end.test_generate import write_tokenizer

WORDS, LENGTH, BATCH, STEPS, SEED = 61, 24, 4, 20, 1234
USER, ASSISTANT, TURN_END, EOD, FIRST_ANSWER = 1, 2, 4, 5, 31
LR, BETAS, EPS, DECAY, CLIP = 2e-3, (0.9, 0.95), 1e-8, 0.05, 0.4
FLAGS = [
    *("--finetune", "--precision", "fp64", "--train-iters", STEPS, "--global-batch-size", BATCH, "--seed", SEED),
    *("--split", "1", "--seq-length", LENGTH, "--lr", LR, "--min-lr", LR, "--weight-decay", DECAY),
    *("--adam-beta1", BETAS[0], "--adam-beta2", BETAS[1], "--adam-eps", EPS, "--clip-grad", CLIP),
]
DOCUMENTS = ["--reset-attention-mask", "--reset-position-ids"]
# A turn is w1 and the user's words, or w2 and the assistant's, which end with w4.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'w1 ' + m.content + ' ' }}{% else %}{{ 'w2 ' }}"
    "{% generation %}{{ m.content + ' w4 ' }}{% endgeneration %}{% endif %}{% endfor %}"
)
LAYOUTS: dict[str, tuple[int, list[object]]] = {
    "cp 2, documents": (2, ["--context-parallel-size", 2, "--micro-batch-size", 2, *DOCUMENTS]),
    "one process": (1, ["--micro-batch-size", 4]),
    "tp 2, documents": (2, ["--tensor-model-parallel-size", 2, "--sequence-parallel", *DOCUMENTS]),
    "pp 2": (2, ["--pipeline-model-parallel-size", 2, "--micro-batch-size", 1]),
    "zero 3, documents": (2, ["--zero-stage", 3, "--micro-batch-size", 1, *DOCUMENTS]),
    "3 replicas share 4 samples, documents": (3, ["--micro-batch-size", 1, "--zero-stage", 2, *DOCUMENTS]),
    "cp 2, 2 replicas": (4, ["--context-parallel-size", 2, "--zero-stage", 1, "--micro-batch-size", 1]),
}


def counted(ids: torch.Tensor) -> torch.Tensor:
    """Find the tokens of the assistant, by their ids alone."""
    return (ids == TURN_END) | (ids == EOD) | (ids >= FIRST_ANSWER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers and its tokenizer, with a chat template."""
    from transformers import GPT2Config, GPT2LMHeadModel

    path = write_tokenizer(tmp_path_factory.mktemp("theirs") / "model", EOD)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    torch.manual_seed(3)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=24, n_layer=2, n_head=4, initializer_range=0.3, **none
    )
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def chat(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a corpus of conversations of one to three turns, each of which ends with an answer."""
    root, draw = tmp_path_factory.mktemp("chat"), Random(0)

    def words(first: int, stop: int) -> str:
        return " ".join(f"w{draw.randrange(first, stop)}" for _ in range(draw.randrange(1, 6)))

    with open(root / "chat.jsonl", "w") as file:
        for _ in range(40):
            talk = list[dict[str, str]]()
            for _ in range(draw.randrange(1, 4)):
                talk.append({"role": "user", "content": words(6, FIRST_ANSWER)})
                talk.append({"role": "assistant", "content": words(FIRST_ANSWER, WORDS)})
            file.write(json.dumps({"messages": talk}) + "\n")
    given = ["--input", str(root / "chat.jsonl"), "--output-prefix", str(root / "chat"), "--workers", "1"]
    preprocess_data.main([*given, "--tokenizer", str(folder), "--mask-from", "chat", "--append-eod"])
    return root / "chat_messages_document"


@pytest.fixture(scope="module")
def losses(folder: Path, chat: Path) -> Callable[[bool], list[float]]:
    """losses(documents): of 20 steps in fp64, as a loop over transformers' model has them."""
    from transformers import GPT2LMHeadModel

    @functools.cache
    def train(documents: bool) -> list[float]:
        data: Any = open_datasets((str(chat),), "1", LENGTH, SEED, WORDS).train
        model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").train()
        matrices = [p for n, p in model.named_parameters() if n.endswith("weight") and ".ln_" not in n]
        others = [p for n, p in model.named_parameters() if not (n.endswith("weight") and ".ln_" not in n)]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
        optimizer, found = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS), []
        for step in range(STEPS):
            tokens = torch.stack([torch.from_numpy(data[BATCH * step + i].ids) for i in range(BATCH)])
            ids, labels = tokens[:, :-1], tokens[:, 1:]
            document = F.pad((ids == EOD).cumsum(-1), (1, -1))  # number of each token's document in its sample
            same = (document[:, :, None] == document[:, None, :]).tril()
            places = same.sum(-1) - 1
            bias = torch.zeros(same.shape, dtype=torch.float64).masked_fill(~same, -torch.inf)[:, None]
            options = {"attention_mask": bias, "position_ids": places} if documents else {}
            logits = model(ids, **options).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            loss = loss[counted(labels).flatten()].mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            found.append(loss.item())
        return found

    return train


EACH = [pytest.param(name, marks=() if name == "cp 2, documents" else pytest.mark.slow) for name in LAYOUTS]


@pytest.mark.parametrize("layout", EACH)
def test_masked_fine_tuning_is_a_loop_of_transformers(
    layout: str, folder: Path, chat: Path, losses: Callable[[bool], list[float]], tmp_path: Path
) -> None:
    ranks, flags = LAYOUTS[layout]
    given = ["--load", folder, "--data-path", chat, *FLAGS, *flags, "--log-dir", tmp_path]
    done = pretrain(*given, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert f"% of {chat} count as targets" in done.stdout + done.stderr
    found, wanted = [record["loss"] for record in metrics(tmp_path)], losses(DOCUMENTS[0] in flags)
    assert len(found) == STEPS and wanted[-1] < 0.9 * wanted[0]
    errors = [abs(ours - theirs) / theirs for ours, theirs in zip(found, wanted, strict=True)]
    assert all(error < 1e-10 for error in errors), errors
