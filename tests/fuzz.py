"""Random layouts under megazero verify: `make fuzz`, or `python -m tests.fuzz --seed 7 --pairs 100`.

A pair is a model with all options of its training, a layout of up to eight ranks, and another layout that resumes from
it. Options are drawn one after the other from the tables below; one that the command line refuses is left out. A pair
is drawn from its own seed, so that `--seed N --pairs 1` draws it again. Prints a line for each pair, and the command
line of each that does not pass. Exits with 1 if there is one.
"""

import argparse
import itertools
import logging
import random
import shlex
import sys
import time
from typing import Any

from megazero.cluster import local
from megazero.engine.model.stage import declare
from megazero.engine.plan.schedule.schedules import SCHEDULES
from megazero.flags.config import Config
from megazero.flags.flag_names import as_flag, flags, value_of, with_values
from megazero.flags.presets import over_defaults
from megazero.flags.resolve import resolve
from megazero.log import log
from megazero.verify.command import verdict_of
from megazero.verify.shrink import steps_alone
from megazero.verify.verification import Verification, Wanted, make_runs
from tests.helpers.families import SMALL
from tests.parallel.matrix import EXPERTS, FROZEN_ROTARY, SCORES, blocked

Values = dict[str, Any]  # flag without dashes -> value
Options = list[list[Values]]  # levels of each option; a plain one is not listed

MAX_WORLD = 8
SHARE = 0.4  # of the options that are not at their plainest


def levels(name: str, *values: Any) -> list[Values]:
    return [{name: value} for value in values]


def named(options: dict[str, Any]) -> Values:
    return {name.replace("_", "-"): value for name, value in options.items()}


SIZES: Values = {
    "num-layers": 4,
    "hidden-size": 24,
    "num-attention-heads": 4,
    "vocab-size": 101,
    "init-method-std": 0.1,
    "lr": 1e-3,
    "precision": "fp64",
}
MODEL: Options = [
    levels("num-layers", 3, 5, 6),
    [{"num-attention-heads": 6}, {"num-attention-heads": 3}],
    levels("vocab-size", 96, 128),
    [named(each) for each in EXPERTS.values()],
    levels("moe-expert-capacity-factor", 0.5, 1.0),
    [
        {"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True, "moe-aux-loss-coeff": 0.0},
        {"moe-router-score-function": "sigmoid"},
    ],
    [{"moe-router-num-groups": 2, "moe-router-group-topk": 1}],
    [named(each) for each in SCORES.values() if each],
    levels("hidden-dropout", 0.1),
    levels("attention-dropout", 0.2),
    levels("untie-embeddings", True),
    [{"mtp-num-layers": depths, "mtp-loss-scaling-factor": 0.5} for depths in (1, 2)],
    levels("freeze-parameters", FROZEN_ROTARY, ("token_embedding.*",), ("blocks.0.*",)),
    levels("reset-attention-mask", True),
    levels("reset-position-ids", True),
    levels("eod-mask-loss", True),
    [
        {"optimizer": "lion"},
        {"optimizer": "muon"},
        {"optimizer": "muon", "muon-scale": "keller"},
        {"adam-moments": "bf16"} | named(blocked("llama")),
        {"adam-moments": "int8"} | named(blocked("llama")),
    ],
    levels("clip-grad", 0.0, 0.1),
    levels("weight-decay", 0.0, 0.2),
    [
        {"lr-decay-style": "cosine", "lr-warmup-iters": 1},
        {"lr-decay-style": "wsd", "lr-wsd-decay-iters": 1},
        {"lr-decay-style": "inverse-square-root", "lr-warmup-iters": 1},
    ],
    [
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"precision": "bf16", "grad-dtype": "bf16"},
        {"precision": "bf16", "master-weights": "split"},
        {"precision": "fp16"},
    ],
]
SCHEDULE: list[Values] = [
    {"pipeline-schedule": name, "virtual-pipeline-stages": chunks, "zero-bubble-backlog": backlog}
    for name, each in SCHEDULES.items()
    for chunks in ((2, 3) if each.virtual_stages else (1,))
    for backlog in ((0, 1) if each.backlog else (0,))
]
LAYOUT: Options = [
    levels("micro-batch-size", 2),
    SCHEDULE,
    [{"expert-model-parallel-size": ep, "expert-tensor-parallel-size": etp} for ep in (1, 2, 4) for etp in (0, 1)],
    levels("sequence-parallel", True),
    [  # again, with the tokens of a sample divided
        {"expert-model-parallel-size": ep, "expert-tensor-parallel-size": etp} for ep in (2, 4) for etp in (0, 1)
    ],
    levels("cp-exchange", "ring", "all-gather"),
    levels("zero-stage", 0, 1, 2, 3, 3),
    levels("zero-shard-size", 2, 4),
    levels("zero-reduce-every", "step"),
    levels("zero-gather-every", "step"),
    levels("reduce-bucket-size", 5000, 300),
    levels("overlap-comm", False),
    levels("recompute", "selective", "full", "full"),
    levels("partition-activations", True),
    levels("checkpoint-in-cpu", True),
    levels("contiguous-checkpointing", True),
    levels("loss-chunk-tokens", 0, 1, 7),
    [
        {"optimizer-cpu-offload": True},
        {"optimizer-cpu-offload": True, "optimizer-offload-fraction": 0.4},
        {"optimizer-cpu-offload": True, "optimizer-nvme-offload": "/tmp"},
    ],
]


class Draw:
    """Draws pairs from a seed."""

    def __init__(self, seed: int, max_world: int = MAX_WORLD) -> None:
        self.random = random.Random(seed)
        sizes = list(itertools.product((1, 2, 3, 4, 8), repeat=4))
        self.shapes = [(pp, dp, cp, tp) for pp, dp, cp, tp in sizes if 1 < pp * dp * cp * tp <= max_world]

    def pair(self) -> Wanted:
        """Draw a run in a layout, and the layout that resumes from it, which `megazero verify` accepts."""
        while True:
            model = self.model()
            first, second = self.layout(model), self.layout(model)
            if first is None or second is None:
                continue
            (config, world), (other, ranks) = first, second
            plain = over_defaults({}, config.model.architecture)
            then = [f"--world-size {ranks}", *difference(config, other)]
            named = [f"--architecture {config.model.architecture}", *difference(plain, config)]
            wanted = Wanted(shlex.split(" ".join(named)), world, then=" ".join(then))
            if not refusal(wanted):
                return wanted

    def model(self) -> Config:
        """Draw a model, its batch and its optimizer."""
        name = self.random.choice(list(SMALL))
        batch = {
            "global-batch-size": self.random.choice((4, 5, 6, 8, 8, 12)),
            "seq-length": self.random.choice((11, 12, 16)),
        }
        config = with_values(over_defaults({}, name), {"architecture": name} | SIZES | named(SMALL[name]) | batch)
        if self.random.random() < SHARE / 4:
            size = config.training.global_batch_size
            ramp = {"rampup-batch-size": (size // 2, size - size // 2, size // 2)}
            config = with_values(config, ramp)
        return self._with(MODEL, config, 1)

    def layout(self, config: Config) -> tuple[Config, int] | None:
        """Draw a layout of a model, and its number of ranks; None if the model cannot have the axes."""
        pp, dp, cp, tp = self.random.choice(self.shapes)
        world = pp * dp * cp * tp
        axes = {"pipeline-model-parallel-size": pp, "context-parallel-size": cp, "tensor-model-parallel-size": tp}
        config = with_values(config, axes)
        if not accepted(config, world):
            return None
        config = self._with(LAYOUT, config, world)
        return self._with([[{"pipeline-split": self.split(config)}]], config, world), world

    def split(self, config: Config) -> str:
        """Draw the layers of each stage; some may have none."""
        stages = config.parallel.pipeline_model_parallel_size * config.parallel.virtual_pipeline_stages
        if stages == 1:
            return ""
        cuts = sorted(self.random.choices(range(config.model.num_layers + 1), k=stages - 1))
        return ",".join(str(b - a) for a, b in itertools.pairwise([0, *cuts, config.model.num_layers]))

    def _with(self, options: Options, config: Config, world: int) -> Config:
        """Draw a level of each option, and leave out those that are refused."""
        for each in options:
            if self.random.random() < SHARE:
                wider = with_values(config, self.random.choice(each))
                config = wider if accepted(wider, world) else config
        return config


def accepted(config: Config, world: int) -> bool:
    """Return whether the command line's checks accept a run."""
    try:
        resolve(steps_alone(config, 3), world, 0, declare)
    except ValueError:
        return False
    return True


def refusal(wanted: Wanted) -> str:
    """Return why a pair cannot be verified; empty: it can."""
    try:
        make_runs(wanted, "fp64")
    except ValueError as error:
        return str(error)
    return ""


def difference(before: Config, after: Config) -> list[str]:
    """Return the flags that make `before` into `after`."""
    return [
        as_flag(name, value_of(after, name))
        for name in flags()
        if value_of(after, name) != value_of(before, name) and name != "architecture"
    ]


def command_line(wanted: Wanted) -> str:
    own = ["--world-size", str(wanted.world_size), *wanted.flags, "--then", wanted.then]
    return f"python scripts/verify.py {shlex.join(own)}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first pair; the next has the next one")
    parser.add_argument("--pairs", type=int, default=0, help="0: until --hours are over")
    parser.add_argument("--hours", type=float, default=1.0, help="the last pair begins before their end")
    parser.add_argument("--max-world", type=int, default=MAX_WORLD, help="ranks of a layout, at most")
    options = parser.parse_args(argv)
    local.preload(["megazero.verify.training"])
    until, failed, done = time.monotonic() + 3600 * options.hours, 0, 0
    numbers = range(options.seed, options.seed + options.pairs) if options.pairs else itertools.count(options.seed)
    for seed in numbers:
        wanted = Draw(seed, options.max_world).pair()
        proof = Verification(wanted).run()
        print(f"seed {seed}: {verdict_of(proof)} ({proof.seconds:.0f} s)", flush=True)
        done += 1
        if not proof.passed:
            print(f"  {command_line(wanted)}", flush=True)
            failed += 1
        if not options.pairs and time.monotonic() > until:
            break
    print(f"{done} pairs, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    log.setLevel(logging.WARNING)  # here, because a test calls `main` in its own process
    sys.exit(main(sys.argv[1:]))
