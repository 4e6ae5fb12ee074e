#!/usr/bin/env python3
"""Turn text into the .bin/.idx token files that megazero and Megatron-LM train on."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_tools.encoding import (
    Encoded,
    GigatokenDiffers,
    Job,
    encode_all,
    sample_texts,
    trust_gigatoken,
)
from data_tools.finished import record_of, refuse_files_of_others, refuse_other
from data_tools.journal import Skipped, WorkFolder
from data_tools.megatron import our_words
from data_tools.next_step import to_merge, to_train
from data_tools.preprocess_options import Options, selection_of, settings_of, token_type, tokenizer_of, workers_of
from data_tools.reading import Chunk, Position, read_chunks
from data_tools.seen import Seen
from data_tools.sources import Source, find_sources, partition
from data_tools.tool import check_workers, parse, progress_bar, run_tool
from megazero.data.writer import CorpusParts, publish
from megazero.files import OutputFile, read_json_object, sync_folder
from megazero.units import things, visible

PROGRAM = "preprocess_data.py"
# A kill loses at most the work since the last commit.
COMMIT_SECONDS, COMMIT_BYTES = 5.0, 64 << 20
# Bad lines shown on stderr; all of them are in a file.
SHOWN_BAD = 5


class Corpus(NamedTuple):
    """Result of a run: files and counts."""

    prefix: str
    num_documents: int
    num_tokens: int
    num_targets: int | None  # None without a loss mask
    dtype: str


@dataclass
class Counts:
    """Progress of a run; stored with every commit."""

    text_bytes: int = 0
    disk_bytes: int = 0
    duplicates: int = 0
    empty: list[int] = field(default_factory=list)  # per key
    arguments: list[list[list[int]]] = field(default_factory=list)  # per key and value of --input: documents, tokens


class Run:
    """One run over the sources, from the last commit of the work folder to the published corpora."""

    def __init__(
        self, options: Options, sources: Sequence[Source], prefix: str, work: WorkFolder, record: Mapping[str, str]
    ) -> None:
        """record: see `data_tools.finished`."""
        self.options, self.sources, self.prefix, self.work, self.record = options, sources, prefix, work, record
        self.selection = selection_of(options)
        self.tokenizer = tokenizer_of(options)
        self.dtype = token_type(options, self.tokenizer)
        self.keys = self.selection.corpora
        state = work.state or {}
        self.position = Position(**state.get("position", {}))
        nothing = Counts(empty=[0] * len(self.keys), arguments=[[[0, 0] for _ in options.input] for _ in self.keys])
        self.counts = Counts(**state["counts"]) if state else nothing
        self.encoder: str = state.get("encoder") or self._choose_encoder()
        self.seen = Seen()
        self.digests: OutputFile | None = None
        self.committed_at, self.committed_bytes = time.monotonic(), self.counts.text_bytes

    def _choose_encoder(self) -> str:
        """Return "gigatoken" if it gives the same ids, else "tokenizer" with a warning."""
        if not self.options.gigatoken or self.options.tokenizer == "byte" or self.selection.chat:
            return "tokenizer"
        why = trust_gigatoken(self.options.tokenizer, sample_texts(self.sources, self.selection.keys))
        if why:
            print(f"gigatoken is not used: {why}; --tokenizer {self.options.tokenizer} encodes", file=sys.stderr)
        return "tokenizer" if why else "gigatoken"

    def tokenize(self) -> None:
        """Read and encode from `position` to the end of the sources."""
        state = self.work.state or {}
        corpora = state.get("corpora", [None] * len(self.keys))
        with ExitStack() as stack:
            self.parts = []
            for number, known in enumerate(corpora):
                stem = self.work.path / str(number)
                self.parts.append(CorpusParts(stem, self.dtype, known, masked=self.selection.masked))
                stack.callback(self.parts[-1].close)
            self.skipped = Skipped(self.work.path / "skipped", state.get("skipped"))
            stack.callback(self.skipped.close)
            if self.options.dedup:
                self.digests = OutputFile(self.work.path / "digests", state.get("digests", 0))
                stack.callback(self.digests.close)
                self._recall()
            done = self.counts
            if self.tokenizer.bos:
                names = self.tokenizer.shown(*self.tokenizer.bos)
                print(f"each document begins with {names}; --no-prepend-bos leaves it out", file=sys.stderr)
            elif (own := self.tokenizer.own_bos) and self.selection.chat and not self.options.no_prepend_bos:
                names = self.tokenizer.shown(*own)
                print(
                    f"conversations begin without {names}, which the chat template does not write; --prepend-bos adds "
                    "it",
                    file=sys.stderr,
                )
            if state:
                print(f"resuming after {done.text_bytes / 1e6:,.0f} MB of text, in {self.work.path}", file=sys.stderr)
            bar = stack.enter_context(progress_bar("tokenizing", size_of(self.sources)))
            bar.advance(0, done.disk_bytes, counts=False)
            job = Job(
                tokenizer=self.options.tokenizer,
                selection=self.selection,
                append_eod=self.options.append_eod,
                bos=self.tokenizer.bos,
                dtype=self.dtype,
                gigatoken=self.encoder == "gigatoken",
                digests=self.options.dedup,
            )
            chunks = read_chunks(self.sources, self.selection.keys, self.position)
            for chunk, encoded in encode_all(job, chunks, workers_of(self.options)):
                tokens = self._write(chunk, encoded)
                bar.advance(len(chunk.raw), chunk.disk_bytes, tokens)
                self._commit_if_due()
            for key, part in zip(self.keys, self.parts, strict=True):
                self._refuse_useless(key, part)
            self._commit()
            self._finish()

    def _refuse_useless(self, key: str, part: CorpusParts) -> None:
        """Raise ValueError for a corpus without a token, or without a target; not for a part of one."""
        given = f"--input {' '.join(self.options.input)}"
        if not self.options.partition.endswith("/1"):
            return
        if part.num_documents == 0:
            raise ValueError(f"{given}: no document has any text under {key!r}")
        if self.selection.masked and part.num_targets == 0:
            wanted = "no message has the role assistant" if self.selection.chat else "keys with :1 hold no text"
            raise ValueError(f"{given}: no token would count as a target, because {wanted}; correct the input")

    def _recall(self) -> None:
        """Read the hashes of finished documents again."""
        assert self.digests is not None
        step = 16 << 20
        for at in range(0, self.digests.size, step):
            raw = self.digests.read(min(step, self.digests.size - at), at)
            self.seen.add(np.frombuffer(raw, np.uint64).reshape(-1, 2))

    def _write(self, chunk: Chunk, encoded: Encoded) -> int:
        """Append a chunk's documents to the corpora; the tokens of all keys."""
        if encoded.bad:
            if self.options.on_bad_line == "stop":
                raise ValueError(f"{encoded.bad[0]}; mend it, or give --on-bad-line skip")
            for bad in encoded.bad[: max(0, SHOWN_BAD - self.skipped.count)]:
                print(visible(f"skipped {bad}"), file=sys.stderr)
            self.skipped.add(encoded.bad)
        kept = None
        if encoded.digests is not None:
            kept = self.seen.add(encoded.digests)
            self.counts.duplicates += int((~kept).sum())
            assert self.digests is not None
            self.digests.write(encoded.digests[kept].tobytes())
        tokens = 0
        for k, column in enumerate(encoded.columns):
            column = column if kept is None else column.select(kept)
            full = column.lengths[column.lengths > 0].astype(np.int32)
            self.parts[k].add_documents(column.ids, full, mask=column.mask)
            self.counts.empty[k] += column.lengths.size - full.size
            of_argument = self.counts.arguments[k][chunk.source.argument]
            of_argument[0] += full.size
            of_argument[1] += column.ids.size
            tokens += column.ids.size
        self.counts.text_bytes += len(chunk.raw)
        self.counts.disk_bytes += chunk.disk_bytes
        self.position = chunk.behind
        return tokens

    def _commit_if_due(self) -> None:
        late = time.monotonic() - self.committed_at > COMMIT_SECONDS
        if late or self.counts.text_bytes - self.committed_bytes > COMMIT_BYTES:
            self._commit()

    def _commit(self) -> None:
        if self.digests is not None:
            self.digests.sync()
        self.work.commit(
            {
                "published": False,
                "position": asdict(self.position),
                "counts": asdict(self.counts),
                "encoder": self.encoder,
                "corpora": [part.commit() for part in self.parts],
                "skipped": self.skipped.commit(),
                "digests": self.digests.size if self.digests else 0,
            }
        )
        self.committed_at, self.committed_bytes = time.monotonic(), self.counts.text_bytes

    def _finish(self) -> None:
        """Complete the files of all corpora; only their names are missing then."""
        folder = self.work.path / "tokenizer"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        saved = self.tokenizer.save(folder).replace("{}", f"{Path(self.prefix).name}_tokenizer")
        for k, (key, part) in enumerate(zip(self.keys, self.parts, strict=True)):
            part.finish(
                {
                    "tokenizer": self.options.tokenizer,
                    "tokenizer_hash": self.tokenizer.identity,
                    "saved_tokenizer": saved,
                    "vocab_size": self.tokenizer.vocab_size,
                    "eod": self.tokenizer.eod if self.options.append_eod else None,
                    "bos": self.tokenizer.bos or None,
                    "key": key,
                    "partition": self.options.partition,
                    "made_with": self.record,
                    "sources": [
                        {"input": given, "documents": documents, "tokens": tokens}
                        for given, (documents, tokens) in zip(self.options.input, self.counts.arguments[k], strict=True)
                    ],
                    "text_bytes": self.counts.text_bytes,
                    "empty_documents": self.counts.empty[k],
                    "duplicate_documents": self.counts.duplicates,
                    "skipped_lines": self.skipped.count,
                }
            )
        assert self.work.state is not None
        self.work.commit({**self.work.state, "published": True})

    def publish(self) -> list[Corpus]:
        """Give all files their names; can be repeated after a kill."""
        assert self.work.state is not None
        made = []
        for number, key in enumerate(self.keys):
            target = f"{self.prefix}_{key}_document"
            publish(str(self.work.path / str(number)), target)
            counts = self.work.state["corpora"][number]
            targets = counts["mask"]["num_targets"] if "mask" in counts else None
            made.append(Corpus(target, counts["num_documents"], counts["num_tokens"], targets, self.dtype))
        folder = self.work.path / "tokenizer"
        if folder.exists():
            shutil.rmtree(f"{self.prefix}_tokenizer", ignore_errors=True)
            if any(folder.iterdir()):
                os.rename(folder, f"{self.prefix}_tokenizer")
        if self.work.state["skipped"]["count"]:
            if (self.work.path / "skipped").exists():
                os.replace(self.work.path / "skipped", f"{self.prefix}_skipped.txt")
        else:
            Path(f"{self.prefix}_skipped.txt").unlink(missing_ok=True)
        sync_folder(self.work.path.parent)  # before the journal, by which these steps can be repeated, is gone
        self.work.remove()
        return made


def size_of(sources: Sequence[Source]) -> int:
    """Bytes on disk to read; 0 if one is a stream."""
    if any(source.kind in ("stream", "stdin", "stdin-text") for source in sources):
        return 0
    return round(sum(source.size * (source.end - source.begin) for source in sources))


def preprocess(options: Options) -> list[Corpus]:
    """Make the corpora, one per key. Output is in the order of the input for any number of --workers.

    Flags are checked before anything is written. After an exception, committed work is kept for the same command; if
    nothing is committed, nothing is left.
    """
    check_workers(workers_of(options))
    selection = selection_of(options)
    whole = find_sources(options.input, selection.keys, options.input_format)
    sources = partition(whole, options.partition)
    tokenizer = tokenizer_of(options)
    if options.append_eod:
        assert tokenizer.eod >= 0  # raises here if there is none, not in the first worker
    index, count = (int(word) for word in options.partition.split("/"))
    if options.dedup and count > 1:
        raise ValueError(f"--dedup sees all documents, and --partition {options.partition} only a part; drop one")
    prefix = options.output_prefix + (f"-{index:05}-of-{count:05}" if count > 1 else "")
    settings, inputs = settings_of(options), "--input (names, sizes or dates of files)"
    record = record_of(whole, settings)
    work = WorkFolder(prefix, {inputs: [source.identity() for source in sources], **settings})
    try:
        if not (work.state or {}).get("published"):
            refuse_files_of_others(prefix)
        if work.state is None and not options.overwrite:
            _guard_finished(options, whole, prefix, record)
        try:
            return _tokenize_and_publish(options, sources, prefix, work=work, record=record)
        except GigatokenDiffers as error:
            print(
                f"gigatoken gives other ids than --tokenizer {options.tokenizer} at {error}: starting again without it",
                file=sys.stderr,
            )
            work.clear()
            options = Options(**{**vars(options), "gigatoken": False})
            return _tokenize_and_publish(options, sources, prefix, work=work, record=record)
    except BaseException as error:
        _leave(work, error)
        raise
    finally:
        work.close()


def _guard_finished(options: Options, sources: Sequence[Source], prefix: str, record: Mapping[str, str]) -> None:
    """Refuse to replace corpora that were made from other inputs or with other options."""
    for target in (f"{prefix}_{key}_document" for key in selection_of(options).corpora):
        if os.path.exists(f"{target}.idx") or os.path.exists(f"{target}.bin"):
            found = None
            with suppress(OSError, ValueError):  # a corpus of Megatron-LM, or a damaged one
                found = read_json_object(f"{target}.json").get("made_with")
            refuse_other(f"--output-prefix {options.output_prefix}: {target}.idx", found, record, sources)


def _tokenize_and_publish(
    options: Options, sources: Sequence[Source], prefix: str, work: WorkFolder, record: Mapping[str, str]
) -> list[Corpus]:
    start, before = time.monotonic(), (work.state or {}).get("counts", {}).get("text_bytes", 0)
    run = Run(options=options, sources=sources, prefix=prefix, work=work, record=record)
    if not (work.state or {}).get("published"):
        run.tokenize()
    assert work.state is not None
    counts, skipped = Counts(**work.state["counts"]), work.state["skipped"]["count"]
    made = run.publish()
    seconds = time.monotonic() - start
    for corpus, empty in zip(made, counts.empty, strict=True):
        documents, tokens = things(corpus.num_documents, "document"), things(corpus.num_tokens, "token")
        left_out = f"; {things(empty, 'empty document')} left out" if empty else ""
        targets = "" if corpus.num_targets is None else f", {things(corpus.num_targets, 'target')}"
        print(f"{corpus.prefix}: {documents}, {tokens}{targets}, {corpus.dtype}{left_out}")
    if counts.duplicates:
        print(f"{things(counts.duplicates, 'document')} left out, equal to an earlier one")
    if skipped:
        print(f"{things(skipped, 'bad line')} skipped: {prefix}_skipped.txt")
    text = counts.text_bytes - before
    print(f"{text / 1e6:,.1f} MB in {seconds:.1f} s: {text / 1e6 / seconds:.2f} MB/s, by {run.encoder}")
    if prefix == options.output_prefix:
        to_train([corpus.prefix for corpus in made], masked=run.selection.masked)
    else:
        to_merge(options.output_prefix, run.keys, int(options.partition.split("/")[1]))
    return made


def _leave(work: WorkFolder, error: BaseException) -> None:
    """Keep committed work only, and report it in the error."""
    if work.state is None:
        work.remove()
        return
    for number, known in enumerate(work.state["corpora"]):
        with suppress(OSError, ValueError):  # work after the commit only takes space
            stem = work.path / str(number)
            if not work.state["published"] and stem.with_suffix(".bin").exists():
                CorpusParts(stem, known["dtype"], known, masked="mask" in known).close()
    done = work.state["counts"]["text_bytes"] / 1e6
    note = f"{done:,.0f} MB of text are done and kept in {work.path}: the same command resumes from there"
    if isinstance(error, KeyboardInterrupt):
        error.args = (note,)
    else:
        error.add_note(note)


def stop(number: int, frame: FrameType | None) -> None:
    """Raise an exception at SIGTERM, so that uncommitted work is removed."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str]) -> None:
    """The tool: parse, then work."""
    options = parse(Options, our_words(arguments), PROGRAM)
    signal.signal(signal.SIGTERM, stop)
    preprocess(options)


def command(arguments: Sequence[str] | None = None) -> None:
    """Run as a program; `arguments` are by default those of the process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --workers 1 is one core, too
    run_tool(main, PROGRAM, arguments)


if __name__ == "__main__":
    command()
