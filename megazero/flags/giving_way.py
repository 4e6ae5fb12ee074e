"""Values of a preset that give way to the rest of the command line, where the two would be refused together.

A preset describes a whole run, and a command line changes parts of it: a shorter run, no --save, one rank. A value that
the command line gives never gives way; if it is impossible, `validate` refuses it.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from megazero.engine.options.option import Requires, Role
from megazero.flags.config import CheckpointConfig, Config
from megazero.flags.flag_names import LAYOUT_FLAGS, as_flag, flags, flags_with, value_of, with_values
from megazero.flags.limit_checks import shorten
from megazero.flags.resolve import make_layout
from megazero.flags.validate import iteration_range, lacks_needed, needed_words, searches
from megazero.units import things

# Folders that other flags need: a preset leaves them to the command line.
FOLDERS = {*flags_with(Role.PLACE)} & {*flags_with(Role.PATH)}

# Returns the value that the other flags allow, and the reason; the reason is empty if they allow the present value.
Rule = Callable[[Config], tuple[Any, str]]


def _end(config: Config) -> str:
    flag = "--lr-decay-iters" if config.optimizer.lr_decay_iters else "--train-iters"
    return f"{flag} is {config.decay_end}"


def _warmup(config: Config) -> tuple[int, str]:
    optimizer, last = config.optimizer, config.decay_end
    warmup, decay = optimizer.lr_warmup_iters, max(1, optimizer.lr_wsd_decay_iters)
    if optimizer.lr_decay_style == "constant" or warmup + decay <= last:
        return warmup, ""
    room = last - decay if decay <= last else last
    return max(0, min(warmup, last // 10, room)), _end(config)


def _wsd_decay(config: Config) -> tuple[int, str]:
    optimizer, last = config.optimizer, config.decay_end
    warmup, decay, style = optimizer.lr_warmup_iters, optimizer.lr_wsd_decay_iters, optimizer.lr_decay_style
    if style != "wsd":
        return 0, f"--lr-decay-style is {style}"
    fits = warmup + decay <= last
    return max(1, min(decay, last // 10, last - warmup)), "" if fits else _end(config)


def _min_lr(config: Config) -> tuple[float, str]:
    lr = config.optimizer.lr
    return float(f"{lr / 10:g}"), f"--lr is {lr:g}" if config.optimizer.min_lr > lr else ""


def _save_interval(config: Config) -> tuple[int, str]:
    minutes = config.checkpoint.save_interval_minutes
    return 0, f"--save-interval-minutes is {minutes:g}" if minutes != CheckpointConfig().save_interval_minutes else ""


def _save_minutes(config: Config) -> tuple[float, str]:
    interval = config.checkpoint.save_interval
    return CheckpointConfig().save_interval_minutes, f"--save-interval is {interval}" if interval else ""


def _profile(config: Config) -> tuple[str, str]:
    text, last = config.log.profile_iterations, config.training.train_iters
    return "", f"--train-iters is {last}" if text and iteration_range(text)[1] > last else ""


def _without_tp(config: Config) -> tuple[bool, str]:
    return False, "--tensor-model-parallel-size is 1" if config.parallel.tensor_model_parallel_size == 1 else ""


def _grad_dtype(config: Config) -> tuple[str, str]:
    return "fp32", "--precision is fp64" if config.training.precision == "fp64" else ""


def _mock_data(config: Config) -> tuple[bool, str]:
    return False, "there is --data-path" if config.data.data_path or config.data.data_args_path else ""


def _data_path(config: Config) -> tuple[tuple[str, ...], str]:
    return (), "there is --mock-data" if config.data.mock_data else ""


def _data_args_path(config: Config) -> tuple[str, str]:
    return "", "there is --mock-data" if config.data.mock_data else ""


# Flag of a preset -> the rule by which it gives way, in the order in which the rules are applied.
RULES: Mapping[str, Rule] = {
    "lr-warmup-iters": _warmup,
    "lr-wsd-decay-iters": _wsd_decay,
    "min-lr": _min_lr,
    "save-interval": _save_interval,
    "save-interval-minutes": _save_minutes,
    "profile-iterations": _profile,
    "grad-dtype": _grad_dtype,
    "sequence-parallel": _without_tp,
    "partition-activations": _without_tp,
    "mock-data": _mock_data,
    "data-path": _data_path,
    "data-args-path": _data_args_path,
}


def give_way(config: Config, preset: str, names: Collection[str], typed: Collection[str]) -> tuple[Config, list[str]]:
    """Return the configuration that the command line allows, and a line for each value of the preset that gave way.

    A flag of the preset that lacks another one gives way if the command line sets that one, or leaves out a folder.

    Args:
        preset: as the command line names it.
        names: flags, without dashes, whose values are those of the preset.
        typed: flags, without dashes, of the command line.
    """
    changes, gone = list[str](), list[str]()

    def change(name: str, value: Any, reason: str) -> Config:
        old, new = (shorten(as_flag(name, each)) for each in (value_of(config, name), value))
        changes.append(f"--preset {preset}: {old} becomes {new}, because {reason}")
        return with_values(config, {name: value})

    for name in (name for name, flag in flags().items() if name in names and Role.KIND_OF_RUN not in flag.facts):
        needed = {needs.flag for needs in flags()[name].all(Requires)}
        if needed & ({*typed, *gone} | FOLDERS) and lacks_needed(config, name):
            config = change(name, flags()[name].default, f"it needs {needed_words(name)}")
            gone.append(name)
    if "sequence-parallel" in typed and config.parallel.sequence_parallel and not searches(config):
        if reason := _without_tp(config)[1]:  # scripts of Megatron-LM have it in every layout
            changes.append(f"--sequence-parallel has no effect, because {reason}")
            config = with_values(config, {"sequence-parallel": False})
    for name in (name for name in RULES if name in names and value_of(config, name) != flags()[name].default):
        value, reason = RULES[name](config)
        if reason and value != value_of(config, name):
            config = change(name, value, reason)
    return config, changes


def without_layout(config: Config, preset: str, names: Collection[str], ranks: int) -> tuple[Config, str]:
    """Return the configuration of an evaluation without a preset's layout that its ranks do not fit, and a note of it.

    config.toml has the layout of the training run. An evaluation has the same result in each.
    """
    dropped = [name for name in LAYOUT_FLAGS if name in names and value_of(config, name) != flags()[name].default]
    plain = with_values(config, {name: flags()[name].default for name in dropped})
    if not dropped or _fits(config, ranks) or not _fits(plain, ranks):
        return config, ""
    words = " ".join(as_flag(name, value_of(config, name)) for name in dropped)
    return (
        plain,
        f"--eval-only on {things(ranks, 'rank')}, without {words} of --preset {preset}; name a flag to keep it",
    )


def _fits(config: Config, ranks: int) -> bool:
    try:
        make_layout(config, ranks)
    except ValueError:
        return False
    return True
