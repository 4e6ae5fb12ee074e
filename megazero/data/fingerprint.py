"""Fingerprints of corpora: do a resumed run and all ranks read the same tokens?

A fingerprint is a short text, "SAMPLED:CHECKSUM". The first part is a hash of the sizes of both files, of both ends of
the index and of a few stretches of the tokens and of their mask. The second is a hash of the checksums in PREFIX.json,
so that one changed token anywhere changes the fingerprint; "-" without PREFIX.json.
"""

import hashlib
import json
import os
from collections.abc import Sequence

from megazero.data.about import read_about
from megazero.data.indexed import IndexedDataset

# Number and length of the stretches of tokens that are hashed, evenly spaced.
STRETCHES, STRETCH_BYTES = 16, 4096


def fingerprint(data: str | os.PathLike[str] | IndexedDataset) -> str:
    """The fingerprint of a corpus, given by itself or its prefix. ValueError as `IndexedDataset`."""
    data = data if isinstance(data, IndexedDataset) else IndexedDataset(data)
    digest = hashlib.sha256(data.index_fingerprint.encode())
    length = STRETCH_BYTES // data.dtype.itemsize
    last = max(0, data.num_tokens - length)
    for start in sorted({last * k // (STRETCHES - 1) for k in range(STRETCHES)}):
        stop = min(start + length, data.num_tokens)
        digest.update(data.tokens(start, stop).tobytes())
        if data.masked:
            digest.update(data.mask(start, stop).tobytes())
    checksum = read_about(data).get("checksum")
    whole = hashlib.sha256(json.dumps(checksum, sort_keys=True).encode()).hexdigest()[:16] if checksum else "-"
    return f"{digest.hexdigest()[:16]}:{whole}"


def same(one: str, other: str) -> bool:
    """Return True if two fingerprints can be of one corpus: a missing PREFIX.json alone is no difference."""
    (sampled, whole), (sampled2, whole2) = one.split(":"), other.split(":")
    return sampled == sampled2 and (whole == whole2 or "-" in (whole, whole2))


def differences(saved: Sequence[str], ours: Sequence[str], prefixes: Sequence[str]) -> list[str]:
    """One sentence for each corpus that has changed since a checkpoint was saved.

    Args:
        saved: fingerprints in the checkpoint, in the order of --data-path.
        ours: fingerprints of this run's corpora.
        prefixes: of this run's corpora.
    """
    if len(saved) != len(ours):
        return [f"--data-path names {len(ours)} corpora, and named {len(saved)} when this was saved"]
    return [
        f"--data-path {prefix} holds other tokens than when this was saved: it was made again, or is another corpus"
        for then, now, prefix in zip(saved, ours, prefixes, strict=True)
        if not same(then, now)
    ]
