"""The kinds of tokenizers, each with its own library, which is imported when one is made."""

import base64
import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megazero.data.tokenizer.base import END_OF_DOCUMENT, Ids, Tokenizer
from megazero.data.tokenizer.special_tokens import added_before, configured_token, find_eod, read_settings
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

    def _save(self, folder: Path) -> str:
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
        known = backend.get_vocab(with_added_tokens=True)
        # A tokenizer.json may carry the truncation or padding of some other use.
        backend.no_truncation()
        backend.no_padding()
        added = added_before(backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids)
        bos, eos = (known.get(configured_token(settings, name) or "") for name in ("bos_token", "eos_token"))
        beginning = added or (() if bos is None else (bos,))
        super().__init__(spec, max(known.values()) + 1, eod, eos, beginning, begins=bool(added))
        self._backend = backend
        self._settings, self._others = dict(settings), dict(others)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in encoded]

    @property
    def json(self) -> str:
        """The contents of a tokenizer.json, whose post-processor puts `bos` before a text."""
        if bool(self.bos) == self.begins:
            return str(self._backend.to_str())
        from tokenizers import Tokenizer as Backend
        from tokenizers import processors

        other = Backend.from_str(self._backend.to_str())
        names = [other.id_to_token(number) for number in self.bos]
        tokens = list(zip(names, self.bos, strict=True))
        other.post_processor = processors.TemplateProcessing(single=[*names, "$A"], special_tokens=tokens)
        return str(other.to_str())

    def vocabulary(self) -> dict[str, int]:
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def _save(self, folder: Path) -> str:
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
        known, special = backend.get_vocab(), {*backend.all_special_tokens}
        special |= {token.content for token in backend.added_tokens_decoder.values() if token.special}
        added = added_before(backend("a")["input_ids"], backend("a", add_special_tokens=False)["input_ids"])
        beginning = added or (() if backend.bos_token_id is None else (backend.bos_token_id,))
        eod = find_eod(known, special, backend.eos_token)
        super().__init__(spec, max(known.values()) + 1, eod, backend.eos_token_id, beginning, begins=bool(added))
        self._backend = backend

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self._backend(list(texts), add_special_tokens=False)["input_ids"])

    def vocabulary(self) -> dict[str, int]:
        return dict(self._backend.get_vocab())

    def _save(self, folder: Path) -> str:
        backend = self._backend
        if bool(self.bos) != self.begins:
            backend = copy.deepcopy(backend)
            backend.add_bos_token = bool(self.bos)
        backend.save_pretrained(folder)
        return "{}"

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=False))


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model; its end of sentence is the end of document.

    Kinds: sentencepiece; llama2, which puts the beginning of sentence before each text, as Megatron-LM's
    Llama2Tokenizer does; megatron, with the tokens that Megatron-LM's SentencePieceTokenizer adds behind the model's.
    <EOD> of them ends a document.
    """

    def __init__(self, spec: str, path: Path, kind: str = "sentencepiece") -> None:
        if not path.is_file():  # the library's own message is about a C++ file name
            raise FileNotFoundError(f"{path} is not a file")
        library = load_optional("sentencepiece", "a SentencePiece model")
        self._backend = library.SentencePieceProcessor(model_file=str(path))
        self.kind, size = kind, self._backend.vocab_size()
        self._pieces = {self._backend.id_to_piece(number): number for number in range(size)}
        bos, eos, pad = self._backend.bos_id(), self._backend.eos_id(), self._backend.pad_id()
        eod = eos if eos >= 0 else None
        if kind == "megatron":
            ends = [name for name, number in (("<PAD>", pad), ("<BOS>", bos), ("<EOS>", eos)) if number < 0]
            for name in ("<CLS>", "<SEP>", "<EOD>", "<MASK>", *ends):
                self._pieces.setdefault(name, len(self._pieces))
            eod = self._pieces["<EOD>"]
        if eod is None:
            control = {piece for piece, number in self._pieces.items() if self._backend.is_control(number)}
            eod = find_eod(self._pieces, control, None)
        begins = kind == "llama2" or (
            kind == "sentencepiece" and read_settings(path.parent).get("add_bos_token") is True
        )
        super().__init__(
            spec, len(self._pieces), eod, eos if eos >= 0 else None, (bos,) if bos >= 0 else (), begins=begins
        )
        if kind == "llama2":
            self.prepending(True)  # raises if it has none

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self._backend.encode(list(texts), num_threads=1))

    def vocabulary(self) -> dict[str, int]:
        return dict(self._pieces)

    def behind_model(self) -> dict[str, int]:
        """The tokens that are not in the model, and their ids."""
        return {name: number for name, number in self._pieces.items() if number >= self._backend.vocab_size()}

    def named(self, kind: str) -> str | None:
        """The piece that the model itself has for "eos", "bos", "unk" or "pad"; None if it has none."""
        number = int(getattr(self._backend, f"{kind}_id")())
        return str(self._backend.id_to_piece(number)) if number >= 0 else None

    def _save(self, folder: Path) -> str:
        write_atomically(folder / "tokenizer.model", self._backend.serialized_model_proto())
        kind = self.kind if self.kind == "megatron" else "llama2" if self.bos else "sentencepiece"
        return f"{kind}:{{}}/tokenizer.model"

    def decode(self, ids: Sequence[int]) -> str:
        size, names, parts = self._backend.vocab_size(), list(self._pieces), []
        for known, run in itertools.groupby(ids, key=lambda token: token < size):
            tokens = list(run)
            parts += [self._backend.decode(tokens)] if known else [names[token] for token in tokens]
        return "".join(parts)


class TiktokenTokenizer(Tokenizer):
    """A tiktoken file: FILE, the ranks of tokens, and FILE.json, the other settings.

    FILE.json has two arguments of `tiktoken.Encoding`: `pat_str`, the pattern that divides text, and `special_tokens`,
    name -> id; and, if the end of document has an unusual name, `eos_token`; `bos_token`, which begins each text if
    `add_bos_token` is true. The text is not searched for special tokens.
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
        eos, bos = (configured_token(settings, name) for name in ("eos_token", "bos_token"))
        beginning, begins = (special[bos],) if bos in special else (), settings.get("add_bos_token") is True
        size, end = self._backend.max_token_value + 1, find_eod(special, special, eos)
        super().__init__(spec, size, end, special.get(eos or ""), beginning, begins=begins)
        self._tokens, self._special = tokens, special

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._backend.encode_ordinary(text) for text in texts]

    def vocabulary(self) -> dict[str, int]:
        return {token.decode("latin-1"): rank for token, rank in self._tokens.items()} | self._special

    def _save(self, folder: Path) -> str:
        settings = self.settings | ({} if bool(self.bos) == self.begins else {"add_bos_token": bool(self.bos)})
        write_atomically(folder / "tokenizer.tiktoken", self.ranks)
        write_atomically(folder / "tokenizer.tiktoken.json", json.dumps(settings, indent=2).encode())
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
