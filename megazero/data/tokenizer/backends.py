"""The kinds of tokenizers, each with its own library, which is imported when one is made."""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megazero.data.tokenizer.base import END_OF_DOCUMENT, Ids, Tokenizer
from megazero.files import write_atomically
from megazero.optional import load_optional


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
        """Wrap the backend. `save` also writes the `settings` of tokenizer_config.json and the files `others`."""
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
        return str(self._backend.to_str())

    def vocabulary(self) -> dict[str, int]:
        return dict(self._backend.get_vocab(with_added_tokens=True))

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
        return str(self._backend.decode(list(ids), skip_special_tokens=False))


class TransformersTokenizer(Tokenizer):
    """A folder that only `transformers` can read: one without tokenizer.json."""

    def __init__(self, spec: str, backend: Any) -> None:
        size = max(backend.get_vocab().values()) + 1
        super().__init__(spec, size, find_eod(backend.get_vocab(), backend.eos_token))
        self._backend = backend

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self._backend(list(texts), add_special_tokens=False)["input_ids"])

    def vocabulary(self) -> dict[str, int]:
        return dict(self._backend.get_vocab())

    def save(self, folder: Path) -> str:
        self._backend.save_pretrained(folder)
        return "{}"

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=False))


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model; its end of sentence is the end of document."""

    def __init__(self, spec: str, path: Path) -> None:
        if not path.is_file():  # the library's own message is about a C++ file name
            raise FileNotFoundError(f"{path} is not a file")
        library = load_optional("sentencepiece", "a SentencePiece model")
        self._backend = library.SentencePieceProcessor(model_file=str(path))
        eos = self._backend.eos_id()
        super().__init__(spec, self._backend.vocab_size(), eos if eos >= 0 else None)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self._backend.encode(list(texts), num_threads=1))

    def vocabulary(self) -> dict[str, int]:
        return {self._backend.id_to_piece(number): number for number in range(self.vocab_size)}

    def save(self, folder: Path) -> str:
        write_atomically(folder / "tokenizer.model", self._backend.serialized_model_proto())
        return "sentencepiece:{}/tokenizer.model"

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids)))


class TiktokenTokenizer(Tokenizer):
    """A tiktoken file: FILE, the ranks of tokens, and FILE.json, the other settings.

    FILE.json has two arguments of `tiktoken.Encoding`: `pat_str`, the pattern that divides text, and `special_tokens`,
    name -> id; and, if the end of document has an unusual name, `eos_token`. The text is not searched for special
    tokens.
    """

    def __init__(self, spec: str, ranks: bytes, settings: Mapping[str, Any]) -> None:
        tiktoken = load_optional("tiktoken", "a tiktoken file")
        self.ranks, self.settings = ranks, dict(settings)
        pattern, special = settings.get("pat_str"), settings.get("special_tokens", {})
        if not isinstance(pattern, str) or not isinstance(special, dict):
            raise ValueError("the .json next to it must have a text `pat_str` and an object `special_tokens`")
        pairs = (line.split() for line in ranks.splitlines() if line)
        tokens = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        self._backend = tiktoken.Encoding("file", pat_str=pattern, mergeable_ranks=tokens, special_tokens=special)
        super().__init__(spec, self._backend.max_token_value + 1, find_eod(special, configured_eos(settings)))
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


def configured_eos(config: Mapping[str, Any]) -> str | None:
    """`eos_token` of a tokenizer_config.json: a string, or an object with its `content`."""
    eos = config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos is not None and not isinstance(eos, str):
        raise ValueError(f"tokenizer_config.json has an eos_token that is no text: {json.dumps(eos)[:80]}")
    return eos


def find_eod(vocab: dict[str, int], configured: str | None) -> int | None:
    names = (*END_OF_DOCUMENT, configured)
    return next((vocab[name] for name in names if name is not None and name in vocab), None)
