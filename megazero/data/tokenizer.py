# ruff: noqa: RUF001 - the probe holds letters of many scripts
"""Tokenizers behind one small interface: Hugging Face, GPT-2's own files, SentencePiece, tiktoken, and plain bytes.

No begin-of-text or other special token is added to what is encoded: a document is its own tokens, and who
wants an end of document appends `eod`. The libraries are imported by the loader that needs them.
"""

import base64
import functools
import hashlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megazero.files import explain, open_regular, read_json_object, read_regular, write_atomically

SPECS = (
    "a folder or tokenizer.json of Hugging Face, gpt2:DIR (vocab.json and merges.txt), "
    "sentencepiece:FILE.model, tiktoken:FILE, or byte"
)
# Which token ends a document, if a tokenizer does not say: GPT-2's, then LLaMA's.
END_OF_DOCUMENT = ("<|endoftext|>", "</s>")
# What transformers may read of a tokenizer's folder besides tokenizer.json and its configuration.
OTHER_FILES = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
Ids = npt.NDArray[Any]
# Texts on which tokenizers of one vocabulary part: white space, cases, contractions, digits, scripts, accents
# in both normal forms, joined emoji, code, markup, and names of special tokens.
PROBE = (
    "Hello world! I'll say it's 1,234.56 or 1e-9, WON'T I?  Two  spaces,\ttabs\n\n\nand lines \r\n of both kinds. ",
    "  leading and trailing  ",
    "def f(x):\n    return {'a': [x ** 2, \"b\\\\n\"]}  # comment\n\tif (a&&b||!c) {i++;}\n",
    "Straße naïve café cafe\u0301 Ångström \u212b ﬁ ½ ² Ⅳ İstanbul ǅ ＡＢＣ １２３",
    "Привет, мир. Γειά σου Κόσμε. שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "你好，世界。こんにちは世界カタカナ 안녕하세요 세계 𠀀𠀁 \u3000全角",
    "👩‍👩‍👧‍👦 🇺🇳 👍🏽 \u200b\ufeff\u00a0\u2028\u0000\u0007\u001b\ufffd",
    "<|endoftext|> </s> <s> <unk> [CLS] <html><b>x</b></html> https://a.b/c?d=e&f=%20#g ________ ====== aaaaaaaaaaaaaa",
)


class Tokenizer(ABC):
    """Text to ids in [0, `vocab_size`) and back. `spec` is what `load_tokenizer` made it from."""

    def __init__(self, spec: str, vocab_size: int, eod: int | None) -> None:
        self.spec, self.vocab_size, self._eod = spec, vocab_size, eod

    @property
    def eod(self) -> int:
        """The end-of-document id. ValueError if there is none: raised only where one is needed."""
        if self._eod is None:
            raise ValueError(
                f"--tokenizer {self.spec}: it has no end-of-document token ({', '.join(END_OF_DOCUMENT)}, or "
                f"eos_token in tokenizer_config.json), which --append-eod, --eod-mask-loss and --reset-... need; "
                f"add one to it, or leave these flags out"
            )
        return self._eod

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def vocabulary(self) -> dict[str, int]:
        """Every token and its id."""

    @abstractmethod
    def save(self, folder: Path) -> str:
        """Write the tokenizer into an existing folder; the SPEC that reads it, with the folder as `{}`."""

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.encode_batch([text])[0]

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Ids]:
        """The ids of all texts one after another, and the number of each text's."""
        parts = [np.array(ids, dtype=np.int64) for ids in self.encode_batch(texts)]
        return np.concatenate([np.zeros(0, np.int64), *parts]), np.array([part.size for part in parts], np.int64)

    @functools.cached_property
    def identity(self) -> str:
        """A hash of what the tokenizer does: its vocabulary, and the ids of a probe of many kinds of text.

        Not of its files, which other versions of a library write otherwise.
        """
        digest = hashlib.sha256()
        for token, number in sorted(self.vocabulary().items(), key=lambda pair: (pair[1], pair[0])):
            digest.update(f"{number}\0{token}\0".encode("utf-8", "surrogatepass"))
        digest.update(repr(self.encode_batch(PROBE)).encode())
        return digest.hexdigest()[:16]


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of a --tokenizer SPEC (see `SPECS`). ValueError if it cannot be read."""
    kind, _, path = spec.partition(":")
    if spec == "byte":
        return ByteTokenizer(spec)
    if kind == "gpt2":
        return _guarded(spec, lambda: _load_gpt2(spec, Path(path)))
    if kind == "sentencepiece":
        return _guarded(spec, lambda: SentencePieceTokenizer(spec, Path(path)))
    if kind == "tiktoken":
        return _guarded(spec, lambda: _load_tiktoken(spec, Path(path)))
    return _guarded(spec, lambda: _load_hugging_face(spec, Path(spec)))


class Packed(NamedTuple):
    """A tokenizer's files in memory.

    Attributes:
        spec: what `Tokenizer.save` returns: the SPEC that reads it, with the folder as `{}`.
        files: contents by name.
    """

    spec: str
    files: dict[str, bytes]


def pack(tokenizer: Tokenizer) -> Packed:
    """The files that `Tokenizer.save` writes. ValueError if there is no room for them in the temporary folder."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            spec = tokenizer.save(Path(folder))
            files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
    except OSError as error:
        raise ValueError(f"--tokenizer {tokenizer.spec} cannot be copied: {explain(error)}") from None
    return Packed(spec, files)


def beside(saved: str, folder: Path) -> str:
    """The SPEC of a saved tokenizer from one whose path is relative to `folder`."""
    if saved == "byte":
        return saved
    kind, _, path = saved.rpartition(":")
    return f"{kind}:" * bool(kind) + str(folder / path)


def end_of_document(tokenizer: Tokenizer) -> int | None:
    """The end-of-document id, where there is one."""
    try:
        return tokenizer.eod
    except ValueError:
        return None


def _guarded(spec: str, load: Callable[[], Tokenizer]) -> Tokenizer:
    """Whatever a library raises at a bad file (plain Exception, RuntimeError, ...) becomes one ValueError."""
    try:
        return load()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"--tokenizer {spec}: cannot be read: {reason}; expected {SPECS}") from error


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255; 256 ends a document."""

    def __init__(self, spec: str) -> None:
        super().__init__(spec, vocab_size=257, eod=256)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8", errors="surrogatepass")) for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Ids]:
        raw = [text.encode("utf-8", errors="surrogatepass") for text in texts]
        return np.frombuffer(b"".join(raw), np.uint8), np.array([len(text) for text in raw], np.int64)

    def vocabulary(self) -> dict[str, int]:
        return {**{f"byte {value}": value for value in range(256)}, END_OF_DOCUMENT[0]: 256}

    def save(self, folder: Path) -> str:
        return "byte"

    def decode(self, ids: Sequence[int]) -> str:
        parts, run = [], bytearray()
        for token in ids:
            if token < 256:
                run.append(token)
            else:
                parts += [run.decode("utf-8", errors="replace"), END_OF_DOCUMENT[0]]
                run = bytearray()
        return "".join([*parts, run.decode("utf-8", errors="replace")])


class FastTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer`, whether from a tokenizer.json or built from GPT-2's files."""

    def __init__(
        self,
        spec: str,
        backend: Any,
        eod: int | None,
        settings: Mapping[str, Any] = {},
        others: Mapping[str, bytes] = {},
    ) -> None:
        """Wrap the backend. What `save` writes keeps the `settings` of tokenizer_config.json and the files `others`."""
        # Ids may have gaps, and the vocabulary must hold the largest.
        super().__init__(spec, max(backend.get_vocab(with_added_tokens=True).values()) + 1, eod)
        # A tokenizer.json may carry the truncation or padding of some other use.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._settings, self._others = dict(settings), dict(others)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in encoded]

    @property
    def json(self) -> str:
        """The contents of a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return found

    def save(self, folder: Path) -> str:
        write_atomically(folder / "tokenizer.json", self.json.encode())
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self._eod is not None:
            settings["eos_token"] = self._backend.id_to_token(self._eod)
        settings |= {key: value for key, value in self._settings.items() if key != "auto_map"}  # which names code
        write_atomically(folder / "tokenizer_config.json", json.dumps(settings, indent=2).encode())
        for name, content in self._others.items():
            write_atomically(folder / name, content)
        return "{}"

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text


class TransformersTokenizer(Tokenizer):
    """A folder that only `transformers` can read: one without tokenizer.json."""

    def __init__(self, spec: str, backend: Any) -> None:
        size = max(backend.get_vocab().values()) + 1
        super().__init__(spec, size, _find_eod(backend.get_vocab(), backend.eos_token))
        self._backend = backend

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._backend(list(texts), add_special_tokens=False)["input_ids"]
        return ids

    def vocabulary(self) -> dict[str, int]:
        found: dict[str, int] = self._backend.get_vocab()
        return found

    def save(self, folder: Path) -> str:
        self._backend.save_pretrained(folder)
        return "{}"

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model; its end of sentence is the end of document."""

    def __init__(self, spec: str, path: Path) -> None:
        if not path.is_file():  # the library's own words are about a C++ file name
            raise FileNotFoundError(f"{path} is not a file")
        from sentencepiece import SentencePieceProcessor

        self._backend = SentencePieceProcessor(model_file=str(path))
        eos = self._backend.eos_id()
        super().__init__(spec, self._backend.vocab_size(), eos if eos >= 0 else None)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._backend.encode(list(texts), num_threads=1)
        return ids

    def vocabulary(self) -> dict[str, int]:
        return {self._backend.id_to_piece(number): number for number in range(self.vocab_size)}

    def save(self, folder: Path) -> str:
        write_atomically(folder / "tokenizer.model", self._backend.serialized_model_proto())
        return "sentencepiece:{}/tokenizer.model"

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(ids))
        return text


class TiktokenTokenizer(Tokenizer):
    """A tiktoken file: FILE, the ranks of tokens, and FILE.json, what the ranks leave open.

    FILE.json has the arguments of `tiktoken.Encoding` that its ids depend on: `pat_str`, the pattern that divides text,
    and `special_tokens`, name -> id; and, if the end of document has an unusual name, `eos_token`. Special tokens are
    not looked for in the text.
    """

    def __init__(self, spec: str, ranks: bytes, settings: Mapping[str, Any]) -> None:
        import tiktoken

        self.ranks, self.settings = ranks, dict(settings)
        pattern, special = settings.get("pat_str"), settings.get("special_tokens", {})
        if not isinstance(pattern, str) or not isinstance(special, dict):
            raise ValueError("the .json beside it must have a text `pat_str` and an object `special_tokens`")
        pairs = (line.split() for line in ranks.splitlines() if line)
        tokens = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        self._backend = tiktoken.Encoding("file", pat_str=pattern, mergeable_ranks=tokens, special_tokens=special)
        super().__init__(spec, self._backend.max_token_value + 1, _find_eod(special, _configured_eos(settings)))
        self._tokens, self._special = tokens, special

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._backend.encode_ordinary(text) for text in texts]

    def vocabulary(self) -> dict[str, int]:
        return {token.decode("latin-1"): rank for token, rank in self._tokens.items()} | self._special

    def save(self, folder: Path) -> str:
        write_atomically(folder / "tokenizer.tiktoken", self.ranks)
        write_atomically(folder / "tokenizer.tiktoken.json", json.dumps(self.settings, indent=2).encode())
        return "tiktoken:{}/tokenizer.tiktoken"

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids)))


def gpt2_backend(model: Any) -> Any:
    """A `tokenizers.Tokenizer` that splits and joins text as GPT-2 does, around a byte-level BPE model."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, pre_tokenizers

    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _load_gpt2(spec: str, folder: Path) -> Tokenizer:
    """OpenAI's two files, under OpenAI's names (encoder.json, vocab.bpe) or Hugging Face's.

    <|endoftext|> is not looked for in the text, as in Megatron: a document that quotes it does not end there.
    """
    from tokenizers.models import BPE

    for vocab, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if (folder / vocab).is_file() and (folder / merges).is_file():
            backend = gpt2_backend(BPE.from_file(str(folder / vocab), str(folder / merges)))
            return FastTokenizer(spec, backend, _find_eod(backend.get_vocab(), None))
    raise FileNotFoundError(f"no vocab.json and merges.txt (nor encoder.json and vocab.bpe) in {folder}")


def _load_tiktoken(spec: str, path: Path) -> Tokenizer:
    settings = Path(f"{path}.json")
    ranks = read_regular(path)
    if not settings.is_file():
        raise FileNotFoundError(
            f"{settings} is missing: a tiktoken file has no pattern; write "
            '{"pat_str": ..., "special_tokens": {"<|endoftext|>": ...}} of its tiktoken.Encoding there'
        )
    return TiktokenTokenizer(spec, ranks, read_json_object(settings))


def _load_hugging_face(spec: str, path: Path) -> Tokenizer:
    """A tokenizer.json is read without `transformers`, whose import takes seconds on every rank."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not path.is_dir():
        os.close(open_regular(path))  # refuses a FIFO or a device, at which a library would wait for ever
        file = path
    else:
        for entry in path.iterdir():
            if not entry.is_dir() and entry.exists():
                os.close(open_regular(entry))
        file = path / "tokenizer.json"
    config = read_json_object(settings) if (settings := file.parent / "tokenizer_config.json").exists() else {}
    if not file.exists():
        return _load_transformers(spec, path, config)
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(file))
    eod = _find_eod(backend.get_vocab(with_added_tokens=True), _configured_eos(config))
    others = {name: read_regular(file.parent / name) for name in OTHER_FILES if (file.parent / name).is_file()}
    return FastTokenizer(spec, backend, eod, config, others)


def _load_transformers(spec: str, folder: Path, config: dict[str, Any]) -> Tokenizer:
    """Nothing in the folder is run: `trust_remote_code` is not left to a question on the terminal."""
    if config.get("auto_map"):
        raise ValueError(
            f"{folder} has no tokenizer.json, and its tokenizer_config.json asks to run code of its own "
            f"(auto_map), which is never done; save the tokenizer as a tokenizer.json"
        )
    from transformers import AutoTokenizer

    backend = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return TransformersTokenizer(spec, backend)


def _configured_eos(config: Mapping[str, Any]) -> str | None:
    """`eos_token` of a tokenizer_config.json: a string, or an object with its `content`."""
    eos = config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos is not None and not isinstance(eos, str):
        raise ValueError(f"tokenizer_config.json has an eos_token that is no text: {json.dumps(eos)[:80]}")
    return eos


def _find_eod(vocab: dict[str, int], configured: str | None) -> int | None:
    names = (*END_OF_DOCUMENT, configured)
    return next((vocab[name] for name in names if name is not None and name in vocab), None)
