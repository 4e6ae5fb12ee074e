"""From --tokenizer to a `Tokenizer`: the kind is named, or recognised by the files at a path."""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megazero.data.tokenizer.backends import (
    ByteTokenizer,
    FastTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    TransformersTokenizer,
    gpt2_backend,
)
from megazero.data.tokenizer.base import END_OF_DOCUMENT, GENERATION, Tokenizer
from megazero.data.tokenizer.special_tokens import (
    add_configured,
    configured_token,
    configured_tokens,
    find_eod,
    read_settings,
)
from megazero.files import first_line, open_regular, read_json_object, read_small
from megazero.optional import load_optional

SPECS = (
    "a folder or a file: tokenizer.json of Hugging Face, vocab.json and merges.txt of GPT-2, a SentencePiece .model, "
    "or a tiktoken FILE with FILE.json; the same with the kind named (gpt2:DIR, sentencepiece:FILE, tiktoken:FILE); "
    "llama2:FILE.model or megatron:FILE.model for Megatron-LM's; or byte"
)
# GPT-2's two files under Hugging Face's names, and under OpenAI's.
GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
# Files that transformers may read from a tokenizer's folder besides tokenizer.json and its configuration.
OTHER_FILES = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", GENERATION)
# Files from which transformers knows a tokenizer that has no tokenizer.json.
SETTINGS = ("tokenizer_config.json", "config.json")
# Bytes from which a file's kind is recognised: a line of tiktoken's holds a token of at most a few hundred bytes.
HEAD_BYTES = 4096
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?(\n|$)")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
LISTED_FILES = 8


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of a --tokenizer SPEC (see `SPECS`). ValueError if it cannot be read."""
    if spec == "byte":
        return ByteTokenizer(spec)
    kind, colon, path = spec.partition(":")
    named = NAMED[kind] if colon and kind in NAMED else None
    path = path if named else spec
    tokenizer = _guarded(spec, lambda: (named or _recognised)(spec, Path(path)))
    tokenizer.generation = read_generation(path)
    return tokenizer


def read_generation(path: str) -> bytes:
    """Return the generation_config.json in a folder, or next to a file; empty if there is none.

    Raises:
        ValueError: it is no JSON object, or its eos_token_id no id and no list of ids.
    """
    file = (Path(path) if Path(path).is_dir() else Path(path).parent) / GENERATION
    if not file.is_file():
        return b""
    ends = read_json_object(file).get("eos_token_id")
    if not all(type(end) is int for end in (ends if isinstance(ends, list) else [ends] if ends is not None else [])):
        raise ValueError(f"{file}: eos_token_id {str(ends)[:80]} is no token id, and no list of them; correct it")
    return read_small(file)


def hub_hint(name: str, include: str = "") -> str:
    """Return, in parentheses, the command that downloads `name` from the Hugging Face hub; "" if it is no name there.

    Args:
        include: options of `hf download`, each followed by a space.
    """
    if not HUB_NAME.fullmatch(name):
        return ""
    return f" (a model of the Hugging Face hub is downloaded first: hf download {name} {include}--local-dir DIR)"


def _guarded(spec: str, load: Callable[[], Tokenizer]) -> Tokenizer:
    """Call `load`; turn any exception of a library (Exception, RuntimeError, ...) into one ValueError."""
    try:
        return load()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        raise ValueError(f"--tokenizer {spec}: cannot be read: {first_line(error)}; expected {SPECS}") from error


def _recognised(spec: str, path: Path) -> Tokenizer:
    """Recognise a folder by its files' names, and a file by its name or its content."""
    if path.is_dir():
        return _load_folder(spec, path)
    if not path.is_file():
        hint = hub_hint(spec, "--include 'tokenizer*' ")
        raise FileNotFoundError(f"{path} does not exist, or is not a file{hint}")
    gpt2 = [names for names in GPT2_FILES if path.name in names]
    if gpt2 and all((path.parent / name).is_file() for name in gpt2[0]):
        return _load_gpt2(spec, path.parent)
    if path.name in SETTINGS or path.name in OTHER_FILES:
        return _load_folder(spec, path.parent)
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    # By how it begins, not by its name: a tokenizer.model may be a tiktoken file (Llama 3).
    if head.lstrip()[:1] in (b"{", b"["):
        return _load_hugging_face(spec, path)
    if TIKTOKEN_LINE.match(head):
        return _load_tiktoken(spec, path)
    if head[:1] == b"\n":  # the tag of a SentencePiece model's first field, its pieces
        return SentencePieceTokenizer(spec, path)
    found = f"begins with {head[:16]!r}" if head else "is empty"
    raise ValueError(f"{path} is not a tokenizer file: it {found}")


def _load_folder(spec: str, folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").exists():
        return _load_hugging_face(spec, folder / "tokenizer.json")
    if any((folder / name).exists() for name in SETTINGS):
        return _load_transformers(spec, folder)
    if any(all((folder / name).is_file() for name in names) for names in GPT2_FILES):
        return _load_gpt2(spec, folder)
    names = sorted(entry.name for entry in folder.iterdir())
    files = [name for name in names if name.endswith((".model", ".tiktoken"))]
    if len(files) == 1:
        return _recognised(spec, folder / files[0])
    if files:
        raise ValueError(f"{folder} holds several tokenizers, {', '.join(files[:LISTED_FILES])}; name one of them")
    listed = names if len(names) <= LISTED_FILES else [*names[:LISTED_FILES], "..."]
    raise FileNotFoundError(f"{folder} is a folder without a tokenizer; it holds {', '.join(listed) or 'nothing'}")


def _load_gpt2(spec: str, folder: Path) -> Tokenizer:
    """GPT-2's two files, by their folder or as VOCAB,MERGES under any names.

    The text is not searched for <|endoftext|>, as in Megatron: a document that quotes it does not end there.
    """
    from tokenizers.models import BPE

    pairs = [(folder / vocab, folder / merges) for vocab, merges in GPT2_FILES]
    if "," in str(folder) and not folder.is_dir():
        one, _, other = str(folder).partition(",")
        pairs = [(Path(one), Path(other))]
    for vocab_file, merges_file in pairs:
        if vocab_file.is_file() and merges_file.is_file():
            model = BPE.from_file(str(vocab_file), str(merges_file))
            # These files do not name special tokens: they are those that no merges make.
            special = {name for name in END_OF_DOCUMENT if [token.value for token in model.tokenize(name)] != [name]}
            backend = gpt2_backend(model)
            return FastTokenizer(spec, backend, find_eod(backend.get_vocab(), special, None))
    if "," in str(folder):
        raise FileNotFoundError(f"{folder} must be VOCAB,MERGES, two files that exist")
    raise FileNotFoundError(f"no vocab.json and merges.txt (nor encoder.json and vocab.bpe) in {folder}")


def _load_tiktoken(spec: str, path: Path) -> Tokenizer:
    settings = Path(f"{path}.json")
    ranks = path.read_bytes()
    if not settings.is_file():
        raise FileNotFoundError(
            f"{settings} is missing: a tiktoken file has no pattern; write "
            '{"pat_str": ..., "special_tokens": {"<|endoftext|>": ...}} of its tiktoken.Encoding there'
        )
    return TiktokenTokenizer(spec, ranks, read_json_object(settings))


def _load_hugging_face(spec: str, file: Path) -> Tokenizer:
    """A tokenizer.json is read without `transformers`, whose import takes seconds on every rank."""
    from tokenizers import Tokenizer as Backend

    settings = file.parent / "tokenizer_config.json"
    config = read_json_object(settings) if settings.exists() else {}
    os.close(open_regular(file))  # the library would wait for the writer of a FIFO
    backend = Backend.from_file(str(file))
    merged = read_settings(file.parent)
    add_configured(backend, merged, file.parent)
    special = configured_tokens(merged)
    special |= {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    known = backend.get_vocab(with_added_tokens=True)
    eod = find_eod(known, special, configured_token(merged, "eos_token"))
    others = {name: (file.parent / name).read_bytes() for name in OTHER_FILES if (file.parent / name).is_file()}
    others.pop(GENERATION, None)  # every kind of tokenizer has it
    return FastTokenizer(spec=spec, backend=backend, eod=eod, settings=config, others=others)


def differing_tokens(tokenizer: Tokenizer, identity: str) -> str:
    """Return how a corpus of `identity` was made without the tokens of settings files, and the way out; "": it was not.

    Earlier versions left out the tokens that a tokenizer.json lacks.
    """
    file = Path(tokenizer.spec) / "tokenizer.json" if Path(tokenizer.spec).is_dir() else Path(tokenizer.spec)
    if not isinstance(tokenizer, FastTokenizer) or not file.is_file():
        return ""
    from tokenizers import Tokenizer as Backend

    plain = FastTokenizer(tokenizer.spec, Backend.from_file(str(file)), None)
    if plain.identity != identity:
        return ""
    known = plain.vocabulary()
    lost = sorted(number for token, number in tokenizer.vocabulary().items() if token not in known)
    return (
        f"was made by an earlier version without {tokenizer.shown(*lost[:LISTED_FILES])}, which --tokenizer "
        f"{tokenizer.spec} has in tokenizer_config.json or added_tokens.json alone; preprocess it again to have them, "
        f"or, to continue without them, move added_tokens_decoder out of {file.parent / 'tokenizer_config.json'}, and "
        f"added_tokens.json out of that folder"
    )


def _load_transformers(spec: str, folder: Path) -> Tokenizer:
    """No code in the folder is run: `trust_remote_code` is False, so that transformers does not ask on the terminal."""
    settings = folder / "tokenizer_config.json"
    config: dict[str, Any] = read_json_object(settings) if settings.exists() else {}
    if config.get("auto_map"):
        raise ValueError(
            f"{folder} has no tokenizer.json, and its tokenizer_config.json asks to run code of its own "
            f"(auto_map), which is never done; save the tokenizer as a tokenizer.json"
        )
    library = load_optional("transformers", f"{folder} has no tokenizer.json; another kind of tokenizer")
    backend = library.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return TransformersTokenizer(spec, backend)


# Kinds that a SPEC can name, KIND:PATH.
NAMED: dict[str, Callable[[str, Path], Tokenizer]] = {
    "gpt2": _load_gpt2,
    **{kind: functools.partial(SentencePieceTokenizer, kind=kind) for kind in ("sentencepiece", "llama2", "megatron")},
    "tiktoken": _load_tiktoken,
}
