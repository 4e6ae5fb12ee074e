"""Kinds of --input, and refusals of bad input."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from data_tools import encoding, preprocess_data, reading
from data_tools.documents import Bad, documents_of, text_of
from data_tools.reading import Chunk, Position, read_chunks
from data_tools.seen import Seen
from data_tools.sources import find_sources, partition
from megazero.data import corpora
from megazero.data.corpora import open_datasets
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


def zstd(raw: bytes) -> bytes:
    import pyarrow as pa

    return pa.compress(raw, codec="zstd", asbytes=True)


def xz(raw: bytes) -> bytes:
    return lzma.compress(raw) + bytes(8)  # padding, which the format allows


COMPRESS = {".gz": gzip.compress, ".gzip": gzip.compress, ".bz2": bz2.compress, ".xz": xz}
COMPRESS |= {".zst": zstd, ".zstd": zstd}


def write(path: Path, texts: list[str]) -> Path:
    """A file of any kind, by its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half, end = len(texts) // 2, path.suffix.lower()
    inner = os.path.splitext(path.stem.lower())[1] if end in COMPRESS else end
    if end == ".parquet":
        import pyarrow.parquet as pq

        pq.write_table(table(texts), path, row_group_size=37, write_page_checksum=True)
    elif end == ".arrow":
        import pyarrow as pa

        kind = pa.ipc.new_file if "file" in path.name else pa.ipc.new_stream
        with kind(str(path), table(texts).schema) as writer:
            writer.write_table(table(texts), max_chunksize=50)
    elif inner in (".csv", ".tsv"):
        file = io.StringIO()
        writer = csv.writer(file, "excel-tab" if inner == ".tsv" else "excel")
        writer.writerows([("id", "text"), *enumerate(texts)])
        path.write_bytes(COMPRESS.get(end, bytes)(file.getvalue().encode()))
    elif end in COMPRESS:  # two members, as `cat a.gz b.gz` makes
        path.write_bytes(b"".join(COMPRESS[end](jsonl(part)) for part in (texts[:half], texts[half:])))
    else:
        path.write_bytes(jsonl(texts))
    return path


NAMES = ["a.jsonl", "a.ndjson", "a.jsonl.gz", "a.jsonl.zst", "a.jsonl.bz2", "a.csv", "a.parquet", "a.arrow"]
RARER = [
    "a.tsv",
    "a.CSV.gz",
    "a_file.arrow",
    "a.JSONL",
    "a.json",
    "a.jsonlines",
    "a.jl",
    "a.jl.gzip",
    "a.jsonl.zstd",
    "a.JSONL.XZ",
    "a.Parquet",
]


@for_each("name", [*NAMES, *RARER])
def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path, name: str, monkeypatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 3000)
    path = write(tmp_path / name, TEXTS)
    assert texts(run(tmp_path, path)) == TEXTS


@for_each("name", [*NAMES, "a_file.arrow", "saved"])
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
    with pytest.raises(ValueError, match="has no such column; give one of id, text"):
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


def test_a_folder_is_read_through_its_links_each_folder_once(tmp_path: Path) -> None:
    for name in ("in/a.jsonl", "other/b.jsonl", "other/deep/c.jsonl", ".hidden/d.jsonl"):
        write(tmp_path / name, [f"{name} 1", f"{name} 2"])
    (tmp_path / "in" / "b").symlink_to("../other")
    (tmp_path / "in" / "c").symlink_to("../other/deep")
    (tmp_path / "other" / "back").symlink_to("../in")
    found = texts(run(tmp_path, tmp_path / "in"))
    assert found == [f"{name} {k}" for name in ("in/a.jsonl", "other/b.jsonl", "other/deep/c.jsonl") for k in (1, 2)]
    with pytest.raises(ValueError, match=r"in/b/none.jsonl: No such file"):
        (tmp_path / "other" / "none.jsonl").symlink_to("none")
        run(tmp_path, tmp_path / "in", prefix="x/p")


def test_files_of_a_folder_that_are_left_out_are_counted(tmp_path: Path, capsys) -> None:
    """A clone of a data set, a folder of mixed kinds, and one of texts alone."""
    folder, rows = tmp_path / "clone", ["one", "two"]
    write(folder / "data" / "a.parquet", rows)
    for name in (
        "README.md",
        "LICENSE.txt",
        "data/notes.txt",
        "data/more.TXT",
        "x.pdf",
        "y.PDF",
        "Makefile",
        ".gitattributes",
    ):
        (folder / name).write_text("no document")
    assert texts(run(tmp_path, folder)) == rows
    err = capsys.readouterr().err
    assert f"--input {folder}: left out 1 .PDF, 1 .TXT, 1 .pdf, 1 .txt, 1 LICENSE.txt, 1 README.md, 1 without an" in err
    asked = texts(run(tmp_path, folder, folder / "**" / "*.txt"))
    assert (
        asked == [*rows, "no document", "no document"] and f"to add the texts: --input {folder} '{folder}/**/*." in err
    )
    (folder / "data" / "a.parquet").unlink()
    assert texts(run(tmp_path, folder)) == ["no document"] * 2
    assert (
        f"--input {folder}: left out 1 .PDF, 1 .pdf, 1 LICENSE.txt, 1 README.md, 1 without an"
        in capsys.readouterr().err
    )
    write(tmp_path / "plain" / "a.jsonl", rows)
    run(tmp_path, tmp_path / "plain")
    assert "left out" not in capsys.readouterr().err


@for_each("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow"])
@for_each("inside", [True, False])
def test_a_pointer_of_git_lfs_is_no_data(tmp_path: Path, name: str, inside: bool) -> None:
    path = tmp_path / "in" / name
    path.parent.mkdir()
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12345\n")
    with pytest.raises(
        ValueError, match=rf"--input {path} is a pointer of git-lfs, .*; run `git lfs pull` in {path.parent}"
    ):
        run(tmp_path, path.parent if inside else path)


@for_each(
    ("raw", "kind", "program"),
    [
        (b'[{"text": "a"}, {"text": "b"}]', "a JSON array", ".[]"),
        (b'\n\xef\xbb\xbf[\n  {\n    "text": "a"\n  }\n]\n', "a JSON array", ".[]"),
        (b'[{"text": "a"},\n{"text": "b"}]', "a JSON array", ".[]"),
        (b'{\n  "text": "a"\n}\n{\n  "text": "b"\n}\n', "JSON over several lines", "."),
        (b'{"text": "a",\n "id": 1}', "JSON over several lines", "."),
        (b'{"version": "1",\n "data": [{"text": "a"}]}', "JSON over several lines", "."),
        (b'{\n  "data": [\n    {"text": "a"},\n    {"text": "b"}]}', "JSON over several lines", ".data[]"),
    ],
)
@for_each("skip", ["stop", "skip"])
def test_json_that_is_not_lines_is_refused_with_a_program_for_jq(
    tmp_path: Path, raw: bytes, kind: str, program: str, skip: str
) -> None:
    for name in ("a.json", "a.json.xz"):
        path, way = tmp_path / name, f"`jq -c '{program}' {tmp_path / name} |`"
        path.write_bytes(raw if name == "a.json" else xz(raw))
        if name != "a.json":
            way = f"`xz -dc {path} | jq -c '{program}' |`"
        with pytest.raises(ValueError, match=re.escape(f"--input {path} is {kind}, not one object a line")) as caught:
            run(tmp_path, path, more=("--on-bad-line", skip))
        assert way in str(caught.value)


def test_a_first_line_that_is_bad_is_skipped_as_any_other(tmp_path: Path) -> None:
    for number, first in enumerate((b"[]", b"[1]", b"{", b'{"text": "cut', b'{"a": 1,', b"{}")):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(first + b'\n{"text": "b"}\n')
        prefix = run(tmp_path, path, prefix=f"{number}/p", more=("--on-bad-line", "skip"))
        assert texts(prefix) == ["b"], first


@for_each(
    ("document", "advice"),
    [
        ({"content": "x", "id": 3, "title": "y"}, "there are content, id, title; perhaps --json-keys content, title"),
        ({"id": 3}, "there are id"),
        ({"meta": {"text": "x"}}, "there are meta; perhaps `jq -c '.meta'`"),
        ({"data": [{"text": "x"}]}, "there are data; perhaps `jq -c '.data[]'`"),
        ({"talk": [{"role": "user", "content": "x"}]}, "there are talk; perhaps --mask-from chat --json-keys talk"),
    ],
)
def test_a_missing_key_is_answered_with_the_keys_that_hold_text(tmp_path: Path, document: object, advice: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=re.escape(f"--json-keys text: the key is missing, {advice}; mend it")):
        run(tmp_path, path)


@for_each(
    ("raw", "fault"),
    [
        ('{"text": "é"}'.encode("utf-16"), "begins as UTF-16; `iconv"),
        (b'{"text": "a"}\r{"text": "b"}\r', "Extra data: .*; `jq -c .` writes"),
        (b'{"text": "a"}{"text": "b"}', "Extra data: .*; `jq -c .` writes"),
    ],
)
def test_lines_of_other_programs(tmp_path: Path, raw: bytes, fault: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=f"a.jsonl:1: .*{fault}"):
        run(tmp_path, path)
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\xef\xbb\xbf{"text": "b"}\r\n')  # of two files in one
    assert texts(run(tmp_path, path)) == ["a", "b"]


@for_each(
    ("raw", "read"),
    [
        (b'\xef\xbb\xbftext\r\n"a\r\nb"\r\n\r\nc "d"\r\n', ["a\r\nb", 'c "d"']),
        (b"id,text\n1,x\n\n2,\n3,y", ["x", "y"]),
        (b"text\n" + b"x" * 200_000 + b"\n", ["x" * 200_000]),
        (b"id;text\n1;x\n", "--json-keys text: .* has no such column; give one of id;text$"),
        (b"text,text\nx,y\n", "has several columns of this name"),
        (b"", "has no such column"),
        ("text\nx\n".encode("utf-16"), "line 1: the header is no UTF-8 text; correct it"),
        (b'text,id\n"a",1\n"b,2\n', "line 3: unexpected end of data; correct it"),
        (b'text\n"a"b\n', "line 2: ',' expected after '\"'; correct it"),
        (b"text,id\na\n", "line 2: 1 field, and the header has 2; correct it"),
        (b"text,id\na\xff,1\n", "a.csv, row 0: --json-keys text: the column is no string; mend it"),
    ],
)
def test_csv_of_other_programs(tmp_path: Path, raw: bytes, read: list[str] | str) -> None:
    path, limit = tmp_path / "a.csv", csv.field_size_limit()
    path.write_bytes(raw)
    if isinstance(read, list):
        assert texts(run(tmp_path, path)) == read
    else:
        with pytest.raises(ValueError, match=read):
            run(tmp_path, path)
    assert csv.field_size_limit() == limit


# A frame of zstd that asks for a window of 256 MiB: magic, no flags, a window of 2^(10 + 18), one raw last block of 3.
WIDE = bytes.fromhex("28b52ffd00") + bytes([18 << 3]) + bytes([3 << 3 | 1, 0, 0]) + b"abc"


def test_a_compressed_file_that_is_whole_is_not_called_damaged(tmp_path: Path) -> None:
    for name, raw, way in (
        (
            "a b.jsonl.zst",
            WIDE,
            r"window of this file .*: `zstd -dc --long=31 '.*a b.jsonl.zst' \|`, with --input -",
        ),
        ("a.jsonl.gz", jsonl(["a"]), "it is no gzip file, but JSON that is not compressed; rename it"),
        ("a.jsonl.zst", jsonl(["a"]), "it is no zstd file, but JSON that is not compressed; rename it"),
    ):
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(ValueError, match=way) as caught:
            run(tmp_path, tmp_path / name)
        assert "damaged" not in str(caught.value)


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


@for_each("name", ["a.jsonl", "a.parquet"])
@for_each(
    ("files", "lines", "count"), [(1, 12, 2), (1, 12, 3), (1, 12, 12), (3, 4, 2), (3, 4, 6), (4, 3, 4), (2, 1, 2)]
)
def test_a_border_of_partitions_at_the_beginning_of_a_line(
    tmp_path: Path, name: str, files: int, lines: int, count: int
) -> None:
    """Documents of equal size: each border is where a line, a row group or a file begins."""
    import pyarrow.parquet as pq

    documents = [f"document {k:02}" for k in range(files * lines)]
    paths = []
    for k in range(files):
        path = tmp_path / f"{k}{name}"
        paths.append(str(path))
        own = documents[k * lines : (k + 1) * lines]
        if name == "a.parquet":
            pq.write_table(table(own), path, row_group_size=1, use_dictionary=False)
        else:
            path.write_bytes(b"".join(b'{"text": "%s"}\n' % text.encode() for text in own))
    sources = find_sources(paths, ["text"])
    assert len({source.size for source in sources}) == 1
    parts = []
    for index in range(count):
        own = read_chunks(partition(sources, f"{index}/{count}"), ["text"])
        parts.append([d[0] for chunk in own for d in documents_of(chunk, ["text"], text_of)])
    assert [text for part in parts for text in part] == documents
    if name == "a.jsonl":
        assert {len(part) for part in parts} == {len(documents) // count}


@for_each("shift", range(-3, 4))
def test_a_border_of_partitions_near_the_beginning_of_a_line(tmp_path: Path, shift: int) -> None:
    """Two lines: the border is some bytes from the beginning of the second."""
    path = tmp_path / "a.jsonl"
    lines = [b'{"text": "%s"}' % (b"x" * size) for size in (30 + shift, 30 - shift)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    parts = [[*read_chunks(partition(find_sources([str(path)], ["text"]), f"{k}/2"), ["text"])] for k in range(2)]
    assert [b"".join(chunk.raw for chunk in part).splitlines() for part in parts] == (
        [lines, []] if shift < 0 else [lines[:1], lines[1:]]
    )


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


@for_each("name", ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl.bz2", "a.jsonl.xz", "a.parquet", "a.arrow", "a_file.arrow"])
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
    if damage == "empty" and path.suffix in COMPRESS:
        with pytest.raises(ValueError, match=r"no document has any text|damaged"):
            run(tmp_path, path)
    elif damage == "middle" and "arrow" in name:  # Arrow has no checksums: other characters, or a bad row
        try:
            run(tmp_path, path)
        except ValueError as error:
            assert str(path) in str(error)
    else:
        with pytest.raises(
            ValueError, match=rf"--input {path}: damaged (gzip|zstd|bzip2|xz|parquet|Arrow) file"
        ) as caught:
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


@for_each("keys", ["q a", "a q", "q:0 a:1", "q", "a"])
def test_dedup_compares_the_texts_of_all_keys(tmp_path: Path, keys: str, monkeypatch) -> None:
    """A document is a copy if no key has another text; then it is left out of the corpus of each key."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", 60)
    rows = [("x", "1"), ("x", "2"), ("y", "1"), ("x", "1"), ("x1", ""), ("", "x1"), ("y", "1"), ("x", "2"), ("z", "9")]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in rows))
    prefix = run(tmp_path, path, more=("--dedup", "--json-keys", *keys.split()))
    names = [key.partition(":")[0] for key in keys.split()]
    kept = list(dict.fromkeys(tuple({"q": q, "a": a}[name] for name in names) for q, a in rows))
    if ":" in keys:
        assert texts(prefix, "q_a") == ["".join(each) for each in kept]
        return
    for place, name in enumerate(names):
        assert texts(prefix, name) == [each[place] for each in kept if each[place]], name
        about = json.loads(Path(f"{prefix}_{name}_document.json").read_text())
        assert about["duplicate_documents"] == len(rows) - len(kept)
        assert about["empty_documents"] == sum(not each[place] for each in kept)


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


@for_each("name", ["a.parquet", "a.arrow", "a_file.arrow"])
def test_two_columns_of_one_name(tmp_path: Path, name: str, monkeypatch) -> None:
    import pyarrow as pa

    text = pa.array(["a", "b"])
    monkeypatch.setitem(globals(), "table", lambda texts: pa.table([text, text], names=["text", "text"]))
    path = write(tmp_path / name, ["a", "b"])
    with pytest.raises(ValueError, match=f"--json-keys text: {path} has several columns of this name; rename them"):
        run(tmp_path, path)
    monkeypatch.setitem(globals(), "table", lambda texts: pa.table([text, text, text], names=["id", "id", "text"]))
    assert texts(run(tmp_path, write(tmp_path / name, ["a", "b"]))) == ["a", "b"]


def test_a_string_of_a_table_that_is_no_utf8_is_a_bad_row(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    raw = pa.array([b"good", b"\xff\xfe", b"more"]).buffers()
    pq.write_table(pa.table({"text": pa.StringArray.from_buffers(3, raw[1], raw[2])}), tmp_path / "a.parquet")
    with pytest.raises(
        ValueError, match=r"a.parquet, row 1: --json-keys text: the column cannot be read: 'utf-8' codec"
    ):
        run(tmp_path, tmp_path / "a.parquet")
    assert texts(run(tmp_path, tmp_path / "a.parquet", more=("--on-bad-line", "skip"))) == ["good", "more"]


@for_each(
    "error",
    [KeyError("Field 'x'"), RecursionError("deep"), TypeError("no"), UnicodeDecodeError("utf-8", b"", 0, 1, "")],
)
def test_any_exception_of_a_reader_is_one_sentence(tmp_path: Path, error: Exception, monkeypatch) -> None:
    import datasets
    import pyarrow.parquet as pq

    def fail(*_: object, **__: object) -> None:
        raise error

    path = write(tmp_path / "a.parquet", TEXTS)
    datasets.disable_progress_bars()
    datasets.Dataset(table(TEXTS)).save_to_disk(tmp_path / "saved")
    for owner, name, given, fault in (
        (pq, "ParquetFile", path, "damaged parquet file"),
        (pq.ParquetFile, "iter_batches", path, "damaged parquet file"),
        (datasets.Dataset, "__getitem__", tmp_path / "saved", "`datasets` cannot read it"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"--input {given}: {fault}: "):
            patch.setattr(owner, name, fail)
            run(tmp_path, given)


def test_a_fault_of_our_own_keeps_its_traceback(tmp_path: Path, monkeypatch) -> None:
    """The border is around calls of libraries, and not around the tool."""

    def fail(*_: object, **__: object) -> None:
        raise KeyError("ours")

    path = write(tmp_path / "a.parquet", TEXTS)
    given = ["--input", str(path), "--output-prefix", str(tmp_path / "p"), "--tokenizer", "byte", "--workers", "1"]
    for owner, name in ((reading, "_row_chunks"), (reading, "Chunk"), (encoding, "documents_of")):
        with monkeypatch.context() as patch, pytest.raises(KeyError, match="ours"):
            patch.setattr(owner, name, fail)
            preprocess_data.command(given)


def test_a_container_without_proc(tmp_path: Path, monkeypatch) -> None:
    """--data-path and preprocess work, with the limits that the system names itself."""
    prefix = f"{run(tmp_path, write(tmp_path / 'a.jsonl', TEXTS))}_text_document"
    limits = [(64, 4096)]

    def listdir(path: str) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory", path)

    def opened(path: str, mode: str) -> io.BytesIO:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(corpora.os, "listdir", listdir)
    monkeypatch.setattr(corpora.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(corpora.resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    assert open_datasets((prefix,), "1", 5, 1, 257).train[0].ids.size == 6 and limits[-1] == (4096, 4096)
    before = encoding.resident_bytes()
    monkeypatch.setattr(encoding, "open", opened, raising=False)
    assert 0.5 < encoding.resident_bytes() / before < 20


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
    pytest.importorskip("gigatoken", reason="not installed: gigatoken")
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


def test_a_missing_gigatoken_is_named(bpe: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    monkeypatch.setattr(encoding, "fast_tokenizer", encoding.fast_tokenizer.__wrapped__)  # without its cache
    assert encoding.trust_gigatoken(str(bpe), []) == "it is not installed (`pip install gigatoken`)"


def test_a_tokenizer_that_gigatoken_does_not_know(tmp_path: Path, capsys) -> None:
    pytest.importorskip("gigatoken", reason="not installed: gigatoken")
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
