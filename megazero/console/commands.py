"""The command `megazero`: its subcommands, each of which imports its modules when it is called."""

import sys
from collections.abc import Callable
from typing import NamedTuple

from megazero.units import did_you_mean

Words = list[str]


class Subcommand(NamedTuple):
    """`run` takes the words behind the subcommand, and returns the exit code or None; or it ends the process."""

    summary: str
    run: Callable[[Words], int | None]


def _train(words: Words) -> None:
    from megazero.command.pretrain import run_pretrain

    run_pretrain(words)


def _plan(words: Words) -> None:
    searches = "--plan-search" in (word.replace("_", "-") for word in words)
    _train(words if searches else ["--plan", *words])


def _launch(words: Words) -> int:
    from megazero.cluster.launcher import launch_ranks_here

    program = words[0] if words[:1] in (["train"], ["generate"]) else ""
    return launch_ranks_here(words[bool(program) :], ["-m", "megazero", program or "train"])


def _preprocess(words: Words) -> None:
    from data_tools.preprocess_data import command

    command(words)


def _tokenizer(words: Words) -> None:
    from data_tools.train_tokenizer import command

    command(words)


def _peek(words: Words) -> None:
    from data_tools.peek import command

    command(words)


def _tasks(words: Words) -> None:
    from data_tools.convert_tasks import command

    command(words)


def _generate(words: Words) -> None:
    from megazero.console.generate_tool import run_generate

    run_generate(words)


def _checkpoint(words: Words) -> int:
    from megazero.console.checkpoint_tool import run_checkpoint_tool

    return run_checkpoint_tool(words)


def _verify(words: Words) -> int:
    from megazero.verify.command import main

    return main(words)


def _report(words: Words) -> int:
    from megazero.observe.report.report_command import write_reports

    return write_reports(words)


def _program(words: Words) -> int:
    from megazero.console.program_tool import print_program

    return print_program(words)


COMMANDS = {
    "train": Subcommand("train a model, alone or as a rank of torchrun or srun", _train),
    "preprocess": Subcommand("turn text into a corpus of tokens", _preprocess),
    "tokenizer": Subcommand("train a tokenizer on text", _tokenizer),
    "peek": Subcommand("show a corpus and its documents", _peek),
    "tasks": Subcommand("convert published data sets to items for --tasks", _tasks),
    "generate": Subcommand("generate text from a checkpoint", _generate),
    "checkpoint": Subcommand("list, verify, show, export, import, upcycle or merge checkpoints", _checkpoint),
    "launch": Subcommand("train with several processes on this machine", _launch),
    "plan": Subcommand("predict memory, traffic and speed of a run without its devices", _plan),
    "verify": Subcommand("prove that a layout trains the same model as one process", _verify),
    "report": Subcommand("write report.html of a run", _report),
    "program": Subcommand("print the operations of a training step", _program),
}


def run_command(words: Words | None = None) -> int:
    """Run a command line, by default that of the process, and return the exit code."""
    name, *rest = (sys.argv[1:] if words is None else words) or ["--help"]
    if name in COMMANDS:
        try:
            return COMMANDS[name].run(rest) or 0
        except ModuleNotFoundError as error:  # of an import; the commands themselves report a package of an extra
            from megazero.optional import missing_package

            print(f"megazero {name} {missing_package(error)}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"megazero {name}: interrupted", file=sys.stderr)
            return 130
    if name in ("--help", "-h", "help"):
        print("usage: megazero COMMAND [FLAGS]\n\nPretrain language models: one model, any layout.\n")
        print("\n".join(f"  {name:<12}{command.summary}" for name, command in COMMANDS.items()))
        print("\n`megazero COMMAND --help` explains a command and its flags.")
        return 0
    hint = did_you_mean(name, COMMANDS, cutoff=0.5) or "`megazero --help` lists the commands"
    print(f"megazero: {name} is no command; {hint}", file=sys.stderr)
    return 2
