"""Tokenizers behind one small interface: Hugging Face, GPT-2's own files, SentencePiece, tiktoken, and plain bytes.

No begin-of-text or other special token is added to what is encoded: a document is its own tokens, and who
wants an end of document appends `eod`. Begin with `base`; `loading` finds out what a --tokenizer names.
"""

from megazero.data.tokenizer.backends import (
    ByteTokenizer,
    FastTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    gpt2_backend,
)
from megazero.data.tokenizer.base import END_OF_DOCUMENT, PROBE, Packed, Tokenizer, beside, end_of_document, pack
from megazero.data.tokenizer.loading import OTHER_FILES, SPECS, hub_hint, load_tokenizer

__all__ = [
    "END_OF_DOCUMENT",
    "OTHER_FILES",
    "PROBE",
    "SPECS",
    "ByteTokenizer",
    "FastTokenizer",
    "Packed",
    "SentencePieceTokenizer",
    "TiktokenTokenizer",
    "Tokenizer",
    "beside",
    "end_of_document",
    "gpt2_backend",
    "hub_hint",
    "load_tokenizer",
    "pack",
]
