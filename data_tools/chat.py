"""Conversations: tokens by the tokenizer's chat template, and those of them that are the assistant's.

A conversation is a list of messages, {"role": ..., "content": ...}; the targets are the tokens of role "assistant".
"""

import functools
import hashlib
import re
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from data_tools.documents import Malformed, well_formed
from megazero.data.indexed import Int64s, Mask
from megazero.data.tokenizer import PROBE, FastTokenizer, load_tokenizer
from megazero.data.tokenizer.backends import TransformersTokenizer
from megazero.files import first_line
from megazero.optional import load_optional
from megazero.units import things

Messages = list[dict[str, Any]]
# transformers' tags around the assistant's part of a template. Calls of a macro in their place put a mark at each end
# of such a part. transformers' own mask of the assistant's tokens is wrong in some versions, such as 5.17, which marks
# later messages of the user.
GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
BEGIN, END = "\ue0f0<\ue0f1", "\ue0f0>\ue0f1"
MARKING = f"{{% macro marked_for_training() %}}{BEGIN}{{{{ caller() }}}}{END}{{% endmacro %}}{{{{ '' }}}}"
# Templates that show the date get Llama 3's, so that a command that resumes on another day writes the same bytes.
DATE = "26 Jul 2024"
FIXED_DATE = (
    "{% macro strftime_now(format) %}{{ '26 Jul 2024' if '%b' in format or '%B' in format else '2024-07-26' }}"
    "{% endmacro %}{{ '' }}"  # else the template's first newline would be left out
)


# Loops in loops of a template can be endless for any purpose; a conversation takes milliseconds.
RENDERING_CPU_SECONDS = 10.0


class TemplateUnsuitable(ValueError):
    """A chat template that does not end, or in which the assistant's tokens cannot be found."""


class Conversation(NamedTuple):
    """The tokens of a conversation, and whether each is a target, [n]."""

    ids: Int64s
    mask: Mask


class ChatTemplate:
    """Renders conversations with the chat template of a --tokenizer, by transformers.

    Raises:
        ValueError: transformers is not installed, there is no template, or transformers gives other ids.
    """

    def __init__(self, spec: str) -> None:
        self.spec, tokenizer = spec, load_tokenizer(spec)
        if not isinstance(tokenizer, FastTokenizer | TransformersTokenizer):
            raise self._missing()
        library = load_optional("transformers", "--mask-from chat")
        try:
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.save(Path(folder))
                self._backend = library.AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
            template = self._backend.get_chat_template() if self._backend.chat_template else None
        except Exception as error:  # any exception of the library
            reason = first_line(error)
            raise ValueError(f"--mask-from chat: transformers cannot read --tokenizer {spec}: {reason}") from error
        if template is None:
            raise self._missing()
        if not isinstance(template, str):
            raise ValueError(
                f"--mask-from chat: the chat_template of --tokenizer {spec} is a {type(template).__name__}, not a text"
            )
        if not self._backend.is_fast:
            raise ValueError(
                f"--mask-from chat: --tokenizer {spec} does not give the place of a token in the text, as a "
                f"tokenizer.json does; save it as one"
            )
        encoded = self._backend(list(PROBE), add_special_tokens=False)["input_ids"]
        if encoded != tokenizer.encode_batch(PROBE):
            raise ValueError(
                f"--mask-from chat: transformers reads --tokenizer {spec} as a tokenizer that gives other ids; correct "
                f"the tokenizer_class in its tokenizer_config.json"
            )
        self.template = (FIXED_DATE if "strftime_now" in template else "") + template
        self._marked = ""
        if GENERATION.search(self.template):
            tags = {None: "call marked_for_training()", "end": "endcall"}
            self._marked = MARKING + GENERATION.sub(
                lambda tag: f"{{%{tag[1]} {tags[tag[2]]} {tag[3]}%}}", self.template
            )

    def _missing(self) -> ValueError:
        return ValueError(
            f"--mask-from chat: --tokenizer {self.spec} has no chat template; name a folder with a tokenizer.json and "
            f"the template in chat_template.jinja, or under chat_template in tokenizer_config.json"
        )

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.template.encode()).hexdigest()[:16]

    def encode(self, value: Any) -> Conversation:
        """Return the tokens of a value of the input, a list of messages.

        Raises:
            Malformed: it is none, or the template does not accept it.
            TemplateUnsuitable: the template has no {% generation %}, and renders an answer in another way once
                messages follow it, or after another text than its generation prompt; or it changes the marked text.
        """
        messages = messages_of(value)
        try:
            text = str(self._apply(messages, self.template))
            if self._marked:
                spans = self._marked_spans(messages, text)
            else:
                answers = [number for number, each in enumerate(messages) if each["role"] == "assistant"]
                spans = [self._span(messages, number, text) for number in answers]
            found = self._backend(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        except (TemplateUnsuitable, MemoryError):
            raise
        except Exception as error:  # any exception of a template, or of the library
            raise Malformed(f"is refused by the chat template: {first_line(error)}") from error
        mask = np.zeros(len(found["input_ids"]), np.bool_)
        first, stop = np.array(found["offset_mapping"], np.int64).reshape(-1, 2).T
        for begin, end in spans:
            mask |= (stop > begin) & (first < end)
        return Conversation(np.array(found["input_ids"], np.int64), mask)

    def writes(self, beginning: Sequence[int]) -> bool:
        """Return whether a conversation begins with these ids. TemplateUnsuitable as `encode`."""
        try:
            found = self.encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        except Malformed:  # it accepts other conversations alone
            return False
        return found.ids[: len(beginning)].tolist() == list(beginning)

    def _apply(self, messages: Messages, template: str, **options: Any) -> Any:
        fault = (
            f"--mask-from chat: the chat template of --tokenizer {self.spec} takes more than {RENDERING_CPU_SECONDS:g} "
            f"s of CPU time for a conversation of {things(len(messages), 'message')}; correct its loops"
        )
        with _ending_after(RENDERING_CPU_SECONDS, TemplateUnsuitable(fault)):
            return self._backend.apply_chat_template(
                messages, chat_template=template, date_string=DATE, tokenize=False, **options
            )

    def _marked_spans(self, messages: Messages, whole: str) -> list[tuple[int, int]]:
        """Return the characters in a rendered conversation that {% generation %} is around."""
        parts = re.split(f"({BEGIN}|{END})", str(self._apply(messages, self._marked)))
        texts, marks, at, begin, spans = parts[::2], parts[1::2], 0, 0, list[tuple[int, int]]()
        if "".join(texts) != whole or marks != [BEGIN, END] * (len(marks) // 2):
            raise TemplateUnsuitable(
                f"--mask-from chat: the chat template of --tokenizer {self.spec} changes the text around "
                "{% generation %}; put the tags where the text is final, and one pair not inside another"
            )
        for text, mark in zip(texts, marks, strict=False):
            at += len(text)
            if mark == END:
                spans.append((begin, at))
            begin = at
        return spans

    def _span(self, messages: Messages, number: int, whole: str) -> tuple[int, int]:
        """Return the characters of message `number`, the assistant's, in the rendered conversation."""
        before = str(self._apply(messages[:number], self.template, add_generation_prompt=True))
        after = str(self._apply(messages[: number + 1], self.template))
        if not (after.startswith(before) and whole.startswith(after)):
            raise TemplateUnsuitable(
                f"--mask-from chat: the chat template of --tokenizer {self.spec} renders an answer in another way when "
                f"messages follow it, or without its generation prompt, so that the assistant's tokens cannot be "
                f"found; put {{% generation %}} and {{% endgeneration %}} around them in the template"
            )
        return len(before), len(after)


@contextmanager
def _ending_after(seconds: float, error: Exception) -> Iterator[None]:
    """Raise `error` in the block once the process has computed for `seconds`. For the main thread.

    Counted is time on a CPU, not the clock's, so that a busy machine ends nothing.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@functools.cache
def cached_template(spec: str) -> ChatTemplate:
    """One per process, however many chunks it renders."""
    return ChatTemplate(spec)


def messages_of(value: Any) -> Messages:
    """Check and clean a list of messages. Malformed if it is none."""
    if not isinstance(value, list) or not value:
        raise Malformed("is no list of messages")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Malformed(f"has no text under role in message {number}")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise Malformed(f"has no text under content in message {number}")
    cleaned: Messages = _cleaned(value)
    return cleaned


def _cleaned(value: Any) -> Any:
    """Leave out keys without a value, which columns of a table have, and replace halves of surrogate pairs."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, dict):
        return {key: _cleaned(each) for key, each in value.items() if each is not None}
    return [_cleaned(each) for each in value] if isinstance(value, Sequence) else value
