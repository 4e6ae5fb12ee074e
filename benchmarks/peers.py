"""The same GPT in plain PyTorch, under the data-parallel systems that megazero is measured against.

Imports torch and megazero's random numbers, and transformers for a llama, so that DeepSpeed can run it in an
environment of its own.

Every peer has the model as good PyTorch writes it (flash attention, tanh GELU, fused AdamW, gradients clipped with
foreach) and the settings below; anything not named is the peer's default.

Shapes: b micro-batch, s sequence, h hidden, n heads, d head dim, v vocabulary.
"""

from __future__ import annotations

import contextlib
import queue
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from megazero.config.schema import Config, ModelConfig, OptimizerConfig, TrainingConfig, ZeroConfig
from megazero.kernels import initial_values
from megazero.model.stage import declare
from megazero.plan.layout.layers import stage_units
from megazero.plan.layout.parameters import LocalBlock
from megazero.plan.layout.topology import Layout


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

    def config(self, stage: int) -> Config:
        """Return megazero's config; the peers read the model and the optimizer from it too."""
        h, n = self.hidden_size, self.num_heads
        model = ModelConfig(self.num_layers, h, 4 * h, n, self.seq_length, self.vocab_size)
        if self.architecture == "llama":  # as many weights in the MLP; groups of two heads
            options = {"num_query_groups": n // 2, "norm_epsilon": 1e-6, "untie_embeddings": True}
            model = replace(model, architecture="llama", ffn_hidden_size=8 * h // 3 // 64 * 64, **options)
        return Config(
            model=model,
            training=TrainingConfig(self.micro_batch_size, precision=self.precision),  # type: ignore[arg-type]
            zero=ZeroConfig(stage),  # type: ignore[arg-type]
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


class PlainBlock(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        h = model.hidden_size
        self.num_heads = model.num_attention_heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.attention = nn.ModuleDict({"qkv": nn.Linear(h, 3 * h), "proj": nn.Linear(h, h)})
        self.mlp = nn.ModuleDict({"up": nn.Linear(h, model.ffn_size), "down": nn.Linear(model.ffn_size, h)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [b, s, h] -> [b, s, h]. Rows of qkv are ordered head, then q, k, v, as megazero's."""
        qkv = self.attention["qkv"](self.norm1(x))
        b, s, _ = qkv.shape  # not x's: under sequence parallelism a rank's x has a part of the sequence
        q, k, v = qkv.view(b, s, self.num_heads, 3, -1).transpose(1, 2).unbind(3)  # [b, n, s, d]
        y = self.attend(q, k, v)
        x = x + self.attention["proj"](y.transpose(1, 2).reshape(b, s, -1))
        return x + self.mlp["down"](F.gelu(self.mlp["up"](self.norm2(x)), approximate="tanh"))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def initial_weights(model: ModelConfig, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (global name, megazero's initial value) of every parameter, whole."""
    for specs in stage_units(declare(model), Layout(), 0).values():
        for spec in specs:
            block = LocalBlock((0,) * len(spec.shape), spec.shape, spec.shape)
            yield spec.name, initial_values.draw(seed, spec, block, 0, block.numel).view(spec.shape)


def draw_weights(module: nn.Module, model: ModelConfig, seed: int) -> None:
    """megazero's initial values for parameters that bear its global names."""
    parameters = dict(module.named_parameters())
    for name, value in initial_weights(model, seed):
        if name in parameters:
            parameter = parameters.pop(name).data
            parameter.copy_(value.view(parameter.shape))
    assert not parameters, f"not initialised: {list(parameters)}"


class PlainGPT(nn.Module):
    """Parameters bear megazero's global names, and hold the same initial values. The token table is tied."""

    def __init__(self, model: ModelConfig, seed: int) -> None:
        super().__init__()
        h = model.hidden_size
        self.token_embedding = nn.Embedding(model.vocab_size, h)
        self.position_embedding = nn.Embedding(model.seq_length, h)
        self.blocks = nn.ModuleList(PlainBlock(model) for _ in range(model.num_layers))
        self.head = nn.ModuleDict({"norm": nn.LayerNorm(h)})
        draw_weights(self, model, seed)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """ids, labels [b, s] -> mean cross-entropy, a scalar."""
        x = self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.head["norm"](x), self.token_embedding.weight)  # [b, s, v]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class PlainLlama(nn.Module):
    """transformers' LlamaForCausalLM with torch's attention, and megazero's initial values."""

    def __init__(self, model: ModelConfig, seed: int) -> None:
        from transformers import LlamaForCausalLM

        from megazero.huggingface.families import family_of

        super().__init__()
        family = family_of(model)
        config = family.to_config(model, None)
        config.use_cache = False
        self.llama = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
        self.blocks = self.llama.model.layers
        self.llama.load_state_dict(family.split(dict(initial_weights(model, seed)), model))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """ids, labels [b, s] -> mean cross-entropy, a scalar."""
        logits = self.llama(ids).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class TorchtitanLlama(nn.Module):
    """torchtitan's Llama 3 model with torch's causal attention, and megazero's initial values."""

    def __init__(self, model: ModelConfig, seed: int) -> None:
        from torchtitan.models.common.attention import ScaledDotProductAttention
        from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
        from torchtitan.models.llama3 import (
            ComplexRoPE,
            Embedding,
            Linear,
            Llama3Model,
            Llama3StateDictAdapter,
            Llama3TransformerBlock,
            RMSNorm,
        )

        from megazero.huggingface.families import family_of

        super().__init__()
        h, v, zeros = model.hidden_size, model.vocab_size, {"weight": nn.init.zeros_}  # overwritten below
        norm = RMSNorm.Config(normalized_shape=h, eps=model.norm_epsilon)
        rotary = ComplexRoPE.Config(
            dim=h // model.num_attention_heads, max_seq_len=model.seq_length, theta=model.rotary_base
        )
        attention = make_gqa_config(
            dim=h,
            n_heads=model.num_attention_heads,
            n_kv_heads=model.query_groups,
            wqkv_param_init=zeros,
            wo_param_init=zeros,
            inner_attention=ScaledDotProductAttention.Config(),
            fuse_qkv=True,
            rope=rotary,
        )
        mlp = make_ffn_config(dim=h, hidden_dim=model.ffn_size, w1_param_init=zeros, w2w3_param_init=zeros)
        block = Llama3TransformerBlock.Config(attention_norm=norm, ffn_norm=norm, attention=attention, feed_forward=mlp)
        config = Llama3Model.Config(
            dim=h,
            vocab_size=v,
            tok_embeddings=Embedding.Config(num_embeddings=v, embedding_dim=h),
            norm=norm,
            lm_head=Linear.Config(in_features=h, out_features=v),
            layers=[block] * model.num_layers,
        )
        self.llama = config.build()
        self.blocks = self.llama.layers.values()
        values = family_of(model).split(dict(initial_weights(model, seed)), model)
        self.llama.load_state_dict(Llama3StateDictAdapter(config, None).from_hf(values))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """ids, labels [b, s] -> mean cross-entropy, a scalar."""
        return F.cross_entropy(self.llama(ids).flatten(0, 1).float(), labels.flatten())


def plain_model(config: Config) -> Any:
    """The model as the peers train it."""
    made = PlainLlama if config.model.architecture == "llama" else PlainGPT
    return made(config.model, config.training.seed)


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
    """One process under torch.compile; autocast over fp32 weights."""
    config = work.config(0)
    model = plain_model(config).to(device)
    optimizer = torch.optim.AdamW(_groups(model, config.optimizer), **_adamw(config.optimizer))
    return _plain_step(torch.compile(model), optimizer, config.optimizer.clip_grad, _autocast(work, device))


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
    """Torch's fused AdamW as client optimizer. Stage 3 releases a weight after its use: with DeepSpeed's own limits it
    would keep a model this small gathered. Weights below its persistence threshold stay gathered, as is its default.
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
    engine, *_ = ds.initialize(
        model=model,
        optimizer=torch.optim.AdamW(_groups(model, o), **_adamw(o)),
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

    from megazero.comm.mesh.mesh import Mesh
    from megazero.data.loader import MicroBatch
    from megazero.kernels.choices import choose_matmul_backend
    from megazero.plan.layout.resolve import resolve
    from megazero.step.engine import Engine

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
