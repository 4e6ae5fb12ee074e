"""Special tokens of a tokenizer: the end of a document, the beginning of a text, those of settings files alone."""

import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from megazero.data.tokenizer.base import END_OF_DOCUMENT
from megazero.files import read_json_object

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("additional_special_tokens", "extra_special_tokens")


def find_eod(known: Mapping[str, int], special: Container[str], configured: str | None) -> int | None:
    """Return the id of the end of a document, if there is one.

    It is a special token of a name in `END_OF_DOCUMENT`, at best the `configured` one; else the configured one, because
    the eos_token of a chat tokenizer ends a message. An ordinary token of such a name may be a tag of HTML.
    """
    names = [name for name in END_OF_DOCUMENT if name in special]
    if configured is not None:
        names = [configured, *names] if configured in END_OF_DOCUMENT else [*names, configured]
    return next((known[name] for name in names if name in known), None)


def configured_token(settings: Mapping[str, Any], name: str) -> str | None:
    """Return a token such as `eos_token` of a tokenizer_config.json: a string, or an object with its `content`."""
    token = settings.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(token, str):
        article = "an" if name[0] in "aeiou" else "a"
        raise ValueError(f"tokenizer_config.json has {article} {name} that is no text: {json.dumps(token)[:80]}")
    return token


def configured_tokens(settings: Mapping[str, Any]) -> set[str]:
    """Return the special tokens that a tokenizer_config.json names."""
    found = {configured_token(settings, name) for name in NAMED}
    for name in LISTS:
        listed = settings.get(name) or ()
        for each in listed.values() if isinstance(listed, dict) else listed:
            found.add(each.get("content") if isinstance(each, dict) else each)
    return {name for name in found if isinstance(name, str)}


def added_before(whole: Sequence[int], text: Sequence[int]) -> tuple[int, ...]:
    """Return the ids that a tokenizer puts before a text: `whole` with special tokens, `text` without."""
    places = range(len(whole) - len(text) + 1)
    return tuple(whole[: next((k for k in places if list(whole[k : k + len(text)]) == list(text)), 0)])


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the tokenizer_config.json of a folder, with special_tokens_map.json where transformers reads that."""
    path, older = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    settings = read_json_object(path) if path.exists() else {}
    if older.exists() and "added_tokens_decoder" not in settings:
        names = read_json_object(older)
        settings |= {name: names[name] for name in (*NAMED, *LISTS) if name in names}
    return settings


def add_configured(backend: Any, settings: Mapping[str, Any], folder: Path) -> None:
    """Add the tokens to `backend`, of a tokenizer.json, that only the other files of its folder have.

    transformers adds those of `added_tokens_decoder` in tokenizer_config.json, else those of added_tokens.json.

    Raises:
        ValueError: a file gives a token another id than the one that it gets in transformers.
    """
    from tokenizers import AddedToken

    file, older = folder / "tokenizer_config.json", folder / "added_tokens.json"
    wanted = {}
    if "added_tokens_decoder" in settings:
        wanted = {int(number): AddedToken(**token) for number, token in settings["added_tokens_decoder"].items()}
    elif older.exists():
        file, special = older, configured_tokens(settings)
        for name, number in read_json_object(older).items():
            wanted[number] = AddedToken(name, special=name in special, normalized=name not in special)
    held = {each.content: repr(each) for each in backend.get_added_tokens_decoder().values()}
    if file is older:  # names and ids alone: the tokenizer.json knows more of those that it has
        wanted = {number: token for number, token in wanted.items() if token.content not in held}
    for number, token in sorted(wanted.items()):
        if held.get(token.content) == repr(token):
            continue
        backend.add_tokens([token])
        if (found := backend.token_to_id(token.content)) != number and token.content not in held:
            raise ValueError(
                f"{file} gives {token.content!r} the id {number}, and after those of tokenizer.json it gets {found}; "
                "save the tokenizer again, so that its tokenizer.json holds all tokens"
            )
