"""The file of --optimizer-nvme-offload by itself: space, damage, names, and the system's cache."""

import fcntl
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from megazero.cluster import launch
from megazero.cluster.machine import machine
from megazero.engine.memory import PAGE
from megazero.engine.model.stage import declare
from megazero.engine.zero.off_device import StateFile, StatesLost
from megazero.flags.cli import parse
from megazero.flags.resolve import resolve
from megazero.planner.bytes.capacity import check_memory
from megazero.planner.bytes.estimate import estimate


def aligned(pages: int, value: int) -> torch.Tensor:
    memory = torch.empty((pages + 1) * PAGE, dtype=torch.uint8)
    begin = -memory.data_ptr() % PAGE
    return memory[begin : begin + pages * PAGE].fill_(value)


def test_it_is_read_and_written_past_the_systems_cache_and_mapped(tmp_path: Path) -> None:
    sent = Counter[str]()
    file = StateFile(str(tmp_path), 5 * PAGE, sent)
    assert fcntl.fcntl(file._handle, fcntl.F_GETFL) & os.O_DIRECT
    assert list(tmp_path.iterdir()) == []  # no name: nothing is left if the process is killed
    assert os.fstat(file._handle).st_blocks * 512 >= 5 * PAGE  # reserved, so that the disk cannot fill up later
    memory = aligned(2, 7)
    file.submit(2 * PAGE, lambda: file.write(memory, PAGE)).result()
    assert file.data.view(5, PAGE).float().mean(1).tolist() == [0, 7, 7, 0, 0]
    file.data[2 * PAGE :] = 9
    file.flush()
    file.submit(2 * PAGE, lambda: file.read(memory, 2 * PAGE)).result()
    assert memory.unique().tolist() == [9] and sent == {"nvme": 4 * PAGE}


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^--optimizer-nvme-offload /dev/shm: cannot reserve 35\.2 TB for this rank: "
    ):
        StateFile("/dev/shm", 1 << 45, Counter())


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    file = StateFile(str(tmp_path), 4 * PAGE, Counter())
    os.ftruncate(file._handle, 2 * PAGE)
    with pytest.raises(StatesLost, match=r"cannot read optimizer states: the file ends too early; the run ends, and"):
        file.submit(0, lambda: file.read(aligned(3, 0), PAGE)).result()
    os.dup2(os.open(os.devnull, os.O_RDONLY), file._handle)
    with pytest.raises(StatesLost, match=r"cannot write optimizer states: Bad file descriptor; the run ends"):
        file.submit(0, lambda: file.write(aligned(1, 0), 0)).result()


def test_space_is_checked_before_a_run_starts(tmp_path: Path) -> None:
    """All ranks of a node together, with the bytes of the estimate."""
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 300 --seq-length 16"
    flags += f" --optimizer-cpu-offload --optimizer-nvme-offload {tmp_path}"
    config, layout = resolve(parse(flags.split()), 2, 0, declare)
    found = machine(launch.World(0, 2, 0, "torchrun"), torch.device("cpu"), str(tmp_path))._replace(ranks=range(2))
    assert found.files is not None and found.files.num_bytes > 1 << 20
    needed = 2 * estimate(config, layout).memory["nvme"]
    check_memory(config, layout, 0, found._replace(files=found.files._replace(num_bytes=needed)))
    with pytest.raises(
        ValueError,
        match=rf"^--optimizer-nvme-offload: .* and [0-9.]+ MB free in {tmp_path}; free some space there, name",
    ):
        check_memory(config, layout, 0, found._replace(files=found.files._replace(num_bytes=needed - 1)))
    with pytest.raises(ValueError, match=r"^--optimizer-nvme-offload /nowhere: .*No such file or directory"):
        machine(launch.World(0, 2, 0, "torchrun"), torch.device("cpu"), "/nowhere")
