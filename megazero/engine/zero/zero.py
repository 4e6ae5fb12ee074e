"""ZeRO-DP as one mechanism: the stage chooses which of optimizer states, gradients and parameters are sharded.

N ranks partition one copy of the model states among them. They are a *sharding group*: its units have one policy, axis
and reducer.

| ZeRO stage                           | 0               | 1               | 2                | 3                |
|--------------------------------------|-----------------|-----------------|------------------|------------------|
| owned range of a unit's flat buffer  | all             | 1/N             | 1/N              | 1/N              |
| Reduce                               | all-reduce      | reduce-scatter  | reduce-scatter   | reduce-scatter   |
| Reduce runs (*)                      | once per step   | once per step   | each micro-batch | each micro-batch |
| Gather and Release around a use      | -               | -               | -                | all-gather, free |
| Sync after Update                    | -               | all-gather      | all-gather       | -                |

(*) Once per step in every stage with --zero-reduce-every step.

With --optimizer-cpu-offload, StoreGradient copies the owned range of reduced gradients to host memory, Update runs
there, and FetchWeights copies the weights of the owned range back, in every stage.

The classes here own memory and start collectives; the program (`engine.plan.program`) determines when.
"""

import functools
from collections.abc import Mapping

import torch

from megazero.engine.memory.copies import HostLink
from megazero.engine.mesh.collectives import Pending
from megazero.engine.model.layers.weight import GradWriter, Weight
from megazero.engine.plan.layout.zero_policy import ShardingGroup, plan_buckets
from megazero.engine.plan.program.rank_spec import RankSpec
from megazero.engine.zero.flat_unit import FlatUnit, ZeroOptions
from megazero.engine.zero.gradients import UnitGradients
from megazero.engine.zero.home import Home
from megazero.engine.zero.norms import square_sums
from megazero.engine.zero.off_device import HostBuffer, file_buffers
from megazero.engine.zero.optimizer_shard import OptimizerShard
from megazero.engine.zero.reduce_scatter import Reducer
from megazero.engine.zero.weights import UnitWeights


class ParamUnit:
    """Weights, gradients and optimizer states of one unit, on one rank.

    Attributes:
        optimizer: updates master weights and states.
        at_rest: the shard that checkpoints read and fill; `optimizer` itself unless states are in a file.
    """

    def __init__(self, flat: FlatUnit, options: ZeroOptions, home: Home) -> None:
        self.name, self.flat, self.home = flat.name, flat, home
        self.weights = UnitWeights(flat, options)
        self.gradients = UnitGradients(flat, options, home)
        shard = functools.partial(OptimizerShard, flat, self.weights.sharded, options, home)
        resident, at_rest = home.states
        self.optimizer = shard(memory=resident)
        self.at_rest = self.optimizer if at_rest is None else shard(memory=at_rest)
        self.at_rest.initialize()


class Zero:
    """All units of a pipeline rank. It owns the memory of the layers' weights and receives their gradients."""

    def __init__(self, options: ZeroOptions, units: Mapping[str, list[Weight]], spec: RankSpec) -> None:
        """Allocate and initialise all weights. Collective: all ranks call this.

        Args:
            units: unit name -> its weights.
            spec: the rank, with the sharding group of each unit.
        """
        self.options, self.mesh, self.groups = options, options.mesh, spec.groups.values()
        # contributions that a Backward postpones (zero-bubble); None: add them to their buffers at once
        self.queue: list[tuple[Weight, GradWriter]] | None = None
        # one allocation for gathered weights; the program assigns the offset of every unit (`plan.program.arena`)
        self.arena = torch.empty(0, dtype=options.dtype, device=options.mesh.device)
        self._arena_allocation = options.tracker.allocate("buffers", 0)
        flats = [FlatUnit(name, weights, options.mesh, spec) for name, weights in units.items()]
        order = {unit: number for number, unit in enumerate(spec.offloaded_units)}  # order of updates
        on_host = [flat for flat in flats if flat.on_host]
        hosts = self._host_buffers(sorted(on_host, key=lambda flat: order.get(flat.name, len(order))))
        device = Home(options.mesh.device)
        self.units = {flat.name: ParamUnit(flat, options, hosts.get(flat.name, device)) for flat in flats}
        self._bind_persistent_gradients()
        self._gradients: dict[Weight, UnitGradients] = {}
        for unit in self.units.values():
            for weight, _ in unit.flat.members:
                self._gradients[weight], weight.owner = unit.gradients, self
        self.reducers = {group: self._reducer(group) for group in self.groups}
        self.sync_params()

    def _host_buffers(self, units: list[FlatUnit]) -> Mapping[str, HostBuffer]:
        options = self.options
        if not units:
            return {}
        link = HostLink(options.mesh.device, options.mesh.copied)
        if options.config.optimizer.optimizer_nvme_offload:
            return file_buffers(units, options, link)
        return {unit.name: HostBuffer(unit, options, link) for unit in units}

    def _reducer(self, group: ShardingGroup) -> Reducer:
        o, zero = self.options, self.options.config.zero
        reduces = group.policy.optimizer and o.config.trains
        ranges = [unit.flat.ranges for unit in self.units.values() if reduces and unit.flat.group == group]
        axis = self.mesh.axis(group.axis)
        buckets = plan_buckets(zero.reduce_bucket_size, ranges, axis.rank, zero.overlap_comm)
        return Reducer(
            axis=axis,
            buckets=buckets,
            dtype=o.grad_dtype,
            device=self.mesh.device,
            tracker=o.tracker,
            overlap=zero.overlap_comm,
        )

    def start_reduce(self, unit: str) -> Pending:
        """Sum a unit's gradients over its sharding group."""
        found = self.units[unit]
        return found.gradients.start_reduce(self.reducers[found.flat.group])

    def _bind_persistent_gradients(self) -> None:
        """Place gradients that outlive their unit's backward in one allocation (--contiguous-checkpointing)."""
        sizes = [numel for unit in self.units.values() for numel in unit.gradients.persistent_numel]
        arena = torch.empty(sum(sizes), dtype=self.options.grad_dtype, device=self.mesh.device)
        parts = iter(arena.split(sizes))
        for unit in self.units.values():
            unit.gradients.bind_persistent(next(parts), next(parts))  # unsharded, sharded

    def reserve(self, numel: int) -> None:
        """Grow the arena to `numel` elements. No weights may be gathered."""
        if numel <= self.arena.numel():
            return
        for unit in self.units.values():
            unit.weights.forget_arena()
        self.arena = self.arena.new_empty(0)  # free the old buffer before allocating the larger one
        self._arena_allocation.end()
        self.arena = self.arena.new_full((numel,), torch.nan)
        self._arena_allocation = self.options.tracker.allocate("buffers", self.arena.nbytes)

    def sync_params(self) -> None:
        """Cast the master weights, all-gather them to the ranks that keep whole weights, and wait."""
        for unit in self.units.values():
            unit.home.release()  # of the copies of a step, which orders its own by its program
        for unit in self.units.values():
            unit.at_rest.cast()
            unit.at_rest.start_fetch().wait()
            unit.weights.start_sync().wait()
        for unit in self.units.values():
            unit.home.flush()

    def accumulate_grad(self, weight: Weight, write: GradWriter) -> None:
        """Add a contribution to a weight's gradient, now or when the queue is processed."""
        if self.queue is not None:
            self.queue.append((weight, write))
        else:
            self._gradients[weight].accumulate(weight, write)

    @property
    def trained_units(self) -> list[ParamUnit]:
        return [unit for unit in self.units.values() if unit.flat.trains]

    def gradient_square_sum(self, tied: str | None) -> torch.Tensor:
        """Return the sum of squares of the whole model's gradients, a scalar in fp64 on the device.

        Sharded, replicated and tied parameters are counted once.
        """
        mesh = self.mesh
        units = [unit for unit in self.trained_units if unit.name != tied or mesh.pp.is_first]
        pieces: list[list[torch.Tensor | float]] = []
        for group in self.groups:
            own = [unit.gradients for unit in units if unit.flat.group == group]
            pieces.append([piece for each in own for piece in each.counted()])
        total = mesh.control_sum(square_sums(pieces, mesh.device), mesh.tp, mesh.pp)
        for group, part in zip(self.groups, total.split(1), strict=True):
            if group.norm_axis:
                mesh.control_sum(part, mesh.axis(group.norm_axis))  # in place: `part` is a view of `total`
        return total.sum()

    def discard_gradients(self) -> None:
        """Free all gradients, after a skipped step or an exception."""
        self.queue = None
        for unit in self.units.values():
            unit.gradients.discard()
