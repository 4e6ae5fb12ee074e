"""Write report.html of a run: one file without scripts, readable offline. report.html.jinja is its template."""

from __future__ import annotations

import functools
import itertools
import math
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from megazero.engine.plan.layout.topology import Layout
from megazero.files import replace_file
from megazero.observe.progress_line import Record
from megazero.observe.report.chart import MOST_COLUMNS, Chart, HeatMap, Line, heat_map, line_chart
from megazero.observe.report.lost_time import KEPT, spent
from megazero.observe.report.runs import METRICS, Curve, Run, curve, keys_of, read_run, smooth
from megazero.units import count, duration, ranges, size, things

REPORT = "report.html"
MAX_DRAWN_RANKS = 64
MAX_SHOWN_LOSS = 20.0  # nats; above it a perplexity is meaningless
MAX_LINES = 8  # colours of the style sheet; the chart leaves out further corpora
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


def write_report(folder: Path) -> Path:
    """Write report.html of a --log-dir folder into it.

    Raises:
        ValueError: the folder holds no iteration.
        OSError: the file cannot be written.
    """
    path = folder / REPORT
    replace_file(path, page(read_run(folder)))
    return path


@functools.cache
def template() -> jinja2.Template:
    """Return the compiled template of the page."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    jinja = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return jinja.get_template("report.html.jinja")


def page(run: Run) -> str:
    """Return the page of a run."""
    last, start = run.records[-1], run.start
    return template().render(
        name=run.name,
        state=_state(run),
        cards=_cards(run),
        read=f"One of {run.stride} iterations of {METRICS} was read." if run.stride > 1 else "",
        charts=_charts(run),
        loads=[each for each in (_loads(run), _last_loads(run)) if each is not None],
        sampled=next((record for record in reversed(run.records) if record.get("samples")), None),
        layout=_layout(start),
        memory=_bars(last.get("memory_bytes"), MEMORY),
        traffic=_bars(last.get("traffic_bytes"), TRAFFIC),
        time=_shares(spent(run)),
        resumes=_resumes(run),
        given=[f"--{name.replace('_', '-')}" for name in start.get("given", ())],
        options=_options(start.get("config", {})),
        command=shlex.join(start.get("command", ())),
        environment=[(name, _shown(value)) for name, value in start.get("environment", {}).items()],
        events=run.events if len(run.events) > 1 else [],
    )


# -- summary


def _cards(run: Run) -> list[tuple[str, str]]:
    """Return the numbers at the top of the page: names and values."""
    tokens, hours = curve(run, "loss", "tokens").x, curve(run, "loss", "hours").x
    loss, validation, peak = curve(run, "loss"), curve(run, "validation_loss"), curve(run, "memory_bytes/peak").y
    cards = [("iterations", f"{run.records[-1]['iteration']:,}")]
    if "parameters" in run.start:
        whole: int = run.start["parameters"]
        active: int = run.start.get("active_parameters", whole)
        cards.append(("parameters", count(whole)))
        if active != whole:
            cards.append(("parameters active per token", count(active)))
    if len(loss.y):
        cards.append(("training loss, mean of the last hundredth", f"{smooth(loss, 0).y[-1]:.4f}"))
    if len(validation.y):
        cards.append(("validation loss", f"{validation.y[-1]:.4f}"))
        if validation.y[-1] < MAX_SHOWN_LOSS:
            cards.append(("validation perplexity", f"{math.exp(validation.y[-1]):,.2f}"))
        best = int(validation.y.argmin())
        if best < len(validation.y) - 1:
            cards.append(("its least", f"{validation.y[best]:.4f} at iteration {validation.x[best]:,.0f}"))
    if len(tokens):
        cards.append(("tokens", count(round(float(tokens[-1])))))
        cards.append(("training time, without evaluation and saving", duration(float(hours[-1]) * 3600)))
    for name, key, form in MEDIANS:
        if len(values := curve(run, key).y):
            cards.append((f"{name}, median", format(np.median(values), form)))
    if causes := spent(run):
        cards.append((f"goodput: time in {KEPT}", f"{causes[KEPT] / sum(causes.values()):.1%}"))
    if len(peak):
        cards.append(("peak memory of rank 0", size(round(float(peak.max())))))
    if skipped := sum(bool(record.get("skipped")) for record in run.records):
        cards.append(("iterations without an update", f"{skipped:,}"))
    return cards


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


# -- curves


def _charts(run: Run) -> list[Chart]:
    marks = [(start["iteration"], _began(start)) for start in run.starts if start.get("iteration")]

    def chart(title: str, lines: list[Line], **options: Any) -> Chart | None:
        return line_chart(lines, title, marks=marks, **options)

    def smoothed(label: str, key: str) -> list[Line]:
        """Return a curve, faint, and its running mean over a hundredth of it; a short curve alone."""
        found = curve(run, key)
        if len(found.y) < 200:
            return [Line(label, found, 0)]
        return [Line("", found, 0, faint=True), Line(label, smooth(found, 0), 0)]

    validation = Line("validation", curve(run, "validation_loss"), 1, points=True)
    peak, scale = curve(run, "memory_bytes/peak"), curve(run, "loss_scale")
    entropy, dropped = Line("", curve(run, "moe_router_entropy"), 0), curve(run, "moe_dropped")
    balance = [
        Line("auxiliary loss", curve(run, "moe_aux_loss"), 0),
        Line("z-loss", curve(run, "moe_z_loss"), 1),
    ]
    charts = [
        chart("Loss, nats per token", [*smoothed("training", "loss"), validation], log=True),
        chart("Loss of modules that predict further ahead", _by_corpus(run, "mtp_losses"), log=True),
        chart("Training loss by corpus", _by_corpus(run, "loss_by_corpus"), log=True),
        chart("Validation loss by corpus", _by_corpus(run, "validation_loss_by_corpus"), log=True),
        chart("Gradient norm, before clipping", smoothed("", "grad_norm"), log=True),
        chart("Learning rate", [Line("", curve(run, "lr"), 0)], from_zero=True, y_format=lambda v: f"{v:.2g}"),
        chart("Throughput, tokens/s", smoothed("", "tokens_per_second"), from_zero=True),
        chart("Peak memory of rank 0, bytes", [Line("", peak, 0)], from_zero=True) if _varies(peak) else None,
        chart("Entropy of routers, nats", [entropy]),
        chart("Choices that experts drop, share", [Line("", dropped, 0)], from_zero=True) if _varies(dropped) else None,
        chart("Balance losses of routers, without their factors", balance, from_zero=True),
        chart("Loss scale", [Line("", scale, 0)], log=True) if _varies(scale) else None,
    ]
    return [each for each in charts if each is not None]


def _by_corpus(run: Run, key: str) -> list[Line]:
    names = keys_of(run, key)[:MAX_LINES]
    points = key.startswith("validation")
    return [
        Line(label, smooth(curve(run, f"{key}/{name}"), 1 if points else 0), number, points=points)
        for number, (name, label) in enumerate(zip(names, _short_names(names), strict=True))
    ]


def _loads(run: Run) -> HeatMap | None:
    """Draw the load of the busiest expert over the iterations; of several in one column, the largest."""
    layers = keys_of(run, "moe_load")
    found = [curve(run, f"moe_load/{layer}") for layer in layers]
    first, last = run.records[0]["iteration"], run.records[-1]["iteration"]
    columns = min(MOST_COLUMNS, last - first + 1)
    values = np.full((len(layers), columns), np.nan)
    for row, each in zip(values, found, strict=True):
        np.fmax.at(row, ((each.x - first) * columns // (last - first + 1)).astype(int), each.y)
    return heat_map(
        "Load of each layer's busiest expert", "iteration", _layers(layers), values=values, columns=(first, last)
    )


def _last_loads(run: Run) -> HeatMap | None:
    """Draw the loads of all experts in the last iteration that has them."""
    record = next((record for record in reversed(run.records) if record.get("moe_choices")), None)
    if record is None:
        return None
    choices = np.array(list(record["moe_choices"].values()), dtype=np.float64)
    loads = choices / np.maximum(choices.mean(1, keepdims=True), 1e-9)
    title = f"Loads of all experts in iteration {record['iteration']:,}"
    return heat_map(title, "expert", _layers(record["moe_choices"]), values=loads, columns=(0, loads.shape[1] - 1))


def _layers(numbers: Iterable[str]) -> list[str]:
    return [f"layer {number}" for number in numbers]


def _varies(found: Curve) -> bool:
    return len(np.unique(found.y)) > 1


def _short_names(names: list[str]) -> list[str]:
    """Return paths without the folders that all have in common."""
    parts = [name.split("/") for name in names]
    folders = zip(*(part[:-1] for part in parts), strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, folders))
    return ["/".join(part[common:]) for part in parts]


# -- layout, memory, traffic, options


def _layout(start: Record) -> dict[str, Any] | None:
    """Return a sentence on the layout, and the ranks by pipeline stage and data-parallel rank."""
    try:
        options = start["config"]
        layout = Layout(**start["layout"] | {"split": tuple(start["layout"]["split"])})
        layers, stage = options["model"]["num_layers"], options["zero"]["zero_stage"]
    except (KeyError, TypeError):  # an older version's
        return None
    text = f"{things(layout.world_size, 'rank')}: {layout}, ZeRO stage {stage}"
    if stage and layout.shard > 1:
        text += f"; {SHARDED[stage]} sharded over {layout.shard} data-parallel ranks"
    stages = [
        (", ".join(ranges(layout.layers(layers, pp))), [layout.tensor_ranks(pp, at) for at in range(layout.data)])
        for pp in range(layout.pp)
    ]
    return {"text": f"{text}.", "stages": stages if 1 < layout.world_size <= MAX_DRAWN_RANKS else [], "tp": layout.tp}


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
            words += f"; {things(again, 'iteration')} of {start['lost_seconds']:.1f} s computed again"
        rows.append((_began(start), words))
    return rows


def _began(start: Record) -> str:
    """Describe a start that is not the first."""
    words = f"stage {start['stage']} began" if "stage" in start else "resumed"
    return f"{words} after iteration {start['iteration']:,}"


def _options(config: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Return flags and values by group."""
    groups = {name: dict(group) for name, group in config.items() if isinstance(group, dict)}
    data = groups.get("data", {})
    if data.get("tokenizer") == "" and (data.get("data_path") or data.get("data_args_path")):
        data["tokenizer"] = "of the corpus"
    return {
        title: [(f"--{name.replace('_', '-')}", _shown(value)) for name, value in group.items()]
        for title, group in groups.items()
    }


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return str(value) or "none"
