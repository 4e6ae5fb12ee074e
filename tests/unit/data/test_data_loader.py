"""Samples of each rank, masks, and threads that read ahead and change nothing."""

import signal
import threading
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megazero.data.blending import BlendedDataset
from megazero.data.corpora import Datasets
from megazero.data.loader import PREFETCHED_STEPS, Assignment, Batches
from megazero.data.samples import GPTDataset, Sample, WholeSplit
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.options.batch_sizes import PADDING, micro_batches
from megazero.flags.batch_ramp import BatchSizes
from megazero.flags.config import Config, DataConfig, ModelConfig
from megazero.flags.resolve import resolve
from megazero.run.trainer import Trainer
from tests.helpers.table import for_each
from tests.unit.data_helpers import numbered_documents, write_corpus

EOD = 0


@pytest.fixture
def dataset(tmp_path: Path) -> GPTDataset:
    documents = [[*document[1:], EOD] for document in numbered_documents(60, low=3)]
    return GPTDataset(write_corpus(tmp_path / "c", documents), "1", "train", seq_length=8, seed=1)


def loader(dataset: Any, size: int, count: int, rank: int = 0, ranks: int = 1, **options: Any) -> Batches:
    """Batches of `count` micro-batches of `size` samples on each rank."""
    return Batches(dataset, 8, BatchSizes(size * count * ranks), size, rank, ranks, **options)


@for_each(("size", "count", "ranks"), [(1, 1, 1), (2, 3, 4), (3, 2, 1), (1, 4, 3)])
def test_ranks_share_a_step_without_gap_or_overlap(size: int, count: int, ranks: int) -> None:
    sizes = BatchSizes(size * count * ranks)
    steps = [Assignment(size, sizes, rank, ranks).samples(1000) for rank in range(ranks)]
    for m in range(count):
        for rank in range(ranks):
            first = 1000 + (m * ranks + rank) * size
            assert steps[rank][m] == tuple(range(first, first + size))
    numbers = sorted(i for step in steps for row in step for i in row)
    assert numbers == list(range(1000, 1000 + size * count * ranks))


@for_each("ranks", [1, 2, 3, 5])
@for_each("size", [1, 2, 3])
@for_each("batch", range(1, 12))
def test_the_first_ranks_take_what_is_left(batch: int, size: int, ranks: int) -> None:
    """A batch of any size: every sample once, all ranks the same number of micro-batches, the first ranks' real."""
    steps = [Assignment(size, BatchSizes(batch), rank, ranks).samples(1000) for rank in range(ranks)]
    served = [i for step in steps for row in step for i in row]
    assert sorted(i for i in served if i != PADDING) == list(range(1000, 1000 + batch))
    assert {len(step) for step in steps} == {micro_batches(batch, size, ranks)}
    assert all(len(row) == size for step in steps for row in step)
    real = [sum(row[0] != PADDING for row in step) for step in steps]
    assert real == sorted(real, reverse=True) and real[0] - real[-1] <= 1
    assert real[0] == len(steps[0])  # no round is padding alone
    partly = [row for step in steps for row in step if row[0] != PADDING == row[-1]]
    assert len(partly) == (batch % size > 0)


class Counted:
    """Samples that note which of them were read."""

    def __init__(self, samples: GPTDataset) -> None:
        self.samples, self.read = samples, list[int]()

    def __getitem__(self, index: int) -> Sample:
        self.read.append(index)
        return self.samples[index]


def test_padding_is_not_read_and_does_not_count(dataset: GPTDataset) -> None:
    """Two micro-batches of 2 on each of 3 ranks, of a batch of 7: a half one, and two of padding alone."""
    data, found = Counted(dataset), []
    for rank in range(3):
        found.append(Batches(data, 8, BatchSizes(7), 2, rank, 3, eod=EOD, document_end=EOD).batch(7))
    assert sorted(data.read) == list(range(7, 14))
    assert [[micro.samples for micro in rank] for rank in found] == [
        [(7, 8), (13, PADDING)],
        [(9, 10), (PADDING, PADDING)],
        [(11, 12), (PADDING, PADDING)],
    ]
    for micro in (micro for rank in found for micro in rank):
        padding = [number == PADDING for number in micro.samples]
        assert micro.ids[padding].eq(0).all() and micro.labels[padding].eq(0).all()
        assert micro.loss_mask[padding].eq(0).all() and micro.document_starts[padding].eq(0).all()
        assert micro.loss_mask[[not each for each in padding]].sum(-1).gt(0).all()
        assert micro.ids.shape == micro.labels.shape == micro.loss_mask.shape == (2, 8)


def test_padding_is_of_no_corpus(dataset: GPTDataset) -> None:
    """A blend is not asked which of its corpora serves a padded sample."""
    blend = BlendedDataset([dataset, dataset], [1, 3])
    first, last = (Batches(blend, 8, BatchSizes(3), 2, rank, 2).batch(0) for rank in range(2))
    assert [micro.corpora for micro in first] == [tuple(blend.locate(i)[0] for i in (0, 1))]
    assert [micro.corpora for micro in last] == [(blend.locate(2)[0], 0)]


def megatron_batch(consumed: int, full: int, start: int, increment: int, samples: int) -> int:
    """The rule of Megatron-LM's RampupBatchsizeNumMicroBatchesCalculator, in exact numbers."""
    if consumed > samples:
        return full
    return start + int(consumed / Fraction(samples, (full - start) // increment)) * increment


def test_a_growing_batch_is_megatrons_and_leaves_no_sample_out(dataset: GPTDataset) -> None:
    for numbers in ((32, 8, 8, 100), (24, 4, 2, 7), (1000, 10, 1, 99_999), (8, 4, 4, 1)):
        sizes = BatchSizes(*numbers)
        assert all(
            sizes.at(c) == megatron_batch(c, *numbers) for c in range(0, 2 * numbers[3], max(1, numbers[3] // 97))
        )
        consumed = 0
        for iterations in range(300):
            assert sizes.total(iterations) == consumed
            consumed += sizes.at(consumed)
    assert BatchSizes(8).total(5) == 40
    assert BatchSizes(8).at(0) == BatchSizes(8).at(10**9) == 8
    ramp = BatchSizes(12, 4, 4, 20)
    for workers in (0, 1):
        ranks = [Batches(dataset, 8, ramp, 2, rank, 2, num_workers=workers) for rank in range(2)]
        consumed, served = 0, list[int]()
        for size in (4, 4, 4, 8, 12, 12):
            steps = [rank.batch(consumed) for rank in ranks]
            assert [len(step) for step in steps] == [size // 4] * 2 and ramp.at(consumed) == size
            served += sorted(number for step in steps for micro in step for number in micro.samples)
            consumed += size
        assert served == list(range(consumed))
        for rank in ranks:
            rank.close()


def test_a_batch_grows_by_any_number(dataset: GPTDataset) -> None:
    """Here by 3 samples, which two ranks with micro-batches of 2 cannot share."""
    ramp = BatchSizes(11, 2, 3, 20)
    ranks = [Batches(dataset, 8, ramp, 2, rank, 2, num_workers=1) for rank in range(2)]
    consumed, served = 0, list[int]()
    for size in (2, 2, 2, 2, 5, 5, 8, 11, 11):
        steps = [rank.batch(consumed) for rank in ranks]
        assert [len(step) for step in steps] == [-(-size // 4)] * 2 and ramp.at(consumed) == size
        served += sorted(i for step in steps for micro in step for i in micro.samples if i != PADDING)
        consumed += size
    assert served == list(range(consumed))
    for rank in ranks:
        rank.close()


def test_micro_batches_hold_the_samples_they_name(dataset: GPTDataset) -> None:
    batch = loader(dataset, 2, 3, 1, 2).batch(24)
    assert [micro.samples for micro in batch] == [(26, 27), (30, 31), (34, 35)]
    for micro in batch:
        for j, index in enumerate(micro.samples):
            assert micro.ids[j].tolist() == dataset[index].ids[:-1].tolist()
            assert micro.labels[j].tolist() == dataset[index].ids[1:].tolist()
        assert micro.ids.dtype == micro.labels.dtype == torch.int64
        assert micro.loss_mask.dtype == torch.float32 and micro.loss_mask.shape == micro.ids.shape == (2, 8)
        assert micro.ids.is_contiguous() and micro.labels.is_contiguous()
        assert micro.loss_mask.eq(1).all()


def test_eod_mask_loss_masks_targets_whose_input_is_eod(dataset: GPTDataset) -> None:
    masked = loader(dataset, 4, 2, eod=EOD).batch(0)
    plain = loader(dataset, 4, 2).batch(0)
    for micro, unmasked in zip(masked, plain, strict=True):
        assert torch.equal(micro.loss_mask, (micro.ids != EOD).float())
        assert 0 < micro.loss_mask.sum() < micro.loss_mask.numel()
        assert torch.equal(micro.labels, unmasked.labels) and unmasked.loss_mask.eq(1).all()


@pytest.mark.parametrize("workers", [0, 1])
def test_documents_begin_where_megatron_has_them_begin(dataset: GPTDataset, workers: int) -> None:
    """Behind every end of document; a sample begins one."""
    batches = loader(dataset, 4, 2, document_end=EOD, num_workers=workers)
    for micro in batches.batch(0) + batches.batch(8):
        wanted = torch.zeros_like(micro.ids)
        for row, place in (micro.ids == EOD).nonzero().tolist():
            wanted[row, place + 1 :] = place + 1
        assert micro.document_starts is not None and torch.equal(micro.document_starts, wanted)
        assert wanted.any() and micro.loss_mask.eq(1).all()
    batches.close()
    assert loader(dataset, 4, 2, eod=EOD).batch(0)[0].document_starts is None


@for_each("count", [9, 10, 17, 480])
def test_a_whole_split_has_every_target_once(count: int, tmp_path: Path) -> None:
    """Behind the last token nothing counts, though ids there are such as a layer can look up."""
    ids = list(range(1, count + 1))
    data = GPTDataset(write_corpus(tmp_path / "c", [ids]), "1", "train", seq_length=8, seed=1)
    whole = WholeSplit(data)
    steps = -(-len(whole) // 6)
    micros = [micro for step in range(steps) for micro in loader(whole, 3, 2).batch(6 * step)]
    counted = []
    for micro in micros:
        counts = micro.loss_mask.bool()
        counted += zip(micro.ids[counts].tolist(), micro.labels[counts].tolist(), strict=True)
    assert counted == list(pairwise(ids))
    assert all(micro.ids.min() >= 0 and micro.labels.min() >= 0 for micro in micros)


def flat(batch: list) -> list:
    return [(m.ids.tolist(), m.labels.tolist(), m.loss_mask.tolist(), m.samples) for m in batch]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_workers_change_nothing(dataset: GPTDataset, num_workers: int) -> None:
    blend = BlendedDataset([dataset, dataset], [1, 3])
    here, there = (loader(blend, 2, 2, 1, 2, eod=EOD, document_end=EOD, num_workers=n) for n in (0, num_workers))
    for consumed in [*range(0, 800, 8), 1600, 1608, 8, 16]:  # in order over several epochs, a jump ahead, and back
        for found, wanted in zip(there.batch(consumed), here.batch(consumed), strict=True):
            for one, other in zip(found, wanted, strict=True):
                assert one.equal(other) and one.is_contiguous() if isinstance(one, torch.Tensor) else one == other
    there.close()
    assert flat(there.batch(24)) == flat(here.batch(24))
    there.close()


@for_each("num_workers", [0, 1, 3])
def test_errors_come_through(tmp_path: Path, num_workers: int) -> None:
    """At the step that holds the bad token, although it was read ahead."""
    prefix = write_corpus(tmp_path / "c", [[1, 2, 3, 4, 5, 300, 7, 8, 9, 10]])
    dataset = GPTDataset(prefix, "1", "train", 3, seed=1, vocab_size=256)
    (bad,) = [i for i in range(4) if 300 in GPTDataset(prefix, "1", "train", 3, seed=1)[i].ids]
    assert bad > 0  # so that the workers have started
    batches = loader(dataset, 1, 1, num_workers=num_workers)
    for _ in range(2):  # the second time too, not the step after it
        for consumed in range(bad):
            batches.batch(consumed)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^--data-path .*token id 300") as caught:
                batches.batch(bad)
            assert "\n" not in str(caught.value)
    batches.close()


class Gate:
    """Samples that hold their number. One is read once the gate is open, or if it is below `free`."""

    def __init__(self, free: int = 0) -> None:
        self.free, self.asked, self.gate = free, list[int](), threading.Event()
        self.threads, self.seen = set[threading.Thread](), threading.Condition()

    def __getitem__(self, index: int) -> Sample:
        with self.seen:
            self.asked.append(index)
            self.threads.add(threading.current_thread())
            self.seen.notify_all()
        assert index < self.free or self.gate.wait()
        return Sample(np.full(3, index))

    def wait_for(self, index: int) -> None:
        """Wait until a thread reads it."""
        with self.seen:
            self.seen.wait_for(lambda: index in self.asked)


@for_each("num_workers", [1, 2])
def test_each_thread_reads_two_steps_ahead_and_no_more(num_workers: int) -> None:
    samples, idle = Gate(free=10**9), threading.Barrier(num_workers)
    batches = loader(samples, 1, 1, num_workers=num_workers)
    for step in range(5):
        assert int(batches.batch(step)[0].ids[0, 0]) == step
        for met in [batches._pool.submit(idle.wait) for _ in range(num_workers)]:  # after all reads so far
            met.result()
        assert sorted(samples.asked) == list(range(step + PREFETCHED_STEPS * num_workers + 1))
    batches.close()


def test_what_nobody_wants_is_not_waited_for() -> None:
    """A read that hangs does not hold up the end of a run, nor a batch that is asked for out of order."""
    samples = Gate(free=1)
    batches = loader(samples, 1, 1, num_workers=1)
    assert int(batches.batch(0)[0].ids[0, 0]) == 0
    samples.wait_for(1)
    (hangs,) = samples.threads
    samples.free, samples.asked = 10**9, []
    assert int(batches.batch(100)[0].ids[0, 0]) == 100
    batches.close()
    for thread in samples.threads - {hangs}:
        thread.join()
    assert hangs.is_alive()
    samples.gate.set()
    hangs.join()
    assert 1 not in samples.asked and 2 not in samples.asked  # dropped with the step that hung


def test_an_interrupt_while_a_batch_is_awaited_ends_the_threads() -> None:
    """The same batch can then be read again."""
    samples, main = Gate(), threading.get_ident()
    batches = loader(samples, 1, 1, num_workers=1)

    def interrupt() -> None:
        samples.wait_for(7)
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores the signal
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            batches.batch(7)
    finally:
        signal.signal(signal.SIGINT, before)
    samples.gate.set()
    assert int(batches.batch(7)[0].ids[0, 0]) == 7
    batches.close()
    for thread in samples.threads:
        thread.join()


class WhoReads:
    """Samples that hold the number of the thread that reads them. The first `count` of them are read at once."""

    def __init__(self, count: int) -> None:
        self.together, self.count = threading.Barrier(count), count

    def __getitem__(self, index: int) -> Sample:
        if index < self.count:
            self.together.wait()
        return Sample(np.full(3, threading.get_ident()))


def readers(batches: Batches) -> set[int]:
    found = {int(batches.batch(step)[0].ids[0, 0]) for step in range(6)}
    batches.close()
    return found


@for_each("num_workers", [0, 1, 2])
def test_workers_read_and_nobody_else(num_workers: int) -> None:
    """Batches come from as many threads as were asked for, and none from this one."""
    found = readers(loader(WhoReads(max(1, num_workers)), 1, 1, num_workers=num_workers))
    assert len(found) == max(1, num_workers)
    assert (threading.get_ident() in found) == (num_workers == 0)


@for_each("num_workers", [0, 2])
def test_a_run_trains_on_what_its_workers_read(num_workers: int) -> None:
    """--num-workers reaches the loader of the training split; evaluation reads in this thread."""
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=2, vocab_size=5)
    config = replace(Config(), model=model, data=DataConfig(num_workers=num_workers))
    config, layout = resolve(config, 1, 0, declare)
    mesh = Mesh.build(layout, 0, torch.device("cpu"))
    samples = WhoReads(max(1, num_workers)), WhoReads(1), WhoReads(1)
    trainer = Trainer(config, mesh, Datasets(*samples), None)
    found = readers(trainer.train_batches)
    assert len(found) == max(1, num_workers) and (threading.get_ident() in found) == (num_workers == 0)
    ((_, validation, _),) = trainer.evaluator.parts
    assert readers(validation) == {threading.get_ident()}
