"""Functions that turn a foreign flag with its values into words of ours; the tables name them.

Each takes a `Use` and returns words of ours, none if there is nothing to do; it raises `Refused` with the reason.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from megazero.config.foreign.table import DEEPSPEED_FILE, Foreign, find_entry, read_tables
from megazero.config.foreign.use import FALSE, Refused, Use, number
from megazero.config.limits import MOST_MINUTES, is_number, shorten
from megazero.files import read_json_object

# -- any system


def switch_unless_given(use: Use) -> list[str]:
    words: list[str] = use.argument.split()
    return words if use.on() and not use.given(words[0].removeprefix("--")) else []


def choose(use: Use) -> list[str]:
    choices: Mapping[str, str] = use.argument
    if use.value.lower() not in choices:
        raise Refused(f"{use.value}: there are {', '.join(f'{v} ({w})' for v, w in choices.items() if w)}")
    return choices[use.value.lower()].split()


def only(use: Use) -> list[str]:
    allowed, why = use.argument
    word = use.value.lower() if use.values else "true"
    if word not in allowed and not any(is_number(a) and is_number(word) and float(a) == float(word) for a in allowed):
        raise Refused(why)
    return []


def refuse(use: Use) -> list[str]:
    if len(use.values) == 1 and use.value.lower() in FALSE[:3]:
        return []
    raise Refused(use.argument)


def no_equal(use: Use) -> list[str]:
    close = nearest(use.name, {name: f"--{name}" for name in use.defaults})
    return refuse(replace(use, argument=f"it has no equal here; drop it{f', or see {close}' if close else ''}"))


def nearest(name: str, spelled: Mapping[str, str]) -> str:
    """Return up to three flags whose names resemble `name`, as they are spelled; empty if none does."""
    return ", ".join(spelled[close] for close in difflib.get_close_matches(name, spelled, n=3, cutoff=0.6))


# -- Megatron-LM: the model

NORMS = {"rmsnorm": "RMSNorm (--architecture llama)", "layernorm": "LayerNorm (gpt2)"}
POSITIONS = {"rope": "rope (--architecture llama)", "learned_absolute": "learned_absolute (gpt2)"}


def architecture(use: Use) -> list[str]:
    """Translate the four parts of a llama, which Megatron-LM gives by a flag each."""
    known = {"normalization": NORMS, "position-embedding-type": POSITIONS}.get(use.name)
    if known and use.value.lower() not in known:
        raise Refused(f"{use.value}: there are {' and '.join(known.values())}")
    if not _is_llama(use) or use.given("architecture"):
        return []
    words = ["--architecture", "llama"]
    if "untie-embeddings-and-output-weights" not in use.foreign and not use.given("untie-embeddings"):
        words += ["--no-untie-embeddings"]  # Megatron-LM's default; a llama is untied here
    if not use.given("norm-epsilon"):
        words += ["--norm-epsilon", "1e-5"]
    if not use.get_whole("ffn-hidden-size"):
        words += ["--ffn-hidden-size", str(int(4 * use.get_whole("hidden-size") * 2 / 3 / 64) * 64)]
    return words


def _is_llama(use: Use) -> bool:
    """Return whether the model is a llama, by Megatron-LM's flags or by ours. Refused if it is half of one."""
    words = {name: values[0].lower() if len(values) == 1 else "" for name, values in use.foreign.items()}
    on = {name for name, word in words.items() if word not in ("false", "no")}
    rope = words.get("position-embedding-type") == "rope" or "use-rotary-position-embeddings" in on
    parts = {
        "--swiglu": "swiglu" in on,
        "--normalization RMSNorm": words.get("normalization") == "rmsnorm",
        "--position-embedding-type rope": rope,
        "--disable-bias-linear": "disable-bias-linear" in on,
    }
    given = use.get("architecture") if use.given("architecture") else ""
    if given == "llama":
        valued = {
            "--normalization RMSNorm": "normalization",
            "--position-embedding-type rope": "position-embedding-type",
        }
        if "add-bias-linear" in words or any(valued[p] in words and not parts[p] for p in valued):
            raise Refused("it does not go with --architecture llama; drop it")
        return True
    if any(parts.values()) and not all(parts.values()):
        missing = " ".join(part for part, there in parts.items() if not there)
        present = " ".join(part for part, there in parts.items() if there)
        every = "--architecture llama has all four, gpt2 none; give all, or drop all"
        raise Refused(f"{present} without {missing}: {every}")
    if given and all(parts.values()):
        raise Refused(f"it does not go with --architecture {given}; drop it")
    return all(parts.values())


def head_size(use: Use) -> list[str]:
    if use.whole() * use.get_whole("num-attention-heads") != use.get_whole("hidden-size"):
        raise Refused("a head's size is --hidden-size / --num-attention-heads, no other; drop it")
    return []


def max_positions(use: Use) -> list[str]:
    rotary = use.given("architecture") and use.get("architecture") != "gpt2"
    if not rotary and use.whole() != use.get_whole("seq-length"):
        raise Refused(
            f"{use.value} is not --seq-length {use.get('seq-length')}, and there is a learned position for each token "
            "of a sample; give both the same value"
        )
    return []


def experts(use: Use) -> list[str]:
    if not use.foreign.get("num-experts") or any(word != "1" for word in use.foreign["num-experts"]):
        raise Refused("there are no mixtures of experts; drop it")
    return []


# -- duration and learning rate


def _refuse_rampup(use: Use, ours: str) -> None:
    if use.given("rampup-batch-size"):
        raise Refused(f"with --rampup-batch-size an iteration's samples change; give --{ours}")


def train_length(use: Use) -> list[str]:
    """Return the shorter of --train-samples and --train-tokens, in whole iterations."""
    per_sample = {"train-samples": 1, "train-tokens": max(1, use.get_whole("seq-length"))}
    samples = [use.number_of(name, "") / per for name, per in per_sample.items() if name in use.foreign]
    _refuse_rampup(use, "train-iters")
    return ["--train-iters", str(max(1, int(min(samples) // use.global_batch())))]


def in_iterations(use: Use) -> list[str]:
    """Convert --X-samples N or --X-tokens N to --X-iters."""
    base, _, unit = use.name.rpartition("-")
    _refuse_rampup(use, f"{base}-iters")
    samples = use.number() / (max(1, use.get_whole("seq-length")) if unit == "tokens" else 1)
    return [f"--{base}-iters", str(max(1, round(samples / use.global_batch())) if samples else 0)]


def warmup_fraction(use: Use) -> list[str]:
    if not 0 <= use.number() <= 1:
        raise Refused(f"{use.value} is not a fraction; --lr-warmup-iters takes iterations")
    if use.name == "warmup-ratio":  # Hugging Face's, of all steps, rounded up
        steps = math.ceil(use.number() * use.get_whole("train-iters"))
        return ["--lr-warmup-iters", str(steps)] if use.number() else []  # 0 leaves it to --warmup_steps
    total = use.get_whole("lr-decay-iters") or use.get_whole("train-iters")
    return ["--lr-warmup-iters", str(round(use.number() * total))]


def profile(use: Use) -> list[str]:
    first, last = use.number_of("profile-step-start", "10"), use.number_of("profile-step-end", "12")
    return ["--profile-iterations", f"{int(first) + 1}:{int(last)}"] if use.on() else []


# -- layout


def virtual_stages(use: Use) -> list[str]:
    stages = use.whole()
    if use.name == "num-layers-per-virtual-pipeline-stage":
        layers, pp, each = use.get_whole("num-layers"), max(1, use.get_whole("pipeline-model-parallel-size")), stages
        if each < 1 or layers % (pp * each):
            raise Refused(f"{each} layers do not divide --num-layers {layers} over {pp} stages")
        stages = layers // (pp * each)
    return ["--pipeline-schedule", "interleaved", "--virtual-pipeline-stages", str(stages)] if stages > 1 else []


def recompute_method(use: Use) -> list[str]:
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
    return ["--recompute", "full"] if use.name == "activations-checkpoint-method" else []


# -- tokenizer

GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
TOKENIZERS = {
    **dict.fromkeys(("huggingfacetokenizer", "pretrainedfromhf", "hftokenizer"), ""),
    **dict.fromkeys(("sentencepiecetokenizer", "llama2tokenizer", "gptsentencepiecetokenizer"), "sentencepiece:"),
    "tiktokenizer": "tiktoken:",
}  # --tokenizer-type, in lower case -> prefix of --tokenizer


def tokenizer(use: Use) -> list[str]:
    """Translate --tokenizer-type with its files, or a file alone."""
    if use.given("tokenizer") or (use.name != "tokenizer-type" and "tokenizer-type" in use.foreign):
        return []
    if use.name in ("tokenizer-model", "tokenizer-name-or-path"):
        return ["--tokenizer", ("sentencepiece:" if use.value.endswith(".model") else "") + use.value]
    kind = use.value.lower() if use.name == "tokenizer-type" else "gpt2bpetokenizer"
    if kind == "nulltokenizer":
        return ["--vocab-size", str(use.get_whole("vocab-size") + 1)]  # Megatron-LM's adds an end of document
    if kind == "gpt2bpetokenizer":
        return ["--tokenizer", _gpt2(use.word("vocab-file"), use.word("merge-file"))]
    if kind not in TOKENIZERS:
        ours = "a Hugging Face folder, gpt2:DIR, sentencepiece:FILE.model, tiktoken:FILE or byte"
        raise Refused(f"{use.value}: --tokenizer takes {ours}")
    path = use.word("tokenizer-model") or use.word("tokenizer-name-or-path")
    if not path:
        raise Refused(f"{use.value} needs its file: --tokenizer {TOKENIZERS[kind]}PATH")
    return ["--tokenizer", TOKENIZERS[kind] + path]


def tiktoken(use: Use) -> list[str]:
    if use.word("tokenizer-type").lower() == "tiktokenizer":
        raise Refused("tiktoken:FILE reads its pattern and special tokens from FILE.json; drop it")
    return []


def _gpt2(vocab: str, merges: str) -> str:
    if not (vocab and merges):
        raise Refused("GPT-2's tokenizer has two files; give --vocab-file vocab.json --merge-file merges.txt")
    one, other = PurePath(vocab), PurePath(merges)
    one_folder = one.parent == other.parent and (one.name, other.name) in GPT2_FILES
    return f"gpt2:{one.parent}" if one_folder else f"gpt2:{vocab},{merges}"


# -- Hugging Face


def pairs(use: Use) -> list[str]:
    found = [pair.partition("=") for pair in use.value.split(",")]
    for key, _, _ in found:
        if key not in use.argument:
            raise Refused(f"{key} is no size of a model here; there are {', '.join(use.argument)}")
    return [word for key, _, value in found for word in (f"--{use.argument[key]}", value)]


def accumulation(use: Use) -> list[str]:
    steps = use.whole()
    if steps < 1:
        raise Refused("it must be at least 1")
    return ["--global-batch-size", str(steps * use.get_whole("micro-batch-size") * use.data_parallel())]


def report(use: Use) -> list[str]:
    flags = {"tensorboard": "tensorboard-dir", "wandb": "wandb-project"}
    for system in use.values:
        if system not in ("none", "all", *flags):
            raise Refused(f"{system}: there are tensorboard (--tensorboard-dir DIR) and wandb (--wandb-project NAME)")
    missing = [f"--{flag}" for system, flag in flags.items() if system in use.values and not use.given(flag)]
    if missing:
        raise Refused(f"{' '.join(use.values)} needs {' and '.join(missing)}")
    return []


def resume(use: Use) -> list[str]:
    if use.value.lower() == "false":
        return []
    return ["--load", use.get("save") if use.value.lower() == "true" else use.value]


def interval(use: Use) -> list[str]:
    """Convert --eval_steps, --save_steps or --logging_steps; below 1 it is a fraction of all steps."""
    ours = {"eval-steps": "eval-interval", "save-steps": "save-interval", "logging-steps": "log-interval"}[use.name]
    asked = use.number()
    return [f"--{ours}", str(round(asked * use.get_whole("train-iters")) if 0 < asked < 1 else use.whole())]


def evaluation(use: Use) -> list[str]:
    if not use.on() or use.get_whole("eval-interval") or use.given("eval-only"):
        return []
    last = use.get_whole("train-iters")
    if "do-train" not in use.foreign:
        raise Refused(
            f"--eval-only --load DIR evaluates a checkpoint alone, --eval-interval {last} the trained model; give one"
        )
    if "steps" in (use.word("eval-strategy"), use.word("evaluation-strategy")):
        raise Refused(f"--eval_steps is missing; give --eval-interval N, such as {max(1, last // 10)}")
    return ["--eval-interval", str(last)]


def validation_share(use: Use) -> list[str]:
    share = use.whole()
    if not 0 < share < 100:
        raise Refused(f"{use.value} is no percentage that leaves both; --split 95,5,0 takes 5 for validation")
    return ["--split", f"{100 - share},{share},0"]


# -- DeepSpeed's JSON file


def deepspeed_file(use: Use) -> list[str]:
    """Translate --deepspeed_config FILE, and --deepspeed if a file follows, as in Hugging Face's scripts.

    Flags of the command line win: the two agree, or DeepSpeed would refuse them. The value "auto" leaves a key to them.
    """
    if not use.values or use.values[0].lower() in ("true", "false"):
        return []
    try:
        leaves = flatten(read_json_object(use.value))
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: hundreds of levels deep
        raise Refused(f"{use.value} cannot be read: {error}") from None
    disabled = tuple(
        key.removesuffix("enabled")
        for key, value in leaves.items()
        if key.endswith(".enabled") and _as_text(value).lower() in FALSE
    )
    entries = {
        key: find_entry(key, read_tables(*DEEPSPEED_FILE))
        for key, value in leaves.items()
        if value != "auto" and not key.startswith(("_", *disabled))
    }
    ours, words, wrong = dict(use.ours), list[str](), list[str]()
    for key, entry in sorted(entries.items(), key=lambda found: found[1].order if found[1] else 0):
        try:
            found = _key_words(key, leaves[key], entry, replace(use, ours=ours))
            found = use.checked(_not_given(found, ours))
        except Refused as reason:
            wrong.append(f"{shorten(key)} = {shorten(json.dumps(leaves[key]))}: {reason}")
            continue
        words += found
        ours |= {flag.removeprefix("--"): (value,) for flag, value in zip(found, [*found, ""][1:], strict=True)}
    if wrong:
        raise Refused("; ".join(wrong))
    return words


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a JSON object by the path to them, joined by dots."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        found |= flatten(value, f"{path}.") if isinstance(value, Mapping) and value else {path: value}
    return found


def _key_words(key: str, value: Any, entry: Foreign | None, use: Use) -> Sequence[str]:
    if entry is None:
        if value == {} and any(known.startswith(f"{key}.") for known in read_tables(*DEEPSPEED_FILE)):
            return []
        raise Refused("it has no equal here; drop it")
    if key == "tensorboard.output_path" and not isinstance(value, str):
        raise Refused("it must be a string")
    return CONVERSIONS[entry.by](replace(use, name=key, values=(_as_text(value),), argument=entry.argument))


def _not_given(words: Iterable[str], ours: Mapping[str, Any]) -> list[str]:
    """Leave out the flags that are given, and their values."""
    kept, keep = list[str](), True
    for word in words:
        if word.startswith("--"):
            keep = word.removeprefix("--").removeprefix("no-") not in ours
        kept += [word] if keep else []
    return kept


def _as_text(value: object) -> str:
    """A value of a JSON file as a word of a command line; 5e8 is a whole number."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value)


def scale_power(use: Use) -> list[str]:
    if not 0 <= use.whole() <= 48:
        raise Refused("it must be 0 to 48")
    return ["--initial-loss-scale", str(2 ** use.whole())]


def betas(use: Use) -> list[str]:
    found = use.value.removeprefix("[").removesuffix("]").split(",")
    if len(found) != 2:
        raise Refused("it must be two numbers, such as [0.9, 0.95]")
    first, second = (str(number(beta.strip())) for beta in found)
    return ["--adam-beta1", first, "--adam-beta2", second]


CONVERSIONS: Mapping[str, Callable[[Use], list[str]]] = {
    "nothing": lambda use: [],
    "rename": lambda use: [f"--{use.argument}", *use.values],
    "switch": lambda use: use.argument.split() if use.on() else [],
    "minutes": lambda use: ["--distributed-timeout-minutes", f"{use.number() / 60:g}"],
    # A duration that our flag refuses as too long stands for never.
    "exit_duration": lambda use: ["--exit-duration-minutes", "0" if use.number() > MOST_MINUTES else use.value],
    "run_name": lambda use: ["--wandb-name", use.value] if use.given("wandb-project") else [],
    "output": lambda use: ["--save", use.value, *([] if use.given("log-dir") else ["--log-dir", use.value])],
    **{
        function.__name__: function
        for function in (
            *(switch_unless_given, choose, only, refuse, no_equal, pairs, architecture, head_size, max_positions),
            *(train_length, in_iterations, warmup_fraction, profile, virtual_stages, recompute_method, tokenizer),
            *(experts, tiktoken),
            *(accumulation, report, resume, interval, evaluation, validation_share, deepspeed_file, scale_power, betas),
        )
    },
}
