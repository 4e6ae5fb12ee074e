"""The ends of the model, and norms over all heads: the same model in every layout as in plain PyTorch, in fp64.

Embeddings with a factor, logits that are divided and capped, tied and with a matrix of their own; a bias of the logits;
one norm over the queries of all heads and one over all keys.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megazero.engine.kernels.dropout import Rows
from megazero.engine.model.layers.context import MicroBatchInfo
from megazero.generation.kv_cache import KVCache
from megazero.generation.model import hidden_states
from megazero.planner.bytes.estimate import estimate
from tests import reference
from tests.helpers.families import of_family
from tests.helpers.rings import by_default
from tests.parallel.cases import MODEL, Case, evaluate, global_batch, new_engine, train
from tests.parallel.test_parity import TOLERANCE, check_bytes, expected, fp64, relative_error

# Logits of these models are below 2: the cap bends them.
TIED = replace(MODEL, num_layers=2, embedding_multiplier=6.5, logits_divisor=1.75, final_softcap=0.8)
LLAMA = replace(TIED, num_attention_heads=8, **of_family("llama"), num_query_groups=2, untie_embeddings=True)
ALL_HEADS = replace(LLAMA, kv_channels=10, qk_layernorm=True, qk_norm_all_heads=True)
DIVIDED = replace(ALL_HEADS, final_softcap=0.0, num_query_groups=0)
BIASED = replace(ALL_HEADS, linear_biases=("logits",), root_embedding=True, untie_embeddings=False)

CASES = [
    Case(model=TIED),
    Case(tp=2, zero=1, model=TIED),
    Case(tp=2, sp=True, recompute="selective", model=ALL_HEADS),
    Case(tp=4, model=ALL_HEADS),  # two ranks have the same group of keys
    Case(tp=4, sp=True, recompute="full", micro_batches=3, model=ALL_HEADS, reset="documents"),
    Case(tp=2, recompute="full", pa=True, model=DIVIDED),
    Case(pp=2, schedule="zero-bubble", micro_batches=3, model=ALL_HEADS),
    Case(pp=2, tp=2, model=replace(TIED, untie_embeddings=True, hidden_dropout=0.1)),
    Case(dp=2, zero=3, recompute="full", model=ALL_HEADS),
    Case(dp=2, tp=2, zero=3, sp=True, micro_batches=3, model=replace(TIED, final_softcap=0.0)),
    Case(tp=2, model=ALL_HEADS, frozen=("token*", "head*", "*.query.*", "*.kv.*", "*.proj.*", "*.mlp.*", "*.norm?.*")),
]
BIASES = [
    Case(tp=2, model=BIASED),
    Case(dp=2, zero=3, micro_batches=3, model=replace(BIASED, untie_embeddings=True)),
    Case(tp=2, sp=True, model=replace(BIASED, vocab_size=61)),  # the second rank has padding alone
    Case(pp=2, tp=2, zero=1, recompute="selective", model=BIASED),
    Case(tp=2, model=BIASED, frozen=("token_embedding.*", "head.norm.*", "blocks.*")),
]


@pytest.mark.parametrize("case", [*by_default(map(fp64, CASES), 4), *by_default(map(fp64, BIASES), 3)], ids=str)
def test_every_layout_is_the_same_model(case: Case, ranks) -> None:
    losses, norms = expected(case)
    outcomes = ranks(case.world).run(train, case)
    for outcome in outcomes:
        assert relative_error(outcome.losses, losses) < TOLERANCE
        assert relative_error(outcome.norms, norms) < TOLERANCE
    check_bytes(case, outcomes)


@pytest.mark.second
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_bytes_are_those_estimated_in_16_bits(precision: str, ranks) -> None:
    case = Case(tp=2, sp=True, zero=1, precision=precision, model=ALL_HEADS)
    check_bytes(case, ranks(2).run(train, case))


@pytest.mark.parametrize("mode, passes", [("none", 2), ("full", 3)])
def test_norms_over_all_heads_send_two_numbers_per_token(mode: str, passes: int) -> None:
    """A pass, a block and a micro-batch: an all-reduce of the sums of queries and keys, in fp32."""
    case = Case(
        tp=2, recompute=mode, precision="bf16", model=replace(ALL_HEADS, qk_layernorm=False, qk_norm_all_heads=False)
    )
    traffic = [estimate(each.config(), each.layout).traffic["tp"] for each in (case._replace(model=ALL_HEADS), case)]
    tokens = case.samples * case.model.seq_length
    assert traffic[0] - traffic[1] == 2 * case.micro_batches * passes * tokens * 2 * 4


def set_bias(bias: torch.Tensor, first: int) -> None:
    bias.copy_(torch.arange(first, first + len(bias), dtype=bias.dtype).sin())


def cached_logits(rank: int, case: Case) -> torch.Tensor:
    """Return the logits of two sequences: of four tokens at first, then of one at a time."""
    engine = new_engine(rank, case)
    stage, cache, found = engine.model, KVCache(2, case.model.seq_length), []
    assert stage.head is not None
    if (bias := stage.head.output_bias) is not None:
        set_bias(bias.data[: bias.block.shape[0]], bias.block.offset[0])
    ids = global_batch(case, 0)[0][:2]
    with torch.no_grad():
        for part in (range(4), *(range(at, at + 1) for at in range(4, ids.shape[1]))):
            rows = tuple(Rows(sample, part.start, len(part)) for sample in range(2))
            positions = torch.tensor([[*part, *part]])
            tokens = MicroBatchInfo(0, (0,), False, rows, (part, part), cache, head_positions=positions)
            x = hidden_states(stage, ids[:, part.start : part.stop].reshape(1, -1), tokens)
            found.append(stage.head.whole_logits(x).view(2, len(part), -1))
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    "case",
    [fp64(Case(tp=tp, model=model)) for tp, model in ((1, TIED), (2, TIED), (4, ALL_HEADS), (2, BIASED))],
    ids=str,
)
def test_logits_with_a_cache(case: Case, ranks) -> None:
    """The same as in plain PyTorch, which has no cache."""
    weights = reference.initial_weights(case.config())
    if case.model == BIASED:
        set_bias(weights["head.output_bias"], 0)
    wanted = reference.forward(case.config(), weights, global_batch(case, 0)[0][:2])
    for found in ranks(case.world).run(cached_logits, case):
        assert (found - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize("cp", [1, 2])
def test_an_evaluation_maps_logits_too(cp: int, ranks) -> None:
    case = fp64(Case(tp=2, cp=cp, model=ALL_HEADS))
    ids, labels, mask = global_batch(case, 0)
    logits = reference.forward(case.config(), reference.initial_weights(case.config()), ids)
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    wanted = float((each * mask.flatten()).sum())
    for loss, _ in ranks(case.world).run(evaluate, case):
        assert abs(loss - wanted) < TOLERANCE * wanted
