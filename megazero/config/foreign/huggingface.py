"""Flags of Hugging Face's Trainer and of its run_clm.py, in this program's words."""

from __future__ import annotations

from megazero.config.foreign.table import (
    HUGGING_FACE,
    TYPES,
    Entries,
    Foreign,
    Refused,
    Translation,
    Use,
    alias,
    choice,
    computed,
    fixed,
    refused,
    switch,
    unneeded,
)

# Keys of --config_overrides and of a model's config.json -> flags.
SIZES = {
    **dict.fromkeys(("n_layer", "num_hidden_layers"), "num-layers"),
    **dict.fromkeys(("n_embd", "hidden_size"), "hidden-size"),
    **dict.fromkeys(("n_head", "num_attention_heads"), "num-attention-heads"),
    **dict.fromkeys(("n_positions", "n_ctx", "max_position_embeddings"), "seq-length"),
    **dict.fromkeys(("n_inner", "intermediate_size"), "ffn-hidden-size"),
    **dict.fromkeys(("layer_norm_epsilon", "rms_norm_eps"), "norm-epsilon"),
    "vocab_size": "vocab-size",
    "num_key_value_heads": "num-query-groups",
    "rope_theta": "rotary-base",
    "initializer_range": "init-method-std",
    "attn_pdrop": "attention-dropout",
    "attention_dropout": "attention-dropout",
    "resid_pdrop": "hidden-dropout",
}


def _accumulation(use: Use) -> list[str]:
    return ["--global-batch-size", str(use.whole() * use.get_whole("micro-batch-size") * use.data_parallel())]


def _warmup_ratio(use: Use) -> list[str]:
    if not 0 <= use.number() <= 1:
        raise Refused(f"{use.value} is not a fraction; --lr-warmup-iters takes iterations")
    total = use.get_whole("train-iters")
    return ["--lr-warmup-iters", str(-int(-use.number() * total // 1))] if use.number() else []


def _overrides(use: Use) -> list[str]:
    words = []
    for pair in use.value.split(","):
        key, _, value = pair.partition("=")
        if key not in SIZES:
            raise Refused(f"{key} is no size of a model here; there are {', '.join(SIZES)}")
        words += [f"--{SIZES[key]}", value]
    return words


def _precision(use: Use) -> list[str]:
    if use.value.lower() not in TYPES:
        raise Refused(f"{use.value}: there are bf16, fp16, fp32 and fp64")
    return ["--precision", TYPES[use.value.lower()]]


def _minutes(use: Use) -> list[str]:
    return ["--distributed-timeout-minutes", f"{use.number() / 60:g}"]


def _report(use: Use) -> list[str]:
    for system in use.values:
        if system not in ("none", "all", "tensorboard", "wandb"):
            raise Refused(f"{system}: there are tensorboard (--tensorboard-dir DIR) and wandb (--wandb-project NAME)")
    missing = [
        f"--{flag}"
        for system, flag in (("tensorboard", "tensorboard-dir"), ("wandb", "wandb-project"))
        if system in use.values and not use.given(flag)
    ]
    if missing:
        raise Refused(f"{' '.join(use.values)} needs {' and '.join(missing)}, to know where to")
    return []


def _run_name(use: Use) -> list[str]:
    return ["--wandb-name", use.value] if use.given("wandb-project") else []


def _resume(use: Use) -> list[str]:
    if use.value.lower() == "false":
        return []
    return ["--load", use.get("save") if use.value.lower() == "true" else use.value]


def _output(use: Use) -> list[str]:
    return ["--save", use.value, *([] if use.given("log-dir") else ["--log-dir", use.value])]


def _steps(use: Use) -> list[str]:
    if use.number() <= 0:
        raise Refused(f"{use.value}: --train-iters N says how long to train")
    return ["--train-iters", str(use.whole())]


def _fraction_of_steps(ours: str) -> Translation:
    def convert(use: Use) -> list[str]:
        asked = use.number()  # below 1 a fraction of all steps, as in transformers
        return [f"--{ours}", str(round(asked * use.get_whole("train-iters")) if 0 < asked < 1 else use.whole())]

    return convert


def _evaluates(use: Use) -> list[str]:
    if not use.on() or use.get_whole("eval-interval") or use.given("eval-only"):
        return []
    last = use.get_whole("train-iters")
    if "do-train" not in use.foreign:
        raise Refused(
            f"--eval-only --load DIR evaluates a checkpoint alone, --eval-interval {last} what was trained; give one"
        )
    if "steps" in (use.word("eval-strategy"), use.word("evaluation-strategy")):
        raise Refused(f"--eval_steps is missing; give --eval-interval N, such as {max(1, last // 10)}")
    return ["--eval-interval", str(last)]


def _validation_share(use: Use) -> list[str]:
    share = use.whole()
    if not 0 < share < 100:
        raise Refused(f"{use.value} is no percentage that leaves both; --split 95,5,0 takes 5 for validation")
    return ["--split", f"{100 - share},{share},0"]


def _only_evaluates(use: Use) -> list[str]:
    if not use.on():
        raise Refused("--eval-only evaluates a checkpoint alone")
    return []


_TEXT = "data_tools/preprocess_data.py --input FILE --output-prefix P --tokenizer SPEC makes a corpus for --data-path"
_EPOCHS = "--train-iters: epochs x tokens of --data-path (data_tools/peek.py) / --seq-length / --global-batch-size"
_MODEL = "scripts/checkpoint.py import makes a checkpoint of it; then --preset DIR/config.toml --load DIR --finetune"
_NO_TRAINER = "it is about another way of training; drop it"

ENTRIES: Entries = (
    *choice(
        HUGGING_FACE,
        "model-type",
        {"gpt2": "--architecture gpt2", "llama": "--architecture llama"},
        "there are gpt2 and llama; see --architecture",
    ),
    *refused(HUGGING_FACE, "model-name-or-path config-name", _MODEL),
    *computed(HUGGING_FACE, "config-overrides", "n_layer, n_embd, ...: --num-layers, --hidden-size, ...", _overrides),
    *alias(HUGGING_FACE, "tokenizer-name", "tokenizer"),
    *alias(HUGGING_FACE, "block-size max-seq-length model-max-length max-length", "seq-length"),
    *refused(
        HUGGING_FACE,
        "train-file validation-file dataset-name dataset-config-name dataset-path dataset streaming",
        _TEXT,
    ),
    *computed(HUGGING_FACE, "validation-split-percentage", "P: --split 100-P,P,0", _validation_share),
    *refused(HUGGING_FACE, "max-train-samples max-eval-samples", "--train-iters and --eval-iters bound what is read"),
    *unneeded(
        HUGGING_FACE,
        "preprocessing-num-workers overwrite-cache keep-linebreaks cache-dir line-by-line",
        "it is about preprocessing: data_tools/preprocess_data.py",
    ),
    *alias(HUGGING_FACE, "per-device-train-batch-size per-gpu-train-batch-size train-batch-size", "micro-batch-size"),
    *unneeded(
        HUGGING_FACE, "per-device-eval-batch-size per-gpu-eval-batch-size", "evaluation takes --micro-batch-size"
    ),
    *computed(
        HUGGING_FACE,
        "gradient-accumulation-steps",
        "--global-batch-size: it x --micro-batch-size x data-parallel ranks",
        _accumulation,
        2,
    ),
    *computed(HUGGING_FACE, "max-steps num-training-steps max-train-steps", "--train-iters", _steps),
    *refused(HUGGING_FACE, "num-train-epochs epochs num-epochs", _EPOCHS),
    *alias(HUGGING_FACE, "learning-rate", "lr"),
    *choice(
        HUGGING_FACE,
        "lr-scheduler-type",
        {
            name: f"--lr-decay-style {ours}"
            for name, ours in (
                ("linear", "linear"),
                ("cosine", "cosine"),
                ("cosine_with_min_lr", "cosine"),
                ("constant", "constant"),
                ("constant_with_warmup", "constant"),
                ("inverse_sqrt", "inverse-square-root"),
                ("warmup_stable_decay", "wsd"),
            )
        },
        "see --lr-decay-style for what there is",
    ),
    *alias(HUGGING_FACE, "warmup-steps num-warmup-steps warmup-iters", "lr-warmup-iters"),
    *computed(
        HUGGING_FACE, "warmup-ratio", "--lr-warmup-iters: the fraction of --train-iters, rounded up", _warmup_ratio, 4
    ),
    *alias(HUGGING_FACE, "max-grad-norm gradient-clipping", "clip-grad"),
    *alias(HUGGING_FACE, "adam-epsilon", "adam-eps"),
    *fixed(HUGGING_FACE, "optim", "adamw_torch|adamw_torch_fused|adamw_hf|adamw", "there is AdamW"),
    *refused(HUGGING_FACE, "optim-args optim-target-modules", "there is AdamW"),
    *computed(HUGGING_FACE, "torch-dtype dtype mixed-precision", "--precision", _precision),
    *unneeded(HUGGING_FACE, "fp16-full-eval bf16-full-eval half-precision-backend fp16-opt-level", "see --precision"),
    *switch(HUGGING_FACE, "gradient-checkpointing", "--recompute full"),
    *switch(HUGGING_FACE, "torch-compile", "--compile"),
    *choice(
        HUGGING_FACE,
        "fsdp",
        {
            "full_shard": "--zero-stage 3",
            "shard_grad_op": "--zero-stage 2",
            "no_shard": "--zero-stage 0",
            "full_shard auto_wrap": "--zero-stage 3",
            "": "",
        },
        "--zero-stage 3 is full_shard, 2 is shard_grad_op",
    ),
    *unneeded(
        HUGGING_FACE,
        "fsdp-config fsdp-transformer-layer-cls-to-wrap attn-implementation low-cpu-mem-usage "
        "use-fast-tokenizer ddp-find-unused-parameters ddp-bucket-cap-mb torch-empty-cache-steps "
        "group-by-length remove-unused-columns dataloader-pin-memory dataloader-drop-last "
        "dataloader-persistent-workers skip-memory-metrics auto-find-batch-size-off disable-tqdm "
        "include-tokens-per-second include-num-input-tokens-seen",
        "it changes no result, and is decided inside",
    ),
    *computed(HUGGING_FACE, "ddp-timeout", "--distributed-timeout-minutes: seconds / 60", _minutes),
    *alias(HUGGING_FACE, "dataloader-num-workers", "num-workers"),
    *computed(HUGGING_FACE, "output-dir", "--save, and --log-dir unless that is given", _output, 1),
    *unneeded(
        HUGGING_FACE,
        "overwrite-output-dir",
        "a new --save needs no permission; one that holds another run is refused all the same",
    ),
    *unneeded(HUGGING_FACE, "do-train", "this program trains"),
    *computed(
        HUGGING_FACE,
        "do-eval",
        "with --do-train: --eval-interval of --train-iters, once at the end; nothing, where it is given",
        _evaluates,
        4,
    ),
    *refused(HUGGING_FACE, "do-predict do-test", "--eval-only --eval-split test, on a checkpoint"),
    *fixed(HUGGING_FACE, "evaluation-strategy eval-strategy", "steps|no", "--eval-interval N, in iterations"),
    *fixed(HUGGING_FACE, "save-strategy", "steps|no", "--save-interval N, in iterations"),
    *fixed(HUGGING_FACE, "logging-strategy", "steps", "--log-interval N, in iterations"),
    *(
        Foreign(
            name,
            HUGGING_FACE,
            "translated",
            f"--{ours}; below 1 a fraction of --train-iters",
            _fraction_of_steps(ours),
            3,
        )
        for name, ours in (
            ("eval-steps", "eval-interval"),
            ("save-steps", "save-interval"),
            ("logging-steps", "log-interval"),
        )
    ),
    *unneeded(
        HUGGING_FACE,
        "logging-first-step log-level log-level-replica log-on-each-node logging-nan-inf-filter",
        "see --log-interval and --log-dir",
    ),
    *computed(HUGGING_FACE, "run-name", "--wandb-name, with --wandb-project", _run_name, 2),
    *alias(HUGGING_FACE, "save-total-limit", "keep-last"),
    *unneeded(HUGGING_FACE, "save-safetensors", "checkpoints are safetensors"),
    *refused(
        HUGGING_FACE, "save-only-model", "a checkpoint holds all that going on needs; scripts/checkpoint.py export"
    ),
    *refused(
        HUGGING_FACE,
        "load-best-model-at-end metric-for-best-model greater-is-better",
        "--keep-every N and --eval-only find the best checkpoint",
    ),
    *alias(HUGGING_FACE, "logging-dir", "tensorboard-dir"),
    *alias(HUGGING_FACE, "data-seed", "seed"),
    *computed(HUGGING_FACE, "report-to", "nothing, where --tensorboard-dir or --wandb-project is given", _report, 2),
    *computed(HUGGING_FACE, "resume-from-checkpoint", "--load; True: of --save", _resume, 2),
    *refused(HUGGING_FACE, "auto-find-batch-size", "--plan says what fits"),
    *refused(
        HUGGING_FACE, "push-to-hub* hub-*", "scripts/checkpoint.py export makes a Hugging Face model of a checkpoint"
    ),
    *refused(
        HUGGING_FACE,
        "lora-* peft-* use-lora use-peft use-peft* load-in-* neftune-* label-smoothing-factor "
        "use-cpu no-cuda fp8 deepspeed-plugin",
        _NO_TRAINER,
    ),
)
