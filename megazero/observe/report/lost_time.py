"""Goodput: the time of a run in steps that are kept, and the causes of the rest. docs/metrics.md defines them."""

from megazero.observe.pauses import PAUSES
from megazero.observe.report.runs import Run
from megazero.units import duration

SHORT_SECONDS = 3600
KEPT, AGAIN, DOWN, OTHER = "steps that are kept", "steps computed again", "no process", "all else"


def spent(run: Run) -> dict[str, float]:
    """Return seconds by cause, from the first start to the last record or end; empty for folders of older versions."""
    starts = [start for start in run.starts if "seconds" in start]
    if not starts or starts[0] is not run.starts[0]:
        return {}
    found = {KEPT: 3600 * float(run.axes["hours"][-1])}
    found[AGAIN] = sum(start.get("lost_seconds", 0.0) for start in starts)
    found[DOWN] = sum(start.get("down_seconds", 0.0) for start in starts)
    for start in starts:
        for part, seconds in start["seconds"].items():
            found[f"start: {part}"] = found.get(f"start: {part}", 0.0) + seconds
    moments = [*run.records, *run.events]
    for key, cause in PAUSES.items():
        found[cause] = sum(each.get("pause_seconds", {}).get(key, 0.0) for each in moments)
    begin = starts[0].get("at", 0.0) - sum(starts[0]["seconds"].values())
    total = max(each.get("at", begin) for each in moments) - begin
    found[OTHER] = max(0.0, total - sum(found.values()))
    return found


def kept_share(found: dict[str, float]) -> float | None:
    """Return the share of time in steps that are kept, given the seconds by cause.

    None for a run of less than an hour that computed no step again: its start alone would decide the share.
    """
    total = sum(found.values())
    if not found or (total < SHORT_SECONDS and not found[AGAIN]):
        return None
    return found[KEPT] / total


def goodput_line(run: Run) -> str:
    """Return the goodput, and the causes of the rest that take a hundredth of the time; empty without a goodput."""
    found = spent(run)
    total, share = sum(found.values()), kept_share(found)
    if share is None:
        return ""
    causes = {cause: seconds for cause, seconds in found.items() if cause != KEPT and not cause.startswith("start: ")}
    causes = {"starts": sum(found.values()) - sum(causes.values()) - found[KEPT]} | causes
    large = [f"{cause} {seconds / total:.1%}" for cause, seconds in causes.items() if seconds >= total / 100]
    rest = f"; {', '.join(large)}" if large else ""
    return f"{share:.1%} of {duration(total)} in {KEPT}{rest}"
