"""The account: sizes of a step by hand, one place that derives them, and tokens of a rank as ranges."""

import ast
import itertools
from collections import Counter
from pathlib import Path

import torch

from megazero.engine.model.context_parallel.dealt import DealtTokens
from megazero.engine.model.documents import Documents
from megazero.engine.model.layers.context import MicroBatchInfo, ResidualStream
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.layers import ROUTER_SUMS
from megazero.engine.plan.layout.topology import Coord, Layout
from megazero.engine.plan.layout.zero_policy import DENSE
from megazero.engine.plan.program.operations import (
    Backward,
    Forward,
    Gather,
    GradNorm,
    Op,
    Rebuild,
    Reduce,
    ReduceReplicas,
    Send,
    SumReplicated,
    SumTied,
    Sync,
    Update,
)
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.flags.cli import parse
from megazero.flags.flag_names import with_values
from megazero.flags.resolve import resolve
from megazero.planner.bytes.estimate import estimate, stage_bytes, stage_moments
from megazero.planner.bytes.statistics import StatisticsSizes, block_rows
from megazero.planner.sizes import (
    LayerSizes,
    Moved,
    StepSizes,
    hidden_bytes,
    kept_input_bytes,
    keys_bytes,
    least_held,
    logits_bytes,
)
from megazero.planner.state_shares import Share, States
from megazero.planner.trace.pretend import pretend_mesh
from tests.helpers.table import for_each

ROOT = Path(__file__).resolve().parents[3]
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 24 --vocab-size 500 --micro-batch-size 4 "
    "--precision bf16 --grad-dtype fp32 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--global-batch-size 96"
)


def sizes_of(flags: str, shard_rank: int | None = None, layers: dict[str, LayerSizes] | None = None) -> StepSizes:
    config, layout = resolve(parse(f"{FLAGS} {flags}".split()), 16, 0, declare)
    places = None if shard_rank is None else {"shard": shard_rank, "cp": 0}
    return StepSizes(config, layout, rank_spec(config, layout, 0, declare), layers, places)


def test_every_operation_moves_its_buffer_along_its_axis() -> None:
    """tp 2, pp 2, dp 4 as two copies of two shards; w 2 and g 4 bytes; b s h = 4 x 24 x 64."""
    sizes = sizes_of("--zero-stage 1 --zero-shard-size 2 --recompute full --partition-activations")
    unit = sizes.numel["blocks.0"]
    wanted: list[tuple[Op, list[Moved]]] = [
        (Gather("blocks.0"), [Moved("shard", "all-gather", 2 * unit)]),
        (Sync("blocks.0"), [Moved("shard", "all-gather", 2 * unit)]),
        (Reduce("blocks.0"), [Moved("shard", "reduce-scatter", 4 * unit)]),
        (ReduceReplicas("blocks.0"), [Moved("replica", "all-reduce", 4 * unit // 2)]),
        (SumTied("token_embedding"), [Moved("embedding", "all-reduce", 2 * sizes.numel["token_embedding"])]),
        (Send("x", 1, 0), [Moved("pp", "message", 2 * 4 * 24 * 64)]),
        (Rebuild("blocks.0", 0), [Moved("tp", "all-gather", 2 * 4 * 24 * 64)]),
        (GradNorm(), [Moved(axis, "all-reduce", 8, control=True) for axis in ("tp", "pp", "shard")]),
        (Update("blocks.0"), []),
    ]
    for op, moves in wanted:
        assert sizes.moves(op) == tuple(moves), op
    assert sizes.moves(GradNorm())[0].kind == "control" and sizes.traffic(GradNorm()) == (("control", 8),) * 3
    assert sizes.traffic(SumTied("token_embedding")) == (("pp", 2 * sizes.numel["token_embedding"]),)
    assert sizes.traffic(Reduce("blocks.0")) == (("dp", 2 * unit),)
    whole = sizes_of("--zero-stage 0")
    assert whole.moves(Reduce("blocks.0")) == (Moved("shard", "all-reduce", 4 * whole.numel["blocks.0"]),)
    assert [move.axis for move in whole.moves(GradNorm())] == ["tp", "pp"]
    assert [move.axis for move in whole.agreed()] == ["data", "data", "pp"]


def test_ranks_agree_on_targets_losses_and_routers_by_hand() -> None:
    """Two corpora by name and a further head: 3 numbers; in 3 layers and the head 6 experts and sums; 8 bytes each."""
    flags = "--architecture mixtral --num-experts 6 --moe-layer-freq [0,1,1,1] --mtp-num-layers 1 --data-path 1 a 3 b"
    sizes = sizes_of(f"{flags} --tensor-model-parallel-size 2")
    losses, routers = 3 * 8, 4 * (6 + ROUTER_SUMS) * 8
    moved = [(move.axis, move.collective, move.num_bytes, move.control) for move in sizes.agreed()]
    assert moved == [
        *[(axis, "all-reduce", losses, True) for axis in ("data", "data", "pp")],
        *[(axis, "all-reduce", routers, True) for axis in ("data", "tp", "pp")],
    ]


def test_tokens_of_a_rank_by_hand() -> None:
    """tp 2, cp 3, pp 4, dp 5, micro-batch 7 of 24 tokens: each rank has 56 tokens, and half of 6 heads of keys of 8."""
    flags = (
        "--architecture llama --num-layers 4 --hidden-size 96 --num-attention-heads 12 --num-query-groups 6 "
        "--seq-length 24 --vocab-size 500 --micro-batch-size 7 --precision bf16 --context-parallel-size 3 "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --recompute full"
    )
    config, layout = resolve(parse(flags.split()), 120, 0, declare)
    found = (each(config, layout) for each in (hidden_bytes, kept_input_bytes, keys_bytes, logits_bytes))
    assert tuple(found) == (56 * 96 * 2, 56 * 96 * 2, 2 * 56 * 3 * 8 * 2, 56 * 500 * 2 // 2)
    halves = with_values(config, {"sequence-parallel": True}), with_values(config, {"partition-activations": True})
    assert [hidden_bytes(each, layout) for each in halves] == [56 * 96 * 2 // 2, 56 * 96 * 2]
    assert [kept_input_bytes(each, layout) for each in halves] == [56 * 96 * 2 // 2] * 2


def test_statistics_of_layers_by_hand() -> None:
    """A rank scores 8 queries of a sample's 24 tokens with all keys: 6 heads of 2 bytes and a mask; keys of 3 heads
    of 8 are gathered. Sums of three kinds and maxima of two, of 8 bytes, of 4 blocks and both ends.
    """
    flags = (
        "--architecture llama --num-layers 4 --hidden-size 96 --num-attention-heads 12 --num-query-groups 6 "
        "--seq-length 24 --vocab-size 500 --micro-batch-size 7 --precision bf16 --context-parallel-size 3 "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --stats-interval 5"
    )
    config, layout = resolve(parse(flags.split()), 120, 0, declare)
    first, second = (StatisticsSizes(config, layout, Coord(pp=3, dp=dp, cp=2, tp=1), each=2) for dp in (0, 1))
    assert (first.scores, second.scores) == (8 * 24 * (6 * 2 + 1), 0)
    assert first.gathered() == Moved("cp", "all-gather", 24 * 3 * 8 * 2)
    assert [move.num_bytes for move in first.reduced()] == [3 * 6 * 8, 2 * 6 * 8]
    assert first.copied(numel=10, state=4) == 40
    assert (block_rows(6, 1 << 20), block_rows(1 << 20, 1 << 20)) == (2, 1)


def test_ranks_of_a_shard_sum_the_replicated_part_that_they_own() -> None:
    """Norms and biases behind a sum, with sequence parallelism: the parts add up; without a rank, their mean counts."""
    flags = "--zero-stage 2 --sequence-parallel"
    each = [sum(m.num_bytes for m in sizes_of(flags, rank).moves(SumReplicated("blocks.1"))) for rank in range(4)]
    whole = sum(m.num_bytes for m in sizes_of("--zero-stage 0 --sequence-parallel").moves(SumReplicated("blocks.1")))
    assert sum(each) == whole == 4 * 6 * 64 and len(set(each)) > 1
    assert sum(m.num_bytes for m in sizes_of(flags).moves(SumReplicated("blocks.1"))) == whole // 4


def test_traffic_inside_a_layer_is_counted_by_axis() -> None:
    layer = LayerSizes(Counter(tp=5, shard=3), Counter(), Counter(), 0, 0, (), 0, 0)
    sizes = sizes_of("", layers={"blocks.0": layer})
    assert sizes.traffic(Forward("blocks.0", 0, True)) == (("tp", 5), ("dp", 3))
    assert sizes.traffic(Backward("blocks.0", 0)) == ()


@for_each("stage", range(4))
def test_states_are_shares_of_the_elements(stage: int) -> None:
    """Parameters 2, optimizer 12, gradients 4 bytes an element; over four ranks from stages 3, 1, 1 on."""
    config, layout = resolve(parse(f"{FLAGS} --zero-stage {stage}".split()), 16, 0, declare)
    states = States.of(config, layout)
    ranks = [4 if stage >= first else 1 for first in (3, 1, 1, 2)]
    expected = [Share(each, n) for each, n in zip((2, 12, 4, 4), ranks, strict=True)]
    assert list(states) == [*expected, Share(16, ranks[1], 0.0), Share(0, ranks[1], 0.0)]
    assert str(states.optimizer) == ("12 Psi / 4" if stage else "12 Psi")
    assert states.at_rest(64) == {"parameters": 2 * 64 // ranks[0], "optimizer": 12 * 64 // ranks[1]}


@for_each("stage", range(4))
def test_states_in_host_memory_are_a_share_of_the_elements(stage: int) -> None:
    """Masters, moments and a buffer of three quarters; gradients that are whole stay on the device."""
    flags = f"{FLAGS} --zero-stage {stage} --optimizer-cpu-offload --optimizer-offload-fraction 0.75"
    states = States.of(*resolve(parse(flags.split()), 16, 0, declare))
    ranks = 4 if stage else 1
    assert states[1:3] == (Share(12, ranks, 0.25), Share(4, ranks, 0.25))
    assert states.accumulated == (Share(4, 4, 0.25) if stage >= 2 else Share(4))
    assert states.host == Share(16, ranks, 0.75) and states.host.of(64) == 16 * 48 // ranks
    assert str(states.optimizer) == ("0.25 x 12 Psi / 4" if stage else "0.25 x 12 Psi")
    in_files = States.of(*resolve(parse(f"{flags} --optimizer-nvme-offload /tmp".split()), 16, 0, declare))
    assert in_files == states._replace(host=Share(0, ranks, 0.75), nvme=states.host)


def test_the_least_that_is_held() -> None:
    """The gradients, or the inputs of two blocks and the logits: of one micro-batch, under gpipe of all six inputs."""
    for flags, inputs in (("", 2), ("--pipeline-schedule gpipe", 2 * 6)):
        config, layout = resolve(parse(f"{FLAGS} {flags}".split()), 16, 0, declare)
        hidden, logits = 2 * 4 * 24 * 64, 2 * 4 * 24 * 500 // 2
        rest = {"parameters": 2 * 64, "optimizer": 3 * 64}
        assert least_held(config, layout, {DENSE: 64}, 2, last=True) == rest | {
            "activations": inputs * hidden,
            "logits": logits,
        }
        many = 4 * inputs * hidden
        held = least_held(config, layout, {DENSE: many}, 2, last=False)
        assert held["gradients"] == many and "activations" not in held


def test_a_stages_peak_is_of_one_instant() -> None:
    """It is no less than at any moment after an operation, and than the engine's own; its kinds add up to it.

    In 16 bit, an update takes a copy of the gradients, which no moment after an operation has.
    """
    base = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --vocab-size 64"
    narrow, evaluates = "--precision bf16 --grad-dtype bf16 --recompute full", "--zero-stage 3 --eval-only --load x"
    for flags in ("--zero-stage 2 --global-batch-size 6", narrow, evaluates):
        config, layout = resolve(parse(f"{base} {flags}".split()), 2, 0, declare)
        found = stage_bytes(config, layout, 0, "cpu")
        most = max(sum(moment.held) for moment in stage_moments(config, layout, 0, "cpu"))
        assert found.peak == sum(found.at_peak.values()) >= max(most, found.memory["peak"])
        assert (found.memory, found.traffic) == estimate(config, layout, 0)


def test_bytes_are_derived_in_one_place() -> None:
    """In planner/, `sizes` alone computes the bytes of a type or a ring, and the sharded states."""
    for path in sorted({*(ROOT / "megazero/planner").rglob("*.py")} - {ROOT / "megazero/planner/sizes.py"}):
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in imports for alias in node.names}
        assert not names & {"BYTES", "ring_bytes", "partition_numel"} and ".for_stage(" not in path.read_text(), path


def test_a_rank_may_hold_several_ranges_of_tokens() -> None:
    """Two samples of eight tokens, dealt to two ranks; documents of three and five tokens.

    The second rank of tp has the second half of the rows of the first rank of cp: those of sample 7.
    """
    mesh = pretend_mesh(Layout(tp=2), 1, torch.device("cpu"), needs_staging_buffer=False)
    ids, stream = torch.zeros(2, 8, dtype=torch.int64), ResidualStream(mesh.tp, sharded=True)
    own = ((range(1), range(3, 6)), (range(1, 2), range(4, 7)))
    other = ((range(1, 3), range(6, 8)), (range(1), range(2, 4), range(7, 8)))
    dealt = DealtTokens.of(tuple(zip(own, other, strict=True)), 0, 8)
    info = MicroBatchInfo.of(ids, (6, 7), stream, training=True, dealt=dealt)
    assert [tuple(row) for row in info.rows] == [(7, 1, 1), (7, 4, 3)]
    assert [position for run in info.runs for position in run] == [1, 4, 5, 6]
    assert info.head_positions is not None and info.head_positions.tolist() == [[0, 3, 4, 5], [1, 4, 5, 6]]
    documents = Documents.of(torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3]]).repeat(2, 1))
    bounded = MicroBatchInfo.of(ids, (6, 7), stream, training=True, position_documents=documents, dealt=dealt)
    assert list(itertools.chain(*bounded.runs)) == [1, 1, 2, 3]
    assert bounded.head_positions is not None and bounded.head_positions.tolist() == [[0, 0, 1, 2], [1, 1, 2, 3]]


def test_a_stream_that_is_sharded_has_its_part_of_the_tokens() -> None:
    mesh = pretend_mesh(Layout(tp=2), 1, torch.device("cpu"), needs_staging_buffer=False)
    assert ResidualStream(mesh.tp, sharded=True).tokens(24) == range(12, 24)
    assert ResidualStream(mesh.tp, sharded=False).tokens(24) == range(24)
