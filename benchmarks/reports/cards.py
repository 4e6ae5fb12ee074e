"""Published speeds on newer cards next to plans in bf16 with the published axes; 8 and 4 bits have no share."""

import re

from benchmarks.reports.blocks import markdown
from benchmarks.reports.published import CARD_RUNS, MODELS, CardRun
from megazero.flags.cli import parse
from megazero.flags.flag_names import LAYOUT_FLAGS, value_of
from megazero.planner.layouts import layout_words
from megazero.planner.run_plan import Plan, make_plan
from megazero.planner.search.search import Search
from megazero.planner.time.devices import load_device


def fastest(run: CardRun) -> Plan | None:
    """Return the fastest plan in bf16 with the published axes; None if no recompute makes one fit."""
    flags = f"{MODELS[run.model]} {run.layout} --global-batch-size {run.batch}"
    config = parse(f"{flags} --plan-search --world-size {run.gpus} --device-type {run.device}".split())
    given = {name: value_of(config, name) for name in LAYOUT_FLAGS if f"--{name} " in flags}  # not the preset's
    device = load_device(run.device).multiplying(config.training)
    plans = Search(config, device, 0, given=given).run()
    return make_plan(plans[0].config, plans[0].layout, device) if plans else None  # with a range


def row(run: CardRun) -> list[object]:
    """Return a row of the table."""
    plan = fastest(run)
    published = f"{run.tokens:,}, {run.source}" if run.tokens else "-"
    cells = [run.model, f"{run.gpus} x {run.device}", published, run.narrower or "-"]
    if plan is None:
        return [*cells, "does not fit", "-", "-", "-"]
    each = plan.tokens / run.gpus
    planned, low, high = (each / seconds for seconds in (plan.seconds, plan.time.slow, plan.time.fast))
    axes = re.sub(r" \(layers [^)]*\)", "", layout_words(plan.layout))
    words = f"{axes}, recompute {plan.config.activations.recompute}"
    share = f"{run.tokens / planned:.2f}" if run.tokens else "-"
    return [*cells, words, f"{planned:,.0f}", f"{low:,.0f} to {high:,.0f}", share]


def cards() -> dict[str, str]:
    """Make the table."""
    columns = ["model", "cards", "in BF16", "in fewer bits", "planned in bf16", "tokens/s", "range", "share"]
    return {"cards": markdown(columns, list(map(row, CARD_RUNS)))}
