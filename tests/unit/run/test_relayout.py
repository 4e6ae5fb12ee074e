"""The table of layouts of an elastic run: chosen once, kept whole, and read again by the run that it is for."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megazero.checkpoint.folders import save_mark
from megazero.engine.model.stage import declare
from megazero.flags.cli import Command, read
from megazero.flags.flag_names import LAYOUT_FLAGS
from megazero.flags.resolve import resolve
from megazero.flags.validate import check_values, elastic_nodes
from megazero.planner.search.choose import choose_layout
from megazero.planner.time.devices import Constant, load_device
from megazero.run import relayout
from megazero.run.relayout import LAYOUTS, Question, complete, resuming, start_words
from megazero.world import BEFORE, World

TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 257 --global-batch-size 8 "
    "--save saved --elastic 2:4"
)
CPU = load_device("cpu")


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., Command]:
    def get(line: str = "") -> Command:
        command = read(f"{TINY} --save {tmp_path} {line}".split())
        check_values(command.config)
        return command

    return get


@pytest.fixture
def question(asked: Callable[..., Command]) -> Callable[..., Question]:
    def get(line: str = "", per_node: int = 1) -> Question:
        command = asked(line)
        return Question(command.config, command.given, per_node, 0, CPU)

    return get


@pytest.mark.second
def test_nodes_are_a_range() -> None:
    assert elastic_nodes("2:4") == range(2, 5) and elastic_nodes("7:7") == range(7, 8) and not elastic_nodes("")
    for wrong in ("4", "4:2", "0:3", "2:", "2:x", "1:2:3", "-1:2"):
        with pytest.raises(ValueError, match=f"--elastic {wrong}: give the least and the largest number of nodes"):
            elastic_nodes(wrong)


def test_it_implies_the_choice_of_a_layout(asked: Callable[..., Command], tmp_path: Path) -> None:
    """Flags of the command line keep their value; those of a preset do not count."""
    assert asked().config.parallel.layout == "auto"
    assert asked("--layout given").config.parallel.layout == "given"
    preset = tmp_path / "mine.toml"
    preset.write_text("zero-stage = 3\nmicro-batch-size = 2\n")
    command = asked(f"--preset {preset} --micro-batch-size 4")
    assert {"zero-stage", "micro-batch-size"} & command.given == {"micro-batch-size"}
    for line in ("--save ", "--global-batch-size 0"):
        words = f"{TINY} {line}".split(" ")
        with pytest.raises(ValueError, match="--elastic 2:4 needs --save DIR and --global-batch-size B"):
            check_values(read(words).config)


@pytest.mark.second
def test_each_row_is_the_choice_for_so_many_nodes(question: Callable[..., Question]) -> None:
    """Each has the given flags, and trains the whole batch."""
    ask = question("--micro-batch-size 2", per_node=2)
    for nodes in (2, 3, 4):
        row = ask.row({}, nodes)
        plain = replace(ask.config, parallel=replace(ask.config.parallel, elastic=""))
        assert row == choose_layout(plain, ask.given, 2 * nodes, 0, CPU)
        assert row.flags.keys() == {*LAYOUT_FLAGS} - {"micro-batch-size"}
        config, layout = resolve(row.apply(ask.config), 2 * nodes, 0, declare)
        assert layout.world_size == 2 * nodes and config.training.global_batch_size == 8
        assert config.training.micro_batch_size == 2
    for nodes in (1, 5):
        with pytest.raises(ValueError, match=f"--elastic 2:4: this run has {nodes} node"):
            ask.row({}, nodes)


@pytest.mark.second
def test_a_later_start_takes_its_row_without_a_search(question: Callable[..., Question], tmp_path: Path) -> None:
    """Even where it would choose another one, such as with a newer version."""
    ask = question()
    complete(ask, 0, 1, None)
    kept = relayout.read_layouts(tmp_path, ask.digest())
    assert kept == {nodes: ask.choose(nodes) for nodes in (2, 3, 4)}
    other = {3: kept[2]}
    assert ask.row(other, 3) == kept[2] != kept[3] and ask.missing(other) == [4, 2]
    before = (tmp_path / LAYOUTS).stat().st_mtime_ns
    complete(ask, 0, 1, None)
    assert (tmp_path / LAYOUTS).stat().st_mtime_ns == before


def test_more_nodes_add_rows(question: Callable[..., Question], tmp_path: Path) -> None:
    ask = question()
    relayout.write_layouts(tmp_path, ask.digest(), {2: ask.choose(3)})
    complete(question("--elastic 1:2"), 0, 1, None)
    kept = relayout.read_layouts(tmp_path, ask.digest())
    assert kept == {2: ask.choose(3), 1: question("--elastic 1:2").choose(1)}


@pytest.mark.second
def test_a_table_of_another_run_does_not_count(question: Callable[..., Question], tmp_path: Path) -> None:
    ask = question()
    complete(ask, 0, 1, None)
    roomy = replace(CPU, constants=CPU.constants | {"memory.capacity": Constant(1e15, 1e15, 1e15, "")})
    others = [
        question(line) for line in ("--num-layers 5", "--global-batch-size 9", "--zero-stage 1", "--precision fp64")
    ]
    others += [question(per_node=2), ask._replace(vocab_size=300), ask._replace(device=roomy)]
    for other in others:
        assert relayout.read_layouts(tmp_path, other.digest()) == {}
    memory = CPU["memory.capacity"] + 2.0**26
    similar = replace(CPU, constants=CPU.constants | {"memory.capacity": Constant(memory, memory, memory, "")})
    assert len(relayout.read_layouts(tmp_path, ask._replace(device=similar).digest())) == 3
    for same in ("--log-dir elsewhere", "--save-interval 7", "--elastic 1:9"):
        assert len(relayout.read_layouts(tmp_path, question(same).digest())) == 3


@pytest.mark.second
@pytest.mark.parametrize("damage", ["", "{", "[]", '{"question": 1}', None])
def test_a_damaged_table_is_made_anew(question: Callable[..., Question], tmp_path: Path, damage: str | None) -> None:
    ask = question()
    if damage is not None:
        (tmp_path / LAYOUTS).write_text(damage)
    assert relayout.read_layouts(tmp_path, ask.digest()) == {}
    complete(ask, 0, 1, None)
    assert len(relayout.read_layouts(tmp_path, ask.digest())) == 3


def test_values_of_flags_survive_the_file(question: Callable[..., Question], tmp_path: Path) -> None:
    ask = question("--pipeline-model-parallel-size 2 --pipeline-split 3,1")
    relayout.write_layouts(tmp_path, ask.digest(), {2: ask.choose(2)})
    (row,) = relayout.read_layouts(tmp_path, ask.digest()).values()
    assert row == ask.choose(2) and row.apply(ask.config) == ask.choose(2).apply(ask.config)


def test_a_number_of_nodes_that_no_layout_fits_is_refused_at_the_start(question: Callable[..., Question]) -> None:
    """It is refused before any node is lost."""
    ask = question("--tensor-model-parallel-size 4", per_node=1)
    with pytest.raises(
        ValueError, match=r"--elastic 2:4, on 3 nodes: .* does not divide .*; or allow other numbers of"
    ):
        complete(ask, 0, 1, None)


@pytest.mark.second
def test_a_start_resumes_from_what_the_run_has_saved(
    asked: Callable[..., Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the launch has saved, each generation starts where the first one did, also where --save holds others."""
    other, back = asked("--load other --finetune").config, asked(f"--load {tmp_path}/iter_0000003").config
    assert resuming(asked().config) == {"load": str(tmp_path), "finetune": False}
    for latest in (None, 1000):
        if latest is not None:
            (tmp_path / "latest").touch()
            os.utime(tmp_path / "latest", (latest, latest))
        monkeypatch.setenv(BEFORE, save_mark(str(tmp_path)))
        for count in ("0", "2"):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
            assert resuming(other) == {} == resuming(back)
    os.utime(tmp_path / "latest", (2000, 2000))
    for config in (other, back):
        assert resuming(config) == {"load": str(tmp_path), "finetune": False}
    plain = replace(other, parallel=replace(other.parallel, elastic=""))
    assert resuming(plain) == {}


@pytest.mark.second
def test_the_line_of_a_start(asked: Callable[..., Command], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    line = start_words(asked().config, World(0, 6, 0, "torchrun"), "dp 6")
    assert line == "generation 7: 2 nodes of at most 4, 6 ranks: dp 6"
    with pytest.raises(ValueError, match="7 ranks, 3 of them on this node; start as many on every node"):
        start_words(asked().config, World(0, 7, 0, "torchrun"), "dp 7")
