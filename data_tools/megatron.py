"""Flags of Megatron-LM's tools/preprocess_data.py: those that name a tokenizer translated to ours, others left out."""

import sys
from collections.abc import Sequence

from megazero.flags.foreign.flag_table import find_entry
from megazero.flags.foreign.translate import refusals, split_items, translate

TOKENIZER = {"vocab-file", "merge-file", "tokenizer-type", "tokenizer-model", "tokenizer-name-or-path"}
ALWAYS = {"dataset-impl": ("mmap",), "vocab-extra-ids": ("0",)}  # values that are always true here
# The result does not depend on them: documents stay in order.
NEEDLESS = {"log-interval", "partitions", "keep-sequential-samples", "chunk-size", "find-optimal-num-workers"}
NEEDLESS |= {"workers-to-check", "max-documents-to-check", "seed", "rank", "tensor-model-parallel-size"}


def our_words(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with --tokenizer instead of Megatron-LM's flags for it, and without flags that do nothing.

    Those are reported on stderr; the flags in ALWAYS are not.

    Raises:
        ValueError: flags that name no tokenizer, such as a vocabulary without its merges.
    """
    items = split_items(list(arguments))
    foreign = [item for item in items if item.name in TOKENIZER]
    left = [item for item in items if item not in foreign and ALWAYS.get(item.name) != item.values]
    needless = [item for item in left if item.name in NEEDLESS or _is_needless(item.name)]
    left = [item for item in left if item not in needless]
    if needless:
        print(f"nothing to do for: {', '.join(item.spelled for item in needless)}", file=sys.stderr)
    words = [word for item in left for word in item.words()]
    if not foreign:
        return words
    given = [item for item in left if item.name == "tokenizer"]
    done = translate([word for item in [*foreign, *given] for word in item.words()])
    if refused := refusals(done.answers):
        raise ValueError(refused)
    return [word for item in left if item not in given for word in item.words()] + done.args


def _is_needless(name: str) -> bool:
    """Return whether a flag has no effect in training either, such as --make-vocab-size-divisible-by."""
    entry = find_entry(name) if name else None
    return entry is not None and (entry.table, entry.by) == ("megatron", "unneeded")
