"""Bytes of the statistics of a step (--stats-interval). `observe.layer_statistics` allocates and sends them."""

from megazero.engine.model.layers.latent_attention import gathers_latents
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.dealing import dealt_tokens
from megazero.engine.plan.layout.topology import Coord, Layout
from megazero.engine.plan.program.operations import Forward
from megazero.flags.config import Config
from megazero.planner.sizes import Moved, agreement

SUMS, MAXIMA = 3, 2  # of each layer: squares of gradients, updates and weights; activations and logits
MOST_SCORES = 1 << 24  # of attention, in memory together


def block_rows(heads: int, keys: int) -> int:
    """Return the queries whose scores are computed together."""
    return max(1, MOST_SCORES // (heads * keys))


class StatisticsSizes:
    """Bytes of a rank's statistics; all 0 in a run without them."""

    def __init__(self, config: Config, layout: Layout, coord: Coord, each: int) -> None:
        """each: bytes of a query's number."""
        self.on, self.declared = config.log.stats_interval > 0 and config.trains, declare(config.model, layout.tp)
        model = config.model
        heads, keys = model.num_attention_heads // layout.tp, model.seq_length
        rows = min(block_rows(heads, keys), dealt_tokens(config, layout, coord.cp))
        self.has_sample = self.on and coord.dp == 0  # the first of the global batch
        self.scores = rows * keys * (heads * each + 1) if self.has_sample else 0
        groups, ring = max(1, model.query_groups // layout.tp), config.parallel.cp_exchange == "ring"
        whole = model.multi_latent_attention and gathers_latents(model, heads, ring)
        self.keys = 0 if whole else layout.cp * dealt_tokens(config, layout) * groups * model.head_dim * each

    def observes_scores(self, op: Forward) -> bool:
        """Return whether the largest score of attention is found in an operation."""
        return self.has_sample and op.micro_batch == 0 and op.layer in self.declared.blocks

    def gathered(self) -> Moved:
        """Return the all-gather of the sample's keys."""
        return Moved("cp", "all-gather", self.keys)

    def copied(self, numel: int, state: int) -> int:
        """Return the bytes of the copy of a unit's master weights; state: bytes of one."""
        return numel * state if self.on else 0

    def reduced(self) -> tuple[Moved, ...]:
        """Return the all-reduces over all ranks."""
        if not self.on:
            return ()
        layers = len(self.declared.kinds)
        return tuple(each for kinds in (SUMS, MAXIMA) for each in agreement("world", numbers=kinds * layers))
