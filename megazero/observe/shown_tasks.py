"""Scores of tasks in a record of metrics.jsonl, as the console and report.html show them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from megazero.units import things

# key of metrics.jsonl -> its name, and the format of its values
SHOWN = {
    "task_acc": ("accuracy", ".3f"),
    "task_acc_norm": ("accuracy by byte", ".3f"),
    "task_perplexity": ("perplexity", ",.4g"),
    "task_bits_per_byte": ("bits per byte", ".4f"),
}


class ShownScore(NamedTuple):
    """A score: its task, or TASK/DOMAIN; the name of the score; its value, such as "0.612 ± 0.011 (1,838 items)"."""

    task: str
    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.task} {self.name} {self.value}"


def task_scores(record: Mapping[str, Any]) -> list[ShownScore]:
    """Return the scores of all tasks in a record, task by task."""
    found, items = list[ShownScore](), record.get("task_items", {})  # records of earlier versions count no items
    for key, (name, form) in SHOWN.items():
        errors = record.get(f"{key}_stderr", {})
        for task, value in record.get(key, {}).items():
            shown = "not finite" if value is None else format(value, form)
            if task in errors:
                shown += f" ± {errors[task]:{form}}"
            if task in items:
                shown += f" ({things(items[task], 'item')})"
            found.append(ShownScore(task, name, shown))
    order = list(dict.fromkeys(score.task.partition("/")[0] for score in found))
    return sorted(found, key=lambda score: order.index(score.task.partition("/")[0]))
