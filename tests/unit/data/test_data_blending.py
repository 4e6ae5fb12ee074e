"""Blending: proportions, Megatron's rule, and random access."""

import time
from fractions import Fraction
from pathlib import Path

import pytest

from megazero.data.blending import BlendedDataset
from megazero.data.corpora import open_datasets, parse_data_path
from megazero.data.samples import GPTDataset
from tests.helpers.table import for_each
from tests.unit.data_helpers import numbered_documents, write_corpus


class Names:
    """A dataset whose sample i is (name, i)."""

    def __init__(self, name: int) -> None:
        self.name = name

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.name, index


def blend(*weights: object) -> BlendedDataset:
    return BlendedDataset([Names(k) for k in range(len(weights))], weights)


def megatron(weights: list[Fraction], size: int) -> list[int]:
    """Megatron's loop, with exact numbers: the dataset furthest behind its share; of equals, the first."""
    counts = [0] * len(weights)
    order = []
    for i in range(size):
        errors = [w / sum(weights) * max(i, 1) - n for w, n in zip(weights, counts, strict=True)]
        order.append(errors.index(max(errors)))
        counts[order[-1]] += 1
    return order


@for_each("weights", [("1", "1"), ("0.3", "0.7"), ("0.7", "0.3"), ("1", "2"), ("2", "1"), ("3", "1"), ("1e-3", "1")])
def test_two_datasets_follow_megatron(weights: tuple[str, str]) -> None:
    blended = blend(*weights)
    expected = megatron([Fraction(w) for w in weights], 2500)
    assert [blended.locate(i)[0] for i in range(2500)] == expected


@for_each(
    "weights",
    [(5, 3, 2), (1, 1, 1, 1, 1), ("0.33", "0.33", "0.34"), (1, 10, 100, 1000), (0.5, 0.25, 0.125, 0.125)],
)
def test_proportions_hold_at_every_moment(weights: tuple) -> None:
    blended = blend(*weights)
    shares = [Fraction(w) / sum(map(Fraction, weights)) for w in weights]
    counts = [0] * len(weights)
    for i in range(3000):
        number, sample = blended[i]
        assert sample == counts[number]  # each dataset's samples in order, none left out
        counts[number] += 1
        depth = len(weights) - 1
        assert all(abs(n - share * (i + 1)) < depth for n, share in zip(counts, shares, strict=True))


def test_far_samples_cost_no_more_than_near_ones() -> None:
    blended = blend("1442858730", "4697570389", "8670888578", *["17.25"] * 50)
    start = time.process_time()
    located = [blended.locate(10**15 + i) for i in range(200)]
    assert time.process_time() - start < 2
    counts = dict(located)
    share = 1442858730 / (1442858730 + 4697570389 + 8670888578 + 17.25 * 50)
    assert abs(counts[0] / 10**15 - share) < 1e-12


def test_one_dataset() -> None:
    assert blend(3)[17] == (0, 17)


def test_parse_data_path() -> None:
    assert parse_data_path(["0.3", "p", "1e2", "q"]) == [(Fraction(3, 10), "p"), (100, "q")]
    for names in (["p"], ["p", "q"], ["p", "2", "q"], ["./1", "p", "q"]):
        assert parse_data_path(names) == [(None, name) for name in names]


@for_each(
    "given",
    [
        ["1", "p", "2"],
        [],
        ["1", "p", "q", "r"],
        ["1"],
        ["0", "p", "1", "q"],
        ["-1", "p"],
        ["nan", "p"],
        ["p", "q", "1", "r"],
    ],
)
def test_bad_data_path(given: list[str]) -> None:
    with pytest.raises(ValueError, match="--data-path " + " ".join(given)):
        parse_data_path(given)


def test_open_datasets_blends(tmp_path: Path) -> None:
    low = str(write_corpus(tmp_path / "low", numbered_documents(50)))
    high = str(write_corpus(tmp_path / "high", [[9000 + t for t in d] for d in numbered_documents(50)]))
    train = open_datasets(("3", low, "1", high), "9,1", 4, 1, None).train
    served = [train[i].ids for i in range(400)]
    assert sum(ids[0] < 9000 for ids in served) == 300
    # Without weights, corpora are weighted by their tokens, equally in all splits.
    small = str(write_corpus(tmp_path / "small", [[8000] * 10] * 10))
    total = sum(map(len, numbered_documents(50)))
    blend = open_datasets((low, small), "9,1", 4, 1, None)
    weighted = open_datasets((str(total), low, "100", small), "9,1", 4, 1, None)
    assert blend.train.counts(total + 100) == [total, 100]
    assert blend.train_tokens == sum(part.num_tokens for part in blend.train.datasets)
    for one, other in ((blend.train, weighted.train), (blend.validation, weighted.validation)):
        assert all((one[i].ids == other[i].ids).all() for i in range(200))
    write_corpus(tmp_path / "empty", [[], []])
    with pytest.raises(ValueError, match=r"--data-path .*empty holds no token; leave it out"):
        open_datasets((low, str(tmp_path / "empty")), "9,1", 4, 1, None)
    alone = GPTDataset(low, "9,1", "train", 4, 1)
    own = [ids.tolist() for ids in served if ids[0] < 9000]
    assert own == [alone[i].ids.tolist() for i in range(300)]
