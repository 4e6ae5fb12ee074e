"""Items of tasks from files, their requests, and the samples that hold the requests."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero.data.samples import NO_TOKEN
from megazero.data.task_files import TaskItems, read_tasks
from megazero.data.task_requests import PackedRequests, Pair, encode_tasks
from megazero.data.tokenizer import load_tokenizer
from tests.helpers.table import for_each
from tests.unit.data_helpers import write_byte_tokenizer

CHOICE = {"kind": "choice", "task": "a", "context": "ab", "choices": ["c", "de", "f"], "answer": 2}
CLOZE = {"kind": "cloze", "task": "b", "context": "ab ", "continuation": "c", "delimiter": ""}
TEXT = {"kind": "text", "task": "c", "text": "0123456789"}
END = 256


def read(folder: Path, *items: object, limit: int = 0) -> TaskItems:
    path = folder / "items.jsonl"
    path.write_text("\n".join(item if isinstance(item, str) else json.dumps(item) for item in items))
    return read_tasks([str(path)], limit)


def ids(text: str) -> list[int]:
    return list(text.encode())


@for_each(
    "item, words",
    [
        ("{", "Input data was truncated; docs/tasks.md has the form of an item"),
        ("[1]", "Expected `object`, got `array`"),
        ({"task": "a"}, "missing required field `kind`"),
        (CHOICE | {"kind": "essay"}, r"Invalid value 'essay' - at `\$.kind`"),
        (CHOICE | {"answer": 3}, "answer 3 of 3 choices, counted from 0; correct it"),
        (CHOICE | {"answer": -1}, r"at `\$.answer`"),
        (CHOICE | {"choices": ["one"]}, r"length >= 2 - at `\$.choices`"),
        (CHOICE | {"choices": ["one", ""]}, r"length >= 1 - at `\$.choices\[1\]`"),
        (CHOICE | {"chioces": []}, "unknown field `chioces`"),
        (CHOICE | {"task": "a b"}, r"at `\$.task`"),
        (CLOZE | {"task": "a"}, "task a has items of another kind; give this one another name"),
    ],
)
def test_a_bad_line_is_named(item: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^--tasks {tmp_path}/items.jsonl, line 2: .*{words}"):
        read(tmp_path, CHOICE, item)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no item; write one per line"):
        read(tmp_path, "", " ")
    with pytest.raises(ValueError, match=f"^--tasks {tmp_path} is a folder, .*; name a file of JSON lines"):
        read_tasks([str(tmp_path)])
    with pytest.raises(ValueError, match=f"^--tasks {tmp_path}/none: No such file"):
        read_tasks([str(tmp_path / "none")])


def test_items_are_in_order_and_limited_by_task(tmp_path: Path) -> None:
    found = read(tmp_path, CHOICE, CLOZE, "", CHOICE | {"answer": 0}, CLOZE, TEXT, limit=1)
    assert [item.task for item in found.items] == ["a", "b", "c"] and found.counts == {"a": 1, "b": 1, "c": 1}
    assert [place.rpartition(" ")[2] for place in found.places] == ["1", "2", "6"]
    assert found.digest == read(tmp_path, CHOICE, CLOZE, "", CHOICE | {"answer": 0}, CLOZE, TEXT).digest
    assert found.digest != read(tmp_path, CHOICE).digest


def test_requests_follow_the_conventions(tmp_path: Path) -> None:
    """Every option has one; white space moves to the continuation; contexts are cut from the left; windows are full."""
    whole = CLOZE | {"context": "", "continuation": "xy"}
    encoded = encode_tasks(read(tmp_path, CHOICE, CLOZE, whole, TEXT), load_tokenizer("byte"))
    assert encoded.requests(100).pairs == (
        *(Pair(ids("ab"), ids(text)) for text in (" c", " de", " f")),
        Pair(ids("ab"), ids(" c")),
        Pair([END], ids("xy")),
        Pair([END], ids("0123456789")),
    )
    short = encoded.requests(4)
    assert short.firsts == (0, 3, 4, 5, 8)
    assert short.pairs[:3] == (Pair(ids("ab"), ids(" c")), Pair(ids("ab"), ids(" de")), Pair(ids("ab"), ids(" f")))
    assert short.pairs[5:] == (
        Pair([END], ids("0123")),
        Pair(ids("3"), ids("4567")),
        Pair(ids("567"), ids("89")),
    )
    assert encoded.requests(3).pairs[:2] == (Pair(ids("ab"), ids(" c")), Pair(ids("b"), ids(" de")))
    with pytest.raises(ValueError, match=r"line 1: a continuation has 3 tokens, more than --seq-length 2; leave"):
        encoded.requests(2)


def test_requests_begin_as_texts_do(tmp_path: Path) -> None:
    """The beginning of a text stands for a missing context, and is in front of others, as in transformers."""
    theirs = write_byte_tokenizer(tmp_path / "t", ["<s>", "</s>"], begins=["<s>"])
    whole = CLOZE | {"context": "", "continuation": "xy"}
    tasks = read(tmp_path, CLOZE, whole, TEXT | {"text": "ab"})
    assert encode_tasks(tasks, load_tokenizer(str(theirs))).requests(100).pairs == (
        Pair([256, 64, 65], [220, 66]),
        Pair([256], [87, 88]),
        Pair([256], [64, 65]),
    )


def test_windows_of_a_long_text_copy_no_more_than_they_keep() -> None:
    text, length = list(range(20_000)), 10
    windows = Pair([END], text).windows(length)
    first = next(windows)  # all tokens are in one list now
    tracemalloc.start()
    try:
        for at, window in enumerate(windows, 1):
            assert window == Pair([at * length - 1], text[at * length : (at + 1) * length])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert first == Pair([END], text[:length]) and at == 1_999
    assert peak < 8 * len(text) / 10


def test_a_continuation_without_a_token_is_refused(tmp_path: Path) -> None:
    class Greedy:
        eod = END

        def encode_texts(self, texts: list[str]) -> list[list[int]]:
            return [[1] for _ in texts]

    with pytest.raises(ValueError, match="line 1: a continuation has no token of its own; begin it with a space"):
        encode_tasks(read(tmp_path, CHOICE), Greedy())  # type: ignore[arg-type]


@for_each("packs", [True, False])
def test_every_request_is_in_one_sample_and_apart_from_others(packs: bool, tmp_path: Path) -> None:
    """A sample with one request is one document, so that kernels without documents compute it."""
    items = [CHOICE, CLOZE, TEXT, *(CLOZE | {"context": "x" * n} for n in range(9))]
    requests = encode_tasks(read(tmp_path, *items), load_tokenizer("byte")).requests(10)
    packed, seen = PackedRequests(requests, 10, packs), set[int]()
    assert len(packed) == (7 if packs else 14)
    for index in range(len(packed)):
        sample, owners = packed[index], packed.owners(index)
        assert sample.ids.shape == (11,) and (sample.starts is not None) == packs and sample.counts is not None
        assert (sample.counts == (owners >= 0)).all()
        starts = sample.starts if sample.starts is not None else np.zeros(10, np.int64)
        for number in set(owners.tolist()) - {-1}:
            places = np.flatnonzero(owners == number)
            (start,) = set(starts[places].tolist())
            context, continuation = requests.pairs[number]
            assert sample.ids[start : places[-1] + 2].tolist() == [*context, *continuation]
            assert places.tolist() == list(range(places[-1] + 1 - len(continuation), places[-1] + 1))
            assert number not in seen
            seen.add(number)
        behind = np.flatnonzero(sample.ids == NO_TOKEN)
        assert not packs or (starts[behind[behind < 10]] == behind.min(initial=11)).all()
    assert seen == set(range(14))
