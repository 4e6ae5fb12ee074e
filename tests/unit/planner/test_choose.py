"""`--layout auto`: given flags are kept, everything else is chosen, and a choice is the same on every rank."""

import dataclasses
import functools
from pathlib import Path

import pytest

from megazero.engine.model.stage import declare
from megazero.flags.cli import Command, read
from megazero.flags.config import Config
from megazero.flags.flag_names import LAYOUT_FLAGS, flags, value_of
from megazero.flags.resolve import resolve
from megazero.flags.validate import check_values
from megazero.host import Available, Machine
from megazero.planner.bytes.capacity import check_memory
from megazero.planner.run_plan import make_plan
from megazero.planner.search.choose import Chosen, choose_layout, device_of_ranks
from megazero.planner.time.devices import Constant, Device, load_device
from tests.helpers.table import for_each

TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 257 --global-batch-size 8 "
    "--layout auto"
)
EXPERTS = "--architecture llama --num-experts 4"
CPU = load_device("cpu")


def asked(line: str = "") -> Command:
    command = read(f"{TINY} {line}".split())
    check_values(command.config)
    return command


@functools.cache
def choose(line: str, world: int, memory: int = 0) -> tuple[Chosen, Config]:
    """Return a choice, and its configuration; memory: bytes of each rank, 0: the CPU's."""
    command = asked(line)
    device = with_memory(memory) if memory else CPU
    found = choose_layout(command.config, command.given, world, 0, device)
    return found, found.apply(command.config)


def with_memory(num_bytes: int) -> Device:
    """Return a CPU whose ranks have `num_bytes`, and no libraries."""
    constants = {"memory.capacity": num_bytes, "memory.reserved": 0}
    return dataclasses.replace(
        CPU, constants=CPU.constants | {name: Constant(n, n, n, "") for name, n in constants.items()}
    )


GIVEN = {
    "tensor-model-parallel-size": ("--tensor-model-parallel-size 4", 4),
    "context-parallel-size": ("--context-parallel-size 2", 4),
    "pipeline-model-parallel-size": ("--pipeline-model-parallel-size 4", 4),
    "expert-model-parallel-size": (f"--expert-model-parallel-size 2 {EXPERTS}", 2),
    "expert-tensor-parallel-size": (f"--expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 {EXPERTS}", 4),
    "pipeline-schedule": ("--pipeline-schedule gpipe --pipeline-model-parallel-size 2", 2),
    "virtual-pipeline-stages": ("--virtual-pipeline-stages 2", 2),
    "pipeline-split": ("--pipeline-split 3,1", 2),
    "sequence-parallel": ("--sequence-parallel", 2),
    "zero-stage": ("--zero-stage 3", 2),
    "zero-shard-size": ("--zero-shard-size 3", 6),
    "recompute": ("--recompute selective", 2),
    "partition-activations": ("--partition-activations", 2),
    "checkpoint-in-cpu": ("--checkpoint-in-cpu", 1),
    "contiguous-checkpointing": ("--contiguous-checkpointing", 1),
    "micro-batch-size": ("--micro-batch-size 3", 2),
}


@pytest.mark.second
@pytest.mark.long
@for_each("flag", LAYOUT_FLAGS)
def test_a_given_flag_keeps_its_value(flag: str) -> None:
    """Even one that no search tries, and the layout is one that a run accepts."""
    line, world = GIVEN[flag]
    found, config = choose(line, world)
    assert flag not in found.flags and value_of(config, flag) == value_of(asked(line).config, flag)
    assert value_of(config, flag) != flags()[flag].default
    resolved, layout = resolve(config, world, 0, declare)
    assert layout.world_size == world and resolved.parallel.layout == "given"
    free, unfixed = choose(EXPERTS if EXPERTS in line else "", world)
    assert value_of(unfixed, flag) != value_of(config, flag) and free.seconds <= found.seconds


@pytest.mark.second
@pytest.mark.long
def test_without_given_flags_the_fastest_of_all_layouts_is_chosen() -> None:
    found, config = choose("", 4)
    assert found.flags.keys() == {*LAYOUT_FLAGS}
    parts = [choose(f"--pipeline-model-parallel-size {pp}", 4)[0].seconds for pp in (1, 2, 4)]
    assert found.seconds == min(parts) < max(parts) and found.seconds < choose("--recompute full", 4)[0].seconds
    again = make_plan(*resolve(config, 4, 0, declare), CPU)
    assert (again.seconds, again.stages[again.fullest].peak, again.free) == (found.seconds, found.peak, found.free)


def test_less_memory_chooses_a_slower_layout_that_fits() -> None:
    roomy, _ = choose("", 2)
    found, config = choose("", 2, roomy.peak - 1)
    assert found.peak < roomy.peak and found.seconds > roomy.seconds and found.free >= 0
    machine = Machine(range(2), "cpu", None, Available(2 * (roomy.peak - 1), "of host memory"))
    check_memory(*resolve(config, 2, 0, declare), 0, machine)
    with pytest.raises(ValueError, match=r"--layout auto: none of the \d+ layouts of 2 ranks fits .*; use more ranks"):
        choose("", 2, 1000)
    with pytest.raises(ValueError, match=r"with --zero-stage 0: none .* drop some of these flags"):
        choose("--zero-stage 0", 2, 1000)


def test_a_preset_gives_no_layout_unless_it_asks_for_the_choice(tmp_path: Path) -> None:
    """Its layout is for other devices; --layout auto in it is for its other flags."""
    preset = tmp_path / "mine.toml"
    preset.write_text("zero-stage = 3\nmicro-batch-size = 2\nlr = 0.5\n")
    command = asked(f"--preset {preset} --micro-batch-size 4")
    assert {"zero-stage", "lr"} & command.given == {"lr"} and command.config.zero == Config().zero
    assert command.config.training.micro_batch_size == 4 and "micro-batch-size" in command.given
    (note,) = command.notes
    assert "--layout auto" in note and f"without --zero-stage 3 of --preset {preset};" in note and "micro" not in note
    elastic = read(f"{TINY.removesuffix('--layout auto')} --preset {preset} --elastic 1:2 --save {tmp_path}".split())
    assert elastic.dropped == {"zero-stage", "micro-batch-size"} and elastic.config.zero == Config().zero
    preset.write_text('zero-stage = 3\nlayout = "auto"\n')
    command = read(f"{TINY.removesuffix('--layout auto')} --preset {preset}".split())
    assert command.config.parallel.layout == "auto" and command.config.zero.zero_stage == 3
    assert "zero-stage" in command.given and not command.notes
    given = read(f"{TINY} --layout given --preset {preset}".split())
    assert given.config.zero.zero_stage == 3


def test_flags_that_need_a_layout_are_accepted_before_it_is_chosen() -> None:
    for flag, stages in (("--zero-gather-every step", {3}), ("--zero-reduce-every step", {2, 3})):
        _, config = choose(flag, 2)
        check_values(config)
        assert config.zero.zero_stage in stages
    _, config = choose("--zero-bubble-backlog 2", 2)
    assert config.parallel.pipeline_schedule.startswith("zero-bubble")


REFUSED = {
    "--tensor-model-parallel-size 2": (3, "--tensor-model-parallel-size 2 .* does not divide the 3 ranks"),
    "--partition-activations": (3, "--partition-activations: no layout of 3 ranks allows these flags .*; drop some"),
    "--pipeline-schedule other": (2, "--pipeline-schedule other: there are gpipe"),
    "--global-batch-size 0": (1, "--layout auto needs --global-batch-size, .*; add it"),
    "--zero-gather-every step --zero-stage 2": (2, "every step needs --zero-stage 3 or higher.*; drop some"),
}


@for_each("line", REFUSED)
def test_refusals_name_the_flags_and_the_way_out(line: str) -> None:
    world, said = REFUSED[line]
    with pytest.raises(ValueError, match=said):
        choose(line, world)


def test_several_ranks_choose_for_memory_that_they_have_in_common() -> None:
    """The free memory that each of them sees differs, because the others are starting."""
    config, host = asked().config, Available(5 * 10**9, "of host memory")
    machine = Machine(range(4, 8), "cpu", None, host, 10**10)
    later = machine._replace(host=Available(3 * 10**9, ""), ranks=range(0, 4))
    first = device_of_ranks(config, "", machine, 8)
    assert first == device_of_ranks(config, "", later, 8)
    assert first["memory.capacity"] == 0.9 * 10**10 / 4 and first.devices_per_node == 4
    alone = device_of_ranks(config, "", machine._replace(ranks=range(1)), 1)
    assert alone["memory.capacity"] == 0.9 * host.num_bytes and alone.devices_per_node == 1


def test_the_device_of_ranks_is_their_card() -> None:
    gpu = Machine(range(2), "cuda", Available(70 * 10**9, "free on its GPU"), None, 80 * 10**9)
    config = asked().config
    found = device_of_ranks(config, "NVIDIA H100 80GB HBM3", gpu, 2)
    assert (found.name, found["memory.capacity"], found.devices_per_node) == ("h100-80gb", 0.9 * 80e9, 2)
    assert found["compute.fp32"] == found["compute.tf32"]
    for ranks in (4, 2):  # of a tray of four, of which an NVLink domain has 18
        rack = device_of_ranks(config, "NVIDIA GB200", gpu._replace(ranks=range(ranks)), 36)
        assert (rack.devices_per_node, rack.devices_per_host) == (18 * ranks, ranks)
    assert device_of_ranks(config, "NVIDIA H100 80GB HBM3", gpu, 1)["memory.capacity"] == 0.9 * 70e9
    with pytest.raises(ValueError, match=r"no device file describes NVIDIA X; add --device-type .* b200, .* your own"):
        device_of_ranks(config, "NVIDIA X", gpu, 2)
    named = asked("--device-type a100-80gb").config
    assert device_of_ranks(named, "NVIDIA X", gpu, 2).name == "a100-80gb"
    with pytest.raises(ValueError, match="--device-type a100-80gb describes a cuda device, and this rank has a CPU"):
        device_of_ranks(named, "", Machine(range(2), "cpu", None, None), 2)


@pytest.mark.second
def test_the_printed_flags_make_the_same_run() -> None:
    command = asked("--tensor-model-parallel-size 2")
    found, config = choose("--tensor-model-parallel-size 2", 6)
    fixed = found.as_flags(command.config)
    assert "tensor" not in fixed and "--micro-batch-size 3" in fixed
    line = f"{TINY.removesuffix('--layout auto')} --tensor-model-parallel-size 2 {fixed}"
    assert read(line.split()).config == config
    words = found.words(command.config, CPU)
    assert "dp 3 x tp 2" in words and words.endswith(f"instead of --layout auto: {fixed}") and " s a step" in words
    found, _ = choose(f"--tensor-model-parallel-size 2 {fixed}", 6)
    assert found.words(config, CPU).endswith("To fix this layout, leave out --layout auto")


@pytest.mark.second
def test_the_printed_flags_replace_those_of_a_preset(tmp_path: Path) -> None:
    """Without --layout auto the preset's layout counts again, also where the choice is a default."""
    preset = tmp_path / "mine.toml"
    preset.write_text("zero-stage = 3\nmicro-batch-size = 2\nrecompute = 'full'\n")
    command = asked(f"--preset {preset}")
    found = choose_layout(command.config, command.given, 8, 0, CPU)
    fixed = found.as_flags(command.config, command.dropped)
    assert "--recompute none" in fixed and found.words(command.config, CPU, command.dropped).endswith(fixed)
    line = f"{TINY.removesuffix('--layout auto')} --preset {preset} {fixed}"
    again = read(line.split()).config
    assert {name: value_of(again, name) for name in LAYOUT_FLAGS} == found.flags
