"""preprocess_data.py inside this process: bytes, order, omissions, every refusal."""

import contextlib
import gzip
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import threading
import zlib
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_tools import encoding, merge_datasets, preprocess_data, preprocess_options, reading, tool, train_tokenizer
from data_tools.selection import select
from data_tools.sources import find_sources
from megazero.data.indexed import IndexedDataset
from megazero.data.tokenizer import load_tokenizer
from megazero.flags.cli import parse
from megazero.units import things
from tests.helpers.table import for_each
from tests.unit.data_helpers import pack_index, pack_tokens, unpack_corpus, write_byte_tokenizer

EOD = 256


@pytest.fixture(autouse=True)
def no_commits_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine workers take longer to start than the tool waits for a commit: then an error keeps work."""
    monkeypatch.setattr(preprocess_data, "COMMIT_SECONDS", float("inf"))


def run(tmp_path: Path, *inputs: Path, prefix: str = "out/p", more: tuple[str, ...] = ()) -> Path:
    """Preprocess with the byte tokenizer; the prefix of the first corpus, without _<key>_document."""
    names = [str(path) for path in inputs]
    target = tmp_path / prefix
    arguments = ["--input", *names, "--output-prefix", str(target), "--tokenizer", "byte", *more]
    preprocess_data.main(arguments)
    return target


def write_jsonl(path: Path, *objects: object) -> Path:
    path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in objects))
    return path


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", {"text": "ab"}, {"text": "", "id": 1}, {"text": "é"})


RECORDED = "--tokenizer --json-keys --append-eod --dtype --dedup --partition --input-format".split()


@pytest.mark.parametrize("eod", [True, False])
def test_bytes_of_the_corpus(tmp_path: Path, lines: Path, eod: bool) -> None:
    prefix = run(tmp_path, lines, more=("--append-eod",) if eod else ())
    sequences = [[97, 98, EOD], [0xC3, 0xA9, EOD]] if eod else [[97, 98], [0xC3, 0xA9]]
    assert Path(f"{prefix}_text_document.bin").read_bytes() == pack_tokens(8, sequences)
    assert Path(f"{prefix}_text_document.idx").read_bytes() == pack_index(8, [len(s) for s in sequences], [0, 1, 2])
    about = json.loads(Path(f"{prefix}_text_document.json").read_text())
    assert set(about.pop("made_with")) == {"--input", *RECORDED}
    assert about.pop("checksum")["bin"] == [f"{zlib.crc32(pack_tokens(8, sequences)):08x}"]
    assert about == {
        "version": 1,
        "tokenizer": "byte",
        "tokenizer_hash": encoding.cached_tokenizer("byte").identity,
        "saved_tokenizer": "byte",
        "key": "text",
        "partition": "0/1",
        "sources": [{"input": str(lines), "documents": 2, "tokens": sum(map(len, sequences))}],
        "text_bytes": lines.stat().st_size,
        "empty_documents": 1,
        "duplicate_documents": 0,
        "skipped_lines": 0,
        "vocab_size": 257,
        "eod": EOD if eod else None,
        "bos": None,
        "dtype": "uint16",
        "num_documents": 2,
        "num_tokens": sum(map(len, sequences)),
        "max_id": EOD if eod else 0xC3,
    }
    assert sorted(path.name for path in prefix.parent.iterdir()) == [
        f"p_text_document.{end}" for end in ("bin", "idx", "json")
    ]


@for_each(
    ("begins", "flags", "bos"),
    [(True, (), [256]), (True, ("--no-prepend-bos",), None), (False, (), None), (False, ("--prepend-bos",), [256])],
)
def test_documents_begin_as_the_tokenizer_or_a_flag_says(
    tmp_path: Path, begins: bool, flags: tuple[str, ...], bos: list[int] | None
) -> None:
    """Once each. The copy of the tokenizer has the choice; another choice is another corpus."""
    theirs = write_byte_tokenizer(
        tmp_path / "t", ["<s>", "</s>"], begins=["<s>"] if begins else [], tokenizer_config={"bos_token": "<s>"}
    )
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "ab"}, {"text": ""}, {"text": "<s>a"}, {"text": "b"})
    more = ("--append-eod", "--tokenizer", str(theirs), "--workers", "1")
    prefix = run(tmp_path, path, more=(*more, *flags))
    first = bos or []
    found = unpack_corpus(Path(f"{prefix}_text_document"))[1]
    assert found == [[*first, 64, 65, 257], [256, 64, 257], [*first, 65, 257]]
    about = json.loads(Path(f"{prefix}_text_document.json").read_text())
    assert (about["bos"], about["empty_documents"]) == (bos, 1)
    assert list(load_tokenizer(f"{prefix}_tokenizer").bos) == first
    other = ("--no-prepend-bos",) if bos else ("--prepend-bos",)
    with pytest.raises(ValueError, match="it was made with other --prepend-bos;"):
        run(tmp_path, path, more=(*more, *other))
    made = [run(tmp_path, path, prefix=f"{k}/p", more=(*more, *flag)) for k, flag in enumerate((flags, other))]
    parts = [f"{each}_text_document" for each in made]
    with pytest.raises(ValueError, match=r"was made with another tokenizer than .*: bos "):
        merge_datasets.main(["--input", *parts, "--output-prefix", str(tmp_path / "m")])


def test_all_kinds_of_files_in_order(tmp_path: Path, lines: Path) -> None:
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "gz"}\r\n\n   \n{"text": "no newline at the end"}'))
    text = tmp_path / "c.md"
    text.write_text("# two\nlines\n")
    marked = tmp_path / "d.jsonl"
    marked.write_bytes(b'\xef\xbb\xbf{"text": "after a byte order mark"}\n')
    prefix = run(tmp_path, packed, text, lines, marked)
    found = [bytes(s).decode() for s in unpack_corpus(f"{prefix}_text_document")[1]]
    assert found == ["gz", "no newline at the end", "# two\nlines\n", "ab", "é", "after a byte order mark"]


def test_one_corpus_for_each_key(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"q": "1", "a": "2"}, {"q": "3", "a": ""}, {"a": "4", "q": "5"})
    prefix = run(tmp_path, path, more=("--json-keys", "q", "a"))
    for key, expected in (("q", b"135"), ("a", b"24")):
        found = unpack_corpus(f"{prefix}_{key}_document")
        assert found == (8, [[byte] for byte in expected], list(range(len(expected) + 1)))


def test_each_key_has_counts_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, and in the corpus's .json for each input. Documents are equal if all their keys are."""
    one = write_jsonl(
        tmp_path / "1.jsonl", {"q": "ab", "a": "x"}, {"q": "ab", "a": ""}, {"q": "ab", "a": "x"}, {"q": "", "a": ""}
    )
    two = write_jsonl(tmp_path / "2.jsonl", {"q": "ab", "a": ""}, {"q": "cde", "a": "wxyz"}, {"q": "cde", "a": "wxyz"})
    prefix = run(tmp_path, one, two, more=("--json-keys", "q", "a", "--dedup"))
    wanted = {"q": ([b"ab", b"ab", b"cde"], [(2, 4), (1, 3)], 1), "a": ([b"x", b"wxyz"], [(1, 1), (1, 4)], 2)}
    printed = capsys.readouterr().out
    for key, (documents, counts, empty) in wanted.items():
        assert unpack_corpus(f"{prefix}_{key}_document")[1] == list(map(list, documents))
        about = json.loads(Path(f"{prefix}_{key}_document.json").read_text())
        assert [(each["documents"], each["tokens"]) for each in about["sources"]] == counts
        assert (about["empty_documents"], about["duplicate_documents"]) == (empty, 3)
        number, total = len(documents), sum(map(len, documents))
        left_out = f"{things(empty, 'empty document')} left out"
        assert f"_{key}_document: {number} documents, {total} tokens, uint16; {left_out}\n" in printed
    assert "3 documents left out, equal to an earlier one\n" in printed


def test_lone_surrogates_become_replacement_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(r'{"text": "a\ud800b\ud83d\ude42"}')
    prefix = run(tmp_path, path)
    assert bytes(unpack_corpus(f"{prefix}_text_document")[1][0]).decode() == "a\ufffdb🙂"


def test_large_vocabulary_is_stored_as_int32(tmp_path: Path, lines: Path, monkeypatch) -> None:
    class Large(encoding.cached_tokenizer("byte").__class__):
        def __init__(self) -> None:
            super().__init__("byte")
            self.vocab_size = 65500

    for module in (preprocess_options, encoding):
        monkeypatch.setattr(module, "cached_tokenizer", lambda spec: Large())
    assert unpack_corpus(f"{run(tmp_path, lines)}_text_document")[0] == 4
    monkeypatch.setattr(Large, "__init__", lambda self: (super(Large, self).__init__("byte"), vars(self).update(
        vocab_size=65537))[0])  # fmt: skip
    with pytest.raises(ValueError, match="--dtype uint16 cannot hold the 65,537 ids"):
        run(tmp_path, lines, prefix="new/p", more=("--dtype", "uint16"))


@pytest.mark.parametrize(("dtype", "code"), [("auto", 8), ("uint16", 8), ("int32", 4)])
def test_dtype(tmp_path: Path, lines: Path, dtype: str, code: int) -> None:
    assert unpack_corpus(f"{run(tmp_path, lines, more=('--dtype', dtype))}_text_document")[0] == code


@pytest.mark.long
def test_workers_and_chunks_change_no_byte(tmp_path: Path, monkeypatch) -> None:
    objects = [{"text": f"document {k} " * (k % 7)} for k in range(200)]
    one, two = (write_jsonl(tmp_path / f"{k}.jsonl", *objects[k::2]) for k in range(2))
    expected = run(tmp_path, one, two, prefix="one/p")
    monkeypatch.setattr(reading, "CHUNK_BYTES", 100)
    small = run(tmp_path, one, two, prefix="small/p")
    many = run(tmp_path, one, two, prefix="many/p", more=("--workers", "2"))
    for end in ("bin", "idx", "json"):
        bytes_of = [Path(f"{p}_text_document.{end}").read_bytes() for p in (expected, small, many)]
        assert bytes_of[0] == bytes_of[1] == bytes_of[2]


@pytest.mark.second
def test_chunks_in_memory_are_bounded(tmp_path: Path, monkeypatch) -> None:
    """However far the reader could run ahead of slow workers, it must not: in number and in bytes."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", 1)
    path = write_jsonl(tmp_path / "a.jsonl", *({"text": "x"} for _ in range(100)))
    for limit, most in ((1 << 20, 2 * encoding.CHUNKS_PER_WORKER), (30, 3)):
        monkeypatch.setattr(encoding, "WAITING_BYTES", limit)
        read: list[reading.Chunk] = []
        sources = find_sources([str(path)], ["text"])
        chunks = (read.append(c) or c for c in reading.read_chunks(sources, ["text"]))
        job = encoding.Job("byte", select(["text"], "none"), False, "uint16")
        for done, _ in enumerate(encoding.encode_all(job, chunks, workers=2)):
            assert len(read) - done == min(most, 100 - done)  # as many as may be: the last is as parallel as the first
        assert len(read) == 100


@pytest.mark.second
@for_each("threads", [0, 1])
@for_each("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_the_workers_start_ends_them(
    tmp_path: Path, kind: signal.Signals, threads: int, monkeypatch
) -> None:
    """After the first worker, and before the thread that ends workers: they would wait for ever.

    The tool has other threads, such as a tokenizer's, and the system gives the signal to any that takes it.
    """
    start = SpawnProcess.start

    def interrupted(process: SpawnProcess) -> None:
        start(process)
        os.kill(os.getpid(), kind)

    handlers = [signal.signal(each, preprocess_data.stop) for each in encoding.INTERRUPTS]
    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    text = write_jsonl(tmp_path / "a.jsonl", {"text": "x"})
    done = threading.Event()
    for _ in range(threads):
        threading.Thread(target=done.wait).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, text, more=("--workers", "2"))
        assert multiprocessing.active_children() == []
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(encoding.INTERRUPTS) == set()
    finally:
        done.set()
        for child in multiprocessing.active_children():
            child.kill()
        for each, handler in zip(encoding.INTERRUPTS, handlers, strict=True):
            signal.signal(each, handler)
    assert not list((tmp_path / "out").iterdir())


def test_an_interrupt_of_the_group_leaves_workers_alone_that_start(tmp_path: Path, monkeypatch) -> None:
    start = SpawnProcess.start

    def interrupted(process: SpawnProcess) -> None:
        start(process)
        os.kill(process.pid, signal.SIGINT)

    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    text = write_jsonl(tmp_path / "a.jsonl", {"text": "ab"})
    prefix = run(tmp_path, text, more=("--workers", "2"))
    assert Path(f"{prefix}_text_document.bin").read_bytes() == pack_tokens(8, [[97, 98]])


@for_each(
    ("line", "words", "workers"),
    [
        (b'{"text": "x"', "malformed JSON", "1"),
        (b'{"text": "x"', "malformed JSON", "2"),
        (b"[1, 2]", "expected a JSON object, found list", "1"),
        (b'{"txt": "x"}', "--json-keys text: the key is missing, there are txt", "1"),
        (b'{"text": 3}', "--json-keys text: the key is no string", "1"),
        (b'{"text": "\xff"}', "invalid start byte", "1"),
        (b"[" * 100_000, "nested too deeply", "1"),
    ],
)
def test_bad_lines_are_named_and_leave_nothing(
    tmp_path: Path, line: bytes, words: str, workers: str, monkeypatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' * 3 + line + b'\n{"text": "good"}\n')
    with pytest.raises(ValueError, match=f"{path}:7: .*{words}"):
        run(tmp_path, path, more=("--workers", workers))
    assert list((tmp_path / "out").iterdir()) == []


def test_damaged_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "x"}\n' * 100)[:-12])
    with pytest.raises(ValueError, match=f"--input {path}: damaged gzip"):
        run(tmp_path, path)
    path.write_bytes(b"no gzip at all")
    with pytest.raises(ValueError, match=f"--input {path}: damaged gzip"):
        run(tmp_path, path)


def test_no_text_at_all(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"text": ""})
    with pytest.raises(ValueError, match="no document has any text under"):
        run(tmp_path, path, more=("--append-eod",))
    assert list((tmp_path / "out").iterdir()) == []


def test_arguments_are_checked_before_anything_is_written(tmp_path: Path, lines: Path) -> None:
    def refused(words: str, *inputs: Path, more: tuple[str, ...] = ()) -> None:
        with pytest.raises(ValueError, match=words):
            run(tmp_path, *inputs, more=more)
        assert not (tmp_path / "out").exists()

    missing, odd, text = tmp_path / "missing.jsonl", tmp_path / "a.xls", tmp_path / "a.txt"
    odd.touch()
    text.write_text("x")
    link = tmp_path / "link.jsonl"
    os.symlink(lines, link)
    refused(f"--input {missing}: No such file", lines, missing)
    refused(f"--input {odd}: unknown kind .*; or give --input-format$", odd)
    (tmp_path / "tables").mkdir()
    refused("a folder without a file .*; name files, or give --input-format", tmp_path / "tables")
    refused(r"--input \('a\\x00b',\): contains a null character", Path("a\0b"))
    refused(f"--input {link}: .* is the same file as {lines}", lines, link)
    refused("--workers -1: give 1 to", lines, more=("--workers", "-1"))
    refused("--workers 1000000000000: give 1 to", lines, more=("--workers", "1000000000000"))
    refused("--json-keys text text: a key is given twice", lines, more=("--json-keys", "text", "text"))
    refused("a text file has no --json-keys body", text, more=("--json-keys", "body"))
    refused("--tokenizer nowhere: cannot be read", lines, more=("--tokenizer", "nowhere"))


def test_append_eod_needs_an_eod(tmp_path: Path, lines: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    Backend(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    more = ("--tokenizer", str(tmp_path / "tokenizer.json"), "--append-eod")
    with pytest.raises(ValueError, match="has no end-of-document token"):
        run(tmp_path, lines, more=more)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_finished_corpus_is_not_replaced_by_another(tmp_path: Path, lines: Path) -> None:
    other = write_jsonl(tmp_path / "b.jsonl", {"text": "another text"})
    run(tmp_path, lines)
    made = files_of(tmp_path / "out")
    os.utime(lines, (0, 0))
    run(tmp_path, lines)  # the same command
    assert files_of(tmp_path / "out") == made
    way_out = "; name another output, or add --overwrite to replace it$"
    for inputs, more, names in (
        ([other], (), "--input"),
        ([lines, other], (), "--input"),
        ([lines], ("--append-eod",), "--append-eod"),
        ([lines], ("--dtype", "int32", "--dedup"), "--dtype, --dedup"),
    ):
        with pytest.raises(ValueError, match=f"_text_document.idx exists, and it was made with other {names}{way_out}"):
            run(tmp_path, *inputs, more=more)
        assert files_of(tmp_path / "out") == made
    with pytest.raises(ValueError, match="no document has any text"):  # another corpus, whose files do not exist
        run(tmp_path, write_jsonl(tmp_path / "c.jsonl", {"body": ""}), more=("--json-keys", "body"))
    run(tmp_path, other, more=("--overwrite",))
    assert files_of(tmp_path / "out").keys() == made.keys() and files_of(tmp_path / "out") != made
    (tmp_path / "out" / "p_text_document.json").unlink()  # as of Megatron-LM
    with pytest.raises(ValueError, match=f"idx exists, and there is no record of the options that made it{way_out}"):
        run(tmp_path, other)


@for_each(
    ("name", "end"),
    [
        ("text", "_tokenizer"),
        ("byte", "_tokenizer"),
        ("text", "_skipped.txt"),
        ("link", "_tokenizer"),
        ("merge", "_tokenizer"),
    ],
)
def test_a_folder_of_the_user_is_not_replaced(tmp_path: Path, name: str, end: str) -> None:
    """At the name of a corpus's tokenizer, or of its bad lines; those of a corpus are replaced with it."""
    tokenizer = write_byte_tokenizer(tmp_path / "t", ["<s>"])
    more = ("--tokenizer", "byte" if name == "byte" else str(tokenizer), "--workers", "1", "--overwrite")
    path, own = write_jsonl(tmp_path / "a.jsonl", {"text": "ab"}, {}), tmp_path / "out" / f"p{end}"
    prefix = run(tmp_path, path, prefix="made/p", more=(*more, "--on-bad-line", "skip"))

    def write() -> None:
        if name == "merge":
            given = ["--input", f"{prefix}_text_document", "--output-prefix", str(tmp_path / "out" / "p_text_document")]
            merge_datasets.main(given)
        else:
            run(tmp_path, path, more=(*more, "--on-bad-line", "skip"))

    (tmp_path / "mine").mkdir()
    own.parent.mkdir()
    if end == "_skipped.txt":
        own.write_text("mine")
    elif name == "link":
        own.symlink_to(tmp_path / "mine")
    else:
        shutil.copytree(tmp_path / "mine", own)
        (own / "notes").write_text("mine")
    with pytest.raises(ValueError, match=rf"--output-prefix .*p: {own} exists, and no .*; move it, or name another"):
        write()
    assert [each.name for each in own.parent.iterdir()] == [own.name]
    os.rename(own, tmp_path / "moved")
    write()
    write()
    assert own.exists() == (name != "byte")


def test_text_from_a_pipe_is_never_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        reader, writer = os.pipe()
        os.write(writer, b'{"text": "ab"}\n')
        os.close(writer)
        with os.fdopen(reader, encoding="utf-8") as text:
            monkeypatch.setattr("sys.stdin", text)
            given = ["--input", "-", "--output-prefix", str(tmp_path / "p"), "--tokenizer", "byte"]
            with pytest.raises(ValueError, match="made with other --input;") if number else contextlib.nullcontext():
                preprocess_data.main([*given, "--workers", "1"])


def test_a_finished_tokenizer_is_not_replaced_by_another(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", *({"text": f"some words {k} and more words"} for k in range(300)))

    def train(size: int, *more: str) -> dict[str, bytes]:
        given = ["--input", str(path), "--output", str(tmp_path / "t"), "--vocab-size", str(size), *more]
        train_tokenizer.main(given)
        return files_of(tmp_path / "t")

    made = train(280)
    assert train(280) == made
    refusals = {
        (281,): "tokenizer.json exists, and it was made with other --vocab-size;",
        (300, "--model", "sentencepiece"): "tokenizer.json exists, .* other --vocab-size, --model;",
    }
    for given, words in refusals.items():
        with pytest.raises(ValueError, match=rf"^--output {tmp_path}/t: .*{words} .* add --overwrite"):
            train(*given)
        assert files_of(tmp_path / "t") == made
    assert train(281, "--overwrite") != made
    assert set(train(300, "--model", "sentencepiece", "--overwrite")) >= {"tokenizer.model", "made_with.json"}
    assert not (tmp_path / "t" / "tokenizer.json").exists()
    (tmp_path / "t" / "made_with.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer.model exists, and there is no record"):
        train(280)


def test_trained_tokenizer_is_deterministic_and_checked(tmp_path: Path, capsys) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", *({"text": f"some words {k} and more words"} for k in range(300)))
    for name in "ab":
        arguments = ["--input", str(path), "--output", str(tmp_path / name), "--vocab-size", "280"]
        train_tokenizer.main(arguments)
    assert f"{tmp_path}/b: 280 tokens" in capsys.readouterr().out
    names = ["made_with.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == names
    assert all((tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names)
    with pytest.raises(ValueError, match=r"--vocab-size 256: .*give 257 or more"):
        train_tokenizer.main(["--input", str(path), "--output", "x", "--vocab-size", "256"])


def test_progress_has_the_rates_of_this_process_and_the_time_left_at_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """500 of 1,000 MB on disk are an earlier process's. 100 MB, of 240 MB of text, took 600 s, so 400 MB take 2,400."""
    now, shown = [0.0], list[dict[str, Any]]()
    monkeypatch.setattr(tool, "time", SimpleNamespace(monotonic=lambda: now[0]))
    bar: Any = SimpleNamespace(disable=True, update=lambda task, **values: shown.append(values))
    reporter = tool.Reporter(bar, None, 1000 * 10**6)
    reporter.advance(900 * 10**6, 500 * 10**6, 77, counts=False)
    now[0] = 600.0
    reporter.advance(240 * 10**6, 100 * 10**6, 30_000_000)
    assert capsys.readouterr().err == "60%, 240 MB, 0.4 MB/s, 50,000 tokens/s, about 40 min left\n"
    assert shown[-1] == {"completed": 600 * 10**6, "rate": "240 MB, 0.4 MB/s, 50,000 tokens/s"}
    now[0] = 610.0
    reporter.advance(0, 0)
    assert capsys.readouterr().err == ""  # the last line is not old
    unknown = tool.Reporter(bar, None, 0)
    now[0] = 1210.0
    unknown.advance(120 * 10**6, 60 * 10**6)
    assert capsys.readouterr().err == "120 MB, 0.2 MB/s\n"


def next_command(said: str) -> list[str]:
    """The last line of a tool's output, as words behind `python PROGRAM`."""
    python, _, *words = shlex.split(said.splitlines()[-1])
    assert python == "python"
    return words


@pytest.mark.second
@pytest.mark.long
def test_each_tool_names_the_next_command(tmp_path: Path, lines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands as printed: tokenizer, tokens, training; and parts that are joined."""
    train_tokenizer.main(["--input", str(lines), "--output", str(tmp_path / "t"), "--vocab-size", "257"])
    words = next_command(capsys.readouterr().out)
    prefix = str(tmp_path / "a corpus")
    preprocess_data.main([prefix if word == "PREFIX" else word for word in words])
    said = capsys.readouterr().out
    assert "a corpus_text_document: 2 documents, " in said and "; 1 empty document left out" in said
    run(tmp_path, write_jsonl(tmp_path / "full.jsonl", {"text": "a"}), prefix="full")
    assert "full_text_document: 1 document, 1 token, uint16\n" in capsys.readouterr().out
    (corpus,) = parse(next_command(said)).data.data_path
    assert IndexedDataset(corpus).num_documents == 2
    whole = Path(f"{corpus}.bin").read_bytes()
    for part in range(3):
        more = ["--output-prefix", str(tmp_path / "p"), "--partition", f"{part}/3"]
        preprocess_data.main(["--input", str(lines), "--tokenizer", str(tmp_path / "t"), "--append-eod", *more])
    merge_datasets.main(next_command(capsys.readouterr().out))
    assert (tmp_path / "p_text_document.bin").read_bytes() == whole
