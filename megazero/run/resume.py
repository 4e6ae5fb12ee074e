"""The checkpoint that a run goes on from, and whether it may: the guard of --save, the model, the corpora."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megazero import checkpoint
from megazero.checkpoint import Damaged
from megazero.config.flags import as_flag, flags
from megazero.config.schema import Config, ModelConfig
from megazero.data import fingerprint
from megazero.data.corpora import parse_data_path, read_data_args
from megazero.model.stage import declare
from megazero.run.run_state import RunState, is_hugging_face, other_folder


def find_checkpoint(config: Config, group: Any = None, passing_over: Mapping[str, str] | None = None) -> Path | None:
    """The folder that --load means, checked to be this model's; None: start fresh. Rank 0 looks, for all of `group`.

    Where --load names a folder of checkpoints, damaged ones are passed over, with a warning, unless --load-exact.

    Args:
        passing_over: folders that were found damaged since -> what is wrong with them.

    Raises:
        ValueError: --load is not there; --save holds another run's checkpoints; or the one to load is of another model.
        Damaged: what is to be loaded is damaged, and there is nothing older to go back to.
    """
    options = config.checkpoint
    path, known = None, dict(passing_over or {})
    while options.load:
        path = checkpoint.find(Path(options.load), group, passing_over=known, exact=options.load_exact)
        if path is None:
            break
        try:
            state = RunState.read(path, group)
        except Damaged as error:
            if path == Path(options.load):
                raise
            known[path.name] = str(error)
            continue
        check_model(path, state.model, config.model)
        break
    if options.load and path is None and is_hugging_face(Path(options.load)):
        raise ValueError(f"--load {options.load} holds no checkpoint; {other_folder(Path(options.load))}")
    if config.evaluation.eval_only and path is None:
        raise ValueError(f"--eval-only: --load {options.load} holds no checkpoint; give the --save folder of a run")
    _guard_save(options.load, options.save, path, options.finetune)
    starts = bool(options.save) and Path(options.load).resolve() == Path(options.save).resolve()
    if path is None and options.load and not Path(options.load).exists() and not starts:
        there = next(str(folder) for folder in Path(options.load).absolute().parents if folder.is_dir())
        raise ValueError(
            f"--load {options.load}: there is no such folder, only {there}; correct it, or give the same folder as "
            "--save to start a new run there"
        )
    return path


def _guard_save(load: str, save: str, path: Path | None, finetune: bool) -> None:
    """Refuse to save where another run's checkpoints are: they would be mixed with this run's, and pruned."""
    there = checkpoint.checkpoints(Path(save)) if save else []
    goes_on = path is not None and path.parent.resolve() == Path(save).resolve() and not finetune
    if not there or goes_on:
        return
    holds = f"--save {save} holds {there[-1].name.strip('.')} of an earlier run"
    if not load:
        raise ValueError(f"{holds}; add --load {save} to go on with it, or name another folder")
    if finetune:
        raise ValueError(f"{holds}, and --finetune begins a new one; name another folder, or drop --finetune to go on")
    elsewhere = f"loads {path}" if path is not None else "holds no checkpoint"
    raise ValueError(f"{holds}, and --load {load} {elsewhere}; --load {save} goes on with it, or name another folder")


def check_model(path: Path, saved: dict[str, Any], model: ModelConfig) -> None:
    """Refuse a checkpoint whose tensors have other names or shapes, as the layers declare them."""
    there = asdict(ModelConfig()) | saved
    wrong = [
        f"--{key.replace('_', '-')} {there[key]}, not {value}"
        for key, value in asdict(model).items()
        if there[key] != value and _changes_shapes(model, key, there[key])
    ]
    if wrong:
        raise ValueError(f"--load {path}: the checkpoint of another model: it has {'; '.join(wrong)}")


def _changes_shapes(model: ModelConfig, option: str, value: Any) -> bool:
    """True if the layers declare other weights where `option` of the model is `value`, or if it cannot be that."""
    bounds = flags()[option.replace("_", "-")].bounds
    if type(value) is not type(getattr(model, option)) or (bounds is not None and bounds.complaint(value)):
        return True
    if isinstance(value, str) or (option == "vocab_size" and not value):  # no model, or of another architecture
        return True
    return _shapes(replace(model, **{option: value})) != _shapes(model)


def _shapes(model: ModelConfig) -> tuple[int, list[tuple[str, tuple[int, ...]]]]:
    return model.num_layers, [(spec.name, spec.shape) for spec in declare(model).params()]


def check_data(
    path: Path,
    state: RunState,
    config: Config,
    fingerprints: tuple[str, ...],
    split_by_tokens: tuple[str, ...] = (),
) -> None:
    """Refuse what would go on over other samples in silence: a corpus made anew under the same prefix, another split.

    Another --data-path is the user's choice, and is said with the other differences.

    Args:
        fingerprints: of the corpora, in the order of --data-path.
        split_by_tokens: prefixes of those that --split divides by tokens.

    Raises:
        ValueError: the same prefixes hold other tokens than when the checkpoint was saved; or they were split by
            documents then, as all were before --split-by.
    """
    saved, ours = state.config.get("data", {}), config.data
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
            f"--load {path} was saved when --split knew whole documents alone, and {split_by_tokens[0]}, of few, would "
            "now be split by tokens; add --split-by documents to go on with the same samples, or --split-by tokens"
        )


def changed_options(saved: dict[str, Any], config: Config, given: Collection[str] | None = None) -> list[str]:
    """A sentence for each option that this run has otherwise than the one that it goes on from, and the way back.

    Args:
        saved: the options of that run, resolved, by group.
        given: names of the flags that were given now, without dashes; None: all were.
    """
    ours, found, back = json.loads(json.dumps(asdict(config))), list[str](), list[str]()
    for group, options in saved.items():
        if group in ("log", "checkpoint", "preset") or not isinstance(options, dict):
            continue
        for name, value in options.items():
            if name in ours.get(group, {}) and ours[group][name] != value:
                flag = name.replace("_", "-")
                found.append(f"--{flag} is {ours[group][name]}, and was {value} when this was saved")
                follows = name == "lr_decay_iters" and value == saved["training"]["train_iters"]  # was its default
                if given is not None and flag not in given and not follows:
                    back.append(as_flag(flag, value))
    if back:
        found.append(f"not given now; to go on as before, give again: {' '.join(back)}{_preset_of(saved, config)}")
    return found


def _preset_of(saved: dict[str, Any], config: Config) -> str:
    """Name the flags of an earlier run as a preset, where this run does not write its own in their place."""
    folder = saved.get("log", {}).get("log_dir", "")
    if not folder or (config.log.log_dir and Path(folder).resolve() == Path(config.log.log_dir).resolve()):
        return ""
    preset = Path(folder) / "config.toml"
    return f", or all of that run's flags: --preset {preset}" if preset.is_file() else ""
