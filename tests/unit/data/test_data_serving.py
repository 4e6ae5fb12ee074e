"""Corpora opened once, tables computed by one process, blends of thousands, tokenizers distinguished."""

import gc
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megazero.data import corpora, epochs, indexed
from megazero.data.blending import BlendedDataset
from megazero.data.corpora import open_datasets, read_data_args
from megazero.data.fingerprint import fingerprint
from megazero.data.samples import GPTDataset
from megazero.data.tokenizer import load_tokenizer
from megazero.data.writer import IndexedWriter
from tests.helpers.table import for_each
from tests.unit.data_helpers import numbered_documents, write_corpus


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(epochs, "tempfile", SimpleNamespace(gettempdir=lambda: str(tmp_path / "system")))
    monkeypatch.setattr(epochs, "CACHED_BYTES", 0)


def read_at_once(prefix: Path, built: Any, asked: Any, count: int, results: Any) -> None:
    """One of `count` processes that need one table; the first to compute it waits until all have asked."""
    folders, build = epochs._cache_folders, epochs.build_table

    def asking(*arguments):
        with asked.get_lock():
            asked.value += 1
        return list(folders(*arguments))

    def building(*arguments):
        with built.get_lock():
            built.value += 1
        while asked.value < count:
            pass
        return build(*arguments)

    epochs._cache_folders, epochs.build_table = asking, building
    epochs.tempfile, epochs.CACHED_BYTES = SimpleNamespace(gettempdir=lambda: str(prefix.parent / "system")), 0
    dataset = GPTDataset(prefix, "1", "train", 6, seed=3)
    results.put([dataset[i].ids.tolist() for i in range(9)])


def at_once(prefix: Path, count: int) -> tuple[int, list[Any]]:
    """(Number of processes that computed the table, the samples that each of them read.)"""
    context = multiprocessing.get_context("forkserver")  # forking a process with threads can deadlock
    built, asked, results = context.Value("i", 0), context.Value("i", 0), context.Queue()
    arguments = (prefix, built, asked, count, results)
    processes = [context.Process(target=read_at_once, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    read = [results.get() for _ in processes]
    for process in processes:
        process.join(60)
    return built.value, read


@pytest.mark.second
@for_each("place", ["beside", "system"])
def test_one_process_computes_a_table_and_the_others_map_it(tmp_path: Path, place: str) -> None:
    prefix = write_corpus(tmp_path / "c", numbered_documents(60))
    if place == "system":
        (tmp_path / "c_index_cache").write_text("in the way")
    built, read = at_once(prefix, 3)
    assert built == 1 and read == [read[0]] * 3


@pytest.mark.second
def test_where_nothing_can_be_locked_each_computes_its_own(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", numbered_documents(60))
    for name in ("c_index_cache", "system"):
        (tmp_path / name).write_text("in the way")
    built, read = at_once(prefix, 2)
    assert built == 2 and read == [read[0]] * 2


def test_a_computed_table_is_mapped_not_kept(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", numbered_documents(60))
    base: Any = GPTDataset(prefix, "1", "train", 6, seed=3)._table(0).order
    kinds = set()
    while base is not None:
        kinds.add(type(base))
        base = getattr(base, "base", None)
    assert np.memmap in kinds


@for_each("shift", [0, 3, 12, 13, 50, 58])
def test_permutations_are_a_stable_sort_of_the_raw_stream(shift: int) -> None:
    """Keys that differ in high bits, in low bits that the packed sort does not see, in both, or not at all."""
    draw = np.random.default_rng(shift)
    keys = (draw.integers(0, 40, 5000).astype(np.uint64) << np.uint64(shift)) | draw.integers(0, 7, 5000).astype(
        np.uint64
    )
    for count in (0, 1, 2, 3, 4096, 4097, 5000):
        found = epochs.permutation(lambda count: keys[:count].copy(), count)
        assert np.array_equal(found, np.argsort(keys[:count], kind="stable")) and found.dtype == np.int64
    plain = epochs.permutation(epochs.EpochKey("c", 0, 9, 99, 6, 5).stream("documents", 3), 5000)
    seed = hashlib.sha256(repr(("documents", ("c", 0, 9), (), 5, 3)).encode()).digest()
    raw = np.random.PCG64(int.from_bytes(seed, "little")).random_raw(5000)
    assert np.array_equal(plain, np.argsort(raw, kind="stable"))


def test_small_tables_are_not_cached(tmp_path: Path, monkeypatch) -> None:
    prefix = write_corpus(tmp_path / "c", numbered_documents(60))
    expected = GPTDataset(prefix, "1", "train", 6, seed=3)[0].ids.tolist()
    (path,) = (tmp_path / "c_index_cache").glob("*.npy")
    size = path.stat().st_size - 128 - 8  # of the header and the checksum
    for limit, cached in ((size - 1, True), (size, False)):
        path.unlink(missing_ok=True)
        monkeypatch.setattr(epochs, "CACHED_BYTES", limit)
        assert GPTDataset(prefix, "1", "train", 6, seed=3)[0].ids.tolist() == expected
        assert path.exists() == cached


def test_each_corpus_is_opened_once(tmp_path: Path, monkeypatch) -> None:
    prefixes = [str(write_corpus(tmp_path / f"c{k}", numbered_documents(40, seed=k))) for k in range(3)]
    opened, checked = [], []
    start, check = indexed.IndexedDataset.__init__, indexed.IndexedDataset._check_sequences
    monkeypatch.setattr(indexed.IndexedDataset, "__init__", lambda self, *a: (opened.append(a[0]), start(self, *a))[1])
    monkeypatch.setattr(indexed.IndexedDataset, "_check_sequences", lambda self: (checked.append(1), check(self))[1])
    data_path = [word for prefix in prefixes for word in ("1", prefix)]
    data = open_datasets(data_path, "8,1,1", 4, 1, 10_000, needed=("train", "validation"))
    data.train[0], data.validation[0], data.fingerprints()
    assert opened == prefixes and len(checked) == 3
    assert data.fingerprints() == [fingerprint(prefix) for prefix in prefixes]


def test_many_corpora_need_few_descriptors(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(epochs, "CACHED_BYTES", 1 << 20)
    count = 300
    documents = numbered_documents(8)
    words = [word for k in range(count) for word in ("1", str(write_corpus(tmp_path / f"c{k}", documents)))]
    before = len(os.listdir("/proc/self/fd"))
    data = open_datasets(words, "1", 4, 1, 10_000)
    for i in range(2 * count):
        data.train[i]
    assert len(os.listdir("/proc/self/fd")) - before <= indexed.OPEN_FILES + 2
    served = data.train.counts(2 * count)
    assert sum(served) == 2 * count and min(served) >= 1


@for_each("change", ["as large", "longer", "the same inode"])
def test_a_corpus_made_anew_is_not_read_through_the_old_index(tmp_path: Path, change: str) -> None:
    """A file is closed when many corpora are open, and opened again; by then, another may have its name."""
    one, other = (indexed.IndexedDataset(write_corpus(tmp_path / n, [[1, 2, 3], [4, 5]])) for n in "cd")
    assert one.tokens(0, 2).tolist() == other.tokens(0, 2).tolist() == [1, 2]
    anew = write_corpus(tmp_path / "e", [[1, 2], [3, 4, 5] + ([6] if change == "longer" else [])])
    for end in (".bin", ".idx"):
        put = shutil.copyfile if change == "the same inode" else os.replace
        put(f"{anew}{end}", f"{tmp_path / 'c'}{end}")
    indexed._open.cache_clear()
    os.utime(tmp_path / "c.bin", ns=(5, 5))  # some file systems count in steps longer than this test takes
    with pytest.raises(ValueError, match=r"-path .*/c: .*/c.bin: the file was replaced .*last checkpoint"):
        one.tokens(0, 2)
    assert other.tokens(0, 2).tolist() == [1, 2]


def test_the_limit_of_open_files_is_raised(tmp_path: Path, monkeypatch) -> None:
    """Each open one counts as four: a mapped index, and the tables of its epochs."""
    monkeypatch.setattr(indexed, "RESIDENT_BYTES", 0)
    words = [w for k in range(30) for w in ("1", str(write_corpus(tmp_path / f"c{k}", numbered_documents(8))))]
    limits, most = [(200, 10**6)], 10**6
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: limits.append(new))
    gc.collect()  # files of other tests stay open or are closed, but not from here on
    needed = corpora.OTHER_FILES + 4 * (len(os.listdir("/proc/self/fd")) + 30)
    first = open_datasets(words, "1", 4, 1, None)
    assert limits[-1] == (needed, most)
    limits.append((200, most))
    open_datasets(words, "1", 4, 1, None)  # of a second stage
    assert limits[-1] == (needed + 120, most)
    del first
    for hard, wanted in ((210, 210), (resource.RLIM_INFINITY, needed)):
        limits.append((200, hard))
        open_datasets(words, "1", 4, 1, None)
        assert limits[-1] == (wanted, hard)
    for enough in ((needed, most), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)):
        limits.append(enough)
        open_datasets(words, "1", 4, 1, None)
        assert limits[-1] == enough


@for_each("count", [1, 2, 3, 17, 400])
def test_halves_and_counts_of_a_blend(count: int) -> None:
    """Against the definitions: the first border of nearest equal weight; samples counted one by one."""
    draw = random.Random(count)
    weights = [Fraction(draw.randrange(1, 9)) for _ in range(count)]
    blend = BlendedDataset([None] * count, weights)  # type: ignore[list-item]
    sums = blend._sums
    for _ in range(50):
        if count > 1:
            first = draw.randrange(count - 1)
            stop = draw.randrange(first + 2, count + 1)
            nearest = min(range(first + 1, stop), key=lambda k: abs(2 * sums[k] - sums[first] - sums[stop]))
            assert blend._middle(first, stop) == nearest
    counted = [0] * count
    for index in range(300):
        assert blend.counts(index) == counted
        counted[blend.locate(index)[0]] += 1


def described(prefix: Path, tokenizer: str) -> str:
    loaded = load_tokenizer(tokenizer)
    said = {"tokenizer": tokenizer, "tokenizer_hash": loaded.identity, "vocab_size": loaded.vocab_size}
    with IndexedWriter(prefix, np.uint16, said) as writer:
        for document in numbered_documents(20):
            writer.add(document)
    return str(prefix)


def test_data_of_another_tokenizer_of_the_same_size_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    specs = []
    for name, letters in (("one", "abc"), ("two", "acb")):
        (tmp_path / name).mkdir()
        vocab = {letter: k for k, letter in enumerate(letters)}
        Tokenizer(models.BPE(vocab, [])).save(str(tmp_path / name / "tokenizer.json"))
        specs.append(str(tmp_path / name))
    prefix = described(tmp_path / "c", specs[0])
    open_datasets((prefix,), "1", 4, 1, None, tokenizer=load_tokenizer(specs[0]))
    words = (
        f"--data-path {prefix} was made with the tokenizer {specs[0]}, of 3 tokens; --tokenizer {specs[1]} has 3 and"
    )
    with pytest.raises(ValueError, match=words):
        open_datasets((prefix,), "1", 4, 1, None, tokenizer=load_tokenizer(specs[1]))
    about = json.loads(Path(f"{prefix}.json").read_text())
    del about["tokenizer_hash"]  # made by an earlier version: recognised by its size
    Path(f"{prefix}.json").write_text(json.dumps(about))
    open_datasets((prefix,), "1", 4, 1, None, tokenizer=load_tokenizer(specs[1]))
    with pytest.raises(ValueError, match="of 3 tokens; --tokenizer byte has 257"):
        open_datasets((prefix,), "1", 4, 1, None, tokenizer=load_tokenizer("byte"))


def test_documents_without_an_end_cannot_be_told_apart(tmp_path: Path) -> None:
    """A corpus made without --append-eod is refused if a flag would do nothing; one without that information is not."""
    flags = ("--eod-mask-loss", "--reset-attention-mask")
    for number, said in enumerate(({"eod": None}, {"eod": 256}, {})):
        prefix = tmp_path / f"c{number}"
        with IndexedWriter(prefix, np.uint16, said) as writer:
            for document in numbered_documents(20):
                writer.add(document)
        open_datasets((str(prefix),), "1", 4, 1, None)
        if number:
            open_datasets((str(prefix),), "1", 4, 1, None, document_flags=flags)
            continue
        with pytest.raises(ValueError, match=f"^--eod-mask-loss --reset-attention-mask: .* {prefix} .* --append-eod"):
            open_datasets((str(prefix),), "1", 4, 1, None, document_flags=flags)


def test_corpora_and_weights_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("0.3 data/a  # the first\n\n0.7\tdata/b\n")
    assert read_data_args(str(path)) == ("0.3", "data/a", "0.7", "data/b")
    path.write_text("# nothing\n")
    with pytest.raises(ValueError, match=f"--data-args-path {path}: the file names no corpus"):
        read_data_args(str(path))
    for wrong in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match=f"--data-args-path {wrong}: .*name a text file"):
            read_data_args(str(wrong))
