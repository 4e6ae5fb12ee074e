"""The next command, which a tool prints at its end."""

import shlex
from collections.abc import Sequence

from megazero.called_as import in_own_words

# Values of --input that are shown; a shell's glob may have given thousands.
SHOWN_INPUTS = 3


def print_next(purpose: str, words: Sequence[str]) -> None:
    """Print a purpose and its command, quoted for a shell."""
    print(f"{purpose}:\n  {in_own_words(shlex.join(words))}")


def to_preprocess(inputs: Sequence[str], output: str, json_keys: Sequence[str], input_format: str) -> None:
    """Print the command that tokenizes text with the tokenizer in folder `output`; of many inputs only the first."""
    shown = list(inputs) if len(inputs) <= SHOWN_INPUTS else [inputs[0], "..."]
    words = ["python", "data_tools/preprocess_data.py", "--input", *shown]
    if input_format != "auto":
        words += ["--input-format", input_format]
    if tuple(json_keys) != ("text",):
        words += ["--json-keys", *json_keys]
    print_next(
        "to make tokens of text with it", [*words, "--output-prefix", "PREFIX", "--tokenizer", output, "--append-eod"]
    )


def to_train(corpora: Sequence[str], masked: bool) -> None:
    """Print the command that trains on the corpora with these prefixes, or fine-tunes if they have loss masks."""
    purpose, model = "to train a small model on it", ["--preset", "tiny"]
    if masked:
        purpose, model = "to fine-tune a Hugging Face model on it", ["--finetune", "--load", "FOLDER"]
    run = [*model, "--data-path", *corpora, "--save", "runs/a", "--log-dir", "runs/a"]
    print_next(purpose, ["python", "pretrain_gpt.py", *run])


def to_merge(prefix: str, keys: Sequence[str], count: int) -> None:
    """Print the command that joins the `count` parts of a --partition, for each of --json-keys."""
    words = ["python", "data_tools/merge_datasets.py", "--input"]
    for key in keys:
        parts = [f"{prefix}-{part:05}-of-{count:05}_{key}_document.idx" for part in range(count)]
        shown = parts if count <= SHOWN_INPUTS else [parts[0], "...", parts[-1]]
        print_next(
            f"to join the {count} parts once all exist",
            [*words, *shown, "--output-prefix", f"{prefix}_{key}_document"],
        )
