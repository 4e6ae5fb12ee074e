"""Find the checkpoint from which a run resumes, and check that its model, its data and --save fit the run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from megazero import checkpoint
from megazero.checkpoint import Damaged
from megazero.checkpoint.folders import refuse_to_mix
from megazero.data import fingerprint
from megazero.data.corpora import parse_data_path, read_data_args
from megazero.data.tokenizer import hub_hint
from megazero.engine.model.stage import declare
from megazero.families import TRAITS
from megazero.flags.batch_ramp import batch_sizes
from megazero.flags.config import CheckpointConfig, Config, ModelConfig
from megazero.flags.stages import DataStage
from megazero.log import log
from megazero.run.run_state import RunState, is_hugging_face

ALWAYS = ("architecture", "vocab_size")  # options with which a model is always another


def find_checkpoint(
    config: Config, group: Any = None, passing_over: Mapping[str, str] | None = None, memory: bool = True
) -> Path | None:
    """Return the checkpoint folder that --load selects; None: there is none. Rank 0 reads for all ranks of `group`.

    A Hugging Face folder is returned as it is: the run starts from its weights.
    In a folder of checkpoints damaged ones are passed over, with a warning, unless --load-exact is given.

    Args:
        passing_over: folders already found damaged -> the damage.
        memory: it may have a checkpoint; then it is no error if all on the disk are damaged.

    Raises:
        ValueError: --load is missing; --save holds another run's checkpoints; the checkpoint is of another model; or
            --decay-from cannot begin from it.
        Damaged: the selected checkpoint is damaged, and there is no older one.
    """
    options = config.checkpoint
    if options.load and is_hugging_face(Path(options.load)):
        _guard_save(options, None)
        return Path(options.load)
    path, known = None, dict(passing_over or {})
    while options.load:
        try:
            path = checkpoint.find(Path(options.load), group, passing_over=known, exact=options.load_exact)
        except Damaged as error:
            if options.load_exact or not (memory and takes_memory(config)):
                raise
            log.warning(f"{error}. Looking for one in memory")
            return None
        if path is None:
            break
        try:
            state = RunState.read(path, group)
        except Damaged as error:
            if path == Path(options.load):
                raise
            known[path.name] = str(error)
            continue
        check_same_model(path, state.typed_model(path), config.model)
        break
    if path is None and options.decay_from:
        return find_branch(config, group, known)
    if path is not None and options.decay_from:
        _check_own(path, RunState.read(path, group), options)
    if config.evaluation.eval_only and path is None:
        raise ValueError(f"--eval-only: --load {options.load} holds no checkpoint; give the --save folder of a run")
    _guard_save(options, path)
    starts = bool(options.save) and Path(options.load).resolve() == Path(options.save).resolve()
    if path is None and options.load and not starts:
        _refuse_missing(options.load)
    return path


def find_branch(config: Config, group: Any, passing_over: Mapping[str, str]) -> Path:
    """Return the checkpoint of --decay-from if the branch has not saved yet. Arguments as in `find_checkpoint`.

    Raises:
        ValueError: a decay cannot begin there, or the folders of the logs are those of its run.
        Damaged: it is missing or damaged.
    """
    source = Path(config.checkpoint.decay_from)
    try:
        path = checkpoint.find(source, group, passing_over=passing_over)
    except ValueError as error:
        raise type(error)(f"--decay-from{str(error).removeprefix('--load')}") from None
    assert path is not None  # it is no root
    state = RunState.read(path, group)
    check_same_model(path, state.typed_model(path), config.model)
    check_branch(path, state, config)
    return path


def check_branch(path: Path, state: RunState, config: Config) -> None:
    """Refuse to branch off the checkpoint `path` if the learning rate there is not --lr, or the logs are its run's."""
    given, ours = f"--decay-from {path}", config.optimizer.lr
    if state.weights_only:
        raise ValueError(
            f"{given} has weights alone: the optimizer states and the place in the data, which a decay continues, are "
            "missing; name a checkpoint that a run saved, or start a new run with --load and --finetune"
        )
    saved, rate = state.config.get("optimizer"), state.saved_rate
    theirs = saved.get("lr") if isinstance(saved, dict) else None
    if isinstance(theirs, float) and rate is not None and not math.isclose(rate, theirs, rel_tol=1e-9):
        raise ValueError(
            f"{given}: the learning rate there is {rate:g}, and its run has --lr {theirs:g}: it warms up, or decays "
            "already; name a checkpoint at which the learning rate is constant"
        )
    if rate is not None and not math.isclose(rate, ours, rel_tol=1e-9):
        raise ValueError(f"{given}: the learning rate there is {rate:g}, and --lr is {ours:g}; give --lr {rate:g}")
    logs = state.config.get("log")
    for flag, folder in (("log-dir", config.log.log_dir), ("tensorboard-dir", config.log.tensorboard_dir)):
        used = logs.get(flag.replace("-", "_")) if isinstance(logs, dict) else ""
        if folder and used and Path(folder).resolve() == Path(str(used)).resolve():
            raise ValueError(
                f"--{flag} {folder} has the metrics of the run of {given}, which this run would cut off; name another "
                "folder"
            )


def _check_own(path: Path, state: RunState, options: CheckpointConfig) -> None:
    """Refuse a --save folder whose checkpoint `path` is not of a branch off --decay-from."""
    saved = state.config.get("checkpoint")
    theirs = str(saved.get("decay_from", "")) if isinstance(saved, dict) else ""
    if Path(theirs).absolute().parts[-2:] != Path(options.decay_from).absolute().parts[-2:]:
        branch = f"the branch off {theirs}" if theirs else "another run"
        raise ValueError(
            f"--save {options.save} holds {path.name} of {branch}, not off --decay-from {options.decay_from}; name "
            "another folder"
        )


def _refuse_missing(load: str) -> NoReturn:
    """Refuse a --load that is not --save and has nothing to load."""
    if Path(load).exists():
        raise ValueError(
            f"--load {load} has nothing to load, neither a checkpoint nor a config.json that can be read. It holds "
            f"{_found(Path(load))}. Name the --save folder of a run or a Hugging Face folder, give the same "
            "folder as --save to start a new run there, or leave out --load to start from random weights"
        )
    there = next(str(folder) for folder in Path(load).absolute().parents if folder.is_dir())
    raise ValueError(
        f"--load {load}: there is no such folder, only {there}; correct it, or give the same folder as --save to start "
        f"a new run there{hub_hint(load)}"
    )


def _found(folder: Path) -> str:
    """Return some names in a folder, links without a target first."""
    entries = sorted(folder.iterdir(), key=lambda path: (path.exists(), path.name))
    shown = [path.name if path.exists() else f"{path.name}, a link to a missing file" for path in entries[:4]]
    return "; ".join(shown) + ("; ..." if len(entries) > 4 else "") or "nothing"


def takes_memory(config: Config) -> bool:
    """Return whether the run resumes from --save, and may take checkpoints in memory that are newer than the disk's."""
    options = config.checkpoint
    same = bool(options.load) and Path(options.load).resolve() == Path(options.save).resolve()
    return bool(options.memory_checkpoint_interval) and config.trains and same and not options.finetune


def _guard_save(options: CheckpointConfig, path: Path | None) -> None:
    """Refuse folders with checkpoints of another run, which would be mixed with this run's and pruned, or system.

    path: the checkpoint from which the run resumes.
    """
    load, save, finetune = options.load, options.save, options.finetune
    folders = {"save": save, "save-hf": options.save_hf, "memory-checkpoint-dir": options.memory_checkpoint_dir}
    for flag, folder in folders.items():
        if folder:
            refuse_to_mix(f"--{flag}", Path(folder), exports=flag == "save-hf")
    existing = checkpoint.checkpoints(Path(save)) if save else []
    resumes = path is not None and path.parent.resolve() == Path(save).resolve() and not finetune
    if not existing or resumes:
        return
    holds = f"--save {save} holds {existing[-1].name.strip('.')} of an earlier run"
    if not load:
        raise ValueError(f"{holds}; add --load {save} to resume it, or name another folder")
    if finetune:
        raise ValueError(f"{holds}, and --finetune starts a new one; name another folder, or drop --finetune to resume")
    elsewhere = f"loads {path}" if path is not None else "holds no checkpoint"
    raise ValueError(f"{holds}, and --load {load} {elsewhere}; --load {save} resumes it, or name another folder")


def check_same_model(path: Path, saved: ModelConfig, model: ModelConfig) -> None:
    """Refuse a checkpoint whose tensors have other names or shapes than this run's."""
    wrong = []
    for name, ours in asdict(model).items():
        theirs = getattr(saved, name)
        if name in TRAITS and saved.architecture != model.architecture:
            continue  # they follow the family
        if theirs != ours and (name in ALWAYS or _shapes(replace(model, **{name: theirs})) != _shapes(model)):
            wrong.append(f"--{name.replace('_', '-')} {theirs}, not {ours}")
    if wrong:
        raise ValueError(f"--load {path}: the checkpoint of another model: it has {'; '.join(wrong)}")


def _shapes(model: ModelConfig) -> tuple[int, list[tuple[str, tuple[int, ...]]]]:
    return model.num_layers, [(spec.name, spec.shape) for spec in declare(model).params()]


def check_stage(path: Path, state: RunState, config: Config, stages: Sequence[DataStage]) -> None:
    """Refuse a --data-stages file that has changed behind the last sample of a checkpoint.

    Raises:
        ValueError: that sample was trained in another stage than that of the file.
    """
    last = max(0, state.consumed_samples - 1)
    now = next(stage for stage in stages if stage.holds(last))
    if config.data.data_stages and now.first != state.stage:
        raise ValueError(
            f"--load {path} was trained to sample {last:,} in the stage that began at sample {state.stage:,}, and by "
            f"--data-stages {config.data.data_stages} that stage began at {now.first:,}, in the past; restore the "
            "file, or load an earlier checkpoint"
        )
    at, size = state.consumed_samples, config.training.global_batch_size
    stage = next(stage for stage in stages if stage.holds(at))
    if stage.stop is not None and at >= batch_sizes(config).samples and (stage.stop - at) % size:
        raise ValueError(
            f"--load {path} continues at sample {at:,}, so with --global-batch-size {size} no batch begins at sample "
            f"{stage.stop:,}, where the next stage of --data-stages {config.data.data_stages} does; restore the batch "
            f"size, or let that stage begin at {stage.stop + (at - stage.stop) % size:,}"
        )


def check_data(
    path: Path,
    state: RunState,
    config: Config,
    fingerprints: tuple[str, ...],
    split_by_tokens: tuple[str, ...] = (),
) -> None:
    """Refuse a resume that would silently read other samples: a replaced corpus, or another split.

    Another --data-path is the user's choice; `changes.changed_options` reports it.

    Args:
        fingerprints: of the corpora, in the order of --data-path.
        split_by_tokens: prefixes of the corpora that --split divides by tokens.

    Raises:
        ValueError: the same prefixes hold other tokens than when the checkpoint was saved; or versions before
            --split-by have split them by documents.
    """
    saved, ours = state.config.get("data"), config.data
    if not isinstance(saved, dict) or not isinstance(saved.get("data_path", []), (list, tuple)):
        return
    named = (list(saved.get("data_path", ())), saved.get("data_args_path", ""))
    if not state.fingerprints or not any(named) or named != (list(ours.data_path), ours.data_args_path):
        return
    prefixes = [prefix for _, prefix in parse_data_path(ours.data_path or read_data_args(ours.data_args_path))]
    found = fingerprint.differences(state.fingerprints, fingerprints, prefixes)
    if found:
        raise ValueError(
            f"--load {path}: {'; '.join(found)}; restore the corpus, or give the new one another name to train on it"
        )
    if split_by_tokens and ours.split_by == "auto" and "split_by" not in saved:
        raise ValueError(
            f"--load {path} was saved when --split divided whole documents alone, and {split_by_tokens[0]}, of few, "
            "would now be split by tokens; add --split-by documents to keep the same samples, or --split-by tokens"
        )
