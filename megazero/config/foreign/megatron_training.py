"""Megatron-LM's flags of batches, duration, learning rate and precision."""

from __future__ import annotations

from megazero.config.foreign.table import (
    MEGATRON,
    Entries,
    Refused,
    Translation,
    Use,
    alias,
    computed,
    fixed,
    refused,
    switch,
    unneeded,
)
from megazero.config.limits import MOST_MINUTES

# -- batches, duration, learning rate


def _iterations(samples: float, use: Use) -> int:
    return max(1, round(samples / use.global_batch()))


def _train_length(use: Use) -> list[str]:
    """The shorter of --train-samples and --train-tokens, in whole iterations."""
    per_sample = {"train-samples": 1, "train-tokens": max(1, use.get_whole("seq-length"))}
    samples = [use.number_of(name, "") / per for name, per in per_sample.items() if name in use.foreign]
    _same_batch(use, "train-iters")
    return ["--train-iters", str(max(1, int(min(samples) // use.global_batch())))]


def _same_batch(use: Use, ours: str) -> None:
    if use.given("rampup-batch-size"):
        raise Refused(f"with --rampup-batch-size an iteration's samples change; give --{ours}")


def _in_iterations(ours: str, per_token: bool) -> Translation:
    def convert(use: Use) -> list[str]:
        _same_batch(use, ours)
        samples = use.number() / (max(1, use.get_whole("seq-length")) if per_token else 1)
        return [f"--{ours}", str(_iterations(samples, use) if samples else 0)]

    return convert


def _warmup_fraction(use: Use) -> list[str]:
    total = use.get_whole("lr-decay-iters") or use.get_whole("train-iters")
    if not 0 <= use.number() <= 1:
        raise Refused(f"{use.value} is not a fraction; --lr-warmup-iters takes iterations")
    return ["--lr-warmup-iters", str(round(use.number() * total))]


def _loss_scale(use: Use) -> list[str]:
    if use.number():
        raise Refused("the loss scale is dynamic: --initial-loss-scale, --min-loss-scale, --loss-scale-window")
    return []


def _exit_duration(use: Use) -> list[str]:
    """Translate a duration that our flag would refuse as too long into never: scripts mean that by it."""
    return ["--exit-duration-minutes", "0" if use.number() > MOST_MINUTES else use.value]


TRAINING: Entries = (
    *switch(MEGATRON, "bf16", "--precision bf16"),
    *switch(MEGATRON, "fp16", "--precision fp16"),
    *switch(MEGATRON, "grad-reduce-in-bf16", "--grad-dtype bf16"),
    *switch(MEGATRON, "accumulate-allreduce-grads-in-fp32", "--grad-dtype fp32"),
    *computed(MEGATRON, "loss-scale", "nothing, where it is 0: the scale is dynamic", _loss_scale),
    *alias(MEGATRON, "batch-size", "micro-batch-size"),
    *computed(
        MEGATRON,
        "exit-duration-in-mins",
        f"--exit-duration-minutes; 0, which is never, where it is more than {MOST_MINUTES:,}",
        _exit_duration,
    ),
    *computed(
        MEGATRON,
        "train-samples train-tokens",
        "--train-iters: samples / --global-batch-size, rounded down",
        _train_length,
        3,
    ),
    *computed(
        MEGATRON,
        "lr-decay-samples",
        "--lr-decay-iters: samples / --global-batch-size, rounded",
        _in_iterations("lr-decay-iters", False),
        3,
    ),
    *computed(
        MEGATRON,
        "lr-decay-tokens",
        "--lr-decay-iters: tokens / --seq-length / --global-batch-size, rounded",
        _in_iterations("lr-decay-iters", True),
        3,
    ),
    *computed(
        MEGATRON,
        "lr-wsd-decay-samples",
        "--lr-wsd-decay-iters: samples / --global-batch-size, rounded",
        _in_iterations("lr-wsd-decay-iters", False),
        3,
    ),
    *computed(
        MEGATRON,
        "lr-warmup-samples",
        "--lr-warmup-iters: samples / --global-batch-size, rounded",
        _in_iterations("lr-warmup-iters", False),
        3,
    ),
    *computed(
        MEGATRON,
        "lr-warmup-tokens",
        "--lr-warmup-iters: tokens / --seq-length / --global-batch-size, rounded",
        _in_iterations("lr-warmup-iters", True),
        3,
    ),
    *computed(
        MEGATRON,
        "lr-warmup-fraction warmup",
        "--lr-warmup-iters: the fraction of --lr-decay-iters, or of --train-iters",
        _warmup_fraction,
        4,
    ),
    *fixed(MEGATRON, "lr-warmup-init", "0", "warm-up begins at --lr / --lr-warmup-iters"),
    *fixed(MEGATRON, "optimizer", "adam|adamw", "there is AdamW"),
    *fixed(MEGATRON, "weight-decay-incr-style", "constant", "--weight-decay stays as it is"),
    *unneeded(
        MEGATRON,
        "override-opt-param-scheduler override-lr-scheduler",
        "a resumed run's schedule comes from its flags",
    ),
    *refused(
        MEGATRON,
        "use-checkpoint-opt-param-scheduler use-checkpoint-lr-scheduler",
        "a resumed run's schedule comes from its flags: --preset DIR/config.toml has those of the run before",
    ),
    *refused(MEGATRON, "decoupled-lr decoupled-min-lr head-lr-mult", "all parameters have one --lr; drop it"),
    *refused(MEGATRON, "start-weight-decay end-weight-decay", "--weight-decay stays as it is over a run"),
    *refused(
        MEGATRON,
        "muon-* lion-* sgd-momentum use-precision-aware-optimizer exp-avg-* main-grads-dtype main-params-dtype",
        "there is AdamW, with fp32 moments and master weights; drop it",
    ),
    *refused(
        MEGATRON,
        "optimizer-cpu-offload optimizer-offload-fraction cpu-offload* use-torch-optimizer-for-cpu-offload "
        "overlap-cpu-optimizer-d2h-h2d",
        "--zero-stage 1 shards the optimizer over data-parallel ranks instead",
    ),
    *refused(MEGATRON, "fp8-* fp4-* te-*", "precisions are bf16, fp16, fp32, fp64 (--precision); drop it"),
    *refused(MEGATRON, "fp16-lm-cross-entropy", "the loss is computed in fp32; drop it"),
    *refused(
        MEGATRON,
        "step-batch-size-schedule decrease-batch-size-if-needed",
        "--rampup-batch-size START INCREMENT SAMPLES is how a batch grows",
    ),
    *refused(MEGATRON, "data-parallel-random-init", "weights are the same in every layout; drop it"),
    *refused(MEGATRON, "freeze-all-layers", "--freeze-parameters PATTERN ..."),
    *unneeded(MEGATRON, "calculate-per-token-loss", "the loss is a mean over all targets of the global batch"),
    *unneeded(
        MEGATRON,
        "check-for-nan-in-loss-and-grad no-check-for-nan-in-loss-and-grad check-for-spiky-loss check-for-large-grads",
        "an update that is not finite is skipped, and said",
    ),
    *unneeded(
        MEGATRON,
        "manual-gc* empty-unused-memory-level no-*-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl "
        "no-persist-layer-norm abort-on-unmet-fused-kernel-constraints onnx-safe torch-fsdp2-no-reshard-after-forward "
        "no-warn* enable-experimental",
        "it is about kernels or memory that are not here, and changes no result",
    ),
)
