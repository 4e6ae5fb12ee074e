"""The command to type next, which a tool prints at its end."""

import shlex
from collections.abc import Sequence

# Values of --input that are shown; a shell's glob may have given thousands.
SHOWN_INPUTS = 3


def say_next(what: str, words: Sequence[str]) -> None:
    """Print `what` is to be done and its command, quoted for a shell."""
    print(f"{what}:\n  {shlex.join(words)}")


def to_preprocess(inputs: Sequence[str], output: str, json_keys: Sequence[str], input_format: str) -> None:
    """Say how text becomes tokens by the tokenizer in folder `output`. Of many inputs the first and `...` are shown."""
    shown = list(inputs) if len(inputs) <= SHOWN_INPUTS else [inputs[0], "..."]
    words = ["python", "data_tools/preprocess_data.py", "--input", *shown]
    if input_format != "auto":
        words += ["--input-format", input_format]
    if tuple(json_keys) != ("text",):
        words += ["--json-keys", *json_keys]
    say_next(
        "to make tokens of text with it", [*words, "--output-prefix", "PREFIX", "--tokenizer", output, "--append-eod"]
    )


def to_train(corpora: Sequence[str]) -> None:
    """Say how to train on corpora, given by their prefixes; a blend where there are several."""
    run = ["--preset", "tiny", "--data-path", *corpora, "--save", "runs/a", "--log-dir", "runs/a"]
    say_next("to train a small model on it", ["python", "pretrain_gpt.py", *run])


def to_merge(prefix: str, keys: Sequence[str], count: int) -> None:
    """Say how the `count` parts of a --partition are joined, for each of --json-keys."""
    words = ["python", "data_tools/merge_datasets.py", "--input"]
    for key in keys:
        parts = [f"{prefix}-{part:05}-of-{count:05}_{key}_document.idx" for part in range(count)]
        shown = parts if count <= SHOWN_INPUTS else [parts[0], "...", parts[-1]]
        say_next(
            f"to join the {count} parts when all are there",
            [*words, *shown, "--output-prefix", f"{prefix}_{key}_document"],
        )
