"""Tokenizers behind one small interface: Hugging Face, GPT-2's own files, SentencePiece, tiktoken, and plain bytes.

`encode_texts` puts the beginning of a text before each, `encode_batch` adds no special token; callers append `eod`
themselves. Begin with `base`; `choose_tokenizer` recognises the kind of a --tokenizer.
"""

from megazero.data.tokenizer.backends import (
    ByteTokenizer,
    FastTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    gpt2_backend,
)
from megazero.data.tokenizer.base import (
    END_OF_DOCUMENT,
    GENERATION,
    PROBE,
    Packed,
    Tokenizer,
    asked_beginning,
    beside,
    end_of_document,
    pack,
)
from megazero.data.tokenizer.choose_tokenizer import (
    OTHER_FILES,
    SPECS,
    differing_tokens,
    hub_hint,
    load_tokenizer,
    read_generation,
)

__all__ = [
    "END_OF_DOCUMENT",
    "GENERATION",
    "OTHER_FILES",
    "PROBE",
    "SPECS",
    "ByteTokenizer",
    "FastTokenizer",
    "Packed",
    "SentencePieceTokenizer",
    "TiktokenTokenizer",
    "Tokenizer",
    "asked_beginning",
    "beside",
    "differing_tokens",
    "end_of_document",
    "gpt2_backend",
    "hub_hint",
    "load_tokenizer",
    "pack",
    "read_generation",
]
