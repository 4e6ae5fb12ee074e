"""Report of --rehearse, printed and written: each rehearsed rank's bytes next to the estimate."""

import json
import re
import time
from dataclasses import asdict
from pathlib import Path

from megazero.command.rehearsal.rehearsal import Rehearsal, RehearsalDevice, rehearse_rank
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.files import write_atomically
from megazero.flags.config import Config
from megazero.flags.resolve import replica_layout, replica_words, resolve
from megazero.flags.validate import check_device
from megazero.planner.layouts import coord_words, layout_words
from megazero.planner.time.exchange import choose_exchange
from megazero.world import World

FORM = "write WORLD, WORLD:RANK, WORLD:RANK,RANK,... or WORLD:stages"
REPORT = "rehearsal.json"


def pretended_world(config: Config, world: World) -> int:
    """Return the number of ranks that --rehearse names.

    Raises:
        ValueError: it is malformed, is no multiple of the model-parallel size, or this process is one of several.
    """
    text = config.plan.rehearse
    if world.launcher != "single":
        raise ValueError(
            f"--rehearse {text} needs a single process, and {world.launcher} started {world.size}; start it with python"
        )
    if config.evaluation.eval_only:
        raise ValueError(f"--rehearse {text}: --eval-only trains nothing to rehearse; drop either")
    found = re.fullmatch(r"(\d{1,7})(:(stages|\d+(,\d+)*))?", text)
    if not found or int(found[1]) == 0:
        raise ValueError(f"--rehearse {text}: not a number of ranks; {FORM}")
    size = int(found[1])
    each = replica_layout(config.parallel).world_size
    if size % each:
        fits = size // each * each
        either = f"{fits} or {fits + each}" if fits else f"{each}"
        raise ValueError(
            f"--rehearse {text}: {size} ranks are not divisible by {replica_words(config.parallel)}; "
            f"rehearse {either}, or change either"
        )
    return size


def rehearsed_ranks(text: str, layout: Layout) -> list[int]:
    """Return the ranks of a layout that --rehearse names.

    Raises:
        ValueError: a rank is not one of the world's.
    """
    _, _, ranks = text.partition(":")
    if ranks == "stages":
        return [layout.stage_ranks(stage)[0] for stage in range(layout.pp)]
    found = [int(rank) for rank in ranks.split(",")] if ranks else [0]
    beyond = [rank for rank in found if rank >= layout.world_size]
    if beyond:
        raise ValueError(f"--rehearse {text}: there is no rank {beyond[0]}; ranks are 0 to {layout.world_size - 1}")
    return found


def run_rehearsal(config: Config, world: World, vocab_size: int) -> list[Rehearsal]:
    """Rehearse the ranks of --rehearse: print a table for each, and write rehearsal.json in --log-dir.

    Args:
        vocab_size: of the tokenizer; 0 without one.
    """
    text, asked, start = config.plan.rehearse, config.plan.rehearse_on, time.perf_counter()
    on, found = RehearsalDevice.of(asked), []
    config, layout = resolve(config, pretended_world(config, world), vocab_size, declare)
    check_device(config, on.kind)
    config = choose_exchange(config, layout, None)  # a rehearsal knows no speeds
    ranks = rehearsed_ranks(text, layout)
    tensors = f"real tensors on {on.device}" if on.real else f"stand-ins for tensors of a {asked.upper()}"
    exchange = f"--cp-exchange {config.parallel.cp_exchange}, " if layout.cp > 1 else ""
    stage = config.zero.zero_stage
    print(f"rehearsing {layout.world_size} ranks, {layout_words(layout)}, {exchange}ZeRO stage {stage}, with {tensors}")
    for rank in ranks:
        found.append(rehearse_rank(config, layout, rank, on))
        print(rehearsal_table(found[-1]), flush=True)
    if config.log.log_dir:
        path = Path(config.log.log_dir) / REPORT
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "world_size": layout.world_size,
            "layout": asdict(layout),
            "rehearse_on": asked,
            "ranks": [each.to_json() for each in found],
        }
        write_atomically(path, (json.dumps(report, indent=1) + "\n").encode())
        print(f"wrote {path}")
    print(f"{time.perf_counter() - start:.1f} s; this process took {found[-1].host_peak_bytes / 1e9:.2f} GB")
    return found


def rehearsal_table(found: Rehearsal) -> str:
    """Format one rank's bytes: rehearsed, estimated, and their difference."""
    save = found.save
    rows = [f"rank {found.rank}: {coord_words(found.coord)}"]
    rows.append(f"  {'bytes':<28}{'rehearsal':>20}{'estimate':>20}{'difference':>14}")
    pairs = [(kind, found.memory[kind], found.estimated_memory[kind]) for kind in found.memory]
    pairs += [(f"{kind} traffic", found.traffic[kind], found.estimated_traffic[kind]) for kind in found.traffic]
    for kind, ours, theirs in pairs:
        rows.append(f"  {kind:<28}{ours:>20,}{theirs:>20,}{ours - theirs:>14,}")
    rows.append(f"  {'all tensors at once':<28}{found.allocated:>20,}   in {found.allocated_in}")
    rows.append(f"  {'sent in an iteration':<28}{'calls':>20}{'bytes':>20}")
    for each in found.collectives:
        name = f"{each.operation} over {each.axis}" + (", control" if each.kind == "control" else "")
        rows.append(f"    {name:<26}{each.calls:>20,}{each.num_bytes:>20,}")
    if save is not None:
        rows.append(
            f"  a checkpoint of {save.checkpoint_bytes:,} bytes: this rank writes {save.written_bytes:,} in "
            f"{save.written_chunks:,} chunks. Its plan of {save.rank_plan_bytes:,} bytes takes "
            f"{save.rank_seconds:.2f} s; rank 0 joins all plans in {save.coordinator_seconds:.2f} s"
        )
    rows.append(f"  built in {found.build_seconds:.1f} s, a step in {found.step_seconds:.1f} s")
    return "\n".join(rows)
