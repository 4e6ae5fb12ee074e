"""--recipe auto: the batch, the schedule and the optimizer of a run from published laws. Pure; docs/recipes.md.

N is the number of parameters of the blocks, without embeddings and head; D is the number of tokens of training.
"""

import math
from collections.abc import Collection
from typing import Any, NamedTuple

from megazero.engine.options.option import Role
from megazero.flags.config import Config
from megazero.flags.flag_names import as_flag, flags_with, value_of

STEP_LAW = "Step Law, arXiv:2503.04715"
POWER_LINES = "Power Lines, arXiv:2505.13738"
TOKENS_PER_PARAMETER = 20  # Chinchilla, arXiv:2203.15556
SHARED = 8  # a batch of twice as many samples or more is a multiple, so that usual numbers of ranks share it equally
FITTED = (60e6, 1.1e9), (2e9, 1e11)  # N and D of the runs behind the Step Law
FROM_INITIAL = "the laws are of one run from initial weights"
# Flags that the recipe sets: the command line's keep their value, and those of a preset do not count.
RECIPE_FLAGS = flags_with(Role.RECIPE)


class ModelSize(NamedTuple):
    """Numbers of parameters: of all blocks, and of the whole model as far as one token passes it."""

    blocks: int
    active: int


class RecipeValue(NamedTuple):
    """The value of a flag, and its source. `kept`: the command gives it."""

    flag: str
    value: Any
    source: str
    kept: bool = False


def step_law_rate(n: float, d: float) -> float:
    """Return the peak learning rate for AdamW."""
    return 1.79 * math.pow(n, -0.713) * math.pow(d, 0.307)


def step_law_batch(d: float) -> float:
    """Return the tokens of a global batch."""
    return 0.58 * math.pow(d, 0.571)


def power_lines_decay(n: float, d: float, batch: float, rate: float) -> float:
    """Return the weight decay at which AdamW forgets over the best share of the run, which D / N decides.

    batch: tokens of a global batch.
    """
    share = 1.084 * math.pow(d / n, -0.527)
    return batch / (rate * share * d)


def recipe(config: Config, kept: Collection[str], size: ModelSize) -> list[RecipeValue]:
    """Return the value of every flag of the recipe.

    Args:
        kept: flags, without dashes, whose values in `config` stay.

    Raises:
        ValueError: no law is known for the optimizer, or the flags that are kept leave the tokens open.
    """
    _check(config, kept)
    found, seq, n = list[RecipeValue](), config.model.seq_length, size.blocks

    def choose(flag: str, value: Any, source: str) -> Any:
        is_kept = flag in kept
        value = value_of(config, flag) if is_kept else float(f"{value:.3g}") if isinstance(value, float) else value
        found.append(RecipeValue(flag, value, "given" if is_kept else source, is_kept))
        return value

    if "train-iters" in kept:
        tokens, reason = config.training.train_iters * config.training.global_batch_size * seq, "given"
    elif "train-tokens" in kept:
        tokens, reason = config.training.train_tokens, "of --train-tokens, rounded up"
    else:
        tokens, reason = TOKENS_PER_PARAMETER * size.active, "20 tokens a parameter, arXiv:2203.15556, rounded up"
    samples = step_law_batch(tokens) / seq
    samples = SHARED * round(samples / SHARED) if samples >= 2 * SHARED else max(1, round(samples))
    samples = choose("global-batch-size", samples, f"0.58 D^0.571 tokens ({STEP_LAW})")
    iterations = choose("train-iters", -(-tokens // (samples * seq)), reason)
    rate_source = f"1.79 N^-0.713 D^0.307 ({STEP_LAW})"
    if why := config.optimizer.rules.as_adamw:
        rate_source += f", {why}"
    rate = choose("lr", step_law_rate(n, tokens), rate_source)
    choose("min-lr", min(1e-5, rate), STEP_LAW)
    source = f"the 2,000 of the Step Law, at most the tenth of the run of {POWER_LINES}"
    choose("lr-warmup-iters", min(2000, iterations // 10), source)
    style = choose("lr-decay-style", "cosine", STEP_LAW)
    if style == "wsd":
        choose("lr-wsd-decay-iters", math.ceil(iterations / 10), "a tenth of the run (MiniCPM, arXiv:2404.06395)")
    decay = power_lines_decay(n, tokens, samples * seq, rate)
    choose("weight-decay", decay, f"B / (lr D 1.084 (D / N)^-0.527) ({POWER_LINES})")
    choose("adam-beta1", 0.9, STEP_LAW)
    choose("adam-beta2", 0.95, STEP_LAW)
    return found


def not_initial(flag: str) -> ValueError:
    """Return the refusal of a recipe for a run that begins with the weights of another. flag: that which loads them."""
    return ValueError(
        f"--recipe auto with {flag}: {FROM_INITIAL}; give --lr, --lr-warmup-iters and --lr-decay-style instead of "
        "--recipe auto"
    )


def _check(config: Config, kept: Collection[str]) -> None:
    given, optimizer = "--recipe auto", config.optimizer
    if config.checkpoint.finetune:
        raise not_initial("--finetune")
    for flag, is_set in (("--data-stages", config.data.data_stages), ("--decay-from", config.checkpoint.decay_from)):
        if is_set:
            raise ValueError(f"{given} with {flag}: {FROM_INITIAL}; drop one of the two")
    if {"lr", "weight-decay"} - {*kept}:
        if optimizer.rules.as_adamw is None:
            raise ValueError(
                f"{given} with --optimizer {optimizer.optimizer}: no law is known for it; give --lr and --weight-decay"
            )
        if optimizer.muon_scale != "moonlight":  # of --optimizer muon alone
            raise ValueError(
                f"{given} with --muon-scale {optimizer.muon_scale}: its rates are not AdamW's; use moonlight, or give "
                "--lr and --weight-decay"
            )
    if "train-iters" in kept and "global-batch-size" not in kept:
        raise ValueError(
            f"{given} with --train-iters {config.training.train_iters}: the tokens of the run are open, because they "
            "decide the batch; give --train-tokens instead, or --global-batch-size too"
        )


def recipe_words(config: Config, chosen: list[RecipeValue], size: ModelSize) -> str:
    """Return the table of a recipe, a line for each flag. config: with the recipe."""
    tokens = config.training.train_iters * config.training.global_batch_size * config.model.seq_length
    lines = [f"--recipe auto: N = {size.blocks:,} parameters of blocks, D = {tokens:,} tokens"]
    if not all(least <= each <= most for each, (least, most) in zip((size.blocks, tokens), FITTED, strict=True)):
        lines[0] += "; the laws were fitted to N from 60 M to 1.1 B and D from 2 B to 100 B, and are extrapolated here"
    words = [as_flag(each.flag, each.value) for each in chosen]
    width = max(map(len, words))
    return "\n".join([*lines, *(f"  {word:<{width}}  {e.source}" for word, e in zip(words, chosen, strict=True))])
