"""report.html of a run: one file without scripts, that needs no network."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megazero.files import replace_file
from megazero.observe.report.chart import Line, line_chart
from megazero.observe.report.runs import METRICS, Curve, Record, Run, curve, keys_of, read_run, smooth
from megazero.observe.report.style import STYLE
from megazero.plan.layout.topology import Layout
from megazero.units import count, duration, size, things

REPORT = "report.html"
MAX_DRAWN_RANKS = 64
MAX_SHOWN_LOSS = 20.0  # nats; a perplexity of e^20 says nothing
MAX_LINES = 8  # colours of the style sheet: corpora beyond are left out of the chart


def write_report(folder: Path) -> Path:
    """Write report.html of a --log-dir folder into it.

    Raises:
        ValueError: the folder holds no iteration.
        OSError: it cannot be written.
    """
    path = folder / REPORT
    replace_file(path, page(read_run(folder)))
    return path


def page(run: Run) -> str:
    """Return the page of a run."""
    start = run.start
    config = start.get("config") if isinstance(start.get("config"), dict) else None
    sections = [
        ("", _summary(run)),
        ("Curves", _curves(run)),
        ("Samples", _samples(run)),
        ("Layout", _layout(start)),
        ("Memory of rank 0", _memory(run.records[-1])),
        ("Traffic of rank 0 per iteration", _bars(run.records[-1].get("traffic_bytes"), TRAFFIC)),
        ("Configuration", _configuration(config, start.get("given", ()), run.options or {})),
        ("Environment", _environment(run)),
    ]
    body = "".join(f"<section>{f'<h2>{name}</h2>' * bool(name)}{text}</section>" for name, text in sections if text)
    name = escape(run.name)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}: megazero</title>'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<style>{STYLE}</style></head><body><h1>{name}</h1>{body}</body></html>\n"
    )


# -- summary


def _summary(run: Run) -> str:
    last, loss = run.records[-1], curve(run, "loss")
    validation, rates = curve(run, "validation_loss"), curve(run, "tokens_per_second")
    seconds, tokens = (curve(run, "loss", axis).x for axis in ("hours", "tokens"))
    peak = curve(run, "memory_bytes/peak").y
    cards = [("iterations", f"{last['iteration']:,}")]
    parameters = run.start.get("parameters")
    if isinstance(parameters, int):
        cards.append(("parameters", count(parameters)))
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
        cards += [
            ("tokens", count(round(float(tokens[-1])))),
            ("training time, without evaluation and saving", duration(float(seconds[-1]) * 3600)),
        ]
    if len(rates.y):
        cards.append(("tokens/s, median", f"{sorted(rates.y)[len(rates.y) // 2]:,.0f}"))
    flops, mfu = curve(run, "tflops_per_device").y, curve(run, "mfu").y
    if len(flops):
        cards.append(("TFLOP/s per device, median", f"{sorted(flops)[len(flops) // 2]:.3g}"))
    if len(mfu):
        cards.append(("MFU, median", f"{sorted(mfu)[len(mfu) // 2]:.1%}"))
    if len(peak):
        cards.append(("peak memory of rank 0", size(round(float(peak.max())))))
    skipped = sum(bool(record.get("skipped")) for record in run.records)
    if skipped:
        cards.append(("iterations without an update", f"{skipped:,}"))
    text = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in cards)
    note = f"<p>One of {run.stride} iterations of {METRICS} was read.</p>" * (run.stride > 1)
    return f'<p>{escape(_state(run))}</p><div class="cards">{text}</div>{note}'


def _state(run: Run) -> str:
    """Say how the run stands, as far as its events tell."""
    starts = [event for event in run.events if event.get("event") == "start"]
    if not starts:
        return f"{METRICS} has {things(len(run.records), 'iteration')}."
    last, words = run.events[-1], [f"Started {starts[0].get('time', '')}"]
    if len(starts) > 1:
        times = "once" if len(starts) == 2 else f"{len(starts) - 1} times, last"
        words.append(f"resumed {times} {starts[-1].get('time', '')}")
    if last.get("event") == "end":
        words.append(f"ended {last.get('time', '')}: {last.get('why', '')}")
    else:
        words.append("its end is not recorded: it runs, or was killed")
    return "; ".join(words) + "."


# -- curves


def _curves(run: Run) -> str:
    begun = [event.get("iteration") for event in run.events if event.get("event") == "start"]
    marks = [(float(i), f"resumed after iteration {i}") for i in begun if isinstance(i, int) and i > 0]

    def chart(title: str, lines: list[Line], **options: Any) -> str:
        return line_chart(lines, title, "iteration", marks=marks, **options)

    def one(title: str, key: str, **options: Any) -> str:
        return chart(title, _smoothed("", curve(run, key), 0), **options)

    losses = _smoothed("training", curve(run, "loss"), 0)
    losses.append(Line("validation", curve(run, "validation_loss"), 1, points=True))
    peak, scale = curve(run, "memory_bytes/peak"), curve(run, "loss_scale")
    charts = [
        chart("Loss, nats per token", losses, log=True),
        chart("Training loss by corpus", _by_corpus(run, "loss_by_corpus"), log=True),
        chart("Validation loss by corpus", _by_corpus(run, "validation_loss_by_corpus"), log=True),
        one("Gradient norm, before clipping", "grad_norm", log=True),
        chart("Learning rate", [Line("", curve(run, "lr"), 0)], from_zero=True, y_format=lambda v: f"{v:.2g}"),
        one("Throughput, tokens/s", "tokens_per_second", from_zero=True),
    ]
    if _varies(peak):
        lines = [Line("", peak, 0)]
        charts.append(chart("Peak memory of rank 0, bytes", lines, from_zero=True))
    if _varies(scale):
        charts.append(chart("Loss scale", [Line("", scale, 0)], log=True))
    return f'<div class="charts">{"".join(charts)}</div>'


def _smoothed(label: str, found: Curve, color: int) -> list[Line]:
    """A curve, faint, and its running mean over a hundredth of it; a short one alone."""
    if len(found.y) < 200:
        return [Line(label, found, color)]
    return [Line("", found, color, faint=True), Line(label, smooth(found, 0), color)]


def _by_corpus(run: Run, key: str) -> list[Line]:
    names = keys_of(run, key)[:MAX_LINES]
    short = _short_names(names)
    points = key.startswith("validation")
    return [
        Line(short[number], smooth(curve(run, f"{key}/{name}"), 1 if points else 0), number, points=points)
        for number, name in enumerate(names)
    ]


def _varies(found: Curve) -> bool:
    return len(found.y) > 1 and bool(found.y.min() < found.y.max())


def _short_names(names: Sequence[str]) -> list[str]:
    """Last parts of paths, as many as tell them apart."""
    parts = [name.split("/") for name in names]
    for length in range(1, max(map(len, parts), default=0)):
        short = ["/".join(part[-length:]) for part in parts]
        if len(set(short)) == len(names):
            return short
    return list(names)


def _samples(run: Run) -> str:
    """The continuations of prompts that were written last."""
    record = next((record for record in reversed(run.records) if record.get("samples")), None)
    if record is None:
        return ""
    texts = "".join(f"<pre><b>{escape(str(s['prompt']))}</b>{escape(str(s['text']))}</pre>" for s in record["samples"])
    return f"<p><small>After iteration {record['iteration']:,}</small></p>{texts}"


# -- layout, memory, traffic


def _layout(start: Record) -> str:
    """The ranks by pipeline stage and data-parallel rank, and what ZeRO shards."""
    try:
        options = start["config"]
        layout = Layout(**start["layout"] | {"split": tuple(start["layout"]["split"])})
        layers, stage = options["model"]["num_layers"], options["zero"]["zero_stage"]
    except (KeyError, TypeError):
        return ""
    sharded = ["", "optimizer states", "optimizer states and gradients", "optimizer states, gradients and parameters"]
    words = [f"{things(layout.world_size, 'rank')}: {layout}, ZeRO stage {stage}"]
    if stage and layout.shard > 1:
        words.append(f"{sharded[stage]} sharded over {layout.shard} data-parallel ranks")
    text = f"<p>{escape('; '.join(words))}.</p>"
    if not 1 < layout.world_size <= MAX_DRAWN_RANKS:
        return text
    head = "".join(f"<th>data-parallel {dp}</th>" for dp in range(layout.dp))
    rows = []
    for pp in range(layout.pp):
        held = _ranges(layout.layers(layers, pp))
        cells = []
        for dp in range(layout.dp):
            boxes = "".join(f"<i>{rank}</i>" for rank in layout.tensor_ranks(pp, dp))
            cells.append(f"<td>{boxes}</td>")
        rows.append(f"<tr><th>stage {pp}<small>layers {held}</small></th>{''.join(cells)}</tr>")
    note = "A box is a rank; those in one cell share every layer by tensor parallelism." if layout.tp > 1 else ""
    table = f'<div class="wide"><table class="ranks"><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'
    return text + table + f"<p><small>{note}</small></p>" * bool(note)


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 6, 7] -> "0 to 2, 6 to 7"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a} to {b}" if a < b else str(a) for a, b in runs) or "none"


MEMORY = {
    "parameters": "parameters",
    "optimizer": "optimizer states",
    "gradients": "gradients",
    "activation_checkpoints": "inputs kept for recompute",
    "buffers": "buffers",
    "logits": "logits",
    "peak": "peak of all at one instant",
    "host": "host memory",
}
TRAFFIC = {"dp": "data-parallel and ZeRO", "tp": "tensor-parallel", "pp": "pipeline", "control": "losses, norms, flags"}


def _memory(record: Record) -> str:
    bars = _bars(record.get("memory_bytes"), MEMORY)
    note = "Of the last iteration: the most of each kind at one instant; they need not fall together."
    return bars and f"{bars}<p><small>{note}</small></p>"


def _bars(values: Any, names: dict[str, str]) -> str:
    """Rows of a name, a bar and an amount."""
    if not isinstance(values, dict):
        return ""
    shown = [(names.get(key, key), int(v)) for key, v in values.items() if isinstance(v, (int, float)) and v > 0]
    most = max((value for _, value in shown), default=0)
    rows = (
        f'<tr><th>{escape(name)}</th><td><b style="width:{100 * n / most:.1f}%"></b></td><td>{size(n)}</td></tr>'
        for name, n in shown
    )
    return f'<table class="bars">{"".join(rows)}</table>' * bool(shown)


# -- configuration, environment


def _configuration(config: dict[str, Any] | None, given: Iterable[str], options: dict[str, Any]) -> str:
    """Options that were given, and all behind a fold."""
    if config is None:
        return _folded("config.toml", _table(options.items())) if options else ""
    known, groups = set(given), {name: group for name, group in config.items() if isinstance(group, dict)}
    data = groups.get("data", {})
    if data.get("tokenizer") == "" and (data.get("data_path") or data.get("data_args_path")):
        groups["data"] = data | {"tokenizer": "of the corpus"}
    changed = {
        f"--{name.replace('_', '-')}": value
        for group in groups.values()
        for name, value in group.items()
        if name in known
    }
    everything = "".join(
        f"<h3>{escape(title)}</h3>"
        + _table(((f"--{name.replace('_', '-')}", value) for name, value in group.items()), known)
        for title, group in groups.items()
    )
    return _table(changed.items()) + _folded("All options", everything)


def _environment(run: Run) -> str:
    found, command = run.start.get("environment"), run.start.get("command")
    parts = []
    if isinstance(command, list):
        parts.append(f"<pre>{escape(shlex.join(map(str, command)))}</pre>")
    if isinstance(found, dict):
        parts.append(_table(found.items()))
    if len(run.events) > 1:
        rows = ((str(event.get("time", "")), _said(event)) for event in run.events)
        parts.append(_folded("Starts and ends", _table(rows)))
    return "".join(parts)


def _said(event: Record) -> str:
    why = f": {event['why']}" if "why" in event else ""
    return f"{event.get('event')} after iteration {event.get('iteration')}{why}"


def _table(rows: Iterable[tuple[str, Any]], bold: Iterable[str] = ()) -> str:
    marked = {f"--{name.replace('_', '-')}" for name in bold}
    text = "".join(
        f"<tr{' class=given' * (name in marked)}><th>{escape(str(name))}</th><td>{escape(_shown(value))}</td></tr>"
        for name, value in rows
    )
    return f'<table class="values">{text}</table>'


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return str(value) or "none"


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{text}</details>"
