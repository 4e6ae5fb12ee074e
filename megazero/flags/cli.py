"""The command line: flags over those of a preset, over the defaults of an architecture, over all other defaults.

Note [A config.json among the flags]
The fields of a Hugging Face config.json are flags too: all of a model's, and --tokenizer. If the command line names the
file, by --hf-config or as the folder of --load, they stand above the preset's, which may describe another model. If
only the preset names it, it is the config.toml of a run, whose values stand above, as they were when the run began.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from megazero.called_as import in_own_words, program_name
from megazero.families import FAMILIES
from megazero.flags.config import Config
from megazero.flags.flag_names import LAYOUT_FLAGS, flags, to_toml, toml_value, value_of
from megazero.flags.foreign.other_defaults import left_out
from megazero.flags.foreign.translate import OWN_WORDS, refusals, split_items, translate
from megazero.flags.giving_way import give_way, without_layout
from megazero.flags.help import show_normal, until_reader_ends, with_whole_lines
from megazero.flags.implied import branch, count_iterations
from megazero.flags.limit_checks import check_text
from megazero.flags.presets import Preset, read_preset
from megazero.flags.recipe import RECIPE_FLAGS
from megazero.flags.stack import COMMAND_LINE, OptionLayer, Stack, Standing
from megazero.flags.validate import check_values, plans
from megazero.log import log

SCRIPT = "pretrain_gpt.py"
Own = TypeVar("Own")


class ModelFlags(NamedTuple):
    """A model that a config.json of Hugging Face describes.

    Attributes:
        source: config.json or its folder, as it was named.
        values: of all flags of the model, by their names without dashes.
        tokenizer: the --tokenizer next to it; empty if there is none.
        notes: lines to report.
    """

    source: str
    values: dict[str, Any]
    tokenizer: str
    notes: list[str]


# Finds the model of a config.json by the value of --hf-config ("": none) and the values of --load, the last one last.
FindModel = Callable[[str, list[str]], ModelFlags | None]


def _no_model(hf_config: str, loads: list[str]) -> None:
    if hf_config:
        raise ValueError(f"--hf-config {hf_config}: this program does not read it; give the model's flags")


class Command(NamedTuple):
    """A command line, read.

    Attributes:
        stack: of the values of all flags, not yet resolved.
        args: the command line with foreign flags translated, without the flags of the preset.
        notes: lines that report translated foreign flags, accepted ones without effect, and ignored retired ones.
        foreign: flags of other systems, and keys of a DeepSpeed file, in kebab-case.
    """

    stack: Stack
    args: list[str]
    notes: list[str]
    foreign: frozenset[str] = frozenset()

    @property
    def config(self) -> Config:
        """Not yet resolved."""
        return self.stack.config

    @property
    def given(self) -> frozenset[str]:
        """Names of the flags, without dashes, that the command line, its preset or a config.json sets."""
        return self.stack.given

    @property
    def dropped(self) -> frozenset[str]:
        """Flags of the preset that do not count, because --layout auto chooses them."""
        return self.stack.undone_by("--layout auto")

    def left_out(self, config: Config) -> str:
        """Return a line for flags that are not given and have other values in other systems; may be empty.

        config: with the defaults of the device.
        """
        return left_out(self.foreign, config, self.given)

    def to_toml(self, resolved: Config) -> str:
        """Format the given flags as a preset of the same run, and derived values as comments."""
        asked = self.stack.asked.config
        text = to_toml(asked, self.given)
        if asked.hf_config:
            text = f"# The model is that of config.json in {toml_value(asked.hf_config)}.\n{text}"
        derived = [
            f"# {name} = {toml_value(value_of(resolved, name))}\n"
            for name in flags()
            if value_of(asked, name) != value_of(resolved, name)
        ]
        if derived:
            text += "\n# Derived from these for this run; a --preset does not fix it. plan.txt has all options.\n"
        return text + "".join(derived)


def parse(argv: list[str], find_model: FindModel = _no_model) -> Config:
    """Return the configuration of a command line. Raises as `read`."""
    return read(argv, find_model=find_model).config


def read(argv: list[str], count_ranks: Callable[[], int] = lambda: 1, find_model: FindModel = _no_model) -> Command:
    """Read a command line, in which flags of Megatron-LM, DeepSpeed and Hugging Face may be mixed with ours.

    Args:
        count_ranks: returns the number of ranks of the run. Called only if a foreign flag depends on it, such as
            --gradient_accumulation_steps.
        find_model: reads --hf-config; see Note [A config.json among the flags].

    Raises:
        ValueError: a foreign flag cannot be translated; or the preset is unknown, or one of its keys or values is;
            or a config.json cannot be read.
        SystemExit: --help, --help-all, or an unknown flag; the message is printed.
    """
    import tyro

    if "--help" in argv or "-h" in argv:
        with until_reader_ends():
            show_normal(program_name(SCRIPT), bool({"--plan", "--plan-search"} & {*argv}))
    argv = ["--help" if word == "--help-all" else word for word in argv]
    name = _last_value(argv, "preset")
    check_text("preset", name, is_path=True)
    preset = read_preset(name) if name else Preset({}, [])
    translated = translate(argv, preset.values, count_ranks)
    refused = refusals(translated.answers)
    if refused:
        refused = "\n".join([refused, *_further_faults(translated.args, refused, count_ranks, find_model)])
    if any(answer.unknown for answer in translated.answers):
        log.error(refused)
        raise SystemExit(2)
    if refused:
        raise ValueError(refused)
    args, notes = translated.args, [*preset.notes, *translated.notes]
    found = find_model(*_sources(args, preset.values))
    notes += found.notes if found else []
    layers, name_source = _layers(preset.values, found, args), f"--preset {name}"
    defaults = Stack(layers).config
    if "--help" in args:
        defaults = with_whole_lines(defaults)
    program, omit = program_name(SCRIPT), (tyro.conf.OmitArgPrefixes,)
    with until_reader_ends():
        try:
            config = tyro.cli(type(defaults), default=defaults, args=args, prog=program, config=omit)
        except SystemExit as stop:
            if stop.code and notes:  # the message names the translation of a foreign flag
                log.error("\n".join(notes))
            raise
    typed = names_of(args)
    words = {each: value_of(config, each) for each in (*typed, "preset", "hf-config")}
    stack, lines = Stack((*layers, OptionLayer(COMMAND_LINE, words))), list[str]()
    if (model := stack.config.model).activation == "auto":
        usual = {"activation": FAMILIES[model.architecture].traits["activation"]}
        stack = stack.over(stack.sources["activation"].source, usual)
    if config.parallel.elastic and "layout" not in stack.given:
        stack = stack.over("--elastic", {"layout": "auto"})
    if stack.config.parallel.layout == "auto" and {"layout", "elastic"} & typed:
        stack, lost = stack.freed("--layout auto", LAYOUT_FLAGS)
        if lost:
            lines.append(f"--layout auto chooses the layout, without {lost} of {name_source}; name a flag to keep it")
    if config.training.recipe == "auto" and "recipe" in typed:
        stack, lost = stack.freed("--recipe auto", RECIPE_FLAGS)
        if lost:
            lines.append(f"--recipe auto chooses the run, without {lost} of {name_source}; name a flag to keep it")
    stack, branched = branch(stack, typed)
    ranks = functools.cache(lambda: _num_ranks(config, count_ranks))
    stack, counted = count_iterations(stack, typed, ranks)
    lines += [branched, counted]
    if config.evaluation.eval_only:
        stack, kept = without_layout(stack, name_source, ranks())
        lines.append(kept)
    stack, changes = give_way(stack, name_source, typed)
    return Command(stack, args, notes=[*notes, *filter(None, lines), *changes], foreign=translated.foreign)


def _further_faults(args: list[str], refused: str, count_ranks: Callable[[], int], find_model: FindModel) -> list[str]:
    """Return the faults of the words that are not refused, so that one start shows all.

    Left out are those that name a flag of `refused`: the flag that was meant may be all that is missing.
    """
    try:
        check_values(read(args, count_ranks, find_model).config)
    except ValueError as error:
        named = {*re.findall(r"--[a-z][\w-]*", refused)}
        return [line for line in str(error).splitlines() if not named & {*re.findall(r"--[a-z][\w-]*", line)}]
    return []


def _num_ranks(config: Config, count_ranks: Callable[[], int]) -> int:
    """Return the ranks of a prediction, of a rehearsal, or those that were started."""
    rehearsed = config.plan.rehearse.partition(":")[0]
    if plans(config.plan):
        return config.plan.world_size or 1
    return int(rehearsed) if rehearsed.isdecimal() else count_ranks()


def _sources(args: list[str], preset: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return --hf-config, and every --load that is given, the preset's first."""
    hf_config, loads = _last_value(args, "hf-config"), _values(args, "load")
    check_text("hf-config", hf_config, is_path=True)
    return hf_config, [load for load in (preset.get("load", ""), *loads) if load]


def _layers(preset: Mapping[str, Any], found: ModelFlags | None, args: list[str]) -> tuple[OptionLayer, ...]:
    """Return the layers below the command line. See Note [A config.json among the flags]."""
    of_preset, layers = OptionLayer(f"--preset {_last_value(args, 'preset')}", preset), list[OptionLayer]()
    if found:
        of_model = OptionLayer(f"the model of {found.source}", found.values)
        if found.tokenizer:
            layers.append(OptionLayer(f"the tokenizer of {found.source}", {"tokenizer": found.tokenizer}))
        named = found.source in (_last_value(args, "hf-config"), *_values(args, "load"))
        layers += [of_preset, of_model] if named else [of_model, of_preset]
        layers.append(OptionLayer(of_model.source, {"hf-config": found.source}))
    else:
        layers.append(of_preset)
    asked = _last_value(args, "architecture") or Stack(tuple(layers)).config.model.architecture
    defaults = FAMILIES[asked].defaults if asked in FAMILIES else {}  # the parser refuses another name
    return (OptionLayer(f"--architecture {asked}", defaults, Standing.IMPLIED), *layers)


def names_of(args: list[str]) -> frozenset[str]:
    """Return the flags that a translated command line sets, without dashes."""
    found = {item.name for item in split_items(args) if item.name not in OWN_WORDS}
    return frozenset(name if name in flags() else name.removeprefix("no-") for name in found if name)


def _last_value(argv: list[str], flag: str) -> str:
    """Return the last value of a flag; empty if it has none."""
    return ["", *_values(argv, flag)][-1]


def _values(argv: list[str], flag: str) -> list[str]:
    """Return the value of each time that a flag is given."""
    return [item.values[0] for item in split_items(argv) if item.name == flag and item.values]


def read_own(kind: type[Own], argv: list[str], script: str) -> tuple[Own, list[str]]:
    """Read the flags of another program, a dataclass; return them, and the words that are not among them.

    Args:
        script: of the program, as `called_as.SUBCOMMANDS` names it.

    Raises:
        SystemExit: --help, or a value that is wrong; the message is printed.
    """
    import tyro

    text, program = in_own_words(inspect.getdoc(kind) or ""), program_name(script)  # tyro alone drops examples
    with until_reader_ends():
        options, rest = tyro.cli(kind, args=argv, prog=program, description=text, return_unknown_args=True)
    return options, list(rest)


def read_flags(kind: type[Own], argv: list[str], script: str) -> Own:
    """Read the flags of another program, all words of its command line. As `read_own`."""
    import tyro

    text, program = in_own_words(inspect.getdoc(kind) or ""), program_name(script)
    if {"--help", "-h"} & {*argv}:
        kind = with_whole_lines(kind)
    with until_reader_ends():
        options = tyro.cli(kind, args=argv, prog=program, description=text)
    return options
