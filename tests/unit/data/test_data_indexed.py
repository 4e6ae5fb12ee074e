"""The .bin/.idx format, byte for byte, and the messages of damaged corpora."""

import itertools
import json
import os
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from megazero.data import indexed
from megazero.data import writer as writer_module
from megazero.data.indexed import IndexedDataset, dtype_for
from megazero.data.writer import IndexedWriter
from tests.helpers.table import for_each
from tests.unit.data_helpers import pack_index, pack_tokens, unpack_corpus, write_corpus

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12]]


@for_each("code", [1, 2, 3, 4, 5, 8])
def test_reads_every_token_type(tmp_path: Path, code: int) -> None:
    data = IndexedDataset(write_corpus(tmp_path / "c", DOCUMENTS, code=code))
    assert (data.num_documents, data.num_tokens) == (3, 8)
    assert [data.document(i).tolist() for i in range(3)] == DOCUMENTS
    assert data.tokens(2, 5).tolist() == [7, 8, 9]
    assert data.lengths.dtype == np.int32 and data.lengths.tolist() == [3, 1, 4]
    assert data.document_indices.dtype == np.int64 and data.document_indices.tolist() == [0, 1, 2, 3]


def test_documents_of_several_and_of_no_sequences(tmp_path: Path) -> None:
    data = IndexedDataset(write_corpus(tmp_path / "c", DOCUMENTS, documents=[0, 0, 2, 2, 3, 3]))
    documents = [data.document(i).tolist() for i in range(data.num_documents)]
    assert documents == [[], [5, 6, 7, 8], [], [9, 10, 11, 12], []]


@for_each("chunk", [1, 2, 3, 1 << 16])
def test_lengths_of_documents_wherever_chunks_end(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One document of two sequences, or of none, at each place among those of one."""
    monkeypatch.setattr(indexed, "CHUNK", chunk)
    for place, step in itertools.product(range(6), (0, 2)):
        counts = [1] * place + [step] + [1] * (5 - place)
        ends = list(itertools.accumulate(counts, initial=0))
        sequences = [[7] * (number + 1) for number in range(ends[-1])]
        data = IndexedDataset(write_corpus(tmp_path / "c", sequences, documents=ends))
        wanted = [sum(map(len, sequences[a:b])) for a, b in itertools.pairwise(ends)]
        for first, stop in ((0, 6), (1, 5), (2, 3)):
            assert data.document_lengths(first, stop).tolist() == wanted[first:stop], (place, step, first)


def test_multimodal_index_is_read_without_its_modes(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", DOCUMENTS)
    with open(f"{prefix}.idx", "ab") as file:
        file.write(bytes(3))
    assert IndexedDataset(prefix).document(2).tolist() == DOCUMENTS[2]


@for_each("chunk", [1, 2, 1 << 20])
@for_each(("dtype", "code"), [(np.uint16, 8), (np.int32, 4)])
def test_writer_is_byte_for_byte(tmp_path: Path, dtype, code: int, chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(writer_module, "CHUNK", chunk)
    with IndexedWriter(tmp_path / "c", dtype) as writer:
        writer.add(DOCUMENTS[0])
        writer.add_documents(np.array(DOCUMENTS[1] + DOCUMENTS[2]), np.array([1, 4], dtype=np.int32))
    assert (tmp_path / "c.bin").read_bytes() == pack_tokens(code, DOCUMENTS)
    assert (tmp_path / "c.idx").read_bytes() == pack_index(code, [3, 1, 4], [0, 1, 2, 3])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx"]
    assert IndexedDataset(tmp_path / "c").document(2).tolist() == DOCUMENTS[2]


def test_writer_keeps_sequences_of_a_document(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "c", np.int32) as writer:
        writer.add([1, 2], [3])
        writer.add()
        writer.add([4])
    assert unpack_corpus(tmp_path / "c") == (4, [[1, 2], [3], [4]], [0, 2, 2, 3])


def test_writer_notes_what_it_wrote(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "c", np.uint16, about={"tokenizer": "byte", "vocab_size": 257}) as writer:
        writer.add([1, 256])
    about = json.loads((tmp_path / "c.json").read_text())
    assert about == {
        "tokenizer": "byte",
        "vocab_size": 257,
        "dtype": "uint16",
        "num_documents": 1,
        "num_tokens": 2,
        "max_id": 256,
        "version": 1,
        "checksum": {
            "algorithm": "crc32",
            "block_bytes": 16 << 20,
            "bin": [f"{zlib.crc32(struct.pack('<HH', 1, 256)):08x}"],
            "idx": [f"{zlib.crc32((tmp_path / 'c.idx').read_bytes()):08x}"],
        },
    }


def test_failed_writer_leaves_nothing_and_spares_the_old_corpus(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", DOCUMENTS)
    with pytest.raises(KeyboardInterrupt), IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.add([1])
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx"]
    assert IndexedDataset(tmp_path / "c").num_tokens == 8


def test_index_comes_last(tmp_path: Path, monkeypatch) -> None:
    """A run that dies between two renames must not leave an old index next to new tokens."""
    write_corpus(tmp_path / "c", DOCUMENTS)
    names = []

    def replace(source: str, target: str) -> None:
        if Path(target).name in ("c.bin", "c.json", "c.idx"):
            assert not (tmp_path / "c.idx").exists()
            names.append(Path(target).name)
        Path(source).rename(target)

    monkeypatch.setattr(os, "replace", replace)
    with IndexedWriter(tmp_path / "c", np.uint16, about={}) as writer:
        writer.add([1])
    assert names == ["c.bin", "c.json", "c.idx"]


@for_each("ids", [[70000], [-1]])
def test_writer_refuses_ids_that_do_not_fit(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="do not fit"), IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.add(ids)
    assert list(tmp_path.iterdir()) == []


def test_dtype_for() -> None:
    assert (dtype_for(65499), dtype_for(65500)) == (np.uint16, np.int32)


GOOD = pack_index(8, [3, 1, 4], [0, 1, 2, 3])


@for_each(
    ("index", "words"),
    [
        (b"", "no Megatron index"),
        (GOOD[:5], "truncated"),
        (GOOD[:33], "truncated"),
        (GOOD[:34], "truncated: 34 bytes, its header promises 102"),
        (GOOD[:-1], "truncated: 101 bytes, its header promises 102"),
        (GOOD + b"x", "damaged"),
        (b"TNTIDX\0\0" + GOOD[8:], "legacy TNTIDX format.*preprocess"),
        (b"PK\3\4" + GOOD[4:], "no Megatron index"),
        (pack_index(8, [3, 1, 4], [0, 1, 2, 3], version=2), "index version 2, and only 1"),
        (pack_index(6, [3, 1, 4], [0, 1, 2, 3]), "code 6, float32 in one fork"),
        (pack_index(7, [3, 1, 4], [0, 1, 2, 3]), "code 7, float32 in one fork"),
        (pack_index(9, [3, 1, 4], [0, 1, 2, 3]), "code 9, which is unknown"),
        (pack_index(8, [3, 1, 4], [0, 1, 2, 3], offsets=[0, 6, 10]), "inconsistent at sequence 2.*offset 10"),
        (pack_index(8, [3, 1, 4], [0, 1, 2, 3], offsets=[2, 6, 8]), "inconsistent at sequence 0"),
        (pack_index(8, [3, -1, 6], [0, 1, 2, 3]), "inconsistent at sequence 1: length -1"),
        (pack_index(8, [3, 1, 4], [0, 2, 1, 3]), "document indices"),
        (pack_index(8, [3, 1, 4], [0, 1, 2]), "document indices"),
        (pack_index(8, [3, 1, 4], [1, 2, 3]), "document indices"),
        (pack_index(8, [3, 1, 4], []), "document indices"),
        (pack_index(8, [3, 1, 3], [0, 1, 2, 3]), "does not belong to this .idx: 16 bytes"),
        (pack_index(8, [3, 1, 5], [0, 1, 2, 3]), r"\.bin is truncated: 16 bytes, the index describes 18"),
    ],
)
@for_each("chunk", [1, 1 << 20])
def test_damaged_corpus(tmp_path: Path, index: bytes, words: str, chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(indexed, "CHUNK", chunk)  # 1: borders between chunks everywhere
    prefix = write_corpus(tmp_path / "c", DOCUMENTS)
    Path(f"{prefix}.idx").write_bytes(index)
    with pytest.raises(ValueError, match=f"--data-path {prefix}: .*{words}"):
        IndexedDataset(prefix)


def refusal(prefix: Path) -> str:
    with pytest.raises(ValueError, match=f"^--data-path {prefix}: ") as caught:
        IndexedDataset(prefix)
    return str(caught.value)


def test_missing_files(tmp_path: Path) -> None:
    assert f"no file {tmp_path}/c.bin or {tmp_path}/c.idx; make a corpus with" in refusal(tmp_path / "c")
    (tmp_path / "c.txt").write_text("a text")
    said = refusal(tmp_path / "c.txt")
    assert f"--input {tmp_path}/c.txt --output-prefix runs/c --tokenizer byte" in said and "did you mean" not in said
    write_corpus(tmp_path / "c", DOCUMENTS)
    assert f"did you mean {tmp_path}/c?" in refusal(tmp_path / "c.bin")
    (tmp_path / "c.bin").unlink()
    assert f"no file {tmp_path}/c.bin; make a corpus" in refusal(tmp_path / "c")
    (tmp_path / "c.bin").mkdir()
    assert f"no file {tmp_path}/c.bin; make a corpus" in refusal(tmp_path / "c")


@for_each(
    ("magic", "kind", "words"),
    [(0, "<u2", "copy that file too"), (20240520, "<u2", "llm.c"), (20240801, "<u4", "llm.c")],
)
@for_each("end", ["", ".bin"])
def test_tokens_of_other_programs_become_a_corpus_by_the_lines_of_the_readme(
    tmp_path: Path, magic: int, kind: str, words: str, end: str, monkeypatch
) -> None:
    """A file without an index is named, whether or not --data-path has its ending."""
    header, eod = (1024, 128000 if kind == "<u4" else 50256) if magic else (0, 50256)
    raw = np.array([magic, 1, 7] if magic else [], "<i4").tobytes().ljust(header, b"\0")
    (tmp_path / "train.v1.bin").write_bytes(raw + np.array([1, 2, eod, 3, eod, 4, 5], kind).tobytes())
    said = refusal(tmp_path / f"train.v1{end}")
    assert f"{tmp_path}/train.v1.bin has no {tmp_path}/train.v1.idx; " in said
    assert words in said and "did you mean" not in said
    readme = (Path(indexed.__file__).parents[2] / "data_tools" / "README.md").read_text()
    assert "### Tokens of nanoGPT and llm.c\n" in readme and '"Tokens of nanoGPT and llm.c"' in said
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    own = f"kind, header, eod = {'np.uint32' if kind == '<u4' else 'np.uint16'}, {header}, {eod}"
    monkeypatch.chdir(tmp_path)
    exec(re.sub("kind, header, eod = .*", own, code.replace("train.bin", "train.v1.bin")), {})
    data = IndexedDataset("data/train")
    assert [data.document(k).tolist() for k in range(data.num_documents)] == [[1, 2, eod], [3, eod], [4, 5]]


def test_a_prefix_without_its_key_is_completed(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus_text_document", DOCUMENTS)
    assert f"did you mean {tmp_path}/corpus_text_document?" in refusal(tmp_path / "corpus")
    assert "did you mean" not in refusal(tmp_path / "other")


def test_huge_counts_in_a_header_do_not_allocate(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", DOCUMENTS)
    Path(f"{prefix}.idx").write_bytes(GOOD[:18] + struct.pack("<QQ", 2**63, 2**63) + GOOD[34:])
    with pytest.raises(ValueError, match="truncated"):
        IndexedDataset(prefix)
