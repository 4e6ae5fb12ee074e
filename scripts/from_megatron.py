#!/usr/bin/env python3
"""Print our command line for a shell script that trains with Megatron-LM, DeepSpeed or Hugging Face's Trainer.

    python scripts/from_megatron.py run.sh [NAME=VALUE ...]

The script is read, not run. NAME=VALUE stands for what it takes from its environment; 1=PATH for its first argument.
The command goes to stdout, and a note for each flag that is not carried over to stderr. Exit code 2: none is there.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megazero.config.cli import flags, names_of, options
from megazero.config.foreign.script import Launch, find_launch
from megazero.config.foreign.table import HUGGING_FACE
from megazero.config.foreign.translate import Translated, UnknownFlags, refusals, split_items, translate

# Megatron-LM's defaults that are others here, for flags that a script leaves to them.
MEGATRON_DEFAULTS = {
    "attention-dropout": "0.1",
    "hidden-dropout": "0.1",
    "lr-decay-style": "linear",
    "eval-interval": "1000",
    "eval-iters": "100",
    "log-interval": "100",
    "precision": "fp32",  # not bf16, as by default on a GPU here
    "lr-warmup-iters": "0",  # not 1 %, likewise
}

WIDTH = 100


def convert(text: str, environment: dict[str, str]) -> tuple[str, list[str]]:
    """Return our command for a script's, and what the reader must know of it.

    Raises:
        ValueError: the script has no such command, or a flag that nothing knows.
    """
    launch = find_launch(text, environment)
    notes = [f"{name} is not set in the script: put its value in, or give NAME=VALUE" for name in launch.unknown]
    known = launch.ranks.isdecimal() and (launch.nodes or "1").isdecimal()
    ranks = int(launch.ranks) * int(launch.nodes or "1") if known else 1
    try:
        done = translate(launch.words, options(), count_ranks=lambda: ranks)
    except UnknownFlags as error:
        raise ValueError(str(error)) from None
    notes += [f"not carried over: {line}" for line in refusals(done.answers).splitlines()]
    notes += done.notes
    args = done.args + defaults(done)
    return f"{launcher(launch)} {written(args)}", notes


def defaults(done: Translated) -> list[str]:
    """Return Megatron-LM's defaults for what its script leaves out; none for Hugging Face's."""
    if any(answer.entry.system == HUGGING_FACE for answer in done.answers):
        return []
    given = names_of(done.args)
    return [word for name, value in MEGATRON_DEFAULTS.items() if name not in given for word in (f"--{name}", value)]


def launcher(launch: Launch) -> str:
    """Return how the same number of ranks is started here."""
    if launch.nodes not in ("", "1"):
        each = launch.ranks or "8"
        nodes = f"--nodes={launch.nodes} --ntasks-per-node={each} --gpus-per-node={each}"
        return f"sbatch {nodes} scripts/slurm/pretrain.sbatch"
    if launch.ranks not in ("", "1"):
        return f"bash scripts/launch.sh --nproc {launch.ranks}"
    return "python pretrain_gpt.py"


def written(args: list[str]) -> str:
    """Write the flags of a command, the last use of each; a line has one group of flags. Variables stay as they are."""
    order = {name: at for at, name in enumerate(flags())}
    last = {item.name: item.words() for item in split_items(args)}
    positive = {name: name if name in order else name.removeprefix("no-") for name in last}
    lines, group = list[str](), ""
    for name in sorted(last, key=lambda name: order[positive[name]]):
        owner, words = flags()[positive[name]][0], last[name]
        piece = " ".join(word if re.search(r"\$\{?\w", word) else shlex.quote(word) for word in words)
        if lines and owner == group and len(lines[-1]) + len(piece) < WIDTH:
            lines[-1] += f" {piece}"
        else:
            lines.append(piece)
        group = owner
    return " \\\n    ".join(["", *lines]).lstrip()


def main(arguments: list[str]) -> None:
    pairs = [word.split("=", 1) for word in arguments if re.fullmatch(r"\w+=.*", word, re.S)]
    files = [word for word in arguments if not re.fullmatch(r"\w+=.*", word, re.S)]
    if len(files) != 1 or files[0].startswith("-"):
        print(__doc__)
        raise SystemExit(0 if files in (["--help"], ["-h"]) else 2)
    try:
        command, notes = convert(Path(files[0]).read_text(encoding="utf-8"), dict(pairs))
    except (OSError, ValueError) as error:
        print(f"from_megatron.py: {files[0]}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(command)
    for note in notes:
        print(f"# {note}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
