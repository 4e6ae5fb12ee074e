"""`StepConfig`: the options of a step, as one frozen dataclass tree."""

from dataclasses import dataclass, field

from megazero.engine.options.batch_sizes import micro_batches
from megazero.engine.options.model_options import ModelConfig as ModelConfig
from megazero.engine.options.optimizers import BYTES as BYTES
from megazero.engine.options.step_options import ActivationConfig as ActivationConfig
from megazero.engine.options.step_options import DataConfig as DataConfig
from megazero.engine.options.step_options import OptimizerConfig as OptimizerConfig
from megazero.engine.options.step_options import ParallelConfig as ParallelConfig
from megazero.engine.options.step_options import TrainingConfig as TrainingConfig
from megazero.engine.options.step_options import ZeroConfig as ZeroConfig
from megazero.engine.plan.schedule.schedules import EVALUATION, SCHEDULES

# Bytes of a chunk of logits, and its fewest tokens: each chunk reads and writes the gradient of the whole table once,
# which takes a fifth of the time of 128 tokens on a CPU (benchmarks/head.py).
CPU_LOGITS, GPU_LOGITS, LEAST_CHUNK = 1 << 25, 1 << 29, 512


@dataclass(frozen=True)
class StepConfig:
    """The options of a training step. `flags.config.Config` adds those of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    data: DataConfig = field(default_factory=DataConfig)

    @property
    def trains(self) -> bool:
        """True; a run that evaluates alone overrides it: it has no gradients and no moments."""
        return True

    @property
    def schedule(self) -> str:
        """Schedule of the run's own program, for `plan.program`: --pipeline-schedule, or forward passes alone."""
        return self.parallel.pipeline_schedule if self.trains else EVALUATION

    @property
    def copies_kept_inputs(self) -> bool:
        """True if inputs that are kept in slots are copied for recompute: queued weight gradients outlive the slots."""
        activations = self.activations
        slots = activations.checkpoint_in_cpu or activations.contiguous_checkpointing
        return slots and SCHEDULES[self.parallel.pipeline_schedule].backlog and not activations.partition_activations

    def loss_chunk(self, device_type: str, tp: int) -> int:
        """Return the tokens whose logits a rank holds together; 0: all of a micro-batch."""
        asked, training = self.activations.loss_chunk_tokens, self.training
        if asked >= 0:
            return asked
        if BYTES[training.grad_dtype] == 2:
            return 0
        width = -(-self.model.vocab_size // tp) * BYTES[training.precision]
        return max(LEAST_CHUNK, (CPU_LOGITS if device_type == "cpu" else GPU_LOGITS) // width)

    def micro_batches(self, dp: int) -> int:
        """Micro-batches of an iteration of the full global batch on each rank."""
        return micro_batches(self.training.global_batch_size, self.training.micro_batch_size, dp)

    def padding(self, dp: int) -> int:
        """Samples of padding that `dp` replicas compute besides the full global batch."""
        return self.micro_batches(dp) * self.training.micro_batch_size * dp - self.training.global_batch_size
