"""Kinds of --input, and refusals of bad input."""

import gzip
import io
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from data_tools import encoding, preprocess_data, reading
from data_tools.documents import Bad, documents_of, text_of
from data_tools.reading import Chunk, Position, read_chunks
from data_tools.seen import Seen
from data_tools.sources import find_sources, partition
from tests.helpers.table import for_each
from tests.unit.data_helpers import unpack_corpus

pytestmark = pytest.mark.timeout(300)
TEXTS = [f"document {k} " + 'é🙂\n"\\ x' * (k % 23) for k in range(300)]


@pytest.fixture(autouse=True)
def no_commits_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine workers take longer to start than the tool waits for a commit: then an error keeps work."""
    monkeypatch.setattr(preprocess_data, "COMMIT_SECONDS", float("inf"))


def run(tmp_path: Path, *inputs: object, prefix: str = "out/p", more: tuple[str, ...] = ()) -> Path:
    target = tmp_path / prefix
    names = [str(name) for name in inputs]
    given = ["--input", *names, "--output-prefix", str(target), "--tokenizer", "byte", "--workers", "1"]
    preprocess_data.main([*given, "--overwrite", *more])
    return target


def texts(prefix: Path, key: str = "text") -> list[str]:
    return [bytes(s).decode() for s in unpack_corpus(f"{prefix}_{key}_document")[1]]


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": k, "text": text}) + "\n" for k, text in enumerate(texts)).encode()


def table(texts: list[str]):
    import pyarrow as pa

    return pa.table({"id": list(range(len(texts))), "text": texts})


def write(path: Path, texts: list[str]) -> Path:
    """A file of any kind, by its name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".parquet"):
        pq.write_table(table(texts), path, row_group_size=37, write_page_checksum=True)
    elif path.name.endswith(".arrow"):
        kind = pa.ipc.new_file if "file" in path.name else pa.ipc.new_stream
        with kind(str(path), table(texts).schema) as writer:
            writer.write_table(table(texts), max_chunksize=50)
    elif path.name.endswith(".gz"):
        half = len(texts) // 2  # two members, as `cat a.gz b.gz` makes
        path.write_bytes(gzip.compress(jsonl(texts[:half])) + gzip.compress(jsonl(texts[half:])))
    elif path.name.endswith(".zst"):
        half = len(texts) // 2
        with open(path, "wb") as raw:
            for part in (texts[:half], texts[half:]):
                with pa.CompressedOutputStream(pa.PythonFile(io.BytesIO(), "w"), "zstd"):
                    pass
                raw.write(pa.compress(jsonl(part), codec="zstd", asbytes=True))
    else:
        path.write_bytes(jsonl(texts))
    return path


NAMES = ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a_file.arrow"]


@for_each("name", NAMES)
def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path, name: str, monkeypatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 3000)
    path = write(tmp_path / name, TEXTS)
    assert texts(run(tmp_path, path)) == TEXTS


@for_each("name", [*NAMES, "saved"])
def test_reading_goes_on_from_any_chunk(tmp_path: Path, name: str, monkeypatch) -> None:
    """The chunks behind a position are those of an uninterrupted reading."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(reading, "ROWS", 20)
    if name == "saved":
        import datasets

        datasets.Dataset(table(TEXTS)).save_to_disk(tmp_path / name)
        paths = [str(tmp_path / name)]
    else:
        paths = [str(write(tmp_path / f"{k}{name}", TEXTS[k::2])) for k in range(2)]
    sources = find_sources(paths, ["text"])
    whole = list(read_chunks(sources, ["text"]))
    assert len(whole) > 10
    for at in (0, 1, len(whole) // 2, len(whole) - 1):
        rest = list(read_chunks(sources, ["text"], whole[at].behind))
        assert [chunk.raw for chunk in rest] == [chunk.raw for chunk in whole[at + 1 :]]
        assert [chunk.behind for chunk in rest] == [chunk.behind for chunk in whole[at + 1 :]]
    if name != "saved":
        disk = sum(chunk.disk_bytes for chunk in whole)
        assert 0.8 < disk / sum(source.size for source in sources) < 1.2


def test_a_saved_data_set_and_its_splits(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset(table(TEXTS)).save_to_disk(tmp_path / "one")
    assert texts(run(tmp_path, tmp_path / "one")) == TEXTS
    assert texts(run(tmp_path, f"datasets:{tmp_path / 'one'}")) == TEXTS
    both = datasets.DatasetDict(train=datasets.Dataset(table(TEXTS)), test=datasets.Dataset(table(TEXTS[:3])))
    both.save_to_disk(tmp_path / "two")
    assert texts(run(tmp_path, f"datasets:{tmp_path / 'two'}:test")) == TEXTS[:3]
    assert texts(run(tmp_path, f"datasets:{tmp_path / 'two'}")) == TEXTS  # train, where there is one
    with pytest.raises(ValueError, match="it has the splits train, test; give datasets:"):
        run(tmp_path, f"datasets:{tmp_path / 'two'}:none", prefix="x/p")
    with pytest.raises(ValueError, match="has no such column; there are id, text"):
        run(tmp_path, tmp_path / "one", prefix="x/p", more=("--json-keys", "body"))


def test_a_folder_of_files_streamed_by_datasets(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(reading, "CHUNK_BYTES", 2000)
    for k in range(2):
        write(tmp_path / "folder" / f"{k}.jsonl", TEXTS[150 * k : 150 * (k + 1)])
    assert texts(run(tmp_path, f"datasets:{tmp_path / 'folder'}:train")) == TEXTS
    sources = find_sources([f"datasets:{tmp_path / 'folder'}:train"], ["text"])
    whole = list(read_chunks(sources, ["text"]))
    rest = list(read_chunks(sources, ["text"], whole[2].behind))
    assert [chunk.raw for chunk in rest] == [chunk.raw for chunk in whole[3:]]
    with pytest.raises(ValueError, match=r"`datasets` cannot read it: .*; give a folder of save_to_disk"):
        run(tmp_path, f"datasets:{tmp_path / 'nowhere'}", prefix="x/p")
    assert not (tmp_path / "x" / "p.partial").exists()


def test_folders_and_globs_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name, text in (("b/2.jsonl", "2"), ("b/1.jsonl", "1"), ("a.jsonl.gz", "0"), (".hidden/x.jsonl", "x")):
        write(tmp_path / "in" / name, [text, text])
    (tmp_path / "in" / "notes.pdf").write_bytes(b"not text")
    assert texts(run(tmp_path, tmp_path / "in")) == list("001122")
    assert texts(run(tmp_path, tmp_path / "in" / "b" / "*.jsonl")) == list("1122")
    assert texts(run(tmp_path, tmp_path / "in" / "**" / "[02]*.jsonl")) == list("22")
    odd = write(tmp_path / "in" / "c[1].jsonl", ["odd"])  # a name that looks like a glob is a name
    assert texts(run(tmp_path, odd)) == ["odd"]
    with pytest.raises(ValueError, match=r"--input .*\*\.none: no file has such a name"):
        run(tmp_path, tmp_path / "in" / "*.none", prefix="x/p")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"a folder without a file whose name ends in .jsonl"):
        run(tmp_path, tmp_path / "empty", prefix="x/p")
    assert not (tmp_path / "x").exists()


def test_a_folder_of_code(tmp_path: Path) -> None:
    for name in ("src/a.py", "src/b/c.c", "src/.git/config"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"in {name}\n")
    prefix = run(tmp_path, tmp_path / "src", more=("--input-format", "text"))
    assert texts(prefix) == ["in src/a.py\n", "in src/b/c.c\n"]


@for_each("kind", ["auto", "text"])
def test_standard_input(tmp_path: Path, kind: str, monkeypatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 1000)
    raw = jsonl(TEXTS)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    found = texts(run(tmp_path, "-", more=("--input-format", kind)))
    assert found == (TEXTS if kind == "auto" else [raw.decode()])


@for_each("name", NAMES)
@for_each("count", [2, 3, 7])
def test_partitions_are_the_whole_one_after_another(tmp_path: Path, name: str, count: int, monkeypatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 2000)
    draw = random.Random(count)
    cuts = sorted(draw.sample(range(1, 300), 3))
    paths = []
    for first, stop in zip([0, *cuts], [*cuts, 300], strict=True):
        paths.append(str(write(tmp_path / "in" / f"{first:03}{name}", TEXTS[first:stop])))
    sources = find_sources(paths, ["text"])
    parts = []
    for index in range(count):
        own = partition(sources, f"{index}/{count}")
        parts.append([d[0] for chunk in read_chunks(own, ["text"]) for d in documents_of(chunk, ["text"], text_of)])
    assert [text for part in parts for text in part] == TEXTS
    if name in ("a.jsonl", "a.parquet"):  # divided within files
        sizes = [sum(map(len, part)) for part in parts]
        assert max(sizes) < 2 * sum(sizes) / count + 5000


@for_each("given", ["2/2", "-1/2", "1", "a/b", "0/0", "1/2/3"])
def test_bad_partitions(tmp_path: Path, given: str) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ValueError, match=f"--partition {given}: give I/N"):
        run(tmp_path, path, more=("--partition", given))
    with pytest.raises(ValueError, match="is a stream, which cannot be entered in the middle"):
        run(tmp_path, "-", more=("--partition", "1/2"))


def test_bad_lines_are_skipped_counted_and_kept_in_a_file(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 50)
    lines = [b'{"text": "good %d"}' % k for k in range(20)]
    bad = {2: b"{", 3: b'{"txt": 1}', 5: b"\xff\xfe", 8: b"[]", 9: b'{"text": null}', 13: b"\0" * 40, 17: b"3"}
    for number, line in bad.items():
        lines[number] = line
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    prefix = run(tmp_path, path, more=("--on-bad-line", "skip"))
    assert texts(prefix) == [f"good {k}" for k in range(20) if k not in bad]
    said = capsys.readouterr()
    assert said.err.count(f"skipped {path}:") == preprocess_data.SHOWN_BAD
    assert f"7 bad lines skipped: {prefix}_skipped.txt" in said.out
    noted = Path(f"{prefix}_skipped.txt").read_text().splitlines()
    assert [int(line.split(":")[1]) for line in noted] == [number + 1 for number in bad]
    assert "malformed JSON" in noted[0] and "the key is missing, there are txt" in noted[1]
    assert json.loads(Path(f"{prefix}_text_document.json").read_text())["skipped_lines"] == 7
    path.write_bytes(b"\n".join(line for k, line in enumerate(lines) if k not in bad))
    run(tmp_path, path)
    assert not Path(f"{prefix}_skipped.txt").exists()  # that of an older corpus


def test_rows_without_text_are_bad(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None, "b"]}), path)
    with pytest.raises(ValueError, match=f"{path}, row 1: --json-keys text: the column is empty"):
        run(tmp_path, path)
    assert texts(run(tmp_path, path, more=("--on-bad-line", "skip"))) == ["a", "b"]
    pq.write_table(pa.table({"text": [b"a", b"\xff"]}), path)
    with pytest.raises(ValueError, match=f"{path}, row 1: .*is no string"):
        run(tmp_path, path)
    pq.write_table(pa.table({"text": [1, 2]}), path)
    with pytest.raises(ValueError, match=f"{path}, row 0: .*is no string"):
        run(tmp_path, path)


@for_each("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a_file.arrow"])
@for_each("damage", ["cut", "junk", "middle", "empty"])
def test_damaged_files(tmp_path: Path, name: str, damage: str) -> None:
    path = write(tmp_path / name, [os.urandom(3000).hex() for _ in range(100)])
    good = path.read_bytes()
    middle = len(good) // 2
    path.write_bytes(
        {
            "cut": good[:-20],
            "junk": b"this is something else",
            "middle": good[:middle] + bytes(2000) + good[middle + 2000 :],
            "empty": b"",
        }[damage]
    )
    if damage == "empty" and name.endswith((".gz", ".zst")):
        with pytest.raises(ValueError, match=r"no document has any text|damaged"):
            run(tmp_path, path)
    elif damage == "middle" and "arrow" in name:  # Arrow has no checksums: other characters, or a bad row
        try:
            run(tmp_path, path)
        except ValueError as error:
            assert str(path) in str(error)
    else:
        with pytest.raises(ValueError, match=rf"--input {path}: damaged (gzip|zstd|parquet|Arrow) file") as caught:
            run(tmp_path, path)
        assert "\n" not in str(caught.value)
    if not (tmp_path / "out" / "p_text_document.idx").exists():
        assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


@for_each("kind", ["folder", "fifo", "device", "unreadable"])
def test_odd_inputs(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jsonl"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    with pytest.raises(ValueError, match=f"--input {path}"):
        run(tmp_path, path)
    assert not (tmp_path / "out").exists()


def test_one_long_document(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 1000)
    long = "x" * 5_000_000
    path = write(tmp_path / "a.jsonl", ["a", long, "b"])
    assert texts(run(tmp_path, path)) == ["a", long, "b"]


def test_dedup_keeps_the_first_of_equal_documents(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 500)
    draw = random.Random(0)
    many = [draw.choice(TEXTS) for _ in range(2000)]
    path = write(tmp_path / "a.jsonl", many)
    prefix = run(tmp_path, path, more=("--dedup", "--append-eod"))
    kept = list(dict.fromkeys(many))
    found = [bytes(s[:-1]).decode() for s in unpack_corpus(f"{prefix}_text_document")[1]]
    assert found == kept
    about = json.loads(Path(f"{prefix}_text_document.json").read_text())
    assert about["duplicate_documents"] == 2000 - len(kept)
    with pytest.raises(ValueError, match="--dedup sees all documents"):
        run(tmp_path, path, more=("--dedup", "--partition", "0/2"))


def test_seen_is_a_set() -> None:
    draw, seen, known = np.random.default_rng(0), Seen(), set()
    for _ in range(200):
        digests = draw.integers(0, 40, (draw.integers(0, 50), 2)).astype(np.uint64)  # first halves often agree
        fresh = []
        for row in map(tuple, digests.tolist()):
            fresh.append(row not in known)
            known.add(row)
        assert seen.add(digests).tolist() == fresh
        assert len(seen) == len(known)


# -- gigatoken


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BPE tokenizer."""
    from data_tools import train_tokenizer

    folder = tmp_path_factory.mktemp("bpe")
    train_tokenizer.save(train_tokenizer.train_bpe(iter([TEXTS]), 400), folder)
    return folder


@pytest.mark.second
@pytest.mark.parametrize("workers", ["1", "2"])
def test_gigatoken_gives_the_tokenizers_ids(tmp_path: Path, bpe: Path, workers: str, capsys) -> None:
    path = write(tmp_path / "a.jsonl", TEXTS)
    more = ("--tokenizer", str(bpe), "--append-eod", "--workers", workers)
    fast = run(tmp_path, path, prefix="fast/p", more=more)
    assert "by gigatoken" in capsys.readouterr().out
    slow = run(tmp_path, path, prefix="slow/p", more=(*more, "--no-gigatoken"))
    assert "by tokenizer" in capsys.readouterr().out
    for end in ("bin", "idx"):
        one, two = (Path(f"{prefix}_text_document.{end}").read_bytes() for prefix in (fast, slow))
        assert one == two
    reference = encoding.cached_tokenizer(str(bpe))
    assert unpack_corpus(f"{fast}_text_document")[1] == [[*ids, reference.eod] for ids in reference.encode_batch(TEXTS)]


def test_gigatoken_is_not_trusted_unseen(tmp_path: Path, bpe: Path, capsys, monkeypatch) -> None:
    """A wrong id in the sample: the tokenizer encodes; in a later chunk: all is done again."""
    path = write(tmp_path / "a.jsonl", TEXTS)
    right = encoding.BoundedGigatoken.encode
    monkeypatch.setattr(reading, "CHUNK_BYTES", 4000)
    expected = run(tmp_path, path, prefix="slow/p", more=("--tokenizer", str(bpe), "--no-gigatoken"))
    capsys.readouterr()

    def wrong(fast, texts):
        ids, lengths = right(fast, texts)
        if wrong.calls >= wrong.first and ids.size:
            ids = ids.copy()
            ids[-1] ^= 1
        wrong.calls += 1
        return ids, lengths

    monkeypatch.setattr(encoding.BoundedGigatoken, "encode", wrong)
    for first, words in ((0, "it gives other ids on a sample"), (9, "starting again without it")):
        wrong.calls, wrong.first = 0, first
        made = run(tmp_path, path, prefix=f"wrong{first}/p", more=("--tokenizer", str(bpe)))
        said = capsys.readouterr()
        assert words in said.err and "by tokenizer" in said.out
        for end in ("bin", "idx"):
            one, two = (Path(f"{prefix}_text_document.{end}").read_bytes() for prefix in (made, expected))
            assert one == two


def test_gigatokens_memory_is_bounded(bpe: Path, monkeypatch) -> None:
    """It is replaced when the process has grown, for any reason; the ids stay the same."""
    json, made, grown = encoding.cached_tokenizer(str(bpe)).json, [], [0]
    monkeypatch.setattr(encoding, "resident_bytes", lambda: grown[0])

    def make() -> object:
        import gigatoken

        made.append(grown[0])
        return gigatoken.Tokenizer.from_json(json)

    fast, reference = encoding.BoundedGigatoken(make), encoding.cached_tokenizer(str(bpe))
    for k, text in enumerate(TEXTS[:40]):
        ids, lengths = fast.encode([text, "x"])
        wanted, wanted_lengths = reference.encode_flat([text, "x"])
        assert ids.tolist() == wanted.tolist() and lengths.tolist() == wanted_lengths.tolist()
        grown[0] = k * encoding.CACHE_BYTES // 8
    assert made == [0, *(9 * n * encoding.CACHE_BYTES // 8 for n in range(1, 5))]


def test_the_memory_of_a_process_is_seen_to_grow() -> None:
    before = encoding.resident_bytes()
    held = np.ones(64 << 20, np.uint8)
    assert encoding.resident_bytes() - before > 32 << 20
    del held


def test_a_tokenizer_that_gigatoken_does_not_know(tmp_path: Path, capsys) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"document": 0, "x": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path / "a.jsonl", TEXTS)
    run(tmp_path, path, more=("--tokenizer", str(tmp_path / "tokenizer.json")))
    said = capsys.readouterr()
    assert "gigatoken is not used: it does not know this tokenizer" in said.err and "by tokenizer" in said.out


def test_places_of_lines_are_those_of_the_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 30)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n\n' * 10 + b"bad\n")
    sources = find_sources([str(path)], ["text"])
    found = [d for chunk in read_chunks(sources, ["text"]) for d in documents_of(chunk, ["text"], text_of)]
    assert isinstance(found[-1], Bad) and found[-1].where == f"{path}:21"
    behind = Chunk(sources[0], Position(0, 100, -1), Position(), b"\nbad\n", 5)
    (bad,) = documents_of(behind, ["text"], text_of)
    assert isinstance(bad, Bad) and bad.where == f"{path}, line 2 behind byte 100"
