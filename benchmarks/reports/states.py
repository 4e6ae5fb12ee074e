"""Model states: Tables 1 and 2 and Figure 1 of the ZeRO paper by formula and by rehearsal; traffic."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.reports.blocks import gb, markdown, percent
from benchmarks.reports.pictures import bars
from benchmarks.reports.rehearsals import Asked, flags_of, rehearse_all, resolved, states
from benchmarks.reports.zero_theory import (
    DEGREES,
    DEVICE_BYTES,
    MEASURED,
    SIZES,
    STAGES,
    TABLE_2,
    bytes_per_parameter,
    largest,
    rounded,
    table_1_cell,
    table_2_cell,
)
from megazero.command.rehearsal.rehearsal import Rehearsal
from megazero.engine.model.stage import declare
from megazero.planner.bytes.estimate import estimate
from megazero.planner.parameter_counts import num_parameters

# model -> (layers, hidden size, heads): few wide layers, since only the sum counts here
SHAPES = {"7.5B": (4, 12032, 94), "128B": (4, 51200, 400), "1T": (4, 143360, 1120)}
BUCKETS = 200  # a model in as many buckets: few enough to run, small enough not to matter
HEAD = 128  # width of an attention head in Table 2's shapes


def _asked(model: str, nd: int, stage: int) -> Asked:
    """One short sequence a rank: activations do not count here."""
    return Asked(nd, flags_of(*SHAPES[model], **_options(stage, nd, SIZES[model])), nd - 1)


def _options(stage: int, nd: int, parameters: float) -> dict[str, object]:
    """Stage 1 has two micro-batches: with one it would reduce gradients at once, and hold no whole one, as stage 2."""
    options: dict[str, object] = {"zero_stage": stage, "seq_length": 64, "recompute": "full"}
    options |= {"reduce_bucket_size": int(parameters / BUCKETS), "no_overlap_comm": True}
    return options | {"global_batch_size": nd * (2 if stage == 1 else 1)}


def _states(found: Rehearsal, stage: int, nd: int) -> int:
    return states(found.memory, accumulates=stage == 1 and nd > 1)


def table_1() -> dict[str, str]:
    """Table 1, Figure 1, and traffic next to 2 Psi and 3 Psi: all from the same rehearsals."""
    cells = [(model, nd, stage) for model in SIZES for nd in DEGREES for stage in STAGES if nd > 1 or stage == 1]
    found = dict(zip(cells, rehearse_all([_asked(*cell) for cell in cells]), strict=True))
    found |= {(model, 1, stage): found[model, 1, 1] for model in SIZES for stage in STAGES}  # nothing is sharded
    psi = {model: num_parameters(declare(resolved(_asked(model, 1, 1))[0].model)) for model in SIZES}
    rows, worst = [], 0.0
    for nd in DEGREES:
        row: list[object] = [nd]
        for model in SIZES:
            shown = []
            for stage in STAGES:
                per_parameter = _states(found[model, nd, stage], stage, nd) / psi[model]
                deviation = per_parameter / bytes_per_parameter(stage, nd) - 1
                worst = max(worst, deviation, -deviation)
                text, cut = table_1_cell(model, nd, stage)
                ours = rounded(per_parameter * SIZES[model] / 1e9)
                shown.append(f"{text}{'*' * cut} ({ours})")
            row.append(", ".join(shown))
        rows.append(row)
    assert worst < 0.01, worst
    table = markdown(["Nd", *(f"{model}: Pos, Pos+g, Pos+g+p" for model in SIZES)], rows)
    shapes = "; ".join(
        f"{model}: {shape[0]} layers of {shape[1]}, Psi = {psi[model] / 1e9:.4g}B" for model, shape in SHAPES.items()
    )
    traffic = []
    for nd in DEGREES[1:]:
        traffic.append([nd])
        for stage in STAGES:
            each = found["7.5B", nd, stage]
            ideal = (3 if stage == 3 else 2) * (nd - 1) / nd
            sent = each.traffic["dp"] / 2 / psi["7.5B"]
            traffic[-1].append(f"{sent:.4f} ({ideal:.4f}, {percent(sent, ideal)})")
    bars_of = [_states(found["7.5B", 1, 1], 1, 1), *(_states(found["7.5B", 64, stage], stage, 64) for stage in STAGES)]
    _figure_1([num_bytes / psi["7.5B"] * 7.5 for num_bytes in bars_of])
    summary = (
        f"Rehearsed models, of which GB are scaled to the paper's Psi: {shapes}. The largest deviation of a "
        f"rehearsal's bytes per parameter from the formula is {100 * worst:.3f} %: Pos counts a reduce bucket, "
        f"1/{BUCKETS} of the model, besides the gradients that it adds up; all others differ by padding alone."
    )
    return {
        "table 1": f"{table}\n\n{summary}",
        "traffic": markdown(["Nd", *STAGES.values()], traffic),
    }


def _figure_1(ours: list[float]) -> None:
    names = ["baseline", *STAGES.values()]
    paper = [120.0, 31.4, 16.6, 1.9]
    bars("paper-figure-1.svg", names, {"paper": paper, "rehearsed": ours}, "GB of model states")


def _shape(mp: int, stage: int, layers: int) -> tuple[int, int]:
    """Return (hidden size, heads) such that the largest model has some `layers`."""
    heads = max(1, round(math.sqrt(largest(stage, mp) / (12 * layers)) / HEAD / mp)) * mp
    return HEAD * heads, heads


def _largest(mp: int, stage: int, about: int) -> tuple[int, Asked]:
    """Return the most layers whose states fit a device by `estimate`, some `about`, and that model's rehearsal."""
    hidden, heads = _shape(mp, stage, about)
    options = _options(stage, 64, largest(stage, 1)) | {"tensor_model_parallel_size": mp}

    def asked(layers: int) -> Asked:
        return Asked(64 * mp, flags_of(layers, hidden, heads, **options))

    def fits(layers: int) -> bool:
        memory = estimate(*resolved(asked(layers)), needs_staging_buffer=False).memory
        return states(memory, accumulates=stage == 1) <= DEVICE_BYTES

    most = 1
    while fits(2 * most):
        most *= 2
    step = most
    while step > 1:
        step //= 2
        most += step * fits(most + step)
    return most, asked(most)


class Cell(NamedTuple):
    """A cell of Table 2 by rehearsal: parameters of the largest model of whole layers, bytes of states held."""

    layers: int
    parameters: int
    held: int


def table_2_cells(cells: Sequence[tuple[int, int]], layers: int = 64) -> list[Cell]:
    """Rehearse the largest model of some `layers` of each (MP, stage)."""
    models = [_largest(mp, stage, layers) for mp, stage in cells]
    rehearsed = rehearse_all([asked for _, asked in models])
    return [
        Cell(layers, num_parameters(declare(resolved(asked)[0].model)), _states(found, stage, 64))
        for (_, stage), (layers, asked), found in zip(cells, models, rehearsed, strict=True)
    ]


def table_2() -> dict[str, str]:
    """Table 2: the largest model that fits, by formula and by rehearsal."""
    cells = [(mp, stage) for mp in TABLE_2 for stage in range(4)]
    found = dict(zip(cells, table_2_cells(cells), strict=True))
    rows = []
    for mp, printed in TABLE_2.items():
        row: list[object] = [f"{mp} / {64 * mp}"]
        for stage in range(4):
            cell, text, exact = found[mp, stage], table_2_cell(stage, mp), largest(stage, mp)
            assert cell.held <= DEVICE_BYTES, (mp, stage, cell)
            assert text == printed.split()[stage]
            row.append(f"{text} ({cell.parameters / 1e9:.1f}B in {gb(cell.held)}; {percent(cell.parameters, exact)})")
        rows.append([*row, MEASURED[mp].replace(" ", ", ")])
    columns = ["MP / GPUs", "baseline", *STAGES.values(), "the paper's measured baseline, Pos"]
    return {"table 2": markdown(columns, rows)}
