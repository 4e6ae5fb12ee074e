"""Every kind of --tokenizer: ids, end of document, refusals."""

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_tools import train_tokenizer
from megazero.data.samples import require_vocabulary
from megazero.data.tokenizer import PROBE, Tokenizer, beside, end_of_document, load_tokenizer, pack
from megazero.run.run_state import RunState, attached_tokenizer
from tests.helpers.table import for_each
from tests.unit.data_helpers import download_gpt2, kept_folder, write_byte_tokenizer

TEXT = "The quick brown fox, don't jump over 13 lazy dogs.\n\tNaïve café 日本語 🙂  end"
# A tiktoken file of the 256 bytes, without merges.
BYTE_RANKS = b"".join(base64.b64encode(bytes([k])) + b" %d\n" % k for k in range(256))


@pytest.fixture(scope="module")
def gpt2_files(request: pytest.FixtureRequest) -> Path:
    return download_gpt2(request)


def test_files_of_other_packages_need_no_cache_of_pytest(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(request.config, "cache", raising=False)  # as under -p no:cacheprovider
    assert not list(kept_folder(request, "empty").iterdir())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("the cat sat on the mat, that cat. " * 20)
    backend = train_tokenizer.train_bpe(iter([[(folder / "text.txt").read_text()]]), 270)
    train_tokenizer.save(backend, folder / "tokenizer")
    return folder / "tokenizer"


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sentencepiece import SentencePieceTrainer

    prefix = tmp_path_factory.mktemp("sentencepiece") / "tiny"
    lines = [f"the quick brown fox number {k} jumps over lazy dogs" for k in range(200)]
    SentencePieceTrainer.train(sentence_iterator=iter(lines), model_prefix=str(prefix), vocab_size=60, minloglevel=2)
    return prefix.with_suffix(".model")


def check_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(isinstance(token, int) and 0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "", text[:5]]) == [ids, [], tokenizer.encode(text[:5])]


def test_byte() -> None:
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.spec) == (257, 256, "byte")
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert tokenizer.decode([97, 0xC3, 0xA9, 256, 98, 0xFF]) == "aé<|endoftext|>b\ufffd"
    check_round_trip(tokenizer, TEXT)


@pytest.mark.long
def test_gpt2(gpt2_files: Path) -> None:
    tokenizer = load_tokenizer(f"gpt2:{gpt2_files}")
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    assert tokenizer.decode([50256]) == "<|endoftext|>"
    assert 50256 not in tokenizer.encode("quoted: <|endoftext|> in a text")
    check_round_trip(tokenizer, TEXT)


@pytest.mark.second
@pytest.mark.long
def test_gpt2_under_hugging_face_names_and_as_transformers_has_it(gpt2_files: Path, tmp_path: Path) -> None:
    shutil.copy(gpt2_files / "encoder.json", tmp_path / "vocab.json")
    shutil.copy(gpt2_files / "vocab.bpe", tmp_path / "merges.txt")
    tokenizer = load_tokenizer(f"gpt2:{tmp_path}")
    from transformers import GPT2TokenizerFast

    theirs = GPT2TokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.encode(TEXT) == theirs(TEXT).input_ids
    named = load_tokenizer(f"gpt2:{gpt2_files / 'encoder.json'},{tmp_path / 'merges.txt'}")
    assert named.identity == tokenizer.identity
    with pytest.raises(ValueError, match=r"a,b must be VOCAB,MERGES, two files"):
        load_tokenizer("gpt2:a,b")
    # The same folder without a tokenizer.json is read by transformers.
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    folder = load_tokenizer(str(tmp_path))
    assert folder.encode_batch([TEXT, ""]) == [tokenizer.encode(TEXT), []]
    assert (folder.vocab_size, folder.eod, folder.decode([15496, 995])) == (50257, 50256, "Hello world")


def test_a_path_alone_tells_the_kind(sentencepiece_model: Path, trained: Path, tmp_path: Path) -> None:
    """A folder is recognised by its files' names, and a file by its content, even if its name is unusual."""
    model = load_tokenizer(f"sentencepiece:{sentencepiece_model}")
    llama2, llama3, gpt2 = (tmp_path / name for name in ("llama2", "llama3", "gpt2"))
    for folder in (llama2, llama3, gpt2):
        folder.mkdir()
    shutil.copy(sentencepiece_model, llama2 / "tokenizer.model")
    (llama3 / "tokenizer.model").write_bytes(BYTE_RANKS)
    settings = {"pat_str": r"\p{L}+|\s+|.", "special_tokens": {"<|endoftext|>": 256}}
    (llama3 / "tokenizer.model.json").write_text(json.dumps(settings))
    ranks = load_tokenizer(f"tiktoken:{llama3}/tokenizer.model")
    backend = json.loads((trained / "tokenizer.json").read_text())["model"]
    (gpt2 / "vocab.json").write_text(json.dumps(backend["vocab"]))
    (gpt2 / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in backend["merges"]))
    pairs = load_tokenizer(f"gpt2:{gpt2}")
    shutil.copy(trained / "tokenizer.json", tmp_path / "renamed")
    for named, paths in (
        (model, [llama2, llama2 / "tokenizer.model", sentencepiece_model]),
        (ranks, [llama3, llama3 / "tokenizer.model"]),
        (pairs, [gpt2, gpt2 / "vocab.json", gpt2 / "merges.txt"]),
        (load_tokenizer(str(trained)), [trained / "tokenizer.json", trained / "tokenizer_config.json"]),
        (load_tokenizer(str(trained)), [tmp_path / "renamed"]),
    ):
        for path in paths:
            found = load_tokenizer(str(path))
            assert (found.identity, found.spec) == (named.identity, str(path)), path
            assert type(found) is type(named) and (path == tmp_path / "renamed" or found.eod == named.eod)


def test_hugging_face_folder_and_file(trained: Path) -> None:
    folder, file = load_tokenizer(str(trained)), load_tokenizer(str(trained / "tokenizer.json"))
    assert folder.encode(TEXT) == file.encode(TEXT)
    assert folder.vocab_size == 270 and folder.eod == file.eod == 0
    assert len(folder.encode(" cat")) == 1
    check_round_trip(folder, TEXT)


def test_hugging_face_template_truncation_and_padding_are_left_out(trained: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    backend = Backend.from_file(str(trained / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).encode(TEXT) == load_tokenizer(str(trained)).encode(TEXT)


def stored(name: str, number: int, special: bool = True) -> dict:
    """An entry of `added_tokens_decoder` in tokenizer_config.json."""
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {str(number): {"content": name, "special": special, **flags}}


DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
# Folders by the arguments of `write_byte_tokenizer`, with the id that ends a document and the ids of a text.
FOLDERS = [
    # chat tokenizers: Qwen, Llama 3, Gemma, gpt-oss
    ({"special": ["<|endoftext|>", "<|im_end|>"], "tokenizer_config": {"eos_token": "<|im_end|>"}}, 256, "a", [64]),
    ({"special": ["<|end_of_text|>", "<|eot_id|>"], "tokenizer_config": {"eos_token": "<|eot_id|>"}}, 256, "a", [64]),
    (
        {
            "special": ["<bos>", "<eos>", "<end_of_turn>"],
            "ordinary": ["</s>", "<s>"],
            "begins": ["<bos>"],
            "tokenizer_config": {"eos_token": "<end_of_turn>", "bos_token": "<bos>"},
        },
        257,
        "a</s>",
        [256, 64, 259],
    ),
    ({"special": ["<|return|>", "<|endoftext|>"], "tokenizer_config": {"eos_token": "<|return|>"}}, 257, "a", [64]),
    # a configured end of a known name; of another name; as an object; ordinary ones of known names
    ({"special": ["<|endoftext|>", "</s>"], "tokenizer_config": {"eos_token": "</s>"}}, 257, "a", [64]),
    ({"special": ["</s>", "<|end|>"], "tokenizer_config": {"eos_token": "<|end|>"}}, 256, "a", [64]),
    ({"special": ["<|end|>"], "ordinary": ["</s>"], "tokenizer_config": {"eos_token": "<|end|>"}}, 256, "a", [64]),
    (
        {"special": ["<|end|>"], "tokenizer_config": {"eos_token": {"__type": "AddedToken", "content": "<|end|>"}}},
        256,
        "a",
        [64],
    ),
    ({"special": [DEEPSEEK_END], "tokenizer_config": {"eos_token": DEEPSEEK_END}}, 256, "a", [64]),
    ({"ordinary": ["<|endoftext|>", "</s>"], "tokenizer_config": {"pad_token": "</s>"}}, 257, "a", [64]),
    ({"ordinary": ["</s>"], "special_tokens_map": {"eos_token": "</s>"}}, 256, "a", [64]),
    ({"ordinary": ["<|endoftext|>", "</s>", "<eos>"]}, None, "</s>", [257]),
    ({"special": ["<|end|>"]}, None, "a", [64]),
    # several tokens before a text; a post-processor that adds one behind it, too
    ({"special": ["[gMASK]", "<sop>", "<|endoftext|>"], "begins": ["[gMASK]", "<sop>"]}, 258, "a", [256, 257, 64]),
    # tokens that only another file has
    (
        {
            "tokenizer_config": {
                "eos_token": "<|e|>",
                "added_tokens_decoder": stored("<|s|>", 256) | stored("<|e|>", 257),
            }
        },
        257,
        "<|s|>a<|e|>",
        [256, 64, 257],
    ),
    ({"added_tokens": {"<|e|>": 256}, "tokenizer_config": {"eos_token": "<|e|>"}}, 256, "a<|e|>", [64, 256]),
    ({"added_tokens": {"<tag>": 256}}, None, "a<tag>", [64, 256]),
    # a token that is special only by the settings
    ({"ordinary": ["</s>"], "tokenizer_config": {"added_tokens_decoder": stored("</s>", 256)}}, 256, "</s>", [256]),
]


@for_each(("folder", "eod", "text", "ids"), FOLDERS)
def test_end_of_document_and_beginning_of_a_text(
    tmp_path: Path, folder: dict, eod: int | None, text: str, ids: list[int]
) -> None:
    """A chat tokenizer's eos_token ends a message; an ordinary token named </s> is a tag of HTML."""
    tokenizer = load_tokenizer(str(write_byte_tokenizer(tmp_path / "t", **folder)))
    assert (end_of_document(tokenizer), tokenizer.encode_texts([text])) == (eod, [ids])
    assert tokenizer.encode(text) == ids[len(tokenizer.bos) :]
    if eod is None:
        with pytest.raises(ValueError, match=f"--tokenizer {tmp_path}/t: it has no end-of-document"):
            _ = tokenizer.eod


@pytest.mark.second
@for_each(("folder", "eod", "text", "ids"), FOLDERS)
def test_transformers_gives_the_same_ids(
    tmp_path: Path, folder: dict, eod: int | None, text: str, ids: list[int]
) -> None:
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(write_byte_tokenizer(tmp_path / "t", **folder))(text).input_ids == ids


@for_each(
    ("files", "words"),
    [
        (
            {"tokenizer_config": {"added_tokens_decoder": stored("<|e|>", 300)}},
            r"config.json gives '<\|e\|>' the id 300",
        ),
        ({"added_tokens": {"<|e|>": 300}}, r"added_tokens.json gives '<\|e\|>' the id 300, .* it gets 256"),
        ({"tokenizer_config": {"bos_token": 5}}, "a bos_token that is no text"),
    ],
)
def test_settings_that_contradict_the_tokenizer(tmp_path: Path, files: dict, words: str) -> None:
    write_byte_tokenizer(tmp_path / "t", **files)
    with pytest.raises(ValueError, match=words):
        load_tokenizer(str(tmp_path / "t"))


@pytest.mark.second
def test_a_folder_that_transformers_alone_reads(sentencepiece_model: Path, tmp_path: Path) -> None:
    """A SentencePiece model, too, begins texts as its folder's settings do."""
    shutil.copy(sentencepiece_model, tmp_path / "tokenizer.model")
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    for spec in (str(tmp_path), f"sentencepiece:{tmp_path}/tokenizer.model"):
        tokenizer = load_tokenizer(spec)
        assert (tokenizer.bos, tokenizer.eod, tokenizer.ends) == ((1,), 2, (5, 2))
        for asked in (True, False):
            copy = tmp_path / f"{spec.partition(':')[0].strip('/').replace('/', '_')}{asked}"
            copy.mkdir()
            saved = load_tokenizer(tokenizer.prepending(asked).save(copy).replace("{}", str(copy)))
            assert (saved.bos, saved.ends) == ((1,) if asked else (), (5, 2))


@for_each("begins", [True, False])
def test_a_chosen_beginning_travels_with_the_files(tmp_path: Path, sentencepiece_model: Path, begins: bool) -> None:
    """A flag overrides the settings; a saved tokenizer has the choice, for transformers too."""
    theirs = write_byte_tokenizer(
        tmp_path / "t", ["<s>", "</s>"], begins=[] if begins else ["<s>"], tokenizer_config={"bos_token": "<s>"}
    )
    ranks = {"pat_str": "(?s).", "special_tokens": {"<s>": 256}, "bos_token": "<s>", "add_bos_token": not begins}
    (tmp_path / "ranks").write_bytes(BYTE_RANKS)
    (tmp_path / "ranks.json").write_text(json.dumps(ranks))
    model = f"{'sentencepiece' if begins else 'llama2'}:{sentencepiece_model}"
    for number, (spec, ids) in enumerate([(str(theirs), [256, 64]), (str(tmp_path / "ranks"), [256, 97]), (model, [])]):
        own = load_tokenizer(spec)
        chosen, copy = own.prepending(begins), tmp_path / f"copy{number}"
        copy.mkdir()
        saved = load_tokenizer(chosen.save(copy).replace("{}", str(copy)))
        assert own.prepending(None).bos == own.bos and bool(own.bos) is not begins
        assert chosen.bos == saved.bos and bool(saved.bos) is begins and saved.identity == own.identity
        if ids:
            assert saved.encode_texts(["a"]) == [ids if begins else ids[1:]]
        else:
            assert saved.encode_texts([""]) == [[1] if begins else []]
    with pytest.raises(ValueError, match="--prepend-bos: --tokenizer byte has no beginning-of-text token"):
        load_tokenizer("byte").prepending(True)


def test_gpt2_files_do_not_tell_special_tokens(tmp_path: Path) -> None:
    """</s> ends a document unless merges make it of letters, as those of HTML do."""
    for name, merges in (("special", []), ("tag", [("<", "/"), ("</", "s"), ("</s", ">")])):
        (tmp_path / name).mkdir()
        vocab = {token: number for number, token in enumerate(["<", "/", "s", ">", "</", "</s", "</s>"])}
        (tmp_path / name / "vocab.json").write_text(json.dumps(vocab))
        (tmp_path / name / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, merges)))
    found = [end_of_document(load_tokenizer(f"gpt2:{tmp_path / name}")) for name in ("special", "tag")]
    assert found == [6, None]


def test_sentencepiece(sentencepiece_model: Path) -> None:
    tokenizer = load_tokenizer(f"sentencepiece:{sentencepiece_model}")
    assert (tokenizer.vocab_size, tokenizer.eod) == (60, 2)
    check_round_trip(tokenizer, "the quick brown fox")
    assert 1 not in tokenizer.encode("the quick") and 2 not in tokenizer.encode("the quick")


def test_sentencepiece_as_megatron_reads_it(sentencepiece_model: Path) -> None:
    """Llama2Tokenizer begins each document; SentencePieceTokenizer has tokens behind the model's, <EOD> among them."""
    plain, llama2, megatron = (
        load_tokenizer(f"{kind}:{sentencepiece_model}") for kind in ("sentencepiece", "llama2", "megatron")
    )
    assert plain.bos == megatron.bos == () and llama2.encode_texts(["a"]) == [[1, *plain.encode("a")]]
    assert llama2.identity == plain.identity and llama2.eod == 2
    # <CLS> <SEP> <EOD> <MASK>, and <PAD>, which this model lacks
    assert (megatron.vocab_size, megatron.eod) == (65, 62)
    assert megatron.encode("the quick") == plain.encode("the quick")
    with pytest.raises(ValueError, match=r"holds token id 62, outside the vocabulary of 60; .*megatron:FILE.model"):
        require_vocabulary("c", np.array([1, 62]), plain.vocab_size, "the corpus")
    require_vocabulary("c", np.array([1, 62]), megatron.vocab_size, "the corpus")
    assert megatron.decode([*megatron.encode("the quick"), 62, *megatron.encode("fox")]) == "the quick<EOD>fox"


# tiktoken's of r50k_base and cl100k_base. They have possessive repeats, which other libraries read otherwise.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
GPT4_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)


def write_tiktoken(path: Path, vocab: dict[str, int], settings: dict) -> str:
    """A byte-level BPE's ranks as a tiktoken file."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {letter: value for value, letter in bytes_to_unicode().items()}
    tokens = {rank: bytes(map(byte_of.get, token)) for token, rank in vocab.items() if token != "<|endoftext|>"}
    lines = (f"{base64.b64encode(tokens[rank]).decode()} {rank}\n" for rank in sorted(tokens))
    path.write_text("".join(lines))
    Path(f"{path}.json").write_text(json.dumps(settings))
    return f"tiktoken:{path}"


@pytest.mark.second
@pytest.mark.long
def test_tiktoken(gpt2_files: Path, tmp_path: Path) -> None:
    """The pattern decides: by GPT-2's, ids are those of the tokenizers library. Saved, packed, and by gigatoken."""
    from data_tools.encoding import fast_tokenizer, trust_gigatoken
    from megazero.interop.huggingface.tokenizer_files import write_tokenizer

    reference = load_tokenizer(f"gpt2:{gpt2_files}")
    vocab = reference.vocabulary()
    settings = {"pat_str": GPT2_PATTERN, "special_tokens": {"<|endoftext|>": 50256}}
    tokenizer = load_tokenizer(write_tiktoken(tmp_path / "r50k_base.tiktoken", vocab, settings))
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    check_round_trip(tokenizer, TEXT)
    assert tokenizer.encode_batch(PROBE) == reference.encode_batch(PROBE)
    assert trust_gigatoken(tokenizer.spec, [TEXT]) == "" and fast_tokenizer(tokenizer.spec) is not None
    (tmp_path / "saved").mkdir()
    saved = load_tokenizer(tokenizer.save(tmp_path / "saved").format(tmp_path / "saved"))
    assert saved.identity == tokenizer.identity and saved.eod == 50256
    packed = pack(tokenizer)
    assert sorted(packed.files) == ["tokenizer.tiktoken", "tokenizer.tiktoken.json"]
    with pytest.raises(ValueError, match=r"transformers reads no tiktoken file .*; name a Hugging Face tokenizer"):
        write_tokenizer(tokenizer, tmp_path)

    settings = {"pat_str": GPT4_PATTERN, "special_tokens": {"<|end|>": 60000}, "eos_token": "<|end|>"}
    other = load_tokenizer(write_tiktoken(tmp_path / "own", vocab, settings))
    assert (other.vocab_size, other.eod) == (60001, 60000)
    assert other.encode("1234567") != reference.encode("1234567") and other.decode(other.encode(TEXT)) == TEXT
    assert trust_gigatoken(other.spec, [TEXT]) == "it does not know this tokenizer"


@for_each(
    ("ranks", "settings", "words"),
    [
        (b"YQ== 0\n", None, "is missing: a tiktoken file has no pattern; write"),
        (b"YQ== 0\n", "{}", "must have a text `pat_str`"),
        (b"YQ== 0\n", '{"pat_str": "(", "special_tokens": {}}', ""),
        (b"YQ 0\n", '{"pat_str": ".", "special_tokens": {}}', "padding"),
        (b"YQ==\n", '{"pat_str": ".", "special_tokens": {}}', ""),
        (b"\x0a\x05<unk>\xff 1\n", '{"pat_str": ".", "special_tokens": {}}', ""),
    ],
)
def test_odd_tiktoken_files(tmp_path: Path, ranks: bytes, settings: str | None, words: str) -> None:
    (tmp_path / "t").write_bytes(ranks)
    if settings is not None:
        (tmp_path / "t.json").write_text(settings)
    with pytest.raises(ValueError, match=f"--tokenizer tiktoken:{tmp_path}/t: cannot be read: .*{words}"):
        load_tokenizer(f"tiktoken:{tmp_path}/t")


def test_a_packed_tokenizer_is_the_same_elsewhere(trained: Path, sentencepiece_model: Path, tmp_path: Path) -> None:
    """Settings and other files of a Hugging Face folder are kept, but for the name of code to run."""
    folder = shutil.copytree(trained, tmp_path / "theirs")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    more = {"model_max_length": 77, "auto_map": {"AutoTokenizer": "x.py"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | more))
    (folder / "chat_template.jinja").write_text("{{ x }}")
    (tmp_path / "ranks").write_bytes(BYTE_RANKS)
    (tmp_path / "ranks.json").write_text('{"pat_str": "(?s).", "special_tokens": {"</s>": 256}}')
    for number, spec in enumerate(
        [str(folder), "byte", f"sentencepiece:{sentencepiece_model}", str(tmp_path / "ranks")]
    ):
        tokenizer = load_tokenizer(spec)
        saved, _ = attached_tokenizer(tokenizer)  # a checkpoint's state is read again
        state = {"iteration": 1, "consumed_samples": 1, "updates": 1, "model": {}, "layout": {}, "config": {}}
        assert RunState.parse(state | {"saved_tokenizer": saved}).saved_tokenizer == saved
        packed, copy = pack(tokenizer), tmp_path / f"copy{number}"
        copy.mkdir()
        for name, content in packed.files.items():
            (copy / name).write_bytes(content)
        again = load_tokenizer(beside(packed.spec.replace("{}", copy.name), tmp_path))
        assert (again.identity, again.eod) == (tokenizer.identity, tokenizer.eod)
    copy = tmp_path / "copy0"
    assert (copy / "chat_template.jinja").read_text() == "{{ x }}"
    kept = json.loads((copy / "tokenizer_config.json").read_text())
    assert kept["model_max_length"] == 77 and "auto_map" not in kept


@for_each(
    ("spec", "words"),
    [
        ("gpt2:{tmp}", "no vocab.json and merges.txt"),
        ("gpt2:", "no vocab.json"),
        ("sentencepiece:{tmp}/none.model", "is not a file"),
        ("sentencepiece:{tmp}/junk.model", "cannot be read"),
        ("{tmp}/none", "does not exist, or is not a file;"),
        ("{tmp}/junk.json", "cannot be read"),
        ("{tmp}/junk.model", "is not a tokenizer file: it begins with b'junk'"),
        ("{tmp}/nothing", "is empty"),
        ("{tmp}/empty", "is a folder without a tokenizer; it holds nothing"),
        ("{tmp}/text", "is a folder without a tokenizer; it holds a.txt, b.txt"),
        ("{tmp}/two", "holds several tokenizers, a.model, b.tiktoken; name one"),
        ("bytes", "does not exist, .*hf download bytes "),
        ("gpt2", "gpt2 does not exist, .*hf download gpt2 "),
        ("meta-llama/Llama-2-7b", "does not exist, .*hf download meta-llama/Llama-2-7b "),
    ],
)
def test_unreadable(tmp_path: Path, spec: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "junk.json").write_text("{]")
    (tmp_path / "junk.model").write_text("junk")
    (tmp_path / "nothing").touch()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "b.txt").touch()
    (tmp_path / "text" / "a.txt").touch()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.model").touch()
    (tmp_path / "two" / "b.tiktoken").touch()
    spec = spec.format(tmp=tmp_path)
    with pytest.raises(ValueError, match=f"(?s)--tokenizer {spec}: .*{words}.*expected a folder or a file"):
        load_tokenizer(spec)


def test_a_message_of_a_library_that_quotes_the_file_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps("x" * 100_000))
    with pytest.raises(ValueError, match=r'cannot be read: invalid type: string "x+\.\.\.; expected') as caught:
        load_tokenizer(str(tmp_path))
    assert len(str(caught.value)) < 2000


def test_reading_a_tokenizer_json_imports_neither_transformers_nor_torch(trained: Path) -> None:
    code = (
        f"import sys; from megazero.data.tokenizer import load_tokenizer; load_tokenizer({str(trained)!r});"
        "print(sorted({'transformers', 'torch', 'sentencepiece'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
