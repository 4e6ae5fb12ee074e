"""--packing best-fit: every token once, whole documents, as full as a plain best fit, and no sample that depends on
anything but (corpus, split, sequence length, seed, number)."""

from bisect import bisect_left, insort
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero.data import epochs, packing
from megazero.data.blending import BlendedDataset
from megazero.data.corpora import open_datasets
from megazero.data.loader import Batches
from megazero.data.packing import PackedDataset, best_fit, pack_documents
from megazero.data.samples import NO_TOKEN, Sample, WholeSplit
from megazero.flags.batch_ramp import BatchSizes
from tests.helpers.table import for_each
from tests.unit.data_helpers import numbered_documents, write_corpus

ALL = "1,0,0"
GOLDEN = [[260, 261, 262, 263, -1], [190, 191, 192, 193, 194], [40, 41, 42, 43, 44]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(epochs.tempfile, "gettempdir", lambda: str(tmp_path / "system"))
    monkeypatch.setattr(epochs, "CACHED_BYTES", 0)


def plain_best_fit(lengths: list[int], room: int) -> list[int]:
    """Bin of each item, longest first: the least space that is enough, of equals the one that has had it longest."""
    spaces: list[tuple[int, int, int]] = []  # (space, time of its last item, bin), in order
    found = []
    for time, length in enumerate(lengths):
        at = bisect_left(spaces, (length, -1, -1))
        space, _, chosen = spaces.pop(at) if at < len(spaces) else (room, 0, len(set(found)))
        insort(spaces, (space - length, time, chosen))
        found.append(chosen)
    return found


@for_each(("seed", "count", "room"), [(0, 0, 9), (1, 1, 5), (2, 300, 9), (3, 700, 64), (4, 2000, 200), (5, 400, 2049)])
def test_groups_are_filled_as_a_loop_over_documents_fills_bins(seed: int, count: int, room: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = np.sort(draw.lognormal(np.log(room) - 1.5, 1.0, count).astype(np.int64).clip(1, room))[::-1].copy()
    assert best_fit(lengths, room).tolist() == plain_best_fit(lengths.tolist(), room)


def test_windows_are_packed_one_after_another() -> None:
    """Each document is in one sample. Small windows need hardly more samples."""
    lengths = np.random.default_rng(0).integers(0, 70, 500).astype(np.int32)
    found = {window: pack_documents(lengths, 33, np.random.PCG64(1).random_raw, window) for window in (500, 499, 60)}
    for window, each in found.items():
        rests = packing.rest(lengths.astype(np.int64), 33)
        assert sorted(each.documents.tolist()) == np.flatnonzero(rests > 1).tolist()
        sums = np.add.reduceat(rests[each.documents], each.firsts[:-1])
        assert sums.max() <= 33 and sums.sum() == rests[rests > 1].sum() and each.firsts[-1] == each.documents.size
        assert each.filling.samples == each.num_samples <= found[500].num_samples + 2 * (500 // window)
    assert found[60].documents.tolist() != found[500].documents.tolist()


def opened(tmp_path: Path, documents: list[list[int]], length: int = 8, **options: Any) -> PackedDataset:
    (tmp_path / "corpora").mkdir(exist_ok=True)
    prefix, bounds = tmp_path / "corpora" / "c", options.pop("bounds", None)
    if not Path(f"{prefix}.idx").exists():
        write_corpus(prefix, documents, bounds)
    return PackedDataset(prefix, options.pop("split", ALL), options.pop("name", "train"), length, 3, **options)


def parts_of(sample: Sample) -> list[list[int]]:
    """The documents, or pieces of one, in a sample; checks boundaries, targets and padding."""
    assert sample.starts is not None and sample.counts is not None
    held = int((sample.ids != NO_TOKEN).sum())
    assert (sample.ids[held:] == NO_TOKEN).all()
    firsts = [*dict.fromkeys(sample.starts[: min(held, sample.starts.size)].tolist()), held]
    parts = [sample.ids[a:b].tolist() for a, b in pairwise(firsts)]
    counts = [flag for part in parts for flag in [True] * (len(part) - 1) + [False]]
    length = sample.starts.size
    assert sample.counts.tolist() == (counts + [False] * length)[:length]
    assert (sample.starts[held:] == held).all()  # padding is a document of its own
    return parts


@for_each("length", [1, 2, 7, 8, 40])
def test_every_token_but_a_documents_first_is_a_target_once_per_epoch(tmp_path: Path, length: int) -> None:
    documents = numbered_documents(60, low=0, high=30)
    dataset = opened(tmp_path, documents, length)
    wanted = Counter(token for document in documents for token in document[1:])
    orders = []
    for epoch in range(2):
        numbers = range(epoch * dataset.num_samples, (epoch + 1) * dataset.num_samples)
        parts = [part for i in numbers for part in parts_of(dataset[i])]
        assert Counter(token for part in parts for token in part[1:]) == wanted
        if epoch == 0:
            whole = [document for document in documents if 1 < len(document) <= length + 1]
            assert [document for document in whole if document not in parts] == []  # none of these is cut
            filling = dataset.packing.filling
            assert filling.targets == sum(wanted.values()) and filling.tokens == sum(map(len, parts))
            assert filling.cut == sum(len(document) > length + 1 for document in documents)
            assert filling.room == (length + 1) * dataset.num_samples
        orders.append([dataset[i].ids.tolist() for i in numbers])
    assert sorted(orders[0]) == sorted(orders[1]) and (length == 40 or orders[0] != orders[1])
    once = WholeSplit(dataset)
    assert sorted(once[i].ids.tolist() for i in range(len(once))) == sorted(orders[0])
    assert (once[len(once)].ids == NO_TOKEN).all() and dataset[10**15].ids.shape == (length + 1,)


def test_samples_are_a_function_of_corpus_split_length_and_seed(tmp_path: Path, monkeypatch) -> None:
    """The very numbers: a change here changes every run that is resumed. Neither access nor cache matters."""
    documents = [list(range(10 * k, 10 * k + 3 + k % 5)) for k in range(30)]
    dataset = opened(tmp_path, documents, 4, split="9,1")
    assert [dataset[i].ids.tolist() for i in (0, 1, 100)] == GOLDEN
    expected = [dataset[i].ids.tolist() for i in range(90)]
    with monkeypatch.context() as patch:
        patch.setattr(packing, "pack_documents", None)
        mapped = opened(tmp_path, documents, 4, split="9,1")
        assert [mapped[i].ids.tolist() for i in reversed(range(90))] == expected[::-1]
    for change in ({"length": 5}, {"split": "8,2"}, {"name": "validation"}):
        other = opened(tmp_path, documents, **{"length": 4, "split": "9,1", **change})
        assert [other[i].ids.tolist() for i in range(20)] != expected[:20], change


def test_a_damaged_table_is_made_again(tmp_path: Path) -> None:
    documents = numbered_documents(40, high=20)
    expected = [opened(tmp_path, documents)[i].ids.tolist() for i in range(20)]
    (path,) = (tmp_path / "corpora" / "c_index_cache").glob("packing-*.npy")
    good = path.read_bytes()
    for damage in (good[:-8], b"", good[:128], good[:128] + bytes(range(100, 132)) + good[160:], good + b"more"):
        path.write_bytes(damage)
        assert [opened(tmp_path, documents)[i].ids.tolist() for i in range(20)] == expected
        assert path.read_bytes() == good


def test_a_table_of_another_corpus_is_an_error(tmp_path: Path) -> None:
    dataset = opened(tmp_path, [[k] * 4 for k in range(9)])
    dataset._packing = dataset._packing._replace(firsts=np.array([0, 9]), full=np.empty(0, np.int64))
    with pytest.raises(ValueError, match=r"no place for 4 of document \d behind 8 others, .* delete .*c_index_cache"):
        dataset.in_order(0)


def test_documents_of_several_sequences_and_a_split_by_tokens(tmp_path: Path) -> None:
    sequences = [[0, 1], [2], [3, 4, 5], [6], [7, 8]]
    (tmp_path / "a").mkdir()
    several = opened(tmp_path / "a", sequences, 5, bounds=[0, 0, 2, 2, 3, 3, 3, 5, 5])
    assert sorted(part for i in range(several.num_samples) for part in parts_of(several[i])) == [
        [0, 1, 2], [3, 4, 5], [6, 7, 8],
    ]  # fmt: skip
    cut = opened(tmp_path, [list(range(50)), list(range(50, 100))], 10, split="7,3", split_by="tokens")
    tokens = {token for i in range(cut.num_samples) for part in parts_of(cut[i]) for token in part}
    assert tokens == set(range(70))


def test_a_split_without_targets_is_refused(tmp_path: Path) -> None:
    words = r"^--data-path .*c: no document of its train split .* has two tokens.*--packing best-fit.*3 tokens in 5"
    prefix = str(write_corpus(tmp_path / "c", [[1], [], [2], [], [3]]))
    for act in (
        lambda: PackedDataset(prefix, ALL, "train", 4, 1)[0],
        lambda: open_datasets((prefix,), ALL, 4, 1, None, packing="best-fit"),
    ):
        with pytest.raises(ValueError, match=words):
            act()
    small = opened(tmp_path, [[], [7, 8], []], 6)  # less than a sample, and no document per token
    assert small.num_samples == 1 and parts_of(small[5]) == [[7, 8]]


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    dataset = opened(tmp_path, [[1, 2, 3], [4, 300, 5]], vocab_size=300)
    with pytest.raises(ValueError, match=r"sample \d of train holds token id 300, outside the vocabulary of 300"):
        [dataset[i] for i in range(dataset.num_samples)]


def test_batches_have_the_documents_without_an_end_token(tmp_path: Path) -> None:
    """A blend, read by two ranks: masks and boundaries are the samples', with --eod-mask-loss on top."""
    one = write_corpus(tmp_path / "one", [[7, 1, 2], [3, 7, 4, 5]])
    two = write_corpus(tmp_path / "two", [[10, 11], [12, 13, 14]])
    data = open_datasets(("3", str(one), "1", str(two)), ALL, 8, 1, 20, packing="best-fit")
    assert isinstance(data.train, BlendedDataset) and data.notes()[0].startswith(
        "--packing best-fit: 2 samples per epoch, 33.33% padding; 0 documents longer than a sample are cut; attention"
    )
    rows = []
    for rank in range(2):
        batches = Batches(data.train, 8, BatchSizes(4), 2, rank, 2, eod=7, document_end=7)
        rows += batches.batch(0)
    ids, mask, starts = (np.concatenate([getattr(b, name).numpy() for b in rows]) for name in
                         ("ids", "loss_mask", "document_starts"))  # fmt: skip
    assert ids.tolist() == [[3, 7, 4, 5, 7, 1, 2, 0], [12, 13, 14, 10, 11, 0, 0, 0], *[[3, 7, 4, 5, 7, 1, 2, 0]] * 2]
    assert mask.tolist() == [[1, 0, 1, 0, 0, 1, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0], *[[1, 0, 1, 0, 0, 1, 0, 0]] * 2]
    assert starts.tolist() == [[0] * 4 + [4] * 3 + [7], [0] * 3 + [3] * 2 + [5] * 3, *[[0] * 4 + [4] * 3 + [7]] * 2]
    ahead = rows[0].ahead(1)
    assert ahead.loss_mask[0].tolist() == [0, 1, 0, 0, 1, 0, 0, 0]  # the target after the next, in the same document
