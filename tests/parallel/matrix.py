"""The parity matrix: factors, rules about which levels go together, cases in which every legal pair of levels meets.

A feature joins by a level in `FACTORS` and, if it does not go with everything, a rule in `RULES`. The cases are
generated from both, always the same ones; `python -m tests.parallel.matrix` prints them and the pairs that they cover.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megazero.engine.plan.schedule.schedules import SCHEDULES
from tests.helpers.families import dense, of_family
from tests.parallel.cases import MODEL, RESETS, Case

Choice = dict[str, Any]  # factor -> level
Flags = NDArray[np.bool_]

# Families that have, together, every part and option of a family; tests/parallel/test_families.py has all families.
COMBINED = ("qwen3", "olmo3", "gemma2", "gpt-neox", "deepseek-v3", "gpt-oss")
Factors = dict[str, tuple[Any, ...]]  # factor -> levels, the plainest first

LAYOUT: Factors = dict.fromkeys(("pp", "dp", "cp", "tp"), (1, 2, 3, 4))
SCORES: dict[str, dict[str, Any]] = {  # options of attention's scores
    "": {},
    "window": {"window_size": 4},
    "window in turns": {"window_size": 3, "layer_pattern": "LLG", "attention_scale": 0.3},
    "capped": {"attention_softcap": 0.4},
}
NO_WINDOW = {"window_size": 0, "layer_pattern": ""}
# level -> share of the elements
ON_HOST = {"adamw, 0.4 on the host": 0.4, "adamw, on the host": 1.0, "adamw, in a file": 1.0}
FACTORS: Factors = {
    **LAYOUT,
    "exchange": ("all-gather", "ring"),
    "schedule": ("1f1b", *(name for name in SCHEDULES if name != "1f1b")),
    "by_hand": (False, True),  # layers split over the stages: the first has none
    "backlog": (0, 1),
    "micro_batches": (1, 2, 3, 4),
    "zero": (0, 1, 2, 3),
    "zero_shard_size": (0, 2),
    "zero_reduce_every": ("micro-batch", "step"),
    "zero_gather_every": ("use", "step"),
    "reduce_bucket_size": (40_000_000, 5000),
    "overlap_comm": (True, False),
    "recompute": ("none", "selective", "full"),
    "pa": (False, True),
    "host": (False, True),
    "md": (False, True),
    "sp": (False, True),
    "loss_chunk": (0, 7, 3),  # tokens whose logits exist together; the last chunk is shorter, or has no target
    "compile": (False, True),
    "dropout": (False, True),
    "untied": (False, True),
    "mtp": (0, 2, 1),  # modules of multi-token prediction
    "frozen": (False, True),
    "architecture": (
        "gpt2",
        "llama, 2 groups",  # of heads that share keys and values
        "llama, 1 group",
        "parallel",
        *COMBINED,
    ),
    "activation": ("auto", "squared-relu", "relu"),
    "scores": tuple(SCORES),
    "optimizer": ("adamw", "lion", "muon", *ON_HOST),
    "moments": ("fp32", "bf16", "int8"),
    "ema": (0, 1, 2),  # updates between two changes of the running average of the weights
    "stats": (False, True),  # statistics per layer in every step
    "seq_length": (11, 12),  # under sp, 12 cuts in the middle of a sample
    "reset": tuple(RESETS),  # attention and positions that restart with a document
    "targets": ("most", "last"),  # tokens that count: of the last ones alone, some context-parallel ranks have none
    "short": (0, 1, 3),  # samples that the batch lacks: of half a micro-batch, or of one and a half
}
# A smaller matrix: the precisions that users train in, with the factors that each may change.
NUMBERS: Factors = {
    **dict.fromkeys(LAYOUT, (1, 2)),
    "precision": ("fp32", "bf16", "fp16"),
    "grad_dtype": ("fp32", "bf16", "fp16"),
    **{name: FACTORS[name] for name in ("zero", "recompute", "pa", "sp", "loss_chunk", "untied")},
    "mtp": (0, 2),
    "stats": (False, True),
    "optimizer": ("adamw", *ON_HOST),
    "micro_batches": (1, 3),
    "reduce_bucket_size": (40_000_000, 5000),
    "architecture": ("gpt2", "llama, 2 groups", "deepseek-v3", "gpt-oss"),
    "reset": ("", "documents"),
    "short": (0, 2),  # less of a batch would have more rounding
}
# Mixtures of experts: a matrix of its own, with the factors that decide which tokens and weights a rank has.
BALANCED = {"moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.2}
SHARED_EXPERT = {"moe_shared_expert_intermediate_size": 36, "moe_layer_freq": "DE"}
EXPERTS: dict[str, dict[str, Any]] = {
    "2 of 4": BALANCED | {"num_experts": 4},
    "3 of 5, shared": BALANCED
    | SHARED_EXPERT
    | {"num_experts": 5, "moe_router_topk": 3, "moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.0},
    "all of 4, gated": BALANCED
    | SHARED_EXPERT
    | {"num_experts": 4, "moe_router_topk": 4, "moe_shared_expert_gate": True, "moe_layer_freq": "2"},
    "2 of 16": BALANCED | {"num_experts": 16, "moe_ffn_hidden_size": 12},  # of which some get no token
}
DIVISIONS = {  # level -> ranks that the experts of a layer are divided over, and that share an expert; 0: tp
    "": (1, 0),
    "ep 2": (2, 0),
    "ep 4": (4, 0),
    "whole": (1, 1),
    "ep 2, whole": (2, 1),
    "ep 4, whole": (4, 1),
}
WITH_EXPERTS: Factors = {
    **dict.fromkeys(LAYOUT, (1, 2)),
    "experts": tuple(EXPERTS),
    "division": tuple(DIVISIONS),
    "schedule": ("1f1b", "zero-bubble"),
    "micro_batches": (1, 3),
    **{name: FACTORS[name] for name in ("zero", "zero_shard_size", "zero_reduce_every", "zero_gather_every")},
    **{
        name: FACTORS[name]
        for name in ("reduce_bucket_size", "overlap_comm", "recompute", "pa", "host", "sp", "loss_chunk")
    },
    **{name: FACTORS[name] for name in ("dropout", "frozen", "seq_length", "reset", "short")},
    "mtp": (0, 2),
    "architecture": ("llama, 2 groups", "qwen3", "gemma2", "deepseek-v3", "gpt-oss"),
    "optimizer": ("adamw", "muon", *ON_HOST),
    "moments": ("fp32", "int8"),
    "ema": (0, 1),
    "stats": (False, True),
    "targets": ("most", "last", "uneven"),
    "capacity": (0.0, 1.0, 0.5),
}
# On a GPU, in 16 bit too: all experts of a layer, so that rounding chooses no other ones.
MIXTURES = {  # level -> levels of experts and division
    "": ("", ""),
    "all of 4": ("all of 4, gated", ""),
    "all of 4, ep 2": ("all of 4, gated", "ep 2"),
    "all of 4, whole": ("all of 4, gated", "whole"),
}
# The paths of a GPU, on the pretended one (tests/pretended_gpu): a matrix whose twin on a CPU is `FACTORS`.
ON_GPU: Factors = {
    **dict.fromkeys(LAYOUT, (1, 2)),
    "device": ("pretended gpu",),
    "precision": ("fp64", "fp32", "bf16", "fp16"),
    **{
        name: NUMBERS[name]
        for name in ("grad_dtype", "micro_batches", "reduce_bucket_size", "architecture", "reset", "short")
    },
    "scores": tuple(SCORES),
    **{
        name: FACTORS[name]
        for name in ("exchange", "schedule", "zero", "zero_reduce_every", "zero_gather_every", "overlap_comm")
    },
    **{
        name: FACTORS[name]
        for name in ("recompute", "pa", "host", "md", "sp", "loss_chunk", "dropout", "untied", "frozen")
    },
    "mtp": (0, 2),
    "optimizer": ("adamw", "muon", *ON_HOST),
    "moments": ("fp32", "bf16", "int8"),
    "masters": ("fp32", "split"),
    "ema": (0, 1),
    "stats": (False, True),
    "mixture": tuple(MIXTURES),
}
FROZEN = ("token_embedding.*", "position*", "blocks.0.*", "blocks.1.mlp.*", "blocks.2.*.bias")
# kv* is a weight of keys and values, or those of their latents.
FROZEN_ROTARY = ("token_embedding.*", "blocks.0.*", "blocks.1.attention.kv*", "blocks.1.mlp.*", "blocks.2.norm*")
FROZEN_ON_GPU = ("token_embedding.*", "blocks.0.*", "blocks.1.mlp.*")
SAMPLES = 2  # of a micro-batch
MAX_WORLD = 8
BEGINNINGS, TRIES = 6, 12  # of the search for a case: pairs that it begins from, layouts that it tries


@dataclass(frozen=True)
class Rule:
    """Levels of the factors that `holds` names, which do not go together where it is False."""

    reason: str
    refused: bool  # by the command line; else they have no effect together, or take too long
    holds: Callable[..., bool]

    @cached_property
    def factors(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.holds).parameters)

    def allows(self, choice: Choice) -> bool:
        """Return whether the rule allows a choice that has all of its factors."""
        return self.holds(*(choice[name] for name in self.factors))


def _options(architecture: str) -> dict[str, Any]:
    """Return the options of the model of a level."""
    name, _, groups = architecture.partition(", ")
    if architecture in COMBINED:  # windows of gpt-oss are levels of "scores", so that a ring meets its sinks
        return of_family(name) | dense(name) | (NO_WINDOW if name == "gpt-oss" else {})
    return of_family(name) | {"num_query_groups": int(groups.split()[0]) if groups else 0}


def blocked(architecture: str) -> dict[str, Any]:
    """Return sizes with which rows of most matrices are whole blocks of small moments, on any number of ranks."""
    latent = {"kv_lora_rank": 32, "qk_head_dim": 26, "v_head_dim": 32}
    shared = {"hidden_size": 128 if architecture == "gpt-oss" else 96}  # tp shares the biases of gpt-oss' experts
    return shared | (latent if architecture.startswith("deepseek") else {"kv_channels": 32})


def _ranks(division: str, tp: int) -> int:
    """Return the ranks that hold one copy of the experts."""
    ep, etp = DIVISIONS[division]
    return ep * (etp or tp)


def _divides(division: str, dp: int, cp: int, tp: int) -> bool:
    return dp * cp * tp % _ranks(division, tp) == 0


def _shares(experts: str, division: str) -> bool:
    return bool(EXPERTS[experts]["num_experts"] % DIVISIONS[division][0] == 0)


def _groups(architecture: str) -> int:
    return int(_options(architecture).get("num_query_groups", 0))


RULES = [
    Rule("more ranks than a test starts", False, lambda pp, dp, cp, tp: pp * dp * cp * tp <= MAX_WORLD),
    Rule("over one rank every ZeRO stage is stage 0", False, lambda zero, dp, cp: not zero or dp * cp > 1),
    Rule("shard groups need ZeRO", True, lambda zero_shard_size, zero: not zero_shard_size or zero > 0),
    Rule("two shard groups", False, lambda zero_shard_size, dp, cp: zero_shard_size in (0, dp * cp / 2)),
    Rule("stages 0, 1: once a step", True, lambda zero_reduce_every, zero: zero_reduce_every != "step" or zero > 1),
    Rule("only stage 3 gathers", True, lambda zero_gather_every, zero: zero_gather_every != "step" or zero == 3),
    Rule("stage 0 has no buckets", False, lambda reduce_bucket_size, zero: reduce_bucket_size > 5000 or zero > 0),
    Rule("one stage has all layers", False, lambda by_hand, pp: not by_hand or pp > 1),
    Rule("virtual stages need a pipeline", True, lambda schedule, pp: pp > 1 or not SCHEDULES[schedule].virtual_stages),
    Rule("only zero-bubble has a backlog", True, lambda backlog, schedule: not backlog or SCHEDULES[schedule].backlog),
    Rule("nothing to overlap", False, lambda overlap_comm, dp, cp: overlap_comm or dp * cp > 1),
    Rule("parts need tp ranks", True, lambda pa, tp: not pa or tp > 1),
    Rule("sequence parallelism keeps parts already", True, lambda pa, sp: not (pa and sp)),
    *(Rule("full recompute alone keeps inputs", True, holds) for holds in (
        lambda pa, recompute: not pa or recompute == "full",
        lambda host, recompute: not host or recompute == "full",
        lambda md, recompute: not md or recompute == "full",
    )),
    Rule("sequence parallelism needs tp", True, lambda sp, tp: not sp or tp > 1),
    Rule("tp divides the tokens", True, lambda sp, tp, seq_length: not sp or SAMPLES * seq_length % tp == 0),
    Rule("2 groups on 3 ranks", True, lambda architecture, tp: not (tp == 3 and _groups(architecture) == 2)),
    Rule("experts have no biases", True, lambda mixture, architecture: not mixture or architecture != "gpt2"),
    *(Rule("ep x etp divides the ranks of a stage", True, holds) for holds in (
        _divides,
        lambda mixture, dp, cp, tp: _divides(MIXTURES[mixture][1], dp, cp, tp),
    )),
    Rule("5 experts on 2 ranks", True, _shares),
    *(Rule("tensor-parallel ranks send their own tokens", True, holds) for holds in (
        lambda division, tp, sp: not division or tp == 1 or sp,
        lambda mixture, tp, sp: not MIXTURES[mixture][1] or tp == 1 or sp,
    )),
    Rule("shards are whole copies of the experts", True, lambda zero_shard_size, division, tp: (
        not zero_shard_size or zero_shard_size * tp % _ranks(division, tp) == 0
    )),
    *(Rule("one rank shares what one rank shares", False, holds) for holds in (
        lambda division, tp: DIVISIONS[division][1] != 1 or tp > 1,
        lambda mixture, tp: DIVISIONS[MIXTURES[mixture][1]][1] != 1 or tp > 1,
    )),
    Rule("a replica has one padded micro-batch at most", False, lambda short, dp: short < dp * SAMPLES),
    *(Rule("a ring has blocks of keys, to which fused attention without windows attends", True, holds) for holds in (
        lambda exchange, cp: exchange != "ring" or cp > 1,
        lambda exchange, dropout: exchange != "ring" or not dropout,
        lambda exchange, scores: exchange != "ring" or not scores,
        lambda exchange, architecture: exchange != "ring" or architecture not in ("olmo3", "gemma2"),
    )),
    Rule("FlashAttention is in 16 bit", False, lambda exchange, precision: exchange != "ring" or precision[2:] == "16"),
    Rule("Newton-Schulz iterations magnify rounding", False, lambda optimizer, precision: (
        optimizer != "muon" or precision == "fp64"
    )),
    Rule("weights of bf16 alone are the upper bits of fp32 ones", True, lambda masters, precision: (
        masters == "fp32" or precision == "bf16"
    )),
    Rule("rounding magnifies differences", False, lambda moments, precision: moments == "fp32" or precision == "fp64"),
    Rule("no third type", False, lambda grad_dtype, precision: grad_dtype in ("fp32", precision)),
]  # fmt: skip
# Factors of many rules; a rule has at most one factor besides these.
SHARED = (
    "pp",
    "dp",
    "cp",
    "tp",
    "exchange",
    "division",
    "zero",
    "recompute",
    "sp",
    "schedule",
    "precision",
    "mixture",
)


def case_of(choice: Choice) -> Case:
    """The case that a choice of levels stands for; factors that it lacks are at their plainest, in fp64."""
    choice = {name: levels[0] for name, levels in FACTORS.items()} | {"precision": "fp64", "device": "cpu"} | choice
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.2} if choice["dropout"] else {}
    architecture = choice["architecture"].partition(",")[0]
    chunks = 2 if SCHEDULES[choice["schedule"]].virtual_stages else 1
    stages = choice["pp"] * chunks
    on_gpu = choice["device"] != "cpu"
    layers = max(3, stages + 1)
    frozen = FROZEN_ON_GPU if on_gpu else FROZEN if architecture == "gpt2" else FROZEN_ROTARY
    experts, division = MIXTURES[choice.get("mixture", "")]
    ep, etp = DIVISIONS[choice.get("division", division)]
    flags = ("zero_shard_size", "zero_reduce_every", "zero_gather_every", "reduce_bucket_size", "overlap_comm")
    return Case(
        **{name: choice[name] for name in Case._fields if name in choice and name not in ("frozen", "optimizer")},
        optimizer=choice["optimizer"].partition(",")[0],
        offload=ON_HOST.get(choice["optimizer"], 0.0),
        disk="file" in choice["optimizer"],
        frozen=frozen if choice["frozen"] else (),
        options=tuple((name, choice[name]) for name in flags if choice[name] != FACTORS[name][0]),
        ep=ep,
        etp=etp,
        chunks=chunks,
        split=",".join(map(str, [0, *[1] * (stages - 2), layers - stages + 2])) if choice["by_hand"] else "",
        model=replace(
            MODEL,
            num_layers=layers,
            num_attention_heads=8 if choice["tp"] == 4 else MODEL.num_attention_heads,
            seq_length=choice["seq_length"],
            **_options(choice["architecture"])
            | (blocked(choice["architecture"]) if choice["moments"] != "fp32" else {})
            | SCORES[choice["scores"]]
            | EXPERTS.get(choice.get("experts", experts), {})
            | {"moe_expert_capacity_factor": choice.get("capacity", 0.0)}
            | dropout
            | {"untie_embeddings": choice["untied"]}
            | ({} if choice["activation"] == "auto" else {"activation": choice["activation"]})
            | ({"mtp_num_layers": choice["mtp"], "mtp_loss_scaling_factor": 0.3} if choice["mtp"] else {}),
        ),
        batch=choice["dp"] * choice["micro_batches"] * SAMPLES - choice["short"],
        micro_batch_size=SAMPLES if choice["short"] else 0,
        kernels="eager" if on_gpu else "auto",  # a GPU's are Triton's, interpreted: seconds a step
    )


def factors_of(choice: Choice) -> Factors:
    return ON_GPU if "device" in choice else WITH_EXPERTS if "experts" in choice else NUMBERS | FACTORS


def name_of(choice: Choice) -> str:
    """The levels that are not the plainest."""
    words, factors = [], factors_of(choice)
    for name, level in choice.items():
        if level != factors[name][0]:
            words.append(name if level is True else f"{name}={level}")
    return "-".join(words) or "plain"


class Matrix:
    """Cases in which every legal pair of levels of two factors meets.

    Levels are numbered, factor by factor. `partners` [level, level]: the pairs that may meet; `missing`: those that
    have not yet.
    """

    def __init__(self, factors: Factors, dear: tuple[str, ...] = ()) -> None:
        """`dear`: factors that stay at their plainest in all cases but a few, which cover the rest."""
        self.factors, self.dear = factors, dear
        self.draw = random.Random(0)
        self.levels = [(name, level) for name in factors for level in factors[name]]
        self.number = {key: i for i, key in enumerate(self.levels)}
        ends = [*itertools.accumulate(map(len, factors.values()), initial=0)]
        self.parts = dict(zip(factors, map(slice, ends, ends[1:]), strict=False))
        self.rules = {
            name: [r for r in RULES if name in r.factors and set(r.factors) <= set(factors)] for name in factors
        }
        states = self._states()
        self.ranks = np.array([choice["pp"] * choice["dp"] * choice["cp"] * choice["tp"] for choice in states])
        self.legal = np.concatenate([self._legal(name, states) for name in factors], axis=1)
        self.partners = self._together(self.legal)
        self.missing = self.partners.copy()

    def _states(self) -> list[Choice]:
        """Return every legal choice of the shared factors."""
        shared = [name for name in self.factors if name in SHARED]
        chosen: list[Choice] = [{}]
        for name in shared:
            ready = [r for r in self.rules[name] if set(r.factors) <= set(shared[: shared.index(name) + 1])]
            wider = (choice | {name: level} for choice in chosen for level in self.factors[name])
            chosen = [choice for choice in wider if all(rule.allows(choice) for rule in ready)]
        return chosen

    def _legal(self, name: str, states: list[Choice]) -> Flags:
        """Return [state, level]: does the level of this factor go with the state?"""
        levels = self.factors[name]
        if name in SHARED:
            return np.array([[choice[name] == level for level in levels] for choice in states])
        needed = sorted({factor for rule in self.rules[name] for factor in rule.factors} - {name})
        keys = [tuple([choice[factor] for factor in needed]) for choice in states]
        fits = {
            key: [all(rule.allows(choice | {name: level}) for rule in self.rules[name]) for level in levels]
            for key, choice in dict(zip(keys, states, strict=True)).items()
        }
        return np.array([fits[key] for key in keys])

    def _together(self, legal: Flags) -> Flags:
        """Return [level, level]: are both in one of the states `legal` [state, level], and of two factors?"""
        found = np.stack([legal[legal[:, i]].any(axis=0) for i in range(len(self.levels))])
        for part in self.parts.values():
            found[part, part] = False
        return found

    def reach(self, max_world: int) -> Flags:
        """Pairs that can meet on up to `max_world` ranks."""
        return self._together(self.legal[self.ranks <= max_world])

    def cover(self, max_world: int, dear: bool = False) -> Iterator[Choice]:
        """Choices on up to `max_world` ranks until all pairs that can meet there have; most new pairs first."""
        legal = self.legal[self.ranks <= max_world]
        for name in () if dear else self.dear:
            legal[:, self.parts[name]][:, 1:] = False
        reach = self._together(legal)
        while (wanted := (self.missing & reach).any(axis=1).nonzero()[0]).size:
            pairs, states = [], []
            for i in wanted[:: 1 + wanted.size // BEGINNINGS]:  # the best of several beginnings is taken
                j = (self.missing[i] & reach[i]).argmax()
                fits = (legal[:, i] & legal[:, j]).nonzero()[0].tolist()
                states += self.draw.sample(fits, min(TRIES, len(fits)))
                pairs += [(i, j)] * (len(states) - len(pairs))
            choice = dict(itertools.compress(self.levels, self._best(legal[states], np.array(pairs))))
            self.meet(choice)
            yield choice

    def _best(self, legal: Flags, pairs: np.ndarray) -> Flags:
        """Return the levels of the choice with most new pairs, a choice for each of several states and pairs.

        Each factor in turn takes the level with most new pairs, the less plain one of equals.

        Args:
            legal: [case, level]
            pairs: [case, 2] numbers of levels that the case has.
        """
        cases, missing = np.zeros(legal.shape, dtype=np.int16), self.missing.astype(np.int16)
        rows = np.arange(len(cases))
        cases[rows, pairs[:, 0]] = cases[rows, pairs[:, 1]] = 1
        for part in self.parts.values():
            chosen = cases[:, part].any(axis=1, keepdims=True)
            free = np.where(chosen, cases[:, part], legal[:, part])
            gains = np.where(free, cases @ missing[:, part], -1)
            cases[rows, part.stop - 1 - gains[:, ::-1].argmax(axis=1)] = 1
        return cases[(cases @ missing * cases).sum(axis=1).argmax()].astype(bool)

    def meet(self, choice: Choice) -> None:
        """Take note that the levels of a choice have met."""
        numbers = [self.number[item] for item in choice.items()]
        self.missing[np.ix_(numbers, numbers)] = False


def count(pairs: Flags) -> int:
    """Pairs of levels in `partners` or `missing`, each of which occurs twice."""
    return int(pairs.sum()) // 2


# Besides the generated cases: three kinds of parallelism at once, as users run them.
ANCHORS: list[Choice] = [
    {},
    {"pp": 2, "dp": 2, "tp": 2, "zero": 3, "recompute": "full", "pa": True, "micro_batches": 3},
    {"dp": 2, "tp": 2, "zero": 1, "recompute": "selective", "sp": True, "micro_batches": 3},
    {"pp": 2, "dp": 2, "zero": 2, "schedule": "zero-bubble", "micro_batches": 3, "untied": True},
    {"cp": 2, "tp": 2, "zero": 1, "recompute": "selective", "sp": True, "reset": "documents", "seq_length": 12},
]


class Covers(NamedTuple):
    """The generated choices, in which all pairs meet: those of the default suite, of the second ring, and slow ones."""

    default: list[Choice]
    second: list[Choice]
    slow: list[Choice]

    @classmethod
    def split(cls, default: list[Choice], generated: list[Choice], second: int) -> Covers:
        """Divide generated choices: the default suite gets every level of every factor.

        On more than two ranks, the levels that others have are the plainest in the default suite. The whole choice is
        in the second ring, or slow on four ranks.

        Args:
            default: choices that the default suite has besides.
            second: how many of the others the second ring has besides; the first ones add most pairs.
        """
        first, dear, others = _with_every_level(default, generated)
        dearest = [choice for choice in dear if case_of(choice).world > 3]
        dear = [choice for choice in dear if choice not in dearest]
        return cls(default + first, dear + others[:second], dearest + others[second:])


def _with_every_level(given: list[Choice], choices: list[Choice]) -> tuple[list[Choice], list[Choice], list[Choice]]:
    """Return few of `choices`, on few ranks, in which every level occurs that `given` lacks.

    Returns:
        The few, plainer if they have more than two ranks; the latter as they were; and the other choices.
    """
    missing = {item for choice in choices for item in choice.items()} - {item for c in given for item in c.items()}
    first, dear, others = [], [], list(choices)
    while missing:
        best = max(others, key=lambda choice: len(missing & choice.items()) / case_of(choice).world)
        others.remove(best)
        if case_of(best).world > 2:
            dear.append(best)
            best = _plainer(best, missing)
        first.append(best)
        missing -= best.items()
    return first, dear, others


def _plainer(choice: Choice, needed: set[tuple[str, Any]]) -> Choice:
    """Return a choice whose levels that are not `needed` are the plainest, where the rules allow it."""
    for name, level in choice.items():
        plainer = choice | {name: factors_of(choice)[name][0]}
        rules = [rule for rule in RULES if name in rule.factors and set(rule.factors) <= set(choice)]
        if (name, level) not in needed and all(rule.allows(plainer) for rule in rules):
            choice = plainer
    return choice


@cache
def covers() -> Covers:
    """The matrix in fp64."""
    matrix = Matrix(FACTORS, dear=("compile",))
    default = [{name: anchor.get(name, levels[0]) for name, levels in FACTORS.items()} for anchor in ANCHORS]
    for choice in default:
        matrix.meet(choice)
    small = [*matrix.cover(max_world=2), *matrix.cover(max_world=4)]
    larger = [*matrix.cover(MAX_WORLD), *matrix.cover(MAX_WORLD, dear=True)]
    assert not count(matrix.missing)
    rings = Covers.split(default, small, second=20)
    return rings._replace(slow=rings.slow + larger)


@cache
def numbers() -> Covers:
    """The matrix of precisions, on two ranks."""
    return Covers.split([], list(Matrix(NUMBERS).cover(max_world=2)), second=5)


@cache
def with_experts() -> Covers:
    """The matrix of experts, on up to four ranks, in fp64."""
    matrix = Matrix(WITH_EXPERTS)
    return Covers.split([], [*matrix.cover(max_world=2), *matrix.cover(max_world=4)], second=5)


@cache
def on_gpu() -> Covers:
    """The matrix on the pretended GPU, on up to four ranks. Every level of every factor is in the second ring."""
    matrix = Matrix(ON_GPU)
    plain = {name: levels[0] for name, levels in ON_GPU.items()}
    alone = [plain, plain | {"precision": "bf16", "recompute": "full", "host": True, "micro_batches": 3}]
    for choice in alone:
        matrix.meet(choice)
    rings = Covers.split([], [*matrix.cover(max_world=2), *matrix.cover(max_world=4)], second=4)
    return Covers(alone, rings.default + rings.second, rings.slow)


def products() -> list[Choice]:
    """Products of three factors that share a mechanism: every way to keep activations, at every stage and schedule."""
    full = {"recompute": "full"}
    ways: list[Choice] = [{"recompute": mode, "sp": sp} for mode in FACTORS["recompute"] for sp in (False, True)]
    ways += [full | {"sp": sp, "host": h, "md": m} for sp in (False, True) for h, m in ((False, True), (True, False))]
    ways += [full | {"pa": True, "host": h, "md": m} for h in (False, True) for m in (False, True)]
    layouts: list[Choice] = [{"dp": 2, "tp": 2, "zero": z, "micro_batches": 3} for z in FACTORS["zero"]]
    layouts += [{"pp": 2, "tp": 2, "schedule": s, "micro_batches": 4} for s in FACTORS["schedule"]]
    return [layout | way for layout in layouts for way in ways]


def in_rings(title: str, found: Covers) -> list[tuple[str, list[Choice]]]:
    return list(zip((f"{ring}, {title}" for ring in ("default suite", "second ring", "slow")), found, strict=True))


def main() -> None:
    found = covers()
    for title, choices in (
        *in_rings("fp64", found),
        ("slow, fp64: products", products()),
        *in_rings("experts in fp64", with_experts()),
        *in_rings("fp32, bf16, fp16", numbers()),
        *in_rings("on the pretended GPU", on_gpu()),
    ):
        print(f"{title}: {len(choices)} cases")
        for choice in choices:
            print(f"  {case_of(choice).world} ranks  {name_of(choice)}")
    matrix = Matrix(FACTORS)
    for choice in found.default:
        matrix.meet(choice)
    missing = matrix.missing
    legal = count(matrix.partners)
    print(f"legal pairs of levels: {legal:,}; covered by default: {legal - count(missing):,}; with the slow cases: all")
    print(f"Not by default, on up to {MAX_WORLD} ranks:")
    words = [f"{name}={level}" for name, level in matrix.levels]
    for i, word in enumerate(words):
        others = [words[j] for j in range(i + 1, len(words)) if missing[i, j]]
        if others:
            print(f"  {word} with {', '.join(others)}")
    print("Never, because")
    for rule in RULES:
        print(f"  {', '.join(rule.factors)}: {rule.reason}{' (refused)' * rule.refused}")


if __name__ == "__main__":
    main()
