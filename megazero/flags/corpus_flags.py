"""Facts that follow from the flags of corpora."""

from collections.abc import Sequence

from megazero.flags.config import DataConfig

# A blend of more corpora has no entry per corpus in the metrics, whose lines would be pages.
MAX_NAMED_CORPORA = 100


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def named_corpora(words: Sequence[str]) -> int:
    """Return the corpora of --data-path with an entry each in the metrics; 1 if it names one, or too many."""
    num_corpora = len(words) // 2 if words and is_number(words[0]) else len(words)  # with weights, or without
    return num_corpora if 1 < num_corpora <= MAX_NAMED_CORPORA else 1


def document_flags(data: DataConfig) -> tuple[str, ...]:
    """Return the flags given that need the end-of-document token."""
    by_token = data.packing == "split"  # else the samples' documents are known
    flags = {
        "--eod-mask-loss": data.eod_mask_loss,
        "--reset-attention-mask": data.reset_attention_mask and by_token,
        "--reset-position-ids": data.reset_position_ids and by_token,
    }
    return tuple(flag for flag, given in flags.items() if given)
