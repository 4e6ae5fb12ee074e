"""--tasks, --task-interval and --task-limit: scores in a run, and of its checkpoint in other layouts."""

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero.console.checkpoint_tool import Export, export_checkpoint
from megazero.data.task_files import read_tasks
from megazero.data.task_requests import Pair, encode_tasks
from megazero.flags.config import ModelConfig
from megazero.generation.generate import Generator
from megazero.generation.sampling import Sampling
from megazero.interop.lm_eval_model import CheckpointScorer, lm_eval_class
from megazero.observe.report.page import cards
from megazero.observe.report.runs import read_run
from tests.end_to_end.cli import metrics, pretrain
from tests.helpers.rings import by_default
from tests.helpers.rounding import model_tolerance

LAYERS, HIDDEN, HEADS, LENGTH, WORDS = 4, 24, 4, 16, 300
SIZES = ["--num-layers", LAYERS, "--hidden-size", HIDDEN, "--num-attention-heads", HEADS, "--seq-length", LENGTH]
SIZES += ["--init-method-std", 0.2, "--global-batch-size", 3, "--lr", 1e-2, "--mock-data"]
NEAR = model_tolerance(ModelConfig(LAYERS, HIDDEN, 0, HEADS, LENGTH, WORDS), torch.float32)
TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps. Straße, naïve café. 1,234 things are there."
ITEMS: list[dict[str, Any]] = [
    {"context": "The quick", "choices": ["brown fox", "dog", "lazy", "things are"], "answer": 0},
    {"context": "the dog: ", "choices": ["naïve", "sleeps"], "answer": 1},
    {"context": "", "choices": ["café", "the", "over"], "answer": 2},
    {"context": f"{TEXT} {TEXT}", "choices": ["The", "Straße"], "answer": 0},
]
ITEMS = [{"kind": "choice", "task": "choices"} | item for item in ITEMS]
ITEMS += [
    {"kind": "cloze", "task": "last", "context": "jumps over the lazy", "continuation": "dog"},
    {"kind": "cloze", "task": "last", "context": "The dog", "continuation": "sleeps."},
    {"kind": "text", "task": "texts", "domain": "long", "text": TEXT},
    {"kind": "text", "task": "texts", "domain": "short", "text": "fox"},
]
LAYOUTS = {
    "one process": (1, []),
    "tp 2": (2, ["--tensor-model-parallel-size", 2, "--loss-chunk-tokens", 5]),
    "cp 2": (2, ["--context-parallel-size", 2]),
    "zero 3, unequal": (2, ["--zero-stage", 3]),
    "pp 2": (2, ["--pipeline-model-parallel-size", 2]),
    "pp 2 x dp 2": (4, ["--pipeline-model-parallel-size", 2, "--zero-stage", 2]),
}


def write_tokenizer(folder: Path) -> Path:
    """Train a byte-level BPE of a few merges, some of which join a space with a word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=["<|endoftext|>"], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Train on two stages; return the folder of items, tokenizer and run, and the output."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "items.jsonl").write_text("\n".join(json.dumps(item) for item in ITEMS) + "\n\n")
    tokenizer = write_tokenizer(folder / "tokenizer")
    training = ["--train-iters", 5, "--task-interval", 2, "--save", folder / "run", "--log-dir", folder / "run"]
    tasks = ["--tokenizer", tokenizer, "--tasks", folder / "items.jsonl"]
    done = pretrain(*SIZES, *training, *tasks, "--pipeline-model-parallel-size", 2, ranks=2)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def by_transformers(run) -> list[list[tuple[float, bool]]]:
    """Return the log-likelihood of each continuation of each item, and whether it is the likeliest: plain loops."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = run
    assert export_checkpoint(Export(folder / "run", folder / "exported")) == 0
    model = AutoModelForCausalLM.from_pretrained(folder / "exported", local_files_only=True, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "exported", local_files_only=True)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")

    def encoded(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def score(context: list[int], continuation: list[int]) -> tuple[float, bool]:
        ids = torch.tensor([(context + continuation)[-(LENGTH + 1) :]])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0, -len(continuation) :]
        found = torch.tensor(continuation)
        nats = logits.double().log_softmax(-1).gather(1, found[:, None]).sum()
        return float(nats), bool((logits.argmax(-1) == found).all())

    def of_text(ids: list[int]) -> tuple[float, bool]:
        parts = [score(([end, *ids])[: 1 + start], ids[start : start + LENGTH]) for start in range(0, len(ids), LENGTH)]
        return sum(nats for nats, _ in parts), all(greedy for _, greedy in parts)

    found = []
    for item in ITEMS:
        if item["kind"] == "text":
            found.append([of_text(encoded(item["text"]))])
            continue
        whole = [item["context"] + " " + text for text in item.get("choices", [item.get("continuation")])]
        context = encoded(item["context"].rstrip())
        found.append([score(context or [end], encoded(text)[len(context) :]) for text in whole])
    return found


def evaluate(folder: Path, layout: str, *flags: object) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """Return the output, the line of metrics.jsonl and the lines of tasks.jsonl of --eval-only."""
    ranks, words = LAYOUTS[layout]
    log_dir = folder / "evaluations" / str(random.random())
    common = ["--tokenizer", folder / "tokenizer", "--tasks", folder / "items.jsonl", "--load", folder / "run"]
    done = pretrain(*SIZES, *common, "--eval-only", "--log-dir", log_dir, *words, *flags, ranks=ranks)
    assert done.returncode == 0, done.stderr
    (record,) = metrics(log_dir)
    return done.stdout, record, [json.loads(line) for line in (log_dir / "tasks.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("layout", by_default(LAYOUTS, 1))
def test_items_of_a_checkpoint_are_those_of_transformers(layout: str, run, by_transformers) -> None:
    folder, _ = run
    _, record, lines = evaluate(folder, layout)
    assert [line["task"] for line in lines] == [item["task"] for item in ITEMS]
    for line, wanted in zip(lines, by_transformers, strict=True):
        assert line["greedy"] == [greedy for _, greedy in wanted]
        for ours, (theirs, _) in zip(line["log_likelihoods"], wanted, strict=True):
            assert abs(ours - theirs) < NEAR * abs(theirs)
    last = metrics(folder / "run")[-1]
    for key, values in ((key, values) for key, values in last.items() if key.startswith("task_")):
        assert record[key] == pytest.approx(values, rel=NEAR * 40), key  # of a perplexity: nats x NEAR


def expected_scores(by_transformers) -> dict[str, dict[str, float]]:
    """Return the scores of metrics.jsonl, from the nats of each continuation."""
    nats = [[-each for each, _ in wanted] for wanted in by_transformers]
    sizes = [[len(text.encode()) for text in item["choices"]] for item in ITEMS[:4]]
    per_byte = [[n / s for n, s in zip(*each, strict=True)] for each in zip(nats[:4], sizes, strict=True)]

    def share(found: list[list[float]]) -> float:
        best = [min(range(len(each)), key=each.__getitem__) for each in found]
        return sum(at == item["answer"] for at, item in zip(best, ITEMS[:4], strict=True)) / 4

    texts = [(nats[i][0] / math.log(2), len(ITEMS[i]["text"].encode())) for i in (6, 7)]
    bits = {"texts": sum(n for n, _ in texts) / sum(size for _, size in texts)}
    bits |= {f"texts/{name}": n / size for name, (n, size) in zip(("long", "short"), texts, strict=True)}
    return {
        "task_acc": {"choices": share(nats[:4]), "last": 0.0},
        "task_acc_norm": {"choices": share(per_byte)},
        "task_perplexity": {"last": math.exp((nats[4][0] + nats[5][0]) / 2)},
        "task_bits_per_byte": bits,
    }


def test_scores_of_a_run(run, by_transformers) -> None:
    """After iterations 2, 4 and the last; shown in the page and on the console are those of the last."""
    folder, output = run
    records = [record for record in metrics(folder / "run") if "task_acc" in record]
    assert [record["iteration"] for record in records] == [2, 4, 5]
    assert all(record["pause_seconds"]["tasks"] > 0 for record in records)
    last, wanted = records[-1], expected_scores(by_transformers)
    for key, values in wanted.items():
        assert last[key] == pytest.approx(values, rel=NEAR * (40 if key == "task_perplexity" else 1)), (
            key
        )  # nats x NEAR
    right, bits = wanted["task_acc"]["choices"], wanted["task_bits_per_byte"]
    error = math.sqrt(right * (1 - right) / 3)
    assert last["task_acc_stderr"]["choices"] == pytest.approx(error)
    values = {
        "choices, accuracy": f"{right:.3f} ± {error:.3f} (4 items)",
        "texts, bits per byte": f"{bits['texts']:.4f} (2 items)",
        "texts/long, bits per byte": f"{bits['texts/long']:.4f}",
    }
    shown, page = dict(cards(read_run(folder / "run"))), (folder / "run" / "report.html").read_text()
    for name, value in values.items():
        assert shown[name].startswith(value) and f"<b>{shown[name]}</b><span>{name}</span>" in page, name
    assert "tasks     choices 4, last 2, texts 2: " in output and "scored every 2 iterations and after" in output
    assert f"tasks after iteration 5: choices accuracy {values['choices, accuracy']}" in output
    assert f"texts bits per byte {values['texts, bits per byte']}" in output


@pytest.mark.second
def test_a_limit_takes_the_first_items_of_each_task(run) -> None:
    folder, _ = run
    output, record, lines = evaluate(folder, "one process", "--task-limit", 1)
    _, _, whole = evaluate(folder, "one process")
    assert [line["task"] for line in lines] == ["choices", "last", "texts"]
    for line, place in zip(lines, (0, 4, 6), strict=True):
        assert line["log_likelihoods"] == pytest.approx(whole[place]["log_likelihoods"], rel=NEAR)
    assert "task_acc_stderr" not in record and "  texts bits per byte " in output


def test_files_that_cannot_be_used_are_refused_before_the_run(run, refusal) -> None:
    folder, _ = run
    bad = folder / "bad.jsonl"
    bad.write_text(json.dumps(ITEMS[0]) + "\n" + json.dumps(ITEMS[0] | {"answer": 4}) + "\n")
    done = refusal(*SIZES, "--tokenizer", "byte", "--tasks", bad, "--save", folder / "never")
    assert done.returncode == 1 and f"--tasks {bad}, line 2: answer 4 of 4 choices" in done.stderr
    done = refusal(*SIZES, "--vocab-size", WORDS, "--tasks", folder / "items.jsonl", "--save", folder / "never")
    assert done.returncode == 1 and "needs --tokenizer, because items are text; add it" in done.stderr
    assert not (folder / "never").exists()


def test_the_model_of_lm_eval_without_lm_eval(run, by_transformers) -> None:
    """Log-likelihoods of pairs and of texts; greedy texts end at a stop sequence."""
    folder, _ = run
    scorer = CheckpointScorer(str(folder / "run"), batch_size=3)
    encoded = encode_tasks(read_tasks([str(folder / "items.jsonl")]), scorer.text)
    found = scorer.score_pairs([pair for pairs in encoded.pairs[:6] for pair in pairs])
    for (ours, greedy), (theirs, wanted) in zip(found, [x for item in by_transformers[:6] for x in item], strict=True):
        assert abs(ours - theirs) < NEAR * abs(theirs) and greedy == wanted
    texts = [SimpleNamespace(args=(item["text"],)) for item in ITEMS[6:]]
    rolling = scorer.loglikelihood_rolling(texts)
    assert rolling == pytest.approx([theirs for ((theirs, _),) in by_transformers[6:]], rel=NEAR)
    request = SimpleNamespace(args=("The quick", {"max_gen_toks": 9, "do_sample": False}))
    (whole,) = scorer.generate_until([request])
    ids = scorer.text.encode("The quick")
    (greedy,) = Generator(scorer.inference, Sampling(temperature=0.0), 9, batch_size=1, ends=()).run([ids])
    assert whole == scorer.text.decode(greedy[0].new_ids) and len(whole) > 3
    request = SimpleNamespace(args=("The quick", {"max_gen_toks": 9, "until": ["~~", whole[2]]}))
    assert scorer.generate_until([request]) == [whole[: whole.index(whole[2])]]
    with pytest.raises(
        ValueError, match=r"request 1 of 2.*: its continuation has 17 tokens, more than --seq-length 16"
    ):
        scorer._loglikelihood_tokens([("a", [1], [2] * 16), ("b", [1], [2] * 17)])
    assert scorer.tok_encode("The", add_special_tokens=False) == scorer.tok_encode("The") == scorer.text.encode("The")
    assert scorer.prefix_token_id == scorer.text.eod
    scorer.text.bos = (7,)  # of a tokenizer that puts it before a text
    assert scorer.tok_encode("The") == [7, *scorer.tok_encode("The", add_special_tokens=False)]
    pairs = [Pair([7], [1, 2]), Pair([7, 3], [2])]
    wanted, of_lm_eval = scorer.score_pairs(pairs), [("", [7], [7, 1, 2]), ("x", [7, 3], [2])]
    assert scorer._loglikelihood_tokens(of_lm_eval) == wanted  # lm-eval 0.4.9 encodes a lone continuation as a text
    with pytest.raises(ValueError, match=r"--prepend-bos: .* has no beginning-of-text token"):
        CheckpointScorer(str(folder / "run"), add_bos_token=True)
    with pytest.raises(ValueError, match=f"load={folder} holds no checkpoint"):
        CheckpointScorer(str(folder))


@pytest.mark.second
def test_lm_evals_own_model_scores_the_export_alike(run) -> None:
    """Compare our model with `hf` on the exported folder, through lm-eval's own encoding."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
    from lm_eval.models.huggingface import HFLM

    folder, _ = run
    if not (folder / "exported").exists():
        assert export_checkpoint(Export(folder / "run", folder / "exported")) == 0
    ours = lm_eval_class().create_from_arg_string(f"load={folder / 'run'},batch_size=4")
    theirs = HFLM(pretrained=str(folder / "exported"), dtype="float32", device="cpu", batch_size=4)
    pairs = [(i["context"], f" {text}") for i in ITEMS[:4] for text in i["choices"]]
    pairs += [(i["context"], f" {i['continuation']}") for i in ITEMS[4:6]]
    requests, texts = (
        [SimpleNamespace(args=args) for args in each] for each in (pairs, [(i["text"],) for i in ITEMS[6:]])
    )
    for (a, b), (c, d) in zip(ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True):
        assert abs(a - c) < NEAR * abs(c) and b == d
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), rel=NEAR)
