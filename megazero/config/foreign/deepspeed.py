"""DeepSpeed's flags and its JSON configuration, in this program's words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megazero.config.foreign.table import (
    DEEPSPEED,
    FALSE,
    Entries,
    Refused,
    Use,
    alias,
    as_text,
    computed,
    fixed,
    number,
    refused,
    switch,
    truth,
    unneeded,
    whole,
)
from megazero.config.limits import shorten
from megazero.files import read_json_object

AUTO = "auto"  # in a DeepSpeed file: what the command line says

# Keys of a DeepSpeed file, with the path to them -> a flag that takes the value.
FLAGS = {
    "train_batch_size": "global-batch-size",
    "train_micro_batch_size_per_gpu": "micro-batch-size",
    "gradient_clipping": "clip-grad",
    "steps_per_print": "log-interval",
    "zero_optimization.stage": "zero-stage",
    "zero_optimization.reduce_bucket_size": "reduce-bucket-size",
    "zero_optimization.zero_hpz_partition_size": "zero-shard-size",
    "fp16.loss_scale_window": "loss-scale-window",
    "fp16.hysteresis": "hysteresis",
    "fp16.min_loss_scale": "min-loss-scale",
    "optimizer.params.lr": "lr",
    "optimizer.params.eps": "adam-eps",
    "optimizer.params.weight_decay": "weight-decay",
    "scheduler.params.warmup_num_steps": "lr-warmup-iters",
    "scheduler.params.total_num_steps": "lr-decay-iters",
    "tensorboard.output_path": "tensorboard-dir",
}
# Keys -> words where the value is true, or is this one.
SWITCHES = {
    "bf16.enabled": "--precision bf16",
    "bfloat16.enabled": "--precision bf16",
    "fp16.enabled": "--precision fp16",
    "activation_checkpointing.partition_activations": "--partition-activations",
    "activation_checkpointing.cpu_checkpointing": "--checkpoint-in-cpu",
    "activation_checkpointing.contiguous_memory_optimization": "--contiguous-checkpointing",
}
# Keys without anything to do; * stands for any ending.
UNNEEDED = (
    "zero_optimization.allgather_*",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.reduce_scatter",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.sub_group_size",
    "zero_optimization.stage3_*",
    "zero_optimization.elastic_checkpoint",
    "zero_optimization.load_from_fp32_weights",
    "zero_optimization.ignore_unused_parameters",
    "zero_force_ds_cpu_optimizer",
    "zero_allow_untested_optimizer",
    "fp16.consecutive_hysteresis",
    "fp16.auto_cast",
    "activation_checkpointing.number_checkpoints",
    "activation_checkpointing.synchronize_checkpoint_boundary",
    "activation_checkpointing.profile",
    "wall_clock_breakdown",
    "prescale_gradients",
    "gradient_predivide_factor",
    "memory_breakdown",
    "dump_state",
    "comms_logger.*",
    "flops_profiler.*",
    "tensorboard.enabled",
    "tensorboard.job_name",
    "wandb.*",
    "aio.*",
    "checkpoint.*",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.last_batch_iteration",
    "optimizer.params.bias_correction",
    "optimizer.params.torch_adam",
    "optimizer.params.adam_w_mode",
)
# Keys -> the values, in JSON and lower case, that are the case here.
ONLY = {
    "optimizer.type": ('"adam"', '"adamw"'),
    "fp16.loss_scale": ("0", "0.0"),
    "zero_optimization.offload_optimizer.device": ('"none"',),
    "zero_optimization.offload_param.device": ('"none"',),
    "zero_optimization.cpu_offload": ("false",),
    "communication_data_type": ('"fp32"',),
    "sparse_gradients": ("false",),
    "curriculum_learning.enabled": ("false",),
    "data_efficiency.enabled": ("false",),
    "amp.enabled": ("false",),
}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a JSON object by the path to them, joined by dots."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= (
            flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
        )
    return found


def file_words(leaves: Mapping[str, Any], use: Use) -> list[str]:
    """Translate a DeepSpeed file, flattened.

    A flag that is on the command line is left to it: the two agree, or DeepSpeed would have refused them. So is a
    value of "auto".

    Raises:
        Refused: a key or value without an equal.
    """
    disabled = tuple(
        key.removesuffix("enabled")
        for key, value in leaves.items()
        if key.endswith(".enabled") and as_text(value).lower() in FALSE
    )
    words, wrong = list[str](), list[str]()
    for key, value in leaves.items():
        if value == AUTO or key.startswith("_") or (key.startswith(disabled) and disabled):
            continue
        try:
            words += use.checked(_key_words(key, value, leaves, use))
        except Refused as reason:
            wrong.append(f"{shorten(key)} = {shorten(json.dumps(value))}: {reason}")
    if wrong:
        raise Refused("; ".join(wrong))
    return words


def _key_words(key: str, value: Any, leaves: Mapping[str, Any], use: Use) -> list[str]:
    if key == "tensorboard.output_path" and not isinstance(value, str):
        raise Refused("it must be a string")
    if key in FLAGS:
        return [] if use.given(FLAGS[key]) else [f"--{FLAGS[key]}", as_text(value)]
    if key in SWITCHES:
        flag = SWITCHES[key].split()[0].removeprefix("--")
        return SWITCHES[key].split() if truth(as_text(value)) and not use.given(flag) else []
    if key in ONLY:
        if json.dumps(value).lower() not in ONLY[key]:
            raise Refused("it must be " + " or ".join(ONLY[key]) + _INSTEAD.get(key, ""))
        return []
    if key == "zero_optimization.overlap_comm":
        return [] if truth(as_text(value)) or use.given("overlap-comm") else ["--no-overlap-comm"]
    if key == "fp16.initial_scale_power":
        power = whole(as_text(value))
        if not 0 <= power <= 48:
            raise Refused("it must be 0 to 48")
        return [] if use.given("initial-loss-scale") else ["--initial-loss-scale", str(2**power)]
    if key == "optimizer.params.betas":
        if not isinstance(value, list) or len(value) != 2:
            raise Refused("it must be two numbers, such as [0.9, 0.95]")
        betas = [str(number(as_text(beta))) for beta in value]
        return [] if use.given("adam-beta2") else ["--adam-beta1", betas[0], "--adam-beta2", betas[1]]
    if key == "gradient_accumulation_steps":
        steps = whole(as_text(value))
        if steps < 1:
            raise Refused("it must be at least 1")
        known = "train_batch_size" in leaves or use.given("global-batch-size")
        return [] if known else _accumulated(steps, leaves, use)
    if key == "scheduler.type":
        if not isinstance(value, str) or value not in SCHEDULES:
            raise Refused("there are " + ", ".join(SCHEDULES))
        return [] if use.given("lr-decay-style") else ["--lr-decay-style", SCHEDULES[value]]
    if any(key == known or (known.endswith("*") and key.startswith(known[:-1])) for known in UNNEEDED):
        return []
    if value == {} and any(leaf.startswith(f"{key}.") for leaf in (*FLAGS, *SWITCHES, *ONLY, *UNNEEDED)):
        return []
    raise Refused("it has no equal here; drop it")


_INSTEAD = {
    "fp16.loss_scale": ": the scale is dynamic",
    "zero_optimization.offload_optimizer.device": "; --zero-stage 1 shards the optimizer over ranks instead",
    "zero_optimization.offload_param.device": "; --zero-stage 3 shards parameters over ranks instead",
    "zero_optimization.cpu_offload": "; --zero-stage 1 shards the optimizer over ranks instead",
}


def _accumulated(steps: int, leaves: Mapping[str, Any], use: Use) -> list[str]:
    micro = leaves.get("train_micro_batch_size_per_gpu", AUTO)
    if micro == AUTO or use.given("micro-batch-size"):
        micro = use.get("micro-batch-size")
    micro = whole(as_text(micro), "train_micro_batch_size_per_gpu ")
    return ["--global-batch-size", str(steps * micro * use.data_parallel())]


def _file(use: Use) -> list[str]:
    """Translate --deepspeed_config FILE, and --deepspeed where it is followed by a file, as Hugging Face's."""
    if not use.values or use.values[0].lower() in ("true", "false"):
        return []
    try:
        return file_words(flatten(read_json_object(use.value)), use)
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: nested hundreds of levels deep
        raise Refused(f"{use.value} cannot be read: {error}") from None


_OFFLOAD = "--zero-stage 1 shards the optimizer over ranks instead"
ENTRIES: Entries = (
    *computed(DEEPSPEED, "deepspeed", "nothing alone; the flags of its file, where one follows", _file, 1),
    *computed(
        DEEPSPEED, "deepspeed-config ds-config", "the flags of the file; those of the command line win", _file, 1
    ),
    *unneeded(DEEPSPEED, "deepspeed-activation-checkpointing deepspeed-mpi deepscale", "one engine does it all"),
    *switch(DEEPSPEED, "zero-optimization", "--zero-stage 1"),
    *alias(DEEPSPEED, "zero-reduce-bucket-size", "reduce-bucket-size"),
    *unneeded(
        DEEPSPEED,
        "zero-allgather-bucket-size zero-contigious-gradients zero-reduce-scatter split-transformers "
        "scattered-embeddings",
        "gradients are reduced, and parameters gathered, layer by layer out of contiguous buffers",
    ),
    *switch(DEEPSPEED, "contigious-checkpointing", "--contiguous-checkpointing"),
    *switch(DEEPSPEED, "partition-activations-in-checkpoint", "--partition-activations"),
    *unneeded(DEEPSPEED, "synchronize-each-layer profile-backward", "see --profile-iterations"),
    *fixed(DEEPSPEED, "checkpoint-num-layers", "1", "--recompute full keeps the input of every block"),
    *unneeded(DEEPSPEED, "no-pipeline-parallel", "--pipeline-model-parallel-size 1 is no pipeline"),
    *refused(DEEPSPEED, "cpu-optimizer cpu-torch-adam remote-device offload-*", _OFFLOAD),
    *refused(
        DEEPSPEED, "memory-centric-tiled-linear tile-factor", "--tensor-model-parallel-size divides a layer's matrices"
    ),
    *refused(
        DEEPSPEED, "num-gpus num-nodes include exclude hostfile", "it is the launcher's; scripts/launch.sh --nproc N"
    ),
)
