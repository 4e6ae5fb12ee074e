"""The model's numerics against transformers' GPT-2, with the same weights."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megazero.engine.kernels.dropout import Dropout
from megazero.engine.kernels.kernel_table import EAGER
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.layers.attention import CoreAttention
from megazero.engine.model.layers.context import MicroBatchInfo
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.step.engine import Engine
from megazero.flags.config import Config, ModelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from megazero.generation.model import hidden_states
from tests.parallel.cases import MicroBatch

TOLERANCE = 1e-10  # in fp64
MODEL = ModelConfig(num_layers=3, hidden_size=60, num_attention_heads=6, seq_length=17, vocab_size=131)


def to_megazero(name: str, t: torch.Tensor, model: ModelConfig) -> tuple[str, torch.Tensor]:
    """transformers' name and tensor -> ours: Conv1D stores [in, out]; QKV rows are [3, heads, d]."""
    n, h = model.num_attention_heads, model.hidden_size
    d = h // n
    whole = {"wte.weight": "token_embedding.weight", "wpe.weight": "position_embedding.weight"}
    whole |= {"ln_f.weight": "head.norm.weight", "ln_f.bias": "head.norm.bias"}
    if name in whole:
        return whole[name], t
    _, layer, part = name.split(".", 2)
    kind = part.rsplit(".", 1)[1]
    names = {"ln_1": "norm1", "ln_2": "norm2", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.proj"}
    names |= {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
    source = part.rsplit(".", 1)[0]
    if kind == "weight" and not source.startswith("ln"):
        t = t.t()
    if source == "attn.c_attn":
        t = t.reshape(3, n, d, *t.shape[1:]).transpose(0, 1)
    return f"blocks.{layer}.{names[source]}.{kind}", t


@pytest.fixture(scope="module")
def pair():
    """(transformers' model, our engine) with the same weights, drawn wide enough for every part to matter."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": MODEL.num_layers, "n_embd": MODEL.hidden_size, "n_head": MODEL.num_attention_heads}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=MODEL.vocab_size, n_positions=MODEL.seq_length, **sizes, **dropout))
    theirs = theirs.double()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    config, _ = resolve(
        replace(Config(), model=MODEL, training=TrainingConfig(micro_batch_size=3, precision="fp64")), 1, 0, declare
    )
    ours = Engine(config, Mesh.build(Layout(), 0, torch.device("cpu")))
    parameters = {w.spec.name: w.data for weights in ours.model.units.values() for w in weights}
    with torch.no_grad():
        for name, p in theirs.transformer.named_parameters():
            name, value = to_megazero(name, p, MODEL)
            parameters.pop(name)[tuple(map(slice, value.shape))] = value  # the vocabulary is padded
    assert not parameters
    return theirs, ours


def batch() -> MicroBatch:
    ids = torch.randint(0, MODEL.vocab_size, (3, MODEL.seq_length + 1), generator=torch.Generator().manual_seed(1))
    return MicroBatch(ids[:, :-1], ids[:, 1:], torch.ones(3, MODEL.seq_length), (0, 1, 2))


def test_logits(pair) -> None:
    theirs, ours = pair
    ids = batch().ids
    with torch.no_grad():
        wanted = theirs(ids).logits
        tokens = MicroBatchInfo.of(ids, (0, 1, 2), ours.model.stream, training=False)
        found = ours.model.head.whole_logits(hidden_states(ours.model, ids, tokens)).view(3, MODEL.seq_length, -1)
    assert found.shape == wanted.shape  # without padding
    assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()


def test_loss_and_gradients(pair) -> None:
    theirs, ours = pair
    b = batch()
    loss = F.cross_entropy(theirs(b.ids).logits.flatten(0, 1), b.labels.flatten())
    theirs.zero_grad()
    loss.backward()
    found = ours._run(
        ours.program("1f1b", 1),
        ours._upload([b], training=True, documents=ours.config.documents),
        torch.tensor([1 / b.labels.numel()], dtype=torch.float64),
    )
    assert abs(found[0].sum() / b.labels.numel() - loss) < TOLERANCE * loss
    units = ours.zero.units
    gradients = {
        member.weight.spec.name: unit.gradients.sharded_grad[member.window.slice()].view(member.weight.block.stored)
        for unit in units.values()
        for member in unit.flat.members
    }
    for name, p in theirs.transformer.named_parameters():
        name, wanted = to_megazero(name, p.grad, MODEL)
        gradient = gradients[name][tuple(map(slice, wanted.shape))]
        assert (gradient - wanted).abs().max() < TOLERANCE * wanted.abs().max(), name
    assert (gradients["token_embedding.weight"][MODEL.vocab_size :] == 0).all()  # padding is never trained
    ours.zero.discard_gradients()


def test_large_scores_do_not_overflow_fp16() -> None:
    """q k^T is more than fp16 holds; divided by the root of d it is not."""
    core = CoreAttention(Dropout(0.0, 0, 0, "scores"), EAGER, recompute=False)
    q = torch.full((1, 1, 3, 128), 24.0, dtype=torch.float16)
    assert float((q.float() @ q.float().transpose(-1, -2)).max()) > torch.finfo(torch.float16).max
    weights = core.weights(core.capped(q, q), None)[0].float()
    assert torch.allclose(weights, torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3] * 3]), atol=1e-3)
