"""merge_datasets, check_dataset, peek, and tokenizers that travel with the data."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from data_tools import check_dataset, merge_datasets, peek, preprocess_data, train_tokenizer
from megazero.data.corpora import open_datasets
from megazero.data.indexed import IndexedDataset
from megazero.data.remembered import data_tokenizer
from megazero.data.tokenizer import load_tokenizer
from megazero.flags.config import Config, DataConfig, ModelConfig
from tests.helpers.table import for_each
from tests.unit.data_helpers import unpack_corpus, write_byte_tokenizer, write_corpus

TEXTS = [f"document <{k}> & [b]some[/b] words " * (1 + k % 9) for k in range(200)]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bpe")
    train_tokenizer.save(train_tokenizer.train_bpe(iter([TEXTS]), 400), folder)
    return folder


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", *TEXTS]))
    return path


def preprocess(prefix: Path, lines: Path, tokenizer: object, *more: str) -> str:
    given = ["--input", str(lines), "--output-prefix", str(prefix), "--tokenizer", str(tokenizer), "--workers", "1"]
    preprocess_data.main([*given, "--append-eod", *more])
    return f"{prefix}_text_document"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["byte", pytest.param("bpe", marks=pytest.mark.second)])
def test_joined_parts_are_the_whole_byte_for_byte(tmp_path: Path, lines: Path, bpe: Path, kind: str) -> None:
    tokenizer = "byte" if kind == "byte" else bpe
    whole = preprocess(tmp_path / "whole" / "c", lines, tokenizer)
    for index in range(3):
        preprocess(tmp_path / "parts" / "c", lines, tokenizer, "--partition", f"{index}/3")
    parts = sorted(str(path) for path in (tmp_path / "parts").glob("*.idx"))
    assert len(parts) == 3
    target = tmp_path / "joined" / "c_text_document"
    merge_datasets.main(["--input", *parts, "--output-prefix", str(target)])
    for end in ("bin", "idx", "json"):
        assert Path(f"{target}.{end}").read_bytes() == Path(f"{whole}.{end}").read_bytes()
    if kind == "bpe":
        shutil.rmtree(tmp_path / "parts")
        assert load_tokenizer(str(tmp_path / "joined" / "c_tokenizer")).identity == load_tokenizer(str(bpe)).identity


def test_merging_keeps_documents_of_several_sequences(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(merge_datasets, "CHUNK", 3)
    sequences = [[1, 2, 3], [4], [5, 6, 7, 8], [9]]
    write_corpus(tmp_path / "a", sequences, documents=[0, 0, 2, 3, 3, 4])
    write_corpus(tmp_path / "b", [[10]], documents=[0, 1, 1])
    write_corpus(tmp_path / "none", [])
    inputs = [str(tmp_path / name) for name in ("a", "none", "b")]
    merge_datasets.main(["--input", *inputs, "--output-prefix", str(tmp_path / "m")])
    assert unpack_corpus(tmp_path / "m") == (8, [*sequences, [10]], [0, 0, 2, 3, 3, 4, 5, 5])
    assert not (tmp_path / "m.json").exists()


def test_what_does_not_fit_is_not_joined(tmp_path: Path, lines: Path, bpe: Path) -> None:
    one = preprocess(tmp_path / "one", lines, "byte")
    other = preprocess(tmp_path / "other", lines, bpe)
    wide = preprocess(tmp_path / "wide", lines, "byte", "--dtype", "int32")

    def refused(words: str, *inputs: str, target: Path = tmp_path / "m") -> None:
        with pytest.raises(ValueError, match=words):
            merge_datasets.main(["--input", *inputs, "--output-prefix", str(target)])
        assert not list(tmp_path.glob("m.*"))

    refused(f"--input {other} was made with another tokenizer than {one}: tokenizer_hash", one, other)
    refused(f"--input {wide} has int32 tokens, and {one} uint16", one, wide)
    refused("is named twice", one, one)
    refused("is also an --input", one, target=Path(one))
    refused("no file", one, str(tmp_path / "none"))
    raw = Path(f"{one}.bin").read_bytes()
    Path(f"{one}.bin").write_bytes(raw[:50] + b"!!" + raw[52:])
    refused("is damaged between bytes", one)


def test_check_dataset(tmp_path: Path, lines: Path, bpe: Path, capsys) -> None:
    prefix = preprocess(tmp_path / "c", lines, bpe)
    check_dataset.main(["--input", f"{prefix}.idx", "--tokenizer", str(bpe)])
    size = load_tokenizer(str(bpe)).vocab_size
    assert f"200 documents, {IndexedDataset(prefix).num_tokens:,} tokens, ids 0 to" in (said := capsys.readouterr().out)
    assert f"of a vocabulary of {size:,}; checksums right" in said
    with pytest.raises(ValueError, match=f"made with another tokenizer than --tokenizer byte: {bpe}"):
        check_dataset.main(["--input", prefix, "--tokenizer", "byte"])
    about, raw = Path(f"{prefix}.json"), Path(f"{prefix}.bin").read_bytes()
    good = about.read_text()
    about.write_text(good.replace('"max_id": ', '"max_id": 1'))
    with pytest.raises(ValueError, match="has max_id 1"):
        check_dataset.main(["--input", prefix])
    about.write_text(good)
    Path(f"{prefix}.bin").write_bytes(raw[:-1] + b"\xff")
    with pytest.raises(ValueError, match="is damaged between bytes"):
        check_dataset.main(["--input", prefix])
    about.unlink()
    check_dataset.main(["--input", prefix])
    assert "no checksums" in capsys.readouterr().out
    with pytest.raises(ValueError, match=rf"holds token id \d+ among .*outside the vocabulary of {size}"):
        check_dataset.main(["--input", prefix, "--tokenizer", str(bpe)])


class Page(HTMLParser):
    """The text of a page, and whether every element that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.open, self.tags = "", [], set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_peek_as_a_page(tmp_path: Path, lines: Path, bpe: Path, capsys) -> None:
    prefix = preprocess(tmp_path / "c", lines, bpe)
    peek.main([prefix, "--documents", "4", "--html", str(tmp_path / "c.html")])
    page = Page((tmp_path / "c.html").read_text())
    assert page.open == [] and not page.tags & {"b", "script"}  # markup in a corpus is text
    for words in (str(lines), "200", "document <150> & [b]some[/b] words", "tokenizer_hash", "document 100"):
        assert words in page.text
    assert "document <150> & [b]some[/b] words" in capsys.readouterr().out
    spans = peek.histogram(IndexedDataset(prefix))
    lengths = [len(s) for s in unpack_corpus(Path(prefix))[1]]
    assert [(s.documents, s.tokens) for s in spans] == [
        (sum(s.low <= n <= s.high for n in lengths), sum(n for n in lengths if s.low <= n <= s.high)) for s in spans
    ]
    assert sum(s.documents for s in spans) == 200


def test_peek_shows_each_number_in_its_row(tmp_path: Path, capsys) -> None:
    """Documents of 2, 7, 5 and 210 tokens, the second in two sequences; the last has 204 targets."""
    prefix = write_corpus(tmp_path / "c", [[1] * 2, [2] * 3, [3] * 4, [4] * 5, [*range(210)]], [0, 1, 3, 4, 5])
    about = {"num_tokens": 224, "max_id": 209, "num_targets": 204, "vocab_size": 260}
    about["sources"] = [{"input": "a", "documents": 1, "tokens": 2}, {"input": "b", "documents": 3, "tokens": 222}]
    Path(f"{prefix}.json").write_text(json.dumps(about))
    Path(f"{prefix}.mask").write_bytes(bytes(20) + bytes([1]) * 204)
    peek.main([str(prefix), "--documents", "2"])
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if line.startswith("│")]
    assert rows[:8] == [
        ["token type", "uint16"], ["documents", "4"], ["sequences", "5"], ["tokens", "224"],
        ["shortest document", "2"], ["longest document", "210"], ["mean document", "56"], ["max_id", "209"],
    ]  # fmt: skip
    assert ["num_targets", "204"] in rows and ["vocab_size", "260"] in rows
    assert [row for row in rows if len(row) == 4] == [
        ["a", "1", "2", "0.9%"],
        ["b", "3", "222", "99.1%"],
        ["2 to 3", "1", "0.9%", "#" * 10],
        ["4 to 7", "2", "5.4%", "#" * 20],
        ["128 to 255", "1", "93.8%", "#" * 10],
    ]
    assert [row[1:] for row in re.findall(r"(document (\d+): (\d+) tokens, (\d+) of them targets)", said)] == [
        ("0", "2", "0"),
        ("2", "5", "0"),
    ]
    peek.main([str(prefix), "--documents", "4"])
    said = capsys.readouterr().out
    assert "document 3: 210 tokens, 204 of them targets" in said and "... and 10 tokens more" in said
    assert said.count("more") == 1 and " 4 5[[6 7" in said and "199]]" in said
    assert check_dataset.check(str(prefix)).startswith(
        f"{prefix}: 4 documents, 224 tokens, 204 targets, ids 0 to 209 of a vocabulary of 260; no checksums"
    )


def test_no_text_of_a_corpus_commands_the_terminal(tmp_path: Path, capsys) -> None:
    """Control characters are shown as escapes in documents, in the description, in errors and in skipped lines."""
    evil = "a\x1b[31mb\x9b2Jc\x07\r\x7f\td\ne"
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"text": evil}) + "\n" + json.dumps({"\x1b]0;title": "x"}) + "\n")
    given = ["--input", str(path), "--output-prefix", str(tmp_path / "p"), "--tokenizer", "byte", "--workers", "1"]
    with pytest.raises(SystemExit):
        preprocess_data.command(given)
    preprocess_data.command([*given, "--on-bad-line", "skip"])
    about = json.loads((tmp_path / "p_text_document.json").read_text())
    about["sources"][0]["input"] = about["key"] = evil
    (tmp_path / "p_text_document.json").write_text(json.dumps(about))
    peek.command([f"{tmp_path}/p_text_document", "--html", str(tmp_path / "p.html")])
    shown = capsys.readouterr()
    found = "".join((shown.out, shown.err, (tmp_path / "p.html").read_text()))
    assert set(re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", found)) == set()
    assert found.count(r"a\x1b[31mb\x9b2Jc\x07\r\x7f") >= 3 and found.count(r"there are \x1b]0;title") == 2


def test_peek_shows_how_documents_would_be_packed(tmp_path: Path, capsys) -> None:
    """Documents of 1, 3, 4 and 9 tokens in samples of 5 + 1: 9 is cut in 6 and 4; 4, 4 and 3 need a sample each."""
    prefix = str(write_corpus(tmp_path / "c", [[1], [2] * 3, [3] * 4, [4] * 9]))
    peek.main([prefix, "--documents", "0", "--seq-length", "5"])
    shown = re.findall(r"\d[\d.]*%?", capsys.readouterr().out.partition("packed by --seq-length")[2])
    assert shown == ["5", "4", "29.17%", "13", "1"]
    with pytest.raises(ValueError, match=r"^--seq-length -1: give 1 or more"):
        peek.main([prefix, "--seq-length", "-1"])


def test_shares_of_tokens(tmp_path: Path, lines: Path, capsys) -> None:
    """Shares by source and by length, on the screen and on the page, are those of the lengths on disk and add up."""
    other = tmp_path / "b.jsonl"
    other.write_text("".join(json.dumps({"text": "x" * 3**k}) + "\n" for k in range(9)))
    prefix = preprocess(tmp_path / "c", lines, "byte", "--input", str(lines), str(other))
    capsys.readouterr()
    peek.main([prefix, "--documents", "0", "--html", str(tmp_path / "c.html")])
    by_source, _, by_length = capsys.readouterr().out.partition("tokens in document")
    lengths = [len(ids) for ids in unpack_corpus(Path(prefix))[1]]
    spans = [[n for n in lengths if n.bit_length() == bits] for bits in range(20)]
    _, _, page = (tmp_path / "c.html").read_text().partition("tokens in document")
    for shown, groups in ((by_source, [lengths[:-9], lengths[-9:]]), (by_length, spans), (page, spans)):
        found = re.findall(r"(?<![\d.])(\d+\.\d)%", shown)
        assert found == [f"{100 * sum(group) / sum(lengths):.1f}" for group in groups if group]
        assert len(found) > 1 and abs(sum(map(float, found)) - 100) <= 0.05 * len(found) + 1e-6


@pytest.mark.second
@pytest.mark.long
@pytest.mark.parametrize("kind", ["folder", "gpt2", "sentencepiece", "transformers"])
def test_the_tokenizer_is_saved_beside_the_data(tmp_path: Path, lines: Path, bpe: Path, kind: str, capsys) -> None:
    folder = tmp_path / "tokenizer"
    spec = str(folder)
    if kind == "sentencepiece":
        given = ["--input", str(lines), "--output", spec, "--vocab-size", "320", "--model", "sentencepiece"]
        train_tokenizer.main(given)
        spec = f"sentencepiece:{folder}/tokenizer.model"
    elif kind == "folder":
        shutil.copytree(bpe, folder)
    else:
        folder.mkdir()
        model = json.loads((bpe / "tokenizer.json").read_text())["model"]
        (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
        (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])))
        spec = f"gpt2:{folder}"
        if kind == "transformers":
            spec = str(folder)
            (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    given = load_tokenizer(spec)
    prefix = preprocess(tmp_path / "c", lines, spec)
    about = json.loads(Path(f"{prefix}.json").read_text())
    saved = load_tokenizer(about["saved_tokenizer"].replace("c_tokenizer", str(tmp_path / "c_tokenizer")))
    assert saved.identity == given.identity == about["tokenizer_hash"] and saved.eod == given.eod
    assert saved.encode_batch(TEXTS) == given.encode_batch(TEXTS)
    shutil.rmtree(folder)  # peek takes the copy
    capsys.readouterr()
    peek.main([prefix, "--documents", "1"])
    assert "document <0> & [b]some[/b]" in capsys.readouterr().out


def test_tokenizers_are_told_by_what_they_do(bpe: Path, tmp_path: Path) -> None:
    ours = load_tokenizer(str(bpe))
    content = json.loads((bpe / "tokenizer.json").read_text())
    (tmp_path / "same").mkdir()
    (tmp_path / "same" / "tokenizer.json").write_text(json.dumps(content, indent=7))
    assert load_tokenizer(str(tmp_path / "same")).identity == ours.identity  # other bytes
    vocab = content["model"]["vocab"]
    (one, two) = list(vocab)[-2:]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (tmp_path / "vocab").mkdir()
    (tmp_path / "vocab" / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(str(tmp_path / "vocab")).identity != ours.identity  # the same size
    content = json.loads((bpe / "tokenizer.json").read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "prefix").mkdir()
    (tmp_path / "prefix" / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(str(tmp_path / "prefix")).identity != ours.identity  # the same vocabulary


def test_trained_sentencepiece_knows_every_character(tmp_path: Path, lines: Path) -> None:
    for name in "ab":
        train_tokenizer.main(
            ["--input", str(lines), "--output", str(tmp_path / name), "--vocab-size", "322", "--model", "sentencepiece"]
        )
    one, two = ((tmp_path / name / "tokenizer.model").read_bytes() for name in "ab")
    assert one == two
    tokenizer = load_tokenizer(f"sentencepiece:{tmp_path}/a/tokenizer.model")
    assert tokenizer.vocab_size == 322 and tokenizer.eod == 2
    text = "unseen: 漢字 🙂 é, and  two spaces\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(ValueError, match="--vocab-size 90000: SentencePiece cannot train it"):
        train_tokenizer.main(
            [
                "--input",
                str(lines),
                "--output",
                str(tmp_path / "x"),
                "--vocab-size",
                "90000",
                "--model",
                "sentencepiece",
            ]
        )
    assert not (tmp_path / "x").exists()


@for_each(("begins", "flag"), [(True, "--no-prepend-bos"), (False, "--prepend-bos")])
def test_a_run_begins_texts_as_its_corpus_does(tmp_path: Path, begins: bool, flag: str) -> None:
    """The copy of the tokenizer and the original, which has another default, begin texts so."""
    settings = {"tokenizer_config": {"bos_token": "<s>"}}
    theirs = write_byte_tokenizer(tmp_path / "t", ["<s>", "</s>"], begins=["<s>"] if begins else [], **settings)
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n')
    prefix = preprocess(tmp_path / "c", tmp_path / "a.jsonl", theirs, flag)
    plain = str(write_corpus(tmp_path / "plain", [[1, 2]]))
    earlier = preprocess(tmp_path / "e", tmp_path / "a.jsonl", theirs, "--no-prepend-bos")
    about = json.loads(Path(f"{earlier}.json").read_text())
    del about["bos"]  # as an earlier version wrote it, which knew no beginning
    Path(f"{earlier}.json").write_text(json.dumps(about))
    for data, expected in (
        (DataConfig(data_path=(earlier,)), False),
        (DataConfig(data_path=(earlier,), tokenizer=str(theirs)), False),
        (DataConfig(data_path=(prefix,)), not begins),
        (DataConfig(data_path=(prefix,), tokenizer=str(theirs)), not begins),
        (DataConfig(data_path=(plain,), tokenizer=str(theirs)), begins),
        (DataConfig(tokenizer=str(theirs)), begins),
    ):
        tokenizer = data_tokenizer(Config(data=data))
        assert tokenizer is not None and tokenizer.bos == ((256,) if expected else ())


def test_a_run_keeps_the_ends_of_the_model_from_which_it_began(tmp_path: Path) -> None:
    """Its generation_config.json goes with any tokenizer of the same ids, and with no other."""
    source = write_byte_tokenizer(tmp_path / "model", ["</s>", "<|m|>"], generation_config={"eos_token_id": [257]})
    (source / "config.json").touch()
    same = write_byte_tokenizer(tmp_path / "same", ["</s>", "<|m|>"])
    other = write_byte_tokenizer(tmp_path / "other", ["</s>", "<|o|>"])
    for tokenizer, hf_config, ends in (
        (source, "", (257, 256)),
        (same, "", (256,)),
        (same, source, (257, 256)),
        (same, source / "config.json", (257, 256)),
        (other, source, (256,)),
    ):
        found = data_tokenizer(Config(data=DataConfig(tokenizer=str(tokenizer)), hf_config=str(hf_config)))
        assert found is not None and found.ends == ends, (tokenizer, hf_config)
    (source / "tokenizer.json").unlink()  # weights alone: the tokenizer is the user's to name
    found = data_tokenizer(Config(data=DataConfig(tokenizer=str(other)), hf_config=str(source)))
    assert found is not None and found.ends == (257, 256)


def test_a_corpus_remembers_its_tokenizer(lines: Path, bpe: Path, tmp_path: Path) -> None:
    """--tokenizer can be left out: the copy next to a corpus is read, even after a move; else the named one."""
    theirs = shutil.copytree(bpe, tmp_path / "theirs")
    preprocess(tmp_path / "there" / "c", lines, theirs)
    shutil.move(tmp_path / "there", tmp_path / "here")
    prefix, identity = str(tmp_path / "here" / "c_text_document"), load_tokenizer(str(bpe)).identity

    def found(*words: str, vocab_size: int = 0, **flags: bool):
        data = DataConfig(data_path=words or (prefix,), **flags)
        return data_tokenizer(Config(data=data, model=ModelConfig(vocab_size=vocab_size)))

    copy = found(reset_attention_mask=True)
    assert copy.identity == identity and copy.spec == str(tmp_path / "here" / "c_tokenizer")
    assert found(vocab_size=copy.vocab_size).identity == identity and found(vocab_size=copy.vocab_size - 1) is None
    (tmp_path / "list").write_text(f"1 {prefix}\n")
    listed = Config(data=DataConfig(data_args_path=str(tmp_path / "list")))
    assert data_tokenizer(listed).identity == identity and data_tokenizer(Config()) is None

    plain = str(tmp_path / "plain")  # a corpus of Megatron's has no PREFIX.json, unlike the next
    write_corpus(tmp_path / "plain", [[1, 2]])
    assert found(plain) is None and found("1", plain, "2", prefix).identity == identity
    with pytest.raises(
        ValueError, match=r"--eod-mask-loss needs the end-of-document token.*give --tokenizer: a folder"
    ):
        found(plain, eod_mask_loss=True)
    shutil.rmtree(tmp_path / "here" / "c_tokenizer")
    assert found().spec == str(theirs)
    train_tokenizer.save(train_tokenizer.train_bpe(iter([TEXTS[:9]]), 300), theirs)  # another one by now
    with pytest.raises(ValueError, match=rf"{prefix} was made with the tokenizer {theirs}, .*give --tokenizer PATH"):
        found()
    assert data_tokenizer(Config(data=DataConfig(data_path=(prefix,), tokenizer="byte"))).spec == "byte"  # given: taken


@for_each("file", ["tokenizer_config", "added_tokens"])
def test_a_corpus_without_tokens_that_count_now(lines: Path, tmp_path: Path, file: str) -> None:
    """Earlier versions left out tokens outside tokenizer.json: the refusal names them, and its way out works."""
    settings = {"eos_token": "</s>"}
    files = {
        "tokenizer_config": settings | {"added_tokens_decoder": {"257": {"content": "<|m|>", "special": True}}},
        "added_tokens": {"<|m|>": 257},
    }
    theirs = write_byte_tokenizer(tmp_path / "theirs", ["</s>"], tokenizer_config=settings)
    prefix, copy = preprocess(tmp_path / "c", lines, theirs), tmp_path / "c_tokenizer"
    words = r"{} was made by an earlier version without '<\|m\|>' \(257\), which --tokenizer {} has in .* move added"
    for source, read in (
        (copy, lambda: data_tokenizer(Config(data=DataConfig(data_path=(prefix,))))),
        (theirs, lambda: open_datasets((prefix,), "1", 4, 1, None, tokenizer=load_tokenizer(str(theirs)))),
        (theirs, lambda: check_dataset.check(prefix, str(theirs))),
    ):
        for folder in (source, theirs):
            (folder / f"{file}.json").write_text(json.dumps(files[file]))
        with pytest.raises(ValueError, match=words.format(prefix, source)):
            read()
        (source / "added_tokens.json").unlink(missing_ok=True)
        (source / "tokenizer_config.json").write_text(json.dumps(settings))
        read()
