"""States of a model by their sharding, bytes of a checkpoint, and bytes that updates move, in integers. Pure."""

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple, Self

from megazero.engine.options.optimizers import Optimizer, WeightKind
from megazero.engine.plan.layout.parameters import ParamSpec
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.layout.zero_policy import DENSE, ShardingGroup, offload_fraction, sharding_groups
from megazero.engine.plan.optimizer_sizes import OwnedSizes, Rates
from megazero.flags.config import Config


def least_rates(config: Config) -> Rates:
    """Return the rates of the rule that keeps least."""
    return min((Rates.of(config, rule) for rule in config.optimizer.rules.rules), key=lambda rates: rates.optimizer)


def host_rate(rates: Rates) -> Fraction:
    """Return the bytes per element of a unit with states in host memory, with the buffer of its copies."""
    return rates.in_file + rates.buffer


def update_rate(rates: Rates, clips: bool) -> Fraction:
    """Return the bytes that a fused update moves: clipping also writes the gradient, narrower numbers are cast."""
    casts = [each + rates.state for each in (rates.gradients, rates.weights) if each != rates.state]
    return rates.update + (rates.state if clips else 0) + sum(casts)


def updated_bytes(owned: OwnedSizes) -> int:
    """Return the bytes that the update of a unit's owned part reads and writes."""
    run = owned.run
    return int(sum(n * update_rate(run.rates[rule], run.clips) for rule, n in owned.by_rule.items()))


class Share(NamedTuple):
    """A state of `each` bytes per element of a rank's units, sharded over `ranks` ranks; of `part` of the elements."""

    each: int | Fraction
    ranks: int = 1
    part: float = 1.0

    def of(self, numel: int) -> int:
        """Return the bytes of units of `numel` elements, padding included."""
        return int(self.each * (numel // self.ranks) * self.part)

    def __str__(self) -> str:
        each = f"{float(self.each):g} Psi"
        each = f"{each} / {self.ranks}" if self.ranks > 1 else each
        return each if self.part == 1 else f"{self.part:g} x {each}"


class States(NamedTuple):
    """Model states of a rank.

    Attributes:
        gradients: at the end of an iteration.
        accumulated: gradients during the iteration, while micro-batches are added up.
        host, nvme: the states in host memory or in files, at most.
    """

    parameters: Share
    optimizer: Share
    gradients: Share
    accumulated: Share
    host: Share
    nvme: Share

    @classmethod
    def of(cls, config: Config, layout: Layout) -> Self:
        """Return the states of the dense units."""
        return cls.by_group(config, layout)[DENSE]

    @classmethod
    def by_group(cls, config: Config, layout: Layout) -> dict[str, Self]:
        """Return the states of the units of each sharding group."""
        return {name: cls.of_group(config, group) for name, group in sharding_groups(config, layout).items()}

    @classmethod
    def of_group(cls, config: Config, group: ShardingGroup) -> Self:
        """Return the states of a group's units; of the optimizer's rules, take the one that keeps least."""
        rates, policy = least_rates(config), group.policy
        gradients, offloaded = rates.gradients if config.trains else 0, offload_fraction(config)
        in_files = bool(config.optimizer.optimizer_nvme_offload)
        return cls(
            parameters=Share(rates.weights, group.shards if policy.parameters else 1),
            optimizer=Share(rates.optimizer, group.parts, 1 - offloaded),
            gradients=Share(gradients, group.parts, 1 - offloaded),
            accumulated=Share(gradients, group.shards, 1 - offloaded)
            if policy.reduces_each(offloaded > 0)
            else Share(gradients),
            host=Share(0 if in_files else host_rate(rates), group.parts, offloaded),
            nvme=Share(host_rate(rates) if in_files else 0, group.parts, offloaded),
        )

    def at_rest(self, numel: int) -> dict[str, int]:
        """Return the bytes on the device between steps, by kind, of units of `numel` elements; at least."""
        return {"parameters": self.parameters.of(numel), "optimizer": self.optimizer.of(numel)}


def saved_bytes(config: Config, elements: Iterable[tuple[ParamSpec, int]]) -> int:
    """Return the bytes in a checkpoint of some elements of each weight: all tensors are as wide as master weights."""
    numbers = sum(numel * len(saved_states(config.optimizer.rules, spec.kind)) for spec, numel in elements)
    return numbers * least_rates(config).state


def saved_states(rules: Optimizer, kind: WeightKind) -> tuple[str, ...]:
    """Return the prefixes of a weight's name in a checkpoint: of its master weights, and of each state."""
    return ("model", *(state.name for state in rules.rule(kind).kept))
