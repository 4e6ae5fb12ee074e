"""Lines that call a part: every argument of the parts that a run is put together from, at values that are no default.

A run is made in this process, by `pretrain_gpt.main` and `generate_texts`, with all of its real parts. The
arguments of each are noted, and compared with a table, which must have an entry for every parameter.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megazero.console.generate_tool import GenerateOptions, generate_texts
from megazero.engine.kernels.kernel_table import EAGER
from megazero.engine.kernels.matmul import TORCH
from megazero.engine.model.stage import declare
from megazero.engine.step.batch import Dealer
from megazero.flags.batch_ramp import BatchSizes
from megazero.flags.stages import WHOLE
from megazero.interop.huggingface.weight_files import open_weights
from megazero.observe.bad_step import diagnose_step
from megazero.observe.memory_report import device_in_use, explain_out_of_memory
from megazero.world import World
from tests.helpers.notes import As, Call, Kind, Notes, calls_of, differences
from tests.unit.data_helpers import write_corpus

pytestmark = pytest.mark.second


MODEL = (
    "--num-layers 3 --hidden-size 16 --ffn-hidden-size 40 --num-attention-heads 2 --seq-length 8 --vocab-size 260 "
    "--init-method-std 0.05 --precision fp64 --tokenizer byte --micro-batch-size 2 --global-batch-size 4 "
    "--distributed-timeout-minutes 7 --seed 77 --num-workers 2 --eval-iters 3 --split 40,40,20"
)
TRAINING = (
    "--poison-buffers --rampup-batch-size 2 2 4 --train-iters 2 --split-by documents --eod-mask-loss "
    "--reset-position-ids --matmul-backend torch --reduce-bucket-size 1000 --no-overlap-comm --recompute full "
    "--checkpoint-in-cpu --contiguous-checkpointing --freeze-parameters head.norm.* --eval-interval 2 "
    "--save-interval-minutes 45 --exit-duration-minutes 90 --hang-timeout 3 --check-replicas-interval 2 "
    "--sample-interval 2 --log-interval 2"
)
PARTS = """
    megazero.command.prepare:machine megazero.command.prepare:check_memory
    megazero.command.prepare:open_data megazero.run.inputs:open_datasets megazero.data.corpora:GPTDataset
    megazero.run.checkpoints:find_checkpoint megazero.command.prepare:Clock megazero.command.prepare:check_device
    megazero.command.prepare:resolve megazero.cluster.launch:start megazero.cluster.launch:limit
    megazero.cluster.launch:stop
    megazero.command.train:agree megazero.engine.mesh.mesh:Mesh.build megazero.observe.start_report:screen
    megazero.observe.start_report:details megazero.observe.start_report:hand_out megazero.command.train:Trainer
    megazero.run.trainer:choose_matmul_backend megazero.run.trainer:choose_kernels megazero.run.trainer:Engine
    megazero.run.trainer:Profiler megazero.command.train:Checkpoints megazero.run.trainer:Batches
    megazero.command.train:CheckpointLoader
    megazero.run.trainer:Evaluator megazero.run.trainer:TextSampler megazero.run.training_run:RunEvents
    megazero.run.training_run:open_writers megazero.run.training_run:check_replicas megazero.run.trainer:peak_flops
    megazero.command.train:Wishes megazero.command.train:TrainingRun
    megazero.engine.step.engine:Context megazero.engine.step.engine:Stage megazero.engine.step.engine:ZeroOptions
    megazero.engine.step.engine:Zero megazero.engine.step.engine:Interpreter megazero.engine.step.engine:KeptInputs
    megazero.engine.step.engine:upload_step megazero.engine.step.engine:learning_rate
    megazero.engine.step.engine:rank_spec megazero.data.loader:ThreadPoolExecutor megazero.data.corpora:BlendedDataset
""".split()
TOOL = "Sampling Generator InferenceModel tokenizer_for packed_prompts Mesh.build resolve".split()
GENERATION = [f"megazero.console.generate_tool:{name}" for name in TOOL]
GENERATION += """
    megazero.cluster.launch:start megazero.cluster.launch:stop
    megazero.generation.model:Stage megazero.generation.model:Context megazero.generation.model:KVCache
""".split()


class Runs:
    """A run that trains, one that evaluates its checkpoint, and one that generates text from it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_JOB_ID", "SLURM_NTASKS"):
            patch.delenv(variable, raising=False)
        patch.setattr(torch, "set_num_threads", lambda number: None)
        draw = random.Random(0)
        for name in ("one", "two"):
            documents = [[draw.randrange(256) for _ in range(draw.randrange(20, 60))] + [256] for _ in range(30)]
            write_corpus(folder / name, documents)
        (folder / "prompts").write_text("a\n")
        data = f"--data-path 3 {folder}/one 1 {folder}/two"
        logs = f"--sample-prompts {folder}/prompts --log-dir {folder}/log"
        states = f"--optimizer-cpu-offload --optimizer-nvme-offload {folder}"
        self.argv = f"{MODEL} {TRAINING} {data} {logs} {states} --save {folder}/save --load {folder}/save".split()
        with pytest.MonkeyPatch.context() as inner:
            self.training = Notes(inner)
            for part in PARTS:
                self.training.of(part)
            self.training.of("megazero.run.trainer:choose_kernels", lambda config, mesh: (config, "of kernels"))
            pretrain_gpt.main(self.argv)
        with pytest.MonkeyPatch.context() as inner:
            self.evaluation = Notes(inner)
            for part in PARTS:
                self.evaluation.of(part)
            only = f"--eval-only --eval-split test --load {folder}/save --log-dir {folder}/evaluated"
            pretrain_gpt.main(f"{MODEL} {data} {only}".split())
        self.evaluated = json.loads((folder / "evaluated/metrics.jsonl").read_text())
        with pytest.MonkeyPatch.context() as inner:
            self.generation = Notes(inner)
            for part in GENERATION:
                self.generation.of(part)
            flags = {"max_new_tokens": 3, "temperature": 0.7, "top_k": 9, "top_p": 0.6, "seed": 5, "batch_size": 2}
            options = GenerateOptions(str(folder / "save"), ("b",), num_samples=3, **flags)
            generate_texts(options, World(0, 1, 0, "single"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch:
        yield Runs(tmp_path_factory.mktemp("wiring"), patch)


STREAM, TRACKER = As("Checkpoints.engine.model.stream"), As("Checkpoints.engine.tracker")
CPU, WORLD, HOSTS = torch.device("cpu"), World(0, 1, 0, "single"), As("build.hosts")
FOLDER = As("Trainer.config.optimizer.optimizer_nvme_offload")
CONFIG, MESH, ENGINE = As("Trainer.config"), As("Trainer.mesh"), As("Checkpoints.engine")
LAYERS = ["token_embedding", "position_embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
FIRST: dict[str, Call] = {  # part -> its arguments at its first call
    "machine": {"world": WORLD, "device": CPU, "folder": FOLDER},
    "check_memory": {"config": CONFIG, "layout": As("Trainer.mesh.layout"), "rank": 0, "machine": Kind("Machine")},
    "open_data": {"config": CONFIG, "tokenizer": As("Trainer.tokenizer"), "begins": None},
    "open_datasets": {
        "data_path": As("Trainer.config.data.data_path"),
        "split": "40,40,20",
        "seq_length": 8,
        "seed": 77,
        "vocab_size": 260,
        "tokenizer": As("Trainer.tokenizer"),
        "needed": ("train", "validation"),
        "document_flags": ("--eod-mask-loss", "--reset-position-ids"),
        "split_by": "documents",
        "packing": "split",
        "begins": None,
    },
    "GPTDataset": {
        "data": Kind("IndexedDataset"),
        "split": "40,40,20",
        "split_name": "train",
        "seq_length": 8,
        "seed": 77,
        "vocab_size": 260,
        "split_by": "documents",
    },
    "BlendedDataset": {"datasets": Kind("list"), "weights": [3, 1], "origin": 0, "firsts": ()},
    "find_checkpoint": {"config": CONFIG, "group": None, "passing_over": {}, "memory": True},
    "Clock": {
        "duration_minutes": 90.0,
        "before_minutes": 0.0,
        "job_end": Kind("function"),
        "began": Kind("float"),
        "save_minutes": 45.0,
    },
    "check_device": {"config": CONFIG, "device_type": "cpu"},
    "resolve": {"config": As("screen.asked"), "world_size": 1, "vocab_size": 257, "declare": declare},
    "start": {"world": WORLD, "device": CPU, "timeout_minutes": 7.0},
    "limit": {"world": WORLD, "seconds": 60 * (10.0 + 7.0), "action": "making the groups of ranks"},
    "stop": {"world": WORLD, "timeout_minutes": 7.0},
    "agree": {"values": Kind("partial"), "world": WORLD, "device": CPU, "hosts": HOSTS, "refused": ""},
    "build": {
        "layout": As("check_memory.layout"),
        "rank": 0,
        "device": CPU,
        "timeout_minutes": 7.0,
        "check_buffers": True,
        "hosts": As("agree.hosts"),
    },
    "screen": {
        "asked": As("resolve.config"),
        "config": CONFIG,
        "layout": As("check_memory.layout"),
        "machine": As("check_memory.machine"),
        "device": Kind("str"),
        "chosen": "",
        "num_ids": 257,
        "corpus": As("Trainer.datasets.train_tokens"),
        "auto": "",
        "tasks": "",
        "stages": [WHOLE],
    },
    "details": {
        "config": CONFIG,
        "layout": As("check_memory.layout"),
        "machine": As("check_memory.machine"),
        "hosts": HOSTS,
        "environment": Kind("dict"),
        "notes": "of kernels",
        "sources": Kind("str"),
    },
    "hand_out": {"config": CONFIG, "screen": Kind("list"), "details": Kind("str")},
    "Trainer": {
        "config": As("check_memory.config"),
        "mesh": Kind("Mesh"),
        "datasets": As("Checkpoints.datasets"),
        "eod": 256,
        "watchdog": Kind("Watchdog"),
        "tokenizer": As("open_data.tokenizer"),
        "tasks": None,
    },
    "Wishes": {"signals": Kind("Signals"), "clock": Kind("Clock"), "stop_file": As("TrainingRun.wishes.stop_file")},
    "TrainingRun": {
        "trainer": Kind("Trainer"),
        "loader": Kind("CheckpointLoader"),
        "wishes": Kind("Wishes"),
        "command": Kind("Command"),
        "exports": None,
        "elastic": "",
        "clock": Kind("StartClock"),
    },
    "choose_matmul_backend": {"config": CONFIG, "mesh": MESH, "measure": Kind("function")},
    "choose_kernels": {"config": CONFIG, "mesh": MESH, "complaint": None},
    "Engine": {
        "config": CONFIG,
        "mesh": MESH,
        "num_corpora": 2,
        "explain": explain_out_of_memory,
        "diagnose": diagnose_step,
    },
    "Profiler": {"config": CONFIG, "engine": ENGINE},
    "Checkpoints": {
        "config": CONFIG,
        "engine": Kind("Engine"),
        "datasets": As("Trainer.datasets"),
        "tokenizer": As("Trainer.tokenizer"),
        "watchdog": As("Trainer.watchdog"),
        "stage": WHOLE,
        "lock": Kind("SaveLock"),
    },
    "CheckpointLoader": {
        "saves": As("TrainingRun.loader.saves"),
        "given": As("TrainingRun.command.given"),
        "open_weights": open_weights,
        "stages": [WHOLE],
    },
    "Batches": {
        "dataset": As("Trainer.datasets.train"),
        "seq_length": 8,
        "sizes": BatchSizes(4, 2, 2, 4),
        "micro_batch_size": 2,
        "dp_rank": 0,
        "dp_size": 1,
        "eod": 256,
        "document_end": 256,
        "num_workers": 2,
    },
    "Evaluator": {
        "config": CONFIG,
        "engine": ENGINE,
        "datasets": As("Trainer.datasets"),
        "split": "validation",
        "open_batches": Kind("function"),
    },
    "TextSampler": {"config": CONFIG, "engine": ENGINE, "tokenizer": As("Trainer.tokenizer"), "num_tokens": 64},
    "RunEvents": {
        "command": As("TrainingRun.command"),
        "config": CONFIG,
        "mesh": MESH,
        "clock": As("TrainingRun.clock"),
        "text": Kind("dict"),
    },
    "open_writers": {
        "config": CONFIG,
        "start_iteration": 0,
        "in_use": Kind("function"),
        "command": As("TrainingRun.command"),
        "about": Kind("dict"),
    },
    "check_replicas": {"engine": ENGINE, "iteration": 2},
    "peak_flops": {"card": "", "training": As("Trainer.config.training")},
    "ZeroOptions": {"config": CONFIG, "mesh": MESH, "tracker": As("Checkpoints.engine.tracker")},
    "Zero": {
        "options": As("Checkpoints.engine.zero.options"),
        "units": As("Checkpoints.engine.model.units"),
        "spec": As("Checkpoints.engine.spec"),
    },
    "Interpreter": {
        "layers": Kind("dict"),
        "zero": As("Checkpoints.engine.zero"),
        "kept": Kind("KeptInputs"),
        "pp": As("Trainer.mesh.pp"),
        "route": Kind("method"),
        "activation": ((16, 16), torch.float64, CPU),
        "tracker": As("Checkpoints.engine.tracker"),
        "tied": "token_embedding",
    },
    "KeptInputs": {
        "numel": 256,
        "dtype": torch.float64,
        "device": CPU,
        "tracker": As("Checkpoints.engine.tracker"),
        "tp": None,
        "on_host": True,
        "contiguous": True,
        "sent": As("Trainer.mesh.copied"),
        "outlive": False,
    },
    "upload_step": {
        "batches": Kind("list"),
        "stream": As("Checkpoints.engine.model.stream"),
        "documents": As("Trainer.config.documents"),
        "device": CPU,
        "dealer": Dealer(1, 0, 1, (0,) * 3),
        "training": True,
        "num_corpora": 2,
        "by_sample": False,
        "depths": 0,
    },
    "learning_rate": {"config": As("Trainer.config.optimizer"), "iteration": 1},
    "rank_spec": {"config": CONFIG, "layout": As("Trainer.mesh.layout"), "pp": 0, "declare": declare},
}

LATER: list[tuple[str, int, Call]] = [  # part, number of a further call, its differences
    ("Batches", 1, {"dataset": As("Trainer.datasets.validation"), "num_workers": 0, "sizes": BatchSizes(4)}),
    ("upload_step", 2, {"batches": Kind("list"), "training": False}),
    ("learning_rate", 1, {"iteration": 2}),
    ("GPTDataset", 4, {"split_name": "test"}),
]
# Parameters that differ in another run: --eval-only of the test split of the checkpoint.
EVALUATED: dict[str, Call] = {
    "open_datasets": {"needed": ("test",), "document_flags": (), "split_by": "auto"},
    "Clock": {"duration_minutes": 0.0, "save_minutes": 0.0},
    "Trainer": {"eod": None},
    "Evaluator": {"split": "test"},
    "open_writers": {"config": Kind("Config"), "start_iteration": 2},
    "build": {"check_buffers": False},
    "upload_step": {"training": False},
}
GENERATED: dict[str, Call] = {
    "Sampling": {"temperature": 0.7, "top_k": 9, "top_p": 0.6, "seed": 5},
    "start": {"world": WORLD, "device": CPU, "timeout_minutes": 10.0},
    "stop": {"world": WORLD, "timeout_minutes": 10.0},
    "build": {
        "layout": Kind("Layout"),
        "rank": 0,
        "device": CPU,
        "timeout_minutes": 10.0,
        "check_buffers": False,
        "hosts": Kind("tuple"),
    },
    "resolve": {"config": Kind("Config"), "world_size": 1, "vocab_size": 0, "declare": declare},
    "tokenizer_for": {"spec": "", "path": As("InferenceModel.path"), "state": Kind("RunState"), "vocab_size": 260},
    "InferenceModel": {
        "path": As("tokenizer_for.path"),
        "model": As("resolve.config.model"),
        "mesh": Kind("Mesh"),
        "precision": "fp64",
    },
    "packed_prompts": {"data": Kind("dict"), "prompts": [[98]] * 3, "eod": 256},
    "KVCache": {
        "num_sequences": 2,
        "capacity": 4,  # a prompt of one token and three new ones, of a window of 8
        "cp": As("InferenceModel.mesh.cp"),
    },
    "Generator": {
        "model": Kind("InferenceModel"),
        "sampling": Kind("Sampling"),
        "max_new_tokens": 3,
        "batch_size": 2,
        "ends": (256,),
        "on_batch": Kind("function"),
    },
    "Stage": {
        "model": As("InferenceModel.model"),
        "names": LAYERS,
        "context": Kind("Context"),
        "frozen": (),
    },
    "Context": {
        "stream": Kind("ResidualStream"),
        "cp": As("InferenceModel.mesh.cp"),
        "ring": False,
        "tracker": Kind("MemoryTracker"),
        "precision": "fp64",
        "device": CPU,
        "seed": 0,
        "selective": False,
        "products": TORCH,
        "kernels": EAGER,
        "loss_chunk": 512,
        "recomputed": frozenset(),
        "ep": Kind("_HAS_DEFAULT_FACTORY_CLASS"),  # each rank has all experts
        "expert_tp": None,
    },
}


@pytest.mark.long
@pytest.mark.parametrize("part", FIRST)
def test_a_run_hands_its_parts_what_the_flags_say(part: str, runs: Runs) -> None:
    call = calls_of(runs.training, part)[0]
    assert call.keys() == FIRST[part].keys(), "every parameter has an entry"
    assert not differences(runs.training, call, FIRST[part])
    for name, at, changes in LATER:
        if name == part:
            assert not differences(runs.training, calls_of(runs.training, part)[at], FIRST[part] | changes)


@pytest.mark.parametrize("part", EVALUATED)
def test_an_evaluation_hands_its_parts_what_the_flags_say(part: str, runs: Runs) -> None:
    assert not differences(runs.evaluation, calls_of(runs.evaluation, part)[0], FIRST[part] | EVALUATED[part])


@pytest.mark.parametrize("part", GENERATED)
def test_generation_hands_its_parts_what_the_flags_say(part: str, runs: Runs) -> None:
    call = calls_of(runs.generation, part)[0]
    assert call.keys() == GENERATED[part].keys()
    assert not differences(runs.generation, call, GENERATED[part])


def test_every_part_that_is_noted_has_a_table(runs: Runs) -> None:
    others = {"Context", "Stage", "ThreadPoolExecutor"}  # see the next tests
    assert {name.rpartition(":")[2].removeprefix("Mesh.") for name in PARTS} == {*FIRST, *others}
    assert {name.rpartition(":")[2].removeprefix("Mesh.") for name in GENERATION} == {*GENERATED}


def test_layers_are_built_with_the_runs_own_context(runs: Runs) -> None:
    """The first calls are those of traces, whose tensors have no data."""
    engine = As("Checkpoints.engine").found(runs.training)
    (context,) = [call for call in calls_of(runs.training, "Context") if call["tracker"] is engine.tracker]
    assert context == {
        "stream": engine.model.stream,
        "tracker": engine.tracker,
        "precision": "fp64",
        "device": CPU,
        "seed": 77,
        "selective": False,
        "products": TORCH,
        "kernels": EAGER,
        "cp": engine.mesh.cp,
        "ring": False,
        "loss_chunk": 16131,
        "recomputed": frozenset(range(3)),
        "ep": engine.mesh.ep,
        "expert_tp": engine.mesh.etp,
    }
    (stage,) = [call for call in calls_of(runs.training, "Stage") if call["context"].tracker is engine.tracker]
    assert stage == {
        "model": engine.config.model,
        "names": LAYERS,
        "context": Kind("Context"),
        "frozen": ("head.norm.*",),
    }


def test_threads_read_ahead_as_told(runs: Runs) -> None:
    """Two of them, in training and where an evaluation is all that is done."""
    for notes in (runs.training, runs.evaluation):
        made = calls_of(notes, "ThreadPoolExecutor")
        assert [call["max_workers"] for call in made if call["thread_name_prefix"] == "data"] == [2]


def test_an_evaluation_reads_its_split_ahead(runs: Runs) -> None:
    _, call = calls_of(runs.evaluation, "Batches")
    assert (call["num_workers"], call["sizes"], call["eod"], call["document_end"]) == (2, BatchSizes(4), None, None)
    assert call["dataset"] is As("Trainer.datasets.test").found(runs.evaluation)
    found = runs.evaluated
    assert found["targets"] == 3 * 4 * 8  # --eval-iters x batch x sequence
    assert found["tokens_per_second"] * found["eval_seconds"] == pytest.approx(found["targets"])


def test_ranks_compare_the_tokenizer_and_the_corpora(runs: Runs) -> None:
    values = calls_of(runs.training, "agree")[0]["values"]()
    assert values["the content of --tokenizer"] == As("Trainer.tokenizer").found(runs.training).identity
    assert [values[f"the weight of --data-path's corpus {number}"] for number in (1, 2)] == ["3", "1"]
    assert values["--seed"] == "77" and values["--ffn-hidden-size"] == "40"


def test_functions_that_parts_are_given_do_what_the_flags_say(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog ends a hung run; others have a tenth of --hang-timeout to see it; a line reports the memory in use."""
    hung = Notes(monkeypatch).of("megazero.cluster.failures:end_hung", lambda *_: None)
    As("Trainer.watchdog").found(runs.training)._end("has been in operation 'x' for 180 s")
    (call,) = hung
    patience = 0.1 * 60 * 3.0
    assert [*call.values()] == [WORLD, "has been in operation 'x' for 180 s", HOSTS.found(runs.training), patience]
    assert As("Trainer.watchdog._limit").found(runs.training) == 60 * 3.0
    (before, _), found = device_in_use(CPU), calls_of(runs.training, "open_writers")[0]["in_use"]()
    assert before <= found[0] <= device_in_use(CPU)[0] and found[1] == 0
