"""The tokenizer of a run: the one that --tokenizer names, else the one that the description of a corpus remembers."""

from __future__ import annotations

from pathlib import Path

from megazero.config.schema import Config
from megazero.data.about import read_about
from megazero.data.corpora import parse_data_path, read_data_args
from megazero.data.indexed import IndexedDataset
from megazero.data.tokenizer import SPECS, Tokenizer, beside, load_tokenizer


def data_tokenizer(config: Config) -> Tokenizer | None:
    """Load the tokenizer of the data; None where neither --tokenizer nor a corpus' PREFIX.json tells.

    The first corpus that tells decides; `open_datasets` compares the others with it. A remembered tokenizer that is
    larger than --vocab-size is left out: such a model was asked for without it.

    Raises:
        ValueError: it cannot be read, or there is none and a flag needs one.
    """
    data, size = config.data, config.model.vocab_size
    if data.tokenizer:
        return load_tokenizer(data.tokenizer)
    words = data.data_path or (read_data_args(data.data_args_path) if data.data_args_path else ())
    for prefix in (prefix for _, prefix in parse_data_path(words)) if words else ():
        found = remembered_tokenizer(IndexedDataset(prefix))
        if found is not None and size and found.vocab_size > size:
            break
        if found is not None:
            return found
    if data.document_flags:
        raise ValueError(
            f"{data.document_flags[0]} needs the end-of-document token, and no PREFIX.json of --data-path tells which "
            f"tokenizer made it; give --tokenizer: {SPECS}"
        )
    return None


def remembered_tokenizer(data: IndexedDataset) -> Tokenizer | None:
    """Load the tokenizer that made a corpus: the copy that lies beside it, else what PREFIX.json names.

    Returns:
        None: PREFIX.json names none, or is not there.

    Raises:
        ValueError: what is named cannot be read here, or is another tokenizer by now.
    """
    about = read_about(data)
    copy, named = str(about.get("saved_tokenizer", "")), str(about.get("tokenizer", ""))
    faults = []
    for spec in filter(None, (copy and beside(copy, Path(data.prefix).parent), named)):
        try:
            loaded = load_tokenizer(spec)
        except ValueError as error:
            faults.append(str(error))
            continue
        if about.get("tokenizer_hash", loaded.identity) == loaded.identity:
            return loaded
        faults.append(f"--tokenizer {spec} is no longer the one that made this corpus")
    if faults:
        raise ValueError(
            f"--data-path {data.prefix} was made with the tokenizer {named or copy}, which cannot be read here: "
            f"{faults[0]}; give --tokenizer PATH to where it is"
        )
    return None
