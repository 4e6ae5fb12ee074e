"""The command of an elastic run, which is the same on all of its nodes. `node_agent` compares it."""

import os
from collections.abc import Sequence
from itertools import zip_longest


def absolute_save(words: Sequence[str]) -> tuple[list[str], str]:
    """Return the words with an absolute --save folder, and that folder; empty if they have none."""
    found, save = list[str](), ""
    for word in words:
        if word.startswith("--save=") or found[-1:] == ["--save"]:
            save = os.path.abspath(word.removeprefix("--save="))
            word = f"--save={save}" if word.startswith("--save=") else save
        found.append(word)
    return found, save


def first_difference(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """Return the first words that differ between two commands, with their flags."""
    at = next(at for at, (one, other) in enumerate(zip_longest(ours, theirs)) if one != other)
    return _flag(ours, at), _flag(theirs, at)


def _flag(words: Sequence[str], at: int) -> str:
    if at >= len(words):
        return "no further flag"
    begin = next((begin for begin in range(at, 0, -1) if words[begin].startswith("--")), 0)
    return " ".join(words[begin : at + 1])
