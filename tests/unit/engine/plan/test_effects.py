"""Every flag has an effect: flipped, it changes the plan, or another test names it."""

import functools
import re
from pathlib import Path

import pytest

from megazero.engine.model.stage import declare
from megazero.engine.step.optimization import LossScale, clip_factor, learning_rate
from megazero.flags.cli import parse
from megazero.flags.config import Config
from megazero.flags.flag_names import flags
from megazero.planner.run_plan import make_plan, plan_config
from tests.helpers.table import for_each

TESTS = Path(__file__).resolve().parents[3]
BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 257 --global-batch-size 16 "
    "--train-iters 20 --plan --world-size 8 --device-type h100-80gb"
)
TP, PP, FULL = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--recompute full"
CP, EXPERTS = "--context-parallel-size 2", "--architecture llama --num-experts 4"
LATENT = "--architecture llama --multi-latent-attention"
# Flags whose flip changes `seen`: the flip, and the flags that it needs.
FLIPPED = {
    "num-layers": ("--num-layers 8", ""),
    "hidden-size": ("--hidden-size 32", ""),
    "ffn-hidden-size": ("--ffn-hidden-size 100", ""),
    "num-attention-heads": ("--num-attention-heads 2", f"--architecture llama --num-query-groups 2 {TP}"),
    "seq-length": ("--seq-length 64", ""),
    "vocab-size": ("--vocab-size 300", ""),
    "untie-embeddings": ("--untie-embeddings", ""),
    "architecture": ("--architecture parallel", ""),
    "activation": ("--activation relu", "--architecture llama"),
    "norm": ("--norm rmsnorm", ""),
    "norm-place": ("--norm-place around", ""),
    "parallel-norms": ("--parallel-norms 1", ""),
    "linear-biases": ("--linear-biases qkv", ""),
    "attention-sinks": ("--attention-sinks", ""),
    **dict.fromkeys(("fused-qkv", "learned-positions"), ("--no-fused-qkv --no-learned-positions", "")),
    "num-query-groups": ("--num-query-groups 2", "--architecture llama"),
    "kv-channels": ("--kv-channels 32", ""),
    "qk-layernorm": ("--qk-layernorm", "--architecture llama"),
    "qk-norm-all-heads": ("--qk-norm-all-heads", "--architecture llama --qk-layernorm"),
    "multi-latent-attention": ("--multi-latent-attention", "--architecture llama"),
    "q-lora-rank": ("--q-lora-rank 24", LATENT),
    "kv-lora-rank": ("--kv-lora-rank 24", LATENT),
    "qk-head-dim": ("--qk-head-dim 24", f"{LATENT} --v-head-dim 24"),
    "qk-pos-emb-head-dim": ("--qk-pos-emb-head-dim 24", LATENT),
    "v-head-dim": ("--v-head-dim 24", LATENT),
    "window-size": ("--window-size 8", ""),
    "layer-pattern": ("--layer-pattern LG", "--window-size 8"),
    "attention-softcap": ("--attention-softcap 5", ""),
    "add-qkv-bias": ("--add-qkv-bias", "--architecture llama"),
    "num-experts": ("--num-experts 4", "--architecture llama"),
    "moe-router-topk": ("--moe-router-topk 3", EXPERTS),
    "moe-ffn-hidden-size": ("--moe-ffn-hidden-size 100", EXPERTS),
    "moe-expert-capacity-factor": ("--moe-expert-capacity-factor 0.5", EXPERTS),
    "expert-model-parallel-size": ("--expert-model-parallel-size 2", EXPERTS),
    "expert-tensor-parallel-size": ("--expert-tensor-parallel-size 1", f"{EXPERTS} {TP} --sequence-parallel"),
    "moe-layer-freq": ("--moe-layer-freq DE", EXPERTS),
    "moe-shared-expert-intermediate-size": ("--moe-shared-expert-intermediate-size 100", EXPERTS),
    "moe-shared-expert-gate": (
        "--moe-shared-expert-gate",
        f"{EXPERTS} --moe-shared-expert-intermediate-size 100",
    ),
    "mtp-num-layers": ("--mtp-num-layers 2", ""),
    "micro-batch-size": ("--micro-batch-size 2", ""),
    "loss-chunk-tokens": ("--loss-chunk-tokens 3", ""),
    "global-batch-size": ("--global-batch-size 32", ""),
    "train-iters": ("--train-iters 10", "--lr-decay-style linear"),
    "precision": ("--precision bf16", ""),
    "optimizer-cpu-offload": ("--optimizer-cpu-offload", ""),
    "optimizer-offload-fraction": ("--optimizer-offload-fraction 0.5", "--optimizer-cpu-offload"),
    "optimizer-nvme-offload": ("--optimizer-nvme-offload /nvme", "--optimizer-cpu-offload"),
    "grad-dtype": ("--grad-dtype bf16", "--precision bf16"),
    "freeze-parameters": ("--freeze-parameters blocks.*", ""),
    "initial-loss-scale": ("--initial-loss-scale 8", "--precision fp16"),
    "min-loss-scale": ("--min-loss-scale 2", "--precision fp16"),
    "loss-scale-window": ("--loss-scale-window 5", "--precision fp16"),
    "hysteresis": ("--hysteresis 3", "--precision fp16"),
    "ema-interval": ("--ema-interval 5", ""),
    "stats-interval": ("--stats-interval 5", ""),
    "lr": ("--lr 1", ""),
    "min-lr": ("--min-lr 1e-5", "--lr-decay-style cosine"),
    "lr-warmup-iters": ("--lr-warmup-iters 3", ""),
    "lr-decay-iters": ("--lr-decay-iters 10", "--lr-decay-style cosine"),
    "lr-decay-style": ("--lr-decay-style cosine", ""),
    "lr-wsd-decay-iters": ("--lr-wsd-decay-iters 5", "--lr-decay-style wsd --lr-wsd-decay-iters 10"),
    "lr-wsd-decay-style": ("--lr-wsd-decay-style linear", "--lr-decay-style wsd --lr-wsd-decay-iters 10"),
    "clip-grad": ("--clip-grad 0.5", ""),
    "tensor-model-parallel-size": (TP, ""),
    "context-parallel-size": (CP, ""),
    "cp-exchange": ("--cp-exchange ring", f"{CP} --precision bf16"),
    "pipeline-model-parallel-size": (PP, ""),
    "pipeline-schedule": ("--pipeline-schedule gpipe", PP),
    "virtual-pipeline-stages": ("--virtual-pipeline-stages 2 --pipeline-schedule interleaved", PP),
    "pipeline-split": ("--pipeline-split 3,1", PP),
    "sequence-parallel": ("--sequence-parallel", TP),
    "zero-stage": ("--zero-stage 2", ""),
    "zero-shard-size": ("--zero-shard-size 2", ""),
    "zero-reduce-every": ("--zero-reduce-every step", "--zero-stage 2"),
    "zero-gather-every": ("--zero-gather-every step", "--zero-stage 3"),
    "reduce-bucket-size": ("--reduce-bucket-size 1000", "--zero-stage 2"),
    "overlap-comm": ("--no-overlap-comm", "--zero-stage 3"),
    "recompute": (FULL, ""),
    "partition-activations": ("--partition-activations", f"{FULL} {TP}"),
    "checkpoint-in-cpu": ("--checkpoint-in-cpu", FULL),
    "contiguous-checkpointing": ("--contiguous-checkpointing", FULL),
    "attention-dropout": ("--attention-dropout 0.5", ""),
    "hidden-dropout": ("--hidden-dropout 0.5", ""),
    "world-size": ("--world-size 4", ""),
    "device-type": ("--device-type v100-32gb", ""),
    "moe-plan-imbalance": ("--moe-plan-imbalance 1.5", f"{EXPERTS} --expert-model-parallel-size 2"),
}


@functools.cache
def seen(line: str) -> str:
    """Describe the plan and the computation of a command line, as far as possible without training."""
    config, layout, device = plan_config(parse(line.split()))
    plan, optimizer = make_plan(config, layout, device), config.optimizer
    return repr(
        (
            plan.seconds,
            plan.stages,
            [learning_rate(optimizer, i) for i in range(1, 21)],
            clip_factor(3.0, optimizer.clip_grad),
            LossScale.of(config.training),
            [(spec.name, spec.shape) for spec in declare(config.model).params()],
        )
    )


def test_every_flag_is_flipped_or_in_a_test() -> None:
    """A new flag needs no entry here if a test has its name, as a flag or as a field."""
    text = "\n".join(path.read_text() for path in TESTS.rglob("*.py") if path != Path(__file__))
    named = {*re.findall(r'(?:--|")([a-z][a-z0-9-]+)', text)}
    named |= {field.replace("_", "-") for field in re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", text)}
    assert {*flags()} - {*FLIPPED} - named == set()
    assert FLIPPED.keys() <= flags().keys()


@pytest.mark.slow  # half a minute of plans
@for_each("flag", FLIPPED)
def test_a_flip_is_seen(flag: str) -> None:
    flip, around = FLIPPED[flag]
    assert seen(f"{BASE} {around}") != seen(f"{BASE} {around} {flip}")


def test_a_flag_without_effect_would_be_found() -> None:
    assert seen(BASE) == seen(BASE) and seen(BASE) == seen(f"{BASE} --seed 7") and parse([]) == Config()
