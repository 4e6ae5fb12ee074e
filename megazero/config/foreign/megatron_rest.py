"""Megatron-LM's flags of checkpoints, logs and of what is not here."""

from __future__ import annotations

from megazero.config.foreign.table import (
    MEGATRON,
    Entries,
    Refused,
    Use,
    alias,
    computed,
    refused,
    unneeded,
)

# -- checkpoints, logs, what is not here


def _profile(use: Use) -> list[str]:
    if not use.on():
        return []
    first, last = use.number_of("profile-step-start", "10"), use.number_of("profile-step-end", "12")
    return ["--profile-iterations", f"{int(first) + 1}:{int(last)}"]


REST: Entries = (
    *unneeded(
        MEGATRON,
        "ckpt-format dist-ckpt-* use-dist-ckpt auto-detect-ckpt-format ckpt-fully-parallel-* "
        "ckpt-assume-constant-structure no-ckpt-fully-parallel-save use-persistent-ckpt-worker ckpt-drop-redundant-* "
        "universal-checkpoint dist-ckpt-strictness",
        "checkpoints have one format, which every rank writes a part of and any layout loads",
    ),
    *unneeded(MEGATRON, "exit-signal-handler*", "TERM, INT and USR1 save and stop"),
    *unneeded(
        MEGATRON, "exit-on-missing-checkpoint", "a --load that is not there is an error, unless it is --save too"
    ),
    *refused(
        MEGATRON,
        "no-load-optim no-load-rng no-load-lr-state pretrained-checkpoint",
        "--load DIR --finetune loads weights alone",
    ),
    *refused(
        MEGATRON,
        "no-save-optim no-save-rng",
        "a checkpoint holds all that going on needs; scripts/checkpoint.py export writes weights alone",
    ),
    *refused(MEGATRON, "use-checkpoint-args", "--preset DIR/config.toml has the flags of the run before"),
    *refused(MEGATRON, "ckpt-step override-ckpt-iteration", "--load DIR/iter_0000100 names one checkpoint"),
    *alias(MEGATRON, "save-retain-interval", "keep-every"),
    *refused(
        MEGATRON,
        "non-persistent-* replication* adlr-autoresume* ckpt-convert-*",
        "--save-interval, --async-save and --exit-before-minutes are what there is",
    ),
    *refused(MEGATRON, "kill-switch-path", "a file named stop in --log-dir ends the run, after saving"),
    *unneeded(
        MEGATRON,
        "log-throughput log-timers-to-tensorboard log-batch-size-to-tensorboard log-validation-ppl-to-tensorboard "
        "log-learning-rate-to-tensorboard no-log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard "
        "no-log-loss-scale-to-tensorboard log-memory-to-tensorboard log-world-size-to-tensorboard log-memory-interval "
        "log-progress timing-log-* tensorboard-log-interval tensorboard-queue-size wandb-save-dir logging-level "
        "log-device-memory-used log-energy",
        "metrics.jsonl, and TensorBoard and W&B where they are asked for, have every measure there is",
    ),
    *alias(MEGATRON, "wandb-exp-name", "wandb-name"),
    *unneeded(
        MEGATRON,
        "wandb-entity one-logger-* no-one-logger enable-one-logger app-tag-*",
        "a run is known by its --log-dir",
    ),
    *refused(
        MEGATRON,
        "log-params-norm log-num-zeros-in-grad log-optimizer-states-to-tensorboard log-max-attention-logit",
        "it is not measured; drop it",
    ),
    *computed(
        MEGATRON, "profile", "--profile-iterations, from --profile-step-start + 1 to --profile-step-end", _profile
    ),
    *unneeded(MEGATRON, "profile-step-start profile-step-end profile-ranks use-pytorch-profiler", "see --profile"),
    *refused(MEGATRON, "record-memory-history memory-snapshot-path", "--plan and the log say what memory is for"),
    *unneeded(MEGATRON, "log-straggler straggler-*", "slow ranks are named every --straggler-interval iterations"),
    *refused(
        MEGATRON,
        "inference-* rl-* grpo-* langrl-* retro-* vision-* dino-* swin-* ict-* biencoder-* retriever-* bert-* img-* "
        "mamba-* inprocess-* ft-* enable-ft-package rerun-mode error-injection-* run-workload-inspector-server "
        "modelopt-* logits-save-* logits-load-* mask-* num-classes num-channels patch-dim "
        "random-ltd curriculum-learning* data-efficiency-* kd mos teacher-* yaml-cfg",
        "this program pretrains GPT models, and nothing else; drop it",
    ),
)


def _experts(use: Use) -> list[str]:
    if use.foreign.get("num-experts") and all(word == "1" for word in use.foreign["num-experts"]):
        return []
    raise Refused("there are no mixtures of experts; drop it")


EXPERTS: Entries = computed(
    MEGATRON,
    "num-experts moe-* create-moe-param-group disable-moe-token-dropping expert-* topk",
    "nothing, where --num-experts is 1",
    _experts,
)
