"""Functions that the engine and its estimate both call, against tables worked out by hand.

A fault in such a function makes both wrong in the same way, so that no comparison of the two sees it.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from megazero.checkpoint.engine_state import EngineState
from megazero.engine.memory import COPY_DEPTH
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.layers.context import kept_bytes
from megazero.engine.model.layers.weight import GradWriter
from megazero.engine.model.stage import declare
from megazero.engine.options.optimizers import ADAMW
from megazero.engine.plan.layout.flat_layout import FlatParam, Range, equal_ranges, flat_layout, partition_numel
from megazero.engine.plan.layout.layers import pass_costs
from megazero.engine.plan.layout.parameters import unit_layout
from megazero.engine.plan.layout.topology import TRAFFIC, Layout, ring_bytes
from megazero.engine.plan.layout.zero_policy import (
    Buckets,
    ShardingGroup,
    ZeroPolicy,
    persistent_gradients,
    plan_buckets,
)
from megazero.engine.plan.optimizer_sizes import Rates
from megazero.engine.plan.program.program import Program, program
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.engine.step.engine import Engine
from megazero.flags.config import (
    BYTES,
    ActivationConfig,
    Config,
    EvaluationConfig,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
    ZeroConfig,
)
from megazero.flags.pipeline_split import layer_costs
from megazero.planner.sizes import NUMBER
from megazero.planner.trace.trace import trace_block
from tests.helpers.families import of_family
from tests.helpers.table import for_each
from tests.parallel.cases import Case

# -- initial values, by the papers. GPT-2: std 0.02; on the residual path over sqrt(2 layers), "a modified
#    initialization which accounts for the accumulation on the residual path with model depth". Megatron-LM has the
#    same for every architecture: init_method, and scaled_init_method of output layers.

STD, RESIDUAL = 0.03, 0.03 / math.sqrt(2 * 3)
SHARED_BLOCK = {"mlp.up.weight": STD, "mlp.down.weight": RESIDUAL, "attention.proj.weight": RESIDUAL}
LAYER_NORM = {"weight": 1.0, "bias": 0.0}
# architecture -> name -> std of the weights that are drawn; and the constants of the others
DRAWN = {
    "gpt2": {
        "token_embedding.weight": STD,
        "position_embedding.weight": STD,
        "attention.qkv.weight": STD,
        **SHARED_BLOCK,
    },
    "llama": {
        "token_embedding.weight": STD,
        "head.output.weight": STD,
        "attention.query.weight": STD,
        "attention.kv.weight": STD,
        **SHARED_BLOCK,
    },
    "parallel": {
        "token_embedding.weight": STD,
        "head.output.weight": STD,
        "attention.query.weight": STD,
        "attention.kv.weight": STD,
        **SHARED_BLOCK,
    },
}
CONSTANT = {
    "gpt2": {
        **{f"{norm}.{name}": value for norm in ("norm1", "norm2", "head.norm") for name, value in LAYER_NORM.items()},
        **dict.fromkeys(("attention.qkv.bias", "attention.proj.bias", "mlp.up.bias", "mlp.down.bias"), 0.0),
    },
    "llama": {
        **dict.fromkeys(("norm1.weight", "norm2.weight", "head.norm.weight"), 1.0),
        **dict.fromkeys(("attention.query.bias", "attention.kv.bias"), 0.0),  # --add-qkv-bias
    },
    "parallel": {
        **{f"{norm}.{name}": value for norm in ("norm", "head.norm") for name, value in LAYER_NORM.items()},
        **dict.fromkeys(("attention.query.bias", "attention.kv.bias", "mlp.up.bias", "mlp.down.bias"), 0.0),
    },
}


def model_of(architecture: str) -> ModelConfig:
    model = ModelConfig(3, 64, 96, 8, 32, 300, init_method_std=STD, **of_family(architecture))
    if architecture == "gpt2":
        return model
    return replace(model, untie_embeddings=True, num_query_groups=2, add_qkv_bias=True)


@for_each("architecture", DRAWN)
def test_initial_values_are_those_of_the_papers(architecture: str) -> None:
    """Means and standard deviations as declared, and those of the weights of an engine of one rank."""
    model = model_of(architecture)
    specs = [spec for kind in declare(model).kinds.values() for spec in kind.params]
    named = {spec.name.removeprefix("blocks.0."): spec for spec in specs}
    wanted = {name: (std, 0.0) for name, std in DRAWN[architecture].items()}
    wanted |= {name: (0.0, mean) for name, mean in CONSTANT[architecture].items()}
    assert {name: (spec.std, spec.mean) for name, spec in named.items()} == {
        name: (pytest.approx(std), mean) for name, (std, mean) in wanted.items()
    }
    # Matrices and tables decay.
    assert {name for name, spec in named.items() if spec.decays} == set(DRAWN[architecture])
    engine = Engine(Case(model=model).config(), Mesh.build(Layout(), 0, torch.device("cpu")))
    for name, shard in EngineState(engine).shards().items():
        if name.startswith("model."):
            short = name.removeprefix("model.")
            key = short.split(".", 2)[2] if short.startswith("blocks.") else short
            std, mean = wanted[key]
            deviation = float(shard.data.double().std(correction=0)) if shard.data.numel() > 1 else 0.0
            # of n draws: the error of a mean is std / sqrt(n), that of a standard deviation std / sqrt(2 n)
            error = 5 * std / math.sqrt(shard.data.numel())
            assert float(shard.data.double().mean()) == pytest.approx(mean, abs=error), name
            assert deviation == pytest.approx(std, abs=error), name


@for_each("tp", [2, 4])
def test_initial_values_do_not_depend_on_tensor_parallelism(tp: int) -> None:
    for architecture in DRAWN:
        for specs, alone in zip(
            *(declare(model_of(architecture), n).kinds.values() for n in (tp, 1)),
            strict=True,
        ):
            drawn = [[(s.std, s.mean, s.decays) for s in kind.params] for kind in (specs, alone)]
            assert drawn[0] == drawn[1]


# -- the plan of memory


@for_each(
    ("stage", "every", "micro_batches", "wanted"),
    [
        # (unsharded, sharded): of stage 0 the whole sum lives until the update
        (0, "micro-batch", 1, (True, False)),
        (0, "micro-batch", 2, (True, False)),
        # of stage 1 the whole sum lives from one micro-batch to the next; with one alone only until it is reduced
        (1, "micro-batch", 1, (False, True)),
        (1, "micro-batch", 2, (True, True)),
        (2, "micro-batch", 1, (False, True)),
        (2, "micro-batch", 2, (False, True)),
        (2, "step", 1, (False, True)),
        (2, "step", 2, (True, True)),
        (3, "micro-batch", 2, (False, True)),
        (3, "step", 2, (True, True)),
    ],
)
def test_gradients_that_outlive_a_backward_are_persistent(
    stage: int, every: str, micro_batches: int, wanted: tuple[bool, bool]
) -> None:
    policy = ZeroPolicy.for_stage(ZeroConfig(stage, zero_reduce_every=every), 2)  # type: ignore[arg-type]
    assert persistent_gradients(policy, True, micro_batches, on_host=False) == wanted
    assert persistent_gradients(policy, True, micro_batches, on_host=True) == (wanted[0], False)
    assert persistent_gradients(policy, False, micro_batches, on_host=False) == (False, False)
    engine = Engine(
        Case(zero=stage, recompute="full", md=True, micro_batches=micro_batches, batch=2).config(),
        Mesh.build(Layout(), 0, torch.device("cpu")),
    )
    # one rank has nothing to shard: its whole gradients are persistent at every stage
    numel = sum(unit.flat.numel for unit in engine.zero.units.values())
    assert engine.tracker.now["gradients"] == 4 * numel


@for_each(
    ("bucket", "sizes", "shards", "overlap", "wanted"),
    [
        # (columns, slots, packs, row, packed): a bucket holds shards x columns elements, columns a multiple of 64
        (1024, [4096], 4, True, Buckets(256, 2, True, 256, 1024)),  # of each rank's 1024 elements, 256 at a time
        (1024, [4096], 4, False, Buckets(256, 1, True, 256, 1024)),
        (4096, [4096], 4, True, Buckets(1024, 1, False, 1024, 0)),  # the unit is sent without packing
        (4095, [4096], 4, True, Buckets(960, 2, True, 960, 3840)),
        (100, [4096], 4, True, Buckets(64, 2, True, 64, 256)),  # at least 64 columns
        (10**9, [640, 1280], 2, True, Buckets(640, 1, False, 640, 0)),  # no larger than the largest unit
    ],
)
def test_buckets_by_hand(bucket: int, sizes: list[int], shards: int, overlap: bool, wanted: Buckets) -> None:
    assert plan_buckets(bucket, [equal_ranges(size, shards) for size in sizes], 1, overlap) == wanted


def test_buckets_of_uneven_ranges_by_hand() -> None:
    """Rows of a bucket of 3 x 256: of ranges of 2048, 512 and 512 elements, they have 512, 128 and 128."""
    ranges = Range(0, 512), Range(1024, 3072), Range(512, 1024)
    found = plan_buckets(768, [ranges, equal_ranges(192, 3)], 1, True)
    assert found == Buckets(256, 2, True, 512, 768) and found.count(ranges) == 4
    assert plan_buckets(768, [ranges], 2, True) == Buckets(256, 2, True, 128, 768)
    rows = [found.rows(ranges, number) for number in range(4)]
    assert rows[0] == [(0, 128), (1024, 1536), (512, 640)] and rows[3] == [(384, 512), (2560, 3072), (896, 1024)]
    odd = Range(0, 64), Range(64, 320), Range(320, 320)  # rows begin at multiples of 64
    small = plan_buckets(192, [odd], 0, False)
    assert small == Buckets(64, 1, True, 64, 256) and small.count(odd) == 2
    assert [small.rows(odd, n) for n in (0, 1)] == [
        [(0, 64), (64, 256), (320, 320)],
        [(64, 64), (256, 320), (320, 320)],
    ]


def test_rows_of_a_table_are_padded_to_64_a_rank() -> None:
    """GPT-2's 50,257 rows: 50,304 on one rank, as in Megatron-LM's example of 786 x 64; 12,608 on each of four."""
    for vocab_size, tp, rows in ((50257, 1, 50304), (50257, 4, 12608), (128, 2, 64), (129, 2, 128), (101, 4, 64)):
        table = declare(replace(model_of("gpt2"), vocab_size=vocab_size), tp).kinds["token_embedding"].params[0]
        assert table.local({"tp": 0}, {"tp": tp}).stored == (rows, 64), (vocab_size, tp)


def test_a_flat_buffer_by_hand() -> None:
    """Every parameter begins at a multiple of 64; decayed first, replicated in the middle; the end divides by ranks."""
    tp = frozenset({"tp"})
    params = [
        FlatParam("norm", 10, False),
        FlatParam("matrix", 100, True, tp),
        FlatParam("bias", 64, False, tp),
        FlatParam("positions", 65, True),
        FlatParam("shared kv", 30, True, summed=tp),
    ]
    layout = flat_layout(params, 3)
    assert layout.windows == {
        "matrix": Range(0, 100),
        "positions": Range(128, 193),
        "shared kv": Range(256, 286),
        "norm": Range(320, 330),
        "bias": Range(384, 448),
    }
    assert (layout.decayed, layout.replicated("tp")) == (Range(0, 320), [Range(128, 384)])
    assert layout.sharded("tp") == [Range(0, 128), Range(384, 576)]
    assert layout.numel == 576  # 448, and then 3 x 64 divides it
    assert [*equal_ranges(layout.numel, 3)] == [(0, 192), (192, 384), (384, 576)]
    assert (layout.summed("tp", False), layout.summed("tp", True)) == ([Range(256, 320)], [Range(128, 384)])


def test_numbers_that_bytes_are_made_of() -> None:
    assert BYTES == {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
    assert COPY_DEPTH == 2 and NUMBER == 8
    assert [partition_numel(n, 4) for n in (1, 4, 5, 8)] == [1, 1, 2, 2]
    assert [ring_bytes(1000, n, passes) for n, passes in ((1, 2), (4, 1), (4, 2), (3, 1))] == [0, 750, 1500, 666]
    # master copy and two moments of 4 bytes; fp32 weights are their own master copy: 12 and 8 bytes an element
    found = {}
    for precision, trains in itertools.product(BYTES, (True, False)):
        run = Config(training=TrainingConfig(precision=precision), evaluation=EvaluationConfig(eval_only=not trains))
        rates = Rates.of(run, ADAMW)
        found[precision, trains] = rates.state, rates.optimizer
    assert found == {
        ("fp32", True): (4, 8),
        ("bf16", True): (4, 12),
        ("fp16", True): (4, 12),
        ("fp64", True): (8, 16),
        ("fp32", False): (4, 0),
        ("bf16", False): (4, 4),
        ("fp16", False): (4, 4),
        ("fp64", False): (8, 0),
    }
    # axis -> the kind that its bytes are counted as, where that is another name
    dense = {"data": "dp", "shard": "dp", "replica": "dp", "embedding": "pp", "world": "control", "host": "control"}
    assert TRAFFIC == dense | {"etp": "tp", "expert_shard": "dp", "expert_replica": "dp"}


def test_micro_batches_of_a_step() -> None:
    config = Config(training=TrainingConfig(micro_batch_size=3, global_batch_size=36))
    assert [config.micro_batches(dp) for dp in (1, 2, 6, 12)] == [12, 6, 2, 1]


# -- the plan of computation


@for_each(
    ("recompute", "input_gradient"),
    [
        ("none", 1.2),  # (24 h^2 + 2 x 4 s h) / (24 h^2 + 4 s h), with h = 8 and s = 12: (1536 + 768) / 1920
        ("selective", 1.3),  # half of attention's products again: 192 more
        ("full", 2.2),  # a whole forward more
    ],
)
def test_costs_of_a_blocks_passes(recompute: str, input_gradient: float) -> None:
    model = ModelConfig(2, 8, 0, 2, 12, 100)
    costs = pass_costs(declare(model), ActivationConfig(recompute))  # type: ignore[arg-type]
    assert costs == pytest.approx((1.0, input_gradient, 0.8))  # weights: 1536 / 1920
    # llama, 4 groups of 16 heads: 2 h^2 + 2 h 2 (h / 4) + 2 h^2 and 6 h f
    wide = ModelConfig(2, 64, 96, 16, 32, 1000, **of_family("llama"), num_query_groups=4)
    matrices, attention = 5 * 64**2 + 6 * 64 * 96, 4 * 32 * 64
    again = {"none": 0, "selective": attention / 2, "full": matrices + attention}[recompute]
    whole = matrices + attention
    wanted = 1.0, (matrices + 2 * attention + again) / whole, matrices / whole
    assert pass_costs(declare(wide), ActivationConfig(recompute)) == pytest.approx(wanted)  # type: ignore[arg-type]
    least = {"none": 1.0, "selective": 1.0, "full": 0.75}[recompute]  # a recomputed block takes 4 passes instead of 3
    ends = layer_costs(declare(wide), wide, ActivationConfig(recompute))  # type: ignore[arg-type]
    assert (ends.embedding, ends.head) == pytest.approx((2 * 64 / whole * least, 2 * 1000 * 64 / whole * least))
    assert set(ends.blocks) == {1.0}


@for_each(("tp", "summed"), [(1, 0), (2, 0), (4, 2 * 2 * 8 * 64 + 2 * 2 * 8)])
def test_gradients_that_are_summed_over_tp(tp: int, summed: int) -> None:
    """Two groups of keys and values on four ranks: a summand of their weight and bias on each."""
    specs = declare(model_of("llama"), tp).kinds["blocks.0"].params
    partial = [spec for spec in specs if spec.summed == {"tp"}]
    assert sum(math.prod(spec.shape) for spec in partial) == summed
    ranges = unit_layout(specs, {"tp": tp}, 1).summed("tp", False)
    assert sum(r.numel for r in ranges) == -(-summed // 64) * 64


def step_of(micro_batches: int = 2, layout: Layout | None = None, **groups: object) -> Program:
    config = replace(Config(model=ModelConfig(3, 64, 0, 4, 16, 128)), **groups)  # type: ignore[arg-type]
    return program(
        rank_spec(config, layout or Layout(dp=2), 0, declare),
        "1f1b",
        micro_batches,
    )


def test_slots_and_arenas_by_hand() -> None:
    """Kept inputs: 3 blocks of each micro-batch in flight, at most as many as stages. Weights: two layers at once."""
    kept = ActivationConfig("full", contiguous_checkpointing=True)
    assert step_of(5, activations=kept).num_slots == 3
    assert step_of(5, Layout(pp=3), activations=kept).num_slots == 3  # one block on a stage
    assert step_of(2, Layout(pp=3), activations=kept).num_slots == 2
    assert step_of(5, activations=replace(kept, contiguous_checkpointing=False)).num_slots == 0
    block = 12 * 64**2 + 13 * 64
    assert step_of(zero=ZeroConfig(3)).arena_numel == 2 * -(-block // 128) * 128
    assert step_of(zero=ZeroConfig(3, overlap_comm=False)).arena_numel == -(-block // 128) * 128
    assert [step_of(zero=ZeroConfig(stage)).arena_numel for stage in (0, 1, 2)] == [0, 0, 0]


def test_weight_gradients_that_wait_keep_these_bytes() -> None:
    """Inputs and gradients of four products, 16 T h; gradients of two norms and four biases, 13 h. fp32.

    Two contributions that share a tensor keep it once.
    """
    config = Config(model=ModelConfig(2, 64, 0, 4, 32, 100), training=TrainingConfig(micro_batch_size=2))
    assert trace_block(config, Layout(), "cpu").queued == 4 * (16 * 64 * 64 + 13 * 64)
    x, y = torch.zeros(8), torch.zeros(4)
    writes = [GradWriter(lambda *_: None, tensors) for tensors in ((x, y), (x[2:], y.view(2, 2)), (y,))]
    assert kept_bytes(writes) == 4 * (8 + 4) and kept_bytes(writes[2:]) == 16


def test_a_rank_as_its_programs_see_it() -> None:
    """Every flag that the passes read, at a value that is no default; the last of four ranks of the pipeline."""
    config = Config(
        model=ModelConfig(8, 16, 0, 2, 8, 100),
        training=TrainingConfig(freeze_parameters=("blocks.3.*", "token_embedding.*", "position_embedding.*")),
        parallel=ParallelConfig(sequence_parallel=True, zero_bubble_backlog=3),
        zero=ZeroConfig(3, overlap_comm=False, zero_gather_every="step"),
        activations=ActivationConfig("full", True, True, True),
    )
    layout = Layout(pp=4, dp=4, tp=2, shards=2, chunks=2, split=(1, 1, 1, 1, 1, 1, 1, 1))
    spec = rank_spec(config, layout, 3, declare)
    assert (spec.pipeline.rank, spec.pipeline.ranks, spec.overlap, spec.recompute) == (3, 4, False, True)
    assert (spec.partitioned, spec.on_host, spec.arena) == (True, True, True)
    assert (spec.tied, spec.pipeline.backlog, spec.pipeline.v_shaped) == ("token_embedding", 3, False)
    policy = ZeroPolicy(True, True, True, gathers_once=True)
    assert spec.groups == {"dense": ShardingGroup(policy, "shard", 2, "replica", 2)}
    assert (
        spec.pipeline.costs
        == pass_costs(declare(config.model), config.activations)
        != pass_costs(declare(config.model), ActivationConfig())
    )
    assert (spec.placement, spec.stages) == ((0, 1, 2, 3, 0, 1, 2, 3), [3, 7])
    # nothing before block 4 trains but blocks 0 to 2, so that a gradient passes through block 3
    layers = {layer.name: (layer.trains, layer.passes_gradient) for layer in spec.layers.values()}
    assert layers == {"blocks.3": (False, True), "blocks.7": (True, True), "head": (True, True)}
    first = rank_spec(config, layout, 0, declare)
    layers = {layer.name: (layer.trains, layer.passes_gradient) for layer in first.layers.values()}
    assert layers == {
        "token_embedding": (False, False),
        "position_embedding": (False, False),
        "blocks.0": (True, False),  # nothing before it trains
        "blocks.4": (True, True),
    }
    middle = rank_spec(
        replace(config, model=replace(config.model, untie_embeddings=True)),
        layout,
        1,
        declare,
    )
    assert middle.tied is None and rank_spec(config, layout, 1, declare).tied is None
    assert rank_spec(config, replace(layout, shards=4), 3, declare).groups["dense"].replicas == 1
    plain = rank_spec(
        replace(Config(), model=config.model),
        Layout(),
        0,
        declare,
    )
    assert (plain.overlap, plain.recompute, plain.partitioned, plain.on_host, plain.arena) == (True, *[False] * 4)
    assert (plain.tied, plain.pipeline.backlog) == (None, None)
