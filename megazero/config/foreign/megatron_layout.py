"""Megatron-LM's flags of parallelism, communication and recompute."""

from __future__ import annotations

from megazero.config.foreign.table import (
    ANY,
    MEGATRON,
    Entries,
    Refused,
    Use,
    alias,
    choice,
    computed,
    fixed,
    refused,
    switch,
    unneeded,
)

# -- layout


def _per_virtual_stage(use: Use) -> list[str]:
    layers, pp, each = use.get_whole("num-layers"), max(1, use.get_whole("pipeline-model-parallel-size")), use.whole()
    if each < 1 or layers % (pp * each):
        raise Refused(f"{each} layers do not divide --num-layers {layers} over {pp} stages")
    return _chunks(layers // (pp * each))


def _chunks(chunks: int) -> list[str]:
    return ["--pipeline-schedule", "interleaved", "--virtual-pipeline-stages", str(chunks)] if chunks > 1 else []


def _recompute_method(use: Use) -> list[str]:
    each = use.number_of("recompute-num-layers", use.word("activations-checkpoint-num-layers") or "1")
    stage = use.get_whole("num-layers") // max(1, use.get_whole("pipeline-model-parallel-size"))
    if use.value not in ("uniform", "block"):
        raise Refused("there are uniform and block")
    if use.value == "uniform" and each != 1:
        raise Refused(
            f"--recompute full keeps the input of every block, not of every {each:g}; give 1 layer, or drop both"
        )
    if use.value == "block" and each < stage:
        raise Refused(
            f"--recompute full recomputes all {stage} blocks of a rank, not {each:g}; drop it, or use selective"
        )
    old = use.name == "activations-checkpoint-method"
    return ["--recompute", "full"] if old else []


def _granularity(use: Use) -> list[str]:
    if use.value not in ("full", "selective"):
        raise Refused("there are full and selective")
    return ["--recompute", use.value]


def _optimizer_sharding(use: Use) -> list[str]:
    return [] if not use.on() or use.given("zero-stage") else ["--zero-stage", "1"]


_ONE = "--tensor-model-parallel-size with --sequence-parallel shards long samples; there is no other sharding of tokens"
LAYOUT: Entries = (
    *alias(ANY, "tp tensor-parallel-size tp-size", "tensor-model-parallel-size"),
    *alias(ANY, "pp pipeline-parallel-size pp-size", "pipeline-model-parallel-size"),
    *alias(MEGATRON, "model-parallel-size", "tensor-model-parallel-size"),
    *computed(
        MEGATRON,
        "num-layers-per-virtual-pipeline-stage",
        "--pipeline-schedule interleaved --virtual-pipeline-stages: layers / stages / it",
        _per_virtual_stage,
        1,
    ),
    *computed(
        MEGATRON,
        "num-virtual-stages-per-pipeline-rank",
        "--pipeline-schedule interleaved --virtual-pipeline-stages",
        lambda use: _chunks(use.whole()),
    ),
    *refused(
        MEGATRON,
        "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-layout",
        "--pipeline-split 4,4,3,1 names the layers of every stage",
    ),
    *refused(
        MEGATRON, "pipeline-model-parallel-split-rank standalone-embedding-stage", "there are no encoders; drop it"
    ),
    *unneeded(
        MEGATRON,
        "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split pp-partition-method",
        "layers are split so that the busiest rank computes least, with the head counted; see --pipeline-split",
    ),
    *computed(MEGATRON, "use-distributed-optimizer", "--zero-stage 1, unless it is given", _optimizer_sharding, 1),
    *switch(MEGATRON, "use-torch-fsdp2 use-megatron-fsdp use-custom-fsdp", "--zero-stage 3"),
    *choice(
        MEGATRON,
        "data-parallel-sharding-strategy",
        {
            "no_shard": "--zero-stage 0",
            "optim": "--zero-stage 1",
            "optim_grads": "--zero-stage 2",
            "optim_grads_params": "--zero-stage 3",
        },
        "see --zero-stage",
    ),
    *unneeded(
        MEGATRON,
        "overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step overlap-p2p-communication* "
        "no-overlap-p2p-communication* no-align-grad-reduce no-align-param-gather delay-grad-reduce delay-param-gather "
        "ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw align-*",
        "communication is behind the computation, unless --no-overlap-comm",
    ),
    *alias(MEGATRON, "ddp-bucket-size", "reduce-bucket-size"),
    *refused(MEGATRON, "ddp-num-buckets", "--reduce-bucket-size N, in elements"),
    *unneeded(
        MEGATRON,
        "distributed-backend ddp-impl use-nccl-ub use-ring-exchange-p2p *-contiguous-*-in-local-ddp local-rank "
        "use-sharp nccl-* tp-comm-* use-tp-pp-dp-mapping no-async-tensor-model-parallel-allreduce "
        "async-tensor-model-parallel-allreduce defer-embedding-wgrad-compute wgrad-deferral-limit "
        "high-priority-stream-groups scatter-gather-tensors-in-pipeline no-scatter-gather-tensors-in-pipeline "
        "disable-symmetric-registration keep-fp8-transpose-cache fsdp-double-buffer",
        "collectives are NCCL's on GPUs, gloo's on CPUs, and chosen inside",
    ),
    *fixed(MEGATRON, "context-parallel-size ds-sequence-parallel-size hierarchical-context-parallel-sizes", "1", _ONE),
    *fixed(MEGATRON, "expert-model-parallel-size expert-tensor-parallel-size", "1", "there are no experts"),
    *fixed(MEGATRON, "num-distributed-optimizer-instances", "1", "--zero-shard-size N shards within groups of N ranks"),
    *refused(MEGATRON, "cp-comm-type", _ONE),
    *switch(MEGATRON, "recompute-activations", "--recompute selective"),
    *computed(MEGATRON, "recompute-granularity", "--recompute full or selective", _granularity),
    *computed(MEGATRON, "recompute-method", "nothing, where every block is recomputed", _recompute_method, 1),
    *computed(
        MEGATRON, "activations-checkpoint-method", "--recompute full, where every block is", _recompute_method, 1
    ),
    *unneeded(
        MEGATRON, "recompute-num-layers activations-checkpoint-num-layers", "see --recompute-method: every block is"
    ),
    *refused(MEGATRON, "recompute-modules", "--recompute selective recomputes norms, GELU and attention weights"),
    *switch(MEGATRON, "checkpoint-activations", "--recompute full"),
    *switch(MEGATRON, "distribute-saved-activations distribute-checkpointed-activations", "--partition-activations"),
    *switch(MEGATRON, "enable-cuda-graph", "--cuda-graph-impl local"),
    *fixed(MEGATRON, "cuda-graph-scope", "full", "--cuda-graph-impl local captures whole blocks"),
    *unneeded(MEGATRON, "cuda-graph-warmup-steps cuda-graph-num-warmup", "--cuda-graph-impl local warms up by itself"),
    *refused(MEGATRON, "external-cuda-graph cuda-graph-*", "--cuda-graph-impl local is what there is"),
)
