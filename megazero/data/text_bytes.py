"""Bytes of text per token, by which a loss becomes bits per byte: comparable between tokenizers."""

import itertools

import numpy as np

from megazero.data.corpora import Datasets
from megazero.data.samples import NO_TOKEN, Samples
from megazero.data.tokenizer import Tokenizer, end_of_document

TOKENS = 1 << 16  # that are decoded, in a tenth of a second


def bytes_per_token(datasets: Datasets, tokenizer: Tokenizer) -> float | None:
    """Return the mean bytes of UTF-8 text per counted target, in the first samples of the validation split.

    The beginning and the end of a document are targets without text. If the split is empty, the training split is
    read; None if that has no text.
    """
    for samples in (datasets.validation, datasets.train):
        try:
            return _measured(samples, tokenizer)
        except ValueError:  # an empty split
            continue
    return None


def _measured(samples: Samples, tokenizer: Tokenizer) -> float | None:
    num_bytes = num_targets = 0
    end = end_of_document(tokenizer)
    without_text = [*tokenizer.bos, NO_TOKEN if end is None else end]
    for index in itertools.count():
        sample = samples[index]
        ids = sample.ids[1:] if sample.counts is None else sample.ids[1:][sample.counts.astype(bool)]
        ids = ids[ids != NO_TOKEN]
        texts = ids[~np.isin(ids, without_text) & (ids < tokenizer.vocab_size)]
        text = tokenizer.decode(texts.tolist()).strip("\ufffd")  # the ends of a sample may cut a character
        num_bytes += len(text.encode(errors="replace"))
        num_targets += len(ids)
        if num_targets >= TOKENS or (index and not num_targets):
            return num_bytes / num_targets if num_bytes else None
    raise AssertionError
