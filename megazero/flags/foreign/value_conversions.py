"""Functions that translate a foreign flag with its values into words of ours; the tables name them.

Each takes a `ForeignFlag` and returns words of ours, or none if there is nothing to do. It raises `Refused` with the
reason if it cannot translate. The first line of a docstring is the translation that docs/results/flags.md lists.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import PurePath

from megazero.engine.options.option import MOST_LAYERS
from megazero.families import FAMILIES
from megazero.flags.config import MOST_MINUTES
from megazero.flags.corpus_flags import is_number
from megazero.flags.flag_names import as_flag, flags
from megazero.flags.foreign.flag import (
    TRUE,
    ForeignFlag,
    Overridden,
    Refused,
    layer_letters,
    read_number,
    whole_number,
)
from megazero.flags.foreign.flag_table import Foreign, kebab


def hint(name: str, others: Iterable[Foreign] = ()) -> str:
    """Return the flags of ours, or of `others` as they are spelled, that resemble `name`; empty if none does.

    A flag of another system that is only a name of one of ours follows ours.
    """
    spelled = {flag: (f"--{flag}",) for flag in flags()}
    for entry in others:
        ours = (f"--{entry.argument}",) if entry.by == "rename" else ()
        spelled.setdefault(kebab(entry.name), (*ours, f"--{entry.name}"))
    close = [found for flag in difflib.get_close_matches(name, spelled, n=3, cutoff=0.6) for found in spelled[flag]]
    return ", ".join(dict.fromkeys(close))


# -- the sections of the tables


def rename(flag: ForeignFlag) -> list[str]:
    return [f"--{flag.argument}", *flag.values]


def has_experts(flag: ForeignFlag) -> bool:
    """Return whether a flag or the architecture gives the model experts."""
    family = FAMILIES.get(flag.get("architecture"))
    return int(*flag.ours.get("num-experts", (family.options.get("num_experts", 0) if family else 0,))) > 0


def rename_with_experts(flag: ForeignFlag) -> list[str]:
    return rename(flag) if has_experts(flag) else []


def words(flag: ForeignFlag) -> list[str]:
    return flag.argument.split() if flag.on() else []


def words_unless_given(flag: ForeignFlag) -> list[str]:
    ours: list[str] = flag.argument.split()
    return ours if flag.on() and ours[0].removeprefix("--") not in flag.ours else []


def choose(flag: ForeignFlag) -> list[str]:
    choices: Mapping[str, str] = flag.argument
    if flag.value.lower() not in choices:
        raise Refused(f"{flag.value}: there are {', '.join(f'{v} ({w})' for v, w in choices.items() if w)}")
    return choices[flag.value.lower()].split()


def model_types() -> dict[str, str]:
    """Return the words of ours for each model_type: its family, and options that its class has by default besides."""
    words = {}
    for family in FAMILIES.values():
        for row in family.models:
            options = {name: v for name, v in (row.needed | row.class_options).items() if family.options.get(name) != v}
            more = [as_flag(name.replace("_", "-"), value) for name, value in options.items()]
            words[row.model_type] = " ".join([f"--architecture {family.name}", *more])
    return words


def model_type(flag: ForeignFlag) -> list[str]:
    return choose(replace(flag, argument=model_types()))


def pairs(flag: ForeignFlag) -> list[str]:
    ours_of = {key: ours for ours, keys in flag.argument.items() for key in keys.split()}
    found = [pair.partition("=") for pair in flag.value.split(",")]
    for key, _, _ in found:
        if key not in ours_of:
            raise Refused(f"{key} is no size of a model here; there are {', '.join(ours_of)}")
    return [word for key, _, value in found for word in (f"--{ours_of[key]}", value)]


def only(flag: ForeignFlag) -> list[str]:
    allowed = flag.argument.split()
    word = flag.value.lower() if flag.values else "true"
    if word in allowed or any(is_number(a) and is_number(word) and float(a) == float(word) for a in allowed):
        return []
    close = hint(flag.name)
    raise Refused(f"only {' or '.join(allowed)} is possible here{close and f'; see {close}'}")


def unneeded(flag: ForeignFlag) -> list[str]:
    return []


def refused(flag: ForeignFlag) -> list[str]:
    if len(flag.values) == 1 and flag.is_off():
        return []
    raise Refused(flag.argument)


def refused_with_experts(flag: ForeignFlag) -> list[str]:
    return refused(flag) if has_experts(flag) else []


# -- Megatron-LM: the model


def architecture(flag: ForeignFlag) -> list[str]:
    """--architecture llama, if all four parts of a llama are given"""
    known = {"normalization": ("layernorm", "rmsnorm"), "position-embedding-type": ("learned_absolute", "rope")}
    if flag.name in known and flag.value.lower() not in known[flag.name]:
        raise Refused(f"{flag.value}: there are {' and '.join(known[flag.name])}")
    on = {name for name, values in flag.foreign.items() if "".join(values).lower() not in ("false", "no")}
    rope = flag.word("position-embedding-type").lower() == "rope" or "use-rotary-position-embeddings" in on
    parts = {
        "--swiglu": "swiglu" in on,
        "--normalization RMSNorm": flag.word("normalization").lower() == "rmsnorm",
        "--position-embedding-type rope": rope,
        "--disable-bias-linear": "disable-bias-linear" in on,
    }
    if "architecture" in flag.ours:
        asks = flag.value.lower() in ("rmsnorm", "rope") if flag.name in known else flag.on()
        if asks != (flag.get("architecture") == "llama"):
            raise Refused(f"it does not go with --architecture {flag.get('architecture')}; drop it")
        return []
    if not any(parts.values()):
        return []
    if missing := " ".join(part for part, given in parts.items() if not given):
        # The message begins with the flag itself.
        also = [part for part, given in parts.items() if given and part.split()[0] != f"--{flag.name}"]
        given = f"with {' '.join(also)}, " if also else ""
        raise Refused(f"{given}without {missing}: --architecture llama has all four, gpt2 none; give all, or none")
    ours = ["--architecture", "llama"]
    if "untie-embeddings-and-output-weights" not in flag.foreign and "untie-embeddings" not in flag.ours:
        ours += ["--no-untie-embeddings"]  # Megatron-LM's default; a llama is untied here
    if "norm-epsilon" not in flag.ours:
        ours += ["--norm-epsilon", "1e-5"]
    if not flag.get_whole("ffn-hidden-size"):
        ours += ["--ffn-hidden-size", str(int(4 * flag.get_whole("hidden-size") * 2 / 3 / 64) * 64)]
    return ours


def layer_pattern(flag: ForeignFlag) -> list[str]:
    """--layer-pattern: of N layers the last is global (G), the others are local (L); in a list, 1 is local"""
    if "[" in flag.value:
        return ["--layer-pattern", layer_letters(flag.value, "GL")]
    if not 0 < flag.whole() <= MOST_LAYERS:
        raise Refused("write it as --layer-pattern, such as LLLG")
    return ["--layer-pattern", "L" * (flag.whole() - 1) + "G"]


def expert_layers(flag: ForeignFlag) -> list[str]:
    """--moe-layer-freq: of N layers the last has experts (E), the others are dense (D)"""
    if not 0 < flag.whole() <= MOST_LAYERS:
        raise Refused("write it as --moe-layer-freq, such as DE")
    return ["--moe-layer-freq", "D" * (flag.whole() - 1) + "E"] if has_experts(flag) else []


def balance(flag: ForeignFlag) -> list[str]:
    """nothing: the loss of --moe-aux-loss-coeff is seq_aux_loss; with none, that must be 0"""
    if flag.value not in ("seq_aux_loss", "aux_loss", "none"):
        raise Refused(f"{flag.value}: there are seq_aux_loss, with --moe-aux-loss-coeff, and none")
    if flag.value == "none" and read_number(flag.get("moe-aux-loss-coeff")):
        raise Refused("--moe-aux-loss-coeff gives the experts a balance loss; drop one of the two")
    return []


def linear_scaling(flag: ForeignFlag) -> list[str]:
    """--rope-scaling-type linear --rope-scaling-factor, unless it is 1"""
    return ["--rope-scaling-type", "linear", "--rope-scaling-factor", flag.value] if flag.number() != 1 else []


# -- duration and learning rate


def train_length(flag: ForeignFlag) -> list[str]:
    """--train-iters: samples / the batch of each iteration, rounded down; nothing if --train-tokens are fewer"""
    tokens, samples = flag.get_whole("train-tokens"), flag.number()
    if tokens and tokens > samples * flag.get_whole("seq-length"):
        raise Refused(f"--train-tokens {tokens} are more, and the shorter one counts; drop --train-tokens")
    return [] if tokens else ["--train-iters", str(max(1, int(flag.iterations(samples))))]


def _length(flag: ForeignFlag) -> int:
    """Return the iterations of the run."""
    tokens, seq = flag.get_whole("train-tokens"), max(1, flag.get_whole("seq-length"))
    return math.ceil(flag.iterations(tokens / seq)) if tokens else flag.get_whole("train-iters")


def in_iterations(flag: ForeignFlag) -> list[str]:
    """the same flag in -iters: samples, or tokens / --seq-length, / the batch of each iteration, rounded"""
    base, _, unit = flag.name.rpartition("-")
    samples = flag.number() / (max(1, flag.get_whole("seq-length")) if unit == "tokens" else 1)
    found = flag.iterations(samples)
    if base == "lr-wsd-decay":  # the last iterations of the decay, whose batches differ from those of a ramp
        end = _decay_samples(flag)
        found = flag.iterations(end) - flag.iterations(end - samples)
    return [f"--{base}-iters", str(max(1, round(found)) if samples else 0)]


def _decay_samples(flag: ForeignFlag) -> float:
    """Return the samples at which the decay of the learning rate ends."""
    seq = max(1, flag.get_whole("seq-length"))
    for tokens, samples in (
        (flag.word(f"{base}-tokens"), flag.word(f"{base}-samples")) for base in ("lr-decay", "train")
    ):
        if tokens or samples:
            return read_number(samples) if samples else read_number(tokens) / seq
    if length := flag.get_whole("train-tokens"):
        return length / seq
    return flag.batch_sizes().total(flag.get_whole("lr-decay-iters") or flag.get_whole("train-iters"))


def warmup_fraction(flag: ForeignFlag) -> list[str]:
    """--lr-warmup-iters: the fraction of the samples of the decay, rounded to iterations (warmup_ratio: up)"""
    share = flag.number()
    if not 0 <= share <= 1:
        raise Refused(f"{flag.value} is not a fraction; --lr-warmup-iters takes iterations")
    if flag.name == "warmup-ratio":  # 0 leaves it to --warmup_steps
        return ["--lr-warmup-iters", str(math.ceil(share * _length(flag)))] if share else []
    if "rampup-batch-size" in flag.ours:
        return ["--lr-warmup-iters", str(round(flag.iterations(share * _decay_samples(flag))))]
    total = flag.get_whole("lr-decay-iters") or _length(flag)
    return ["--lr-warmup-iters", str(round(share * total))]


def exit_duration(flag: ForeignFlag) -> list[str]:
    """--exit-duration-minutes; 0 (never) if it is more than two years"""
    return ["--exit-duration-minutes", "0" if flag.number() > MOST_MINUTES else flag.value]


def profile(flag: ForeignFlag) -> list[str]:
    """--profile-iterations, from --profile-step-start + 1 to --profile-step-end"""
    first, last = flag.number_of("profile-step-start", "10"), flag.number_of("profile-step-end", "12")
    return ["--profile-iterations", f"{int(first) + 1}:{int(last)}"] if flag.on() else []


# -- layout


def virtual_stages(flag: ForeignFlag) -> list[str]:
    """--pipeline-schedule interleaved --virtual-pipeline-stages; of layers: --num-layers / stages / it"""
    stages = flag.whole()
    if flag.name == "num-layers-per-virtual-pipeline-stage":
        layers, pp, each = flag.get_whole("num-layers"), max(1, flag.get_whole("pipeline-model-parallel-size")), stages
        if each < 1 or layers % (pp * each):
            raise Refused(f"{each} layers do not divide --num-layers {layers} over {pp} stages")
        stages = layers // (pp * each)
    return ["--pipeline-schedule", "interleaved", "--virtual-pipeline-stages", str(stages)] if stages > 1 else []


def recomputed_layers(flag: ForeignFlag) -> list[str]:
    """nothing if every layer is recomputed by itself"""
    method = flag.word("recompute-method") or flag.word("activations-checkpoint-method")
    stage = flag.get_whole("num-layers") // max(1, flag.get_whole("pipeline-model-parallel-size"))
    if flag.whole() < stage if method == "block" else flag.whole() != 1:
        raise Refused("--recompute full recomputes every layer, each from its own input; drop it, or use selective")
    return []


def recomputed_modules(flag: ForeignFlag) -> list[str]:
    """core_attn alone: --recompute selective, unless --recompute is given"""
    if others := [module for module in flag.values if module != "core_attn"]:
        raise Refused(
            f"{', '.join(others)} cannot be chosen; --recompute selective recomputes core_attn, full whole layers; "
            "give one, and drop this flag"
        )
    if not flag.values:
        raise Refused("give it core_attn, or drop it")
    return [] if "recompute" in flag.ours else ["--recompute", "selective"]


# -- tokenizer

GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
TOKENIZERS = {
    **dict.fromkeys(("huggingfacetokenizer", "pretrainedfromhf", "hftokenizer"), ""),
    "sentencepiecetokenizer": "megatron:",
    "llama2tokenizer": "llama2:",
    "gptsentencepiecetokenizer": "sentencepiece:",
    "tiktokenizer": "tiktoken:",
    "gpt2bpetokenizer": "gpt2:",
}  # --tokenizer-type, in lower case -> prefix of --tokenizer


def tokenizer(flag: ForeignFlag) -> list[str]:
    """--tokenizer, by --tokenizer-type and its files; NullTokenizer: --vocab-size N + 1"""
    if "tokenizer" in flag.ours:
        return []
    kind = flag.word("tokenizer-type").lower()
    path = flag.word("tokenizer-model") or flag.word("tokenizer-name-or-path")
    if kind == "nulltokenizer":  # Megatron-LM's adds an end of document
        return ["--vocab-size", str(flag.get_whole("vocab-size") + 1)] if flag.name == "tokenizer-type" else []
    if not kind and path:
        prefix = "sentencepiece:" if path.endswith(".model") else ""
    elif kind in TOKENIZERS or not kind:
        prefix = TOKENIZERS[kind or "gpt2bpetokenizer"]
    else:
        ours = "a Hugging Face folder, gpt2:DIR, sentencepiece:FILE.model, tiktoken:FILE or byte"
        raise Refused(f"{kind}: --tokenizer takes {ours}")
    if prefix == "gpt2:":
        path = _gpt2(flag.word("vocab-file"), flag.word("merge-file"))
    if not path:
        raise Refused(f"{kind} needs its file: --tokenizer {prefix}PATH")
    return ["--tokenizer", prefix + path]


def _gpt2(vocab: str, merges: str) -> str:
    if not (vocab and merges):
        raise Refused("GPT-2's tokenizer has two files; give --vocab-file vocab.json --merge-file merges.txt")
    one, other = PurePath(vocab), PurePath(merges)
    one_folder = one.parent == other.parent and (one.name, other.name) in GPT2_FILES
    return str(one.parent) if one_folder else f"{vocab},{merges}"


# -- Hugging Face and DeepSpeed


def accumulation(flag: ForeignFlag) -> list[str]:
    """--global-batch-size: it x --micro-batch-size x data-parallel ranks"""
    steps = flag.whole()
    if steps < 1:
        raise Refused("it must be at least 1")
    ranks, file_batch = flag.data_parallel(), flag.word("file.train-batch-size")
    if not file_batch:
        return ["--global-batch-size", str(steps * flag.get_whole("micro-batch-size") * ranks)]
    chosen = flag.ours.get("layout") == ("auto",) or "plan-search" in flag.ours
    if chosen:
        return []  # the layout and with it the micro-batch is chosen later
    if (file_batch,) != flag.ours.get("global-batch-size"):
        raise Overridden(f"--global-batch-size {flag.get('global-batch-size')}")
    batch, file_micro = whole_number(file_batch), flag.word("file.train-micro-batch-size-per-gpu")
    if file_micro and (file_micro,) != flag.ours.get("micro-batch-size"):
        raise Overridden(f"--micro-batch-size {flag.get('micro-batch-size')}")
    micro = whole_number(file_micro) if file_micro else max(1, batch // (steps * ranks))
    if micro * steps * ranks != batch:
        raise Refused(
            f"train_batch_size {batch} is not --micro-batch-size {micro} x {steps} x {ranks} data-parallel ranks = "
            f"{micro * steps * ranks}; change one, or drop it"
        )
    return ["--micro-batch-size", str(micro)]


def scheduled_rate(flag: ForeignFlag) -> list[str]:
    """--lr, which optimizer.params.lr may repeat but not contradict"""
    optimizer = flag.word("file.optimizer.params.lr")
    if optimizer and (optimizer,) == flag.ours.get("lr"):  # else the command line decides
        if read_number(optimizer, "optimizer.params.lr ") != flag.number():
            raise Refused(
                f"optimizer.params.lr is {optimizer}, and DeepSpeed trains with the scheduler's rate; give both the "
                "same, or drop one"
            )
    return ["--lr", flag.value]


def bucket(flag: ForeignFlag) -> list[str]:
    """--reduce-bucket-size, unless it is 0"""
    return ["--reduce-bucket-size", flag.value] if flag.number() else []


def shard_group(flag: ForeignFlag) -> list[str]:
    """--zero-shard-size, if it is more than 1"""
    return ["--zero-shard-size", flag.value] if flag.whole() > 1 else []


def minutes(flag: ForeignFlag) -> list[str]:
    """--distributed-timeout-minutes: seconds / 60"""
    return ["--distributed-timeout-minutes", f"{flag.number() / 60:g}"]


def output(flag: ForeignFlag) -> list[str]:
    """--save, and --log-dir unless that is given"""
    return ["--save", flag.value, *([] if "log-dir" in flag.ours else ["--log-dir", flag.value])]


def run_name(flag: ForeignFlag) -> list[str]:
    """--wandb-name, with --wandb-project"""
    return ["--wandb-name", flag.value] if "wandb-project" in flag.ours else []


def report(flag: ForeignFlag) -> list[str]:
    """nothing if --tensorboard-dir or --wandb-project is given"""
    for system in flag.values:
        needed = {"tensorboard": "tensorboard-dir", "wandb": "wandb-project", "none": "", "all": ""}.get(system)
        if needed is None:
            raise Refused(f"{system}: there are tensorboard (--tensorboard-dir DIR) and wandb (--wandb-project NAME)")
        if needed and needed not in flag.ours:
            raise Refused(f"{system} needs --{needed}")
    return []


def resume(flag: ForeignFlag) -> list[str]:
    """--load; True: of --save"""
    if flag.is_off():
        return []
    if flag.value.lower() not in TRUE[:3]:
        return ["--load", flag.value]
    if not flag.get("save"):
        raise Refused("there is no folder to resume from; add --output_dir DIR, or name the folder of checkpoints here")
    return ["--load", flag.get("save")]


def data_seed(flag: ForeignFlag) -> list[str]:
    """--seed, unless it is given: one seed is for weights and data"""
    if "seed" in flag.ours and flag.get("seed") != flag.value:
        raise Overridden(f"--seed {flag.get('seed')}")
    return ["--seed", flag.value]


def interval(flag: ForeignFlag) -> list[str]:
    """--eval-interval, --save-interval, --log-interval; below 1 a fraction of --train-iters"""
    ours = {"eval-steps": "eval-interval", "save-steps": "save-interval", "logging-steps": "log-interval"}[flag.name]
    asked = flag.number()
    return [f"--{ours}", str(round(asked * _length(flag)) if 0 < asked < 1 else flag.whole())]


def evaluation(flag: ForeignFlag) -> list[str]:
    """with --do-train: --eval-interval of --train-iters, once at the end, unless it is given"""
    if not flag.on() or flag.get_whole("eval-interval") or "eval-only" in flag.ours:
        return []
    last = _length(flag)
    if "do-train" not in flag.foreign:
        raise Refused(
            f"--eval-only --load DIR evaluates a checkpoint alone, --eval-interval {last} the trained model; give one"
        )
    if "steps" in (flag.word("eval-strategy"), flag.word("evaluation-strategy")):
        raise Refused(f"--eval_steps is missing; give --eval-interval N, such as {max(1, last // 10)}")
    return ["--eval-interval", str(last)]


def validation_share(flag: ForeignFlag) -> list[str]:
    """P: --split 100-P,P,0"""
    share = flag.whole()
    if not 0 < share < 100:
        raise Refused(f"{flag.value} is not a percentage from 1 to 99; --split 95,5,0 takes 5 for validation")
    return ["--split", f"{100 - share},{share},0"]


def scale_power(flag: ForeignFlag) -> list[str]:
    """--initial-loss-scale: 2 to this power"""
    if not 0 <= flag.whole() <= 48:
        raise Refused("it must be 0 to 48")
    return ["--initial-loss-scale", str(2 ** flag.whole())]


def betas(flag: ForeignFlag) -> list[str]:
    """--adam-beta1 --adam-beta2"""
    found = flag.value.removeprefix("[").removesuffix("]").split(",")
    if len(found) != 2:
        raise Refused("it must be two numbers, such as [0.9, 0.95]")
    first, second = (str(read_number(beta.strip())) for beta in found)
    return ["--adam-beta1", first, "--adam-beta2", second]


# In the order of translation: a function sees the results of those before it.
CONVERSIONS: Mapping[str, Callable[[ForeignFlag], list[str]]] = {
    function.__name__: function
    for function in (
        *(
            rename,
            words,
            choose,
            model_type,
            pairs,
            only,
            unneeded,
            refused,
            minutes,
            exit_duration,
            profile,
            validation_share,
        ),
        *(scale_power, betas, scheduled_rate, words_unless_given, architecture, virtual_stages, output),
        *(recomputed_layers, recomputed_modules, bucket, shard_group),
        *(layer_pattern, linear_scaling, run_name, report, resume, data_seed, accumulation),
        *(rename_with_experts, refused_with_experts, expert_layers, balance),
        *(train_length, in_iterations, interval, warmup_fraction, evaluation, tokenizer),
    )
}
ORDER = {name: place for place, name in enumerate(CONVERSIONS)}
