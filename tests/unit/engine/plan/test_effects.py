"""Every flag has an effect: flipped, it changes the plan or the results, or a test is named that sees it."""

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
    "num-query-groups": ("--num-query-groups 2", "--architecture llama"),
    "kv-channels": ("--kv-channels 32", ""),
    "qk-layernorm": ("--qk-layernorm", "--architecture llama"),
    "qk-norm-all-heads": ("--qk-norm-all-heads", "--architecture llama --qk-layernorm"),
    "multi-latent-attention": ("--multi-latent-attention", "--architecture llama"),
    "q-lora-rank": ("--q-lora-rank 24", LATENT),
    "kv-lora-rank": ("--kv-lora-rank 24", LATENT),
    "qk-head-dim": ("--qk-head-dim 24", LATENT),
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
# Flags that no plan can see -> a test that does; its file has the flag's name.
SEEN = {
    "init-method-std": "unit/engine/plan/test_parameters.py",
    "rotary-base": "unit/engine/kernels/test_rotary.py",
    "rope-scaling-factor": "unit/engine/kernels/test_rotary.py",
    "rope-scaling-type": "unit/engine/kernels/test_rotary.py",
    "rope-trained-length": "unit/engine/kernels/test_rotary.py",
    "beta-fast": "unit/engine/kernels/test_rotary.py",
    "yarn-correction-range-round-to-int": "unit/engine/kernels/test_rotary.py",
    "mscale": "unit/engine/kernels/test_rotary.py",
    "mscale-all-dim": "unit/engine/kernels/test_rotary.py",
    "max-position-embeddings": "unit/interop/test_published_configs.py",
    "rotary-percent": "unit/engine/kernels/test_rotary.py",
    "rotary-interleaved": "unit/engine/kernels/test_rotary.py",
    "local-rotary-base": "unit/engine/kernels/test_rotary.py",
    "norm-epsilon": "unit/engine/model/test_families.py",
    "embedding-multiplier": "parallel/test_ends.py",
    "logits-divisor": "parallel/test_ends.py",
    "final-softcap": "parallel/test_ends.py",
    "residual-multiplier": "parallel/test_parity.py",
    "attention-scale": "unit/engine/model/test_window.py",
    "ema-decay": "parallel/test_average.py",
    "moe-router-pre-softmax": "unit/engine/model/test_experts.py",
    "moe-aux-loss-coeff": "unit/engine/model/test_experts.py",
    "moe-z-loss-coeff": "unit/engine/model/test_experts.py",
    "mtp-loss-scaling-factor": "parallel/matrix.py",
    "moe-router-score-function": "unit/engine/model/test_expert_scores.py",
    "moe-router-enable-expert-bias": "parallel/test_expert_bias.py",
    "moe-router-bias-update-rate": "parallel/test_expert_bias.py",
    "moe-router-num-groups": "unit/engine/model/test_expert_scores.py",
    "moe-router-group-topk": "unit/engine/model/test_expert_scores.py",
    "moe-router-topk-scaling-factor": "unit/engine/model/test_expert_scores.py",
    "seed": "end_to_end/test_reference_run.py",
    "train-tokens": "unit/flags/test_recipe.py",
    "recipe": "unit/flags/test_recipe.py",
    "rampup-batch-size": "parallel/test_resume_layouts.py",
    "max-skipped-iterations": "parallel/test_run_life.py",
    "matmul-backend": "unit/engine/kernels/test_matmul.py",
    "compile": "end_to_end/test_pretrain.py",
    "fused-kernels": "unit/engine/kernels/test_kernels.py",
    "weight-decay": "unit/engine/optim/test_optim.py",
    "optimizer": "parallel/test_muon.py",
    "adam-moments": "unit/engine/optim/test_small_states.py",
    "master-weights": "unit/engine/optim/test_small_states.py",
    "muon-momentum": "unit/engine/optim/test_muon.py",
    "muon-scale": "unit/engine/optim/test_muon.py",
    "muon-num-ns-steps": "unit/engine/optim/test_muon.py",
    "tf32": "unit/engine/kernels/test_matmul.py",
    "deterministic-mode": "end_to_end/test_pretended_gpu.py",
    "zero-bubble-backlog": "unit/engine/plan/test_schedules.py",
    "adam-beta1": "end_to_end/test_reference_run.py",
    "adam-beta2": "end_to_end/test_reference_run.py",
    "adam-eps": "end_to_end/test_reference_run.py",
    "distributed-timeout-minutes": "end_to_end/test_ranks_lost.py",
    "poison-buffers": "parallel/test_events.py",
    "mock-data": "unit/data/test_data_mock.py",
    "data-path": "unit/data/test_data_blending.py",
    "data-args-path": "unit/data/test_data_corpora_tools.py",
    "split": "unit/data/test_data_samples.py",
    "split-by": "unit/data/test_data_samples.py",
    "packing": "unit/data/test_packing.py",
    "tokenizer": "unit/data/test_data_tokenizer.py",
    "mtbf": "unit/planner/test_goodput.py",
    "eod-mask-loss": "end_to_end/test_reference_run.py",
    "reset-attention-mask": "end_to_end/test_reference_run.py",
    "reset-position-ids": "end_to_end/test_reference_run.py",
    "data-stages": "end_to_end/test_stages.py",
    "skip-samples": "parallel/test_run_life.py",
    "num-workers": "unit/data/test_data_loader.py",
    "eval-interval": "end_to_end/test_pretrain.py",
    "eval-iters": "end_to_end/test_evaluation.py",
    "eval-only": "end_to_end/test_evaluation.py",
    "eval-split": "end_to_end/test_evaluation.py",
    "save": "unit/run/test_resume.py",
    "load": "unit/run/test_resume.py",
    "finetune": "parallel/test_run_life.py",
    "decay-from": "end_to_end/test_decay_branch.py",
    "decay-iters": "end_to_end/test_decay_branch.py",
    "load-exact": "unit/run/test_resume.py",
    "save-interval": "end_to_end/test_pretrain.py",
    "save-hf": "end_to_end/test_continued_pretraining.py",
    "save-hf-interval": "end_to_end/test_continued_pretraining.py",
    "save-interval-minutes": "unit/run/test_stopping.py",
    "keep-last": "end_to_end/test_pretrain.py",
    "keep-every": "unit/run/test_resume.py",
    "async-save": "parallel/test_run_life.py",
    "memory-checkpoint-interval": "parallel/test_memory_checkpoints.py",
    "memory-checkpoint-dir": "parallel/test_memory_checkpoints.py",
    "exit-interval": "end_to_end/test_pretrain.py",
    "exit-duration-minutes": "parallel/test_run_life.py",
    "exit-before-minutes": "parallel/test_run_life.py",
    "hang-timeout": "end_to_end/test_ranks_lost.py",
    "straggler-interval": "parallel/test_run_life.py",
    "check-replicas-interval": "parallel/test_run_life.py",
    "log-dir": "unit/observe/test_log.py",
    "verbose": "unit/observe/test_start_report.py",
    "log-interval": "unit/observe/test_progress_line.py",
    "report": "parallel/test_run_life.py",
    "profile-iterations": "end_to_end/test_pretrain.py",
    "tensorboard-dir": "unit/observe/test_log.py",
    "wandb-project": "unit/observe/test_log.py",
    "plan": "unit/planner/test_plan.py",
    "plan-search": "unit/planner/test_plan.py",
    "layout": "unit/planner/test_choose.py",
    "elastic": "unit/run/test_relayout.py",
    "rehearse": "unit/command/test_rehearsal.py",
    **dict.fromkeys(("tasks", "task-interval", "task-limit"), "end_to_end/test_task_runs.py"),
    "sample-prompts": "parallel/test_samples.py",
    "sample-interval": "parallel/test_samples.py",
}

# Flags whose effect no test of the default suite sees by their name: none may join them.
UNSEEN = {"wandb-name", "rehearse-on"}


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


def test_every_flag_has_an_entry() -> None:
    """A new flag: add its flip to FLIPPED, or the test that sees it to SEEN."""
    assert sorted([*FLIPPED, *SEEN, *UNSEEN]) == sorted(flags())


@pytest.mark.slow  # half a minute of plans
@for_each("flag", FLIPPED)
def test_a_flip_is_seen(flag: str) -> None:
    flip, around = FLIPPED[flag]
    assert seen(f"{BASE} {around}") != seen(f"{BASE} {around} {flip}")


def test_the_named_tests_are_about_their_flags() -> None:
    for flag, file in SEEN.items():
        found = rf"(?<![\w-])(--{flag}|{flag.replace('-', '_')})(?![\w-])|\"{flag}\""
        assert re.search(found, (TESTS / file).read_text()), (flag, file)


def test_a_flag_without_effect_would_be_found() -> None:
    assert seen(BASE) == seen(BASE) and seen(BASE) == seen(f"{BASE} --seed 7") and parse([]) == Config()
