"""The layouts that a search compares: sizes of axes, schedule, ZeRO, recompute, micro-batch."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from megazero.engine.options.batch_sizes import micro_batches
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.schedule.schedules import SCHEDULES as ORDERS
from megazero.flags.batch_ramp import data_parallel_size
from megazero.flags.config import Config, ModelConfig
from megazero.flags.flag_names import with_values
from megazero.flags.limit_checks import divisors
from megazero.flags.validate import plans
from megazero.flags.validate_model import tensor_parallel_sizes
from megazero.planner.time.devices import Device

MOST_STAGES = 64
LEAST_DEALT = 4096  # tokens of a sample on a context-parallel rank: of fewer, tensor parallelism is as good
MOST_OF_A_V = 512  # stages x micro-batches: finding the order of a longer V takes many seconds
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
FEW_SAMPLES = 8  # of a replica: fewer may be one micro-batch, such as 3
# The fewest chunks first
SCHEDULES = sorted(((name, v) for name, order in ORDERS.items() for v in order.tried), key=lambda each: each[1])
Given = Mapping[str, Any]  # flags that keep their value, without dashes
T = TypeVar("T")


class Sizes(NamedTuple):
    """The axes that divide a stage's weights and tokens. etp: 0: tp."""

    tp: int
    cp: int
    ep: int = 1
    etp: int = 0


class Candidate(NamedTuple):
    """The flags of a layout."""

    tp: int
    cp: int
    pp: int
    schedule: str
    chunks: int
    zero_stage: int
    shard: int  # --zero-shard-size
    recompute: str
    partition: bool
    sequence: bool
    micro_batch: int
    ep: int = 1
    etp: int = 0

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.tp, self.cp, self.ep, self.etp)

    def flags(self, config: Config) -> dict[str, Any]:
        """Return these flags, by their names without dashes. Inputs kept for recompute stay where `config` has them."""
        activations, full = config.activations, self.recompute == "full"
        return {
            "tensor-model-parallel-size": self.tp,
            "context-parallel-size": self.cp,
            "pipeline-model-parallel-size": self.pp,
            "pipeline-schedule": self.schedule,
            "pipeline-split": "",
            "virtual-pipeline-stages": self.chunks,
            "sequence-parallel": self.sequence,
            "zero-stage": self.zero_stage,
            "zero-shard-size": self.shard,
            "recompute": self.recompute,
            "partition-activations": self.partition,
            "checkpoint-in-cpu": activations.checkpoint_in_cpu and full,
            "contiguous-checkpointing": activations.contiguous_checkpointing and full,
            "micro-batch-size": self.micro_batch,
            "expert-model-parallel-size": self.ep,
            "expert-tensor-parallel-size": self.etp,
        }

    def apply(self, config: Config, given: Given | None = None) -> Config:
        """Return `config` with these flags; those in `given` keep their value."""
        return as_given(with_values(config, {**self.flags(config), **(given or {})}))


def as_given(config: Config) -> Config:
    """Return `config` as if its layout had been given, to --plan or to a run, which has no use for --device-type."""
    planned = plans(config.plan)
    device = {} if planned else {"device-type": ""}
    return with_values(config, {"layout": "given", "plan": planned, "plan-search": False, **device})


def candidates(config: Config, world: int, device: Device, given: Given | None = None) -> Iterator[Candidate]:
    """Yield the layouts of the model on `world` devices whose flags agree with those in `given`.

    A given value is taken even if no search would try it, such as a micro-batch of 3; a run checks whether it is legal.
    """
    fixed = given or {}
    model, batch = config.model, config.training.global_batch_size
    for tp, cp, pp in _sizes(model, world, device, fixed):
        dp = data_parallel_size(world, pp, tp, cp)
        layout = Layout(pp, dp, tp, cp=cp)
        if pp > model.num_layers or batch < dp:
            continue
        share = micro_batches(batch, 1, dp)  # samples of the first replica, which has the most
        node = max(1, device.ranks_per_node(world) // tp)
        zeros = _zeros(layout.data, node, config.zero.zero_stage, fixed)
        within = {n: dataclasses.replace(layout, shards=n).stride("replica") for _, n in zeros}
        small = {share} if share < FEW_SAMPLES else set[int]()
        sizes = _one_of(fixed, "micro-batch-size", sorted(small | {n for n in MICRO_BATCHES if share % n == 0}))
        keeps = [("full", False)] if tp == 1 else [("full", False), ("full", True)]
        if not config.activations.checkpoint_in_cpu:
            keeps = [("none", False), ("selective", False), *keeps]
        for (schedule, chunks), (stage, shard), (recompute, partition), sequence, micro in itertools.product(
            _schedules(pp, model.num_layers, fixed), zeros, keeps, (False, True) if tp > 1 else (False,), sizes
        ):
            if sequence and (partition or micro * model.seq_length % tp):
                continue
            if ORDERS[schedule].v_shaped and pp * (share // micro) > MOST_OF_A_V:
                continue
            for ep, etp in _experts(model, layout.stride("pp"), tp, sequence=sequence, given=fixed):
                if within[shard] % ep == 0:
                    found = Candidate(
                        *(tp, cp, pp, schedule, chunks, stage, shard, recompute, partition, sequence, micro, ep, etp)
                    )
                    if _agrees(found, config, fixed):
                        yield found


def _agrees(found: Candidate, config: Config, given: Given) -> bool:
    """Return whether a layout has the given flags; a given split of the layers needs as many stages."""
    if not given:
        return True
    if split := given.get("pipeline-split"):
        return split.count(",") + 1 == found.pp * found.chunks and _agrees(
            found, config, {name: value for name, value in given.items() if name != "pipeline-split"}
        )
    flags = found.flags(config)
    return all(flags[name] == value for name, value in given.items())


def _one_of(given: Given, flag: str, usual: Sequence[T]) -> Sequence[T]:
    """Return the values of a flag to try: the given one, or the usual ones."""
    return [given[flag]] if flag in given else usual


def _zeros(data: int, node: int, stage: int, given: Given) -> list[tuple[int, int]]:
    """Return pairs of a ZeRO stage and a shard size.

    Args:
        data: ranks to shard over; `node` of them are in a node.
        stage: of a rank without others, for which it changes nothing.
    """
    stages = _one_of(given, "zero-stage", (0, 1, 2, 3) if data > 1 else (stage,))
    shards = _one_of(given, "zero-shard-size", (0, node) if 1 < node < data and data % node == 0 else (0,))
    return [(stage, n) for n in shards for stage in stages if not n or (stage and data % n == 0)]


def _schedules(pp: int, num_layers: int, given: Given) -> list[tuple[str, int]]:
    """Return pairs of a schedule and its virtual stages."""
    asked = given.get("pipeline-schedule"), given.get("virtual-pipeline-stages")
    known = list(SCHEDULES)
    if asked[0] in ORDERS:
        chunks = [v for name, v in SCHEDULES if name == asked[0]] or [1]
        known = [(asked[0], v) for v in _one_of(given, "virtual-pipeline-stages", chunks)]
    elif asked[1]:
        known = [(name, asked[1]) for name, order in ORDERS.items() if order.virtual_stages == (asked[1] > 1)]
    if pp == 1:
        return [s for s in known if not ORDERS[s[0]].virtual_stages][:1]
    return [s for s in known if pp * s[1] <= num_layers]


def _experts(model: ModelConfig, ranks: int, tp: int, sequence: bool, given: Given) -> Iterator[tuple[int, int]]:
    """Yield divisions of the experts over the ranks of a stage: as an MLP, and whole ones over powers of two."""
    found = [(1, 0)]
    if model.num_experts and (tp == 1 or sequence):
        ep = 1 if tp > 1 else 2
        while math.gcd(ranks, model.num_experts) % ep == 0:
            found.append((ep, int(tp > 1)))
            ep *= 2
    for ep in _one_of(given, "expert-model-parallel-size", [0]):
        for etp in _one_of(given, "expert-tensor-parallel-size", [-1]):
            yield from dict.fromkeys((ep or each, etp if etp >= 0 else inner) for each, inner in found)


def _sizes(model: ModelConfig, world: int, device: Device, given: Given) -> Iterator[tuple[int, int, int]]:
    """Yield tensor-parallel, context-parallel and pipeline sizes."""
    within = [n for n in tensor_parallel_sizes(model) if n <= device.ranks_per_node(world)]
    for tp in sorted({*_one_of(given, "tensor-model-parallel-size", within)} & {*divisors(world)}):
        left = divisors(data_parallel_size(world, tp=tp))
        dealt = [n for n in left if n <= max(1, model.seq_length // LEAST_DEALT)]
        for cp in sorted({*_one_of(given, "context-parallel-size", dealt)} & {*left}):
            left = divisors(data_parallel_size(world, tp=tp, cp=cp))
            stages = [n for n in left if n <= MOST_STAGES]
            for pp in sorted({*_one_of(given, "pipeline-model-parallel-size", stages)} & {*left}):
                yield tp, cp, pp
