"""Forged, odd and damaged files: one sentence each, never a raw traceback, a hang or blind trust."""

import functools
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megazero import files
from megazero.checkpoint.folders import find_copy
from megazero.data import about, epochs
from megazero.data.about import read_about, verify
from megazero.data.corpora import open_datasets, read_data_args
from megazero.data.fingerprint import differences, fingerprint, same
from megazero.data.indexed import IndexedDataset
from megazero.data.packing import PackedDataset
from megazero.data.samples import GPTDataset
from megazero.data.tokenizer import load_tokenizer
from megazero.data.writer import IndexedWriter
from megazero.files import MAX_SMALL_BYTES, read_json_object
from megazero.flags.presets import read_preset
from megazero.planner.time.devices import load_device
from tests.helpers.table import for_each
from tests.unit.data_helpers import numbered_documents, write_corpus

pytestmark = pytest.mark.timeout(300)  # a FIFO in place of a file must not be waited for
DOCUMENTS = numbered_documents(60)


def write_described(prefix: Path, documents: list[list[int]] = DOCUMENTS, **said: object) -> Path:
    with IndexedWriter(prefix, np.uint16, about={"tokenizer": "byte", "vocab_size": 257, **said}) as writer:
        for document in documents:
            writer.add(document)
    return prefix


@pytest.fixture(autouse=True)
def cache_all(monkeypatch) -> None:
    monkeypatch.setattr(epochs, "CACHED_BYTES", 0)


ODD: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: path.mkdir(),
    "fifo": lambda path: os.mkfifo(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
}


@for_each(
    ("end", "kind"),
    [(end, kind) for end in (".bin", ".idx", ".json") for kind in ODD],
)
def test_no_file_in_place_of_a_corpus_file(tmp_path: Path, end: str, kind: str) -> None:
    prefix = write_described(tmp_path / "c")
    path = Path(f"{prefix}{end}")
    path.unlink()
    ODD[kind](path)
    with pytest.raises(ValueError, match=rf"--data-path {prefix}: .*c\{end}") as caught:
        open_datasets((str(prefix),), "1", 4, 1, 300)
    assert "\n" not in str(caught.value)


READERS: dict[str, Callable[[Path], object]] = {
    "preset.toml": lambda path: read_preset(str(path)),
    "device.toml": lambda path: load_device(str(path)),
    "corpora.txt": lambda path: read_data_args(str(path)),
    "config.json": read_json_object,
    "tokenizer.json": lambda path: load_tokenizer(str(path.parent)),
    "latest": lambda path: find_copy(path.parent),
}


@pytest.mark.parametrize("name", READERS)
def test_no_file_in_place_of_a_small_one(tmp_path: Path, name: str) -> None:
    """Nor a large one, in place of settings."""
    large = lambda path: (path.touch(), os.truncate(path, MAX_SMALL_BYTES + 1))  # noqa: E731
    for kind, make in {**ODD, **({} if name == "tokenizer.json" else {"large": large})}.items():
        path = tmp_path / kind / name
        path.parent.mkdir()
        make(path)
        with pytest.raises((ValueError, OSError), match=re.escape(name)) as caught:
            READERS[name](path)
        assert "\n" not in str(caught.value), kind


def sums(**given: object) -> str:
    checksum = {"algorithm": "crc32", "block_bytes": 9, "bin": [], "idx": []}
    return json.dumps({"num_tokens": 8, "checksum": checksum | given})


@for_each(
    ("text", "words"),
    [
        ("[]", "holds a JSON list, not an object"),
        ("[" * 100_000, "no JSON: maximum recursion depth"),
        ('{"num_tokens": ' + "[" * 100_000, "no JSON: maximum recursion depth"),
        ("{", "no JSON"),
        ("\xff\xfe", "no JSON"),
        ("", "no JSON"),
        ("{}", "missing required field `num_tokens`"),
        ('{"num_tokens": "8"}', r"Expected `int`, got `str` - at `\$.num_tokens`"),
        ('{"num_tokens": true}', "Expected `int`, got `bool`"),
        ('{"num_tokens": -1}', "Expected `int` >= 0"),
        ('{"num_tokens": 7}', "describes another corpus, of num_tokens 7, and .* has 8"),
        ('{"num_tokens": 8, "max_id": [1]}', r"Expected `int`, got `array` - at `\$.max_id`"),
        ('{"num_tokens": 8, "tokenizer": 5}', "Expected `str`, got `int`"),
        ('{"num_tokens": 8, "vocab_size": 1.5}', "Expected `int`, got `float`"),
        ('{"num_tokens": 8, "eod": "x"}', r"Expected `int | null`, got `str` - at `\$.eod`"),
        ('{"num_tokens": 8, "dtype": "int32"}', "describes another corpus, of dtype int32"),
        ('{"num_tokens": 8, "version": 99}', r"Expected `int` <= 1 - at `\$.version`"),
        ('{"num_tokens": 8, "checksum": []}', "Expected `object`, got `array`"),
        ('{"num_tokens": 8, "checksum": {}}', "missing required field `algorithm`"),
        (sums(algorithm="md5"), "Invalid enum value 'md5'"),
        (sums(block_bytes=0), "Expected `int` >= 1"),
        (sums(idx=[1]), "Expected `str`, got `int`"),
        (sums(idx=["123"]), "Expected `str` of length >= 8"),
        (sums(), r"has no checksum of all of .*c\.idx"),
    ],
)
def test_odd_descriptions(tmp_path: Path, text: str, words: str) -> None:
    prefix = write_corpus(tmp_path / "c", [[1, 2, 3], [8], [9, 10, 11, 12]])
    Path(f"{prefix}.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=f"--data-path {prefix}: {prefix}.json .*{words}") as caught:
        open_datasets((str(prefix),), "1", 4, 1, 300)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_description_without_tokenizer_is_fine(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", [[1, 2, 3, 4, 5, 6, 7, 8]])
    Path(f"{prefix}.json").write_text('{"num_tokens": 8, "max_id": 8}')
    datasets = open_datasets((str(prefix),), "1", 4, 1, 300)
    assert len(datasets.train[0].ids) == 5  # a sample and its last target


def test_every_flipped_byte_is_found_at_start(tmp_path: Path) -> None:
    prefix = write_described(tmp_path / "c")
    open_datasets((str(prefix),), "1", 4, 1, 600)
    draw = random.Random(0)
    for end in (".bin", ".idx"):
        path = Path(f"{prefix}{end}")
        good = path.read_bytes()
        for at in draw.sample(range(len(good)), 60):
            path.write_bytes(good[:at] + bytes([good[at] ^ (1 << draw.randrange(8))]) + good[at + 1 :])
            with pytest.raises(ValueError, match=f"--data-path {prefix}"):
                open_datasets((str(prefix),), "1", 4, 1, None)
        path.write_bytes(good)


def test_a_large_corpus_is_sampled(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(about.Checksum, "__init__", lambda self: vars(self).update(
        block_bytes=10, blocks=[], check=0, filled=0))  # fmt: skip
    prefix = write_described(tmp_path / "c")
    monkeypatch.undo()
    data, read = IndexedDataset(prefix), []
    assert verify(data, budget=100, draw=random.Random(1), advance=read.append)
    assert len(read) == 10  # five blocks of each file
    assert verify(data, advance=read.append)
    assert len(read) > 100
    good = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"c\.bin is damaged between bytes"):
        verify(data)
    found = 0
    for seed in range(40):  # one block in about seventy: a sample of five finds it now and then
        try:
            verify(data, budget=100, draw=random.Random(seed))
        except ValueError:
            found += 1
    assert 0 < found < 40


def test_checksums_do_not_depend_on_how_writes_are_cut() -> None:
    data = random.Random(0).randbytes(1000)
    whole = about.Checksum(block_bytes=64)
    whole.update(data)
    parts = about.Checksum(block_bytes=64)
    for at in range(0, 1000, 7):
        parts = about.Checksum(**vars(parts))  # stored and taken up again
        parts.update(data[at : at + 7])
    assert whole.digests() == parts.digests() and len(whole.digests()) == 16


def test_truncated_while_in_use(tmp_path: Path, monkeypatch) -> None:
    """A memory map would be killed by SIGBUS: tried in a process of its own, which must end by itself."""
    prefix = write_corpus(tmp_path / "c", [[7] * 50_000] * 40)
    for end in (".bin", ".idx"):
        size = os.path.getsize(f"{prefix}{end}")
        code = (
            "import os, sys\n"
            "from megazero.data import indexed\n"
            "from megazero.data.samples import GPTDataset\n"
            "indexed.RESIDENT_BYTES = 0\n"
            f"dataset = GPTDataset({str(prefix)!r}, '1', 'train', 64, 1)\n"
            f"dataset[0]; os.truncate({str(prefix) + end!r}, 0)\n"
            "try:\n    [dataset[i] for i in range(5, 500)]\n"
            "except ValueError as error:\n    print(error)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f"{prefix}{end} was truncated while it was in use" in done.stdout
        os.truncate(f"{prefix}{end}", size)
        write_corpus(tmp_path / "c", [[7] * 50_000] * 40)


def table_path(tmp_path: Path, prefix: Path) -> Path:
    (path,) = tmp_path.joinpath(f"{prefix.name}_index_cache").glob("*.npy")
    return path


def nine(prefix: Path, packed: bool = False) -> list[list[int]]:
    dataset = (PackedDataset if packed else GPTDataset)(prefix, "1", "train", 6, seed=3)
    return [dataset[i].ids.tolist() for i in range(9)]


def damaged_tables(good: bytes) -> dict[str, bytes]:
    """Contents of a damaged table file, by the kind of damage; most are as long as the good one."""
    flat = np.frombuffer(good[128:], np.int64)
    found = {"text": b"hello", "cut": good[:-8], "longer": good + b"more", "no checksum": good[:-8]}
    found |= {"another checksum": good[:-8] + bytes(8), "zeros": bytes(len(good))}
    found |= {"half zeros": good[: len(good) // 2] + bytes(len(good) - len(good) // 2)}
    found |= {"random": good[:128] + np.random.default_rng(0).bytes(len(good) - 128)}
    found |= {"reversed": good[:128] + flat[::-1].tobytes()}
    for at, bit in itertools.product((0, flat.size // 3, flat.size - 3, flat.size - 1), (0, 2, 45, 62)):
        found[f"bit {bit} of number {at}"] = good[:128] + (flat ^ (np.arange(flat.size) == at) * (1 << bit)).tobytes()
    return found


@for_each("packed", [False, True])
def test_a_damaged_index_cache_is_made_again(tmp_path: Path, packed: bool) -> None:
    prefix = write_corpus(tmp_path / "c", DOCUMENTS)
    expected = nine(prefix, packed)
    for path in tmp_path.joinpath("c_index_cache").glob("*.npy"):
        good = path.read_bytes()
        damages = {kind: functools.partial(Path.write_bytes, data=raw) for kind, raw in damaged_tables(good).items()}
        for kind, damage in sorted({**ODD, **damages}.items(), key=lambda each: each[0] == "folder"):
            path.unlink()
            damage(path)
            assert nine(prefix, packed) == expected, kind
            assert path.is_dir() if kind == "folder" else path.read_bytes() == good, kind


def test_a_table_under_the_name_of_another_is_made_again(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", DOCUMENTS)
    expected, path = nine(prefix), table_path(tmp_path, prefix)
    other = GPTDataset(prefix, "1", "train", 6, seed=4)
    other[0]
    (theirs,) = set(path.parent.glob("*.npy")) - {path}
    path.write_bytes(theirs.read_bytes())
    assert nine(prefix) == expected


@for_each("packed", [False, True])
def test_a_sample_beyond_its_epoch_is_refused(tmp_path: Path, packed: bool) -> None:
    """Otherwise the tables of epochs without number are made in search of it."""
    kind = PackedDataset if packed else GPTDataset
    dataset = kind(write_corpus(tmp_path / "c", DOCUMENTS), "1", "train", 6, seed=3)
    for number in (len(dataset._table(0).shuffle), -1, 1 << 45):
        dataset._tables[0] = dataset._table(0)._replace(shuffle=np.full_like(dataset._table(0).shuffle, number))
        with pytest.raises(ValueError, match=rf"its table names sample {number}; delete .*c_index_cache"):
            dataset[0]


def poison(path: Path) -> None:
    """Write a well-formed table with the samples in another order."""
    flat = np.load(path)[:-1]
    shuffle = flat[2 * len(DOCUMENTS) + 1 :]
    shuffle[:] = np.roll(shuffle, 1)
    epochs._write(str(path), [flat])


@pytest.mark.parametrize("change", ["owner", "mode", "link"])
@pytest.mark.parametrize("place", ["next to the corpus", "temporary"])
def test_tables_in_a_folder_of_others_are_not_used(tmp_path: Path, place: str, change: str, monkeypatch) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    monkeypatch.setattr(epochs.tempfile, "gettempdir", lambda: str(tmp_path / "system"))
    prefix = write_corpus(tmp_path / "c", DOCUMENTS)
    if place == "temporary":
        (tmp_path / "c_index_cache").write_text("in the way")
    expected = nine(prefix)
    (path,) = tmp_path.rglob("*.npy")
    poison(path)
    assert nine(prefix) != expected  # one's own is used
    folder = path.parent
    assert folder.stat().st_mode & 0o777 == (0o700 if place == "temporary" else 0o755)
    if change == "owner":
        os.chown(folder, 12345, 12345)
    elif change == "link":  # of another user, to a folder of ours
        folder.rename(tmp_path / "ours")
        folder.symlink_to(tmp_path / "ours")
        os.chown(folder, 12345, 12345, follow_symlinks=False)
    else:
        folder.chmod(0o777)
    assert nine(prefix) == expected


def test_tables_of_the_owner_of_the_corpus_are_used(tmp_path: Path, monkeypatch) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    prefix = write_corpus(tmp_path / "c", DOCUMENTS)
    expected = nine(prefix)
    for path in (Path(f"{prefix}.idx"), tmp_path / "c_index_cache"):
        os.chown(path, 12345, 12345)
    monkeypatch.setattr(epochs, "build_table", None)
    assert nine(prefix) == expected


@pytest.mark.second
@pytest.mark.long
def test_code_of_a_tokenizer_folder_is_neither_run_nor_asked_about(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = {"auto_map": {"AutoTokenizer": ["mine.T", None]}, "tokenizer_class": "T"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"asks to run code of its own \(auto_map\), which is never done"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").unlink()  # the same by way of the model's own settings
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t", **config}))
    code = f"from megazero.data.tokenizer import load_tokenizer; load_tokenizer({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], input="y\ny\n", capture_output=True, text=True)
    assert done.returncode == 1 and f"ValueError: --tokenizer {tmp_path}: cannot be read" in done.stderr
    assert "[y/N]" not in done.stdout + done.stderr and not (tmp_path / "ran").exists()


@for_each(
    ("name", "kind"),
    [("", "fifo"), ("", "device"), ("", "loop"), ("tokenizer.json", "loop"), ("tokenizer.json", "folder")],
)
def test_no_file_in_place_of_a_tokenizer(tmp_path: Path, name: str, kind: str) -> None:
    spec = tmp_path / "tokenizer"
    spec.parent.mkdir(exist_ok=True)
    if name:
        spec.mkdir()
    ODD[kind](spec / name if name else spec)
    with pytest.raises(ValueError, match=f"--tokenizer {spec}: cannot be read"):
        load_tokenizer(str(spec))


@for_each("text", ["[]", "[" * 100_000, '{"eos_token": [1]}', '{"eos_token": {"content": 3}}', "\0"])
def test_odd_tokenizer_settings(tmp_path: Path, text: str) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError, match=f"--tokenizer {tmp_path}: cannot be read: .*tokenizer_config.json"):
        load_tokenizer(str(tmp_path))


@for_each("text", ["[]", "[" * 100_000, "{}", '{"model": 1}', '{"model": {"type": "BPE"}}'])
def test_odd_tokenizer_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=f"--tokenizer {tmp_path}: cannot be read"):
        load_tokenizer(str(tmp_path))


class FullDisk:
    """os.pwrite of a disk that takes `room` bytes, and then no more."""

    def __init__(self, room: int) -> None:
        self.room, self.pwrite = room, os.pwrite

    def __call__(self, handle: int, data: memoryview, at: int) -> int:
        if self.room <= 0:
            raise OSError(28, "No space left on device")
        part = data[: self.room]
        self.room -= len(part)
        return self.pwrite(handle, part, at)


@for_each("room", [0, 30, 50, 300, 1500])
def test_disk_full_leaves_nothing_and_says_where(tmp_path: Path, room: int, monkeypatch) -> None:
    monkeypatch.setattr(files.os, "pwrite", FullDisk(room))
    with (
        pytest.raises(OSError, match="No space left") as caught,
        IndexedWriter(tmp_path / "c", np.uint16, {}) as writer,
    ):
        for document in DOCUMENTS:
            writer.add(document)
    assert list(tmp_path.iterdir()) == []
    assert caught.value.__context__ is None or not isinstance(caught.value.__context__, BufferError)
    assert files.explain(caught.value).endswith("No space left on device; free some space, or write elsewhere")
    assert str(tmp_path / "c.partial-") in files.explain(caught.value)


def test_an_error_of_close_hides_nothing(tmp_path: Path, monkeypatch) -> None:
    closed = files.OutputFile.close

    def fail(self: files.OutputFile) -> None:
        closed(self)
        raise OSError(28, "No space left on device", self.path)

    monkeypatch.setattr(files.OutputFile, "close", fail)
    with pytest.raises(ZeroDivisionError), IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.add([1])
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No space left"), IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.add([1])
    assert list(tmp_path.iterdir()) == []


def test_fingerprints_are_of_content(tmp_path: Path) -> None:
    first = write_described(tmp_path / "a")
    moved = write_described(tmp_path / "b")
    assert fingerprint(first) == fingerprint(str(moved)) and same(fingerprint(first), fingerprint(moved))
    changed = [list(document) for document in DOCUMENTS]
    changed[31][0] += 1  # one token, all sizes the same
    other = fingerprint(write_described(tmp_path / "c", changed))
    assert not same(fingerprint(first), other)
    before = fingerprint(first)
    Path(f"{first}.json").unlink()  # a corpus that lost its description is still the same
    bare = fingerprint(first)
    assert bare != before and same(bare, before) and not same(bare, other)
    assert differences([before], [bare], ["a"]) == []
    (said,) = differences([before, before], [bare, other], ["a", "c"])
    assert said.startswith("--data-path c holds other tokens than when this was saved")
    assert "names 1 corpora, and named 2" in differences([before, before], [bare], ["a"])[0]


def test_a_corpus_made_anew_has_another_fingerprint_though_sizes_agree(tmp_path: Path) -> None:
    one = fingerprint(write_corpus(tmp_path / "c", [[1, 2, 3], [4]]))
    assert fingerprint(write_corpus(tmp_path / "c", [[1, 2, 9], [4]])) != one
    assert fingerprint(write_corpus(tmp_path / "c", [[1, 2, 3], [4]])) == one


def test_open_datasets_reads_described_corpora(tmp_path: Path) -> None:
    prefix = str(write_described(tmp_path / "c"))
    assert read_about(IndexedDataset(prefix))["tokenizer"] == "byte"
    assert open_datasets((prefix,), "1", 4, 1, None).train[0].ids.shape == (5,)
