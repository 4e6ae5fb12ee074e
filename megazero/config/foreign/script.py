"""Read the launch of a training script out of a shell script: variables, arrays, continuations; nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import NamedTuple

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ASSIGNMENT = re.compile(rf"(?:export |local )?({NAME})(\+?)=(.*)", re.S)
BRANCH = re.compile(r"(if|elif|else|fi)\b\s*(.*)", re.S)
USE = re.compile(
    rf"\$(?:\{{({NAME})(?:\[[@*]\])?(?::?([-=?])([^{{}}]*))?\}}|({NAME})|\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)|([0-9@*]))"
)
POSITIONAL = re.compile(r"\$(?:\{([0-9])(?::?-([^{}]*))?\}|([0-9]))")
ARITHMETIC = re.compile(r"[0-9+\-*/() ]+")
LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed", "srun", "accelerate")
QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`|\$\(\(.*?\)\)|\$\([^)]*\)", re.S)
PROGRAM = re.compile(r"(?:^|/)[\w.-]+\.py$")
# The launcher's arguments -> how many words follow; those that are not here and have no = take one.
SWITCHES = {"--standalone", "--no-python", "--use-env", "--use_env", "-m", "-u", "-l", "--module", "--exclusive"}
RANKS = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num-gpus", "--num_processes")
NODES = ("--nnodes", "--num_nodes", "--num-nodes", "--num_machines")


class Launch(NamedTuple):
    """A command that starts a training program.

    Attributes:
        program: the Python file.
        words: what the program is given.
        ranks: processes of a node; empty if the launcher is not told.
        nodes: nodes; empty if the launcher is not told.
        unknown: variables that the script takes from elsewhere; they stay in `words` as they are.
    """

    program: str
    words: list[str]
    ranks: str
    nodes: str
    unknown: list[str]


def statements(text: str) -> Iterator[str]:
    """Yield the statements of a script: comments out, continued lines joined, arrays and quoted text whole."""
    held = ""
    for line in _without_documents(text.replace("\\\n", " ").splitlines()):
        held = f"{held}\n{line}" if held else line
        if _open(held):
            continue
        yield _uncommented(held).strip()
        held = ""
    if held.strip():
        yield _uncommented(held).strip()


def _without_documents(lines: list[str]) -> Iterator[str]:
    """Leave out here-documents, which are files of other languages."""
    end = ""
    for line in lines:
        if end:
            end = "" if line.strip() == end else end
            continue
        found = re.search(r"<<-?\s*['\"]?(\w+)['\"]?", line)
        end = found[1] if found else ""
        yield line if not found else ""


def _uncommented(text: str) -> str:
    return re.sub(r"(?m)(^|\s)#.*$", "", text)


def _open(text: str) -> bool:
    """Return whether a quotation or an array goes on behind the end of the text."""
    bare = _uncommented(text)
    if len(re.findall(r'(?<!\\)"', bare)) % 2:
        return True
    outside = re.sub(r'"[^"]*"', '""', bare)
    if len(re.findall(r"'", outside)) % 2:
        return True
    array = re.search(rf"(?:^|\s){NAME}\+?=\(", outside)
    if array is None:
        return False
    inside = outside[array.end() :]
    return inside.count(")") < inside.count("(") + 1


def find_launch(text: str, environment: Mapping[str, str] | None = None) -> Launch:
    """Find the training program's command in a shell script, with what the script's variables stand for.

    Comparisons of known values decide a branch; where they cannot, all branches are read, and the last assignment of a
    variable before the command counts.

    Raises:
        ValueError: no command of the script starts a Python file with flags.
    """
    values, found = dict(environment or {}), list[str]()
    taken: list[bool | None] = []  # of each `if` around: whether this branch is; None: not known
    for statement in statements(text):
        if branch := BRANCH.match(statement):
            _enter(branch[1], branch[2] or "", taken, values)
            continue
        if False in taken:
            continue
        assigned = ASSIGNMENT.fullmatch(statement)
        if assigned and (assigned[3].startswith("(") or not re.search(r"\s", QUOTED.sub("", assigned[3].strip(" ;")))):
            values[assigned[1]] = _assigned(assigned[3], values, values.get(assigned[1], "") if assigned[2] else "")
            continue
        words = _words(_substitute(statement, values))
        if any(re.search(r"\.py(\s|$)", word) for word in words) and " --" in statement + " ".join(words):
            found = words
    if not found:
        commands = (value for value in reversed(values.values()) if re.search(r"\.py\s.*--", value, re.S))
        found = _words(next(commands, ""))
    if not found:
        raise ValueError("no command here starts a Python program with flags; give the script that calls torchrun")
    return _launch(found)


def _enter(word: str, condition: str, taken: list[bool | None], values: Mapping[str, str]) -> None:
    """Follow `if`, `elif`, `else` and `fi`."""
    if word == "if":
        taken.append(_holds(condition, values))
    elif word == "fi" and taken:
        taken.pop()
    elif taken and word == "else":
        taken[-1] = None if taken[-1] is None else not taken[-1]
    elif taken and word == "elif" and taken[-1] is not None:
        taken[-1] = not taken[-1] and _holds(condition, values)


def _holds(condition: str, values: Mapping[str, str]) -> bool | None:
    """Return whether comparisons joined by || or by && hold; None if that cannot be told."""
    joined = any if "||" in condition else all
    parts = re.split(r"\|\||&&", condition.split("; then")[0].removesuffix(";").removesuffix("then"))
    found = [_compare(_words(_substitute(part.strip(" ;[]"), values))) for part in parts]
    return None if None in found else joined(map(bool, found))


def _compare(words: list[str]) -> bool | None:
    if any("$" in word or "`" in word for word in words):
        return None
    if len(words) <= 2 and words[:1] in (["-z"], ["-n"]):
        return (words[0] == "-z") == (len(words) == 1 or not words[1])
    if len(words) != 3:
        return None
    left, sign, right = words
    if sign in ("=", "==", "!="):
        return (left == right) != (sign == "!=")
    numbers = {"-eq": (0,), "-ne": (-1, 1), "-gt": (1,), "-lt": (-1,), "-ge": (0, 1), "-le": (-1, 0)}
    if sign not in numbers or not (left.lstrip("-").isdecimal() and right.lstrip("-").isdecimal()):
        return None
    return (int(left) > int(right)) - (int(left) < int(right)) in numbers[sign]


def _assigned(value: str, values: Mapping[str, str], before: str) -> str:
    value = value.strip().removesuffix(";")
    if value.startswith("("):
        words = _words(_substitute(value.strip()[1:-1], values))
        return " ".join(filter(None, (before, *(word if " " in word else shlex.quote(word) for word in words))))
    single = value.startswith("'")
    text = value if single else _substitute(value, values)
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    return before + text


def _substitute(text: str, values: Mapping[str, str]) -> str:
    """Put in what variables stand for, and sums of numbers; what is not known stays."""

    def replace(match: re.Match[str]) -> str:
        name = match[1] or match[4]
        if match[5] is not None:
            return _sum(match[5], values) or match[0]
        if name in values:
            return values[name]
        return match[3] if name and match[2] in ("-", "=") and match[3] else match[0]

    for _ in range(8):
        again = USE.sub(replace, text)
        if again == text:
            break
        text = again
    return POSITIONAL.sub(lambda m: values.get(m[1] or m[3]) or (m[2] or "").strip("\"'") or f"${m[1] or m[3]}", text)


def _sum(text: str, values: Mapping[str, str]) -> str:
    """Return a sum of whole numbers; empty if it has anything else."""
    bare = re.sub(r"[$\s{}]", "", text)
    bare = re.sub(NAME, lambda m: values.get(m[0], m[0]), bare).replace("_", "")
    if not ARITHMETIC.fullmatch(bare) or "**" in bare or len(bare) > 200:
        return ""
    import ast

    return str(_evaluate(ast.parse(bare.replace("//", "/").replace("/", "//"), mode="eval").body))


def _evaluate(node: object) -> int:
    import ast
    import operator

    signs = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
    if isinstance(node, ast.Constant):
        return int(node.value)  # type: ignore[arg-type]
    assert isinstance(node, ast.BinOp), node
    return int(signs[type(node.op)](_evaluate(node.left), _evaluate(node.right)))


def _words(text: str) -> list[str]:
    text = re.split(r"\s(?:\d?&?>+&?|\|&?|2>&1)\s?", text)[0]
    try:
        return shlex.split(text.replace("\n", " "))
    except ValueError:
        return text.split()


def _launch(words: list[str]) -> Launch:
    if len(words) > 1 and words[0] in ("eval", "exec", "bash", "sh"):  # a command in a string
        words = [part for word in words[1:] for part in (_words(word) if " " in word else [word])]
    words = [part for word in words for part in (_words(word) if " " in word and ".py" in word else [word])]
    at = next(place for place, word in enumerate(words) if PROGRAM.search(word))
    before, after = words[:at], words[at + 1 :]
    given = dict(zip(before, [*before[1:], ""], strict=True)) | dict(w.split("=", 1) for w in before if "=" in w)
    after = [part for word in after for part in (word.split() if word.startswith("--") and " " in word else [word])]

    def of(names: tuple[str, ...]) -> str:
        return next((given[name] for name in names if name in given), "")

    after = [word for word in after if word not in ("$@", "${@:2}", "$*")]
    unknown = dict.fromkeys(match for word in after for match in re.findall(r"\$\{?\w+\}?|`[^`]*`|\$\([^)]*\)", word))
    return Launch(words[at], after, of(RANKS), of(NODES), list(unknown))
