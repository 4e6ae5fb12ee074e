"""The tokenizer of a run: the one that --tokenizer names, else the one that the description of a corpus remembers."""

from collections.abc import Sequence
from pathlib import Path

from megazero.data.about import read_about
from megazero.data.corpora import parse_data_path, read_data_args
from megazero.data.indexed import IndexedDataset
from megazero.data.tokenizer import SPECS, Tokenizer, beside, differing_tokens, load_tokenizer, read_generation
from megazero.flags.config import Config
from megazero.flags.corpus_flags import document_flags


def data_tokenizer(config: Config) -> Tokenizer | None:
    """Load the tokenizer of the data; None if neither --tokenizer nor a corpus' PREFIX.json names one.

    The first corpus that names one decides; `open_datasets` compares the others with it. It is ignored if it is larger
    than --vocab-size.

    Raises:
        ValueError: it cannot be read, or there is none and a flag needs one.
    """
    found = _named_or_remembered(config)
    if found is not None and not found.generation and config.hf_config:
        found.generation = _generation_of(config.hf_config, found)
    return found


def _generation_of(source: str, tokenizer: Tokenizer) -> bytes:
    """Return the generation_config.json of a model's source, whose ids are those of its own tokenizer."""
    if not (generation := read_generation(source)):
        return b""
    folder = Path(source) if Path(source).is_dir() else Path(source).parent
    try:
        return generation if load_tokenizer(str(folder)).identity == tokenizer.identity else b""
    except ValueError:  # it has none
        return generation


def _named_or_remembered(config: Config) -> Tokenizer | None:
    """Load the tokenizer, as `data_tokenizer`."""
    data, size = config.data, config.model.vocab_size
    words = data.data_path or (read_data_args(data.data_args_path) if data.data_args_path else ())
    if data.tokenizer:
        named = load_tokenizer(data.tokenizer)
        named.bos = _beginning_of_documents(words, named.bos)
        return named
    for prefix in (prefix for _, prefix in parse_data_path(words)) if words else ():
        found = remembered_tokenizer(IndexedDataset(prefix))
        if found is not None and size and found.vocab_size > size:
            break
        if found is not None:
            return found
    flags = document_flags(data)
    if flags:
        raise ValueError(
            f"{flags[0]} needs the end-of-document token, and no PREFIX.json of --data-path names a "
            f"tokenizer; give --tokenizer: {SPECS}"
        )
    return None


def _beginning_of_documents(words: Sequence[str], own: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ids that begin texts of a run: those of the first corpus, or without a PREFIX.json `own`.

    Corpora of earlier versions begin with none, and their PREFIX.json does not name any.
    """
    try:
        prefix = next((prefix for _, prefix in parse_data_path(words)), None) if words else None
        about = read_about(IndexedDataset(prefix)) if prefix is not None else {}
    except (OSError, ValueError):  # reported when the corpora are opened
        return own
    return tuple(about.get("bos") or ()) if about else own


def remembered_tokenizer(data: IndexedDataset) -> Tokenizer | None:
    """Load the tokenizer that made a corpus: the copy next to it, else the one at the path in PREFIX.json.

    Returns:
        None: PREFIX.json is missing, or names none.

    Raises:
        ValueError: the tokenizer cannot be read here, or has changed.
    """
    about = read_about(data)
    copy, named = str(about.get("saved_tokenizer", "")), str(about.get("tokenizer", ""))
    faults, difference = [], ""
    for spec in filter(None, (copy and beside(copy, Path(data.prefix).parent), named)):
        try:
            loaded = load_tokenizer(spec)
        except ValueError as error:
            faults.append(str(error))
            continue
        if about.get("tokenizer_hash", loaded.identity) == loaded.identity:
            return loaded if "bos" in about else loaded.prepending(False)
        difference = difference or differing_tokens(loaded, str(about["tokenizer_hash"]))
        faults.append(f"--tokenizer {spec} is no longer the one that made this corpus")
    if difference:
        raise ValueError(f"--data-path {data.prefix} {difference}")
    if faults:
        raise ValueError(
            f"--data-path {data.prefix} was made with the tokenizer {named or copy}, which cannot be read here: "
            f"{faults[0]}; give --tokenizer PATH to where it is"
        )
    return None
