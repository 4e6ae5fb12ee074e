"""One rank's training engine: model, ZeRO, recompute and pipeline; a training step; an evaluation.

Shapes: b micro-batch, M micro-batches of a step, T' tokens of the residual stream on this rank, h hidden, v vocabulary.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from megazero.engine.activations.store import KeptInputs
from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.layers.context import Context
from megazero.engine.model.stage import Stage, block_numbers, declare
from megazero.engine.optim.step import StepParams
from megazero.engine.options.batch_sizes import micro_batches
from megazero.engine.options.schema import DocumentOptions, StepConfig
from megazero.engine.plan.layout.dealing import rank_tokens
from megazero.engine.plan.program.program import Program, program
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.engine.plan.schedule.schedules import EVALUATION
from megazero.engine.step.batch import Dealer, MicroBatch, Uploaded, sum_by_corpus, upload_step
from megazero.engine.step.interpreter import ActivationSpec, Compute, Interpreter
from megazero.engine.step.optimization import LossScale, clip_factor, learning_rate
from megazero.engine.step.results import Computed, StepResult
from megazero.engine.step.routers import Routers
from megazero.engine.zero.flat_unit import ZeroOptions
from megazero.engine.zero.zero import Zero

Explain = Callable[[Exception, "Engine", Program], str]
# (engine; samples of each micro-batch; repeats the step's gradients, None: without need) -> why the step is skipped
Diagnose = Callable[["Engine", list[tuple[int, ...]], Callable[[], None] | None], str]


class LossScaleExhausted(Exception):
    """fp16 gradients overflow at the lowest loss scale. No update was made."""


class Engine:
    """One rank's part of the model, its optimizer and its programs."""

    def __init__(
        self,
        config: StepConfig,
        mesh: Mesh,
        num_corpora: int = 1,
        explain: Explain | None = None,
        diagnose: Diagnose | None = None,
    ) -> None:
        """Build the model with its initial weights on this rank's device.

        Args:
            config: resolved; see `choose_kernels` and `choose_matmul_backend`.
            num_corpora: number of corpora with losses of their own.
            explain: text to add to an exception of a step's operation, such as a memory report; empty: none.
            diagnose: names a gradient that is not finite, on all ranks; may discard the gradients and repeat the step.
        """
        self.explain = explain or (lambda error, engine, step: "")
        self.diagnose = diagnose or (lambda engine, samples, repeat: "a gradient is not finite")
        self.num_corpora = num_corpora
        self.config, self.mesh, self.tracker = config, mesh, MemoryTracker()
        self.updates = 0  # so far, for Adam's bias correction
        self.averages = 0  # changes of the running average so far
        self.scale = LossScale.of(config.training)
        self.layers = declare(config.model, mesh.layout.tp)
        self.spec = rank_spec(config, mesh.layout, mesh.pp.rank, declare)
        self.programs: dict[tuple[str, int], Program] = {}
        recomputed = block_numbers(name for name, layer in self.spec.layers.items() if self.spec.recomputes(layer))
        context = Context.of(config, mesh, self.tracker, recomputed)
        model = config.model
        self.dealer = Dealer.of(config, mesh.layout, mesh.cp.rank)
        self.model = Stage(model, list(self.spec.layers), context, config.training.freeze_parameters)
        self.routers = Routers.of(model, self.model, mesh.device)
        self.zero = Zero(ZeroOptions(config, mesh, self.tracker), self.model.units, self.spec)
        step = self.program(config.schedule, config.micro_batches(mesh.layout.dp))
        self.zero.reserve(step.arena_numel)
        tokens = context.stream.tokens(rank_tokens(config, mesh.layout, mesh.cp.rank))
        activation = ActivationSpec((len(tokens), model.hidden_size), context.dtype, mesh.device)
        self.interpreter = Interpreter(
            layers={name: (layer, self.model.layer(name).compute) for name, layer in self.spec.layers.items()},
            zero=self.zero,
            kept=self._kept_inputs(activation),
            pp=mesh.pp,
            route=self.spec.route,
            activation=activation,
            tracker=self.tracker,
            tied=self.layers.tied,
        )

    def _kept_inputs(self, activation: ActivationSpec) -> KeptInputs | None:
        activations = self.config.activations
        if activations.recompute != "full":
            return None
        return KeptInputs(
            numel=math.prod(activation.shape),
            dtype=activation.dtype,
            device=activation.device,
            tracker=self.tracker,
            tp=self.mesh.tp if activations.partition_activations else None,
            on_host=activations.checkpoint_in_cpu,
            contiguous=activations.contiguous_checkpointing,
            sent=self.mesh.copied,
            outlive=self.config.copies_kept_inputs,
        )

    def program(self, schedule: str, micro_batches: int) -> Program:
        """Return this rank's program for a schedule and a number of micro-batches.

        All programs gather weights into the arena of the configured step, so an evaluation takes no more memory.
        """
        config, key = self.config, (schedule, micro_batches)
        if key not in self.programs:
            step = config.schedule, config.micro_batches(self.mesh.layout.dp)
            limit = None if key == step else self.program(*step).arena_numel
            self.programs[key] = program(self.spec, *key, limit)
        return self.programs[key]

    # -- a step

    @contextlib.contextmanager
    def _explained(self, step: Program) -> Iterator[None]:
        """Within: add the explanation to an exception."""
        try:
            yield
        except Exception as error:
            if note := self.explain(error, self, step):
                error.add_note(note)
            raise

    def train_step(self, iteration: int, batches: Sequence[MicroBatch], samples: int = 0) -> StepResult:
        """Run one iteration, counted from 1, over this rank's micro-batches.

        Args:
            samples: of the global batch without padding; 0: no rank has padding.

        Note [one wait]: the host waits for the GPU once per step. Between gradients and update it reads the number of
        targets, the loss and the norm together. So it decides whether to skip the step before a weight has changed, and
        the GPU computes the update while the host launches the next step's first layers.
        """
        self.begin()
        step = self.program(self.config.parallel.pipeline_schedule, len(batches))
        uploaded = self._upload(batches, training=True, documents=self.config.documents)
        scale = self.scale.value if self.scale else 1.0
        # Note [the divisor in fp16]: gradients that are divided by the millions of targets of a global batch underflow
        # in fp16. So they are divided by the targets of an average micro-batch, and their sum by `parts`, the number of
        # micro-batches without padding, which is the same in every layout.
        parts = self._parts(batches, samples) if self.scale else 1
        found = self._compute_gradients(step, uploaded, scale * parts)
        lr, gradient_bytes = learning_rate(self.config.optimizer, iteration), self.tracker.now["gradients"]
        skip_reason = None
        if found.targets and math.isfinite(found.norm):
            self._update(step, found, lr, scale * parts)
        else:
            skip_reason = self._skip(step, batches, uploaded, found)
        overflows = skip_reason is not None and found.targets > 0
        if self.scale and overflows and self.scale.exhausted:
            raise LossScaleExhausted(
                f"iteration {iteration}: gradients overflow at the smallest loss scale (--min-loss-scale {scale:g}), "
                f"first: {skip_reason}; the loss is {found.loss:g}. Lower --lr, or train in bf16"
            )
        self.scale = self.scale and self.scale.after(overflows)
        return StepResult(
            loss=found.loss,
            grad_norm=found.norm,
            lr=lr,
            loss_scale=scale,
            skipped=skip_reason is not None,
            skip_reason=skip_reason,
            gradient_bytes=gradient_bytes,
            imbalance=uploaded.imbalance,
            loss_by_corpus=found.means if self.num_corpora > 1 else (),
            targets=found.targets,
            routed=found.routed,
            mtp_losses=found.mtp_losses,
        )

    def _compute_gradients(self, step: Program, uploaded: Uploaded, factor: float) -> Computed:
        """Compute the step's gradients, multiplied by `factor`, and read their numbers: see Note [one wait]."""
        counted = self._count_targets(uploaded.targets)
        model, corpora = self.config.model, self.num_corpora
        by_depth = torch.stack([counted[:corpora].sum(), *counted[corpora:]])
        seeds = torch.full_like(by_depth, factor)
        if model.mtp_num_layers:
            seeds[1:] *= model.mtp_loss_scaling_factor / model.mtp_num_layers
        # `scalar / tensor` multiplies by a rounded reciprocal; div_ rounds once
        seeds.div_(by_depth.clamp(min=1))
        losses = self._run(step, uploaded, seeds)
        choices = self.routers.summed(self.mesh)
        targets, sums, [square_sum], routed = self._read(
            counted, self._global_losses(losses, uploaded), self.interpreter.square_sum[None], choices
        )
        return Computed(
            targets_by_corpus=targets[:corpora],
            loss_sums=sums[:corpora],
            mtp_losses=tuple(x / n if n else math.nan for x, n in zip(sums[corpora:], targets[corpora:], strict=True)),
            norm=math.sqrt(square_sum) / factor,
            choices=choices,
            routed=routed,
            seeds=seeds,
        )

    def _update(self, step: Program, found: Computed, lr: float, factor: float) -> None:
        """Clip and update; gradients are `factor` times the model's."""
        with self._explained(step):
            divisor = factor / clip_factor(found.norm, self.config.optimizer.clip_grad)
            self.interpreter.update(step, self._step_params(lr, divisor))
        self.routers.update(found.choices)
        self.updates += 1
        self.averages += self._averages(self.updates)

    def _skip(self, step: Program, batches: Sequence[MicroBatch], uploaded: Uploaded, found: Computed) -> str:
        """Discard the gradients, and return why: no target counts, or a gradient is not finite."""
        reason = "no target counts in this batch"
        if found.targets:
            ordinary = self.scale is not None and math.isfinite(found.loss)  # overflow in fp16

            def repeat() -> None:
                self._run(step, uploaded, found.seeds)

            reason = self.diagnose(self, [batch.samples for batch in batches], None if ordinary else repeat)
        self.zero.discard_gradients()
        return reason

    def _parts(self, batches: Sequence[MicroBatch], samples: int) -> int:
        """Count the micro-batches of all replicas that are not padding."""
        each = len(batches[0].samples)
        return micro_batches(samples or len(batches) * each * self.mesh.dp.size, each, 1)

    def _averages(self, update: int) -> bool:
        """Return whether an update, counted from 1, changes the running average of the weights."""
        interval = self.config.optimizer.ema_interval
        return interval > 0 and update % interval == 0

    def _step_params(self, lr: float, divisor: float) -> dict[torch.device, StepParams]:
        """Return the inputs of updates, by the device that computes them."""
        found, average = {}, 0.0
        if self._averages(self.updates + 1):
            average = max(1 - self.config.optimizer.ema_decay, 1 / (self.averages + 1))
        for device in {unit.home.device for unit in self.zero.trained_units}:
            number = torch.full((), self.updates + 1.0, dtype=torch.float32, device=device)
            by = None if divisor == 1.0 else torch.full_like(number, divisor, dtype=self.zero.options.master_dtype)
            found[device] = StepParams(
                config=self.config.optimizer,
                lr=lr,
                step=number,
                divisor=by,
                number=self.updates + 1,
                average=average,
            )
        return found

    def begin(self) -> None:
        """Reset per-iteration peaks and discard state left by a failed step."""
        self.interpreter.reset()
        self.routers.reset()
        self.tracker.begin_iteration()
        if self.mesh.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.mesh.device)

    def evaluate(self, batches: Sequence[MicroBatch]) -> tuple[float, int]:
        """Return (sum of the cross-entropies, number of targets) of a global batch, on all ranks."""
        sums, targets = self.evaluate_by_corpus(batches)
        return sum(sums), sum(targets)

    @torch.no_grad()
    def evaluate_by_corpus(self, batches: Sequence[MicroBatch]) -> tuple[list[float], list[int]]:
        """Return the sums of the cross-entropies and the numbers of targets, per corpus of a global batch."""
        losses, uploaded = self.forward(batches)
        sums, targets = self._read(self._global_losses(losses, uploaded), self._count_targets(uploaded.targets))
        return sums, [int(count) for count in targets]

    @torch.no_grad()
    def forward(
        self, batches: Sequence[MicroBatch], head: Compute | None = None, documents: DocumentOptions | None = None
    ) -> tuple[dict[int, torch.Tensor], Uploaded]:
        """Run the program of an evaluation.

        Args:
            head: replaces the model's head; returns a vector for a micro-batch.
            documents: options that replace the run's.

        Returns:
            micro-batch -> its losses, or the result of `head`; empty except on the last stage; and the micro-batches.
        """
        uploaded = self._upload(batches, training=False, documents=documents or self.config.documents)
        return self._run(self.program(EVALUATION, len(batches)), uploaded, head=head), uploaded

    def _upload(self, batches: Sequence[MicroBatch], training: bool, documents: DocumentOptions) -> Uploaded:
        return upload_step(
            batches,
            stream=self.model.stream,
            documents=documents,
            device=self.mesh.device,
            dealer=self.dealer,
            training=training,
            num_corpora=self.num_corpora,
            by_sample=training and self.config.model.num_experts > 0,
            depths=self.config.model.mtp_num_layers if training else 0,
        )

    def _read(self, *tensors: torch.Tensor) -> list[list[float]]:
        """Return the values of 1D tensors, which are read together: see Note [one wait]."""
        values = iter(self.mesh.read(torch.cat(tensors)))
        return [list(itertools.islice(values, len(x))) for x in tensors]

    def _run(
        self,
        step: Program,
        uploaded: Uploaded,
        seeds: torch.Tensor | None = None,
        head: Compute | None = None,
    ) -> dict[int, torch.Tensor]:
        micro_batches = uploaded.micro_batches
        if seeds is not None:
            micro_batches = [each.seeded(seeds) for each in micro_batches]
        with self._explained(step):
            return self.interpreter.run(step, micro_batches, None if seeds is None else seeds[0], head)

    def wait(self) -> None:
        """Wait for all outstanding collectives; call before shutdown."""
        self.interpreter.wait_all()

    def _count_targets(self, own: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' unmasked targets, [num_corpora + depths]. Loss and gradients are divided by their sum."""
        return self.mesh.control_sum(own, self.mesh.data)

    def _global_losses(self, losses: Mapping[int, torch.Tensor], uploaded: Uploaded) -> torch.Tensor:
        """Sum losses as `Uploaded.targets` over the ranks of `data`, and send them to all stages.

        Args:
            losses: micro-batch -> its samples' losses, by depth, [(1 + D) b]; empty except on the last stage.
        """
        sums = torch.zeros_like(uploaded.targets)
        if losses:
            depths = 1 + len(sums) - self.num_corpora
            found = torch.cat([losses[i].view(depths, -1) for i in range(len(uploaded.micro_batches))], 1)
            of_corpora = sum_by_corpus(found[0], uploaded.corpora, self.num_corpora)
            sums = torch.cat([of_corpora, found[1:].sum(1)])
        return self.mesh.control_sum(sums, self.mesh.data, self.mesh.pp)
