"""`--plan-search` and `--layout auto`: the fastest layouts of a model on a cluster, with the given flags.

`ClosedTerms` ranks all layouts by formulas, which take the seconds of a block from its trace and ignore the order of
events. The best of them are then simulated, and their memory is estimated, as by --plan.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from megazero.engine.model.stage import declare
from megazero.engine.options.batch_sizes import micro_batches
from megazero.engine.plan.layout.layers import End, Use
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.layout.zero_policy import DENSE, EXPERT, offload_fraction, sharding_groups
from megazero.engine.plan.program.operations import Backward, Forward
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.engine.plan.schedule.schedules import SCHEDULES as ORDERS
from megazero.engine.plan.schedule.schedules import placement
from megazero.flags.batch_ramp import data_parallel_size
from megazero.flags.config import ActivationConfig, Config
from megazero.flags.flag_names import as_flag, with_values
from megazero.flags.pipeline_split import layer_costs, split_by_cost
from megazero.flags.resolve import check_layout, resolve
from megazero.planner.run_plan import Plan, plan_if_it_fits
from megazero.planner.search.candidates import Candidate, Given, Sizes, candidates
from megazero.planner.sizes import elements
from megazero.planner.state_shares import States, least_rates, update_rate
from megazero.planner.time.costs import StepCosts
from megazero.planner.time.devices import Device
from megazero.planner.time.exchange import choose_exchange
from megazero.planner.time.network import Network
from megazero.planner.trace.trace import shallow, trace_block

TRIED = 48  # best-ranked layouts whose memory is estimated
MOST_TRIED = 480  # more, until enough of them fit: queued gradients of experts are large, and no bound knows them
FEW_OF_EXPERTS = 4  # enough for models with experts; 1 for others
SIMULATED = 12  # of those, the most that are simulated, because they fit
SAME_SIZES = 4  # of the layouts tried, the most with the same sizes of axes
Track = Callable[[Sequence["Candidate"], str], Iterable["Candidate"]]
# sharding group -> axes of the ranks that share a copy, and of those with the same part of different copies
AXES = {DENSE: ("shard", "replica"), EXPERT: ("expert_shard", "expert_replica")}


class _Block(NamedTuple):
    """Seconds and bytes of a block, for one micro-batch on one rank."""

    forward: float
    backward: float
    saved: int
    hidden: int  # its input


class _Held(NamedTuple):
    """Bytes of states: between steps, of accumulated gradients, and of gradients at the end."""

    rest: int
    accumulated: int
    gradients: int


class _Saved(NamedTuple):
    """Bytes that autograd saves in a block, with its input and without."""

    whole: int
    without_input: int


def _live(c: Candidate, m: int) -> tuple[int, ...]:
    """Return the least number of micro-batches that each chunk of the first pipeline rank holds at once.

    With virtual stages, warm-up begins another round of the first chunk before the first backward.
    """
    least = min(m, c.pp)
    if ORDERS[c.schedule].v_shaped:
        return min(m, 2 * c.pp - 1), 0
    if ORDERS[c.schedule].holds_all:
        return (m,)
    return (min(m, 2 * c.pp - 1), *[least] * (c.chunks - 1)) if c.chunks > 1 else (least,)


class ClosedTerms:
    """Memory and time of layouts by formulas, for ranking. Values that many layouts share are computed once."""

    def __init__(self, config: Config, world: int, device: Device) -> None:
        """Prepare for a configuration with a known vocabulary, whose layout does not matter."""
        self.config, self.world, self.device = config, world, device
        self.rates = least_rates(config)
        self.block = functools.cache(self._block)
        self.saved = functools.cache(self._saved)
        self.ends = functools.cache(self._ends)
        self.elements = functools.cache(self._elements)
        self.numel = functools.cache(self._numel)
        self.on_first = functools.cache(self._on_first)
        self.first = functools.cache(self._first)
        self.network = functools.cache(self._network)
        self.states = functools.cache(self._states)
        self._usable = functools.cache(device.usable_bytes)

    def of(self, c: Candidate) -> _Block:
        return self.block(c.sizes, c.micro_batch, c.sequence, c.recompute == "selective")

    def _costs(self, sizes: Sizes, micro: int, sequence: bool, selective: bool) -> StepCosts:
        """Return the costs of the `shallow` model without pipeline and recompute."""
        kept, (tp, cp, ep, etp) = "selective" if selective else "none", sizes
        c = Candidate(
            tp=tp,
            cp=cp,
            pp=1,
            schedule="1f1b",
            chunks=1,
            zero_stage=0,
            shard=0,
            recompute=kept,
            partition=False,
            sequence=sequence,
            micro_batch=micro,
            ep=ep,
            etp=etp,
        )
        config = c.apply(self.config)
        config = dataclasses.replace(config, model=shallow(config.model))
        layout = self._layout(sizes)
        return StepCosts(config, layout, rank_spec(config, layout, 0, declare), self.device)

    def _block(self, sizes: Sizes, micro: int, sequence: bool, selective: bool) -> _Block:
        """Return the mean block; each kind is traced once."""
        costs = self._costs(sizes, micro, sequence, selective)
        layers = declare(costs.config.model, sizes.tp)
        blocks = Counter(layers.kinds[name].name for name in layers.blocks)

        def mean(of: Callable[[str], float]) -> float:
            return sum(count * of(name) for name, count in blocks.items()) / len(layers.blocks)

        forward = mean(lambda name: costs.of_layer(Forward(name, 0, True)).seconds)
        backward = mean(lambda name: costs.of_layer(Backward(name, 0)).seconds)
        saved = mean(lambda name: self.saved(sizes, micro, sequence, selective)[name].whole)
        return _Block(forward, backward, math.ceil(saved), costs.sizes.hidden)

    def _saved(self, sizes: Sizes, micro: int, sequence: bool, selective: bool) -> dict[str, _Saved]:
        """Return the saved bytes of each kind of block."""
        costs = self._costs(sizes, micro, sequence, selective)
        kinds = {kind.name for kind in declare(costs.config.model, sizes.tp).kinds.values() if kind.end is None}
        traced = {name: trace_block(costs.config, costs.layout, self.device.kind, name) for name in kinds}
        return {name: _Saved(each.kept(own_input=True), each.kept(own_input=False)) for name, each in traced.items()}

    def _ends(self, tp: int, cp: int, micro: int) -> float:
        """Seconds of embedding and head, forward and backward."""
        costs = self._costs(Sizes(tp, cp), micro, False, False)
        names = [name for name, layer in costs.spec.layers.items() if layer.use is not Use.LAYER]
        forward = sum(costs.of_layer(Forward(name, 0, True)).seconds for name in names)
        return forward + sum(costs.of_layer(Backward(name, 0)).seconds for name in names)

    def _elements(self, sizes: Sizes) -> dict[str, Counter[str]]:
        """Return the elements of each kind of layer, on one rank, by sharding group."""
        layout = self._layout(sizes)
        kinds = {kind.name: kind for kind in declare(shallow(self.config.model), sizes.tp).kinds.values()}
        groups = sharding_groups(with_values(self.config, {"zero-stage": 0}), dataclasses.replace(layout, shards=1))
        return {name: elements(kind, layout, groups) for name, kind in kinds.items()}

    def _numel(self, sizes: Sizes) -> dict[str, tuple[int, int]]:
        """Elements of a mean block and of the tables, on one rank, by sharding group."""
        layers, each = declare(shallow(self.config.model), sizes.tp), self.elements(sizes)
        found: dict[str, tuple[int, int]] = {}
        for group in sorted({group for count in each.values() for group in count}):
            numel = [(kind.end, each[kind.name][group]) for kind in layers.kinds.values()]
            blocks, table = (sum(n for end, n in numel if end is wanted) for wanted in (None, End.FIRST))
            found[group] = blocks // len(layers.blocks), table
        return found

    def _first(self, pp: int, schedule: str, chunks: int, full: bool) -> tuple[Counter[str], ...]:
        """Count the blocks of each chunk of the first pipeline rank, by kind."""
        model, v_shaped = self.config.model, ORDERS[schedule].v_shaped
        layers, activations = declare(model), ActivationConfig("full" if full else "none")
        split = split_by_cost(placement(pp, chunks, v_shaped), layer_costs(layers, model, activations))
        layout = Layout(pp, chunks=chunks, split=split, v_shaped=v_shaped)
        kinds = [[layers.kinds[name] for name in layers.chunk(layout, 0, chunk)] for chunk in range(chunks)]
        return tuple(Counter(kind.name for kind in chunk if kind.end is None) for chunk in kinds)

    def _layout(self, sizes: Sizes, pp: int = 1, shard: int = 0, chunks: int = 1, v_shaped: bool = False) -> Layout:
        tp, cp, ep, etp = sizes
        dp = data_parallel_size(self.world, pp, tp, cp)
        return Layout(pp=pp, dp=dp, tp=tp, shards=shard, chunks=chunks, v_shaped=v_shaped, cp=cp, ep=ep, expert_tp=etp)

    def _network(self, sizes: Sizes, pp: int, shard: int) -> Network:
        return Network(self.device, self._layout(sizes, pp, shard))

    def fits(self, c: Candidate) -> bool:
        """Return whether a layout may fit. States come first, because they need no trace."""
        usable = self._usable(
            self._layout(c.sizes, c.pp, c.shard, chunks=c.chunks, v_shaped=ORDERS[c.schedule].v_shaped)
        )
        return self._held(c).rest <= usable and self.memory(c) <= usable

    def micro_batches(self, c: Candidate) -> int:
        dp = data_parallel_size(self.world, c.pp, c.tp, c.cp)
        return micro_batches(self.config.training.global_batch_size, c.micro_batch, dp)

    def _held(self, c: Candidate) -> _Held:
        """Return the states of the first pipeline rank."""
        numel = self.on_first(c.sizes, c.pp, c.schedule, chunks=c.chunks, full=c.recompute == "full")
        return self.states(c.sizes, c.pp, c.zero_stage, shard=c.shard, numel=numel)

    def _on_first(self, sizes: Sizes, pp: int, schedule: str, chunks: int, full: bool) -> tuple[tuple[str, int], ...]:
        """Return the elements of the first pipeline rank, by sharding group."""
        each, blocks = self.elements(sizes), sum(self.first(pp, schedule, chunks, full), Counter[str]())
        return tuple(
            (group, table + sum(n * each[kind][group] for kind, n in blocks.items()))
            for group, (_, table) in self.numel(sizes).items()
        )

    def _states(self, sizes: Sizes, pp: int, zero_stage: int, shard: int, numel: tuple[tuple[str, int], ...]) -> _Held:
        states = States.by_group(with_values(self.config, {"zero-stage": zero_stage}), self._layout(sizes, pp, shard))
        held = [
            (sum(states[group].at_rest(n).values()), states[group].accumulated.of(n), states[group].gradients.of(n))
            for group, n in numel
        ]
        return _Held(*map(sum, zip(*held, strict=True)))

    def memory(self, c: Candidate) -> float:
        """Return a lower bound of the bytes of a device of the first pipeline rank."""
        chunks, m = self.first(c.pp, c.schedule, c.chunks, c.recompute == "full"), self.micro_batches(c)
        saved = self.saved(c.sizes, c.micro_batch, c.sequence, c.recompute == "selective")
        rest, accumulated, gradients = self._held(c)
        held = 0.0
        for live, chunk in zip(_live(c, m), chunks, strict=True):
            if c.recompute == "full":
                hidden = 0 if self.config.activations.checkpoint_in_cpu else self.of(c).hidden
                held += live * sum(chunk.values()) * hidden / (c.tp if c.partition else 1)
            else:
                held += live * sum(n * saved[kind].whole for kind, n in chunk.items())
        if c.recompute == "full":
            held += min(each.without_input for each in saved.values())
        # later forwards, which hold as much, follow the first backward of each chunk, but none does if all are held
        steady = not ORDERS[c.schedule].holds_all and (m >= 3 * c.pp if c.chunks > 1 else m > c.pp)
        return rest + (accumulated + held if steady else max(gradients, held))

    def seconds(self, c: Candidate) -> float:
        """Return about the seconds of a step."""
        block, layers, m = self.of(c), self.config.model.num_layers, self.micro_batches(c)
        again = block.forward if c.recompute == "full" else 0.0
        passes = block.forward + block.backward + again
        blocks = math.ceil(layers / (c.pp * c.chunks)) * c.chunks
        stage = max(blocks * passes, (layers * passes + self.ends(c.tp, c.cp, c.micro_batch)) / c.pp)
        bubble = (c.pp - 1) / c.chunks * ORDERS[c.schedule].idle * stage
        network = self.network(c.sizes, c.pp, c.shard)
        rebuild = m * layers / c.pp * network.one_pass("tp", block.hidden) if c.partition else 0.0
        message = network.message(block.hidden, 0, 1) if c.pp > 1 else 0.0
        forward, backward = layers / c.pp * block.forward, layers / c.pp * (block.backward + again)
        return m * stage + bubble + rebuild + self._units(c, m, forward, backward) + message * 2 * (c.pp - 1 + c.chunks)

    def _units(self, c: Candidate, m: int, forward: float, backward: float) -> float:
        """Return the seconds of updates, and of communication over dp that these passes do not hide."""
        rates, network = self.rates, self.network(c.sizes, c.pp, c.shard)
        gather = reduce = replicas = owned = 0.0
        for group, (each, table) in self.numel(c.sizes).items():
            shard, replica = AXES[group]
            numel = self.config.model.num_layers / c.pp * each + table
            mine = numel / (network.groups[shard].ranks if c.zero_stage else 1)
            gather += network.one_pass(shard, numel * rates.weights)
            reduce += network.one_pass(shard, numel * rates.gradients)
            replicas += network.all_reduce(replica, mine * rates.gradients)
            owned += mine
        exposed = {
            0: max(0.0, 2 * reduce - backward),
            1: max(0.0, reduce - backward) + max(0.0, gather - forward),
            2: m * max(0.0, reduce - backward) + max(0.0, gather - forward),
            3: m * (max(0.0, gather - forward) + max(0.0, gather + reduce - backward)),
        }[c.zero_stage]
        bandwidth = self.device["memory.bandwidth"] * self.device["memory.fraction"]
        updated = owned * (rates.gradients + update_rate(rates, clips=bool(self.config.optimizer.clip_grad)))
        on_host = offload_fraction(self.config)
        return exposed + replicas + updated * ((1 - on_host) / bandwidth + on_host / self.device.host_memory_bandwidth)


class Search:
    """All layouts of a model on a cluster, and the fastest of them."""

    def __init__(
        self, config: Config, device: Device, vocabulary: int, world: int = 0, given: Given | None = None
    ) -> None:
        """List the layouts.

        Args:
            config: checked, not resolved.
            vocabulary: of the tokenizer; 0 without one.
            world: number of ranks; 0: --world-size.
            given: flags that keep their value, without dashes; None: the search may set all of LAYOUT_FLAGS.

        Raises:
            ValueError: no layout is possible.
        """
        self.world, self.device, self.vocabulary = world or config.plan.world_size, device, vocabulary
        self.given, batch = given or {}, config.training.global_batch_size
        flag = "--plan-search" if config.plan.plan_search else "--layout auto"
        if not batch:
            raise ValueError(
                f"{flag} needs --global-batch-size, because it compares layouts by the time of a step; add it"
            )
        self.config = with_values(config, {"vocab-size": config.model.vocab_size or vocabulary})
        self.found, why = list(candidates(self.config, self.world, device, given)), ""
        if given is not None:
            complaints = [self._complaint(c) for c in self.found]
            self.found = [c for c, complaint in zip(self.found, complaints, strict=True) if not complaint]
            why = next(filter(None, complaints), "the model and the batch cannot be divided so")
        if not self.found or not self.config.model.vocab_size:
            resolve(config, self.world, vocabulary, declare)  # raises the error of a run
            flags = " ".join([flag, *(as_flag(name, value) for name, value in self.given.items())])
            raise ValueError(
                f"{flags}: no layout of {self.world} ranks allows these flags ({why}); drop some, or take another "
                "number of ranks"
                if given is not None
                else f"--global-batch-size {batch} on --world-size {self.world}: no layout gives every data-parallel "
                f"rank a sample; use {self.world}"
            )

    def _complaint(self, c: Candidate) -> str:
        """Return why a run would refuse a layout; empty if it would not."""
        try:
            check_layout(c.apply(self.config, self.given), self.world)
        except ValueError as error:
            return str(error)
        return ""

    def run(self, track: Track = lambda steps, name: steps) -> list[Plan]:
        """Return the best-ranked plans that fit, fastest first.

        Args:
            track: passes on the steps of a list, and shows their progress under a name.
        """
        terms = ClosedTerms(self.config, self.world, self.device)
        ranked = sorted((terms.seconds(c), c) for c in track(self.found, "ranking layouts") if terms.fits(c))
        plans: list[Plan] = []
        experts = self.config.model.num_experts > 0
        varied, fewest = _varied(ranked, experts), FEW_OF_EXPERTS if experts else 1
        for tried, c in enumerate(track(varied, "simulating the best")):
            if len(plans) == SIMULATED or (tried >= TRIED and len(plans) >= fewest):
                break
            plan = self._plan(c)
            if plan is not None:
                plans.append(plan)
        return sorted(plans, key=lambda plan: plan.seconds)

    def _plan(self, c: Candidate) -> Plan | None:
        """Return the plan of a layout; None if it does not fit or its flags are refused."""
        try:
            config, layout = resolve(c.apply(self.config, self.given), self.world, self.vocabulary, declare)
        except ValueError:
            return None
        return plan_if_it_fits(choose_exchange(config, layout, self.device), layout, self.device)


def _varied(ranked: list[tuple[float, Candidate]], experts: bool) -> list[Candidate]:
    """Return the first MOST_TRIED, skipping those after SAME_SIZES with the same sizes of axes.

    With experts also of the same schedule, because zero-bubble schedules hold most and may fit nowhere.
    """
    count, found = Counter[tuple[Sizes, int, str]](), list[Candidate]()
    for _, c in ranked:
        key = c.sizes, c.pp, c.schedule if experts else ""
        count[key] += 1
        if count[key] <= SAME_SIZES:
            found.append(c)
    return found[:MOST_TRIED]
