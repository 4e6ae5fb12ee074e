"""Flags of Megatron-LM, DeepSpeed and Hugging Face: the translation of each, and of public scripts."""

import functools
import itertools
import json
import re
import typing
from collections import Counter
from pathlib import Path

import pytest

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import AXES, Layout
from megazero.families import MODELS
from megazero.flags.cli import parse, read
from megazero.flags.flag_names import flags, with_values
from megazero.flags.foreign.flag import Refused
from megazero.flags.foreign.flag_table import (
    DEEPSPEED_FILE,
    DEFAULTS,
    FLAGS,
    FOLDER,
    VALUES,
    Value,
    kebab,
    read_table,
    read_tables,
    read_values,
)
from megazero.flags.foreign.other_defaults import read_defaults, short_value
from megazero.flags.foreign.translate import DEEPSPEED_FLAGS, is_ours, refusals, translate
from megazero.flags.foreign.value_conversions import CONVERSIONS, model_types
from megazero.flags.foreign.values import choices, spell, translate_value
from megazero.flags.presets import read_preset
from megazero.flags.resolve import resolve
from tests.helpers.table import for_each
from tests.parallel.matrix import DIVISIONS

ROOT = Path(__file__).resolve().parents[3]
ENTRIES = [entry for table in FLAGS for entry in read_table(table)]
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"


def ours(line: str, ranks: int = 1) -> str:
    """The command line in our words; a refusal is an error."""
    translated = translate(line.split(), count_ranks=lambda: ranks)
    assert not [answer.refusal for answer in translated.answers if answer.refusal]
    return " ".join(translated.args)


# (theirs, ours), which must be the same configuration
SAME = [
    ("--bf16", "--precision bf16"),
    ("--fp16 True --bf16 False", "--precision fp16"),
    ("--tp 2 --pp=3", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3"),
    ("--train_iters 1e5 --seq_length=2e3 --global-batch-size 1.5e3", "--train-iters 100000 --seq-length 2000 "
     "--global-batch-size 1500"),
    ("--compile True --untie-embeddings=no --precision bfloat16", "--compile --no-untie-embeddings --precision bf16"),
    ("--lr-warmup-fraction .01 --lr-decay-iters 320000", "--lr-warmup-iters 3200 --lr-decay-iters 320000"),
    ("--train-iters 500 --lr-warmup-fraction 0.1", "--train-iters 500 --lr-warmup-iters 50"),
    ("--train-tokens 1048576 --seq-length 1024 --global-batch-size 8 --lr-warmup-fraction 0.25",
     "--train-tokens 1048576 --seq-length 1024 --global-batch-size 8 --lr-warmup-iters 32"),
    (LLAMA, "--architecture llama --no-untie-embeddings --norm-epsilon 1e-5 --ffn-hidden-size 2048"),
    (f"{LLAMA} --untie-embeddings-and-output-weights --layernorm-epsilon 1e-6 --ffn-hidden-size 99",
     "--architecture llama --ffn-hidden-size 99"),
    (f"--architecture llama {LLAMA}", "--architecture llama"),
    ("--architecture llama --swiglu --position-embedding-type rope", "--architecture llama"),
    ("--normalization LayerNorm --position-embedding-type learned_absolute --add-bias-linear", ""),
    ("--architecture llama --rotary_percent 0.5 --rotary-interleaved --rotary-seq-len-interpolation-factor 4",
     "--architecture llama --rotary-percent 0.5 --rotary-interleaved --rope-scaling-type linear "
     "--rope-scaling-factor 4"),
    ("--rotary-percent 1.0 --rotary-seq-len-interpolation-factor 1", ""),
    ("--model_type llama --config_overrides partial_rotary_factor=0.25,rope_theta=100", "--architecture llama "
     "--rotary-percent 0.25 --rotary-base 100"),
    ("--group-query-attention --architecture llama", "--architecture llama --num-query-groups 1"),
    ("--group-query-attention --num-query-groups 4 --architecture llama", "--architecture llama --num-query-groups 4"),
    ("--recompute-activations", "--recompute selective"),
    ("--recompute-modules core_attn", "--recompute selective"),
    ("--recompute-modules core_attn --recompute-granularity selective", "--recompute selective"),
    ("--recompute-modules core_attn --recompute-granularity full", "--recompute full"),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "--recompute full"),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 12", "--recompute full"),
    ("--num-layers 24 --pipeline-model-parallel-size 4 --recompute-granularity full --recompute-method block "
     "--recompute-num-layers 6", "--num-layers 24 --pipeline-model-parallel-size 4 --recompute full"),
    ("--checkpoint-activations --distribute-saved-activations", "--recompute full --partition-activations"),
    ("--use-distributed-optimizer --zero-stage 3", "--zero-stage 3"),
    ("--zero-stage 3 --use-distributed-optimizer", "--zero-stage 3"),
    ("--use-distributed-optimizer", "--zero-stage 1"),
    ("--num-layers 24 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "--num-layers 24 "
     "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved --virtual-pipeline-stages 4"),
    ("--num-layers-per-virtual-pipeline-stage 6 --pp 2", "--pipeline-model-parallel-size 2"),
    ("--vocab-file a/b/vocab.json --merge-file a/b/merges.txt", "--tokenizer gpt2:a/b"),
    ("--merge-file m.txt --vocab-file v.json --tokenizer-type GPT2BPETokenizer", "--tokenizer gpt2:v.json,m.txt"),
    ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model a/b", "--tokenizer a/b"),
    ("--tokenizer-type Llama2Tokenizer --tokenizer-model a/b.model", "--tokenizer llama2:a/b.model"),
    ("--tokenizer-model a/b --tokenizer-type TikTokenizer", "--tokenizer tiktoken:a/b"),
    ("--tokenizer-type NullTokenizer --vocab-size 100", "--vocab-size 101"),
    ("--train-samples 1000 --global-batch-size 32", "--train-iters 31 --global-batch-size 32"),
    ("--train-samples 1000 --train-tokens 20480 --global-batch-size 2 --seq-length 1024",
     "--train-tokens 20480 --global-batch-size 2 --seq-length 1024"),
    ("--train-tokens 20480 --global-batch-size 2 --seq-length 1024 --lr-warmup-fraction 0.2",
     "--train-tokens 20480 --global-batch-size 2 --seq-length 1024 --lr-warmup-iters 2"),
    ("--lr-warmup-samples 183105 --lr-decay-samples 126953125 --global-batch-size 1536",
     "--lr-warmup-iters 119 --lr-decay-iters 82652 --global-batch-size 1536"),
    ("--lr-warmup-samples 0 --global-batch-size 8", "--lr-warmup-iters 0 --global-batch-size 8"),
    ("--exit-duration-in-mins 235", "--exit-duration-minutes 235"),
    ("--exit-duration-in-mins 1000000", "--exit-duration-minutes 1000000"),
    ("--exit-duration-in-mins 30000000", "--exit-duration-minutes 0"),
    ("--profile --profile-step-start 4 --profile-step-end 6", "--profile-iterations 5:6"),
    ("--deepspeed --zero-optimization", "--zero-stage 1"),
    ("--model-parallel-size 2 --batch-size 4", "--tensor-model-parallel-size 2 --micro-batch-size 4"),
    ("--learning_rate 1e-4 --max_steps 100 --warmup_ratio 0.05 --max_grad_norm 1 --output_dir x",
     "--lr 1e-4 --train-iters 100 --lr-warmup-iters 5 --clip-grad 1 --save x --log-dir x"),
    ("--output_dir x --log-dir y", "--save x --log-dir y"),
    ("--output_dir x --resume_from_checkpoint True", "--save x --log-dir x --load x"),
    ("--max_steps 200 --eval_steps 0.1 --save_steps 50", "--train-iters 200 --eval-interval 20 --save-interval 50"),
    ("--model_type llama --config_overrides n_embd=64,n_head=4", "--architecture llama --hidden-size 64 "
     "--num-attention-heads 4"),
    ("--validation_split_percentage 5 --overwrite_output_dir --do_eval False", "--split 95,5,0"),
    ("--do_train --do_eval --max_steps 70", "--eval-interval 70 --train-iters 70"),
    ("--do_train --do_eval --eval_strategy steps --eval_steps 7", "--eval-interval 7"),
    ("--do_eval --eval-only --load x", "--eval-only --load x"),
    ("--save x --resume_from_checkpoint True", "--save x --load x"),
    ("--resume_from_checkpoint None --data_seed 7", "--seed 7"),
    ("--seed 42 --data_seed 7", "--seed 42"),
    ("--data_seed 7 --seed 42", "--seed 42"),
    ("--split '99,1,0' --lr-decay-style \"cosine\" --adam-beta1 '0.8'", "--split 99,1,0 --lr-decay-style cosine "
     "--adam-beta1 0.8"),
    ("--precision bf16 --main-grads-dtype bf16 --repeated-dataloader", "--precision bf16 --grad-dtype bf16"),
    ("--sequence-parallel --micro-batch-size 2", "--micro-batch-size 2"),
    ("--sequence-parallel --tp 2", "--sequence-parallel --tensor-model-parallel-size 2"),
    ("--ddp-bucket-size 0 --zero-reduce-bucket-size 0 --remote-device none", ""),
    ("--torch_dtype bfloat16 --gradient_checkpointing True", "--precision bf16 --recompute full"),
    ("--lr-decay-style WSD --lr-wsd-decay-samples 64 --global-batch-size 8",
     "--lr-decay-style wsd --lr-wsd-decay-iters 8 --global-batch-size 8"),
    ("--wandb-project p --run_name a --lr_scheduler_type inverse_sqrt",
     "--wandb-project p --wandb-name a --lr-decay-style inverse-square-root"),
    ("--num-experts 1 --moe-loss-coeff 0.01 --topk 1 --moe-train-capacity-factor 1.0", "--num-experts 0"),
    ("--topk 3 --moe-loss-coeff 0.01 --architecture llama --num-experts 8 --moe-router-load-balancing-type aux_loss",
     "--moe-router-topk 3 --moe-aux-loss-coeff 0.01 --architecture llama --num-experts 8"),
    ("--architecture llama --num-experts 8 --moe-router-score-function softmax --moe-token-dispatcher-type alltoall "
     "--moe-grouped-gemm --moe-expert-parallel-size 2 --moe-z-loss-coeff 1e-3",
     "--architecture llama --num-experts 8 --expert-model-parallel-size 2 --moe-z-loss-coeff 1e-3"),
    ("--lr-decay-style inverse_sqrt --lr-wsd-decay-style MINUS-SQRT",
     "--lr-decay-style inverse-square-root --lr-wsd-decay-style minus_sqrt"),
    ("--lr_decay_style warmup_stable_decay --lr-wsd-decay-style 1-sqrt",
     "--lr-decay-style wsd --lr-wsd-decay-style minus_sqrt"),
    ("--precision 16-mixed --grad-dtype torch.float64", "--precision fp16 --grad-dtype fp64"),
    ("--mixed_precision no --zero-stage 3.0", "--precision fp32 --zero-stage 3"),
    ("--precision TF32", "--precision fp32 --tf32"),
    ("--window-size 127,0 --window-attn-skip-freq 4", "--window-size 128 --layer-pattern LLLG"),
    ("--window-size (7,0) --window-attn-skip-freq [1,0,0]", "--window-size 8 --layer-pattern LGG"),
    ("--window-size 8,0 --window-attn-skip-freq ([1]*3+[0])*2", "--window-size 9 --layer-pattern LLLGLLLG"),
    ("--architecture llama --num-experts 8 --expert-interval 3 --moe-router-load-balancing-type none "
     "--moe-aux-loss-coeff 0.0 --moe-layer-recompute --moe-router-dtype fp32 --moe-input-jitter-eps 0",
     "--architecture llama --num-experts 8 --moe-layer-freq DDE --recompute selective"),
    ("--expert-interval 3 --num-experts 1", "--num-experts 0"),
    ("--architecture llama --num-experts 8 --moe-layer-freq ([0]*2+[1]*3)", "--architecture llama --num-experts 8 "
     "--moe-layer-freq DDEEE"),
    ("--architecture llama --num-experts 8 --moe-layer-freq ([0] + [1])*2", "--architecture llama --num-experts 8 "
     "--moe-layer-freq DEDE"),
    ("--window-size -1,0 --window-attn-skip-freq 1", "--layer-pattern G"),
    ("--model_type mistral --config_overrides sliding_window=8", "--architecture mistral --window-size 8"),
    ("--pipeline-schedule 1F1B", "--pipeline-schedule 1f1b"),
    ("--pipeline-schedule=Interleaved1F1B", "--pipeline-schedule interleaved"),
    ("--recompute uniform --loss-scale-window 500.0 --zero-shard-size 8.", "--recompute full --loss-scale-window 500 "
     "--zero-shard-size 8"),
]  # fmt: skip


@for_each(("theirs", "expected"), SAME)
def test_a_foreign_command_line_is_ours(theirs: str, expected: str) -> None:
    assert parse(theirs.split()) == parse(expected.split())


def test_gradient_accumulation_is_a_global_batch() -> None:
    """Steps x samples of a device x data-parallel ranks, which are all ranks over those that share a sample."""
    line = "--gradient_accumulation_steps 4 --per_device_train_batch_size 8 --tp 2"
    assert "--global-batch-size 512" in ours(line, ranks=32)
    assert "--global-batch-size 64" in ours(f"{line} --plan --world-size 4", ranks=32)
    assert "--global-batch-size 32" in ours("--gradient_accumulation_steps 4 --micro-batch-size 2 --cp 2", ranks=8)


def test_translations_count_data_parallel_ranks_as_the_layout_does() -> None:
    """Over every pair of axes, experts divided or not: micro-batches, and samples as iterations, are those asked for.

    A global batch is given by accumulation, or is the default: a micro-batch of each replica.
    """
    sizes = {"pp": "pipeline-model", "cp": "context", "tp": "tensor-model"}
    assert {*sizes, "dp"} == set(AXES)
    model = f"--num-layers 4 --vocab-size 128 --seq-length 64 {LLAMA} --num-experts 4"
    theirs = "--per_device_train_batch_size 2 --train-samples 1920"
    for pp, dp, cp, tp, (ep, etp) in itertools.product(*[(1, 2)] * 4, DIVISIONS.values()):
        layout = Layout(pp, dp, tp, cp=cp)
        if layout.stride("pp") % (ep * (etp or tp)):
            continue
        axes = " ".join(f"--{name}-parallel-size {getattr(layout, axis)}" for axis, name in sizes.items())
        axes += f" --expert-model-parallel-size {ep} --expert-tensor-parallel-size {etp}"
        axes += " --sequence-parallel" if tp > 1 else ""
        count = functools.partial(int, layout.world_size)
        for steps, accumulated in ((4, "--gradient_accumulation_steps 4"), (1, "")):
            config = read(f"{theirs} {accumulated} {model} {axes}".split(), count).config
            config, found = resolve(config, layout.world_size, 0, declare)
            assert (found.dp, found.cp, found.ep) == (dp, cp, ep), axes
            assert config.training.global_batch_size == steps * 2 * dp, axes
            assert config.training.train_iters == 1920 // (steps * 2 * dp), axes


def consumed_by_hand(ramp: tuple[int, int, int], full: int, iterations: int) -> list[int]:
    """The samples consumed before each iteration, as Megatron-LM's loop counts them."""
    (start, increment, samples), consumed = ramp, [0]
    while len(consumed) <= iterations:
        size = full
        if consumed[-1] < samples:
            size = start + int(consumed[-1] / (samples / ((full - start) / increment))) * increment
        consumed.append(consumed[-1] + size)
    return consumed


RAMPS = [((16, 16, 5000), 128), ((32, 32, 960), 64), ((4, 4, 100), 16), ((16, 16, 60_000), 1024)]


@for_each(("ramp", "full"), RAMPS)
def test_samples_are_iterations_over_the_ramp_of_the_batch(ramp: tuple[int, int, int], full: int) -> None:
    """Lengths, warm-ups and ends of the decay, given in samples, tokens, or as a fraction; in the ramp and after it."""
    far = 40 + 2 * ramp[2] // ramp[0]
    consumed, words = consumed_by_hand(ramp, full, far), f"--rampup-batch-size {' '.join(map(str, ramp))}"
    words += f" --global-batch-size {full} --seq-length 64"

    def length_of(samples: float) -> int:
        return max(n for n in range(far) if consumed[n] <= samples)

    def nearest(samples: float) -> int:
        return min(range(1, far), key=lambda n: abs(consumed[n] - samples))

    for at in (3, far // 3, far // 2, far - 20):
        samples, end = consumed[at] + 1, consumed[far - 5]
        for theirs, expected in (
            (f"--train-samples {samples}", f"--train-iters {length_of(samples)}"),
            (f"--lr-warmup-samples {samples}", f"--lr-warmup-iters {nearest(samples)}"),
            (f"--lr-warmup-tokens {samples * 64}", f"--lr-warmup-iters {nearest(samples)}"),
            (f"--lr-decay-samples {samples}", f"--lr-decay-iters {nearest(samples)}"),
            (f"--train-samples {end} --lr-warmup-fraction 0.25",
             f"--train-iters {far - 5} --lr-warmup-iters {nearest(end / 4)}"),
            (f"--train-samples {end} --lr-wsd-decay-samples {end - samples}",
             f"--train-iters {far - 5} --lr-wsd-decay-iters {far - 5 - at}"),
        ):  # fmt: skip
            assert ours(f"{words} {theirs}") == f"{words} {expected}"
    assert read(f"{words} --train-samples {consumed[9]}".split()).notes == [
        f"translated: --train-samples {consumed[9]} is --train-iters 9"
    ]


def test_a_ramp_of_a_preset_is_one_and_a_wrong_ramp_is_left_to_its_own_refusal(tmp_path: Path) -> None:
    preset = tmp_path / "p.toml"
    preset.write_text("rampup-batch-size = [4, 4, 24]\nglobal-batch-size = 8\n")  # 4, 4, 4, 4, 4, 4, 8, ...
    assert parse(["--preset", str(preset), "--train-samples", "40"]).training.train_iters == 8
    for ramp in ("0 4 24", "4 0 24", "4 4 0", "4 -4 24"):
        assert translate(f"--rampup-batch-size {ramp} --train-samples 80 --global-batch-size 8".split()).answers


def test_the_last_of_two_spellings_wins() -> None:
    assert parse("--bf16 --precision fp16".split()).training.precision == "fp16"
    assert parse("--precision fp16 --bf16".split()).training.precision == "bf16"
    assert parse("--tp 2 --tensor-model-parallel-size 4 --tp 3".split()).parallel.tensor_model_parallel_size == 3


REFUSED = [
    (
        "--num-experts 8 --moe-router-load-balancing-type none --moe-loss-coeff 0.1",
        "--moe-router-load-balancing-type none: --moe-aux-loss-coeff gives the experts a balance loss",
    ),
    ("--num-experts 8 --moe-router-load-balancing-type global_aux_loss", "there are seq_aux_loss, with"),
    ("--num-experts 8 --moe-router-dtype fp64", "only fp32 is possible here"),
    ("--num-experts 8 --expert-interval 0", "write it as --moe-layer-freq, such as DE"),
    ("--num-experts 8 --moe-apply-probs-on-input", "weights multiply the results of experts"),
    ("--window-size 8,0 --window-attn-skip-freq 0", "write it as --layer-pattern, such as LLLG"),
    ("--window-size 8,0 --window-attn-skip-freq [1,2]", "no list of 0 and 1 for at most 4096 layers; give letters"),
    ("--num-experts 8 --moe-layer-freq [1]*9999999999", "; give letters, such as DE"),
    ("--num-experts 8 --moe-layer-freq ([1]*4096+[0])*4096", "; give letters, such as DE"),
    ("--num-experts 8 --moe-layer-freq [1]+__import__('os')", "; give letters, such as DE"),
    ("--num-experts 8 --moe-layer-freq []", "; give letters, such as DE"),
    ("--num-experts 8 --moe-layer-freq [True]*2**9", "; give letters, such as DE"),
    ("--window-size 8,4", "--window-size takes a whole number"),
    ("--swiglu", "--swiglu: without --normalization RMSNorm --pos"),
    ("--swiglu --disable-bias-linear", "--swiglu: with --disable-bias-linear, without --normalization RMSNorm --pos"),
    (f"--architecture gpt2 {LLAMA}", "does not go with --architecture gpt2"),
    ("--architecture llama --normalization LayerNorm", "does not go with --architecture llama"),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", "recomputes every layer"),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", "each from its own input"),
    ("--loss-scale 8192", "--loss-scale 8192: only 0 is possible here; see --min-loss-scale"),
    ("--fp8-format hybrid", "--precision is bf16, fp16, fp32 or fp64"),
    ("--yarn-mscale 1.0", "--rope-scaling-type yarn with --rope-scaling-factor"),
    (
        "--num-experts 8 --moe-eval-capacity-factor 1.25",
        "--moe-expert-capacity-factor F bounds the choices of a sample",
    ),
    (
        "--num-experts 8 --moe-token-drop-policy position",
        "--moe-token-drop-policy position: only probs is possible here",
    ),
    (
        "--num-experts 8 --moe-input-jitter-eps 1e-2",
        "--moe-input-jitter-eps 1e-2: only 0 is possible here",
    ),
    (
        "--num-experts 8 --moe-router-load-balancing-type sinkhorn",
        "there are seq_aux_loss, with --moe-aux-loss-coeff, and none",
    ),
    ("--architecture olmoe --moe-min-capacity 4", "--moe-expert-capacity-factor F bounds the choices of a sample"),
    ("--optimizer sgd", "--optimizer sgd: there are adamw, lion and muon"),
    ("--tokenizer-type BertWordPieceLowerCase", "bertwordpiecelowercase: --tokenizer takes"),
    ("--tokenizer-type SentencePieceTokenizer", "needs its file: --tokenizer megatron:PATH"),
    ("--vocab-file v.json", "give --vocab-file vocab.json --merge-file merges.txt"),
    ("--lr-warmup-fraction 1.5", "1.5 is not a fraction"),
    ("--bf16 maybe", "maybe is neither true nor false"),
    ("--train-samples many", "many is not a number"),
    (
        "--resume_from_checkpoint True",
        "--resume_from_checkpoint True: there is no folder to resume from; add --output_dir",
    ),
    ("--do_eval --max_steps 70", "--eval-only --load DIR evaluates a checkpoint alone, --eval-interval 70 the"),
    ("--do_train --do_eval --eval_strategy steps --max_steps 70", "--eval-interval N, such as 7"),
    ("--validation_split_percentage 100", "100 is not a percentage"),
    ("--num_train_epochs 3", "--num_train_epochs 3: give --train-tokens N, epochs x tokens of --data-path, which"),
    ("--recompute-modules core_attn mlp", "--recompute-modules core_attn mlp: mlp cannot be chosen; --recompute selec"),
    ("--recompute-modules", "--recompute-modules: give it core_attn, or drop it"),
    ("--report_to wandb", "needs --wandb-project"),
    ("--deepspeed_config missing.json", "missing.json cannot be read"),
    ("--deepspeed a\0b", "--deepspeed 'a\\x00b': contains a null character; remove it"),
    ("--precision fp8-hybrid", "--precision fp8-hybrid: there is nothing smaller than bf16 and fp16"),
    ("--torch_dtype auto", "--torch_dtype auto: there are bf16, fp16, fp32 and fp64; name one"),
    ("--lr-decay-style polynomial", "--lr-decay-style polynomial: --lr-decay-style linear with --min-lr"),
    ("--enable-cuda-graph", "no part of a step is captured as a CUDA graph; drop it"),
    ("--cuda-graph-impl local", "no part of a step is captured as a CUDA graph; drop it"),
    ("--architecture lama", "--architecture lama: there are gpt2, llama"),
    ("--architecture lama", "; did you mean llama?"),
    ("--zero-stage 4", "--zero-stage 4: there are 0, 1, 2, 3"),
    ("--zero-stage 1.5", "--zero-stage 1.5: there are 0, 1, 2, 3"),
    ("--lr-decay-style=", "--lr-decay-style '': there are constant, linear"),
    ("--recompute full selective", "--recompute full selective: there are none, selective, full"),
    ("--recompute", "--recompute: there are none, selective, full"),
    ("--num-layers many", "--num-layers many: --num-layers takes a whole number"),
    ("--encoder-num-layers 1.5", "--encoder-num-layers 1.5: --num-layers takes a whole number"),
    ("--lr high", "--lr high: --lr takes a number"),
]


def test_every_value_of_few_is_refused_by_name_value_and_choices() -> None:
    """In one line, with the nearest value."""
    few = {name: typing.get_args(flag.kind) for name, flag in flags().items() if choices(flag.kind)}
    assert len(few) >= 16
    for name, values in few.items():
        with pytest.raises(ValueError, match=re.escape(f"--{name} {values[-1]}x: there are")) as refused:
            parse([f"--{name}", f"{values[-1]}x"])
        assert "\n" not in str(refused.value)
        assert all(str(value) in str(refused.value) for value in values)
        assert isinstance(values[0], int) or str(refused.value).endswith(f"; did you mean {values[-1]}?")


def test_a_foreign_value_of_our_flag_is_reported() -> None:
    assert read("--lr-decay-style inverse_sqrt --precision tf32 --zero-stage 2.0 --recompute FULL".split()).notes == [
        "translated: --lr-decay-style inverse_sqrt is --lr-decay-style inverse-square-root; --precision tf32 is "
        "--precision fp32 --tf32"
    ]


def test_a_flag_of_ours_can_translate_and_answer_foreign_values() -> None:
    """A flag that we may have one day: its values, other systems' names for them, and answers to the others."""
    rows = [
        Value("fusedadam", "adamw", ""),
        Value("dist-*", "muon --zero-stage 1", ""),
        Value("sgd", "", "no momentum"),
    ]
    kind = typing.Literal["adamw", "muon"]
    found = {
        word: translate_value("optimizer", kind, [spell(kind, word)], lambda: rows)
        for word in ("adamw", "Muon", "FusedAdam", "dist_muon")
    }
    assert found == {
        "adamw": [],
        "Muon": [],
        "FusedAdam": ["--optimizer", "adamw"],
        "dist_muon": ["--optimizer", "muon", "--zero-stage", "1"],
    }
    for word, said in (("SGD", "no momentum"), ("adam", "there are adamw, muon; did you mean adamw?")):
        with pytest.raises(Refused, match=re.escape(said)):
            translate_value("optimizer", kind, [word], lambda: rows)


def test_the_values_of_other_systems_name_flags_and_values_of_ours() -> None:
    for name, rows in read_values().items():
        known = choices(flags()[name].kind)
        assert len({row.name for row in rows}) == len(rows)
        for row in rows:
            assert row.name == kebab(row.name.lower()) and row.name not in map(kebab, known)
            assert bool(row.words) != bool(row.answer)
            if row.words:
                assert not translate(["--" + name, *row.words.split()]).answers, row
            named = re.findall(r"(?<![-\w])--([a-z0-9-]+[a-z0-9])", row.answer)
            assert all(map(is_ours, named)), row


@for_each(("line", "said"), REFUSED)
def test_what_has_no_equal_is_refused_with_the_way_out(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(line.split())


def test_all_refusals_are_said_at_once() -> None:
    with pytest.raises(ValueError, match="fp8") as refused:
        parse("--fp8-format hybrid --no-load-optim --bf16 --no-load-rng".split())
    assert len(str(refused.value).splitlines()) == 2 and "--no-load-optim, --no-load-rng: --load" in str(refused.value)


def test_a_deepspeed_file_is_flags(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    values = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 5e8,
            "overlap_comm": False,
            "contiguous_gradients": True,
        },
        "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale": 0, "hysteresis": 1},
        "bf16": {"enabled": False, "immediate_grad_update": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.8, 0.95], "eps": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    path.write_text(json.dumps(values))
    config = read(["--lr", "3e-4", "--deepspeed", str(path)], lambda: 8).config
    assert config == parse(
        "--micro-batch-size 2 --global-batch-size 64 --clip-grad 0.5 --zero-stage 2 --reduce-bucket-size 500000000 "
        "--no-overlap-comm --precision fp16 --initial-loss-scale 4096 --hysteresis 1 --lr 3e-4 --adam-beta1 0.8 "
        "--adam-beta2 0.95 --lr-decay-style linear --lr-warmup-iters 10 --lr-decay-iters 100 "
        "--checkpoint-in-cpu".split()
    )  # fmt: skip
    path.write_text(json.dumps({"zero_optimization": {"offload_param": {"device": "cpu"}}, "xyzzy": 1}))
    with pytest.raises(ValueError, match=r"offload_param.device cpu: parameters stay on .*\nxyzzy 1: it has no"):
        parse(["--deepspeed_config", str(path)])
    offload = {"_comment": "x", "offload_optimizer": {"_why": [1], "device": "cpu", "ratio": 0.5, "pin_memory": True}}
    path.write_text(json.dumps({"_comment": {"of": "all"}, "zero_optimization": offload}))
    ours = parse(["--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5"])
    assert parse(["--deepspeed", str(path)]) == ours
    for kind, line in (("Adam", "adamw"), ("AdamW", "adamw"), ("Lion", "lion"), ("Muon", "muon --muon-scale keller")):
        path.write_text(json.dumps({"optimizer": {"type": kind, "params": {"lr": 0.02}}}))
        assert parse(["--deepspeed", str(path)]) == parse(f"--lr 0.02 --optimizer {line}".split()), kind
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": "/local"}}
    path.write_text(json.dumps({"zero_optimization": offload}))
    ours_in_files = parse(["--optimizer-cpu-offload", "--optimizer-nvme-offload", "/local"])
    assert parse(["--deepspeed", str(path)]) == ours_in_files
    assert parse("--cpu-optimizer --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d".split()) == ours


@for_each(
    ("line", "file", "said"),
    [
        ("--zero-stage 1 --clip-grad 2.0", {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5},
         "translated: zero_optimization.stage 2 is --zero-stage 2, overridden by --zero-stage 1; gradient_clipping 0.5 "
         "is --clip-grad 0.5, overridden by --clip-grad 2.0"),
        ("--max_grad_norm 2.0", {"gradient_clipping": 0.5},
         "translated: gradient_clipping 0.5 is --clip-grad 0.5, overridden by --max_grad_norm 2.0; --max_grad_norm 2.0 "
         "is --clip-grad 2.0"),
        ("--zero-stage 2 --clip-grad 0.50", {"zero_optimization": {"stage": 2}},
         "translated: zero_optimization.stage 2 is --zero-stage 2"),
        ("--global-batch-size 8", {"gradient_accumulation_steps": 256},
         "translated: gradient_accumulation_steps 256 is --global-batch-size 256, overridden by --global-batch-size 8"),
        ("--global-batch-size 8", {"train_batch_size": 16, "gradient_accumulation_steps": 4},
         "translated: train_batch_size 16 is --global-batch-size 16, overridden by --global-batch-size 8; "
         "gradient_accumulation_steps 4, overridden by --global-batch-size 8"),
        ("--no-overlap-comm", {"zero_optimization": {"overlap_comm": True}},
         "translated: zero_optimization.overlap_comm true is --overlap-comm, overridden by --no-overlap-comm"),
        ("--lr 5", {"optimizer": {"params": {"lr": 2e-4}}, "scheduler": {"params": {"warmup_max_lr": 3e-4}}},
         "translated: optimizer.params.lr 0.0002 is --lr 0.0002, overridden by --lr 5; scheduler.params.warmup_max_lr "
         "0.0003 is --lr 0.0003, overridden by --lr 5"),
    ],
)  # fmt: skip
def test_a_file_is_overridden_by_the_command_line_which_is_reported(
    line: str, file: dict[str, object], said: str, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(file))
    assert read([*line.split(), "--deepspeed", str(tmp_path / "ds.json")]).notes[:1] == [said]


def test_a_translation_that_another_flag_overrides_is_reported() -> None:
    assert read("--output_dir x --save y --bf16 --precision fp16".split()).notes == [
        "translated: --output_dir x is --save x --log-dir x, overridden by --save y; --bf16 is --precision bf16, "
        "overridden by --precision fp16"
    ]


@for_each(
    ("line", "file", "said"),
    [
        ("--fp16", {"bf16": {"enabled": True}}, "bf16.enabled true: --fp16 contradicts it"),
        ("--precision float32", {"bf16": {"enabled": True}}, "bf16.enabled true: --precision float32 contradicts it"),
        ("--bf16", {"fp16": {"enabled": True}}, "fp16.enabled true: --bf16 contradicts it"),
        ("--fp16", {"fp16": {"enabled": False}}, "fp16.enabled false: --fp16 contradicts it"),
        (
            "",
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            "fp16.enabled true: bf16.enabled true contradicts",
        ),
    ],
)
def test_another_precision_than_that_of_the_file_is_refused(
    line: str, file: dict[str, object], said: str, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match=re.escape(said)):
        read([*line.split(), "--deepspeed", str(tmp_path / "ds.json")])


SHORT = ("gather_16bit_weights_on_model_save", "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
SHORT += ("param_persistence_threshold", "model_persistence_threshold", "module_granularity_threshold")


@for_each(
    "file",
    [
        {"zero_optimization": dict.fromkeys(SHORT, 5)},
        {"zero_optimization": {"offload_param": {"device": "none", "pin_memory": True, "buffer_count": 5}}},
        {"zero_optimization": {"offload_param": None, "offload_optimizer": {}, "stage3_x": 1}},
        {"zero_optimization": {"offload_param": {"device": "None"}, "offload_optimizer": {"device": None}}},
        {"zero_optimization": {"reduce_bucket_size": 0, "zero_hpz_partition_size": 1, "mics_shard_size": -1}},
        {"zero_optimization": {"zero_quantized_weights": False, "zeropp_loco_param": None}},
        {"zero_optimization": {"cpu_offload": False, "cpu_offload_param": False}},
        {
            "comms_config": {"verbose": False, "debug": True},
            "monitor_config": {"tag": "x", "wandb": {"enabled": False}},
        },
        {"csv_monitor": {"enabled": True, "output_path": "x"}, "tensorboard": {"enabled": False, "output_path": "x"}},
        {"wandb": {"enabled": False, "project": "x"}, "comet": {"enabled": None}, "amp": {"enabled": False}},
        {"data_types": {"grad_accum_dtype": None}, "communication_data_type": None, "gradient_clipping": "none"},
        {"compression_training": {"enabled": False, "x": {"y": [3]}}, "elasticity": {"enabled": "off", "max": 3}},
        {"something_new": None, "other": [], "another": {}, "more": False, "and_more": 0, "last": "NULL"},
        {"fp16": {"enabled": 0, "opt_level": "O2"}, "scheduler": None, "optimizer": {"type": "none"}},
        {"bf16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 10}, "zero_optimization": False},
    ],
)
def test_keys_of_a_file_that_ask_for_nothing_are_listed(file: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(file))
    command = read(["--deepspeed", str(tmp_path / "ds.json")])
    assert command.config == parse([])
    assert command.notes[0].startswith("nothing to do for: ")


@for_each(
    ("file", "said"),
    [
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_optimizer.device cpu"),
        (
            {"gradient_cliping": 0},
            "gradient_cliping 0: it has no equal here; drop it, or did you mean gradient_clipping?",
        ),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights true: it has no equal here"),
        ({"amp": {"enabled": True}}, "amp.enabled true: give bf16 or fp16 instead"),
    ],
)
def test_keys_of_a_file_that_ask_for_something_else_are_refused(
    file: dict[str, object], said: str, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(file))
    with pytest.raises(ValueError, match=re.escape(said)):
        read(["--deepspeed", str(tmp_path / "ds.json")])


def test_the_rate_of_a_deepspeed_scheduler_is_the_learning_rate(tmp_path: Path) -> None:
    """It was dropped. Warm-up begins at 0 and is linear; a file may write that."""
    path = tmp_path / "ds.json"
    scheduler = {"warmup_max_lr": 3e-4, "warmup_min_lr": 0, "warmup_type": "linear", "warmup_num_steps": 10}
    values = {"scheduler": {"type": "WarmupLR", "params": scheduler}}
    ours = parse("--lr 3e-4 --lr-warmup-iters 10".split())
    for rate in (None, 0.0003, "auto", "3e-4", "0.00030"):
        optimizer = {} if rate is None else {"optimizer": {"params": {"lr": rate}}}
        path.write_text(json.dumps(optimizer | values))
        assert parse(["--deepspeed", str(path)]) == ours
    assert parse(["--lr", "5", "--deepspeed", str(path)]).optimizer.lr == 5
    path.write_text(json.dumps({"optimizer": {"params": {"lr": 2e-4}}} | values))
    assert parse(["--lr", "5", "--deepspeed", str(path)]).optimizer.lr == 5  # and not one of the file's two rates


def test_the_batch_sizes_of_a_deepspeed_file_are_those_of_its_product(tmp_path: Path) -> None:
    """One of the three may be missing; flags of the command line count."""
    path = tmp_path / "ds.json"
    batch, micro, steps = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"

    def sizes(values: dict[str, object], line: str = "", ranks: int = 2) -> tuple[int, int]:
        path.write_text(json.dumps(values))
        training = read([*line.split(), "--deepspeed", str(path)], lambda: ranks).config.training
        return training.global_batch_size, training.micro_batch_size

    assert sizes({batch: 16, micro: 2, steps: 4}) == (16, 2)
    assert sizes({steps: 4, batch: 16}) == (16, 2)
    assert sizes({micro: 2, steps: 4}) == (16, 2)
    assert sizes({batch: 16, micro: 2}) == (16, 2)
    assert sizes({batch: 16, micro: "auto", steps: "auto"}, "--gradient_accumulation_steps 2") == (16, 4)
    whole = {batch: 16, micro: 2, steps: 4}
    assert sizes(whole, "--micro-batch-size 4") == (16, 4)  # the command line wins
    assert sizes(whole, "--global-batch-size 32") == (32, 2)
    assert sizes({batch: 64, steps: 4}, "--plan-search --world-size 8 --device-type h100-80gb") == (64, 1)  # not tied
    for values, line, said in (
        ({batch: 64, micro: 2, steps: 4}, "", "gradient_accumulation_steps 4: train_batch_size 64 is not "
         "--micro-batch-size 2 x 4 x 2 data-parallel ranks = 16; change one, or drop it"),
        ({batch: 16, micro: 2, steps: 4}, "--tp 2", "--micro-batch-size 2 x 4 x 1 data-parallel ranks = 8;"),
        ({batch: 20, steps: 4}, "", "train_batch_size 20 is not --micro-batch-size 2 x 4 x 2"),
        ({batch: 4, steps: 4}, "", "train_batch_size 4 is not --micro-batch-size 1 x 4 x 2"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(said)):
            sizes(values, line)


# Values that hardly any flag or key takes.
ABSURD = ("Infinity", "-Infinity", "NaN", "null", "[]", "[[0.9], 1]", "{}", '{"x": 1}', "1e400", "[" * 900 + "]" * 900)
PERHAPS = ("true", '"x"', "1000000000", "-1", "0.5", "0")


@pytest.mark.second
def test_a_foreign_flag_with_an_absurd_value_is_refused_by_its_name() -> None:
    """No entry raises anything else than a refusal."""
    around = ["--seq-length inf", "--pp 0 --micro-batch-size 0", "--train-tokens x --recompute-num-layers nan"]
    around += ["--num-layers nan --profile-step-start x --seq-length 0"]
    for entry in (entry for entry in ENTRIES if entry.name not in DEEPSPEED_FLAGS):
        flag = f"--{entry.name.replace('*', 'any')}"
        for line in around:
            for word in ("NaN", "1"):
                translate([*line.split(), flag, word])
        for word in (*ABSURD, *PERHAPS):
            refused = refusals(translate([flag, word], count_ranks=lambda: 2).answers)
            assert not refused or refused.startswith(flag), (flag, word, refused)


def test_a_value_that_is_refused_under_our_name_is_reported_with_its_translation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse(["--tokenizer_name", "a", "b"])
    assert "--tokenizer_name a b is --tokenizer a b" in capsys.readouterr().err


def test_a_deepspeed_file_with_absurd_values_is_refused_by_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    for entry in read_table(DEEPSPEED_FILE):
        for value in (*ABSURD, *PERHAPS):
            text = value
            for part in reversed(entry.name.split(".")):
                text = f'{{"{part}": {text}}}'
            path.write_text(text)
            refused = refusals(translate(["--deepspeed_config", str(path)], count_ranks=lambda: 2).answers)
            assert not refused or entry.name in refused, (entry.name, value, refused)


@for_each(
    ("text", "said"),
    [
        ('{"fp16": {"initial_scale_power": 1e9}}', "fp16.initial_scale_power 1000000000: it must be 0 to 48"),
        ('{"optimizer": {"params": {"betas": [0.9]}}}', "optimizer.params.betas [0.9]: it must be two numbers"),
        ('{"optimizer": {"params": {"lr": 2e-4}}, "scheduler": {"params": {"warmup_max_lr": 3e-4}}}',
         "scheduler.params.warmup_max_lr 0.0003: optimizer.params.lr is 0.0002, and DeepSpeed trains with the "
         "scheduler's rate; give both the same, or drop one"),
        ('{"scheduler": {"params": {"warmup_min_lr": 1e-6}}}', "warmup_min_lr 1e-06: only 0 is possible here"),
        ('{"scheduler": {"params": {"warmup_type": "log"}}}', "warmup_type log: only linear is possible here"),
        ('{"gradient_accumulation_steps": 0}', "gradient_accumulation_steps 0: it must be at least 1"),
        ('{"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": "x"}',
         "train_micro_batch_size_per_gpu x: --micro-batch-size takes a whole number"),
        ("[" * 100_000, "ds.json is no JSON: maximum recursion depth"),
        ('{"a":' * 1000 + "1" + "}" * 1000, "ds.json"),
    ],
)  # fmt: skip
def test_a_deepspeed_file_is_refused_with_the_reason(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(["--deepspeed_config", str(tmp_path / "ds.json")])


@for_each("off", ["false", '"false"', '"False"', "0", '"off"'])
def test_a_disabled_group_of_a_deepspeed_file_asks_for_nothing(tmp_path: Path, off: str) -> None:
    (tmp_path / "ds.json").write_text(f'{{"fp16": {{"enabled": {off}, "hysteresis": 3}}, "steps_per_print": 7}}')
    assert translate(["--deepspeed_config", str(tmp_path / "ds.json")]).args == ["--log-interval", "7"]


def test_empty_groups_of_a_deepspeed_file_ask_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"optimizer": {"params": {}}, "aio": {}, "fp16": {}, "steps_per_print": 7}')
    assert parse(["--deepspeed_config", str(tmp_path / "ds.json")]) == parse(["--log-interval", "7"])


def test_what_was_done_is_said_in_a_line_each() -> None:
    translated, needless = read("--bf16 --use-flash-attn --data-impl mmap --tp 2 --num-layers 3".split()).notes
    assert translated == "translated: --bf16 is --precision bf16; --tp 2 is --tensor-model-parallel-size 2"
    assert needless == "nothing to do for: --use-flash-attn, --data-impl"
    assert read("--num_layers 3 --lr 1".split()).notes == []


# -- flags that a script leaves out

DROPOUTS = "--attention-dropout 0 (0.1 there), --hidden-dropout 0 (0.1 there)"
MEGATRON = (
    f"not given, and different in Megatron-LM: {DROPOUTS}, --lr-decay-style constant (linear there), --eval-interval 0 "
    "(1000 there), --eval-iters 10 (100 there), --log-interval 1 (100 there), --num-workers 1 (2 there)"
)
TRAINER = (
    "not given, and different in Hugging Face: --lr 0.0003 (5e-05 there), --weight-decay 0.01 (0 there), "
    "--lr-decay-style constant (linear there), --micro-batch-size 1 (8 there), --seed 1234 (42 there), --eval-iters 10 "
    "(all there), --log-interval 1 (500 there), --save-interval 0 (500 there), --num-workers 1 (0 there)"
)
JSON = "--deepspeed FILE"  # of the values in the second column


@for_each(
    ("line", "file", "said"),
    [
        ("--num-layers 2 --lr 1", None, ""),  # of no other system
        ("--num-layers 2 --use-flash-attn", None, MEGATRON),
        ("--bf16", None, ""),  # of several
        ("--fp16 --lr 1", None, ""),
        ("--fp16 --use-flash-attn", None,
         f"{MEGATRON}, --initial-loss-scale 2^16 (2^32 there), --grad-dtype fp32 (fp16 there)"),
        ("--use-flash-attn --bf16 --attention-dropout 0 --hidden-dropout 0.1 --lr-decay-style cosine "
         "--eval-interval 1 --eval-iters 2 --log-interval 100", None,
         "not given, and different in Megatron-LM: --num-workers 1 (2 there)"),
        ("--use-flash-attn --preset PRESET", None, MEGATRON.replace(f"{DROPOUTS}, ", "")),
        ("--architecture llama --tp 1", None, f"{MEGATRON}, --untie-embeddings yes (no there), "
            "--norm-epsilon 1e-06 (1e-05 there)"),
        ("--max_steps 9 --architecture llama", None, TRAINER),
        ("--max_steps 9 --bf16 --learning_rate 1", None,
         TRAINER.replace("--lr 0.0003 (5e-05 there), ", "") + f", {DROPOUTS}"),
        ("--eval-only --load x --use-flash-attn", None, ""),
        (JSON, {"zero_optimization": {"stage": 2}}, f"{MEGATRON}; different in DeepSpeed: --clip-grad 1 (0 there)"),
        (f"{JSON} --max_steps 9 --architecture llama", {"fp16": {"enabled": True}},
         f"{TRAINER}; different in DeepSpeed: --clip-grad 1 (0 there)"),
        (JSON, {"gradient_clipping": 1, "optimizer": {"type": "AdamW"}},
         f"{MEGATRON}; different in DeepSpeed: --lr 0.0003 (0.001 there), --weight-decay 0.01 (0 there)"),
        (JSON, {"gradient_clipping": 1, "scheduler": {"params": {"warmup_type": "linear"}}},
         f"{MEGATRON}; different in DeepSpeed: --lr-warmup-iters 0 (1000 there)"),
        (JSON, {"gradient_clipping": 1, "scheduler": {"params": {"warmup_num_steps": 9}}},
         f"{MEGATRON}; different in DeepSpeed: warm-up linear (logarithmic there)"),
    ],
)  # fmt: skip
def test_values_that_a_script_of_another_system_leaves_out_are_reported(
    line: str, file: dict[str, object] | None, said: str, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(file))
    (tmp_path / "p.toml").write_text("attention-dropout = 0.2\nhidden-dropout = 0.0\n")
    line = line.replace("FILE", str(tmp_path / "ds.json")).replace("PRESET", str(tmp_path / "p.toml"))
    command = read(line.split())
    assert command.left_out(command.config) == said


def test_the_defaults_of_a_device_are_compared_too() -> None:
    command = read("--use-flash-attn --lr-warmup-iters 0".split())
    on_gpu = with_values(command.config, {"precision": "bf16", "lr-warmup-iters": 7})
    assert "--precision bf16 (fp32 there)" in command.left_out(on_gpu)
    assert "lr-warmup-iters" not in command.left_out(on_gpu)  # it is given


def test_docs_megatron_md_has_every_other_default() -> None:
    """`python -m benchmarks.reports.foreign` writes the table."""
    text = (ROOT / "docs" / "megatron.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    header, *table = rows[:1] + rows[2:]
    cells = {row[0].strip("`").removeprefix("--"): dict(zip(header, row, strict=True)) for row in table}
    for system, theirs in read_defaults().items():
        for name, value in theirs.items():
            rows_of = value if isinstance(value, dict) and "here" not in value else {name: value}
            for flag, there in rows_of.items():
                here = there["here"] if isinstance(there, dict) else short_value(flags()[flag].default)
                there = there["there"] if isinstance(there, dict) else short_value(there)
                if there == here and flag not in cells:
                    continue
                assert cells[flag]["here"] == here
                assert there in [part.split(" (")[0] for part in cells[flag][system].split(", ")], (system, flag)
    for flag, row in cells.items():
        assert {part.split(" (")[0] for key in read_defaults() for part in row[key].split(", ")} - {"", row["here"]}, (
            flag
        )


def test_what_has_no_effect_is_reported() -> None:
    assert read("--sequence-parallel".split()).notes == [
        "--sequence-parallel has no effect, because --tensor-model-parallel-size is 1"
    ]
    assert read("--seed 42 --data_seed 7".split()).notes == ["translated: --data_seed 7, overridden by --seed 42"]


def test_the_given_flags_are_known(tmp_path: Path) -> None:
    preset = tmp_path / "p.toml"
    preset.write_text("lr = 0.5\nuntie-embeddings = true\n")
    given = read(["--preset", str(preset), "--no-compile", "--bf16", "--data-path", "1", "a"]).given
    assert given == {"lr", "untie-embeddings", "compile", "precision", "data-path"}


def test_the_tables_are_read_whole() -> None:
    """Every file is read, every function of `conversions` is in a table, and every function in a table exists."""
    assert {path.stem for path in FOLDER.glob("*.toml")} == {*FLAGS, DEEPSPEED_FILE, VALUES, DEFAULTS}
    assert {entry.by for entry in [*ENTRIES, *read_table(DEEPSPEED_FILE)]} == set(CONVERSIONS)


def test_each_model_type_of_hugging_face_is_its_architecture() -> None:
    found = {name: parse(["--model_type", name]).model.architecture for name in MODELS}
    assert found == {name: row.architecture for name, row in MODELS.items()}
    words = {"mistral": "--architecture mistral --window-size 4096", "qwen2": "--architecture qwen2"}
    words |= {"helium": "--architecture llama --rotary-interleaved"}
    assert {name: model_types()[name] for name in words} == words


def test_the_tables_are_read_for_foreign_flags_alone() -> None:
    """A command line of ours starts without them."""
    read_tables.cache_clear()
    read_values.cache_clear()
    read("--num_layers 3 --lr=1e-3 --no-compile --precision BF16".split())
    assert read_tables.cache_info().misses == read_values.cache_info().misses == 0
    read("--encoder-num-layers 3".split())
    assert read_tables.cache_info().misses == 1


def test_a_retired_flag_is_answered_with_its_replacement(tmp_path: Path) -> None:
    """It is refused on a command line; in the config.toml of an earlier run it is ignored, with a note."""
    config = tmp_path / "config.toml"
    for entry in read_table("retired"):
        assert entry.name not in flags()
        with pytest.raises(ValueError, match=re.escape(f"--{entry.name} 3: {entry.argument}")):
            parse([f"--{entry.name}", "3"])
        config.write_text(f"lr = 0.5\n{entry.name} = 3\n")
        command = read(["--preset", str(config)])
        assert (command.config.optimizer.lr, command.given) == (0.5, {"lr"})
        assert command.notes == [f"--preset {config}: {entry.name} is ignored: {entry.argument}"]


def test_entries_have_one_home_each() -> None:
    for tables in (FLAGS, (DEEPSPEED_FILE,)):
        names = [kebab(entry.name) for table in tables for entry in read_table(table)]
        assert not [name for name, count in Counter(names).items() if count > 1]


def test_every_entry_answers() -> None:
    """No entry raises anything else than a refusal, with no value, a word, a number or several words."""
    for entry in (entry for entry in ENTRIES if entry.name not in DEEPSPEED_FLAGS):
        for values in ("", "x", "1", "2.5", "-1", "a b", "0"):
            flag = f"--{entry.name.replace('*', 'any')}"
            found = translate([flag, *values.split()])
            assert found.answers, (flag, values)


def test_an_unknown_word_is_answered_with_the_nearest() -> None:
    (answer,) = translate(["--gradient_acumulation_steps", "3"]).answers
    assert answer.unknown
    assert re.match(r"--gradient_acumulation_steps 3: no such flag. .* --gradient_accumulation_st", refusals([answer]))


def test_no_preset_needs_a_translation() -> None:
    for path in (ROOT / "scripts" / "presets").glob("*.toml"):
        assert all(map(is_ours, read_preset(str(path)).values))
    assert not [name for name in flags() if name != name.lower()]
