"""Loss masks: from conversations and keys to PREFIX.mask, and from there to the targets of a sample."""

import itertools
import json
import sys
import zlib
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools import chat, check_dataset, merge_datasets, peek, preprocess_data, reading
from megazero.data import corpora
from megazero.data.about import read_about
from megazero.data.corpora import open_datasets
from megazero.data.fingerprint import fingerprint, same
from megazero.data.indexed import IndexedDataset
from megazero.data.loader import Batches
from megazero.data.packing import PackedDataset
from megazero.data.samples import GPTDataset, WholeSplit
from megazero.data.tokenizer import load_tokenizer
from megazero.flags.batch_ramp import BatchSizes
from tests.helpers.table import for_each
from tests.unit.data_helpers import numbered_documents, write_byte_tokenizer, write_corpus

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}"
)
# The same text, with tags that take the white space around them away, on lines of their own.
INDENTED = (
    "{%- for m in messages %}\n    {{- '<|im_start|>' + m['role'] + '\n' }}\n    {%- if m['role'] == 'assistant' %}\n"
    "        {%- generation -%}\n    {{ m['content'] }}\n{{- '<|im_end|>' }}{% endgeneration %}\n    {%- else %}\n"
    "        {{- m['content'] + '<|im_end|>' }}\n    {%- endif %}\n    {{- '\n' }}\n{%- endfor %}"
)
TRIMMED = (
    "{% for m in messages %}{% set x %}{% generation %}{{ m['content'] }} {% endgeneration %}{% endset %}{{ x | trim }}"
    "{% endfor %}"
)
# The space before an answer is in one token with its first letter.
SPACED = (
    "{% for m in messages %}{{ 'A:' if m['role'] == 'assistant' else 'Q: ' }}"
    "{% if m['role'] == 'assistant' %}{{ ' ' }}{% endif %}{{ m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)
# As templates of models that think: of earlier answers only the part behind the thoughts is shown.
THINKING = (
    "{% for m in messages %}{{ m['role'] + ':' }}"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
PROMPTED = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif")
DATED = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}" + MARKED
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "hé?"},
    {"role": "assistant", "content": "yes, hé"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "so"},
]


def write_chat_tokenizer(folder: Path, template: str | None) -> Path:
    """A tokenizer of bytes, special tokens, and of a space joined with a letter; a chat template next to it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", letter) for letter in "yhs"]
    vocab = {token: number for number, token in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def preprocess(folder: Path, documents: list[Any], tokenizer: object, *more: str) -> Path:
    """Preprocess JSON lines; the prefix without _KEY_document."""
    text = folder / "in.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    text.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in documents))
    given = ["--input", str(text), "--output-prefix", str(folder / "p"), "--tokenizer", str(tokenizer)]
    preprocess_data.main([*given, "--workers", "1", *more])
    return folder / "p"


def marked(prefix: object, tokenizer: object) -> list[str]:
    """The text of each document, with [ ] around tokens whose byte in .mask is 1."""
    data, raw, decode = IndexedDataset(str(prefix)), Path(f"{prefix}.mask").read_bytes(), load_tokenizer(str(tokenizer))
    assert len(raw) == data.num_tokens
    texts = []
    for number in range(data.num_documents):
        start, ids = int(data.document_starts(number, number + 1)[0]), data.document(number).tolist()
        pairs = zip(ids, raw[start : start + len(ids)], strict=True)
        runs = [
            (byte, decode.decode([token for token, _ in run])) for byte, run in groupby(pairs, lambda pair: pair[1])
        ]
        texts.append("".join(f"[{text}]" if byte else text for byte, text in runs))
    return texts


SYSTEM = "<|im_start|>system\nBe kind.<|im_end|>\n"
FIRST, SECOND = "<|im_start|>user\nhé?<|im_end|>\n", "<|im_start|>user\nwhy<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"


@for_each(
    ("template", "eod", "expected"),
    [
        (MARKED, False, f"{SYSTEM}{FIRST}{ANSWER}[yes, hé<|im_end|>]\n{SECOND}{ANSWER}[so<|im_end|>]\n"),
        (MARKED, True, f"{SYSTEM}{FIRST}{ANSWER}[yes, hé<|im_end|>]\n{SECOND}{ANSWER}[so<|im_end|>]\n<|endoftext|>"),
        (CHATML, False, f"{SYSTEM}{FIRST}{ANSWER}[yes, hé<|im_end|>\n]{SECOND}{ANSWER}[so<|im_end|>\n]"),
        (CHATML, True, f"{SYSTEM}{FIRST}{ANSWER}[yes, hé<|im_end|>\n]{SECOND}{ANSWER}[so<|im_end|>\n<|endoftext|>]"),
        (SPACED, False, "Q: Be kind.<|endoftext|>Q: hé?<|endoftext|>A:[ yes, hé<|endoftext|>]"
                        "Q: why<|endoftext|>A:[ so<|endoftext|>]"),
        (INDENTED, False, f"{SYSTEM}{FIRST}{ANSWER}[yes, hé<|im_end|>]\n{SECOND}{ANSWER}[so<|im_end|>]\n"),
        (DATED, False, f"26 Jul 2024{SYSTEM}{FIRST}{ANSWER}[yes, hé<|im_end|>]\n{SECOND}{ANSWER}[so<|im_end|>]\n"),
    ],
)  # fmt: skip
def test_the_assistants_tokens_are_the_targets(tmp_path: Path, template: str, eod: bool, expected: str) -> None:
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", template)
    flags = ["--mask-from", "chat", *(["--append-eod"] if eod else [])]
    prefix = preprocess(tmp_path, [{"messages": TALK}, {"messages": TALK[1:2]}], tokenizer, *flags)
    found = marked(f"{prefix}_messages_document", tokenizer)
    assert found[0] == expected and "[" not in found[1]
    about = read_about(IndexedDataset(f"{prefix}_messages_document"))
    raw = Path(f"{prefix}_messages_document.mask").read_bytes()
    assert about["num_targets"] == sum(raw) > 0 and set(raw) == {0, 1}
    assert about["checksum"]["mask"] == [f"{zlib.crc32(raw):08x}"]


def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    """And of the tokenizer that is saved next to the corpus, which still has the template."""
    from transformers import AutoTokenizer

    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    prefix = preprocess(tmp_path, [{"talk": TALK}], tokenizer, "--mask-from", "chat", "--json-keys", "talk")
    for folder in (tokenizer, f"{prefix}_tokenizer"):
        wanted = AutoTokenizer.from_pretrained(folder).apply_chat_template(TALK)["input_ids"]
        assert IndexedDataset(f"{prefix}_talk_document").document(0).tolist() == wanted


@for_each("template", [MARKED, CHATML, "{{ bos_token }}" + MARKED, "{{ bos_token }}" + CHATML])
@for_each("flag", [None, "--prepend-bos", "--no-prepend-bos"])
def test_a_conversation_begins_once(tmp_path: Path, template: str, flag: str | None, capsys) -> None:
    """The template writes the beginning, unless a flag adds it. It is never a target, even in texts of several keys."""
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    theirs = write_byte_tokenizer(
        tmp_path / "t", special, begins=["<s>"], tokenizer_config=settings, chat_template=template
    )
    flags = ["--mask-from", "chat", *([flag] if flag else [])]
    prefix = preprocess(tmp_path, [{"messages": TALK[3:]}], theirs, *flags)
    (found,) = marked(f"{prefix}_messages_document", theirs)
    begins = "bos_token" in template or flag == "--prepend-bos"
    assert found.startswith(f"{'<s>' if begins else ''}<|im_start|>user\nwhy<|im_end|>\n{ANSWER}[so<|im_end|>")
    noted = "conversations begin without '<s>' (256), which the chat template does not write" in capsys.readouterr().err
    assert noted == (not begins and flag is None)
    copy, about = load_tokenizer(f"{prefix}_tokenizer"), read_about(IndexedDataset(f"{prefix}_messages_document"))
    recorded = [256] if begins and flag != "--no-prepend-bos" else []
    assert list(copy.bos) == recorded == (about["bos"] or [])
    prefix = preprocess(tmp_path / "keys", [{"q": "x", "a": "y"}], theirs, "--json-keys", "q:1", "a:0")
    assert marked(f"{prefix}_q_a_document", theirs) == ["<s>[x]y"]


def test_a_token_that_only_settings_name_is_refused(tmp_path: Path) -> None:
    """transformers gives it an id behind the tokenizer's."""
    settings = {"eos_token": "<|im_end|>"}
    theirs = write_byte_tokenizer(tmp_path / "t", ["<|im_start|>"], tokenizer_config=settings, chat_template=CHATML)
    with pytest.raises(ValueError, match=r"its files have 257 tokens, and transformers gives the id 257 .*; save"):
        preprocess(tmp_path, [{"messages": TALK}], theirs, "--mask-from", "chat")


@for_each(
    ("keys", "eod", "name", "expected"),
    [
        (["q:0", "a:1"], True, "q_a",
         ["x y[yes<|endoftext|>]", "only a question<|endoftext|>", "[alone<|endoftext|>]"]),
        (["q:1", "a:0"], False, "q_a", ["[x y]yes", "[only a question]", "alone"]),
        (["a:1", "n:0", "q:1"], True, "a_n_q",
         ["[yes]1[x y<|endoftext|>]", "2[only a question<|endoftext|>]", "[alone]3<|endoftext|>"]),
    ],
)  # fmt: skip
def test_keys_in_order_are_one_document(
    tmp_path: Path, keys: list[str], eod: bool, name: str, expected: list[str]
) -> None:
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", None)
    documents = [
        {"q": "x y", "a": "yes", "n": "1"},
        {"n": "2", "q": "only a question", "a": ""},
        {"q": "", "a": "alone", "n": "3"},
    ]
    flags = ["--json-keys", *keys, *(["--append-eod"] if eod else [])]
    prefix = preprocess(tmp_path, documents, tokenizer, *flags)
    assert marked(f"{prefix}_{name}_document", tokenizer) == expected
    assert [path.name for path in tmp_path.glob("p_*.mask")] == [f"p_{name}_document.mask"]


@pytest.mark.second
def test_workers_and_chunks_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    documents = [{"messages": [TALK[1], {"role": "assistant", "content": "yes " * (k % 5)}]} for k in range(60)]
    flags = ("--mask-from", "chat", "--append-eod")
    whole = preprocess(tmp_path / "one", documents, tokenizer, *flags)
    monkeypatch.setattr(reading, "CHUNK_BYTES", 500)
    small = preprocess(tmp_path / "two", documents, tokenizer, *flags, "--workers", "2")
    for end in ("bin", "idx", "mask"):
        one, other = (Path(f"{prefix}_messages_document.{end}").read_bytes() for prefix in (whole, small))
        assert one == other


def test_conversations_in_columns(tmp_path: Path) -> None:
    """A table has every key in every message, some of them without a value."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", MARKED.replace("m['role'] + '\n'", "m['role'] + m|string"))
    # Keys in the order of the alphabet, in which older versions of pyarrow write them.
    talk = [{"content": "a", "name": None, "role": "user"}, {"content": "b", "name": "n", "role": "assistant"}]
    pq.write_table(pa.table({"messages": [talk, talk[:1]]}), tmp_path / "t.parquet")
    lines = preprocess(
        tmp_path / "lines", [{"messages": talk}, {"messages": talk[:1]}], tokenizer,
        "--mask-from", "chat",
    )  # fmt: skip
    flags = ["--output-prefix", str(tmp_path / "rows"), "--tokenizer", str(tokenizer), "--mask-from", "chat"]
    preprocess_data.main(["--input", str(tmp_path / "t.parquet"), *flags, "--workers", "1"])
    for end in ("bin", "idx", "mask"):
        one, other = (Path(f"{prefix}_messages_document.{end}") for prefix in (lines, tmp_path / "rows"))
        assert one.read_bytes() == other.read_bytes()
    assert "None" not in marked(f"{lines}_messages_document", tokenizer)[0]


@for_each(
    ("template", "document", "flags", "message"),
    [
        (None, TALK, "--mask-from chat", r"--tokenizer .*tokenizer has no chat template; name a folder with a "
         r"tokenizer.json and the template in chat_template.jinja, or under chat_template in tokenizer_config.json"),
        (CHATML, TALK, "--mask-from chat --tokenizer byte", r"--mask-from chat: --tokenizer byte has no chat template"),
        (THINKING, [*TALK[:2], {"role": "assistant", "content": "<think>hm</think>yes"}, *TALK[3:]],
         "--mask-from chat", r"renders an answer in another way when messages follow it, or without its generation "
         r"prompt, .* put \{% generation %\} and \{% endgeneration %\} around them in the template"),
        (PROMPTED, TALK, "--mask-from chat", "renders an answer in another way"),
        (TRIMMED, TALK, "--mask-from chat", r"changes the text around \{% generation %\}; put the tags where"),
        (CHATML, "text", "--mask-from chat", r"in.jsonl:1: --json-keys messages: the key is no list of messages"),
        (CHATML, [], "--mask-from chat", r"in.jsonl:1: --json-keys messages: the key is no list of messages"),
        (CHATML, [*TALK, {"from": "x"}], "--mask-from chat", "the key has no text under role in message 5; mend it"),
        (CHATML, [*TALK, {"role": "x", "content": 3}], "--mask-from chat", "has no text under content in message 5"),
        ("{{ raise_exception('no roles\nx') }}", TALK, "--mask-from chat",
         "in.jsonl:1: --json-keys messages: the key is refused by the chat template: no roles; mend it"),
        (CHATML, TALK[2:], "--mask-from chat", "the key is refused by the chat template: "),
        (CHATML, TALK, "--mask-from chat --json-keys a:0 b:1", "--mask-from chat finds the targets itself; leave out"),
        (CHATML, TALK, "--json-keys a b:1", "--json-keys a b:1: only some keys have :0 or :1; give each one, or none"),
        (CHATML, TALK, "--json-keys a:0 b:0", "--json-keys a:0 b:0: no token would be a target; give :1 to the key"),
        (CHATML, TALK, "--json-keys a:0 a:1", "a key is given twice; give each once"),
        (MARKED, TALK[:2], "--mask-from chat", "no token would count as a target, because no message has the role"),
        (CHATML, TALK, "--json-keys a:0 messages:1", "--json-keys a: the key is missing, there are messages"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(
    tmp_path: Path, template: str | None, document: Any, flags: str, message: str
) -> None:
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", template)
    with pytest.raises(ValueError, match=message) as caught:
        preprocess(tmp_path, [{"messages": document}], tokenizer, *flags.split())
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("p_*")) and not list(tmp_path.glob("p.partial"))


@for_each("template", [5, True, {}, [{"name": "default", "template": 5}]])
def test_a_chat_template_that_is_no_text(tmp_path: Path, template: Any) -> None:
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", None)
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ValueError, match=r"^--mask-from chat: .*--tokenizer .*tokenizer"):
        chat.ChatTemplate(str(tokenizer))


LOOPS = "{% for a in range(9999) %}{% for b in range(9999) %}BODY{% endfor %}{% endfor %}"


@for_each(
    "template",
    [
        LOOPS.replace("BODY", "x"),
        MARKED + LOOPS.replace("BODY", LOOPS.replace("BODY", "")),
        "{% set s = 'x' * 9999 %}{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_a_chat_template_without_end_is_refused(tmp_path: Path, template: str, monkeypatch) -> None:
    monkeypatch.setattr(chat, "RENDERING_CPU_SECONDS", 0.1)
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", template)
    with pytest.raises(ValueError, match=r"takes more than 0\.1 s of CPU time for a conversation of 5 messages;"):
        preprocess(tmp_path, [{"messages": TALK}], tokenizer, "--mask-from", "chat", "--on-bad-line", "skip")
    assert not list(tmp_path.glob("p*"))


def test_targets_do_not_depend_on_the_mask_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its versions, such as 5.17, mark the messages of the user that follow an answer."""
    from transformers import PreTrainedTokenizerBase

    apply = PreTrainedTokenizerBase.apply_chat_template

    def wrong(*given: Any, **options: Any) -> Any:
        found = apply(*given, **options)
        if "assistant_masks" in found:
            found["assistant_masks"] = [1] * len(found["input_ids"])
        return found

    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", wrong)
    found = chat.ChatTemplate(str(write_chat_tokenizer(tmp_path / "tokenizer", MARKED))).encode(TALK)
    assert found.mask.any() and not found.mask.all()


def test_bad_conversations_can_be_skipped(tmp_path: Path) -> None:
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    deep: Any = []
    for _ in range(700 if sys.version_info < (3, 12) else 1200):  # json can read it, and Python's own calls cannot
        deep = [deep]
    talks = (TALK, "x", TALK[2:], TALK, TALK[:3], [{**TALK[1], "content": "x", "extra": deep}])
    documents = [{"messages": each} for each in talks]
    flags = ["--mask-from", "chat", "--on-bad-line", "skip", "--dedup"]
    prefix = preprocess(tmp_path, documents, tokenizer, *flags)
    assert len(marked(f"{prefix}_messages_document", tokenizer)) == 2
    skipped = Path(f"{prefix}_skipped.txt").read_text().splitlines()
    assert len(skipped) == 3 and skipped[2].endswith("--json-keys messages: the key is nested too deeply")


def test_other_options_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus with a mask is not replaced by one without, nor after a change of the template."""
    tokenizer = write_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    preprocess(tmp_path, [{"messages": TALK}], tokenizer, "--mask-from", "chat")
    with pytest.raises(ValueError, match="it was made with other --mask-from; name another output"):
        preprocess(tmp_path, [{"messages": TALK}], tokenizer, "--json-keys", "messages")
    (tokenizer / "chat_template.jinja").write_text(MARKED)
    chat.cached_template.cache_clear()  # a process reads a template once
    with pytest.raises(ValueError, match="it was made with other --mask-from; name another output"):
        preprocess(tmp_path, [{"messages": TALK}], tokenizer, "--mask-from", "chat")


def test_a_corpus_that_replaces_a_masked_one_has_no_mask(tmp_path: Path) -> None:
    prefix = preprocess(tmp_path, [{"q": "a", "a": "b", "q_a": "c"}], "byte", "--json-keys", "q:0", "a:1")
    assert IndexedDataset(f"{prefix}_q_a_document").masked
    preprocess(tmp_path, [{"q": "a", "a": "b", "q_a": "c"}], "byte", "--json-keys", "q_a", "--overwrite")
    data = IndexedDataset(f"{prefix}_q_a_document")
    assert not data.masked and data.mask(0, 1).tolist() == [True] and "num_targets" not in read_about(data)


def test_parts_are_joined_with_their_masks(tmp_path: Path) -> None:
    documents = [{"q": "x" * (k % 5), "a": "y" * (k % 7)} for k in range(60)]
    flags = ["--json-keys", "q:0", "a:1", "--append-eod"]
    whole = preprocess(tmp_path, documents, "byte", *flags)
    for k in range(3):
        preprocess(tmp_path, documents, "byte", *flags, "--partition", f"{k}/3")
    parts = [f"{tmp_path}/p-0000{k}-of-00003_q_a_document" for k in range(3)]
    joined = tmp_path / "joined" / "p_q_a_document"
    merge_datasets.main(["--input", *parts, "--output-prefix", str(joined)])
    for end in ("bin", "mask", "idx", "json"):
        assert Path(f"{joined}.{end}").read_bytes() == Path(f"{whole}_q_a_document.{end}").read_bytes(), end
    plain = preprocess(tmp_path / "plain", documents, "byte", "--json-keys", "a", "--append-eod")
    with pytest.raises(ValueError, match=r"00000-of-.* has a loss mask, and .*plain.* has none; preprocess one"):
        merge_datasets.main(["--input", f"{plain}_a_document", parts[0], "--output-prefix", str(tmp_path / "no")])


def test_check_dataset_finds_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [{"q": "x" * k, "a": "y" * k} for k in range(9)]
    prefix = f"{preprocess(tmp_path, documents, 'byte', '--json-keys', 'q:0', 'a:1')}_q_a_document"
    check_dataset.main(["--input", prefix])
    assert "8 documents, 72 tokens, 36 targets, ids" in capsys.readouterr().out
    path, about = Path(f"{prefix}.mask"), json.loads(Path(f"{prefix}.json").read_text())
    raw = path.read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            check_dataset.main(["--input", prefix])

    path.write_bytes(bytes(byte ^ (k == 40) for k, byte in enumerate(raw)))
    refused(rf"{prefix}.mask is damaged between bytes 0 and ")
    del about["checksum"]
    Path(f"{prefix}.json").write_text(json.dumps(about))
    refused(rf"json has num_targets 36, and 3[57] tokens count in {prefix}.mask")
    path.write_bytes(raw[:40] + b"\x07" + raw[41:])
    refused(rf"{prefix}.mask has byte 7 for token 40, and only 0 and 1 ")
    path.write_bytes(raw[:-1])
    refused(rf"{prefix}.mask is truncated: 71 bytes, the index describes 72; ")


def test_peek_shows_the_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [{"q": "ask [bold] ", "a": "reply"}]
    prefix = preprocess(tmp_path, documents, "byte", "--json-keys", "q:0", "a:1", "--append-eod")
    peek.main([f"{prefix}_q_a_document", "--html", str(tmp_path / "page.html")])
    out = capsys.readouterr().out
    assert "ask [bold] [[reply<|endoftext|>]]" in out and "17 tokens, 6 of them targets" in out
    assert "[[reply&lt;|endoftext|&gt;]]" in (tmp_path / "page.html").read_text()


# -- training


def write_masked(prefix: Path, documents: list[list[int]], counts: Callable[[int], bool]) -> Path:
    """A corpus whose tokens count as targets if `counts(token)`, so that a sample's targets are known from its ids."""
    write_corpus(prefix, documents)
    Path(f"{prefix}.mask").write_bytes(bytes(counts(token) for document in documents for token in document))
    return prefix


def third(token: int) -> bool:
    return token % 3 == 1


@for_each(("split_by", "seq_length"), [("documents", 7), ("tokens", 7), ("tokens", 200)])
def test_a_target_counts_if_its_byte_is_1(tmp_path: Path, split_by: str, seq_length: int) -> None:
    """In every split, over two epochs, by every kind of dataset; a mask does not change the order of samples."""
    documents = numbered_documents(120, low=2)
    masked, plain = write_masked(tmp_path / "m", documents, third), write_corpus(tmp_path / "p", documents)
    for kind, name in itertools.product((GPTDataset, *GPTDataset.__subclasses__()), ("train", "validation")):
        one, other = (kind(each, "60,40", name, seq_length, seed=3, split_by=split_by) for each in (masked, plain))
        for i in range(2 * one.num_tokens // seq_length + 2):
            found, without = one[i], other[i]
            assert np.array_equal(found.ids, without.ids) and found.counts is not None
            counted = np.array([third(token) for token in found.ids[1:].tolist()])
            wanted = counted if without.counts is None else counted & without.counts
            assert found.counts.tolist() == wanted.tolist(), (kind, i)


def odd_or_end(token: int) -> bool:
    return token not in (2, 4, 6)


def test_blends_ends_of_documents_and_depths(tmp_path: Path) -> None:
    """The mask of a corpus together with a corpus that has none, --eod-mask-loss and multi-token prediction."""
    masked = write_masked(tmp_path / "m", [[1, 2, 3, 4, 0], [5, 6, 7, 0], [4, 4, 0]] * 9, odd_or_end)
    plain = write_corpus(tmp_path / "p", [[9, 8, 0]] * 30)
    data = open_datasets(("1", str(masked), "2", str(plain)), "1", 6, 1, 10)
    batches, left_out = Batches(data.train, 6, BatchSizes(4), 2, eod=0), 0
    for step in range(6):
        for batch in batches.batch(4 * step):
            ids, labels = batch.ids.numpy(), batch.labels.numpy()
            wanted = np.vectorize(odd_or_end)(labels) & (ids != 0)
            assert batch.loss_mask.tolist() == wanted.tolist()
            left_out += int((ids != 0).sum() - wanted.sum())
            ahead = batch.ahead(2)
            assert ahead.loss_mask[:, :-2].tolist() == batch.loss_mask[:, 2:].tolist()
    assert left_out > 0
    expected = f"loss masks: of the tokens, 58.3% of {masked} count as targets; all tokens of the other corpora count"
    assert data.notes()[0] == expected


def test_a_whole_split_counts_each_target_once(tmp_path: Path) -> None:
    documents = numbered_documents(40)
    dataset = GPTDataset(write_masked(tmp_path / "c", documents, third), "1", "train", 9, seed=1)
    whole, found = WholeSplit(dataset), list[int]()
    for step in range(-(-len(whole) // 4)):
        for batch in Batches(whole, 9, BatchSizes(4), 4).batch(4 * step):
            found += batch.labels[batch.loss_mask > 0].tolist()
    first = whole[0].ids[0]  # no target, as in every split
    assert sorted(found) == [token for token in range(dataset.num_tokens) if third(token) and token != first]


def test_what_does_not_fit_the_corpus_is_refused(tmp_path: Path) -> None:
    prefix = write_masked(tmp_path / "c", [[1, 2, 3], [4]], third)
    for raw, fault in ((b"\1" * 3, "is truncated: 3 bytes"), (b"\1" * 5, "does not belong to this .idx: 5 bytes")):
        Path(f"{prefix}.mask").write_bytes(raw)
        with pytest.raises(ValueError, match=f"--data-path {prefix}: {prefix}.mask {fault}, the index describes 4; "):
            open_datasets((str(prefix),), "1", 1, 1, 10)
    made = preprocess(tmp_path, [{"q": "abc", "a": "de"}] * 9, "byte", "--json-keys", "q:0", "a:1")
    Path(f"{made}_q_a_document.mask").unlink()
    with pytest.raises(ValueError, match=r"_document.mask is missing, and without it every token would count as a tar"):
        open_datasets((f"{made}_q_a_document",), "1", 1, 1, 257)


def test_the_start_reports_the_share_of_targets(tmp_path: Path) -> None:
    prefix = preprocess(tmp_path, [{"q": "abc", "a": "de"}] * 900, "byte", "--json-keys", "q:0", "a:1")
    data = open_datasets((f"{prefix}_q_a_document",), "1", 5, 1, 257)
    assert data.notes() == [f"loss masks: of the tokens, 40.0% of {prefix}_q_a_document count as targets"]


@for_each("alone", [True, False])
def test_targets_are_counted_where_no_description_has_their_number(tmp_path: Path, alone: bool, monkeypatch) -> None:
    """All in a small mask, some in a large one. A corpus without any is refused, also in a blend."""
    documents = numbered_documents(40)
    prefix, count = write_corpus(tmp_path / "c", documents), sum(map(len, documents))
    given = [str(prefix)] if alone else ["3", str(write_corpus(tmp_path / "p", documents)), "1", str(prefix)]

    def notes(mask: bytes) -> str:
        Path(f"{prefix}.mask").write_bytes(mask)
        return open_datasets(given, "1", 5, 1, count).notes()[0]

    assert f"of the tokens, {1 / count:.1%} of {prefix} count as targets" in notes(bytes(count - 1) + b"\1")
    for raw, fault in (
        (bytes(count), "counts no token as a target, .*; leave it out"),
        (b"\xff" * count, r"has byte 255 for token 0, and only 0 and 1 \(a target\) are known"),
        (b"1" * count, "has byte 49 for token 0, "),
        (b"\1" * (count - 1) + b"\2", f"has byte 2 for token {count - 1}, "),
    ):
        with pytest.raises(ValueError, match=f"--data-path {prefix}: {prefix}.mask {fault}"):
            notes(raw)
    monkeypatch.setattr(corpora, "SCANNED_BYTES", 64 * len(given))
    monkeypatch.setattr(corpora, "SCANNED_PIECES", 4)
    assert "of the tokens, about 50.0% of" in notes(bytes(k % 2 for k in range(count)))
    assert "of the tokens, about 0.0% of" in notes(bytes(count))


@for_each("kind", (GPTDataset, PackedDataset))
def test_a_byte_that_no_start_has_seen_is_refused_where_it_is_read(tmp_path: Path, kind: type[GPTDataset]) -> None:
    prefix = write_masked(tmp_path / "c", [[1, 2, 3]] * 9, third)
    path = Path(f"{prefix}.mask")
    path.write_bytes(path.read_bytes()[:14] + b"\x80" + path.read_bytes()[15:])
    dataset = kind(prefix, "1", "train", 3, seed=1)
    with pytest.raises(ValueError, match=f"{prefix}.mask has byte 128 for token 14, "):
        [dataset[k] for k in range(9)]


def test_another_mask_is_another_corpus(tmp_path: Path) -> None:
    """A resumed run, and ranks that read different copies, compare fingerprints."""
    documents, prints = numbered_documents(40), []
    for number, rule in enumerate((third, odd_or_end)):
        prints.append(fingerprint(write_masked(tmp_path / str(number), documents, rule)))
    prints.append(fingerprint(write_corpus(tmp_path / "none", documents)))
    assert not any(same(one, other) for one, other in itertools.combinations(prints, 2))
