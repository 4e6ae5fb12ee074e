"""Every family against transformers' class with the same weights: logits, gradients, configuration, parameters."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pretrain_gpt
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.layers.context import MicroBatchInfo
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.step.engine import Engine
from megazero.families import FAMILIES, MODELS
from megazero.families.parts.model_types import canonical
from megazero.families.parts.weight_conversions import layer_types_of
from megazero.flags.cli import parse
from megazero.flags.config import Config, ModelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from megazero.generation.model import hidden_states
from megazero.interop.huggingface.families import family_of
from megazero.planner.parameter_counts import num_parameters
from tests.helpers.families import SMALL, family, of_family
from tests.helpers.rounding import model_tolerance
from tests.helpers.table import for_each
from tests.parallel.cases import MicroBatch

# sqrt(hidden size) is whole: Gemma's factor of embeddings, which transformers keeps in fp32, is then exact in fp64.
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=44,
    num_attention_heads=8,
    seq_length=17,
    vocab_size=131,
    norm_epsilon=1e-4,
)


VARIANTS = {
    "llama, one group, tied": replace(MODEL, **of_family("llama"), num_query_groups=1),
    "llama, narrow heads": replace(MODEL, **of_family("llama"), kv_channels=4, untie_embeddings=True),
    "llama, linear": replace(MODEL, **of_family("llama"), rope_scaling_factor=3.0, rope_scaling_type="linear"),
    "qwen2, windows in the last layers": replace(
        MODEL, **of_family("qwen2"), add_qkv_bias=True, window_size=6, layer_pattern="GLLL"
    ),
    "mistral, a window in turns": replace(MODEL, **of_family("mistral"), window_size=5, layer_pattern="LG"),
    "qwen3, wide heads, a window": replace(
        MODEL, **of_family("qwen3"), qk_layernorm=True, kv_channels=20, window_size=3, untie_embeddings=True
    ),
    "qwen2-moe, renormalised": replace(
        family("qwen2-moe", MODEL), moe_router_pre_softmax=False, moe_layer_freq="2", window_size=0, layer_pattern=""
    ),
    "qwen3-moe, not renormalised": replace(
        family("qwen3-moe", MODEL), moe_router_pre_softmax=True, moe_layer_freq="DEED", kv_channels=0, window_size=0
    ),
    "qwen3-moe, experts in all layers": replace(
        family("qwen3-moe", MODEL), moe_layer_freq="E", moe_ffn_hidden_size=0, moe_router_topk=6
    ),
    "olmoe, one expert of a token": replace(family("olmoe", MODEL), moe_router_topk=1),
    "olmoe, renormalised": replace(family("olmoe", MODEL), moe_router_pre_softmax=False, moe_ffn_hidden_size=36),
}
CASES = {name: family(name, MODEL) for name in SMALL} | VARIANTS


def without_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers keep activations in fp64, which it casts to fp32 in norms and in softmax.

    DeepSeek-V2's fp32 angles become complex numbers by `torch.polar`, whose last bits are others than those of `cos`.
    """
    to, as_type, softmax = torch.Tensor.to, torch.Tensor.type, torch.softmax

    def keeps(x: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        return x.dtype == torch.float64 and x.requires_grad and torch.float32 in (*args, *kwargs.values())

    monkeypatch.setattr(torch.Tensor, "to", lambda x, *a, **k: x if keeps(x, *a, **k) else to(x, *a, **k))
    monkeypatch.setattr(torch, "polar", lambda size, angle: torch.complex(size * angle.cos(), size * angle.sin()))
    monkeypatch.setattr(torch.Tensor, "type", lambda x, *a: x if keeps(x, *a) else as_type(x, *a))
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if keeps(x, torch.float32) else to(x, torch.float32))
    for owner in (F, torch.Tensor):
        monkeypatch.setattr(
            owner, "softmax", lambda x, dim, dtype=None: softmax(x, dim, dtype=None if keeps(x, dtype) else dtype)
        )


def transformers_model(model: ModelConfig, dtype: torch.dtype) -> Any:
    """Return transformers' model of these options, with random weights."""
    import transformers

    row = family_of(model)
    config = row.to_config(model, None)
    torch.manual_seed(0)
    made = (
        getattr(transformers, row.model_class)
        ._from_config(config, attn_implementation="eager", experts_implementation="eager")
        .to(dtype)
        .eval()
    )
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return made


@pytest.mark.parametrize("precision", ["fp64", pytest.param("fp32", marks=pytest.mark.second)])
@for_each("name", CASES)
def test_logits_and_gradients_are_those_of_transformers(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CASES[name]
    assert family_of(model).architecture == name.partition(",")[0]
    dtype = torch.float64 if precision == "fp64" else torch.float32
    tolerance = 1e-10 if precision == "fp64" else model_tolerance(model, dtype)
    theirs = transformers_model(model, dtype)
    parameters = dict(theirs.named_parameters())
    ours = engine_of(model, precision, parameters)
    ids, labels = text_of(model)
    with monkeypatch.context() as patch:
        without_casts(patch)
        logits = theirs(ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
    with torch.no_grad():
        info = MicroBatchInfo.of(ids, (0, 1, 2), ours.model.stream, training=False)
        assert ours.model.head is not None
        found = ours.model.head.whole_logits(hidden_states(ours.model, ids, info)).view_as(logits)
    assert (found - logits).abs().max() < tolerance * logits.abs().max()
    check_losses_and_gradients(ours, [loss], [1.0], parameters, tolerance=tolerance)


def text_of(model: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels of three samples."""
    tokens = torch.randint(0, model.vocab_size, (3, model.seq_length + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def engine_of(model: ModelConfig, precision: str, parameters: dict[str, Any]) -> Engine:
    """Return an engine with transformers' weights, all of them."""
    row = family_of(model)
    training = TrainingConfig(micro_batch_size=3, precision=precision)  # type: ignore[arg-type]
    config, _ = resolve(replace(Config(), model=model, training=training), 1, 0, declare)
    ours = Engine(config, Mesh.build(Layout(), 0, torch.device("cpu")))
    weights = {weight.spec.name: weight for unit in ours.model.units.values() for weight in unit}
    rows = [each for ours in weights for each in row.names(ours, model, parameters)]
    assert {name for each in rows for name in each.theirs} == parameters.keys()
    for weight, value in row.join(parameters, weights, model).items():
        weights[weight].data[tuple(map(slice, value.shape))] = value.detach()  # the vocabulary is padded
    return ours


def check_losses_and_gradients(
    ours: Engine, losses: list[torch.Tensor], factors: list[float], parameters: dict[str, Any], tolerance: float
) -> None:
    """Compare with the loss of each depth, and with the gradients of their sum by `factors`."""
    model = ours.config.model
    ids, labels = text_of(model)
    batch = MicroBatch(ids, labels, torch.ones(3, model.seq_length), (0, 1, 2))
    targets = torch.tensor([3.0 * (model.seq_length - depth) for depth in range(len(losses))], dtype=torch.float64)
    seeds = torch.tensor(factors, dtype=torch.float64) / targets
    summed = ours._run(
        ours.program("1f1b", 1), ours._upload([batch], training=True, documents=ours.config.documents), seeds
    )
    found = summed[0].view(len(losses), -1).sum(1) / targets
    assert all(abs(a - b) < tolerance * b for a, b in zip(found, losses, strict=True))
    names = {weight.spec.name: weight for unit in ours.model.units.values() for weight in unit}
    wanted = family_of(model).join({name: p.grad for name, p in parameters.items()}, names, model)
    for unit in ours.zero.units.values():
        for member in unit.flat.members:
            gradient = unit.gradients.sharded_grad[member.window.slice()].view(member.weight.block.stored)
            want = wanted[member.weight.spec.name]
            gradient = gradient[tuple(map(slice, want.shape))]
            assert (gradient - want).abs().max() < tolerance * want.abs().max(), member.weight.spec.name
    ours.zero.discard_gradients()


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_modules_that_predict_further_ahead_are_those_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses of two modules of MtpLayer, and the gradients of all weights, in fp64."""
    modeling_layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(MtpModel := modeling_layers.MtpModel, "forward_layer"):
        pytest.skip("MtpModel of this transformers has no forward_layer")
    model = replace(CASES[name], mtp_num_layers=2, mtp_loss_scaling_factor=0.3)
    theirs = transformers_model(model, torch.float64)
    torch.manual_seed(2)
    modules = MtpModel(theirs, 2).to(torch.float64).eval()
    parameters = dict(theirs.named_parameters())
    with torch.no_grad():
        for buffer in modules.layers.buffers():
            buffer.zero_()  # biases of experts, which it does not initialise, nor its weights
        for path, parameter in modules.layers.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
            number, rest = path.split(".", 1)
            rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            parameters[f"model.layers.{model.num_layers + int(number)}.{rest}"] = parameter
    ours = engine_of(model, "fp64", parameters)
    (ids, labels), losses = text_of(model), []
    with monkeypatch.context() as patch:
        without_casts(patch)
        state = theirs.model(ids).last_hidden_state
        losses.append(F.cross_entropy(theirs.lm_head(state).flatten(0, 1), labels.flatten()))
        for k in range(2):  # the token at i reads that at i + k + 1, and predicts the one behind it
            length = model.seq_length - k - 1
            places = torch.arange(length).expand(3, -1)
            state = modules.forward_layer(k, state[:, :length], places, None, input_ids=labels[:, k : k + length])
            losses.append(F.cross_entropy(theirs.lm_head(state).flatten(0, 1), labels[:, k + 1 :].flatten()))
        sum(factor * loss for factor, loss in zip((1.0, 0.15, 0.15), losses, strict=True)).backward()
    check_losses_and_gradients(ours, losses, [1.0, 0.15, 0.15], parameters, tolerance=1e-10)


@pytest.mark.slow  # the second ring plans a preset of each (tests/unit/flags/test_presets.py)
@for_each("name", FAMILIES)
def test_a_family_is_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan of its default flags is printed, with its number of parameters."""
    sizes = "--num-layers 6 --hidden-size 4096 --num-attention-heads 16 --seq-length 32 --vocab-size 128".split()
    if "num-experts" in FAMILIES[name].defaults:
        sizes += ["--moe-ffn-hidden-size", "256"]
    layout = "--world-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1".split()
    pretrain_gpt.main(["--architecture", name, *sizes, *layout, "--plan", "--device-type", "h100-80gb"])
    printed = capsys.readouterr().out
    parameters = num_parameters(declare(parse(["--architecture", name, *sizes]).model))
    assert f"{parameters / 1e9:.2f} B parameters on 8 x h100-80gb: pp 2 x dp 2 x tp 2" in printed
    assert "step: 0.0" in printed


@for_each("name", CASES)
def test_a_configuration_goes_there_and_back(name: str) -> None:
    """No option of a family has its default."""
    row = family_of(CASES[name])
    dropouts = {option: 0.25 for option in ("hidden_dropout", "attention_dropout") if option in row.options}
    model = replace(
        CASES[name], init_method_std=0.5, untie_embeddings=True, moe_router_bias_update_rate=1e-3, **dropouts
    )
    assert canonical(ModelConfig(**row.from_config(row.to_config(model, None)))) == canonical(model)


WITHOUT_DEFAULTS = ("ministral", "deepseek_v2")  # the default configurations lack head_dim, and num_experts_per_tok


@pytest.mark.second
@for_each("model_type", [name for name in MODELS if name not in WITHOUT_DEFAULTS])
def test_transformers_defaults_are_a_model_of_ours(model_type: str) -> None:
    """Both have the same number of parameters, at the default sizes."""
    import transformers

    row = MODELS[model_type]
    config = transformers.AutoConfig.for_model(model_type)
    model = ModelConfig(**row.from_config(config))
    with torch.device("meta"):
        theirs = getattr(transformers, row.model_class)(config)
    assert sum(math.prod(spec.shape) for spec in declare(model).params()) == sum(p.numel() for p in theirs.parameters())


@for_each(
    ("letters", "pattern"),
    [
        ("", ""),
        ("GGGG", ""),
        ("LLL", ""),
        ("LGLGLG", "LG"),
        ("LGLGL", "LG"),
        ("GGLL", "GGLL"),
        ("NNN", "N"),
        ("LLGLLGLL", "LLG"),
    ],
)
def test_patterns_are_the_shortest(letters: str, pattern: str) -> None:
    assert layer_types_of(letters) == pattern
