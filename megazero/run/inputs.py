"""The data of a run, opened and checked before ranks meet."""

from megazero.data.corpora import Continued, Datasets, mock_datasets, open_datasets, read_data_args
from megazero.data.task_files import read_tasks
from megazero.data.task_requests import EncodedTasks, encode_tasks
from megazero.data.tokenizer import Tokenizer
from megazero.flags.config import Config
from megazero.flags.corpus_flags import document_flags


def require_data(config: Config) -> None:
    """Raise ValueError unless the flags name corpora in exactly one way."""
    data = config.data
    if data.mock_data or bool(data.data_path) != bool(data.data_args_path):
        return
    raise ValueError(
        "--data-path is missing; give the PREFIX of a .bin/.idx pair made by data_tools/preprocess_data.py, "
        "or try without data: --mock-data --vocab-size 50257"
        if not data.data_path
        else f"--data-path and --data-args-path {data.data_args_path} both name corpora; give one of them"
    )


def open_data(config: Config, tokenizer: Tokenizer | None, begins: Continued | None = None) -> Datasets:
    """Open and check the corpora.

    Args:
        begins: where training data begin, in a later stage of a run.

    Raises:
        ValueError: see `require_data` and `data.corpora`.
    """
    data, evaluation = config.data, config.evaluation
    if data.mock_data:
        return mock_datasets(config.model.seq_length, config.training.seed, config.model.vocab_size)
    require_data(config)
    needed: tuple[str, ...] = ("train", "validation") if evaluation.eval_interval else ("train",)
    if evaluation.eval_only:
        needed = (evaluation.eval_split,)
    return open_datasets(
        data.data_path or read_data_args(data.data_args_path),
        data.split,
        config.model.seq_length,
        seed=config.training.seed,
        vocab_size=config.model.vocab_size,
        tokenizer=tokenizer,
        needed=needed,
        document_flags=document_flags(data),
        split_by=data.split_by,
        begins=begins,
        packing=data.packing,
    )


def open_tasks(config: Config, tokenizer: Tokenizer | None) -> EncodedTasks | None:
    """Read and encode --tasks; None without the flag.

    Raises:
        ValueError: a file cannot be used, or there is no tokenizer.
    """
    options = config.evaluation
    if not options.tasks:
        return None
    found = read_tasks(options.tasks, options.task_limit)
    if tokenizer is None:
        raise ValueError(f"--tasks {' '.join(options.tasks)} needs --tokenizer, because items are text; add it")
    return encode_tasks(found, tokenizer)
