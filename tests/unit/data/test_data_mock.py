"""--mock-data: the same endless samples for whoever asks, spread over the vocabulary."""

import numpy as np
import pytest

from megazero.data.corpora import mock_datasets

SIZE, VOCABULARY = 64, 1000


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
            assert (ids == differs).mean() < 0.1
    assert data.fingerprints() == [] and "--mock-data" in data.notes()[0]


def test_tokens_are_uniform() -> None:
    """Counts of 64,000 independent draws from 1,000 have a standard deviation of 8."""
    data = mock_datasets(SIZE, 1, VOCABULARY).train
    counts = np.bincount(np.concatenate([data[i].ids[:-1] for i in range(1000)]), minlength=VOCABULARY)
    assert counts.sum() == 64_000 and counts.std() == pytest.approx(8, rel=0.15)
