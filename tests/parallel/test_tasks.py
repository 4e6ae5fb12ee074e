"""Log-likelihoods of requests are those of plain PyTorch, in every layout."""

import contextlib
import io
import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from megazero.data.task_files import read_tasks
from megazero.data.task_requests import PackedRequests, Pair, TaskRequests, encode_tasks
from megazero.data.tokenizer import load_tokenizer
from megazero.engine.mesh.collectives import Axis
from megazero.flags.config import CheckpointConfig, Config, EvaluationConfig, LogConfig
from megazero.generation.target_scores import _likeliest
from megazero.run.stopping import Wish
from megazero.run.task_scores import TaskScorer
from tests import reference
from tests.helpers.families import of_family
from tests.helpers.rings import by_default
from tests.parallel.cases import MODEL, Case, new_engine
from tests.parallel.runs import configured, names, quietly, run_of, write_corpus

# The byte tokenizer's vocabulary, and weights that make other logits in every place.
BYTES = replace(MODEL, vocab_size=257, num_layers=4, init_method_std=0.3)
LLAMA = replace(BYTES, **of_family("llama"), num_query_groups=2)
EXPERTS = replace(LLAMA, num_experts=4, moe_ffn_hidden_size=24)
MULTIPLE = replace(BYTES, mtp_num_layers=1)
ITEMS = [
    {"kind": "choice", "task": "a", "context": "To be", "choices": ["or", "not to", "be", "x"], "answer": 1},
    {"kind": "choice", "task": "a", "context": "", "choices": ["1", "22"], "answer": 0, "delimiter": ""},
    {"kind": "text", "task": "c", "text": "It is a text of more than three windows.", "domain": "d"},
    {"kind": "text", "task": "c", "text": "Straße"},
    *({"kind": "cloze", "task": "b", "context": "x" * n, "continuation": "y" * (1 + n % 3)} for n in range(13)),
]
COUNT = 4 + 2 + 4 + 1 + 13


class Expected(NamedTuple):
    requests: TaskRequests
    nats: list[float]
    missed: list[float]


def expected(case: Case, path: Path) -> Expected:
    """Compute every request by a forward of its own. The continuation of the last six is the model's likeliest."""
    path.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    requests = encode_tasks(read_tasks([str(path)]), load_tokenizer("byte")).requests(BYTES.seq_length)
    config, pairs, nats, missed = case.config(), list(requests.pairs), [], []
    weights = reference.initial_weights(config)
    for number, (context, continuation) in enumerate(pairs):
        likeliest, ids = number >= COUNT - 6, [*context, *continuation]
        for at in range(len(context), len(ids)):
            with torch.no_grad():
                logits = reference.forward(config, weights, torch.tensor([ids[:at]]))[0, -1]
            if likeliest:
                ids[at] = int(logits.argmax())
            nats.append(-float(logits.log_softmax(-1)[ids[at]]))
            missed.append(float(logits.argmax() != ids[at]))
        pairs[number] = Pair(context, ids[len(context) :])
        tokens = len(continuation)
        nats[-tokens:], missed[-tokens:] = [sum(nats[-tokens:])], [sum(missed[-tokens:])]
    assert len(nats) == COUNT and missed[-6:] == [0.0] * 6 and all(missed[:-6])
    return Expected(requests._replace(pairs=tuple(pairs)), nats, missed)


def scored(rank: int, case: Case, requests: TaskRequests, packs: bool) -> tuple[list[float], list[float]]:
    """Without packing, no kernel may see documents."""
    packed, engine = PackedRequests(requests, case.model.seq_length, packs), new_engine(rank, case)
    upload, given = engine._upload, []

    def spied(*arguments: Any, **options: Any) -> Any:
        uploaded = upload(*arguments, **options)
        given.extend(each.tokens.attention_documents for each in uploaded.micro_batches)
        return uploaded

    engine._upload = spied  # type: ignore[method-assign]
    found = TaskScorer(case.config(), engine, packed).request_scores()
    assert any(documents is not None for documents in given) == packs
    return found


@pytest.mark.parametrize(
    ("case", "packs"),
    by_default(
        [
            (Case(model=BYTES, precision="fp64", loss_chunk=3), True),
            (Case(dp=2, zero=3, model=BYTES, precision="fp64", batch=3, micro_batch_size=1), True),  # unequal
            (Case(tp=2, model=BYTES, precision="fp64", loss_chunk=5), True),
            (Case(cp=2, batch=4, model=BYTES, precision="fp64"), True),
            (Case(pp=2, model=LLAMA, precision="fp64"), True),
            (Case(pp=2, dp=2, zero=1, model=LLAMA, precision="fp64", batch=5, micro_batch_size=1), True),
            (Case(model=BYTES, precision="fp64"), False),
            (Case(tp=2, cp=2, sp=True, zero=3, exchange="ring", model=LLAMA, precision="fp64"), True),
            (Case(pp=2, schedule="zero-bubble-v", chunks=2, recompute="full", model=BYTES, precision="fp64"), True),
            (Case(dp=2, ep=2, zero=3, model=EXPERTS, precision="fp64"), True),
            (Case(pp=2, cp=2, ep=2, batch=4, recompute="full", model=EXPERTS, precision="fp64"), True),
            (Case(tp=2, model=MULTIPLE, precision="fp64"), True),
        ],
        *(1, 2, 3),
    ),
    ids=str,
)
def test_every_layout_scores_every_request(case: Case, packs: bool, ranks, tmp_path: Path) -> None:
    wanted = expected(case, tmp_path / "items.jsonl")
    for nats, missed in ranks(case.world).run(scored, case, wanted.requests, packs):
        assert len(nats) == COUNT and max(abs(a - b) for a, b in zip(nats, wanted.nats, strict=True)) < 1e-10
        assert missed == wanted.missed


def test_padding_is_never_the_likeliest_token() -> None:
    """Its logits are 0, above those of all tokens here."""
    logits = torch.tensor([[-3.0, -1.0, -2.0, 0.0, 0.0], [-5.0, -7.0, -4.0, 0.0, 0.0]])
    context = SimpleNamespace(tp=Axis("tp", [0], 0))
    table: Any = SimpleNamespace(context=context, num_rows=3, first_row=10, vocab_size=13)
    assert _likeliest(table, logits).tolist() == [11, 12]


# -- requests to stop


class Stops(NamedTuple):
    wish: Wish | None
    batches: int  # of tasks
    output: str
    iterations: list[int]
    scored: bool


def stopped(rank: int, world: int, config: Config, requests: TaskRequests) -> Stops:
    """The last rank sees a signal in the first global batch of tasks."""
    run, calls = run_of(rank, world, config), []
    run.trainer.tasks = tasks = TaskScorer(run.config, run.trainer.engine, PackedRequests(requests, 8))
    score, writers, records = tasks.target_scores, run._open_writers, []

    def signalled(batches: Any) -> Any:
        calls.append(batches)
        if rank == world - 1:
            run.wishes.signals.noted = signal.SIGUSR1
        return score(batches)

    def kept(events: Any) -> Any:
        found = writers(events)
        write = found.write
        found.write = lambda record: (records.append(record), write(record))  # type: ignore[assignment]
        return found

    tasks.target_scores, run._open_writers = signalled, kept  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        wish = run.evaluate() if config.evaluation.eval_only else run.train()
    iterations, scored = [record["iteration"] for record in records], any("task_acc" in record for record in records)
    return Stops(wish, len(calls), output.getvalue(), iterations, scored)


def test_scores_of_tasks_end_when_a_rank_is_asked_to_stop(ranks, tmp_path: Path) -> None:
    """A run is saved and stops after its iteration, without scores; --eval-only has no result."""
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    path = str(tmp_path / "items.jsonl")
    requests = encode_tasks(read_tasks([path]), load_tokenizer("byte")).requests(8)
    config = configured(write_corpus(tmp_path / "corpus"), tmp_path / "saved", 3)
    config = replace(config, evaluation=EvaluationConfig(tasks=(path,), task_interval=1))
    first, second = ranks(2).run(stopped, 2, config, requests)
    samples = len(PackedRequests(requests, 8))
    words = f"stopped by SIGUSR1 after {4 / samples:.0%} of the tasks: no result"
    assert (
        samples > 8
        and f"scores of tasks after iteration 1 {words}" in first.output
        and "stopped after iteration 1 by SIGUSR1: saved" in first.output
    )
    expected = Stops(Wish.STOP_SIGUSR1, 1, first.output, [1], False)
    assert first == expected and second == expected._replace(output=second.output)
    assert names(tmp_path / "saved") == [1]
    only = EvaluationConfig(tasks=(path,), eval_only=True, eval_iters=1, eval_split="train")
    alone = replace(config, checkpoint=CheckpointConfig(load=str(tmp_path / "saved")), evaluation=only)
    found = stopped(0, 1, alone, requests)
    assert found == Stops(Wish.STOP_SIGUSR1, 1, found.output, [], False)
    assert words in found.output


def test_metrics_are_written_before_the_results_of_items(tmp_path: Path) -> None:
    """A folder is where tasks.jsonl should be."""
    path, log_dir = tmp_path / "items.jsonl", tmp_path / "log"
    path.write_text(json.dumps(ITEMS[0]))
    (log_dir / "tasks.jsonl").mkdir(parents=True)
    requests = encode_tasks(read_tasks([str(path)]), load_tokenizer("byte")).requests(8)
    config = configured(write_corpus(tmp_path / "corpus"), tmp_path / "saved", 1)
    quietly(run_of(0, 1, config))
    config = replace(
        config,
        checkpoint=CheckpointConfig(load=str(tmp_path / "saved")),
        evaluation=EvaluationConfig(tasks=(str(path),), eval_only=True, eval_iters=1, eval_split="train"),
        log=LogConfig(log_dir=str(log_dir), report=False),
    )
    run = run_of(0, 1, config)
    run.trainer.tasks = TaskScorer(run.config, run.trainer.engine, PackedRequests(requests, 8))
    with pytest.raises(ValueError, match=f"^--log-dir {log_dir}: "), contextlib.redirect_stdout(io.StringIO()):
        run.evaluate()
    (record,) = map(json.loads, (log_dir / "metrics.jsonl").read_text().splitlines())
    assert record["iteration"] == 1 and "a" in record["task_acc"]
