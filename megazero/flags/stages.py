"""Stages of a run (--data-stages): the flags that change at a sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megazero.engine.options.option import Role
from megazero.files import explain, read_toml
from megazero.flags.batch_ramp import batch_sizes
from megazero.flags.config import Config
from megazero.flags.flag_names import flags_with, with_values
from megazero.flags.implied import SETS
from megazero.flags.presets import typed_values
from megazero.flags.validate import plans, skipped_samples

FROM = "from-sample"
STAGE_FLAGS = flags_with(Role.STAGE)
CORPORA = ("data-path", "data-args-path")


@dataclass(frozen=True)
class DataStage:
    """One stage: it trains on samples [first, stop), with `values` of flags over the command's; stop None: to the end.

    `number` counts from 1, the stage of the command alone. `tokens` are those of the stages before it.
    """

    number: int = 1
    first: int = 0
    stop: int | None = None
    values: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0

    @property
    def changes(self) -> dict[str, Any]:
        """Values of flags over those of the command. A stage names corpora in its own way."""
        named = {*CORPORA} & self.values.keys()
        return {"data-path": (), "data-args-path": "", **self.values} if named else self.values

    def over(self, config: Config) -> Config:
        """Return the options of a command in this stage."""
        return with_values(config, self.changes)

    def holds(self, sample: int) -> bool:
        return self.first <= sample and (self.stop is None or sample < self.stop)

    def consumed_tokens(self, samples: int, seq_length: int) -> int:
        """Return the tokens of the run's first `samples`; those of this stage have `seq_length` tokens each."""
        return self.tokens + (samples - self.first) * seq_length


WHOLE = DataStage()  # of a run without --data-stages


def read_stages(config: Config) -> tuple[DataStage, ...]:
    """Return the stages of a run; one without --data-stages.

    Raises:
        ValueError: the file cannot be read; or a key or a value of it is wrong; or stages do not follow each other; or
            a flag of the command does not go with stages.
    """
    name = config.data.data_stages
    if not name:
        return (WHOLE,)
    source = f"--data-stages {name}"
    try:
        content = read_toml(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--data-stages {explain(error) if isinstance(error, OSError) else error}") from None
    tables = content.get("stage")
    if set(content) != {"stage"} or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise ValueError(f"{source}: expected tables [[stage]] alone, each with {FROM} and flags, such as data-path")
    if config.trains and not (config.checkpoint.save or plans(config.plan) or config.plan.rehearse):
        raise ValueError(f"{source} needs --save: a stage begins from a checkpoint of the one before it")
    found = [WHOLE]
    for number, table in enumerate(tables, 2):
        stop = _first(table, found[-1].first, f"{source}: stage {number}")
        tokens = found[-1].consumed_tokens(stop, found[-1].over(config).model.seq_length)
        found[-1] = replace(found[-1], stop=stop)
        values = _values(table, f"{source}: stage {number}", bool(config.checkpoint.decay_from))
        found.append(DataStage(number, stop, None, values, tokens=tokens))
    for stage in found[:-1]:
        _check_border(stage, config, source)
    if config.data.skip_samples:
        _check_skipped(found, config, source)
    return tuple(found)


def _check_skipped(stages: Sequence[DataStage], config: Config, source: str) -> None:
    """Refuse a --skip-samples after which no batch begins at a border."""
    left_out = skipped_samples(config)
    stage = next(stage for stage in stages if stage.holds(left_out.start))
    if stage.stop is None:
        return
    size, begins = batch_sizes(stage.over(config)).full, _start_of_batch(config, stage, left_out.stop)
    if left_out.stop > stage.stop or begins != left_out.stop:
        raise ValueError(
            f"--skip-samples {config.data.skip_samples} with {source}: it must end where a global batch of its stage "
            f"begins, such as {left_out.start}:{min(begins + size, stage.stop)}"
        )


def last_samples(config: Config, stages: Sequence[DataStage]) -> list[int]:
    """Return the sample at which each stage ends that --train-iters reach; later stages have none."""
    left, found = config.training.train_iters, list[int]()
    for stage in stages:
        if left <= 0:
            break
        sizes, consumed = batch_sizes(stage.over(config)), stage.first
        while left and consumed < sizes.samples and stage.holds(consumed):
            consumed, left = consumed + sizes.at(consumed), left - 1
        full = left if stage.stop is None else min(left, (stage.stop - consumed) // sizes.full)
        found.append(consumed + full * sizes.full)
        left -= full
    return found


def _first(table: Mapping[str, Any], before: int, where: str) -> int:
    first = table.get(FROM)
    if type(first) is not int:
        raise ValueError(f"{where}: {FROM} is missing or no whole number: give the first sample of the stage")
    if first <= before:
        raise ValueError(
            f"{where} begins at sample {first:,}, and the stage before it at {before:,}: list them in order"
        )
    return first


def _values(table: Mapping[str, Any], where: str, branches: bool) -> dict[str, Any]:
    values = typed_values({key: value for key, value in table.items() if key != FROM}, where)
    for key in values:
        if key not in STAGE_FLAGS:
            raise ValueError(f"{where}: --{key} holds for the whole run; a stage may change {', '.join(STAGE_FLAGS)}")
        if branches and key in SETS:
            raise ValueError(f"{where}: --{key} and --decay-from: the branch has its own; leave out {key}")
    return values


def _check_border(stage: DataStage, config: Config, source: str) -> None:
    """Refuse a border inside a global batch. Only the first stage may have a ramp; it must have ended."""
    sizes, stop = batch_sizes(stage.over(config)), stage.stop or 0
    first = sizes.samples if stage.first == 0 else stage.first
    size = sizes.full
    if not size:
        raise ValueError(f"{source} needs --global-batch-size, because a stage begins where a global batch does")
    if stop < first:
        raise ValueError(f"{source}: stage 2 begins at sample {stop:,}, while the batch grows to sample {first:,}")
    before = _start_of_batch(config, stage, stop)
    if before != stop:
        raise ValueError(
            f"{source}: stage {stage.number + 1} begins at sample {stop:,}, inside a global batch of {size}; use "
            f"{before:,} or {before + size:,}"
        )


def _start_of_batch(config: Config, stage: DataStage, sample: int) -> int:
    """Return the sample at which the global batch with `sample` begins."""
    sizes, consumed = batch_sizes(stage.over(config)), stage.first
    while consumed < sizes.samples:
        consumed += sizes.at(consumed)
    return sample - (sample - consumed) % sizes.full


def longest(config: Config, stages: tuple[DataStage, ...]) -> DataStage:
    """Return the stage with the most tokens in a micro-batch; of equals, the first."""

    def tokens(stage: DataStage) -> int:
        options = stage.over(config)
        return options.training.micro_batch_size * options.model.seq_length

    return max(stages, key=tokens)


def of_longest(config: Config) -> tuple[Config, frozenset[str], str]:
    """Return the options of the stage with the most tokens in a micro-batch, the flags that it sets, and a note.

    The note is empty if there is one stage.

    Raises:
        ValueError: as `read_stages`.
    """
    stages = read_stages(config)
    if len(stages) == 1:
        return config, frozenset(), ""
    stage = longest(config, stages)
    return (
        stage.over(config),
        frozenset(stage.values),
        f"--data-stages: stage {stage.number} of {len(stages)}, from sample {stage.first:,}",
    )
