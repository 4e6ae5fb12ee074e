"""The start of a run: one screen on the console, everything else in plan.txt in the log folder."""

import platform
import textwrap
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import numpy
import torch

from megazero.engine.model.scores import Scores
from megazero.engine.model.stage import declare
from megazero.engine.options.option import Role
from megazero.engine.plan.layout.dealing import dealt_multiple, dealt_tokens
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.families import FAMILIES
from megazero.files import explain, replace_file
from megazero.flags.config import Config
from megazero.flags.flag_names import as_flag, flags, flags_with, to_toml, value_of
from megazero.flags.presets import preset_values
from megazero.flags.stages import WHOLE, DataStage, last_samples
from megazero.host import Machine
from megazero.log import log
from megazero.planner.bytes.bytes_report import bytes_table, expert_words, padding_warning, padding_words, queue_line
from megazero.planner.bytes.estimate import KINDS, StageBytes, stage_bytes
from megazero.planner.imbalance import causal_imbalance, update_imbalance
from megazero.planner.layouts import stage_copies
from megazero.planner.parameter_counts import num_parameters
from megazero.units import count, ranges, size, things

WIDTH, MARGIN = 120, 10  # columns of the screen; of the name before each paragraph
MOST_DRAWN = 4  # stages, or copies of one, that a drawing has; it leaves out those in the middle
SHOWN_SHARE = 0.02  # smallest share of a rank's memory that is named
LARGE_VOCABULARY = 2  # smallest ratio of --vocab-size to the tokenizer's ids that is reported

KIND_NAMES = {
    "parameters": "weights",
    "optimizer": "optimizer states",
    "activation_checkpoints": "inputs kept for recompute",
}
ZERO = ("", "optimizer states", "optimizer states and gradients", "optimizer states, gradients and weights")
# x86 instructions that multiply matrices of a 16-bit type. A CPU without them is faster in fp32.
FAST_TYPES = {"bf16": ("amx_bf16", "avx512_bf16"), "fp16": ("amx_fp16", "avx512_fp16")}
SHOWN_OPTIONS = flags_with(Role.ON_SCREEN)


# -- the screen


def screen(
    asked: Config,
    config: Config,
    layout: Layout,
    machine: Machine,
    device: str,
    chosen: str = "",
    num_ids: int = 0,
    corpus: int = 0,
    auto: str = "",
    tasks: str = "",
    stages: Sequence[DataStage] = (WHOLE,),
) -> list[str]:
    """Return the lines that a run begins with.

    Args:
        asked: the options as given, before derived ones are filled in.
        config: resolved.
        device: of this rank, such as "NVIDIA H200", or from `device_text`.
        chosen: the report of `gpu_defaults` on the defaults that it chose.
        num_ids: of the tokenizer; 0 without one.
        corpus: tokens of the training split; 0 with --mock-data.
        auto: the report of --layout auto.
        tasks: the description of --tasks.
        stages: of --data-stages.
    """
    model, training = config.model, config.training
    last = last_samples(config, stages)
    ends = stages[len(last) - 1]
    tokens = ends.consumed_tokens(last[-1], ends.over(config).model.seq_length)
    replicas = f"{layout.dp} ranks x " if layout.dp > 1 else ""
    batch = f"{replicas}{config.micro_batches(layout.dp)} x micro-batch {training.micro_batch_size}"
    epochs = f", {tokens / corpus:{'.2g' if tokens < corpus else ',.1f'}} epochs" if corpus and len(stages) == 1 else ""
    queue = _queue_warning(config, layout, machine.device_type)
    warnings = padding_warning(config, layout), queue, *_update_warnings(config)
    paragraphs = {
        "model": f"{model.architecture}, {count(num_parameters(declare(model)))} parameters: {model.num_layers} "
        f"layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads, vocabulary "
        f"{model.vocab_size}; {training.precision} on {layout.world_size} x {device}",
        "experts": expert_words(model),
        "layout": "\n".join(drawing(config, layout)),
        "auto": auto,
        "memory": _memory(config, layout, machine),
        "plan": f"{things(training.train_iters, 'iteration')} of {things(training.global_batch_size, 'sample')} "
        f"({batch}{padding_words(config, layout)}) of {model.seq_length:,} tokens: {count(tokens)} tokens{epochs}",
        "stages": "\n".join(_stage_words(stage, stage.over(config)) for stage in stages) if len(stages) > 1 else "",
        "tasks": tasks,
        "options": " ".join(option_lines(asked)),
        "defaults": chosen,
        "kept": kept_lines(config),
        "note": large_vocabulary(config, num_ids),
        "warning": "\n".join(filter(None, warnings)),
    }
    return [line for name, text in paragraphs.items() if text for line in _paragraph(name, text)]


def _paragraph(name: str, text: str) -> list[str]:
    lines = [line for part in text.split("\n") for line in textwrap.wrap(part, WIDTH - MARGIN, break_on_hyphens=False)]
    return [f"{name if number == 0 else '':{MARGIN}}{line}" for number, line in enumerate(lines)]


def _stage_words(stage: DataStage, config: Config) -> str:
    """Name the first sample of a stage, the length of its samples, and its corpora."""
    data = config.data
    corpora = "mock data" if data.mock_data else " ".join(data.data_path) or data.data_args_path
    return f"{stage.number}, from sample {stage.first:,}: samples of {config.model.seq_length:,} tokens, {corpora}"


def _queue_warning(config: Config, layout: Layout, device_type: str) -> str:
    _, warns, text = queue_line(config, layout, device_type).rpartition("warning: ")
    return text if warns else ""


def _update_warnings(config: Config) -> list[str]:
    """Return warnings of weights whose gradients are 0 but for rounding."""
    model, found = config.model, []
    if model.expert_layers and model.moe_router_topk == 1 and not model.moe_router_pre_softmax:
        found.append(
            "--moe-router-topk 1 without --moe-router-pre-softmax: the weight of a token's only expert is always 1, so "
            "that routers do not learn from the loss; a new model needs --moe-router-pre-softmax, or 2 experts"
        )
    unrotated = model.rotary_dim < model.head_dim or "N" in model.layer_pattern
    shifts = (model.add_qkv_bias or "qkv" in model.linear_biases) and not (
        model.attention_sinks or model.attention_softcap
    )
    if config.optimizer.rules.others.takes_sign and shifts and (unrotated or model.learned_positions):
        found.append(
            f"--optimizer {config.optimizer.optimizer}: no loss depends on the biases of keys that are not rotated; "
            "their gradients are rounding, whose sign it takes, so these biases differ between layouts"
        )
    return found if config.trains else []


def drawing(config: Config, layout: Layout) -> list[str]:
    """Return a line per pipeline stage, with its layers and its ranks; nothing for a single rank.

    Ranks in brackets share one copy of a stage's weights by tensor parallelism; those in braces share the tokens of a
    sample by context parallelism.
    """
    if layout.world_size == 1:
        return []
    axes = [(layout.pp, "pipeline stages"), (layout.dp, "data-parallel"), (layout.cp, "context-parallel")]
    axes.append((layout.tp, "tensor-parallel"))
    head = " x ".join(f"{n} {name}" for n, name in axes if n > 1) + f" = {layout.world_size} ranks"
    stage, tokens = config.zero.zero_stage, []
    if layout.cp > 1:
        tokens = [_dealt_words(config, layout)]
    if stage and layout.shard > 1:
        copies = f", {layout.replica} copies" if layout.replica > 1 else ""
        head += f"; ZeRO stage {stage}: {ZERO[stage]} sharded over {layout.shard} {_data_words(layout)}{copies}"
    elif layout.data > 1:
        head += f"; ZeRO stage 0: nothing sharded over {_data_words(layout)}"
    if config.optimizer.rules.matrices.whole_matrices and stage and layout.shard > 1:
        uneven = update_imbalance(rank_spec(config, layout, 0, declare))
        head += f"; each matrix is updated by one of them, the busiest has {uneven:.2f} times the mean work"
    if layout.pp == 1:
        each = "each [ ] one copy of the model" if layout.tp > 1 else "each a copy of the model"
        return [head, f"ranks {_groups(layout, 0)}: {each}", *tokens]
    stages = []
    for pp in range(layout.pp):
        chunks = [layout.chunk_layers(config.model.num_layers, pp, chunk) for chunk in range(layout.chunks)]
        held = f"layers {', '.join(text for chunk in chunks for text in ranges(chunk))}"
        held = f"token table, {held}" if pp == 0 else held
        held = f"{held}, head" if pp == layout.last_pp else held
        stages.append(f"stage {pp}: {held}: ranks {_groups(layout, pp)}")
    return [head, *_shortened(stages), *tokens]


def _dealt_words(config: Config, layout: Layout) -> str:
    """Report the tokens of a sample on a context-parallel rank, and the imbalance of attention."""
    model = config.model
    uneven = causal_imbalance(model.seq_length, layout.cp, Scores.windows(model), dealt_multiple(config))
    documents = "; of documents: cp_imbalance in metrics.jsonl" if config.data.reset_attention_mask else ""
    tokens = " to ".join(f"{n:,}" for n in sorted({dealt_tokens(config, layout, rank) for rank in (0, layout.cp - 1)}))
    return (
        f"tokens: ranks in {{ }} share each sample, {tokens} tokens each; work of attention even within {uneven:.1%}"
        f"{documents}; --cp-exchange {config.parallel.cp_exchange}"
    )


def _groups(layout: Layout, pp: int) -> str:
    """Name the ranks of a stage: "0-3" if each holds a copy, "[0-3] [4-7]" if four share one."""
    copies = [ranges(copy)[0] for copy in stage_copies(layout, pp)]
    if layout.tp > 1:
        copies = [f"[{copy}]" for copy in copies]
    if layout.cp > 1:
        samples = (copies[at : at + layout.cp] for at in range(0, layout.data, layout.cp))
        copies = [f"{{{' '.join(_shortened(sample))}}}" for sample in samples]
    elif layout.tp == 1:
        return ", ".join(ranges(layout.stage_ranks(pp)))
    return " ".join(_shortened(copies))


def _data_words(layout: Layout) -> str:
    return "data-parallel x context-parallel ranks" if layout.cp > 1 else "data-parallel ranks"


def _shortened(texts: list[str]) -> list[str]:
    return texts if len(texts) <= MOST_DRAWN else [*texts[: MOST_DRAWN - 1], "...", texts[-1]]


def _memory(config: Config, layout: Layout, machine: Machine) -> str:
    """Compare the memory of the fullest rank with the available memory."""
    stages = {pp: stage_bytes(config, layout, pp, machine.device_type) for pp in sorted({0, layout.pp - 1})}
    fullest = max(stages, key=lambda pp: stages[pp].peak)
    need, ranks, text = stages[fullest].peak, len(machine.ranks), ""
    if layout.world_size > 1:
        text = " per rank" if layout.pp == 1 else f" per rank of stage {fullest}"
    if machine.device is None and machine.host is not None and ranks > 1:
        text += f", {size(need * ranks)} for this node's {ranks}"
    if available := machine.device or machine.host:
        text += f" of the {size(available.num_bytes)} {available.source}"
    host = stages[fullest].memory["host"]
    more = f"; and {size(host)} of host memory" if host else ""
    more += f"; and {size(files)} in a file" if (files := stages[fullest].memory["nvme"]) else ""
    return f"{size(need)}{text}, besides libraries: {_kinds(stages[fullest])}{more}"


def _kinds(found: StageBytes) -> str:
    shown = {kind: found.at_peak[kind] for kind in KINDS if found.at_peak[kind] >= SHOWN_SHARE * found.peak}
    return ", ".join(f"{KIND_NAMES.get(kind, kind)} {size(num_bytes)}" for kind, num_bytes in shown.items())


def option_lines(asked: Config) -> list[str]:
    """Return the other flags that differ from their defaults, or from the values of --preset."""
    known = FAMILIES[asked.model.architecture].trait_flags | (preset_values(asked.preset) if asked.preset else {})
    found = [f"--preset {asked.preset}"] if asked.preset else []
    for name, flag in flags().items():
        value = value_of(asked, name)
        if value != known.get(name, flag.default) and name not in SHOWN_OPTIONS:
            found.append(as_flag(name, value))
    return found


# -- notes of the screen


def device_text(device: torch.device, precision: str) -> str:
    """Return the name of this rank's GPU, or describe its CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return cpu_text(precision, torch.get_num_threads(), words)


def cpu_text(precision: str, threads: int, flags: Container[str]) -> str:
    """Name a CPU's number of threads, and a 16-bit precision that is slow on it.

    Args:
        flags: names of its instructions, as in /proc/cpuinfo. Only those of x86 are known here.
    """
    text = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    fast = FAST_TYPES.get(precision, ())
    slow = fast and "sse2" in flags and not any(flag in flags for flag in fast)
    return f"{text}; {precision} is slower than fp32 on this CPU, which has no AMX" if slow else text


def kept_lines(config: Config) -> str:
    """Return the flags that would keep more of a run; empty if it keeps everything, or only evaluates."""
    if config.evaluation.eval_only or (config.checkpoint.save and config.log.log_dir):
        return ""
    if config.checkpoint.save:
        return "checkpoints alone: --log-dir DIR keeps metrics and report.html"
    if config.log.log_dir:
        return "metrics and report.html, no checkpoint: --save DIR keeps checkpoints"
    return "nothing: --save DIR keeps checkpoints, --log-dir DIR metrics and report.html"


def large_vocabulary(config: Config, num_ids: int) -> str:
    """Report a --vocab-size much larger than the number of ids of the tokenizer (0: there is none); else empty."""
    vocabulary = config.model.vocab_size
    if config.data.mock_data or not num_ids or vocabulary <= LARGE_VOCABULARY * num_ids:
        return ""
    return (
        f"--vocab-size {vocabulary} is {vocabulary / num_ids:.0f} times the {num_ids:,} ids of the tokenizer: the "
        f"other rows are never used, and cost memory and time; --vocab-size {num_ids} suffices"
    )


# -- plan.txt


def details(
    config: Config,
    layout: Layout,
    machine: Machine,
    hosts: Sequence[str],
    environment: Mapping[str, str],
    notes: str,
    sources: str,
) -> str:
    """Return the rest: bytes by kind and their formulas, all options, the environment.

    Args:
        sources: the table of `Stack.table`.
        hosts: of all ranks.
        notes: further lines, on the choice of kernels.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}"
    variables = [f"{name}={value}" for name, value in environment.items()]
    parts = [
        bytes_table(config, layout, machine.device_type),
        notes,
        "\n  ".join(["environment", f"{versions}, {platform.platform()}", *variables]),
        "\n  ".join(["hosts", *(f"{host}: ranks {', '.join(ranges(here))}" for host, here in ranks.items())]),
        "\n  ".join(["options that are no defaults, and their sources", *sources.splitlines()]),
        "all options, with derived values filled in\n" + to_toml(config),
    ]
    return "\n\n".join(filter(None, parts))


def hand_out(config: Config, screen: Sequence[str], details: str) -> None:
    """Write both to plan.txt in --log-dir, unless the run only evaluates; print `details` with --verbose.

    Raises:
        ValueError: the folder or the file cannot be made.
    """
    if config.log.verbose:
        log.info(details)
    if not config.log.log_dir or config.evaluation.eval_only:  # it may be another run's folder
        return
    folder = Path(config.log.log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "plan.txt", "\n".join([*screen, "", details, ""]))
    except OSError as error:
        raise ValueError(f"--log-dir {folder}: {explain(error)}") from None
    log.info(f"{'more':{MARGIN}}{folder / 'plan.txt'}: memory by kind, all options, environment")
