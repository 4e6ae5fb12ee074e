#!/usr/bin/env python3
"""Convert the files of published data sets to items for --tasks."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_tools.task_formats import FORMATS, read_items
from data_tools.tool import parse, run_tool
from megazero.data.task_files import NAME, NAME_LENGTH, Item, check_item
from megazero.files import write_atomically
from megazero.units import things

PROGRAM = "convert_tasks.py"


@dataclass(frozen=True)
class Options:
    """Convert the files of published data sets to items for --tasks (docs/tasks.md), with the prompts of lm-eval.

    formats:
      {formats}

    example:
      python data_tools/convert_tasks.py --from arc --task arc_easy --input ARC-Easy-Test.jsonl --output arc_easy.jsonl
    """

    input: tuple[str, ...]
    """Files, as their authors publish them."""
    output: str
    """File of JSON lines to write."""
    format: Annotated[str, tyro.conf.arg(name="from")]
    """Format of the files: hellaswag, arc, piqa, lambada, mmlu, or text."""
    task: str = ""
    """Name of the task in metrics. Empty: the format's."""
    shots: int = 0
    """mmlu: examples before each question, the first of the development split. 0: none, lm-eval's default."""
    overwrite: bool = False
    """Replace the output."""


Options.__doc__ = (Options.__doc__ or "").replace(
    "{formats}", "\n      ".join(f"{name:<10} {each.summary}" for name, each in FORMATS.items())
)


def main(arguments: Sequence[str]) -> None:
    """The tool. ValueError for files that are not of the format."""
    options = parse(Options, arguments, PROGRAM)
    if options.format not in FORMATS:
        raise ValueError(f"--from {options.format}: unknown format; use {', '.join(FORMATS)}")
    if options.shots < 0 or (options.shots and not FORMATS[options.format].shots):
        raise ValueError(f"--shots {options.shots} with --from {options.format}: leave it out")
    if options.task and not re.match(NAME, options.task):
        raise ValueError(f"--task {options.task!r}: names have up to {NAME_LENGTH} letters, digits and _ . : + -")
    output, lines = Path(options.output), []
    if output.exists() and not options.overwrite:
        raise ValueError(f"--output {output} exists; add --overwrite, or name another file")
    for path in options.input:
        for number, fields in read_items(options.format, Path(path), options.shots):
            fields = {"kind": fields["kind"], "task": options.task or options.format} | fields
            place = f"--input {path}, line {number}"
            try:
                item: Item = msgspec.convert(fields, Item)
            except msgspec.ValidationError as error:
                raise ValueError(f"{place}: {error}; correct it, or leave it out") from None
            lines.append(msgspec.json.encode(check_item(item, place)) + b"\n")
    if not lines:
        raise ValueError(f"--input {' '.join(options.input)}: no item; give files of a split with answers")
    write_atomically(output, b"".join(lines))
    print(f"wrote {output}: {things(len(lines), 'item')}")


def command(arguments: Sequence[str] | None = None) -> None:
    """Run as a program; `arguments` are by default those of the process."""
    run_tool(main, PROGRAM, arguments)


if __name__ == "__main__":
    command()
