"""The data of a run, opened and checked before ranks meet."""

from __future__ import annotations

from megazero.config.schema import Config
from megazero.data.corpora import Datasets, mock_datasets, open_datasets, read_data_args
from megazero.data.tokenizer import Tokenizer


def require_data(config: Config) -> None:
    """Raise ValueError unless a corpus is named, in one of the ways, or none is wanted."""
    data = config.data
    if data.mock_data or bool(data.data_path) != bool(data.data_args_path):
        return
    raise ValueError(
        "--data-path is missing; give the PREFIX of a .bin/.idx pair, which data_tools/preprocess_data.py makes of a "
        "text, or try without one: --mock-data --vocab-size 50257"
        if not data.data_path
        else f"--data-path and --data-args-path {data.data_args_path} both name corpora; give one of them"
    )


def open_data(config: Config, tokenizer: Tokenizer | None) -> Datasets:
    """The corpora, checked.

    Raises:
        ValueError: see `data.corpora`; also when no data is named.
    """
    data, evaluation = config.data, config.evaluation
    needed = ("train", *["validation"] * (evaluation.eval_interval > 0))
    if data.mock_data:
        return mock_datasets(config.model.seq_length, config.training.seed, config.model.vocab_size)
    if evaluation.eval_only:
        needed = (evaluation.eval_split,)
    require_data(config)
    return open_datasets(
        data.data_path or read_data_args(data.data_args_path),
        data.split,
        config.model.seq_length,
        config.training.seed,
        config.model.vocab_size,
        tokenizer=tokenizer,
        needed=needed,
        document_flags=data.document_flags,
        split_by=data.split_by,
    )
