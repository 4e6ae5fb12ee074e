"""A GPT and a llama in plain PyTorch, and by transformers and torchtitan, with megazero's initial values.

Imports torch and megazero's random numbers, and transformers for a llama, so that DeepSpeed can run it in an
environment of its own.

Shapes: b micro-batch, s sequence, h hidden, n heads, d head dim, v vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from megazero.engine.kernels import initial_values
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.layers import stage_units
from megazero.engine.plan.layout.parameters import LocalBlock
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import Config, ModelConfig


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
        return self.loss(x, labels)

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """x [b, s, h], labels [b, s] -> mean cross-entropy, a scalar."""
        logits = F.linear(self.head["norm"](x), self.token_embedding.weight)  # [b, s, v]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class PlainLlama(nn.Module):
    """transformers' LlamaForCausalLM with torch's attention, and megazero's initial values."""

    def __init__(self, model: ModelConfig, seed: int) -> None:
        from transformers import LlamaForCausalLM

        from megazero.interop.huggingface.families import family_of

        super().__init__()
        family = family_of(model)
        config = family.to_config(model, None)
        config.use_cache = False
        self.llama = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
        self.blocks = self.llama.model.layers
        self.llama.load_state_dict(family.split(dict(initial_weights(model, seed)), model))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """ids, labels [b, s] -> mean cross-entropy, a scalar."""
        return self.loss(self.llama.model(ids).last_hidden_state, labels)

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """x [b, s, h], labels [b, s] -> mean cross-entropy, a scalar."""
        return F.cross_entropy(self.llama.lm_head(x).flatten(0, 1).float(), labels.flatten())


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

        from megazero.interop.huggingface.families import family_of

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
