"""Refusal of runs that cannot fit in memory: available bytes, a lower bound, and flags that make the run fit."""

import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero.cluster import launch
from megazero.cluster.machine import bind_to_near_cpus, machine
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.cli import parse
from megazero.flags.config import Config
from megazero.flags.resolve import resolve
from megazero.host import Available, Machine, host_memory
from megazero.planner.bytes import capacity
from megazero.planner.bytes.capacity import (
    Needs,
    check_memory,
    checkpoint_bytes,
    estimated,
    largest_preset,
    least,
    memory_copies,
)
from megazero.planner.bytes.estimate import staged_bytes
from megazero.world import tasks_of_node
from tests.helpers.table import for_each
from tests.unit.engine.options.test_limits import limited_work
from tests.unit.flags.test_config import make

ROOT = Path(__file__).resolve().parents[3]
SMALL = {"num_layers": 4, "hidden_size": 96, "seq_length": 64, "vocab_size": 300, "num_attention_heads": 6}


def files(root: Path, **contents: str) -> Path:
    for name, text in contents.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal: 4000 kB\nMemFree: 100 kB\nMemAvailable: 1000 kB\n"


def test_host_memory_is_the_least_of_kernel_and_control_groups(tmp_path: Path) -> None:
    root = files(tmp_path, proc__meminfo=MEMINFO)
    assert host_memory(root) == Available(1000 * 1024, "of host memory")
    assert host_memory(root, whole=True) == Available(4000 * 1024, "of host memory")
    for name in ("sys/fs/cgroup/job/step", "sys/fs/cgroup/job"):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "memory.current").write_text("90000\n")
        (root / name / "memory.stat").write_text("anon 50000\ninactive_file 20000\nactive_file 10000\n")
        (root / name / "memory.max").write_text("max\n")
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("0::/job/step\n")
    assert host_memory(root) == Available(1000 * 1024, "of host memory")
    (root / "sys/fs/cgroup/job/memory.max").write_text("100000\n")  # of the outer group: it binds all the same
    assert host_memory(root) == Available(100_000 - (90_000 - 30_000), "of the control group's memory limit")
    (root / "sys/fs/cgroup/job/step/memory.max").write_text("50000\n")
    assert host_memory(root) == Available(0, "of the control group's memory limit")
    assert host_memory(root, whole=True) == Available(50_000, "of the control group's memory limit")


def test_host_memory_in_a_version_1_control_group(tmp_path: Path) -> None:
    """In a container the group's path is often that of the host: then the limit is at the mount itself."""
    root = files(
        tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="9:cpu:/docker/a\n4:blkio,memory:/docker/a\n0::/\n"
    )
    folder = "sys__fs__cgroup__memory__memory_DOT_"
    files(root, **{f"{folder}limit_in_bytes": "70000", f"{folder}usage_in_bytes": "30000"})
    files(root, **{f"{folder}stat": "total_inactive_file 5000\ninactive_file 1\n"})
    assert host_memory(root) == Available(45_000, "of the control group's memory limit")


def test_cpus_near_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is bound to those that it may use; not where the system names no node, or none is left."""
    allowed, bound = {2, 3, 4, 9}, list[set[int]]()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(cpus))
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1B, pci_device_id=0xA)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    node = tmp_path / "sys/bus/pci/devices/0001:1b:0a.0/numa_node"
    bind_to_near_cpus(torch.device("cuda", 0), tmp_path)  # no such file
    node.parent.mkdir(parents=True)
    for number, listed in ((0, "0-1,5-7"), (1, "3-4,9,12-15")):
        cpus = tmp_path / f"sys/devices/system/node/node{number}/cpulist"
        cpus.parent.mkdir(parents=True)
        cpus.write_text(f"{listed}\n")
    for number in ("-1", "0", "1", "none"):
        node.write_text(f"{number}\n")
        bind_to_near_cpus(torch.device("cuda", 0), tmp_path)
    assert bound == [{3, 4, 9}]


def test_host_memory_here() -> None:
    found = host_memory()
    assert found is not None and found.num_bytes > 0


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (4, {"zero_stage": 3, "precision": "bf16"}),
    (4, {"zero_stage": 2, "recompute": "full", "micro_batch_size": 3}),
    (8, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "zero_stage": 1}),
    (4, {"pipeline_model_parallel_size": 4, "pipeline_schedule": "gpipe", "global_batch_size": 16}),
    (
        2,
        {"tensor_model_parallel_size": 2, "recompute": "full", "partition_activations": True, "untie_embeddings": True},
    ),
    (4, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "interleaved", "virtual_pipeline_stages": 2}),
    # the head, whose logits are most, is on the first rank of a V
    (4, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero-bubble-v", "virtual_pipeline_stages": 2,
         "vocab_size": 3000, "micro_batch_size": 3}),
    (2, {"recompute": "full", "checkpoint_in_cpu": True, "freeze_parameters": ("blocks.*",)}),
]  # fmt: skip


def resolved(world_size: int, options: dict[str, Any]) -> tuple[Config, Layout]:
    return resolve(make(**(SMALL | options)), world_size, 0, declare)


@pytest.mark.second
@for_each(("world_size", "options"), LAYOUTS)
@for_each("device_type", ["cpu", "cuda"])
def test_the_lower_bound_is_one(world_size: int, options: dict[str, Any], device_type: str) -> None:
    """Never more than the estimate, and at least its parameters and optimizer states: or it would refuse too much."""
    config, layout = resolved(world_size, options)
    for stage in range(layout.pp):
        bound, whole = least(config, layout, stage), estimated(config, layout, stage, device_type)
        assert all(bound.device[kind] == whole.device[kind] for kind in ("parameters", "optimizer"))
        assert bound.total <= whole.total and bound.host <= whole.host


def test_the_lower_bound_takes_a_few_lines_for_each_layer() -> None:
    """It counts layers by kind, and walks no iteration."""
    lines = []
    for layers in (2, 4096):
        config, layout = resolved(1, {"num_layers": layers, "global_batch_size": 30})
        with limited_work() as count:
            least(config, layout, 0)
        lines.append(count[0])
    # 18 lines a layer, and some that do not grow with it: fewer if tests before this one filled a cache
    assert lines[0] < 20_000 and lines[1] - lines[0] < 19 * 4096


@for_each(("world_size", "options"), LAYOUTS)
@for_each("device_type", ["cpu", "cuda"])
def test_a_run_is_refused_where_a_byte_is_missing(world_size: int, options: dict[str, Any], device_type: str) -> None:
    """On a CPU the ranks of a node share the host; a GPU is a rank's own, and copies of inputs are the host's."""
    config, layout = resolved(world_size, options)
    needs = [estimated(config, layout, layout.coord(rank).pp, device_type) for rank in range(world_size)]
    device = max(n.total for n in needs)
    host = sum(n.host + n.total * (device_type == "cpu") for n in needs)

    def with_memory(missing_device: int = 0, missing_host: int = 0) -> Machine:
        free = Available(device - missing_device, "free on its GPU") if device_type == "cuda" else None
        return Machine(range(world_size), device_type, free, Available(host - missing_host, "of host memory"))

    fullest = max(range(world_size), key=lambda rank: needs[rank].total)
    check_memory(config, layout, fullest, with_memory())
    shortages = ([{"missing_host": 1}] if host > 0 else []) + ([{"missing_device": 1}] if device_type == "cuda" else [])
    for shortage in shortages:
        with pytest.raises(ValueError, match=r"^--[a-z-]+ \d+ .*: a rank needs .* .* available.*; "):
            check_memory(config, layout, fullest, with_memory(**shortage))
    check_memory(config, layout, fullest, Machine(range(world_size), device_type, None, None))


@for_each(
    ("device_type", "elastic", "times"), [("cpu", "", 1), ("cuda", "", 1), ("cuda", "3:4", 4 / 3), ("cuda", "1:4", 2)]
)
def test_copies_in_memory_are_host_memory(device_type: str, elastic: str, times: float) -> None:
    """A node holds its part and its neighbour's of two checkpoints: on four nodes, the bytes of a whole one.

    An elastic run must fit on its fewest nodes. Copies of an earlier start are replaced, so they count once.
    """
    config, layout = resolved(4, {"memory_checkpoint_interval": 7, "save": "x", "zero_stage": 1})
    config = replace(config, parallel=replace(config.parallel, elastic=elastic))
    each, copies = estimated(config, layout, 0, device_type), int(times * checkpoint_bytes(config))
    total = each.host + each.total * (device_type == "cpu")
    for present in (0, copies // 2):
        node = Machine(range(2, 3), device_type, None, Available(total + copies - present, "of host memory"))
        check_memory(config, layout, 2, node._replace(copies=present))
        short = node._replace(copies=present, host=Available(total + copies - present - 1, "of host memory"))
        with pytest.raises(
            ValueError, match=r"--memory-checkpoint-interval 7: each of \d nodes? holds .* and its "
        ) as e:
            check_memory(config, layout, 2, short)
        assert str(e.value).endswith(" of host memory; it fits with --memory-checkpoint-interval 0")
    check_memory(config, layout, 2, Machine(range(2, 3), device_type, None, Available(total, ""), copies=2 * copies))


def test_the_copies_of_all_ranks_are_a_checkpoint() -> None:
    """Each element is staged by one rank of its shards, and a replicated one by each of both tensor-parallel ranks:
    position embeddings of 66 x 96, six vectors of 96 in each of 4 blocks, and two behind them; 3 states of 4 bytes.
    """
    axes = {"tensor_model_parallel_size": 2, "context_parallel_size": 3, "seq_length": 66, "global_batch_size": 5}
    more = {"memory_checkpoint_interval": 7, "save": "x", "zero_stage": 1, "vocab_size": 330}
    config, layout = resolved(30, axes | more)
    staged = [staged_bytes(config, layout, rank) for rank in range(30)]
    assert sum(staged) == checkpoint_bytes(config) + (66 + 4 * 6 + 2) * 96 * 3 * 4
    assert 15 * max(staged) < 1.1 * sum(staged) / 2


@for_each(("given", "nodes"), [("", 6), ("2:6", 2), ("1:6", 1)])
def test_the_nodes_of_copies_are_those_of_all_ranks(given: str, nodes: int) -> None:
    """pp 2 x dp 3 x cp 2 x tp 1, two ranks a node."""
    axes = {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    config, layout = resolved(12, {"memory_checkpoint_interval": 7, "save": "x"} | axes)
    config = replace(config, parallel=replace(config.parallel, elastic=given))
    (rank, *_) = ranks = range(4, 6)
    need = sum(estimated(config, layout, layout.coord(each).pp, "cuda").host for each in ranks)
    copies = memory_copies(config, nodes)
    assert copies == checkpoint_bytes(config) * (4 if nodes > 1 else 2) // nodes
    for missing in (0, 1):
        node = Machine(ranks, "cuda", None, Available(need + copies - missing, "of host memory"))
        if not missing:
            check_memory(config, layout, rank, node)
            continue
        with pytest.raises(ValueError, match=f"each of {nodes} nodes? holds|each of 1 node holds"):
            check_memory(config, layout, rank, node)


def test_the_way_out_leaves_a_layer_to_every_virtual_stage() -> None:
    """pp 2 x 3 chunks: at least 6 layers, though 5 would fit."""
    options = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "interleaved", "virtual_pipeline_stages": 3}
    config, layout = resolved(2, options | {"num_layers": 60, "recompute": "full"})
    for layers in (6, 5):
        fits = resolved(2, (options if layers == 6 else {"pipeline_model_parallel_size": 2}) | {"num_layers": layers})
        free = max(estimated(*fits, stage, "cuda").total for stage in range(2))
        with pytest.raises(ValueError) as refusal:
            check_memory(config, layout, 0, Machine(range(2), "cuda", Available(free, "free on its GPU"), None))
        named = re.search(r"at most --num-layers (\d+)", str(refusal.value))
        assert bool(named) == (layers == 6) and (named is None or int(named[1]) >= 6), refusal.value


@for_each(
    ("world_size", "options", "share", "expected"),
    [
        (4, {"zero_stage": 0}, 0.9, "--zero-stage 1"),
        (4, {"zero_stage": 0}, 0.65, "--zero-stage 3"),
        (1, {"micro_batch_size": 4}, 0.7, "--recompute"),
        (1, {"num_layers": 40}, 0.3, "--num-layers"),
    ],
)
def test_the_way_out_is_one(world_size: int, options: dict[str, Any], share: float, expected: str) -> None:
    """The flags that a refusal names make the run fit."""
    config, layout = resolved(world_size, options)
    total = sum(estimated(config, layout, layout.coord(rank).pp, "cpu").total for rank in range(world_size))
    node = Machine(range(world_size), "cpu", None, Available(int(total * share), "of host memory"))
    with pytest.raises(ValueError) as refusal:
        check_memory(config, layout, 0, node)
    way_out = str(refusal.value).rsplit("; ", 1)[1]
    assert expected in way_out, way_out
    named = dict(itertools.pairwise(re.findall(r"--[a-z-]+|[\w.]+", way_out.split(" or at most ")[-1])))
    changes: dict[str, Any] = {
        flag[2:].replace("-", "_"): int(value) if value.isdigit() else value
        for flag, value in named.items()
        if flag.startswith("--")
    }
    assert changes
    config, layout = resolved(world_size, options | changes)
    check_memory(config, layout, 0, node)


def test_ranks_of_a_node_by_slurm() -> None:
    tasks = "2(x2),3,1(x1000000)"
    assert [tasks_of_node(tasks, node) for node in (0, 1, 2, 3, 9)] == [2, 2, 3, 1, 1]
    assert tasks_of_node("", 0) == 1


def test_the_machine_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = machine(launch.World(5, 8, 1, "torchrun"), torch.device("cpu"))
    assert (found.ranks, found.device_type, found.device) == (range(4, 8), "cpu", None)
    assert found.host is not None
    assert machine(launch.World(5, 6, 1, "torchrun"), torch.device("cpu")).ranks == range(4, 6)
    assert machine(launch.World(0, 1, 0, "single"), torch.device("cpu")).ranks == range(1)


@for_each("fraction", [1.0, 0.5])
def test_states_on_the_host_are_the_hosts(fraction: float) -> None:
    for options in ({}, {"precision": "bf16", "zero_stage": 2}):
        given = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
        config, layout = resolved(2, options | given)
        bound, whole = least(config, layout, 0), estimated(config, layout, 0, "cuda")
        assert bound.total <= whole.total and bound.host <= whole.host and whole.host > 0
        if fraction == 1:
            # an update also casts the gradients of a unit, if they are narrower
            assert bound.host == whole.host
            assert not bound.device["optimizer"]


@pytest.mark.second
@pytest.mark.long
@for_each(("preset", "gigabytes"), [("gpt2-1.5b", 4), ("llama-1b", 8)])
def test_the_preset_that_is_named_fits(preset: str, gigabytes: int) -> None:
    here = Machine(range(1), "cpu", None, Available(gigabytes * 10**9, "of host memory"))
    with pytest.raises(ValueError) as refusal:
        check_memory(*resolve(parse(["--preset", preset]), 1, 0, declare), 0, here)
    named = re.search(r", or (--preset \S+ --micro-batch-size 1 --recompute full)", str(refusal.value))
    assert named
    check_memory(*resolve(parse(named[1].split()), 1, 0, declare), 0, here)


@pytest.mark.long
def test_a_preset_is_named_if_four_micro_batches_fit() -> None:
    """The account of a whole step decides: one micro-batch, whose gradients are not added to others, takes less."""

    def peak(micro_batches: int) -> int:
        words = f"--preset gpt2-124m --micro-batch-size 1 --recompute full --global-batch-size {micro_batches}"
        return estimated(*resolve(parse(words.split()), 1, 0, declare), 0, "cpu").total

    def named(num_bytes: int) -> str:
        def fits(config: Config, layout: Layout) -> bool:
            if least(config, layout, 0).total > num_bytes:
                return False
            return estimated(config, layout, 0, "cpu").total <= num_bytes

        return largest_preset(parse(["--preset", "gpt2-345m"]), fits)

    one, four = peak(1), peak(4)
    assert one < four
    assert named(four) == "--preset gpt2-124m --micro-batch-size 1 --recompute full"
    assert named(four - 1) == named(one) == ""


@pytest.mark.second
@pytest.mark.long
def test_the_documented_refusal_is_raised() -> None:
    here = Machine(range(1), "cpu", None, Available(4 * 10**9, "of host memory"))
    with pytest.raises(ValueError) as refusal:
        check_memory(*resolve(parse(["--preset", "gpt2-1.5b"]), 1, 0, declare), 0, here)
    assert f"```\nerror: {refusal.value}\n```" in (ROOT / "docs" / "outputs.md").read_text()


@pytest.mark.second
def test_flags_that_are_refused_import_no_torch() -> None:
    """Because importing torch alone takes seconds."""
    program = """
import sys
import pretrain_gpt
try:
    pretrain_gpt.main(["--preset", "tiny", "--plan"])
except SystemExit as stop:
    print(stop.code, sorted({"torch", "numpy", "tyro"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "1 ['tyro']\n", done.stderr
    assert done.stderr.startswith("error: --plan needs --device-type NAME, such as h100-80gb; ")


# Of stage 0 and of stage 1: at least, and at the peak of a step, in MB.
LEAST = {0: (11, 0, 0), 1: (13, 0, 0)}
ESTIMATED = {0: (250, 31, 41), 1: (510, 37, 43)}
MODEL = "--num-layers 2 --ffn-hidden-size 56 --vocab-size 64 --hidden-size 24"
ACTIVE = "--micro-batch-size 3 --seq-length 9"


@for_each(
    ("rank", "largest", "device", "host", "files", "message"),
    [
        (3, "parameters", 12, 900, 900, f"{MODEL}: a rank needs at least 13.0 MB (parameters 12.0 MB, buffers 1.00 "
         "MB), and 12.0 MB free are available to it; way"),
        (3, "activations", 509, 900, 900, f"{ACTIVE} --hidden-size 24: a rank needs at least 510 MB (activations 509 "
         "MB, buffers 1.00 MB), and 509 MB free are available to it; way"),
        (3, "logits", 509, 900, 900, f"{ACTIVE} --vocab-size 64 --hidden-size 24: a rank needs at least 510 MB "
         "(logits 509 MB, buffers 1.00 MB), and 509 MB free are available to it; way"),
        (0, "logits", 999, 900, 126, "--optimizer-nvme-offload: the ranks of this node need 127 MB for optimizer "
         "states, and 126 MB of disk; free some space there, name another folder, or use more nodes"),
        (0, "buffers", 999, 104, 127, f"{ACTIVE} --hidden-size 24: a rank needs 31.0 MB of host memory, the 3 ranks of "
         "this node 105 MB, and 104 MB of host memory are available; way"),
        (0, "buffers", 0, 1269, 127, f"{ACTIVE} --hidden-size 24: a rank needs at least 250 MB (buffers 250 MB), the 3 "
         "ranks of this node 1.38 GB, and 1.27 GB of host memory are available; way"),
        (0, "buffers", 999, 105, 127, ""),
    ],
)  # fmt: skip
def test_a_refusal_has_each_number_in_its_place(
    rank: int, largest: str, device: int, host: int, files: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 1 to 3 of two stages of two are on a node: one of the first stage, and two of the second."""

    def needs(amounts: tuple[int, int, int]) -> Needs:
        whole, in_host, in_files = (10**6 * each for each in amounts)
        kinds = {largest: whole - 10**6} if largest != "buffers" else {}
        return Needs(kinds | {"buffers": whole - sum(kinds.values())}, in_host, in_files)

    monkeypatch.setattr(capacity, "least", lambda config, layout, stage: needs(LEAST[stage]))
    monkeypatch.setattr(capacity, "estimated", lambda config, layout, stage, kind: needs(ESTIMATED[stage]))
    monkeypatch.setattr(capacity, "_way_out", lambda *_: "way")
    flags = f"{MODEL} {ACTIVE} --num-attention-heads 3 --pipeline-model-parallel-size 2 --global-batch-size 6"
    config, layout = resolve(parse(flags.split()), 4, 0, declare)
    kind = "cuda" if device else "cpu"
    found = Machine(
        range(1, 4), kind, Available(device * 10**6, "free") if device else None,
        Available(host * 10**6, "of host memory"), files=Available(files * 10**6, "of disk"),
    )  # fmt: skip
    said = ""
    try:
        check_memory(config, layout, rank, found)
    except ValueError as error:
        said = str(error)
    assert said == message
