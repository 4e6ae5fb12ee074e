"""Options of a resumed run that differ from those of its checkpoint: warnings if the loss curve changes, else notes."""

import json
import shlex
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from megazero.data import fingerprint
from megazero.data.corpora import parse_data_path
from megazero.engine.options.option import OnResume
from megazero.engine.step.optimization import learning_rate
from megazero.families import with_traits
from megazero.flags.config import Config, OptimizerConfig
from megazero.flags.flag_names import LAYOUT_FLAGS, as_flag, flags, flags_with
from megazero.run.run_state import RunState

MOST_RATES = 1000  # iterations at which two schedules are compared
DIFFERS = "and the loss curve differs from here"
SENTENCES = {
    OnResume.NOTED: "",
    OnResume.DATA: f"training continues at sample {{sample:,}} of the new data, {DIFFERS}; with --finetune and another "
    "--save, a new run begins with these weights at sample 0",
    OnResume.PACKING: "samples hold other documents, and with best-fit alone attention stays within these: training "
    f"continues at sample {{sample:,}} of the new samples, {DIFFERS}",
    OnResume.ORDER: f"the samples have another order: training continues at sample {{sample:,}} of it, {DIFFERS}",
    OnResume.BATCHES: f"training continues at sample {{sample:,}} with batches of another size, {DIFFERS}",
    OnResume.RATE: f"from iteration {{iteration:,}} on, the new schedule gives another learning rate, {DIFFERS}",
    OnResume.STATES: f"the optimizer's states begin at 0, {DIFFERS}",
    OnResume.UPDATES: f"updates are computed in another way from iteration {{iteration:,}} on, {DIFFERS}",
    OnResume.MODEL: f"the model computes other values from the same weights, {DIFFERS}",
    OnResume.LOSS: f"training minimizes another loss from iteration {{iteration:,}} on, {DIFFERS}",
    OnResume.ROUNDING: f"values are rounded in another way, {DIFFERS}",
}
SENTENCES[OnResume.BY_DOCUMENT] = SENTENCES[OnResume.MODEL]
RATE_FLAGS = flags_with(OnResume.RATE)


class Changes(NamedTuple):
    """Sentences about the options that differ."""

    warnings: list[str]
    notes: list[str]


def changed_options(
    state: RunState,
    config: Config,
    given: Collection[str] | None = None,
    fingerprints: Sequence[str] = (),
    planned: Collection[str] = (),
) -> Changes:
    """Describe the options that differ from the resumed run, their consequences, and the flags that restore them.

    Args:
        state: of the checkpoint.
        given: names of the flags of this command, without dashes; None: all were given.
        fingerprints: of this run's corpora, in the order of --data-path.
        planned: names of flags that a new stage of the run changes.
    """
    saved: dict[str, Any] = dict(state.config)
    ours = json.loads(json.dumps(asdict(config)))
    options = saved.get("optimizer", {})
    if isinstance(options, dict):
        saved["optimizer"] = {"optimizer": state.optimizer} | options  # versions before the flag
    if isinstance(data := saved.get("data", {}), dict):
        saved["data"] = {"packing": "split"} | data  # likewise
    if isinstance(model := saved.get("model", {}), dict):
        saved["model"] = json.loads(json.dumps(with_traits(model))) if "architecture" in model else model
    changed, back = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    harmless = _without_effect(state, config, fingerprints) | {*planned}
    for group, options in saved.items():
        if not isinstance(options, dict):
            continue
        for name, value in options.items():
            flag = name.replace("_", "-")
            if name not in ours.get(group, {}) or ours[group][name] == value:
                continue
            consequence = flags()[flag].on_resume
            if consequence is OnResume.UNSAID:
                continue
            if config.parallel.elastic and flag in LAYOUT_FLAGS:
                continue  # they follow the number of nodes
            if consequence is OnResume.BY_DOCUMENT and saved["data"]["packing"] != config.data.packing:
                continue  # they follow the packing
            follows = "" if flag in harmless else SENTENCES[consequence]
            changed[follows].append(f"--{flag} is {_shown(ours[group][name])}, and was {_shown(value)}")
            if flag in planned:
                continue
            default = name == "lr_decay_iters" and value == saved["training"]["train_iters"]
            if given is not None and flag not in given and not default:
                back[follows].append(as_flag(flag, value))
    notes = [f"{change} when this was saved" for change in changed.pop("", ())]
    if "" in back:
        notes.append(f"not given now; to continue as before, add: {' '.join(back[''])}")
    at = {"sample": state.consumed_samples, "iteration": state.iteration + 1}
    warnings = []
    for follows, changes in changed.items():
        way_back = f". To continue as before, add: {' '.join(back[follows])}" if follows in back else ""
        warnings.append(f"{'; '.join(changes)} when this was saved: {follows.format(**at)}{way_back}")
    return Changes(warnings, notes)


def _without_effect(state: RunState, config: Config, fingerprints: Sequence[str]) -> set[str]:
    """Return the flags whose changes have no effect in this run: a corpus that was moved, an equal learning rate."""
    found, data, options = set[str](), state.config.get("data"), state.config.get("optimizer")
    if isinstance(data, dict) and state.fingerprints and len(state.fingerprints) == len(fingerprints):
        weights = [
            [weight for weight, _ in parse_data_path(words)]
            for words in (data.get("data_path"), list(config.data.data_path))
            if words and isinstance(words, list) and all(isinstance(word, str) for word in words)
        ]
        if len(weights) == 2 and weights[0] == weights[1]:
            if all(map(fingerprint.same, state.fingerprints, fingerprints)):
                found.add("data-path")
    if isinstance(options, dict):
        now = {name: getattr(config.optimizer, name) for name in (flag.replace("-", "_") for flag in RATE_FLAGS)}
        then = {name: options[name] for name, value in now.items() if type(options.get(name)) is type(value)}
        before = replace(config.optimizer, **then)
        if _same_rates(before, config.optimizer, state.iteration + 1, config.training.train_iters):
            found.update(RATE_FLAGS)
    return found


def _same_rates(one: OptimizerConfig, other: OptimizerConfig, first: int, last: int) -> bool:
    iterations = range(first, last + 1, max(1, (last - first) // MOST_RATES))
    return all(learning_rate(one, at) == learning_rate(other, at) for at in (*iterations, max(first, last)))


def _shown(value: Any) -> str:
    """Return a value as a shell's words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    words = value if isinstance(value, list) else [value] if value != "" else []
    return shlex.join(map(str, words)) or "empty"
