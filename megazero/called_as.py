"""The name by which a program was called: `megazero train` where it is installed, or the script `pretrain_gpt.py`.

Help, errors and suggested commands are written with the names of the scripts. `in_own_words` puts the names of the
installed commands in their place, if one of those is running.
"""

import re
import sys
from pathlib import Path

# Script -> subcommand of `megazero`.
SUBCOMMANDS = {
    "pretrain_gpt.py": "train",
    "data_tools/preprocess_data.py": "preprocess",
    "data_tools/train_tokenizer.py": "tokenizer",
    "data_tools/peek.py": "peek",
    "data_tools/convert_tasks.py": "tasks",
    "scripts/generate.py": "generate",
    "scripts/checkpoint.py": "checkpoint",
    "scripts/launch.sh": "launch",
    "scripts/verify.py": "verify",
    "scripts/report.py": "report",
    "scripts/print_program.py": "program",
}
_OF_FILES = {Path(script).name: name for script, name in SUBCOMMANDS.items()}
_SCRIPT = re.compile(
    rf"(?:(?:python|bash) )?\b(?:scripts/|data_tools/)?({'|'.join(map(re.escape, _OF_FILES))})\b"
    r"|python data_tools/(\w+)\.py"
)
_OTHER_PROGRAM = re.compile(r"PROGRAM=(\S+) bash scripts/launch\.sh")


def is_installed_command() -> bool:
    """Return whether this process runs `megazero`, `python -m megazero` or an older command, `megazero-verify`."""
    called = Path(sys.argv[0])
    return called.name.partition("-")[0] == "megazero" or called.parts[-2:] == ("megazero", "__main__.py")


def program_name(script: str) -> str:
    """Return the program's name for its usage line; `script` is a key of SUBCOMMANDS, or another script."""
    subcommand = SUBCOMMANDS.get(script)
    if subcommand is None or not is_installed_command():
        return Path(script).name
    if subcommand == "train" and sys.argv[1:2] == ["plan"]:
        return "megazero plan"
    return f"megazero {subcommand}"


def in_own_words(text: str) -> str:
    """Return `text` with the commands of this installation, if an installed command runs; else unchanged."""
    if not is_installed_command():
        return text
    text = _OTHER_PROGRAM.sub(lambda found: f"megazero launch {_OF_FILES[Path(found[1]).name]}", text)
    text = _SCRIPT.sub(
        lambda found: f"megazero {_OF_FILES[found[1]]}" if found[1] else f"python -m data_tools.{found[2]}", text
    )
    text = text.replace("megazero train --plan ", "megazero plan ")
    if program_name("pretrain_gpt.py") == "megazero plan":  # which adds --plan: the user did not
        text = re.sub(r"(^|\s)--plan(?=\s)", r"\1megazero plan", text.replace("; add it, or drop --plan", "; add it"))
    return text
