"""Flags of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from megazero.engine.options.option import (
    FEW,
    MOST_LAYERS,
    Bounds,
    OnResume,
    Probability,
    Requires,
    Role,
    Usual,
    Written,
)

LARGE = "products of larger numbers overflow"
RopeScaling = Literal["llama3", "linear", "yarn"]
# Llama 3.1's scaling: frequencies with fewer than LOW_FREQUENCY turns in the trained length are divided by the factor,
# those with more than HIGH_FREQUENCY turns stay.
LOW_FREQUENCY, HIGH_FREQUENCY = 1.0, 4.0
SLOW = 1.0  # YaRN's: dims with fewer turns are divided, those with more than `Rotary.fast` stay
SWIGLU_SLOPE, SWIGLU_LIMIT = 1.702, 7.0  # clamped SwiGLU
NormName = Literal["layernorm", "rmsnorm", "rmsnorm-1p"]
ActivationName = Literal["gelu", "gelu-tanh", "relu", "squared-relu", "swiglu", "geglu-tanh", "swiglu-clamped"]
BiasName = Literal["qkv", "proj", "mlp", "experts", "logits"]


@dataclass(frozen=True)
class ModelOptions:
    """Options of a model. `flags.config.ModelConfig` has them with the names of families."""

    on_resume: ClassVar = OnResume.MODEL

    num_layers: Annotated[int, Bounds(1, MOST_LAYERS, FEW), Usual("model", 2), Role.ON_SCREEN] = 12
    """Transformer blocks."""
    hidden_size: Annotated[
        int, Bounds(1, 2**20, "no published model is as wide"), Usual("model", 3), Role.ON_SCREEN
    ] = 768
    """Width of the residual stream."""
    ffn_hidden_size: Annotated[int, Bounds(0, 2**23, "no published model is as wide")] = 0
    """Width inside the MLP. 0: 4 x --hidden-size."""
    num_attention_heads: Annotated[int, Bounds(1, 2**20, FEW), Usual("model", 4), Role.ON_SCREEN] = 12
    """Attention heads; must divide --hidden-size, unless --kv-channels is given."""
    seq_length: Annotated[
        int,
        Bounds(1, 2**24, "attention over more tokens is not feasible"),
        Usual("model", 5),
        Role.STAGE,
        Role.ON_SCREEN,
        OnResume.ORDER,
    ] = 1024
    """Tokens of a sample. With --architecture gpt2, also the number of learned positions."""
    vocab_size: Annotated[int, Bounds(0, 2**31 - 1, "token ids are stored in 32 bits"), Role.ON_SCREEN] = 0
    """Size of the vocabulary. 0: that of --tokenizer. It is padded for tensor parallelism, which changes no result."""
    attention_dropout: Annotated[Probability, OnResume.LOSS] = 0.0
    """Dropout probability of attention weights."""
    hidden_dropout: Annotated[Probability, OnResume.LOSS] = 0.0
    """Dropout probability of the embedding and of both residual branches."""
    init_method_std: Annotated[
        float, Bounds(0, 10, "GPT-2 uses 0.02, and products of larger weights overflow"), OnResume.NOTED
    ] = 0.02
    """Standard deviation of the initial weights. That of residual projections is divided by sqrt(2 x --num-layers)."""
    untie_embeddings: bool = False
    """Give the output head a matrix of its own. By default it uses the token table."""
    architecture: str = "gpt2"
    """Name of the family, which has set its options. No layer reads it."""
    activation: Annotated[Literal["auto", ActivationName], Role.TRAIT] = "gelu-tanh"
    """Activation of the MLPs. swiglu, geglu-tanh and swiglu-clamped are gated: the MLP has three matrices. auto: the
    architecture's."""
    num_query_groups: Annotated[int, Bounds(0, 2**20, FEW), Role.ROTARY] = 0
    """Groups of attention heads that share keys and values. 0: one per head. Not for gpt2."""
    kv_channels: Annotated[int, Bounds(0, 2**16, "no published model has as wide heads")] = 0
    """Width of an attention head. 0: --hidden-size / --num-attention-heads."""
    rotary_base: Annotated[
        float, Bounds(1, 1e12, "no published model has a longer wavelength", least_open=True), Role.ROTARY
    ] = 1e4
    """Base of the rotary frequencies (theta); llama 3 has 500000. Not for gpt2."""
    rope_scaling_factor: Annotated[
        float, Bounds(1, 1e6, "no published model is stretched as far"), Written("F"), Role.ROTARY
    ] = 1.0
    """Factor by which rotary wavelengths are stretched for contexts longer than --rope-trained-length, in the way of
    --rope-scaling-type. 1: none. Not for gpt2."""
    rope_scaling_type: Annotated[RopeScaling, Requires("rope-scaling-factor"), Role.ROTARY] = "llama3"
    """Wavelengths that --rope-scaling-factor stretches. llama3: long ones, as in Llama 3.1. linear: all, as in Gemma 3.
    yarn: long ones, and queries and keys grow by 0.1 ln(factor) + 1, as in OLMo 3. Not for gpt2."""
    rope_trained_length: Annotated[
        int,
        Bounds(1, 2**24, "no published model was trained on a longer context"),
        Requires("rope-scaling-factor"),
        Role.ROTARY,
    ] = 8192
    """Context length before --rope-scaling-factor. llama3 and yarn stretch the wavelengths that are long compared with
    it. Not for gpt2."""
    max_position_embeddings: Annotated[
        int, Bounds(0, 2**24, "attention over more tokens is not feasible"), Role.FAMILY
    ] = 0
    """Context length of the model's exports to Hugging Face, if positions are rotary and it is more than --seq-length.
    It changes no result. 0: --seq-length. --hf-config and a Hugging Face folder as --load set it to theirs."""
    rotary_percent: Annotated[
        float, Bounds(0, 1, "a head has no more dims", least_open=True), Role.FAMILY, Role.ROTARY
    ] = 1.0
    """Share of each head that is rotated: its first dims, rounded down. Pythia has 0.25. Not for gpt2."""
    rotary_interleaved: Annotated[bool, Role.FAMILY, Role.ROTARY] = False
    """Rotate dims 2 i and 2 i + 1 of a head together, as in GPT-J. By default dims i and i + half of them are. Not for
    gpt2."""
    local_rotary_base: Annotated[
        float,
        Bounds(0, 1e12, "no published model has a longer wavelength"),
        Role.FAMILY,
        Requires("window-size"),
        Role.ROTARY,
    ] = 0.0
    """Rotary base of the layers with a sliding window, which then have no scaling, as in Gemma 3. 0: that of the other
    layers. Not for gpt2."""
    add_qkv_bias: Annotated[bool, Role.FAMILY, Role.ROTARY] = False
    """Add biases to queries, keys and values, as in Qwen 2. Not for gpt2."""
    qk_layernorm: Annotated[bool, Role.FAMILY, Role.ROTARY] = False
    """Norm each attention head's queries and keys, as in Qwen 3, by the kind of norm that the block has. Not for
    gpt2."""
    window_size: Annotated[int, Bounds(0, 2**24, "attention over more tokens is not feasible"), Written("W")] = 0
    """Tokens that a query attends to, itself included, in layers with a sliding window. 0: all earlier tokens."""
    layer_pattern: str = ""
    """Kinds of attention of the layers, such as LLLG, repeated over them. L: local, with the window of --window-size;
    G: global; N: global, without rotary positions. Empty: all L with --window-size, otherwise all G."""
    attention_softcap: Annotated[float, Bounds(0, 1e6, "no published model has a higher cap"), Role.FAMILY] = 0.0
    """Soft cap C of attention scores, as in Gemma 2: C tanh(score / C). Attention weights are then saved or recomputed,
    because the fused kernels have no cap. 0: none."""
    attention_scale: Annotated[float, Bounds(0, 1000, "the softmax would pick one key"), Role.FAMILY] = 0.0
    """Factor of attention scores, as in Granite and Gemma. 0: 1 / sqrt(width of a head)."""
    qk_norm_all_heads: Annotated[bool, Role.FAMILY, Requires("qk-layernorm"), Role.ROTARY] = False
    """The norms of --qk-layernorm are over all heads of a token: one RMSNorm of its queries and one of its keys, as in
    OLMo 2. Not for gpt2."""
    multi_latent_attention: Annotated[bool, Role.FAMILY, Role.LATENT] = False
    """Latent attention, as in DeepSeek-V3: keys and values of a token are projections of a latent of --kv-lora-rank
    elements, which all heads share, and of a rotary key. Not for gpt2."""
    q_lora_rank: Annotated[int, Bounds(0, 2**20, "no published model is as wide"), Role.FAMILY, Role.LATENT] = 0
    """--multi-latent-attention: width of the latent from which queries are projected. 0: they have none, as in
    DeepSeek-V2-Lite."""
    kv_lora_rank: Annotated[int, Bounds(1, 2**20, "no published model is as wide"), Role.FAMILY, Role.LATENT] = 512
    """--multi-latent-attention: width of the latent of keys and values."""
    qk_head_dim: Annotated[int, Bounds(1, 2**16, "no published model has as wide heads"), Role.FAMILY, Role.LATENT] = (
        128
    )
    """--multi-latent-attention: dims of a query and a key without positions."""
    qk_pos_emb_head_dim: Annotated[
        int, Bounds(1, 2**16, "no published model has as wide heads"), Role.FAMILY, Role.LATENT
    ] = 64
    """--multi-latent-attention: rotary dims of a query and a key, after the others. Those of a key are one for all
    heads."""
    v_head_dim: Annotated[int, Bounds(1, 2**16, "no published model has as wide heads"), Role.FAMILY, Role.LATENT] = 128
    """--multi-latent-attention: dims of a value, at most as many as of a key."""
    beta_fast: Annotated[
        float, Bounds(1, 1e6, "no dim makes more turns in a published context"), Role.FAMILY, Role.ROTARY
    ] = 32.0
    """--rope-scaling-type yarn: wavelengths that turn more often than this in --rope-trained-length stay; those that
    turn less than once are stretched."""
    yarn_correction_range_round_to_int: Annotated[bool, Role.FAMILY, Role.ROTARY] = True
    """--rope-scaling-type yarn: round the dims between which wavelengths are stretched in part to whole ones. gpt-oss
    does not."""
    mscale: Annotated[float, Bounds(0, 1000, "scores would overflow"), Role.FAMILY, Role.ROTARY] = 0.0
    """--rope-scaling-type yarn: queries and keys grow by (0.1 M ln(factor) + 1) / (0.1 A ln(factor) + 1) for this M
    and the A of --mscale-all-dim. 0, or A 0: by 0.1 ln(factor) + 1."""
    mscale_all_dim: Annotated[float, Bounds(0, 1000, "scores would overflow"), Role.FAMILY, Role.ROTARY] = 0.0
    """See --mscale. With --multi-latent-attention, scores grow by (0.1 A ln(factor) + 1)^2, as in DeepSeek-V3."""
    norm_epsilon: Annotated[
        float, Bounds(0, 1, "it only keeps a norm's divisor from 0", least_open=True), Role.FAMILY
    ] = 1e-5
    """Added to the variance in a norm. Most families with RMSNorm have 1e-6."""
    embedding_multiplier: Annotated[float, Bounds(0, 1e6, LARGE, least_open=True), Role.FAMILY] = 1.0
    """Factor of the token embeddings, as in Granite. A tied output matrix is not multiplied."""
    logits_divisor: Annotated[float, Bounds(0, 1e6, LARGE, least_open=True), Role.FAMILY] = 1.0
    """Divisor of the logits, as Granite's logits_scaling."""
    final_softcap: Annotated[float, Bounds(0, 1000, "logits are smaller"), Role.FAMILY] = 0.0
    """Largest absolute logit, C: a logit x becomes C tanh(x / C), as in Gemma 2. 0: no limit."""
    residual_multiplier: Annotated[
        float, Bounds(0, 1000, "no published model has a larger one", least_open=True), Role.FAMILY
    ] = 1.0
    """Factor of the results of attention and MLP before they are added to the residual stream; Granite has 0.22."""

    # Traits: a family sets them. The defaults are GPT-2's.
    norm: Annotated[NormName, Role.FAMILY, Role.TRAIT] = "layernorm"
    """Kind of all norms. rmsnorm-1p multiplies by 1 + weight."""
    norm_place: Annotated[Literal["before", "after", "around"], Role.FAMILY, Role.TRAIT] = "before"
    """Place of the norms in a branch of a block: x + branch(norm(x)), x + norm(branch(x)), or both."""
    parallel_norms: Annotated[Literal[0, 1, 2], Role.FAMILY, Role.TRAIT] = 0
    """Norms of a block whose attention and MLP read the same x, as in x + attention(norm(x)) + mlp(norm(x)): 1 if they
    share it, 2 if each has its own. 0: attention, then the MLP."""
    linear_biases: Annotated[tuple[BiasName, ...], Role.FAMILY, Role.TRAIT] = ("qkv", "proj", "mlp")
    """Linear layers that have biases: qkv, proj (of attention), mlp, experts (with their router), logits (the output
    matrix)."""
    attention_sinks: Annotated[bool, Role.FAMILY, Role.TRAIT] = False
    """Give each attention head a sink, as in gpt-oss."""
    fused_qkv: Annotated[bool, Role.FAMILY, Role.TRAIT] = True
    """Queries, keys and values are one weight; with --learned-positions alone."""
    learned_positions: Annotated[bool, Role.FAMILY, Role.TRAIT] = True
    """Add a table of positions to the embeddings. Otherwise positions are rotary."""
    root_embedding: Annotated[bool, Role.FAMILY, Role.TRAIT] = False
    """Multiply the embeddings by sqrt(--hidden-size), as in Gemma."""

    num_experts: Annotated[int, Bounds(0, 2**14, FEW)] = 0
    """Replace the MLP by this many experts, each an MLP, in the layers of --moe-layer-freq. A router sends each token
    to --moe-router-topk of them. 0: none."""
    moe_router_topk: Annotated[int, Bounds(1, 2**10, FEW)] = 2
    """Experts of a token."""
    moe_router_pre_softmax: Annotated[bool, Role.FAMILY] = False
    """Multiply the result of an expert by its score among all experts, as in OLMoE. By default the scores of a token's
    experts are divided by their sum, as in Mixtral."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Score of an expert. softmax: its probability among all experts. sigmoid: the sigmoid of its own logit, as in
    DeepSeek-V3."""
    moe_router_enable_expert_bias: bool = False
    """Balance the experts without a loss, as in DeepSeek-V3: a token passes the experts with the largest sums of score
    and bias. After each iteration the bias of each expert changes by --moe-router-bias-update-rate: up if the global
    batch chose it less often than the mean of all experts, down if more often. Results are weighted by scores alone."""
    moe_router_bias_update_rate: Annotated[
        float, Bounds(0, 1000, "scores are at most 1"), Requires("moe-router-enable-expert-bias")
    ] = 1e-3
    """Change of a bias in an iteration, with --moe-router-enable-expert-bias."""
    moe_router_num_groups: Annotated[
        int, Bounds(0, 2**14, FEW), Role.FAMILY, Requires("moe-router-group-topk"), Written("G")
    ] = 0
    """Groups of neighbouring experts. A token passes experts of --moe-router-group-topk groups alone. 0: no groups."""
    moe_router_group_topk: Annotated[
        int, Bounds(0, 2**14, FEW), Role.FAMILY, Requires("moe-router-num-groups"), Written("K")
    ] = 0
    """Groups of a token, with --moe-router-num-groups: those in which the scores of the best two experts have the
    largest sums."""
    moe_router_topk_scaling_factor: Annotated[float, Bounds(0, 1e6, LARGE, least_open=True), Role.FAMILY] = 1.0
    """Factor of the weights of experts; DeepSeek-V3 has 2.5."""
    moe_ffn_hidden_size: Annotated[int, Bounds(0, 2**23, "no published model is as wide")] = 0
    """Width inside an expert. 0: --ffn-hidden-size."""
    moe_layer_freq: str = "1"
    """Layers that have experts. A number N: layers 0, N, 2 N and so on. Or letters, repeated over the layers: DE is a
    layer with a dense MLP, then one with experts."""
    moe_shared_expert_intermediate_size: Annotated[int, Bounds(0, 2**23, "no published model is as wide")] = 0
    """Width inside an MLP that all tokens pass besides their experts. 0: there is none."""
    moe_shared_expert_gate: Annotated[bool, Role.FAMILY] = False
    """Multiply the result of the shared expert by the sigmoid of a product with the token, as in Qwen 2 MoE."""
    moe_aux_loss_coeff: Annotated[float, Bounds(0, 1e6, LARGE), OnResume.LOSS] = 0.0
    """Factor of the loss that balances the experts: per sample and layer, experts x sum over experts of (share
    of the choices) x (mean share of the scores), which is 1 if they are balanced. It does not depend on layout or
    batches."""
    moe_z_loss_coeff: Annotated[float, Bounds(0, 1e6, LARGE), OnResume.LOSS] = 0.0
    """Factor of the loss that keeps router logits small: per layer, the mean over tokens of the squared log of the sum
    of exp(logit). 0.001 is usual."""
    moe_expert_capacity_factor: Annotated[float, Bounds(0, 1e6, LARGE), OnResume.LOSS] = 0.0
    """Bound rows, bytes and traffic of training with uneven loads. An expert takes at most this many times its even
    share of the choices of one sample, rounded up: those with the largest weights, the earlier ones of equal weights.
    It drops the others: their results are left out, and weights of the rest do not change. The sample is the unit with
    --reset-attention-mask too, so no layout or batch changes the model. Evaluation, generation and exported models drop
    nothing. 1 to 2 is usual; 0: no limit."""

    mtp_num_layers: Annotated[int, Bounds(0, 64, "published models have 1 to 3")] = 0
    """Multi-token prediction, as in DeepSeek-V3: this many modules, each with a block like the last one, which predict
    one token further ahead each. Losses are logged as mtp_losses. 0: none."""
    mtp_loss_scaling_factor: Annotated[float, Bounds(0, 1e6, LARGE), OnResume.LOSS] = 0.1
    """Factor of the mean loss of the modules of --mtp-num-layers. DeepSeek-V3 had 0.3, later 0.1."""

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def expert_size(self) -> int:
        """Width inside an expert."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def expert_capacity(self) -> int:
        """Choices of a sample that an expert takes in training; at most one of each token."""
        even = self.moe_router_topk * self.seq_length / self.num_experts
        return min(self.seq_length, math.ceil(even * self.moe_expert_capacity_factor) or self.seq_length)

    def has_experts(self, number: int) -> bool:
        """Return whether the MLP of a layer is a mixture of experts."""
        if not self.num_experts:
            return False
        pattern, number = self.moe_layer_freq, self._like(number)
        return number % int(pattern) == 0 if pattern.isdecimal() else pattern[number % len(pattern)] == "E"

    @property
    def expert_layers(self) -> list[int]:
        """The layers with experts, in modules of --mtp-num-layers too: they are numbered behind the others."""
        return [number for number in range(self.num_layers + self.mtp_num_layers) if self.has_experts(number)]

    def _like(self, number: int) -> int:
        """Return the number of the layer of the same kind: the last one's, for a module of --mtp-num-layers."""
        return min(number, self.num_layers - 1)

    @property
    def head_dim(self) -> int:
        """Width of a query and a key of an attention head."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_dim(self) -> int:
        """Width of a value of an attention head."""
        return self.v_head_dim if self.multi_latent_attention else self.head_dim

    @property
    def max_positions(self) -> int:
        """Longest context of the model, as its exports have it."""
        return max(self.seq_length, self.max_position_embeddings)

    @property
    def rotary_dim(self) -> int:
        """Dims of an attention head that are rotated, rounded as transformers does."""
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim
        return int(self.head_dim * self.rotary_percent)

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    def attention_kind(self, number: int) -> str:
        """Return the kind of attention of a layer: L local, G global, N global without rotary positions."""
        pattern = self.layer_pattern
        return pattern[self._like(number) % len(pattern)] if pattern else "GL"[self.window_size > 0]

    @property
    def embedding_scale(self) -> float:
        """Factor of the token embeddings."""
        return self.embedding_multiplier * (math.sqrt(self.hidden_size) if self.root_embedding else 1.0)

    @property
    def residual_std(self) -> float:
        """Standard deviation of weights that write to the residual stream, whose variance then stays put with depth."""
        return self.init_method_std / math.sqrt(2 * self.num_layers)
