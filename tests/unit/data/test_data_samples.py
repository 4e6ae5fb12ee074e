"""Tokens of sample i: coverage, order, splits, the cache, and every refusal."""

import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero.data import corpora, epochs, indexed, samples
from megazero.data.corpora import mock_datasets, open_datasets
from megazero.data.indexed import IndexedDataset
from megazero.data.samples import NO_TOKEN, SPLITS, GPTDataset, WholeSplit, split_ranges, splits_by_tokens
from tests.helpers.table import for_each
from tests.unit.data_helpers import numbered_documents, write_corpus

ALL = "1,0,0"
GOLDEN = [[201, 202, 10, 11, 12], [212, 213, 260, 261, 262], [72, 73, 74, 260, 261]]


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch) -> None:
    """The second-best place of the cache is under the system's: keep the tests out of it."""
    monkeypatch.setattr(epochs.tempfile, "gettempdir", lambda: str(tmp_path / "system"))
    monkeypatch.setattr(epochs, "CACHED_BYTES", 0)


def stream_of(dataset: GPTDataset, num_samples: int) -> list[int]:
    """The stream, put together again from shuffled samples by the token that neighbours share."""
    parts = [dataset[i].ids.tolist() for i in range(num_samples)]
    position = {index: k for k, index in enumerate(stream_numbers(dataset, num_samples))}
    ordered = [parts[position[k]] for k in range(num_samples)]
    for left, right in pairwise(ordered):
        assert left[-1] == right[0]
    return [token for part in ordered for token in part[:-1]]


def stream_numbers(dataset: GPTDataset, num_samples: int) -> Iterator[int]:
    """Number in the stream of samples 0, 1, ...; checks that every epoch is shuffled within itself."""
    size, epoch = dataset.seq_length, 0
    done = 0
    while done < num_samples:
        first = -(-epoch * dataset.num_tokens // size)
        stop = -(-(epoch + 1) * dataset.num_tokens // size)
        shuffle = dataset._table(epoch).shuffle
        assert sorted(shuffle.tolist()) == list(range(stop - first))
        yield from (first + shuffle).tolist()
        done, epoch = stop, epoch + 1


@for_each(("num_documents", "size"), [(50, 7), (50, 1), (9, 40), (1, 3), (200, 64)])
def test_every_token_of_an_epoch_is_an_input_exactly_once(tmp_path: Path, num_documents: int, size: int) -> None:
    documents = numbered_documents(num_documents, low=5, high=15)
    dataset = GPTDataset(write_corpus(tmp_path / "c", documents), ALL, "train", size, seed=1)
    total = dataset.num_tokens
    assert total == sum(map(len, documents)) and dataset.num_documents == num_documents
    num_samples = -(-3 * total // size)  # those that begin in three epochs
    stream = stream_of(dataset, num_samples)
    for epoch in range(3):
        tokens = stream[epoch * total : (epoch + 1) * total]
        assert sorted(tokens) == list(range(total))
        # Documents stay whole and in order: each begins where it should and runs on.
        starts = {document[0]: document for document in documents}
        at = 0
        while at < total:
            document = starts[tokens[at]]
            assert tokens[at : at + len(document)] == document
            at += len(document)


def test_epochs_differ_and_documents_are_shuffled(tmp_path: Path) -> None:
    dataset = GPTDataset(write_corpus(tmp_path / "c", numbered_documents(50)), ALL, "train", 4, seed=1)
    orders = [dataset._table(epoch).order.tolist() for epoch in range(3)]
    assert len({tuple(order) for order in [*orders, list(range(50))]}) == 4
    shuffles = [dataset._table(epoch).shuffle.tolist() for epoch in range(2)]
    assert shuffles[0] != sorted(shuffles[0]) and shuffles[0] != shuffles[1]


def test_empty_documents_and_documents_of_several_sequences(tmp_path: Path) -> None:
    sequences = [[0, 1], [2], [3, 4, 5], [6], [7, 8]]
    prefix = write_corpus(tmp_path / "c", sequences, documents=[0, 0, 2, 2, 3, 3, 3, 5, 5])
    dataset = GPTDataset(prefix, ALL, "train", 3, seed=1)
    for epoch in range(4):
        tokens = [token for i in range(3) for token in dataset._stream(9 * epoch + 3 * i, 3)[0].tolist()]
        assert sorted(tokens) == list(range(9))
        for whole in ([0, 1, 2], [3, 4, 5], [6, 7, 8]):
            at = tokens.index(whole[0])
            assert tokens[at : at + 3] == whole


def test_order_is_a_function_of_corpus_split_length_and_seed(tmp_path: Path) -> None:
    """The very numbers: a change here changes every run that is resumed."""
    documents = [list(range(10 * k, 10 * k + 3 + k % 5)) for k in range(30)]
    dataset = GPTDataset(write_corpus(tmp_path / "c", documents), "9,1", "train", 4, seed=1234)
    assert [dataset[i].ids.tolist() for i in (0, 1, 100)] == GOLDEN


def test_order_depends_on_neither_access_nor_path_nor_cache(tmp_path: Path) -> None:
    documents = numbered_documents(40)
    prefix = write_corpus(tmp_path / "c", documents)
    expected = [GPTDataset(prefix, "8,2", "train", 6, seed=3)[i].ids.tolist() for i in range(120)]
    (tmp_path / "elsewhere").mkdir()
    moved = write_corpus(tmp_path / "elsewhere" / "d", documents)
    backwards = GPTDataset(moved, "8,2", "train", 6, seed=3)  # without a cache
    assert [backwards[i].ids.tolist() for i in reversed(range(120))] == expected[::-1]
    cached = GPTDataset(prefix, "80,20,0", "train", 6, seed=3)
    jumps = np.random.default_rng(0).permutation(120).tolist()
    assert [cached[i].ids.tolist() for i in jumps] == [expected[i] for i in jumps]


@for_each("change", ["seed", "split", "corpus", "name"])
def test_order_differs_otherwise(tmp_path: Path, change: str) -> None:
    prefix = write_corpus(tmp_path / "c", numbered_documents(60))
    first = GPTDataset(prefix, "1,1", "train", 4, seed=1)
    split, name, seed = "1,1", "train", 1
    if change == "seed":
        seed = 2
    elif change == "split":
        split = "2,1"
    elif change == "name":
        name = "validation"
    else:
        prefix = write_corpus(tmp_path / "d", numbered_documents(60, seed=1))
    other = GPTDataset(prefix, split, name, 4, seed=seed)
    assert not np.array_equal(first._table(0).shuffle[:20], other._table(0).shuffle[:20])
    assert not np.array_equal(first._table(0).order[:20], other._table(0).order[:20] - other._key.first_document)


def cache_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "c_index_cache").glob("*.npy"))


@for_each("damage", ["truncated", "empty", "pickle", "other"])
def test_damaged_cache_is_computed_again(tmp_path: Path, damage: str) -> None:
    prefix = write_corpus(tmp_path / "c", numbered_documents(40))
    expected = [GPTDataset(prefix, ALL, "train", 6, seed=3)[i].ids.tolist() for i in range(20)]
    (path,) = cache_files(tmp_path)
    good = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(good[:-8])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "pickle":
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    else:
        np.save(path, np.zeros(3))
    assert [GPTDataset(prefix, ALL, "train", 6, seed=3)[i].ids.tolist() for i in range(20)] == expected
    assert cache_files(tmp_path) == [path] and path.read_bytes() == good


def test_cache_is_not_mistaken_for_that_of_another_split_or_an_older_corpus(tmp_path: Path) -> None:
    for turn in range(2):  # the second time, other tokens bear the name
        documents = [[10 * k] * (2 + (k + turn) % 2) for k in range(40)]
        prefix = write_corpus(tmp_path / "c", documents)
        for name, own in (("train", documents[:20]), ("validation", documents[20:])):
            dataset = GPTDataset(prefix, "1,1", name, 5, seed=1)
            tokens = dataset._stream(0, dataset.num_tokens)[0].tolist()
            assert sorted(tokens) == sorted(token for document in own for token in document)


@for_each("split_by", ["documents", "tokens"])
def test_a_table_of_a_corpus_that_differs_in_the_middle_alone_is_not_used(
    tmp_path: Path, split_by: str, monkeypatch
) -> None:
    """The fingerprint reads both ends of the index: the same, with as many documents and tokens in both corpora."""
    monkeypatch.setattr(indexed, "HASHED_BYTES", 50)
    lengths = [3, 2, 5, 4, 1, 6, 2, 8, 3, 3, 2, 2]
    names, made, expected = [], [], []
    turns = (lengths, [*lengths[:4], 6, 1, *lengths[6:]])
    for turn in turns:
        documents = [[100 * k + place for place in range(length)] for k, length in enumerate(turn)]
        for folder, kept in (("used", made), (f"new{len(names)}", expected)):
            (tmp_path / folder).mkdir(exist_ok=True)
            prefix = write_corpus(tmp_path / folder / "c", documents)
            later = time.time_ns() + turns.index(turn) * 10**9  # file systems count time in steps
            os.utime(f"{prefix}.idx", ns=(later, later))
            dataset = GPTDataset(prefix, ALL, "train", 4, seed=3, split_by=split_by)
            kept.append([dataset[i].ids.tolist() for i in range(9)])
        names.append(dataset._key.name(0))
    assert names[0] == names[1] and made == expected and made[0] != made[1]


@pytest.mark.timeout(30)
def test_a_table_that_ends_before_its_epoch_is_an_error_not_a_hang(tmp_path: Path) -> None:
    dataset = GPTDataset(write_corpus(tmp_path / "c", [[k] * 3 for k in range(10)]), ALL, "train", 4, seed=1)
    dataset._tables[0] = dataset._table(0)._replace(starts=dataset._table(0).starts // 2)
    with pytest.raises(ValueError, match=r"no document of epoch 0 holds its token 28, .* delete .*c_index_cache"):
        dataset._stream(28, 5)


def test_cache_is_used(tmp_path: Path, monkeypatch) -> None:
    prefix = write_corpus(tmp_path / "c", numbered_documents(40))
    expected = GPTDataset(prefix, ALL, "train", 6, seed=3)[0].ids.tolist()
    monkeypatch.setattr(epochs, "build_table", None)
    table = GPTDataset(prefix, ALL, "train", 6, seed=3)._table(0)
    assert GPTDataset(prefix, ALL, "train", 6, seed=3)[0].ids.tolist() == expected
    base = table.order
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert not isinstance(base, np.ndarray) or isinstance(base, np.memmap)  # mapped, not read into memory


@pytest.mark.parametrize("second", [True, False])
def test_unwritable_cache(tmp_path: Path, second: bool) -> None:
    prefix = write_corpus(tmp_path / "c", numbered_documents(40))
    (tmp_path / "c_index_cache").write_text("in the way: root may write anywhere else")
    if not second:
        (tmp_path / "system").write_text("in the way")
    dataset = GPTDataset(prefix, ALL, "train", 6, seed=3)
    moved = GPTDataset(write_corpus(tmp_path / "d", numbered_documents(40)), ALL, "train", 6, seed=3)
    assert [dataset[i].ids.tolist() for i in range(50)] == [moved[i].ids.tolist() for i in range(50)]
    if second:
        assert len(list((tmp_path / "system").rglob("*.npy"))) > 0


def test_no_temporary_files_stay_in_the_cache(tmp_path: Path, monkeypatch) -> None:
    prefix = write_corpus(tmp_path / "c", numbered_documents(40))

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    assert GPTDataset(prefix, ALL, "train", 6, seed=3)[0].ids.size == 7
    assert cache_files(tmp_path) == []


@for_each(
    ("split", "count", "expected"),
    [
        ("969,30,1", 1000, [(0, 969), (969, 999), (999, 1000)]),
        ("969,30,1", 100, [(0, 97), (97, 100), (100, 100)]),
        ("969,30,1", 1, [(0, 1), (1, 1), (1, 1)]),
        ("0.9,0.1", 10, [(0, 9), (9, 10), (10, 10)]),
        ("1", 7, [(0, 7), (7, 7), (7, 7)]),
        ("0,1,0", 7, [(0, 0), (0, 7), (7, 7)]),
        ("1,1,1", 10, [(0, 3), (3, 7), (7, 10)]),
        ("1,1", 5, [(0, 2), (2, 5), (5, 5)]),  # Megatron rounds with Python's round: halves to even
        ("1,1,1", 10**14, [(0, 33333333333333), (33333333333333, 66666666666667), (66666666666667, 10**14)]),
    ],
)
def test_split_ranges(split: str, count: int, expected: list[tuple[int, int]]) -> None:
    assert split_ranges(split, count) == dict(zip(("train", "validation", "test"), expected, strict=True))


@for_each("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan", "inf,1", "1,,2"])
def test_bad_split(split: str) -> None:
    with pytest.raises(ValueError, match=f"--split {split}: expected"):
        split_ranges(split, 10)


def test_splits_hold_their_own_documents(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", numbered_documents(100))
    data = open_datasets((str(prefix),), "60,30,10", 4, 1, None)
    seen = [
        set(np.concatenate([part[i].ids for i in range(part.num_tokens // 4)]).tolist())
        for part in (data.train, data.validation, data.test)
    ]
    assert not seen[0] & seen[1] and not seen[1] & seen[2] and not seen[0] & seen[2]
    assert [part.num_documents for part in (data.train, data.validation, data.test)] == [60, 30, 10]


def tokens_of(part: GPTDataset) -> list[int]:
    """All tokens of a split, sorted, from as many samples as one epoch of the stream has."""
    whole = WholeSplit(part)
    return sorted(t for i in range(len(whole)) for t in whole[i].ids[i > 0 :].tolist() if t != NO_TOKEN)


def test_an_evaluation_that_repeats_samples_is_noted(tmp_path: Path) -> None:
    """103 samples: 26 global batches of 4 cover them, the last sample again to fill the last batch."""
    one = str(write_corpus(tmp_path / "one", [list(range(1000))]))
    data = open_datasets((one,), "587,413,0", 4, 1, None, needed=("train", "validation"))
    assert len(WholeSplit(data.validation)) == 103 and data.train_tokens == 587
    note = data.repeats("validation", 27, 4)
    assert "validation split holds 103 samples: --eval-iters 26 covers it" in note and "--eval-iters 27 " in note
    assert [data.repeats("validation", iters, 4) for iters in (0, 1, 26)] == [""] * 3
    mock = mock_datasets(4, 1, 97)
    assert mock.repeats("validation", 200, 4) == "" and mock.train_tokens == 0


def test_few_documents_are_split_by_tokens(tmp_path: Path) -> None:
    """Training, validation and test share all tokens in order, for any borders of documents; samples are stable."""
    one = str(write_corpus(tmp_path / "one", [list(range(1000))]))
    data = open_datasets((one,), "969,30,1", 8, 1, None, needed=("train", "validation"))
    assert [part.num_tokens for part in (data.train, data.validation, data.test)] == [969, 30, 1]
    assert tokens_of(data.train) == list(range(969)) and tokens_of(data.validation) == list(range(969, 999))
    assert data.split_by_tokens == (one,)
    assert f"validation and test are cut from the end of {one} (1 document), by tokens" in data.notes()[0]
    with pytest.raises(
        ValueError,
        match=r"test split .* holds 1 tokens in 1 of 1 documents.*give --split 98,1,1, or drop --eval-interval$",
    ):
        data.test[0]
    with pytest.raises(ValueError, match=r"train split .*; give --split 99,1,0$"):
        open_datasets((one,), "1,999,0", 8, 1, None)
    with pytest.raises(ValueError, match=r"validation split .*; give --split 80,20,0, or drop --eval-interval$"):
        open_datasets((one,), "1", 150, 1, None, needed=("train", "validation"))
    again = open_datasets((one,), "969,30,1", 8, 1, None).train
    assert [again[i].ids.tolist() for i in range(300)] == [data.train[i].ids.tolist() for i in range(300)]

    # Empty documents, and borders inside, at and between documents.
    documents = [[], [0, 1, 2, 3], [], [4], [5, 6, 7, 8, 9, 10, 11], [], [12, 13, 14, 15], []]
    few = str(write_corpus(tmp_path / "few", documents))
    for split, tokens in (("1,1,1e-9", (8, 8, 0)), ("5,5,6", (5, 5, 6)), ("1,15", (1, 15, 0)), ("0,1,0", (0, 16, 0))):
        parts = [GPTDataset(few, split, name, 3, 1, split_by="tokens") for name in ("train", "validation", "test")]
        assert tuple(part.num_tokens for part in parts) == tokens
        ends = np.cumsum((0, *tokens)).tolist()
        for part, (begin, end) in zip(parts, pairwise(ends), strict=True):
            if part.num_tokens > 3:
                assert tokens_of(part) == list(range(begin, end)), (split, part.split_name)
                epochs_of_stream = stream_of(part, -(-2 * part.num_tokens // 3))[: 2 * part.num_tokens]
                assert sorted(epochs_of_stream) == sorted(2 * list(range(begin, end)))


@for_each("packing", ["split", "best-fit"])
@for_each("split_by", ["auto", "documents", "tokens"])
def test_the_split_that_a_refusal_names_fits(tmp_path: Path, split_by: str, packing: str) -> None:
    """Followed once, the advice is enough; if no split fits, the refusal states it."""
    sizes = (([90], 20), ([9] * 10, 20), ([50, 1, 1, 38], 20), ([90], 50), ([1] * 9, 2), ([20], 9))
    refused = 0
    for number, (lengths, length) in enumerate(sizes):
        prefix = str(write_corpus(tmp_path / str(number), [[7] * each for each in lengths]))
        for needed in (("train",), ("train", "validation"), SPLITS):
            options = {"split": "969,30,1", "split_by": split_by, "seq_length": length, "packing": packing}
            for turn in (1, 2):
                try:
                    open_datasets((prefix,), seed=1, vocab_size=None, needed=needed, **options)
                    break
                except ValueError as error:
                    found = re.search(r"; give --split ([\d,]+\d)(?: --split-by (tokens))?", str(error))
                    if found is None:
                        assert "no --split is enough for " in str(error)
                        refused += 1
                        break
                    assert turn == 1, (lengths, needed, str(error))
                    options |= {"split": found[1], "split_by": found[2] or split_by}
    assert refused


@for_each(
    ("split", "count", "by_tokens"),
    [
        *(
            ("969,30,1", 1, True),
            ("969,30,1", 500, True),
            ("969,30,1", 501, False),
            ("1", 1, False),
            ("1,0,0", 1, False),
        ),
        *(
            ("0.9,0.1", 4, True),
            ("0.9,0.1", 5, False),
            ("1,1", 2, False),
            ("1,1,1e-12", 10**6, True),
            ("0,1,0", 1, False),
        ),
    ],
)
def test_which_corpora_are_split_by_tokens(split: str, count: int, by_tokens: bool) -> None:
    assert splits_by_tokens(split, "auto", count) is by_tokens
    assert splits_by_tokens(split, "tokens", count) and not splits_by_tokens(split, "documents", count)


def test_short_or_empty_split_raises_when_used(tmp_path: Path) -> None:
    prefix = str(write_corpus(tmp_path / "c", [[1, 2, 3], [4, 5]]))
    assert GPTDataset(prefix, ALL, "train", 4, seed=1)[0].ids.size == 5
    short = GPTDataset(prefix, ALL, "train", 5, seed=1)
    words = r"--data-path .*train split.*5 tokens in 2 of 2 documents.*--seq-length 5"
    for act in (short.check, lambda: short[0], lambda: open_datasets((prefix,), ALL, 5, 1, None)):
        with pytest.raises(ValueError, match=words):
            act()
    data = open_datasets((prefix,), ALL, 4, 1, None)
    with pytest.raises(ValueError, match=r"validation split.* 0 tokens in 0 of 2"):
        data.validation[0]
    open_datasets((prefix,), ALL, 4, 1, None)
    with pytest.raises(ValueError, match="validation split"):
        open_datasets((prefix,), ALL, 4, 1, None, needed=("validation",))


def test_ids_outside_the_vocabulary(tmp_path: Path, monkeypatch) -> None:
    prefix = str(write_corpus(tmp_path / "c", [[1, 2, 3, 4, 300, 5, 6, 7]]))
    words = rf"--data-path {prefix}: .*token id 300, outside the vocabulary of 300.*--tokenizer"
    open_datasets((prefix,), ALL, 4, 1, 301)
    with pytest.raises(ValueError, match=words):
        open_datasets((prefix,), ALL, 4, 1, 300)
    with pytest.raises(ValueError, match=words):
        list(map(GPTDataset(prefix, ALL, "train", 4, 1, vocab_size=300).__getitem__, range(2)))
    list(map(GPTDataset(prefix, ALL, "train", 4, 1, vocab_size=301).__getitem__, range(2)))
    negative = str(write_corpus(tmp_path / "n", [[1, 2, 3, 4, -5]], code=4))
    with pytest.raises(ValueError, match="token id -5"):
        open_datasets((negative,), ALL, 4, 1, 300)
    # Only the ends of a large corpus are read; the note next to it has the rest, if it is about these
    # tokens.
    monkeypatch.setattr(corpora, "SCANNED_BYTES", 4)
    open_datasets((prefix,), ALL, 4, 1, 300)
    Path(prefix + ".json").write_text('{"max_id": 300, "num_tokens": 8}')
    with pytest.raises(ValueError, match=words):
        open_datasets((prefix,), ALL, 4, 1, 300)
    Path(prefix + ".json").unlink()
    monkeypatch.setattr(corpora, "SCANNED_BYTES", 8)
    with pytest.raises(ValueError, match=words):
        open_datasets((prefix,), ALL, 4, 1, 300)


def test_validate_names_the_second_corpus(tmp_path: Path) -> None:
    prefix = str(write_corpus(tmp_path / "c", numbered_documents(9)))
    with pytest.raises(ValueError, match=f"--data-path {prefix}2: no file"):
        open_datasets(("1", prefix, "2", prefix + "2"), ALL, 4, 1, None)


def test_far_epochs_are_reached_at_once(tmp_path: Path) -> None:
    dataset = GPTDataset(write_corpus(tmp_path / "c", numbered_documents(10)), ALL, "train", 4, seed=1)
    assert dataset[10**15].ids.shape == (5,) and dataset[0].ids.dtype == np.int64


def test_few_tables_are_kept(tmp_path: Path) -> None:
    dataset = GPTDataset(write_corpus(tmp_path / "c", numbered_documents(10)), ALL, "train", 4, seed=1)
    for i in range(200):
        dataset[i]
    assert len(dataset._tables) == samples.KEPT_EPOCHS


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("cached", [0, 1 << 20], ids=["stored", "computed"])
def test_threads_share_a_dataset(cached: int, impatient: None, tmp_path: Path, monkeypatch) -> None:
    """Read by five threads over the borders of more epochs than are kept, and evaluated by one.

    Meanwhile its files are closed, as they are when many corpora are open.
    """
    monkeypatch.setattr(epochs, "CACHED_BYTES", cached)
    monkeypatch.setattr(indexed, "RESIDENT_BYTES", 0)
    prefix = write_corpus(tmp_path / "c", numbered_documents(20))
    alone, shared = (GPTDataset(prefix, ALL, "train", 4, seed=1) for _ in range(2))
    expected = {i: alone[i].ids.tolist() for i in range(300)}
    whole = [alone.in_order(i).ids.tolist() for i in range(300)]
    orders = [np.random.default_rng(k).permutation(300).tolist() for k in range(3)] + [list(range(300))] * 2
    with ThreadPoolExecutor(6) as pool:
        read = [pool.submit(lambda order=order: {i: shared[i].ids.tolist() for i in order}) for order in orders]
        evaluated = pool.submit(lambda: [shared.in_order(i).ids.tolist() for i in range(300)])
        while not all(each.done() for each in (*read, evaluated)):
            indexed._open.cache_clear()
    assert all(each.result() == expected for each in read) and evaluated.result() == whole


def test_one_thread_computes_a_table_and_the_others_wait(tmp_path: Path, monkeypatch) -> None:
    calls, load = [], epochs.load_table

    def slow(data: Any, key: Any, epoch: int) -> Any:
        calls.append(epoch)
        time.sleep(0.05)
        return load(data, key, epoch)

    monkeypatch.setattr(samples, "load_table", slow)
    dataset = GPTDataset(write_corpus(tmp_path / "c", numbered_documents(10)), ALL, "train", 4, seed=1)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: dataset[0].ids.tolist(), range(8)))
    assert found == [dataset[0].ids.tolist()] * 8 and sorted(calls) == sorted(set(calls))


def test_fingerprint_sees_both_ends(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(indexed, "HASHED_BYTES", 50)
    names = []
    for sequences in ([[1], [2, 3], [4]], [[1, 2], [3], [4]], [[1], [2], [3, 4]], [[1], [2], [3, 4, 5]]):
        names.append(IndexedDataset(write_corpus(tmp_path / "c", sequences)).index_fingerprint)
    assert len(set(names)) == 4
