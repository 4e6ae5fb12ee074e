"""--mock-data: the same endless samples for whoever asks, with structure that a model can learn."""

import numpy as np
import pytest

from megazero.data.corpora import mock_datasets
from megazero.data.mock import level_sizes, mock_loss_floor

SIZE, VOCABULARY = 64, 1000


def tokens(split: object, count: int) -> np.ndarray:
    return np.concatenate([split[i].ids[:-1] for i in range(count)])


def transitions(vocab_size: int) -> np.ndarray:
    """Probabilities of the next token, a row for each token: the rule, written once more."""
    sizes = level_sizes(vocab_size)
    drawn = np.concatenate([np.full(size, 1 / (4 * len(sizes) * size)) for size in sizes])
    table = np.tile(drawn, (vocab_size, 1))
    for level, size in enumerate(sizes):
        for within in range(size):
            table[2**level - 1 + within, 2**level - 1 + (within + 1) % size] += 3 / 4
    return table


def test_samples_are_a_function_of_seed_split_and_place() -> None:
    data, again, other = (mock_datasets(SIZE, seed, VOCABULARY) for seed in (7, 7, -8))
    for index in (0, 5, 2**40):
        ids, following = data.train[index].ids, data.train[index + 1].ids
        assert ids.dtype == np.int64 and ids.shape == (SIZE + 1,) and 0 <= ids.min() and ids.max() < VOCABULARY
        assert (ids == again.train[index].ids).all() and ids[-1] == following[0]  # neighbours share a token
        for differs in (
            other.train[index].ids,
            data.validation[index].ids,
            data.test[index].ids,
            data.train[index + 2].ids,
        ):
            assert (ids == differs).mean() < 0.4  # a token of ten levels has one value
    assert data.fingerprints() == [] and "--mock-data" in data.notes()[0]


def test_a_stream_has_the_same_tokens_in_samples_of_any_length() -> None:
    """So a stage with longer samples continues it."""
    short, long = (tokens(mock_datasets(size, 3, VOCABULARY).train, 4096 // size) for size in (16, 512))
    assert (short == long).all()


def test_tokens_follow_each_other_as_described() -> None:
    """Counts of 64,000 tokens are within five standard deviations of the rule's."""
    ids = tokens(mock_datasets(SIZE, 1, VOCABULARY).train, 1000)
    sizes, levels = level_sizes(VOCABULARY), np.log2(ids + 1).astype(int)
    assert sum(sizes) == VOCABULARY
    runs = len(ids) / 4  # a level is drawn as often, and lasts for four tokens on average, with variance 12
    deviation = np.sqrt(runs * (16 / 10 * 9 / 10 + 12 / 10))
    assert np.abs(np.bincount(levels) - len(ids) / 10).max() < 5 * deviation
    table = transitions(VOCABULARY)
    likely = table.argmax(axis=1)[ids[:-1]] == ids[1:]
    assert likely.mean() == pytest.approx(table.max(axis=1)[ids].mean(), abs=5 * np.sqrt(3 / 16 / len(ids)))


@pytest.mark.parametrize("vocab_size", [1, 2, 50, 1000])
def test_the_floor_is_the_entropy_of_the_next_token(vocab_size: int) -> None:
    table, sizes = transitions(vocab_size), level_sizes(vocab_size)
    share = np.concatenate([np.full(size, 1 / (len(sizes) * size)) for size in sizes])
    assert table.sum(axis=1) == pytest.approx(1) and share @ table == pytest.approx(share)
    entropy = -(share[:, None] * table * np.log(table, where=table > 0, out=np.zeros_like(table))).sum()
    assert mock_loss_floor(vocab_size) == pytest.approx(entropy, abs=1e-12)


def test_the_floor_is_reached_by_the_rule_and_not_below() -> None:
    """The loss of the true probabilities; that of the frequencies alone is far above."""
    ids, table = tokens(mock_datasets(SIZE, 1, VOCABULARY).validation, 2000), transitions(VOCABULARY)
    losses = -np.log(table[ids[:-1], ids[1:]])
    floor, deviation = mock_loss_floor(VOCABULARY), losses.std() / np.sqrt(len(losses))
    assert losses.mean() == pytest.approx(floor, abs=5 * deviation)
    share = np.concatenate([np.full(size, 1 / (10 * size)) for size in level_sizes(VOCABULARY)])
    assert -np.log(share[ids]).mean() > 1.8 * floor
