"""The start of a run in words: one screen on the console, everything else in plan.txt in the log folder."""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from megazero.config.flags import as_flag, flags, to_toml, value_of
from megazero.config.presets import preset_values
from megazero.config.schema import Config
from megazero.files import explain, replace_file
from megazero.log import log
from megazero.memory.host import Machine
from megazero.model.stage import declare
from megazero.observe.start_notes import Processor, device_words, kept, large_vocabulary
from megazero.plan.layout.layers import num_parameters
from megazero.plan.layout.topology import Layout
from megazero.price.bytes.estimate import KINDS, StageBytes, stage_bytes
from megazero.price.bytes.report import padding_warning, padding_words, queue_line, table
from megazero.units import count, size

WIDTH, MARGIN = 120, 10  # columns of the screen; of the words before each paragraph
MOST_STAGES, MOST_GROUPS = 4, 4  # of a drawing; what lies between the ends is left out
SHOWN_SHARE = 0.02  # of a rank's memory, from which on a kind is named

KIND_NAMES = {
    "parameters": "weights",
    "optimizer": "optimizer states",
    "activation_checkpoints": "inputs kept for recompute",
}
ZERO = ("", "optimizer states", "optimizer states and gradients", "optimizer states, gradients and weights")
# Options that the first lines of the screen tell.
TOLD = {
    *("architecture", "num-layers", "hidden-size", "num-attention-heads", "seq-length", "vocab-size", "precision"),
    *("micro-batch-size", "global-batch-size", "train-iters", "zero-stage"),
    *("tensor-model-parallel-size", "pipeline-model-parallel-size"),
}


def screen(
    asked: Config,
    config: Config,
    layout: Layout,
    machine: Machine,
    device_name: str,
    chosen: str = "",
    processor: Processor | None = None,
    num_ids: int = 0,
    corpus: int = 0,
) -> list[str]:
    """Return the lines that a run begins with.

    Args:
        asked: the options as given, before what is derived from others is filled in.
        config: resolved.
        device_name: of this rank, such as "cpu" or "NVIDIA H200".
        chosen: the defaults of a GPU that were chosen, as `gpu_defaults` says them.
        processor: of this rank; None where it computes on a GPU.
        num_ids: of the tokenizer; 0 without one.
        corpus: tokens of the training split; 0 with --mock-data.
    """
    model, training, ranks = config.model, config.training, layout.world_size
    tokens = config.batch_sizes.total(training.train_iters) * model.seq_length
    parameters = count(num_parameters(declare(model)))
    parts = f"{config.micro_batches(layout.dp)} x micro-batch {training.micro_batch_size}"
    told = {
        "model": f"{model.architecture}, {parameters} parameters: {model.num_layers} layers, hidden "
        f"size {model.hidden_size}, {model.num_attention_heads} heads, vocabulary {model.vocab_size}; "
        f"{training.precision} on {ranks} x {device_words(config, device_name, processor)}",
        "layout": "\n".join(drawing(config, layout)),
        "memory": _memory(config, layout, machine),
        "plan": f"{training.train_iters:,} iterations of {training.global_batch_size:,} samples ("
        + (f"{layout.dp} ranks x " if layout.dp > 1 else "")
        + f"{parts}{padding_words(config, layout)}) of {model.seq_length:,} tokens: {count(tokens)} tokens"
        + (f", {tokens / corpus:{'.2g' if tokens < corpus else ',.1f'}} epochs" if corpus else ""),
        "options": " ".join(options(asked)),
        "defaults": chosen,
        "kept": kept(config),
        "note": large_vocabulary(config, num_ids),
        "warning": "\n".join(
            filter(None, (padding_warning(config, layout), _queue_warning(config, layout, machine.device_type)))
        ),
    }
    return [line for name, text in told.items() if text for line in _paragraph(name, text)]


def _paragraph(name: str, text: str) -> list[str]:
    indent = " " * MARGIN
    lines = [line for part in text.split("\n") for line in textwrap.wrap(part, WIDTH - MARGIN, break_on_hyphens=False)]
    return [name.ljust(MARGIN) + lines[0], *(indent + line for line in lines[1:])]


def _queue_warning(config: Config, layout: Layout, device_type: str) -> str:
    _, warns, text = queue_line(config, layout, device_type).rpartition("warning: ")
    return text if warns else ""


def drawing(config: Config, layout: Layout) -> list[str]:
    """Draw which ranks hold what: a line per pipeline stage; nothing for a single rank.

    Ranks in brackets share one copy of a stage's weights by tensor parallelism.
    """
    if layout.world_size == 1:
        return []
    axes = [(layout.pp, "pipeline stages"), (layout.dp, "data-parallel"), (layout.tp, "tensor-parallel")]
    head = " x ".join(f"{n} {name}" for n, name in axes if n > 1) + f" = {layout.world_size} ranks"
    stage = config.zero.zero_stage
    if stage and layout.shard > 1:
        head += f"; ZeRO stage {stage}: {ZERO[stage]} sharded over {layout.shard} data-parallel ranks"
        head += f", {layout.replica} copies" * (layout.replica > 1)
    elif layout.dp > 1:
        head += "; ZeRO stage 0: nothing sharded over data-parallel ranks"
    if layout.pp == 1:
        each = "each [ ] one copy of the model" if layout.tp > 1 else "each a copy of the model"
        return [head, f"ranks {_groups(layout, 0)}: {each}"]
    lines = []
    for pp in _ends(layout.pp, MOST_STAGES):
        if pp is None:
            lines.append("...")
            continue
        chunks = [layout.chunk_layers(config.model.num_layers, pp, chunk) for chunk in range(layout.chunks)]
        held = f"layers {', '.join(_span(chunk.start, chunk.stop - 1) for chunk in chunks)}"
        held = ("token table, " if pp == 0 else "") + held + (", head" if pp == layout.last_pp else "")
        lines.append(f"stage {pp}: {held}: ranks {_groups(layout, pp)}")
    return [head, *lines]


def _groups(layout: Layout, pp: int) -> str:
    """Name the ranks of a stage: "0 1 2 3" where each holds a copy, "[0-3] [4-7]" where four share one."""
    stage = layout.stage_ranks(pp)
    if layout.tp == 1 and len(stage) > 2 * MOST_GROUPS:
        return _span(stage[0], stage[-1])
    texts = []
    for dp in _ends(layout.dp, 2 * MOST_GROUPS if layout.tp == 1 else MOST_GROUPS):
        if dp is None:
            texts.append("...")
        elif layout.tp == 1:
            texts.append(str(stage[dp]))
        else:
            peers = layout.tensor_ranks(pp, dp)
            texts.append(f"[{_span(peers[0], peers[-1])}]")
    return " ".join(texts)


def _ends(number: int, most: int) -> list[int | None]:
    """Return 0 to number - 1, or the first most - 1 of them, None for those left out, and the last."""
    if number <= most:
        return list(range(number))
    return [*range(most - 1), None, number - 1]


def _span(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first} {last}" if last == first + 1 else f"{first}-{last}"


def _memory(config: Config, layout: Layout, machine: Machine) -> str:
    """Say what the fullest rank takes, of what, beside what there is."""
    stages = {pp: stage_bytes(config, layout, pp, machine.device_type) for pp in sorted({0, layout.pp - 1})}
    fullest = max(stages, key=lambda pp: stages[pp].peak)
    found = stages[fullest]
    need, here = found.peak, machine.ranks
    of = ""
    if machine.device is not None:
        of = f" of the {size(machine.device.num_bytes)} {machine.device.source}"
    elif machine.host is not None and len(here) == 1:
        of = f" of the {size(machine.host.num_bytes)} {machine.host.source}"
    elif machine.host is not None:
        of = f", {size(need * len(here))} for this node's {len(here)} of the {size(machine.host.num_bytes)} "
        of += machine.host.source
    stage = f" of stage {fullest}" * (layout.pp > 1)
    whose = f" per rank{stage}" * (layout.world_size > 1)
    return f"{size(need)}{whose}{of}, besides libraries: {_kinds(found)}"


def _kinds(found: StageBytes) -> str:
    shown = {kind: found.at_peak[kind] for kind in KINDS if found.at_peak[kind] >= SHOWN_SHARE * found.peak}
    texts = [f"{KIND_NAMES.get(kind, kind)} {size(num_bytes)}" for kind, num_bytes in shown.items()]
    return ", ".join(texts)


def options(asked: Config) -> list[str]:
    """Return the flags that differ from their defaults, or from those of --preset, except what the screen tells."""
    known: Mapping[str, Any] = preset_values(asked.preset) if asked.preset else {}
    found = [f"--preset {asked.preset}"] if asked.preset else []
    for name, flag in flags().items():
        value = value_of(asked, name)
        if value != known.get(name, flag.default) and name not in TOLD:
            found.append(as_flag(name, value))
    return found


def details(
    config: Config, layout: Layout, machine: Machine, hosts: Sequence[str], environment: Mapping[str, str], notes: str
) -> str:
    """Return what the screen leaves out: bytes by kind and their formulas, all options, the environment.

    Args:
        hosts: of all ranks.
        notes: what else there is to say about the run.
    """
    per_host = [f"  {host}: ranks {_span(ranks[0], ranks[-1])}" for host, ranks in _by_host(hosts)]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}"
    variables = [f"{name}={value}" for name, value in environment.items()]
    parts = [
        table(config, layout, machine.device_type),
        notes,
        "\n  ".join(["environment", f"{versions}, {platform.platform()}", *variables]),
        "hosts\n" + "\n".join(per_host),
        "all options, those derived from others filled in\n" + to_toml(config),
    ]
    return "\n\n".join(filter(None, parts))


def _by_host(hosts: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    yield from ranks.items()


def hand_out(config: Config, screen: Sequence[str], details: str) -> None:
    """Write both to plan.txt in --log-dir, unless the run only evaluates; print `details` with --verbose.

    Raises:
        ValueError: the folder or the file cannot be made.
    """
    if config.log.verbose:
        log.info(details)
    if not config.log.log_dir or config.evaluation.eval_only:  # perhaps another run's folder
        return
    folder = Path(config.log.log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "plan.txt", "\n".join([*screen, "", details, ""]))
    except OSError as error:
        raise ValueError(f"--log-dir {folder}: {explain(error)}") from None
    log.info(f"{'more':{MARGIN}}{folder / 'plan.txt'}: memory by kind, all options, environment")
