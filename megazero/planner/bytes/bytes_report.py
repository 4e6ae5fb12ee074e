"""The table of a run's estimated memory and traffic, and notes on them for the start of the run. Pure."""

from dataclasses import replace
from typing import NamedTuple

from megazero.engine.memory import BLOCKS
from megazero.engine.model.stage import declare
from megazero.engine.options.batch_sizes import micro_batches
from megazero.engine.plan.layout.dealing import rank_tokens
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.layout.zero_policy import sharding_groups
from megazero.engine.plan.optimizer_sizes import Rates
from megazero.engine.plan.schedule.schedules import SCHEDULES
from megazero.flags.batch_ramp import padding_samples
from megazero.flags.config import Config, ModelConfig
from megazero.flags.pipeline_split import layer_costs, rank_costs
from megazero.planner.bytes.estimate import StageBytes, stage_bytes
from megazero.planner.layouts import divides_experts
from megazero.planner.parameter_counts import active_parameters, num_parameters
from megazero.planner.state_shares import States, least_rates
from megazero.units import count


class ReportRow(NamedTuple):
    """A kind of memory or traffic of one rank."""

    kind: str
    num_bytes: int
    formula: str  # Psi: elements of the rank's units, padding included; N: ranks that share one copy of them


def report_rows(config: Config, layout: Layout, device_type: str = "cpu") -> list[ReportRow]:
    """List every kind of memory of rank 0, then its traffic in an iteration."""
    found = stage_bytes(config, layout, 0, device_type)
    formulas = _memory_formulas(config, layout, device_type) | _traffic_formulas(config, layout, found)
    numbers = {"activations": found.activations} | found.memory
    numbers |= {f"{kind} traffic": num_bytes for kind, num_bytes in found.traffic.items()}
    return [ReportRow(kind, num_bytes, formulas[kind]) for kind, num_bytes in numbers.items()]


def _memory_formulas(config: Config, layout: Layout, device_type: str) -> dict[str, str]:
    states = [States.of_group(config, group) for group in sharding_groups(config, layout).values()]
    rules, none = config.optimizer.rules, dict.fromkeys(("optimizer", "gradients", "nvme"), "")
    others = f", of tables and vectors {Rates.of(config, rules.others).optimizer} Psi" if len(rules.rules) > 1 else ""
    w = least_rates(config).weights
    activations, full = config.activations, config.activations.recompute == "full"
    parts = f" / {layout.tp}" if activations.partition_activations or config.parallel.sequence_parallel else ""
    tokens = f"s / {layout.cp}" if layout.cp > 1 else "s"
    chunk = config.loss_chunk(device_type, layout.tp)
    rows = str(chunk) if 0 < chunk < rank_tokens(config, layout) else f"b {tokens}"
    kept = f"{w} b {tokens} h{parts} for each block and micro-batch in flight" if full else ""
    arenas = ", arenas" if activations.contiguous_checkpointing else ""
    shares = {
        kind: " and, of experts, ".join(dict.fromkeys(str(getattr(each, kind)) for each in states))
        + (others if kind == "optimizer" else "")
        for kind in ("parameters", "optimizer", "gradients", "host", "nvme")
        if getattr(states[0], kind).each * getattr(states[0], kind).part
    }
    host = [shares["host"]] if "host" in shares else []
    host += [f"{BLOCKS} layers of those in files"] if "nvme" in shares else []
    host += [f"{kept}, in host memory"] if activations.checkpoint_in_cpu else []
    host += ["weights and optimizer states to copy"] if config.checkpoint.memory_checkpoint_interval else []
    return none | {
        "activations": f"autograd's saved tensors of {'one recomputed block, and the ends' if full else 'all layers'}",
        **shares,
        "activation_checkpoints": "" if activations.checkpoint_in_cpu else kept,
        "buffers": f"arena of gathered weights, buckets, unreduced gradients, messages, rotary tables{arenas}",
        "logits": f"{w} {rows} v / tp",
        "peak": "highest sum of all these but activations",
        "host": " + ".join(host),
    }


def _traffic_formulas(config: Config, layout: Layout, found: StageBytes) -> dict[str, str]:
    """Write traffic along dp as the number of times that a step gathers and reduces each element, and its bytes."""
    rates, states, (least, most) = least_rates(config), States.of(config, layout), found.gathers
    terms = []
    if most:
        terms.append(f"{'up to ' if least < most else ''}{_times(most, rates.weights)}")
    if found.reductions:
        terms.append(_times(found.reductions, rates.gradients))
    replicas = ""
    if layout.replica > 1 and found.reductions:
        replicas = f" + 2 x {states.gradients._replace(part=1.0)} x ({layout.replica}-1)/{layout.replica}"
    each = f"({' + '.join(terms)})" if len(terms) > 1 else "".join(terms)
    experts = f" (experts: {layout.expert_shard})" if divides_experts(layout) else ""
    dp = f"{each} Psi x (N-1)/N, N = {layout.shard}{experts}{replicas}" if terms else ""
    offloads = bool(states.host.part)
    copied = ["gradients to host memory, weights back"] if offloads else []
    copied += ["inputs of blocks, there and back"] if config.activations.checkpoint_in_cpu else []
    return {
        "dp traffic": dp,
        "cp traffic": "keys and values of the other ranks, and their gradients" if layout.cp > 1 else "",
        "ep traffic": "rows of tokens to and from their experts, if all get as many" if layout.ep > 1 else "",
        "tp traffic": "activations and losses",
        "pp traffic": "messages, tied table",
        "control traffic": "norms, losses, counts",
        "pcie traffic": " + ".join(copied),
        "nvme traffic": "gradients and states, there and back" if offloads and states.nvme.each else "",
    }


def _times(number: int, num_bytes: int) -> str:
    return f"{number} x {num_bytes}" if number > 1 else f"{num_bytes}"


def partition_line(config: Config, layout: Layout, device_type: str = "cpu") -> str:
    """Report the memory that --partition-activations saves and the traffic it adds; empty without it."""
    activations = config.activations
    if not activations.partition_activations:
        return ""
    without = replace(config, activations=replace(activations, partition_activations=False))
    ours, theirs = (stage_bytes(each, layout, 0, device_type) for each in (config, without))
    kind, place = ("host", "host memory") if activations.checkpoint_in_cpu else ("activation_checkpoints", "memory")
    saved, extra = theirs.memory[kind] - ours.memory[kind], ours.traffic["tp"] - theirs.traffic["tp"]
    return (
        f"--partition-activations saves {saved:,} bytes of this rank's {place}, and adds {extra:,} bytes to its tp "
        f"traffic of an iteration ({extra / theirs.traffic['tp']:.1%})"
    )


def split_line(config: Config, layout: Layout) -> str:
    """List the layers of every virtual stage, and the costs of ranks; empty if stages are even."""
    if not layout.split:
        return ""
    known = layer_costs(declare(config.model, layout.tp), config.model, config.activations)
    costs = rank_costs(layout.split, layout.placement, known)
    return (
        f"layers per virtual stage: {','.join(map(str, layout.split))}; the head costs {known.head:.1f} blocks, so "
        f"that pipeline ranks cost {', '.join(f'{cost:.1f}' for cost in costs)} blocks "
        "(--pipeline-split changes the layers)"
    )


def expert_words(model: ModelConfig) -> str:
    """Count the experts, and the parameters that a token passes; empty without experts."""
    if not model.num_experts:
        return ""
    layers, shared = declare(model), ", and a shared one" if model.moe_shared_expert_intermediate_size else ""
    return (
        f"{model.num_experts} in each of {len(model.expert_layers)} layers, {model.moe_router_topk} active per token"
        f"{shared}: {count(num_parameters(layers))} parameters, {count(active_parameters(layers))} active per token"
    )


def padding_words(config: Config, layout: Layout) -> str:
    """Count the samples of an iteration that are padding; empty if there are none."""
    padding = padding_samples(config, layout.dp)
    return f", {padding} of {config.training.global_batch_size + padding} samples padding" if padding else ""


def padding_warning(config: Config, layout: Layout) -> str:
    """Count the data-parallel ranks that compute only padding; empty if there are none."""
    training = config.training
    real = micro_batches(training.global_batch_size, training.micro_batch_size, 1)
    if real >= layout.dp:
        return ""
    return (
        f"{layout.dp - real} of {layout.dp} data-parallel ranks compute only padding: --global-batch-size "
        f"{training.global_batch_size} is {real} x --micro-batch-size {training.micro_batch_size}"
    )


def queue_line(config: Config, layout: Layout, device_type: str = "cpu") -> str:
    """Report the memory of queued weight gradients, which full recompute does not free; empty without a queue."""
    parallel = config.parallel
    queued = 0
    if SCHEDULES[parallel.pipeline_schedule].backlog:
        queued = max(stage_bytes(config, layout, stage, device_type).queued for stage in range(layout.pp))
    if not queued:
        return ""
    line = (
        f"--pipeline-schedule {parallel.pipeline_schedule}: queued weight gradients hold up to {queued:,} bytes of a "
        "rank's buffers"
    )
    if config.activations.recompute != "full":
        return line
    return (
        f"warning: {line}, which --recompute full frees under other schedules; queue fewer micro-batches with "
        "--zero-bubble-backlog 1, or use --pipeline-schedule 1f1b"
    )


def bytes_table(config: Config, layout: Layout, device_type: str = "cpu") -> str:
    """Format `report_rows` and the notes as text."""
    psi = stage_bytes(config, layout, 0, device_type).numel
    rows = [
        f"  {row.kind:<24}{row.num_bytes:>20,}   {row.formula}".rstrip()
        for row in report_rows(config, layout, device_type)
    ]
    notes = (
        split_line(config, layout),
        queue_line(config, layout, device_type),
        partition_line(config, layout, device_type),
    )
    return "\n".join([f"estimated bytes of rank 0; Psi = {psi:,} elements", *rows, *filter(None, notes)])
