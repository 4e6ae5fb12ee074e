"""--plan-search for published models and clusters: does it find the published layout, or a better one, and why.

Each is searched twice: with all features of this engine, and with those of the published system.
"""

import multiprocessing
import shlex
import time
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.paper_speed import executed
from benchmarks.reports.blocks import markdown
from benchmarks.reports.published import FIGURE_2_ZERO, FIGURE_4, NARAYANAN, MegatronRun, ZeroRun
from benchmarks.reports.rehearsals import PROCESSES, flags_of
from megazero.engine.model.stage import declare
from megazero.flags.cli import parse
from megazero.flags.resolve import resolve
from megazero.planner.layouts import layout_words
from megazero.planner.run_plan import Plan, make_plan
from megazero.planner.search.candidates import Candidate
from megazero.planner.search.search import Search
from megazero.planner.search.search_report import search_command
from megazero.planner.time.devices import load_device


def of_zero(c: Candidate) -> bool:
    """The ZeRO paper's system: no pipeline, Pos+g at most, full recompute."""
    return c.pp == 1 and c.zero_stage <= 2 and not c.shard and c.recompute == "full" and not c.sequence


def of_megatron(c: Candidate) -> bool:
    """Narayanan 2021's system: no ZeRO, full recompute, 1f1b or interleaved."""
    whole = c.recompute == "full" and not c.partition and not c.sequence
    return whole and c.zero_stage == 0 and c.schedule in ("1f1b", "interleaved")


class Case(NamedTuple):
    """A published run: flags of its model and batch, and of its layout."""

    name: str
    gpus: int
    device: str
    model: str
    layout: str
    then: Callable[[Candidate], bool]
    tflops: float | None  # per GPU, published, recompute counted


def _zero(run: ZeroRun) -> Case:
    batch = run.micro_batch * run.gpus // run.tp
    model = flags_of(run.layers, run.hidden, run.heads, global_batch_size=batch)
    layout = f"--zero-stage 2 --recompute full --micro-batch-size {run.micro_batch}"
    if run.tp > 1:
        layout += f" --tensor-model-parallel-size {run.tp} --partition-activations"
    return Case(f"{run.model}, ZeRO paper", run.gpus, "v100-32gb", model, layout, of_zero, run.tflops)


def _megatron(run: MegatronRun) -> Case:
    options = {"vocab_size": 51200, "seq_length": 2048, "precision": "bf16", "grad_dtype": "fp32"}
    model = flags_of(run.layers, run.hidden, run.heads, **options, global_batch_size=run.batch)
    layout = f"--tensor-model-parallel-size {run.tp} --zero-stage 0 --recompute full --micro-batch-size 1"
    if run.pp > 1:
        layout += f" --pipeline-model-parallel-size {run.pp}"
    name = f"{run.model}, Narayanan 2021"
    return Case(name, run.gpus, "a100-80gb", model, layout, of_megatron, run.tflops)


NARAYANAN_CASES = list(map(_megatron, NARAYANAN))
CASES = [
    _zero(FIGURE_4[-1]),
    _zero(next(run for run in FIGURE_2_ZERO if run.model == "100B")),
    *NARAYANAN_CASES,
]


class Row(NamedTuple):
    """A layout as text."""

    layout: str
    seconds: float
    gigabytes: float
    waits: str
    command: str


class Answer(NamedTuple):
    """Results of a case: the published layout, the best of its features, the best of all."""

    published: Row
    tflops: float  # of it, predicted, recompute counted
    then: Row
    place: int  # of the published layout among those of its features that were played; 0: not played
    best: Row
    layouts: int
    cpu_seconds: float  # of the search over all


def answer(case: Case) -> Answer:
    """Search a case, in a process of its own."""
    device, argv = load_device(case.device), case.model.split()
    config, layout = resolve(parse([*argv, *case.layout.split()]), case.gpus, 0, declare)
    asked = [*argv, "--plan-search", "--world-size", str(case.gpus), "--device-type", case.device]
    found, spent = list[list[Plan]](), list[float]()
    for allowed in (None, case.then):  # the second search uses the traces of the first
        begun = time.process_time()
        search = Search(parse(asked), device, 0)
        layouts = len(search.found)
        if allowed is not None:
            search.found = [c for c in search.found if allowed(c)]
        plans = search.run()[:10]
        spent.append(time.process_time() - begun)
        found.append(plans)
    best, then = found
    published = make_plan(config, layout, device)
    tflops = executed(config, published.time.expected, case.gpus)
    place = next((n + 1 for n, plan in enumerate(then) if _same(plan, published)), 0)
    rows = [_row(plan, asked) for plan in (published, then[0], best[0])]
    return Answer(rows[0], tflops, rows[1], place, rows[2], layouts, spent[0])


def _same(a: Plan, b: Plan) -> bool:
    return (a.layout, a.config.training, a.config.parallel, a.config.zero, a.config.activations) == (
        b.layout,
        b.config.training,
        b.config.parallel,
        b.config.zero,
        b.config.activations,
    )


def _row(plan: Plan, asked: list[str]) -> Row:
    config, parts = plan.config, plan.time.expected.parts
    words = [layout_words(plan.layout), config.parallel.pipeline_schedule * (plan.layout.pp > 1)]
    words += [f"ZeRO {config.zero.zero_stage}", f"recompute {config.activations.recompute}"]
    words += ["Pa" * config.activations.partition_activations, "SP" * config.parallel.sequence_parallel]
    words += [f"micro-batch {config.training.micro_batch_size}"]
    shares = {name: parts[name] / plan.seconds for name in ("recompute", "tp", "dp", "pp", "bubble")}
    waits = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    peak = plan.stages[plan.fullest].peak / 1e9
    line = search_command(plan, parse(asked), asked)
    return Row(", ".join(word for word in words if word), plan.seconds, peak, waits, line)


def searches() -> dict[str, str]:
    """Search all cases; one process serves several."""
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        answers = pool.map(answer, CASES, chunksize=1)
    rows, lines = list[list[object]](), list[str]()
    for case, found in zip(CASES, answers, strict=True):
        measured = f", {case.tflops:g} measured" if case.tflops else ""
        published = f"published ({found.tflops:.0f} TFLOP/s predicted{measured})"
        place = f"{found.place}. of its kind" if found.place else "behind those of its kind that were played"
        title = f"{case.name}, {case.gpus} x {case.device}"
        for label, row in (
            (f"{published}: {place}", found.published),
            ("the best of its kind", found.then),
            (f"the best of {found.layouts:,} layouts, searched in {found.cpu_seconds:.0f} s", found.best),
        ):
            speedup = f"{found.published.seconds / row.seconds:.2f}"
            rows.append([title, label, row.layout, f"{row.seconds:.4g}", speedup, f"{row.gigabytes:.0f}", row.waits])
            title = ""
        ask = shlex.join(["python", "pretrain_gpt.py", *case.model.split(), "--plan-search"])
        lines += [f"# {case.name}", f"{ask} --world-size {case.gpus} --device-type {case.device}", found.best.command]
    columns = ["model and cluster", "", "layout", "s a step", "speed-up", "GB", "shares of the step"]
    return {"searches": markdown(columns, rows), "searches, command lines": "\n".join(["```", *lines, "```"])}
