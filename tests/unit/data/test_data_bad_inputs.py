"""The table of bad inputs in data_tools/README.md: each row's input gets the row's sentence, and leaves nothing."""

import errno
import gzip
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from data_tools import encoding, preprocess_data, tool
from data_tools.chat import cached_template
from data_tools.preprocess_data import main
from megazero.data.indexed import IndexedDataset
from megazero.files import OutputFile
from tests.helpers.table import for_each
from tests.unit.data.test_data_masks import CHATML, write_chat_tokenizer

README = Path(__file__).parents[3] / "data_tools" / "README.md"
GOOD = b'{"text": "good"}\n'


def rows() -> dict[str, list[str]]:
    """Input -> the sentences of its row."""
    table = README.read_text().split("| input | sentence |")[1].split("\n\n")[0]
    cells = [line.strip("| ").split(" | ", 1) for line in table.splitlines()[2:]]
    return {name: re.findall(r"`([^`]*)`", sentences) for name, sentences in cells}


def seventh(line: bytes) -> Callable[[pytest.MonkeyPatch], list[str]]:
    """A file whose seventh line is `line`."""

    def make(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        Path("x.jsonl").write_bytes(GOOD * 6 + line + b"\n")
        return []

    return make


def unreadable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Path("x.jsonl").write_bytes(GOOD)
    Path("x.jsonl").chmod(0)
    if os.geteuid() == 0:  # who may read all
        real = open

        def refusing(path, *arguments, **options):
            if path == "x.jsonl":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return real(path, *arguments, **options)

        monkeypatch.setattr("builtins.open", refusing)
    return []


def folder(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Path("x").mkdir()
    return ["--input", "x"]


def fifo(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    os.mkfifo("x")
    return ["--input", "x"]


def parquet(**columns: list[object]) -> Callable[[pytest.MonkeyPatch], list[str]]:
    def make(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table(columns), "x.parquet")
        return ["--input", "x.parquet"]

    return make


def csv_of(raw: bytes) -> Callable[[pytest.MonkeyPatch], list[str]]:
    def make(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        Path("x.csv").write_bytes(raw)
        return ["--input", "x.csv"]

    return make


def damaged(name: str) -> Callable[[pytest.MonkeyPatch], list[str]]:
    def make(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        text = GOOD * 100
        pq.write_table(pa.table({"text": ["good"] * 100}), "whole.parquet")
        with pa.ipc.new_file("whole.arrow", pa.schema([("text", pa.string())])) as writer:
            writer.write_table(pa.table({"text": ["good"] * 100}))
        whole = {
            ".gz": gzip.compress(text),
            ".zst": pa.compress(text, codec="zstd", asbytes=True),
            ".parquet": Path("whole.parquet").read_bytes(),
            ".arrow": Path("whole.arrow").read_bytes(),
        }[Path(name).suffix]
        Path(name).write_bytes(whole[:-7])
        return ["--input", name]

    return make


def tokenizer_of(size: int, *more: str) -> Callable[[pytest.MonkeyPatch], list[str]]:
    """A tokenizer of `size` tokens, none of which ends a document."""

    def make(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        Path("x.jsonl").write_bytes(GOOD)
        Path("DIR").mkdir()
        Tokenizer(models.BPE({f"w{k}": k for k in range(size)}, [])).save("DIR/tokenizer.json")
        return ["--tokenizer", "DIR", *more]

    return make


def own_code(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Path("x.jsonl").write_bytes(GOOD)
    Path("DIR").mkdir()
    Path("DIR/tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Own", null]}}')
    return ["--tokenizer", "DIR"]


def chat(template: str | None, line: str) -> Callable[[pytest.MonkeyPatch], list[str]]:
    """Six conversations and a seventh line, and a tokenizer with a chat template."""

    def make(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        turns = [{"role": role, "content": "<b>w</b>"} for role in ("user", "user" if "user" in line else "assistant")]
        Path("x.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 6 + line)
        write_chat_tokenizer(Path("DIR"), template)
        return ["--tokenizer", "DIR", "--mask-from", "chat"]

    return make


def no_text(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Path("x.jsonl").write_text('{"text": ""}\n' * 3)
    return []


def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Path("x.jsonl").write_bytes(GOOD * 5000)
    write, written = OutputFile.write, []

    def filling(self: OutputFile, data: bytes) -> None:
        written.append(len(data))
        if len(written) > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "P.partial/0.bin")
        write(self, data)

    monkeypatch.setattr(OutputFile, "write", filling)
    monkeypatch.setattr("data_tools.reading.CHUNK_BYTES", 1000)
    monkeypatch.setattr(preprocess_data, "COMMIT_BYTES", 1)
    return []


ROWS: dict[str, list[Callable[[pytest.MonkeyPatch], list[str]]]] = {
    "missing file": [lambda monkeypatch: []],
    "unreadable": [unreadable],
    "a folder without text, a FIFO, a device": [folder, fifo],
    "binary, or not UTF-8": [seventh(b"\xff\xfe\x00")],
    "not JSON": [seventh(b'{"text": "x"')],
    "no object": [seventh(b"[1, 2]")],
    "wrong key": [seventh(b'{"txt": "x"}')],
    "wrong column": [parquet(id=[1], body=["x"])],
    "rows of a `.csv` that differ": [csv_of(b'id,text\n1,a\n2,"b",c\n')],
    "null in a column": [parquet(text=["good"] * 12 + [None])],
    "no chat template": [chat(None, "")],
    "an unsuitable one": [chat(CHATML.replace("assistant\n' }}{% endif", "assistant:' }}{% endif"), "")],
    "no conversation": [chat(CHATML, '{"messages": "hello"}')],
    "no target at all": [chat(CHATML, '{"messages": [{"role": "user", "content": "hello"}]}')],
    "damaged .gz, .zst, .parquet, .arrow": [
        damaged(name) for name in ("x.jsonl.gz", "x.jsonl.zst", "x.parquet", "x.arrow")
    ],
    "half a surrogate pair": [],  # no error: see below
    "a tokenizer without end of document": [tokenizer_of(9, "--append-eod")],
    "ids beyond `--dtype`": [tokenizer_of(70_000, "--dtype", "uint16")],
    "a tokenizer with code of its own": [own_code],
    "no text at all": [no_text],
    "full disk (exit code 1)": [full_disk],
}


def said_by(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    given = {"--input": "x.jsonl", "--output-prefix": "P", "--tokenizer": "byte", "--workers": "1"}
    for flag in arguments[::2]:
        given.pop(flag, None)
    words = [word for pair in given.items() for word in pair] + arguments
    encoding.cached_tokenizer.cache_clear()  # of a folder of the same name
    encoding.fast_tokenizer.cache_clear()
    cached_template.cache_clear()
    monkeypatch.setattr(sys, "argv", ["preprocess_data.py", *words])
    with pytest.raises(SystemExit) as caught:
        tool.run_tool(main, preprocess_data.PROGRAM)
    return int(str(caught.value.code)), capsys.readouterr().err


@for_each("name", ROWS)
def test_a_row_of_the_table(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The program prints one line, which contains the table's text; no file has a final name."""
    sentences = rows()[name]
    monkeypatch.setattr(preprocess_data, "COMMIT_SECONDS", float("inf"))
    for number, make in enumerate(ROWS[name]):
        (tmp_path / str(number)).mkdir()
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path / str(number))
            code, said = said_by(make(patch), patch, capsys)
            left = [path.name for path in Path().iterdir() if path.name.startswith("P")]
        (line,) = [line for line in said.splitlines() if "error: " in line]
        assert not said.count("Traceback") and said.endswith(f"{line}\n")
        sentence = sentences[number if len(ROWS[name]) == len(sentences) else 0]
        words = [re.escape(part.strip()) for part in sentence.split("...")]
        assert re.fullmatch("preprocess_data.py: error: " + ".*".join(words), line), (sentence, line)
        full = name.startswith("full disk")
        assert code == (1 if full else 2) and left == (["P.partial"] if full else [])


def test_every_row_of_the_table_is_tried() -> None:
    assert list(rows()) == list(ROWS)


def test_half_a_surrogate_pair(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(rb'{"text": "a\ud83db"}')
    main([*("--input", f"{tmp_path}/x.jsonl", "--output-prefix", f"{tmp_path}/P"), *("--tokenizer", "byte")])
    data = IndexedDataset(tmp_path / "P_text_document")
    assert bytes(data.tokens(0, data.num_tokens).astype("u1")).decode() == "a\N{REPLACEMENT CHARACTER}b"
