"""Train a byte-level BPE tokenizer (GPT-2's kind) on text; it can encode any text, no token is unknown."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_tools.documents import check_inputs, progress_bar, read_chunks, run_tool, texts_of
from megazero.data.tokenizer import END_OF_DOCUMENT, gpt2_backend
from megazero.files import write_atomically

EPILOG = """\
The same input gives the same tokenizer, on any machine.

example:
  python data_tools/train_tokenizer.py --input wiki.jsonl --output data/tokenizer --vocab-size 8192
  python data_tools/preprocess_data.py --input wiki.jsonl --output-prefix data/wiki \\
      --tokenizer data/tokenizer --append-eod
"""
# 256 bytes and the end of document.
SMALLEST_VOCABULARY = 257


def train(inputs: Sequence[str], keys: Sequence[str], vocab_size: int) -> Any:
    """A trained `tokenizers.Tokenizer`; of fewer tokens than asked for if the text has too few words."""
    from tokenizers import models, trainers
    from tokenizers.pre_tokenizers import ByteLevel

    total = check_inputs(inputs, keys)
    backend = gpt2_backend(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT[0]],
        initial_alphabet=ByteLevel.alphabet(),  # every byte, seen in the text or not
        show_progress=False,  # we show our own, by bytes: it does not know how much text there is
    )
    with progress_bar("counting words", total) as advance:

        def texts() -> Iterator[list[str]]:
            for chunk in read_chunks(inputs):
                yield [text for document in texts_of(chunk, keys) for text in document]
                advance(chunk)

        backend.train_from_iterator(texts(), trainer)
    return backend


def save(backend: Any, folder: Path) -> None:
    """Write `folder` as Hugging Face's libraries read it; tokenizer.json, the tokenizer itself, last."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_DOCUMENT[0],
        "eos_token": END_OF_DOCUMENT[0],
        "unk_token": END_OF_DOCUMENT[0],
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "tokenizer_config.json": json.dumps(config, indent=2),
        "tokenizer.json": backend.to_str(pretty=True),
    }
    for name, text in texts.items():
        write_atomically(folder / name, f"{text}\n".encode())


def main(arguments: Sequence[str]) -> None:
    """The tool. ValueError for what is wrong with its arguments or input."""
    parser = argparse.ArgumentParser(
        prog="train_tokenizer.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines or text, as for preprocess_data.py",
    )
    add("--output", required=True, metavar="DIR", help="folder for tokenizer.json and tokenizer_config.json")
    add(
        "--vocab-size",
        type=int,
        required=True,
        metavar="N",
        help="tokens, bytes and end of document included",
    )
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys with text (default: text)")
    given = parser.parse_args(arguments)
    if given.vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"--vocab-size {given.vocab_size}: the 256 bytes and {END_OF_DOCUMENT[0]} alone are "
            f"{SMALLEST_VOCABULARY}; give {SMALLEST_VOCABULARY} or more"
        )
    backend = train(given.input, given.json_keys, given.vocab_size)
    save(backend, Path(given.output))
    size = backend.get_vocab_size()
    short = f" (the text has no more than these, of {given.vocab_size:,})" if size < given.vocab_size else ""
    print(f"{given.output}: {size:,} tokens{short}")


if __name__ == "__main__":
    run_tool(main)
