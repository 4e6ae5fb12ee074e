"""Lists of values that are compared, refused, kept or printed: item by item, against lists written here."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace as changed

from megazero import checkpoint
from megazero.checkpoint import Damaged, verify
from megazero.checkpoint.manifest import Manifest, StoredTensor, Tiling, read_manifest, write_manifest
from megazero.checkpoint.shards import LocalShard
from megazero.cluster.same_start import agree
from megazero.command.rehearsal.rehearsal import RehearsalDevice, rehearsed
from megazero.data.corpora import Datasets, mock_datasets
from megazero.data.fingerprint import same
from megazero.flags.cli import parse
from megazero.flags.config import Config, DataConfig, ModelConfig
from megazero.flags.flag_names import LAYOUT_FLAGS, flags, value_of, with_values
from megazero.observe.start_report import SHOWN_OPTIONS
from megazero.observe.start_report import option_lines as told_options
from megazero.planner.search.candidates import Candidate
from megazero.run.changes import changed_options
from megazero.run.resume import check_data, check_same_model
from megazero.run.run_state import RunState
from megazero.run.same_run import LOCAL_FLAGS, run_values
from megazero.world import World
from tests.helpers.families import of_family
from tests.helpers.table import for_each

GROUPS = {field.name for field in fields(Config) if field.name not in ("preset", "hf_config")}


def other(value: Any, kind: Any) -> Any:
    """Return a value that an option may also have, as far as its type is known."""
    choices = [choice for choice in get_args(kind) if choice != value and type(choice) is type(value)]
    if choices and not isinstance(value, tuple):
        return choices[0]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return abs(value) * 2 + 1
    return (*value, "x") if isinstance(value, tuple) else f"{value}x"


def with_other(config: Config, flag: str) -> Config:
    """Return a configuration in which one option is another."""
    return with_values(config, {flag: other(value_of(config, flag), flags()[flag].kind)})


# -- ranks of one run


@pytest.mark.second
@pytest.mark.long
def test_flags_that_may_differ_between_ranks() -> None:
    """Every other one must be the same, and is compared by itself."""
    assert {*LOCAL_FLAGS} >= {
        *("log-dir", "log-interval", "tensorboard-dir", "wandb-project", "wandb-name"),
        *("num-workers", "data-path", "data-args-path", "tokenizer", "tasks"),
    }
    config = replace(Config(), data=DataConfig(mock_data=True))
    datasets = mock_datasets(8, 1, 100)
    before = run_values(config, datasets, None)
    for flag in set(flags()) - {"mock-data"}:  # without it, corpora are read
        after = run_values(with_other(config, flag), datasets, None)
        changed = {name for name in before if before[name] != after.get(name)}
        assert changed == (set() if flag in LOCAL_FLAGS else {f"--{flag}"}), flag
    assert before["--mock-data"] == "True"


def test_what_ranks_compare_besides_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Corpora(Datasets):
        def fingerprints(self) -> list[str]:
            return ["first:a", "second:-"]

    class Known:
        identity = "what it does"

    mock = mock_datasets(8, 1, 100)
    config = replace(Config(), data=DataConfig(data_path=("0.3", "a", "2", "b")))
    values = run_values(config, Corpora(mock.train, mock.validation, mock.test), Known())  # type: ignore[arg-type]
    besides = {name: value for name, value in values.items() if not name.startswith("--")}
    code = besides.pop("megazero's code")
    assert besides == {
        "the weight of --data-path's corpus 1": "3/10",
        "the content of --data-path's corpus 1": "first:a",
        "the weight of --data-path's corpus 2": "2",
        "the content of --data-path's corpus 2": "second:-",
        "the content of --tokenizer": "what it does",
        "the content of --tasks": "none",
        "torch's version": torch.__version__,
    }
    assert len(code) == 12 and int(code, 16) >= 0
    (tmp_path / "list").write_text("a # the first\nb\n")
    listed = replace(Config(), data=DataConfig(data_args_path=str(tmp_path / "list")))
    values = run_values(listed, Corpora(mock.train, mock.validation, mock.test), None)
    assert [values[f"the weight of --data-path's corpus {number}"] for number in (1, 2)] == ["by tokens"] * 2
    assert values["the content of --data-path's corpus 2"] == "second:-"
    monkeypatch.setattr("megazero.run.same_run.code_digest", lambda folder: f"code of {Path(folder).name}")
    assert run_values(config, Corpora(mock.train, mock.validation, mock.test), None)["megazero's code"] == (
        "code of megazero"
    )


@for_each("unlike", [None, 0, 1, 2, 3])
def test_every_part_of_a_digest_is_compared(unlike: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest and the lowest of both halves: ranks that differ in one of them alone are reported."""
    values, seen = {"--seed": "5"}, list[list[int]]()
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()
    first, second = (int.from_bytes(part, "little") >> 2 for part in (digest[:8], digest[8:16]))

    def all_reduce(x: torch.Tensor, op: dist.ReduceOp) -> None:
        seen.append(x.tolist())
        assert op == dist.ReduceOp.MAX
        if unlike is not None:  # another rank has a higher one
            x[unlike] += 1

    def all_gather_object(everyone: list[str], text: str) -> None:
        everyone[:] = [text, '{"--seed": "6"}']

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    world, device = World(0, 2, 0, "srun"), torch.device("cpu")
    if unlike is None:
        agree(lambda: values, world, device, ["a", "b"])
    else:
        with pytest.raises(ValueError, match=r"--seed is 5 on rank 0 \(a\), 6 on rank 1 \(b\)"):
            agree(lambda: values, world, device, ["a", "b"])
    assert seen == [[first, second, -first, -second]]


@for_each(
    ("one", "other", "wanted"),
    [
        ("a:b", "a:b", True),
        ("a:b", "a:c", False),  # another checksum: a token changed that no stretch shows
        ("a:b", "c:b", False),
        ("a:b", "a:-", True),  # its description is lost
        ("a:-", "a:b", True),
        ("a:-", "a:-", True),
        ("a:-", "c:-", False),
        ("a:b", "c:-", False),
    ],
)
def test_both_parts_of_a_fingerprint_count(one: str, other: str, wanted: bool) -> None:
    assert same(one, other) == wanted


# -- a checkpoint and the run that resumes from it


def test_an_option_that_differs_from_the_checkpoints_is_named() -> None:
    """Every one, but those of logging and of checkpoints, which change no result."""
    config = with_values(Config(), {"lr-decay-iters": 1000})
    saved, silent = json.loads(json.dumps(asdict(config))), set()
    state = RunState(1, 8, 1, None, {}, {}, saved)
    assert changed_options(state, config) == ([], [])
    for flag, (group, *_) in flags().items():
        if group in GROUPS:
            warnings, notes = changed_options(state, with_other(config, flag))
            if not (warnings or notes):
                silent.add(group)
                continue
            now = value_of(with_other(config, flag), flag)
            then = saved[group][flag.replace("-", "_")]
            then, now = (
                ("off", "on")[value]
                if isinstance(value, bool)
                else " ".join(value)
                if not isinstance(value, (str, int, float))
                else value
                for value in (then, now)
            )
            (text,) = warnings or notes
            wanted = f"--{flag} is {now or 'empty' if now == '' else now}, and was {'empty' if then == '' else then}"
            assert text.startswith(f"{wanted} when this was saved")
    assert silent == {"log", "checkpoint"}
    shown = {group for flag, (group, *_) in flags().items() if group in GROUPS} - silent
    assert shown == {
        *("model", "training", "optimizer", "parallel", "zero", "activations"),
        *("data", "evaluation", "monitor", "plan"),
    }


def test_options_that_make_another_model() -> None:
    """An option counts if it changes a name or a shape; rotary positions, norms and dropout do neither."""
    for architecture, wanted in (
        ("gpt2", {"num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "vocab_size", "untie_embeddings"}),
        (
            "llama",
            {"num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "untie_embeddings", "num_query_groups"},
        ),
        (
            "mixtral",
            {"num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "untie_embeddings", "num_query_groups"}
            | {"moe_ffn_hidden_size", "moe_layer_freq", "moe_shared_expert_intermediate_size"}
            | {"moe_shared_expert_gate"},
        ),
        (
            "deepseek-v2",
            {"num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "untie_embeddings", "q_lora_rank"}
            | {"kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"},
        ),
    ):
        model = ModelConfig(2, 64, 96, 4, 16, 100, **of_family(architecture), untie_embeddings=architecture != "gpt2")
        if architecture == "deepseek-v2":
            model = replace(model, multi_latent_attention=True)
        elif architecture != "gpt2":
            model = replace(model, num_query_groups=2)
        if architecture == "mixtral":
            model = replace(model, num_experts=4, moe_layer_freq="2", moe_shared_expert_intermediate_size=24)
        changes: dict[str, Any] = {
            "num_layers": 3,
            "hidden_size": 128,
            "ffn_hidden_size": 128,
            "num_attention_heads": 8,
            "seq_length": 32,
            "vocab_size": 101,
            "attention_dropout": 0.5,
            "hidden_dropout": 0.5,
            "init_method_std": 0.5,
            "untie_embeddings": not model.untie_embeddings,
            "rotary_base": 1e5,
            "rope_scaling_factor": 2.0,
            "rope_scaling_type": "yarn",
            "rope_trained_length": 4,
            "max_position_embeddings": 64,
            "rotary_percent": 0.5,
            "rotary_interleaved": True,
            "local_rotary_base": 1e5,
            "norm_epsilon": 1e-3,
            "add_qkv_bias": True,
            "num_query_groups": 4,
            "kv_channels": 10,
            "qk_layernorm": True,
            "qk_norm_all_heads": False,
            "embedding_multiplier": 2.0,
            "logits_divisor": 2.0,
            "final_softcap": 30.0,
            "residual_multiplier": 0.22,
            "window_size": 8,
            "layer_pattern": "GG",
            "attention_softcap": 5.0,
            "attention_scale": 0.5,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.5,
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_topk_scaling_factor": 2.5,
            "architecture": "parallel",
            "activation": "relu",
            "num_experts": 5,
            "moe_router_topk": 3,
            "moe_router_pre_softmax": True,
            "moe_ffn_hidden_size": 24,
            "moe_layer_freq": "DE",
            "moe_shared_expert_intermediate_size": 32,
            "moe_shared_expert_gate": True,
            "moe_aux_loss_coeff": 0.1,
            "moe_z_loss_coeff": 0.1,
            "moe_expert_capacity_factor": 1.5,
            "multi_latent_attention": not model.multi_latent_attention,
            "q_lora_rank": 24,
            "kv_lora_rank": 24,
            "qk_head_dim": 24,
            "qk_pos_emb_head_dim": 24,
            "v_head_dim": 24,
            "beta_fast": 16.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
            "yarn_correction_range_round_to_int": False,
            "mtp_num_layers": 1,
            "mtp_loss_scaling_factor": 0.3,
            "norm": "rmsnorm-1p",
            "norm_place": "after",
            "parallel_norms": 1,
            "linear_biases": ("qkv", "logits"),
            "attention_sinks": True,
            "fused_qkv": not model.fused_qkv,
            "learned_positions": not model.learned_positions,
            "root_embedding": True,
        }
        assert changes.keys() == {field.name for field in fields(ModelConfig)}
        refused = set()
        for name, value in changes.items():
            try:
                check_same_model(Path("iter"), replace(model, **{name: value}), model)
            except ValueError as error:
                assert f"it has --{name.replace('_', '-')} {value}, not {getattr(model, name)}" in str(error)
                refused.add(name)
        wanted |= {
            "num_attention_heads",
            "multi_latent_attention",
            "architecture",
            "num_experts",
            "mtp_num_layers",
        }  # heads: shapes of queries, keys and values
        wanted |= {"norm_place", "parallel_norms", "linear_biases", "attention_sinks", "learned_positions"}
        wanted |= {"fused_qkv"} if architecture != "deepseek-v2" else set()
        wanted |= {"norm"} if architecture == "gpt2" else set()  # LayerNorm has biases
        wanted |= {"activation"} if architecture != "gpt2" else set()  # a gated one has another matrix
        wanted |= {"kv_channels"} if architecture != "deepseek-v2" else set()
        wanted |= {"add_qkv_bias", "qk_layernorm"} if architecture in ("llama", "mixtral") else set()
        assert refused == wanted, architecture


@for_each(
    ("then", "now", "refused"),
    [
        ({"data_path": ("a",)}, {"data_path": ("a",)}, True),
        ({"data_path": ("a",)}, {"data_path": ("b",)}, False),  # the user's choice
        ({"data_path": ("a",)}, {"data_path": ("1", "a")}, False),
        ({"data_args_path": "LIST"}, {"data_args_path": "LIST"}, True),
        ({"data_args_path": "other"}, {"data_args_path": "LIST"}, False),
        ({"data_path": ("a",)}, {"data_args_path": "LIST"}, False),
        ({"mock_data": True}, {"mock_data": True}, False),
    ],
)
def test_another_content_under_the_same_name_is_refused(
    then: dict[str, Any], now: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "LIST").write_text("a")
    named = [{name: str(tmp_path / "LIST") if v == "LIST" else v for name, v in each.items()} for each in (then, now)]
    before, ours = (replace(Config(), data=DataConfig(**each)) for each in named)
    state = RunState(1, 4, 1, None, {}, {}, json.loads(json.dumps(asdict(before))), fingerprints=("x:y",))
    check_data(Path("iter"), state, ours, ("x:y",))
    if not refused:
        check_data(Path("iter"), state, ours, ("z:y",))
        return
    with pytest.raises(ValueError, match="--load iter: --data-path a holds other tokens"):
        check_data(Path("iter"), state, ours, ("z:y",))


# -- verify and load


def saved(root: Path) -> Path:
    tensors = {name: LocalShard((6, 2), (0, 0), (6, 2), 0, 12, torch.arange(12.0)) for name in ("model.w", "exp_avg.w")}
    attached = {"tokenizer/tokenizer.json": b'{"a": 1}'}
    return checkpoint.save(root, 1, tensors, {"iteration": 1, "text": "state"}, attached=attached)


def load(path: Path) -> None:
    """Read all that a run reads of a checkpoint."""
    found = checkpoint.find(path)
    assert found == path
    checkpoint.read_state(path)
    names = ("model.w", "exp_avg.w")
    checkpoint.load(path, {name: LocalShard((6, 2), (0, 0), (6, 2), 0, 12, torch.zeros(12)) for name in names})


def edited(path: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Write a manifest with other contents and a correct checksum."""
    write_manifest(path, change(read_manifest(path)))


def without_a_chunk(manifest: Manifest) -> Manifest:
    """Leave out the last chunk of each tensor; the others are as they were."""

    assert all(len(tensor.crc32) > 1 for tensor in manifest.tensors.values())
    tilings = [Tiling(tiling.offset[:-1], tiling.size[:-1], tiling.file[:-1]) for tiling in manifest.tilings]
    tensors = {name: changed(tensor, crc32=tensor.crc32[:-1]) for name, tensor in manifest.tensors.items()}
    return changed(manifest, tilings=tilings, tensors=tensors)


def with_tensor(change: Callable[[StoredTensor], StoredTensor]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        edited(path, lambda m: changed(m, tensors=m.tensors | {"exp_avg.w": change(m.tensors["exp_avg.w"])}))

    return write


def flipped(name: str, at: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[at] ^= 1
        (path / name).write_bytes(content)

    return write


FILES = ("manifest.json", "state.json", "rank_00000.safetensors", "tokenizer/tokenizer.json")
DAMAGES: dict[str, Callable[[Path], object]] = {
    **{
        f"{name} without its end": lambda path, n=name: os.truncate(path / n, (path / n).stat().st_size - 1)
        for name in FILES
    },
    **{
        f"{name} longer": lambda path, n=name: (path / n).write_bytes((path / n).read_bytes() + b"\0") for name in FILES
    },
    **{f"{name} gone": lambda path, n=name: (path / n).unlink() for name in FILES},
    **{f"{name} a folder": lambda path, n=name: ((path / n).unlink(), (path / n).mkdir()) for name in FILES},
    **{f"a bit of {name}": flipped(name, -3) for name in FILES},
    "a bit of the header": flipped("rank_00000.safetensors", 20),
    "a hole": lambda path: edited(path, without_a_chunk),
    "another checksum": with_tensor(lambda w: changed(w, crc32=(w.crc32[0] ^ 1, *w.crc32[1:]))),
    "another dtype": with_tensor(lambda w: changed(w, dtype="float64")),
    "another shape": with_tensor(lambda w: changed(w, shape=(7, 2))),
    "another checksum of the state": lambda path: edited(path, lambda m: changed(m, state_crc32=m.state_crc32 ^ 1)),
    "no list of files": lambda path: edited(path, lambda m: changed(m, files={})),
    "no such tensor in the file": lambda path: edited(
        path, lambda m: changed(m, tensors={n.replace("exp", "new"): e for n, e in m.tensors.items()})
    ),
}


@for_each("damage", DAMAGES)
def test_what_a_load_refuses_is_a_fault_to_verify(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megazero.checkpoint.shards.CHUNK_BYTES", 16)  # several chunks a tensor
    path = saved(tmp_path)
    assert list(verify.faults(path)) == []
    load(path)
    DAMAGES[damage](path)
    with pytest.raises(ValueError):
        load(path)
    if any(
        damage == f"{name} {how}" for name in FILES[2:] for how in ("without its end", "longer", "gone", "a folder")
    ):
        with pytest.raises(Damaged):  # seen by its length, before anything is read
            checkpoint.find(path)
    faults = list(verify.faults(path))
    assert faults and all(isinstance(fault, str) and fault for fault in faults)


# -- lists that are shown or copied


def test_every_option_is_on_the_screen() -> None:
    """The first lines print these; all others are listed if they differ from their defaults."""
    assert {*SHOWN_OPTIONS} == {
        *("architecture", "num-layers", "hidden-size", "num-attention-heads", "seq-length", "vocab-size", "precision"),
        *("micro-batch-size", "global-batch-size", "train-iters", "zero-stage"),
        *("tensor-model-parallel-size", "context-parallel-size", "pipeline-model-parallel-size"),
    }
    for flag, (group, *_) in flags().items():
        if group in GROUPS and flag not in SHOWN_OPTIONS:
            (said,) = told_options(with_other(Config(), flag))
            assert said.removeprefix("--no-").removeprefix("--").split()[0] == flag, said


def test_a_search_prints_every_flag_that_it_chooses() -> None:
    """A candidate's fields, applied to a configuration that has none of them, against the flags of a command line."""
    before = parse(["--pipeline-split", "1,2", "--checkpoint-in-cpu", "--contiguous-checkpointing"])
    after = Candidate(2, 3, 4, "interleaved", 2, 3, 8, "selective", True, True, 4, 2, 1).apply(before)
    changed = {
        flag
        for flag, (group, *_) in flags().items()
        if group in GROUPS and value_of(before, flag) != value_of(after, flag)
    }
    assert changed == {*LAYOUT_FLAGS}


def test_a_rehearsal_leaves_out_what_changes_no_byte() -> None:
    """All options other than their defaults: those of these groups, and of these names, are as if not given."""
    config = Config()
    for flag, (group, *_) in flags().items():
        if group in GROUPS:
            config = with_other(config, flag)
    config = replace(config, training=replace(config.training, matmul_backend="onednn"))
    found = rehearsed(config, RehearsalDevice(torch.device("cpu"), True))
    kept = {group for group in GROUPS if getattr(found, group) == getattr(config, group)}
    assert kept == {"optimizer", "parallel", "zero", "activations", "plan", "model"}
    training = {n for n, v in asdict(config.training).items() if v != asdict(found.training)[n]}
    assert training == {"matmul_backend", "compile", "train_iters"}
    assert found.data == DataConfig(num_workers=0)
    assert (found.monitor.straggler_interval, found.checkpoint.save, found.evaluation.eval_interval) == (0, "", 0)
