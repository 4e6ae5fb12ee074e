"""The corpora of a run: named, opened once, checked once, and handed out as datasets."""

import os
import random
import re
import resource
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megazero.data.about import BLOCK_BYTES, SAMPLED_BYTES, read_about, verify
from megazero.data.blending import BlendedDataset
from megazero.data.document_edges import check_edges
from megazero.data.fingerprint import fingerprint
from megazero.data.indexed import IndexedDataset
from megazero.data.mock import MockSamples, mock_loss_floor
from megazero.data.packing import Filling, PackedDataset
from megazero.data.samples import SPLITS, GPTDataset, Samples, WholeSplit, require_vocabulary, split_ranges
from megazero.data.tokenizer import Tokenizer, differing_tokens
from megazero.files import read_small
from megazero.flags.corpus_flags import MAX_NAMED_CORPORA, is_number
from megazero.units import things

# Bytes of all corpora without PREFIX.json that are searched, at both ends, for ids outside the vocabulary; and bytes of
# their masks in which targets are counted.
SCANNED_BYTES = 64 << 20
# Evenly spaced pieces of a larger mask in which targets are counted.
SCANNED_PIECES = 16
# File descriptors that the rest of a process needs.
OTHER_FILES = 256


@dataclass(frozen=True)
class Datasets:
    """The splits of a run, and their corpora. An empty split raises when its first sample is read."""

    train: Samples
    validation: Samples
    test: Samples
    corpora: tuple[IndexedDataset, ...] = ()
    edges: tuple[str, ...] = ()  # sentences on documents that begin or end in another way than the tokenizer's
    continued: tuple[str, ...] = ()  # sentences on corpora that earlier stages have read
    target_shares: Mapping[str, str] = field(default_factory=dict)  # by prefix, of the corpora with a mask

    def _parts(self, split: str) -> list[GPTDataset]:
        """A split of each corpus, in the order of --data-path; empty with --mock-data."""
        samples: Samples = getattr(self, split)
        parts = samples.datasets if isinstance(samples, BlendedDataset) else (samples,)
        return [part for part in parts if isinstance(part, GPTDataset)]

    def whole(self, split: str) -> dict[str, WholeSplit]:
        """Return a split of each corpus, in order and once through, by the corpus' prefix."""
        return {part.data.prefix: WholeSplit(part) for part in self._parts(split)}

    @property
    def named(self) -> tuple[str, ...]:
        """Prefixes of the corpora of a blend, if they are few enough for the metrics to list; else empty."""
        listed = 1 < len(self.corpora) <= MAX_NAMED_CORPORA
        return tuple(data.prefix for data in self.corpora) if listed else ()

    @property
    def split_by_tokens(self) -> tuple[str, ...]:
        """Prefixes of the corpora whose documents --split divides."""
        return tuple(part.data.prefix for part in self._parts("train") if part.by_tokens)

    def notes(self, split: str = "train") -> list[str]:
        """Sentences on properties that may surprise a user: made-up data, masks, packing, divided documents.

        split: the one that the run reads.
        """
        if isinstance(self.train, MockSamples):
            floor = mock_loss_floor(self.train.vocab_size)
            return [f"--mock-data: tokens are made up; the loss falls from ln(--vocab-size) to {floor:.4f} at best"]
        return [*self.edges, *self._masked(), *self._packed(split), *self._divided(), *self.continued]

    def _packed(self, split: str) -> list[str]:
        packed = [part for part in self._parts(split) if isinstance(part, PackedDataset)]
        if not packed:
            return []
        implied = "attention stays within documents, and positions restart in each"
        if len(packed) > MAX_NAMED_CORPORA:  # or a start would pack thousands of corpora that are read much later
            return [f"--packing best-fit: {implied}"]
        total = Filling(*map(sum, zip(*(part.packing.filling for part in packed), strict=True)))
        return [f"--packing best-fit: {total.words}; {implied}"]

    def _masked(self) -> list[str]:
        masked = self.target_shares
        if not masked:
            return []
        shown = [f"{share} of {prefix}" for prefix, share in [*masked.items()][:3]]
        more = f" and {len(masked) - 3} more" if len(masked) > 3 else ""
        others = "; all tokens of the other corpora count" if len(masked) < len(self.corpora) else ""
        return [f"loss masks: of the tokens, {', '.join(shown)}{more} count as targets{others}"]

    def _divided(self) -> list[str]:
        divided = [part.data for part in self._parts("train") if part.by_tokens]
        if not divided:
            return []
        shown = [f"{data.prefix} ({things(data.num_documents, 'document')})" for data in divided[:3]]
        more = f" and {len(divided) - 3} more" if len(divided) > 3 else ""
        return [
            f"validation and test are cut from the end of {', '.join(shown)}{more}, by tokens (--split, --split-by)"
        ]

    def repeats(self, split: str, eval_iters: int, batch_size: int) -> str:
        """Warn if an evaluation has more samples than a split of all corpora together; else ""."""
        held = sum(map(len, self.whole(split).values()))
        enough = -(-held // batch_size)
        if not held or eval_iters <= enough:
            return ""
        return (
            f"the {split} split holds {held:,} samples: --eval-iters {enough} covers it, and with --eval-iters "
            f"{eval_iters} samples are repeated; --eval-iters 0 takes each of its tokens once"
        )

    @property
    def train_tokens(self) -> int:
        """Tokens of the training split of all corpora; 0 with --mock-data."""
        return sum(part.num_tokens for part in self._parts("train"))

    def fingerprints(self) -> list[str]:
        """Return the fingerprint of each corpus, in the order of --data-path."""
        return [fingerprint(data) for data in self.corpora]

    def served(self, consumed_samples: int) -> dict[str, int]:
        """Count the samples before `consumed_samples` that came from each corpus of `named`, in this stage."""
        if not self.named:
            return {}
        assert isinstance(self.train, BlendedDataset)
        return dict(zip(self.named, self.train.counts(consumed_samples), strict=True))


class Continued(NamedTuple):
    """The beginning of a stage in its training data.

    Attributes:
        origin: the stage's first sample.
        tokens: by file, those of each corpus that earlier stages were served.
        seq_length: of the stage before.
    """

    origin: int
    tokens: Mapping[str, int]
    seq_length: int

    def first(self, data: IndexedDataset, seq_length: int) -> int:
        """Return the sample at which a corpus continues."""
        return -(-self.tokens.get(_file(data), 0) // seq_length)

    def notes(self, corpora: Sequence[IndexedDataset], seq_length: int) -> tuple[str, ...]:
        """Return a sentence on each corpus that continues."""
        found = []
        for data in corpora:
            if first := self.first(data, seq_length):
                served = self.tokens[_file(data)] / data.num_tokens % 1
                again = (
                    f"; its samples have another length and another order: about {served:.0%} of those in the "
                    "rest of this epoch were served before"
                )
                same = seq_length == self.seq_length
                found.append(f"{data.prefix} continues at its sample {first:,}{'' if same else again}")
        return tuple(found)


def _file(data: IndexedDataset) -> str:
    return os.path.realpath(f"{data.prefix}.bin")


def continued(datasets: Datasets, stop: int, seq_length: int, before: Continued | None = None) -> Continued:
    """Return where the next stage begins, at sample `stop`, after a stage with `datasets` that began at `before`."""
    train, tokens = datasets.train, Counter(before.tokens if before is not None else {})
    origin = before.origin if before is not None else 0
    counts = train.counts(stop) if isinstance(train, BlendedDataset) else [stop - origin] * len(datasets.corpora)
    for data, count in zip(datasets.corpora, counts, strict=True):
        tokens[_file(data)] += count * seq_length
    return Continued(stop, tokens, seq_length)


def _target_share(data: IndexedDataset, about: dict[str, Any], scanned_bytes: int) -> str:
    """The share of a corpus' tokens that count as targets, from PREFIX.json or, at most `scanned_bytes`, its mask.

    Raises:
        ValueError: none counts.
    """
    counted, targets = data.num_tokens, about.get("num_targets")
    if targets is None:
        pieces = 1 if counted <= scanned_bytes else SCANNED_PIECES
        length = min(counted, scanned_bytes) // pieces
        starts = [(counted - length) * piece // max(1, pieces - 1) for piece in range(pieces)]
        targets, counted = sum(int(data.mask(at, at + length).sum()) for at in starts), length * pieces
    if not targets and counted == data.num_tokens > 0:
        raise ValueError(
            f"--data-path {data.prefix}: {data.prefix}.mask counts no token as a target, so that nothing is learned "
            "from this corpus; leave it out, or write a mask with ones"
        )
    return f"{'' if counted == data.num_tokens else 'about '}{targets / max(1, counted):.1%}"


def mock_datasets(seq_length: int, seed: int, vocab_size: int) -> Datasets:
    """Return the splits of --mock-data."""
    train, validation, test = (MockSamples(name, seq_length, seed, vocab_size) for name in SPLITS)
    return Datasets(train, validation, test)


def parse_data_path(data_path: Sequence[str]) -> list[tuple[Fraction | None, str]]:
    """[(weight, prefix)] of --data-path PREFIX1 PREFIX2 ... or W1 PREFIX1 W2 PREFIX2 ...

    Without weights they are None: corpora are then weighted by their tokens.
    """
    words, given = list(data_path), "--data-path " + " ".join(data_path)
    numbers = [is_number(word) for word in words[::2]]
    if words and not any(numbers):
        return [(None, prefix) for prefix in words]
    if not words or len(words) % 2 or not all(numbers):
        raise ValueError(
            f"{given}: expected PREFIX, PREFIX1 PREFIX2 ... or pairs W1 PREFIX1 W2 PREFIX2 ...; a prefix that is a "
            "number is written ./NUMBER"
        )
    pairs: list[tuple[Fraction | None, str]] = []
    for weight, prefix in zip(words[::2], words[1::2], strict=True):
        number = re.fullmatch(r"(\d*\.?\d+|\d+\.)(e[+-]?\d{1,3})?", weight, re.IGNORECASE)
        if not number or Fraction(weight) == 0:
            raise ValueError(f"{given}: weight {weight!r} of {prefix} must be a number above 0, such as 0.3")
        pairs.append((Fraction(weight), prefix))
    return pairs


def read_data_args(path: str) -> tuple[str, ...]:
    """The words of --data-args-path FILE, which stand for those of --data-path; # begins a comment."""
    try:
        text = read_small(path).decode()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--data-args-path {path}: {error}; name a text file of prefixes, or of W1 PREFIX1 W2 PREFIX2 ..."
        ) from error
    words = tuple(word for line in text.splitlines() for word in line.split("#")[0].split())
    if not words:
        raise ValueError(
            f"--data-args-path {path}: the file names no corpus; write prefixes, or W1 PREFIX1 W2 PREFIX2 ..."
        )
    return words


def open_datasets(
    data_path: Sequence[str],
    split: str,
    seq_length: int,
    seed: int,
    vocab_size: int | None,
    *,
    tokenizer: Tokenizer | None = None,
    needed: Sequence[str] = ("train",),
    document_flags: Sequence[str] = (),
    split_by: str = "auto",
    packing: str = "split",
    begins: Continued | None = None,
) -> Datasets:
    """Open the corpora of --data-path, each once, and check them; to be called before any process group starts.

    Checks: the files, as `IndexedDataset` does; a random choice of their blocks, by the checksums in PREFIX.json; the
    largest id, from PREFIX.json or a scan of both ends of the tokens; the tokenizer, as far as PREFIX.json names it;
    the first and last tokens of a sample of documents; that a mask has a target; that each split in `needed` has a
    sample of every corpus.

    Args:
        begins: where training data begin, in a later stage of a run.

    Raises:
        ValueError: a check fails; names --data-path and the corpus.
    """
    pairs = parse_data_path(data_path)
    split_ranges(split, 1)  # raises for a malformed --split
    corpora = tuple(IndexedDataset(prefix) for _, prefix in pairs)
    _allow_files()
    abouts = [read_about(data) for data in corpora]
    for data, about in zip(corpora, abouts, strict=True):
        if tokenizer is not None:
            _check_tokenizer(data, about, tokenizer)
        if document_flags and about.get("eod", 0) is None:
            raise ValueError(
                f"{' '.join(document_flags)}: the documents of --data-path {data.prefix} end in no end-of-document "
                "token; preprocess it again with --append-eod, or drop these flags"
            )
        if vocab_size is not None:
            _check_vocabulary(data, about, vocab_size, SCANNED_BYTES // len(corpora))
        if not data.num_tokens and len(corpora) > 1:
            raise ValueError(f"--data-path {data.prefix} holds no token; leave it out")
    shares = {
        data.prefix: _target_share(data, about, SCANNED_BYTES // len(corpora))
        for data, about in zip(corpora, abouts, strict=True)
        if data.masked
    }
    _check_sample(corpora, random.Random())
    edges = check_edges(corpora, abouts, tokenizer, document_flags) if tokenizer is not None else ()

    given = zip((weight for weight, _ in pairs), corpora, strict=True)
    weights = [Fraction(data.num_tokens) if weight is None else weight for weight, data in given]
    kind = PackedDataset if packing == "best-fit" else GPTDataset

    def opened(split_name: str) -> Samples:
        parts = [
            kind(
                data=data,
                split=split,
                split_name=split_name,
                seq_length=seq_length,
                seed=seed,
                vocab_size=vocab_size,
                split_by=split_by,
            )
            for data in corpora
        ]
        if split_name in needed:
            for part in parts:
                part.check(needed)
        if split_name == "train" and begins is not None:
            firsts = [begins.first(data, seq_length) for data in corpora]
            return BlendedDataset(parts, weights, begins.origin, firsts)
        return parts[0] if len(parts) == 1 else BlendedDataset(parts, weights)

    train, validation, test = (opened(name) for name in SPLITS)
    continues = begins.notes(corpora, seq_length) if begins is not None else ()
    return Datasets(train, validation, test, corpora=corpora, edges=edges, continued=continues, target_shares=shares)


def _allow_files() -> None:
    """Raise the limit of open files if mapped indices, of all stages, and the tables of their epochs need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        needed = OTHER_FILES + 4 * len(os.listdir("/proc/self/fd"))
    except OSError:  # a container without /proc
        needed = hard if hard > 0 else 1 << 20
    if 0 <= soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard < 0 else min(needed, hard), hard))


def _check_sample(corpora: Sequence[IndexedDataset], draw: random.Random) -> None:
    """Compare about `SAMPLED_BYTES` of all corpora with their checksums; ranks and starts choose different blocks."""
    left = SAMPLED_BYTES
    for number in draw.sample(range(len(corpora)), len(corpora)):
        budget = max(2 * BLOCK_BYTES, SAMPLED_BYTES // len(corpora))
        verify(corpora[number], budget, draw)
        size = corpora[number].num_tokens * corpora[number].dtype.itemsize
        left -= min(budget, size + 20 * corpora[number].num_documents + 4096)
        if left <= 0:
            return


def _check_tokenizer(data: IndexedDataset, about: dict[str, Any], tokenizer: Tokenizer) -> None:
    ours = tokenizer.identity if "tokenizer_hash" in about else None
    if about.get("tokenizer_hash") == ours and about.get("vocab_size", tokenizer.vocab_size) == tokenizer.vocab_size:
        return
    if ours and (difference := differing_tokens(tokenizer, str(about["tokenizer_hash"]))):
        raise ValueError(f"--data-path {data.prefix} {difference}")
    copy = Path(data.prefix).parent / str(about.get("saved_tokenizer", "")).rpartition(":")[2]
    at = f" (a copy is in {copy})" if "saved_tokenizer" in about and copy.exists() else ""
    raise ValueError(
        f"--data-path {data.prefix} was made with the tokenizer {about.get('tokenizer', 'of an unknown name')}{at}, of "
        f"{about.get('vocab_size', 'unknown')} tokens; --tokenizer {tokenizer.spec} has {tokenizer.vocab_size} and "
        f"gives other ids; name the one that made the corpus"
    )


def _check_vocabulary(data: IndexedDataset, about: dict[str, Any], vocab_size: int, scanned_bytes: int) -> None:
    largest = about.get("max_id")
    if isinstance(largest, int):
        parts = [np.array([largest])]
    else:
        count, end = scanned_bytes // data.dtype.itemsize, data.num_tokens
        parts = [data.tokens(0, min(count, end)), data.tokens(max(0, end - count), end)]
    for ids in parts:
        require_vocabulary(data.prefix, ids, vocab_size, "the corpus")
