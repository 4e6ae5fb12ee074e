"""Documents that share a sample: --reset-attention-mask and --reset-position-ids.

With both, a document's logits are those of the document alone: `tests/parallel/matrix.py` has the flags as a factor.
"""

from dataclasses import replace
from itertools import chain, pairwise

import torch

from megazero.engine.model.documents import Documents, DocumentSpan
from megazero.engine.model.layers.context import MicroBatchInfo
from megazero.engine.model.stage import declare
from megazero.flags.config import Config, DataConfig, ModelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from megazero.generation.generate import packed_prompts
from megazero.generation.model import hidden_states
from megazero.planner.trace.trace import trace_block, whole_samples
from tests import reference
from tests.helpers.families import of_family
from tests.helpers.table import for_each
from tests.parallel.cases import MODEL, Case, new_engine

CPU = torch.device("cpu")
LENGTHS = ((3, 1, 7), (11,), (1, 1, 9))  # of the documents of three samples
BOTH = DataConfig(tokenizer="byte", reset_attention_mask=True, reset_position_ids=True)


def starts_of(lengths: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    borders = [[sum(row[:i]) for i in range(len(row))] for row in lengths]
    rows = [
        chain(*([first] * n for first, n in zip(*both, strict=True))) for both in zip(borders, lengths, strict=True)
    ]
    return torch.tensor([list(row) for row in rows])


def test_spans_and_positions_of_documents() -> None:
    documents = Documents.of(starts_of(LENGTHS))
    wanted = [(0, 0, 3), (0, 3, 4), (0, 4, 11), (1, 0, 11), (2, 0, 1), (2, 1, 2), (2, 2, 11)]
    assert documents.spans == tuple(DocumentSpan(*span) for span in wanted)
    assert documents.bounds.tolist() == [0, 3, 4, 11, 22, 23, 24, 33] and documents.longest == 11
    positions = list(chain(*(range(n) for n in chain(*LENGTHS))))
    assert documents.positions.flatten().tolist() == positions
    for first in range(33):
        for stop in range(first + 1, 34):
            assert list(chain(*documents.runs(range(first, stop)))) == positions[first:stop]
    assert whole_samples(2, 5, CPU).spans == (DocumentSpan(0, 0, 5), DocumentSpan(1, 0, 5))


# torch's kernel, and weights in the open; 16 bit rounds at every step
@for_each("precision, tolerance", [("fp64", 1e-9), ("bf16", 2**-6)])
@for_each("architecture", ["gpt2", "llama", "parallel"])
def test_a_packed_document_is_the_document_alone(architecture: str, precision: str, tolerance: float) -> None:
    """Plain PyTorch computes the documents one by one, and knows of no mask but the causal one."""
    groups = 0 if architecture == "gpt2" else 2
    model = replace(MODEL, **of_family(architecture), num_query_groups=groups)
    case = Case(model=model, precision=precision, reset="documents", batch=3, micro_batches=1)
    engine, documents = new_engine(0, case), Documents.of(starts_of(LENGTHS))
    ids = torch.randint(0, model.vocab_size, (3, 11), generator=torch.Generator().manual_seed(1))
    flags = {"attention_documents": documents, "position_documents": documents}
    info = MicroBatchInfo.of(ids, (0, 1, 2), engine.model.stream, training=False, **flags)
    assert engine.model.head is not None
    with torch.no_grad():
        hidden = hidden_states(engine.model, ids, info)
        found = engine.model.head.whole_logits(hidden).view(3, 11, -1)
    plain = case._replace(precision="fp64", reset="").config()
    weights = reference.initial_weights(plain)
    for row, lengths in enumerate(LENGTHS):
        for first, stop in pairwise([0, *(sum(lengths[: i + 1]) for i in range(len(lengths)))]):
            wanted = reference.forward(plain, weights, ids[row : row + 1, first:stop])[0]
            assert (found[row, first:stop] - wanted).abs().max() < tolerance * wanted.abs().max()


def test_a_prompt_of_several_documents_is_said() -> None:
    """Generation knows no documents: transformers and its like do not either."""
    trained = {"reset_attention_mask": True, "reset_position_ids": False}
    assert "trained with --reset-attention-mask:" in packed_prompts(trained, [[1, 2], [1, 9, 2]], 9)
    assert packed_prompts(trained, [[1, 2], [1, 9]], 9) == packed_prompts({}, [[1, 9, 2]], 9) == ""
    assert packed_prompts(trained, [[1, 9, 2]], None) == ""


@for_each("recompute", ["none", "selective"])
@for_each("architecture", ["gpt2", "llama"])
def test_documents_change_no_byte_that_a_block_keeps(architecture: str, recompute: str) -> None:
    """On a CPU. One kernel more than whole samples would need keeps as much, wherever documents begin."""
    model = replace(MODEL, **of_family(architecture), num_layers=1)
    case = Case(model=model, recompute=recompute, reset="documents", batch=3, micro_batches=1)
    config, layout = case.resolved()
    cost = trace_block(config, layout, "cpu")
    plain, _ = case._replace(reset="").resolved()
    assert cost == trace_block(plain, layout, "cpu")

    engine, documents = new_engine(0, case), Documents.of(starts_of(LENGTHS))
    flags = {"attention_documents": documents, "position_documents": documents}
    info = MicroBatchInfo.of(torch.zeros(3, 11), (0, 1, 2), engine.model.stream, training=True, **flags)
    weights = {w.data.untyped_storage().data_ptr() for unit in engine.model.units.values() for w in unit}
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(33, model.hidden_size, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.model.blocks["0"](x, info)
    assert sum(sizes.values()) == sum(cost.saved) + cost.saved_input


@for_each("precision, more", [("bf16", 200), ("fp32", None)])
def test_a_gpus_block_is_traced_with_documents(precision: str, more: int | None) -> None:
    """In 16 bit one kernel has all documents, and keeps a few numbers more; in fp32 there is none, so weights stay."""
    model = ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=99)
    training = TrainingConfig(micro_batch_size=2, precision=precision)  # type: ignore[arg-type]
    costs = []
    for data in (DataConfig(), BOTH):
        for made in (model, replace(model, **of_family("llama"), num_query_groups=2)):
            config, layout = resolve(Config(model=made, training=training, data=data), 1, 0, declare)
            costs.append(sum(trace_block(config, layout, "cuda").saved))
    scores = 2 * 4 * 64 * 64 * 4
    for plain, bounded in zip(costs[:2], costs[2:], strict=True):
        if more is not None:
            assert abs(bounded - plain) < more
        else:
            assert bounded > plain + scores / 2
