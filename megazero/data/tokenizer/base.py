# ruff: noqa: RUF001 - the probe holds letters of many scripts
"""`Tokenizer`, the interface; its probe and identity; its files, packed for a checkpoint."""

import copy
import functools
import hashlib
import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from megazero.files import explain, write_atomically

# Names of the special token that ends a document: of GPT-2, Llama 1 and 2, Gemma, Llama 3, DeepSeek, Command, Kimi,
# Megatron-LM. Others are configured.
END_OF_DOCUMENT = (
    *("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    *("<EOS_TOKEN>", "[EOS]", "<EOD>"),
)
GENERATION = "generation_config.json"  # transformers' settings of generation; they name the ends of a text
Ids = npt.NDArray[Any]
# Texts that tokenizers of one vocabulary encode differently: white space, cases, contractions, digits, scripts, accents
# in both normal forms, joined emoji, code, markup, and names of special tokens.
PROBE = (
    b"Hello world! I'll say it's 1,234.56 or 1e-9, WON'T I?  Two  spaces,\ttabs\n\n\nand lines \r\n "
    b"of both kinds. ".decode(),
    "  leading and trailing  ",
    "def f(x):\n    return {'a': [x ** 2, \"b\\\\n\"]}  # comment\n\tif (a&&b||!c) {i++;}\n",
    "Straße naïve café cafe\u0301 Ångström \u212b ﬁ ½ ² Ⅳ İstanbul ǅ ＡＢＣ １２３",
    "Привет, мир. Γειά σου Κόσμε. שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "你好，世界。こんにちは世界カタカナ 안녕하세요 세계 𠀀𠀁 \u3000全角",
    "👩‍👩‍👧‍👦 🇺🇳 👍🏽 \u200b\ufeff\u00a0\u2028\u0000\u0007\u001b\ufffd",
    "<|endoftext|> </s> <s> <unk> [CLS] <html><b>x</b></html> https://a.b/c?d=e&f=%20#g ________ ====== aaaaaaaaaaaaaa",
)


class Tokenizer(ABC):
    """Text to ids in [0, `vocab_size`) and back. `spec` is the value of --tokenizer."""

    generation = b""  # the generation_config.json of the model to which it belongs

    def __init__(
        self,
        spec: str,
        vocab_size: int,
        eod: int | None,
        eos: int | None = None,
        beginning: Sequence[int] = (),
        begins: bool = False,
    ) -> None:
        """Set the facts of every kind.

        Args:
            eos: id of its eos_token, which may end a message instead of a document.
            beginning: ids of the beginning of a text; none: it has no such token.
            begins: its own settings put them before a text.
        """
        self.spec, self.vocab_size, self._eod, self._beginning = spec, vocab_size, eod, tuple(beginning)
        self.begins, self._eos = begins, eos
        self.bos = self._beginning if begins else ()  # ids that begin each text here

    @property
    def eod(self) -> int:
        """The end-of-document id. ValueError if there is none: raised only where one is needed."""
        if self._eod is None:
            raise ValueError(
                f"--tokenizer {self.spec}: it has no end-of-document token (a special one, such as "
                f"{', '.join(END_OF_DOCUMENT[:2])}, or eos_token in tokenizer_config.json), which --append-eod, "
                "--eod-mask-loss and --reset-... need; add one to it, or leave these flags out"
            )
        return self._eod

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a text: those of `generation`, the end of a document, the eos_token."""
        known = json.loads(self.generation).get("eos_token_id") if self.generation else None
        ends = [*(known if isinstance(known, list) else [known]), self._eod, self._eos]
        return tuple(dict.fromkeys(end for end in ends if end is not None))

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def vocabulary(self) -> dict[str, int]:
        """Every token and its id."""

    def save(self, folder: Path) -> str:
        """Write the tokenizer into an existing folder; the SPEC that reads it, with the folder as `{}`."""
        if self.generation:
            write_atomically(folder / GENERATION, self.generation)
        return self._save(folder)

    @abstractmethod
    def _save(self, folder: Path) -> str:
        """Write the tokenizer alone, as `save`."""

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.encode_batch([text])[0]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of whole texts, each after `bos`, which none has twice; `encode_batch` is for parts of texts."""
        return [
            ids if tuple(ids[: len(self.bos)]) == self.bos else [*self.bos, *ids] for ids in self.encode_batch(texts)
        ]

    @property
    def beginning(self) -> tuple[int, ...]:
        """The ids that can begin a text, whether or not they do in `bos`."""
        return self._beginning

    @property
    def own_bos(self) -> tuple[int, ...]:
        """The ids that its own settings put before a text; `bos` may differ."""
        return self._beginning if self.begins else ()

    def name_of(self, number: int) -> str:
        """The token of an id; "" if it is none."""
        return next((token for token, known in self.vocabulary().items() if known == number), "")

    def shown(self, *ids: int) -> str:
        """Tokens for messages."""
        return " ".join(f"{self.name_of(number)!r} ({number})" for number in ids)

    def prepending(self, asked: bool | None) -> Self:
        """This tokenizer with the beginning of a text in `bos`, or without; None: as it is.

        Raises:
            ValueError: it has no beginning.
        """
        if asked and not self._beginning:
            raise ValueError(
                f"--prepend-bos: --tokenizer {self.spec} has no beginning-of-text token (bos_token in "
                "tokenizer_config.json); add one to it, or leave the flag out"
            )
        found = copy.copy(self)
        if asked is not None:
            found.bos = self._beginning if asked else ()
        return found

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Ids]:
        """The ids of all texts one after another, and the number of each text's."""
        parts = [np.array(ids, dtype=np.int64) for ids in self.encode_batch(texts)]
        return np.concatenate([np.zeros(0, np.int64), *parts]), np.array([part.size for part in parts], np.int64)

    @functools.cached_property
    def identity(self) -> str:
        """A hash of the vocabulary and of the ids of a probe of many kinds of text.

        Not of the tokenizer's files, because their bytes depend on the version of a library.
        """
        digest = hashlib.sha256()
        for token, number in sorted(self.vocabulary().items(), key=lambda pair: (pair[1], pair[0])):
            digest.update(f"{number}\0{token}\0".encode("utf-8", "surrogatepass"))
        digest.update(repr(self.encode_batch(PROBE)).encode())
        return digest.hexdigest()[:16]


class Packed(NamedTuple):
    """A tokenizer's files in memory."""

    spec: str  # as `Tokenizer.save` returns it
    files: dict[str, bytes]  # contents by name


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
    kind, colon, path = saved.rpartition(":")
    return f"{kind}{colon}{folder / path}"


def asked_beginning(prepend_bos: bool, no_prepend_bos: bool) -> bool | None:
    """The argument of `Tokenizer.prepending` by two flags. ValueError if both are given."""
    if prepend_bos and no_prepend_bos:
        raise ValueError("--prepend-bos with --no-prepend-bos: they contradict each other; drop one")
    return prepend_bos or (False if no_prepend_bos else None)


def end_of_document(tokenizer: Tokenizer) -> int | None:
    """The end-of-document id, where there is one."""
    try:
        return tokenizer.eod
    except ValueError:
        return None
