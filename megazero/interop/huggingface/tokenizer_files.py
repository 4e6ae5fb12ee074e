"""Tokenizers of an export and of an import."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from megazero.data.tokenizer import (
    END_OF_DOCUMENT,
    OTHER_FILES,
    PROBE,
    ByteTokenizer,
    FastTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    end_of_document,
    gpt2_backend,
    load_tokenizer,
)
from megazero.data.tokenizer.special_tokens import configured_token, read_settings
from megazero.files import read_json_object, write_atomically

# Files of a Hugging Face tokenizer.
FILES = ("tokenizer.json", "tokenizer_config.json", *OTHER_FILES, "vocab.json", "merges.txt", "tokenizer.model")
# LlamaTokenizer reads a SentencePiece model.
SENTENCEPIECE = {
    "tokenizer_class": "LlamaTokenizer",
    "legacy": False,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
}


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> bool:
    """Write a run's tokenizer so that `AutoTokenizer` reads it from `folder`.

    A Hugging Face folder is copied file by file: chat templates and the like stay.

    Returns:
        True if transformers gives the same ids for texts of many kinds. It does not for a SentencePiece model with a
        normaliser of its own, because it knows only Llama's.
    """
    check_tokenizer(tokenizer)
    source = Path(tokenizer.spec)
    if source.is_dir() and (source / "tokenizer.json").is_file():
        copy_files(source, folder)
        _complete_settings(tokenizer, folder / "tokenizer_config.json")
    elif isinstance(tokenizer, ByteTokenizer):
        _byte_level(tokenizer).save(folder)
    else:
        tokenizer.save(folder)
        if isinstance(tokenizer, SentencePieceTokenizer):
            write_atomically(folder / "tokenizer_config.json", json.dumps(_of_model(tokenizer), indent=2).encode())
    return _gives_the_same_ids(tokenizer, folder)


class SpecialIds(NamedTuple):
    """Ids of special tokens in an export; None if there is none."""

    bos: int | None = None
    ends: tuple[int, ...] = ()
    pad: int | None = None

    @property
    def eos(self) -> int | list[int] | None:
        """The ends of a text as transformers has them."""
        return list(self.ends) if len(self.ends) > 1 else next(iter(self.ends), None)


def special_ids(tokenizer: Tokenizer, folder: Path) -> SpecialIds:
    """Return the ids of special tokens: those of the tokenizer's generation_config.json, of its files in `folder`."""
    given = json.loads(tokenizer.generation or b"{}")
    settings, known = read_settings(folder), tokenizer.vocabulary()

    def found(name: str) -> int | None:
        number = given.get(f"{name}_token_id")
        return number if number is not None else known.get(configured_token(settings, f"{name}_token") or "")

    beginning = tokenizer.bos[0] if len(tokenizer.bos) == 1 else None
    bos = found("bos")
    return SpecialIds(beginning if bos is None else bos, tokenizer.ends, found("pad"))


def generation_config(generation: bytes, ids: SpecialIds) -> dict[str, Any]:
    """Return the generation_config.json of an export: that of the model's source, which stops at all ends of a text.

    Args:
        generation: the source's; empty if there is none.
    """
    if not generation:
        return {"bos_token_id": ids.bos, "eos_token_id": ids.eos, "pad_token_id": ids.pad}
    found: dict[str, Any] = json.loads(generation)
    return found | ({"eos_token_id": ids.eos} if ids.ends else {})


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raise ValueError for a tokenizer that cannot be exported."""
    if isinstance(tokenizer, TiktokenTokenizer):
        raise ValueError(
            f"--tokenizer {tokenizer.spec}: transformers reads no tiktoken file with a pattern of its own; name a "
            "Hugging Face tokenizer of the same ids"
        )


def has_tokenizer(source: Path) -> bool:
    """Return whether a Hugging Face folder holds a tokenizer."""
    return any((source / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model"))


def read_tokenizer(source: Path, folder: Path) -> Tokenizer | None:
    """Copy a Hugging Face model's tokenizer into an existing folder; None where `source` has none.

    Raises:
        ValueError: it has one that cannot be read.
    """
    if not has_tokenizer(source):
        return None
    tokenizer = load_tokenizer(str(source))
    copy_files(source, folder)
    return tokenizer


def _complete_settings(tokenizer: Tokenizer, path: Path) -> None:
    """Name the class and the end of document where they are not named: else transformers goes by the model's type."""
    known = read_json_object(path) if path.is_file() else {}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    eod = end_of_document(tokenizer)
    if eod is not None:
        settings["eos_token"] = tokenizer.name_of(eod)
    if settings.keys() - known.keys():
        write_atomically(path, json.dumps(settings | known, indent=2).encode())


def _of_model(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    """The tokenizer_config.json of a SentencePiece model, with its own names: LlamaTokenizer would add others to it."""
    eod = end_of_document(tokenizer)
    names = {f"{kind}_token": tokenizer.named(kind) for kind in ("bos", "eos", "unk", "pad")}
    names["eos_token"] = None if eod is None else tokenizer.name_of(eod)
    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    added = {str(number): {"content": name} | flags for name, number in tokenizer.behind_model().items()}
    return SENTENCEPIECE | {"add_bos_token": bool(tokenizer.bos), "added_tokens_decoder": added} | names


def copy_files(source: Path, folder: Path) -> None:
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _byte_level(tokenizer: ByteTokenizer) -> FastTokenizer:
    """The same ids from a byte-level BPE without merges: it has a token for every byte."""
    from tokenizers.models import BPE
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {letter: value for value, letter in bytes_to_unicode().items()} | {END_OF_DOCUMENT[0]: tokenizer.eod}
    return FastTokenizer("byte", gpt2_backend(BPE(vocabulary, [])), tokenizer.eod)


def _gives_the_same_ids(tokenizer: Tokenizer, folder: Path) -> bool:
    """Compare on the probe, but for its text of special tokens' names, which transformers finds in a text."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    texts = list(PROBE[:-1])
    found: list[list[int]] = theirs(texts, add_special_tokens=False)["input_ids"]
    return found == tokenizer.encode_batch(texts)
