"""Items of tasks from the files of data sets as their authors publish them, with the prompts of lm-eval's tasks."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megazero.data.task_files import NAME_CHARACTERS, NAME_LENGTH, numbered_lines
from megazero.files import explain, read_regular

LETTERS = "ABCD"
Fields = dict[str, Any]  # of an item, see docs/tasks.md
Numbered = Iterator[tuple[int, Any]]  # numbers and contents of lines


class TaskFormat(NamedTuple):
    """A kind of file.

    Attributes:
        read: (path, shots) -> line numbers and items, without their task.
        summary: the files, and the task of lm-eval that has the same prompts.
        shots: examples may come before a question.
    """

    read: Callable[[Path, int], Iterator[tuple[int, Fields]]]
    summary: str
    shots: bool = False


def _json_lines(path: Path) -> Numbered:
    for number, line in _lines(path):
        try:
            yield number, json.loads(line)
        except ValueError as error:
            raise ValueError(f"--input {path}, line {number}: {error}") from None


def _lines(path: Path) -> Numbered:
    for number, line in numbered_lines(read_regular(path)):
        yield number, line.decode()


def _question(text: str) -> str:
    return f"Question: {text}\nAnswer:"


def _cleaned(text: str) -> str:
    """Return a text of HellaSwag without the marks of its source, WikiHow."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def hellaswag(path: Path, shots: int) -> Iterator[tuple[int, Fields]]:
    """Yield items of hellaswag_val.jsonl."""
    for number, item in _json_lines(path):
        context = f"{item['activity_label']}: {item['ctx_a']} {item['ctx_b'].capitalize()}"
        choices = [_cleaned(ending) for ending in item["endings"]]
        yield number, {"kind": "choice", "context": _cleaned(context), "choices": choices, "answer": int(item["label"])}


def arc(path: Path, shots: int) -> Iterator[tuple[int, Fields]]:
    """Yield items of ARC-Easy-Test.jsonl or ARC-Challenge-Test.jsonl; labels are letters or digits."""
    for number, item in _json_lines(path):
        options = item["question"]["choices"]
        answer = [option["label"] for option in options].index(item["answerKey"])
        choices, context = [option["text"] for option in options], _question(item["question"]["stem"])
        yield number, {"kind": "choice", "context": context, "choices": choices, "answer": answer}


def piqa(path: Path, shots: int) -> Iterator[tuple[int, Fields]]:
    """Yield items of valid.jsonl, with the answers of valid-labels.lst next to it."""
    answers = path.with_name(f"{path.stem}-labels.lst")
    try:
        labels = read_regular(answers).decode().split()
    except OSError as error:
        raise ValueError(f"--input {path}: {explain(error)}; put the labels there, as the authors name them") from None
    for place, (number, item) in enumerate(_json_lines(path)):
        choices, context = [item["sol1"], item["sol2"]], _question(item["goal"])
        yield number, {"kind": "choice", "context": context, "choices": choices, "answer": int(labels[place])}


def lambada(path: Path, shots: int) -> Iterator[tuple[int, Fields]]:
    """Yield items of lambada_test_plain_text.txt, or of JSON lines with `text`: the last word is to be found."""
    texts = ((n, item["text"]) for n, item in _json_lines(path)) if path.suffix == ".jsonl" else _lines(path)
    for number, text in texts:
        if text.strip():
            context, _, word = text.rpartition(" ")
            yield number, {"kind": "cloze", "context": context, "continuation": word}


def mmlu(path: Path, shots: int) -> Iterator[tuple[int, Fields]]:
    """Yield items of test/SUBJECT_test.csv. Examples are the first of dev/SUBJECT_dev.csv."""
    subject = re.sub(r"_(test|val|dev)$", "", path.stem)
    intro = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
    if shots:
        examples = path.parent.parent / "dev" / f"{subject}_dev.csv"
        try:
            found = [_mmlu_question(row) for _, row in _rows(examples)][:shots]
        except OSError as error:
            raise ValueError(f"--shots {shots}: {explain(error)}; put the examples there, as the authors do") from None
        if len(found) < shots:
            raise ValueError(f"--shots {shots}: {examples} has {len(found)} examples; ask for fewer")
        intro += "".join(f"{question} {letter}\n\n" for question, letter in found)
    for number, row in _rows(path):
        question, letter = _mmlu_question(row)
        answer = LETTERS.index(letter)
        yield number, {"kind": "choice", "context": intro + question, "choices": list(LETTERS), "answer": answer}


def _rows(path: Path) -> Numbered:
    reader = csv.reader(io.StringIO(read_regular(path).decode(), newline=""))
    for row in reader:
        yield reader.line_num, row


def _mmlu_question(row: list[str]) -> tuple[str, str]:
    """Return the text of a question, and the letter of its answer."""
    question, *options, letter = row
    listed = "".join(f"\n{name}. {option}" for name, option in zip(LETTERS, options, strict=True))
    return f"{question.strip()}{listed}\nAnswer:", letter


def text(path: Path, shots: int) -> Iterator[tuple[int, Fields]]:
    """Yield the documents of JSON lines with `text`, and perhaps `domain`; else of a text file, which is one."""
    if path.suffix != ".jsonl":
        yield 1, {"kind": "text", "text": read_regular(path).decode(), "domain": _named(path.stem)}
        return
    for number, item in _json_lines(path):
        domain = item.get("domain", path.stem)
        yield number, {"kind": "text", "text": item["text"], "domain": domain and _named(domain)}


def _named(text: str) -> str:
    """Return a name of a domain with `_` in place of characters that names do not have."""
    return re.sub(f"[^{NAME_CHARACTERS}]", "_", text)[:NAME_LENGTH]


FORMATS = {
    "hellaswag": TaskFormat(hellaswag, "hellaswag_val.jsonl; as lm-eval's hellaswag"),
    "arc": TaskFormat(arc, "ARC-Easy-Test.jsonl, ARC-Challenge-Test.jsonl; arc_easy, arc_challenge"),
    "piqa": TaskFormat(piqa, "valid.jsonl, with valid-labels.lst next to it; piqa"),
    "lambada": TaskFormat(lambada, "lambada_test_plain_text.txt, lambada_test.jsonl; lambada_standard, lambada_openai"),
    "mmlu": TaskFormat(mmlu, "test/SUBJECT_test.csv, with dev/ next to test/; mmlu", shots=True),
    "text": TaskFormat(text, "texts, or JSON lines with text and perhaps domain; bits per byte"),
}


def read_items(name: str, path: Path, shots: int) -> Iterator[tuple[int, Fields]]:
    """Yield the line number and the fields of each item of a file.

    Raises:
        ValueError: the file cannot be read, or a line is no item of this format; the message names it.
    """
    number, lines = 0, FORMATS[name].read(path, shots)
    while True:
        try:
            number, item = next(lines)
        except StopIteration:
            return
        except OSError as error:
            raise ValueError(f"--input {path}: {explain(error)}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"--input {path}: it is no text: {error}") from None
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError, csv.Error) as error:
            raise ValueError(_complaint(name, path, number, f"{type(error).__name__} {error}")) from None
        except ValueError as error:
            known = str(error).startswith("--")
            raise ValueError(str(error) if known else _complaint(name, path, number, str(error))) from None
        yield number, item


def _complaint(name: str, path: Path, number: int, reason: str) -> str:
    return (
        f"--input {path}: the item behind line {number} is none of {name}: {reason}; give the authors' file of a split "
        "with answers"
    )
