"""`estimate` against closed formulas, written down here from the papers and docs: nothing walks a plan.

Rajbhandari et al. 2020 (states, Pa), Narayanan et al. 2021 (traffic of tensor and pipeline parallelism), Korthikanti et
al. 2022 (sequence parallelism). w and g are the bytes of a weight and of a gradient, Psi a rank's elements, N the ranks
that share a copy, M the micro-batches.
"""

import itertools
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import ActivationConfig, Config, ModelConfig, ParallelConfig, TrainingConfig, ZeroConfig
from megazero.flags.resolve import resolve
from megazero.planner.bytes.estimate import estimate
from megazero.planner.layouts import rank_places
from tests.helpers.table import for_each


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class Closed:
    """The formulas, for one rank."""

    config: Config
    layout: Layout
    stage: int

    def __getattr__(self, name: str) -> Any:
        """Short names of the quantities in the formulas."""
        c, lay = self.config, self.layout
        values = {
            "w": {"fp32": 4, "bf16": 2, "fp16": 2}[c.training.precision],
            "g": {"fp32": 4, "bf16": 2, "fp16": 2}[c.training.grad_dtype],
            "N": c.zero.zero_shard_size or lay.dp * lay.cp,
            "M": c.training.global_batch_size // (c.training.micro_batch_size * lay.dp),
            "zero": c.zero.zero_stage if (c.zero.zero_shard_size or lay.dp * lay.cp) > 1 else 0,
            "b": c.training.micro_batch_size,
            "s": c.model.seq_length,
            "h": c.model.hidden_size,
            "L": c.model.num_layers,
            "t": lay.tp,
            "c": lay.cp,
            "sp": c.parallel.sequence_parallel,
            "full": c.activations.recompute == "full",
            "first": self.stage == 0,
            "last": self.stage == lay.pp - 1,
            "tied": not c.model.untie_embeddings,
        }
        if name not in values:
            raise AttributeError(name)
        return values[name]

    @property
    def blocks(self) -> int:
        """Count the stage's blocks: the first stages have one more where L / pp leaves a rest."""
        return self.L // self.layout.pp + (self.stage < self.L % self.layout.pp)

    @property
    def vocabulary(self) -> int:
        """Rows of the token table on a rank, in multiples of 64."""
        return up(math.ceil(self.config.model.vocab_size / self.t), 64)

    def flat(self, sizes: list[int]) -> int:
        """Each parameter begins at a multiple of 64 elements; the whole is a multiple of 64 N."""
        return up(sum(up(size, 64) for size in sizes), 64 * self.N)

    def units(self) -> dict[str, int]:
        """Elements of the stage's units, by kind of unit, padding included."""
        h, f, t = self.h, 4 * self.h, self.t
        block = [3 * h * h // t, h * h // t, f * h // t, f * h // t, h, h, h, h, 3 * h // t, f // t, h, h]
        found = {f"block {i}": self.flat(block) for i in range(self.blocks)}
        table = self.vocabulary * h
        if self.first or (self.last and self.tied):
            found["token"] = self.flat([table])
        if self.first:
            found["position"] = self.flat([self.s * h])
        if self.last:
            found["head"] = self.flat([h, h] + ([] if self.tied else [table]))
        return found

    @property
    def tokens(self) -> int:
        """Tokens of a sample on the first rank of cp; tp must divide those of all samples in sequence parallelism."""
        unit = self.t // math.gcd(self.t, self.b) if self.sp else 1
        return math.ceil(self.s / unit / self.c) * unit

    @property
    def psi(self) -> int:
        return sum(self.units().values())

    @property
    def live(self) -> int:
        """Micro-batches between their forward and their backward."""
        gpipe = self.config.parallel.pipeline_schedule == "gpipe"
        return self.M if gpipe else min(self.M, self.layout.pp - self.stage)

    def kept(self) -> int:
        """The inputs kept for recompute: w b s h for each block and micro-batch in flight; with Pa 1/t of it."""
        elements = self.b * self.tokens * self.h
        parts = self.t if self.sp or self.config.activations.partition_activations else 1
        return self.live * self.blocks * self.w * math.ceil(elements / parts) * self.full

    def memory(self) -> dict[str, int]:
        """Return the bytes that have a closed form in every layout."""
        on_host = self.config.activations.checkpoint_in_cpu
        owners = self.N if self.zero >= 1 else 1
        return {
            "parameters": self.w * self.psi // (self.N if self.zero == 3 else 1),
            "optimizer": (12 if self.w == 2 else 8) * self.psi // owners,
            "gradients": self.g * self.psi // owners,
            "activation_checkpoints": 0 if on_host else self.kept(),
            "host": self.kept() if on_host else 0,
            "logits": self.w * min(self.chunk, self.b * self.tokens) * self.vocabulary * self.last,
        }

    @property
    def chunk(self) -> int:
        """Tokens whose logits exist at once: given, or those of 32 MB, at least 512; all, if sums would be rounded."""
        given, rows = self.config.activations.loss_chunk_tokens, math.ceil(self.config.model.vocab_size / self.t)
        chosen = 0 if self.g == 2 else max(512, 2**25 // (rows * self.w))
        return (given if given >= 0 else chosen) or self.b * self.tokens

    def adjacent(self, layers: list[list[str]]) -> int:
        """The most elements of a layer's units or, with overlap, of two layers that follow each other."""
        sizes = [sum(self.units()[unit] for unit in layer) for layer in layers]
        pairs = [a + b for a, b in itertools.pairwise(sizes)] if self.config.zero.overlap_comm else []
        return max(sizes + pairs)

    def stage_3_buffers(self, staged: bool) -> int:
        """Buffers of a single pipeline stage whose weights are gathered for every use, and reduced after each.

        The arena: the weights that are computed with and, with overlap, the next layer's, which are on their way. The
        order is token table, positions, blocks, head (with a tied table), and back; backward begins where forward ends.

        Gradients: those that are made and, with overlap, the layer's before, which are being reduced. A unit larger
        than a bucket is copied into buckets, and its gradients are freed at once. A tied table's are made by the head
        and by the lookup, so that they exist throughout; those of two micro-batches never exist at once.

        Buckets: as many columns as the largest unit has per rank, or as --reduce-bucket-size allows.
        """
        units = self.units()
        blocks = [[f"block {i}"] for i in range(self.blocks)]
        arena = self.adjacent([["token"], ["position"], *blocks, ["head", "token"] if self.tied else ["head"]])
        columns = min(max(units.values()), max(64 * self.N, self.config.zero.reduce_bucket_size)) // self.N // 64 * 64
        large = {name for name, size in units.items() if size > columns * self.N}
        made = [["head"], *reversed(blocks), ["position"], ["token"]]
        gradients = 0
        for before, (name,) in zip([made[-1] if self.M > 1 else [], *made], made, strict=False):
            there = {name} | ({"token"} if self.tied else set())
            if self.config.zero.overlap_comm:
                there |= {unit for unit in before if unit not in large}
            gradients = max(gradients, sum(units[unit] for unit in there))
        # In 16 bit, the update takes a copy in fp32 of a unit's reduced gradients.
        update = 4 * max(units.values()) // self.N * (self.g == 2)
        buckets = 2 if large and self.config.zero.overlap_comm else 1
        scratch = columns * (self.N - 1 if staged else 1)
        packed = columns * self.N * bool(large)
        return self.w * arena + max(self.g * gradients, update) + self.g * buckets * (scratch + packed)

    def dp(self) -> float:
        """2 g Psi; (g + w) Psi; (M g + w) Psi; (G w + M g) Psi, G gathers. Between replicas 2 g Psi / N."""
        n, m = self.N, self.M
        total = 0.0
        for name, psi in self.units().items():
            gathers = 2 * m if name.startswith("block") or (name == "token" and self.first and self.last) else m
            gathers -= self.joined(name)
            if name == "token" and not self.tied:
                gathers = m
            once = self.config.zero.zero_gather_every == "step"
            reductions = 1 if self.config.zero.zero_reduce_every == "step" else m
            total += (
                psi
                * {
                    0: 2 * self.g,
                    1: self.g + self.w,
                    2: reductions * self.g + self.w,
                    3: (1 if once else gathers) * self.w + reductions * self.g,
                }[self.zero]
            )
        replicas = self.layout.dp * self.c // n
        owned = self.psi / n if self.zero else self.psi
        return total * (n - 1) / n + 2 * self.g * owned * (replicas - 1) / replicas

    def joined(self, name: str) -> int:
        """Gathers that 1F1B saves, since the unit is used twice in a row with only messages in between.

        After w warm-up forwards come M - w pairs of a forward and a backward. In a pair, the last block of a stage that
        is not the last is used twice in a row; between pairs, the first block of a stage that is not the first is. A
        block that is alone on its stage, between others, is gathered once.
        """
        if name == "block 0" and self.blocks == 1 and not (self.first or self.last):
            return 2 * self.M - 1
        w = min(self.layout.pp - self.stage - 1, self.M)
        found = 0
        if name == f"block {self.blocks - 1}" and not self.last:
            found += max(self.M - w, 1)
        if name == "block 0" and not self.first:
            found += max(self.M - w - 1, 0)
        return found

    def tp(self) -> float:
        """In passes of w b s h x (t-1)/t: an all-reduce is two, a gather or a reduce-scatter one.

        A block has two sums forward and two backward (Narayanan); with sequence parallelism a gather and a
        reduce-scatter for each, and two more gathers, of inputs that are not kept whole (Korthikanti). Full recompute
        runs all but the last sum again. The head has one sum of gradients, and with
        sequence parallelism one gather; the token table one sum forward. The loss adds up
        12 bytes a token: maxima, exponentials and picked logits. With sequence parallelism the gradients of replicated
        weights (norms, biases after a sum, positions) are summed once; the formula is a mean, because owners differ.
        """
        ring = (self.t - 1) / self.t
        block = 10 if self.sp else 8
        if self.full:
            block += 3 if self.sp else 2
            block += bool(self.config.activations.partition_activations)
        passes = block * self.blocks
        passes += self.first * 2  # with sequence parallelism a reduce-scatter, and the gather of its gradient
        passes += self.last * 2
        loss = self.last * 2 * 12 * self.b * self.s / self.c
        total = self.M * ring * (passes * self.w * self.b * self.s / self.c * self.h + loss)
        if self.sp:
            each = up(self.h, 64)
            replicated = 6 * each * self.blocks + self.first * up(self.s * self.h, 64) + self.last * 2 * each
            total += 2 * ring * self.g * replicated / (self.N if self.zero else 1)
        return total

    def cp(self) -> int:
        """Keys and values of the other ranks, of as many tokens as the fullest rank has, and as many gradients.

        Gradients are fp32 if weights are 16 bit. All recompute, and a ring, gather keys once more; both, twice more.
        """
        again = (self.config.activations.recompute != "none") + (self.config.parallel.cp_exchange == "ring")
        if self.config.activations.recompute == "selective":
            again = 1
        elements = 2 * (self.c - 1) * self.b * self.tokens * self.h // self.t
        return self.M * self.blocks * elements * ((1 + again) * self.w + max(4, self.w))

    def pp(self) -> float:
        """Each boundary is crossed by x and by dx; the tied table's gradient is summed over both ends."""
        if self.layout.pp == 1:
            return 0
        message = self.w * self.b * self.tokens * self.h / (self.t if self.sp else 1)
        ends = (
            self.units()["token"] / (self.N if self.zero else 1) * self.g
            if (self.tied and "token" in self.units())
            else 0
        )
        return self.M * message * (2 - self.first - self.last) + ends


def draw(seed: int) -> tuple[Config, Layout]:
    """A legal configuration."""
    r = random.Random(seed)
    pp, dp, tp = r.choice([1, 1, 2, 3, 4]), r.choice([1, 2, 4, 8]), r.choice([1, 2, 4])
    zero = r.choice([0, 1, 2, 3])
    shard = r.choice([0, 0, 2]) if dp > 2 and zero else 0
    bucket = random.Random(-1 - seed).choice([40_000_000, 40_000_000, 1, 3000])
    precision = r.choice(["fp32", "bf16"])
    recompute = r.choice(["none", "selective", "full", "full"])
    sp = tp > 1 and r.random() < 0.4
    full = recompute == "full"
    micro, m = r.choice([4, 8]), r.choice([1, 2, 3, 7])
    context = random.Random(1000 + seed)
    cp = 1 if shard else context.choice([1, 2, 3])
    ring = cp > 1 and precision == "fp32" and context.random() < 0.5
    config = Config(
        model=ModelConfig(
            num_layers=r.randrange(pp, 7),
            hidden_size=8 * r.randrange(2, 9) * 4,
            num_attention_heads=8,
            seq_length=r.randrange(3, 40),
            vocab_size=r.randrange(100, 1000),
            untie_embeddings=r.random() < 0.4,
        ),
        training=TrainingConfig(
            micro_batch_size=micro,
            global_batch_size=micro * m * dp,
            precision=precision,
            grad_dtype=r.choice(["fp32", precision]),
        ),
        parallel=ParallelConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            pipeline_schedule=r.choice(["1f1b", "gpipe"]) if pp > 1 else "1f1b",
            sequence_parallel=sp,
            context_parallel_size=cp,
            cp_exchange="ring" if ring else "auto",
        ),
        zero=ZeroConfig(
            zero_stage=zero, zero_shard_size=shard, overlap_comm=r.random() < 0.7, reduce_bucket_size=bucket
        ),
        activations=ActivationConfig(
            recompute=recompute,
            partition_activations=full and tp > 1 and not sp and r.random() < 0.5,
            checkpoint_in_cpu=full and r.random() < 0.3,
            contiguous_checkpointing=full and r.random() < 0.3,
            loss_chunk_tokens=r.choice([-1, 0, 1, 13]),
        ),
    )
    if zero >= 2 and r.random() < 0.3:
        once = {"zero_reduce_every": "step"} | ({"zero_gather_every": "step"} if zero == 3 else {})
        config = replace(config, zero=replace(config.zero, **once))
    return resolve(config, pp * dp * cp * tp, 0, declare)


@pytest.mark.long
@pytest.mark.parametrize(
    "seeds",
    [
        range(10),
        pytest.param(range(10, 30), marks=pytest.mark.second),
        pytest.param(range(30, 60), marks=pytest.mark.slow),
    ],
)
def test_estimate_is_the_closed_formulas(seeds: range) -> None:
    """On the first rank of every stage. Sums of rounded-down terms: a byte per collective is forgiven.

    With gloo; the next test but one has the difference of NCCL.
    """
    for seed in seeds:
        config, layout = draw(seed)
        for stage in range(layout.pp):
            rank = next(rank for rank in range(layout.world_size) if layout.coord(rank).pp == stage)
            memory, traffic = estimate(config, layout, rank)
            closed = Closed(config, layout, stage)
            where = f"seed {seed}, stage {stage}: {config}"
            for kind, wanted in closed.memory().items():
                assert memory[kind] == wanted, (kind, where)
            assert traffic["cp"] == closed.cp(), where
            for kind, wanted in (("dp", closed.dp()), ("pp", closed.pp())):
                assert abs(traffic[kind] - wanted) <= 20 * closed.M * (closed.L + 3), (kind, where)
            sharers = [rank for rank in range(layout.world_size) if shares_copy(layout, rank, stage)]
            found = sum(estimate(config, layout, rank).traffic["tp"] for rank in sharers) / len(sharers)
            assert abs(found - closed.tp()) <= 20 * closed.M * (closed.L + 3), ("tp", where)


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 30), marks=pytest.mark.second)])
@for_each("staged", [True, False])
def test_buffers_at_stage_3(staged: bool, seeds: range) -> None:
    for seed in seeds:
        r = random.Random(seed)
        micro_batches, dp, precision = r.choice([1, 3]), r.choice([2, 4]), r.choice(["fp32", "bf16"])
        model = ModelConfig(
            num_layers=r.randrange(1, 5),
            hidden_size=8 * r.randrange(2, 9),
            num_attention_heads=8,
            seq_length=r.randrange(3, 400),
            vocab_size=r.choice([100, 300, 3000]),
            untie_embeddings=r.random() < 0.5,
        )
        config = Config(
            model=model,
            training=TrainingConfig(2, 2 * micro_batches * dp, precision=precision, grad_dtype=precision),
            zero=ZeroConfig(3, overlap_comm=r.random() < 0.6, reduce_bucket_size=r.choice([1, 9000, 40_000_000])),
            parallel=ParallelConfig(tensor_model_parallel_size=r.choice([1, 2])),
            activations=ActivationConfig(recompute=r.choice(["none", "full"])),
        )
        config, layout = resolve(config, dp * config.parallel.tensor_model_parallel_size, 0, declare)
        found = estimate(config, layout, 0, staged).memory["buffers"]
        assert found == Closed(config, layout, 0).stage_3_buffers(staged), (seed, config)


def shares_copy(layout: Layout, rank: int, stage: int) -> bool:
    """Return whether a rank is one of the first N of a stage, which own its gradients together."""
    coord = layout.coord(rank)
    return (coord.pp, coord.tp) == (stage, 0) and rank_places(layout, rank)["data"] < layout.shard


@pytest.mark.second
@pytest.mark.long
def test_what_nccl_and_a_gpu_take_instead() -> None:
    """On gloo a reduce-scatter needs scratch for messages of the others, on NCCL as large as its result. Copies to the
    host use two device buffers each way on a GPU, and none on a CPU. Nothing else differs."""
    seen = set()
    for seed in range(24):
        config, layout = draw(seed)
        if config.parallel.cp_exchange == "ring":  # in fp32, a GPU has none
            continue
        closed = Closed(config, layout, 0)
        gloo, nccl = (estimate(config, layout, 0, needs_staging_buffer) for needs_staging_buffer in (True, False))
        assert gloo.traffic == nccl.traffic
        # The elements of every rank's range in a bucket; there are two buckets if one is packed while one is sent.
        largest = max(closed.units().values()) // closed.N
        columns = min(largest, max(64, config.zero.reduce_bucket_size // closed.N // 64 * 64))
        buckets = 2 if config.zero.overlap_comm and largest > columns else 1
        less = buckets * columns * (closed.N - 2) * closed.g if closed.zero >= 1 else 0
        more = 4 * closed.kept() // (closed.live * closed.blocks) if config.activations.checkpoint_in_cpu else 0
        assert nccl.memory["buffers"] - gloo.memory["buffers"] == more - less, config
        assert nccl.memory["peak"] - gloo.memory["peak"] == more - less, config
        others = set(gloo.memory) - {"buffers", "peak"}
        assert all(nccl.memory[kind] == gloo.memory[kind] for kind in others)
        seen.add((less > 0 and buckets, more > 0))
    assert len(seen) == 6  # every combination was among them


def test_the_peak_of_a_single_process() -> None:
    """The states, and the logits: with two micro-batches, all gradients and the second one's logits exist at once."""
    model = ModelConfig(num_layers=3, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=300)
    config = Config(model=model, training=TrainingConfig(micro_batch_size=2, global_batch_size=4))
    config, layout = resolve(config, 1, 0, declare)
    closed, memory = Closed(config, layout, 0), estimate(config, layout).memory
    assert memory["buffers"] == 0
    assert memory["peak"] == 16 * closed.psi + 4 * 2 * 32 * 320


@pytest.mark.second
@pytest.mark.long
@for_each("needs_staging_buffer", [True, False])
def test_the_peak_lies_between_its_bounds(needs_staging_buffer: bool) -> None:
    for seed in range(40):
        config, layout = draw(seed)
        memory = estimate(config, layout, 0, needs_staging_buffer).memory
        at_rest = memory["parameters"] + memory["optimizer"] + memory["gradients"]
        kinds = at_rest + memory["buffers"] + memory["activation_checkpoints"] + memory["logits"]
        assert at_rest <= memory["peak"] <= kinds, config
