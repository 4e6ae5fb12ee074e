"""The models of `peer_models` under the data-parallel systems that megazero is measured against.

Every peer has the model as good PyTorch writes it (flash attention, tanh GELU, fused AdamW, gradients clipped with
foreach) and the settings below; anything not named is the peer's default.

Shapes: b micro-batch, s sequence.
"""

import contextlib
import queue
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from benchmarks.peer_models import TorchtitanLlama, plain_model
from megazero.engine.model.stage import declare
from megazero.families import with_traits
from megazero.flags.config import Config, ModelConfig, OptimizerConfig, TrainingConfig, ZeroConfig


@dataclass(frozen=True)
class Work:
    """The model that every system of a run trains, and the number of ranks."""

    num_layers: int
    hidden_size: int
    num_heads: int
    seq_length: int
    vocab_size: int
    micro_batch_size: int
    ranks: int
    precision: str
    architecture: str = "gpt2"
    offload: bool = False  # optimizer states in host memory
    matmul_backend: str = "auto"  # of megazero

    def config(self, stage: int) -> Config:
        """Return megazero's config; the peers read the model and the optimizer from it too."""
        h, n = self.hidden_size, self.num_heads
        model = ModelConfig(self.num_layers, h, 4 * h, n, self.seq_length, self.vocab_size)
        if self.architecture == "llama":  # as many weights in the MLP; groups of two heads
            options = {"num_query_groups": n // 2, "norm_epsilon": 1e-6, "untie_embeddings": True}
            model = replace(
                model, **with_traits({"architecture": "llama"}), ffn_hidden_size=8 * h // 3 // 64 * 64, **options
            )
        return Config(
            model=model,
            training=TrainingConfig(
                self.micro_batch_size,
                precision=self.precision,  # type: ignore[arg-type]
                matmul_backend=self.matmul_backend,  # type: ignore[arg-type]
            ),
            zero=ZeroConfig(stage),  # type: ignore[arg-type]
            optimizer=OptimizerConfig(optimizer_cpu_offload=self.offload),
        )

    def tokens(self, step: int, rank: int) -> torch.Tensor:
        """[b, s + 1] of a rank's micro-batch. Frequencies fall steeply, so that there is something to learn."""
        generator = torch.Generator().manual_seed(step * self.ranks + rank)
        uniform = torch.rand(self.micro_batch_size, self.seq_length + 1, generator=generator)
        return (self.vocab_size * uniform**3).long()

    def inputs(self, step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Arguments of a rank's step: ids and labels, [b, s] each."""
        tokens = self.tokens(step, rank).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _nothing() -> None:
    pass


class Training(NamedTuple):
    """One rank's."""

    step: Callable[..., float]  # (*inputs of this rank) -> loss
    wait_for_all: Callable[[], None] = _nothing  # waits for communication that a step leaves in flight
    check: Callable[[], dict[str, float]] | None = None  # kind -> largest deviation of the results


def _groups(model: nn.Module, c: OptimizerConfig) -> list[dict[str, Any]]:
    """Matrices and embeddings decay; biases and norms do not."""
    named = list(model.named_parameters())
    exempt = [name.endswith("bias") or "norm" in name for name, _ in named]
    return [
        {"params": [p for (_, p), free in zip(named, exempt, strict=True) if free == wanted], "weight_decay": decay}
        for wanted, decay in ((False, c.weight_decay), (True, 0.0))
    ]


def _adamw(c: OptimizerConfig) -> dict[str, Any]:
    return {"lr": c.lr, "betas": (c.adam_beta1, c.adam_beta2), "eps": c.adam_eps, "fused": True}


def _autocast(work: Work, device: torch.device) -> Callable[[], Any]:
    """Autocast for the peers that keep fp32 weights and know no other mixed precision."""
    if work.precision == "fp32":
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, torch.bfloat16)


def _plain_step(model: nn.Module, optimizer: Any, clip: float, cast: Callable[[], Any]) -> Training:
    def step(ids: torch.Tensor, labels: torch.Tensor) -> float:
        with cast():
            loss = model(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return Training(step)


def compiled(work: Work, device: torch.device) -> Training:
    """One process; autocast over fp32 weights. Blocks are compiled once for all, and head and loss together."""
    config = work.config(0)
    model = plain_model(config).to(device)
    for block in model.blocks:
        block.compile()
    model.loss = torch.compile(model.loss)
    optimizer = torch.optim.AdamW(_groups(model, config.optimizer), **_adamw(config.optimizer))
    return _plain_step(model, optimizer, config.optimizer.clip_grad, _autocast(work, device))


def ddp(work: Work, device: torch.device, sharded: bool) -> Training:
    """Gradients as views of the buckets, a static graph; `sharded`: ZeroRedundancyOptimizer, parameters in buckets."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    config = work.config(0)
    plain = plain_model(config).to(device)
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True, static_graph=True)
    groups, settings = _groups(plain, config.optimizer), _adamw(config.optimizer)
    if sharded:
        optimizer: Any = ZeroRedundancyOptimizer(
            groups, optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **settings
        )
    else:
        optimizer = torch.optim.AdamW(groups, **settings)
    return _plain_step(model, optimizer, config.optimizer.clip_grad, _autocast(work, device))


def fsdp2(work: Work, device: torch.device, reshard: bool, build: Callable[[Config], Any] = plain_model) -> Training:
    """A unit per block; embeddings and final norm in the root, which FSDP2 keeps from forward to backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    config = work.config(0)
    plain = build(config).to(device)
    settings: dict[str, Any] = {"mesh": init_device_mesh(device.type, (work.ranks,))}
    if work.precision == "bf16":
        settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in plain.blocks:
        fully_shard(block, reshard_after_forward=reshard, **settings)
    model = fully_shard(plain, **settings)
    optimizer = torch.optim.AdamW(_groups(model, config.optimizer), **_adamw(config.optimizer))
    return _plain_step(model, optimizer, config.optimizer.clip_grad, contextlib.nullcontext)


def torchtitan(work: Work, device: torch.device) -> Training:
    """torchtitan's model code, sharded as its `parallelize_llama` does."""
    if work.architecture != "llama":
        raise ValueError("--torchtitan-python compares a llama; add --architecture llama")
    return fsdp2(work, device, True, lambda config: TorchtitanLlama(config.model, config.training.seed))


def deepspeed(work: Work, device: torch.device, stage: int) -> Training:
    """Torch's fused AdamW as client optimizer; with offload, DeepSpeed's own for CPUs, which it compiles once.

    Stage 3 releases a weight after its use: with DeepSpeed's own limits it would keep a model this small gathered.
    Weights below its persistence threshold stay gathered, as is its default.
    """
    import deepspeed as ds

    config = work.config(stage)
    o = config.optimizer
    model = plain_model(config).to(device)
    if work.precision == "bf16":
        model = model.bfloat16()
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    groups, settings = _groups(model, o), _adamw(o)
    if work.offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        zero["offload_optimizer"] = {"device": "cpu"}
        optimizer = DeepSpeedCPUAdam(groups, lr=o.lr, betas=settings["betas"], eps=o.adam_eps)
    else:
        optimizer = torch.optim.AdamW(groups, **settings)
    engine, *_ = ds.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": work.micro_batch_size,
            "gradient_clipping": o.clip_grad,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
            "bf16": {"enabled": work.precision == "bf16"},
        },
    )

    def step(ids: torch.Tensor, labels: torch.Tensor) -> float:
        loss = engine(ids, labels)
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return Training(step)


def trainer(work: Work, device: torch.device, sharded: bool) -> Training:
    """transformers' Trainer with its own loop, in a thread that waits between steps. It reads a rank's batches, clips,
    updates by torch's fused AdamW and logs nothing. `sharded`: FSDP2 by transformers' DistributedConfig, which runs on
    CPUs too; TrainingArguments.fsdp does not, because accelerate 1.15 ignores it there and trains DDP. Otherwise: DDP.
    """
    import threading

    from torch.distributed.tensor import DTensor
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.distributed import DistributedConfig

    if work.architecture != "llama":
        raise ValueError("--trainer-python compares a llama; add --architecture llama")
    config = work.config(0)
    o, batches, losses = config.optimizer, queue.Queue[Any](), queue.Queue[float]()
    llama = plain_model(config).llama

    class Fed(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            while (batch := batches.get()) is not None:
                yield batch

    class Stepped(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=None)  # this rank's batches alone

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            ids, labels = inputs["ids"].to(device), inputs["labels"].to(device)
            self.shown = model(ids, labels=labels, shift_labels=labels).loss
            return self.shown

    class Told(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            losses.put(float(made.shown.item()))

    if sharded:  # as from_pretrained(distributed_config=...) does
        shards, _, mesh = llama.prepare_distribute_model(DistributedConfig(fsdp_size=work.ranks))
        llama = llama.maybe_distribute_model(llama, shards, mesh)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=device.type == "cpu",
        per_device_train_batch_size=work.micro_batch_size,
        max_steps=1 << 30,
        learning_rate=o.lr,
        lr_scheduler_type="constant",
        weight_decay=o.weight_decay,
        adam_beta1=o.adam_beta1,
        adam_beta2=o.adam_beta2,
        adam_epsilon=o.adam_eps,
        max_grad_norm=o.clip_grad,
        optim="adamw_torch_fused",
        bf16=work.precision == "bf16",
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=False,
    )
    made = Stepped(model=llama, args=arguments, train_dataset=Fed(), callbacks=[Told()])
    assert all(isinstance(p, DTensor) for p in llama.parameters()) == sharded
    threading.Thread(target=made.train, daemon=True).start()

    def step(ids: torch.Tensor, labels: torch.Tensor) -> float:
        batches.put({"ids": ids, "labels": labels})
        return losses.get(timeout=600)

    return Training(step)


def megazero(work: Work, device: torch.device, stage: int) -> Training:
    """Its own engine; the loss is the mean over all ranks."""
    import torch.distributed as dist

    from megazero.engine.mesh.mesh import Mesh
    from megazero.engine.step.batch import MicroBatch
    from megazero.engine.step.engine import Engine
    from megazero.flags.resolve import resolve
    from megazero.run.kernel_choices import choose_matmul_backend

    config, layout = resolve(work.config(stage), work.ranks, 0, declare)
    mesh = Mesh.build(layout, dist.get_rank(), device)
    engine = Engine(choose_matmul_backend(config, mesh)[0], mesh)
    mask = torch.ones(work.micro_batch_size, work.seq_length, device=device)
    samples = tuple(range(work.micro_batch_size))

    def step(ids: torch.Tensor, labels: torch.Tensor) -> float:
        return engine.train_step(1, [MicroBatch(ids, labels, mask, samples)]).loss

    return Training(step, engine.wait)


class System(NamedTuple):
    """A way to train the model; `make(work, device)` gives a rank's training."""

    stage: int  # of ZeRO: with which others it is compared
    label: str
    make: Callable[[Work, torch.device], Training]


SYSTEMS = {
    "ddp": System(0, "torch DDP", lambda w, d: ddp(w, d, False)),
    "zero-redundancy": System(1, "DDP + ZeroRedundancyOptimizer", lambda w, d: ddp(w, d, True)),
    "fsdp2-keep": System(2, "FSDP2, reshard_after_forward=False", lambda w, d: fsdp2(w, d, False)),
    "fsdp2": System(3, "FSDP2, reshard_after_forward=True", lambda w, d: fsdp2(w, d, True)),
    "torchtitan": System(3, "torchtitan's model, FSDP2", torchtitan),
    "trainer0": System(0, "transformers' Trainer, DDP", lambda w, d: trainer(w, d, False)),
    "trainer3": System(3, "transformers' Trainer, FSDP2", lambda w, d: trainer(w, d, True)),
    "deepspeed1": System(1, "DeepSpeed stage 1", lambda w, d: deepspeed(w, d, 1)),
    "deepspeed2": System(2, "DeepSpeed stage 2", lambda w, d: deepspeed(w, d, 2)),
    "deepspeed3": System(3, "DeepSpeed stage 3", lambda w, d: deepspeed(w, d, 3)),
    "megazero0": System(0, "megazero, stage 0", lambda w, d: megazero(w, d, 0)),
    "megazero1": System(1, "megazero, stage 1", lambda w, d: megazero(w, d, 1)),
    "megazero2": System(2, "megazero, stage 2", lambda w, d: megazero(w, d, 2)),
    "megazero3": System(3, "megazero, stage 3", lambda w, d: megazero(w, d, 3)),
}
