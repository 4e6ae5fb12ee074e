"""Keys of the input that are read, the corpora made of them, and the tokens that count as targets."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

MaskFrom = Literal["none", "chat"]


class Selection(NamedTuple):
    """The choice made by --json-keys and --mask-from."""

    keys: tuple[str, ...]  # keys, or columns, that are read
    corpora: tuple[str, ...]  # KEY in the name of each corpus
    counted: tuple[bool, ...] = ()  # whether the tokens of each key are targets; empty: each key is a corpus
    chat: bool = False  # keys hold conversations

    @property
    def masked(self) -> bool:
        """True if the corpora have loss masks."""
        return self.chat or bool(self.counted)


def select(json_keys: Sequence[str], mask_from: MaskFrom) -> Selection:
    """Read --json-keys KEY ..., or KEY:0 KEY:1 ... for one corpus of all keys; () is the default for --mask-from.

    Raises:
        ValueError: only some keys have :0 or :1, all have :0, or they are combined with --mask-from.
    """
    keys = tuple(json_keys) or (("messages",) if mask_from == "chat" else ("text",))
    given = f"--json-keys {' '.join(keys)}"
    marked = [key for key in keys if key[-2:] in (":0", ":1") and key[:-2]]
    if not marked:
        return Selection(keys, keys, chat=mask_from == "chat")
    if mask_from != "none":
        raise ValueError(f"{given}: --mask-from {mask_from} finds the targets itself; leave out :0 and :1")
    if len(marked) < len(keys):
        raise ValueError(f"{given}: only some keys have :0 or :1; give each one, or none for a corpus of each key")
    counted = tuple(key.endswith(":1") for key in keys)
    if not any(counted):
        raise ValueError(f"{given}: no token would be a target; give :1 to the key of the answers")
    names = tuple(key[:-2] for key in keys)
    return Selection(names, ("_".join(names),), counted)
