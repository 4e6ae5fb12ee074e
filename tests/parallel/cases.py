"""Small models and batches for the parity matrix, and the functions that ranks run on them."""

import contextlib
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.options.batch_sizes import PADDING
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.step.batch import MicroBatch
from megazero.engine.step.engine import Engine
from megazero.flags.config import (
    ActivationConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
    ZeroConfig,
)
from megazero.flags.resolve import resolve
from megazero.observe.bad_step import diagnose_step
from megazero.observe.layer_statistics import LayerStatistics
from megazero.observe.memory_report import explain_out_of_memory
from megazero.observe.step_metrics import ExpertLoads, expert_loads, memory_bytes
from megazero.run.averages import averaged_weights

# Odd on purpose: 5 layers, 6 heads, a prime vocabulary, a sequence that no axis divides. Weights of 0.05: with 0.02 in
# so narrow a model, gradients of queries and keys come near fp32's rounding, and Adam makes a full step of their noise.
MODEL = ModelConfig(
    num_layers=5, hidden_size=48, num_attention_heads=6, seq_length=11, vocab_size=101, init_method_std=0.05
)
STEPS = 3  # the first weights, an update with fresh moments, one with kept moments
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5)
EMA_DECAY = 0.6  # the third change of an average has the weight 0.4, and not a third
ENDS = 20  # ids below end a document: two or three in a sample
RESETS = {  # level -> the options that restart with a document
    "": DataConfig(),
    "attention": DataConfig(tokenizer="byte", reset_attention_mask=True),
    "positions": DataConfig(tokenizer="byte", reset_position_ids=True),
    "documents": DataConfig(packing="best-fit"),  # no target behind the end of a document; padding
}

# options of the model that are in a case's name
NAMED = {
    "num_layers",
    "seq_length",
    "num_attention_heads",
    "untie_embeddings",
    "hidden_dropout",
    "attention_dropout",
    "architecture",
    "activation",
    "num_query_groups",
    "kv_channels",
    "qk_layernorm",
    "window_size",
    "layer_pattern",
    "attention_softcap",
    "attention_scale",
    "qk_norm_all_heads",
    "embedding_multiplier",
    "logits_divisor",
    "final_softcap",
    "rotary_percent",
    "rotary_interleaved",
    "rope_scaling_factor",
    "rope_scaling_type",
    "local_rotary_base",
    "residual_multiplier",
    "num_experts",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_expert_capacity_factor",
    "mtp_num_layers",
    "mtp_loss_scaling_factor",
}


class Case(NamedTuple):
    """A layout, with options of the model and the run."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    exchange: str = "all-gather"
    ep: int = 1
    etp: int = 0
    zero: int = 0
    recompute: str = "none"
    pa: bool = False
    host: bool = False
    md: bool = False
    sp: bool = False
    loss_chunk: int = 0
    compile: bool = False
    schedule: str = "1f1b"
    micro_batches: int = 2
    precision: str = "fp32"
    grad_dtype: str = "fp32"
    options: tuple[tuple[str, object], ...] = ()  # of ZeroConfig
    frozen: tuple[str, ...] = ()
    model: ModelConfig = MODEL
    batch: int = 12
    chunks: int = 1
    split: str = ""
    backlog: int = 0
    reset: str = ""
    kernels: str = "auto"
    corpora: int = 1
    device: str = "cpu"
    targets: str = "most"
    optimizer: str = "adamw"
    moments: str = "fp32"
    masters: str = "fp32"
    ema: int = 0  # updates between two changes of the running average of the weights
    offload: float = 0.0  # share of the elements with states in host memory
    disk: bool = False  # these states are in a file
    stats: bool = False  # statistics per layer in every step
    micro_batch_size: int = 0  # 0: the batch is whole micro-batches, equally many on each replica

    @property
    def samples(self) -> int:
        """Samples of a micro-batch."""
        return self.micro_batch_size or self.batch // self.dp // self.micro_batches

    @property
    def layout(self) -> Layout:
        return self.resolved()[1]

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def __str__(self) -> str:
        recompute = {"none": "", "full": "recompute", "selective": "selective"}[self.recompute]
        words = [
            (True, f"pp{self.pp}-dp{self.dp}-tp{self.tp}-zero{self.zero}-M{self.micro_batches}"),
            (self.cp > 1, f"cp{self.cp}-{self.exchange}"),
            (self.ep > 1 or self.etp, f"ep{self.ep}-etp{self.etp}"),
            (self.pp > 1 or self.schedule != "1f1b", self.schedule),
            (self.chunks > 1, f"v{self.chunks}"),
            (self.split, f"split{self.split}"),
            (self.backlog, f"backlog{self.backlog}"),
            (recompute, recompute),
            *((getattr(self, name), name) for name in ("pa", "host", "md", "sp", "compile")),
            (self.loss_chunk, f"chunk{self.loss_chunk}"),
            (self.precision not in ("fp32", "fp64"), self.precision),
            (self.grad_dtype != "fp32", "grad16"),
            *((True, f"{name}={value}") for name, value in self.options),
            (self.frozen, "frozen"),
            (self.reset, f"reset-{self.reset}"),
            (self.targets != "most", f"targets-{self.targets}"),
            (self.kernels != "auto", self.kernels),
            (self.device != "cpu", self.device.replace(" ", "-")),
            (self.corpora > 1, f"corpora{self.corpora}"),
            (self.batch != 12, f"batch{self.batch}"),
            (self.micro_batch_size, f"by{self.micro_batch_size}"),
            (self.optimizer != "adamw", self.optimizer),
            (self.moments != "fp32", f"moments-{self.moments}"),
            (self.masters != "fp32", f"masters-{self.masters}"),
            (self.ema, f"ema{self.ema}"),
            (self.stats, "stats"),
            (self.offload, f"offload{self.offload:g}{'-disk' * self.disk}"),
        ]
        changed = {n: v for n, v in vars(self.model).items() if v != getattr(MODEL, n) and n in NAMED}
        return "-".join([*(word for given, word in words if given), *(f"{n}={v}" for n, v in changed.items())])

    def config(self) -> Config:
        return self.resolved()[0]

    def resolved(self) -> tuple[Config, Layout]:
        config = Config(
            model=self.model,
            training=TrainingConfig(
                micro_batch_size=self.samples,
                global_batch_size=self.batch,
                train_iters=STEPS,
                precision=self.precision,
                grad_dtype=self.grad_dtype,
                freeze_parameters=self.frozen,
                compile=self.compile,
                fused_kernels=self.kernels,
                initial_loss_scale=2.0**12,  # these models' gradients are large: none overflows
            ),
            optimizer=replace(
                OPTIMIZER,
                optimizer=self.optimizer,
                optimizer_cpu_offload=self.offload > 0,
                optimizer_offload_fraction=self.offload or 1.0,
                optimizer_nvme_offload=tempfile.gettempdir() if self.disk else "",
                adam_moments=self.moments,
                master_weights=self.masters,
                ema_interval=self.ema,
                ema_decay=EMA_DECAY if self.ema else OPTIMIZER.ema_decay,
            ),
            zero=ZeroConfig(zero_stage=self.zero, poison_buffers=True, **dict(self.options)),
            activations=ActivationConfig(self.recompute, self.pa, self.host, self.md, self.loss_chunk),
            log=LogConfig(stats_interval=int(self.stats)),
            data=replace(RESETS[self.reset], data_path=("1", "some") * self.corpora * (self.corpora > 1)),
        )
        parallel = replace(
            config.parallel,
            tensor_model_parallel_size=self.tp,
            context_parallel_size=self.cp,
            cp_exchange=self.exchange if self.cp > 1 or self.exchange == "ring" else "auto",
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            pipeline_model_parallel_size=self.pp,
            pipeline_schedule=self.schedule,
            virtual_pipeline_stages=self.chunks,
            pipeline_split=self.split,
            zero_bubble_backlog=self.backlog,
            sequence_parallel=self.sp,
        )
        return resolve(replace(config, parallel=parallel), self.world, 0, declare)


def packed(case: Case) -> bool:
    return RESETS[case.reset].packing != "split"


def held_tokens(case: Case, row: int) -> int:
    """Return the inputs of a sample before its padding, if samples are packed."""
    return case.model.seq_length - row % 3


def document_starts(case: Case, ids: torch.Tensor) -> torch.Tensor | None:
    """Find where the document of each token begins, [B, s]; None if nothing restarts."""
    if not case.reset:
        return None
    starts = torch.zeros_like(ids)
    for row, sample in enumerate(ids.tolist()):
        for place, token in enumerate(sample[:-1]):
            starts[row, place + 1] = place + 1 if token < ENDS else starts[row, place]
        if packed(case):  # padding is one document
            starts[row, held_tokens(case, row) :] = held_tokens(case, row)
    return starts


def global_batch(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, labels, loss mask [B, s]; two batches in turn, so that something is learned. The mask is uneven."""
    generator = torch.Generator().manual_seed(100 + step % 2)
    shape = case.batch, case.model.seq_length + 1
    tokens = torch.randint(0, case.model.vocab_size, shape, generator=generator)
    mask = (torch.rand(case.batch, case.model.seq_length, generator=generator) < 0.8).float()
    if case.targets == "last":
        mask[:, :-2] = 0.0
    if case.targets == "uneven":  # from none to all of a sample
        kept = (torch.arange(case.batch) + 1) % 4 / 3 * case.model.seq_length
        mask = (torch.arange(case.model.seq_length) < kept[:, None]).float()
    if packed(case):
        mask[tokens[:, :-1] < ENDS] = 0.0
        for row in range(case.batch):
            held = held_tokens(case, row)
            tokens[row, held:], mask[row, held - 1 :] = 0, 0.0
            if case.targets == "last":
                mask[row, held - 3 : held - 1] = 1.0
    return tokens[:, :-1], tokens[:, 1:], mask


def reference_batches(case: Case) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """The global batches of all steps, with where their documents begin."""
    return [(*batch, document_starts(case, batch[0])) for batch in (global_batch(case, step) for step in range(STEPS))]


def micro_batches(case: Case, mesh: Mesh, step: int) -> list[MicroBatch]:
    """This rank's: micro-batch m of rank r has samples (m dp + r) b ...; behind the batch's last, padding."""
    batch = global_batch(case, step)
    starts, b, found = document_starts(case, batch[0]), case.samples, []
    missing = case.micro_batches * case.dp * b - case.batch
    assert 0 <= missing < case.dp * b, case
    ids, labels, mask = (torch.cat([each, each.new_zeros(missing, each.shape[1])]) for each in batch)
    if starts is not None:
        starts = torch.cat([starts, starts.new_zeros(missing, starts.shape[1])])
    for m in range(case.micro_batches):
        start = (m * case.dp + mesh.dp.rank) * b
        part = slice(start, start + b)
        numbers = tuple(step * case.batch + i if i < case.batch else PADDING for i in range(start, start + b))
        document = None if starts is None else starts[part]
        corpora = corpora_of(case, numbers) if case.corpora > 1 else ()
        found.append(MicroBatch(ids[part], labels[part], mask[part], numbers, document, corpora))
    return found


def corpora_of(case: Case, samples: Iterable[int]) -> tuple[int, ...]:
    """Number of the corpus of each sample; the last corpus has none."""
    return tuple(sample * 5 // 3 % (case.corpora - 1) for sample in samples)


class Outcome(NamedTuple):
    """A rank's results, one list entry per step."""

    losses: list[float]
    norms: list[float]
    sent: list[dict[str, int]]
    memory: list[dict[str, int]]
    by_corpus: list[tuple[float | None, ...]]
    experts: list[ExpertLoads | None]
    ahead: list[tuple[float, ...]]  # losses of the modules of multi-token prediction
    layers: list[dict[str, dict[str, float]]]  # statistics per layer, by key of metrics.jsonl
    averaged: list[float]  # losses of the averaged weights, since the average has changed


def new_engine(rank: int, case: Case) -> Engine:
    mesh = Mesh.build(case.layout, rank, torch.device("cpu"))
    return Engine(case.config(), mesh, explain=explain_out_of_memory, diagnose=diagnose_step)


def evaluate(rank: int, case: Case) -> tuple[float, int]:
    engine = new_engine(rank, case)
    return engine.evaluate(micro_batches(case, engine.mesh, 0))


def train(rank: int, case: Case, steps: int = STEPS) -> Outcome:
    """Train a few steps as rank `rank` of a case."""
    return train_on(Mesh.build(case.layout, rank, torch.device("cpu")), case, steps)


def train_on(
    mesh: Mesh,
    case: Case,
    steps: int = STEPS,
    around_step: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Outcome:
    """Train a few steps on a mesh of the case's layout."""
    engine = Engine(case.config(), mesh, case.corpora)
    outcome, statistics = Outcome([], [], [], [], [], [], [], [], []), LayerStatistics(engine)
    before = mesh.sent()
    for step in range(steps):
        batches = micro_batches(case, mesh, step)
        with around_step():
            if case.stats:
                statistics.begin()
            result = engine.train_step(step + 1, batches, case.batch)
            if case.stats:
                outcome.layers.append(statistics.end(result.grad_norm))
        after = mesh.sent()
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
        outcome.sent.append({kind: after[kind] - before[kind] for kind in after})
        outcome.memory.append(memory_bytes(engine, result))
        outcome.by_corpus.append(result.loss_by_corpus)
        outcome.experts.append(expert_loads(result, case.model))
        outcome.ahead.append(result.mtp_losses)
        if engine.averages:
            with averaged_weights(engine):
                total, targets = engine.evaluate(batches)
            outcome.averaged.append(total / targets)
        before = mesh.sent()
    return outcome
