"""Other ways to preprocess, for benchmarks/preprocess.py.

    python -m benchmarks.preprocess_peers NAME CORPUS TOKENIZER N OUT

Each writes OUT.bin, uint16, with 50256 behind every document.
"""

import json
import multiprocessing
import os
import sys
from typing import Any

import numpy as np

END = 50256


class Megatron:
    """The loop of Megatron-LM's tools/preprocess_data.py: `Pool.imap` of single lines, one array per document."""

    tokenizer: Any = None

    @classmethod
    def start(cls, folder: str) -> None:
        from transformers import GPT2TokenizerFast

        cls.tokenizer = GPT2TokenizerFast(f"{folder}/vocab.json", f"{folder}/merges.txt")

    @classmethod
    def encode(cls, line: str) -> tuple[list[int], int]:
        ids = cls.tokenizer(json.loads(line)["text"])["input_ids"]
        return [*ids, END], len(line)

    @classmethod
    def run(cls, corpus: str, folder: str, workers: int, output: str) -> None:
        with open(corpus, encoding="utf-8") as lines, open(f"{output}.bin", "wb") as file:
            with multiprocessing.Pool(workers, initializer=cls.start, initargs=(folder,)) as pool:
                for ids, _ in pool.imap(cls.encode, lines, 32):
                    file.write(np.array(ids, dtype=np.uint16).tobytes(order="C"))


def run_datasets(corpus: str, folder: str, workers: int, output: str) -> None:
    """`datasets.map` in batches with the tokenizers library, then the column written out."""
    import datasets
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE.from_file(f"{folder}/vocab.json", f"{folder}/merges.txt"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [[*each.ids, END] for each in tokenizer.encode_batch_fast(batch["text"])]}

    cache = f"{output}-cache"
    data = datasets.load_dataset("json", data_files=corpus, split="train", cache_dir=cache)
    data = data.map(encode, batched=True, num_proc=workers, remove_columns=["text"], load_from_cache_file=False)
    with open(f"{output}.bin", "wb") as file:
        for batch in data.with_format("arrow").iter(1000):
            file.write(batch["ids"].combine_chunks().values.to_numpy().astype(np.uint16).tobytes())


def run_gigatoken(corpus: str, folder: str, workers: int, output: str) -> None:
    """gigatoken reads, parses and encodes the file itself, on as many threads."""
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    import gigatoken

    from megazero.data.tokenizer import FastTokenizer, load_tokenizer

    reference = load_tokenizer(f"gpt2:{folder}")
    assert isinstance(reference, FastTokenizer)
    tokenizer = gigatoken.Tokenizer.from_json(reference.json)
    layout = tokenizer.encode_files(gigatoken.JsonlFileSource([corpus], field="text")).layout
    ids, ends = np.asarray(layout.content.data), np.asarray(layout.offsets.data)[1:]
    np.insert(ids.astype(np.uint16), ends, END).tofile(f"{output}.bin")


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    run = {"megatron": Megatron.run, "datasets": run_datasets, "gigatoken": run_gigatoken}[name]
    run(words[0], words[1], int(words[2]), words[3])
