#!/usr/bin/env python3
"""Train a tokenizer on text: byte-level BPE (GPT-2's kind), or SentencePiece (LLaMA's kind)."""

import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_tools.documents import Bad, documents_of, text_of
from data_tools.finished import record_of, refuse_other
from data_tools.next_step import to_preprocess
from data_tools.reading import read_chunks
from data_tools.sources import Format, Source, find_sources
from data_tools.tool import parse, progress_bar, run_tool
from megazero.data.tokenizer import END_OF_DOCUMENT, gpt2_backend
from megazero.files import first_line, read_json_object, write_atomically
from megazero.units import things

PROGRAM = "train_tokenizer.py"
FILES = {"bpe": "tokenizer.json", "sentencepiece": "tokenizer.model"}
RECORD = "made_with.json"
# Further flags on which the tokenizer depends.
RECORDED = ("vocab-size", "model", "input-format", "json-keys", "on-bad-line")
# 256 bytes and the end of document; SentencePiece has <unk>, <s> and </s> instead.
SMALLEST_VOCABULARY = 257
# Limit of the pieces in which SentencePiece gets a document, because it ignores longer ones.
SENTENCE_BYTES = 4000


@dataclass(frozen=True)
class Options:
    """Train a tokenizer on text: byte-level BPE (GPT-2's kind), or SentencePiece (LLaMA's kind).

    It can encode any text: no token is unknown. The same input gives the same tokenizer, on any machine.

    example:
      python data_tools/train_tokenizer.py --input wiki.jsonl --output data/tokenizer --vocab-size 8192

    then:
      python data_tools/preprocess_data.py --input wiki.jsonl --output-prefix data/wiki --tokenizer data/tokenizer
      --append-eod
    """

    input: tuple[str, ...]
    """Inputs as of preprocess_data.py: JSON lines, text, CSV, parquet, arrow, folders, globs, -, datasets:NAME."""
    output: str
    """Folder for tokenizer.json and tokenizer_config.json, or for tokenizer.model."""
    vocab_size: int
    """Tokens; bytes and end of document included."""
    model: Literal["bpe", "sentencepiece"] = "bpe"
    """sentencepiece: a BPE model with byte fallback; read with --tokenizer sentencepiece:DIR/tokenizer.model."""
    input_format: Format = "auto"
    """Format of all of --input. auto: by the names of the files."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys, or columns, that hold text."""
    on_bad_line: Literal["stop", "skip"] = "stop"
    """Action for a line that is no document."""
    overwrite: bool = False
    """Replace a tokenizer in --output that was made from other inputs or with other options."""


def texts_of(options: Options, sources: Sequence[Source]) -> Iterator[list[str]]:
    """The texts of each chunk, with a bar."""
    skipped = 0
    with progress_bar("counting words", sum(source.size for source in sources)) as bar:
        for chunk in read_chunks(sources, options.json_keys):
            texts: list[str] = []
            for document in documents_of(chunk, options.json_keys, text_of):
                if not isinstance(document, Bad):
                    texts += document
                elif options.on_bad_line == "stop":
                    raise ValueError(f"{document}; mend it, or give --on-bad-line skip")
                else:
                    skipped += 1
            yield texts
            bar.advance(len(chunk.raw), chunk.disk_bytes)
    if skipped:
        print(f"{things(skipped, 'bad line')} skipped", file=sys.stderr)


def train_bpe(texts: Iterator[list[str]], vocab_size: int) -> Any:
    """A trained `tokenizers.Tokenizer`; it has fewer tokens than `vocab_size` if the text has too few words."""
    from tokenizers import models, trainers
    from tokenizers.pre_tokenizers import ByteLevel

    backend = gpt2_backend(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT[0]],
        initial_alphabet=ByteLevel.alphabet(),  # every byte, seen in the text or not
        show_progress=False,  # we show our own, which counts bytes
    )
    backend.train_from_iterator(texts, trainer)
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


def sentences(texts: Iterator[list[str]]) -> Iterator[str]:
    """Yield documents in pieces for SentencePiece: lines, and long lines divided at spaces."""
    for chunk in texts:
        for text in chunk:
            for line in text.splitlines():
                while len(line.encode()) > SENTENCE_BYTES:
                    at = line.rfind(" ", 1, SENTENCE_BYTES // 4)
                    at = at if at > 0 else SENTENCE_BYTES // 4  # characters of up to four bytes
                    yield line[:at]
                    line = line[at:]
                if line:
                    yield line


def train_sentencepiece(texts: Iterator[list[str]], vocab_size: int) -> bytes:
    """The bytes of a SentencePiece model: BPE with byte fallback, as LLaMA's."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=sentences(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=SENTENCE_BYTES + 200,
            num_threads=1,  # so that the model is the same on any machine
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"--vocab-size {vocab_size}: SentencePiece cannot train it on this text: {first_line(error)}"
        ) from error
    return model.getvalue()


def _guard_finished(output: str, record: Mapping[str, str], sources: Sequence[Source]) -> None:
    """Refuse to replace a tokenizer that was made from other inputs or with other options."""
    for name in FILES.values():
        if (Path(output) / name).exists():
            found = None
            with suppress(OSError, ValueError):
                found = read_json_object(Path(output) / RECORD)
            refuse_other(f"--output {output}: {Path(output) / name}", found, record, sources)


def main(arguments: Sequence[str]) -> None:
    """The tool. ValueError for wrong arguments or input."""
    options = parse(Options, arguments, PROGRAM)
    smallest = SMALLEST_VOCABULARY if options.model == "bpe" else SMALLEST_VOCABULARY + 2
    if options.vocab_size < smallest:
        raise ValueError(
            f"--vocab-size {options.vocab_size}: the 256 bytes and the special tokens alone are {smallest}; give "
            f"{smallest} or more"
        )
    sources = find_sources(options.input, options.json_keys, options.input_format)
    texts, folder = texts_of(options, sources), Path(options.output)
    record = record_of(sources, {f"--{name}": getattr(options, name.replace("-", "_")) for name in RECORDED})
    if not options.overwrite:
        _guard_finished(options.output, record, sources)
    if options.model == "bpe":
        backend = train_bpe(texts, options.vocab_size)
        save(backend, folder)
        size = backend.get_vocab_size()
    else:
        raw = train_sentencepiece(texts, options.vocab_size)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / FILES["sentencepiece"], raw)
        size = options.vocab_size
    for other in {*FILES.values()} - {FILES[options.model]}:
        (folder / other).unlink(missing_ok=True)  # a folder names one tokenizer
    write_atomically(folder / RECORD, json.dumps(record, indent=2).encode())
    short = size < options.vocab_size
    few = f" (the text has no more than these, of {options.vocab_size:,})" if short else ""
    print(f"{options.output}: {size:,} tokens{few}")
    to_preprocess(options.input, options.output, options.json_keys, options.input_format)


def command(arguments: Sequence[str] | None = None) -> None:
    """Run as a program; `arguments` are by default those of the process."""
    run_tool(main, PROGRAM, arguments)


if __name__ == "__main__":
    command()
