"""Rules between options that a preset may break with the command line: then a value of the preset gives way. Pure.

The refusal of a rule is the condition of the checker (`validate`) and of presets (`giving_way`).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megazero.flags.config import CheckpointConfig, Config
from megazero.flags.flag_names import as_flag, value_of
from megazero.flags.limit_checks import shorten

Value = Callable[[Config], tuple[Any, str]]  # the value that the other flags allow, and the reason


class Rule(NamedTuple):
    """A rule between options.

    Attributes:
        refusal: returns the message, with the flag, its value and the way out; empty if the rule is kept.
        gives_way: flags of a preset that give way if the rule is broken, in this order, until it is kept.
        of_layout: it holds for a layout that is given, not for flags of one that will be chosen.
    """

    refusal: Callable[[Config], str]
    gives_way: Mapping[str, Value]
    of_layout: bool = False


# -- the learning rate


def _end(config: Config) -> str:
    flag = "--lr-decay-iters" if config.optimizer.lr_decay_iters else "--train-iters"
    return f"{flag} is {config.decay_end}"


def _total(config: Config) -> str:
    return f"--lr-decay-iters {config.decay_end} (by default --train-iters)"


def _min_lr(config: Config) -> str:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        return f"--min-lr {optimizer.min_lr} is more than --lr {optimizer.lr}; lower it"
    return ""


def _lower_min_lr(config: Config) -> tuple[float, str]:
    return float(f"{config.optimizer.lr / 10:g}"), f"--lr is {config.optimizer.lr:g}"


def _something_decays(config: Config) -> str:
    last, warmup = config.decay_end, config.optimizer.lr_warmup_iters
    if config.optimizer.lr_decay_style == "constant" or warmup < last:
        return ""
    return (
        f"--lr-warmup-iters {warmup} is not less than {_total(config)}, so that nothing is left to decay; "
        f"use a --lr-warmup-iters of {last // 10}, or decay longer"
    )


def _wsd_has_a_decay(config: Config) -> str:
    style, decay = config.optimizer.lr_decay_style, config.optimizer.lr_wsd_decay_iters
    if (style == "wsd") == (decay > 0):
        return ""
    return (
        f"--lr-wsd-decay-iters {decay} and --lr-decay-style {style}: wsd, and no other style, "
        "decays in the last --lr-wsd-decay-iters; give both, such as --lr-wsd-decay-iters "
        f"{max(1, config.decay_end // 10)}, or neither"
    )


def _warmup_and_decay_fit(config: Config) -> str:
    optimizer, last = config.optimizer, config.decay_end
    warmup, decay = optimizer.lr_warmup_iters, optimizer.lr_wsd_decay_iters
    if optimizer.lr_decay_style != "wsd" or warmup + decay <= last:
        return ""
    return (
        f"--lr-warmup-iters {warmup} and --lr-wsd-decay-iters {decay} together are more than {_total(config)}; lower "
        "one of them"
    )


def _shorter_warmup(config: Config) -> tuple[int, str]:
    optimizer, last = config.optimizer, config.decay_end
    decay = max(1, optimizer.lr_wsd_decay_iters)
    room = last - decay if decay <= last else last
    return max(0, min(optimizer.lr_warmup_iters, last // 10, room)), _end(config)


def _shorter_decay(config: Config) -> tuple[int, str]:
    optimizer, last = config.optimizer, config.decay_end
    if optimizer.lr_decay_style != "wsd":
        return 0, f"--lr-decay-style is {optimizer.lr_decay_style}"
    return max(1, min(optimizer.lr_wsd_decay_iters, last // 10, last - optimizer.lr_warmup_iters)), _end(config)


# -- saving and logging


def _saves_in_one_way(config: Config) -> str:
    interval, minutes = config.checkpoint.save_interval, config.checkpoint.save_interval_minutes
    if not interval or minutes in (0.0, CheckpointConfig().save_interval_minutes):
        return ""
    return (
        f"--save-interval-minutes {minutes:g} with --save-interval {interval}: checkpoints are saved by time or by "
        "iterations; give one of them"
    )


def _by_time(config: Config) -> tuple[int, str]:
    return 0, f"--save-interval-minutes is {config.checkpoint.save_interval_minutes:g}"


def _by_iterations(config: Config) -> tuple[float, str]:
    return CheckpointConfig().save_interval_minutes, f"--save-interval is {config.checkpoint.save_interval}"


def iteration_range(text: str) -> tuple[int, int]:
    """Return the first and the last iteration that --profile-iterations traces; (0, 0) if it is no range A:B."""
    found = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    return (first, last) if 1 <= first <= last else (0, 0)


def _traces_what_is_reached(config: Config) -> str:
    text, iterations = config.log.profile_iterations, config.training.train_iters
    last = iteration_range(text)[1]
    if text and not last:
        return (
            f"--profile-iterations {text}: must be A:B, the first and the last iteration to trace, counted from 1, "
            "such as 10:12"
        )
    if last > iterations:
        return (
            f"--profile-iterations {text}: iteration {last} is not reached, because --train-iters is {iterations}; end "
            "the range earlier, or train longer"
        )
    return ""


def _no_trace(config: Config) -> tuple[str, str]:
    return "", f"--train-iters is {config.training.train_iters}"


# -- the layout


def _needs_tp(flag: str) -> Rule:
    def refusal(config: Config) -> str:
        if not value_of(config, flag) or config.parallel.tensor_model_parallel_size > 1:
            return ""
        return f"--{flag} needs a --tensor-model-parallel-size of at least 2; raise it, or drop this flag"

    return Rule(refusal, {flag: lambda config: (False, WITHOUT_TP)}, of_layout=True)


WITHOUT_TP = "--tensor-model-parallel-size is 1"


# -- precision and data


def _gradients_are_fp64(config: Config) -> str:
    grad_dtype = config.training.grad_dtype
    if config.training.precision != "fp64" or grad_dtype in ("fp32", "fp64"):  # the default stands for fp64 here
        return ""
    return f"--grad-dtype {grad_dtype}: with --precision fp64, gradients are fp64 too; drop it"


def _one_kind_of_data(config: Config) -> str:
    named = [name for name in ("data-path", "data-args-path") if value_of(config, name)]
    if not config.data.mock_data or not named:
        return ""
    corpora = shorten(as_flag(named[0], value_of(config, named[0])))
    return f"--mock-data with {corpora}: the data is made up or comes from corpora; drop one of them"


def _no_corpora(empty: Any) -> Value:
    return lambda config: (empty, "there is --mock-data")


RULES = (
    Rule(_something_decays, {"lr-warmup-iters": _shorter_warmup}),
    Rule(_wsd_has_a_decay, {"lr-wsd-decay-iters": _shorter_decay}),
    Rule(_warmup_and_decay_fit, {"lr-warmup-iters": _shorter_warmup, "lr-wsd-decay-iters": _shorter_decay}),
    Rule(_min_lr, {"min-lr": _lower_min_lr}),
    Rule(_saves_in_one_way, {"save-interval": _by_time, "save-interval-minutes": _by_iterations}),
    Rule(_traces_what_is_reached, {"profile-iterations": _no_trace}),
    Rule(_gradients_are_fp64, {"grad-dtype": lambda config: ("fp32", "--precision is fp64")}),
    _needs_tp("sequence-parallel"),
    _needs_tp("partition-activations"),
    Rule(
        _one_kind_of_data,
        {
            "mock-data": lambda config: (False, "there is --data-path"),
            "data-path": _no_corpora(()),
            "data-args-path": _no_corpora(""),
        },
    ),
)
