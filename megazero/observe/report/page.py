"""Write report.html of a run: one file, readable offline. report.html.jinja is its template, report.js draws it."""

import functools
import json
import math
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from megazero.engine.plan.layout.topology import Layout
from megazero.files import replace_file
from megazero.observe.progress_line import RECENT, Record
from megazero.observe.report.curves import chart_data, start_text
from megazero.observe.report.heat_map import MOST_COLUMNS, HeatMap, heat_map, logarithmic_limits
from megazero.observe.report.lost_time import KEPT, kept_share, spent
from megazero.observe.report.records import by_name
from megazero.observe.report.runs import METRICS, Run, curve, keys_of, line_faults, read_run, smooth
from megazero.observe.shown_tasks import task_scores
from megazero.planner.layouts import layout_words, rank_layers, stage_copies
from megazero.units import count, duration, ranges, size, things

REPORT = "report.html"
MAX_DRAWN_RANKS, MAX_LAYERS = 64, 10_000
MAX_SHOWN_LOSS = 20.0  # nats; above it a perplexity is meaningless
SCRIPTS = ("report.js", "uplot/uPlot.iife.min.js", "uplot/uPlot.min.css", "uplot/LICENSE")
SHARDED = ("", "optimizer states", "optimizer states and gradients", "optimizer states, gradients and parameters")
MEMORY = {
    "parameters": "parameters",
    "optimizer": "optimizer states",
    "gradients": "gradients",
    "activation_checkpoints": "inputs kept for recompute",
    "buffers": "buffers",
    "logits": "logits",
    "peak": "peak of all at one instant",
    "host": "host memory",
    "nvme": "files",
}
STATISTICS = {
    "layer_grad_norm": "Gradient norm, before clipping",
    "layer_update_ratio": "Update over weight",
    "layer_max_activation": "Largest activation",
    "layer_max_logit": "Largest attention logit",
}
MEDIANS = (
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("TFLOP/s per device", "tflops_per_device", ".3g"),
    ("MFU", "mfu", ".1%"),
)
TRAFFIC = {
    "dp": "data-parallel and ZeRO",
    "cp": "context-parallel",
    "ep": "expert-parallel",
    "tp": "tensor-parallel",
    "pp": "pipeline",
    "control": "losses, norms, flags",
    "pcie": "copies to and from host memory",
    "nvme": "reads and writes of files",
}


def write_report(folder: Path, live: int = 0) -> Path:
    """Write report.html of a --log-dir folder into it.

    Args:
        live: seconds after which the page reloads itself until the run is done; 0: never.

    Raises:
        ValueError: the folder holds no iteration.
        OSError: the file cannot be written.
    """
    path = folder / REPORT
    replace_file(path, page(read_run(folder), live))
    return path


@functools.cache
def template() -> jinja2.Template:
    """Return the compiled template of the page."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    jinja = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return jinja.get_template("report.html.jinja")


def page(run: Run, live: int = 0) -> str:
    """Return the page of a run. live: see `write_report`."""
    last, start = run.records[-1], run.start
    return render(
        [run],
        [run.name],
        live,
        name=run.name,
        state=_state(run),
        cards=cards(run),
        loads=[each for each in (_loads(run), _last_loads(run)) if each is not None],
        layers=_statistics(run),
        sampled=next((record for record in reversed(run.records) if record.get("samples")), None),
        layout=_layout(start),
        memory=_bars(last.get("memory_bytes"), MEMORY),
        traffic=_bars(last.get("traffic_bytes"), TRAFFIC),
        time=_shares(spent(run)),
        resumes=_resumes(run),
        given=[f"--{name.replace('_', '-')}" for name in start.get("given", ())],
        options=_options(start.get("config", {})),
        command=shlex.join(start.get("command", ())),
        environment=[(name, option_text(value)) for name, value in start.get("environment", {}).items()],
        events=run.events if len(run.events) > 1 else [],
    )


def render(runs: Sequence[Run], names: Sequence[str], live: int, **sections: Any) -> str:
    """Return a page with the curves of runs.

    Args:
        live: as of `write_report`.
        sections: further variables of the template; missing ones are left out.
    """
    here = Path(__file__).parent
    ended, done = all(run.ended for run in runs), all(run.done for run in runs)
    data = chart_data(runs, names) | {"live": 0 if done else live, "ended": ended, "written": int(time.time())}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return template().render(
        sections,
        data=data,
        json=Markup(text),
        files={name: Markup((here / name).read_text()) for name in SCRIPTS},
        done=done,
        read=" ".join(sentence for run in runs for sentence in _read(run)),
    )


def _read(run: Run) -> Iterator[str]:
    """Yield a sentence for each reason why not all lines of a run were read."""
    if run.stride > 1:
        yield f"One of {run.stride} iterations of {run.name} was read."
    if run.faults:
        yield f"{run.name} has {line_faults(run.faults)}."


# -- summary


def cards(run: Run) -> list[tuple[str, str]]:
    """Return the numbers at the top of the page: names and values."""
    tokens, hours = run.axes["tokens"], run.axes["hours"]
    loss, validation, peak = curve(run, "loss"), curve(run, "validation_loss"), curve(run, "memory_bytes/peak").y
    done: int = run.records[-1]["iteration"]
    asked = by_name(run.start.get("config", {}).get("training")).get("train_iters")
    left = asked - done if isinstance(asked, int) and asked < 2**53 else 0
    found = [("iterations", f"{done:,} of {done + left:,}" if left > 0 else f"{done:,}")]
    if left > 0 and not run.ended:
        steps = [record.get("step_seconds") or 0.0 for record in run.records[-RECENT:]]
        found.append(("time left, without evaluation and saving", duration(left * sum(steps) / len(steps))))
    if "parameters" in run.start:
        whole: int = run.start["parameters"]
        active: int = run.start.get("active_parameters", whole)
        found.append(("parameters", count(whole)))
        if active != whole:
            found.append(("parameters active per token", count(active)))
    if len(loss.y):
        found.append(("training loss, mean of the last hundredth", f"{smooth(loss, 0).y[-1]:.4f}"))
    if len(validation.y):
        found.append(("validation loss", f"{validation.y[-1]:.4f}"))
        if validation.y[-1] < MAX_SHOWN_LOSS:
            found.append(("validation perplexity", f"{math.exp(validation.y[-1]):,.2f}"))
        if "bytes_per_token" in run.start:
            bits = validation.y[-1] / math.log(2) / run.start["bytes_per_token"]
            found.append(("validation, bits per byte", f"{bits:.4f}"))
        best = int(validation.y.argmin())
        if best < len(validation.y) - 1:
            found.append(("its least", f"{validation.y[best]:.4f} at iteration {validation.x[best]:,.0f}"))
    scored = next((record for record in reversed(run.records) if task_scores(record)), {})
    found += [(f"{score.task}, {score.name}", score.value) for score in task_scores(scored)]
    found.append(("tokens", count(round(float(tokens[-1])))))
    found.append(("training time, without evaluation and saving", duration(float(hours[-1]) * 3600)))
    for name, key, form in MEDIANS:
        if len(values := curve(run, key).y):
            found.append((f"{name}, median", format(np.median(values), form)))
    if (share := kept_share(spent(run))) is not None:
        found.append((f"goodput: time in {KEPT}", f"{share:.1%}"))
    if len(peak):
        found.append(("peak memory of rank 0", size(round(float(peak.max())))))
    if skipped := sum(bool(record.get("skipped")) for record in run.records):
        found.append(("iterations without an update", f"{skipped:,}"))
    return found


def _state(run: Run) -> str:
    """Describe when the run started, resumed and ended, by its events."""
    starts = run.starts
    if not starts:
        return f"{METRICS} has {things(len(run.records), 'iteration')}."
    last, words = run.events[-1], [f"Started {starts[0].get('time', '')}"]
    resumed = [start for start in starts[1:] if "stage" not in start]
    if resumed:
        times = "once" if len(resumed) == 1 else f"{len(resumed)} times, last"
        words.append(f"resumed {times} {resumed[-1].get('time', '')}")
    if last.get("event") == "end":
        words.append(f"ended {last.get('time', '')}: {last.get('why', '')}")
    else:
        words.append("its end is not recorded: it runs, or was killed")
    return "; ".join(words) + "."


# -- experts


def _loads(run: Run) -> HeatMap | None:
    """Draw the load of the busiest expert over the iterations."""
    found, layers = over_iterations(run, "moe_load"), _layers(keys_of(run, "moe_load"))
    if found is None:
        return None
    return heat_map("Load of each layer's busiest expert", "iteration", layers, values=found[0], columns=found[1])


def over_iterations(run: Run, key: str) -> tuple[np.ndarray, tuple[int, int]] | None:
    """Return values by layer and iteration, [layers, columns], and the iterations of the first and the last column.

    Of several values in one column, the largest is taken. None: the run has no values of this key.
    """
    found = [curve(run, f"{key}/{layer}") for layer in keys_of(run, key)]
    places = np.unique(np.concatenate([each.x for each in found])) if found else np.empty(0)
    if not len(places):
        return None
    first, last, columns = int(places[0]), int(places[-1]), min(MOST_COLUMNS, len(places))
    values = np.full((len(found), columns), np.nan)
    for row, each in zip(values, found, strict=True):
        np.fmax.at(row, ((each.x - first) * columns // (last - first + 1)).astype(int), each.y)
    return values, (first, last)


def _statistics(run: Run) -> list[HeatMap]:
    """Draw each statistic of --stats-interval by layer over the iterations."""
    drawn = []
    for key, title in STATISTICS.items():
        if (found := over_iterations(run, key)) is not None:
            values, columns = found
            names = [name.removesuffix("_embedding") for name in keys_of(run, key)]
            limits = logarithmic_limits(values)
            drawn.append(heat_map(title, "iteration", names, values=values, columns=columns, limits=limits))
    return [each for each in drawn if each is not None]


def _last_loads(run: Run) -> HeatMap | None:
    """Draw the loads of all experts in the last iteration that has them."""
    record = next((record for record in reversed(run.records) if record.get("moe_choices")), None)
    if record is None or len({len(choices) for choices in record["moe_choices"].values()}) > 1:
        return None
    choices = np.array(list(record["moe_choices"].values()), dtype=np.float64)
    loads = choices / np.maximum(choices.mean(1, keepdims=True), 1e-9)
    title = f"Loads of all experts in iteration {record['iteration']:,}"
    return heat_map(title, "expert", _layers(record["moe_choices"]), values=loads, columns=(0, loads.shape[1] - 1))


def _layers(numbers: Iterable[str]) -> list[str]:
    return [f"layer {number}" for number in numbers]


# -- layout, memory, traffic, options


def _layout(start: Record) -> dict[str, Any] | None:
    """Return a sentence on the layout, and the ranks by pipeline stage and data-parallel rank.

    None for a start of an older version, or with a layout that no run has.
    """
    try:
        layout = Layout(**start["layout"] | {"split": tuple(start["layout"]["split"])})
        layers, stage = start["config"]["model"]["num_layers"], start["config"]["zero"]["zero_stage"]
        text = f"{things(layout.world_size, 'rank')}: {layout_words(layout)}, ZeRO stage {stage}"
        if stage and layout.shard > 1:
            text += f"; {SHARDED[stage]} sharded over {layout.shard} data-parallel ranks"
        drawn = 1 < layout.world_size <= MAX_DRAWN_RANKS and max(layers, layout.chunks) <= MAX_LAYERS
        stages = [
            (", ".join(ranges(rank_layers(layout, layers, pp))), stage_copies(layout, pp))
            for pp in range(layout.pp if drawn else 0)
        ]
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError):
        return None
    return {"text": f"{text}.", "stages": stages, "tp": layout.tp}


def _bars(values: dict[str, int] | None, names: dict[str, str]) -> list[tuple[str, float, str]]:
    """Return the name of each value above 0, its share of the largest, and the amount."""
    shown = {key: value for key, value in (values or {}).items() if value}
    return [(names.get(key, key), value / max(shown.values()), size(value)) for key, value in shown.items()]


def _shares(seconds: dict[str, float]) -> list[tuple[str, float, str]]:
    """Return the name of each cause, its seconds over the largest, and the amount."""
    total, most = sum(seconds.values()), max(seconds.values(), default=0.0)
    shown = {cause: value for cause, value in seconds.items() if value}
    return [(cause, value / most, f"{duration(value)}, {value / total:.1%}") for cause, value in shown.items()]


def _resumes(run: Run) -> list[tuple[str, str]]:
    """Return the iteration of each resume, and its causes of lost time."""
    rows = []
    for start in run.starts[1:]:
        parts = {"no process": start.get("down_seconds", 0.0), **start.get("seconds", {})}
        words = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in parts.items())
        if again := start.get("lost_iterations"):
            words += f"; {things(again, 'iteration')} of {start.get('lost_seconds', 0.0):.1f} s computed again"
        rows.append((start_text({"iteration": 0} | start), words))
    return rows


def _options(config: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Return flags and values by group."""
    groups = {name: dict(group) for name, group in config.items() if isinstance(group, dict)}
    data = groups.get("data", {})
    if data.get("tokenizer") == "" and (data.get("data_path") or data.get("data_args_path")):
        data["tokenizer"] = "of the corpus"
    return {
        title: [(f"--{name.replace('_', '-')}", option_text(value)) for name, value in group.items()]
        for title, group in groups.items()
    }


def option_text(value: Any) -> str:
    """Format the value of an option."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return str(value) or "none"
