"""Flags of Megatron-LM's tools/preprocess_data.py that name a tokenizer, translated to ours."""

from collections.abc import Sequence

from megazero.flags.foreign.translate import refusals, split_items, translate

TOKENIZER = {"vocab-file", "merge-file", "tokenizer-type", "tokenizer-model"}
ALWAYS = {"dataset-impl": ("mmap",)}  # values that are always true here


def our_words(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with --tokenizer instead of Megatron-LM's flags for it, and without the flags in ALWAYS.

    Raises:
        ValueError: flags that name no tokenizer, such as a vocabulary without its merges.
    """
    items = split_items(list(arguments))
    foreign = [item for item in items if item.name in TOKENIZER]
    left = [item for item in items if item not in foreign and ALWAYS.get(item.name) != item.values]
    words = [word for item in left for word in item.words()]
    if not foreign:
        return words
    given = [item for item in left if item.name == "tokenizer"]
    done = translate([word for item in [*foreign, *given] for word in item.words()])
    if refused := refusals(done.answers):
        raise ValueError(refused)
    return [word for item in left if item not in given for word in item.words()] + done.args
