"""Items of tasks, read from files of JSON lines: docs/tasks.md."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from megazero.files import explain, read_regular

FORM = "docs/tasks.md has the form of an item"
NAME_CHARACTERS, NAME_LENGTH = "A-Za-z0-9_.:+-", 64
NAME = rf"^[{NAME_CHARACTERS}]{{1,{NAME_LENGTH}}}\Z"
Name = Annotated[str, Meta(pattern=NAME)]
Filled = Annotated[str, Meta(min_length=1)]


class ChoiceItem(msgspec.Struct, tag_field="kind", tag="choice", forbid_unknown_fields=True, frozen=True):
    """A multiple choice. `answer`: the index of the right option."""

    task: Name
    context: str
    choices: Annotated[tuple[Filled, ...], Meta(min_length=2)]
    answer: Annotated[int, Meta(ge=0)]
    delimiter: str = " "  # between the context and an option

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the continuations of the context."""
        return tuple(self.delimiter + choice for choice in self.choices)


class ClozeItem(msgspec.Struct, tag_field="kind", tag="cloze", forbid_unknown_fields=True, frozen=True):
    """A text whose end the model has to find."""

    task: Name
    context: str
    continuation: Filled
    delimiter: str = " "

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the one continuation of the context."""
        return (self.delimiter + self.continuation,)


class TextItem(msgspec.Struct, tag_field="kind", tag="text", forbid_unknown_fields=True, frozen=True):
    """A text for bits per byte."""

    task: Name
    text: Filled
    domain: Name | None = None


Item = ChoiceItem | ClozeItem | TextItem


class TaskItems(NamedTuple):
    """All items of --tasks, in the order of the files.

    Attributes:
        places: file and line of each item, for messages.
        digest: a hash of the files.
    """

    items: tuple[Item, ...]
    places: tuple[str, ...]
    digest: str

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of items of each task."""
        return dict(Counter(item.task for item in self.items))


def read_tasks(paths: Sequence[str], limit: int = 0) -> TaskItems:
    """Read the files of --tasks.

    Args:
        limit: items of each task, the first ones; 0: all.

    Raises:
        ValueError: a file or a line of it cannot be used; the message names both.
    """
    digest, kinds, counts = hashlib.sha256(), dict[str, type[Item]](), Counter[str]()
    items, places = list[Item](), list[str]()
    for path in paths:
        try:
            content = read_regular(path)
        except (OSError, ValueError) as error:
            reason = explain(error) if isinstance(error, OSError) else error
            raise ValueError(f"--tasks {reason}; name a file of JSON lines: {FORM}") from None
        digest.update(content + b"\0")
        lines = numbered_lines(content)
        if not lines:
            raise ValueError(f"--tasks {path}: the file holds no item; write one per line: {FORM}")
        for number, line in lines:
            place = f"--tasks {path}, line {number}"
            item = _parse(line, place)
            if kinds.setdefault(item.task, type(item)) is not type(item):
                raise ValueError(f"{place}: task {item.task} has items of another kind; give this one another name")
            counts[item.task] += 1
            if not limit or counts[item.task] <= limit:
                items.append(item)
                places.append(place)
    return TaskItems(tuple(items), tuple(places), digest.hexdigest()[:16])


def numbered_lines(content: bytes) -> list[tuple[int, bytes]]:
    """Return the lines that are not blank, with their numbers from 1.

    `str.splitlines` would also split at characters that JSON allows in a text, such as U+2028.
    """
    lines = enumerate(content.split(b"\n"), 1)
    return [(number, line.removesuffix(b"\r")) for number, line in lines if line.strip()]


def check_item(item: Item, place: str) -> Item:
    """Return an item whose fields have the right types, if they fit each other.

    Raises:
        ValueError: there is no such answer.
    """
    if isinstance(item, ChoiceItem) and item.answer >= len(item.choices):
        raise ValueError(f"{place}: answer {item.answer} of {len(item.choices)} choices, counted from 0; correct it")
    return item


def _parse(line: bytes, place: str) -> Item:
    try:
        item: Item = msgspec.json.decode(line, type=Item)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{place}: {error}; {FORM}") from None
    return check_item(item, place)
