"""The commands that the documents show: their programs exist, and their flags are read without an error."""

import contextlib
import importlib
import io
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest.__main__
import tyro
import yaml

from megazero.called_as import SUBCOMMANDS
from megazero.console import checkpoint_tool
from megazero.console.generate_tool import GenerateOptions
from megazero.console.program_tool import program_options
from megazero.flags.cli import read
from megazero.flags.flag_names import flags
from megazero.observe.report.report_command import ReportOptions
from megazero.verify.command import own_options
from tests.helpers.programs import ROOT, warm
from tests.helpers.table import for_each

pytestmark = pytest.mark.second


# The log and the decisions quote commands of earlier versions.
DOCUMENTS = [ROOT / "README.md", ROOT / "data_tools" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += sorted((ROOT / "docs" / "results").glob("*.md"))
PRETRAIN, LAUNCH = "pretrain_gpt.py", "scripts/launch.sh"
SUBMITTED = {
    "scripts/slurm/pretrain.sbatch": PRETRAIN,
    "scripts/slurm/preprocess.sbatch": "data_tools/preprocess_data.py",
}
OPEN = {"...", "FLAGS"}  # the reader adds flags of his own here
STARTS = "python|bash|sbatch|megazero|torchrun"
SCRIPT_OF = {f"megazero {name}": script for script, name in SUBCOMMANDS.items()}
OF_LAUNCHER = ("--nproc", "--rdzv-endpoint", "--wait")  # each with a value; --elastic is the program's too
OF_RUNS = {
    "scripts/verify.py": own_options,
    "scripts/print_program.py": program_options,
}  # with flags of runs


# Options of scripts that only call a subcommand.
OPTIONS = {
    "scripts/checkpoint.py": checkpoint_tool.COMMANDS,
    "scripts/generate.py": GenerateOptions,
    "scripts/report.py": ReportOptions,
}


def commands(text: str) -> Iterator[str]:
    """The command lines of ```bash blocks, and of `code` that begins as one; continued lines are joined."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        block = re.sub(r"^(.*) <<'(\w+)'\n.*?^\2$", r"\1", block, flags=re.DOTALL | re.MULTILINE)  # no here-documents
        yield from filter(str.strip, block.replace("\\\n", " ").splitlines())
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from (shlex.join(command) for each in yaml.safe_load_all(block) for command in containers(each))
    for span in re.findall(
        rf"`((?:{STARTS}) [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    ):
        yield " ".join(span.split())


def containers(resource: dict[str, Any]) -> list[list[str]]:
    """The commands of a Kubernetes job's containers."""
    spec = resource["spec"].get("template", {}).get("spec", {})
    return [container["command"] for container in spec.get("containers", [])]


def simple_commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a line: comments left out, pipes and lists divided, redirections dropped."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, words = True, []
    for word in [*lexer, ";"]:
        if set(word) <= set("|&;<>()"):
            if words:
                yield words
            words = ["(file)"] if set(word) <= set("<>") else []
        else:
            words.append(word)


def fault(line: str) -> str:
    """Return the fault of a command line, or ""."""
    return "; ".join(filter(None, map(_fault_of_command, simple_commands(line))))


def _fault_of_command(words: list[str]) -> str:
    program = PRETRAIN
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        program = words[0].removeprefix("PROGRAM=") if words[0].startswith("PROGRAM=") else program
        words = words[1:]
    first, *rest = words or [""]
    if first == "torchrun":
        while rest and rest[0] != "-m" and not rest[0].endswith(".py"):
            rest = rest[1:]
        first, rest = ("megazero", rest[2:]) if rest[:2] == ["-m", "megazero"] else ("python", rest)
    if first == "megazero":
        name, *rest = rest
        if name == "plan":
            name, rest = "train", rest if "--plan-search" in rest else ["--plan", *rest]
        if f"megazero {name}" not in SCRIPT_OF:
            return f"megazero {name}: no such command"
        if not rest:  # it is mentioned
            return ""
        if name == "launch" and rest[0] in ("train", "generate"):
            program, rest = SCRIPT_OF[f"megazero {rest[0]}"], rest[1:]
        first, rest = "python", [SCRIPT_OF[f"megazero {name}"], *rest]
    if first == "sbatch":
        while rest and rest[0].startswith("-"):
            rest = rest[1:]
    elif first == "python" and rest[:1] == ["-m"]:
        if rest[1] in ("pip", "zipfile"):
            return ""
        file = rest[1].replace(".", "/")
        rest = [
            next((f for f in (f"{file}.py", f"{file}/__main__.py") if (ROOT / f).is_file()), f"{file}.py"),
            *rest[2:],
        ]
    elif first not in ("python", "bash"):
        return ""
    if not rest or not (ROOT / rest[0]).is_file():
        return f"{' '.join(rest[:1])}: no such file"
    script, *rest = rest
    if script == LAUNCH:
        own = [at for at, word in enumerate(rest) if word in OF_LAUNCHER]
        return _fault_of_program(program, [word for at, word in enumerate(rest) if not {at, at - 1} & {*own}])
    return _fault_of_program(SUBMITTED.get(script, script), rest)


def _fault_of_program(program: str, words: list[str]) -> str:
    if not program.endswith(".py") or "--help" in words:
        return ""
    if program in OF_RUNS:
        numbers = ["1" if word in ("N", "R") else word for word in words]
        program, words = PRETRAIN, OF_RUNS[program](numbers)[1]
    unfinished = any(word in OPEN for word in words)
    words = [word for word in words if word not in OPEN]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            if program == PRETRAIN:
                read(_with_values(words), find_model=lambda hf_config, loads: None)
            elif unfinished or not _parse(program, words):
                source = (ROOT / program).read_text()
                named = {word.partition("=")[0] for word in words if word.startswith("--")}
                unknown = [flag for flag in named if not _is_in(source, flag)]
                return f"{program} has no {', '.join(sorted(unknown))}" if unknown else ""
        except (SystemExit, ValueError) as error:
            return f"{program} {shlex.join(words)}: {error} {printed.getvalue()}"
    return ""


def _with_values(words: list[str]) -> list[str]:
    """Put values where the text has names: numbers for N, and a preset for the config.toml of a run."""
    found = list(words)
    for at, (flag, value) in enumerate(itertools.pairwise(words), 1):
        if flag == "--preset" and value.endswith("/config.toml"):
            found[at] = "tiny"
        elif value.isupper() and flag.removeprefix("--") in flags() and flags()[flag.removeprefix("--")].bounds:
            found[at] = "1"
    return found


def _parse(program: str, words: list[str]) -> bool:
    """Parse by the program's own options. False if it has none that can be had without running it."""
    if program.startswith("benchmarks/"):
        return False
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    options = OPTIONS.get(program) or getattr(module, "Options", None)
    if options is None:
        return False
    if isinstance(options, dict):
        first, *others = options
        for other in others:
            first = first | other
        options = first
    tyro.cli(options, args=words)
    return True


def _is_in(source: str, flag: str) -> bool:
    """Return whether a program's source has a flag: as an argument, as a field of its options, or among ours."""
    name = flag.removeprefix("--").replace("-", "_")
    field = rf"^    {name.removeprefix('no_')}: "
    argument = rf"{flag}(?![\w-])"
    return bool(re.search(f"{field}|{argument}", source, re.MULTILINE)) or (
        "config.cli" in source and flag[2:] in flags()
    )


@for_each("document", DOCUMENTS)
def test_the_commands_of_a_document_are_read(document: Path) -> None:
    faults = {line: found for line in commands(document.read_text()) if (found := fault(line))}
    assert not faults


def test_the_commands_are_found() -> None:
    found = list(commands((ROOT / "README.md").read_text()))
    for part in (
        "megazero tokenizer",
        "megazero launch --nproc 2",
        "--eval-only",
        "export --to hf",
        "sbatch ",
        "megazero verify",
    ):
        assert any(part in line for line in found), part
    found = list(commands((ROOT / "docs" / "containers.md").read_text()))
    for part in ("megazero launch --elastic 1:2 --rdzv-endpoint train-0.train:29400", "-m megazero train", "SETUP="):
        assert any(part in line for line in found), part


@for_each(
    ("line", "said"),
    [
        ("python pretrain_gpt.py --preset tiny --num-layerz 4", "num-layerz"),
        ("python pretrain_gpt.py --preset tiniest", "--preset tiniest"),
        ("python pretrain_gpt.py --zero-stage 4 ...  # an unfinished one", "zero-stage"),
        ("bash scripts/launch.sh --nproc 2 --preset tiny --tensor-paralel 2", "tensor-paralel"),
        ("PROGRAM=scripts/generate.py bash scripts/launch.sh --nproc 2 --load a --promt x", "promt"),
        ("sbatch --nodes=2 scripts/slurm/pretrain.sbatch --preset tiny --sav a", "--sav"),
        ("zstdcat a | python data_tools/preprocess_data.py --imput - --output-prefix a --tokenizer byte", "imput"),
        ("python scripts/checkpoint.py exports runs/a --output b", "exports"),
        ("python data_tools/merge_datasets.py --inputs ...", "--inputs"),
        ("python benchmarks/zero.py --stages 3 --round 8", "benchmarks/zero.py has no --round"),
        ("megazero trian --preset tiny", "no such command"),
        ("megazero train --num-layerz 4", "num-layerz"),
        ("megazero launch generate --nproc 2 --load a --promt x", "promt"),
        ("torchrun --nnodes 2 --rdzv-endpoint=node0:1 -m megazero train --num-layerz 4", "num-layerz"),
        ("megazero launch --elastic 2:2 --rdzv-endpoint node0:29400 --save a --num-layerz 4", "num-layerz"),
        ("python scripts/gone.py --load a", "scripts/gone.py: no such file"),
        ("python -m megazero.gone", "megazero/gone.py: no such file"),
    ],
)
def test_a_wrong_command_is_found(line: str, said: str) -> None:
    assert said in fault(line)


# a name that a reader of the guide adds -> one that exists
ADDED = {"gpipe-reversed": "zero-bubble-v"}
COMMAND = re.compile(r"python -m pytest ((?:\\\n|[^\n`])+)")
PYTEST = sorted({line.replace("\\\n", "") for path in DOCUMENTS for line in COMMAND.findall(path.read_text())})


@pytest.mark.long
@for_each("line", PYTEST)
def test_a_pytest_command_selects_what_it_names(line: str) -> None:
    """In each of its files a test; with -k, tests with this name alone."""
    words = [ADDED.get(word, word) for word in shlex.split(line)]
    done = warm(pytest.__main__.__file__, "--collect-only", "--color=no", *words, "-n", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^((?:benchmarks/)?tests/\S+\.py)::(.*)$", done.stdout, re.MULTILINE)
    assert {file for file, _ in found} == {word for word in words if word.endswith(".py")}
    if "-k" in words:
        names = words[words.index("-k") + 1].split(" or ")
        assert all(any(name in test for name in names) for _, test in found), found


def test_the_pytest_commands_are_found() -> None:
    assert len(PYTEST) >= 4 and any("-k olmo2" in line for line in PYTEST)
