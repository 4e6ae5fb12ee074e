"""The command `megazero`: its list, its subcommands' help, and the names that messages bear."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.called_as import SUBCOMMANDS, in_own_words, program_name
from megazero.console.commands import COMMANDS, run_command
from megazero.console.program_tool import program_lines
from megazero.log import log
from megazero.verify.compare import Row
from megazero.verify.verification import Proof, Verification
from tests.helpers.programs import ROOT, python_path, warm
from tests.helpers.table import for_each
from tests.unit.data_helpers import write_corpus

INSTALLED = "/usr/bin/megazero"


def test_help_lists_the_commands_from_any_folder_without_torch(tmp_path: Path) -> None:
    code = "import sys; from megazero.console.commands import run_command as r; r(['--help']); print(*sys.modules)"
    env = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    *text, modules = done.stdout.splitlines()
    assert not {"torch", "numpy", "tyro"} & {*modules.split()}, done.stderr
    listed = [found[1] for line in text if (found := re.match(r"  (\w+) +\w", line))]
    assert listed == list(COMMANDS) and {*SUBCOMMANDS.values(), "plan"} == {*COMMANDS}


@pytest.mark.second
@for_each("words", ["train --help-all", "report --help", "program --vocab-size 99"])
def test_a_command_ends_quietly_if_its_reader_has_ended(words: str) -> None:
    """`| head` ends so. The exit code is that of a process that SIGPIPE ends."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "megazero", *words.split()]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@for_each(
    ("word", "hint"),
    [("trian", "did you mean train?"), ("zzz", "`megazero --help` lists the commands"), ("--lr", "--help")],
)
def test_an_unknown_command_gets_one_sentence(capsys: pytest.CaptureFixture[str], word: str, hint: str) -> None:
    assert run_command([word]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and f"{word} is no command" in printed.err
    assert hint in printed.err


# A mistake of a user, and words of the sentence that names it.
MISTAKES = {
    "train": ("--preset none-such", "--preset none-such: no such file"),
    "plan": ("--preset tiny --world-size 2", "megazero plan needs --device-type NAME, such as h100-80gb; add it\n"),
    "launch": ("--nproc none", "--nproc 'none' is not a number"),
    "generate": ("--load none-such", "--load none-such holds no checkpoint"),
    "preprocess": ("--input none-such --output-prefix x --tokenizer byte", "--input none-such: No such file"),
    "tokenizer": ("--input none-such --output x --vocab-size 300", "--input none-such: No such file"),
    "peek": ("none-such", "no file none-such.bin"),
    "tasks": ("--from arc --input none-such --output x", "none-such: No such file"),
    "checkpoint": ("verify none-such", "none-such holds no checkpoint"),
    "verify": ("--world-size 2 --num-layers -1", "--num-layers -1: must be at least 1"),
    "report": ("none-such", "none-such/metrics.jsonl does not exist"),
    "program": ("--world-size 2 --num-layers -1", "--num-layers -1: must be at least 1"),
}


@for_each("name", list(COMMANDS))
def test_a_command_that_fails_ends_with_a_sentence_and_an_exit_code(name: str) -> None:
    """Equal ones as a subcommand and as the script that it is too, whose processes end with it."""
    words, said = MISTAKES[name]
    scripts = [each for each, subcommand in SUBCOMMANDS.items() if subcommand == name and each.endswith(".py")]
    calls = [("megazero/__main__.py", name), *((script,) for script in scripts)]
    ended = [warm(*call, *words.split()) for call in calls]
    for done in ended:
        assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
        assert done.stdout == "" and done.stderr.count("\n") == 1, done
    assert said in ended[0].stderr and len({done.returncode for done in ended}) == 1, ended


# A function of a command's work, and words with which it is reached.
WORK = {
    "train": ("megazero.command.pretrain.pretrain", ""),
    "plan": ("megazero.command.pretrain.pretrain", ""),
    "launch": ("megazero.cluster.launcher._launch", "--nproc 2"),
    "generate": ("megazero.console.generate_tool.generate_texts", "--load x"),
    "preprocess": ("data_tools.preprocess_data.main", ""),
    "tokenizer": ("data_tools.train_tokenizer.main", ""),
    "peek": ("data_tools.peek.main", ""),
    "tasks": ("data_tools.convert_tasks.main", ""),
    "checkpoint": ("megazero.console.checkpoint_tool.found_checkpoint", "show x"),
    "verify": ("megazero.verify.verification.Verification.run", "--preset tiny"),
    "report": ("megazero.observe.report.report_command.write_page", "x"),
    "program": ("megazero.console.program_tool.program_lines", ""),
}


@for_each("name", list(COMMANDS))
def test_an_interrupt_is_a_word_and_an_exit_code(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, words = WORK[name]
    calls: list[object] = []

    def interrupted(*given: object, **named: object) -> None:
        calls.append(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(target, interrupted)
    monkeypatch.setattr("megazero.cluster.launch.exit_now", sys.exit)
    try:
        code = run_command([name, *words.split()])
    except SystemExit as stop:
        code = stop.code
    assert (len(calls), code) == (1, 130) and "Traceback" not in capfd.readouterr().err


@for_each("words", ["-m megazero train", "-m megazero peek", "pretrain_gpt.py", "scripts/verify.py"])
def test_an_interpreter_without_the_packages_is_named(words: str) -> None:
    done = subprocess.run([sys.executable, "-S", *words.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert re.search(rf"needs the Python package \w+, which is not installed for {sys.executable}; ", done.stderr)


def test_text_that_a_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    """Instead of an error at the end of the work, or a line of the log that is lost."""
    code = "from megazero.log import log; from data_tools.peek import command; log.info('sûr'); command()"
    write_corpus(tmp_path / "c", [[*"où?".encode()]])
    words = [sys.executable, "-c", code, str(tmp_path / "c"), "--tokenizer", "byte"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "s\\xfbr" in done.stdout and "o\\xf9?" in done.stdout, done


@for_each("words", ["--lr 1", "--lr 1 --plan-search", "--plan_search --lr 1"])
def test_plan_is_the_flag_unless_a_search_is_asked_for(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[list[str]]()
    monkeypatch.setattr("megazero.command.pretrain.pretrain", asked.append)
    assert run_command(["plan", *words.split()]) == 0
    assert asked == [words.split() if "search" in words else ["--plan", *words.split()]]


def test_a_program_is_that_of_the_rank_named() -> None:
    """Two stages have three ranks each, with two micro-batches each: 12 samples."""
    flags = "--num-layers 4 --vocab-size 99 --pipeline-model-parallel-size 2"
    flags += " --global-batch-size 12 --micro-batch-size 2"
    first, third, fourth, last = (program_lines(flags.split(), 6, rank) for rank in (0, 2, 3, 5))
    assert first == third != fourth == last
    for block, lines in enumerate((first, first, fourth, fourth)):
        forwards = [line for line in (*first, *fourth) if line.startswith(f"Forward blocks.{block} ")]
        assert forwards == [f"Forward blocks.{block} mb {mb}" for mb in (0, 1)] and {*forwards} < {*lines}
    for rank in (-1, 6):
        with pytest.raises(ValueError, match=rf"^--rank {rank}: there are ranks 0 to 5; name one, or raise --world"):
            program_lines(flags.split(), 6, rank)


@for_each(("passed", "code"), [(True, 0), (False, 1)])
def test_a_verdict_is_an_exit_code(passed: bool, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(what="loss", difference=1.0, where="", tolerance=0.5, passed=passed)
    proof = Proof(passed=passed, words=[], tables={"steps": [row]}, first="", lost="", seconds=1.0)
    monkeypatch.setattr(Verification, "run", lambda self: proof)
    assert run_command(["verify", "--preset", "tiny"]) == code


@for_each("name", list(COMMANDS))
def test_a_commands_help_names_itself(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no script, which an installed package does not have."""
    monkeypatch.setattr(sys, "argv", [INSTALLED, name, "--help"])
    try:
        assert run_command() == 0
    except SystemExit as stop:
        assert not stop.code
    text = capsys.readouterr().out
    assert (text if name == "launch" else text.split("usage: ")[1]).lstrip().find(f"megazero {name}") >= 0
    assert text.count(f"megazero {name}") >= 2, text  # usage and an example
    assert not re.findall(r"(?:python|bash) (?!-m)\S+|pretrain_gpt|preprocess_data|launch\.sh", text)


@for_each(
    ("text", "own"),
    [
        ("python pretrain_gpt.py --preset tiny", "megazero train --preset tiny"),
        ("python pretrain_gpt.py --plan --preset tiny", "megazero plan --preset tiny"),
        ("as --tokenizer of pretrain_gpt.py.", "as --tokenizer of megazero train."),
        ("made by data_tools/preprocess_data.py, or", "made by megazero preprocess, or"),
        ("(bash scripts/launch.sh --nproc 8 ...)", "(megazero launch --nproc 8 ...)"),
        ("PROGRAM=scripts/generate.py bash scripts/launch.sh --nproc 2", "megazero launch generate --nproc 2"),
        ("python data_tools/merge_datasets.py --input a", "python -m data_tools.merge_datasets --input a"),
        ("scripts/slurm/pretrain.sbatch", "scripts/slurm/pretrain.sbatch"),
    ],
)
def test_messages_name_the_command_that_runs(text: str, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for called, wanted in (
        (INSTALLED, own),
        ("megazero/__main__.py", own),
        ("/usr/bin/megazero-verify", own),
        ("scripts/verify.py", text),
        ("/usr/lib/pytest/__main__.py", text),
    ):
        monkeypatch.setattr(sys, "argv", [called])
        assert in_own_words(text) == wanted, called


def test_a_script_keeps_its_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/verify.py"])
    assert program_name("scripts/verify.py") == "verify.py"
    log.error("python scripts/checkpoint.py list")
    monkeypatch.setattr(sys, "argv", [INSTALLED, "plan"])
    assert program_name("pretrain_gpt.py") == "megazero plan" and program_name("x/y.py") == "y.py"
    log.error("python scripts/checkpoint.py list")
    assert capsys.readouterr().err == "python scripts/checkpoint.py list\nmegazero checkpoint list\n"
